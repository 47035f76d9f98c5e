"""A pool of gloo ranks on this machine that outlives the calls which use it: starting a rank costs seconds, a call
milliseconds. The parity proof and the tests run in such pools."""

import faulthandler
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

TIMEOUT_SECONDS = 60
"""Of a collective, unless told otherwise: a rank that failed leaves the others waiting this long."""


class RankError(AssertionError):
    """A call raised on some ranks; the message has their tracebacks."""


class RankDied(RankError):
    """A process of the pool ended, by a signal or an abort: no call can do that by an exception."""


class Pool:
    """Args:
    world_size: how many ranks.
    timeout_seconds: of a collective.
    """

    def __init__(self, world_size: int, timeout_seconds: int = TIMEOUT_SECONDS):
        self.world_size, self.timeout_seconds, self.broken = world_size, timeout_seconds, False
        self.calls = 0
        # Ranks are forked from a server that has imported torch and done nothing with it: they share its memory.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["titanlite.build"])
        # Ranks are killed in the end; what they leave is freed then, and need not be told.
        os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            pipe, other_end = context.Pipe()
            store = f"{self._folder.name}/store"
            process = context.Process(
                target=_serve, args=(rank, world_size, store, timeout_seconds, other_end), daemon=True
            )
            process.start()
            self._pipes.append(pipe)
            self._processes.append(process)

    def run(self, call: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Call a module's function on every rank and return what each returned.

        Raises:
            RankError: if it raised on any rank; the pool is then closed, since the others may hang. RankDied: if a
                process ended.
        """
        self.calls += 1
        for pipe in self._pipes:
            pipe.send((call, arguments))
        results, errors, kind = [], [], RankError
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(self.timeout_seconds * 2 if not errors else 1):
                errors.append(f"rank {rank}: no answer")
                continue
            try:
                error, result = pipe.recv()
            except EOFError:
                error, result, kind = "process died", None, RankDied
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


def _serve(rank: int, world_size: int, store: str, timeout_seconds: int, pipe: Any) -> None:
    """A rank: run the calls that arrive, one after the other."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    import torch
    import torch.distributed as dist

    faulthandler.enable()  # where a rank was when it died
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )
    while True:
        call, arguments = pipe.recv()
        try:
            pipe.send((None, call(**arguments)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
