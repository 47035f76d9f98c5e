"""Process groups up and down, and the one mesh of ranks that every parallelism takes its own from."""

import contextlib
import ctypes
import dataclasses
import functools
import math
import os
import sys
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.config import Launch


def device_of(launch: Launch) -> torch.device:
    """This rank's device: its own GPU, or the CPU where there is none."""
    return torch.device("cuda", launch.local_rank) if launch.n_devices else torch.device("cpu")


@contextlib.contextmanager
def process_group(launch: Launch, *, timeout_seconds: int, trace_buf_size: int, dump_folder: str) -> Iterator[None]:
    """Start the process group of all ranks, and end it when the body is done.

    Args:
        timeout_seconds: how long a collective may take.
        trace_buf_size: collectives kept by NCCL's flight recorder (0: off), dumped to `dump_folder` after a timeout.
    """
    device = device_of(launch)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if trace_buf_size:
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(trace_buf_size))
            os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
            os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", os.path.join(dump_folder, "flight_recorder_rank_"))
    # gloo beside NCCL carries what lives in host memory: offloaded gradients, checkpoint plans.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    alone = "WORLD_SIZE" not in os.environ
    dist.init_process_group(
        backend,
        timeout=timedelta(seconds=timeout_seconds),
        # Started without torchrun: one rank, which needs no port.
        **({"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {}),
    )
    yield
    # Only on success: after an exception the other ranks may never reach a barrier.
    dist.barrier()
    dist.destroy_process_group()


def retain_freed_memory() -> None:
    """Have glibc keep what the process frees for the next step, instead of returning every larger block to the kernel
    and having each of its pages mapped and cleared anew. Does nothing where there is no glibc."""
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, LARGEST_INT = -1, -3, 2**31 - 1  # malloc.h
        mallopt(M_MMAP_THRESHOLD, LARGEST_INT)
        mallopt(M_TRIM_THRESHOLD, LARGEST_INT)


def leave(status: int) -> None:
    """End the process at once. gloo's threads can abort an interpreter that shuts down in the usual way, which
    would turn a finished run into a failed one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


AXES = ("pp", "dp_replicate", "fsdp", "tp")
"""Of the one mesh, outermost first: neighbouring ranks have the fastest links, and the axes that talk most come last.
fsdp is what weights are sharded over, dp_shard x ring x ulysses: the ranks that use the same weights for other tokens,
be they of other sequences (dp_shard) or other pieces of the same ones (context parallel, ring x ulysses)."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The mesh of all ranks and where this one stands."""

    mesh: DeviceMesh
    ring_group: dist.ProcessGroup | None
    """Ranks that pass keys and values around; None: there is no other rank in it."""
    ulysses_group: dist.ProcessGroup | None
    """Ranks that trade heads for sequence; None: there is no other rank in it."""
    data_rank: int
    """Number of this rank among the data-parallel ones; those that share it work on the same sequences."""
    context_rank: int
    """Number of this rank among those that share its sequences by pieces: ring rank x ulysses + ulysses rank."""

    def axes(self) -> dict[str, tuple[str, list[int]]]:
        """The axis of each of its groups, by the group's name, and the numbers of its ranks."""
        # Where an axis has all ranks, its group is that of all.
        groups = {"all": dist.group.WORLD, **{axis: self.mesh[axis].get_group() for axis in AXES}}
        groups |= {"ring": self.ring_group, "ulysses": self.ulysses_group}
        return {
            group.group_name: (axis, dist.get_process_group_ranks(group))
            for axis, group in groups.items()
            if group is not None
        }

    def groups(self) -> list[dist.ProcessGroup]:
        """All groups of its axes but the one of all ranks."""
        groups = [*self.mesh.get_all_groups(), self.ring_group, self.ulysses_group]
        return [group for group in groups if group not in (None, dist.group.WORLD)]


@functools.cache  # a group holds threads and connections until the process ends
def build_layout(
    device_type: str, *, pp: int, dp_replicate: int, dp_shard: int, ring: int, ulysses: int, tp: int
) -> Layout:
    """Arrange all ranks. Every rank must call it; asked for the same again, it gives the same groups.

    Args:
        device_type: of the devices, "cuda" or "cpu".
        The others are ranks along each axis; their product is the number of ranks.
    """
    sizes = (pp, dp_replicate, dp_shard * ring * ulysses, tp)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
    grid = torch.arange(math.prod(sizes)).reshape(pp, dp_replicate, dp_shard, ring, ulysses, tp)

    def group_along(axis: int) -> dist.ProcessGroup | None:
        if grid.shape[axis] == 1:
            return None
        members = grid.movedim(axis, -1).reshape(-1, grid.shape[axis])
        return dist.new_subgroups_by_enumeration(members.tolist())[0]

    replicate_rank, fsdp_rank = mesh.get_local_rank("dp_replicate"), mesh.get_local_rank("fsdp")
    shard_rank, context_rank = divmod(fsdp_rank, ring * ulysses)
    return Layout(mesh, group_along(3), group_along(4), replicate_rank * dp_shard + shard_rank, context_rank)


def set_timeout(layout: Layout, seconds: int) -> None:
    """Change how long collectives of the training's groups may take from now on. Other groups, such as the
    checkpoint's, keep theirs.

    torch.distributed.set_timeout since torch 2.15; before that, the same under the private name _set_pg_timeout (tried
    on torch 2.11 and 2.13; all three on gloo).
    """
    if layout.mesh.device_type == "cuda":  # collectives in flight keep the timeout they were started with
        torch.cuda.synchronize()
        dist.barrier()
    set_group_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in [dist.group.WORLD, *layout.groups()]:
        set_group_timeout(timedelta(seconds=seconds), group)
