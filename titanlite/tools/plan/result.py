"""The result of a plan: memory of each pipeline rank, time and communication of a step."""

import dataclasses
import functools
import math

from titanlite.config import Config
from titanlite.metrics.devices import Device
from titanlite.tools.plan.cost_model import Cost
from titanlite.tools.plan.memory_timeline import Bytes, Point
from titanlite.tools.plan.schedule import Span, pipeline_bubble

Spread = dict[str, tuple[float, float]]
"""By group of rates in cost_model.GROUPS: the seconds by which a step is shorter (below 0) and longer (above 0) if the
rates of that group are at the ends of their ranges."""


def range_of(seconds: float, spread: Spread) -> tuple[float, float]:
    """Return the range of a step's seconds. The groups of rates have independent errors, which add in quadrature."""
    shorter, longer = (math.hypot(*(pair[end] for pair in spread.values())) for end in (0, 1))
    return seconds - shorter, seconds + longer


def spread_of_difference(one: Spread, other: Spread) -> tuple[float, str]:
    """Return by how many seconds the planned difference between two steps on the same devices may be wrong, and the
    group of rates that contributes most to this error. Errors that both steps share cancel."""
    differences = {group: max(abs(x - y) for x, y in zip(one[group], other[group], strict=True)) for group in one}
    return math.hypot(*differences.values()), max(differences, key=differences.get, default="")


@dataclasses.dataclass(frozen=True)
class RankPlan:
    """The memory of a rank. All ranks with the same pipeline rank (`rank`) need the same memory."""

    rank: int
    points: list[Point]  # bytes on the device at each moment of a step
    offloaded: Bytes  # bytes by kind that CPU offload keeps in host memory
    overhead: dict[str, int]  # bytes of memory outside tensors, by purpose: CUDA context, NCCL buffers, fragmentation

    @functools.cached_property
    def peak(self) -> Point:
        return max(self.points, key=lambda point: point.total)

    @property
    def total(self) -> int:
        return self.peak.total + sum(self.overhead.values())


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of a config."""

    config: Config  # resolved for `world_size` ranks of `device`
    device: Device
    world_size: int
    ranks: list[RankPlan]
    spans: list[list[Span]]  # each pipeline rank's actions in an accumulation step; empty without a pipeline
    cost: Cost  # cost of the busiest rank's step; `elapsed` does not include waiting for other ranks
    step_seconds: float  # expected seconds of the full step
    spread: Spread  # seconds by which step_seconds changes if a group of rates (GROUPS) is at an end of its range
    update_seconds: float  # seconds from the last backward to the end of the step: gradient norm, clipping, optimizer
    flops_per_token: int  # FLOPs to train on one token, as MFU counts them
    n_parameters: int
    axes: dict[str, list[int]]  # ranks of the first rank's process group along each axis

    def axis_size(self, axis: str) -> tuple[int, int]:
        """Return the number of ranks in a process group of an axis, and the number of nodes that the group spans."""
        ranks = self.axes.get(axis, [0])
        return len(ranks), len({rank // devices_per_node(self.config, self.device) for rank in ranks})

    @functools.cached_property
    def worst(self) -> RankPlan:
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def step_range(self) -> tuple[float, float]:
        return range_of(self.step_seconds, self.spread)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and device."""
        return self.config.tokens_per_step / self.step_seconds / self.world_size

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, from 0 to 1."""
        return self.tokens_per_second * self.flops_per_token / self.device.bf16

    @property
    def pipeline_bubble(self) -> float:
        """The share of the pipeline's time in which its ranks are idle; 0 without a pipeline."""
        return pipeline_bubble(self.spans) if self.spans else 0.0


def devices_per_node(config: Config, device: Device) -> int:
    """Return plan.devices_per_node or, if it is -1, the number in the device's data."""
    return device.devices_per_node if config.plan.devices_per_node == -1 else config.plan.devices_per_node
