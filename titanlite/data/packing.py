"""Sequence packing: documents are joined end to end into an array of tokens, which is split into packed sequences of
length T. Sequence i has the tokens i T to i T + T, so a run's position in its data is the next sequence's index."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from titanlite.config.loader import ConfigError
from titanlite.config.schema import Training
from titanlite.data.shuffle import permuted
from titanlite.data.token_shards import Tokens
from titanlite.data.tokenizer import Tokenizer
from titanlite.loss import IGNORED

PADDING = IGNORED - 1
"""Target of padding, which belongs to no document; Batch replaces it by IGNORED."""


class Sequence(NamedTuple):
    """A packed sequence of T tokens; each array is int64 [T]."""

    inputs: np.ndarray
    targets: np.ndarray
    """The token that follows each input, IGNORED where there is nothing to predict, or PADDING."""
    document_positions: np.ndarray
    """Position of each token in its document, or in that part of its document that is in this sequence."""


class Sequences(Protocol):
    """The training split as an endless order of packed sequences."""

    def read(self, first: int, stride: int) -> Iterator[tuple[Sequence, tuple[int, Any] | None]]:
        """Yield the sequences first, first + stride, ...; a stream adds the index and state of a sequence's shard."""


class Mixture(Sequences, Protocol):
    """Sequences of several datasets (techniques/data/mixture.py). `loader_state`: a Loader.state; None at the start."""

    identity: str

    def check(self, loader_state: dict[str, Any] | None, n: int) -> None:
        """Raise ConfigError if a state is of another mixture, or fewer than `n` sequences are left."""

    def resumed(self, loader_state: dict[str, Any] | None) -> "Mixture":
        """Return the mixture, continued from a loader's state. Raises ConfigError if its part of the state is wrong."""

    def state(self, position: int) -> dict[str, Any]:
        """Return the mixture's state after `position` sequences, as plain JSON. Every rank must call this."""


class SplitSequences(Protocol):
    """A validation split, read once and in order: ValidationSequences, BestFit or MixedValidation."""

    n_sequences: int

    def __getitem__(self, index: int) -> Sequence:
        """Return a sequence; past the end, a sequence of padding, since all ranks read the same number of batches."""


def split_sequence(tokens: np.ndarray, tokenizer: Tokenizer) -> Sequence:
    """Split T + 1 tokens into inputs and targets; the target of an EOS that ends a document is IGNORED."""
    inputs, targets = tokens[:-1].astype(np.int64), tokens[1:].astype(np.int64)
    ends = inputs == tokenizer.eos
    if tokenizer.bos is not None:
        ends &= targets == tokenizer.bos  # EOS ends a document only before BOS: the two may be the same token
    targets[ends] = IGNORED
    return Sequence(inputs, targets, positions_in_documents(ends))


def positions_in_documents(ends: np.ndarray) -> np.ndarray:
    """Return each token's position in its document, int64 [T]. `ends`, bool [T]: whether a document ends at a token."""
    indices = np.arange(len(ends))
    begins = np.zeros(len(ends), np.int64)
    begins[1:][ends[:-1]] = indices[1:][ends[:-1]]
    return indices - np.maximum.accumulate(begins)


class PackedSequences:
    """The training split as an endless list of packed sequences, the same for any number of ranks. With
    training.shuffle, seed and epoch determine the order of an epoch. Raises ConfigError for too few tokens."""

    def __init__(self, tokens: Tokens | np.ndarray, tokenizer: Tokenizer, training: Training, *, seed: int):
        self.tokens, self.tokenizer, self.seq_len = tokens, tokenizer, training.seq_len
        self.shuffle, self.seed = training.shuffle, seed
        self.n_sequences = max(len(tokens) - 1, 0) // self.seq_len
        if not self.n_sequences:
            problem = f"training.seq_len = {self.seq_len}: the dataset has {len(tokens):,} tokens, fewer than the "
            raise ConfigError([problem + "seq_len + 1 of one packed sequence; set it lower or train on more text"])

    def __str__(self) -> str:
        return f"{self.n_sequences:,} packed sequences per epoch"

    def __getitem__(self, index: int) -> Sequence:
        """Return the sequence with a global index 0, 1, 2, ...; epochs follow one another."""
        epoch, position = divmod(index, self.n_sequences)
        return self.sequence(permuted(position, self.n_sequences, self.seed, epoch) if self.shuffle else position)

    def sequence(self, position: int) -> Sequence:
        start = position * self.seq_len
        return split_sequence(self.tokens[start : start + self.seq_len + 1], self.tokenizer)

    def read(self, first: int, stride: int) -> Iterator[tuple[Sequence, None]]:
        while True:
            yield self[first], None
            first += stride


class ValidationSequences:
    """The validation split, read once and in order; the last sequence is padded with ignored targets."""

    def __init__(self, tokens: Tokens | np.ndarray, tokenizer: Tokenizer, seq_len: int):
        self.tokens, self.tokenizer, self.seq_len = tokens, tokenizer, seq_len
        self.n_sequences = -(-max(len(tokens) - 1, 0) // seq_len)

    def __str__(self) -> str:
        return f"{self.n_sequences:,} packed sequences"

    def __getitem__(self, index: int) -> Sequence:
        """Return a sequence; past the end, a sequence of padding, with positions that continue the last document."""
        start = index * self.seq_len
        sequence = split_sequence(self.tokens[start : start + self.seq_len + 1], self.tokenizer)
        n_padded = self.seq_len - len(sequence.inputs)
        next_position = sequence.document_positions[-1] + 1 if len(sequence.inputs) else 0
        return Sequence(
            np.pad(sequence.inputs, (0, n_padded)),
            np.pad(sequence.targets, (0, n_padded), constant_values=IGNORED),
            np.append(sequence.document_positions, np.arange(next_position, next_position + n_padded)),
        )
