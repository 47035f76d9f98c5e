"""One rank's training step on fake tensors: the program that trains, with its layers made few and its microsteps made
three, since the others are alike; and the whole step put together from what those did.

A step is cut at marks. ("F", m) begins the forward of microbatch m and ("B", m) its backward, ("I", m) and ("W", m) its
two halves, for the gradients of inputs and of weights; within them ("layer F", n) and ("layer B", n) begin block n's,
and ("layer head", -1) what follows the last block, with the head's own backward where there is no pipeline.
("reduce",) is where a pipeline's gradients are reduced and ("update",) is the norm, clipping and the optimizer. What
lies between two marks is a segment.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite import build
from titanlite.config import Config
from titanlite.config.stage_split import SPLIT_BACKWARD
from titanlite.data import Batch
from titanlite.model import Llama
from titanlite.optimizer import clip_factor, gradient_norm, scale_gradients
from titanlite.parallel import fsdp, mesh
from titanlite.parallel.pipeline import pipeline_stage
from titanlite.plan.fusion import fuse
from titanlite.plan.op_trace import Event, Mark, Memory, OpTrace, Piece, Work, fake_world, recording
from titanlite.train_step import SingleStageRunner

CPU = torch.device("cpu")
SPLIT = 3
"""Number of the microbatch whose backward is in halves."""
KINDS = ("parameters", "gathered", "gradients", "optimizer", "activations", "logits", "communication", "temporary")


class Segment(NamedTuple):
    """What happens between two marks."""

    mark: tuple[Any, ...]
    events: list[Event]


class DryRun(NamedTuple):
    """Of one stage.

    Attributes:
        held: bytes by kind that exist from step to step.
        passages: the segments of each part of the step, with all layers: "F" and "B" of the first, of a middle and of
            the last microbatch, by ("F", 0 to 2); ("I", 3) and ("W", 3), of which the latter has only the layers that
            were run; ("reduce",); ("update",).
        axes: name of each process group's axis, by the group's name, and its ranks' numbers.
        gradients: bytes of a rank's gradients, reduced.
        rotary: bytes of the rotary table, which all stages of a rank share.
        scale: how many times more weights there are than in the layers that were run; what is done to every weight
            after the last backward (the passages "reduce" and "update") takes so many times longer.
    """

    held: dict[str, int]
    passages: dict[tuple[Any, ...], list[Segment]]
    axes: dict[str, tuple[str, list[int]]]
    gradients: int
    rotary: int
    scale: float


def layers_of(names: Sequence[str]) -> list[str]:
    """Those of some modules' names that are layers'."""
    return [name for name in names if name.startswith("layers.")]


def layers_of_pattern(config: Config) -> int:
    """After how many layers the pattern of what is computed again repeats."""
    option = config.activation_checkpoint.selective_ac_option
    return option if config.activation_checkpoint.mode == "selective" and option != "op" else 1


def period_of(config: Config) -> int:
    """The same where FSDP gathers ahead: at least as many layers as it does."""
    pattern, parallelism = layers_of_pattern(config), config.parallelism
    ahead = max(parallelism.fsdp_forward_prefetch, parallelism.fsdp_backward_prefetch)
    return max(math.ceil(ahead / pattern), 1) * pattern


def dry_run_accumulation_steps(n: int) -> dict[int, int]:
    """Of n microsteps without a pipeline those that are run, the first (0), one of the middle (1) and the last (2), and
    for how many each stands."""
    return {1: {0: 1}, 2: {0: 1, 2: 1}}.get(n, {0: 1, 1: n - 2, 2: 1})


class Shortened(NamedTuple):
    """A stage with fewer layers that are alike.

    Attributes:
        names: of the modules that remain.
        repeated: the layers of which copies stand for those that are gone.
        copies: how many more of them there are.
        numbers: of all the stage's layers, those that are gone among them.
    """

    names: list[str]
    repeated: list[int]
    copies: int
    numbers: list[int]


def shorten(names: Sequence[str], period: int) -> Shortened:
    """Leave out layers. What a layer does for its neighbours (gathering the next one's weights, freeing what the last
    one gathered) is the same for all that are not among the first two or the last two.

    Args:
        names: of a stage's modules.
        period: layers after which the pattern repeats.
    """
    layers = layers_of(names)
    all_numbers = [int(name.split(".")[1]) for name in layers]
    kept = 5 * period + len(layers) % period
    if len(layers) <= kept:
        return Shortened(list(names), [], 0, all_numbers)
    names = [name for name in names if name not in layers[kept:]]
    return Shortened(names, all_numbers[2 * period : 3 * period], (len(layers) - kept) // period, all_numbers)


def dry_run(
    config: Config,
    names: Sequence[str],
    number: int,
    *,
    pipeline_rank: int,
    n_stages: int,
    fused: Collection[str] = (),
    shortened: bool = True,
) -> DryRun:
    """Run one step of a stage.

    Args:
        config: resolved.
        names: of the stage's modules.
        number: of the stage.
        pipeline_rank: that has it.
        fused: what of "model" and "loss" to treat as compiled (fusion.py).
        shortened: leave out layers that others stand for; false: run them all, to see that this makes no difference.
    """
    parallelism = config.parallelism
    short = shorten(names, period_of(config) if shortened else len(names))
    world = config.parallelism.world_size
    ranks_of_a_stage = world // parallelism.pipeline_parallel_degree
    mesh.forget_layouts()  # of another rank's world
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_world(pipeline_rank * ranks_of_a_stage, world))
        layout = mesh.build_layout(config.parallelism, CPU)
        axes = axes_of_groups(layout)
        stage = build.build_stage(config, layout, short.names, CPU)
        if config.optimizer.state_dtype == "int8":
            _make_tables()
        tape = stack.enter_context(recording())  # from here on: what is built on the meta device reads numbers
        tape.mark("build")
        stage.materialize(CPU)
        optimizer = build.build_optimizer(config, stage, [stage])
        _make_states(optimizer)
        held = _held(tape, stage, optimizer)
        _mark_layers(tape, stage)
        if parallelism.pipeline_parallel_degree == 1:
            drive: Callable[..., None] = _drive_whole
        else:
            drive = functools.partial(
                _drive_stage, number=number, n_stages=n_stages, group=layout.mesh["pp"].get_group()
            )
        drive(config, tape, stage)
        tape.mark("update")
        _name_gradients(tape, stage)
        with torch.no_grad():
            parameters = list(stage.parameters())
            norm = gradient_norm(parameters, CPU)
            scale_gradients(parameters, clip_factor(norm, config.training.max_norm))
            _take_step(tape, optimizer)
            optimizer.zero_grad()
        tape.mark("end")
    segments = list(_segments(tape.events))
    vocabulary = config.model.vocab_size
    _name_kinds(segments, logits=(vocabulary, vocabulary // parallelism.tensor_parallel_degree))
    if fused:
        kinds = {"model": ("layer F", "layer B"), "loss": ("layer head",)}
        marks = [mark for component in fused for mark in kinds[component]]
        compiled = [segment for segment in segments if segment.mark[0] in marks]
        for segment, events in zip(compiled, fuse([segment.events for segment in compiled]), strict=True):
            segment.events[:] = events
    weights = sum(size for kind, name, size in held if kind == "parameters" and name != "rope")
    whole = _bytes_of_layers(held, short)
    rotary = sum(size for _, name, size in held if name == "rope")
    all_weights = whole["parameters"] - rotary
    return DryRun(whole, _passages(segments, short), axes, all_weights, rotary, all_weights / weights)


def axes_of_groups(layout: mesh.Layout) -> dict[str, tuple[str, list[int]]]:
    """Return the axis and the global ranks of each process group of a layout, by the group's name."""
    # An axis with all ranks has the group of all, so it overwrites "all".
    groups = {"all": dist.group.WORLD, **{axis: layout.mesh[axis].get_group() for axis in mesh.AXES}}
    groups |= {"ring": layout.ring_group, "ulysses": layout.ulysses_group}
    return {
        group.group_name: (axis, dist.get_process_group_ranks(group))
        for axis, group in groups.items()
        if group is not None
    }


def _make_states(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer make its states, by a step with gradients of zero. The one of low-bit moments compiles what it
    does, which cannot be on fake tensors, so it is asked for its moments."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if _is_low_bit(optimizer):
        for weight in weights:
            moments = {"exp_avg": True, "exp_avg_sq": False}
            optimizer.state[weight] = {name: optimizer._new_buffer(weight, sign) for name, sign in moments.items()}
        return
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad()


def _make_tables() -> None:
    """torchao makes 8-bit moments' tables of values once, which cannot be from fake numbers."""
    from torchao.optim.subclass_8bit import OptimState8bit

    for signed in (True, False):
        OptimState8bit.zeros((256,), signed, 256)


def _is_low_bit(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__name__ == "LowBitAdam"  # whose module takes a second to import


def _take_step(tape: OpTrace, optimizer: torch.optim.Optimizer) -> None:
    """One that is compiled reads and writes a weight and its moments, and reads its gradient, once."""
    if not _is_low_bit(optimizer):
        optimizer.step()
        return
    for weight, state in optimizer.state.items():
        parts = [weight, *state.values()]
        kept = sum(part.numel() * part.element_size() for tensor in parts for part in _local(tensor))
        gradient = sum(part.numel() * part.element_size() for part in _local(weight.grad))
        tape.events.append(Work("titanlite.low_bit_adam", 0, "", kept + gradient, kept, (), ()))


def _local(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that one consists of."""
    if isinstance(tensor, DTensor):
        return _local(tensor._local_tensor)
    if isinstance(getattr(tensor, "_tensor", None), Tensor):  # torchao's float8 weight, which flattens by its scale
        return _local(tensor._tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        return [part for name in tensor.__tensor_flatten__()[0] for part in _local(getattr(tensor, name))]
    return [tensor]


def _held(tape: OpTrace, stage: Llama, optimizer: torch.optim.Optimizer) -> list[tuple[str, str, int]]:
    """(kind, parameter's name, bytes) of all that is there from step to step; the pieces learn their kind."""
    held = []

    def hold(kind: str, name: str, tensor: Tensor) -> None:
        for part in _local(tensor):
            piece = tape.piece_of(part)
            if piece is not None and not piece.kind:
                piece.kind = kind
                held.append((kind, name, piece.size))

    for name, parameter in stage.named_parameters():
        hold("parameters", name, parameter)
    for name, parameter in stage.named_parameters():
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor):
                hold("optimizer", name, value)
    for name, buffer in stage.named_buffers():
        hold("parameters", name, buffer)
    for piece in tape.live.values():
        if not piece.kind:
            piece.kind = "temporary"
            held.append(("temporary", "", piece.size))
    return held


def _name_gradients(tape: OpTrace, stage: Llama) -> None:
    for parameter in stage.parameters():
        for part in _local(parameter.grad):
            tape.piece_of(part).kind = "gradients"


def _bytes_of_layers(held: list[tuple[str, str, int]], short: Shortened) -> dict[str, int]:
    """Bytes by kind, of all layers."""
    sums = dict.fromkeys(KINDS, 0)
    for kind, name, size in held:
        layer = re.match(r"layers\.(\d+)\.", name)
        times = 1 + short.copies if layer and int(layer[1]) in short.repeated else 1
        sums[kind] += size * times
    return sums


def _mark_layers(tape: OpTrace, stage: Llama) -> None:
    def before(layer: int, *_: object) -> None:
        tape.mark("layer F", layer)

    def after(layer: int, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: tape.mark("layer B", layer))

    if stage.norm is not None:
        stage.norm.register_forward_pre_hook(lambda *_: tape.mark("layer head", -1), prepend=True)
    for name, block in stage.layers.items():
        block.register_forward_pre_hook(functools.partial(before, int(name)), prepend=True)
        block.register_forward_hook(functools.partial(after, int(name)))


def _microbatch(config: Config, n_sequences: int) -> Batch:
    """A rank's tokens. Documents are taken as long as their sequences: where they end is in the data."""
    n_tokens = config.training.seq_len // config.parallelism.context_parallel_degree
    shape = (n_sequences, n_tokens)
    tokens, targets, positions = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    return Batch(tokens, targets, positions[0] if not config.training.document_mask else positions, None)


def _drive_whole(config: Config, tape: OpTrace, model: Llama) -> None:
    """The microsteps of step.Step: the first, one of the middle, the last."""
    training = config.training
    runner, valid = SingleStageRunner(model), torch.ones((), dtype=torch.float64)
    numbers = dry_run_accumulation_steps(config.gradient_accumulation_steps)
    for microstep in numbers:
        tape.mark("F", microstep)
        fsdp.prepare_accumulation_step(model, config.parallelism, last=microstep == max(numbers))
        runner.forward_backward(_microbatch(config, training.local_batch_size), valid)


def _drive_stage(config: Config, tape: OpTrace, stage: Llama, *, number: int, n_stages: int, group: Any) -> None:
    """Three microbatches through a pipeline's stage, as torch's schedules take them; and a fourth whose backward is in
    halves, where a schedule has that. The first stage's never is."""
    parallelism, training = config.parallelism, config.training
    shape = config.hidden_shape
    dtype = getattr(torch, training.mixed_precision_param)
    part = pipeline_stage(
        stage,
        number,
        parallelism,
        group=group,
        hidden_shape=shape,
        dtype=dtype,
        device=CPU,
    )
    part.has_backward = True  # as a schedule says
    if hasattr(stage, "set_manual_backward_finalization"):  # from 2.15 on, where the stage's forward_one_chunk does it
        stage.set_manual_backward_finalization(True)
    first, last = number == 0, number == n_stages - 1
    fsdp.prepare_accumulation_step(stage, parallelism, last=True)
    valid = torch.ones((), dtype=torch.float64)
    kept: list[tuple[Tensor, Tensor]] = []

    def forward() -> tuple[Tensor, Tensor]:
        batch = _microbatch(config, shape[0])
        with tape.naming("message"):
            given = batch.tokens if first else torch.empty(shape, dtype=dtype).requires_grad_()
        out = part.forward_maybe_with_nosync(given, positions=batch.positions, targets=batch.targets)
        return given, out / valid if last else out

    def of_backward(given: Tensor, output: Any) -> dict[str, Any]:
        with tape.naming("message"):
            grads = None if last else (torch.empty(shape, dtype=dtype),)
        return {"stage_output": output, "output_grads": grads, "input_values": [given]}

    for microbatch in range(3):
        tape.mark("F", microbatch)
        kept.append(forward())
    for microbatch in range(3):
        tape.mark("B", microbatch)
        given, out = kept.pop(0)
        arguments = of_backward(given, out if last else (out,))
        del given, out
        part.backward_maybe_with_nosync("full", arguments)
        del arguments
    if parallelism.pipeline_parallel_schedule in SPLIT_BACKWARD and not first:
        tape.mark("F", SPLIT)
        given, out = forward()
        tape.mark("I", SPLIT)
        arguments = of_backward(given, (out,))
        grads_of_inputs, groups = part.backward_maybe_with_nosync("input", arguments)
        del grads_of_inputs, given  # they are sent
        tape.mark("W", SPLIT)
        part.backward_maybe_with_nosync("weight", {"stage_output": (out,), "param_groups": groups})
        del arguments, out, groups
    tape.mark("reduce")
    part.perform_reduce_grad(1)


def _segments(events: Sequence[Event]) -> Iterator[Segment]:
    """Cut at the marks."""
    current: Segment | None = None
    for event in events:
        if isinstance(event, Mark):
            if current is not None:
                yield current
            current = Segment(event.what, [])
        elif current is not None:
            current.events.append(event)
    if current is not None:
        yield current


def _name_kinds(segments: Sequence[Segment], *, logits: Collection[int]) -> None:
    """Give each piece that has no kind yet its kind, by what made it and how long it lives.

    Args:
        logits: lengths of their last dim.
    """
    phase, microbatch, born, ended = "", "", {}, {}
    for segment in segments:
        what, *number = segment.mark
        if what in ("F", "B", "I", "W"):  # the two halves of a backward are one
            phase, microbatch = ("F" if what == "F" else "B") + str(number[0]), str(number[0])
        elif what == "layer B":
            phase = "B" + microbatch
        elif not what.startswith("layer"):
            phase = what
        for event in segment.events:
            if isinstance(event, Memory):
                if event.change > 0 and event.piece not in born:
                    born[event.piece] = phase
                elif event.piece.size == 0 or event.change < 0:
                    ended[event.piece] = phase
    for piece, begun in born.items():
        if not piece.kind:
            piece.kind = _kind(piece, begun, ended.get(piece, ""), logits)


def _kind(piece: Piece, begun: str, ended: str, logits: Collection[int]) -> str:
    if piece.maker.startswith("fsdp.") or "allgather" in piece.maker:
        return "gathered"
    if piece.maker == "message" or "c10d" in piece.maker:
        return "communication"
    in_forward, in_backward, microbatch = begun.startswith("F"), begun.startswith("B"), begun[1:]
    if (in_forward or in_backward) and ended not in (f"F{microbatch}", f"B{microbatch}"):
        return "gradients"  # the next microbatch's are added
    if in_forward and piece.shape and piece.shape[-1] in logits:
        return "logits"
    return "activations" if in_forward and ended != begun else "temporary"


def _passages(segments: Sequence[Segment], short: Shortened) -> dict[tuple[Any, ...], list[Segment]]:
    passages: dict[tuple[Any, ...], list[Segment]] = {}
    current: list[Segment] = []
    microbatch, part = 0, ""
    for segment in segments:
        what = segment.mark[0]
        if not what.startswith("layer"):
            current, part = passages.setdefault(segment.mark, []), what
            microbatch = segment.mark[1] if len(segment.mark) > 1 else 0
        elif what == "layer B" and part == "F":  # without a pipeline a backward begins with its first layer's
            current, part = passages.setdefault(("B", microbatch), []), "B"
        current.append(segment)
    return {mark: _with_all_layers(passage, short) for mark, passage in passages.items()}


def _with_all_layers(passage: list[Segment], short: Shortened) -> list[Segment]:
    """Insert the copies behind the last of the layers that they are copies of, and number all as they would be."""
    whole, unit = [], []
    for segment in passage:
        whole.append(segment)
        if segment.mark[0].startswith("layer") and segment.mark[1] in short.repeated:
            unit.append(segment)
            if len(unit) == len(short.repeated):
                whole += unit * short.copies
                unit = []
    forward, backward = iter(short.numbers), reversed(short.numbers)
    following = {"layer F": lambda: next(forward), "layer B": lambda: next(backward)}
    return [
        Segment((segment.mark[0], following[segment.mark[0]]()), segment.events)
        if segment.mark[0] in following
        else segment
        for segment in whole
    ]
