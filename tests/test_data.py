"""Data does not depend on the layout: one order of packed sequences for any ranks, microsteps and resumes."""

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
import pytest
import torch
import torch.distributed as dist

from titanlite import build, config, data
from titanlite.data import packed
from titanlite.data.documents import Documents, Source, load_documents, load_stream
from titanlite.data.packed import HeldOutSequences, PackedSequences, is_held_out, token_files
from titanlite.data.streamed import StreamedSequences
from titanlite.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, build_tokenizer, encode_documents
from titanlite.loss import IGNORED
from titanlite.options import ConfigError

Sequence = tuple[list[int], list[int]]
"""Inputs and targets of one packed sequence."""
T = 16
BYTES = ByteTokenizer()
UNMARKED: Any = SimpleNamespace(bos=None, eos=-1)
"""For tokens that are just numbers."""


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


def whole(sequence: tuple[np.ndarray, np.ndarray]) -> Sequence:
    inputs, targets = sequence
    assert inputs.dtype == targets.dtype == np.int64
    return inputs.tolist(), targets.tolist()


def some_texts(count: int = 60) -> list[str]:
    """Different documents of 0 to 40 characters."""
    generator = np.random.RandomState(0)
    return ["".join(chr(97 + (number + i) % 26) for i in range(generator.randint(40))) for number in range(count)]


def flat(texts: list[str], tokenizer: Any = BYTES) -> list[int]:
    """Tokens of documents with their marks, end to end."""
    return [int(token) for tokens in encode_documents(tokenizer, texts) for token in tokens]


def built_in_texts() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


# Tokenizers ----------------------------------------------------------------------------------------------------------

TEXTS = ["Hello, world", "", "naïve — 東京 🎉", "line\nline\r\n\ttab\0", "\ud800 broken"]


def test_bytes_there_and_back():
    for text, tokens in zip(TEXTS, BYTES.encode(TEXTS), strict=True):
        assert tokens.dtype == np.uint32
        assert bytes(tokens.tolist()).decode("utf-8", "surrogatepass") == text
    assert [tokens.tolist() for tokens in encode_documents(BYTES, ["ab", ""])] == [[256, 97, 98, 257], [256, 257]]
    assert BYTES.vocab_size == 258
    assert isinstance(build_tokenizer(""), ByteTokenizer)


@pytest.fixture(scope="module")
def trained() -> str:
    """A tokenizer.json: byte-level BPE on some of the built-in text, whose own template begins a text with <s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<stop>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(built_in_texts()[:10], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer.to_str()


class Assets:
    """A folder with a tokenizer.json and perhaps a tokenizer_config.json."""

    def __init__(self, folder: Path, content: str):
        self.folder, self.file, self.settings = folder, folder / "tokenizer.json", folder / "tokenizer_config.json"
        self.file.write_text(content, encoding="utf-8")

    def open(self, **marks: Any) -> HuggingFaceTokenizer:
        if marks:
            self.settings.write_text(json.dumps(marks))
        return build_tokenizer(str(self.folder))


@pytest.fixture
def assets(tmp_path, trained) -> Assets:
    return Assets(tmp_path, trained)


def test_ids_are_those_of_tokenizers(assets):
    from tokenizers import Tokenizer

    tokenizer, theirs = assets.open(), Tokenizer.from_file(str(assets.file))
    texts = [*TEXTS[:-1], *built_in_texts()[10:20]]
    for text, tokens in zip(texts, tokenizer.encode(texts), strict=True):
        assert tokens.dtype == np.uint32
        assert tokens.tolist() == theirs.encode(text, add_special_tokens=False).ids
        assert theirs.decode(tokens.tolist(), skip_special_tokens=False) == text
    assert tokenizer.vocab_size == theirs.get_vocab_size() == 400
    assert flat(["Hello"], tokenizer) == [0, *tokenizer.encode(["Hello"])[0], 1]
    assert build_tokenizer(str(assets.file)).identity == tokenizer.identity


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ({}, (0, 1)),
        ({"eos_token": "<stop>"}, (0, 2)),
        ({"bos_token": "<stop>", "eos_token": "</s>"}, (2, 1)),
        ({"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": {"content": "<stop>"}}, (0, 2)),
        ({"bos_token": None, "eos_token": None}, (None, 1)),
    ],
    ids=["well-known names", "string", "both", "objects", "null"],
)
def test_marks(assets, marks, expected):
    plain = assets.open()
    tokenizer = assets.open(**marks)
    assert (tokenizer.bos, tokenizer.eos) == expected
    assert (tokenizer.identity == plain.identity) == (expected == (0, 1))
    begin = [] if expected[0] is None else [expected[0]]
    assert flat(["a"], tokenizer) == [*begin, *tokenizer.encode(["a"])[0], expected[1]]


def test_no_known_begin_mark_is_fine_and_no_known_end_mark_is_refused(assets):
    content = assets.file.read_text()
    assets.file.write_text(content.replace("<s>", "<go>"))
    assert assets.open().bos is None
    assets.file.write_text(content.replace("</s>", "<halt>"))
    line = refusal(assets.open)
    assert all(part in line for part in (str(assets.file), "<|end_of_text|>", str(assets.settings)))


def test_unreadable_tokenizers_are_refused(assets):
    missing = assets.folder / "nowhere"
    assert str(missing) in refusal(lambda: build_tokenizer(str(missing)))
    for settings in ("{", "[1]"):
        assets.settings.write_text(settings)
        assert str(assets.file) in refusal(assets.open)
    assets.settings.unlink()
    assets.file.write_text('{"version": "1.0", "model": {"type": "Nonsense"}}')
    assert str(assets.file) in refusal(assets.open)


@pytest.mark.parametrize("key", ["bos_token", "eos_token"])
def test_a_named_mark_that_the_vocabulary_lacks_is_refused(assets, key):
    line = refusal(lambda: assets.open(**{"bos_token": "<s>", "eos_token": "</s>", key: "<nope>"}))
    assert f'{assets.settings} names {key} "<nope>"' in line


def test_text_cannot_end_its_document(assets):
    tokenizer, text = assets.open(), "one</s><s>two<stop>"
    (tokens,) = tokenizer.encode([text])
    assert not {0, 1, 2} & set(tokens.tolist())
    assert tokenizer.tokenizer.decode(tokens.tolist(), skip_special_tokens=False) == text


def test_documents_are_neither_cut_nor_padded(assets):
    """A tokenizer.json may ask for either; that is meant for the inputs of a sentence encoder."""
    from tokenizers import Tokenizer

    texts = ["a long document, far longer than five tokens", "short"]
    expected = [tokens.tolist() for tokens in assets.open().encode(texts)]
    theirs = Tokenizer.from_file(str(assets.file))
    theirs.enable_truncation(max_length=5)
    theirs.enable_padding(pad_id=0, pad_token="<s>", length=7)
    theirs.save(str(assets.file))
    assert [len(encoding) for encoding in theirs.encode_batch(texts)] == [7, 7], "it does both"
    assert [tokens.tolist() for tokens in assets.open().encode(texts)] == expected


# Packing -------------------------------------------------------------------------------------------------------------


def check_packing(tokens: np.ndarray, seq_len: int) -> None:
    """Consecutive windows of the flat stream, targets shifted by one, ignored after an end mark and only there."""
    sequences = PackedSequences(tokens, seq_len=seq_len, tokenizer=BYTES, shuffle=False, seed=0)
    stream = tokens.tolist()
    assert sequences.n_sequences == (len(stream) - 1) // seq_len
    for index in range(sequences.n_sequences):
        inputs, targets = whole(sequences[index])
        places = range(index * seq_len, (index + 1) * seq_len)
        assert inputs == [stream[place] for place in places]
        assert targets == [IGNORED if stream[place] == BYTES.eos else stream[place + 1] for place in places]


def test_packing():
    tokens = np.array(flat(some_texts()), np.uint16)
    assert (tokens == BYTES.eos).sum() == 60
    for seq_len in (1, 7, T, len(tokens) - 1):
        check_packing(tokens, seq_len)


@pytest.mark.parametrize("broken", ["targets not shifted", "inputs one late", "end marks forgotten", "windows apart"])
def test_broken_packing_goes_red(monkeypatch, broken):
    real, get = packed.inputs_and_targets, PackedSequences.__getitem__
    if broken == "windows apart":
        monkeypatch.setattr(PackedSequences, "__getitem__", lambda self, index: get(self, index * 2))
    else:
        functions = {
            "targets not shifted": lambda tokens, tokenizer: (real(tokens, tokenizer)[0],) * 2,
            "inputs one late": lambda tokens, tokenizer: real(np.roll(tokens, -1), tokenizer),
            "end marks forgotten": lambda tokens, tokenizer: real(tokens, UNMARKED),
        }
        monkeypatch.setattr(packed, "inputs_and_targets", functions[broken])
    with pytest.raises(AssertionError):
        check_packing(np.array(flat(some_texts()), np.uint16), T)


def test_one_mark_for_begin_and_end(assets):
    """As GPT-2 has. What follows it as an end is ignored; what follows it as a begin is the text's first token."""
    tokenizer, texts = assets.open(bos_token="</s>", eos_token="</s>"), ["one", "another", "a third"]
    _, targets = packed.inputs_and_targets(np.array(flat(texts, tokenizer)), tokenizer)
    learned = [token for token in targets.tolist() if token != IGNORED]
    assert learned == [token for text in texts for token in [*tokenizer.encode([text])[0].tolist(), tokenizer.eos]]


@pytest.mark.parametrize("length", [T + 1, T + 2, 2 * T, 2 * T + 1, 10 * T + 5])
def test_every_token_is_an_input_once_an_epoch(length):
    """But the tail, of at most T tokens, at least one of which is a target."""
    sequences = PackedSequences(np.arange(length), seq_len=T, tokenizer=UNMARKED, shuffle=True, seed=3)
    for epoch in range(3):
        indices = range(epoch * sequences.n_sequences, (epoch + 1) * sequences.n_sequences)
        seen = Counter(token for index in indices for token in whole(sequences[index])[0])
        assert seen == Counter(range(sequences.n_sequences * T))
    assert 1 <= length - sequences.n_sequences * T <= T


@pytest.mark.parametrize("length", [0, 1, T])
def test_too_little_text_is_refused_with_numbers(length):
    line = refusal(lambda: PackedSequences(np.arange(length), seq_len=T, tokenizer=UNMARKED, shuffle=True, seed=0))
    assert f"training.seq_len = {T}" in line
    assert f"{length} tokens" in line


# Held-out documents --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.05, 0.1, 0.29, 1 / 3, 0.5, 0.9])
def test_held_out_share_is_exact_and_even(fraction):
    """Of the first n documents, n x fraction are held out, for every n."""
    held_out = np.cumsum([is_held_out(document, fraction) for document in range(5000)])
    assert (np.abs(held_out - fraction * np.arange(1, 5001)) < 1).all()
    assert held_out[-1] == pytest.approx(5000 * fraction, abs=1 if fraction == 1 / 3 else 0)


@pytest.mark.parametrize("length", [2, T, T + 1, T + 2, 7 * T + 3])
@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_validation_takes_every_target_once(length, n_ranks):
    sequences = HeldOutSequences(np.arange(1, length + 1), seq_len=T, tokenizer=UNMARKED)
    for size in (1, 2, 5):
        options = {"n_ranks": n_ranks, "local_batch_size": size, "steps": -1}
        batches = [list(data.validation_batches(sequences, rank=rank, **options)) for rank in range(n_ranks)]
        assert len({len(own) for own in batches}) == 1, "every rank must take as many batches"
        seen: Counter[int] = Counter()
        for tokens, targets in (batch for own in batches for batch in own):
            assert tokens.shape == targets.shape == (size, T)
            valid = targets != IGNORED
            assert (targets[valid] == tokens[valid] + 1).all()
            assert (tokens[~valid] == 0).all()
            seen.update(targets[valid].tolist())
        assert seen == Counter(range(2, length + 1))


def test_validation_ends_documents_and_stops_after_some_steps():
    texts = some_texts(20)
    tokens = np.array(flat(texts), np.uint16)
    sequences = HeldOutSequences(tokens, seq_len=T, tokenizer=BYTES)
    options = {"rank": 0, "n_ranks": 1, "local_batch_size": 2}
    batches = list(data.validation_batches(sequences, **options, steps=-1))
    assert len(batches) == -(-(len(tokens) - 1) // (2 * T))
    # Every token is a target but the first one of each document.
    assert sum(int((targets != IGNORED).sum()) for _, targets in batches) == len(tokens) - len(texts)
    first = list(data.validation_batches(sequences, **options, steps=2))
    assert torch.equal(torch.stack([torch.stack(b) for b in first]), torch.stack([torch.stack(b) for b in batches[:2]]))


# The files of tokens -------------------------------------------------------------------------------------------------


def in_memory(texts: list[str]) -> Documents:
    batches = [texts[i : i + 7] for i in range(0, len(texts), 7)]
    return Documents(hashlib.sha256("\0".join(texts).encode()).hexdigest(), lambda: iter(batches))


def make_files(
    documents: Documents, cache: Path, tokenizer: Any = BYTES, fraction: float = 0.25, builds: bool = True
) -> tuple[list[int], list[int], str]:
    train, held_out, content = token_files(
        documents, tokenizer, fraction=fraction, cache_folder=str(cache), builds=builds
    )
    return train.tolist(), held_out.tolist(), content


def check_split(made: tuple[list[int], list[int], str], texts: list[str], every: int = 4, **others: Any) -> None:
    """Every so manieth document is held out, and it alone; a document is whole."""
    assert made[1] == flat(texts[every - 1 :: every], **others)
    assert made[0] == flat([text for number, text in enumerate(texts, 1) if number % every], **others)


def test_token_files_are_made_once(tmp_path):
    documents = in_memory(some_texts())
    made = make_files(documents, tmp_path)
    check_split(made, some_texts())
    asked_again = Documents(documents.fingerprint, lambda: pytest.fail("tokenises again"))
    assert make_files(asked_again, tmp_path) == made
    options = {"fraction": 0.25, "cache_folder": str(tmp_path), "builds": True}
    assert all(isinstance(tokens, np.memmap) for tokens in token_files(documents, BYTES, **options)[:2])
    assert len(list(tmp_path.iterdir())) == 1


def test_token_files_are_made_anew_for_another_text_tokenizer_or_share(tmp_path, assets):
    texts, cache, bpe = some_texts(), tmp_path / "cache", assets.open()
    cases = [(texts, BYTES, 4), ([*texts[:-2], "other", "x"], BYTES, 4), (texts, bpe, 4), (texts, BYTES, 2)]
    made = [make_files(in_memory(case), cache, tokenizer, 1 / every) for case, tokenizer, every in cases]
    for found, (case, tokenizer, every) in zip(made, cases, strict=True):
        check_split(found, case, every, tokenizer=tokenizer)
    assert len({content for _, _, content in made}) == len(list(cache.iterdir())) == 4


def test_equal_tokens_have_equal_hashes_wherever_they_came_from(tmp_path):
    contents = [make_files(Documents(name, lambda: iter([some_texts()])), tmp_path)[2] for name in ("here", "there")]
    assert contents[0] == contents[1]


class ManyTokens(ByteTokenizer):
    """Numbers that two bytes cannot hold."""

    vocab_size, identity = 70_000, "many"

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return [tokens + 65_500 for tokens in super().encode(texts)]


@pytest.mark.parametrize(("tokenizer", "size"), [(BYTES, 2), (ManyTokens(), 4)], ids=["bytes", "many"])
def test_large_vocabularies_take_four_bytes(tmp_path, tokenizer, size):
    assert make_files(in_memory(["hello"]), tmp_path, tokenizer)[0] == flat(["hello"], tokenizer)
    (file,) = tmp_path.glob("*/train.bin")
    assert file.stat().st_size == size * len("<hello>")


def test_half_made_files_are_never_used(tmp_path, monkeypatch):
    """A run is killed while it tokenises, at once or before the folder has its name; the next one starts anew."""
    documents, kill = in_memory(some_texts()), True

    def batches() -> Iterator[list[str]]:
        for number, texts in enumerate(documents.batches()):
            if kill and number == 3:
                raise RuntimeError("a broken document")
            yield texts

    unreliable = Documents(documents.fingerprint, batches)
    for is_removed in (True, False):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a broken document"):
            if not is_removed:
                patch.setattr(packed.shutil, "rmtree", lambda *arguments, **options: None)  # killed: nothing cleans up
            make_files(unreliable, tmp_path)
        assert len(list(tmp_path.iterdir())) == (0 if is_removed else 1)
    kill = False
    check_split(make_files(unreliable, tmp_path), some_texts())


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

    never = Documents(documents.fingerprint, lambda: pytest.fail("tokenises too"))
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(make_files, never, tmp_path, builds=False)
        building = pool.submit(make_files, Documents(documents.fingerprint, batches), tmp_path)
        assert not waiting.done()
        may_build.set()
        assert waiting.result(10) == building.result(10)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    line = refusal(lambda: make_files(in_memory(["a"]), tmp_path / "file" / "cache"))
    assert line.startswith(f'training.cache_folder = "{tmp_path}/file/cache": cannot be written: ')


# Order over ranks ----------------------------------------------------------------------------------------------------


def make_packed(n_sequences: int = 10, seed: int = 42, shuffle: bool = True) -> PackedSequences:
    """Sequences whose tokens tell their place in the flat stream."""
    tokens = np.arange(n_sequences * T + 1)
    return PackedSequences(tokens, seq_len=T, tokenizer=UNMARKED, shuffle=shuffle, seed=seed)


def places(sequences: PackedSequences, indices: range) -> list[int]:
    return [int(sequences[index][0][0]) // T for index in indices]


def test_an_epochs_order_is_a_permutation():
    sequences = make_packed(50)
    epochs = [places(sequences, range(50 * epoch, 50 * (epoch + 1))) for epoch in range(4)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, range(50)]}) == 5
    assert places(make_packed(50, seed=43), range(50)) not in epochs
    assert places(make_packed(50, shuffle=False), range(100)) == [*range(50), *range(50)]
    assert places(sequences, range(199, -1, -1)) == [place for epoch in epochs for place in epoch][::-1], "at any time"


def test_the_order_never_changes():
    """Numbers of an earlier version: another order would send a resumed run over other data, unnoticed."""
    epochs = [1, 8, 5, 3, 7, 9, 4, 0, 6, 2], [9, 5, 8, 7, 6, 4, 0, 3, 1, 2]
    assert places(make_packed(), range(20)) == [*epochs[0], *epochs[1]]


def open_loader(sequences: Any, **others: Any) -> data.Loader:
    options = {"rank": 0, "n_ranks": 1, "local_batch_size": 1, "global_batch_size": 4, "pin": False}
    return data.Loader(sequences, **options | others)


def sequences_of(batch: data.Batch, local_batch_size: int) -> list[Sequence]:
    for tokens, targets in batch:
        assert tokens.shape == targets.shape == (local_batch_size, T)
        assert tokens.dtype == targets.dtype == torch.int64
    return [pair for tokens, targets in batch for pair in zip(tokens.tolist(), targets.tolist(), strict=True)]


def consume(
    make: Callable[[], data.Sequences],
    *,
    n_ranks: int,
    global_batch_size: int,
    steps: int,
    local_batch_size: int = 1,
    state: dict[str, Any] | None = None,
) -> tuple[list[list[Sequence]], list[dict[str, Any]]]:
    """What all ranks train on in some steps, each step's sequences in their global order, and the ranks' states (not of
    streams: those are gathered, which takes a pool of ranks)."""
    options = {"local_batch_size": local_batch_size, "global_batch_size": global_batch_size, "state": state}
    loaders = [open_loader(make(), rank=rank, n_ranks=n_ranks, **options) for rank in range(n_ranks)]
    try:
        consumed = []
        for _ in range(steps):
            parts = [sequences_of(loader.next(), local_batch_size) for loader in loaders]
            assert {len(part) for part in parts} == {global_batch_size // n_ranks}
            consumed.append([parts[k % n_ranks][k // n_ranks] for k in range(global_batch_size)])
        states = [] if loaders[0]._streams else [json.loads(json.dumps(loader.state())) for loader in loaders]
        return consumed, states
    finally:
        with ThreadPoolExecutor(n_ranks) as pool:
            list(pool.map(data.Loader.close, loaders))


def in_steps(sequences: Any, global_batch_size: int, first: int, steps: int) -> list[list[Sequence]]:
    starts = range(first, first + steps * global_batch_size, global_batch_size)
    return [[whole(sequences[start + i]) for i in range(global_batch_size)] for start in starts]


def check_order_over_ranks() -> None:
    """12 sequences a step, 5 steps: 6 epochs of 10."""
    expected = in_steps(make_packed(), 12, 0, 5)
    for n_ranks in (1, 2, 4):
        for size in (1, 3, 12 // n_ranks):
            options = {"n_ranks": n_ranks, "global_batch_size": 12, "local_batch_size": size}
            assert consume(make_packed, **options, steps=5)[0] == expected


def test_order_does_not_depend_on_the_ranks():
    check_order_over_ranks()


@pytest.mark.parametrize("broken", ["rank in the index", "rank in the seed", "neighbours instead of strides"])
def test_an_order_that_depends_on_the_ranks_goes_red(monkeypatch, broken):
    real = PackedSequences.read

    def read(self: PackedSequences, first: int, stride: int, streams: dict[int, Any]) -> Any:
        if broken == "rank in the index":
            return real(self, first + first, stride, streams)
        if broken == "rank in the seed":
            self.seed += first
            return real(self, first, stride, streams)
        return real(self, first * 3, 1, streams)

    monkeypatch.setattr(PackedSequences, "read", read)
    with pytest.raises(AssertionError):
        check_order_over_ranks()


def check_resume(steps: int, ranks_before: int, batch_before: int, ranks_after: int, batch_after: int) -> None:
    before, states = consume(make_packed, n_ranks=ranks_before, global_batch_size=batch_before, steps=steps)
    assert all(state == {"next_sequence": steps * batch_before, "streams": {}} for state in states)
    after, _ = consume(make_packed, n_ranks=ranks_after, global_batch_size=batch_after, steps=3, state=states[0])
    (expected,) = in_steps(make_packed(), steps * batch_before + 3 * batch_after, 0, 1)
    assert [sequence for step in before + after for sequence in step] == expected


@pytest.mark.parametrize(
    "ranks_and_batches",
    [(1, 4, 2, 4), (2, 4, 1, 4), (2, 4, 4, 4), (4, 4, 2, 4), (4, 8, 1, 8), (2, 6, 4, 8), (4, 4, 3, 6), (1, 5, 4, 4)],
)
def test_resume_at_other_ranks_goes_on_in_the_same_order(ranks_and_batches):
    for steps in (0, 1, 3, 6):
        check_resume(steps, *ranks_and_batches)


def test_a_resume_one_sequence_off_goes_red(monkeypatch):
    real = data.Loader.state
    monkeypatch.setattr(
        data.Loader, "state", lambda self: {**real(self), "next_sequence": real(self)["next_sequence"] + 1}
    )
    with pytest.raises(AssertionError):
        check_resume(3, 2, 4, 4, 4)


# Loader --------------------------------------------------------------------------------------------------------------


class Counted:
    """Endless sequences that count how many were read; the one with number `fails_at` cannot be."""

    def __init__(self, fails_at: int = -1):
        self.count, self.fails_at = 0, fails_at

    def read(self, first: int, stride: int, streams: dict[int, Any]) -> Iterator[Any]:
        while True:
            if self.count == self.fails_at:
                raise OSError("the disk is gone")
            self.count += 1
            yield (np.full(T, first), np.full(T, first)), None
            first += stride


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "waited 10 seconds"
        time.sleep(0.005)


def test_batches_are_made_ahead_and_not_without_end():
    sequences = Counted()
    loader = open_loader(sequences, ahead=3)
    # Three steps wait to be asked for, and the next one waits for its place.
    wait_until(lambda: sequences.count == 4 * 4)
    time.sleep(0.05)
    assert sequences.count == 4 * 4
    assert loader.state()["next_sequence"] == 0, "what was made ahead is not trained on yet"
    loader.next()
    wait_until(lambda: sequences.count == 5 * 4)
    assert loader.state()["next_sequence"] == 4
    loader.close()


@pytest.mark.parametrize("steps", [0, 1])
def test_close_ends_the_thread(steps):
    loader = open_loader(Counted())
    for _ in range(steps):
        loader.next()
    assert loader._thread in threading.enumerate()
    loader.close()
    assert loader._thread not in threading.enumerate()
    loader.close()


def test_an_error_is_raised_where_the_batch_is_waited_for_each_time():
    loader = open_loader(Counted(fails_at=6), ahead=1)
    loader.next()
    for _ in range(3):
        with pytest.raises(OSError, match="the disk is gone"):
            loader.next()
    assert loader.state()["next_sequence"] == 4
    loader.close()
    assert not loader._thread.is_alive()


# Sources -------------------------------------------------------------------------------------------------------------


def source(dataset: str, path: Any, text_key: str = "text", text_sample_by: str = "document") -> Source:
    return Source(dataset, str(path), "", "train", text_key, text_sample_by)


def texts_of(*arguments: Any, **others: Any) -> list[str]:
    return [text for batch in load_documents(source(*arguments, **others)).batches() for text in batch]


def fingerprint(*arguments: Any, **others: Any) -> str:
    return load_documents(source(*arguments, **others)).fingerprint


def open_stream(named: Source, n_streams: int = 1, seq_len: int = T) -> StreamedSequences:
    opened, column, _ = load_stream(named)
    return StreamedSequences(opened, column, named, BYTES, seq_len=seq_len, n_streams=n_streams)


def refusals(*arguments: Any, **others: Any) -> Iterator[str]:
    """How the same files are refused whole and as a stream, which may be when they are opened or when they are read."""
    yield refusal(lambda: texts_of(*arguments, **others))
    yield refusal(lambda: [next(open_stream(source(*arguments, **others)).read(0, 1, {})) for _ in range(9)])


def write_jsonl(file: Path, texts: list[Any], key: str = "text") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({key: text, "id": i}) + "\n" for i, text in enumerate(texts)))
    return file


def write_parquet(file: Path, texts: list[Any]) -> Path:
    import pyarrow
    import pyarrow.parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"text": pyarrow.array(texts, pyarrow.string()), "id": list(range(len(texts)))})
    pyarrow.parquet.write_table(table, file, row_group_size=2)
    return file


@pytest.mark.parametrize(
    ("sample_by", "expected"),
    [
        ("document", ["one\ntwo\n\nthree\n", "four"]),
        ("paragraph", ["one\ntwo", "three\n", "four"]),
        ("line", ["one", "two", "", "three", "four"]),
    ],
)
def test_text_files(tmp_path, sample_by, expected):
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n")
    (tmp_path / "b.txt").write_text("four")
    assert texts_of("text", tmp_path, text_sample_by=sample_by) == expected


def test_json_and_parquet_files(tmp_path):
    write_jsonl(tmp_path / "lines.jsonl", ["one", "two\nlines"])
    (tmp_path / "list.json").write_text(json.dumps([{"text": "three", "id": 0}]))
    write_parquet(tmp_path / "rows.parquet", [f"row {i}" for i in range(5)])
    assert texts_of("json", tmp_path / "lines.jsonl") == ["one", "two\nlines"]
    assert texts_of("json", tmp_path) == ["one", "two\nlines", "three"]
    assert texts_of("parquet", tmp_path) == [f"row {i}" for i in range(5)]
    write_jsonl(tmp_path / "other.jsonl", ["one"], key="body")
    assert texts_of("json", tmp_path / "other.jsonl", text_key="body") == ["one"]


def test_folders_and_globs_are_read_in_sorted_order(tmp_path, monkeypatch):
    for name in ("b/2", "b/10", "a/z", "c", "run[1]"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.txt").write_text(name)
    (tmp_path / "a" / "note.md").write_text("not one of them")
    assert texts_of("text", tmp_path) == ["a/z", "b/10", "b/2", "c", "run[1]"]
    assert texts_of("text", tmp_path / "b" / "*.txt") == ["b/10", "b/2"]
    assert texts_of("text", tmp_path / "[ab]" / "?.txt") == ["a/z", "b/2"]
    assert texts_of("text", f"{tmp_path}/**/z.txt") == ["a/z"]
    assert texts_of("text", tmp_path / "run[1].txt") == ["run[1]"], "a file's name is no pattern"
    monkeypatch.chdir(tmp_path)
    assert texts_of("text", "b/1*.txt") == ["b/10"]
    assert texts_of("text", "c.txt") == ["c"]
    monkeypatch.setenv("HOME", str(tmp_path / "b"))
    assert texts_of("text", "~/2.txt") == ["b/2"]


def test_missing_files_are_refused(tmp_path):
    wanted = [("nowhere", "text", "no such file"), ("*.txt", "text", "no such file"), (".", "parquet", ".parquet")]
    for path, dataset, reason in wanted:
        for line in refusals(dataset, tmp_path / path):
            assert line.startswith(f'training.dataset_path = "{tmp_path / path}": ')
            assert reason in line


def test_a_missing_column_is_refused_with_those_that_are_there(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", ["one"], key="body")
    for line in refusals("json", file):
        assert line == (
            f'training.dataset_path = "{file}": no column "text"; set training.dataset_text_key to one of body, id'
        )


@pytest.mark.parametrize("kind", ["json", "parquet"])
@pytest.mark.parametrize(("text_key", "what"), [("id", "holds a int where"), ("text", "holds no text (null) where")])
def test_a_column_that_is_no_text_is_refused(tmp_path, kind, text_key, what):
    write = {"json": write_jsonl, "parquet": write_parquet}[kind]
    for texts in (["one", "two", None], [None]):
        file = write(tmp_path / f"a.{kind}", texts)
        for line in refusals(kind, file, text_key=text_key):
            assert line.startswith(f'training.dataset_path = "{file}": column "{text_key}" {what}')


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(("dataset", "reason"), [("json", "JSON"), ("parquet", "Parquet"), ("text", "utf-8")])
def test_broken_files_are_refused_with_the_reason(tmp_path, dataset, reason, is_late):
    if is_late:
        write_jsonl(tmp_path / "0.json", ["good"])
        write_parquet(tmp_path / "0.parquet", ["good"])
        (tmp_path / "0.txt").write_text("good")
    (tmp_path / f"1.{'txt' if dataset == 'text' else dataset}").write_bytes(b"{\xff\xfe")
    for line in refusals(dataset, tmp_path):
        assert line.startswith(f'training.dataset_path = "{tmp_path}": cannot be {"read" if is_late else "loaded"}: ')
        assert reason in line


@pytest.mark.parametrize(("dataset", "path"), [("hub", "someone/something"), ("c4", "")])
def test_the_hub_without_a_network_is_one_clear_line(dataset, path):
    began = time.monotonic()
    for line in refusals(dataset, path):
        named = f'training.dataset_path = "{path}"' if path else f'training.dataset = "{dataset}"'
        assert line.startswith(f"{named}: cannot be loaded: ")
        assert "without a network, download its files elsewhere" in line
    assert time.monotonic() - began < 5


def test_another_text_is_another_fingerprint(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one\ntwo")
    found = [fingerprint("text", file), fingerprint("text", file, text_sample_by="line")]
    assert fingerprint("text", file) == found[0]
    (tmp_path / "b.txt").write_text("three")
    found.append(fingerprint("text", tmp_path))
    file.write_text("another")
    found.append(fingerprint("text", file))
    jsonl = write_jsonl(tmp_path / "a.jsonl", ["one"])
    found += [fingerprint("json", jsonl), fingerprint("json", jsonl, text_key="id")]
    assert len(set(found)) == 6


@pytest.mark.parametrize("size", [10, 2**16 + 1, 2**20])
def test_another_text_with_the_same_time_and_size_is_noticed(tmp_path, size):
    """Unpacked archives and image layers have files of one fixed time."""
    file, found = tmp_path / "a.txt", set()
    changes = [None, *np.linspace(0, size - 1, 10, dtype=int).tolist()]
    for change in changes:
        content = bytearray(b"a" * size)
        if change is not None:
            content[change] = ord("b")
        file.write_bytes(content)
        os.utime(file, (1_000_000_000, 1_000_000_000))
        assert texts_of("text", file) == [content.decode()]
        found.add((fingerprint("text", file), load_stream(source("text", file))[2]))
    assert len({whole for whole, _ in found}) == len({streamed for _, streamed in found}) == len(changes)


# The whole way from options to sequences -----------------------------------------------------------------------------


def open_sequences(tmp_path: Path, **others: Any) -> tuple[data.Sequences, HeldOutSequences | None, str]:
    options: dict[str, Any] = {
        "tokenizer": BYTES,
        "dataset": "pydoc_topics",
        "dataset_path": "",
        "dataset_config": "",
        "dataset_split": "train",
        "text_key": "text",
        "text_sample_by": "document",
        "streaming": False,
        "streams": 1,
        "shuffle": False,
        "seed": 0,
        "seq_len": T,
        "cache_folder": str(tmp_path / "cache"),
        "validation_path": "",
        "validation_split": "",
        "validation_fraction": 0.05,
        "validation_enable": True,
        "builds_cache": True,
    }
    return data.open_sequences(**options | others)


def test_built_in_text_is_packed_and_split(tmp_path):
    train, held_out, _ = open_sequences(tmp_path)
    texts = built_in_texts()
    for_validation = [number for number in range(len(texts)) if (number + 1) * 5 // 100 > number * 5 // 100]
    assert len(for_validation) == len(texts) // 20
    trained_on = [text for number, text in enumerate(texts) if number not in for_validation]
    assert train.tokens.tolist() == flat(trained_on)
    assert held_out.tokens.tolist() == flat([texts[number] for number in for_validation])
    without = open_sequences(tmp_path, validation_enable=False)
    assert without[1] is None
    assert without[0].tokens.tolist() == train.tokens.tolist(), "validation must not change the training data"


@pytest.mark.parametrize("streaming", [False, True])
def test_files_of_their_own_to_validate_on(tmp_path, streaming):
    file = write_jsonl(tmp_path / "train.jsonl", some_texts())
    own = write_jsonl(tmp_path / "own.jsonl", ["validate", "on this"])
    options = {"dataset": "json", "dataset_path": str(file), "streaming": streaming}
    train, held_out, _ = open_sequences(tmp_path, **options, validation_path=str(own))
    assert isinstance(train, StreamedSequences if streaming else PackedSequences)
    assert held_out.tokens.tolist() == flat(["validate", "on this"])
    sequence, _ = next(train.read(0, 1, {}))
    assert whole(sequence)[0] == flat(some_texts())[:T]
    for path, reason in ((tmp_path / "nowhere", "no such file"), (write_jsonl(tmp_path / "none", [None]), "null")):
        line = refusal(lambda path=path: open_sequences(tmp_path, **options, validation_path=str(path)))
        assert line.startswith(f'validation.dataset_path = "{path}": ')
        assert reason in line


def test_a_share_that_holds_out_nothing_is_refused(tmp_path):
    line = refusal(lambda: open_sequences(tmp_path, validation_fraction=1e-6))
    assert line.startswith("validation.fraction = 1e-06: holds out no document")


def test_identity_names_what_global_indices_mean(tmp_path):
    changes: list[dict[str, Any]] = [{}, {"seed": 1}, {"seq_len": 32}, {"shuffle": False}, {"validation_fraction": 0.1}]
    base: dict[str, Any] = {"shuffle": True}
    assert len({open_sequences(tmp_path, **base | change)[2] for change in changes}) == len(changes)
    not_that = [{}, {"validation_enable": False}, {"cache_folder": str(tmp_path / "elsewhere")}]
    assert len({open_sequences(tmp_path, **base | change)[2] for change in not_that}) == 1


def test_identity_names_what_a_streams_sequences_are(tmp_path, assets):
    folder = tmp_path / "files"
    for number in range(2):
        write_jsonl(folder / f"{number}.jsonl", some_texts())
        (folder / f"{number}.txt").write_text("one\ntwo")

    def identity(**others: Any) -> str:
        options = {"dataset": "json", "dataset_path": str(folder), "streaming": True, "streams": 2}
        return open_sequences(tmp_path, validation_enable=False, **options | others)[2]

    changes = [{}, {"seq_len": 32}, {"streams": 1}, {"text_key": "id"}, {"tokenizer": assets.open()}]
    changes += [{"dataset": "text"}, {"dataset": "text", "text_sample_by": "line"}]
    found = [identity(**change) for change in changes]
    assert identity() == found[0]
    shutil.copy(folder / "0.jsonl", folder / "2.jsonl")
    found.append(identity())
    write_jsonl(folder / "2.jsonl", ["something else"])
    found.append(identity())
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_copy_of_the_files_is_the_same_data(tmp_path, streaming):
    """Each host may hold its own copy, and files may move: what a run was saved with is what it goes on with."""
    identities = set()
    for number, folder in enumerate(("a", "b")):
        file = write_jsonl(tmp_path / folder / "text.jsonl", some_texts())
        os.utime(file, (1e9 + number, 1e9 + number))
        options = {"dataset": "json", "dataset_path": str(file.parent), "streaming": streaming}
        identities.add(open_sequences(tmp_path, **options, validation_enable=not streaming)[2])
    assert len(identities) == 1


def build_in_rank(folder: Path, paths: list[str], arguments: list[str]) -> str:
    """The identity of a rank's data, or how it is refused."""
    launch = config.Launch.from_environment(n_devices=0)
    job = config.load(
        [
            str(folder / "job.toml"),
            "--training.dataset=json",
            f"--training.dataset_path={folder / paths[launch.rank]}",
            f"--training.cache_folder={folder / 'cache' / str(launch.rank)}",
            *arguments,
        ]
    )
    try:
        return build.build_data(config.check(job, launch), builds_cache=True)[2]
    except ConfigError as error:
        return "\n".join(error.problems)


STREAMING = ["--training.streaming=true", "--training.shuffle=false", "--training.streams=2"]


@pytest.mark.parametrize("arguments", [[], STREAMING], ids=["whole", "streamed"])
def test_ranks_that_read_different_data_are_refused(ranks, tmp_path, arguments):
    (tmp_path / "job.toml").write_text("[training]\nseq_len = 16\n[validation]\nenable = false\n")
    for folder in ("a", "same"):
        for number in range(2):
            write_jsonl(tmp_path / folder / f"{number}.jsonl", some_texts())
    for number in range(2):
        write_jsonl(tmp_path / "other" / f"{number}.jsonl", [*some_texts()[1:], "x"])
    of_one, of_other = ranks(2).run(build_in_rank, folder=tmp_path, paths=["a", "same"], arguments=arguments)
    assert of_one == of_other
    assert "seq_len 16" in of_one
    for line in ranks(2).run(build_in_rank, folder=tmp_path, paths=["a", "other"], arguments=arguments):
        assert line == "training.dataset_path: rank 1 reads other data than rank 0; give all hosts the same"


# Streaming -----------------------------------------------------------------------------------------------------------

FILES, STEPS, BATCH = 8, 24, 4
STREAMS = {"json": 8, "parquet": 4}


def file_texts(kind: str, number: int) -> list[str]:
    """3 to 6 documents of up to 40 characters: an epoch of a stream has a dozen packed sequences."""
    generator = np.random.RandomState(number)
    return [f"{kind}{number}/{i} " + "x" * generator.randint(32) for i in range(generator.randint(3, 7))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Eight small files of each kind; those of Parquet have row groups of two documents."""
    folder = tmp_path_factory.mktemp("streams")
    for number in range(FILES):
        write_jsonl(folder / "json" / f"{number}.jsonl", file_texts("json", number))
        write_parquet(folder / "parquet" / f"{number}.parquet", file_texts("parquet", number))
    return {kind: folder / kind for kind in STREAMS}


class Expected:
    """The sequences of the streams, packed by hand: stream n has the n-th share of the files, over and over."""

    def __init__(self, kind: str):
        share = FILES // STREAMS[kind]
        starts = range(0, FILES, share)
        self.streams = [
            flat([text for file in range(start, start + share) for text in file_texts(kind, file)]) for start in starts
        ]

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        window, number = divmod(index, len(self.streams))
        tokens = np.array(self.streams[number])
        inputs, targets = (tokens[(np.arange(window * T, (window + 1) * T) + shift) % len(tokens)] for shift in (0, 1))
        return inputs, np.where(inputs == BYTES.eos, IGNORED, targets)


def make_streamed(kind: str, folder: Path) -> Callable[[], StreamedSequences]:
    return lambda: open_stream(source(kind, folder), STREAMS[kind])


@pytest.mark.parametrize("kind", STREAMS)
def test_streams_do_not_depend_on_the_ranks(folders, kind):
    expected = in_steps(Expected(kind), 8, 0, 40)
    assert max(len(tokens) for tokens in Expected(kind).streams) < 40 * 8 * T / STREAMS[kind] / 2, "two epochs"
    for n_ranks, size in ((1, 8), (2, 1), (2, 4), (4, 2)):
        options = {"n_ranks": n_ranks, "global_batch_size": 8, "local_batch_size": size}
        assert consume(make_streamed(kind, folders[kind]), **options, steps=40)[0] == expected


def states_in_ranks(
    kind: str, folder: Path, steps: int, state: dict[str, Any] | None = None, batch: int = BATCH
) -> list[dict[str, Any]]:
    """The state after each step, through JSON. On every rank of a pool: where a run stands is gathered from all."""
    options = {"rank": dist.get_rank(), "n_ranks": dist.get_world_size(), "global_batch_size": batch, "state": state}
    loader = open_loader(make_streamed(kind, folder)(), **options)
    states = []
    for _ in range(steps):
        loader.next()
        states.append(json.loads(json.dumps(loader.state())))
    loader.close()
    return states


def same_on_all_ranks(states: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    assert all(found == states[0] for found in states)
    return states[0]


@pytest.fixture(scope="module")
def saved(ranks, folders) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """States after 1 .. STEPS steps, of two and of four ranks."""
    return {
        (kind, n_ranks): same_on_all_ranks(ranks(n_ranks).run(states_in_ranks, kind=kind, folder=folder, steps=STEPS))
        for kind, folder in folders.items()
        for n_ranks in (2, 4)
    }


def check_continuation(kind: str, folder: Path, state: dict[str, Any], n_ranks: int, batch: int = BATCH) -> None:
    """What follows a state is what follows without a stop."""
    options = {"n_ranks": n_ranks, "global_batch_size": batch, "state": state}
    consumed, _ = consume(make_streamed(kind, folder), **options, steps=8 // batch + 1)
    assert consumed == in_steps(Expected(kind), batch, state["next_sequence"], 8 // batch + 1)


@pytest.mark.parametrize("kind", STREAMS)
def test_streams_go_on_exactly_after_every_step(saved, folders, kind):
    assert saved[kind, 2] == saved[kind, 4]
    assert min(len(tokens) for tokens in Expected(kind).streams) < STEPS * BATCH * T / STREAMS[kind], "past an end"
    for step, state in enumerate(saved[kind, 2], 1):
        assert state["next_sequence"] == step * BATCH
        check_continuation(kind, folders[kind], state, n_ranks=(1, 2, 4)[step % 3])
    for n_ranks, batch in ((1, 4), (2, 2), (4, 8), (1, 6)):
        check_continuation(kind, folders[kind], saved[kind, 2][10], n_ranks, batch)


@pytest.mark.parametrize("kind", STREAMS)
def test_a_resumed_run_saves_states_that_are_as_good(ranks, saved, folders, kind):
    """Ranks that resumed at another number know old states of streams that are no longer theirs."""
    options = {"kind": kind, "folder": folders[kind]}
    after_six = same_on_all_ranks(ranks(2).run(states_in_ranks, **options, steps=3, batch=2))[-1]
    assert after_six["next_sequence"] == 6, "no multiple of four: rank 0 of four goes on with stream 2"
    for n_ranks, state in ((4, saved[kind, 2][6]), (2, saved[kind, 4][6]), (4, after_six)):
        for resumed in same_on_all_ranks(ranks(n_ranks).run(states_in_ranks, **options, steps=5, state=state)):
            check_continuation(kind, folders[kind], resumed, n_ranks=2)


def test_a_state_before_every_stream_was_read(saved, folders):
    """Eight streams, four sequences a step: after the first step, half of the streams have not begun."""
    state = saved["json", 4][0]
    assert sorted(state["streams"]) == ["0", "1", "2", "3"]
    assert all(set(stream) == {"position", "used"} for stream in state["streams"].values())
    check_continuation("json", folders["json"], state, n_ranks=2)


@pytest.mark.parametrize("broken", ["one token off", "one document off", "one sequence off", "a stale stream"])
def test_a_state_that_is_off_goes_red(monkeypatch, saved, folders, broken):
    real, state = StreamedSequences._documents, json.loads(json.dumps(saved["json", 2][9]))

    def one_token_off(*arguments: Any) -> Any:
        return ((before, tokens, used + 1 if used else used) for before, tokens, used in real(*arguments))

    def one_document_off(*arguments: Any) -> Any:
        found = real(*arguments)
        next(found)
        return found

    if broken == "one sequence off":
        state["next_sequence"] += 1
    elif broken == "a stale stream":
        state["streams"]["2"] = saved["json", 2][7]["streams"]["2"]
    else:
        documents = one_token_off if broken == "one token off" else one_document_off
        monkeypatch.setattr(StreamedSequences, "_documents", documents)
    with pytest.raises(AssertionError):
        check_continuation("json", folders["json"], state, n_ranks=2)


def test_a_document_of_many_sequences_goes_on_within(tmp_path):
    """3 MB are 46 sequences; documents before and after it are less than one."""
    texts = ["before", "many bytes " * 280_000, "after", "it"]
    seq_len, named = 2**16, source("json", write_jsonl(tmp_path / "a.jsonl", texts))
    expected = np.tile(flat(texts), 3)
    found = list(zip(range(120), open_stream(named, seq_len=seq_len).read(0, 1, {}), strict=False))
    for index, ((inputs, _), _) in found:
        assert np.array_equal(inputs, expected[index * seq_len : (index + 1) * seq_len])
    for index in (0, 20, 45, 46, 47, 70, 95):
        state = json.loads(json.dumps(found[index][1][1][1]))
        (inputs, _), _ = next(open_stream(named, seq_len=seq_len).read(index + 1, 1, {0: state}))
        assert np.array_equal(inputs, found[index + 1][1][0][0])


def test_more_streams_than_files_are_refused(folders):
    line = refusal(lambda: open_stream(source("json", folders["json"]), n_streams=9))
    assert line.startswith("training.streams = 9: the dataset has 8 files")


def test_a_stream_without_documents_is_refused(tmp_path):
    (tmp_path / "0.txt").write_text("some text")
    (tmp_path / "1.txt").write_text("")
    sequences = open_stream(source("text", tmp_path, text_sample_by="line"), n_streams=2)
    loader = open_loader(sequences, local_batch_size=2, global_batch_size=2)
    for _ in range(2):
        assert "stream 1 has no documents" in refusal(loader.next)
    loader.close()
