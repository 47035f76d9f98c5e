"""Simulate a pipeline schedule. Each rank takes its actions in torch's order, and each action starts as soon as its
rank is free and its input has arrived. torch keeps no list of the actions of GPipe and 1F1B, so own_actions lists them
as torch 2.13 runs them. The actions of other schedules are read from torch's private `pipeline_order`."""

from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from titanlite.config.schema import Parallelism
from titanlite.config.stage_split import ONE_STAGE, Schedule, rank_of_stage
from titanlite.parallel.pipeline import PipelineRunner
from titanlite.tools.plan.op_trace import fake_world
from titanlite.tools.plan.segments import Pass


class Action(NamedTuple):
    """One pass of a microbatch through a stage."""

    kind: Pass
    stage: int
    microbatch: int


Group = list[Action]  # actions of a rank whose results are sent together, when the last action is done


def own_actions(
    schedule: Schedule, rank: int, n_ranks: int, n_microbatches: int, order: Mapping[int, list[Any]]
) -> list[Group]:
    """Return a rank's actions in order. `order` is torch's pipeline_order, which GPipe and 1F1B lack."""
    if schedule in ONE_STAGE:
        ahead = n_microbatches if schedule == "GPipe" else min(n_ranks - rank, n_microbatches)
        forwards = [Action(Pass.FORWARD, rank, i) for i in range(n_microbatches)]
        backwards = [Action(Pass.BACKWARD, rank, i) for i in range(n_microbatches)]
        actions = forwards[:ahead]
        for i, backward in enumerate(backwards):
            actions += [backward, *forwards[ahead + i : ahead + i + 1]]
        return [[action] for action in actions]
    return [
        [Action(Pass(sub.computation_type.value), sub.stage_index, sub.microbatch_index) for sub in subs]
        for subs in (action.sub_actions or (action,) for action in order[rank] if action is not None)
    ]


def all_actions(schedule: Schedule, n_ranks: int, n_stages: int, n_microbatches: int) -> list[list[Group]]:
    """Return the actions of all ranks without starting them, since rank 0 of torch's schedules computes all orders."""
    order: Mapping[int, list[Any]] = {}
    if schedule not in ONE_STAGE:
        ranks = rank_of_stage(schedule, n_ranks, n_stages)
        parallelism = Parallelism(
            pipeline_parallel_degree=n_ranks,
            pipeline_parallel_schedule=schedule,
            pipeline_parallel_stages_per_rank=n_stages // n_ranks,
        )
        with fake_world(0, n_ranks):
            own = {number: nn.Identity() for number in range(n_stages) if ranks[number] == 0}
            group, device = torch.distributed.group.WORLD, torch.device("cpu")
            messages = {"n_microbatches": n_microbatches, "hidden_shape": (1, 1), "dtype": torch.float32}
            order = PipelineRunner(own, parallelism, group=group, device=device, **messages).order
    return [own_actions(schedule, rank, n_ranks, n_microbatches, order) for rank in range(n_ranks)]


class Span(NamedTuple):
    """The seconds from the step's beginning at which an action starts and ends."""

    action: Action
    start: float
    end: float


Result = tuple[bool, int, int]  # identifies an action's result: (whether it is a forward's, stage, microbatch)


def _input_of(action: Action, n_stages: int) -> Result | None:
    """Return the result of another stage that an action needs, or None."""
    if action.kind == Pass.FORWARD and action.stage > 0:
        return True, action.stage - 1, action.microbatch
    if action.kind in (Pass.BACKWARD, Pass.INPUT_GRADIENT) and action.stage < n_stages - 1:
        return False, action.stage + 1, action.microbatch
    return None


def _can_run(group: Group, n_stages: int, ready: Container[Result]) -> bool:
    own = {(kind == Pass.FORWARD, *of_what) for kind, *of_what in group if kind != Pass.WEIGHT_GRADIENT}
    needed = {_input_of(action, n_stages) for action in group} - {None, *own}
    return all(result in ready for result in needed)


def simulate(
    actions: list[list[Group]],
    n_stages: int,
    seconds: Callable[[Action], float],
    message_seconds: float = 0.0,
    *,
    sends_block: bool = False,
) -> list[list[Span]]:
    """Return when each rank runs each of its actions. `sends_block`: after a send, a rank waits until the message has
    arrived, as in torch's 1F1B, where a send shares a batch with the next receive. Raises ValueError on a deadlock."""
    ready: dict[Result, tuple[float, int]] = {}  # seconds at which a result is ready, and its rank
    free, next_group = [0.0] * len(actions), [0] * len(actions)
    spans: list[list[Span]] = [[] for _ in actions]

    while any(number < len(groups) for number, groups in zip(next_group, actions, strict=True)):
        progress = False
        for rank, groups in enumerate(actions):
            while next_group[rank] < len(groups) and _can_run(groups[next_group[rank]], n_stages, ready):
                group = groups[next_group[rank]]
                for action in group:
                    sent, sender = ready.get(_input_of(action, n_stages), (0.0, rank))
                    start = max(free[rank], sent + (message_seconds if sender != rank else 0.0))
                    free[rank] = start + seconds(action)
                    spans[rank].append(Span(action, start, free[rank]))
                for kind, stage, microbatch in group:
                    if kind != Pass.WEIGHT_GRADIENT:
                        ready[kind == Pass.FORWARD, stage, microbatch] = free[rank], rank
                        if sends_block and 0 <= stage + (1 if kind == Pass.FORWARD else -1) < n_stages:
                            free[rank] += message_seconds
                next_group[rank] += 1
                progress = True
        if not progress:
            raise ValueError("the schedule deadlocks: each rank waits for another")
    return spans


def pipeline_bubble(spans: list[list[Span]]) -> float:
    """Return the share of time, from 0 to 1, in which ranks are idle until the last rank's last action ends."""
    end = max(span.end for rank in spans for span in rank)
    busy = sum(span.end - span.start for rank in spans for span in rank)
    return 1 - busy / (end * len(spans))
