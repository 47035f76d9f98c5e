"""Data does not depend on the layout: one order of packed sequences for any ranks, microsteps and resumes."""

import functools
import hashlib
import json
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
import torch.distributed as dist

from titanlite import build, config, data
from titanlite.config.loader import ConfigError
from titanlite.data import packed
from titanlite.data.documents import Documents, Source, load_documents, load_stream
from titanlite.data.packed import PackedSequences, ValidationSequences, is_validation_document, token_files
from titanlite.data.streamed import StreamedSequences
from titanlite.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, build_tokenizer, encode_documents
from titanlite.loss import IGNORED

Sequence = tuple[list[int], list[int], list[int]]  # inputs, targets and positions in documents
T = 16
BYTES = ByteTokenizer()
MANY: Any = SimpleNamespace(bos=69_998, eos=69_999, vocab_size=70_000, identity="many", encode=BYTES.encode)
UNMARKED: Any = SimpleNamespace(bos=None, eos=-1)  # for tokens that are just numbers


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path_factory) -> None:
    """`datasets` neither asks the hub nor writes outside of the tests' folder."""
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")


def refusal(call: Callable[[], Any]) -> str:
    """The one line of the ConfigError that `call` must raise."""
    with pytest.raises(ConfigError) as caught:
        call()
    (line,) = caught.value.problems
    assert "\n" not in line
    return line


def whole(sequence: packed.Sequence) -> Sequence:
    inputs, targets, documents = sequence
    assert inputs.dtype == targets.dtype == documents.dtype == np.int64
    return inputs.tolist(), targets.tolist(), documents.tolist()


def some_texts(count: int = 60) -> list[str]:
    """Different documents of 0 to 40 characters."""
    generator = np.random.RandomState(0)
    return ["".join(chr(97 + (number + i) % 26) for i in range(generator.randint(40))) for number in range(count)]


def built_in_texts() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def flat(texts: list[str], tokenizer: Any = BYTES) -> list[int]:
    """Tokens of documents with their marks, end to end."""
    return [int(token) for tokens in encode_documents(tokenizer, texts) for token in tokens]


def counted(texts: list[str], tokenizer: Any = BYTES) -> list[int]:
    """The position of each of these tokens in its document."""
    return [position for tokens in encode_documents(tokenizer, texts) for position in range(len(tokens))]


# Tokenizers ----------------------------------------------------------------------------------------------------------

TEXTS = ["Hello, world", "", "naïve — 東京 🎉", "line\nline\r\n\ttab\0", "\ud800 broken"]


def test_bytes_there_and_back():
    for text, tokens in zip(TEXTS, BYTES.encode(TEXTS), strict=True):
        assert tokens.dtype == np.uint32
        assert bytes(tokens.tolist()).decode("utf-8", "surrogatepass") == text
    assert flat(["ab", ""]) == [256, 97, 98, 257, 256, 257]
    assert BYTES.vocab_size == 258
    assert isinstance(build_tokenizer(""), ByteTokenizer)


@pytest.fixture(scope="module")
def trained() -> str:
    """A tokenizer.json: byte-level BPE on some of the built-in text, whose own template begins a text with <s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    marks, alphabet = ["<s>", "</s>", "<stop>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=marks, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(built_in_texts()[:10], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer.to_str()


class Assets:
    """A folder with a tokenizer.json and perhaps a tokenizer_config.json."""

    def __init__(self, folder: Path, content: str):
        self.folder, self.file, self.settings = folder, folder / "tokenizer.json", folder / "tokenizer_config.json"
        self.file.write_text(content, encoding="utf-8")

    def open(self, **marks: Any) -> HuggingFaceTokenizer:
        self.settings.write_text(json.dumps(marks))
        return build_tokenizer(str(self.folder))


@pytest.fixture
def assets(tmp_path, trained) -> Assets:
    return Assets(tmp_path, trained)


def test_ids_are_those_of_tokenizers(assets):
    from tokenizers import Tokenizer

    tokenizer, theirs = build_tokenizer(str(assets.file)), Tokenizer.from_file(str(assets.file))
    texts = [*TEXTS[:-1], *built_in_texts()[10:20]]
    for text, tokens in zip(texts, tokenizer.encode(texts), strict=True):
        assert tokens.dtype == np.uint32
        assert tokens.tolist() == theirs.encode(text, add_special_tokens=False).ids
        assert theirs.decode(tokens.tolist(), skip_special_tokens=False) == text
    assert tokenizer.vocab_size == theirs.get_vocab_size() == 400
    assert assets.open().identity == tokenizer.identity, "a folder is as good as its file"


@pytest.mark.parametrize(
    ("marks", "bos", "eos"),
    [
        ({}, 0, 1),
        ({"eos_token": "<stop>"}, 0, 2),
        ({"bos_token": "<stop>", "eos_token": "</s>"}, 2, 1),
        ({"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": {"content": "<stop>"}}, 0, 2),
        ({"bos_token": None, "eos_token": None}, None, 1),
    ],
)
def test_marks(assets, marks, bos, eos):
    plain, tokenizer = assets.open(), assets.open(**marks)
    assert (tokenizer.bos, tokenizer.eos) == (bos, eos)
    assert (tokenizer.identity == plain.identity) == (not marks)
    assert flat(["a"], tokenizer) == [*([] if bos is None else [bos]), *tokenizer.encode(["a"])[0], eos]


def test_text_cannot_end_its_document(assets):
    tokenizer, text = assets.open(), "one</s><s>two<stop>"
    (tokens,) = tokenizer.encode([text])
    assert not {0, 1, 2} & set(tokens.tolist())
    assert tokenizer.tokenizer.decode(tokens.tolist(), skip_special_tokens=False) == text


def test_documents_are_neither_cut_nor_padded(assets):
    """A tokenizer.json may ask for either; that is meant for the inputs of a sentence encoder."""
    from tokenizers import Tokenizer

    texts = ["a long document, far longer than five tokens", "short"]
    expected = flat(texts, assets.open())
    theirs = Tokenizer.from_file(str(assets.file))
    theirs.enable_truncation(max_length=5)
    theirs.enable_padding(pad_id=0, pad_token="<s>", length=7)
    theirs.save(str(assets.file))
    assert [len(encoding) for encoding in theirs.encode_batch(texts)] == [7, 7], "it does both"
    assert flat(texts, assets.open()) == expected


def test_unusable_tokenizers_are_refused(assets):
    missing, content = assets.folder / "nowhere", assets.file.read_text()
    assert str(missing) in refusal(lambda: build_tokenizer(str(missing)))
    for key in ("bos_token", "eos_token"):
        line = refusal(lambda key=key: assets.open(**{key: "<nope>"}))
        assert f'{assets.settings} names {key} "<nope>", which the vocabulary lacks' in line
    for settings in ("{", "[1]"):
        assets.settings.write_text(settings)
        assert str(assets.file) in refusal(lambda: build_tokenizer(str(assets.folder)))
    assets.file.write_text(content.replace("<s>", "<go>"))
    assert assets.open().bos is None, "no begin mark is fine"
    assets.file.write_text(content.replace("</s>", "<halt>"))
    line = refusal(assets.open)
    assert all(part in line for part in (str(assets.file), "<|end_of_text|>", str(assets.settings)))
    assets.file.write_text('{"version": "1.0", "model": {"type": "Nonsense"}}')
    assert str(assets.file) in refusal(assets.open)


# Packing and holding out ---------------------------------------------------------------------------------------------


def check_packing(tokens: np.ndarray, seq_len: int) -> None:
    """Consecutive windows of the flat stream, targets shifted by one, ignored after an end mark and only there."""
    sequences = PackedSequences(tokens, seq_len=seq_len, tokenizer=BYTES, shuffle=False, seed=0)
    stream = tokens.tolist()
    assert sequences.n_sequences == (len(stream) - 1) // seq_len
    for index in range(sequences.n_sequences):
        inputs, targets, _ = whole(sequences[index])
        places = range(index * seq_len, (index + 1) * seq_len)
        assert inputs == [stream[place] for place in places]
        assert targets == [IGNORED if stream[place] == BYTES.eos else stream[place + 1] for place in places]


def test_packing():
    tokens = np.array(flat(some_texts()), np.uint16)
    assert (tokens == BYTES.eos).sum() == 60
    for seq_len in (1, 7, T, len(tokens) - 1):
        check_packing(tokens, seq_len)
    for length in (T + 1, T + 2, 2 * T, 2 * T + 1):
        check_packing(tokens[:length], T)
    for length in (0, 1, T):
        line = refusal(lambda length=length: check_packing(tokens[:length], T))
        assert line.startswith(f"training.seq_len = {T}: the dataset has {length} tokens")


@pytest.mark.parametrize("broken", ["targets not shifted", "inputs one late", "end marks forgotten", "windows apart"])
def test_broken_packing_goes_red(monkeypatch, broken):
    real, get = packed.cut_sequence, PackedSequences.__getitem__

    def not_shifted(tokens: np.ndarray, tokenizer: Any) -> packed.Sequence:
        sequence = real(tokens, tokenizer)
        return sequence._replace(targets=sequence.inputs)

    if broken == "windows apart":
        monkeypatch.setattr(PackedSequences, "__getitem__", lambda self, index: get(self, index * 2))
    else:
        functions = {
            "targets not shifted": not_shifted,
            "inputs one late": lambda tokens, tokenizer: real(np.roll(tokens, -1), tokenizer),
            "end marks forgotten": lambda tokens, tokenizer: real(tokens, UNMARKED),
        }
        monkeypatch.setattr(packed, "cut_sequence", functions[broken])
    with pytest.raises(AssertionError):
        check_packing(np.array(flat(some_texts()), np.uint16), T)


def test_one_mark_for_begin_and_end(assets):
    """As GPT-2 has. What follows it as an end is ignored; what follows it as a begin is the text's first token."""
    tokenizer, texts = assets.open(bos_token="</s>", eos_token="</s>"), ["one", "another", "a third"]
    _, targets, documents = whole(packed.cut_sequence(np.array(flat(texts, tokenizer)), tokenizer))
    learned = [token for token in targets if token != IGNORED]
    assert learned == [token for text in texts for token in [*tokenizer.encode([text])[0].tolist(), tokenizer.eos]]
    assert documents == counted(texts, tokenizer)[:-1]


@pytest.mark.parametrize(
    ("ends", "positions"),
    [
        ([0, 0, 0, 0, 0], [0, 1, 2, 3, 4]),
        ([0, 1, 0, 0, 0], [0, 1, 0, 1, 2]),
        ([1, 0, 0, 0, 0], [0, 0, 1, 2, 3]),
        ([0, 0, 0, 0, 1], [0, 1, 2, 3, 4]),
        ([0, 0, 0, 1, 0], [0, 1, 2, 3, 0]),
        ([1, 0, 0, 0, 1], [0, 0, 1, 2, 3]),
        ([0, 1, 1, 1, 0], [0, 1, 0, 0, 0]),
        ([1, 1, 0, 1, 1], [0, 0, 0, 1, 0]),
        ([1, 1, 1, 1, 1], [0, 0, 0, 0, 0]),
        ([0], [0]),
        ([1], [0]),
        ([], []),
    ],
)
def test_positions_in_documents(ends, positions):
    found = packed.positions_in_documents(np.array(ends, bool))
    assert found.dtype == np.int64
    assert found.tolist() == positions


def check_documents(texts: list[str], seq_len: int, tokenizer: Any = BYTES) -> None:
    """A token's position is that in its document or, if that began before the sequence, in the sequence."""
    tokens, positions = np.array(flat(texts, tokenizer)), counted(texts, tokenizer)
    sequences = PackedSequences(tokens, seq_len=seq_len, tokenizer=tokenizer, shuffle=False, seed=0)
    for index in range(sequences.n_sequences):
        start = index * seq_len
        expected = [min(positions[start + i], i) for i in range(seq_len)]
        assert whole(sequences[index])[2] == expected, "other positions"


NOT_EMPTY = [text for text in some_texts() if text]


def test_documents_of_packed_sequences():
    begins = counted(some_texts())[::T]
    assert begins.count(0) > 1, "sequences that begin with a document"
    assert sum(position > T for position in begins) > 1, "sequences without a begin"
    for seq_len in (1, 2, 7, T, 50, len(flat(some_texts())) - 1):
        check_documents(some_texts(), seq_len)
    check_documents(["", "", "", "abc", "", "d" * 3 * T], T)


@pytest.mark.parametrize("marks", [{}, {"bos_token": None}, {"bos_token": "</s>"}], ids=["two", "end alone", "one"])
def test_documents_by_other_marks(assets, marks):
    """No empty ones: where there is one mark for both, nothing tells that of their begin from an end."""
    tokenizer = assets.open(**{"eos_token": "</s>"} | marks)
    assert (tokenizer.bos == tokenizer.eos) == (marks.get("bos_token") == "</s>")
    for seq_len in (1, 2, 7, T):
        check_documents(NOT_EMPTY, seq_len, tokenizer)


BROKEN_POSITIONS: dict[str, Callable[..., Any]] = {
    "restart one token late": lambda real, ends: real(np.append(False, ends[:-1])),
    "restart one token early": lambda real, ends: real(np.append(ends[1:], False)),
    "no restart": lambda real, ends: np.arange(len(ends)),
    "numbers of documents": lambda real, ends: np.cumsum(ends) - ends,
    "counted from the end": lambda real, ends: real(ends[::-1])[::-1],
    "counted from 1": lambda real, ends: real(ends) + 1,
}


@pytest.mark.parametrize("broken", BROKEN_POSITIONS)
def test_broken_positions_go_red(monkeypatch, broken):
    real = packed.positions_in_documents
    monkeypatch.setattr(packed, "positions_in_documents", lambda ends: BROKEN_POSITIONS[broken](real, ends))
    with pytest.raises(AssertionError, match="other positions"):
        check_documents(some_texts(), T)


def test_a_begin_taken_for_an_end_goes_red(monkeypatch, assets):
    tokenizer, real = assets.open(bos_token="</s>", eos_token="</s>"), packed.cut_sequence
    end_alone = SimpleNamespace(bos=None, eos=tokenizer.eos)
    monkeypatch.setattr(packed, "cut_sequence", lambda tokens, _: real(tokens, end_alone))
    with pytest.raises(AssertionError, match="other positions"):
        check_documents(NOT_EMPTY, T, tokenizer)


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.05, 0.1, 0.29, 1 / 3, 0.5, 0.9])
def test_held_out_share_is_exact_and_even(fraction):
    """Of the first n documents, n x fraction are held out, for every n."""
    held_out = np.cumsum([is_validation_document(document, fraction) for document in range(5000)])
    assert (np.abs(held_out - fraction * np.arange(1, 5001)) < 1).all()
    assert held_out[-1] == pytest.approx(5000 * fraction, abs=1 if fraction == 1 / 3 else 0)


@pytest.mark.parametrize("length", [2, T, T + 1, T + 2, 7 * T + 3])
@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_validation_takes_every_target_once(length, n_ranks):
    sequences = ValidationSequences(np.arange(1, length + 1), seq_len=T, tokenizer=UNMARKED)
    for size in (1, 2, 5):
        options = {"n_ranks": n_ranks, "local_batch_size": size, "steps": -1}
        batches = [list(data.validation_batches(sequences, rank=rank, **options)) for rank in range(n_ranks)]
        assert len({len(own) for own in batches}) == 1, "every rank must take as many batches"
        seen: Counter[int] = Counter()
        for tokens, targets, positions, documents in (batch for own in batches for batch in own):
            assert tokens.shape == targets.shape == positions.shape == (size, T)
            assert documents is None
            valid = targets != IGNORED
            assert (targets[valid] == tokens[valid] + 1).all()
            assert (tokens[~valid] == 0).all()
            seen.update(targets[valid].tolist())
        assert seen == Counter(range(2, length + 1))


def test_validation_ends_documents_and_stops_after_some_steps():
    tokens = np.array(flat(some_texts(20)), np.uint16)
    sequences = ValidationSequences(tokens, seq_len=T, tokenizer=BYTES)
    options = {"rank": 0, "n_ranks": 1, "local_batch_size": 2}
    every, first = (list(data.validation_batches(sequences, **options, steps=steps)) for steps in (-1, 2))
    assert len(every) == -(-(len(tokens) - 1) // (2 * T))
    n_targets = sum(int((batch.targets != IGNORED).sum()) for batch in every)
    assert n_targets == len(tokens) - 20, "every token is a target but the first of each document"
    assert [batch.targets.tolist() for batch in first] == [batch.targets.tolist() for batch in every[:2]]


def test_padding_continues_the_last_document_and_is_ignored():
    texts = ["", *some_texts(3)]
    tokens, positions = flat(texts), counted(texts)
    for length in range(2, len(tokens) + 1):
        sequences = ValidationSequences(np.array(tokens[:length], np.uint16), seq_len=T, tokenizer=BYTES)
        assert sequences.n_sequences == -(-(length - 1) // T)
        *_, (inputs, targets, documents) = (whole(sequences[index]) for index in range(sequences.n_sequences))
        start = T * (sequences.n_sequences - 1)
        n, last = length - 1 - start, min(positions[length - 2], length - 2 - start)
        assert inputs == tokens[start : length - 1] + [0] * (T - n)
        assert targets[n:] == [IGNORED] * (T - n)
        assert documents[:n] == [min(positions[start + i], i) for i in range(n)]
        assert documents[n:] == [last + 1 + i for i in range(T - n)]
        for index in (sequences.n_sequences, sequences.n_sequences + 7):
            assert whole(sequences[index]) == ([0] * T, [IGNORED] * T, list(range(T))), "nothing but padding"


# The files of tokens -------------------------------------------------------------------------------------------------


def in_memory(texts: list[str]) -> Documents:
    batches = [texts[i : i + 7] for i in range(0, len(texts), 7)]
    return Documents(hashlib.sha256("\0".join(texts).encode()).hexdigest(), lambda: iter(batches))


def make_files(
    documents: Documents, cache: Path, tokenizer: Any = BYTES, fraction: float = 0.25, builds: bool = True
) -> tuple[list[int], list[int], str]:
    options = {"fraction": fraction, "cache_folder": str(cache), "builds": builds}
    train, held_out, content = token_files(documents, tokenizer, **options)
    for tokens in (train, held_out):
        assert isinstance(tokens, np.memmap)
        assert tokens.itemsize == (4 if tokenizer is MANY else 2)
    return train.tolist(), held_out.tolist(), content


def check_split(made: tuple[list[int], list[int], str], texts: list[str], every: int = 4, **others: Any) -> None:
    """Every so manieth document is held out, and it alone; a document is whole."""
    assert made[1] == flat(texts[every - 1 :: every], **others)
    assert made[0] == flat([text for number, text in enumerate(texts, 1) if number % every], **others)


def test_token_files_are_made_once_for_a_text_tokenizer_and_share(tmp_path, assets):
    texts, cache = some_texts(), tmp_path / "cache"
    cases = [(texts, BYTES, 4), ([*texts[:-2], "other", "x"], BYTES, 4), (texts, BYTES, 2)]
    cases += [(texts, assets.open(), 4), (texts, MANY, 4)]
    contents = set()
    for case, tokenizer, every in cases:
        documents = in_memory(case)
        made = make_files(documents, cache, tokenizer, 1 / every)
        check_split(made, case, every, tokenizer=tokenizer)
        asked_again = Documents(documents.fingerprint, lambda: pytest.fail("tokenises again"))
        assert make_files(asked_again, cache, tokenizer, 1 / every) == made
        contents.add(made[2])
    assert len(contents) == len(list(cache.iterdir())) == len(cases)
    assert make_files(Documents("moved", in_memory(texts).batches), cache)[2] in contents, "the hash is of the tokens"


@pytest.mark.parametrize("cleans_up", [True, False], ids=["stopped", "killed"])
def test_half_made_files_are_never_used(tmp_path, monkeypatch, cleans_up):
    documents = in_memory(some_texts())
    broken = Documents(documents.fingerprint, lambda: iter([*documents.batches(), [None]]))
    if not cleans_up:
        monkeypatch.setattr(packed.shutil, "rmtree", lambda *arguments, **options: None)
    with pytest.raises(AttributeError, match="NoneType"):
        make_files(broken, tmp_path)
    assert bool(list(tmp_path.iterdir())) != cleans_up
    check_split(make_files(documents, tmp_path), some_texts())


def test_hosts_that_share_the_folder_may_both_tokenise(tmp_path):
    """The one that is late takes the files of the other."""
    documents = in_memory(some_texts())

    def batches() -> Iterator[list[str]]:
        make_files(documents, tmp_path)
        yield from documents.batches()

    check_split(make_files(Documents(documents.fingerprint, batches), tmp_path), some_texts())
    assert len(list(tmp_path.iterdir())) == 1, "half-made files are left"


def test_other_ranks_of_a_host_wait_for_the_files(tmp_path):
    documents, may_build = in_memory(some_texts()), threading.Event()

    def batches() -> Iterator[list[str]]:
        may_build.wait(10)
        yield from documents.batches()

    with ThreadPoolExecutor(2) as pool:
        never = Documents(documents.fingerprint, lambda: pytest.fail("tokenises too"))
        waiting = pool.submit(make_files, never, tmp_path, builds=False)
        building = pool.submit(make_files, Documents(documents.fingerprint, batches), tmp_path)
        assert not waiting.done()
        may_build.set()
        assert waiting.result(10) == building.result(10)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    line = refusal(lambda: make_files(in_memory(["a"]), tmp_path / "file" / "cache"))
    assert line.startswith(f'training.cache_folder = "{tmp_path}/file/cache": cannot be written: ')


# Order over ranks, read ahead ----------------------------------------------------------------------------------------


def make_packed(n_sequences: int = 10, seed: int = 42, shuffle: bool = True) -> PackedSequences:
    """Sequences whose tokens tell their place in the flat stream."""
    tokens = np.arange(n_sequences * T + 1)
    return PackedSequences(tokens, seq_len=T, tokenizer=UNMARKED, shuffle=shuffle, seed=seed)


def places(sequences: PackedSequences, indices: range) -> list[int]:
    return [int(sequences[index].inputs[0]) // T for index in indices]


def test_an_epochs_order_is_a_permutation():
    sequences = make_packed(50)
    epochs = [places(sequences, range(50 * epoch, 50 * (epoch + 1))) for epoch in range(4)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, range(50)]}) == 5
    assert places(make_packed(50, seed=43), range(50)) not in epochs
    assert places(make_packed(50, shuffle=False), range(100)) == [*range(50), *range(50)]
    # Any index can be asked for at any time.
    assert places(sequences, range(199, -1, -1)) == [place for epoch in epochs for place in epoch][::-1]


def test_the_order_never_changes():
    """Numbers of an earlier version: another order would send a resumed run over other data, unnoticed."""
    epochs = [1, 8, 5, 3, 7, 9, 4, 0, 6, 2], [9, 5, 8, 7, 6, 4, 0, 3, 1, 2]
    assert places(make_packed(), range(20)) == [*epochs[0], *epochs[1]]


def open_loader(sequences: Any, **others: Any) -> data.Loader:
    options = {"rank": 0, "n_ranks": 1, "local_batch_size": 1, "global_batch_size": 4, "pin": False}
    return data.Loader(sequences, **options | others)


def sequences_of(batch: list[data.Batch], local_batch_size: int) -> list[Sequence]:
    """Of microbatches with a document mask."""
    for tokens, targets, positions, documents in batch:
        assert tokens.shape == targets.shape == positions.shape == (local_batch_size, T)
        assert tokens.dtype == targets.dtype == positions.dtype == torch.int64
        assert torch.equal(documents, positions)
    parts = ([part.tolist() for part in microbatch[:3]] for microbatch in batch)
    return [sequence for microbatch in parts for sequence in zip(*microbatch, strict=True)]


def consume(
    make: Callable[[], data.Sequences], *, n_ranks: int, steps: int, batch: int, size: int = 1, state: Any = None
) -> tuple[list[list[Sequence]], list[dict[str, Any]]]:
    """What all ranks train on in some steps, each step's sequences in their global order, and the ranks' states (not of
    streams: those are gathered, which takes a pool of ranks)."""
    options = {"n_ranks": n_ranks, "local_batch_size": size, "global_batch_size": batch, "state": state}
    options["cut"] = data.SequenceShard(document_mask=True)
    loaders = [open_loader(make(), rank=rank, **options) for rank in range(n_ranks)]
    try:
        consumed = []
        for _ in range(steps):
            parts = [sequences_of(loader.next(), size) for loader in loaders]
            assert {len(part) for part in parts} == {batch // n_ranks}
            consumed.append([parts[k % n_ranks][k // n_ranks] for k in range(batch)])
        return consumed, [] if loaders[0]._streams else [json.loads(json.dumps(loader.state())) for loader in loaders]
    finally:
        for loader in loaders:
            loader.close()


def in_steps(sequences: Any, batch: int, steps: int, first: int = 0) -> list[list[Sequence]]:
    return [[whole(sequences[first + step * batch + i]) for i in range(batch)] for step in range(steps)]


def check_order_over_ranks() -> None:
    """12 sequences a step, 5 steps: 6 epochs of 10."""
    expected = in_steps(make_packed(), 12, 5)
    for n_ranks in (1, 2, 4):
        for size in (1, 3, 12 // n_ranks):
            assert consume(make_packed, n_ranks=n_ranks, steps=5, batch=12, size=size)[0] == expected


def test_order_does_not_depend_on_the_ranks():
    check_order_over_ranks()


BROKEN_READS: dict[str, Callable[..., Any]] = {
    "rank in the index": lambda read, self, first, *others: read(self, 2 * first, *others),
    "rank in the seed": lambda read, self, first, *others: read(make_packed(seed=42 + first), first, *others),
    "neighbours instead of strides": lambda read, self, first, _, streams: read(self, 3 * first, 1, streams),
}


@pytest.mark.parametrize("broken", BROKEN_READS)
def test_an_order_that_depends_on_the_ranks_goes_red(monkeypatch, broken):
    real = PackedSequences.read
    monkeypatch.setattr(PackedSequences, "read", lambda *arguments: BROKEN_READS[broken](real, *arguments))
    with pytest.raises(AssertionError):
        check_order_over_ranks()


def check_resume(
    steps: int, ranks_before: int, batch_before: int, ranks_after: int, batch_after: int, off: int = 0
) -> None:
    before, states = consume(make_packed, n_ranks=ranks_before, steps=steps, batch=batch_before)
    assert all(state == {"next_sequence": steps * batch_before, "streams": {}} for state in states)
    state = {"next_sequence": states[0]["next_sequence"] + off, "streams": {}}
    after, _ = consume(make_packed, n_ranks=ranks_after, steps=3, batch=batch_after, state=state)
    consumed = [sequence for step in before + after for sequence in step]
    assert [consumed] == in_steps(make_packed(), steps * batch_before + 3 * batch_after, 1), "another order"


@pytest.mark.parametrize(
    "ranks_and_batches",
    [(1, 4, 2, 4), (2, 4, 1, 4), (2, 4, 4, 4), (4, 4, 2, 4), (4, 8, 1, 8), (2, 6, 4, 8), (4, 4, 3, 6), (1, 5, 4, 4)],
)
def test_resume_at_other_ranks_goes_on_in_the_same_order(ranks_and_batches):
    for steps in (0, 1, 3, 6):
        check_resume(steps, *ranks_and_batches)


def test_a_resume_one_sequence_off_goes_red():
    with pytest.raises(AssertionError, match="another order"):
        check_resume(3, 2, 4, 4, 4, off=1)


class Counted:
    """Endless sequences that count how many were read; the one with number `fails_at` cannot be."""

    def __init__(self, fails_at: int = -1):
        self.count, self.fails_at = 0, fails_at

    def read(self, first: int, stride: int, streams: dict[int, Any]) -> Iterator[Any]:
        while self.count != self.fails_at:
            self.count += 1
            yield packed.Sequence(*(np.full(T, first) for _ in packed.Sequence._fields)), None
            first += stride
        raise OSError("the disk is gone")

    def wait_for(self, count: int) -> None:
        deadline = time.monotonic() + 10
        while self.count != count:
            assert time.monotonic() < deadline, "waited 10 seconds"
            time.sleep(0.005)


def test_batches_are_made_ahead_but_not_without_end_nor_after_close():
    sequences = Counted()
    loader = open_loader(sequences, ahead=3)
    sequences.wait_for(4 * 4)  # three steps wait to be asked for, and the next one waits for its place
    time.sleep(0.05)
    sequences.wait_for(4 * 4)
    assert loader.state()["next_sequence"] == 0, "what was made ahead is not trained on yet"
    loader.next()
    sequences.wait_for(5 * 4)
    assert loader.state()["next_sequence"] == 4
    for opened in (loader, open_loader(Counted())):
        assert opened._thread in threading.enumerate()
        for _ in range(2):
            opened.close()
            assert opened._thread not in threading.enumerate()


def test_an_error_is_raised_where_the_batch_is_waited_for_each_time():
    loader = open_loader(Counted(fails_at=6), ahead=1)
    loader.next()
    for _ in range(3):
        with pytest.raises(OSError, match="the disk is gone"):
            loader.next()
    assert loader.state()["next_sequence"] == 4
    loader.close()
    assert not loader._thread.is_alive()


# What of each sequence a rank takes ----------------------------------------------------------------------------------

OWN, RING = np.array([14, 3, 4, 9, 0]), np.array([11, 0, 3, 4, 15, 14, 9, 2])
CUTS = {"plain": data.SequenceShard(OWN, RING), "masked": data.SequenceShard(OWN, RING, document_mask=True)}
EVERYTHING = np.arange(T)


def expected_parts(sequences: Any, indices: list[int], size: int, cut: data.SequenceShard) -> list[list[Any]]:
    """The parts of the microbatches of some sequences, their elements taken one by one."""
    microbatches = []
    for first in range(0, len(indices), size):
        rows = [whole(sequences[index]) for index in indices[first : first + size]]
        inputs, targets, documents = ([[row[part][i] for i in cut.own] for row in rows] for part in range(3))
        if cut.document_mask:
            positions = [documents, [[row[2][i] for i in cut.ring] for row in rows]]
        else:
            positions = [[[int(i) for i in cut.own]] * size, None]
        microbatches.append([inputs, targets, *positions])
    return microbatches


def parts_of(microbatches: list[data.Batch], size: int, cut: data.SequenceShard) -> list[list[Any]]:
    for microbatch in microbatches:
        assert isinstance(microbatch, data.Batch)
        for part, indices in zip(microbatch, [cut.own] * 3 + [cut.ring], strict=True):
            if part is not None:
                assert part.dtype == torch.int64
                assert part.shape == (size, len(indices))
                assert part.is_contiguous(), "not contiguous"
    return [[part if part is None else part.tolist() for part in microbatch] for microbatch in microbatches]


def check_training(cut: data.SequenceShard, size: int = 3) -> None:
    """Two data-parallel ranks, two steps of twelve sequences."""
    tokens = np.array(flat(some_texts()))
    sequences = PackedSequences(tokens, seq_len=T, tokenizer=BYTES, shuffle=True, seed=0)
    options = {"n_ranks": 2, "local_batch_size": size, "global_batch_size": 12, "cut": cut}
    for rank in range(2):
        loader = open_loader(sequences, rank=rank, **options)
        microbatches = [*loader.next(), *loader.next()]
        loader.close()
        expected = expected_parts(sequences, list(range(rank, 24, 2)), size, cut)
        assert parts_of(microbatches, size, cut) == expected, "another cut"


def check_validation(cut: data.SequenceShard, size: int = 3) -> None:
    """Two data-parallel ranks and a whole split, which ends in padding."""
    sequences = ValidationSequences(np.array(flat(some_texts(20))), seq_len=T, tokenizer=BYTES)
    n_padded = 2 * size * -(-sequences.n_sequences // (2 * size))
    options = {"n_ranks": 2, "local_batch_size": size, "steps": -1, "cut": cut}
    for rank in range(2):
        microbatches = list(data.validation_batches(sequences, rank=rank, **options))
        expected = expected_parts(sequences, list(range(rank, n_padded, 2)), size, cut)
        assert parts_of(microbatches, size, cut) == expected, "another cut"


@pytest.mark.parametrize("check", [check_training, check_validation])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_rank_takes_its_cut_of_each_sequence(check, cut):
    for size in (1, 3):
        check(cut, size)
    check(cut._replace(own=EVERYTHING))
    check(cut._replace(own=EVERYTHING, ring=EVERYTHING))


def test_a_rank_takes_everything_unless_told_otherwise():
    sequences, cut = make_packed(), data.SequenceShard(EVERYTHING, EVERYTHING)
    held_out = ValidationSequences(sequences.tokens, seq_len=T, tokenizer=UNMARKED)
    loader = open_loader(sequences, local_batch_size=2)
    batch = loader.next()
    loader.close()
    assert parts_of(batch, 2, cut) == expected_parts(sequences, [0, 1, 2, 3], 2, cut)
    batches = list(data.validation_batches(held_out, rank=0, n_ranks=1, local_batch_size=2, steps=2))
    assert parts_of(batches, 2, cut) == expected_parts(held_out, [0, 1, 2, 3], 2, cut)


def _positions_in_cut(stack: Any, rows: list[packed.Sequence], cut: data.SequenceShard) -> data.Batch:
    return stack(rows, cut)._replace(positions=torch.arange(len(cut.own)).repeat(len(rows), 1))


def _next_in_cut(stack: Any, rows: list[packed.Sequence], cut: data.SequenceShard) -> data.Batch:
    found = stack(rows, cut)
    return found._replace(targets=found.tokens.roll(-1, dims=1))


def _documents_of_own(stack: Any, rows: list[packed.Sequence], cut: data.SequenceShard) -> data.Batch:
    return stack(rows, cut._replace(ring=cut.own[np.arange(len(cut.ring)) % len(cut.own)]))


def _mask_forgotten(stack: Any, rows: list[packed.Sequence], cut: data.SequenceShard) -> data.Batch:
    return stack(rows, cut)._replace(positions=stack(rows, cut._replace(document_mask=False)).positions)


def _mask_unasked(stack: Any, rows: list[packed.Sequence], cut: data.SequenceShard) -> data.Batch:
    return stack(rows, cut._replace(document_mask=True))._replace(documents=None)


def _columns_first(stack: Any, rows: list[packed.Sequence], cut: data.SequenceShard) -> data.Batch:
    """As numpy leaves what it takes by an array of indices."""
    return data.Batch(*(part if part is None else part.T.contiguous().T for part in stack(rows, cut)))


BROKEN_CUTS: dict[Callable[..., data.Batch], str] = {
    _positions_in_cut: "plain",
    _next_in_cut: "plain",
    _documents_of_own: "masked",
    _mask_forgotten: "masked",
    _mask_unasked: "plain",
    _columns_first: "plain",
}


@pytest.mark.parametrize("check", [check_training, check_validation])
@pytest.mark.parametrize("broken", BROKEN_CUTS)
def test_a_broken_cut_goes_red(monkeypatch, broken, check):
    stack = functools.partial(data._stack, pin=False)
    monkeypatch.setattr(data, "_stack", lambda rows, cut, pin: broken(stack, rows, cut))
    with pytest.raises(AssertionError, match="not contiguous" if broken is _columns_first else "another cut"):
        check(CUTS[BROKEN_CUTS[broken]])


@pytest.mark.parametrize("document_mask", [False, True])
def test_ranks_that_share_sequences_take_each_token_once(document_mask):
    """Whichever tokens each of four takes; the target of a token is what follows it, whoever takes that."""
    shares = np.split(np.random.RandomState(0).permutation(T), (3, 4, 11))
    cuts = [data.SequenceShard(own, EVERYTHING, document_mask) for own in shares]
    loaders = [open_loader(make_packed(), local_batch_size=2, shard=cut) for cut in cuts]
    seen: Counter[tuple[int, int, int]] = Counter()
    for _ in range(5):
        for loader in loaders:
            for microbatch in loader.next():
                seen.update(zip(*(part.flatten().tolist() for part in microbatch[:3]), strict=True))
    for loader in loaders:
        loader.close()
    assert seen == Counter({(token, token + 1, token % T): 2 for token in range(10 * T)}), "two epochs"


# Sources -------------------------------------------------------------------------------------------------------------


def source(dataset: str, path: Any, text_key: str = "text", text_sample_by: str = "document") -> Source:
    return Source(dataset, str(path), "", "train", text_key, text_sample_by)


def texts_of(*arguments: Any, **others: Any) -> list[str]:
    return [text for batch in load_documents(source(*arguments, **others)).batches() for text in batch]


def open_stream(named: Source, n_streams: int = 1, seq_len: int = T) -> StreamedSequences:
    opened, column, _ = load_stream(named)
    return StreamedSequences(opened, column, named, BYTES, seq_len=seq_len, n_streams=n_streams)


def refusals(*arguments: Any, **others: Any) -> Iterator[str]:
    """How data is refused whole and as a stream, either when it is opened or when it is read."""
    yield refusal(lambda: texts_of(*arguments, **others))
    yield refusal(lambda: list(zip(range(9), open_stream(source(*arguments, **others)).read(0, 1, {}), strict=False)))


def write(file: Path, texts: list[Any]) -> Path:
    """Documents in the format that the file's name says; a Parquet file has row groups of two."""
    columns = {"text": texts, "other": [f"{i}!" for i in range(len(texts))], "id": list(range(len(texts)))}
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table(columns), file, row_group_size=2)
    elif file.suffix == ".txt":
        file.write_text("\n".join(texts))
    else:
        rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_text_json_and_parquet_files(tmp_path):
    write(tmp_path / "a.txt", ["one", "two", "", "three", ""])
    write(tmp_path / "b.txt", ["four"])
    assert texts_of("text", tmp_path) == ["one\ntwo\n\nthree\n", "four"]
    assert texts_of("text", tmp_path, text_sample_by="paragraph") == ["one\ntwo", "three\n", "four"]
    assert texts_of("text", tmp_path, text_sample_by="line") == ["one", "two", "", "three", "four"]
    write(tmp_path / "lines.jsonl", ["one", "two\nlines"])
    (tmp_path / "list.json").write_text(json.dumps([{"text": "three", "other": "2!", "id": 0}]))
    assert texts_of("json", tmp_path / "lines.jsonl") == ["one", "two\nlines"]
    assert texts_of("json", tmp_path) == ["one", "two\nlines", "three"]
    assert texts_of("json", tmp_path, text_key="other") == ["0!", "1!", "2!"]
    write(tmp_path / "rows.parquet", [f"row {i}" for i in range(5)])
    assert texts_of("parquet", tmp_path) == [f"row {i}" for i in range(5)]


def test_folders_and_globs_are_read_in_sorted_order(tmp_path, monkeypatch):
    for name in ("b/2", "b/10", "a/z", "c", "run[1]"):
        write(tmp_path / f"{name}.txt", [name])
    (tmp_path / "a" / "note.md").write_text("not one of them")
    assert texts_of("text", tmp_path) == ["a/z", "b/10", "b/2", "c", "run[1]"]
    assert texts_of("text", tmp_path / "b" / "*.txt") == ["b/10", "b/2"]
    assert texts_of("text", tmp_path / "[ab]" / "?.txt") == ["a/z", "b/2"]
    assert texts_of("text", f"{tmp_path}/**/z.txt") == ["a/z"]
    assert texts_of("text", tmp_path / "run[1].txt") == ["run[1]"], "a file's name is no pattern"
    monkeypatch.chdir(tmp_path)
    assert texts_of("text", "b/1*.txt") == ["b/10"]
    monkeypatch.setenv("HOME", str(tmp_path / "b"))
    assert texts_of("text", "~/2.txt") == ["b/2"]


@pytest.mark.parametrize("size", [10, 2**16 + 1, 2**20])
def test_another_text_with_the_same_time_and_size_is_noticed(tmp_path, size):
    """Unpacked archives and image layers have files of one fixed time."""
    file = tmp_path / "a.txt"
    identities = set()
    for place in np.linspace(0, size - 1, 10, dtype=int):
        text = "a" * place + "b" + "a" * (size - 1 - place)
        os.utime(write(file, [text]), (1e9, 1e9))
        assert texts_of("text", file) == [text]
        identities |= {load_documents(source("text", file)).fingerprint, load_stream(source("text", file))[2]}
    assert len(identities) == 20


@pytest.mark.parametrize(
    ("dataset", "path", "reason"),
    [("text", "nowhere", "no such file"), ("text", "*.txt", "no such file"), ("parquet", ".", "ends in .parquet")],
)
def test_missing_files_are_refused(tmp_path, dataset, path, reason):
    for line in refusals(dataset, tmp_path / path):
        assert line.startswith(f'training.dataset_path = "{tmp_path / path}": no ')
        assert reason in line


@pytest.mark.parametrize("kind", ["json", "parquet"])
@pytest.mark.parametrize(
    ("texts", "text_key", "reason"),
    [
        (["one"], "no", 'no column "no"; set training.dataset_text_key to one of text, other, id'),
        (["one"], "id", 'column "id" holds a value of type int where a document\'s text is expected'),
        (["one", "two", None], "text", 'column "text" holds no text (null) where a document\'s text is expected'),
        ([None], "text", 'column "text" holds no text (null) where a document\'s text is expected'),
        ([["one"]], "text", 'column "text" holds a value of type list where a document\'s text is expected'),
    ],
)
def test_a_column_that_is_no_text_is_refused(tmp_path, kind, texts, text_key, reason):
    file = write(tmp_path / f"a.{kind}", texts)
    assert list(refusals(kind, file, text_key=text_key)) == [f'training.dataset_path = "{file}": {reason}'] * 2


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "a.json").touch()
    assert list(refusals("json", tmp_path)) == [f'training.dataset_path = "{tmp_path}": has no documents'] * 2


@pytest.mark.parametrize("what", ["loaded", "read"])
@pytest.mark.parametrize(("dataset", "reason"), [("json", "JSON"), ("parquet", "Parquet"), ("text", "utf-8")])
def test_broken_files_are_refused_with_the_reason(tmp_path, dataset, reason, what):
    ending = "txt" if dataset == "text" else dataset
    if what == "read":  # the first file can be
        write(tmp_path / f"0.{ending}", ["good"])
    (tmp_path / f"1.{ending}").write_bytes(b"{\xff\xfe")
    for line in refusals(dataset, tmp_path):
        assert line.startswith(f'training.dataset_path = "{tmp_path}": cannot be {what}: ')
        assert reason in line


@pytest.mark.parametrize(
    ("dataset", "path", "named"),
    [("hub", "some/thing", 'training.dataset_path = "some/thing"'), ("c4", "", 'training.dataset = "c4"')],
)
def test_the_hub_without_a_network_is_one_clear_line(dataset, path, named):
    began = time.monotonic()
    for line in refusals(dataset, path):
        assert line.startswith(f"{named}: cannot be loaded: ")
        assert "without a network, download its files elsewhere" in line
    assert time.monotonic() - began < 5


# The whole way from options to sequences -----------------------------------------------------------------------------


def open_sequences(tmp_path: Path, **others: Any) -> tuple[data.Sequences, ValidationSequences | None, str]:
    options: dict[str, Any] = {"tokenizer": BYTES, "cache_folder": str(tmp_path / "cache"), "builds_cache": True}
    options |= {"dataset": "pydoc_topics", "dataset_path": "", "dataset_config": "", "dataset_split": "train"}
    options |= {"text_key": "text", "text_sample_by": "document", "streaming": False, "streams": 1, "shuffle": False}
    options |= {"validation_path": "", "validation_split": "", "validation_fraction": 0.05, "validation_enable": True}
    return data.open_sequences(**options | {"seed": 0, "seq_len": T} | others)


def test_built_in_text_is_packed_and_split(tmp_path):
    train, held_out, _ = open_sequences(tmp_path)
    texts = built_in_texts()
    for_validation = [number for number in range(len(texts)) if (number + 1) * 5 // 100 > number * 5 // 100]
    assert len(for_validation) == len(texts) // 20
    assert train.tokens.tolist() == flat([text for number, text in enumerate(texts) if number not in for_validation])
    assert held_out.tokens.tolist() == flat([texts[number] for number in for_validation])
    without = open_sequences(tmp_path, validation_enable=False)
    assert without[1] is None
    assert without[0].tokens.tolist() == train.tokens.tolist(), "validation must not change the training data"
    line = refusal(lambda: open_sequences(tmp_path, validation_fraction=1e-6))
    assert line.startswith("validation.fraction = 1e-06: holds out no document")


@pytest.mark.parametrize("streaming", [False, True])
def test_files_of_their_own_to_validate_on(tmp_path, streaming):
    file, own = write(tmp_path / "train.jsonl", some_texts()), write(tmp_path / "own.jsonl", ["validate", "on this"])
    options = {"dataset": "json", "dataset_path": str(file), "streaming": streaming}
    train, held_out, _ = open_sequences(tmp_path, **options, validation_path=str(own))
    assert whole(next(train.read(0, 1, {}))[0])[0] == flat(some_texts())[:T]
    assert isinstance(train, StreamedSequences) if streaming else train.tokens.tolist() == flat(some_texts())
    assert held_out.tokens.tolist() == flat(["validate", "on this"])
    for path, reason in ((tmp_path / "nowhere", "no such file"), (write(tmp_path / "none", [None]), "null")):
        line = refusal(lambda path=path: open_sequences(tmp_path, **options, validation_path=str(path)))
        assert line.startswith(f'validation.dataset_path = "{path}": ')
        assert reason in line


@pytest.mark.parametrize("streaming", [False, True])
def test_identity_names_what_global_indices_mean(tmp_path, assets, streaming):
    """Of data that is read whole it is a hash of the tokens; so it also tells that changed files are tokenised anew."""
    folder, copy = tmp_path / "files", tmp_path / "copy"
    for number in range(2):
        write(folder / f"{number}.jsonl", some_texts())
        write(folder / f"{number}.txt", ["one", "two"])

    def identity(**others: Any) -> str:
        options = {"dataset": "json", "dataset_path": str(folder), "streaming": streaming, "streams": 2}
        return open_sequences(tmp_path, **options | {"validation_enable": False} | others)[2]

    changes = [{}, {"seq_len": 32}, {"text_key": "other"}, {"tokenizer": assets.open()}]
    changes += [{"dataset": "text"}, {"dataset": "text", "text_sample_by": "line"}]
    only_whole = [{"shuffle": True}, {"shuffle": True, "seed": 1}, {"validation_fraction": 0.1}]
    found = [identity(**change) for change in changes + ([{"streams": 1}] if streaming else only_whole)]

    shutil.copytree(folder, copy, copy_function=shutil.copyfile)  # with times of its own
    same = [{}, {"cache_folder": str(tmp_path / "elsewhere")}, {"dataset_path": str(copy)}]
    same += [] if streaming else [{"validation_enable": True}]
    assert {identity(**change) for change in same} == {found[0]}

    for texts in (["another file"], ["another text"]):
        write(folder / "2.jsonl", texts)
        found.append(identity())
    assert len(set(found)) == len(found)


def build_in_rank(job: Path, paths: list[Path]) -> str:
    """The identity of a rank's data, or how it is refused."""
    launch = config.Launch.from_environment(n_devices=0)
    arguments = [f"--training.dataset_path={paths[launch.rank]}", f"--training.cache_folder={job.parent / 'cache'}"]
    try:
        return build.build_data(config.check(config.load([str(job), *arguments]), launch), builds_cache=True)[2]
    except ConfigError as error:
        return "\n".join(error.problems)


@pytest.mark.parametrize("reading", ["", "streaming = true\nshuffle = false\nstreams = 2\n"], ids=["whole", "streamed"])
def test_ranks_that_read_different_data_are_refused(ranks, tmp_path, reading):
    job = tmp_path / "job.toml"
    job.write_text(f'[validation]\nenable = false\n[training]\nseq_len = 16\ndataset = "json"\n{reading}')
    for folder, first in (("a", "one"), ("same", "one"), ("other", "two")):
        for number in range(2):
            write(tmp_path / folder / f"{number}.jsonl", [first, *some_texts()])
    of_one, of_other = ranks(2).run(build_in_rank, job=job, paths=[tmp_path / "a", tmp_path / "same"])
    assert of_one == of_other
    assert "seq_len 16" in of_one
    refused = ranks(2).run(build_in_rank, job=job, paths=[tmp_path / "a", tmp_path / "other"])
    assert refused == ["training.dataset_path: rank 1 reads other data than rank 0; give all hosts the same"] * 2


# Streaming -----------------------------------------------------------------------------------------------------------

FILES, STEPS, BATCH = 8, 24, 4
STREAMS = {"json": 8, "parquet": 4}


def file_texts(kind: str, number: int) -> list[str]:
    """3 to 6 documents of up to 40 characters: an epoch of a stream has a dozen packed sequences."""
    generator = np.random.RandomState(number)
    return [f"{kind}{number}/{i} " + "x" * generator.randint(32) for i in range(generator.randint(3, 7))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Eight small files of each kind."""
    folder = tmp_path_factory.mktemp("streams")
    for kind in STREAMS:
        for number in range(FILES):
            write(folder / kind / f"{number}.{kind}", file_texts(kind, number))
    return {kind: folder / kind for kind in STREAMS}


class Expected:
    """The sequences of the streams, packed by hand: stream n has the n-th share of the files, over and over."""

    def __init__(self, kind: str):
        files, share = [file_texts(kind, number) for number in range(FILES)], FILES // STREAMS[kind]
        texts = [[text for file in files[i : i + share] for text in file] for i in range(0, FILES, share)]
        self.streams, self.positions = ([np.array(of(own)) for own in texts] for of in (flat, counted))

    def __getitem__(self, index: int) -> packed.Sequence:
        window, number = divmod(index, len(self.streams))
        tokens, places = self.streams[number], np.arange(window * T, (window + 1) * T)
        inputs, targets = tokens[places % len(tokens)], tokens[(places + 1) % len(tokens)]
        documents = np.minimum(self.positions[number][places % len(tokens)], np.arange(T))
        return packed.Sequence(inputs, np.where(inputs == BYTES.eos, IGNORED, targets), documents)


def make_streamed(kind: str, folder: Path) -> Callable[[], StreamedSequences]:
    return lambda: open_stream(source(kind, folder), STREAMS[kind])


@pytest.mark.parametrize("kind", STREAMS)
def test_streams_do_not_depend_on_the_ranks(folders, kind):
    assert max(len(tokens) for tokens in Expected(kind).streams) < 40 * 8 * T / STREAMS[kind] / 2, "two epochs"
    for n_ranks, size in ((1, 8), (2, 1), (2, 4), (4, 2)):
        consumed, _ = consume(make_streamed(kind, folders[kind]), n_ranks=n_ranks, steps=40, batch=8, size=size)
        assert consumed == in_steps(Expected(kind), 8, 40)


def run_in_rank(
    kind: str, folder: Path, steps: int, state: Any, batch: int, data_ranks: list[int] | None
) -> list[dict[str, Any]]:
    """The state after each step, through JSON."""
    data_ranks = list(range(dist.get_world_size())) if data_ranks is None else data_ranks
    options = {"rank": data_ranks[dist.get_rank()], "n_ranks": max(data_ranks) + 1}
    loader = open_loader(make_streamed(kind, folder)(), **options, global_batch_size=batch, state=state)
    states = []
    for _ in range(steps):
        loader.next()
        states.append(json.loads(json.dumps(loader.state())))
    loader.close()
    return states


def states_of(
    pool: Any,
    kind: str,
    folder: Path,
    steps: int,
    state: Any = None,
    batch: int = BATCH,
    data_ranks: list[int] | None = None,
) -> list[Any]:
    """The state after each step of a run in a pool of ranks: where a run stands is gathered from all.

    Args:
        data_ranks: the data-parallel rank that each is or, with others, shares.
    """
    options = {"steps": steps, "state": state, "batch": batch, "data_ranks": data_ranks}
    first, *others = pool.run(run_in_rank, kind=kind, folder=folder, **options)
    assert all(found == first for found in others)
    return first


@pytest.fixture(scope="module")
def saved(ranks, folders) -> dict[tuple[str, int], list[Any]]:
    """States after 1 .. STEPS steps, of two and of four ranks."""
    return {(kind, n): states_of(ranks(n), kind, folders[kind], STEPS) for kind in STREAMS for n in (2, 4)}


def check_continuation(kind: str, folder: Path, state: dict[str, Any], n_ranks: int, batch: int = BATCH) -> None:
    """What follows a state is what follows without a stop."""
    steps = 8 // batch + 1
    consumed, _ = consume(make_streamed(kind, folder), n_ranks=n_ranks, steps=steps, batch=batch, state=state)
    assert consumed == in_steps(Expected(kind), batch, steps, first=state["next_sequence"])


@pytest.mark.parametrize("kind", STREAMS)
def test_streams_go_on_exactly_after_every_step(saved, folders, kind):
    assert saved[kind, 2] == saved[kind, 4]
    assert min(len(tokens) for tokens in Expected(kind).streams) < STEPS * BATCH * T / STREAMS[kind], "past an end"
    assert len(saved["json", 2][0]["streams"]) == 4, "half of the streams have not begun after the first step"
    for step, state in enumerate(saved[kind, 2], 1):
        assert state["next_sequence"] == step * BATCH
        check_continuation(kind, folders[kind], state, n_ranks=(1, 2, 4)[step % 3])
    for n_ranks, batch in ((1, 4), (2, 2), (4, 8), (1, 6)):
        check_continuation(kind, folders[kind], saved[kind, 2][10], n_ranks, batch)


@pytest.mark.parametrize("kind", STREAMS)
def test_a_resumed_run_saves_states_that_are_as_good(ranks, saved, folders, kind):
    """Ranks that resumed at another number know old states of streams that are no longer theirs."""
    after_six = states_of(ranks(2), kind, folders[kind], steps=3, batch=2)[-1]
    assert after_six["next_sequence"] == 6, "no multiple of four: rank 0 of four goes on with stream 2"
    for n_ranks, state in ((4, saved[kind, 2][6]), (2, saved[kind, 4][6]), (4, after_six)):
        for resumed in states_of(ranks(n_ranks), kind, folders[kind], 5, state):
            check_continuation(kind, folders[kind], resumed, n_ranks=2)


@pytest.mark.parametrize("data_ranks", [[0, 0, 1, 1], [0, 1, 0, 1]], ids=["neighbours", "strides"])
@pytest.mark.parametrize("kind", STREAMS)
def test_ranks_that_share_a_data_parallel_rank_save_the_same_states(ranks, saved, folders, kind, data_ranks):
    pool, folder = ranks(4), folders[kind]
    assert states_of(pool, kind, folder, STEPS, data_ranks=data_ranks) == saved[kind, 2]
    after_six = states_of(pool, kind, folder, 3, batch=2, data_ranks=data_ranks)[-1]
    assert after_six == states_of(ranks(2), kind, folder, 3, batch=2)[-1]
    for state in (saved[kind, 4][6], after_six):
        resumed = states_of(pool, kind, folder, 5, state, data_ranks=data_ranks)
        assert resumed == states_of(ranks(2), kind, folder, 5, state)


@pytest.mark.parametrize("broken", ["one token off", "one document off", "one sequence off", "a stale stream"])
def test_a_state_that_is_off_goes_red(monkeypatch, saved, folders, broken):
    real, state = StreamedSequences._documents, json.loads(json.dumps(saved["json", 2][9]))

    def documents(self: StreamedSequences, number: int, start: dict[str, Any]) -> Any:
        found = real(self, number, start)
        if broken == "one document off":
            next(found)
        for position, tokens, used in found:
            yield position, tokens, used + (broken == "one token off" and used > 0)

    monkeypatch.setattr(StreamedSequences, "_documents", documents)
    if broken == "one sequence off":
        state["next_sequence"] += 1
    elif broken == "a stale stream":
        state["streams"]["2"] = saved["json", 2][7]["streams"]["2"]
    with pytest.raises(AssertionError):
        check_continuation("json", folders["json"], state, n_ranks=2)


def test_a_document_of_many_sequences_goes_on_within(tmp_path):
    """3 MB are 46 sequences; documents before and after it are less than one."""
    texts, seq_len = ["before", "many bytes " * 280_000, "after", "it"], 2**16
    sequences = open_stream(source("json", write(tmp_path / "a.jsonl", texts)), seq_len=seq_len)
    expected = np.tile(flat(texts), 3)
    states = []
    for index, (sequence, (_, state)) in zip(range(120), sequences.read(0, 1, {}), strict=False):
        assert np.array_equal(sequence.inputs, expected[index * seq_len : (index + 1) * seq_len])
        states.append(json.loads(json.dumps(state)))
    for index in (0, 20, 45, 46, 47, 70, 95):
        sequence, _ = next(sequences.read(index + 1, 1, {0: states[index]}))
        assert np.array_equal(sequence.inputs, expected[(index + 1) * seq_len : (index + 2) * seq_len])


def test_streams_without_a_file_or_without_documents_are_refused(tmp_path):
    write(tmp_path / "0.txt", ["some text"])
    write(tmp_path / "1.txt", [""])
    named = source("text", tmp_path, text_sample_by="line")
    assert refusal(lambda: open_stream(named, 3)).startswith("training.streams = 3: the dataset has 2 files")
    loader = open_loader(open_stream(named, 2), local_batch_size=2, global_batch_size=2)
    for _ in range(2):
        assert refusal(loader.next) == "training.streams = 2: stream 1 has no documents"
    loader.close()
