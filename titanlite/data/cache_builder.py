"""Build the shards of a token cache that are missing or damaged. One run builds a cache, under a lock, and publishes
each shard by renaming it. Other runs wait, and continue the build if that run is killed."""

import contextlib
import dataclasses
import os
import queue
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from titanlite.config.loader import ConfigError, show
from titanlite.data import shard_builder, token_shards
from titanlite.data.files import Segment
from titanlite.data.shard_builder import CacheOptions
from titanlite.data.token_shards import DamagedShardError, DType, Index, Shard, shard_name
from titanlite.data.tokenizer import Tokenizer
from titanlite.files.durable import sync_folder
from titanlite.launch import process
from titanlite.launch.folder_lock import FolderInUse, FolderLock
from titanlite.launch.progress import alive, progress

MOST_SHOWN = 20  # maximum number of unread columns and keys that a message names


@dataclasses.dataclass
class CacheBuilder:
    """Builds the missing and damaged shards of one token cache."""

    folder: Path
    dtype: DType
    segments: list[list[Segment]]
    options: CacheOptions
    tokenizer: Tokenizer
    option: str
    shards: dict[int, Shard] = dataclasses.field(default_factory=dict)
    unread: set[str] = dataclasses.field(default_factory=set)
    advances: queue.SimpleQueue[tuple[int, int]] = dataclasses.field(default_factory=queue.SimpleQueue)
    stopped: threading.Event = dataclasses.field(default_factory=threading.Event)
    unfinished: set[Path] = dataclasses.field(default_factory=set)
    """Temporary files of shards that are being written."""

    def __post_init__(self) -> None:
        advice = "this run waits until it has built the token cache"
        # A lost lock needs no message: is_held() is checked before each shard is published.
        self.lock = FolderLock(self.folder, "build.lock", self.option, advice, lost=lambda message: None)

    def build(self) -> None:
        """Wait until no other run builds the cache, then build what is missing. Raises ConfigError if writing fails."""
        process.at_exit.append(self._stop)
        try:
            for folder in (*reversed(self.folder.parents), self.folder):
                folder.mkdir(mode=0o755, exist_ok=True)  # other users may read this cache, but not write it
            # Check again after mkdir: some file systems ignore the owner or mode that was set.
            token_shards.check_folder_trusted(self.folder)
            index = None
            while index is None:
                self._wait_for_lock()
                with contextlib.suppress(FolderInUse):  # another run took the lock while this process was suspended
                    self._build_missing()
                    index = Index(dtype=self.dtype, shards=[self.shards[n] for n in range(len(self.segments))])
                    index.publish(self.folder / token_shards.INDEX)
                self.lock.release()
            if names := [show(name) for name in sorted(self.unread)]:
                more = f" and {len(names) - MOST_SHOWN:,} more" if len(names) > MOST_SHOWN else ""
                print(f"{self.options.source}: not read of its rows: {', '.join(names[:MOST_SHOWN])}{more}", flush=True)
        except OSError as error:
            raise ConfigError([f"{self.option}: cannot be written: {error.strerror}"]) from None
        finally:
            process.at_exit.remove(self._stop)
            self.lock.release()

    def _wait_for_lock(self) -> None:
        with progress("waiting until another run has built the token cache"):
            while True:
                with contextlib.suppress(FolderInUse):
                    return self.lock.acquire()
                alive()
                time.sleep(0.2)

    def _build_missing(self) -> None:
        self.stopped.clear()
        for left in self.folder.glob("*.tmp"):  # a killed run has left temporary files
            left.unlink(missing_ok=True)
        missing = [number for number in range(len(self.segments)) if not self._find(number)]
        total = sum(segment.bytes for number in missing for segment in self.segments[number])
        with contextlib.ExitStack() as stack:
            advance = stack.enter_context(progress("building the token cache", total=total, unit="bytes"))
            builders = stack.enter_context(self.tokenizer.workers(len(missing))) or [self]
            pool = stack.enter_context(ThreadPoolExecutor(len(builders)))
            stack.push(lambda error, *_: error and self.stopped.set())  # an error of one builder stops all
            begin, n_tokens, unclaimed = time.monotonic(), 0, iter(missing)
            running = {pool.submit(self._build_shards, unclaimed, builder) for builder in builders}
            while running:
                finished, running = wait(running, timeout=0.1, return_when=FIRST_COMPLETED)
                while not self.advances.empty():
                    n_bytes, tokens = self.advances.get()
                    n_tokens += tokens
                    advance(n_bytes, f"{n_tokens:,} tokens, {n_tokens / (time.monotonic() - begin):,.0f} tokens/s")
                for future in finished:
                    future.result()

    def _stop(self) -> None:
        """Before a signal ends the process, remove incomplete shards and release the lock."""
        self.stopped.set()
        for path in list(self.unfinished):
            path.unlink(missing_ok=True)
        self.lock.release()

    def _find(self, number: int) -> bool:
        """Return whether a shard exists with the right header and size; remove a damaged shard."""
        path = self.folder / shard_name(number)
        try:
            self.shards[number] = shard_builder.read_shard(path, self.dtype)
        except FileNotFoundError:
            return False
        except DamagedShardError as error:
            print(f"token cache {self.folder}: {error}; it is built again", flush=True)
            path.unlink()
            return False
        return True

    def build_shard(self, *of_shard: Any) -> Shard:
        return shard_builder.build_shard(*of_shard, self.tokenizer)

    def _build_shards(self, unclaimed: Iterator[int], builder: Any) -> None:
        """Build the shards in `unclaimed`, which all builders share. Raises FolderInUse if the lock is lost."""
        for number in unclaimed:
            if self.stopped.is_set():
                return
            temporary = self.folder / f"{number:05}.{secrets.token_hex(8)}.tmp"
            self.unfinished.add(temporary)
            try:
                of_shard = temporary, self.dtype, number, self.segments[number], self.options, self._report
                shard = builder.build_shard(*of_shard)
                if not self.lock.is_held():
                    raise FolderInUse([f"{self.option}: another run builds the token cache"])
                os.rename(temporary, self.folder / shard_name(number))
                sync_folder(self.folder)
                self.shards[number] = shard
            finally:
                temporary.unlink(missing_ok=True)
                self.unfinished.remove(temporary)

    def _report(self, n_bytes: int, n_tokens: int, unread: list[str]) -> None:
        self.unread.update(unread)
        if self.stopped.is_set():
            raise InterruptedError
        self.advances.put((n_bytes, n_tokens))
