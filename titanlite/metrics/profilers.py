"""Write Chrome traces and CUDA memory snapshots of a run; a snapshot is also written when the run is out of memory."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from titanlite.config.schema import Job, Profiling
from titanlite.launch.progress import mark

StepDone = Callable[[int], None]  # a function to call after each step, with the step's number


@contextmanager
def run_profilers(job: Job, profiling: Profiling, rank: int) -> Iterator[StepDone]:
    folder, freq, enabled = Path(job.dump_folder), profiling.profile_freq, []
    if profiling.enable_profiling:
        enabled.append(traces(folder / profiling.save_traces_folder, freq, rank))
    if profiling.enable_memory_snapshot:
        enabled.append(memory_snapshots(folder / profiling.save_memory_snapshot_folder, freq, rank))
    with ExitStack() as stack:
        called = [stack.enter_context(profiler) for profiler in enabled]

        def step_done(step: int) -> None:
            for call in called:
                mark("profiling")
                call(step)

        yield step_done


@contextmanager
def traces(folder: Path, freq: int, rank: int) -> Iterator[StepDone]:
    """Write a trace of one step in every `freq` to folder/step_N/rankR.json (open the file in ui.perfetto.dev)."""
    step = 0

    def write(profiler: torch.profiler.profile) -> None:
        step_folder = folder / f"step_{step}"
        step_folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(step_folder / f"rank{rank}.json"))

    def step_done(number: int) -> None:
        nonlocal step
        step = number
        profiler.step()

    schedule = torch.profiler.schedule(wait=freq - 4, warmup=3, active=1)
    with torch.profiler.profile(schedule=schedule, on_trace_ready=write) as profiler:  # profiles the CPU and any GPU
        yield step_done


@contextmanager
def memory_snapshots(folder: Path, freq: int, rank: int) -> Iterator[StepDone]:
    """Write memory snapshots, which name the code behind each GPU allocation (open them in pytorch.org/memory_viz), to
    folder/step_N/rankR.pickle every `freq` steps and to folder/out_of_memory/rankR.pickle on an out-of-memory error.
    Uses two private functions of torch.cuda.memory, which PyTorch's guide to memory snapshots documents."""
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
