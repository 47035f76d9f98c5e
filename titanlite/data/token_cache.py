"""The token cache: a dataset is tokenized once, into shards that every later run reads."""

import contextlib
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titanlite.config.errors import TrainingError
from titanlite.config.loader import ConfigError, show
from titanlite.config.schema import Training
from titanlite.data import token_shards
from titanlite.data.documents import open_dataset
from titanlite.data.files import Segment, is_splittable
from titanlite.data.source import Source
from titanlite.data.token_shards import DamagedShardError, DType, Index, TokenCache
from titanlite.data.tokenizer import Tokenizer
from titanlite.launch.progress import mark, progress

SHARD_BYTES = 2**27
"""Approximate bytes of files per shard; a larger file that cannot be split is one shard."""

VERIFIED_AT_START = 2**30
"""Maximum size, in bytes, of a cache that is verified when it is opened; a larger one is verified when it is read."""


def segments_of_shards(segments: Iterable[Segment]) -> list[list[Segment]]:
    """Return the segments of each shard: the rows of a dataset, in order, about SHARD_BYTES in each shard."""
    shards: list[list[Segment]] = [[]]
    size = 0
    for segment in itertools.chain.from_iterable(map(_split, segments)):
        if shards[-1] and size + segment.bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(segment)
        size += segment.bytes
    return shards


def _split(segment: Segment) -> list[Segment]:
    """Divide a segment into segments of at most SHARD_BYTES each, if its file can be divided."""
    n_rows, size = segment.end - segment.begin, segment.bytes
    n = max(min(-(-size // SHARD_BYTES), n_rows), 1) if is_splittable(segment) else 1
    limits = [(segment.begin + n_rows * i // n, size * i // n) for i in range(n + 1)]
    pairs = itertools.pairwise(limits)
    return [Segment(segment.file, begin, end, after - before) for (begin, before), (end, after) in pairs]


def open_cache(
    source: Source,
    tokenizer: Tokenizer,
    validation_fraction: float,
    *,
    cache_folder: str,
    builds_cache: bool,
    verifies: bool = False,
) -> TokenCache:
    """Return the token cache of a dataset. The rank with `builds_cache`, one per node, builds missing and damaged
    shards. Checksums of a large cache are verified only with `verifies`. Every rank must call this. Raises ConfigError
    for an unreadable dataset or an unwritable or untrusted folder, TrainingError for a disk or network error."""
    segments, template = list[Segment](), template_of(source.training)
    rows = tokenizer.rows if tokenizer.rows and tokenizer.vocab_size > tokenizer.rows.n else None

    def find() -> str:
        """Return the name of the cache's folder, and set open_cache's `segments`."""
        nonlocal segments
        segments, fingerprint = open_dataset(source)
        if template:
            fingerprint += f"/{source.training.dataset_format}/{tokenizer.call(template.identity_of)}"
        options = f"{token_shards.FORMAT}/{fingerprint}/{tokenizer.identity}/{validation_fraction}/{SHARD_BYTES}"
        options += f"/{rows.n} rows" if rows else ""
        return hashlib.sha256(options.encode()).hexdigest()[:32]

    option = f"training.cache_folder = {show(cache_folder)}"
    folder = Path(os.path.expanduser(cache_folder)) / _of_builder(find, builds_cache)
    dtype = token_shards.dtype_for(tokenizer.vocab_size, has_targets=template is not None)
    mark("the token cache", limited=builds_cache)  # ranks wait without a time limit; the builder reports progress
    if not builds_cache:
        cache = TokenCache(folder, _wait(folder, dtype))
    elif (cache := _complete_cache(folder, dtype, option, verifies=verifies)) is None:
        from titanlite.data.cache_builder import CacheBuilder  # imported here: most runs find a cache
        from titanlite.data.shard_builder import CacheOptions

        name = ""
        if template:
            from titanlite.data.worker import name_of  # imported here, since plain text has no template

            name = name_of(template)
        options = CacheOptions(source, validation_fraction, name, rows)
        CacheBuilder(folder, dtype, segments_of_shards(segments), options, tokenizer, option).build()
        if (cache := _complete_cache(folder, dtype, option, verifies=verifies)) is None:
            raise TrainingError(f"{option}: {folder} is damaged right after it was built")
    if not any(shard.train_documents or shard.validation_documents for shard in cache.index.shards):
        raise ConfigError([f"{source}: has no documents"])
    return cache


def template_of(training: Training) -> Any:
    """Return the class that makes documents of a dataset's rows; None: documents are plain text."""
    if training.dataset_format == "text":
        return None
    from titanlite.techniques.data.chat_template import ChatTemplate  # imported here, since plain text has no template

    return ChatTemplate


def _of_builder(find: Callable[[], str], builds_cache: bool) -> str:
    """Call `find` on the rank that builds the cache; all ranks of its node return its result or raise its error."""
    found: list[Any] = [""]
    if builds_cache:
        try:
            found = [find()]
        except (ConfigError, TrainingError) as error:
            found = [error]
    if dist.is_initialized():
        own, found = found[0], [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
        found = found[: dist.get_rank() + 1]
    for each in found:
        if isinstance(each, Exception):
            raise each
    return next(filter(None, reversed(found)), "")  # ranks are in order: the last path is from this node's builder


def _wait(folder: Path, dtype: DType) -> Index:
    reports = dist.get_node_local_rank(fallback_rank=1) == 1  # one waiting rank per node reports
    with progress("waiting until another rank has built the token cache", enabled=reports):
        while True:  # a collective would time out while the builder tokenizes
            with contextlib.suppress(FileNotFoundError, DamagedShardError):
                return token_shards.read_index(folder, dtype)
            time.sleep(0.2)


def _complete_cache(folder: Path, dtype: DType, option: str, *, verifies: bool) -> TokenCache | None:
    """Return the cache if all sizes, and with `verifies` all checksums, are right; otherwise remove the wrong files."""
    try:
        cache = TokenCache(folder, token_shards.read_index(folder, dtype), is_builder=True)
        cache.check_sizes()
        problems = []
        if verifies or cache.n_bytes <= VERIFIED_AT_START:
            with progress("verifying the token cache", total=cache.n_bytes, unit="bytes") as advance:
                problems = cache.verify(advance)
        if not problems:
            return cache
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError([f"{option}: cannot be read: {error.strerror}"]) from None
    except DamagedShardError as error:
        problems = [str(error)]
    for problem in problems:
        print(f"token cache {folder}: {problem}; it is built again", flush=True)
    if folder.is_dir() and not folder.is_symlink():
        (folder / token_shards.INDEX).unlink(missing_ok=True)
    else:
        folder.unlink()
    return None
