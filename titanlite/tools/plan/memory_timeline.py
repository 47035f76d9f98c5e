"""A rank's memory over a step, from the allocations in the dry runs of its stages.

Kinds of memory: parameters (a rank's shards, and the rotary table), gathered (weights that FSDP has all-gathered, and
its buffers), gradients, optimizer (states), activations (saved in a forward for its backward), logits, communication
(messages, and buffers of collectives), temporary (allocated and freed in the same forward or backward)."""

from collections.abc import Iterable
from typing import NamedTuple

from titanlite.config import Config
from titanlite.metrics.devices import find_device
from titanlite.tools.plan.op_trace import Memory, Segment
from titanlite.tools.plan.segments import KINDS

Bytes = dict[str, int]  # bytes by kind of memory


class Point(NamedTuple):
    """A moment of the step: a label of what runs then, and the bytes allocated then."""

    label: str
    bytes: Bytes

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


class MemoryTimeline:
    """Computes memory over time from the allocations of segments, beginning with `persistent` bytes."""

    def __init__(self, config: Config, persistent: Bytes):
        self.current_bytes = {kind: persistent.get(kind, 0) for kind in KINDS}  # bytes allocated now, by kind
        self.rounding = 1 if find_device(config.plan.device).kind == "cpu" else 512  # CUDA's allocation unit in bytes
        self.points: list[Point] = [Point("between steps", dict(self.current_bytes))]  # peak and end of each segment
        self._changes: dict[int, tuple[Bytes, Bytes]] = {}

    def replay(self, segments: Iterable[Segment], label: str, *, without: str = "") -> None:
        """Append the points of some segments. `without`: an Allocation.maker whose allocations are left out."""
        for segment in segments:
            net, at_peak = self._change(segment, without)
            name, *number = segment.mark
            where = label
            if name.startswith("layer"):
                where += ", head and loss" if name.startswith("layer head") else f", layer {number[0]}"
            self.points.append(Point(where, {kind: self.current_bytes[kind] + at_peak[kind] for kind in KINDS}))
            self.current_bytes = {kind: self.current_bytes[kind] + net[kind] for kind in KINDS}
            self.points.append(Point(where, dict(self.current_bytes)))

    def net(self, segments: Iterable[Segment], *, without: str = "") -> Bytes:
        """Return the bytes by kind that some segments allocate, minus the bytes that they free."""
        nets = [self._change(segment, without)[0] for segment in segments]
        return {kind: sum(net[kind] for net in nets) for kind in KINDS}

    def _change(self, segment: Segment, without: str) -> tuple[Bytes, Bytes]:
        """Return, by kind, the bytes that a segment adds in total, and the bytes that it has added at its peak."""
        if id(segment.events) not in self._changes:  # copied layers (FoldedStage) share one list of events
            now, total, most = dict.fromkeys(KINDS, 0), 0, 0
            at_peak = dict(now)
            for event in segment.events:
                if isinstance(event, Memory) and event.allocation.maker != without:
                    size = -(-abs(event.change) // self.rounding) * self.rounding
                    change = size if event.change > 0 else -size
                    now[event.allocation.kind or "temporary"] += change
                    total += change
                    if total > most:
                        most, at_peak = total, dict(now)
            self._changes[id(segment.events)] = now, at_peak
        return self._changes[id(segment.events)]
