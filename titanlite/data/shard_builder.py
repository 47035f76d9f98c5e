"""Tokenize some segments of a dataset into a shard of the token cache."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config.schema import Training
from titanlite.data.documents import read_documents
from titanlite.data.files import END, Segment, place
from titanlite.data.hf_tokenizer import BATCH, restart_time_limit
from titanlite.data.shard_files import write_shard
from titanlite.data.source import Source, Template
from titanlite.data.token_shards import DType, Shard, Split, not_trained_bit
from titanlite.data.tokenizer import Rows, Tokenizer, encode_documents
from titanlite.data.worker import Worker, named, send

Report = Callable[[int, int, list[str]], None]
"""Is called with the bytes of the dataset's files and the tokens since the last call, and the names of columns and of
keys of messages that are not read."""


@dataclasses.dataclass(frozen=True)
class CacheOptions:
    """What the shards of a token cache are made of."""

    training: Training
    path_option: str
    hf_assets_path: str
    validation_fraction: float
    template: str
    """The name of a Template; empty: documents are plain text."""
    rows: Rows | None = None
    """Of a model that has fewer than the tokenizer has ids."""


def is_validation_document(shard: int, document: int, fraction: float) -> bool:
    """Return whether a document of a shard, counted from 0, belongs to the validation split: a fraction of the
    documents, evenly spaced over the shard, and the same for every seed and number of ranks. Shards begin at different
    phases, so that shards of few documents have the fraction together."""
    phase = shard * 0.6180339887498949 % 1  # the golden ratio: any number of shards spread evenly
    return int(phase + (document + 1) * fraction) > int(phase + document * fraction)


def build_shard(
    path: Path,
    dtype: DType,
    number: int,
    segments: list[Segment],
    options: CacheOptions,
    report: Report,
    tokenizer: Tokenizer,
    at: Callable[[str, int], None] = lambda file, begin: None,
) -> Shard:
    """Tokenize segments into a new file. `at` is called with the place that is read next. Raises ConfigError or
    TrainingError for what cannot be read."""
    source, unread = Source(options.training, options.path_option), set[str]()
    encode: Callable[[list[Any]], list[np.ndarray]] = functools.partial(encode_documents, tokenizer)
    document_of: Callable[[dict[str, Any]], str] | None = None
    if options.template:
        template: Template = named(options.template)(tokenizer)
        encode = functools.partial(template.encode, dtype=dtype)
        document_of = functools.partial(template.document, options.training, unread=unread)

    def encoded() -> Iterator[tuple[list[str], list[np.ndarray], int]]:
        """Yield texts, their tokens, and the bytes of the files that were read; two batches are encoded at a time, so
        that the library's threads always have work."""
        running: list[Any] = []
        for texts, n_bytes in _batches(source, segments, document_of, unread, at):
            running.append((texts, pool.submit(encode, texts), n_bytes))
            if len(running) > 2:
                texts, future, n_bytes = running.pop(0)
                yield texts, future.result(), n_bytes
        for texts, future, n_bytes in running:
            yield texts, future.result(), n_bytes

    def documents() -> Iterator[tuple[Split, np.ndarray, int]]:
        document, told = 0, set[str]()
        for texts, tokens, n_bytes in encoded():
            for text, own in zip(texts, tokens, strict=True):
                if options.rows:
                    options.rows.require(text, own & ~np.uint32(not_trained_bit(dtype) if options.template else 0))
                is_validation = is_validation_document(number, document, options.validation_fraction)
                size = len(text) if text.isascii() else len(text.encode())
                yield "validation" if is_validation else "train", own, size
                document += 1
            report(n_bytes, sum(map(len, tokens)), sorted(unread - told))
            told.update(unread)

    # Not in a generator: the garbage collector may close one in any thread, and a thread that is just starting would
    # wait for itself (Python 3.11).
    with ThreadPoolExecutor(2) as pool:
        return write_shard(path, dtype, documents())


def build_in_worker(worker: Worker, *arguments: Any) -> Shard:
    """Build a shard in another process; the other arguments are those of build_shard up to `report`."""
    *of_shard, options, report = arguments
    at = "", 0

    def received(kind: str, *content: Any) -> None:
        nonlocal at
        if kind == "report":
            report(*content)
        else:
            at = content

    def where() -> str:
        file, begin = at
        return f" at {place(options.training, file, begin) if file else f'row {begin + 1:,}'}, or shortly after it"

    return worker.call(_build_and_send, *of_shard, options, where=where, received=received)


def _build_and_send(
    tokenizer: Tokenizer, path: Path, dtype: DType, number: int, segments: list[Segment], options: CacheOptions
) -> Shard:
    def report(*content: Any) -> None:
        send("report", content)

    of_shard = path, dtype, number, segments, options
    return build_shard(*of_shard, report, tokenizer, lambda *document: send("at", document))


def _batches(
    source: Source, segments: list[Segment], document_of: Any, unread: set[str], at: Any
) -> Iterator[tuple[list[str], int]]:
    """Yield texts of BATCH characters or more together, and how many bytes of the files they are, about."""
    texts, size, n_bytes = list[str](), 0, 0.0
    for segment in segments:
        position = segment.begin
        at(segment.file, position)
        per_row = segment.bytes / max(segment.end - segment.begin, 1) if segment.end < END else 0
        for end, text in read_documents(source, segment, document_of, unread):
            texts.append(text)
            size += len(text)
            n_bytes += (end - position) * per_row
            position = end
            if size >= BATCH:
                yield texts, round(n_bytes)
                texts, size, n_bytes = [], 0, 0
            if document_of or not texts:
                at(segment.file, position)
            restart_time_limit()
        n_bytes += 0 if per_row else segment.bytes
    if texts:
        yield texts, round(n_bytes)
