"""A rank's memory over a step, from what its stages' rehearsals allocated.

Kinds: parameters (a rank's shards, and the rotary table), gathered (weights that FSDP has gathered, and the buffers it
gathers through), gradients, optimizer (states), activations (kept from a forward for its backward), logits,
communication (messages, and collectives' buffers), temporary (all that does not outlive the pass that made it).
"""

from collections.abc import Iterable
from typing import NamedTuple

from titanlite.plan.dry_run import KINDS, Segment
from titanlite.plan.op_trace import Memory

Bytes = dict[str, int]
"""By kind."""


class Point(NamedTuple):
    """A moment of the step.

    Attributes:
        label: where the program is.
        bytes: by kind.
    """

    label: str
    bytes: Bytes

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


class MemoryTimeline:
    """What is there, moment by moment.

    Args:
        held: from step to step.
        rounding: bytes that the allocator rounds each piece up to a multiple of.

    Attributes:
        points: each segment's peak and end.
    """

    def __init__(self, held: Bytes, rounding: int = 1):
        self.level, self.rounding = {kind: held.get(kind, 0) for kind in KINDS}, rounding
        self.points: list[Point] = [Point("between steps", dict(self.level))]
        self._summaries: dict[int, tuple[Bytes, Bytes]] = {}

    def play(self, segments: Iterable[Segment], label: str, *, without: str = "") -> None:
        """Go through some segments.

        Args:
            without: maker of pieces that are counted elsewhere.
        """
        for segment in segments:
            net, at_peak = self._summary(segment, without)
            what, *number = segment.mark
            where = label
            if what.startswith("layer"):
                where += ", head and loss" if what == "layer head" else f", layer {number[0]}"
            self.points.append(Point(where, {kind: self.level[kind] + at_peak[kind] for kind in KINDS}))
            self.level = {kind: self.level[kind] + net[kind] for kind in KINDS}
            self.points.append(Point(where, dict(self.level)))

    def net(self, segments: Iterable[Segment], *, without: str = "") -> Bytes:
        """Bytes by kind that some segments add in all."""
        nets = [self._summary(segment, without)[0] for segment in segments]
        return {kind: sum(net[kind] for net in nets) for kind in KINDS}

    def settle(self, level: Bytes) -> None:
        """What is there now is known otherwise."""
        self.level = {kind: level.get(kind, 0) for kind in KINDS}

    @property
    def peak(self) -> Point:
        return max(self.points, key=lambda point: point.total)

    def _summary(self, segment: Segment, without: str) -> tuple[Bytes, Bytes]:
        """Bytes by kind that a segment adds in all, and at its peak."""
        if id(segment.events) not in self._summaries:  # a copy of a layer has the layer's events
            now, total, most = dict.fromkeys(KINDS, 0), 0, 0
            at_peak = dict(now)
            for event in segment.events:
                if isinstance(event, Memory) and event.piece.maker != without:
                    change = event.change
                    if self.rounding > 1:
                        size = -(-abs(change) // self.rounding) * self.rounding
                        change = size if change > 0 else -size
                    now[event.piece.kind or "temporary"] += change
                    total += change
                    if total > most:
                        most, at_peak = total, dict(now)
            self._summaries[id(segment.events)] = now, at_peak
        return self._summaries[id(segment.events)]
