"""Packed sequences, each addressed by a global index.

Documents are tokenised once into one flat file (memory-mapped afterwards), end to end with their marks between them.
Packed sequence i is tokens [i T, i T + T] of it, so any rank can read any sequence, and where a run stands in its data
is one number.
"""

import hashlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titanlite.config.loader import ConfigError, show
from titanlite.data.documents import Documents
from titanlite.data.tokenizer import Tokenizer, encode_documents
from titanlite.loss import IGNORED

FORMAT = 2  # of the token files; raised when what they hold changes


def is_validation_document(document: int, fraction: float) -> bool:
    """Whether the document with this number is in the validation split: an even share over the whole order, the same
    for every seed and number of ranks."""
    return int((document + 1) * fraction) > int(document * fraction)


def token_files(
    documents: Documents, tokenizer: Tokenizer, *, fraction: float, cache_folder: str, builds: bool
) -> tuple[np.ndarray, np.ndarray, str]:
    """Tokens of the training split and of the held-out documents, tokenised on first use.

    Args:
        fraction: share of the documents to hold out.
        builds: whether this rank makes the files if they are not there; the others of its host wait for them.

    Returns:
        Two flat arrays, memory-mapped, and a hash of the first: wherever the documents came from, equal hashes are
        equal tokens.
    """
    key = hashlib.sha256(f"{FORMAT}/{documents.fingerprint}/{tokenizer.identity}/{fraction}".encode()).hexdigest()
    folder = Path(cache_folder).expanduser() / key[:32]
    if builds and not folder.exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            making = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent))
        except OSError as error:
            reason = f"cannot be written: {error.strerror}"
            raise ConfigError([f"training.cache_folder = {show(cache_folder)}: {reason}"]) from None
        try:
            _build(making, documents, tokenizer, fraction)
            making.rename(folder)
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            if not folder.exists():  # another host that shares the folder may have been first
                raise
    while not folder.exists():  # no collective: tokenising may take longer than one may
        time.sleep(0.1)
    made = json.loads((folder / "tokens.json").read_text())
    train, held_out = (_map(folder / f"{split}.bin", made["dtype"]) for split in ("train", "held_out"))
    return train, held_out, made["sha256"]


def _map(file: Path, dtype: str) -> np.ndarray:
    """A file as a flat array that is read when it is used. An empty one cannot be mapped."""
    return np.memmap(file, dtype=dtype, mode="r") if file.stat().st_size else np.empty(0, dtype=dtype)


def _build(folder: Path, documents: Documents, tokenizer: Tokenizer, fraction: float) -> None:
    """Tokenise all documents into the files of a folder."""
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    count, n_tokens, said, content = (
        0,
        0,
        time.monotonic(),
        hashlib.sha256(f"{tokenizer.bos}/{tokenizer.eos}/".encode()),
    )
    with open(folder / "train.bin", "wb") as train, open(folder / "held_out.bin", "wb") as held_out:
        for texts in documents.batches():
            for tokens in encode_documents(tokenizer, texts):
                encoded = tokens.astype(dtype).tobytes()
                if is_validation_document(count, fraction):
                    held_out.write(encoded)
                else:
                    train.write(encoded)
                    content.update(encoded)
                count, n_tokens = count + 1, n_tokens + len(tokens)
            if time.monotonic() - said > 10:
                said = time.monotonic()
                print(f"tokenising: {count:,} documents, {n_tokens:,} tokens", file=sys.stderr, flush=True)
    made = {"dtype": dtype, "documents": count, "tokens": n_tokens, "sha256": content.hexdigest()}
    (folder / "tokens.json").write_text(json.dumps(made))


class Sequence(NamedTuple):
    """A packed sequence; int64 [T] each."""

    inputs: np.ndarray
    targets: np.ndarray
    """The token that follows, IGNORED where there is nothing to predict."""
    documents: np.ndarray
    """Position of each token in its document, or in the part of it that this sequence has."""


def cut_sequence(tokens: np.ndarray, tokenizer: Tokenizer) -> Sequence:
    """A packed sequence of T + 1 tokens. What follows the end of a document is another document, which nothing before
    it foretells: that target is ignored."""
    inputs, targets = tokens[:-1].astype(np.int64), tokens[1:].astype(np.int64)
    ends = inputs == tokenizer.eos
    if tokenizer.bos is not None:
        ends &= targets == tokenizer.bos  # some tokenizers have one mark for both: that of a begin ends nothing
    targets[ends] = IGNORED
    return Sequence(inputs, targets, positions_in_documents(ends))


def positions_in_documents(ends: np.ndarray) -> np.ndarray:
    """Positions that begin again at 0 after each token that ends a document.

    Args:
        ends: bool [T].
    """
    places = np.arange(len(ends))
    begins = np.zeros(len(ends), np.int64)
    begins[1:][ends[:-1]] = places[1:][ends[:-1]]
    return places - np.maximum.accumulate(begins)


class PackedSequences:
    """The training split: an endless order of packed sequences, the same for any number of ranks.

    Args:
        tokens: flat token numbers.
        shuffle: draw a new order each epoch, from (seed, epoch).
    """

    def __init__(self, tokens: np.ndarray, *, seq_len: int, tokenizer: Tokenizer, shuffle: bool, seed: int):
        self.tokens, self.seq_len, self.tokenizer = tokens, seq_len, tokenizer
        self.shuffle, self.seed = shuffle, seed
        self.n_sequences = max(len(tokens) - 1, 0) // seq_len
        if not self.n_sequences:
            raise ConfigError(
                [
                    f"training.seq_len = {seq_len}: the dataset has {len(tokens):,} tokens, fewer than the seq_len + 1 "
                    "of one packed sequence; set it lower or train on more text"
                ]
            )
        self._epoch, self._order = -1, np.empty(0)

    def __str__(self) -> str:
        return f"{self.n_sequences:,} packed sequences an epoch"

    def __getitem__(self, index: int) -> Sequence:
        """The sequence with a global index 0, 1, 2, ...; epochs follow one another."""
        epoch, position = divmod(index, self.n_sequences)
        if self.shuffle:
            if epoch != self._epoch:
                # RandomState: numpy promises that its numbers never change, as it does not for newer generators.
                generator = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((self.seed, epoch))))
                self._epoch, self._order = epoch, generator.permutation(self.n_sequences)
            position = int(self._order[position])
        start = position * self.seq_len
        return cut_sequence(self.tokens[start : start + self.seq_len + 1], self.tokenizer)

    def read(self, first: int, stride: int, streams: dict[int, Any]) -> Iterator[tuple[Sequence, None]]:
        """Sequences first, first + stride, ..., without end, each with None: their index is all the state there is, and
        no stream has any."""
        while True:
            yield self[first], None
            first += stride


class ValidationSequences:
    """The validation split, once through and in order; the last sequence is padded with ignored targets."""

    def __init__(self, tokens: np.ndarray, *, seq_len: int, tokenizer: Tokenizer):
        self.tokens, self.seq_len, self.tokenizer = tokens, seq_len, tokenizer
        self.n_sequences = -(-max(len(tokens) - 1, 0) // seq_len)

    def __str__(self) -> str:
        return f"{self.n_sequences:,} packed sequences"

    def __getitem__(self, index: int) -> Sequence:
        """The sequence with an index; past the end, nothing but padding, so that every rank can take as many batches.
        Padding continues the last document."""
        sequence = Sequence(*(np.empty(0, np.int64) for _ in Sequence._fields))
        if index < self.n_sequences:
            start = index * self.seq_len
            sequence = cut_sequence(self.tokens[start : start + self.seq_len + 1], self.tokenizer)
        n, missing = len(sequence.inputs), self.seq_len - len(sequence.inputs)
        last = sequence.documents[-1] if n else -1
        return Sequence(
            np.pad(sequence.inputs, (0, missing)),
            np.pad(sequence.targets, (0, missing), constant_values=IGNORED),
            np.append(sequence.documents, np.arange(last + 1, last + 1 + missing)),
        )
