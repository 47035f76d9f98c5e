"""What a config needs and how fast it will go, before anyone rents the hardware.

    python -m titanlite.plan CONFIG.toml [--section.key=value ...] [--html FILE]

The plan runs the program that trains (titanlite/build.py) on fake tensors in a fake world of the real size, once for
each kind of pipeline stage (rehearsal.py), and puts the step together from that: what is allocated when (memory.py),
how long it takes on the device that the config names (cost.py), and what pipeline ranks wait for (schedule.py).
"""

import dataclasses
import functools
import logging
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import NamedTuple

import torch

from titanlite import build, devices
from titanlite.config import Config, Launch, check
from titanlite.config.launch import ATTENTION_BACKENDS_ON_CUDA
from titanlite.config.loader import LoadedConfig
from titanlite.config.schema import stage_modules
from titanlite.config.stage_split import ONE_STAGE, module_names, rank_of_stage
from titanlite.launcher import ranks_wanted
from titanlite.plan.cost_model import Cost, CostModel
from titanlite.plan.dry_run import (
    KINDS,
    SPLIT,
    DryRun,
    dry_run,
    dry_run_accumulation_steps,
    layers_of,
    layers_of_pattern,
)
from titanlite.plan.memory_timeline import Bytes, MemoryTimeline, Point
from titanlite.plan.schedule import Action, Span, all_actions, idle_share, simulate

CONTEXT_BYTES = int(0.6 * 2**30)
"""CUDA's context, kernels and cuBLAS's workspaces: what nvidia-smi shows of a process before its first tensor."""
GROUP_BYTES = int(0.25 * 2**30)
"""Buffers of a process group on NCCL."""
SHORTENED = True
"""Leave out layers that others stand for; False: dry_run them all, to see that it makes no difference."""
FRAGMENTATION = 0.03
"""Share of the peak that the allocator cannot hand out, with expandable segments."""


@dataclasses.dataclass(frozen=True)
class RankPlan:
    """A rank's memory. Ranks that differ only in their number on other axes than pp need the same.

    Attributes:
        rank: on the pipeline.
        points: what is on the device at each moment of a step.
        on_host: bytes by kind that offloading keeps in host memory.
        allowance: bytes by what they are for, besides tensors.
    """

    rank: int
    points: list[Point]
    on_host: Bytes
    allowance: dict[str, int]

    @functools.cached_property
    def peak(self) -> Point:
        return max(self.points, key=lambda point: point.total)

    @property
    def total(self) -> int:
        """Peak with allowance, bytes."""
        return self.peak.total + sum(self.allowance.values())


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a config will do.

    Attributes:
        config: resolved for `world_size` of `device`.
        ranks: of the pipeline.
        spans: of each pipeline rank's actions in a microstep, seconds from its beginning; empty without a pipeline.
        cost: of the busiest rank's step; `elapsed` without waiting for others.
        step_seconds: of the whole step.
        update_seconds: of it, after the last backward: norm, clipping, optimizer.
        flops_per_token: by the convention that MFU counts by.
        axes: numbers of the ranks along each, of the first rank's groups.
    """

    config: Config
    device: devices.Device
    world_size: int
    ranks: list[RankPlan]
    spans: list[list[Span]]
    cost: Cost
    step_seconds: float
    update_seconds: float
    flops_per_token: int
    n_parameters: int
    axes: dict[str, list[int]]

    def spread(self, axis: str) -> tuple[int, int]:
        """How many ranks an axis has, and on how many hosts."""
        ranks = self.axes.get(axis, [0])
        return len(ranks), len({rank // devices_per_node(self.config, self.device) for rank in ranks})

    @functools.cached_property
    def worst(self) -> RankPlan:
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def tokens_per_step(self) -> int:
        return self.config.training.global_batch_size * self.config.training.seq_len

    @property
    def tokens_per_second(self) -> float:
        """Of a device."""
        return self.tokens_per_step / self.step_seconds / self.world_size

    @property
    def mfu(self) -> float:
        return self.tokens_per_second * self.flops_per_token / self.device.bf16

    @property
    def bubble(self) -> float:
        """Share of the pipeline's time that its ranks wait."""
        return idle_share(self.spans) if self.spans else 0.0


def resolve(loaded: LoadedConfig[Config], world_size: int | None = None) -> tuple[Config, devices.Device, int]:
    """The config as train.py resolves it on the hardware that it names, the device and the number of ranks.

    Args:
        world_size: ranks; None: what the degrees ask for, or, where the shards are what remains, those of a host.

    Raises:
        ConfigError: with what train.py refuses it with.
    """
    device = devices.find(loaded.config.plan.device)
    n_devices = 0 if loaded.config.plan.device == "cpu" else devices_per_node(loaded.config, device)
    world = world_size or ranks_wanted(loaded, os.environ, n_devices)
    local = min(world, devices_per_node(loaded.config, device))
    return check(loaded, Launch(0, 0, world, local, n_devices)), device, world


def devices_per_node(config: Config, device: devices.Device) -> int:
    """Devices of a host."""
    return device.devices_per_node if config.plan.devices_per_node == -1 else config.plan.devices_per_node


def make_plan(
    loaded: LoadedConfig[Config],
    progress: Callable[[str, int, int], None] | None = None,
    *,
    world_size: int | None = None,
) -> Plan:
    """Plan a run.

    Args:
        world_size: see `resolve`.
        progress: told what was done, how many of how many.

    Raises:
        ConfigError: as `resolve`.
    """
    config, device, world = resolve(loaded, world_size)
    parallelism, degree = config.parallelism, config.parallelism.pipeline_parallel_degree
    stages = stage_modules(config) if degree > 1 else [module_names(config.model.n_layers)]
    ranks = rank_of_stage(parallelism.pipeline_parallel_schedule, degree, len(stages))
    rehearsals = _rehearse_all(config, stages, ranks, progress)
    hosts = devices_per_node(config, device)
    pricers = [CostModel(device, rehearsal.axes, hosts) for rehearsal in rehearsals]
    late = parallelism.pipeline_parallel_schedule in ONE_STAGE
    priced = [_Priced(*both, gathers_late=late) for both in zip(rehearsals, pricers, strict=True)]
    if degree == 1:
        step = _whole_step(config, priced[0])
    else:
        message = _message_bytes(config)
        step = _pipelined_step(config, priced, ranks, pricers[0].collective("send", message, [0, world // degree]))
    sizes, besides = build.parameter_sizes(config), allowance(device, _degrees(config))
    return Plan(
        config=config,
        device=device,
        world_size=world,
        ranks=[_rank_plan(config, rank, points, besides) for rank, points in enumerate(step.points)],
        spans=step.spans,
        cost=step.cost,
        step_seconds=step.seconds,
        update_seconds=step.update_seconds,
        flops_per_token=build.count_flops_per_token(config, sizes),
        n_parameters=sum(sizes.values()),
        axes=dict(rehearsals[0].axes.values()),
    )


def rehearsable(config: Config) -> Config:
    """What runs on fake tensors instead of what is written, with the same allocations and the same work.

    A compiled block is run as its Python, with elementwise results computed again in the backward as inductor's
    partitioner does, and fused afterwards (fusion.py). On CUDA attention is taken through the kernel that the device
    would choose, since fake tensors are the CPU's. Offloaded weights lie where they would be gathered from.
    """
    kernel, recomputed = config.training.attention_backend, config.activation_checkpoint.mode
    if kernel == "auto" and config.plan.device != "cpu":
        kernel = ATTENTION_BACKENDS_ON_CUDA[config.training.mixed_precision_param][0]
    compiled = config.compile.enable and "model" in config.compile.components
    if recomputed == "memory_budget" or (compiled and recomputed == "none"):
        recomputed = "selective"
        config = config.replace(activation_checkpoint__selective_ac_option="op")
    return config.replace(
        training__attention_backend=kernel,
        training__enable_cpu_offload=False,
        compile__enable=False,
        activation_checkpoint__mode=recomputed,
        parallelism__enable_async_tensor_parallel=False,
    )


class _Priced:
    """A stage's rehearsal with its costs.

    Args:
        gathers_late: whether a pipeline's first forward of a stage waits for its weights. Schedules of several stages
            a rank gather them ahead.
    """

    def __init__(self, rehearsal: DryRun, cost_model: CostModel, *, gathers_late: bool):
        self.rehearsal, self.cost_model, self.scale = rehearsal, cost_model, rehearsal.scale
        self.gathers_late = gathers_late
        self._segments: dict[int, Cost] = {}
        self._passages: dict[tuple, Cost] = {}

    def passage(self, kind: str, microbatch: int, last: int) -> tuple:
        """Which passage stands for a microbatch's."""
        wanted = 0 if microbatch == 0 else 2 if microbatch == last else 1
        return (kind, wanted) if (kind, wanted) in self.rehearsal.passages else (kind, 0)

    def cost_of_passage(self, key: tuple) -> Cost:
        """Of all its segments, one after the other."""
        if key not in self._passages:
            total = Cost()
            for segment in self.rehearsal.passages.get(key, []):
                if id(segment.events) not in self._segments:  # a copy of a layer has the layer's events
                    self._segments[id(segment.events)] = self.cost_model.price(segment.events)
                total.add(self._segments[id(segment.events)])
            self._passages[key] = total
        return self._passages[key]

    def cost_of(self, action: Action) -> Cost:
        """Of a pipeline's action. Of a backward in halves, the half for weights has the products that the forward
        has, and what remains is the half for inputs; a first stage does all of it with the weights."""
        if action.kind == "F":
            return self.cost_of_passage(("F", 0 if self.gathers_late and action.microbatch == 0 else 1))
        whole = self.cost_of_passage(("B", min(action.microbatch, 1)))
        if action.kind == "B":
            return whole
        half = self.cost_of_passage(("F", 1)).seconds["products"] / whole.elapsed
        share = {"I": 0.0, "W": 1.0} if action.stage == 0 else {"I": 1 - half, "W": half}
        part = Cost()
        part.add(whole, share[action.kind])
        return part

    def seconds_after_backward(self, part: str) -> float:
        """Of "reduce" or "update", for all the stage's weights."""
        return self.cost_of_passage((part,)).elapsed * self.scale


def _rehearse_all(
    config: Config, stages: list[list[str]], ranks: list[int], progress: Callable[[str, int, int], None] | None
) -> list[DryRun]:
    """Of each stage; those that are alike are one. Each has a process of its own, since torch remembers the groups of a
    world for as long as a process lives."""
    config, fused = rehearsable(config), config.compile.components if config.compile.enable else ()
    pattern = layers_of_pattern(config)

    def likeness(names: list[str]) -> tuple:
        layers = layers_of(names)
        return tuple(name for name in names if name not in layers), len(layers), int(layers[0].split(".")[1]) % pattern

    kinds: dict[tuple, int] = {}
    for number, names in enumerate(stages):
        kinds.setdefault(likeness(names), number)
    with processes(len(kinds), preload="titanlite.plan.dry_run", max_tasks_per_child=1) as pool:
        futures: dict[tuple, Future[DryRun]] = {
            kind: pool.submit(
                dry_run,
                config,
                stages[number],
                number,
                pipeline_rank=ranks[number],
                n_stages=len(stages),
                shortened=SHORTENED,
                fused=fused,
            )
            for kind, number in kinds.items()
        }
        done = {}
        for kind, future in futures.items():
            done[kind] = future.result()
            if progress:
                progress("stages rehearsed", len(done), len(futures))
    return [done[likeness(names)] for names in stages]


def processes(n: int, *, preload: str, max_tasks_per_child: int | None = None) -> ProcessPoolExecutor:
    """At most n workers, no more than there are cores, that begin with a module loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    workers = min(n, os.cpu_count() or 1)
    return ProcessPoolExecutor(workers, context, initializer=_be_quiet, max_tasks_per_child=max_tasks_per_child)


def _be_quiet() -> None:
    """What libraries warn of is about runs."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def _degrees(config: Config) -> tuple[int, ...]:
    """Of all axes that have a process group."""
    parallelism = config.parallelism
    return (
        parallelism.pipeline_parallel_degree,
        parallelism.data_parallel_replicate_degree,
        parallelism.data_parallel_shard_degree * parallelism.context_parallel_degree,
        parallelism.tensor_parallel_degree,
        parallelism.ring_degree,
        parallelism.context_parallel_ulysses_degree,
    )


def allowance(device: devices.Device, degrees: Iterable[int]) -> dict[str, int]:
    """Bytes besides tensors, but for fragmentation, which depends on the peak.

    Args:
        degrees: of axes, each of which has a process group, beside the one of all ranks.
    """
    if device == devices.DEVICES["cpu"]:
        return {}
    groups = 1 + sum(degree > 1 for degree in degrees)
    return {"context": CONTEXT_BYTES, f"{groups} process groups": groups * GROUP_BYTES}


def _rank_plan(config: Config, rank: int, points: list[Point], besides: dict[str, int]) -> RankPlan:
    """Move what is offloaded to the host, and allow for what is not tensors."""
    on_host: Bytes = {}
    if config.training.enable_cpu_offload:
        away = ("parameters", "gradients", "optimizer")
        on_host = {kind: max(point.bytes[kind] for point in points) for kind in away}
        points = [Point(point.label, {**point.bytes, **dict.fromkeys(away, 0)}) for point in points]
    peak = max(point.total for point in points)
    fragments = {"fragmentation": round(FRAGMENTATION * peak)} if besides else {}
    return RankPlan(rank, points, on_host, {**besides, **fragments})


ROUNDING = 512
"""Bytes that CUDA's allocator rounds each tensor up to."""


class _Step(NamedTuple):
    """What a step takes; see Plan. `points` are each pipeline rank's."""

    points: list[list[Point]]
    spans: list[list[Span]]
    cost: Cost
    seconds: float
    update_seconds: float


def _whole_step(config: Config, stage: _Priced) -> _Step:
    """Without a pipeline."""
    ledger, cost = MemoryTimeline(stage.rehearsal.held, 1 if config.plan.device == "cpu" else ROUNDING), Cost()
    passages = stage.rehearsal.passages
    for microstep, times in dry_run_accumulation_steps(config.gradient_accumulation_steps).items():
        for kind, label in (("F", "forward"), ("B", "backward")):
            ledger.play(passages[kind, microstep], label)
            cost.add(stage.cost_of_passage((kind, microstep)), times)
    ledger.play(passages[("update",)], "update")
    cost.add(stage.cost_of_passage(("update",)), stage.scale)
    return _Step([ledger.points], [], cost, cost.elapsed, stage.seconds_after_backward("update"))


def _pipelined_step(config: Config, priced: list[_Priced], ranks: list[int], message_seconds: float) -> _Step:
    """With one.

    Args:
        priced: its stages.
        ranks: of each stage.
        message_seconds: that a microbatch takes from a stage to the next.
    """
    parallelism, n_stages, microsteps = config.parallelism, len(priced), config.gradient_accumulation_steps
    schedule, degree = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree
    n_microbatches = config.training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    turns = all_actions(schedule, degree, n_stages, n_microbatches)
    spans = simulate(turns, n_stages, lambda action: priced[action.stage].cost_of(action).elapsed, message_seconds)
    points, costs, reductions, updates = [], [], [], []
    for rank, groups in enumerate(turns):
        own = {number: stage for number, stage in enumerate(priced) if ranks[number] == rank}
        actions = [action for group in groups for action in group]
        points.append(_pipeline_points(config, own, actions, n_microbatches, microsteps))
        cost, sent = Cost(), 0
        for action in actions:
            cost.add(own[action.stage].cost_of(action), microsteps)
            neighbour = action.stage + (1 if action.kind == "F" else -1)
            sent += action.kind in "FBI" and 0 <= neighbour < n_stages and neighbour not in own
        for stage in own.values():
            cost.add(stage.cost_of_passage(("reduce",)), stage.scale * microsteps)
            cost.add(stage.cost_of_passage(("update",)), stage.scale)
        cost.traffic["pp", "send"] = sent * microsteps, sent * microsteps * _message_bytes(config)
        cost.seconds["link: pp"] += sent * microsteps * message_seconds
        costs.append(cost)
        reductions.append(sum(stage.seconds_after_backward("reduce") for stage in own.values()))
        updates.append(sum(stage.seconds_after_backward("update") for stage in own.values()))
    end = max(span.end for rank in spans for span in rank)
    seconds = (end + max(reductions)) * microsteps + max(updates)
    return _Step(points, spans, max(costs, key=lambda cost: cost.elapsed), seconds, max(updates))


def _message_bytes(config: Config) -> int:
    batch, tokens, dim = config.hidden_shape
    return batch * tokens * dim * getattr(torch, config.training.mixed_precision_param).itemsize


def _pipeline_points(
    config: Config, stages: dict[int, _Priced], actions: list[Action], n_microbatches: int, microsteps: int
) -> list[Point]:
    """A pipeline rank's memory: its stages' passages in the order of its actions. Of more than two microsteps the
    others are as the second."""
    held: Bytes = {}
    schedule, n_stages = config.parallelism.pipeline_parallel_schedule, config.parallelism.n_stages
    message = _message_bytes(config)
    for number, stage in stages.items():
        for kind, size in stage.rehearsal.held.items():
            held[kind] = held.get(kind, 0) + size
        # torch receives each microbatch into a buffer of its own, which it keeps.
        buffers = (number > 0) + (number < n_stages - 1)
        held["communication"] = held.get("communication", 0) + buffers * n_microbatches * message
    held["parameters"] -= (len(stages) - 1) * next(iter(stages.values())).rehearsal.rotary
    ledger = MemoryTimeline(held, 1 if config.plan.device == "cpu" else ROUNDING)
    after = {**held, "gradients": sum(stage.rehearsal.gradients for stage in stages.values())}
    for _ in range(min(microsteps, 2)):
        begun: set[int] = set()
        for action in actions:
            first_backward = action.stage not in begun
            _play(ledger, stages[action.stage], action, n_microbatches - 1, first_backward=first_backward)
            if action.kind in "BW":
                begun.add(action.stage)
            # torch waits for what it sent only at the step's end (1F1B at once), and keeps it until then: the outputs,
            # which a backward would free, and the gradients of inputs.
            if schedule != "1F1B":
                outputs = action.kind in "BW" and action.stage + 1 < n_stages and action.stage + 1 not in stages
                gradients = action.kind in "BI" and action.stage > 0 and action.stage - 1 not in stages
                ledger.level["communication"] += ((outputs and schedule != "GPipe") + gradients) * message
        for stage in stages.values():
            ledger.play(stage.rehearsal.passages[("reduce",)], "reduce")
        ledger.settle(after)
    for stage in stages.values():
        ledger.play(stage.rehearsal.passages[("update",)], "update")
    return ledger.points


def _play(ledger: MemoryTimeline, stage: _Priced, action: Action, last: int, *, first_backward: bool) -> None:
    """An action's memory.

    Args:
        last: number of the last microbatch.
        first_backward: whether it is the first that makes gradients of the stage's weights.
    """
    passages, kind, own = stage.rehearsal.passages, action.kind, {"without": "message"}
    label = f"{kind} of stage {action.stage}"
    if action.stage == 0 and kind in "IW":  # a first stage does all with the weights
        if kind == "I":
            return
        kind = "B"
    if kind == "I":
        ledger.play(passages[("I", SPLIT)], label, **own)
    elif kind == "W":
        # What it frees is what the forward and the other half left; its own passage lacks layers.
        nets = [ledger.net(passages[key, SPLIT], **own) for key in "FI"]
        level = {name: ledger.level[name] - sum(net[name] for net in nets) for name in KINDS}
        if first_backward:
            level["gradients"] += ledger.net(passages[("B", 0)], **own)["gradients"]
        ledger.play(passages[("W", SPLIT)], label, **own)
        ledger.settle(level)
    else:
        ledger.play(passages[stage.passage(kind, action.microbatch, last)], label, **own)
