"""The progress of a process: lines about long work, and the activity of the main thread, by which the watchdog of a
training run tells a hanging rank from a slow one."""

import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from titanlite.config.loader import printable

COMPILES = "forward and backward"
"""The activity that compiles in the first step, and may then take long on all ranks."""
INTERVAL_SECONDS = 10.0
"""Seconds before the first line and between two lines; shorter work prints nothing."""


@contextlib.contextmanager
def progress(
    description: str, *, total: int | None = None, unit: str = "", enabled: bool = True
) -> Iterator[Callable[..., None]]:
    """Print the progress of the with block to standard error every 10 seconds, if `enabled`. Yield a function that
    takes the amount of work done since its last call, and a text for the line."""
    begin, done, details, finished = time.monotonic(), 0, "", threading.Event()

    def advance(amount: int = 1, text: str = "") -> None:
        nonlocal done, details
        done, details = done + amount, text
        alive()

    def report() -> None:
        while enabled and not finished.wait(INTERVAL_SECONDS):
            line = progress_line(description, done, total, unit, time.monotonic() - begin)
            print(printable(f"{line}; {details}" if details else line), file=sys.stderr, flush=True)

    thread = threading.Thread(target=report, name="progress", daemon=True)
    thread.start()
    try:
        yield advance
    finally:
        finished.set()
        thread.join()


def progress_line(description: str, done: int, total: int | None, unit: str, seconds: float) -> str:
    """Return the progress line after `seconds`, such as "validation: 10 of 40 batches, 0:00:20, 0:01:00 left"."""
    amount = [f"{done:,} of {total:,} {unit}"] if total is not None else [f"{done:,} {unit}"] if done else []
    left = [f"{timedelta(seconds=round(seconds / done * (total - done)))} left"] if total and done else []
    return f"{description}: {', '.join([*amount, str(timedelta(seconds=round(seconds))), *left])}"


_SUSPENDED_SECONDS = 5.0
_seen, _suspended = time.monotonic(), 0.0


def now() -> float:
    """Return seconds on a clock that leaves out the time in which the process was suspended, as by SIGSTOP. `now` is
    called every second, so more than 5 s between two calls count as a suspension."""
    global _seen, _suspended
    seconds = time.monotonic()
    if seconds - _seen > _SUSPENDED_SECONDS:
        _suspended += seconds - _seen
    _seen = seconds
    return seconds - _suspended


@dataclasses.dataclass
class Activity:
    """One activity of the main thread."""

    name: str = "starting"
    step: int = 0
    number: int = 0
    """Number of activities that the main thread began before: a rank with a smaller number is behind other ranks."""
    since: float = dataclasses.field(default_factory=now)
    """Time on the clock of `now` at which the activity began or last made progress."""
    limited: bool = True
    """Whether the activity counts as a hang if it takes too long."""

    def __str__(self) -> str:
        return f"step {self.step}: {self.name}" if self.step else self.name


current = Activity()
train_timeout: float | None = None  # comm.train_timeout_seconds; None until the first step is done
_longest: dict[str, float] = {}  # longest time that each activity has taken in seconds, by name
_longest_at_first: dict[str, float] = {}  # `_longest` in the first step, which may compile


def mark(name: str, step: int | None = None, *, limited: bool = True) -> None:
    """Record the activity that the main thread begins; if `step` is None, the number of the step stays the same.
    limited=False: no time limit, since the activity waits for another rank, whose activity has a limit."""
    global current
    begin, last = now(), current
    _longest[last.name] = max(_longest.get(last.name, 0.0), begin - last.since)
    current = Activity(name, last.step if step is None else step, last.number + 1, begin, limited)


def alive() -> None:
    """Record progress of the current activity. Only calls from the main thread have an effect."""
    if threading.current_thread() is threading.main_thread():
        current.since = now()


def first_step_done(timeout_seconds: float) -> None:
    """Record the end of the first step. From now on, activities have the timeout `timeout_seconds`."""
    global train_timeout
    mark("end of the first step")
    train_timeout = timeout_seconds
    _longest_at_first.update(_longest)
    _longest.clear()


def is_over(init_timeout_seconds: float) -> bool:
    """Return whether the current activity takes longer than its longest time so far plus the timeout. In the first
    step, and for a new activity (it may compile), the timeout is `init_timeout_seconds`."""
    before = _longest.get(current.name, _longest_at_first.get(current.name))
    timeout = init_timeout_seconds if before is None or train_timeout is None else train_timeout
    return current.limited and now() - current.since > timeout + (before or 0.0)
