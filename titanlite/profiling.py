"""Chrome traces and CUDA memory snapshots of a running training."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch


@contextlib.contextmanager
def traces(folder: Path, *, freq: int, rank: int) -> Iterator[Callable[[int], None]]:
    """Write a trace of one step in `freq` to folder/step_N/rankR.json (open it in ui.perfetto.dev).

    Yields:
        A function to call with the number of each step after it.
    """

    step = 0

    def write(profiler: torch.profiler.profile) -> None:
        step_folder = folder / f"step_{step}"
        step_folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(step_folder / f"rank{rank}.json"))

    def step_done(number: int) -> None:
        nonlocal step
        step = number
        profiler.step()

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    schedule = torch.profiler.schedule(wait=freq - 4, warmup=3, active=1)
    with torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=write) as profiler:
        yield step_done


@contextlib.contextmanager
def memory_snapshots(folder: Path, *, freq: int, rank: int) -> Iterator[Callable[[int], None]]:
    """Write what each allocation on the GPU was made for to folder/step_N/rankR.pickle (open it in
    pytorch.org/memory_viz), each `freq` steps and when the run dies of a lack of memory.

    Private API of torch.cuda.memory, which its documentation of memory snapshots names all the same.

    Yields:
        A function to call with the number of each step after it.
    """
    torch.cuda.memory._record_memory_history(max_entries=100_000)

    def write(name: str) -> None:
        (folder / name).mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(folder / name / f"rank{rank}.pickle"))

    try:
        yield lambda step: write(f"step_{step}") if step % freq == 0 else None
    except torch.OutOfMemoryError:
        write("out_of_memory")
        raise
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
