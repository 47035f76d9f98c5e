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

from titanlite.config.loader import ConfigError
from titanlite.data.documents import Source, reading, text_of
from titanlite.data.packed import Sequence, cut_sequence
from titanlite.data.tokenizer import Tokenizer, encode_documents

State = dict[str, Any]
"""{"position": state of the datasets.IterableDataset before a document, None before the first; "used": how many of that
document's tokens are used up}; plain JSON."""


class StreamedSequences:
    """Args:
    dataset: a datasets.IterableDataset.
    column: name of its text.
    n_streams: how many streams its files are dealt to.
    """

    def __init__(
        self, dataset: Any, column: str, source: Source, tokenizer: Tokenizer, *, seq_len: int, n_streams: int
    ):
        if dataset.num_shards < n_streams:
            raise ConfigError(
                [
                    f"training.streams = {n_streams}: the dataset has {dataset.num_shards} files, and a file cannot be "
                    "split without depending on the ranks; set it to at most that, with no more data-parallel ranks, "
                    "or training.streaming = false"
                ]
            )
        self.dataset, self.column, self.source, self.tokenizer = dataset, column, source, tokenizer
        self.seq_len, self.n_streams = seq_len, n_streams

    def __str__(self) -> str:
        return f"{self.n_streams} streams of {self.dataset.num_shards} files"

    def read(self, first: int, stride: int, streams: dict[int, State]) -> Iterator[tuple[Sequence, tuple[int, State]]]:
        """Sequences first, first + stride, ..., without end, each with the number of its stream and the stream's state
        after it.

        Args:
            streams: states that streams start from, by number; those it does not name start from their beginning.
        """
        reading: dict[int, Iterator[tuple[np.ndarray, State]]] = {}
        while True:
            number = first % self.n_streams
            if number not in reading:
                reading[number] = self._stream(number, streams.get(number, {"position": None, "used": 0}))
            tokens, state = next(reading[number])
            yield cut_sequence(tokens, self.tokenizer), (number, state)
            first += stride

    def _stream(self, number: int, start: State) -> Iterator[tuple[np.ndarray, State]]:
        """Packed sequences of T + 1 tokens of one stream; the last token of one is the first of the next."""
        pending: deque[list[Any]] = deque()  # [position before the document, its tokens, how many are used]
        documents = self._documents(number, start)
        while True:
            while sum(len(tokens) - used for _, tokens, used in pending) <= self.seq_len:
                pending.append(list(next(documents)))
            length = self.seq_len + 1
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

    def _documents(self, number: int, start: State) -> Iterator[tuple[dict[str, Any] | None, np.ndarray, int]]:
        """Documents of one stream, over and over: position before the document, its tokens, tokens used already."""
        files = self.dataset.shard(num_shards=self.n_streams, index=number)
        beginning = files.state_dict()
        position, used = start["position"], start["used"]
        while True:
            files.load_state_dict(beginning if position is None else position)
            is_empty = position is None
            for row in reading(self.source, files):
                (tokens,) = encode_documents(self.tokenizer, [text_of(self.source, self.column, row[self.column])])
                yield position, tokens, used
                is_empty, used, position = False, 0, files.state_dict()
            if is_empty:
                raise ConfigError([f"training.streams = {self.n_streams}: stream {number} has no documents"])
            position = None
