"""Process groups up and down, and the one DeviceMesh whose axes every parallelism takes its ranks from."""

import contextlib
import ctypes
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


def keep_freed_memory() -> None:
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


def init_mesh(device_type: str, *, dp_replicate: int, dp_shard: int) -> DeviceMesh:
    """The mesh of all ranks; the last axis is made of neighbouring ranks, so it gets the fastest links."""
    return init_device_mesh(device_type, (dp_replicate, dp_shard), mesh_dim_names=("dp_replicate", "dp_shard"))


def set_timeout(mesh: DeviceMesh, seconds: int) -> None:
    """Change how long collectives of the training's groups may take from now on. Other groups, such as the
    checkpoint's, keep theirs.

    torch.distributed.set_timeout since torch 2.15; before that, the same under the private name _set_pg_timeout (tried
    on torch 2.11 and 2.13; all three on gloo).
    """
    if mesh.device_type == "cuda":  # collectives in flight keep the timeout they were started with
        torch.cuda.synchronize()
        dist.barrier()
    set_group_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in [dist.group.WORLD, *mesh.get_all_groups()]:
        set_group_timeout(timedelta(seconds=seconds), group)
