"""A pipeline's schedule, simulated: each rank's actions in torch's own order, each beginning as soon as its rank is
free and what it needs is there.

Of GPipe and 1F1B torch keeps no order that it runs by, so theirs is written here as its code has it (2.13); all others
run from the private `pipeline_order`, which is read here.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from titanlite.config.schema import Parallelism
from titanlite.config.stage_split import ONE_STAGE, Schedule, rank_of_stage
from titanlite.parallel.pipeline import PipelineRunner
from titanlite.plan.op_trace import fake_world


class Action(NamedTuple):
    kind: str
    """F forward, B backward, or I and W: its two halves, for the gradients of inputs and of weights."""
    stage: int
    microbatch: int


Group = list[Action]
"""Actions whose results are sent when all of them are done."""


def own_actions(
    schedule: Schedule, rank: int, n_ranks: int, n_microbatches: int, order: Mapping[int, list[Any]]
) -> list[Group]:
    """What a rank does, in order.

    Args:
        order: the schedule's pipeline_order.
    """
    if schedule in ONE_STAGE:
        ahead = n_microbatches if schedule == "GPipe" else min(n_ranks - rank, n_microbatches)
        forwards, backwards = ([Action(kind, rank, i) for i in range(n_microbatches)] for kind in "FB")
        turns = forwards[:ahead]
        for i, backward in enumerate(backwards):
            turns += [backward, *forwards[ahead + i : ahead + i + 1]]
        return [[turn] for turn in turns]
    given = [action for action in order[rank] if action is not None]
    return [
        [Action(part.computation_type.value, part.stage_index, part.microbatch_index) for part in parts]
        for parts in (action.sub_actions or (action,) for action in given)
    ]


def all_actions(schedule: Schedule, n_ranks: int, n_stages: int, n_microbatches: int) -> list[list[Group]]:
    """What each rank does, without any of them: torch makes the order of all where it makes that of one."""
    order: Mapping[int, list[Any]] = {}
    if schedule not in ONE_STAGE:
        ranks = rank_of_stage(schedule, n_ranks, n_stages)
        with fake_world(0, n_ranks):
            pipeline = PipelineRunner(
                {number: nn.Identity() for number in range(n_stages) if ranks[number] == 0},
                Parallelism(
                    pipeline_parallel_degree=n_ranks,
                    pipeline_parallel_schedule=schedule,
                    pipeline_parallel_stages_per_rank=n_stages // n_ranks,
                ),
                group=torch.distributed.group.WORLD,
                n_microbatches=n_microbatches,
                hidden_shape=(1, 1, 1),
                dtype=torch.float32,
                device=torch.device("cpu"),
            )
            order = pipeline.order
    return [own_actions(schedule, rank, n_ranks, n_microbatches, order) for rank in range(n_ranks)]


class Span(NamedTuple):
    """When an action ran, in seconds from the step's beginning."""

    action: Action
    start: float
    end: float


def simulate(
    turns: list[list[Group]], n_stages: int, seconds: Callable[[Action], float], message_seconds: float = 0.0
) -> list[list[Span]]:
    """When each rank does what.

    Args:
        turns: of each rank.
        seconds: that an action takes.
        message_seconds: that its result takes to another rank.

    Raises:
        ValueError: if ranks wait for each other forever.
    """
    arrived: dict[
        tuple[bool, int, int], tuple[float, int]
    ] = {}  # (of a forward, stage, microbatch): when, on which rank
    free, next_turn = [0.0] * len(turns), [0] * len(turns)
    spans: list[list[Span]] = [[] for _ in turns]

    def needed(action: Action) -> tuple[bool, int, int] | None:
        if action.kind == "F":
            return (True, action.stage - 1, action.microbatch) if action.stage > 0 else None
        if action.kind in "BI":
            return (False, action.stage + 1, action.microbatch) if action.stage < n_stages - 1 else None
        return None

    def can_run(group: Group) -> bool:
        own = {(action.kind == "F", action.stage, action.microbatch) for action in group if action.kind != "W"}
        return all(needed(action) is None or needed(action) in arrived or needed(action) in own for action in group)

    while any(turn < len(groups) for turn, groups in zip(next_turn, turns, strict=True)):
        progress = False
        for rank, groups in enumerate(turns):
            while next_turn[rank] < len(groups) and can_run(groups[next_turn[rank]]):
                group = groups[next_turn[rank]]
                for action in group:
                    sent, sender = arrived.get(needed(action), (0.0, rank))
                    start = max(free[rank], sent + (message_seconds if sender != rank else 0.0))
                    free[rank] = start + seconds(action)
                    spans[rank].append(Span(action, start, free[rank]))
                for kind, stage, microbatch in group:
                    if kind != "W":
                        arrived[kind == "F", stage, microbatch] = free[rank], rank
                next_turn[rank] += 1
                progress = True
        if not progress:
            raise ValueError("the schedule waits for itself")
    return spans


def idle_share(spans: list[list[Span]]) -> float:
    """Of all ranks' time until the last one's end."""
    end = max(span.end for rank in spans for span in rank)
    busy = sum(span.end - span.start for rank in spans for span in rank)
    return 1 - busy / (end * len(spans))
