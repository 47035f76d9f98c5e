"""Progress of long work, in lines that a log file keeps: what is done, of how much, and the time left."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from titanlite.activity import alive

INTERVAL_SECONDS = 10.0
"""Seconds until the first line, and between two lines. Work that is shorter prints nothing."""


@contextlib.contextmanager
def progress(
    description: str, *, total: int | None = None, unit: str = "", enabled: bool = True
) -> Iterator[Callable[..., None]]:
    """Print a line to standard error every 10 seconds for as long as the body runs.

    Args:
        description: what the body does, as in "validation".
        total: how much there is to do; None: unknown, so only what is done and the elapsed time are printed.
        unit: what `total` counts, as in "batches".
        enabled: whether to print at all; False on all ranks but one.

    Yields:
        A function to call with the amount done since the last call and, if wanted, a text to add to the line.
    """
    begin, done, details, finished = time.monotonic(), 0, "", threading.Event()

    def advance(amount: int = 1, text: str = "") -> None:
        nonlocal done, details
        done, details = done + amount, text
        alive()

    def report() -> None:
        while not finished.wait(INTERVAL_SECONDS):
            line = progress_line(description, done, total, unit, time.monotonic() - begin)
            print(f"{line}; {details}" if details else line, file=sys.stderr, flush=True)

    thread = threading.Thread(target=report, name="progress", daemon=True)
    if enabled:
        thread.start()
    try:
        yield advance
    finally:
        finished.set()
        if enabled:
            thread.join()


def progress_line(description: str, done: int, total: int | None, unit: str, seconds: float) -> str:
    """Return the line of some work after so many seconds: "validation: 10 of 40 batches, 0:00:20, 0:01:00 left"."""
    amount = [f"{done:,} of {total:,} {unit}"] if total is not None else [f"{done:,} {unit}"] if done else []
    left = [f"{timedelta(seconds=round(seconds / done * (total - done)))} left"] if total and done else []
    return f"{description}: {', '.join([*amount, str(timedelta(seconds=round(seconds))), *left])}"
