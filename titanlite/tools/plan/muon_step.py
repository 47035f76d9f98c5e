"""Record Muon's step in a dry run. Muon assigns the matrices of all layers of a stage to ranks, in rounds, and a dry
run has only a few layers. Therefore this module computes the rounds of the full stage, and records only the largest
matrix of each round. A phase ("muon", number, times) stands for `times` rounds with largest matrices of equal shape."""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titanlite import build
from titanlite.config import Config
from titanlite.parallel.shards import local_shard
from titanlite.techniques.muon import Muon, assign, is_orthogonalized, newton_schulz, stage_group, work_of
from titanlite.tools.plan.op_trace import Communication, OpTrace, Work


def shapes_of_matrices(config: Config, names: Sequence[str] | None) -> list[tuple[int, ...]]:
    """Return the shapes of the matrices that Muon orthogonalizes in the modules `names`; None: in all modules."""
    parameters = build.meta_model(config, names).named_parameters()
    return [tuple(parameter.shape) for name, parameter in parameters if is_orthogonalized(name, parameter)]


def recorder(
    config: Config, mesh: DeviceMesh, names: Sequence[str], axes: dict[str, tuple[str, list[int]]]
) -> Callable[[OpTrace, Muon], None]:
    """Return a function that runs AdamW's step for the weights that Muon leaves to AdamW, and records Muon's step for a
    stage with the modules `names`. Add Muon's process group to `axes` if it is missing."""
    group = stage_group(mesh)
    axes.setdefault(group.group_name, ("stage", dist.get_process_group_ranks(group)))
    has_own_experts = config.parallelism.expert_parallel_degree == group.size()  # each rank's experts are unsharded
    rounds = assign(shapes_of_matrices(config, names), group.size())
    longest = Counter(max((unit.shape for unit in units), key=work_of) for units in rounds)

    def record_step(trace: OpTrace, optimizer: Muon) -> None:
        optimizer.adamw.step()
        for weight in optimizer.matrices:
            size, exchanged = local_shard(weight).nbytes, local_shard(weight).numel() * optimizer.dtype.itemsize
            # Bytes read and written: momentum, Nesterov look-ahead, weight decay, subtraction of the update.
            trace.record(Work("titanlite.techniques.muon", 0, "", 6 * size + exchanged, 3 * size + exchanged, (), ()))
        for number, (shape, times) in enumerate(longest.items()):
            trace.mark("muon", number, times)
            full = torch.empty(shape, dtype=optimizer.dtype)
            for _ in range(0 if len(shape) == 3 and has_own_experts else 2):
                trace.record(Communication("all_to_all", group.group_name, full.nbytes))
            newton_schulz(full, optimizer.options.muon_newton_schulz_steps)
        trace.mark("update")

    return record_step


def create_states(optimizer: Muon) -> None:
    """Create the optimizer's states without Muon's step, which has collectives."""
    for weight in optimizer.matrices:
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    for weight in (weight for group in optimizer.adamw.param_groups for weight in group["params"]):
        weight.grad = torch.zeros_like(weight)
    optimizer.adamw.state = optimizer.state
    optimizer.adamw.step()
    optimizer.adamw.zero_grad()
