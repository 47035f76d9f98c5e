"""Data does not depend on the layout: one order of packed sequences for any ranks, microsteps and resumes."""

import hashlib
import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from titanlite import data
from titanlite.config import ConfigError
from titanlite.data import packed
from titanlite.data.documents import Documents, load_documents, load_stream
from titanlite.data.packed import HeldOutSequences, PackedSequences, is_held_out, token_files
from titanlite.data.streamed import StreamedSequences
from titanlite.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, build_tokenizer, encode_documents
from titanlite.loss import IGNORED

Sequence = tuple[list[int], list[int]]
"""Inputs and targets of one packed sequence."""
T = 16
BOS, EOS = ByteTokenizer.bos, ByteTokenizer.eos


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


def in_memory(texts: list[str]) -> Documents:
    batches = [texts[i : i + 7] for i in range(0, len(texts), 7)]
    return Documents(hashlib.sha256("\0".join(texts).encode()).hexdigest(), lambda: iter(batches))


def flat(texts: list[str], tokenizer: Any = None) -> list[int]:
    """Tokens of documents with their marks, end to end."""
    return [int(token) for tokens in encode_documents(tokenizer or ByteTokenizer(), texts) for token in tokens]


def split_documents(tokens: np.ndarray) -> list[str]:
    """The texts in a flat array of bytes and marks."""
    *ended, rest = "".join(chr(token) for token in tokens).split(chr(EOS))
    assert rest == ""
    assert all(text[0] == chr(BOS) for text in ended)
    return [text[1:] for text in ended]


# Tokenizers ----------------------------------------------------------------------------------------------------------

TEXTS = ["Hello, world", "", "naïve — 東京 🎉", "line\nline\r\n\ttab\0", "\ud800 broken"]


def test_bytes_there_and_back():
    tokenizer = ByteTokenizer()
    for text, tokens in zip(TEXTS, tokenizer.encode(TEXTS), strict=True):
        assert tokens.dtype == np.uint32
        assert bytes(tokens.tolist()).decode("utf-8", "surrogatepass") == text
    marked = encode_documents(tokenizer, ["ab", ""])
    assert [tokens.tolist() for tokens in marked] == [[256, 97, 98, 257], [256, 257]]
    assert tokenizer.vocab_size == 258


@pytest.fixture(scope="module")
def trained() -> str:
    """A tokenizer.json: byte-level BPE on some of the built-in text, whose own template begins a text with <s>."""
    from pydoc_data.topics import topics

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
    tokenizer.train_from_iterator([topics[name] for name in sorted(topics)[:10]], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer.to_str()


class Assets:
    """A folder with a tokenizer.json and perhaps a tokenizer_config.json."""

    def __init__(self, folder: Path, content: str):
        self.folder = folder
        self.file = folder / "tokenizer.json"
        self.file.write_text(content, encoding="utf-8")

    def open(self, **marks: Any) -> HuggingFaceTokenizer:
        if marks:
            (self.folder / "tokenizer_config.json").write_text(json.dumps(marks))
        return build_tokenizer(str(self.folder))

    def change(self, **entries: Any) -> None:
        self.file.write_text(json.dumps({**json.loads(self.file.read_text()), **entries}))


@pytest.fixture
def assets(tmp_path, trained) -> Assets:
    return Assets(tmp_path, trained)


def test_ids_are_those_of_tokenizers(assets):
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    tokenizer, theirs = assets.open(), Tokenizer.from_file(str(assets.file))
    texts = [*TEXTS[:-1], *list(topics.values())[10:20]]
    for text, tokens in zip(texts, tokenizer.encode(texts), strict=True):
        assert tokens.dtype == np.uint32
        assert tokens.tolist() == theirs.encode(text, add_special_tokens=False).ids
        assert theirs.decode(tokens.tolist(), skip_special_tokens=False) == text
    assert tokenizer.vocab_size == theirs.get_vocab_size() == 400
    assert encode_documents(tokenizer, ["Hello"])[0].tolist() == [0, *tokenizer.encode(["Hello"])[0], 1]
    assert build_tokenizer(str(assets.file)).identity == tokenizer.identity
    assert isinstance(build_tokenizer(""), ByteTokenizer)


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ({}, (0, 1)),
        ({"eos_token": "<stop>"}, (0, 2)),
        ({"bos_token": "<stop>", "eos_token": "</s>"}, (2, 1)),
        ({"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": {"content": "<stop>"}}, (0, 2)),
    ],
    ids=["well-known names", "string", "both", "objects"],
)
def test_marks(assets, marks, expected):
    tokenizer = assets.open(**marks)
    assert (tokenizer.bos, tokenizer.eos) == expected


def test_other_marks_are_another_identity(assets):
    assert assets.open().identity != assets.open(eos_token="<stop>").identity


def test_no_begin_mark_is_fine_and_no_end_mark_is_refused(assets):
    content = assets.file.read_text()
    assets.file.write_text(content.replace("<s>", "<go>"))
    tokenizer = assets.open()
    assert tokenizer.bos is None
    assert encode_documents(tokenizer, ["a"])[0].tolist() == [*tokenizer.encode(["a"])[0], 1]
    assets.file.write_text(content.replace("</s>", "<halt>"))
    line = refusal(assets.open)
    assert str(assets.file) in line
    assert "<|end_of_text|>" in line
    assert str(assets.folder / "tokenizer_config.json") in line


def test_unreadable_tokenizers_are_refused(assets):
    missing = assets.folder / "nowhere"
    assert str(missing) in refusal(lambda: build_tokenizer(str(missing)))
    (assets.folder / "tokenizer_config.json").write_text("{")
    assert str(assets.file) in refusal(assets.open)
    (assets.folder / "tokenizer_config.json").unlink()
    assets.file.write_text('{"version": "1.0", "model": {"type": "Nonsense"}}')
    assert str(assets.file) in refusal(assets.open)


@pytest.mark.parametrize("key", ["bos_token", "eos_token"])
def test_a_named_mark_that_does_not_exist_is_refused(assets, key):
    line = refusal(lambda: assets.open(**{"bos_token": "<s>", "eos_token": "</s>", key: "<nope>"}))
    assert "<nope>" in line


def test_settings_that_are_no_object_are_refused(assets):
    (assets.folder / "tokenizer_config.json").write_text("[]")
    assert "tokenizer_config.json" in refusal(assets.open)


def test_text_cannot_end_its_document(assets):
    tokenizer = assets.open()
    text = "one</s><s>two<stop>"
    (tokens,) = tokenizer.encode([text])
    assert not {0, 1, 2} & set(tokens.tolist())
    assert tokenizer.tokenizer.decode(tokens.tolist(), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "entry",
    [
        {"truncation": {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}},
        {
            "padding": {
                "strategy": "BatchLongest",
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "<s>",
            }
        },
    ],
    ids=["truncation", "padding"],
)
def test_documents_are_neither_cut_nor_padded(assets, entry):
    """A tokenizer.json may ask for either; that is meant for the inputs of a sentence encoder."""
    texts = ["a long document, far longer than five tokens", "short"]
    expected = [tokens.tolist() for tokens in assets.open().encode(texts)]
    assets.change(**entry)
    assert [tokens.tolist() for tokens in assets.open().encode(texts)] == expected


# Packing -------------------------------------------------------------------------------------------------------------


def check_packing(tokens: np.ndarray, seq_len: int, eos: int) -> None:
    """Consecutive windows of the flat stream, targets shifted by one, ignored after an end mark and only there."""
    sequences = PackedSequences(tokens, seq_len=seq_len, eos=eos, shuffle=False, seed=0)
    stream = tokens.tolist()
    assert sequences.n_sequences == (len(stream) - 1) // seq_len
    for index in range(sequences.n_sequences):
        inputs, targets = whole(sequences[index])
        places = range(index * seq_len, (index + 1) * seq_len)
        assert inputs == [stream[place] for place in places]
        assert targets == [IGNORED if stream[place] == eos else stream[place + 1] for place in places]


def some_texts(count: int = 60) -> list[str]:
    """Different documents of 0 to 40 characters."""
    generator = np.random.RandomState(0)
    return ["".join(chr(97 + (number + i) % 26) for i in range(generator.randint(40))) for number in range(count)]


def test_packing():
    tokens = np.array(flat(some_texts()), np.uint16)
    assert (tokens == EOS).sum() == 60
    for seq_len in (1, 7, T, len(tokens) - 1):
        check_packing(tokens, seq_len, EOS)


@pytest.mark.parametrize("broken", ["targets not shifted", "inputs one late", "end marks forgotten", "windows apart"])
def test_broken_packing_goes_red(monkeypatch, broken):
    real, get = packed.inputs_and_targets, PackedSequences.__getitem__
    tokens = np.array(flat(some_texts()), np.uint16)
    if broken == "targets not shifted":
        monkeypatch.setattr(packed, "inputs_and_targets", lambda t, eos: (real(t, eos)[0],) * 2)
    elif broken == "inputs one late":
        monkeypatch.setattr(packed, "inputs_and_targets", lambda t, eos: real(np.roll(t, -1), eos))
    elif broken == "end marks forgotten":
        monkeypatch.setattr(packed, "inputs_and_targets", lambda t, eos: real(t, -1))
    else:
        monkeypatch.setattr(PackedSequences, "__getitem__", lambda self, index: get(self, index * 2))
    with pytest.raises(AssertionError):
        check_packing(tokens, T, EOS)


def test_one_mark_for_begin_and_end(assets):
    """As GPT-2 has. What follows it as an end is ignored; what follows it as a begin is the text's first token."""
    tokenizer = assets.open(bos_token="</s>", eos_token="</s>")
    texts = ["one", "another", "a third"]
    tokens = np.array(flat(texts, tokenizer))
    _, targets = packed.inputs_and_targets(tokens, tokenizer.eos)
    learned = [token for token in targets.tolist() if token != IGNORED]
    assert learned == [token for text in texts for token in [*tokenizer.encode([text])[0].tolist(), tokenizer.eos]]


@pytest.mark.parametrize("length", [T + 1, T + 2, 2 * T, 2 * T + 1, 10 * T + 5])
def test_every_token_is_an_input_once_an_epoch(length):
    """But the tail, of at most T tokens, at least one of which is a target."""
    sequences = PackedSequences(np.arange(length), seq_len=T, eos=-1, shuffle=True, seed=3)
    for epoch in range(3):
        indices = range(epoch * sequences.n_sequences, (epoch + 1) * sequences.n_sequences)
        seen = Counter(token for index in indices for token in whole(sequences[index])[0])
        assert seen == Counter(range(sequences.n_sequences * T))
    assert 1 <= length - sequences.n_sequences * T <= T


@pytest.mark.parametrize("length", [0, 1, T])
def test_too_little_text_is_refused_with_numbers(length):
    line = refusal(lambda: PackedSequences(np.arange(length), seq_len=T, eos=-1, shuffle=True, seed=0))
    assert f"training.seq_len = {T}" in line
    assert f"{length} tokens" in line


# Held-out documents --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.05, 0.1, 0.29, 1 / 3, 0.5, 0.9])
def test_held_out_share_is_exact_and_even(fraction):
    """Of the first n documents, n x fraction are held out, for every n."""
    held_out = np.cumsum([is_held_out(document, fraction) for document in range(5000)])
    assert (np.abs(held_out - fraction * np.arange(1, 5001)) < 1).all()
    assert held_out[-1] == pytest.approx(5000 * fraction, abs=1 if fraction == 1 / 3 else 0)


def test_held_out_documents_are_not_trained_on(tmp_path):
    texts = [f"document {number}" for number in range(100)]
    train, held_out, _ = token_files(
        in_memory(texts), ByteTokenizer(), fraction=0.2, cache_folder=str(tmp_path), builds=True
    )
    for_training, for_validation = split_documents(train), split_documents(held_out)
    assert for_validation == texts[4::5]
    assert for_training == [text for number, text in enumerate(texts) if number % 5 != 4]


@pytest.mark.parametrize("length", [2, T, T + 1, T + 2, 7 * T + 3])
@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_validation_takes_every_target_once(length, n_ranks):
    for local_batch_size in (1, 2, 5):
        sequences = HeldOutSequences(np.arange(1, length + 1), seq_len=T, eos=-1)
        seen, batches = Counter(), set()
        for rank in range(n_ranks):
            own = list(
                data.validation_batches(
                    sequences, rank=rank, n_ranks=n_ranks, local_batch_size=local_batch_size, steps=-1
                )
            )
            batches.add(len(own))
            for tokens, targets in own:
                assert tokens.shape == targets.shape == (local_batch_size, T)
                valid = targets != IGNORED
                assert (targets[valid] == tokens[valid] + 1).all()
                assert (tokens[~valid] == 0).all()
                seen.update(targets[valid].tolist())
        assert seen == Counter(range(2, length + 1))
        assert len(batches) == 1, "every rank must take as many batches"


def test_validation_ends_documents_and_stops_after_some_steps():
    texts = some_texts(20)
    tokens = np.array(flat(texts), np.uint16)
    sequences = HeldOutSequences(tokens, seq_len=T, eos=EOS)
    options = {"rank": 0, "n_ranks": 1, "local_batch_size": 2}
    batches = list(data.validation_batches(sequences, **options, steps=-1))
    assert len(batches) == -(-(len(tokens) - 1) // (2 * T))
    # Every token is a target but the first one of each document.
    assert sum(int((targets != IGNORED).sum()) for _, targets in batches) == len(tokens) - len(texts)
    first = list(data.validation_batches(sequences, **options, steps=2))
    assert len(first) == 2
    assert all(
        torch.equal(a, b) for few, all_ in zip(first, batches[:2], strict=True) for a, b in zip(few, all_, strict=True)
    )


# The files of tokens -------------------------------------------------------------------------------------------------

SPLITS = {"fraction": 0.25, "builds": True}


def test_token_files_are_made_once(tmp_path):
    documents = in_memory(some_texts())
    first = token_files(documents, ByteTokenizer(), **SPLITS, cache_folder=str(tmp_path))
    asked_again = Documents(documents.fingerprint, lambda: pytest.fail("tokenises again"))
    again = token_files(asked_again, ByteTokenizer(), **SPLITS, cache_folder=str(tmp_path))
    for a, b in zip(first[:2], again[:2], strict=True):
        assert isinstance(b, np.memmap)
        assert a.tolist() == b.tolist()
    assert first[2] == again[2]
    assert len(list(tmp_path.iterdir())) == 1


def test_token_files_are_made_anew_for_another_text_tokenizer_or_share(tmp_path, assets):
    texts, cache = some_texts(), tmp_path / "cache"
    other, bpe, more = [*texts[:-1], "other"], assets.open(), {"fraction": 0.5, "builds": True}
    cases = [
        (texts, ByteTokenizer(), SPLITS),
        (other, ByteTokenizer(), SPLITS),
        (texts, bpe, SPLITS),
        (texts, ByteTokenizer(), more),
    ]
    identities = set()
    for case, tokenizer, splits in cases:
        found = token_files(in_memory(case), tokenizer, **splits, cache_folder=str(cache))
        every = round(1 / splits["fraction"])
        assert found[1].tolist() == flat(case[every - 1 :: every], tokenizer)
        assert len(found[0]) + len(found[1]) == len(flat(case, tokenizer))
        identities.add(found[2])
    assert len(identities) == len(list(cache.iterdir())) == 4


class ManyTokens(ByteTokenizer):
    """Numbers that two bytes cannot hold."""

    vocab_size, identity = 70_000, "many"

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return [tokens + 65_500 for tokens in super().encode(texts)]


def test_large_vocabularies_take_four_bytes(tmp_path):
    for tokenizer, size in ((ByteTokenizer(), 2), (ManyTokens(), 4)):
        train, _, _ = token_files(
            in_memory(["hello"]), tokenizer, fraction=0.0, builds=True, cache_folder=str(tmp_path)
        )
        assert train.dtype.itemsize == size
        assert train.tolist() == flat(["hello"], tokenizer)


@pytest.mark.parametrize("process", ["of another process", "of a process with the same number"])
def test_half_made_files_are_never_used(tmp_path, monkeypatch, process):
    """A run was killed while it tokenised. In containers, every run may have the same process number."""
    monkeypatch.setattr(packed.os, "getpid", lambda: 7)
    documents = in_memory(some_texts())
    token_files(documents, ByteTokenizer(), **SPLITS, cache_folder=str(tmp_path / "elsewhere"))
    (made,) = (tmp_path / "elsewhere").iterdir()
    number = 7 if "same" in process else 8
    half = tmp_path / "cache" / f"{made.name}.{number}.tmp"
    shutil.copytree(made, half)
    (half / "train.bin").write_bytes(b"half")
    train, held_out, _ = token_files(documents, ByteTokenizer(), **SPLITS, cache_folder=str(tmp_path / "cache"))
    assert len(train) + len(held_out) == len(flat(some_texts()))


def test_after_an_error_tokenising_starts_anew(tmp_path):
    documents, broken = in_memory(some_texts()), True

    def batches() -> Iterator[list[str]]:
        for number, texts in enumerate(documents.batches()):
            if broken and number == 3:
                raise RuntimeError("a broken document")
            yield texts

    unreliable = Documents(documents.fingerprint, batches)
    with pytest.raises(RuntimeError, match="a broken document"):
        token_files(unreliable, ByteTokenizer(), **SPLITS, cache_folder=str(tmp_path))
    broken = False
    train, held_out, _ = token_files(unreliable, ByteTokenizer(), **SPLITS, cache_folder=str(tmp_path))
    assert len(train) + len(held_out) == len(flat(some_texts()))
    assert len(list(tmp_path.iterdir())) == 1, "half-made files are left"


def test_other_ranks_of_a_host_wait_for_the_files(tmp_path):
    documents, may_build = in_memory(some_texts()), threading.Event()

    def batches() -> Iterator[list[str]]:
        may_build.wait(10)
        yield from documents.batches()

    slow = Documents(documents.fingerprint, batches)
    never = Documents(documents.fingerprint, lambda: pytest.fail("tokenises too"))
    with ThreadPoolExecutor(2) as pool:
        waits = {"fraction": 0.25, "builds": False, "cache_folder": str(tmp_path)}
        waiting = pool.submit(token_files, never, ByteTokenizer(), **waits)
        building = pool.submit(token_files, slow, ByteTokenizer(), **waits | {"builds": True})
        assert not waiting.done()
        may_build.set()
        assert waiting.result(10)[0].tolist() == building.result(10)[0].tolist()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    cache = str(tmp_path / "file" / "cache")
    line = refusal(lambda: token_files(in_memory(["a"]), ByteTokenizer(), **SPLITS, cache_folder=cache))
    assert line.startswith(f"training.cache_folder = {cache!r}: cannot be written: ")


# Order over ranks ----------------------------------------------------------------------------------------------------

N = 10


def make_packed(n_sequences: int = N, seed: int = 42, shuffle: bool = True) -> PackedSequences:
    """Sequences whose tokens tell their place in the flat stream."""
    return PackedSequences(np.arange(n_sequences * T + 1), seq_len=T, eos=-1, shuffle=shuffle, seed=seed)


def places(sequences: PackedSequences, indices: range) -> list[int]:
    return [int(sequences[index][0][0]) // T for index in indices]


def test_an_epochs_order_is_a_permutation():
    sequences = make_packed(50)
    epochs = [places(sequences, range(50 * epoch, 50 * (epoch + 1))) for epoch in range(4)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert tuple(range(50)) not in {tuple(epoch) for epoch in epochs}
    assert places(make_packed(50), range(200)) == [place for epoch in epochs for place in epoch]
    assert places(make_packed(50, seed=43), range(50)) not in epochs
    assert places(make_packed(50, shuffle=False), range(100)) == [*range(50), *range(50)]


def test_any_index_can_be_asked_for_at_any_time():
    one_after_the_other = places(make_packed(), range(35))
    sequences = make_packed()
    assert [places(sequences, range(i, i + 1))[0] for i in reversed(range(35))] == one_after_the_other[::-1]


def test_the_order_never_changes():
    """Numbers of an earlier version: another order would send a resumed run over other data, unnoticed."""
    epochs = [1, 8, 5, 3, 7, 9, 4, 0, 6, 2], [9, 5, 8, 7, 6, 4, 0, 3, 1, 2]
    assert places(make_packed(), range(20)) == [*epochs[0], *epochs[1]]


def consume(
    make: Callable[[], data.Sequences],
    *,
    n_ranks: int,
    global_batch_size: int,
    steps: int,
    local_batch_size: int = 1,
    state: dict[str, Any] | None = None,
) -> tuple[list[list[Sequence]], list[dict[str, Any]]]:
    """What all ranks train on in some steps, each step's sequences in their global order, and the ranks' states."""
    loaders = [
        data.Loader(
            make(),
            rank=rank,
            n_ranks=n_ranks,
            local_batch_size=local_batch_size,
            global_batch_size=global_batch_size,
            pin=False,
            state=state,
        )
        for rank in range(n_ranks)
    ]
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


def sequences_of(batch: data.Batch, local_batch_size: int) -> list[Sequence]:
    for tokens, targets in batch:
        assert tokens.shape == targets.shape == (local_batch_size, T)
        assert tokens.dtype == targets.dtype == torch.int64
    return [
        (inputs, outputs)
        for tokens, targets in batch
        for inputs, outputs in zip(tokens.tolist(), targets.tolist(), strict=True)
    ]


def in_steps(make: Callable[[], Any], global_batch_size: int, first: int, steps: int) -> list[list[Sequence]]:
    sequences = make()
    return [
        [whole(sequences[first + step * global_batch_size + i]) for i in range(global_batch_size)]
        for step in range(steps)
    ]


def check_order_over_ranks() -> None:
    """12 sequences a step, 5 steps: 6 epochs of 10."""
    expected = in_steps(make_packed, 12, 0, 5)
    for n_ranks in (1, 2, 4):
        for local_batch_size in (1, 3, 12 // n_ranks):
            consumed, _ = consume(
                make_packed, n_ranks=n_ranks, global_batch_size=12, local_batch_size=local_batch_size, steps=5
            )
            assert consumed == expected


def test_order_does_not_depend_on_the_ranks():
    check_order_over_ranks()


@pytest.mark.parametrize("broken", ["rank in the index", "rank in the seed", "neighbours instead of strides"])
def test_an_order_that_depends_on_the_ranks_goes_red(monkeypatch, broken):
    real = PackedSequences.read
    if broken == "rank in the index":
        monkeypatch.setattr(PackedSequences, "read", lambda self, first, stride: real(self, first + first, stride))
    elif broken == "rank in the seed":

        def read(self: PackedSequences, first: int, stride: int) -> Any:
            self.seed += first
            return real(self, first, stride)

        monkeypatch.setattr(PackedSequences, "read", read)
    else:
        monkeypatch.setattr(PackedSequences, "read", lambda self, first, stride: real(self, first * 3, 1))
    with pytest.raises(AssertionError):
        check_order_over_ranks()


@pytest.mark.parametrize(
    ("ranks_before", "batch_before", "ranks_after", "batch_after"),
    [(1, 4, 2, 4), (2, 4, 1, 4), (2, 4, 4, 4), (4, 4, 2, 4), (4, 8, 1, 8), (2, 6, 4, 8), (4, 4, 3, 6), (1, 5, 4, 4)],
)
def test_resume_at_other_ranks_goes_on_in_the_same_order(ranks_before, batch_before, ranks_after, batch_after):
    for steps in (0, 1, 3, 6):
        check_resume(steps, ranks_before, batch_before, ranks_after, batch_after)


def check_resume(steps: int, ranks_before: int, batch_before: int, ranks_after: int, batch_after: int) -> None:
    before, states = consume(make_packed, n_ranks=ranks_before, global_batch_size=batch_before, steps=steps)
    assert all(state == {"next_sequence": steps * batch_before, "streams": {}} for state in states)
    after, _ = consume(make_packed, n_ranks=ranks_after, global_batch_size=batch_after, steps=3, state=states[0])
    (expected,) = in_steps(make_packed, steps * batch_before + 3 * batch_after, 0, 1)
    assert [sequence for step in before + after for sequence in step] == expected


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

    def read(self, first: int, stride: int) -> Iterator[tuple[tuple[np.ndarray, np.ndarray], None]]:
        while True:
            if self.count == self.fails_at:
                raise OSError("the disk is gone")
            self.count += 1
            yield (np.full(T, first), np.full(T, first)), None
            first += stride


def open_loader(sequences: Any, **others: Any) -> data.Loader:
    options = {"rank": 0, "n_ranks": 1, "local_batch_size": 2, "global_batch_size": 4, "pin": False, **others}
    return data.Loader(sequences, **options)


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


def test_close_ends_the_thread():
    for steps in (0, 1):
        loader = open_loader(Counted())
        for _ in range(steps):
            loader.next()
        thread = next(thread for thread in threading.enumerate() if thread is loader._thread)
        loader.close()
        assert not thread.is_alive()
        loader.close()


def test_an_error_is_raised_where_the_batch_is_waited_for():
    loader = open_loader(Counted(fails_at=6))
    loader.next()
    with pytest.raises(OSError, match="the disk is gone"):
        loader.next()
    loader.close()
    assert not loader._thread.is_alive()


# Sources -------------------------------------------------------------------------------------------------------------


def load(dataset: str, path: Any, *, text_key: str = "text", text_sample_by: str = "document") -> Documents:
    return load_documents(
        dataset=dataset,
        dataset_path=str(path),
        dataset_config="",
        split="train",
        text_key=text_key,
        text_sample_by=text_sample_by,
    )


def texts_of(*arguments: Any, **others: Any) -> list[str]:
    return [text for batch in load(*arguments, **others).batches() for text in batch]


def write_jsonl(file: Path, texts: list[Any], key: str = "text") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({key: text, "id": i}) + "\n" for i, text in enumerate(texts)))
    return file


def write_parquet(file: Path, texts: list[str], key: str = "text") -> Path:
    import pyarrow
    import pyarrow.parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({key: pyarrow.array(texts, pyarrow.string()), "id": list(range(len(texts)))})
    pyarrow.parquet.write_table(table, file, row_group_size=2)
    return file


def test_built_in_text():
    from pydoc_data.topics import topics

    texts = texts_of("pydoc_topics", "")
    assert texts == [topics[name] for name in sorted(topics)]
    assert load("pydoc_topics", "").fingerprint == load("pydoc_topics", "").fingerprint


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
    assert texts_of("json", tmp_path / "list.json") == ["three"]
    assert texts_of("json", tmp_path) == ["one", "two\nlines", "three"]
    assert texts_of("parquet", tmp_path) == [f"row {i}" for i in range(5)]
    write_jsonl(tmp_path / "other.jsonl", ["one"], key="body")
    assert texts_of("json", tmp_path / "other.jsonl", text_key="body") == ["one"]


def test_folders_and_globs_are_read_in_sorted_order(tmp_path, monkeypatch):
    for name in ("b/2", "b/10", "a/z", "c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.txt").write_text(name)
    (tmp_path / "a" / "note.md").write_text("not one of them")
    assert texts_of("text", tmp_path) == ["a/z", "b/10", "b/2", "c"]
    assert texts_of("text", tmp_path / "b" / "*.txt") == ["b/10", "b/2"]
    assert texts_of("text", tmp_path / "[ab]" / "?.txt") == ["a/z", "b/2"]
    assert texts_of("text", f"{tmp_path}/**/z.txt") == ["a/z"]
    monkeypatch.chdir(tmp_path)
    assert texts_of("text", "b/1*.txt") == ["b/10"]
    assert texts_of("text", "c.txt") == ["c"]
    monkeypatch.setenv("HOME", str(tmp_path / "b"))
    assert texts_of("text", "~/2.txt") == ["b/2"]


def test_a_file_may_have_brackets_in_its_name(tmp_path):
    (tmp_path / "run[1].txt").write_text("one")
    assert texts_of("text", tmp_path / "run[1].txt") == ["one"]


def test_missing_files_are_refused(tmp_path):
    for path, dataset, ending in [("nowhere", "text", "*.txt"), ("*.txt", "text", "*.txt"), (".", "parquet", "*.par")]:
        line = refusal(lambda dataset=dataset, path=path: load(dataset, tmp_path / path))
        assert line.startswith(f"training.dataset_path = {str(tmp_path / path)!r}: no such file")
        assert ending in line


def test_a_missing_column_is_refused_with_those_that_are_there(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", ["one"], key="body")
    for call in (lambda: load("json", file), lambda: stream(file)):
        line = refusal(call)
        assert "no column 'text'" in line
        assert line.endswith("set training.dataset_text_key to one of body, id")
        assert str(file) in line


def test_a_column_that_is_no_text_is_refused(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", ["one"])
    for call in (lambda: load("json", file, text_key="id"), lambda: stream(file, text_key="id")):
        assert "'id'" in refusal(call)


@pytest.mark.parametrize(("dataset", "name"), [("json", "a.json"), ("parquet", "a.parquet"), ("text", "a.txt")])
def test_broken_files_are_refused_with_the_reason(tmp_path, dataset, name):
    (tmp_path / name).write_bytes(b"{\xff\xfe")
    line = refusal(lambda: load(dataset, tmp_path / name))
    assert str(tmp_path / name) in line
    assert any(reason in line for reason in ("JSON", "Parquet", "utf-8")), line


@pytest.mark.parametrize(("dataset", "path"), [("hub", "someone/something"), ("c4", "")])
def test_the_hub_without_a_network_is_one_clear_line(dataset, path):
    began = time.monotonic()
    for call in (lambda: load(dataset, path), lambda: stream(path, dataset=dataset)):
        line = refusal(call)
        assert line.startswith(f"training.dataset = {dataset!r}, {path or 'allenai/c4'!r}: cannot be loaded: ")
        assert "without a network, download its files elsewhere" in line
    assert time.monotonic() - began < 5


def test_another_text_is_another_fingerprint(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one\ntwo")
    fingerprints = [load("text", file).fingerprint, load("text", file, text_sample_by="line").fingerprint]
    assert load("text", file).fingerprint == fingerprints[0]
    (tmp_path / "b.txt").write_text("three")
    fingerprints.append(load("text", tmp_path).fingerprint)
    file.write_text("another")
    fingerprints.append(load("text", file).fingerprint)
    jsonl = write_jsonl(tmp_path / "a.jsonl", ["one"])
    fingerprints += [load("json", jsonl).fingerprint, load("json", jsonl, text_key="id").fingerprint]
    assert len(set(fingerprints)) == 6


def test_another_text_with_the_same_time_and_size_is_noticed(tmp_path):
    """Unpacked archives and image layers have files of one fixed time."""
    import os

    file = tmp_path / "a.txt"
    for text in ("one", "two"):
        file.write_text(text)
        os.utime(file, (1_000_000_000, 1_000_000_000))
        assert texts_of("text", file) == [text]


def test_a_copy_of_the_files_is_the_same_data(tmp_path):
    """Each host may hold its own copy: its ranks must find the identity that rank 0 saved."""
    for host in ("a", "b"):
        (tmp_path / host).mkdir()
        (tmp_path / host / "text.txt").write_text("the same")
    assert load("text", tmp_path / "a").fingerprint == load("text", tmp_path / "b").fingerprint


# The whole way from options to sequences -----------------------------------------------------------------------------


def open_sequences(tmp_path: Path, **others: Any) -> tuple[data.Sequences, HeldOutSequences | None, str]:
    options: dict[str, Any] = {
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
        "seq_len": 64,
        "cache_folder": str(tmp_path / "cache"),
        "validation_path": "",
        "validation_split": "",
        "validation_fraction": 0.05,
        "validation_enable": True,
        "builds_cache": True,
    }
    return data.open_sequences(ByteTokenizer(), **{**options, **others})


def test_built_in_text_is_packed_and_split(tmp_path):
    from pydoc_data.topics import topics

    train, held_out, _ = open_sequences(tmp_path)
    texts = [topics[name] for name in sorted(topics)]
    for_validation = [number for number in range(len(texts)) if (number + 1) * 5 // 100 > number * 5 // 100]
    assert len(for_validation) == len(texts) // 20
    trained_on = [text for number, text in enumerate(texts) if number not in for_validation]
    assert train.tokens.tolist() == flat(trained_on)
    assert held_out.tokens.tolist() == flat([texts[number] for number in for_validation])
    without = open_sequences(tmp_path, validation_enable=False)
    assert without[1] is None
    assert without[0].tokens.tolist() == train.tokens.tolist(), "validation must not change the training data"


def test_files_of_their_own_to_validate_on(tmp_path):
    train_file = write_jsonl(tmp_path / "train.jsonl", some_texts())
    other = write_jsonl(tmp_path / "other.jsonl", ["validate", "on this"])
    for streaming in (False, True):
        train, held_out, _ = open_sequences(
            tmp_path,
            dataset="json",
            dataset_path=str(train_file),
            validation_path=str(other),
            seq_len=T,
            streaming=streaming,
        )
        assert held_out.tokens.tolist() == flat(["validate", "on this"])
        sequence, _ = next(train.read(0, 1))
        assert whole(sequence)[0] == flat(some_texts())[:T]
    assert isinstance(train, StreamedSequences)


def test_a_share_that_holds_out_nothing_is_refused(tmp_path):
    line = refusal(lambda: open_sequences(tmp_path, validation_fraction=1e-6))
    assert line.startswith("validation.fraction = 1e-06: holds out no document")


def test_missing_files_to_validate_on_are_refused_by_their_key(tmp_path):
    file = write_jsonl(tmp_path / "train.jsonl", some_texts())
    missing = str(tmp_path / "nowhere")
    line = refusal(
        lambda: open_sequences(tmp_path, dataset="json", dataset_path=str(file), validation_path=missing, seq_len=T)
    )
    assert line.startswith(f"validation.dataset_path = {missing!r}")


def test_identity_names_what_global_indices_mean(tmp_path):
    base: dict[str, Any] = {"shuffle": True}
    changes: list[dict[str, Any]] = [{}, {"seed": 1}, {"seq_len": 32}, {"shuffle": False}, {"validation_fraction": 0.1}]
    assert len({open_sequences(tmp_path, **base | change)[2] for change in changes}) == len(changes)
    not_that = [{}, {"validation_enable": False}, {"cache_folder": str(tmp_path / "elsewhere")}]
    assert len({open_sequences(tmp_path, **base | change)[2] for change in not_that}) == 1


@pytest.mark.parametrize(
    "change", ["seq_len", "streams", "text_key", "text_sample_by", "another file", "another content"]
)
def test_identity_names_what_a_streams_sequences_are(tmp_path, change):
    folder = tmp_path / "files"
    for number in range(2):
        folder.mkdir(exist_ok=True)
        rows = [{"text": f"one {number}\ntwo", "body": "other"}] * 9
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{number}.txt").write_text(f"one {number}\ntwo\n" * 9)
    dataset = "text" if change == "text_sample_by" else "json"
    options: dict[str, Any] = {"dataset": dataset, "dataset_path": str(folder), "streaming": True, "streams": 2}
    options["validation_enable"] = False
    before = open_sequences(tmp_path, **options)[2]
    assert open_sequences(tmp_path, **options)[2] == before
    changes = {"seq_len": 32, "streams": 1, "text_key": "body", "text_sample_by": "line"}
    if change == "another file":
        shutil.copy(folder / "0.jsonl", folder / "2.jsonl")
    elif change == "another content":
        write_jsonl(folder / "1.jsonl", ["something else"] * 20)
    assert open_sequences(tmp_path, **options | {k: v for k, v in changes.items() if k == change})[2] != before


# Streaming -----------------------------------------------------------------------------------------------------------

FILES, STEPS, BATCH = 8, 24, 4
STREAMS = {"json": 8, "parquet": 4}


def stream(
    path: Any, dataset: str = "json", text_key: str = "text", text_sample_by: str = "document"
) -> tuple[Any, str]:
    return load_stream(
        dataset=dataset,
        dataset_path=str(path),
        dataset_config="",
        split="train",
        text_key=text_key,
        text_sample_by=text_sample_by,
    )


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
        self.streams = []
        share = FILES // STREAMS[kind]
        for number in range(STREAMS[kind]):
            files = range(number * share, (number + 1) * share)
            self.streams.append(flat([text for file in files for text in file_texts(kind, file)]))

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        window, number = divmod(index, len(self.streams))
        tokens = self.streams[number]
        inputs, targets = (
            np.array([tokens[(window * T + i + shift) % len(tokens)] for i in range(T)]) for shift in (0, 1)
        )
        return inputs, np.where(inputs == EOS, IGNORED, targets)


def make_streamed(kind: str, folder: Path) -> Callable[[], StreamedSequences]:
    opened, column = stream(folder, dataset=kind)
    return lambda: StreamedSequences(opened, column, ByteTokenizer(), seq_len=T, n_streams=STREAMS[kind])


@pytest.mark.parametrize("kind", STREAMS)
def test_streams_do_not_depend_on_the_ranks(folders, kind):
    expected = in_steps(lambda: Expected(kind), 8, 0, 40)
    assert max(len(tokens) for tokens in Expected(kind).streams) < 40 * 8 * T / STREAMS[kind] / 2, "two epochs"
    for n_ranks, local_batch_size in ((1, 8), (2, 1), (2, 4), (4, 2)):
        consumed, _ = consume(
            make_streamed(kind, folders[kind]),
            n_ranks=n_ranks,
            global_batch_size=8,
            local_batch_size=local_batch_size,
            steps=40,
        )
        assert consumed == expected


# Cases that run on every rank of a pool: where a run stands is gathered from all ranks.


def states_in_ranks(
    kind: str, folder: Path, steps: int, state: dict[str, Any] | None = None, batch: int = BATCH
) -> list[dict[str, Any]]:
    """The state after each step, through JSON."""
    world_size = dist.get_world_size()
    loader = data.Loader(
        make_streamed(kind, folder)(),
        rank=dist.get_rank(),
        n_ranks=world_size,
        local_batch_size=1,
        global_batch_size=batch,
        pin=False,
        state=state,
    )
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
    first = state["next_sequence"]
    consumed, _ = consume(
        make_streamed(kind, folder), n_ranks=n_ranks, global_batch_size=batch, steps=8 // batch + 1, state=state
    )
    assert consumed == in_steps(lambda: Expected(kind), batch, first, 8 // batch + 1)


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
    check_continuation("json", folders["json"], state, n_ranks=2)


@pytest.mark.parametrize("broken", ["one token off", "one document off", "one sequence off", "a stale stream"])
def test_a_state_that_is_off_goes_red(monkeypatch, saved, folders, broken):
    real = StreamedSequences._documents
    state = json.loads(json.dumps(saved["json", 2][9]))
    if broken == "one token off":

        def documents(self: StreamedSequences, number: int) -> Any:
            for before, tokens, used in real(self, number):
                yield before, tokens, used + 1 if used else used

        monkeypatch.setattr(StreamedSequences, "_documents", documents)
    elif broken == "one document off":

        def documents(self: StreamedSequences, number: int) -> Any:
            found = real(self, number)
            next(found)
            yield from found

        monkeypatch.setattr(StreamedSequences, "_documents", documents)
    elif broken == "one sequence off":
        state["next_sequence"] += 1
    else:
        state["streams"]["2"] = saved["json", 2][7]["streams"]["2"]
    with pytest.raises(AssertionError):
        check_continuation("json", folders["json"], state, n_ranks=2)


def test_more_streams_than_files_are_refused(tmp_path, folders):
    opened, column = stream(folders["json"])
    line = refusal(lambda: StreamedSequences(opened, column, ByteTokenizer(), seq_len=T, n_streams=9))
    assert line.startswith("training.streams = 9: the dataset has 8 files")


def test_a_stream_without_documents_is_refused(tmp_path):
    (tmp_path / "0.txt").write_text("some text")
    (tmp_path / "1.txt").write_text("")
    opened, column = stream(tmp_path, dataset="text", text_sample_by="line")
    sequences = StreamedSequences(opened, column, ByteTokenizer(), seq_len=T, n_streams=2)
    loader = open_loader(sequences, local_batch_size=2, global_batch_size=2)
    assert "stream 1 has no documents" in refusal(loader.next)
    loader.close()
