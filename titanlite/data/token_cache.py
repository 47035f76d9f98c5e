"""The token cache: a dataset is tokenized once, into shards that every later run reads."""

import contextlib
import hashlib
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titanlite.config.loader import ConfigError, show
from titanlite.data import token_shards
from titanlite.data.documents import open_dataset
from titanlite.data.files import Segment, is_splittable
from titanlite.data.source import Source
from titanlite.data.token_shards import DamagedShardError, DType, Index, TokenCache, shard_name
from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import TrainingError
from titanlite.progress import mark, progress

PART_BYTES = 2**27
"""Bytes of the files that become one shard: more if a larger file cannot be split, and less at the end."""


VERIFIED_AT_START = 2**30
"""Bytes of a cache that is verified completely when it is opened, in less than a second. The blocks of a larger one are
verified when they are read."""


def parts_of(segments: list[Segment]) -> list[list[Segment]]:
    """Partition the rows of a dataset, in their order, into parts of about PART_BYTES."""
    parts: list[list[Segment]] = [[]]
    size = 0
    for segment in segments:
        for piece in _split(segment):
            if parts[-1] and size + piece.bytes > PART_BYTES:
                parts.append([])
                size = 0
            parts[-1].append(piece)
            size += piece.bytes
    return parts


def _split(segment: Segment) -> list[Segment]:
    """Return a segment in pieces of at most PART_BYTES, if it can be split."""
    n_rows = segment.end - segment.begin
    n = min(-(-segment.bytes // PART_BYTES), n_rows) if is_splittable(segment) else 1
    limits = [segment.begin + n_rows * i // n for i in range(n + 1)] if n > 1 else [segment.begin, segment.end]
    sizes = [segment.bytes * (i + 1) // n - segment.bytes * i // n for i in range(n)] if n > 1 else [segment.bytes]
    return [
        Segment(segment.file, begin, end, size) for begin, end, size in zip(limits[:-1], limits[1:], sizes, strict=True)
    ]


def open_token_cache(
    source: Source, tokenizer: Tokenizer, validation_fraction: float, *, cache_folder: str, builds_cache: bool
) -> TokenCache:
    """Return the token cache of a dataset. The rank with `builds_cache`, one per node, builds what is missing or
    damaged, and the other ranks of its node wait for it.

    Every rank must call it. Raises ConfigError for a dataset that cannot be read, and for a folder that cannot be
    written or is not to be trusted.
    """
    parts: list[list[Segment]] = []

    def find() -> str:
        """Fill `parts` and return the name of the cache's folder."""
        segments, fingerprint = open_dataset(source)
        if source.training.dataset_format != "text":
            from titanlite.data.shard_builder import chat_template_of

            template = chat_template_of(source.training, tokenizer)
            fingerprint += f"/{source.training.dataset_format}/{template.identity}"
        parts.extend(parts_of(segments))
        limits = [[(piece.begin, piece.end) for piece in part] for part in parts]
        options = f"{token_shards.FORMAT}/{fingerprint}/{tokenizer.identity}/{validation_fraction}/{limits}"
        return hashlib.sha256(options.encode()).hexdigest()[:32]

    option = f"training.cache_folder = {show(cache_folder)}"
    folder = Path(cache_folder).expanduser() / _of_builder(find, builds_cache)
    has_targets = source.training.dataset_format != "text"
    dtype = token_shards.dtype_for(tokenizer.vocab_size, has_targets=has_targets)
    mark("the token cache", limited=builds_cache)  # its builder reports progress, and the others wait
    if builds_cache:
        try:
            index = _complete_index(folder, dtype, len(parts))
        except OSError as error:
            raise ConfigError([f"{option}: cannot be read: {error.strerror}"]) from None
        if index is None:
            from titanlite.data.cache_builder import CacheBuilder  # here: most runs find a complete cache
            from titanlite.data.shard_builder import Work

            work = Work(source.training, source.path_option, tokenizer.path, validation_fraction)
            index = CacheBuilder(folder, dtype, parts, work, tokenizer, option).build()
    else:
        index = _wait(folder, dtype)
    if not any(shard.train_documents or shard.validation_documents for shard in index.shards):
        raise ConfigError([f"{source}: has no documents"])
    return TokenCache(folder, index)


def _of_builder(find: Callable[[], str], builds_cache: bool) -> str:
    """Return what `find` returns on the rank of this node that builds the cache, and raise what it raises there."""
    name, error = "", None
    if builds_cache:
        try:
            name = find()
        except (ConfigError, TrainingError) as caught:
            error = caught
    if dist.is_initialized():
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (builds_cache, name, error))
        for builds, other, failed in found[: dist.get_rank() + 1]:  # a node's ranks are consecutive, the builder first
            if builds:
                name = other
            error = error or failed
    if error:
        raise error
    return name


def _wait(folder: Path, dtype: DType) -> Index:
    """Wait until the rank that builds the token cache has built it."""
    reports = dist.get_node_local_rank(fallback_rank=1) == 1  # one of the waiting ranks
    with progress("waiting until another rank has built the token cache", enabled=reports):
        while True:  # no collective: tokenizing may take longer than its timeout
            with contextlib.suppress(FileNotFoundError, DamagedShardError):
                return token_shards.read_index(folder, dtype)
            time.sleep(0.2)


def _complete_index(folder: Path, dtype: DType, n_parts: int) -> Index | None:
    """Return the index of a cache whose shards are all there, with their sizes and, of a small one, their checksums.
    Remove what is wrong."""
    try:
        index = token_shards.read_index(folder, dtype)
        if len(index.shards) != n_parts:
            counts = f"{len(index.shards):,} shards, not {n_parts:,}"
            raise DamagedShardError(f"{token_shards.INDEX} has {counts}")
        for number, shard in enumerate(index.shards):
            token_shards.check_size(folder / shard_name(number), shard, dtype)
        if sum(shard.file_size(dtype) for shard in index.shards) <= VERIFIED_AT_START:
            for number in range(len(index.shards)):
                try:
                    deque(TokenCache(folder, index).verify(number), maxlen=0)
                except DamagedShardError:
                    (folder / shard_name(number)).unlink()
                    raise
        return index
    except (FileNotFoundError, NotADirectoryError):
        return None
    except DamagedShardError as error:
        print(f"token cache {folder}: {error}; it is built again", flush=True)
        if folder.is_dir() and not folder.is_symlink():
            (folder / token_shards.INDEX).unlink(missing_ok=True)
        else:
            folder.unlink()
        return None
