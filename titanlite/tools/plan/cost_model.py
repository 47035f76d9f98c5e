"""Compute the time that the events of an op trace take: arithmetic, memory traffic, communication and host time. On a
device with measured rates (`titanlite calibrate`) these rates give the times. On any other device, each operator and
collective runs at the data sheet's rate, times the share of that rate that programs reach (efficiency.py)."""

import dataclasses
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

from titanlite.metrics.devices import Device
from titanlite.tools.plan import measured_rates
from titanlite.tools.plan.efficiency import ANY, TILE, Share, reached, slowest_of
from titanlite.tools.plan.op_trace import BUFFER, Communication, Dispatch, Event, HostWait, Work
from titanlite.tools.plan.streams import GATHERED_AXES, Arrival, Collective, CopyIn, CopyOut, Item, Run, Streams, Wait

GROUPS = ("matmul", "attention", "memory", "interconnect", "network", "host", "overlap", "devices", "offload")
"""Groups of rates. The errors of two groups are independent of each other."""
LEAST_SPREAD = 0.05  # lower bound of the relative uncertainty of times on a calibrated device
FULL_WAVES = 14 / 15
"""The inverse of 1 + 1 / waves where attention's rate was measured: 8,192 tokens of 128 heads fill 14 waves."""
ROW_BYTES = 227 * 1024  # bytes of the longest row that fits into a multiprocessor's shared memory
# Mean reads per input if rows exceed ROW_BYTES: 3 (maximum, sum, result); backward: 2 of the gradient, 1 of the output.
SOFTMAX_READS = {"aten._log_softmax": 3.0, "aten._log_softmax_backward_data": 1.5}


def _times_read(work: Work) -> float:
    """Return how many times an operator reads its inputs from device memory."""
    long_rows = work.outputs and work.outputs[0].shape and 4 * work.outputs[0].shape[-1] > ROW_BYTES
    return SOFTMAX_READS.get(work.name, 1.0) if long_rows else 1.0


@dataclasses.dataclass
class Cost:
    """The seconds, FLOPs and communicated bytes of some events. The keys of `seconds` are "matmul", "attention",
    "memory" (all other operators, which are memory-bound), "host" (the device waits for the host), "optimizer" (on the
    CPU, under CPU offload), "communication: AXIS" (before any overlap; the axis "host" is CPU offload's copies) and
    "overlapped" (communication that async TP overlaps). `communication`: count and bytes by (axis, collective)."""

    seconds: Counter = dataclasses.field(default_factory=Counter)
    flops: Counter = dataclasses.field(default_factory=Counter)  # FLOPs by dtype
    communication: dict[tuple[str, str], tuple[int, int]] = dataclasses.field(default_factory=dict)
    host_waits: float = 0  # how often the host waits for the device
    elapsed: float = 0.0  # elapsed seconds; overlapped work counts once

    def count(self, axis: str, name: str, size: int, seconds: float) -> None:
        """Add a collective, or a copy, of `size` bytes."""
        before = self.communication.get((axis, name), (0, 0))
        self.communication[axis, name] = before[0] + 1, before[1] + size
        self.seconds[f"communication: {axis}"] += seconds

    def add(self, other: "Cost", times: float = 1) -> None:
        """Add another cost, multiplied by `times`."""
        for name, value in other.seconds.items():
            self.seconds[name] += value * times
        for name, value in other.flops.items():
            self.flops[name] += value * times
        for key, (count, size) in other.communication.items():
            before = self.communication.get(key, (0, 0))
            self.communication[key] = round(before[0] + count * times), round(before[1] + size * times)
        self.host_waits += other.host_waits * times
        self.elapsed += other.elapsed * times


@dataclasses.dataclass
class _Items:
    """Collects a segment's events as items for Streams.run. `device`, `host` and `both`: fields of streams.Run for the
    operators since the last item."""

    cost: Cost = dataclasses.field(default_factory=Cost)
    items: list[Item] = dataclasses.field(default_factory=list)
    device: float = 0.0
    host: float = 0.0
    both: float = 0.0
    in_flight: set[Hashable] = dataclasses.field(default_factory=set)  # outputs of collectives not read yet
    copied: set[int] = dataclasses.field(default_factory=set)  # ids of weights that CPU offload has copied
    copying: float = 0.0  # seconds of CPU offload's copies since the last all-gather

    def flush(self, *, attends: bool = False) -> None:
        """Append the operators since the last item as one Run."""
        if self.device or self.host:
            self.items.append(Run(self.device, self.host, self.both, attends))
        self.device, self.host, self.both = 0.0, 0.0, 0.0

    def add(self, *items: Item) -> None:
        self.flush()
        self.items += items


class CostModel:
    """Computes the cost of events on a device.

    Args:
        axes: the axis and the ranks of each process group, by the group's name.
        changed: the group of GROUPS whose times are the shortest of their range if `faster`, and otherwise the longest;
            "": every group has its expected times.
        offload: under CPU offload, bytes of a gradient in host memory per byte that FSDP reduces; otherwise None.
        cudnn: whether cuDNN computes attention, whatever backend the dry run used.
        name: the name of the device, by which efficiency.reached finds the ranges of its rates.
        n_devices: number of devices that wait for each other."""

    def __init__(
        self,
        device: Device,
        axes: Mapping[str, tuple[str, list[int]]],
        devices_per_node: int,
        changed: str = "",
        *,
        faster: bool = False,
        offload: float | None = None,
        cudnn: bool = False,
        name: str = "",
        n_devices: int = 1,
    ):
        self.offload, self.is_sharded = offload, any(name in GATHERED_AXES and len(x) > 1 for name, x in axes.values())
        self.device, self.axes, self.devices_per_node = device, axes, devices_per_node
        self.changed, self.faster, self.cudnn = changed, faster, cudnn
        self.efficiency = reached(device, name)
        self.slowest = slowest_of(n_devices, self._seconds("devices", ANY.device_spread)) if device.kind == "gpu" else 1
        self._items: dict[int, tuple[Cost, list[Item], list[Event]]] = {}  # key: id of the list of events

    def streams(self) -> Streams:
        """Return the streams of an idle device."""
        measured = self.device.measured
        slowdown = self._measured("overlap", measured.slowdown) if measured else self._seconds("overlap", ANY.slowdown)
        return Streams(synchronous=self.device.kind == "cpu", slowdown=slowdown)

    def cost(
        self,
        segments: Iterable[list[Event]],
        streams: Streams | None = None,
        *,
        forward: bool = False,
        accumulates: bool = False,
    ) -> Cost:
        """Return the cost of segments that run one after the other. `streams`: the device with its communication in
        flight; None: an idle device, which in the end waits for the segments' communication. See also Streams.run."""
        cost, own = Cost(), streams or self.streams()
        begin, idle = own.computed, own.idle
        for events in segments:
            amounts, items = self._items_of(events)
            cost.add(amounts)
            own.run(items, forward=forward, accumulates=accumulates)
        if streams is None:
            own.join()
        cost.seconds["host"] += own.idle - idle
        cost.elapsed = own.computed - begin
        return cost

    def _items_of(self, events: list[Event]) -> tuple[Cost, list[Item]]:
        """Return the amounts (seconds, FLOPs, bytes) of a segment's events, and its items for Streams.run."""
        if id(events) in self._items:  # copied layers (FoldedStage) share one list of events
            return self._items[id(events)][:2]
        own = _Items()
        in_ring = any(isinstance(x, Communication) and self._axis(x.group)[0] == "ring" for x in events)
        for event in events:
            if isinstance(event, Work):
                self._run(event, own, in_ring=in_ring)
            elif isinstance(event, Dispatch):
                own.host += self.dispatch_seconds(event)
            elif isinstance(event, HostWait):
                own.cost.host_waits += 1
                own.add(Wait(self._seconds("host", ANY.host_wait)))
            elif isinstance(event, Communication):
                own.host += self._unit_seconds(event)
                if not (collective := self._collective(event, own.cost)):
                    continue
                if own.copying and collective.name == "all_gather" and collective.axis in GATHERED_AXES:
                    collective, own.copying = collective._replace(copy=own.copying), 0.0
                own.add(collective)
                own.in_flight.update(collective.outputs)
        own.add(*map(Arrival, own.in_flight))
        self._items[id(events)] = own.cost, own.items, events
        return own.cost, own.items

    def _run(self, work: Work, own: "_Items", *, in_ring: bool) -> None:
        """Add an operator to the items of a segment."""
        category, seconds = self.work_seconds(work)
        own.cost.seconds[category] += seconds
        if work.flops:
            own.cost.flops[work.dtype] += work.flops
        arrived, attends = own.in_flight.intersection(work.inputs), in_ring and category == "attention"
        if arrived or attends:
            own.add(*map(Arrival, arrived))
            own.in_flight -= arrived
        if self.offload is not None:
            own.copying += self._weights_to_device(work, own.copied, own.cost)
            if own.copying and not self.is_sharded:  # FSDP with one rank copies weights on the compute stream
                own.add(Collective("copy to device", "host", own.copying))
                own.copying = 0.0
        if work.name == "fsdp.split_with_sizes_copy":
            own.add(CopyOut())
        elif work.name == "fsdp.chunk_cat":
            own.add(CopyIn())
            if self.offload is not None and not self.is_sharded:
                own.add(self._offloaded_gradient("fsdp", work.written, 0.0, own.cost))
        own.device, own.both = own.device + seconds, max(own.both, own.host) + seconds
        if attends:
            own.flush(attends=True)

    def _collective(self, event: Communication, cost: Cost) -> Collective | None:
        """Count and return a collective; None for one rank, and for a received message, which the sender counts."""
        axis, ranks = self._axis(event.group)
        if len(ranks) == 1 or event.name == "receive":
            return None
        if event.products:
            return Collective(event.name, axis, self._beside_products(event, axis, ranks, cost))
        seconds = self.collective_seconds(event.name, event.size, ranks)
        cost.count(axis, event.name, event.size, seconds)
        if self.offload is not None and axis in GATHERED_AXES and event.name == "reduce_scatter":
            return self._offloaded_gradient(axis, event.size // len(ranks), seconds, cost)
        return Collective(event.name, axis, seconds, outputs=event.outputs if axis == "ep" else ())

    def _beside_products(self, event: Communication, axis: str, ranks: list[int], cost: Cost) -> float:
        """Count an async TP collective and return the seconds by which it lengthens the products that it overlaps.
        In an all-gather, a rank copies its own chunk to symmetric memory, and fetches each remote chunk before the
        product with that chunk. In a reduce-scatter, it copies each chunk after the chunk's product, then sums them.
        Two streams alternate: two products run at once, copies one by one (_symmetric_memory, read in torch 2.13)."""
        n, chunk = len(ranks), event.size // len(ranks)
        copy, meeting = self.collective_seconds("send", chunk, ranks), self.collective_seconds(event.name, 0, ranks)
        read = chunk if event.name == "all_gather" else event.size
        own = self.work_seconds(Work("aten.copy_", 0, "", read, chunk, (), ()))[1]
        products = sum(self.work_seconds(work)[1] for work in event.products)
        product = sum(self.work_seconds(work.of_rows(1 / n))[1] for work in event.products)
        copies = (n - 1) * copy
        slowed = products + self.streams().slowdown * min(products, copies)
        exposed = meeting + max(slowed, n / 2 * (copy + product), copies + product) - products
        cost.count(axis, f"{event.name}, overlapped", event.size, meeting + copies)
        cost.seconds["overlapped"] += meeting + copies - exposed
        cost.seconds["memory"] += own
        return exposed + own

    def _weights_to_device(self, work: Work, copied: set[int], cost: Cost) -> float:
        """Return the seconds in which CPU offload copies those weights of an operator that no earlier operator read."""
        parameters = [x for x in work.inputs if x.kind == "parameters" and x.maker != BUFFER]
        weights = {id(x): x for x in parameters if id(x) not in copied}
        copied.update(weights)
        return sum(self._copy("copy to device", weight.size, cost) for weight in weights.values())

    def _copy(self, name: str, size: int, cost: Cost) -> float:
        """Count a copy between host memory and the device, and return its seconds."""
        seconds = size / (self.device.host_bandwidth * self._reached("offload", ANY.host_link))
        cost.count("host", name, size, seconds)
        return seconds

    def _offloaded_gradient(self, axis: str, reduced: int, seconds: float, cost: Cost) -> Collective:
        """Return the item of a reduce-scatter whose result, `reduced` bytes, CPU offload then copies to host memory."""
        size = round(reduced * self.offload)
        addition = self._host_seconds(3 * size)  # the addition reads two tensors and writes one
        return Collective("reduce_scatter", axis, seconds, self._copy("copy to host", size, cost), addition)

    def host_update(self, events: Iterable[Event]) -> Cost:
        """Return the cost of an update that runs on the CPU, as under CPU offload."""
        seconds = self._host_seconds(sum(event.read + event.written for event in events if isinstance(event, Work)))
        return Cost(seconds=Counter(optimizer=seconds), elapsed=seconds)

    def offloaded_step(self, steps: Sequence[Work]) -> Cost:
        """Return the cost of Adam's step on the CPU, overlapped with copies between host memory and the device."""
        # `written` counts weights, gradients and two states, since the operator's schema marks them as written.
        cost, weights = self.host_update(steps), sum(step.written for step in steps) // 4
        self._copy("copy to device", weights, cost)
        cost.elapsed = max(cost.elapsed, self._copy("copy to host", 2 * weights, cost))
        cost.seconds["optimizer"] = cost.elapsed
        return cost

    def _host_seconds(self, n_bytes: int) -> float:
        """Return the seconds that the CPU takes to read and write `n_bytes` of host memory."""
        return n_bytes / (self.device.host_memory_bandwidth * self._reached("offload", ANY.host_memory))

    def _reached(self, group: str, share: Share) -> float:
        """Return the share that programs reach of a rate of the host; 1 for the rates of a calibrated device."""
        return 1 / self._measured(group, 1.0) if self.device.measured else self._rate(group, share)

    def _axis(self, group: str) -> tuple[str, list[int]]:
        return self.axes.get(group, ("other", [0]))

    def _rate(self, group: str, share: Share) -> float:
        """Return the expected share of a rate or, if `group` is `self.changed`, an end of the share's range."""
        if group != self.changed:
            return share.expected
        return share.high if self.faster else share.low

    def _seconds(self, group: str, share: Share) -> float:
        """Return expected seconds (or a factor) or, if `group` is the changed group, an end of their range."""
        return self._rate(group, share._replace(low=share.high, high=share.low))

    def _measured(self, group: str, seconds: float) -> float:
        """Return measured seconds or, if `group` is the changed group, an end of their range."""
        if group != self.changed:
            return seconds
        spread = max(self.device.measured.spread.get(group, 0.0), LEAST_SPREAD)
        return seconds / (1 + spread) if self.faster else seconds * (1 + spread)

    def dispatch_seconds(self, dispatch: Dispatch) -> float:
        """Return the seconds that the host takes to dispatch operators before it issues the next event."""
        if measured := self.device.measured:
            seconds = dispatch.operators * measured.operator_seconds + dispatch.on_dtensors * measured.dtensor_seconds
            return self._measured("host", seconds)
        seconds = dispatch.operators * self._seconds("host", ANY.operator)
        return seconds + dispatch.on_dtensors * self._seconds("host", ANY.dtensor)

    def _unit_seconds(self, event: Communication) -> float:
        """Return the host's seconds for FSDP's own Python code around the gathering or reduction of a unit."""
        is_unit = self._axis(event.group)[0] in GATHERED_AXES and event.name != "all_reduce"
        return self._seconds("host", ANY.fsdp_unit) if is_unit and not self.device.measured else 0.0

    def work_seconds(self, work: Work) -> tuple[str, float]:
        """Return an operator's category ("matmul", "attention" or "memory") and its seconds."""
        if work.kernels > 1:  # async TP runs two of the kernels at a time
            category, seconds = self.work_seconds(work.of_rows(2 / work.kernels))
            return category, seconds * work.kernels / 2
        category = "memory" if not work.flops else "attention" if "attention" in work.name else "matmul"
        if self.device.measured:
            return category, self._measured(category, measured_rates.work_seconds(self.device.measured, work))
        memory = (work.read * _times_read(work) + work.written) / (self.device.memory_bandwidth * self._memory())
        if category == "memory":
            return category, self.slowest * (memory + self._seconds("host", ANY.next_kernel))
        seconds = self._attention_seconds(work) if category == "attention" else self._matmul_seconds(work)
        return category, self.slowest * (self._seconds("host", ANY.kernel) + max(seconds, memory))

    def _memory(self) -> float:
        return self._rate("memory", self.efficiency.memory)

    def _matmul_seconds(self, work: Work) -> float:
        """Return the seconds of a matrix product, whose tiles fill multiprocessors in waves, and of writing it."""
        times, m, n, _ = work.sizes
        of_fp8 = self.efficiency.matmul_fp8 if work.dtype == "fp8" else None
        share = self._rate("matmul", of_fp8 or self.efficiency.matmul)
        if "grouped" in work.name and work.dtype == "bf16":
            share *= self._rate("matmul", ANY.grouped_matmul)
        peak = getattr(self.device, work.dtype) or self.device.bf16
        waves = times * math.ceil(m / TILE) * math.ceil(n / TILE) / self.efficiency.multiprocessors
        full = waves / math.ceil(waves)
        writing = work.written / (self.device.memory_bandwidth * self._memory())
        return work.flops / (peak * share * full) + writing

    def _attention_seconds(self, work: Work) -> float:
        """Return the seconds of attention. Its FLOP/s grow with the keys per query, and with the number of query tiles
        over all heads. Under a causal mask, a query tile has on average half the work of the longest tile."""
        backward, efficiency = "backward" in work.name, self.efficiency
        of_cudnn = (efficiency.cudnn, efficiency.cudnn_backward)[backward] if self.cudnn else None
        share = self._rate("attention", of_cudnn or (efficiency.flash, efficiency.flash_backward)[backward])
        (queries, keys, head_dim), half = work.sizes[:3], efficiency.half_length[backward]
        heads = work.flops / ((5 if backward else 2) * queries * keys * head_dim)
        tile = efficiency.attention_tile if self.cudnn else TILE
        waves = heads * queries / tile / 2 / efficiency.multiprocessors
        rate = getattr(self.device, work.dtype) * share * keys / (keys + half)
        return work.flops / rate * (1 + 1 / waves) * FULL_WAVES

    def collective_seconds(self, name: str, size: int, ranks: list[int]) -> float:
        """Return the seconds of a collective of `size` bytes over n ranks. Without measured rates, all collectives
        except all-to-alls and messages are assumed to run as rings: each rank sends (n-1)/n of the full tensor (twice
        as much in an all-reduce). Each rank has a network adapter."""
        n, nodes = len(ranks), len({rank // self.devices_per_node for rank in ranks})
        if measured := self.device.measured:
            seconds = measured_rates.collective_seconds(measured, name, size, n, nodes)
            return self._measured("interconnect" if nodes == 1 else "network", seconds)
        efficiency, doublings = self.efficiency, math.log2(nodes)
        of_reduce = efficiency.interconnect_reduce if name == "all_reduce" else None
        share = self._rate("interconnect", of_reduce or efficiency.interconnect)
        interconnect = self.device.interconnect_bandwidth * share
        network = self.device.network_bandwidth * self._rate("network", ANY.network)
        network *= self._rate("network", ANY.network_per_doubling) ** max(doublings - 2, 0.0)
        latency = self._seconds("interconnect", efficiency.latency)
        latency += self._seconds("network", ANY.network_latency) * doublings
        bandwidth = interconnect if nodes == 1 else min(interconnect, network * max(n // nodes, 1))
        if name == "send":  # a message uses one network adapter
            group = "interconnect" if nodes == 1 else "network"
            return self._seconds(group, ANY.message_latency) + size / (interconnect if nodes == 1 else network)
        if name == "all_to_all":  # each rank sends to other nodes over its own network adapter
            remote = (n - n // nodes) / n if nodes > 1 else 0.0
            return latency + max(size * (n - 1) / n / interconnect, size * remote / network)
        sent = size * (n - 1) / n * (2 if name == "all_reduce" else 1)
        return latency + sent / bandwidth
