"""A lock on a folder, which only one process on all nodes can hold. It is a file that names its holder. On the holder's
own node, the process table tells whether the holder is alive. On other nodes, only a heartbeat tells: a counter in the
lock file. A waiting process compares counters, not clocks, which differ between nodes."""

import contextlib
import dataclasses
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from titanlite.config.loader import ConfigError, show
from titanlite.config.regular_file import open_file, open_own
from titanlite.files.durable import Record
from titanlite.launch.process_table import machine, process_start_time
from titanlite.launch.progress import progress

LARGEST_LOCK = 4096  # maximum number of bytes that are read from a lock file
BEAT_OFFSET = len('{"beat": "')

Name = Annotated[str, Field(max_length=256)]


class FolderInUse(ConfigError):
    """Another process holds the lock of a folder."""


class Holder(Record):
    """The content of a lock file: a process, and when it locked the folder."""

    beat: Annotated[str, Field(pattern=r"^[0-9]{12}$")]  # the first key, so that `beat` has a fixed place in the file
    node: Name
    machine: Name
    """Name of a booted kernel and its process table. Process IDs can be compared only if this name is the same."""
    pid: Annotated[int, Field(ge=1, le=2**31 - 1)]
    start_time: Name  # start time of the process, since a later process may have the same ID
    since: Name
    token: Name  # random text that differs between locks

    def __str__(self) -> str:
        return f"process {self.pid} on node {show(self.node)}, since {show(self.since)}"

    def is_alive(self) -> bool | None:
        """Return whether the lock's process exists; None if this node cannot tell."""
        if self.machine != machine():
            return None
        start_time = process_start_time(self.pid)
        return None if start_time is None else start_time == self.start_time


def _read(path: Path) -> bytes | None:
    try:
        with open_file(path, buffering=0, flags=os.O_NOFOLLOW) as file:
            return file.read(LARGEST_LOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError([f"{path}: this lock cannot be read: {error.strerror}; remove it"]) from None


def _parse(content: bytes | None) -> Holder | None:
    """Return the holder that a lock file names; None if there is no file, or it is damaged or from another version."""
    try:
        return Holder.model_validate_json(content or b"")
    except ValidationError:
        return None


def _token(content: bytes | None) -> str:
    return getattr(_parse(content), "token", "")


@dataclasses.dataclass(eq=False)
class FolderLock:
    """Locks a folder from `acquire` to `release`, while a thread writes heartbeats."""

    folder: Path  # folder to lock, which `acquire` creates if it does not exist
    name: str
    purpose: str  # beginning of messages, such as 'job.dump_folder = "outputs"'
    advice: str  # end of the message about a folder in use, such as 'wait for that run'
    lost: Callable[[str], None]
    """Called with a message, in the heartbeat's thread, if another process took over the lock."""
    take_over: bool = True
    """Whether to take over other nodes' locks without heartbeats. This node's dead locks are always taken over."""
    beat_seconds: float = 5.0
    patience: int = 6  # number of heartbeats without which the holder of a lock counts as dead
    token, _beats, _thread = "", 0, None

    def __post_init__(self) -> None:
        self.path, self._released = self.folder / self.name, threading.Event()

    def acquire(self) -> None:
        """Take the lock, from a dead process if necessary, and start the heartbeat. Raises FolderInUse if another
        process holds the lock, and ConfigError if the folder cannot be written."""
        self.token = secrets.token_hex(16)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            while not ((self._create() or self.is_held()) and self._is_settled()):
                found = _read(self.path)
                if found is not None and _token(found) != self.token and self._is_dead(found):
                    self._withdraw(found)
            for left in self.folder.glob(f"{self.path.name}.*"):  # files of processes that died in _withdraw
                left.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError([f"{self.purpose}: cannot be written: {error.strerror}"]) from None
        self._released.clear()
        self._thread = threading.Thread(target=self._keep_beating, name="heartbeat of a folder's lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Stop the heartbeat and remove the lock, unless another process has taken it over."""
        if self._thread:
            self._released.set()
            self._thread.join()
            self._thread = None
            with contextlib.suppress(OSError, ConfigError):  # a lock that stays is harmless: its heartbeat has stopped
                if _token(found := _read(self.path)) == self.token:
                    self._withdraw(found)

    def is_held(self) -> bool:
        return _token(_read(self.path)) == self.token

    def _is_settled(self) -> bool:
        """Wait a moment, and return whether this process still holds the lock: another process may have renamed the
        lock file (_withdraw), and a third process may then have created a new one."""
        time.sleep(min(self.beat_seconds / 2, 0.1))
        return self.is_held()

    def _create(self) -> bool:
        """Create the lock file; return False if it exists. The file is empty for a moment, and stays empty if this
        process dies in that moment, so a process that reads an empty file waits for a change."""
        holder = Holder(
            beat=f"{self._beats:012}",
            node=platform.node()[:256],
            machine=machine(),
            pid=os.getpid(),
            start_time=process_start_time(os.getpid()) or "",
            since=datetime.now().astimezone().isoformat(timespec="seconds"),
            token=self.token,
        )
        try:
            with open(self.path, "xb", buffering=0) as file:
                try:
                    file.write((json.dumps(holder.model_dump()) + "\n").encode())
                except OSError:
                    self.path.unlink()
                    raise
        except FileExistsError:
            return False
        return True

    def _withdraw(self, found: bytes | None) -> None:
        """Remove the lock file if its content is still `found`. The file is renamed first: if two processes remove the
        same dead lock, the later process must not remove the new lock of the earlier process."""
        aside = self.path.with_name(f"{self.path.name}.{self.token}.old")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, aside)
            if _read(aside) == found:
                aside.unlink()
            else:
                os.rename(aside, self.path)

    def _is_dead(self, found: bytes) -> bool:
        """Return True, and print a line, if a lock's holder is dead; return False if the lock file has changed
        meanwhile. Raises FolderInUse if the holder is alive, or its lock may not be taken over."""
        holder = _parse(found)
        who = str(holder) if holder else "an unknown process (the lock is damaged)"
        alive, which = holder.is_alive() if holder else None, "which is dead"
        is_known = alive is not None
        if not is_known:
            now = self._watch(found, who)
            if now is None or _token(now) != _token(found):
                return False
            alive, which = now != found, f"whose heartbeat has stopped for {self.patience * self.beat_seconds:g} s"
        if alive:
            raise FolderInUse([f"{self.purpose}: in use by {who} (lock {self.path}); {self.advice}"])
        if not (is_known or self.take_over):
            advice = f"if it is dead, set job.take_over_lock = true, or remove {self.path}"
            raise FolderInUse([f"{self.purpose}: locked by {who}, {which}; {advice}"])
        print(f"{self.purpose}: took over the lock of {who}, {which}", flush=True)
        return True

    def _watch(self, found: bytes, who: str) -> bytes | None:
        """Return the lock file's content once it differs from `found`, or `found` if it does not change. The wait ends
        after a number of reads, not a time, since the holder and this process may have been suspended together."""
        looks_per_beat = 10
        with progress(f"{self.purpose}: waiting for a heartbeat of {who}"):
            for _ in range(looks_per_beat * self.patience):
                time.sleep(self.beat_seconds / looks_per_beat)
                if (now := _read(self.path)) != found:
                    return now
        return found

    def _keep_beating(self) -> None:
        while not self._released.wait(self.beat_seconds):
            # A short failure of the file system is harmless: other processes take over a lock only after a long one.
            with contextlib.suppress(OSError, ConfigError):
                if winner := self._beat():
                    self.lost(f"{self.purpose}: the lock {self.path} was taken over by {winner}")
                    return

    def _beat(self) -> Holder | None:
        """Increase the lock file's counter, or restore a damaged file. Return the holder if it is another process."""
        self._beats += 1
        found = _read(self.path)
        holder = _parse(found)
        if holder and holder.token != self.token:
            return holder
        if holder:
            # Only digits in an existing block are overwritten, so neither a full disk nor a crash can damage the file.
            with open(self.path, "r+b", opener=open_own) as file:
                os.pwrite(file.fileno(), f"{self._beats:012}".encode(), BEAT_OFFSET)
        else:
            self._withdraw(found)
            self._create()
        return None
