"""Measure host memory, storage, and the host's time to dispatch an operator. A forward and backward of a model with
tiny operators, which take almost no time, is timed with plain tensors and with DTensors. In a training step on a CPU,
large operators evict the dispatcher's code and data from the caches. A copy that evicts caches therefore runs after
each module, and the time of the copies is subtracted. Every rank must call each measuring function."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from titanlite.build_llama import build_llama
from titanlite.checkpoint.files import write_file
from titanlite.config.schema import Model
from titanlite.init import init_weights
from titanlite.parallel.tensor import apply_tensor_parallel
from titanlite.tools.calibrate.timing import Timer
from titanlite.tools.plan.measured_rates import seconds_at
from titanlite.tools.plan.op_trace import Communication, Dispatch, OpTrace, Work
from titanlite.torch_workarounds import ignore_warnings_of_views

LEAST_SECONDS = 1e-7  # lower bound of a dispatch's time, since a difference of noisy measurements may be smaller
UPDATED_VALUES, STORED_VALUES = 2**25, 2**24
"""Elements of the weight that AdamW updates in host memory (more than caches hold), and of the weight that is saved."""
TINY = {"dim": 16, "n_layers": 4, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 16, "vocab_size": 16}


def measure_dispatch(timer: Timer, operators: dict[str, list[list[float]]]) -> tuple[float, float]:
    """Return the seconds to dispatch an operator on plain tensors, and those of an operator on DTensors, excluding the
    plain operators that it dispatches. `operators`: the points (bytes, seconds) that measure_operators returns. On a
    CPU, operators run on the host, so their own time is subtracted."""
    mesh = init_device_mesh(timer.device.type, (dist.get_world_size(), 1), mesh_dim_names=("ranks", "one"))["one"]
    one = torch.ones(1, device=timer.device)
    collective = timer(lambda: dist.all_reduce(one, group=mesh.get_group()))
    eviction, results = Eviction(), list[float]()
    copying = timer(eviction)
    for tensor_parallel in (False, True):
        call = _training_step(mesh, timer.device, eviction, tensor_parallel=tensor_parallel)
        n, on_dtensors, own = _count(call, eviction, operators, collective)
        seconds = timer(call)
        if timer.device.type == "cpu":
            call()  # counts in eviction.copies how often a step evicts the CPU cache
            seconds -= own + eviction.copies * copying
        per_operator = (seconds - n * results[0]) / on_dtensors if tensor_parallel else seconds / n
        results.append(max(per_operator, LEAST_SECONDS))
    return results[0], results[1]


class Eviction:
    """Evicts a core's caches by copying more than they hold. `copies` counts the copies in a training step."""

    def __init__(self) -> None:
        self.source, self.copies = torch.ones(2**19), 0
        self.target = torch.empty_like(self.source)

    def __call__(self, *_: object) -> None:
        self.target.copy_(self.source)
        self.copies += 1

    def after(self, module: nn.Module, inputs: object, output: Any) -> None:
        """Evict the caches now, after a module's forward, and again before its backward."""
        self()
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(self)


def measure_host_memory(timer: Timer) -> float:
    """Return the bytes/s that a rank's fused AdamW reads and writes in host memory."""
    weight = torch.ones(UPDATED_VALUES, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return 7 * weight.nbytes / timer(optimizer.step)  # the step reads four tensors and writes three


def measure_host_link(timer: Timer) -> float:
    """Return the bytes/s between pinned host memory and a GPU, in the slower direction."""
    there = torch.ones(2**26, dtype=torch.uint8, device=timer.device)
    here = torch.ones(2**26, dtype=torch.uint8, pin_memory=True)
    copies = (lambda: there.copy_(here, non_blocking=True), lambda: here.copy_(there, non_blocking=True))
    return here.nbytes / max(timer(copy) for copy in copies)


def measure_storage(timer: Timer, folder: Path, ranks_per_node: int) -> float:
    """Return the bytes/s at which all ranks of a node together write to a folder, with checksums and synced to the disk
    like a checkpoint. Raises OSError if the folder cannot be written."""
    tensor, file = torch.rand(STORED_VALUES), folder / f"calibrate-{dist.get_rank()}.tmp"
    slices = {"weight": (tensor, (0,), tuple(tensor.shape))}
    try:
        return ranks_per_node * tensor.nbytes / timer(lambda: write_file(file, slices))
    finally:
        file.unlink(missing_ok=True)


def _training_step(
    mesh: DeviceMesh, device: torch.device, eviction: Eviction, *, tensor_parallel: bool
) -> Callable[[], None]:
    """Return a function that runs forward and backward of a tiny model on this rank alone."""
    model = build_llama(Model(flavor="debug", **TINY), max_seq_len=8)
    if tensor_parallel:
        apply_tensor_parallel(model, mesh)
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.materialize(device)
    init_weights(model, seed=0, n_layers=TINY["n_layers"], device=device)
    ignore_warnings_of_views()
    tokens = torch.zeros(1, 8, dtype=torch.int64, device=device)
    if device.type == "cpu":
        for module in model.modules():
            if not [*module.children()]:
                module.register_forward_hook(eviction.after)

    def step() -> None:
        eviction.copies = 0
        model(tokens).sum().backward()

    return step


def _count(
    call: Callable[[], object], eviction: Eviction, operators: dict[str, list[list[float]]], collective: float
) -> tuple[int, int, float]:
    """Return how many operators a call dispatches (without the evicting copies), how many of these operators are on
    DTensors, and the seconds that the operators themselves and the collectives take."""
    call()  # FSDP's first step dispatches other operators
    with OpTrace() as trace:
        call()
    trace.mark("end")
    events = [event for segment in trace.segments for event in segment.events]
    dispatches = [event for event in events if isinstance(event, Dispatch)]
    works = [event for event in events if isinstance(event, Work) and event.name != "aten.copy_"]
    own = sum(seconds_at(operators["mul"], work.read + work.written) for work in works)
    own += collective * sum(isinstance(event, Communication) for event in events)
    return sum(x.operators for x in dispatches) - eviction.copies, sum(x.on_dtensors for x in dispatches), own
