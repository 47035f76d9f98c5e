"""The token cache: a dataset is tokenized once, into shards that every later run reads.

A shard has the documents of one part of the dataset. Whoever builds a cache takes one part after another, under a lock
of its own, and publishes the shard by renaming it. So several nodes that share the folder share the work, a build that
was killed continues where it was, and a damaged shard is built again alone.
"""

import contextlib
import hashlib
import os
import queue
import random
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titanlite.config.loader import ConfigError, show
from titanlite.data import token_shards
from titanlite.data.documents import Source, open_dataset
from titanlite.data.files import Segment, is_splittable
from titanlite.data.shard_builder import InProcess, Work, WorkerProcess, chat_template_of
from titanlite.data.token_shards import DamagedShardError, DType, Index, Shard, TokenCache, shard_name
from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import TrainingError
from titanlite.progress import alive, mark, progress
from titanlite.progress_bar import progress_bar
from titanlite.reliability.files import sync_folder
from titanlite.reliability.folder_lock import FolderInUse, FolderLock

PART_BYTES = 2**27
"""Bytes of the files that become one shard: more if a larger file cannot be split, and less at the end."""
THREADS_PER_WORKER = 4
"""Cores for each process that tokenizes. Reading and unpacking take one thread of it."""


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
        template = chat_template_of(source.training, tokenizer)
        segments, fingerprint = open_dataset(source)
        if template:
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
        work = Work(source.training, source.path_option, tokenizer.path, validation_fraction)
        index = _Builder(folder, dtype, parts, work, tokenizer, option).complete()
    else:
        index = _wait(folder, dtype)
    if not any(shard.train_documents or shard.validation_documents for shard in index.shards):
        raise ConfigError([f"{source}: has no documents"])
    return TokenCache(folder, index)


def verify_token_cache(cache: TokenCache) -> bool:
    """Read all tokens of a cache, compare them with their checksums, and remove damaged shards. Return whether there
    was none."""
    total = sum(shard.file_size(cache.index.dtype) for shard in cache.index.shards)
    damaged = []
    with progress_bar("verifying the token cache", total=total, unit="bytes", enabled=True) as advance:
        for number in range(len(cache.index.shards)):
            try:
                for n_bytes in cache.verify(number):
                    advance(n_bytes)
            except DamagedShardError as error:
                print(f"token cache {cache.folder}: {error}", flush=True)
                damaged.append(number)
    for number in damaged:
        (cache.folder / shard_name(number)).unlink(missing_ok=True)
    return not damaged


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


class _Builder:
    """Builds the shards of a token cache that are missing or damaged, alone or together with other runs."""

    def __init__(
        self,
        folder: Path,
        dtype: DType,
        parts: list[list[Segment]],
        work: Work,
        tokenizer: Tokenizer,
        option: str,
    ):
        self.folder, self.dtype, self.parts, self.work, self.tokenizer = folder, dtype, parts, work, tokenizer
        self.option = option
        self.shards: dict[int, Shard] = {}
        self.advances: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self.stopped = threading.Event()
        self._claim = threading.Lock()
        self._unclaimed: list[int] = []

    def complete(self) -> Index:
        """Return the index of the complete cache. Raises ConfigError if it cannot be written."""
        try:
            index = self._index_of_complete()
            if index is None:
                self._build()
                index = Index(dtype=self.dtype, shards=[self.shards[number] for number in range(len(self.parts))])
                token_shards.publish(self.folder / token_shards.INDEX, index.encode())
            return index
        except OSError as error:
            raise ConfigError([f"{self.option}: cannot be written: {error.strerror}"]) from None

    def _index_of_complete(self) -> Index | None:
        """Return the index of a cache whose shards are all there, with their sizes. Remove an index that is wrong."""
        try:
            index = token_shards.read_index(self.folder, self.dtype)
            if len(index.shards) != len(self.parts):
                raise DamagedShardError(
                    f"{token_shards.INDEX} has {len(index.shards):,} shards, not {len(self.parts):,}"
                )
            for number, shard in enumerate(index.shards):
                token_shards.check_size(self.folder / shard_name(number), shard, self.dtype)
            return index
        except FileNotFoundError:
            return None
        except DamagedShardError as error:
            self._say(f"{error}; it is built again")
            if self.folder.is_dir() and not self.folder.is_symlink():
                (self.folder / token_shards.INDEX).unlink(missing_ok=True)
            else:
                self.folder.unlink()
            return None

    def _say(self, message: str) -> None:
        print(f"token cache {self.folder}: {message}", flush=True)

    def _build(self) -> None:
        """Build all shards."""
        self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)  # others may read it, and not write
        token_shards.check_trusted(self.folder)  # some file systems do not keep owners or permissions
        for number in range(len(self.parts)):
            self._look(number)
        first = random.randrange(len(self.parts))  # nodes that share the work begin at different places
        missing = sorted(set(range(len(self.parts))) - set(self.shards), key=lambda number: (number < first, number))
        self._unclaimed = missing
        n_workers = max(1, min(len(missing), len(os.sched_getaffinity(0)) // THREADS_PER_WORKER))
        total = sum(segment.bytes for number in missing for segment in self.parts[number])
        with (
            contextlib.ExitStack() as stack,
            progress("building the token cache", total=total, unit="bytes") as advance,
        ):
            pool = stack.enter_context(ThreadPoolExecutor(n_workers))
            stack.callback(self.stopped.set)
            workers: list[Any] = [InProcess(self.work, self.tokenizer)]
            if n_workers > 1:
                workers = [WorkerProcess(self.work, threads=THREADS_PER_WORKER) for _ in range(n_workers)]
            for worker in workers:
                stack.callback(worker.close)
            begin, n_tokens = time.monotonic(), 0
            running = [pool.submit(self._work, worker) for worker in workers]
            while any(not future.done() for future in running) or not self.advances.empty():
                for future in running:
                    if future.done():
                        future.result()
                with contextlib.suppress(queue.Empty):
                    n_bytes, tokens = self.advances.get(timeout=0.1)
                    n_tokens += tokens
                    advance(n_bytes, f"{n_tokens:,} tokens, {n_tokens / (time.monotonic() - begin):,.0f} tokens/s")
            for future in running:
                future.result()
        self._wait_for_others()

    def _look(self, number: int, *, removes: bool = False) -> bool:
        """Return whether a shard is there and has its size; `removes` removes what is damaged."""
        path = self.folder / shard_name(number)
        try:
            self.shards[number] = token_shards.read_shard(path, self.dtype)
        except FileNotFoundError:
            return False
        except DamagedShardError as error:
            if removes:
                self._say(f"{error}; it is built again")
                path.unlink()
            return False
        return True

    def _work(self, worker: Any) -> None:
        """Build shards that no other run builds, until all are there or being built."""
        while not self.stopped.is_set():
            with self._claim:
                if not self._unclaimed:
                    return
                number = self._unclaimed.pop(0)
            with contextlib.suppress(FolderInUse):
                self._build_shard(number, worker)

    def _build_shard(self, number: int, worker: Any) -> None:
        """Build a shard, unless it is there by now. Raises FolderInUse if another run builds it."""
        lock = FolderLock(
            self.folder,
            name=f"{number:05}.lock",
            purpose=self.option,
            advice="this run waits until it has built this part of the token cache",
            lost=lambda message: None,  # is_held() is asked before anything is published
        )
        with lock:
            if self._look(number, removes=True):
                return
            for left in self.folder.glob(f"{number:05}.*.tmp"):  # by a run that was killed
                left.unlink(missing_ok=True)
            temporary = self.folder / f"{number:05}.{secrets.token_hex(8)}.tmp"
            try:
                shard = worker.build(temporary, self.dtype, number, self.parts[number], self._report)
                if lock.is_held():  # else another run took over while this process was suspended
                    os.rename(temporary, self.folder / shard_name(number))
                    sync_folder(self.folder)
                    self.shards[number] = shard
            finally:
                temporary.unlink(missing_ok=True)

    def _report(self, n_bytes: int, n_tokens: int) -> None:
        if self.stopped.is_set():
            raise InterruptedError
        self.advances.put((n_bytes, n_tokens))

    def _wait_for_others(self) -> None:
        """Wait for the shards that other runs build, and build what they leave."""
        missing = [number for number in range(len(self.parts)) if number not in self.shards]
        if not missing:
            return
        worker = InProcess(self.work, self.tokenizer)
        with progress("waiting until another run has built its part of the token cache"):
            while missing := [number for number in missing if not self._look(number)]:
                with contextlib.suppress(FolderInUse):
                    self._build_shard(missing[0], worker)
                alive()
                time.sleep(0.2)
