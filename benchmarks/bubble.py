"""The idle share of each pipeline schedule: measured, by the formula, and by simulating its own actions.

Needs no GPU and no idle cores: titanlite's own Pipeline runs torch's schedules over gloo ranks, but its stages sleep
instead of computing, so ranks overlap on a machine with fewer cores than ranks. Of each microbatch a rank sleeps
--forward-ms in the forward and --input-ms and --weight-ms in the backward, for the gradients of inputs and of weights;
a rank with several stages sleeps its share of these in each. In the first stage, whose inputs need no gradient, torch
does the whole backward where the schedule has that of the weights, and so does the simulation.

    python benchmarks/bubble.py [--ranks 2 4] [--microbatches 8 16] [--steps 5]

Idle share = 1 - (a rank's seconds asleep, mean over ranks) / (seconds of the step, from a barrier to the last rank's
end); each step is a line of JSON, and the first of a launch, which connects the ranks, is left out. Then a table:

    formula    GPipe and 1F1B (p - 1) / (m + p - 1), with v stages a rank (p - 1) / (v m + p - 1)
    simulated  the same actions in the same order, each beginning as soon as its rank is free and its input is there,
               with messages that take no time; what is measured beyond it is Python, gloo and waiting for a core

What is simulated is titanlite/plan/schedule.py, by which the plan knows a step's time.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.config.stage_split import ONE_STAGE, Schedule, rank_of_stage
from titanlite.data import Batch
from titanlite.parallel.pipeline import Pipeline
from titanlite.parity.process_pool import ProcessPool
from titanlite.plan.schedule import Action, idle_share, own_actions, simulate

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
FORMULAS = (*ONE_STAGE, "Interleaved1F1B", "LoopedBFS")


HEAD = f"{'idle share':22} {'ranks':>5} {'microbatches':>12} {'formula':>8} {'simulated':>10} {'measured':>9}"


class Sleeps(NamedTuple):
    """Seconds of a stage for a microbatch."""

    forward: float
    input: float
    weight: float


# ---------------------------------------------------------------------------------------------------------------------
# Measured


class Clock:
    """Sleeps, and counts how long it slept."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def sleep(self, seconds: float) -> None:
        start = time.perf_counter()
        time.sleep(seconds)
        self.seconds += time.perf_counter() - start


class SleepInBackward(torch.autograd.Function):
    """The identity, which takes its time to hand the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, seconds: float) -> Tensor:
        ctx.sleep = clock.sleep, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sleep, seconds = ctx.sleep
        sleep(seconds)
        return grad, None, None


class SleepingStage(nn.Module):
    """input + weight. The gradients of the two are nodes of their own, which is what lets torch compute them apart."""

    def __init__(self, *, first: bool, last: bool, sleeps: Sleeps, clock: Clock):
        super().__init__()
        self.sleeps, self.clock, self.last = sleeps, clock, last
        self.weight = nn.Parameter(torch.zeros(()))
        self.embedding = nn.Parameter(torch.zeros(())) if first else None

    def forward(self, x: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        """A loss on the last stage.

        Args:
            x: int64 [B, T] on the first stage, [B, T, 1] on the others.
            positions, targets: what Pipeline hands to every stage.
        """
        self.clock.sleep(self.sleeps.forward)
        if self.embedding is not None:
            x = x.unsqueeze(-1) * self.embedding
        x = SleepInBackward.apply(x, self.clock, self.sleeps.input) + SleepInBackward.apply(
            self.weight, self.clock, self.sleeps.weight
        )
        return x.sum() if self.last else x


class Measured(NamedTuple):
    """What a rank saw."""

    seconds: list[float]
    """Of each step but the first."""
    asleep: list[float]
    """How many of these it slept."""
    order: dict[int, list[Any]]
    """The schedule's pipeline_order."""


def measure(schedule: Schedule, n_stages: int, n_microbatches: int, sleeps: Sleeps, steps: int) -> Measured:
    """Run the schedule on this rank of the process group. Every rank must call it."""
    rank, clock, shape = dist.get_rank(), Clock(), (1, 1, 1)
    ranks = rank_of_stage(schedule, dist.get_world_size(), n_stages)
    own = [number for number in range(n_stages) if ranks[number] == rank]
    pipeline = Pipeline(
        {
            number: SleepingStage(first=number == 0, last=number == n_stages - 1, sleeps=sleeps, clock=clock)
            for number in own
        },
        n_stages=n_stages,
        group=dist.group.WORLD,
        schedule=schedule,
        n_microbatches=n_microbatches,
        hidden_shape=shape,
        n_tokens=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    tokens = torch.zeros(n_microbatches, 1, dtype=torch.int64)
    batch, valid = Batch(tokens, tokens, tokens, None), torch.ones((), dtype=torch.float64)
    measured = Measured([], [], pipeline.order)
    for step in range(steps + 1):
        dist.barrier()
        start, clock.seconds = time.perf_counter(), 0.0
        pipeline.forward_backward(batch, valid)
        if step:
            measured.seconds.append(time.perf_counter() - start)
            measured.asleep.append(clock.seconds)
    return measured


def seconds_of(sleeps: Sleeps, action: Action) -> float:
    """How long an action sleeps."""
    whole = sleeps.input + sleeps.weight
    halves = {"I": 0.0, "W": whole} if action.stage == 0 else {"I": sleeps.input, "W": sleeps.weight}
    return {"F": sleeps.forward, "B": whole, **halves}[action.kind]


def formula(schedule: Schedule, n_ranks: int, per_rank: int, n_microbatches: int) -> float | None:
    if schedule not in FORMULAS:
        return None
    return (n_ranks - 1) / (per_rank * n_microbatches + n_ranks - 1)


# ---------------------------------------------------------------------------------------------------------------------


def compare(pool: ProcessPool, schedule: Schedule, n_microbatches: int, whole: Sleeps, steps: int) -> str:
    """Measure one case, print its raw samples, and return its line of the table."""
    n_ranks, per_rank = pool.world_size, 1 if schedule in ONE_STAGE else 2
    sleeps, n_stages = Sleeps(*(seconds / per_rank for seconds in whole)), n_ranks * per_rank
    case = {"schedule": schedule, "n_stages": n_stages, "n_microbatches": n_microbatches}
    ranks: Sequence[Measured] = pool.run(measure, **case, sleeps=sleeps, steps=steps)
    idle = []
    for step in range(steps):
        seconds = max(rank.seconds[step] for rank in ranks)
        asleep = [rank.asleep[step] for rank in ranks]
        idle.append(1 - statistics.mean(asleep) / seconds)
        print(
            json.dumps({**case, "ranks": n_ranks, "seconds": seconds, "asleep": asleep, "idle": idle[-1]}), flush=True
        )
    turns = [own_actions(schedule, rank, n_ranks, n_microbatches, ranks[rank].order) for rank in range(n_ranks)]
    simulated = idle_share(simulate(turns, n_stages, functools.partial(seconds_of, sleeps)))
    expected = formula(schedule, n_ranks, per_rank, n_microbatches)
    return (
        f"{schedule:22} {n_ranks:5} {n_microbatches:12} {'-' if expected is None else f'{expected:.1%}':>8} "
        f"{simulated:10.1%} {statistics.median(idle):9.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    for name in Sleeps._fields:
        parser.add_argument(f"--{name}-ms", type=float, default=40.0)
    options = parser.parse_args()
    if any(count % (2 * ranks) for count in options.microbatches for ranks in options.ranks):
        parser.error("expected numbers of microbatches that are multiples of twice the ranks: all schedules take those")
    whole = Sleeps(*(getattr(options, f"{name}_ms") / 1000 for name in Sleeps._fields))
    print(f"torch {torch.__version__}; a rank's milliseconds for a microbatch: {[1000 * seconds for seconds in whole]}")
    table = []
    for n_ranks in options.ranks:
        pool = ProcessPool(n_ranks, timeout_seconds=600)
        for schedule in options.schedules:
            table += [compare(pool, schedule, count, whole, options.steps) for count in options.microbatches]
        pool.close()
    print("\n".join([HEAD, *table]))


if __name__ == "__main__":
    main()
