"""Try to provoke the corrupted heap in gloo's threads that docs/support.md describes.

    python benchmarks/gloo_heap.py operations|groups|planted [--seconds 120]

operations: many collectives whose names have more than 15 characters, in flight at once on one group of one rank.
groups: two ranks create a group, use it and destroy it, again and again. planted: read freed memory, and free memory
twice, to see whether the allocator notices. Each runs in processes of its own, and the script prints how they end.

With a hardened allocator: LD_PRELOAD=libclang_rt.scudo_standalone-x86_64.so (LLVM's compiler-rt) and, in SCUDO_OPTIONS,
the sampling of GWP-ASan. The raw log is benchmarks/logs/gloo_heap.log.
"""

import argparse
import ctypes
import multiprocessing
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

IN_FLIGHT = 2000
ATTEMPTS = 5000
"""How often a planted bug is tried, since GWP-ASan samples one allocation in some hundreds."""


def operations(seconds: float) -> None:
    """Issue collectives for some seconds, and print how many were done."""
    group, n_done, end = dist.ProcessGroupGloo(dist.HashStore(), 0, 1), 0, time.monotonic() + seconds
    x = torch.ones(4)
    while time.monotonic() < end:
        works = [group.allreduce_coalesced([x], dist.AllreduceCoalescedOptions()) for _ in range(IN_FLIGHT)]
        for work in works:
            work.wait()
        n_done += IN_FLIGHT
    print(f"{n_done:,} collectives")


def groups(rank: int, port: int, seconds: float) -> None:
    """Create and destroy groups until the first rank's time is over, which prints how many."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store, end, n_groups = dist.TCPStore("127.0.0.1", port, 2, rank == 0), time.monotonic() + seconds, 0
    while True:
        own = dist.PrefixStore(f"group{n_groups}", store)
        if rank == 0:
            own.set("continue", str(time.monotonic() < end))
        if own.get("continue") == b"False":
            break
        group = dist.ProcessGroupGloo(own, rank, 2)
        for work in [group._reduce_scatter_base(torch.empty(4), torch.ones(8)) for _ in range(6)]:
            work.wait()
        n_groups += 1
    if rank == 0:
        print(f"{n_groups:,} groups of two ranks")


def planted(bug: str) -> None:
    """Read memory that was freed, or free it twice."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    for _ in range(ATTEMPTS):
        address = libc.malloc(40)
        libc.free(address)
        if bug == "double free":
            libc.free(address)
        else:
            ctypes.string_at(address, 8)
    print(f"{bug}: the allocator did not notice it")


def run(call: Callable[..., None], *arguments_of_processes: tuple[Any, ...]) -> None:
    """Run a call in one process for each tuple of arguments, and print their exit statuses; a signal's are negative."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=call, args=arguments) for arguments in arguments_of_processes]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print(f"exit status: {', '.join(str(process.exitcode) for process in processes)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("operations", "groups", "planted"))
    parser.add_argument("--seconds", type=float, default=120)
    options = parser.parse_args()
    allocator = os.environ.get("LD_PRELOAD", "").rpartition("/")[2] or "the C library's allocator"
    print(f"$ python benchmarks/gloo_heap.py {' '.join(sys.argv[1:])}")
    print(f"torch {torch.__version__}, {os.cpu_count()} CPU cores, {allocator}", flush=True)
    if options.what == "operations":
        run(operations, (options.seconds,))
    elif options.what == "groups":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        run(groups, *((rank, port, options.seconds) for rank in range(2)))
    else:
        for bug in ("use after free", "double free"):
            print(bug, flush=True)
            run(planted, (bug,))


if __name__ == "__main__":
    main()
