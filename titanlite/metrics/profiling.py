"""Start the enabled profilers of a run, and decide when Python collects garbage."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from titanlite.config.schema import Job, Profiling


def profilers(job: Job, profiling: Profiling, rank: int) -> AbstractContextManager[Callable[[int], None]]:
    """Return a context manager that runs the enabled profilers. It yields a function to call at each step."""
    if not (profiling.enable_profiling or profiling.enable_memory_snapshot):
        return nullcontext(lambda step: None)
    from titanlite.metrics.profilers import run_profilers  # imported here: few runs are profiled

    return run_profilers(job, profiling, rank)


@contextmanager
def collected_garbage() -> Iterator[Callable[[int, int], None]]:
    """Disable automatic garbage collection. Yield a function to call after each step with its number and
    training.gc_freq: it collects garbage in the same steps on all ranks."""
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
