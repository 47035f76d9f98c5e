"""Best-fit packing (arXiv:2404.10830): documents are not split, and share sequences so that few tokens are padding.

Each shard of the token cache is packed separately: documents are placed by decreasing length, each into the fullest
sequence that still has room. A packing table stores which documents are in each sequence.

    <token cache>/best_fit-train-2048-split/packing.json    how many sequences each shard has
    <token cache>/best_fit-train-2048-split/00000.table     int64: the index of each sequence's first document,
                                                            then (first token, number of tokens) of each document
"""

import bisect
import contextlib
import functools
import os
import time
from typing import BinaryIO, Literal

import numpy as np

from titanlite.config.errors import TrainingError
from titanlite.config.loader import ConfigError, show
from titanlite.config.regular_file import open_file
from titanlite.config.schema import Training
from titanlite.data import token_shards
from titanlite.data.packing import PADDING, PackedSequences, Sequence, positions_in_documents
from titanlite.data.token_shards import DamagedShardError, RecordWithChecksum, Split, TokenCache
from titanlite.files.durable import Checksum, Int63, Record, cannot_read, checksum, replace_file
from titanlite.launch.progress import progress
from titanlite.loss import IGNORED

INDEX = "packing.json"

LongDocuments = Literal["split", "drop", "truncate", "reject"]
"""How to treat documents that are longer than a sequence."""


# Packing -------------------------------------------------------------------------------------------------------------


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return the bin of each item, int64. Every bin has the same capacity. The longest items are placed first, each
    into the fullest bin that still has room for the item. Items of one length are placed together: if a bin takes one
    of them and has room for another, it is still the fullest such bin. So the time grows with the number of different
    lengths, not of items."""
    bins, n_bins = np.empty(len(lengths), np.int64), 0
    order = np.argsort(-lengths, kind="stable")
    sizes, begins = np.unique(-lengths[order], return_index=True)
    free: dict[int, list[int]] = {}  # lists of bins, by their free space
    spaces: list[int] = []  # the keys of `free`, ascending

    def put_back(space: int, chosen: list[int]) -> None:
        if space and chosen:
            if space not in free:
                bisect.insort(spaces, space)
            free.setdefault(space, []).extend(chosen)

    for size, at, end in zip((-sizes).tolist(), begins.tolist(), [*begins.tolist(), len(lengths)][1:], strict=True):
        while at < end:
            index = bisect.bisect_left(spaces, size)
            space = spaces[index] if index < len(spaces) else capacity
            per_bin = space // size
            n = -(-(end - at) // per_bin)
            if index < len(spaces):
                chosen = free[space][-n:]
                del free[space][-n:]
                if not free[space]:
                    del free[space], spaces[index]
            else:
                chosen = list(range(n_bins, n_bins + n))
                n_bins += n
            placed = min(len(chosen) * per_bin, end - at)
            bins[order[at : at + placed]] = np.repeat(chosen, per_bin)[:placed]
            n_full, rest = divmod(placed, per_bin)
            put_back(space - per_bin * size, chosen[:n_full])
            put_back(space - rest * size, chosen[n_full:])
            at += placed
    return bins


def split_documents(lengths: np.ndarray, seq_len: int, long: LongDocuments) -> np.ndarray:
    """Return the first token and the length of each chunk, int64 [chunks, 2], for documents that are laid end to end. A
    chunk is a document, or seq_len + 1 tokens of a longer one. Neighbouring chunks share one token, so that every token
    of a document except the first is a target once. A document of one token has no target and is left out."""
    starts, lengths = np.cumsum(lengths, dtype=np.int64) - lengths, lengths.astype(np.int64)
    if long == "drop":
        starts, lengths = starts[lengths <= seq_len + 1], lengths[lengths <= seq_len + 1]
    elif long != "split":
        lengths = np.minimum(lengths, seq_len + 1)
    n_chunks = np.maximum(-(-(lengths - 1) // seq_len), 0)
    number = np.arange(n_chunks.sum()) - np.repeat(np.cumsum(n_chunks) - n_chunks, n_chunks)
    begins = number * seq_len  # offset of each chunk in its document
    return np.stack(
        [np.repeat(starts, n_chunks) + begins, np.minimum(np.repeat(lengths, n_chunks) - begins, seq_len + 1)], axis=1
    )


def pack(chunks: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Put chunks, int64 [chunks, 2], into sequences, ordered by their first chunks. Return the index of each sequence's
    first chunk, int64 [sequences + 1], and the chunks sorted by sequence."""
    bins = best_fit_decreasing(chunks[:, 1], seq_len + 1)
    _, first, numbers = np.unique(bins, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    bins = rank[numbers]
    begins = np.append(0, np.cumsum(np.bincount(bins, minlength=len(first))))
    return begins.astype(np.int64), chunks[np.argsort(bins, kind="stable")]


def lay_out(documents: list[np.ndarray], seq_len: int, not_trained: int) -> Sequence:
    """Return the packed sequence of documents of at most seq_len + 1 tokens together. `not_trained`: the bit that marks
    tokens that are not targets; 0 if all are targets. Padding is a separate document with ignored targets."""
    stored = np.concatenate([np.empty(0, np.int64), *documents])
    tokens, n = stored & ~not_trained, len(stored)
    inputs, targets = np.zeros(seq_len, np.int64), np.full(seq_len, IGNORED, np.int64)
    inputs[: min(n, seq_len)] = tokens[:seq_len]
    targets[n:] = PADDING
    targets[: max(n - 1, 0)] = np.where(stored & not_trained, IGNORED, tokens)[1:]
    last = np.cumsum([len(document) for document in documents], dtype=np.int64) - 1
    ends = np.zeros(seq_len, bool)
    ends[last[last < seq_len]] = True
    targets[ends] = IGNORED
    return Sequence(inputs, targets, positions_in_documents(ends))


# Packing tables ------------------------------------------------------------------------------------------------------


class Table(Record):
    """The size of a shard's packing table."""

    sequences: Int63
    chunks: Int63
    xxh3_64: Checksum  # checksum of the file

    @property
    def file_size(self) -> int:
        return 8 * (self.sequences + 1 + 2 * self.chunks)


class PackingIndex(RecordWithChecksum):
    """The content of packing.json."""

    tables: list[Table]  # packing table of each shard of the token cache
    documents: Int63
    long_documents: Int63
    """Number of documents longer than a sequence, which were split, dropped or truncated."""
    tokens: Int63  # number of tokens in all sequences, without padding


def open_best_fit(cache: TokenCache, split: Split, training: Training, *, builds_cache: bool) -> "BestFit":
    """Return the best-fit packing of a split of a token cache. The rank with `builds_cache` writes missing tables.
    Raises ConfigError if training.long_conversations = "reject" and a conversation is too long."""
    packing, index = BestFit(cache, split, training), None
    if builds_cache:
        with contextlib.suppress(FileNotFoundError, DamagedShardError):  # damaged tables are written again
            index = packing.read_index(check_tables=True)
        try:
            index = index or packing.write_tables()
        except OSError as error:
            option = f"training.cache_folder = {show(training.cache_folder)}"
            raise ConfigError([f"{option}: cannot be written: {error.strerror}"]) from None
    while index is None:
        time.sleep(0.2)
        with contextlib.suppress(FileNotFoundError, DamagedShardError):
            index = packing.read_index(check_tables=False)
    packing.index = index
    return packing


def _table_name(number: int) -> str:
    return f"{number:05}.table"


class BestFit:
    """The packed sequences of a split, each read from the token cache when the sequence is needed."""

    def __init__(self, cache: TokenCache, split: Split, training: Training):
        has_targets = training.dataset_format != "text"  # conversations have a bit for untrained tokens
        self.cache, self.split, self.seq_len = cache, split, training.seq_len
        self.long: LongDocuments = training.long_conversations if has_targets else "split"
        self.not_trained = token_shards.not_trained_bit(cache.index.dtype) if has_targets else 0
        self.folder = cache.folder / f"best_fit-{split}-{self.seq_len}-{self.long}"
        self.index: PackingIndex
        self._open = functools.lru_cache(maxsize=token_shards.OPEN_FILES)(self._open_table)
        self._verified: set[int] = set()

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([table.sequences for table in self.index.tables])

    def read_index(self, *, check_tables: bool) -> PackingIndex:
        """Return the content of packing.json. Raises DamagedShardError if the packing belongs to another cache."""
        index = token_shards.read_record(self.folder / INDEX, PackingIndex)
        if len(index.tables) != len(self.cache.index.shards):
            raise DamagedShardError(f"{INDEX}: the number of shards differs")
        for number, table in enumerate(index.tables if check_tables else []):
            token_shards.check_size(self.folder / _table_name(number), table.file_size)
        return index

    def write_tables(self) -> PackingIndex:
        """Pack the documents of each shard, write the tables and, once all are complete, packing.json."""
        self.folder.mkdir(mode=0o755, exist_ok=True)
        token_shards.check_trusted(self.folder)
        tables, n_long, longest, n_tokens, most = [], 0, 0, 0, self.seq_len + 1
        counts = [getattr(shard, f"{self.split}_documents") for shard in self.cache.index.shards]
        n_documents = sum(counts)
        with progress("packing the documents", total=n_documents, unit="documents") as advance:
            for number, count in enumerate(counts):
                lengths = self.cache.read(number, f"{self.split}_documents", 0, count).astype(np.int64)
                chunks = split_documents(lengths, self.seq_len, self.long)
                if self.long == "truncate":
                    chunks = self._with_targets(number, chunks)
                begins, chunks = pack(chunks, self.seq_len)
                data = begins.astype("<i8").tobytes() + chunks.astype("<i8").tobytes()
                tables.append(Table(sequences=len(begins) - 1, chunks=len(chunks), xxh3_64=checksum(data)))
                replace_file(self.folder / _table_name(number), data, by_one=False)
                n_long += int((lengths > most).sum())
                longest = max(longest, int(lengths.max(initial=0)))
                n_tokens += int(chunks[:, 1].sum())
                advance(count)
        if n_long and self.long == "reject":
            problem = f'training.long_conversations = "reject": {n_long:,} of {n_documents:,} conversations have more '
            problem += f"than the {most:,} tokens of a sequence, and the longest has {longest:,}; set a larger "
            raise ConfigError([problem + 'training.seq_len, or "drop" or "truncate"'])
        index = PackingIndex(tables=tables, documents=n_documents, long_documents=n_long, tokens=n_tokens)
        index.publish(self.folder / INDEX)
        return index

    def _with_targets(self, number: int, chunks: np.ndarray) -> np.ndarray:
        """Drop truncated conversations that contain no token of the assistant."""

        def has_target(begin: int, length: int) -> bool:
            return not (self.cache.read(number, self.split, begin + 1, begin + length) & self.not_trained).all()

        full = np.flatnonzero(chunks[:, 1] == self.seq_len + 1)
        return np.delete(chunks, [row for row in full.tolist() if not has_target(*chunks[row].tolist())], axis=0)

    @property
    def n_sequences(self) -> int:
        return int(self._ends[-1])

    def __str__(self) -> str:
        return f"{self.n_sequences:,} packed sequences"

    @property
    def summary(self) -> str:
        """Return a line with the share of padding and the number of documents that were split, dropped or truncated."""
        padding = 1 - self.index.tokens / max(self.n_sequences * (self.seq_len + 1), 1)
        documents = "documents" if self.long == "split" else "conversations"
        done = {"drop": "dropped", "truncate": "truncated"}.get(self.long, "split")
        changed = f"{self.index.long_documents:,} of {self.index.documents:,} {documents} {done}"
        return f"best fit: {padding:.2%} padding, {changed}"

    @property
    def identity(self) -> str:
        """Return a hash of the packing tables, which determine the documents of each sequence."""
        return checksum("/".join(table.xxh3_64 for table in self.index.tables).encode())

    def __getitem__(self, index: int) -> Sequence:
        """Return a sequence; past the end, a sequence of padding only. If the packing table is damaged, removes
        packing.json, so that the next start packs again, and raises TrainingError."""
        if index >= self.n_sequences:
            return lay_out([], self.seq_len, 0)
        number = int(np.searchsorted(self._ends, index, side="right"))
        position = index - int(self._ends[number - 1] if number else 0)
        try:
            begin, end = self._read(number, position, position + 2)
            first, last = (self.index.tables[number].sequences + 1 + 2 * int(chunk) for chunk in (begin, end))
            chunks = self._read(number, first, last).reshape(-1, 2).tolist()
        except DamagedShardError as error:
            with contextlib.suppress(OSError):
                (self.folder / INDEX).unlink()
            raise TrainingError(f"{self.folder}: {error}; the next start packs the documents again") from None
        except OSError as error:
            raise cannot_read(str(self.folder / _table_name(number)), error) from None
        documents = [self.cache.read(number, self.split, begin, begin + length) for begin, length in chunks]
        return lay_out(documents, self.seq_len, self.not_trained)

    def _open_table(self, number: int) -> BinaryIO:
        """Open the file of a packing table. The first time, verify the table's checksum."""
        path, table = self.folder / _table_name(number), self.index.tables[number]
        token_shards.check_size(path, table.file_size)
        file = open_file(path, buffering=0)
        if number not in self._verified and checksum(file.read()) != table.xxh3_64:
            raise DamagedShardError(f"{path.name}: the checksum differs")
        self._verified.add(number)
        return file

    def _read(self, number: int, begin: int, end: int) -> np.ndarray:
        if len(data := os.pread(self._open(number).fileno(), 8 * (end - begin), 8 * begin)) != 8 * (end - begin):
            raise DamagedShardError(f"{_table_name(number)}: ends too early")
        return np.frombuffer(data, "<i8")


class BestFitSequences(PackedSequences):
    """The training split as an endless list of best-fit packed sequences."""

    def __init__(self, packing: BestFit, training: Training, *, seed: int):
        self.packing, self.shuffle, self.seed, self.n_sequences = packing, training.shuffle, seed, packing.n_sequences
        self.seq_len = packing.seq_len
        if not self.n_sequences:
            most = f"{self.seq_len + 1:,} tokens"
            short = f'conversations of at most {most}; set it higher, or training.long_conversations = "truncate"'
            what = {"split": "documents to train on", "truncate": f"answers in the first {most}; set it higher"}
            problem = f"training.seq_len = {self.seq_len}: the dataset has no {what.get(packing.long, short)}"
            raise ConfigError([problem])

    def __str__(self) -> str:
        return f"{self.packing} per epoch, {self.packing.summary}"

    def sequence(self, position: int) -> Sequence:
        return self.packing[position]
