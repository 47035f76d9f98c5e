"""Whether a running training is profiled, and when Python collects garbage."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from titanlite.config.schema import Job, Profiling

StepDone = Callable[[int], None]  # called after each step with its number


@contextmanager
def profilers(job: Job, profiling: Profiling, rank: int) -> Iterator[StepDone]:
    """Run the enabled profilers; yield a function to call after each step."""
    if not (profiling.enable_profiling or profiling.enable_memory_snapshot):
        yield lambda step: None
        return
    from titanlite.metrics.profilers import run_profilers  # imported here, since few runs are profiled

    with run_profilers(job, profiling, rank) as step_done:
        yield step_done


@contextmanager
def collected_garbage() -> Iterator[Callable[[int, int], None]]:
    """Have Python collect garbage only when told to, on all ranks in the same step. Yield a function to call after each
    step with its number and training.gc_freq."""
    gc.collect()
    gc.freeze()
    gc.disable()

    def collect(step: int, freq: int) -> None:
        if step % freq == 0:
            gc.collect()

    try:
        yield collect
    finally:
        gc.unfreeze()
        gc.enable()
