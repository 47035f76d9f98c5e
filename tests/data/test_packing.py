"""Sequence packing: targets, positions in documents, and the padding of the validation split."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.helpers.data import (
    BYTES,
    NO_SPECIAL_TOKENS,
    T,
    as_lists,
    flat,
    positions_of,
    rejection,
    some_texts,
    training,
)
from titanlite.data import packing
from titanlite.data.packing import PackedSequences, ValidationSequences
from titanlite.loss import IGNORED


def check_packing(tokens: np.ndarray, seq_len: int) -> None:
    """Consecutive windows of the flat tokens, targets shifted by one, ignored after EOS and only there."""
    sequences = PackedSequences(tokens, BYTES, training(seq_len=seq_len), seed=0)
    expected = tokens.tolist()
    assert sequences.n_sequences == (len(expected) - 1) // seq_len
    for index in range(sequences.n_sequences):
        inputs, targets, _ = as_lists(sequences[index])
        indices = range(index * seq_len, (index + 1) * seq_len)
        assert inputs == [expected[i] for i in indices]
        assert targets == [IGNORED if expected[i] == BYTES.eos else expected[i + 1] for i in indices]


def test_packing():
    tokens = np.array(flat(some_texts()), np.uint16)
    assert (tokens == BYTES.eos).sum() == 60
    for seq_len in (1, 7, T, len(tokens) - 1):
        check_packing(tokens, seq_len)
    for length in (T + 1, T + 2, 2 * T, 2 * T + 1):
        check_packing(tokens[:length], T)
    for length in (0, 1, T):
        line = rejection(lambda length=length: check_packing(tokens[:length], T))
        assert line.startswith(f"training.seq_len = {T}: the dataset has {length} tokens")


@pytest.mark.parametrize("broken", ["targets not shifted", "inputs one late", "EOS forgotten", "windows apart"])
def test_broken_packing_fails(monkeypatch, broken):
    real, get = packing.split_sequence, PackedSequences.__getitem__

    def not_shifted(tokens: np.ndarray, tokenizer: Any) -> packing.Sequence:
        sequence = real(tokens, tokenizer)
        return sequence._replace(targets=sequence.inputs)

    if broken == "windows apart":
        monkeypatch.setattr(PackedSequences, "__getitem__", lambda self, index: get(self, index * 2))
    else:
        functions = {
            "targets not shifted": not_shifted,
            "inputs one late": lambda tokens, tokenizer: real(np.roll(tokens, -1), tokenizer),
            "EOS forgotten": lambda tokens, tokenizer: real(tokens, NO_SPECIAL_TOKENS),
        }
        monkeypatch.setattr(packing, "split_sequence", functions[broken])
    with pytest.raises(AssertionError):
        check_packing(np.array(flat(some_texts()), np.uint16), T)


def test_one_special_token_as_bos_and_eos(assets):
    """As GPT-2 has. What follows it as EOS is ignored; what follows it as BOS is the text's first token."""
    tokenizer, texts = assets.open(bos_token="</s>", eos_token="</s>"), ["one", "another", "a third"]
    _, targets, document_positions = as_lists(packing.split_sequence(np.array(flat(texts, tokenizer)), tokenizer))
    learned = [token for token in targets if token != IGNORED]
    assert learned == [token for text in texts for token in [*tokenizer.encode([text])[0].tolist(), tokenizer.eos]]
    assert document_positions == positions_of(texts, tokenizer)[:-1]


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
    result = packing.positions_in_documents(np.array(ends, bool))
    assert result.dtype == np.int64
    assert result.tolist() == positions


def check_document_positions(texts: list[str], seq_len: int, tokenizer: Any = BYTES) -> None:
    """A token's position is that in its document or, if that began before the sequence, in the sequence."""
    tokens, positions = np.array(flat(texts, tokenizer)), positions_of(texts, tokenizer)
    sequences = PackedSequences(tokens, tokenizer, training(seq_len=seq_len), seed=0)
    for index in range(sequences.n_sequences):
        start = index * seq_len
        expected = [min(positions[start + i], i) for i in range(seq_len)]
        assert as_lists(sequences[index])[2] == expected, "other positions"


NOT_EMPTY = [text for text in some_texts() if text]


def test_document_positions_of_packed_sequences():
    begins = positions_of(some_texts())[::T]
    assert begins.count(0) > 1, "sequences that begin with a document"
    assert sum(position > T for position in begins) > 1, "sequences without a BOS"
    for seq_len in (1, 2, 7, T, 50, len(flat(some_texts())) - 1):
        check_document_positions(some_texts(), seq_len)
    check_document_positions(["", "", "", "abc", "", "d" * 3 * T], T)


@pytest.mark.parametrize(("prefix", "eos"), [([0], "</s>"), ([], "</s>"), ([0], "<s>"), ([2, 0], "</s>")], ids=str)
def test_document_positions_by_other_special_tokens(assets, prefix, eos):
    """No empty documents: where one token is both BOS and EOS, nothing tells the BOS of an empty one from an EOS."""
    tokenizer = assets.open(eos_token=eos)
    tokenizer.prefix = prefix
    for seq_len in (1, 2, 7, T):
        check_document_positions(NOT_EMPTY, seq_len, tokenizer)


BROKEN_POSITIONS: dict[str, Callable[..., Any]] = {
    "restart one token late": lambda real, ends: real(np.append(False, ends[:-1])),
    "restart one token early": lambda real, ends: real(np.append(ends[1:], False)),
    "no restart": lambda real, ends: np.arange(len(ends)),
    "indices of documents": lambda real, ends: np.cumsum(ends) - ends,
    "counted from the end": lambda real, ends: real(ends[::-1])[::-1],
    "counted from 1": lambda real, ends: real(ends) + 1,
}


@pytest.mark.parametrize("broken", BROKEN_POSITIONS)
def test_broken_positions_fail(monkeypatch, broken):
    real = packing.positions_in_documents
    monkeypatch.setattr(packing, "positions_in_documents", lambda ends: BROKEN_POSITIONS[broken](real, ends))
    with pytest.raises(AssertionError, match="other positions"):
        check_document_positions(some_texts(), T)


def test_bos_taken_for_eos_fails(monkeypatch, assets):
    tokenizer, real = assets.open(eos_token="<s>"), packing.split_sequence
    assert tokenizer.bos == tokenizer.eos
    eos_alone = SimpleNamespace(bos=None, eos=tokenizer.eos)
    monkeypatch.setattr(packing, "split_sequence", lambda tokens, _: real(tokens, eos_alone))
    with pytest.raises(AssertionError, match="other positions"):
        check_document_positions(NOT_EMPTY, T, tokenizer)


def test_padding_continues_the_last_document_and_is_ignored():
    texts = ["", *some_texts(3)]
    tokens, positions = flat(texts), positions_of(texts)
    for length in range(2, len(tokens) + 1):
        sequences = ValidationSequences(np.array(tokens[:length], np.uint16), BYTES, T)
        assert sequences.n_sequences == -(-(length - 1) // T)
        *_, (inputs, targets, document_positions) = (
            as_lists(sequences[index]) for index in range(sequences.n_sequences)
        )
        start = T * (sequences.n_sequences - 1)
        n, last = length - 1 - start, min(positions[length - 2], length - 2 - start)
        assert inputs == tokens[start : length - 1] + [0] * (T - n)
        assert targets[n:] == [IGNORED] * (T - n)
        assert document_positions[:n] == [min(positions[start + i], i) for i in range(n)]
        assert document_positions[n:] == [last + 1 + i for i in range(T - n)]
        for index in (sequences.n_sequences, sequences.n_sequences + 7):
            assert as_lists(sequences[index]) == ([0] * T, [IGNORED] * T, list(range(T))), "nothing but padding"
