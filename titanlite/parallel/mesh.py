"""The one device mesh of all ranks, from which every parallelism takes its axis."""

import dataclasses
import functools
import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.config.schema import Parallelism

AXES = ("pp", "dp_replicate", "fsdp", "tp")
"""Axes of the mesh, outermost first: neighbouring ranks have the fastest interconnect, and the axes that communicate
most come last. Weights are sharded over fsdp = dp_shard x ring x ulysses: the ranks that use the same weights for other
tokens, either of other sequences (dp_shard) or of the same ones (context parallel = ring x ulysses)."""
EXPERT_AXES = ("pp", "dp_replicate", "efsdp", "ep")
"""Axes of the mesh that experts are sharded over: the ranks of fsdp x tp, in other groups."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """A layout is the mesh of all ranks and this rank's place in it."""

    mesh: DeviceMesh
    expert_mesh: DeviceMesh | None
    """The same ranks, with the axes efsdp x ep in place of fsdp x tp; None: no expert parallelism."""
    ring_group: dist.ProcessGroup | None
    """Ranks that send keys and values around a ring; None: this rank only."""
    ulysses_group: dist.ProcessGroup | None
    """Ranks that exchange sequence for heads; None: this rank only."""
    data_rank: int
    """Index of this rank among the data-parallel ones; context-, tensor- and pipeline-parallel ranks share one."""
    context_rank: int
    """Index of this rank among those that split its sequences: ring rank x ulysses + ulysses rank."""


def build_layout(parallelism: Parallelism, device: torch.device) -> Layout:
    """Arrange all ranks in a mesh by the degrees of a resolved config. Every rank must call it."""
    pp, tp = parallelism.pipeline_parallel_degree, parallelism.tensor_parallel_degree
    dp_replicate, dp_shard = parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree
    ring, ulysses = parallelism.ring_degree, parallelism.context_parallel_ulysses_degree
    return _layout(device.type, (pp, dp_replicate, dp_shard, ring, ulysses, tp), parallelism.expert_parallel_degree)


@functools.cache  # a process group keeps its threads and connections until the process ends
def _layout(device_type: str, degrees: tuple[int, int, int, int, int, int], ep: int) -> Layout:
    pp, dp_replicate, dp_shard, ring, ulysses, tp = degrees
    shape, world_size = (pp, dp_replicate, dp_shard * ring * ulysses, tp), math.prod(degrees)
    # Groups of some ranks need no gloo on CUDA. An axis of all ranks uses the default group, unless it is named here.
    backend = "nccl" if device_type == "cuda" else None
    backends = {axis: backend for axis, degree in zip(AXES, shape, strict=True) if backend and degree < world_size}
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=AXES, backend_override=backends)
    expert_mesh = None
    if ep > 1:
        shape = pp, dp_replicate, dp_shard * ring * ulysses * tp // ep, ep
        # The group of ep is never the default one, or its collectives would wait for those of FSDP that are in flight.
        backends = {axis: backend for axis in EXPERT_AXES if backend} or {"ep": dist.get_backend()}
        expert_mesh = init_device_mesh(device_type, shape, mesh_dim_names=EXPERT_AXES, backend_override=backends)
    ranks = torch.arange(world_size).reshape(degrees)

    def group_along(axis: int) -> dist.ProcessGroup | None:
        members = ranks.movedim(axis, -1).reshape(-1, degrees[axis]).tolist()
        return dist.new_subgroups_by_enumeration(members, backend=backend)[0] if degrees[axis] > 1 else None

    shard_rank, context_rank = divmod(mesh.get_local_rank("fsdp"), ring * ulysses)
    data_rank = mesh.get_local_rank("dp_replicate") * dp_shard + shard_rank
    return Layout(mesh, expert_mesh, group_along(3), group_along(4), data_rank, context_rank)


def forget_layouts() -> None:
    """Forget all layouts, because their process groups are gone."""
    _layout.cache_clear()
