"""Build the shards of a token cache that are missing or damaged.

Whoever builds a cache takes one shard after another, under a lock of its own, and publishes the shard by renaming it.
So several nodes that share the folder share the work, a build that was killed continues where it was, and a damaged
shard is built again alone.
"""

import contextlib
import dataclasses
import os
import queue
import random
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

from titanlite.config.loader import ConfigError, show
from titanlite.data import shard_builder, token_shards
from titanlite.data.files import Segment
from titanlite.data.shard_builder import CacheOptions
from titanlite.data.token_shards import DamagedShardError, DType, Index, Shard, shard_name
from titanlite.data.tokenizer import Tokenizer
from titanlite.data.worker import THREADS, Worker
from titanlite.files.durable import sync_folder
from titanlite.launch import process
from titanlite.launch.folder_lock import FolderInUse, FolderLock
from titanlite.launch.progress import alive, progress

MOST_SHOWN = 20
"""Names of columns and keys that are not read, in a message."""


@dataclasses.dataclass
class CacheBuilder:
    """Builds the shards of a token cache that are missing or damaged, alone or together with other runs."""

    folder: Path
    dtype: DType
    segments: list[list[Segment]]
    options: CacheOptions
    tokenizer: Tokenizer
    option: str

    def __post_init__(self) -> None:
        self.shards: dict[int, Shard] = {}
        self.unread: set[str] = set()
        self.advances: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self.stopped = threading.Event()
        self._unfinished: list[contextlib.ExitStack] = []  # remove what is there while shards are built

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
                line = f"{self.options.source}: not read of its rows: "
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
        n_workers = max(1, min(len(missing), process.available_cores() // THREADS))
        total = sum(segment.bytes for number in missing for segment in self.segments[number])
        with (
            contextlib.ExitStack() as stack,
            progress("building the token cache", total=total, unit="bytes") as advance,
        ):
            pool = stack.enter_context(ThreadPoolExecutor(n_workers))
            stack.push(lambda error, *_: error and self.stopped.set())  # all workers end if one has failed
            workers = [Worker(self.options.hf_assets_path) for _ in range(n_workers)] if n_workers > 1 else []
            for worker in workers:
                stack.callback(worker.close)
            begin, n_tokens, unclaimed = time.monotonic(), 0, iter(missing)
            running = {pool.submit(self._work, unclaimed, worker) for worker in workers or [self.tokenizer]}
            while running:
                finished, running = wait(running, timeout=0.1, return_when=FIRST_COMPLETED)
                while not self.advances.empty():
                    n_bytes, tokens = self.advances.get()
                    n_tokens += tokens
                    advance(n_bytes, f"{n_tokens:,} tokens, {n_tokens / (time.monotonic() - begin):,.0f} tokens/s")
                for future in finished:
                    future.result()

    def _stop(self) -> None:
        """Leave complete shards only, before a signal ends the process."""
        self.stopped.set()
        for stack in list(self._unfinished):
            stack.close()

    def _look(self, number: int, *, removes: bool = False) -> bool:
        """Return whether a shard is there and has its size; `removes` removes what is damaged."""
        path = self.folder / shard_name(number)
        try:
            self.shards[number] = shard_builder.read_shard(path, self.dtype)
        except FileNotFoundError:
            return False
        except DamagedShardError as error:
            if removes:
                print(f"token cache {self.folder}: {error}; it is built again", flush=True)
                path.unlink()
            return False
        return True

    def _work(self, unclaimed: Iterator[int], tokenizer: Tokenizer | Worker) -> None:
        """Build shards that no other run builds, until none is left of an iterator that the workers share."""
        for number in unclaimed:
            if self.stopped.is_set():
                return
            with contextlib.suppress(FolderInUse):
                self._build_shard(number, tokenizer)

    def _build_shard(self, number: int, tokenizer: Tokenizer | Worker) -> None:
        """Build a shard, unless it is there by now. Raises FolderInUse if another run builds it."""
        lock = FolderLock(
            self.folder,
            name=f"{number:05}.lock",
            purpose=self.option,
            advice="this run waits until it has built this shard of the token cache",
            lost=lambda message: None,  # is_held() is asked before anything is published
        )
        with contextlib.ExitStack() as stack:
            stack.enter_context(lock)
            if self._look(number, removes=True):
                return
            for left in self.folder.glob(f"{number:05}.*.tmp"):  # by a run that was killed
                left.unlink(missing_ok=True)
            temporary = self.folder / f"{number:05}.{secrets.token_hex(8)}.tmp"
            stack.callback(temporary.unlink, missing_ok=True)
            self._unfinished.append(stack)
            stack.callback(self._unfinished.remove, stack)
            of_shard = temporary, self.dtype, number, self.segments[number], self.options, self._report
            shard = shard_builder.build_in_worker(tokenizer, *of_shard)
            if lock.is_held():  # else another run took over while this process was suspended
                os.rename(temporary, self.folder / shard_name(number))
                sync_folder(self.folder)
                self.shards[number] = shard

    def _report(self, n_bytes: int, n_tokens: int, unread: list[str]) -> None:
        self.unread.update(unread)
        if self.stopped.is_set():
            raise InterruptedError
        self.advances.put((n_bytes, n_tokens))

    def _wait_for_others(self) -> None:
        """Wait for the shards that other runs build, and build what they leave."""
        missing = [number for number in range(len(self.segments)) if number not in self.shards]
        with progress("waiting until another run has built its shards of the token cache"):
            while missing := [number for number in missing if not self._look(number)]:
                with contextlib.suppress(FolderInUse):
                    self._build_shard(missing[0], self.tokenizer)
                alive()
                time.sleep(0.2)
