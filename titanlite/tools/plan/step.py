"""Compose a training step from the dry runs of its stages: the memory of each pipeline rank, and the step time."""

import functools
import math
from typing import NamedTuple

import torch

from titanlite.config import Config
from titanlite.config.stage_split import ONE_STAGE
from titanlite.tools.plan.cost_model import Cost, CostModel
from titanlite.tools.plan.dry_run import SPLIT, DryRun, dry_run_accumulation_steps
from titanlite.tools.plan.memory_timeline import Bytes, MemoryTimeline, Point
from titanlite.tools.plan.op_trace import Communication, Work
from titanlite.tools.plan.schedule import Action, Group, Span, simulate
from titanlite.tools.plan.segments import KINDS, Pass
from titanlite.tools.plan.streams import Streams

WITH_INPUT_GRADIENT = Pass.BACKWARD, Pass.INPUT_GRADIENT
WITH_WEIGHT_GRADIENT = Pass.BACKWARD, Pass.WEIGHT_GRADIENT


class StageCost:
    """The dry run of a stage, and the costs of its phases."""

    def __init__(self, config: Config, dry_run: DryRun, cost_model: CostModel):
        self.dry_run, self.cost_model = dry_run, cost_model
        self.offloads_optimizer = config.optimizer.enable_cpu_offload and cost_model.device.kind == "gpu"
        # Only schedules with one stage per rank expose the all-gathers of a stage's first forward.
        self.exposed_gather = config.parallelism.pipeline_parallel_schedule in ONE_STAGE
        self.of_phase = functools.cache(functools.partial(self.after, None))  # returns a phase's cost on an idle device

    def after(self, streams: Streams | None, key: tuple) -> Cost:
        """Return the cost of the phase `key` after the earlier work of `streams`; None: the device is idle before."""
        kind, accumulates = key[0], key[0] == Pass.BACKWARD and key[1] > 0
        events = (segment.events for segment in self.dry_run.phases.get(key, []))
        return self.cost_model.cost(events, streams, forward=kind == Pass.FORWARD, accumulates=accumulates)

    def of_action(self, action: Action) -> Cost:
        """Return the cost of a pipeline's action. In a split backward, the weight gradient takes as long as the
        forward's matmuls, and the input gradient takes the rest. The first stage has no input gradient."""
        if action.kind == Pass.FORWARD:
            return self.of_phase((Pass.FORWARD, 0 if self.exposed_gather and action.microbatch == 0 else 1))
        backward = self.of_phase((Pass.BACKWARD, min(action.microbatch, 1)))
        if action.kind == Pass.BACKWARD:
            return backward
        weight = self.of_phase((Pass.FORWARD, 1)).seconds["matmul"] / backward.elapsed if action.stage else 1.0
        cost = Cost()
        cost.add(backward, weight if action.kind == Pass.WEIGHT_GRADIENT else 1 - weight)
        return cost

    def of_update(self, *, communicates: bool = True) -> Cost:
        """Return the cost of updating all weights of the stage. `communicates`: whether this stage counts the update's
        collectives; one stage of a rank does, since their cost does not grow with the rank's weights or stages."""
        events = [event for segment in self.dry_run.phases[("update",)] for event in segment.events]
        cost, model = Cost(), self.cost_model
        computation = [event for event in events if not isinstance(event, Communication)]
        if model.offload is None and self.offloads_optimizer:
            by_kind: dict[bool, list] = {True: [], False: []}
            for event in computation:
                by_kind[isinstance(event, Work) and "fused_adam" in event.name].append(event)
            cost.add(model.offloaded_step(by_kind[True]), self.dry_run.scale)
            computation = by_kind[False]
        own = model.host_update(computation) if model.offload is not None else model.cost([computation])
        cost.add(own, self.dry_run.scale)
        for key in self.dry_run.phases:
            if key[0] == "muon":
                cost.add(self.of_phase(key), key[2])
        if communicates:
            cost.add(model.cost([[event for event in events if isinstance(event, Communication)]]))
        return cost


class StepTime(NamedTuple):
    """The time of a step; Plan describes the fields."""

    spans: list[list[Span]]
    cost: Cost
    seconds: float
    update_seconds: float


def step_time(config: Config, stages: list[StageCost], ranks: list[int], actions: list[list[Group]]) -> StepTime:
    """Return the time of a step. `ranks`: the pipeline rank of each stage. `actions`: see memory_points."""
    if actions:
        return _time_with_pipeline(config, stages, ranks, actions)
    (stage,) = stages
    cost, streams = Cost(), stage.cost_model.streams()
    for number, times in dry_run_accumulation_steps(config.gradient_accumulation_steps).items():
        for kind in (Pass.FORWARD, Pass.BACKWARD):
            cost.add(stage.after(streams, (kind, number)), times)
    before = streams.computed
    streams.join()
    cost.elapsed += streams.computed - before
    update = stage.of_update()
    cost.add(update)
    return StepTime([], cost, cost.elapsed, update.elapsed)


def memory_points(
    config: Config, dry_runs: list[DryRun], ranks: list[int], actions: list[list[Group]]
) -> list[list[Point]]:
    """Return the memory of each pipeline rank at each moment of a step. `ranks`: the pipeline rank of each stage.
    `actions`: the actions of each pipeline rank; empty without a pipeline."""
    if not actions:
        (run,) = dry_runs
        timeline = MemoryTimeline(config, run.persistent)
        for number in dry_run_accumulation_steps(config.gradient_accumulation_steps):
            timeline.replay(run.phases[Pass.FORWARD, number], "forward")
            timeline.replay(run.phases[Pass.BACKWARD, number], "backward")
        for key in _update_phases(run):
            timeline.replay(run.phases[key], "update")
        return [timeline.points]
    points = []
    for rank, groups in enumerate(actions):
        own = {number: run for number, run in enumerate(dry_runs) if ranks[number] == rank}
        points.append(_PipelineRank(config, own).points([action for group in groups for action in group]))
    return points


def _time_with_pipeline(
    config: Config, stages: list[StageCost], ranks: list[int], actions: list[list[Group]]
) -> StepTime:
    parallelism, n_stages, n_steps = config.parallelism, len(stages), config.gradient_accumulation_steps
    message = _message_bytes(config)
    neighbours = [0, parallelism.world_size // parallelism.pipeline_parallel_degree]
    message_seconds = stages[0].cost_model.collective_seconds("send", message, neighbours)
    spans = simulate(
        actions,
        n_stages,
        lambda action: stages[action.stage].of_action(action).elapsed,
        message_seconds,
        sends_block=parallelism.pipeline_parallel_schedule == "1F1B",
    )
    costs, reductions, updates = [], [], []
    for rank, groups in enumerate(actions):
        own = {number: stage for number, stage in enumerate(stages) if ranks[number] == rank}
        cost, n_messages = Cost(), 0
        for action in (action for group in groups for action in group):
            cost.add(own[action.stage].of_action(action), n_steps)
            neighbour = action.stage + (1 if action.kind == Pass.FORWARD else -1)
            sends = action.kind != Pass.WEIGHT_GRADIENT and 0 <= neighbour < n_stages and neighbour not in own
            n_messages += n_steps * sends
        reduce, update = Cost(), Cost()
        for number, stage in enumerate(own.values()):
            reduce.add(stage.of_phase(("reduce",)), stage.dry_run.scale)  # `scale` adds the removed layers' weights
            update.add(stage.of_update(communicates=number == 0))
        cost.add(reduce, n_steps)
        cost.add(update)
        cost.communication["pp", "send"] = n_messages, n_messages * message
        cost.seconds["communication: pp"] += n_messages * message_seconds
        costs.append(cost)
        reductions.append(reduce.elapsed)
        updates.append(update.elapsed)
    end = max(span.end for rank in spans for span in rank)
    seconds = (end + max(reductions)) * n_steps + max(updates)
    return StepTime(spans, max(costs, key=lambda cost: cost.elapsed), seconds, max(updates))


def _update_phases(run: DryRun) -> list[tuple]:
    """Return the phases of an update. The last phase frees the gradients."""
    return [*(key for key in run.phases if key[0] == "muon"), ("update",)]


def _message_bytes(config: Config) -> int:
    return math.prod(config.hidden_shape) * getattr(torch, config.training.mixed_precision_param).itemsize


class _PipelineRank:
    """Replays the phases of a pipeline rank's `stages` (dry runs by number) in the order of the rank's actions."""

    def __init__(self, config: Config, stages: dict[int, DryRun]):
        self.config, self.stages, self.message = config, stages, _message_bytes(config)
        self.last_stage, self.last_microbatch = config.parallelism.n_stages - 1, config.n_microbatches - 1
        self.persistent: Bytes = {}
        for number, stage in stages.items():
            for kind, size in stage.persistent.items():
                self.persistent[kind] = self.persistent.get(kind, 0) + size
            # torch keeps a receive buffer for each microbatch.
            buffers = (number > 0) + (number < self.last_stage)
            self.persistent["communication"] += buffers * config.n_microbatches * self.message
        self.persistent["parameters"] -= (len(stages) - 1) * next(iter(stages.values())).rotary
        self.timeline = MemoryTimeline(config, self.persistent)

    def points(self, actions: list[Action]) -> list[Point]:
        """Return the rank's memory over a step: the first accumulation step, and one of the others, which are equal."""
        stages, timeline = self.stages, self.timeline
        gradients = sum(stage.gradients for stage in stages.values())
        for _ in range(min(self.config.gradient_accumulation_steps, 2)):
            with_gradients: set[int] = set()
            for action in actions:
                self._replay(action, first_backward=action.stage not in with_gradients)
                if action.kind in WITH_WEIGHT_GRADIENT:
                    with_gradients.add(action.stage)
                timeline.current_bytes["communication"] += self._unsent(action) * self.message
            for stage in stages.values():
                timeline.replay(stage.phases[("reduce",)], "reduce")
            timeline.current_bytes = {**self.persistent, "gradients": gradients}
        for stage in stages.values():
            for key in _update_phases(stage):
                timeline.replay(stage.phases[key], "update")
        return timeline.points

    def _unsent(self, action: Action) -> int:
        """Return how many of an action's sent messages stay allocated until the step's end, when torch waits for sends;
        0 under 1F1B, which waits at once. Messages are input gradients, and outputs that a backward would free."""
        schedule = self.config.parallelism.pipeline_parallel_schedule
        if schedule == "1F1B":
            return 0
        others = {*range(self.last_stage + 1)} - self.stages.keys()
        output = action.kind in WITH_WEIGHT_GRADIENT and action.stage + 1 in others
        gradient = action.kind in WITH_INPUT_GRADIENT and action.stage - 1 in others
        return (output and schedule != "GPipe") + gradient

    def _replay(self, action: Action, *, first_backward: bool) -> None:
        """Append an action's memory to the timeline. A stage's first backward allocates its weights' gradients."""
        timeline, phases, kind = self.timeline, self.stages[action.stage].phases, action.kind
        label = f"{kind.name.lower().replace('_', ' ')} of stage {action.stage}"
        if action.stage == 0:  # the first stage runs its whole backward in place of the weight gradient
            if kind == Pass.INPUT_GRADIENT:
                return
            kind = Pass.BACKWARD if kind == Pass.WEIGHT_GRADIENT else kind
        if kind == Pass.INPUT_GRADIENT:
            timeline.replay(phases[Pass.INPUT_GRADIENT, SPLIT], label, without="message")
        elif kind == Pass.WEIGHT_GRADIENT:
            # This phase lacks removed layers (FoldedStage), so subtract the bytes that the two phases before it added.
            nets = [timeline.net(phases[key, SPLIT], without="message") for key in (Pass.FORWARD, Pass.INPUT_GRADIENT)]
            after = {name: timeline.current_bytes[name] - sum(net[name] for net in nets) for name in KINDS}
            if first_backward:
                after["gradients"] += timeline.net(phases[Pass.BACKWARD, 0], without="message")["gradients"]
            timeline.replay(phases[Pass.WEIGHT_GRADIENT, SPLIT], label, without="message")
            timeline.current_bytes = after
        else:
            number = 0 if action.microbatch == 0 else 2 if action.microbatch == self.last_microbatch else 1
            timeline.replay(phases.get((kind, number)) or phases[kind, 0], label, without="message")
