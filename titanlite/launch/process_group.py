"""The process group of all ranks, the device of each rank, and the timeouts of collectives."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite import __version__
from titanlite.config import Launch
from titanlite.config.differences import options_by_key
from titanlite.config.launch import raise_open_file_limit
from titanlite.config.loader import ConfigError, Section, printable, show
from titanlite.config.schema import Comm
from titanlite.config.types import MAY_DIFFER
from titanlite.launch.failure import BACKSTOP_SECONDS, OneRank, ranks_store
from titanlite.launch.progress import mark


def device_of(launch: Launch) -> torch.device:
    return torch.device("cuda", launch.local_rank) if launch.n_devices else torch.device("cpu")


def log_rank0(message: str) -> None:
    """Print a line on rank 0, or in a process without a process group."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(printable(message, keep="\n\t"), flush=True)


def watch(launch: Launch, comm: Comm, dump_folder: str) -> OneRank:
    """Return the object that ends this rank after an error. If there are other ranks, it is a Watchdog."""
    if launch.world_size == 1:
        return OneRank(launch)
    from titanlite.launch.watchdog import Watchdog  # imported here: a single rank needs no watchdog

    return Watchdog(launch, comm, Path(dump_folder))


def options_of_run(config: Section) -> dict[str, Any]:
    """Return the options that all ranks must share, by `section.key`, and the versions of titanlite and torch."""
    options = {"titanlite": __version__, "torch": str(torch.__version__), **options_by_key(config, without=MAY_DIFFER)}
    return options | ({"own": config.own.digest} if config.own.digest else {})


@contextlib.contextmanager
def process_group(
    launch: Launch, comm: Comm, dump_folder: str, options: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Start the process group of all ranks, and destroy it after the with block. A timeout dumps NCCL's last
    collectives to `dump_folder`. Raises ConfigError if `options` or the package differ between ranks."""
    device = device_of(launch)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if comm.trace_buf_size:
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(comm.trace_buf_size))
            os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
            os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", os.path.join(dump_folder, "flight_recorder_rank_"))
    # Let gloo connect two ranks when one first sends to the other, instead of all pairs when a group is created.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    raise_open_file_limit()
    # gloo, added to NCCL, is for collectives of tensors in host memory: hashes of the data, checkpoint steps, barriers.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = _backstop(comm.init_timeout_seconds)
    arguments: dict[str, Any] = {}
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if launch.world_size == 1:  # a single rank needs no port
        arguments = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    elif not re.fullmatch(r"[\w.:%-]+:[1-9][0-9]{0,4}", where):  # torchrun has not set the address
        raise ConfigError([f"environment: MASTER_ADDR:MASTER_PORT = {show(where)}: expected the place of rank 0"])
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # After a restart, torchrun's store still has the addresses of old ranks (torch 2.11 to 2.13): gloo must not
        # read them.
        store = ranks_store(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], timeout.total_seconds())
        store = dist.PrefixStore("torch", store)
        arguments = {"store": store, "rank": launch.rank, "world_size": launch.world_size}
    dist.init_process_group(backend, timeout=timeout, **arguments)
    if options and launch.world_size > 1:
        from titanlite.launch.same_config import require_same  # imported here: a single rank has nothing to compare

        require_same(options)
    yield
    # The barrier is skipped after an exception, since other ranks may then never reach the barrier.
    dist.barrier()
    dist.destroy_process_group()


def set_timeout(device: torch.device, seconds: int) -> None:
    """Change how long the collectives of all process groups may take. Uses the private dictionary _world.pg_map of
    torch.distributed.distributed_c10d, which has all groups (also FSDP's). Before torch 2.15, also uses the private
    _set_pg_timeout, since then named torch.distributed.set_timeout (tested with torch 2.11 and 2.13, gloo)."""
    if device.type == "cuda":  # on CUDA, running collectives keep the old timeout
        torch.cuda.synchronize()
        dist.barrier()
    for group in dist.distributed_c10d._world.pg_map:
        set_group_timeout(group, seconds)


def set_group_timeout(group: dist.ProcessGroup, seconds: int) -> None:
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(_backstop(seconds), group)


def _backstop(seconds: int) -> timedelta:
    """Return process groups' timeout, which exceeds the watchdog's, so that the watchdog names a failed rank first."""
    return timedelta(seconds=seconds + BACKSTOP_SECONDS)


@contextlib.contextmanager
def compared_over_ranks() -> Iterator[Callable[..., None]]:
    """Yield a function that compares the identities of all ranks' data; every rank must call it. Raises ConfigError if
    they differ. Only the watchdog limits the wait for other ranks: tokenizing may take hours longer on some nodes."""
    group = dist.new_group(backend="gloo", timeout=timedelta(days=365))

    def compare(*own: str) -> None:
        mark("waiting for the data of other ranks", limited=False)
        identities: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(identities, own, group=group)
        if others := [rank for rank, each in enumerate(identities) if each != identities[0]]:
            problem = f"training.dataset_path: rank {others[0]} reads other data than rank 0; give all nodes the same"
            raise ConfigError([problem])

    yield compare
    dist.destroy_process_group(group)
