"""How long a rehearsed segment takes on a device: arithmetic, memory and links, each at the rate that programs get.

All that is not from a data sheet stands in EFFICIENCY. Nothing there is fitted to a run of a trainer.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping

from titanlite.devices import Device
from titanlite.plan.op_trace import Event, Traffic, Work

ESTIMATE = "an estimate; not measured"
EFFICIENCY: dict[str, tuple[float, str]] = {
    "product, bf16": (0.75, "large bf16 products reach 0.80 on an H200 (790 of 989 TFLOP/s); the model's are smaller"),
    "product, fp8": (0.60, ESTIMATE),
    "product, fp32": (0.85, ESTIMATE),
    "attention": (0.36, "FlashAttention-2 reaches about 35 % of an H100 (arXiv:2407.08608, abstract)"),
    "attention, backward": (0.30, ESTIMATE),
    "attention, Ampere": (0.65, "FlashAttention-2 reaches 50 to 73 % of an A100 (arXiv:2307.08691)"),
    "memory": (0.85, ESTIMATE),
    "link": (0.80, ESTIMATE),
    "network": (0.85, ESTIMATE),
}
"""Share of the data sheet's rate, and where it is from."""

KERNEL_SECONDS = 4e-6
"""From one kernel's beginning to the next one's, if both are empty and launched ahead of time: an estimate."""
COLLECTIVE_SECONDS = 2e-5
"""Of a collective of one byte within a host; and of each further host on a ring that spans hosts, a quarter of it: an
estimate."""

EXPOSED = ("tp", "ulysses", "all")
"""Axes whose collectives the next operator waits for; those of the others run beside it."""


@dataclasses.dataclass
class Cost:
    """Seconds and amounts of some events; they add up.

    Attributes:
        seconds: by what takes them: "products", "attention", "memory" (all other operators), and "link: AXIS" of
            collectives, before anything overlaps.
        flops: by rate.
        traffic: of (axis, collective): how often, and bytes in all.
        elapsed: seconds with what overlaps.
    """

    seconds: Counter = dataclasses.field(default_factory=Counter)
    flops: Counter = dataclasses.field(default_factory=Counter)
    traffic: dict[tuple[str, str], tuple[int, int]] = dataclasses.field(default_factory=dict)
    elapsed: float = 0.0

    def add(self, other: "Cost", times: float = 1) -> None:
        """Add another's, so many times."""
        for name, value in other.seconds.items():
            self.seconds[name] += value * times
        for name, value in other.flops.items():
            self.flops[name] += value * times
        for key, (count, size) in other.traffic.items():
            before = self.traffic.get(key, (0, 0))
            self.traffic[key] = round(before[0] + count * times), round(before[1] + size * times)
        self.elapsed += other.elapsed * times


class CostModel:
    """Prices events.

    Args:
        axes: of a rehearsal: each group's axis and ranks.
        devices_per_node: ranks of a host.
    """

    def __init__(self, device: Device, axes: Mapping[str, tuple[str, list[int]]], devices_per_node: int):
        self.device, self.axes, self.devices_per_node = device, axes, devices_per_node

    def price(self, events: Iterable[Event]) -> Cost:
        """Of a segment: collectives of FSDP run beside all of it, a ring's messages beside its attention."""
        cost = Cost()
        for event in events:
            if isinstance(event, Work):
                what, seconds = self._work(event)
                cost.seconds[what] += seconds
                if event.flops:
                    cost.flops[event.rate] += event.flops
            elif isinstance(event, Traffic) and event.name != "receive":
                axis, ranks = self.axes.get(event.group, ("other", [0]))
                if len(ranks) > 1:
                    cost.seconds[f"link: {axis}"] += self.collective(event.name, event.size, ranks)
                    count, size = cost.traffic.get((axis, event.name), (0, 0))
                    cost.traffic[axis, event.name] = count + 1, size + event.size
        seconds = cost.seconds
        exposed = sum(seconds[f"link: {axis}"] for axis in EXPOSED)
        beside = sum(value for name, value in seconds.items() if name.startswith("link: ")) - exposed
        ring = seconds["link: ring"]
        computing = seconds["products"] + seconds["memory"] + max(seconds["attention"], ring) + exposed
        cost.elapsed = max(computing, beside - ring)
        return cost

    def _work(self, work: Work) -> tuple[str, float]:
        """What it counts as, and its seconds: the longer of its arithmetic and its memory."""
        moving = (work.read + work.written) / (self.device.memory_bandwidth * EFFICIENCY["memory"][0])
        if not work.flops:
            return "memory", max(moving, KERNEL_SECONDS)
        attention = "attention" in work.name
        if attention:
            backward = ", backward" if "backward" in work.name else ""
            name = "attention, Ampere" if not self.device.fp8 else f"attention{backward}"
        else:
            name = f"product, {work.rate}"
        rate = getattr(self.device, work.rate) or self.device.bf16
        seconds = max(work.flops / (rate * EFFICIENCY[name][0]), moving, KERNEL_SECONDS)
        return "attention" if attention else "products", seconds

    def collective(self, name: str, size: int, ranks: list[int]) -> float:
        """Seconds of one over these ranks, a ring: each of n ranks sends (n - 1) / n of the whole, twice to reduce it
        for all. A ring that spans hosts has as many adapters as it has ranks on a host."""
        n, hosts = len(ranks), len({rank // self.devices_per_node for rank in ranks})
        link = self.device.interconnect_bandwidth * EFFICIENCY["link"][0]
        network = self.device.network_bandwidth * EFFICIENCY["network"][0]
        rate = link if hosts == 1 else min(link, network * max(n // hosts, 1))
        if name == "send":  # at a host's border one rank has one adapter
            moved, rate = float(size), link if hosts == 1 else network
        elif name == "all_to_all":  # nothing is passed on: what goes to other hosts takes each rank's own adapter
            away = (n - n // hosts) / n if hosts > 1 else 0.0
            return COLLECTIVE_SECONDS + max(size * (n - 1) / n / link, size * away / network)
        else:
            moved = size * (n - 1) / n * (2 if name == "all_reduce" else 1)
        return COLLECTIVE_SECONDS * (1 + (hosts - 1) / 4) + moved / rate
