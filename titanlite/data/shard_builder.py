"""Tokenize segments of a dataset into a shard of the token cache, and read the description in a shard's file."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from titanlite.config.regular_file import open_file
from titanlite.data import token_shards
from titanlite.data.documents import read_documents
from titanlite.data.files import END, Segment
from titanlite.data.source import Source
from titanlite.data.token_shards import CHECKSUM_BLOCK, HEADER, DamagedShardError, DType, Shard, Split, not_trained_bit
from titanlite.data.tokenizer import BATCH, Rows, Tokenizer, encode_documents, restart_time_limit
from titanlite.files.durable import checksum, sync

N_SEARCHED = 100  # number of documents that are searched for special tokens in ordinary text


@dataclasses.dataclass(frozen=True)
class CacheOptions:
    """The options that determine the tokens in a token cache's shards."""

    source: Source
    validation_fraction: float
    template: str
    """Name, as `name_of` returns it, of the class that makes documents from rows; empty: documents are plain text."""
    rows: Rows | None = None
    """The rows of the model's embedding, if they are fewer than the tokenizer's ids."""


def spelled(tokenizer: Tokenizer, texts: list[str]) -> set[str]:
    """Return a phrase, for a message, about each special token that texts contain as ordinary text."""
    found = [name for name in getattr(tokenizer, "names", ()) if any(name in text[:BATCH] for text in texts)]
    return {f"special token {name} (ordinary text by training.special_tokens_in_text)" for name in found}


def is_validation_document(shard: int, document: int, fraction: float) -> bool:
    """Return whether a shard's document, counted from 0, is in the validation split: an evenly spaced `fraction`, the
    same for any seed and layout. The spacing's phase differs between shards, so small shards average to `fraction`."""
    phase = shard * 0.6180339887498949 % 1  # multiples of the golden ratio spread evenly
    return int(phase + (document + 1) * fraction) > int(phase + document * fraction)


def build_shard(
    path: Path,
    dtype: DType,
    number: int,
    segments: list[Segment],
    options: CacheOptions,
    report: Callable[[int, int, list[str]], None],
    tokenizer: Tokenizer,
    at: Callable[[str, int], None] = lambda file, begin: None,
) -> Shard:
    """Tokenize segments into a new file. `report` is called with the bytes and tokens since its last call and with
    unread columns; `at` with the file and row to read next. Raises ConfigError or TrainingError for unreadable rows."""
    unread, special = set[str](), options.source.training.special_tokens_in_text == "special"
    encode: Callable[[list[Any]], list[np.ndarray]] = functools.partial(encode_documents, tokenizer, special=special)
    document_of: Callable[[dict[str, Any]], list[str]] | None = None
    if options.template:
        from titanlite.data.worker import named  # imported here, since plain text has no template

        template = named(options.template)(tokenizer)
        encode = functools.partial(template.encode, dtype=dtype)
        document_of = functools.partial(template.document, options.source.training, unread=unread)

    def encoded() -> Iterator[tuple[list[str], list[np.ndarray], int]]:
        """Yield texts, their tokens, and the bytes read, while the pool encodes the next batches."""
        batches = _batches(options.source, segments, document_of, unread, at)
        submitted = ((texts, pool.submit(encode, texts), *others) for texts, *others in batches)
        running = collections.deque(itertools.islice(submitted, 2))
        while running:
            running.extend(itertools.islice(submitted, 1))
            texts, future, n_bytes, first = running.popleft()
            at(*first)
            yield texts, future.result(), n_bytes

    def documents() -> Iterator[tuple[Split, np.ndarray, int]]:
        document = 0
        for texts, tokens, n_bytes in encoded():
            if not (number or document or special or options.template):  # find special tokens in the first documents
                unread.update(spelled(tokenizer, texts[:N_SEARCHED]))
            for text, own in zip(texts, tokens, strict=True):
                if options.rows:
                    options.rows.require(text, own & ~np.uint32(not_trained_bit(dtype) if options.template else 0))
                is_validation = is_validation_document(number, document, options.validation_fraction)
                size = len(text) if text.isascii() else len(text.encode())
                yield "validation" if is_validation else "train", own, size
                document += not getattr(text, "is_beginning", False)
            report(n_bytes, sum(map(len, tokens)), sorted(unread))

    # The pool is outside the generator: the garbage collector may close a generator in any thread, and a pool's thread
    # that is just starting would then wait for itself (Python 3.11).
    with ThreadPoolExecutor(2) as pool:
        return write_shard(path, dtype, documents())


def _batches(
    source: Source, segments: list[Segment], document_of: Any, unread: set[str], at: Any
) -> Iterator[tuple[list[str], int, tuple[str, int]]]:
    """Yield batches of BATCH characters or more: texts, their approximate bytes in the files, and the first's place."""
    texts, size, n_bytes, first = list[str](), 0, 0.0, ("", 0)
    for segment in segments:
        position = segment.begin
        at(segment.file, position)
        per_row = segment.bytes / max(segment.end - segment.begin, 1) if segment.end < END else 0
        for end, text in read_documents(source, segment, document_of, unread):
            first = first if texts else (segment.file, position)
            own = text if document_of else [text]
            texts += own
            size += sum(map(len, own))
            n_bytes += (end - position) * per_row
            position = end
            if size >= BATCH:
                yield texts, round(n_bytes), first
                texts, size, n_bytes = [], 0, 0
            if document_of or not texts:
                at(segment.file, position)
            restart_time_limit()
        n_bytes += 0 if per_row else segment.bytes
    if texts:
        yield texts, round(n_bytes), first


def _blocks(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield all bytes in blocks of CHECKSUM_BLOCK; the last block may be shorter."""
    rest = bytearray()
    for chunk in chunks:
        rest += chunk
        while len(rest) >= CHECKSUM_BLOCK:
            yield bytes(rest[:CHECKSUM_BLOCK])
            del rest[:CHECKSUM_BLOCK]
    if rest:
        yield bytes(rest)


def write_shard(path: Path, dtype: DType, documents: Iterable[tuple[Split, np.ndarray, int]]) -> Shard:
    """Write a shard. `documents` yields the split of each document, its tokens, and the number of its text's bytes."""
    lengths: dict[str, list[int]] = {"train": [], "validation": []}
    sizes, checksums, train_hash = list[int](), list[int](), xxhash.xxh3_64()

    def content() -> Iterator[bytes]:
        for split, tokens, n_bytes in documents:
            lengths[split].append(len(tokens))
            sizes.append(n_bytes)
            encoded = tokens.astype(dtype).tobytes()
            if split == "train":
                train_hash.update(encoded)
                yield encoded
            else:
                validation.write(encoded)
        validation.seek(0)
        yield from iter(lambda: validation.read(2**24), b"")
        for split_lengths in lengths.values():
            yield np.array(split_lengths, "<u4").tobytes()

    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with (
        open(path, "wb", opener=lambda name, _: os.open(name, flags, 0o644)) as file,
        tempfile.SpooledTemporaryFile(max_size=2**24, dir=path.parent) as validation,
    ):
        file.write(b"\0" * HEADER)
        for block in _blocks(content()):
            file.write(block)
            checksums.append(xxhash.xxh3_64_intdigest(block))
        file.write(encoded := np.array(checksums, "<u8").tobytes())
        shard = Shard(
            dataset=path.parent.name,
            **{f"{split}_tokens": sum(of_split) for split, of_split in lengths.items()},
            **{f"{split}_documents": len(of_split) for split, of_split in lengths.items()},
            text_bytes=sum(sizes),
            train_xxh3_64=train_hash.hexdigest(),
            checksums_xxh3_64=checksum(encoded),
        )
        file.seek(0)
        file.write(shard.header(dtype))
        sync(file)
    return shard


def read_shard(path: Path, dtype: DType) -> Shard:
    """Return a shard's description. Raises FileNotFoundError, DamagedShardError, or ConfigError if it is untrusted."""
    token_shards.regular_file(path)
    with open_file(path) as file:
        header = file.read(HEADER)
    shard = None
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        shard = Shard.model_validate_json(json.loads(header[8:])["__metadata__"]["shard"])
    if not shard or header != shard.header(dtype):
        raise DamagedShardError(f"{path.name}: the header is damaged")
    token_shards.check_dataset(path, [shard])
    token_shards.check_size(path, shard.file_size(dtype))
    return shard
