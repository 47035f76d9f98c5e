"""Segments of a training step's op trace: the kind of each allocation, the phases of the step, and folded layers.

Marks split the trace into segments. The mark (Pass, m) begins a pass of microbatch m. Within a pass, ("layer F", n) and
("layer B", n) begin block n; ("layer experts F", n) and ("layer experts B", n) begin the part of a block with experts,
which torch.compile does not compile; ("layer head", -1) and ("layer head B", -1) begin the operators after the last
block; without a pipeline these count as forward. ("reduce",) begins the reduction of a pipeline's gradients, and
("update",) begins gradient norm, clipping and optimizer step."""

import enum
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from titanlite.tools.plan.op_trace import Allocation, Memory, Segment

FORWARD_MARKS, BACKWARD_MARKS = ("layer F", "layer experts F"), ("layer B", "layer experts B")
KINDS = ("parameters", "gathered", "gradients", "optimizer", "activations", "logits", "communication", "temporary")
"""Kinds of memory, which memory_timeline.py describes."""


class Pass(str, enum.Enum):
    """A pass of a microbatch through a stage, with the letter that torch's schedules use."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"  # the first half of a split backward (dgrad)
    WEIGHT_GRADIENT = "W"  # the second half of a split backward (wgrad)


Phases = dict[tuple[Any, ...], list[Segment]]  # segments of each phase and its layers; key: the first segment's mark


def layers_of(names: Sequence[str]) -> list[str]:
    return [name for name in names if name.startswith("layers.")]


class FoldedStage(NamedTuple):
    """A stage from which repeated layers were removed."""

    names: list[str]  # names of the modules that were not removed
    repeated: list[int]  # numbers of the remaining layers whose copies stand for the removed layers
    copies: int  # number of copies of each repeated layer
    numbers: list[int]  # numbers of all layers of the full stage


def fold_layers(names: Sequence[str], period: int, n_first: int = 0) -> FoldedStage:
    """Remove repeated layers of a stage whose pattern repeats after `period` layers. All layers except the first two
    and the last two have equal events: FSDP all-gathers the next layer's weights and frees the previous layer's. The
    first `n_first` layers of the model differ from the others; only the kind with more layers is folded."""
    layers = layers_of(names)
    numbers = [int(name.split(".")[1]) for name in layers]
    first = sum(number < n_first for number in numbers)
    begin, end = (0, first) if first > len(layers) - first else (first, len(layers))
    remaining = 5 * period + (end - begin) % period
    if end - begin <= remaining:
        return FoldedStage(list(names), [], 0, numbers)
    names = [name for name in names if name not in layers[begin + remaining : end]]
    repeated = numbers[begin + 2 * period : begin + 3 * period]
    return FoldedStage(names, repeated, (end - begin - remaining) // period, numbers)


def name_kinds(segments: Sequence[Segment], *, logits: Collection[int]) -> None:
    """Set missing kinds of allocations, by their maker and phases. `logits`: possible last dimensions of logits."""
    phase, microbatch, born, freed = "", "", {}, {}
    for segment in segments:
        name, *number = segment.mark
        if isinstance(name, Pass):  # both halves of a split backward are one phase
            phase, microbatch = ("F" if name == Pass.FORWARD else "B") + str(number[0]), str(number[0])
        elif name in BACKWARD_MARKS:
            phase = "B" + microbatch
        elif not name.startswith("layer"):
            phase = name
        for event in segment.events:
            if isinstance(event, Memory):
                if event.change > 0 and event.allocation not in born:
                    born[event.allocation] = phase
                elif event.allocation.size == 0 or event.change < 0:
                    freed[event.allocation] = phase
    for allocation, begin in born.items():
        if not allocation.kind:
            allocation.kind = _kind(allocation, begin, freed.get(allocation, ""), logits)


def _kind(allocation: Allocation, begin: str, end: str, logits: Collection[int]) -> str:
    """Return the kind of an allocation that is allocated in phase `begin` and freed in phase `end`."""
    maker, shape = allocation.maker, allocation.shape
    if maker.startswith("fsdp.") or "allgather" in maker:
        return "gathered"
    if maker == "message" or "c10d" in maker:
        return "communication"
    in_forward, in_backward, microbatch = begin.startswith("F"), begin.startswith("B"), begin[1:]
    if (in_forward or in_backward) and end not in (f"F{microbatch}", f"B{microbatch}"):
        return "gradients"  # gradients of the next microbatch are added to the same allocation
    if in_forward and shape and shape[-1] in logits:
        return "logits"
    return "activations" if in_forward and end != begin else "temporary"


def phases_of(segments: Sequence[Segment], folded: FoldedStage) -> Phases:
    """Group the segments by phase, and insert the folded layers."""
    phases: Phases = {}
    current: list[Segment] = []
    microbatch, kind = 0, ""
    for segment in segments:
        name = segment.mark[0]
        if not name.startswith("layer"):
            current, kind = phases.setdefault(segment.mark, []), name
            microbatch = segment.mark[1] if len(segment.mark) > 1 else 0
        # Without a pipeline, a microbatch's backward has no mark: it begins with the first backward of a layer.
        elif name in BACKWARD_MARKS and kind == Pass.FORWARD:
            current, kind = phases.setdefault((Pass.BACKWARD, microbatch), []), Pass.BACKWARD
        current.append(segment)
    return {mark: _unfold(phase, folded) for mark, phase in phases.items()}


def _unfold(phase: list[Segment], folded: FoldedStage) -> list[Segment]:
    """Insert the copies of the repeated layers after the originals, and number all layers as in the full stage."""
    layers: list[list[Segment]] = []
    repeated: list[list[Segment]] = []
    for number, group in groupby(phase, lambda segment: segment.mark[1] if is_layer(segment) else -1):
        layers.append(list(group))
        if number in folded.repeated:
            repeated.append(layers[-1])
            if len(repeated) == len(folded.repeated):
                layers += repeated * folded.copies
                repeated = []
    forward, backward = iter(folded.numbers), reversed(folded.numbers)
    segments = []
    for layer in layers:
        if is_layer(layer[0]):
            number = next(backward if layer[0].mark[0] in BACKWARD_MARKS else forward)
            layer = [Segment((segment.mark[0], number), segment.events) for segment in layer]
        segments += layer
    return segments


def is_layer(segment: Segment) -> bool:
    return segment.mark[0] in (*FORWARD_MARKS, *BACKWARD_MARKS)
