"""Find common mistakes in a config by its plan. Each hint is a line that names an option (docs/choose_a_layout.md)."""

import itertools
from collections.abc import Iterator

from titanlite.config.stage_split import SPLIT_BACKWARD
from titanlite.tools.plan.result import Plan, devices_per_node

GIB, MICROBATCHES_PER_RANK, SMALL = 2**30, 4, 0.1  # SMALL: share of a step above which a hint names lost time
STATES = ("parameters", "gradients", "optimizer")  # kinds of memory that do not depend on the batch, without "gathered"


def hints(plan: Plan) -> list[str]:
    return [text for text in (*in_time(plan), too_little_memory(plan), *memory_to_spare(plan)) if text]


def in_time(plan: Plan) -> Iterator[str]:
    """Yield hints about lost time."""
    config, parallelism, seconds = plan.config, plan.config.parallelism, plan.cost.seconds
    if (nodes := plan.axis_size("tp")[1]) > 1:
        share = seconds["communication: tp"] / plan.step_seconds
        option = f"parallelism.tensor_parallel_degree at most {devices_per_node(config, plan.device)}"
        yield f"tensor parallel over {nodes} nodes communicates for {share:.0%} of the step: {option}"
    yield few_microbatches(plan)
    busy = [sum(span.end - span.start for span in spans) for spans in plan.spans] or [1.0]
    if (excess := max(busy) * len(busy) / sum(busy) - 1) > SMALL:
        stages = f"pipeline rank {busy.index(max(busy))} computes {excess:.0%} longer than the mean"
        yield stages + ": parallelism.pipeline_parallel_{first,last}_stage_less_layers"
    eager = (seconds["memory"] + seconds["host"]) / plan.step_seconds
    can_compile = not config.model.moe.n_experts and parallelism.pipeline_parallel_schedule not in SPLIT_BACKWARD
    if plan.device.kind == "gpu" and not config.compile.enable and can_compile and eager > SMALL:
        yield f"memory-bound operators and the host take {eager:.0%} of the step: compile.enable = true fuses operators"
    if config.lr_scheduler.warmup_steps == 0:
        ramp = "Adam's first updates are full-sized; a hundredth of training.steps is usual"
        yield f"lr_scheduler.warmup_steps = 0: {ramp}"


def few_microbatches(plan: Plan) -> str:
    """Return a hint at an option that gives a pipeline more microbatches, if the pipeline bubble is large, or ""."""
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
    """Return a hint for a plan that does not fit: the first option that makes it fit, or else saves most memory, of
    sharding instead of replicas, activation checkpointing, a smaller batch, more devices. "": the plan fits."""
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


def memory_to_spare(plan: Plan) -> Iterator[str]:
    """Yield hints to turn off an option that saves memory, if the device has room for the bytes that this may add."""
    config, worst, training, seconds = plan.config, plan.worst, plan.config.training, plan.cost.seconds
    spare, peak = (plan.device.memory - worst.total) / (worst.total / worst.peak.total), worst.peak
    # The backward of a block under full AC adds at least the memory of all the block's activations.
    pairs = itertools.pairwise(worst.points)
    block = max((after.total - before.total for before, after in pairs if ", layer" in after.label), default=0)
    saved = config.model.n_layers * block
    if config.activation_checkpoint.mode == "full" and not plan.spans and saved <= spare:
        more = f"saving all activations takes at most {saved / GIB:.1f} GiB more, which is there"
        yield f'{more}: activation_checkpoint.mode = "none"'
    of_batch = peak.total - sum(map(peak.bytes.get, STATES)) - peak.bytes["gathered"]
    is_one = training.local_batch_size == 1 and config.gradient_accumulation_steps % 2 == 0 and not plan.spans
    busy = ("matmul", "attention", "memory", "host", "optimizer", "communication: tp")
    exposed = (plan.cost.elapsed + seconds["overlapped"] - sum(seconds[name] for name in busy)) / plan.step_seconds
    if is_one and exposed > SMALL and of_batch <= spare:
        batch = f"{exposed:.0%} of the step is communication that more tokens would overlap, and two sequences fit"
        yield f"{batch}: training.local_batch_size = 2"
    if 0 < sum(worst.offloaded.values()) <= spare:
        section = "training" if training.enable_cpu_offload else "optimizer"
        yield f"fits without offload: {section}.enable_cpu_offload = false"
