"""Explain what uses a rank's memory when an allocation has failed."""

import gc
import os
import re
import traceback
from typing import Any

import torch

from titanlite.checkpoint.tensors import plain_tensors
from titanlite.config.errors import TrainingError
from titanlite.launch import progress
from titanlite.launch.process import print_to_console
from titanlite.metrics.logger import peak_memory

OUT_OF_MEMORY = re.compile("out of memory|[Cc]an(no|')t allocate memory|start new thread|CUBLAS_STATUS_ALLOC_FAILED")
"""Matches the messages of torch, CUDA, cuBLAS, Python and the operating system for a failed allocation."""


def explain_out_of_memory(error: Exception) -> Exception:
    """If `error` is a failed allocation, return an error that tells what uses the memory, and write the traceback to
    the rank's log file only. Return any other `error` unchanged."""
    is_of_system = isinstance(error, RuntimeError | OSError) and OUT_OF_MEMORY.search(f"{error}")
    if not isinstance(error, MemoryError) and not is_of_system:
        return error
    print_to_console("".join(traceback.format_exception(error)).rstrip(), hidden=True)
    of_host = isinstance(error, MemoryError | OSError) or "DefaultCPUAllocator" in f"{error}"
    device = torch.device("cuda" if torch.cuda.is_initialized() and not of_host else "cpu")
    gc.unfreeze()  # unfreeze first: gc.get_objects omits frozen objects
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
    """Return the bytes of this rank's shards of `values` on the given type of device."""
    shards = plain_tensors({str(number): value for number, value in enumerate(values) if torch.is_tensor(value)})
    return sum({shard.data_ptr(): shard.nbytes for shard in shards if shard.device.type == device.type}.values())
