"""The device mesh of all ranks; each parallelism uses one of its axes."""

import dataclasses
import functools
import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titanlite.config.schema import Parallelism

AXES = ("pp", "dp_replicate", "fsdp", "tp")
"""Axes of the mesh. The axes with the most communication come last, since neighbouring ranks have the fastest
interconnect. Weights are sharded over fsdp = dp_shard x ring x ulysses: ranks with different sequences (dp_shard), and
ranks with different tokens of the same sequences (context parallel = ring x ulysses)."""
EXPERT_AXES = ("pp", "dp_replicate", "efsdp", "ep")
"""Axes of the mesh over which experts are sharded: efsdp x ep groups the ranks of fsdp x tp differently."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """A layout is the mesh of all ranks and this rank's place in the mesh."""

    mesh: DeviceMesh
    expert_mesh: DeviceMesh | None
    """The ranks of `mesh`, with axes efsdp x ep in place of fsdp x tp; None: no expert parallelism."""
    ring_group: dist.ProcessGroup | None
    """Ranks that send keys and values around a ring; None: this rank only."""
    ulysses_group: dist.ProcessGroup | None
    """Ranks that exchange sequence shards for head shards; None: this rank only."""
    data_rank: int
    """Data-parallel index of this rank, the same for all context-, tensor- and pipeline-parallel ranks of a model."""
    context_rank: int
    """Context-parallel index of this rank: ring rank x ulysses degree + Ulysses rank."""


def build_layout(parallelism: Parallelism, device: torch.device) -> Layout:
    """Build the mesh of all ranks from the degrees in a resolved config. Every rank must call it."""
    pp, tp = parallelism.pipeline_parallel_degree, parallelism.tensor_parallel_degree
    dp_replicate, dp_shard = parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree
    ring, ulysses = parallelism.ring_degree, parallelism.context_parallel_ulysses_degree
    return _layout(device.type, (pp, dp_replicate, dp_shard, ring, ulysses, tp), parallelism.expert_parallel_degree)


@functools.cache  # cached: another set of process groups would add threads and connections
def _layout(device_type: str, degrees: tuple[int, int, int, int, int, int], ep: int) -> Layout:
    pp, dp_replicate, dp_shard, ring, ulysses, tp = degrees
    # On CUDA, subgroups use NCCL only. With local synchronization, a rank waits only for members of its own groups.
    options = {"backend": "nccl" if device_type == "cuda" else None, "use_local_synchronization": True}
    alone = dist.new_group([dist.get_rank()], **options) if math.prod(degrees) > 1 else dist.group.WORLD

    def group_along(axis: int, name: str, ranks: torch.Tensor, *, own: bool = False) -> dist.ProcessGroup:
        """Return this rank's process group along an axis: the default group if it has all ranks, except with `own`."""
        rows = ranks.movedim(axis, -1).flatten(0, -2)
        (members,) = rows[(rows == dist.get_rank()).any(1)].tolist()
        if len(members) == ranks.numel() and not own:
            return dist.group.WORLD
        return dist.new_group(members, group_desc=f"mesh_{name}", **options) if len(members) > 1 else alone

    all_ranks = torch.arange(math.prod(degrees)).reshape(degrees)
    ranks = all_ranks.reshape(pp, dp_replicate, -1, tp)
    groups = [group_along(axis, name, ranks) for axis, name in enumerate(AXES)]
    mesh, expert_mesh = DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=AXES), None
    if ep > 1:
        ranks = all_ranks.reshape(pp, dp_replicate, -1, ep)
        # ep needs a separate group: in the default group, its collectives would wait for FSDP's collectives in flight.
        groups[2:] = group_along(2, "efsdp", ranks), group_along(3, "ep", ranks, own=True)
        expert_mesh = DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=EXPERT_AXES)
    of_ring = group_along(3, "ring", all_ranks, own=True) if ring > 1 else None
    of_ulysses = group_along(4, "ulysses", all_ranks, own=True) if ulysses > 1 else None
    shard_rank, context_rank = divmod(mesh.get_local_rank("fsdp"), ring * ulysses)
    data_rank = mesh.get_local_rank("dp_replicate") * dp_shard + shard_rank
    return Layout(mesh, expert_mesh, of_ring, of_ulysses, data_rank, context_rank)


def forget_layouts() -> None:
    _layout.cache_clear()
