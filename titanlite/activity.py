"""What the main thread of a rank does, and since when; by it the watchdog tells a rank that hangs from a slow one.

The planner, tests and other programs without a watchdog note it too, at no cost worth mentioning.
"""

import dataclasses
import time


@dataclasses.dataclass
class Activity:
    """One thing that the main thread does."""

    name: str = "starting"
    step: int = 0
    number: int = 0
    """How many activities it has begun: of two ranks, the one with the smaller number is behind."""
    since: float = dataclasses.field(default_factory=time.monotonic)
    limited: bool = True
    """Whether it counts as a hang when it takes too long."""

    def __str__(self) -> str:
        return f"step {self.step}: {self.name}" if self.step else self.name


current = Activity()
train_timeout: float | None = None
"""comm.train_timeout_seconds, once the first step is done."""
_longest: dict[str, float] = {}  # seconds that each activity has taken at most, by name
_longest_at_first: dict[str, float] = {}  # the same until the first step was done, which compiles


def mark(name: str, step: int | None = None, *, limited: bool = True) -> None:
    """Note what the main thread begins to do now; `step` remains the last one if it is not given.

    With limited=False it may take any time, because another rank's activity, which it waits for, is limited.
    """
    global current
    now, last = time.monotonic(), current
    _longest[last.name] = max(_longest.get(last.name, 0.0), now - last.since)
    current = Activity(name, last.step if step is None else step, last.number + 1, now, limited)


def alive() -> None:
    """Note that the activity makes progress."""
    current.since = time.monotonic()


def first_step_done(timeout_seconds: float) -> None:
    """Note that the first step is done. From now on another timeout holds, and what takes long is not compilation."""
    global train_timeout
    train_timeout = timeout_seconds
    _longest_at_first.update(_longest)
    _longest.clear()


def is_over(timeout_seconds: float) -> bool:
    """Return whether the activity has taken the timeout longer than it ever has before."""
    before = _longest.get(current.name, _longest_at_first.get(current.name, 0.0))
    return current.limited and time.monotonic() - current.since > timeout_seconds + before
