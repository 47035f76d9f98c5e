"""Streaming: packed sequences of documents that are read and tokenized while training, for large datasets.

The files of the dataset are partitioned into a fixed number of streaming shards, and packed sequence k is the next one
of shard k mod shards. Data-parallel rank r of d takes the sequences k = r mod d and so, as d divides the number of
shards, complete shards: one rank tokenizes each document, and the order does not depend on the number of ranks.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from titanlite.config.loader import ConfigError
from titanlite.data.documents import Source, read_items, text_of
from titanlite.data.packing import Sequence, split_sequence
from titanlite.data.tokenizer import Tokenizer, encode_documents

ShardState = dict[str, Any]
"""Where a shard is resumed, as plain JSON: {"position": state of the datasets.IterableDataset before the first document
that is not used up, None before any; "used": how many of that document's tokens are}."""


class StreamingSequences:
    """The training split as an endless order of packed sequences, read from streaming shards.

    `dataset` is a datasets.IterableDataset, and `column` names its text. Fewer files than shards raise ConfigError.
    """

    def __init__(self, dataset: Any, column: str, source: Source, tokenizer: Tokenizer):
        self.dataset, self.column, self.source, self.tokenizer = dataset, column, source, tokenizer
        self.seq_len, self.n_shards = source.training.seq_len, source.training.streaming_shards
        if dataset.num_shards < self.n_shards:
            problem = f"training.streaming_shards = {self.n_shards}: the dataset has {dataset.num_shards} files, and a "
            problem += "file cannot be split without depending on the ranks; set it to at most that, with no more "
            raise ConfigError([problem + "data-parallel ranks, or training.streaming = false"])

    def __str__(self) -> str:
        return f"{self.n_shards} streaming shards of {self.dataset.num_shards} files"

    def read(
        self, first: int, stride: int, shard_states: dict[int, ShardState]
    ) -> Iterator[tuple[Sequence, tuple[int, ShardState]]]:
        """Yield the sequences first, first + stride, ..., without end, each with the index of its shard and the shard's
        state after it. Shards start from their `shard_states` or, without one, from their beginning."""
        readers: dict[int, Iterator[tuple[np.ndarray, ShardState]]] = {}
        while True:
            shard = first % self.n_shards
            if shard not in readers:
                readers[shard] = self._read_shard(shard, shard_states.get(shard, {"position": None, "used": 0}))
            tokens, state = next(readers[shard])
            yield split_sequence(tokens, self.tokenizer), (shard, state)
            first += stride

    def _read_shard(self, shard: int, start: ShardState) -> Iterator[tuple[np.ndarray, ShardState]]:
        """Yield sequences of T + 1 tokens of one shard; the last token of one is the first of the next."""
        pending: deque[list[Any]] = deque()  # [position before the document, its tokens, how many are used]
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
            position, _, used = pending[0]  # at least the shared last token is pending
            yield sequence, {"position": position, "used": used}

    def _documents(self, shard: int, start: ShardState) -> Iterator[tuple[dict[str, Any] | None, np.ndarray, int]]:
        """Yield the documents of one shard, over and over: position before the document, its tokens, how many of them
        are used already."""
        files = self.dataset.shard(num_shards=self.n_shards, index=shard)
        beginning = files.state_dict()
        position, used = start["position"], start["used"]
        while True:
            files.load_state_dict(beginning if position is None else position)
            is_empty = position is None
            for item in read_items(self.source, files):
                text = text_of(self.source, self.column, item[self.column])
                yield position, encode_documents(self.tokenizer, [text])[0], used
                is_empty, used, position = False, 0, files.state_dict()
            if is_empty:
                raise ConfigError([f"training.streaming_shards = {self.n_shards}: shard {shard} has no documents"])
            position = None
