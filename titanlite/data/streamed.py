"""Packed sequences from a stream: documents are read and tokenised while training, for data too large to tokenise
first.

The files of the dataset are dealt to a fixed number of streams; packed sequence k is the next one of stream k mod
streams. A data-parallel rank r of d takes the sequences k = r mod d and so, as d divides the streams, whole streams:
each document is tokenised by one rank, and the order does not depend on how many there are. Where a run stands is,
for each stream, the position of `datasets` before the first document that is not used up, and how many tokens of it
are."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from titanlite.config import ConfigError
from titanlite.data.packed import inputs_and_targets
from titanlite.data.tokenizer import Tokenizer, encode_documents

State = dict[str, Any]
"""{"documents": state of the datasets.IterableDataset or None for its beginning, "used": tokens}; plain JSON."""


class StreamedSequences:
    """Args:
    dataset: a datasets.IterableDataset.
    column: name of its text.
    n_streams: how many streams its files are dealt to.
    """

    def __init__(self, dataset: Any, column: str, tokenizer: Tokenizer, *, seq_len: int, n_streams: int):
        if dataset.num_shards < n_streams:
            raise ConfigError(
                [
                    f"training.streams = {n_streams}: the dataset has {dataset.num_shards} files, and a file cannot be "
                    "split without depending on the ranks; set it to at most that, with no more data-parallel ranks, "
                    "or training.streaming = false"
                ]
            )
        self.dataset, self.column, self.tokenizer = dataset, column, tokenizer
        self.seq_len, self.n_streams = seq_len, n_streams
        self.states: dict[int, State] = {}

    def __str__(self) -> str:
        return f"{self.n_streams} streams of {self.dataset.num_shards} files"

    def read(self, first: int, stride: int) -> Iterator[tuple[tuple[np.ndarray, np.ndarray], tuple[int, State]]]:
        """Sequences first, first + stride, ..., without end, each with the number of its stream and the stream's state
        after it. The streams start from `self.states` where it names them."""
        streams: dict[int, Iterator[tuple[np.ndarray, State]]] = {}
        while True:
            number = first % self.n_streams
            if number not in streams:
                streams[number] = self._stream(number)
            tokens, state = next(streams[number])
            yield inputs_and_targets(tokens, self.tokenizer.eos), (number, state)
            first += stride

    def _stream(self, number: int) -> Iterator[tuple[np.ndarray, State]]:
        """Packed sequences of T + 1 tokens of one stream; the last token of one is the first of the next."""
        pending: deque[list[Any]] = deque()  # [state before the document, its tokens, how many are used]
        documents = self._documents(number)
        while True:
            while sum(len(tokens) - used for _, tokens, used in pending) <= self.seq_len:
                pending.append(list(next(documents)))
            sequence = np.concatenate([tokens[used:] for _, tokens, used in pending])[: self.seq_len + 1]
            advance = self.seq_len
            while advance:
                _, tokens, used = pending[0]
                step = min(advance, len(tokens) - used)
                pending[0][2] += step
                advance -= step
                if pending[0][2] == len(tokens):
                    pending.popleft()
            state, _, used = pending[0]  # at least the shared last token is pending
            yield sequence, {"documents": state, "used": used}

    def _documents(self, number: int) -> Iterator[tuple[State | None, np.ndarray, int]]:
        """Documents of one stream, over and over: state before the document, its tokens, tokens used already."""
        files = self.dataset.shard(num_shards=self.n_streams, index=number)
        start = self.states.get(number, {"documents": None, "used": 0})
        before, used = start["documents"], start["used"]
        beginning = files.state_dict()
        while True:
            files.load_state_dict(before if before is not None else beginning)
            empty = before is None
            for row in files:
                (tokens,) = encode_documents(self.tokenizer, [row[self.column]])
                yield before, tokens, used
                empty, used, before = False, 0, files.state_dict()
            if empty:
                raise ConfigError([f"training.streams = {self.n_streams}: stream {number} has no documents"])
            before = None
