"""Run one rank's training step on fake tensors, and return the full step's phases (forward, backward, update). The run
leaves out repeated layers (segments.fold_layers), and has at most three gradient accumulation steps."""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite import build
from titanlite.config import Config
from titanlite.config.schema import QUANTIZED_STATES
from titanlite.config.stage_split import SPLIT_BACKWARD
from titanlite.data.loader import Batch
from titanlite.launch.process import Signals
from titanlite.metrics.devices import find_device
from titanlite.model import Llama
from titanlite.parallel import fsdp, mesh
from titanlite.parallel.own_rules import RunsUncompiled
from titanlite.parallel.pipeline import pipeline_stage
from titanlite.tools.plan import expert_load
from titanlite.tools.plan.fusion import fuse, overlap, save_less
from titanlite.tools.plan.memory_timeline import Bytes
from titanlite.tools.plan.op_trace import BUFFER, HostWait, OpTrace, Segment, Work, fake_world, fused_norm, recording
from titanlite.tools.plan.segments import KINDS, FoldedStage, Pass, Phases, fold_layers, name_kinds, phases_of
from titanlite.train_step import Balance, SingleStageRunner, TrainStep

CPU = torch.device("cpu")
SPLIT = 3  # number of the microbatch whose backward is split into input and weight gradients


class DryRun(NamedTuple):
    """The result of a stage's dry run.

    phases: (Pass.FORWARD, n) and (Pass.BACKWARD, n) are the first (n = 0), a middle (1) and the last (2) microbatch. A
    split backward has n = SPLIT, and its phase (Pass.WEIGHT_GRADIENT, SPLIT) lacks the folded layers. Other phases are
    ("reduce",), ("update",), and ("muon", number, times), a round of Muon that a step runs `times` times.

    scale: number of weights in the full stage / number of weights in the dry run. The phases "reduce" and "update",
    which process every weight, take `scale` times as long as their events in the dry run."""

    persistent: Bytes  # bytes by kind of memory that stay allocated from step to step
    phases: Phases  # segments by phase
    axes: dict[str, tuple[str, list[int]]]  # axis and ranks of each process group, by the group's name
    gradients: int  # bytes of a rank's reduced gradients, equal to the bytes of its trained weights
    rotary: int  # bytes of the rotary table, which all stages of a rank share
    scale: float


def checkpointing_period(config: Config) -> int:
    """Return the number of layers after which the pattern of activation checkpointing repeats."""
    section, option = config.activation_checkpoint, config.activation_checkpoint.selective_ac_option
    return option if section.mode == "selective" and isinstance(option, int) else section.layers_per_checkpoint


def layer_period(config: Config) -> int:
    """Return a period of the pattern of layers that is not shorter than the number of layers that FSDP prefetches."""
    moe, parallelism = config.model.moe, config.parallelism
    pattern = sum(kind.count for kind in config.model.layer_pattern) or 1
    period = math.lcm(checkpointing_period(config), moe.every_n_layers if moe.n_experts else 1, pattern)
    prefetched = max(parallelism.fsdp_forward_prefetch, parallelism.fsdp_backward_prefetch)
    return max(math.ceil(prefetched / period), 1) * period


def fold_stage(config: Config, names: Sequence[str]) -> FoldedStage:
    """Fold the repeated layers of the stage whose modules are `names` (segments.fold_layers)."""
    moe = config.model.moe
    return fold_layers(names, layer_period(config), moe.n_first_dense_layers if moe.n_experts else 0)


def dry_run_accumulation_steps(n: int) -> dict[int, int]:
    """Return how many of n accumulation steps each step of the dry run (0: first, 1: middle, 2: last) stands for."""
    return {1: {0: 1}, 2: {0: 1, 2: 1}}.get(n, {0: 1, 1: n - 2, 2: 1})


def dry_run(
    config: Config,
    names: Sequence[str],
    number: int,
    *,
    pipeline_rank: int,
    fused: Collection[str] = (),
    fold: bool = True,
) -> DryRun:
    """Run one training step of stage `number`, which has the modules `names`, on the pipeline rank that has the stage.
    `fused`: which of "model" and "loss" to treat as compiled (fusion.py). fold=False runs all layers, for a test."""
    parallelism = config.parallelism
    folded = fold_stage(config, names) if fold and not config.own.block else fold_layers(names, len(names))
    rank = pipeline_rank * parallelism.world_size // parallelism.pipeline_parallel_degree
    mesh.forget_layouts()  # cached layouts have the process groups of another rank
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_world(rank, parallelism.world_size))
        layout = mesh.build_layout(parallelism, CPU)
        axes = axes_of_groups(layout)
        stage = _build_stage(config, layout, folded.names, compiled="model" in fused)
        if config.optimizer.state_dtype in QUANTIZED_STATES:
            from titanlite.techniques.low_bit_adam import create_value_tables  # late import: it takes a second

            create_value_tables(config.optimizer.state_dtype)
        record = _record_low_bit_adam
        if config.optimizer.name == "Muon":
            from titanlite.tools.plan import muon_step  # late import: most plans do without Muon

            record = muon_step.recorder(config, layout.mesh, names, axes)
        trace = stack.enter_context(recording())  # after the build, which reads values that fake tensors lack
        if fused or find_device(config.plan.device).kind == "gpu":
            stack.enter_context(fused_norm(trace, _local))
        if config.model.moe.n_experts:
            stack.enter_context(expert_load.assumed(config, lambda: trace.record(HostWait())))
        stage.materialize(CPU)
        fsdp.use_in_place(stage, parallelism, config.training)
        optimizer = build.build_optimizer(config, stage, [stage])
        _create_states(config, optimizer)
        balance = build.build_balance(config, stage, CPU)
        persistent, gradients, rotary, scale = _persistent(trace, stage, optimizer, folded)
        _mark_layers(trace, stage)
        if parallelism.pipeline_parallel_degree == 1:
            _run_accumulation_steps(config, trace, stage)
        else:
            _run_microbatches(config, trace, stage, number, layout.mesh["pp"].get_group())
        is_run = not _is(optimizer, "LowBitAdam") and not _is(optimizer, "Muon")
        step = optimizer if is_run else RecordedStep(optimizer, functools.partial(record, trace, optimizer))
        _update(config, trace, stage, step, balance)
        trace.mark("end")
    vocabulary = config.model.vocab_size
    name_kinds(trace.segments, logits=(vocabulary, vocabulary // parallelism.tensor_parallel_degree))
    if parallelism.enable_async_tensor_parallel:
        overlap(trace.segments, {group: len(ranks) for group, (axis, ranks) in axes.items() if axis == "tp"})
    _fuse_compiled(trace.segments, fused)
    return DryRun(persistent, phases_of(trace.segments, folded), axes, gradients, rotary, scale)


def _build_stage(config: Config, layout: mesh.Layout, names: list[str], *, compiled: bool) -> Llama:
    """Build a stage. `compiled`: compile the operators of experts; fusion.py models all other compilation."""
    stage = build.build_stage(config, layout, names, CPU)
    for block in stage.layers.values():
        if compiled and isinstance(block.feed_forward, RunsUncompiled):
            block.feed_forward.compile_operators(config.compile.backend)
    return stage


def axes_of_groups(layout: mesh.Layout) -> dict[str, tuple[str, list[int]]]:
    """Return the axis and the global ranks of each process group of a layout, by the group's name."""
    # An axis with all ranks has the process group of "all". The later entry, the axis, then wins in the returned dict.
    groups = {"all": dist.group.WORLD, **{axis: layout.mesh[axis].get_group() for axis in mesh.AXES}}
    groups |= {"ring": layout.ring_group, "ulysses": layout.ulysses_group}
    present = [(axis, group) for axis, group in groups.items() if group is not None]
    if layout.expert_mesh is not None:
        present += [(axis, layout.expert_mesh[axis].get_group()) for axis in mesh.EXPERT_AXES]
    return {group.group_name: (axis, dist.get_process_group_ranks(group)) for axis, group in present}


def _fuse_compiled(segments: Sequence[Segment], components: Collection[str]) -> None:
    """Model the effect of torch.compile on the components that it compiles."""
    labels = {"model": ("layer F", "layer B"), "loss": ("layer head", "layer head B")}
    wanted = [label for component in components for label in labels[component]]
    for component in components:
        forward, backward = (
            {number for number, segment in enumerate(segments) if segment.mark[0] == label}
            for label in labels[component]
        )
        save_less(segments, forward, backward)
    compiled = [segment for segment in segments if segment.mark[0] in wanted]
    for segment, events in zip(compiled, fuse([segment.events for segment in compiled]), strict=True):
        segment.events[:] = events


class RecordedStep:
    """Replaces an optimizer in TrainStep.update: `step` records operators instead of running them. The factor of
    clipping stays a tensor on the device, as for a fused optimizer (optimizer.clipped_step)."""

    _step_supports_amp_scaling = True

    def __init__(self, optimizer: torch.optim.Optimizer, step: Callable[[], None]):
        self.param_groups, self.zero_grad, self.step = optimizer.param_groups, optimizer.zero_grad, step
        self.optimizer = optimizer


def _update(config: Config, trace: OpTrace, stage: Llama, optimizer: Any, balance: Balance | None) -> None:
    """Finish a step after its last backward: sums over ranks, gradient clipping, optimizer step, balance of experts."""
    trace.mark("update")
    parameters = list(stage.parameters())
    for parameter in (each for each in parameters if each.requires_grad):  # frozen weights (LoRA) have no gradient
        for tensor in _local(parameter.grad):
            trace.allocation_of(tensor).kind = "gradients"
    options = {"device": CPU, "contributes_loss": True, "max_norm": config.training.max_norm, "balance": balance}
    train_step = TrainStep(stage, SingleStageRunner(stage), config.parallelism, **options)
    with torch.no_grad():
        loss_sum, valid = (torch.ones((), dtype=torch.float64) for _ in range(2))
        totals = train_step.groups.totals(loss_sum, valid, parameters, Signals())
        train_step.update(optimizer, totals.norm, torch.tensor(True))  # a fake tensor of a constant has a value
        if isinstance(optimizer, RecordedStep):
            _average(config, optimizer.optimizer)
        optimizer.zero_grad()


def _create_states(config: Config, optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer states by a step with zero gradients, and the weight average (ema). Fake tensors cannot run
    LowBitAdam's compiled step, and Muon's step has collectives, so their states are created without a step."""
    if _is(optimizer, "Muon"):
        from titanlite.tools.plan import muon_step  # late import: most plans do without Muon

        muon_step.create_states(optimizer)
        return _average(config, optimizer)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if _is(optimizer, "LowBitAdam"):
        for weight in weights:
            signed = {"exp_avg": True, "exp_avg_sq": False}
            optimizer.state[weight] = {name: optimizer._new_buffer(weight, sign) for name, sign in signed.items()}
        return _average(config, optimizer)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad()


def _average(config: Config, optimizer: torch.optim.Optimizer) -> None:
    """Update the weight average (ema), which a recorded optimizer step leaves unchanged."""
    if config.ema.decay:
        from titanlite.techniques import ema  # late import: most plans do without an average

        ema.update(optimizer, config.ema)


def _is(optimizer: torch.optim.Optimizer, name: str) -> bool:
    return type(optimizer).__name__ == name  # compare names, since importing the class may take a second


def _record_low_bit_adam(trace: OpTrace, optimizer: torch.optim.Optimizer) -> None:
    """Record the compiled step of LowBitAdam: it reads weights, states and gradients, and writes weights and states."""
    for weight, state in optimizer.state.items():
        own = weight, state["exp_avg"], state["exp_avg_sq"]
        updated = sum(local.nbytes for tensor in own for local in _local(tensor))
        gradient = sum(local.nbytes for local in _local(weight.grad))
        trace.record(Work("titanlite.techniques.low_bit_adam", 0, "", updated + gradient, updated, (), ()))


def _local(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors of a tensor subclass on this rank."""
    if isinstance(tensor, DTensor):
        return _local(tensor._local_tensor)
    if isinstance(getattr(tensor, "_tensor", None), Tensor):  # torchao's float8 weight wraps a plain tensor
        return _local(tensor._tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        return [inner for name in tensor.__tensor_flatten__()[0] for inner in _local(getattr(tensor, name))]
    return [tensor]


def _persistent(
    trace: OpTrace, stage: Llama, optimizer: torch.optim.Optimizer, folded: FoldedStage
) -> tuple[Bytes, int, int, float]:
    """Set the kind of persistent allocations. Return DryRun's fields persistent, gradients, rotary and scale."""
    total, weights, of_run_layers, rotary = dict.fromkeys(KINDS, 0), 0, 0, 0
    parameters = dict(stage.named_parameters())
    tensors = [("parameters", name, tensor) for name, tensor in [*parameters.items(), *stage.named_buffers()]]
    for name, parameter in parameters.items():
        states = optimizer.state.get(parameter, {}).values()
        tensors += [("optimizer", name, state) for state in states if isinstance(state, Tensor)]
    found = [(kind, name, trace.allocation_of(local)) for kind, name, tensor in tensors for local in _local(tensor)]
    for kind, name, allocation in [*found, *(("temporary", "", allocation) for allocation in trace.live.values())]:
        if allocation is not None and not allocation.kind:
            allocation.kind = kind
            layer = re.match(r"layers\.(\d+)\.", name)
            size = allocation.size * (1 + folded.copies if layer and int(layer[1]) in folded.repeated else 1)
            total[kind] += size
            if kind == "parameters" and name in parameters:
                weights += size * parameters[name].requires_grad
                of_run_layers += allocation.size * parameters[name].requires_grad
            elif kind == "parameters":
                allocation.maker = BUFFER
            rotary += allocation.size if name == "rope" else 0
    return total, weights, rotary, weights / of_run_layers


def _mark_layers(trace: OpTrace, stage: Llama) -> None:
    """Register hooks that mark where forward and backward of each block, of its experts and of the head begin."""

    def before_backward(mark: str, layer: int, *args: Any) -> None:  # a forward hook's last argument is the output
        if args[-1].requires_grad:
            args[-1].register_hook(lambda grad: trace.mark(mark, layer))

    def attend_and_mark(attend: Callable[..., Any], layer: int, *args: Any) -> tuple[Tensor, Tensor]:
        """Run a block up to its experts, and mark where the experts begin."""
        begun, *number = trace.segments[-1].mark
        # AC recomputes a block in its backward or, with groups of blocks, when the group's backward begins.
        if again := begun.endswith(" B"):
            trace.mark("layer B", layer := number[0])
        output, normed = attend(*args)
        trace.mark("layer experts B" if again else "layer experts F", layer)
        before_backward("layer B", layer, normed)
        return output, normed

    if stage.norm is not None:
        stage.norm.register_forward_pre_hook(lambda *_: trace.mark("layer head", -1), prepend=True)
        stage.register_forward_hook(functools.partial(before_backward, "layer head B", -1))
    for name, block in stage.layers.items():
        layer, last = int(name), "layer B"
        if isinstance(block.feed_forward, RunsUncompiled):
            last, block.attend = "layer experts B", functools.partial(attend_and_mark, block.attend, layer)
        block.register_forward_pre_hook(lambda *_, layer=layer: trace.mark("layer F", layer), prepend=True)
        block.register_forward_hook(functools.partial(before_backward, last, layer))


def _batch(config: Config, n_sequences: int) -> Batch:
    """Return a rank's batch of zeros. Each document is as long as its sequence, since a plan reads no data."""
    n_tokens = config.training.seq_len // config.parallelism.context_parallel_degree
    tokens, targets, positions = (torch.zeros((n_sequences, n_tokens), dtype=torch.int64) for _ in range(3))
    return Batch(tokens, targets, positions[0] if not config.training.document_mask else positions, None)


def _run_accumulation_steps(config: Config, trace: OpTrace, model: Llama) -> None:
    """Run the first, a middle and the last accumulation step like TrainStep.forward_backward, which fake tensors cannot
    run: it reads the number of valid tokens, and fake tensors have no values."""
    runner, valid = SingleStageRunner(model), torch.ones((), dtype=torch.float64)
    numbers = dry_run_accumulation_steps(config.gradient_accumulation_steps)
    for accumulation_step in numbers:
        trace.mark(Pass.FORWARD, accumulation_step)
        fsdp.prepare_accumulation_step(model, config.parallelism, last=accumulation_step == max(numbers))
        runner.forward_backward(_batch(config, config.training.local_batch_size), valid)


def _run_microbatches(config: Config, trace: OpTrace, model: Llama, number: int, group: Any) -> None:
    """Run three microbatches through a pipeline stage, as torch's schedules do. If the schedule splits the backward,
    run a fourth microbatch with a split backward, except in the first stage, which never splits it."""
    parallelism, shape = config.parallelism, config.hidden_shape
    dtype = getattr(torch, config.training.mixed_precision_param)
    stage = pipeline_stage(model, number, parallelism, group=group, hidden_shape=shape, dtype=dtype, device=CPU)
    stage.has_backward = True  # torch's schedules set this attribute
    if hasattr(model, "set_manual_backward_finalization"):  # forward_one_chunk of torch 2.15 sets this
        model.set_manual_backward_finalization(True)
    first, last = number == 0, number == parallelism.n_stages - 1
    fsdp.prepare_accumulation_step(model, parallelism, last=True)
    valid = torch.ones((), dtype=torch.float64)

    def forward() -> tuple[Tensor, Tensor]:
        batch = _batch(config, parallelism.pipeline_parallel_microbatch_size)
        with trace.naming("message"):
            hidden = batch.tokens if first else torch.empty(shape, dtype=dtype).requires_grad_()
        output = stage.forward_maybe_with_nosync(hidden, positions=batch.positions, targets=batch.targets)
        return hidden, output / valid if last else output

    def backward_arguments(hidden: Tensor, output: Any) -> dict[str, Any]:
        with trace.naming("message"):
            grads = None if last else (torch.empty(shape, dtype=dtype),)
        return {"stage_output": output, "output_grads": grads, "input_values": [hidden]}

    in_flight: list[tuple[Tensor, Tensor]] = []
    for microbatch in range(3):
        trace.mark(Pass.FORWARD, microbatch)
        in_flight.append(forward())
    for microbatch in range(3):
        trace.mark(Pass.BACKWARD, microbatch)
        hidden, output = in_flight.pop(0)
        arguments = backward_arguments(hidden, output if last else (output,))
        del hidden, output
        stage.backward_maybe_with_nosync("full", arguments)
        del arguments
    if parallelism.pipeline_parallel_schedule in SPLIT_BACKWARD and not first:
        trace.mark(Pass.FORWARD, SPLIT)
        hidden, output = forward()
        trace.mark(Pass.INPUT_GRADIENT, SPLIT)
        arguments = backward_arguments(hidden, (output,))
        input_grads, groups = stage.backward_maybe_with_nosync("input", arguments)
        del input_grads, hidden  # a real schedule has sent and freed the input gradients by now
        trace.mark(Pass.WEIGHT_GRADIENT, SPLIT)
        stage.backward_maybe_with_nosync("weight", {"stage_output": (output,), "param_groups": groups})
        del arguments, output, groups
    trace.mark("reduce")
    stage.perform_reduce_grad(1)
