"""How long a segment of an op trace takes on a device: arithmetic, memory traffic and communication.

Each runs at the data sheet's peak rate times an efficiency. All efficiencies are in EFFICIENCY. None is fitted to a run
of a trainer.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping

from titanlite.devices import Device
from titanlite.plan.op_trace import Communication, Event, HostWait, Work

ESTIMATE = "an estimate; not measured"
EFFICIENCY: dict[str, tuple[float, str]] = {
    "matmul, bf16": (0.75, "large bf16 matmuls reach 0.80 on an H200 (790 of 989 TFLOP/s); the model's are smaller"),
    "grouped matmul, bf16": (0.60, ESTIMATE),
    "matmul, fp8": (0.60, ESTIMATE),
    "matmul, fp32": (0.85, ESTIMATE),
    "attention": (0.36, "FlashAttention-2 reaches about 35 % of an H100 (arXiv:2407.08608, abstract)"),
    "attention, backward": (0.30, ESTIMATE),
    "attention, Ampere": (0.65, "FlashAttention-2 reaches 50 to 73 % of an A100 (arXiv:2307.08691)"),
    "memory": (0.85, ESTIMATE),
    "interconnect": (0.80, ESTIMATE),
    "network": (0.85, ESTIMATE),
}
"""Share of the data sheet's rate that programs reach, and its source."""

KERNEL_SECONDS = 4e-6
"""From the start of one kernel to the start of the next, if both are empty and launched ahead of time: an estimate."""
COLLECTIVE_SECONDS = 2e-5
"""Latency of a collective of one byte within a node; each further node of a ring adds a quarter of it: an estimate."""
HOST_WAIT_SECONDS = 1e-4
"""How long the device is idle after the host has waited for it: until the host is again ahead of it, an estimate."""

EXPOSED_AXES = ("tp", "ulysses", "ep", "all")
"""Axes whose communication is exposed: the next operator waits for it. That of other axes overlaps with computation."""


@dataclasses.dataclass
class Cost:
    """Seconds and amounts of some events. Costs can be added.

    Attributes:
        seconds: by "matmul", "attention", "memory" (all other operators, which are memory-bound), "host" (the device
            waits for the host), and "communication: AXIS", before any overlap.
        flops: by dtype.
        communication: count and total bytes, by (axis, collective).
        elapsed: seconds with overlap.
    """

    seconds: Counter = dataclasses.field(default_factory=Counter)
    flops: Counter = dataclasses.field(default_factory=Counter)
    communication: dict[tuple[str, str], tuple[int, int]] = dataclasses.field(default_factory=dict)
    elapsed: float = 0.0

    @property
    def communication_seconds(self) -> tuple[float, float]:
        """Seconds of all communication, and of its exposed part."""
        exposed = sum(self.seconds[f"communication: {axis}"] for axis in EXPOSED_AXES)
        return sum(value for name, value in self.seconds.items() if name.startswith("communication: ")), exposed

    def add(self, other: "Cost", times: float = 1) -> None:
        """Add another cost, multiplied by a number of times."""
        for name, value in other.seconds.items():
            self.seconds[name] += value * times
        for name, value in other.flops.items():
            self.flops[name] += value * times
        for key, (count, size) in other.communication.items():
            before = self.communication.get(key, (0, 0))
            self.communication[key] = round(before[0] + count * times), round(before[1] + size * times)
        self.elapsed += other.elapsed * times


class CostModel:
    """Computes what events cost on a device. `axes` has the axis and the ranks of each process group, by its name."""

    def __init__(self, device: Device, axes: Mapping[str, tuple[str, list[int]]], devices_per_node: int):
        self.device, self.axes, self.devices_per_node = device, axes, devices_per_node

    def cost(self, events: Iterable[Event]) -> Cost:
        """Return the cost of a segment. FSDP's collectives overlap with all its computation, the messages of ring
        attention with its attention."""
        cost = Cost()
        for event in events:
            if isinstance(event, Work):
                category, seconds = self._work_seconds(event)
                cost.seconds[category] += seconds
                if event.flops:
                    cost.flops[event.dtype] += event.flops
            elif isinstance(event, HostWait):
                cost.seconds["host"] += HOST_WAIT_SECONDS
            elif isinstance(event, Communication) and event.name != "receive":
                axis, ranks = self.axes.get(event.group, ("other", [0]))
                if len(ranks) > 1:
                    cost.seconds[f"communication: {axis}"] += self.collective_seconds(event.name, event.size, ranks)
                    count, size = cost.communication.get((axis, event.name), (0, 0))
                    cost.communication[axis, event.name] = count + 1, size + event.size
        seconds = cost.seconds
        communication, exposed = cost.communication_seconds
        ring = seconds["communication: ring"]
        computation = (
            seconds["matmul"] + seconds["memory"] + seconds["host"] + max(seconds["attention"], ring) + exposed
        )
        cost.elapsed = max(computation, communication - exposed - ring)
        return cost

    def _work_seconds(self, work: Work) -> tuple[str, float]:
        """Return an operator's category and its seconds: the longer of its arithmetic and its memory traffic."""
        memory = (work.read + work.written) / (self.device.memory_bandwidth * EFFICIENCY["memory"][0])
        if not work.flops:
            return "memory", max(memory, KERNEL_SECONDS)
        category, efficiency = "matmul", f"matmul, {work.dtype}"
        if "grouped" in work.name and work.dtype == "bf16":
            efficiency = "grouped matmul, bf16"
        if "attention" in work.name:
            backward = ", backward" if "backward" in work.name else ""
            category, efficiency = "attention", f"attention{backward}" if self.device.fp8 else "attention, Ampere"
        peak = getattr(self.device, work.dtype) or self.device.bf16
        return category, max(work.flops / (peak * EFFICIENCY[efficiency][0]), memory, KERNEL_SECONDS)

    def collective_seconds(self, name: str, size: int, ranks: list[int]) -> float:
        """Return the seconds of a collective of `size` bytes over some ranks as a ring: each of n ranks sends
        (n - 1) / n of the full tensor, and twice that in an all-reduce. A ring that spans nodes has as many network
        adapters as it has ranks on a node."""
        n, nodes = len(ranks), len({rank // self.devices_per_node for rank in ranks})
        interconnect = self.device.interconnect_bandwidth * EFFICIENCY["interconnect"][0]
        network = self.device.network_bandwidth * EFFICIENCY["network"][0]
        bandwidth = interconnect if nodes == 1 else min(interconnect, network * max(n // nodes, 1))
        if name == "send":  # one rank has one network adapter
            sent, bandwidth = float(size), interconnect if nodes == 1 else network
        elif name == "all_to_all":  # nothing is forwarded: what goes to other nodes takes each rank's own adapter
            remote = (n - n // nodes) / n if nodes > 1 else 0.0
            return COLLECTIVE_SECONDS + max(size * (n - 1) / n / interconnect, size * remote / network)
        else:
            sent = size * (n - 1) / n * (2 if name == "all_reduce" else 1)
        return COLLECTIVE_SECONDS * (1 + (nodes - 1) / 4) + sent / bandwidth
