"""Pools of ranks on this machine. A pool runs many calls: a rank takes seconds to start, a call takes milliseconds."""

import contextlib
import faulthandler
import multiprocessing
import os
import re
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from titanlite.config import Config, ConfigError, Launch
from titanlite.launch.process import end_after
from titanlite.launch.progress import progress
from titanlite.tools.forkserver import forkserver
from titanlite.tools.parity.reference import Trace
from titanlite.tools.parity.training_run import run_layout


class RankError(AssertionError):
    """A call raised on some ranks; the message contains their tracebacks."""


class RankDied(RankError):
    """A process of the pool ended, by a signal or an abort. An exception in a call does not end a process."""


class ProcessPool:
    """Ranks that run one call after the other. If a rank fails, other ranks wait until a collective times out. Ranks
    are forked from a server that has only imported torch, or are processes of `context`, a multiprocessing context."""

    def __init__(self, world_size: int, timeout_seconds: int = 60, backend: str = "gloo", context: Any = None):
        self.world_size, self.timeout_seconds, self.calls, self.broken = world_size, timeout_seconds, 0, False
        context = context or forkserver("titanlite.build")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        group = {"backend": backend, "init_method": f"file://{self._folder.name}/store", "world_size": world_size}
        group["timeout"] = timedelta(seconds=timeout_seconds)
        for rank in range(world_size):
            pipe, other_end = context.Pipe()
            process = context.Process(target=_serve, args=(rank, group, other_end), daemon=True)
            process.start()
            self._pipes.append(pipe)
            self._processes.append(process)

    def run(self, call: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Call a function of a module on every rank, and return the ranks' results. Raises RankError if a rank raised,
        and RankDied if a process ended; in both cases the pool is closed, since other ranks may hang."""
        self.calls += 1
        for pipe in self._pipes:
            with contextlib.suppress(ConnectionError):  # a dead process is reported below, where its answer is missing
                pipe.send((call, arguments))
        results, errors, kind = [], [], RankError
        for rank, pipe in enumerate(self._pipes):
            error, result = "no answer", None
            if pipe.poll(self.timeout_seconds * 2 if not errors else 1):
                try:
                    error, result = pipe.recv()
                except (EOFError, ConnectionError):
                    error, kind = "process died", RankDied
            results.append(result)
            if error:
                errors.append(f"rank {rank}: {error}")
        if errors:
            self.close()
            raise kind("\n".join(errors))
        return results

    def close(self) -> None:
        self.broken = True
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def run_in_pool(configs: Iterable[Config], n_ranks: int, steps: int) -> Iterator[Trace | Exception]:
    """Run each config on ranks of this machine, and yield its trace or the exception that its ranks raised."""
    pool = None
    try:
        for config in configs:
            if pool is None or pool.broken:
                with progress(f"starting {n_ranks} ranks"):
                    pool = ProcessPool(n_ranks, timeout_seconds=600)
                pool.run(dist.barrier)
            try:
                yield pool.run(trace_of_rank_0, config=config, steps=steps)[0]
            except RankError as error:
                problems = re.findall(r"^titanlite\.config\.loader\.ConfigError: (.*)", f"{error}", re.MULTILINE)
                yield ConfigError([*dict.fromkeys(problems)]) if problems else error
    finally:
        if pool:
            pool.close()


def trace_of_rank_0(config: Config, steps: int) -> Trace | None:
    """Run a layout on this rank of a pool, and return its trace on rank 0, None on other ranks."""
    trace = run_layout(config, launch := Launch.from_environment(n_devices=0), steps=steps)
    return trace if launch.rank == 0 else None


def _serve(rank: int, group: dict[str, Any], pipe: Any) -> None:
    """Run the calls that this rank's pipe receives. `group`: options of init_process_group."""
    end_after(multiprocessing.parent_process().join, "main process")
    size = group["world_size"]
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{size}", "LOCAL_WORLD_SIZE": f"{size}"}
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # launch/process_group.py sets it, too
    faulthandler.enable()  # print the stack of a rank that dies
    torch.set_num_threads(1)
    dist.init_process_group(rank=rank, **group)
    while True:
        try:
            call, arguments = pipe.recv()
        except EOFError:  # the main process has ended
            os._exit(0)
        try:
            pipe.send((None, call(**arguments)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
