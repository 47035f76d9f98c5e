"""Measure the pipeline bubble of each schedule and compare it with the formula and with a simulation of its actions.

No GPU and no idle cores are needed: titanlite's PipelineRunner runs torch's schedules over gloo ranks, but the stages
sleep instead of computing, so ranks overlap even on a machine with fewer cores than ranks. For each microbatch a rank
sleeps --forward-ms in the forward, and --input-ms and --weight-ms in the backward, for the input gradients (dgrad) and
the weight gradients (wgrad). A rank with several stages divides these times among them. The inputs of the first stage
need no gradient: there torch runs the full backward where the schedule has the weight gradients, and the simulation
does the same.

    python -m benchmarks.planner.pipeline_bubble [--ranks 2 4] [--microbatches 8 16] [--steps 5]

Pipeline bubble = 1 - (seconds that a rank sleeps, mean over ranks) / (seconds of the step, from a barrier to the end of
the last rank). Each step prints a JSON line; the first step of a launch, which connects the ranks, is left out. The
table has

    formula    GPipe and 1F1B (p - 1) / (m + p - 1), with v stages per rank (p - 1) / (v m + p - 1)
    simulated  the same actions in the same order; each starts as soon as its rank is free and its input is there, and
               messages take no time. The measured bubble exceeds it by Python, gloo and waiting for a core.

The simulation is titanlite/tools/plan/schedule.py, from which the planner has the time of a step.
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

from titanlite.config.schema import Parallelism
from titanlite.config.stage_split import ONE_STAGE, Schedule, rank_of_stage
from titanlite.data.loader import Batch
from titanlite.parallel.pipeline import PipelineRunner
from titanlite.tools.parity.process_pool import ProcessPool
from titanlite.tools.plan.schedule import Action, own_actions, pipeline_bubble, simulate

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
FORMULAS = (*ONE_STAGE, "Interleaved1F1B", "LoopedBFS")


HEAD = f"{'pipeline bubble':22} {'ranks':>5} {'microbatches':>12} {'formula':>8} {'simulated':>10} {'measured':>9}"


class Sleeps(NamedTuple):
    """Seconds that a stage sleeps for a microbatch."""

    forward: float
    input: float
    weight: float


# ---------------------------------------------------------------------------------------------------------------------
# Measured


class Clock:
    """This class sleeps and adds up the seconds that it slept."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def sleep(self, seconds: float) -> None:
        start = time.perf_counter()
        time.sleep(seconds)
        self.seconds += time.perf_counter() - start


class SleepInBackward(torch.autograd.Function):
    """The identity, with a sleep in its backward."""

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
    """A stage that computes input + weight. The two gradients are separate autograd nodes, so that torch can split the
    backward into input gradient (dgrad) and weight gradient (wgrad)."""

    def __init__(self, *, first: bool, last: bool, sleeps: Sleeps, clock: Clock):
        super().__init__()
        self.sleeps, self.clock, self.last = sleeps, clock, last
        self.weight = nn.Parameter(torch.zeros(()))
        self.embedding = nn.Parameter(torch.zeros(())) if first else None

    def forward(self, x: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        """Return the hidden state, or on the last stage a scalar loss.

        Args:
            x: int64 [B, T] on the first stage, [B, T, 1] on the others.
            positions, targets: the other inputs that PipelineRunner passes to every stage; unused.
        """
        self.clock.sleep(self.sleeps.forward)
        if self.embedding is not None:
            x = x.unsqueeze(-1) * self.embedding
        x = SleepInBackward.apply(x, self.clock, self.sleeps.input) + SleepInBackward.apply(
            self.weight, self.clock, self.sleeps.weight
        )
        return x.sum() if self.last else x


class Measured(NamedTuple):
    """The timing of one rank, without the first step."""

    seconds: list[float]
    """Seconds of each step."""
    asleep: list[float]
    """Seconds that the rank slept in each step."""
    order: dict[int, list[Any]]
    """The schedule's pipeline_order."""


def measure(schedule: Schedule, n_stages: int, n_microbatches: int, sleeps: Sleeps, steps: int) -> Measured:
    """Run the schedule on this rank and return its timing. Every rank of the process group must call it."""
    rank, clock, shape = dist.get_rank(), Clock(), (1, 1)
    ranks = rank_of_stage(schedule, dist.get_world_size(), n_stages)
    own = [number for number in range(n_stages) if ranks[number] == rank]
    pipeline = PipelineRunner(
        {
            number: SleepingStage(first=number == 0, last=number == n_stages - 1, sleeps=sleeps, clock=clock)
            for number in own
        },
        Parallelism(
            pipeline_parallel_degree=dist.get_world_size(),
            pipeline_parallel_schedule=schedule,
            pipeline_parallel_stages_per_rank=n_stages // dist.get_world_size(),
        ),
        group=dist.group.WORLD,
        n_microbatches=n_microbatches,
        hidden_shape=shape,
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
    """Return the seconds that an action sleeps."""
    backward = sleeps.input + sleeps.weight
    split = {"I": 0.0, "W": backward} if action.stage == 0 else {"I": sleeps.input, "W": sleeps.weight}
    return {"F": sleeps.forward, "B": backward, **split}[action.kind]


def formula(schedule: Schedule, n_ranks: int, per_rank: int, n_microbatches: int) -> float | None:
    """Return the pipeline bubble by the formula, or None for a schedule that has none."""
    if schedule not in FORMULAS:
        return None
    return (n_ranks - 1) / (per_rank * n_microbatches + n_ranks - 1)


# ---------------------------------------------------------------------------------------------------------------------


def compare(pool: ProcessPool, schedule: Schedule, n_microbatches: int, rank_sleeps: Sleeps, steps: int) -> str:
    """Measure one case, print its raw samples, and return its line of the table.

    Args:
        rank_sleeps: seconds of a rank for a microbatch, which its stages divide among them.
    """
    n_ranks, per_rank = pool.world_size, 1 if schedule in ONE_STAGE else 2
    sleeps, n_stages = Sleeps(*(seconds / per_rank for seconds in rank_sleeps)), n_ranks * per_rank
    case = {"schedule": schedule, "n_stages": n_stages, "n_microbatches": n_microbatches}
    ranks: Sequence[Measured] = pool.run(measure, **case, sleeps=sleeps, steps=steps)
    bubbles = []
    for step in range(steps):
        seconds = max(rank.seconds[step] for rank in ranks)
        asleep = [rank.asleep[step] for rank in ranks]
        bubbles.append(1 - statistics.mean(asleep) / seconds)
        sample = {**case, "ranks": n_ranks, "seconds": seconds, "asleep": asleep, "bubble": bubbles[-1]}
        print(json.dumps(sample), flush=True)
    actions = [own_actions(schedule, rank, n_ranks, n_microbatches, ranks[rank].order) for rank in range(n_ranks)]
    simulated = pipeline_bubble(simulate(actions, n_stages, functools.partial(seconds_of, sleeps)))
    expected = formula(schedule, n_ranks, per_rank, n_microbatches)
    return (
        f"{schedule:22} {n_ranks:5} {n_microbatches:12} {'-' if expected is None else f'{expected:.1%}':>8} "
        f"{simulated:10.1%} {statistics.median(bubbles):9.1%}"
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
        parser.error("--microbatches: expected multiples of twice the ranks, which all schedules accept")
    rank_sleeps = Sleeps(*(getattr(options, f"{name}_ms") / 1000 for name in Sleeps._fields))
    milliseconds = [1000 * seconds for seconds in rank_sleeps]
    print(f"torch {torch.__version__}; milliseconds per rank and microbatch: {milliseconds}")
    table = []
    for n_ranks in options.ranks:
        pool = ProcessPool(n_ranks, timeout_seconds=600)
        for schedule in options.schedules:
            table += [compare(pool, schedule, count, rank_sleeps, options.steps) for count in options.microbatches]
        pool.close()
    print("\n".join([HEAD, *table]))


if __name__ == "__main__":
    main()
