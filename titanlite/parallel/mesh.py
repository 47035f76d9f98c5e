"""The process group, and the one device mesh of all ranks from which every parallelism takes its axis."""

import contextlib
import ctypes
import dataclasses
import functools
import math
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.config import Launch
from titanlite.config.launch import raise_open_file_limit
from titanlite.config.loader import printable
from titanlite.config.schema import Comm, Parallelism
from titanlite.launch.watchdog import BACKSTOP_SECONDS, ranks_store


def device_of(launch: Launch) -> torch.device:
    """Return this rank's device: its own GPU, or the CPU where there is none."""
    return torch.device("cuda", launch.local_rank) if launch.n_devices else torch.device("cpu")


def log_rank0(message: str) -> None:
    """Print a line on the first rank, or in a process without ranks."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(printable(message, keep="\n\t"), flush=True)


@contextlib.contextmanager
def process_group(launch: Launch, comm: Comm, dump_folder: str) -> Iterator[None]:
    """Start the process group of all ranks, and destroy it after the body. After a timeout NCCL's flight recorder dumps
    its last collectives to `dump_folder`."""
    device = device_of(launch)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if comm.trace_buf_size:
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(comm.trace_buf_size))
            os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
            os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", os.path.join(dump_folder, "flight_recorder_rank_"))
    # A gloo rank connects to another when it first sends to it. Otherwise it connects to all, in every group.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    raise_open_file_limit()
    # gloo beside NCCL is for tensors in host memory: the data's identity, steps of checkpoints, the last barrier.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = _backstop(comm.init_timeout_seconds)
    arguments: dict[str, Any] = {}
    if "WORLD_SIZE" not in os.environ:  # started without torchrun: one rank, which needs no port
        arguments = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun's agent keeps its store when it starts ranks anew (torch 2.11 to 2.13), with the addresses of the
        # old ones, which gloo would connect to.
        store = ranks_store(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], timeout.total_seconds())
        store = dist.PrefixStore("torch", store)
        arguments = {"store": store, "rank": launch.rank, "world_size": launch.world_size}
    dist.init_process_group(backend, timeout=timeout, **arguments)
    yield
    # Only on success: after an exception the other ranks may never reach a barrier.
    dist.barrier()
    dist.destroy_process_group()


def retain_freed_memory() -> None:
    """Have glibc keep what the process frees for the next step, instead of returning every larger block to the kernel
    and having each of its pages mapped and cleared anew. Without glibc this does nothing."""
    with contextlib.suppress(AttributeError, OSError):
        for parameter in (-3, -1):  # malloc.h: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            ctypes.CDLL(None).mallopt(parameter, 2**31 - 1)


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


def set_timeout(device: torch.device, seconds: int) -> None:
    """Change how long the collectives of all process groups may take.

    Private: torch.distributed.distributed_c10d._world.pg_map has the groups, also those that FSDP makes; before torch
    2.15, torch.distributed.set_timeout is _set_pg_timeout (tried on 2.11 and 2.13, gloo).
    """
    if device.type == "cuda":  # collectives in flight keep the timeout that they were started with
        torch.cuda.synchronize()
        dist.barrier()
    for group in dist.distributed_c10d._world.pg_map:
        set_group_timeout(group, seconds)


def set_group_timeout(group: dist.ProcessGroup, seconds: int) -> None:
    """Change how long the collectives of a process group may take."""
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(_backstop(seconds), group)


def _backstop(seconds: int) -> timedelta:
    """Return the timeout of process groups. It is longer than the watchdog's, which tells which rank hangs."""
    return timedelta(seconds=seconds + BACKSTOP_SECONDS)
