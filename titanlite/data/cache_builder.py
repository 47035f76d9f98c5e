"""Build the shards of a token cache that are missing or damaged.

Whoever builds a cache takes one shard after another, under a lock of its own, and publishes the shard by renaming it.
So several nodes that share the folder share the work, a build that was killed continues where it was, and a damaged
shard is built again alone.
"""

import contextlib
import functools
import os
import queue
import random
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from titanlite.config.loader import ConfigError, show
from titanlite.data import shard_builder, shard_files, token_shards
from titanlite.data.files import Segment
from titanlite.data.shard_builder import CacheOptions
from titanlite.data.source import Source
from titanlite.data.token_shards import DamagedShardError, DType, Index, Shard, shard_name
from titanlite.data.tokenizer import Tokenizer
from titanlite.data.worker import THREADS, TokenizerProcess, Worker
from titanlite.files.durable import sync_folder
from titanlite.launch import process
from titanlite.launch.folder_lock import FolderInUse, FolderLock
from titanlite.launch.progress import alive, progress

MOST_SHOWN = 20
"""Names of columns and keys that are not read, in a message."""


class CacheBuilder:
    """Builds the shards of a token cache that are missing or damaged, alone or together with other runs."""

    def __init__(
        self,
        folder: Path,
        dtype: DType,
        segments: list[list[Segment]],
        options: CacheOptions,
        tokenizer: Tokenizer,
        option: str,
    ):
        self.folder, self.dtype, self.segments = folder, dtype, segments
        self.options, self.option = options, option
        self.shards: dict[int, Shard] = {}
        self.unread: set[str] = set()
        self.advances: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self.stopped = threading.Event()
        self._claim = threading.Lock()
        self._unfinished: list[Callable[[], None]] = []  # removes what is there while a shard is built
        self._unclaimed: list[int] = []
        self._build: Any = lambda *of: shard_builder.build_shard(*of, tokenizer)
        if isinstance(tokenizer, TokenizerProcess):
            self._build = functools.partial(shard_builder.build_in_worker, tokenizer)

    def build(self) -> None:
        """Build all shards and the index. Raises ConfigError if they cannot be written."""
        process.at_exit.append(self._stop)
        try:
            self._build_missing()
            self._wait_for_others()
            index = Index(dtype=self.dtype, shards=[self.shards[number] for number in range(len(self.segments))])
            index.publish(self.folder / token_shards.INDEX)
            if names := [show(name) for name in sorted(self.unread)]:
                more = f" and {len(names) - MOST_SHOWN:,} more" if len(names) > MOST_SHOWN else ""
                line = f"{Source(self.options.training, self.options.path_option)}: not read of its rows: "
                print(f"{line}{', '.join(names[:MOST_SHOWN])}{more}", flush=True)
        except OSError as error:
            raise ConfigError([f"{self.option}: cannot be written: {error.strerror}"]) from None
        finally:
            process.at_exit.remove(self._stop)

    def _build_missing(self) -> None:
        """Build the shards that are missing and that no other run builds."""
        for folder in (*reversed(self.folder.parents), self.folder):
            folder.mkdir(mode=0o755, exist_ok=True)  # others may read it, and not write
        token_shards.check_folder_trusted(self.folder)  # some file systems do not keep owners or permissions
        for number in range(len(self.segments)):
            self._look(number)
        first = random.randrange(len(self.segments))  # nodes that share the work begin at different places
        missing = sorted(set(range(len(self.segments))) - set(self.shards), key=lambda number: (number < first, number))
        self._unclaimed = missing
        n_workers = max(1, min(len(missing), process.available_cores() // THREADS))
        total = sum(segment.bytes for number in missing for segment in self.segments[number])
        with (
            contextlib.ExitStack() as stack,
            progress("building the token cache", total=total, unit="bytes") as advance,
        ):
            pool = stack.enter_context(ThreadPoolExecutor(n_workers))
            stack.push(self._stop_workers)
            workers = [Worker(self.options.hf_assets_path) for _ in range(n_workers)] if n_workers > 1 else []
            for worker in workers:
                stack.callback(worker.close)
            begin, n_tokens = time.monotonic(), 0
            builds = [functools.partial(shard_builder.build_in_worker, worker) for worker in workers] or [self._build]
            running = {pool.submit(self._work, build) for build in builds}
            while running:
                finished, running = wait(running, timeout=0.1, return_when=FIRST_COMPLETED)
                while not self.advances.empty():
                    n_bytes, tokens = self.advances.get()
                    n_tokens += tokens
                    advance(n_bytes, f"{n_tokens:,} tokens, {n_tokens / (time.monotonic() - begin):,.0f} tokens/s")
                for future in finished:
                    future.result()

    def _stop_workers(self, error: type[BaseException] | None, *_: Any) -> None:
        """Have all workers end, if one of them has failed."""
        if error:
            self.stopped.set()

    def _stop(self) -> None:
        """Leave complete shards only, before a signal ends the process."""
        self.stopped.set()
        for remove in list(self._unfinished):
            remove()

    def _look(self, number: int, *, removes: bool = False) -> bool:
        """Return whether a shard is there and has its size; `removes` removes what is damaged."""
        path = self.folder / shard_name(number)
        try:
            self.shards[number] = shard_files.read_shard(path, self.dtype)
        except FileNotFoundError:
            return False
        except DamagedShardError as error:
            if removes:
                print(f"token cache {self.folder}: {error}; it is built again", flush=True)
                path.unlink()
            return False
        return True

    def _work(self, build: Any) -> None:
        """Build shards that no other run builds, until all are there or being built."""
        while not self.stopped.is_set():
            with self._claim:
                if not self._unclaimed:
                    return
                number = self._unclaimed.pop(0)
            with contextlib.suppress(FolderInUse):
                self._build_shard(number, build)

    def _build_shard(self, number: int, build: Any) -> None:
        """Build a shard, unless it is there by now. Raises FolderInUse if another run builds it."""
        lock = FolderLock(
            self.folder,
            name=f"{number:05}.lock",
            purpose=self.option,
            advice="this run waits until it has built this shard of the token cache",
            lost=lambda message: None,  # is_held() is asked before anything is published
        )
        with lock:
            if self._look(number, removes=True):
                return
            for left in self.folder.glob(f"{number:05}.*.tmp"):  # by a run that was killed
                left.unlink(missing_ok=True)
            temporary = self.folder / f"{number:05}.{secrets.token_hex(8)}.tmp"
            removals = [functools.partial(temporary.unlink, missing_ok=True), lock.release]
            self._unfinished += removals
            try:
                shard = build(temporary, self.dtype, number, self.segments[number], self.options, self._report)
                if lock.is_held():  # else another run took over while this process was suspended
                    os.rename(temporary, self.folder / shard_name(number))
                    sync_folder(self.folder)
                    self.shards[number] = shard
            finally:
                for remove in removals:
                    self._unfinished.remove(remove)
                temporary.unlink(missing_ok=True)

    def _report(self, n_bytes: int, n_tokens: int, unread: list[str]) -> None:
        self.unread.update(unread)
        if self.stopped.is_set():
            raise InterruptedError
        self.advances.put((n_bytes, n_tokens))

    def _wait_for_others(self) -> None:
        """Wait for the shards that other runs build, and build what they leave."""
        missing = [number for number in range(len(self.segments)) if number not in self.shards]
        if not missing:
            return
        with progress("waiting until another run has built its shards of the token cache"):
            while missing := [number for number in missing if not self._look(number)]:
                with contextlib.suppress(FolderInUse):
                    self._build_shard(missing[0], self._build)
                alive()
                time.sleep(0.2)
