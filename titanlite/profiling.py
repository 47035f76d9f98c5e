"""Chrome traces and CUDA memory snapshots of a running training; what had the memory when it was used up."""

import gc
import os
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from titanlite import progress
from titanlite.config.schema import Profiling
from titanlite.errors import TrainingError
from titanlite.metrics import peak_memory
from titanlite.reliability.process import print_to_console
from titanlite.shards import plain_tensors

OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|Cannot allocate memory|CUBLAS_STATUS_ALLOC_FAILED")
"""In errors of torch, CUDA, cuBLAS and the system."""

StepDone = Callable[[int], None]  # to call with the number of each step after it


def build_profilers(dump_folder: Path, profiling: Profiling, rank: int) -> list[AbstractContextManager[StepDone]]:
    """Build the enabled profilers: contexts for the training loop that yield a function to call after each step."""
    freq, profilers = profiling.profile_freq, []
    if profiling.enable_profiling:
        profilers.append(traces(dump_folder / profiling.save_traces_folder, freq, rank))
    if profiling.enable_memory_snapshot:
        profilers.append(memory_snapshots(dump_folder / profiling.save_memory_snapshot_folder, freq, rank))
    return profilers


@contextmanager
def traces(folder: Path, freq: int, rank: int) -> Iterator[StepDone]:
    """Write a trace of one step in `freq` to folder/step_N/rankR.json (open it in ui.perfetto.dev)."""
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
    with torch.profiler.profile(schedule=schedule, on_trace_ready=write) as profiler:  # of the CPU, and CUDA if there
        yield step_done


@contextmanager
def memory_snapshots(folder: Path, freq: int, rank: int) -> Iterator[StepDone]:
    """Write memory snapshots, which name the code behind each GPU allocation (open them in pytorch.org/memory_viz), to
    folder/step_N/rankR.pickle every `freq` steps and to folder/out_of_memory/rankR.pickle on an out-of-memory error.

    Private: two functions of torch.cuda.memory, which PyTorch's documentation of memory snapshots names all the same.
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


def explain_out_of_memory(error: Exception) -> Exception:
    """Return an error that tells what has the memory, if this one says that there is no more; else this one. The
    traceback is then in the rank's file only."""
    is_of_system = isinstance(error, RuntimeError | OSError) and OUT_OF_MEMORY.search(f"{error}")
    if not isinstance(error, MemoryError) and not is_of_system:
        return error
    print_to_console("".join(traceback.format_exception(error)).rstrip(), hidden=True)
    of_host = isinstance(error, MemoryError | OSError) or "DefaultCPUAllocator" in f"{error}"
    device = torch.device("cuda" if torch.cuda.is_initialized() and not of_host else "cpu")
    gc.unfreeze()  # what is frozen is not found
    optimizers = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
    weights = [weight for optimizer in optimizers for group in optimizer.param_groups for weight in group["params"]]
    states = [state for optimizer in optimizers for each in optimizer.state.values() for state in each.values()]
    tensors = {"weights": weights, "gradients": [weight.grad for weight in weights], "optimizer states": states}
    sizes = {name: _bytes_on(device, values) for name, values in tensors.items()}
    sizes["the rest, such as activations"] = max(peak_memory(device)[1] * 2**30 - sum(sizes.values()), 0)
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    wanted = re.search(r"[Tt](ried to allocate [\d.]+ \w+)", f"{error}")
    return TrainingError(
        f"rank {os.environ.get('RANK', '0')} is out of memory at {str(progress.current)!r}"
        f"{f', where it t{wanted[1]}' if wanted else ''}: "
        f"{', '.join(f'{name} {size / 2**30:.2f} GiB' for name, size in largest)}; "
        "`titanlite plan CONFIG` computes the memory of a config, and docs/memory.md has what saves it"
    )


def _bytes_on(device: torch.device, values: list[Any]) -> int:
    """Return the size of this rank's shards on a kind of device."""
    shards = plain_tensors({str(number): value for number, value in enumerate(values) if torch.is_tensor(value)})
    return sum({shard.data_ptr(): shard.nbytes for shard in shards if shard.device.type == device.type}.values())
