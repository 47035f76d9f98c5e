"""Best-fit packing: what is in which sequence, the tables on the disk, and the order of a run."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.cases import cases
from tests.helpers.data import (
    BYTES,
    T,
    as_lists,
    consume,
    flat,
    open_loader,
    rejection,
    some_texts,
    source,
    training,
    write,
)
from titanlite.config.errors import TrainingError
from titanlite.config.schema import Validation
from titanlite.data import open as opening
from titanlite.data import token_cache
from titanlite.data.open import open_cache
from titanlite.loss import IGNORED
from titanlite.metrics.logger import step_values
from titanlite.metrics.summary import account
from titanlite.techniques.data import best_fit
from titanlite.techniques.data.best_fit import (
    BestFit,
    BestFitSequences,
    best_fit_decreasing,
    lay_out,
    open_best_fit,
    pack,
    split_documents,
)
from titanlite.tools.tokenize import describe

LENGTHS = st.lists(st.integers(1, 60), max_size=80)
EXAMPLES = settings(max_examples=60, deadline=None)


# Packing -------------------------------------------------------------------------------------------------------------


def reference_bins(lengths: list[int], capacity: int) -> list[int]:
    """How full the bins are by best-fit decreasing, one item after the other. Which of two bins with the same free
    space an item is put into does not matter."""
    bins: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [own for own in bins if capacity - sum(own) >= length]
        if fitting:
            min(fitting, key=lambda own: capacity - sum(own)).append(length)
        else:
            bins.append([length])
    return sorted(sum(own) for own in bins)


def check_bins(lengths: list[int], capacity: int) -> None:
    bins = best_fit_decreasing(np.array(lengths, np.int64), capacity).tolist()
    contents: dict[int, list[int]] = {}
    for number, length in zip(bins, lengths, strict=True):
        contents.setdefault(number, []).append(length)
    assert sorted(contents) == list(range(len(contents)))
    assert sorted(sum(own) for own in contents.values()) == reference_bins(lengths, capacity)


@EXAMPLES
@given(lengths=LENGTHS, more=st.integers(0, 40))
def test_bins_are_those_of_best_fit_decreasing(lengths, more):
    check_bins(lengths, max(lengths, default=1) + more)


def test_worst_fit_fails(monkeypatch):
    check_bins([7, 6, 3, 2, 2], 10)

    def worst(spaces: list[int], size: int) -> int:
        return len(spaces) - bool(spaces and spaces[-1] >= size)

    monkeypatch.setattr(best_fit.bisect, "bisect_left", worst)
    with pytest.raises(AssertionError):
        check_bins([7, 6, 3, 2, 2], 10)


def documents_of(lengths: list[int]) -> list[np.ndarray]:
    """Documents whose tokens tell their place in all of them."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def sequences_of(lengths: list[int], seq_len: int, long: Any = "split") -> list[Any]:
    tokens = np.arange(sum(lengths))
    begins, chunks = pack(split_documents(np.array(lengths, np.int64), seq_len, long), seq_len)
    own = [chunks[begin:end].tolist() for begin, end in itertools.pairwise(begins)]
    return [lay_out([tokens[begin : begin + n] for begin, n in one], seq_len, 0) for one in own]


def check_sequences(lengths: list[int], seq_len: int) -> None:
    """Each token but a document's first is predicted once, from the token before it, and only what is too long is
    split."""
    documents = documents_of(lengths)
    begins = {int(document[0]) for document in documents}
    pairs, whole = [], set()
    for inputs, targets, positions in map(as_lists, sequences_of(lengths, seq_len)):
        assert len(inputs) == len(targets) == len(positions) == seq_len
        for i, target in enumerate(targets):
            if target != IGNORED:
                assert target == inputs[i] + 1
                pairs.append(target)
                assert i == 0 or positions[i] == 0 or inputs[i] == inputs[i - 1] + 1
        whole |= {token for token, position in zip(inputs, positions, strict=True) if position == 0 and token in begins}
        for start in (i for i, position in enumerate(positions) if position == 0):
            length = positions[start + 1 :].index(0) + 1 if 0 in positions[start + 1 :] else seq_len - start
            assert positions[start : start + length] == list(range(length))
    assert sorted(pairs) == [token for document in documents for token in document.tolist()[1:]]
    for document in documents:
        if 1 < len(document) <= seq_len + 1:
            assert int(document[0]) in whole, "begins a chunk"


@EXAMPLES
@given(lengths=LENGTHS, seq_len=st.integers(1, 70))
def test_packing_loses_no_token_and_splits_only_what_is_too_long(lengths, seq_len):
    check_sequences(lengths, seq_len)


@pytest.mark.parametrize("broken", ["no shared token", "rest lost", "a document lost"])
def test_broken_packing_fails(monkeypatch, broken):
    real = best_fit.split_documents
    changes = {
        "no shared token": lambda lengths, seq_len, long: real(lengths, seq_len, long) - [0, 1],
        "rest lost": lambda lengths, seq_len, long: real(lengths, seq_len, "truncate"),
        "a document lost": lambda lengths, seq_len, long: real(lengths, seq_len, long)[:-1],
    }
    check_sequences([3, 40, 5, 9], T)
    monkeypatch.setitem(globals(), "split_documents", changes[broken])
    with pytest.raises(AssertionError):
        check_sequences([3, 40, 5, 9], T)


def test_what_is_too_long_is_dropped_or_truncated():
    lengths = [5, 40, T + 1, T + 2]
    for long, kept in (("drop", [5, T + 1]), ("truncate", [5, T + 1, T + 1, T + 1])):
        assert sorted(split_documents(np.array(lengths), T, long)[:, 1].tolist()) == kept
    assert split_documents(np.array(lengths), T, "truncate").tolist() == [[0, 5], [5, 17], [45, 17], [62, 17]]


def test_padding_has_no_targets_and_is_a_document_of_its_own():
    assert as_lists(lay_out([np.array([7, 8, 9]), np.array([5, 6])], 8, 0)) == (
        [7, 8, 9, 5, 6, 0, 0, 0],
        [8, 9, IGNORED, 6, IGNORED, IGNORED, IGNORED, IGNORED],
        [0, 1, 2, 0, 1, 0, 1, 2],
    )
    assert as_lists(lay_out([np.array([7, 8, 9])], 2, 0)) == ([7, 8], [8, 9], [0, 1]), "the last is only a target"
    assert as_lists(lay_out([], 2, 0)) == ([0, 0], [IGNORED, IGNORED], [0, 1])


def test_marked_tokens_are_no_targets():
    bit = 2**15
    stored = np.array([1 | bit, 2 | bit, 3, 4, 5 | bit, 6], np.uint16)
    assert as_lists(lay_out([stored], 8, bit))[:2] == (
        [1, 2, 3, 4, 5, 6, 0, 0],
        [IGNORED, 3, 4, IGNORED, 6, IGNORED, IGNORED, IGNORED],
    )


# Of a dataset --------------------------------------------------------------------------------------------------------


@pytest.fixture
def options(tmp_path, monkeypatch) -> dict[str, Any]:
    """A dataset of several shards."""
    monkeypatch.setattr(token_cache, "SHARD_BYTES", 700)
    file = write(tmp_path / "files" / "0.jsonl", [*some_texts(), "z" * 100])
    cache = {"cache_folder": str(tmp_path / "cache"), "packing": "best_fit", "document_mask": True}
    return {"dataset": "json", "dataset_path": str(file), **cache}


def opened(options: dict[str, Any], validation: dict[str, Any] | None = None, **changed: Any) -> tuple[Any, Any, str]:
    trained, validated = (
        training(**options | changed),
        Validation(**{"enable": False, "fraction": 0.0} | (validation or {})),
    )
    return opening.open_sequences(BYTES, trained, validated, seed=3, builds_cache=True)


def test_sequences_of_a_dataset_have_all_its_documents(options):
    sequences, _, _ = opened(options)
    assert isinstance(sequences, BestFitSequences)
    assert len(sequences.packing.index.tables) > 2, "shards"
    pairs = []
    for index in range(sequences.n_sequences):
        inputs, targets, _ = as_lists(sequences[index])
        pairs += [pair for pair in zip(inputs, targets, strict=True) if pair[1] != IGNORED]
    tokens = flat([*some_texts(), "z" * 100])
    expected = [pair for pair in itertools.pairwise(tokens) if pair[0] != BYTES.eos]
    assert sorted(pairs) == sorted(expected)
    n_long = sum(len(text) + 2 > T + 1 for text in some_texts()) + 1
    assert f"{n_long} of 61 documents split" in str(sequences)
    n_pairs, n_tokens = sequences.n_sequences * (T + 1), sequences.packing.index.tokens
    assert f"{1 - n_tokens / n_pairs:.2%} padding" in str(sequences)
    assert 0 < 1 - n_tokens / n_pairs < 0.2


@pytest.mark.parametrize("shuffle", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_the_order_does_not_depend_on_ranks_and_resumes(options, shuffle):
    def make() -> Any:
        return opened(options, shuffle=shuffle)[0]

    one, _ = consume(make, n_ranks=1, steps=40, batch=4)
    two, states = consume(make, n_ranks=2, steps=13, batch=4)
    rest, _ = consume(make, n_ranks=4, steps=27, batch=4, state=states[0])
    assert two + rest == one
    assert make().n_sequences < 40 * 4, "more than an epoch"
    first_epoch = [sequence for step in one for sequence in step][: make().n_sequences]
    assert (first_epoch == [as_lists(make().sequence(index)) for index in range(make().n_sequences)]) == (not shuffle)


def test_positions_are_counted_by_what_becomes_of_them(options, tmp_path):
    """Documents of 42, 12 and 12 tokens become chunks of 17, 17, 12, 12 and 10, each a sequence of its own."""
    file = write(tmp_path / "few.jsonl", ["x" * 40, "y" * 10, "z" * 10])
    sequences = opened({**options, "dataset": "json", "dataset_path": str(file)}, {"fraction": 0.0})[0]
    epoch = {"packing": "best_fit", "document_mask": True, "global_batch_size": 5}
    loader = open_loader(sequences, **epoch)
    first = loader.next()
    assert loader.step_counts == [5 * T, 3, 4 + 4 + 6, 2], "positions, masked, padding, cut"
    n_valid = sum(int((batch.targets != IGNORED).sum()) for batch in first)
    assert min(int(batch.targets.min()) for batch in first) == IGNORED, "the model knows no padding"
    line = account(*map(int, loader.step_counts))
    assert line.startswith(f"account    {n_valid} of 80 positions trained on, 3 masked, 14 padding")
    loader.take_back(first)
    assert loader.next() is first
    loader.add(loader.step_counts)
    values = step_values(1.0, 1.0, 1.0, 1.0, loader.counts.tolist())
    assert (values["n_tokens_seen"], values["n_padding_seen"]) == (16 + 16 + 12 + 12 + 10, 14)
    state = loader.state()
    loader.next()  # as for the test of the last weights, which trains on nothing
    assert loader.state()["counts"] == state["counts"] == [80, 3, 14, 2]
    resumed, old = (open_loader(sequences, **epoch, state={**state, "counts": n}) for n in (state["counts"], None))
    resumed.next()
    resumed.add(resumed.step_counts)
    assert resumed.state()["counts"] == [160, 6, 28, 4]
    assert old.state()["counts"] == [80, 0, 0, 0], "a checkpoint of an earlier version has none"
    for each in (loader, resumed, old):
        each.close()


def test_the_identity_is_of_the_packing(options):
    identities = [opened(options)[2], opened(options, packing="concatenate")[2], opened(options, seq_len=2 * T)[2]]
    assert len(set(identities)) == 3
    assert opened(options)[2] == identities[0]


def test_the_validation_split_is_packed_once_and_padded(options):
    _, validation, _ = opened(options, {"enable": True, "fraction": 0.25})
    sequences = [as_lists(validation[index]) for index in range(validation.n_sequences)]
    n_targets = sum(target != IGNORED for _, targets, _ in sequences for target in targets)
    cache = validation.cache
    shards = cache.index.shards
    assert n_targets == sum(shard.validation_tokens - shard.validation_documents for shard in shards) > 0
    assert set(as_lists(validation[validation.n_sequences])[1]) == {IGNORED}


def test_documents_of_one_token_only_are_rejected(tmp_path, options, assets):
    path = write(tmp_path / "empty.jsonl", ["", ""])
    content = json.loads(assets.file.read_text()) | {"post_processor": None}  # such a tokenizer adds no BOS
    assets.file.write_text(json.dumps(content))
    tokenizer = assets.open(eos_token="</s>")
    trained = training(**{**options, "dataset_path": str(path)})
    line = rejection(
        lambda: opening.open_sequences(tokenizer, trained, Validation(fraction=0.0), seed=0, builds_cache=True)
    )
    assert line == f"training.seq_len = {T}: the dataset has no documents to train on"


# Tables --------------------------------------------------------------------------------------------------------------


def best_fit_of(options: dict[str, Any], **changed: Any) -> BestFit:
    own = training(**options)
    cache = open_cache(
        source(**{"dataset": "json", "path": options["dataset_path"]}),
        BYTES,
        0.0,
        cache_folder=own.cache_folder,
        builds_cache=True,
    )
    return open_best_fit(cache, "train", own, **{"builds_cache": True} | changed)


def all_of(packing: BestFit) -> list[Any]:
    return [as_lists(packing[index]) for index in range(packing.n_sequences)]


def test_tables_are_written_once_and_read_by_other_ranks(options, monkeypatch):
    first = all_of(best_fit_of(options))
    monkeypatch.setattr(best_fit, "pack", lambda *arguments: pytest.fail("packs again"))
    assert all_of(best_fit_of(options)) == first
    assert all_of(best_fit_of(options, builds_cache=False)) == first


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 8)


def _other_number_of_tables(path: Path) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "tables": content["tables"][1:]}))


DAMAGES: dict[str, Any] = {
    "a table is missing": ("00001.table", Path.unlink),
    "a table is too short": ("00001.table", _truncate),
    "no index": ("packing.json", Path.unlink),
    "the index is no JSON": ("packing.json", lambda path: path.write_text("{")),
    "the index has no table of a shard": ("packing.json", _other_number_of_tables),
}


@cases("damage", DAMAGES, always=["no index", "the index is no JSON", "the index has no table of a shard"])
def test_damaged_tables_are_written_again(options, damage):
    packing = best_fit_of(options)
    expected, (name, do) = all_of(packing), DAMAGES[damage]
    do(packing.folder / name)
    assert all_of(best_fit_of(options)) == expected


def test_other_bytes_in_a_table_are_found_before_they_are_used(options):
    packing = best_fit_of(options)
    expected, path = all_of(packing), packing.folder / "00001.table"
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    with pytest.raises(TrainingError, match=r"00001.table: the checksum differs; the next start packs"):
        all_of(best_fit_of(options, builds_cache=False))
    assert all_of(best_fit_of(options)) == expected


def test_tables_that_others_can_write_are_rejected(options):
    folder = best_fit_of(options).folder
    (folder / "packing.json").chmod(0o666)
    assert "other users may write it" in rejection(lambda: best_fit_of(options))


def test_tokenize_says_what_packing_does(options):
    from titanlite.config import Config

    packing = best_fit_of(options)
    config = Config().replace(
        **{f"training__{key}": value for key, value in options.items()},
        training__seq_len=T,
        training__global_batch_size=4,
    )
    line = describe(config, packing.cache, "train")
    assert f"{packing.summary}; an epoch has {packing.n_sequences:,} packed sequences of {T} tokens" in line
