"""Mixtures of datasets: exact shares, one order for any ranks and stops, limits, changes on resume, wrong configs."""

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from docs.build.config_page import reference_markdown
from tests.helpers.config import ROOT, load, problems
from tests.helpers.data import (
    BYTES,
    NO_SPECIAL_TOKENS,
    Lists,
    T,
    as_lists,
    consume,
    flat,
    rejection,
    some_texts,
    training,
    write,
)
from titanlite import build
from titanlite.config.schema import MixedDataset, Validation
from titanlite.data import open as opening
from titanlite.data.packing import PackedSequences, ValidationSequences
from titanlite.techniques.data import mixture
from titanlite.techniques.data.mixture import Component, MixedSequences, MixedValidation, integer_shares, largest_count

FIRST = 10**6  # the tokens of dataset i begin at i * FIRST

Dataset = tuple[int, int, int | None]  # sequences, share, limit


def mixed(*datasets: Dataset, names: str = "abcdefgh", seed: int = 7, shuffle: bool = False) -> MixedSequences:
    """A mixture whose tokens tell the dataset, by its name, and the index in its flat array."""
    components = []
    for name, (n_sequences, share, limit) in zip(names, datasets, strict=False):
        tokens = np.arange(n_sequences * T + 1) + "abcdefgh".index(name) * FIRST
        own_seed = mixture.seed_of(name, seed)
        packed = PackedSequences(tokens, NO_SPECIAL_TOKENS, training(shuffle=shuffle), seed=own_seed)
        components.append(Component(name, packed, "content", share, limit))
    return MixedSequences(components, seed=seed)


def places(sequences: MixedSequences, n: int, first: int = 0) -> list[tuple[str, int]]:
    """The name of the dataset and the index in it of some sequences in their order."""
    begins = (int(sequence.inputs[0]) for sequence, _ in zip_n(sequences.read(first, 1), n))
    return [("abcdefgh"[begin // FIRST], begin % FIRST // T) for begin in begins]


def zip_n(items: Iterator[Any], n: int) -> list[Any]:
    return [next(items) for _ in range(n)]


def blocks_of(size: int) -> Any:
    """Blocks of fewer sequences, for fast tests."""
    return mock.patch.object(mixture, "MIXTURE_BLOCK", size)


shares = st.one_of(st.integers(1, 5), st.integers(1, 2**32))
limited = st.tuples(st.integers(1, 9), shares, st.one_of(st.none(), st.integers(1, 60)))
unlimited = st.tuples(st.integers(1, 9), shares, st.none())

# Counts --------------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(unlimited, min_size=1, max_size=6), st.integers(1, 40), st.integers(0, 9))
def test_after_every_block_each_dataset_has_its_share_rounded_up_or_down(
    datasets: list[Dataset], block: int, seed: int
):
    with blocks_of(block):
        order = places(mixed(*datasets, seed=seed), 12 * block)
    total = sum(share for _, share, _ in datasets)
    for n in range(0, 12 * block + 1, block):
        counts = Counter(name for name, _ in order[:n])
        for name, (_, share, _) in zip("abcdef", datasets, strict=False):
            assert abs(counts[name] * total - n * share) < total, (n, counts)
    for name, (n_sequences, _, _) in zip("abcdef", datasets, strict=False):
        own = [index for other, index in order if other == name]
        assert own == [k % n_sequences for k in range(len(own))], "not the dataset's own order"


def test_largest_deficit_first_would_not_keep_the_shares():
    """Why the order is by deadlines: the simpler rule is off by more than 1 with these shares."""
    weights = [3, 3, 3, 3, 3, 3, 3, 3, 76, 100]
    total, counts, worst = sum(weights), [0] * len(weights), 0.0
    for n in range(1, 2 * total):
        deficits = [weight * n / total - count for weight, count in zip(weights, counts, strict=True)]
        counts[deficits.index(max(deficits))] += 1
        worst = max(worst, *(abs(w * n / total - c) for w, c in zip(weights, counts, strict=True)))
    assert worst >= 1


@settings(max_examples=100, deadline=None)
@given(st.lists(limited, min_size=1, max_size=5), st.integers(1, 40))
def test_a_dataset_that_is_used_up_leaves_its_share_to_the_others(datasets: list[Dataset], block: int):
    limits = [math.inf if limit is None else limit for _, _, limit in datasets]
    n = min(150, int(min(sum(limits), 150)))
    with blocks_of(block):
        sequences = mixed(*datasets)
        names = [name for name, _ in places(sequences, n)]
        for end in range(0, n + 1, block):
            counts = Counter(names[:end])
            expected = sequences.expected_counts(end)
            assert sequences.counts(end) == [counts[name] for name in "abcde"[: len(datasets)]]
            for name, limit, number in zip("abcde", limits, expected, strict=False):
                assert counts[name] <= limit
                # Each dataset that is used up may round the others' counts once more.
                assert abs(counts[name] - number) <= len(datasets), (end, counts, expected)
    if n == sum(limits):
        assert Counter(names) == dict(zip("abcde", limits, strict=False))


def test_shares_hold_again_from_where_a_dataset_is_used_up():
    with blocks_of(10):
        names = "".join(name for name, _ in places(mixed((9, 2, 6), (9, 1, None), (9, 1, None)), 60))
    counts = [Counter(names[n : n + 10]) for n in range(0, 60, 10)]
    assert [count["a"] for count in counts] == [5, 1, 0, 0, 0, 0]
    assert all(abs(count["b"] - count["c"]) <= 1 for count in counts)
    assert all(count == {"b": 5, "c": 5} for count in counts[2:])


@settings(max_examples=40, deadline=None)
@given(st.lists(limited, min_size=1, max_size=4), st.integers(1, 9), st.integers(0, 30), st.integers(1, 4))
def test_the_dataset_of_an_index(datasets: list[Dataset], block: int, first: int, stride: int):
    with blocks_of(block):
        sequences = mixed(*datasets)
        order = [name for name, _ in places(sequences, 60)]
        numbers = sequences.datasets_of(range(first, 60, stride))
        assert [sequences.names[number] for number in numbers] == order[first::stride]
        assert sequences.datasets_of([first]) == numbers[:1], "earlier than the last one"


def test_the_order_never_ends():
    """A run whose limits are too small is rejected; what is prefetched behind its last step need not exist."""
    with blocks_of(4):
        assert len(places(mixed((2, 1, 3), (2, 1, 2)), 20)) == 20


# Order ---------------------------------------------------------------------------------------------------------------


def test_the_order_never_changes():
    """Numbers of the first version: another order would send a resumed run over other data, unnoticed."""
    order = places(mixed((7, 3, None), (5, 1, 9), (50, 2, None), shuffle=True), 1100)
    assert order[:8] == FIRST_PLACES
    assert order[-4:] == LAST_PLACES


FIRST_PLACES = [("a", 3), ("c", 46), ("a", 0), ("a", 2), ("a", 5), ("a", 1), ("a", 6), ("c", 42)]
LAST_PLACES = [("a", 6), ("a", 0), ("a", 2), ("a", 5)]


def test_no_rank_always_reads_the_same_dataset():
    names = [name for name, _ in places(mixed((50, 1, None), (50, 1, None)), 2048)]
    for n_ranks in (2, 4, 8):
        for rank in range(n_ranks):
            own = Counter(names[rank::n_ranks])
            assert abs(own["a"] - own["b"]) < 3.5 * math.sqrt(len(names) / n_ranks), (n_ranks, rank)
    assert names[:1024] != names[1024:], "each block has an order of its own"


def test_other_seeds_have_other_orders():
    one, two = (places(mixed((50, 1, None), (50, 1, None), seed=seed, shuffle=True), 100) for seed in (1, 2))
    assert [name for name, _ in one] != [name for name, _ in two]
    assert [index for name, index in one if name == "a"][:20] != [index for name, index in two if name == "a"][:20]
    assert [index for name, index in one if name == "a"][:20] != [index for name, index in one if name == "b"][:20]


OPTIONS = {"datasets": [MixedDataset(name="a")]}  # of the loader: there is a mixture


def in_steps(sequences: MixedSequences, batch: int, steps: int) -> list[list[Lists]]:
    order = [as_lists(sequence) for sequence, _ in zip_n(sequences.read(0, 1), batch * steps)]
    return [order[step * batch : (step + 1) * batch] for step in range(steps)]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(limited, min_size=1, max_size=4),
    st.integers(1, 13),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([4, 8]),
)
def test_order_does_not_depend_on_ranks_and_stops(
    datasets: list[Dataset], block: int, before: int, after: int, batch: int
):
    with blocks_of(block):
        expected = in_steps(mixed(*datasets, shuffle=True), batch, 5)

        def make() -> MixedSequences:
            return mixed(*datasets, shuffle=True)

        for stop in range(5):
            options = {"batch": batch, **OPTIONS}
            first, states = consume(make, n_ranks=before, steps=stop, **options)
            assert all(state == states[0] for state in states)
            second, _ = consume(make, n_ranks=after, steps=5 - stop, state=states[0], **options)
            assert first + second == expected


def test_resume_at_every_position():
    with blocks_of(8):
        sequences = mixed((5, 3, None), (4, 1, 5), (9, 2, 11), shuffle=True)
        expected = places(sequences, 60)
        for position in range(50):
            state = loader_state(sequences, position)
            resumed = sequences.resumed(state)
            assert places(resumed, 10, position) == expected[position : position + 10]
            assert resumed.state(position)["mixture"] == state["mixture"]
            sequences = resumed  # and again from there


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("mixture"),
        lambda state: state.update(next_sequence=2**63 - 1),
        lambda state: state["mixture"].update(first=2**62),
        lambda state: state["mixture"]["counts"].clear(),
        lambda state: state["mixture"]["counts"].update(x=1),
        lambda state: state["mixture"]["phase"].update(dict.fromkeys(state["mixture"]["phase"], 9)),
        lambda state: state["mixture"]["read"].update(other=2**62),
        lambda state: state["mixture"]["read"].clear(),
    ],
)
def test_a_forged_position_in_a_mixture_is_rejected(change):
    sequences = mixed((5, 3, None), (4, 1, 5), (9, 2, 11), shuffle=True)
    state = loader_state(sequences, 20)
    sequences.resumed(state)
    change(state)
    line = rejection(lambda: sequences.resumed(state))
    position = state["next_sequence"]
    assert line == f"checkpoint: the mixture cannot be at position {position}: state.json was changed"


def loader_state(sequences: MixedSequences, position: int) -> dict[str, Any]:
    return json.loads(json.dumps({"next_sequence": position, **sequences.state(position)}))


# Changed mixtures ----------------------------------------------------------------------------------------------------


def test_another_mixture_continues_each_dataset_from_its_count():
    with blocks_of(8):
        before = mixed((90, 3, None), (90, 1, None), names="ab", shuffle=True)
        position = 13
        state = loader_state(before, position)
        counts = Counter(name for name, _ in places(before, position))
        after = mixed((90, 1, None), (90, 1, None), names="cb", shuffle=True).resumed(state)
        order = places(after, 80, position)
        assert Counter(name for name, _ in order[:8]) == {"b": 4, "c": 4}, "no new block, or other shares"
        b_alone, c_alone = (places(mixed((90, 1, None), names=name, shuffle=True), 90) for name in "bc")
        assert [place for place in order if place[0] == "b"] == b_alone[counts["b"] : counts["b"] + 40]
        assert [place for place in order if place[0] == "c"] == c_alone[:40]
        # the removed dataset comes back later
        back = mixed((90, 1, None), names="a", shuffle=True).resumed(loader_state(after, position + 20))
        a_alone = places(mixed((90, 1, None), names="a", shuffle=True), 90)
        assert places(back, 5, position + 20) == a_alone[counts["a"] : counts["a"] + 5]


def test_a_used_up_dataset_stays_used_up_in_another_mixture():
    with blocks_of(4):
        before = mixed((9, 1, 3), (9, 1, None))
        after = mixed((9, 5, 3), (9, 1, None)).resumed(loader_state(before, 8))
        assert {name for name, _ in places(after, 12, 8)} == {"b"}
        more = mixed((9, 5, 4), (9, 1, None)).resumed(loader_state(before, 8))
        assert Counter(name for name, _ in places(more, 12, 8)) == {"a": 1, "b": 11}


def test_the_identity_names_what_an_index_means():
    mixtures = [mixed((9, 1, 3), (9, 1, None)), mixed((9, 2, 3), (9, 1, None)), mixed((9, 1, 4), (9, 1, None))]
    mixtures += [mixed((9, 1, 3), (9, 1, None), names="ac"), mixed((9, 1, 3)), mixed((9, 1, None), (9, 1, None))]
    assert len({each.identity for each in mixtures}) == len(mixtures)
    assert mixed((9, 1, 3), (9, 1, None)).identity == mixtures[0].identity


# Shares and limits from options --------------------------------------------------------------------------------------


def test_shares_of_options():
    def of(*options: dict[str, Any]) -> list[int]:
        return integer_shares([MixedDataset(**each) for each in options], [30, 20, 10][: len(options)])

    assert of({"weight": 2.0}, {"weight": 1.0}) == [2**32, 2**31]
    assert of({"weight": 0.5}, {"weight": 1.0}) == [2**31, 2**32]
    assert of({"weight": 1e-30}, {"weight": 1e30}) == [1, 2**32]
    assert of({"tokens": 300}, {"tokens": 7}) == [300, 7]
    assert of({}, {}, {"epochs": 2.0}) == [30, 20, 10]


def test_limits_of_options():
    def of(n_sequences: int = 100, **options: Any) -> int | None:
        return largest_count(MixedDataset(**options), n_sequences, T)

    assert of() is None
    assert of(epochs=0.29) == 29, "0.29 x 100 is 28.999... in floating point"
    assert of(epochs=1.999) == 199
    assert of(epochs=1e-3) == 0
    assert of(tokens=5 * T) == 5
    assert of(tokens=5 * T + 1) == 6
    assert of(tokens=5 * T, epochs=0.04) == 4


def test_limits_that_are_too_small_are_rejected():
    sequences = mixed((9, 1, 30), (9, 1, 20))
    sequences.check(None, 50)
    assert rejection(lambda: sequences.check(None, 51)) == (
        "training.datasets: training.steps needs 51 packed sequences, and the datasets' epochs or tokens allow 50 "
        "(a 30, b 20); set fewer steps, or higher limits"
    )
    state = loader_state(sequences, 10)
    sequences.check(state, 40)
    assert "needs 41 packed sequences" in rejection(lambda: sequences.check(state, 41))
    mixed((9, 1, 1), (9, 1, None)).check(None, 10**12)


# Files ---------------------------------------------------------------------------------------------------------------


def open_files(tmp_path: Path, *tables: dict[str, Any], validation: Any = None, **options: Any) -> Any:
    """A mixture of the JSON lines a.jsonl and b.jsonl."""
    write(tmp_path / "a.jsonl", some_texts(40))
    write(tmp_path / "b.jsonl", ["another text", "and more of it", *some_texts(50)])
    default = {"dataset": "json", "dataset_path": str(tmp_path / "a.jsonl"), "name": "a"}
    datasets = [MixedDataset(**default | table) for table in tables]
    trained = training(datasets=datasets, cache_folder=str(tmp_path / "cache"), **options)
    validated = Validation(**{"enable": True, "fraction": 0.2} | (validation or {}))
    return opening.open_sequences(BYTES, trained, validated, seed=3, builds_cache=True)


B = {"name": "b"}


@pytest.fixture
def b(tmp_path: Path) -> dict[str, Any]:
    return {"name": "b", "dataset_path": str(tmp_path / "b.jsonl")}


def test_training_and_validation_splits_of_files(tmp_path, b):
    sequences, validation, _ = open_files(tmp_path, {"weight": 3.0}, {**b, "weight": 1.0})
    of_a, of_b = (each.sequences for each in sequences.components)
    assert isinstance(validation, MixedValidation)
    own_a, own_b = validation.splits
    everything = flat(some_texts(40))
    assert np.sum(own_a.tokens[:] == BYTES.eos) == 8, "not a fifth of 40 documents"
    assert of_a.seed != of_b.seed
    assert len(of_a.tokens) + len(own_a.tokens) == len(everything)
    assert Counter([*of_a.tokens[:], *own_a.tokens[:]]) == Counter(everything)
    assert len(of_b.tokens) + len(own_b.tokens) == len(flat(["another text", "and more of it", *some_texts(50)]))
    assert sequences.counts(1024) == [768, 256]
    assert str(sequences).startswith(f"a 75.0% of {of_a.n_sequences} packed sequences per epoch, b 25.0% of ")
    # files of its own for the validation split: all documents are trained on
    path = str(write(tmp_path / "own.jsonl", ["validate on this"]))
    sequences, validation, _ = open_files(tmp_path, {}, b, validation={"dataset_path": path})
    assert validation.tokens[:].tolist() == flat(["validate on this"])
    assert sequences.components[0].sequences.tokens[:].tolist() == everything
    assert sequences.counts(1024)[0] == pytest.approx(1024 * of_share(sequences.components, 0), abs=1), (
        "without weights, each weighs by its sequences"
    )


def of_share(components: list[Component], number: int) -> float:
    sizes = [each.sequences.n_sequences for each in components]
    return sizes[number] / sum(sizes)


@pytest.mark.nightly
def test_identities_of_files(tmp_path, b):
    changes = [{}, {"shuffle": True}, {"seq_len": 32}]
    identities = [open_files(tmp_path, {}, b, **change)[2] for change in changes]
    assert len(set(identities)) == len(changes)
    one = open_files(tmp_path, {}, b)[0].identity
    assert open_files(tmp_path, {}, b)[0].identity == one
    for tables in ([{}], [{}, {**b, "epochs": 3.0}], [b, {}], [{**b, "name": "a"}, {"name": "b"}]):
        sequences, _, identity = open_files(tmp_path, *tables)
        assert (sequences.identity, identity) != (one, identities[0])
        assert identity == identities[0], "the mixture has its own part of the identity"


def test_best_fit_packing_of_each_dataset(tmp_path, b):
    sequences, validation, identity = open_files(tmp_path, {"weight": 3.0}, {**b, "weight": 1.0}, packing="best_fit")
    of_a, of_b = (each.sequences for each in sequences.components)
    for index in range(of_a.n_sequences):
        assert as_lists(of_a[index]) == as_lists(of_a.packing[index])
    assert sequences.counts(1024) == [768, 256]
    assert len(validation.splits) == 2
    expected = {"data/a/tokens": 768 * T, "data/a/epoch": 768 / of_a.n_sequences}
    expected |= {"data/b/tokens": 256 * T, "data/b/epoch": 256 / of_b.n_sequences}
    assert sequences.metrics(1024) == expected
    concatenated, _, other = open_files(tmp_path, {"weight": 3.0}, {**b, "weight": 1.0})
    assert (concatenated.identity, other) != (sequences.identity, identity)
    assert concatenated.identity != sequences.identity


def test_a_run_that_needs_more_than_the_limits_allow_is_rejected_before_its_first_step(tmp_path, b):
    """Also if it resumes, by what is left then."""
    sequences, _, _ = open_files(tmp_path, {"epochs": 1.0}, {**b, "epochs": 1.0})
    n = sum(each.limit for each in sequences.components)
    config: Any = SimpleNamespace(training=training(**OPTIONS, steps=n // 4 + 1))
    run = build.Run(config, None, torch.device("cpu"), None, {})
    line = rejection(lambda: build.build_loader(run, sequences, None))
    assert line.startswith(f"training.datasets: training.steps needs {n // 4 * 4 + 4} packed sequences")
    line = rejection(lambda: build.build_loader(run, sequences, loader_state(sequences, 4), 1))
    assert line.startswith(f"training.datasets: training.steps needs {n // 4 * 4} packed sequences")


def test_wrong_datasets_are_named(tmp_path, b):
    wrong = {"name": "w", "dataset_path": str(tmp_path / "nowhere")}
    line = rejection(lambda: open_files(tmp_path, {}, wrong))
    assert line.startswith(f'training.datasets.1.dataset_path = "{tmp_path}/nowhere": no such file')
    short = {"name": "short", "dataset_path": str(write(tmp_path / "short.jsonl", ["x"]))}
    line = rejection(lambda: open_files(tmp_path, {}, short, validation={"enable": False}))
    assert line.startswith(f"training.datasets, short: training.seq_len = {T}: the dataset has 3 tokens")
    line = rejection(lambda: open_files(tmp_path, {}, {**b, "epochs": 1e-6}))
    assert line.startswith("training.datasets.1.epochs = 1e-06: less than one of the ")


def test_a_validation_reads_all_datasets_in_proportion():
    splits = [ValidationSequences(np.arange(n * T + 1) + n * FIRST, NO_SPECIAL_TOKENS, T) for n in (30, 10, 2)]
    validation = MixedValidation(splits)
    assert validation.n_sequences == 42
    begins = [int(validation[index].inputs[0]) for index in range(42)]
    assert sorted(begins) == sorted(n * FIRST + k * T for n in (30, 10, 2) for k in range(n))
    for n in range(0, 43, 3):
        counts = Counter(begin // FIRST for begin in begins[:n])
        assert all(abs(counts[size] - n * size / 42) <= 1 for size in (30, 10, 2)), n
    padding = as_lists(validation[42])
    assert padding == as_lists(splits[0][30])


# Config --------------------------------------------------------------------------------------------------------------

A_TABLE = '[[training.datasets]]\nname = "a"\n'
B_TABLE = '[[training.datasets]]\nname = "b"\ndataset = "text"\ndataset_path = "x"\n'
WRONG = {
    A_TABLE + "wieght = 1": "training.datasets.0.wieght = 1: unknown key; did you mean weight?",
    A_TABLE + B_TABLE + "weight = 0": "training.datasets.1.weight = 0: expected -1, or a finite number > 0",
    A_TABLE + "epochs = 0.0": "training.datasets.0.epochs = 0.0: expected -1, or a finite number > 0",
    A_TABLE + 'dataset_format = "messages"': 'training.datasets.0.dataset_format = "messages": read only when '
    'training.datasets.0.dataset is "json" or "parquet" or "hub"; set that, or remove it',
    A_TABLE
    + 'dataset = "json"\ndataset_path = "a"\nlong_conversations = "drop"': "training.datasets.0.long_conversations"
    ' = "drop": read only when training.datasets.0.dataset_format is "messages" or "prompt_response"; set that, or '
    "remove it",
    A_TABLE + "tokens = 1.5": "training.datasets.0.tokens = 1.5: expected -1, or an integer >= 1",
    A_TABLE + 'dataset = "c5"': 'training.datasets.0.dataset = "c5": expected one of "pydoc_topics", "text", "json", '
    '"parquet", "c4", "hub"',
    "[[training.datasets]]": 'training.datasets.0.name = "" (default): expected a name of letters, digits, "_", "-" '
    'and "."',
    '[[training.datasets]]\nname = "a/b"': 'training.datasets.0.name = "a/b": expected a name of letters',
    A_TABLE + 'dataset = "text"': 'training.datasets.0.dataset_path = "" (default): training.datasets.0.dataset = '
    '"text" needs a file, folder or glob',
    A_TABLE + 'dataset_path = "x"': 'training.datasets.0.dataset_path = "x": read only when '
    'training.datasets.0.dataset is "text" or "json" or "parquet" or "hub"; set that, or remove it',
    A_TABLE + "weight = 1\n" + B_TABLE: "training.datasets.1.weight = -1 (default): other datasets have one; set it "
    "in all tables, or in none",
    A_TABLE + B_TABLE + "tokens = 3": "training.datasets.0.tokens = -1 (default): other datasets have one",
    A_TABLE + "weight = 1\ntokens = 3": "training.datasets.0.tokens = 3: this or another dataset has a weight; set "
    "one of the two in all tables",
    "validation.dataset_path = 'x'\n" + A_TABLE: 'validation.dataset_path = "x": read only when '
    'training.datasets.0.dataset is "text" or "json" or "parquet"; set that, or remove it',
    A_TABLE + 'dataset = "c4"\n[validation]\nfraction = 0.1': "validation.fraction = 0.1: the dataset has a "
    "validation split of its own; remove it",
}


@pytest.mark.parametrize("toml", WRONG)
def test_wrong_configs_are_rejected(tmp_path: Path, toml: str):
    (line,) = problems(lambda: load(tmp_path, toml))
    assert line.startswith(f"{tmp_path}/run.toml: {WRONG[toml]}")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            "--training.dataset=c4",
            'training.dataset = "c4": training.datasets names the datasets; remove one of the two',
        ),
        ("--training.streaming", "training.streaming = true: unsupported with training.datasets; set false"),
        (
            "--training.dataset_format=messages",
            'training.dataset_format = "messages": training.datasets names the datasets; remove one of the two',
        ),
    ],
)
def test_options_that_contradict_a_mixture_are_rejected(tmp_path: Path, settings: str, line: str):
    assert problems(lambda: load(tmp_path, A_TABLE, settings)) == [f"command line: {line}"]


def test_what_conversations_need_is_said_once(tmp_path: Path):
    table = 'dataset = "json"\ndataset_path = "a"\ndataset_format = "messages"\n'
    tables = A_TABLE + table + A_TABLE.replace('"a"', '"b"') + table
    found = problems(lambda: load(tmp_path, tables))
    assert [problem.split(": ")[1].split(" = ")[0] for problem in found] == [
        "training.packing",
        "training.document_mask",
        "model.hf_assets_path",
    ]
    assert all("conversations (training.datasets.0.dataset_format" in problem for problem in found)


def test_equal_names_are_rejected(tmp_path: Path):
    lines = problems(lambda: load(tmp_path, A_TABLE + B_TABLE + A_TABLE.replace('"a"', '"A"')))
    problem = "expected another name for each dataset"
    expected = [f'training.datasets.{number}.name = "{name}": {problem}' for number, name in ((0, "a"), (2, "A"))]
    assert [line.partition(": ")[2] for line in lines] == expected


def test_every_problem_of_the_tables_is_found(tmp_path: Path):
    lines = problems(lambda: load(tmp_path, A_TABLE + "weight = 0\nepochs = 0\n" + B_TABLE + "weight = 'x'\nn = 1"))
    keys = [line.partition(": ")[2].partition(" = ")[0] for line in lines]
    assert keys == [f"training.datasets.{key}" for key in ("0.weight", "0.epochs", "1.weight", "1.n")]


def test_a_config_round_trips(tmp_path: Path):
    loaded = load(tmp_path, A_TABLE + "weight = 2\n" + B_TABLE + "weight = 1.5\nepochs = 2")
    assert [each.weight for each in loaded.config.training.datasets] == [2, 1.5]
    assert loaded.config.training.datasets[1].epochs == 2
    written = loaded.config.toml()
    again = load(tmp_path, written)
    assert again.config == loaded.config
    assert again.config.toml() == written
    inline = load(tmp_path, "", '--training.datasets=[{name="a", weight=2}]')
    assert inline.config.training.datasets == [MixedDataset(name="a", weight=2)]


def test_the_reference_names_every_key_of_a_table():
    entry = " ".join(reference_markdown().partition("### training.datasets\n")[2].partition("\n###")[0].split())
    assert "- weight: -1, or a finite number > 0; default -1. Share of a dataset" in entry
    assert all(f"- {name}: " in entry for name in MixedDataset.model_fields)


# Commands ------------------------------------------------------------------------------------------------------------

RUN = """
[job]
dump_folder = "{folder}/run"
[model]
dim = 32
n_layers = 1
[metrics]
log_freq = 1
enable_tensorboard = false
[checkpoint]
enable = true
[parallelism]
data_parallel_shard_degree = 1
[training]
steps = {steps}
seq_len = 16
local_batch_size = 4
cache_folder = "{folder}/cache"
[[training.datasets]]
name = "topics"
weight = {weight}
[[training.datasets]]
name = "mine"
weight = 1
epochs = {epochs}
dataset = "json"
dataset_path = "{folder}/mine.jsonl"
"""


def titanlite(tmp_path: Path, command: str, *arguments: str, **values: Any) -> subprocess.CompletedProcess[str]:
    write(tmp_path / "mine.jsonl", some_texts())
    (tmp_path / "run.toml").write_text(RUN.format(folder=tmp_path, **{"steps": 2, "weight": 3, "epochs": 1} | values))
    module = [sys.executable, *(["train.py"] if command == "train" else ["-m", "titanlite", command])]
    run = [*module, str(tmp_path / "run.toml"), *arguments]
    return subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.nightly
def test_tokenize_prints_each_datasets_epochs(tmp_path: Path):
    done = titanlite(tmp_path, "tokenize", steps=40)
    assert done.returncode == 0, done.stderr
    assert "training of topics: " in done.stdout
    assert "validation of mine: " in done.stdout
    line = next(line for line in done.stdout.splitlines() if line.startswith("mine: "))
    assert line.startswith("mine: training.steps = 40 reads 0.")
    assert " epochs, 25.0% of the run; " in line
    assert line.endswith(" packed sequences per epoch")
    done = titanlite(tmp_path, "tokenize", "--training.steps=100", '--training.datasets=[{name="topics",tokens=1600}]')
    assert done.returncode == 2
    assert "training.steps needs 400 packed sequences, and the datasets' epochs or tokens allow 100" in done.stderr


@pytest.mark.nightly
def test_a_run_resumes_with_another_mixture_only_if_it_is_allowed_to(tmp_path: Path):
    done = titanlite(tmp_path, "train")
    assert done.returncode == 0, done.stderr
    done = titanlite(tmp_path, "train", steps=4, weight=1)
    assert done.returncode == 2
    assert "saved with mixture = " in done.stderr
    assert "set training.change_mixture_on_resume = true" in done.stderr
    done = titanlite(tmp_path, "train", "--training.change_mixture_on_resume", steps=4, weight=1)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    tokens = [(line["data/topics/tokens"], line["data/mine/tokens"]) for line in lines]
    assert [sum(both) for both in tokens] == [64, 128, 192, 256]
    assert all(line["n_tokens_seen"] == sum(both) for line, both in zip(lines, tokens, strict=True))
    before = [(0, 0), *tokens]
    for line, both, earlier in zip(lines, tokens, before, strict=False):
        losses = {name: line.get(f"data/{name}/loss") for name in ("topics", "mine")}
        read = {name: n - m for name, n, m in zip(losses, both, earlier, strict=True)}
        assert {name for name, n in read.items() if n} == {name for name, loss in losses.items() if loss is not None}
        mean = sum(read[name] * loss for name, loss in losses.items() if loss is not None) / sum(read.values())
        assert mean == pytest.approx(line["loss_metrics/global_avg_loss"], rel=1e-6)
    assert lines[-1]["data/mine/epoch"] > 0
    assert 0 < lines[-1]["data/topics/epoch"] < 0.01
