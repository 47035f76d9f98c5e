"""Wait for all ranks while each reads or writes its own files, and collect their problems on every rank."""

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
import torch.distributed as dist

from titanlite.config.errors import TrainingError
from titanlite.config.loader import ConfigError
from titanlite.launch.progress import alive

INTERVAL_SECONDS = 10.0
"""Ranks that read or write files exchange messages at least this often."""


@contextlib.contextmanager
def collected_problems(
    group: dist.ProcessGroup | None = None, kind: type[Exception] = ConfigError
) -> Iterator[list[str]]:
    """Yield a list that contains, after the with statement, a line for each problem that the statement's body raised on
    any rank. Every rank must enter the statement. Without a process group, these are the process's own problems."""
    own, problems = list[str](), list[str]()
    try:
        yield problems
    except kind as error:
        own = error.problems if isinstance(error, ConfigError) else [str(error)]
    gathered = [own]
    if dist.is_initialized():
        gathered = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, own, group=group)
    problems += dict.fromkeys(problem for each in gathered for problem in each)


def with_all_ranks(
    work: Callable[[], Any], n_done: Callable[[], int], description: str, *, group: dist.ProcessGroup, timeout: float
) -> Any:
    """Run `work`, which reads or writes this rank's files, in a thread, and return its result when all ranks are done.
    At short intervals, an all-reduce tells whether all ranks are done, so that a slow rank does not exceed the group's
    timeout. Raises TrainingError if `n_done()`, the number of finished bytes, stays the same for `timeout` seconds."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint files")
    future = thread.submit(work)
    thread.shutdown(wait=False)
    done, since = -1, time.monotonic()
    while True:
        wait([future], timeout=min(timeout / 4, INTERVAL_SECONDS))
        all_done = torch.tensor(int(future.done()))
        dist.all_reduce(all_done, dist.ReduceOp.MIN, group=group)
        alive()
        if all_done:
            return future.result()
        if future.done() or n_done() != done:
            done, since = n_done(), time.monotonic()
        elif time.monotonic() - since > timeout:
            problem = f"rank {dist.get_rank()}: {description}: not a byte in {timeout:g} seconds"
            raise TrainingError(f"{problem}; does the disk or the network folder answer?")
