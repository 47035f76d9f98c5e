"""A pool of gloo ranks that outlives the tests which use it: starting a rank costs seconds, a case milliseconds."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

TIMEOUT_SECONDS = 60
"""Of a collective: a rank that failed leaves the others waiting this long."""


class RankError(AssertionError):
    """A case raised on some ranks; the message has their tracebacks."""


class Pool:
    def __init__(self, world_size: int):
        self.world_size, self.broken = world_size, False
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            pipe, other_end = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, world_size, f"{self._folder.name}/store", other_end), daemon=True
            )
            process.start()
            self._pipes.append(pipe)
            self._processes.append(process)

    def run(self, case: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Call a module's function on every rank and return what each returned.

        Raises:
            RankError: if it raised on any rank; the pool is then closed, since the others may hang.
        """
        for pipe in self._pipes:
            pipe.send((case, arguments))
        results, errors = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT_SECONDS * 2 if not errors else 1):
                errors.append(f"rank {rank}: no answer")
                continue
            try:
                error, result = pipe.recv()
            except EOFError:
                error, result = "process died", None
            results.append(result)
            if error:
                errors.append(f"rank {rank}: {error}")
        if errors:
            self.close()
            raise RankError("\n".join(errors))
        return results

    def close(self) -> None:
        self.broken = True
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(rank: int, world_size: int, store: str, pipe: Any) -> None:
    """A rank: run the cases that arrive, one after the other."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    while True:
        case, arguments = pipe.recv()
        try:
            pipe.send((None, case(**arguments)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
