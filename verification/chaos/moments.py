"""When a fault strikes: each moment waits for a place in a run, and then for a random part of the time it lasts."""

import random
import time
from collections.abc import Callable
from pathlib import Path

from verification.chaos.run import Run

Moment = Callable[[Run, random.Random], None]


def first_step_of(run: Run) -> int:
    """Wait for the first step of a run, and return its number."""
    run.wait_until(lambda: run.step() > 0)
    return run.step()


def before_ranks(run: Run, draw: random.Random) -> None:
    """The launcher is starting, and no rank exists."""
    time.sleep(draw.uniform(0, 1))


def during_imports(run: Run, draw: random.Random) -> None:
    """Ranks exist, and import torch, connect, or build the token cache."""
    run.wait_until(lambda: len(run.ranks()) == run.scale.ranks)
    time.sleep(draw.uniform(0, 3))


def first_step(run: Run, draw: random.Random) -> None:
    """The run has printed its summary: it loads a checkpoint, and takes its first step."""
    run.wait_until(lambda: "precision " in run.output())
    time.sleep(draw.uniform(0, 0.5))


def a_step(run: Run, draw: random.Random) -> None:
    """Some steps were taken."""
    first, steps = first_step_of(run), draw.randint(1, 8)
    run.wait_until(lambda: run.step() >= min(first + steps, run.scale.steps - 1))
    time.sleep(draw.uniform(0, 0.1))


def checkpoint_write(run: Run, draw: random.Random) -> None:
    """A checkpoint is being written."""
    first_step_of(run)
    run.wait_until(lambda: any(Path(run.folder, "run", "checkpoint").glob("step-*.tmp")), seconds_between=0.001)
    time.sleep(draw.uniform(0, 0.05))


def validation(run: Run, draw: random.Random) -> None:
    """A validation is next, or runs."""
    at = (first_step_of(run) // run.scale.validation_interval + 1) * run.scale.validation_interval
    run.wait_until(lambda: run.step() >= min(at, run.scale.steps) - 1)
    time.sleep(draw.uniform(0, 0.3))


def the_end(run: Run, draw: random.Random) -> None:
    """The last steps, the last save, or the exit."""
    run.wait_until(lambda: run.step() >= run.scale.steps - 1)
    time.sleep(draw.uniform(0, 1))


MOMENTS: dict[str, Moment] = {
    "before ranks": before_ranks,
    "imports": during_imports,
    "first step": first_step,
    "step": a_step,
    "checkpoint write": checkpoint_write,
    "validation": validation,
    "end": the_end,
}
