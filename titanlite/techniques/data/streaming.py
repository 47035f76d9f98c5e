"""Streaming: packed sequences of documents that are read and tokenized during training, for large datasets. The dataset
is partitioned into n streaming shards. Packed sequence k is the next sequence of shard k mod n. Data-parallel rank r of
d takes the sequences with k mod d = r. Because d divides n, a rank takes complete shards: only one rank tokenizes a
document, and the order does not depend on the number of ranks."""

import copy
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import torch.distributed as dist
from pydantic import Field

from titanlite.config.loader import ConfigError
from titanlite.data import hub
from titanlite.data.documents import read_documents, text_of
from titanlite.data.files import Segment, is_splittable
from titanlite.data.packing import Sequence, split_sequence
from titanlite.data.shuffle import permuted
from titanlite.data.source import Source
from titanlite.data.token_shards import dtype_for
from titanlite.data.tokenizer import Tokenizer, encode_documents
from titanlite.files.durable import Int63, Record, parse_part

ShardState = dict[str, Any]  # a _Shard, as plain JSON


class _Shard(Record):
    """The position of a stream in a shard: where the first document with unused tokens begins (None: at the start), how
    many of its tokens are used, the number of the current shuffled block, and how many of its sequences are used."""

    position: tuple[Int63, Int63] | dict[str, Any] | None
    used: Int63
    block: Int63 = 0
    taken: Int63 = 0


Saved = dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], _Shard]
"""The positions that a checkpoint saves: those of the shards that the stream has begun to read, by shard number."""


def partition(segments: list[Segment], n: int) -> list[list[Segment]]:
    """Partition a dataset into n shards of nearly equal bytes, each with its rows in order. If all files can be split,
    a shard is a range of rows; otherwise each file, largest first, goes to the shard with the fewest bytes."""
    shards: list[list[Segment]] = [[] for _ in range(n)]
    if all(map(is_splittable, segments)):
        total = sum(segment.bytes for segment in segments)
        first = 0  # bytes in the segments before `segment`
        for segment in segments:
            n_rows = segment.end - segment.begin
            for number, shard in enumerate(shards):
                limits = (total * number // n, total * (number + 1) // n)
                low, high = (min(max(limit - first, 0), segment.bytes) for limit in limits)
                if low < high:
                    begin, end = (segment.begin - n_rows * -limit // segment.bytes for limit in (low, high))
                    shard.append(Segment(segment.file, begin, end, high - low))
            first += segment.bytes
        return shards
    sizes = [0] * n
    for number in sorted(range(len(segments)), key=lambda number: (-segments[number].bytes, number)):
        smallest = sizes.index(min(sizes))
        sizes[smallest] += max(segments[number].bytes, 1)
        shards[smallest].append(segments[number])
    return [sorted(shard, key=segments.index) for shard in shards]


class StreamingSequences:
    """The training split as an endless list of packed sequences, read from streaming shards. With training.shuffle, the
    sequences of a shard are shuffled in blocks of training.streaming_shuffle_block, by `seed`. `dataset` comes from
    documents.open_stream. Raises ConfigError if there are too few files for the shards."""

    def __init__(self, dataset: list[Segment] | Any, source: Source, tokenizer: Tokenizer, *, seed: int):
        self.source, self.tokenizer, self.seed = source, tokenizer, seed
        options = source.training
        self.seq_len, self.n_shards = options.seq_len, options.streaming_shards
        self.block = options.streaming_shuffle_block if options.shuffle else 1
        self._saved, self.passed = dict[int, ShardState](), dict[int, ShardState]()
        """States of shards by number: `_saved` is from the checkpoint, `passed` is of the last sequences trained on."""
        self.shards: list[Any]
        if source.is_files:
            if not any(segment.bytes for segment in dataset):
                raise ConfigError([f"{source}: has no documents"])
            self.shards, self.n_files = partition(dataset, self.n_shards), len(dataset)
            enough = all(self.shards)
        else:
            self.n_files = dataset.num_shards
            enough = self.n_files >= self.n_shards
            self.shards = [dataset.shard(num_shards=self.n_shards, index=i) for i in range(self.n_shards) if enough]
            self.beginnings = [shard.state_dict() for shard in self.shards]
        if not enough:
            problem = f"training.streaming_shards = {self.n_shards}: the dataset has {self.n_files} files, and these "
            problem += "cannot be split without depending on the ranks; set it to at most that, with no more "
            raise ConfigError([problem + "data-parallel ranks, or training.streaming = false"])

    def __str__(self) -> str:
        return f"{self.n_shards} streaming shards of {self.n_files} files"

    def resumed(self, loader_state: dict[str, Any] | None) -> "StreamingSequences":
        """Return this stream from where a run stopped, as `loader_state` tells; None: from the beginning."""
        saved = parse_part(loader_state or {}, "data.streaming_shards", Saved | None) or {}
        resumed = copy.copy(self)
        resumed._saved = {int(number): each.model_dump(mode="json") for number, each in saved.items()}
        resumed.passed = {}
        return resumed

    def state(self, position: int) -> dict[str, Any]:
        """Return the state that `resumed` needs, as plain JSON. Every rank must call `state`."""
        states, gathered = dict(self._saved), [self.passed] * dist.get_world_size()
        dist.all_gather_object(gathered, self.passed)
        for passed in gathered:  # ranks that read the same shard have the same state of it
            states |= passed
        return {"streaming_shards": {str(number): states[number] for number in sorted(states)}}

    def read(self, first: int, stride: int) -> Iterator[tuple[Sequence, tuple[int, ShardState]]]:
        """Yield the sequences first, first + stride, ... without end, each with its shard's number and that shard's
        state after the sequence. A shard without a saved state starts from its beginning."""
        readers: dict[int, Iterator[tuple[np.ndarray, ShardState]]] = {}
        while True:
            if (shard := first % self.n_shards) not in readers:
                start = {"position": None, "used": 0, "block": 0, "taken": 0}
                readers[shard] = self._read_shard(shard, start | self._saved.get(shard, {}))
            tokens, state = next(readers[shard])
            yield split_sequence(tokens, self.tokenizer), (shard, state)
            first += stride

    def _read_shard(self, shard: int, start: ShardState) -> Iterator[tuple[np.ndarray, ShardState]]:
        """Yield the sequences of a shard (T + 1 tokens each), shuffled in blocks, and the shard's state after each."""
        place = {"position": start["position"], "used": start["used"]}
        block, taken = start["block"], start["taken"]
        sequences = self._in_order(shard, place)
        while True:
            tokens, places = zip(*itertools.islice(sequences, self.block), strict=True)
            after = places[-1]
            for number in range(taken, self.block):
                state = {**place, "block": block, "taken": number + 1}
                if number + 1 == self.block:
                    state = {**after, "block": block + 1, "taken": 0}
                yield tokens[permuted(number, self.block, self.seed, shard, block)], state
            place, block, taken = after, block + 1, 0

    def _in_order(self, shard: int, start: ShardState) -> Iterator[tuple[np.ndarray, ShardState]]:
        """Yield the sequences of a shard, unshuffled. Consecutive sequences of T + 1 tokens share one token."""
        pending: deque[list[Any]] = deque()  # [position before a document, its tokens, number of used tokens]
        documents = self._documents(shard, start)
        length = self.seq_len + 1
        while True:
            while sum(len(tokens) - used for _, tokens, used in pending) < length:
                pending.append(list(next(documents)))
            sequence = np.concatenate([tokens[used : used + length] for _, tokens, used in pending])[:length]
            advance = self.seq_len
            while advance:
                _, tokens, used = pending[0]
                taken = min(advance, len(tokens) - used)
                pending[0][2] += taken
                advance -= taken
                if pending[0][2] == len(tokens):
                    pending.popleft()
            position, _, used = pending[0]  # the next sequence begins with the last token of this one
            yield sequence, {"position": position, "used": used}

    def _documents(self, shard: int, start: ShardState) -> Iterator[tuple[Any, np.ndarray, int]]:
        """Yield a shard's documents, repeated endlessly: position, tokens, and the number of used tokens."""
        dtype = dtype_for(self.tokenizer.vocab_size)
        position, used = start["position"], start["used"]
        texts = self._texts_of_files if self.source.is_files else self._texts_of_hub
        while True:
            is_empty = position is None
            for begin, text in texts(shard, position):
                tokens = encode_documents(self.tokenizer, [text])[0].astype(dtype)
                if self.tokenizer.rows:
                    self.tokenizer.rows.require(text, tokens)
                if used > len(tokens):
                    problem = f"streaming shard {shard}: {used:,} tokens of a document of {len(tokens):,} are used"
                    raise ConfigError([f"checkpoint: {problem}: the dataset or state.json was changed"])
                yield begin, tokens, used
                is_empty, used = False, 0
            if is_empty:
                raise ConfigError([f"training.streaming_shards = {self.n_shards}: shard {shard} has no documents"])
            position = None

    def _texts_of_files(self, shard: int, position: list[int] | None) -> Iterator[tuple[Any, str]]:
        """Yield each document's position ([index of the shard's segment, row]) and text, from `position` on."""
        segments: list[Segment] = self.shards[shard]
        first, begin = position or (0, segments[0].begin)
        for number, segment in enumerate(segments[first:], first):
            begin = begin if number == first else segment.begin
            for end, text in read_documents(self.source, segment._replace(begin=begin)):
                yield [number, begin], text
                begin = end

    def _texts_of_hub(self, shard: int, position: dict[str, Any] | None) -> Iterator[tuple[Any, str]]:
        """Yield each document's position (a state of datasets.IterableDataset) and text, from `position` on."""
        (column,), files = self.source.columns, self.shards[shard]
        files.load_state_dict(self.beginnings[shard] if position is None else position)
        for item in hub.read(self.source, files):
            try:
                yield position, text_of(item[column], column)
            except ValueError as error:
                raise ConfigError([f"{self.source}: {error}"]) from None
            position = files.state_dict()
