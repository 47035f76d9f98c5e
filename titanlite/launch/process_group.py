"""The process group of all ranks: the device of each, and how long collectives may take."""

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from titanlite.config import Launch
from titanlite.config.launch import raise_open_file_limit
from titanlite.config.loader import ConfigError, printable, show
from titanlite.config.schema import Comm
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
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if launch.world_size == 1:  # needs no port
        arguments = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    elif not re.fullmatch(r"[\w.:%-]+:[1-9][0-9]{0,4}", where):  # not torchrun has set it
        raise ConfigError([f"environment: MASTER_ADDR:MASTER_PORT = {show(where)}: expected the place of rank 0"])
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
