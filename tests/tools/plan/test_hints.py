"""Each hint of a plan appears where it applies, and not where its condition is just not met."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from titanlite.config import load
from titanlite.tools.plan.cost_model import Cost
from titanlite.tools.plan.hints import hints
from titanlite.tools.plan.memory_timeline import Point
from titanlite.tools.plan.planner import resolve
from titanlite.tools.plan.report import WIDTH, report
from titanlite.tools.plan.result import Plan, RankPlan
from titanlite.tools.plan.schedule import Action, Span
from titanlite.tools.plan.segments import KINDS

GIB = 2**30
CONFIGS = Path(__file__).parents[3] / "configs"
SHARD, COMPILE = "--parallelism.data_parallel_shard_degree", "--compile.enable=true"
PIPELINE = (
    COMPILE,
    "--parallelism.pipeline_parallel_degree=4",
    f"{SHARD}=1",
    "--parallelism.pipeline_parallel_schedule=1F1B",
)
MEMORY = 80
"""GiB of the device."""


@functools.cache
def base_plan(options: tuple[str, ...]) -> Plan:
    """Return a plan of configs/debug.toml with some options, on 8 devices per node: 40 GiB of weights and optimizer
    states, 16 GiB of activations, a step of 10 seconds."""
    config, device, world = resolve(load([str(CONFIGS / "debug.toml"), "--plan.device=h100", *options]))
    degree = config.parallelism.pipeline_parallel_degree
    before = Point("between steps", dict.fromkeys(KINDS, 0) | {"parameters": 20 * GIB, "optimizer": 20 * GIB})
    peak = Point("backward of stage 0, layer 3", before.bytes | {"activations": 16 * GIB})
    spans = [[Span(Action("F", rank, 0), 0.0, 8.0)] for rank in range(degree)] if degree > 1 else []
    return Plan(
        config=config,
        device=device.model_copy(update={"memory": MEMORY * GIB, "devices_per_node": 8}),
        world_size=world,
        ranks=[RankPlan(rank, [before, peak], {}, {}) for rank in range(degree)],
        spans=spans,
        cost=Cost(seconds=Counter({"matmul": 8.0, "memory": 0.9, "communication: tp": 2.0}), elapsed=10.0),
        step_seconds=10.0,
        spread={"matmul": (-0.3, 0.4)},
        update_seconds=1.0,
        flops_per_token=10**6,
        n_parameters=10**6,
        axes={"tp": list(range(8)), "fsdp": [0, 1]},
    )


def with_memory(plan: Plan, peak: dict[str, float], *, offloaded: float = 0.0) -> Plan:
    """Return a plan with other GiB at its peak, and in host memory."""
    before, point = plan.worst.points
    point = point._replace(bytes=point.bytes | {kind: round(size * GIB) for kind, size in peak.items()})
    host = {"optimizer": round(offloaded * GIB)}
    return dataclasses.replace(plan, ranks=[dataclasses.replace(plan.worst, points=[before, point], offloaded=host)])


def with_spans(plan: Plan, busy: list[float], end: float) -> Plan:
    """Return a plan whose pipeline ranks compute for some seconds, one after the other idle until the end."""
    spans = [[Span(Action("F", rank, 0), end - seconds, end)] for rank, seconds in enumerate(busy)]
    return dataclasses.replace(plan, spans=spans)


def with_seconds(plan: Plan, **seconds: float) -> Plan:
    cost = dataclasses.replace(plan.cost, seconds=plan.cost.seconds | Counter(seconds))
    return dataclasses.replace(plan, cost=cost)


def plan_of(*options: str, **changes: Any) -> Plan:
    """Return the base plan with some attributes replaced."""
    return dataclasses.replace(base_plan(options), **changes)


def with_41_and_40_gib(*options: str) -> tuple[Callable[[], Plan], ...]:
    """Return functions that make plans with more activations than fit beside the states, and with as many as fit."""
    return tuple(functools.partial(_with_activations, options, size) for size in (41.0, 40.0))


def _with_activations(options: tuple[str, ...], size: float) -> Plan:
    return with_memory(plan_of(*options), {"activations": size})


def exposed(plan: Plan, seconds: float) -> Plan:
    """Return a plan with seconds of exposed communication besides those of tensor parallel."""
    return dataclasses.replace(plan, cost=dataclasses.replace(plan.cost, elapsed=8.9 + 2.0 + seconds))


LOCAL, GLOBAL, FULL = "--training.local_batch_size", "--training.global_batch_size", "--activation_checkpoint.mode=full"
OFFLOAD, REPLICATE = "--optimizer.enable_cpu_offload=true", "--parallelism.data_parallel_replicate_degree=2"
ONE, SCHEDULE = (COMPILE, f"{LOCAL}=1"), "--parallelism.pipeline_parallel_schedule="
MICROBATCH = "--parallelism.pipeline_parallel_microbatch_size"
IDLE = ([8.0] * 4, 10.0)
"""A pipeline bubble of 20 %."""
CASES = {
    # Name: a plan with the hint, a plan that just does not have it, the option that the hint names
    "tensor parallel across nodes": (
        lambda: plan_of(COMPILE, axes={"tp": list(range(16))}),
        lambda: plan_of(COMPILE, axes={"tp": list(range(8))}),
        "tensor parallel over 2 nodes communicates for 20% of the step: parallelism.tensor_parallel_degree at most 8",
    ),
    "few microbatches, microbatch size": (
        lambda: with_spans(plan_of(*PIPELINE, f"{LOCAL}=30", f"{MICROBATCH}=2"), *IDLE),
        lambda: with_spans(plan_of(*PIPELINE, f"{LOCAL}=32", f"{MICROBATCH}=2"), *IDLE),
        "pipeline bubble 20%, 15 microbatches for 4 ranks, below 4 each: "
        "parallelism.pipeline_parallel_microbatch_size below 2",
    ),
    "few microbatches, accumulation": (
        lambda: with_spans(plan_of(*PIPELINE, f"{LOCAL}=15", f"{GLOBAL}=30"), *IDLE),
        lambda: with_spans(plan_of(*PIPELINE, f"{LOCAL}=15", f"{GLOBAL}=30"), [9.2] * 4, 10.0),
        "training.local_batch_size = 30 without accumulation",
    ),
    "few microbatches, global batch": (
        lambda: with_spans(plan_of(*PIPELINE, f"{LOCAL}=15"), *IDLE),
        lambda: with_spans(plan_of(*PIPELINE, f"{LOCAL}=16"), *IDLE),
        "training.global_batch_size",
    ),
    "unequal stages": (
        lambda: with_spans(plan_of(*PIPELINE), [8, 8, 8, 9.3], 9.3),
        lambda: with_spans(plan_of(*PIPELINE), [8, 8, 8, 9.0], 9.0),
        "pipeline rank 3 computes 12% longer than the mean",
    ),
    "not compiled": (
        lambda: with_seconds(plan_of(), host=0.2),
        lambda: plan_of(),
        "compile.enable = true",
    ),
    "compiled": (
        lambda: with_seconds(plan_of(), host=0.2),
        lambda: with_seconds(plan_of(COMPILE), host=0.2),
        "compile.enable = true",
    ),
    "no warm-up": (
        lambda: plan_of(COMPILE, "--lr_scheduler.warmup_steps=0"),
        lambda: plan_of(COMPILE, "--lr_scheduler.warmup_steps=1"),
        "lr_scheduler.warmup_steps = 0",
    ),
    "does not fit, replicas": (
        lambda: with_memory(plan_of(COMPILE, REPLICATE, f"{SHARD}=1"), {"activations": 59.0}),
        lambda: with_memory(plan_of(COMPILE, REPLICATE, f"{SHARD}=1"), {"activations": 40.0}),
        "19.0 GiB too much: shard instead of replicating: parallelism.data_parallel_replicate_degree = 1",
    ),
    "does not fit, activations": (
        *with_41_and_40_gib(COMPILE),
        '1.0 GiB too much: activation_checkpoint.mode = "full"',
    ),
    "does not fit, batch": (
        *with_41_and_40_gib(COMPILE, FULL, f"{LOCAL}=4"),
        "1.0 GiB too much: training.local_batch_size = 2",
    ),
    "does not fit, weights": (
        *with_41_and_40_gib(COMPILE, FULL, f"{LOCAL}=1", f"{GLOBAL}=8"),
        "1.0 GiB too much: parallelism.data_parallel_shard_degree",
    ),
    "needless full AC": (  # six layers save at most six times what the backward of one adds
        lambda: with_memory(plan_of(COMPILE, FULL), {"activations": 5.7}),
        lambda: with_memory(plan_of(COMPILE, FULL), {"activations": 5.8}),
        'activation_checkpoint.mode = "none"',
    ),
    "AC in a pipeline": (
        lambda: with_memory(plan_of(COMPILE, FULL), {"activations": 1.0}),
        lambda: with_memory(plan_of(*PIPELINE, FULL), {"activations": 1.0}),
        'activation_checkpoint.mode = "none"',
    ),
    "a batch of 1": (
        lambda: exposed(with_memory(plan_of(*ONE, f"{GLOBAL}=32"), {"activations": 20.0}), 1.1),
        lambda: exposed(with_memory(plan_of(*ONE, f"{GLOBAL}=32"), {"activations": 20.1}), 1.1),
        "training.local_batch_size = 2",
    ),
    "a batch of 1, communication is overlapped": (
        lambda: exposed(plan_of(*ONE, f"{GLOBAL}=32"), 1.1),
        lambda: exposed(plan_of(*ONE, f"{GLOBAL}=32"), 1.0),
        "11% of the step is communication",
    ),
    "a batch of 1, async TP": (
        lambda: with_seconds(exposed(plan_of(*ONE, f"{GLOBAL}=32"), 0.1), overlapped=1.0),
        lambda: with_seconds(exposed(plan_of(*ONE, f"{GLOBAL}=32"), 0.1), overlapped=0.9),
        "11% of the step is communication",
    ),
    "a batch of 1 in a pipeline": (
        lambda: exposed(plan_of(*ONE, f"{GLOBAL}=16"), 1.1),
        lambda: exposed(plan_of(*ONE, *PIPELINE[1:3], SCHEDULE + "GPipe", f"{GLOBAL}=16"), 1.1),
        "training.local_batch_size = 2",
    ),
    "a batch of 1 without accumulation": (
        lambda: exposed(plan_of(*ONE, f"{GLOBAL}=16"), 1.1),
        lambda: exposed(plan_of(*ONE, f"{GLOBAL}=8"), 1.1),
        "training.local_batch_size = 2",
    ),
    "needless offload": (
        lambda: with_memory(plan_of(COMPILE, OFFLOAD), {"activations": 10.0}, offloaded=30.0),
        lambda: with_memory(plan_of(COMPILE, OFFLOAD), {"activations": 10.0}, offloaded=30.1),
        "optimizer.enable_cpu_offload = false",
    ),
}


@pytest.mark.parametrize(("applies", "does_not", "expected"), CASES.values(), ids=CASES)
def test_a_hint_appears_where_it_applies_and_nowhere_else(applies, does_not, expected):
    assert [hint for hint in hints(applies()) if expected in hint] == hints(applies()) != []
    assert hints(does_not()) == []
    assert max(map(len, hints(applies()))) <= WIDTH - len("hint: ")


def test_the_report_has_the_hints():
    plan = plan_of(COMPILE, "--lr_scheduler.warmup_steps=0")
    lines = [str(part) for part in report(plan, "a.toml").renderables]
    assert [line for line in lines if line.startswith("hint: ")] == [f"hint: {hint}" for hint in hints(plan)]
