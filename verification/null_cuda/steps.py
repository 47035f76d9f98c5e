"""Training steps on the ranks of a pool, and what each asked of the device."""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from titanlite import config
from titanlite.parallel import ring
from titanlite.techniques import offloaded_adam
from titanlite.techniques.moe import counts, router
from titanlite.tools.parity.training_run import TrainingRun
from titanlite.tools.plan.expert_load import even_shares
from titanlite.torch_workarounds import NothingToReduce
from verification.null_cuda.device import Device, count
from verification.null_cuda.races import Accesses, Race, races


@functools.cache
def device() -> Device:
    """Return the device of this rank's process."""
    return Device()


def take_steps(job: config.Config, steps: int) -> list[dict[str, Any]]:
    """Build a run and take steps. Return what building it asked of this rank's device, and then each step."""
    launch, asked = config.Launch.from_environment(torch.cuda.device_count()), []
    gc.collect()  # the run before, whose memory would count
    device().begin()
    torch.cuda.set_device(launch.local_rank)
    torch.compiler.reset()  # what earlier cases compiled counts towards a limit
    torch._dynamo.utils.counters.clear()
    with numbers_that_are_read():
        run = TrainingRun(job, torch.device("cuda", launch.local_rank))
        asked.append(report())
        for _ in range(steps):
            batches = run.loader.next()
            torch.cuda.reset_peak_memory_stats()
            device().begin()
            run.step(batches)
            asked.append(report())
        run.loader.close()
    return asked


def find_races(job: config.Config, steps: int, injected: str) -> list[Race]:
    """Return the races of the last of a few steps on this rank. `injected` names a function of BUGS that makes one."""
    launch = config.Launch.from_environment(torch.cuda.device_count())
    torch.cuda.set_device(launch.local_rank)
    with numbers_that_are_read(), BUGS[injected]():
        run = TrainingRun(job, torch.device("cuda", launch.local_rank))
        for _ in range(steps - 1):
            run.step(run.loader.next())
        batches = run.loader.next()
        torch.cuda.synchronize()
        device().begin()
        # From torch 2.13 on, nothing is compiled where operators are recorded: low-bit optimizers take an eager step.
        with torch.compiler.set_stance("force_eager"), Accesses(device()) as recorded:
            run.step(batches)
        run.loader.close()
    return races(device().operations(), recorded.accesses)


def _forget_the_stream() -> Any:
    """The buffer of gradients that nobody reduces is freed while another stream reads it."""

    def release() -> None:
        NothingToReduce.kept = None

    return mock.patch.object(NothingToReduce, "release", staticmethod(release))


def _do_not_wait_for_the_ring() -> Any:
    """Keys and values are read while they may still be received."""
    send_ahead = ring._send_ahead

    def sent_ahead(*arguments: Any) -> Callable[[], list[Tensor]]:
        with mock.patch.object(ring.dist, "batch_isend_irecv", lambda sends: batch(sends) and []):
            return send_ahead(*arguments)

    batch = ring.dist.batch_isend_irecv
    return mock.patch.object(ring, "_send_ahead", sent_ahead)


def _update_before_the_copy() -> Any:
    """The host updates weights in a buffer that is still copied from the device."""
    return mock.patch.object(offloaded_adam.Slot, "wait_until_copied")


BUGS: dict[str, Callable[[], Any]] = {
    "": contextlib.nullcontext,
    "forget the stream": _forget_the_stream,
    "do not wait for the ring": _do_not_wait_for_the_ring,
    "update before the copy": _update_before_the_copy,
}


def report() -> dict[str, Any]:
    """Return what was asked of the device since the log was opened, as plain JSON."""
    operations, memory = device().operations(), torch.cuda.memory_stats()
    return {
        "waits": {f"{kind}: {line}": number for (kind, line), number in sorted(device().waits.items())},
        "launches": count(operations, "launch"),
        "collectives": count(operations, "collective"),
        "communicators": [each.bytes for each in operations if each.kind == "communicator"],
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "active": memory["active_bytes.all.peak"],
        "reserved": memory["reserved_bytes.all.peak"],
    }


@contextlib.contextmanager
def numbers_that_are_read() -> Iterator[None]:
    """The host would read zeros. It gets counts as if all experts had as many rows; and, from torch 2.13 on, that all
    stages of a pipeline know the shapes of their messages."""
    read, count_tokens, rows = counts.read, router._count, [0]
    vote = getattr(PipelineStage, "_warmup_backward_result", None)

    def vote_yes(stage: PipelineStage, received_result: Tensor | None = None) -> Tensor:
        result = vote(stage, received_result)  # type: ignore[misc]
        result.item = lambda: 1
        return result

    def count_and_remember(experts_NK: Tensor, n_experts: int) -> Tensor:
        rows[0] = experts_NK.numel()
        return count_tokens(experts_NK, n_experts)

    def read_balanced(numbers: Tensor) -> list[Any]:
        read(numbers)  # the host waits, as it does on a GPU
        if numbers.dim() == 1:
            return even_shares(rows[0], len(numbers))
        _, n_ranks, n_experts = numbers.shape
        by_rank = [even_shares(n_rows, n_experts) for n_rows in even_shares(rows[0], n_ranks)]
        return [by_rank, by_rank]

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(counts, "read", read_balanced))
        stack.enter_context(mock.patch.object(router, "_count", count_and_remember))
        if vote:
            stack.enter_context(mock.patch.object(PipelineStage, "_warmup_backward_result", vote_yes))
        yield
