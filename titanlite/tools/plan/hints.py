"""Hints at common mistakes in a plan, one line each with the option to change (docs/choose_a_layout.md)."""

import itertools

from titanlite.config.stage_split import SPLIT_BACKWARD
from titanlite.tools.plan.result import Plan, devices_per_node

GIB, MICROBATCHES_PER_RANK, SMALL = 2**30, 4, 0.1
"""SMALL: lost time below this share of a step is not mentioned."""
STATES = ("parameters", "gradients", "optimizer")
"""Kinds of memory that, like "gathered", do not depend on the batch."""


def hints(plan: Plan) -> list[str]:
    """Return the hints that apply."""
    return [text for text in (*in_time(plan), too_little_memory(plan), *memory_to_spare(plan)) if text]


def in_time(plan: Plan) -> list[str]:
    """Return hints about lost time; "" stands for a hint that does not apply."""
    config, parallelism, seconds = plan.config, plan.config.parallelism, plan.cost.seconds
    nodes, most = plan.axis_size("tp")[1], devices_per_node(config, plan.device)
    tensor = f"tensor parallel over {nodes} nodes communicates for "
    tensor += f"{seconds['communication: tp'] / plan.step_seconds:.0%} of the step: "
    tensor += f"parallelism.tensor_parallel_degree at most {most}"
    busy = [sum(span.end - span.start for span in spans) for spans in plan.spans] or [1.0]
    excess = max(busy) * len(busy) / sum(busy) - 1
    stages = f"pipeline rank {busy.index(max(busy))} computes {excess:.0%} longer than the mean: "
    stages += "parallelism.pipeline_parallel_{first,last}_stage_less_layers"
    eager = (seconds["memory"] + seconds["host"]) / plan.step_seconds
    can_compile = not config.model.moe.n_experts and parallelism.pipeline_parallel_schedule not in SPLIT_BACKWARD
    is_eager = plan.device.kind == "gpu" and not config.compile.enable and can_compile and eager > SMALL
    fuse = f"memory-bound operators and the host take {eager:.0%} of the step: compile.enable = true fuses operators"
    ramp = "lr_scheduler.warmup_steps = 0: Adam's first updates are full-sized; a hundredth of training.steps is usual"
    return [
        tensor if nodes > 1 else "",
        few_microbatches(plan),
        stages if excess > SMALL else "",
        fuse if is_eager else "",
        ramp if config.lr_scheduler.warmup_steps == 0 else "",
    ]


def few_microbatches(plan: Plan) -> str:
    """Return a hint if a pipeline is idle for long while it fills and drains: how to have more microbatches."""
    config, degree, n = plan.config, plan.config.parallelism.pipeline_parallel_degree, plan.config.n_microbatches
    if plan.pipeline_bubble < SMALL or n >= MICROBATCHES_PER_RANK * degree:
        return ""
    text = f"pipeline bubble {plan.pipeline_bubble:.0%}, {n} microbatches for {degree} ranks, below "
    text += f"{MICROBATCHES_PER_RANK} each: "
    if (size := config.parallelism.pipeline_parallel_microbatch_size) > 1:
        return text + f"parallelism.pipeline_parallel_microbatch_size below {size}"
    if (steps := config.gradient_accumulation_steps) > 1:
        return text + f"training.local_batch_size = {n * steps} without accumulation"
    return text + "raise training.global_batch_size, or have fewer ranks"


def too_little_memory(plan: Plan) -> str:
    """Return what to change if the plan does not fit: the first option that is enough, or the one that saves most. The
    options are sharding instead of replicas, activation checkpointing, a smaller batch, more devices."""
    config, excess, peak = plan.config, plan.worst.total - plan.device.memory, plan.worst.peak
    parallelism, batch, states = config.parallelism, config.training.local_batch_size, sum(map(peak.bytes.get, STATES))
    replicas, is_pipeline = parallelism.data_parallel_replicate_degree, bool(plan.spans)
    size = parallelism.pipeline_parallel_microbatch_size if is_pipeline else batch
    option = "parallelism.pipeline_parallel_microbatch_size" if is_pipeline else "training.local_batch_size"
    saved = {
        "shard instead of replicating: parallelism.data_parallel_replicate_degree = 1": states * (1 - 1 / replicas),
        'activation_checkpoint.mode = "full"': (config.activation_checkpoint.mode != "full")
        * peak.bytes["activations"],
        f"{option} = {size // 2}": (size > 1) * (peak.total - states - peak.bytes["gathered"]) / 2,
        "parallelism.data_parallel_shard_degree or tensor_parallel_degree = 2 times as much": states / 2,
    }
    enough = (option for option, size in saved.items() if size >= excess)
    return f"{excess / GIB:.1f} GiB too much: {next(enough, max(saved, key=saved.get))}" if excess > 0 else ""


def memory_to_spare(plan: Plan) -> list[str]:
    """Return hints to drop options that save memory which is not needed, given the most bytes that each may add."""
    config, worst, training = plan.config, plan.worst, plan.config.training
    spare, peak = (plan.device.memory - worst.total) / (worst.total / worst.peak.total), worst.peak
    # The memory that the backward of a recomputed block adds includes all of the block's activations.
    pairs = itertools.pairwise(worst.points)
    block = max((after.total - before.total for before, after in pairs if ", layer" in after.label), default=0)
    saved = config.model.n_layers * block
    is_full = config.activation_checkpoint.mode == "full" and not plan.spans
    of_batch = peak.total - sum(map(peak.bytes.get, STATES)) - peak.bytes["gathered"]
    is_one = training.local_batch_size == 1 and config.gradient_accumulation_steps % 2 == 0 and not plan.spans
    busy = ("matmul", "attention", "memory", "host", "optimizer", "communication: tp")
    seconds = plan.cost.seconds
    exposed = (plan.cost.elapsed + seconds["overlapped"] - sum(seconds[name] for name in busy)) / plan.step_seconds
    batch = f"{exposed:.0%} of the step is communication that more tokens would overlap, and two sequences fit: "
    offloaded, section = sum(worst.offloaded.values()), "training" if training.enable_cpu_offload else "optimizer"
    checkpoint = f"saving all activations takes at most {saved / GIB:.1f} GiB more, which is there: "
    return [
        checkpoint + 'activation_checkpoint.mode = "none"' if is_full and saved <= spare else "",
        batch + "training.local_batch_size = 2" if is_one and exposed > SMALL and of_batch <= spare else "",
        f"fits without offload: {section}.enable_cpu_offload = false" if 0 < offloaded <= spare else "",
    ]
