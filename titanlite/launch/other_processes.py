"""Pass signals on to the processes that a launcher or a command starts, and wait until they end."""

import contextlib
import functools
import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from titanlite.launch.process import Signals
from titanlite.launch.process_table import process_start_time


class LauncherSignals(Signals):
    """The signals that a launcher has received, and passes on to its ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks_exist = False
        self._stopped: set[int] = set()

    def received(self, number: int) -> None:
        """Pass a signal on to the ranks (SIGHUP as SIGTERM). A stop signal before ranks start ends the launcher."""
        ranks = children(os.getpid())
        self.stopping = self.stopping or number != signal.SIGUSR1
        if self.stopping and not self.ranks_exist and not ranks:
            self.end("asked to stop before the ranks were started: nothing to save", status=0)
        if number in (signal.SIGINT, signal.SIGUSR1):
            send(ranks, number)
        if number == signal.SIGINT:
            self._stopped.update(ranks)
        self.pass_on()

    def pass_on(self) -> None:
        """If the launcher is to stop, send SIGTERM to ranks that have received no signal yet. Called periodically."""
        self.ranks_exist = self.ranks_exist or bool(children(os.getpid()))
        if self.stopping:
            ranks = set(children(os.getpid())) - self._stopped
            self._stopped |= ranks
            send(ranks, signal.SIGTERM)


@functools.cache
def listen_as_launcher() -> LauncherSignals:
    """Handle the signals of this process, a launcher, from now on, and return their handler."""
    signals = LauncherSignals()
    signals.listen(signals.received)
    return signals


def send(processes: Iterable[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def children(process: int) -> list[int]:
    """Return the process IDs of a process's children: from /proc on Linux, from ps elsewhere."""
    if not Path("/proc/self").exists():
        with subprocess.Popen(["ps", "-A", "-o", "pid=,ppid="], stdout=subprocess.PIPE, text=True) as ps:
            pairs = [tuple(map(int, line.split())) for line in ps.communicate()[0].splitlines()]
        return [child for child, parent in pairs if parent == process and child != ps.pid]
    pids: list[int] = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread or the process has just ended
            pids += map(int, file.read_text().split())
    return pids


def wait_for_end(processes: Collection[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(map(process_start_time, processes)):
        time.sleep(0.05)
