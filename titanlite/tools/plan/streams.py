"""Simulate how long a device takes for a sequence of events: the host issues the events in order, and the device runs
computation and communication on separate streams. Streams wait for each other as under FSDP2 in torch 2.11 to 2.15:

- Computation overlaps with an all-gather of FSDP, and waits for it before the weights are copied out of its buffer. The
  all-gather begins when the host has issued it and its stream is free. In a forward it also waits for the second-last
  copy out of a buffer, in a backward for the last copy, so that at most two buffers exist.
- A reduce-scatter of FSDP begins after the backward that made its gradients. The next reduce-scatter copies gradients
  into a buffer only after the previous one has ended. The all-reduce over replicas follows the reduce-scatter.
- CPU offload copies a shard of weights to the device before its all-gather, on a stream for such copies, and not
  earlier than the all-gather could begin. CPU offload copies a shard of gradients to the host on the reduce-scatter's
  stream. From the second gradient accumulation step on, the host waits for the copy and adds it to earlier gradients.
- A message of ring attention is sent during one attention, and the next attention waits for the message.
- An all-to-all of expert parallel begins after the computation before it. The first operator that reads the result
  waits for the all-to-all.
- Computation waits at once for every other collective, which is exposed.

A CPU has one stream: all operators and collectives except messages of ring attention run on the host."""

from collections import Counter, deque
from collections.abc import Hashable, Iterable
from typing import NamedTuple

GATHERED_AXES = ("fsdp", "efsdp")  # axes over which FSDP gathers weights and reduces gradients
FSDP_STREAMS = {"all_gather", "reduce_scatter", "replicas"}


class Run(NamedTuple):
    """Operators that run one after the other."""

    device: float  # seconds that the operators take on the device
    host: float  # seconds that the host takes to issue the operators
    both: float  # seconds from the issue of the first operator to the end of the last one, on an idle device
    attends: bool = False  # whether the operators compute attention while ring attention sends messages


class Collective(NamedTuple):
    """A collective or a message over an axis of the mesh."""

    name: str
    axis: str
    seconds: float
    copy: float = 0.0  # seconds in which CPU offload copies the shard before an all-gather or after a reduce-scatter
    addition: float = 0.0  # seconds that the host takes to add the copied shard to the earlier gradient
    outputs: tuple[Hashable, ...] = ()  # allocations that the collective writes and an Arrival waits for


class Arrival(NamedTuple):
    """Marks that the next operators read the output of a collective."""

    output: Hashable


class CopyOut(NamedTuple):
    """Marks that the next operators copy gathered weights out of FSDP's buffer."""


class CopyIn(NamedTuple):
    """Marks that the next operators copy gradients into the buffer of FSDP's reduce-scatter."""


class Wait(NamedTuple):
    """The host waits for the device, and continues `seconds` after the device is done."""

    seconds: float


Item = Run | Collective | Arrival | CopyOut | CopyIn | Wait


class Streams:
    """A device's streams and its host. All times are in seconds from the same moment.

    Args:
        synchronous: whether the device is the CPU.
        slowdown: fraction by which computation is slower while a collective runs beside it.

    Attributes:
        host: time when the host is free.
        computed: time when the device has computed everything that was issued.
        exposed: seconds in which computation waited for communication.
        idle: seconds in which computation waited for the host; on a CPU, the seconds of dispatching operators."""

    def __init__(self, *, synchronous: bool = False, slowdown: float = 0.0):
        self.synchronous, self.slowdown = synchronous, slowdown
        self.host = self.computed = self.exposed = self.idle = 0.0
        self._free: Counter[str] = Counter()  # time when each stream of communication is free
        self._gathers: deque[float] = deque()  # end times of all-gathers whose output is not copied out yet
        self._offloaded = 0.0  # time when the stream that copies weights from host memory is free
        self._copies = deque([0.0, 0.0], maxlen=2)  # start times of the last two copies of gathered weights
        self._arrivals: dict[Hashable, float] = {}  # arrival time of a collective's output, by allocation
        self._message: tuple[float, bool] | None = None  # message in flight: arrival time, whether attention has begun

    def run(self, items: Iterable[Item], *, forward: bool, accumulates: bool = False) -> None:
        """Run items after all earlier items. `forward`: the items belong to a forward, otherwise to a backward.
        `accumulates`: gradients are added to the gradients of earlier accumulation steps."""
        for item in items:
            if isinstance(item, Run):
                self._compute(item)
            elif isinstance(item, Collective):
                self._communicate(item, forward)
                if accumulates and item.addition:  # the host adds the gradients, so it waits for the copy
                    self.host = max(self.host, self._free[item.name]) + item.addition
            elif isinstance(item, Arrival):
                self._wait_for(self._arrivals.pop(item.output, 0.0))
            elif isinstance(item, CopyOut):
                if self._gathers:
                    self._wait_for(self._gathers.popleft())
                self._copies.append(self.computed)
            elif isinstance(item, CopyIn):
                self._wait_for(self._free["reduce_scatter"])
            else:
                self.idle += item.seconds
                self.host = self.computed = max(self.host, self.computed) + item.seconds

    def join(self) -> None:
        """Wait for all communication."""
        self._wait_for(max(self._free.values(), default=0.0))
        self._message = None

    def _wait_for(self, moment: float) -> None:
        self.exposed += max(moment - self.computed, 0.0)
        self.computed = max(moment, self.computed)
        if self.synchronous:
            self.host = self.computed

    def _compute(self, run: Run) -> None:
        if run.attends and self._message:
            arrives, begun = self._message
            if begun:
                self._wait_for(arrives)
            self._message = None if begun else (arrives, True)
        begin = self.computed
        if self.synchronous:
            self.computed += run.host + run.device
            self.idle += run.host
        else:
            device = run.device + self.slowdown * min(run.device, max(max(self._free.values(), default=0) - begin, 0))
            self.computed = max(begin + device, self.host + run.both)
            self.idle += self.computed - begin - device
        self.host = self.computed if self.synchronous else self.host + run.host

    def _communicate(self, item: Collective, forward: bool) -> None:
        overlaps = item.name in ("all_gather", "reduce_scatter") and item.axis in GATHERED_AXES
        if item.axis == "ring":
            if self._message:
                self._wait_for(self._message[0])
            self._overlap("ring", item.seconds, self.computed)
            self._message = self._free["ring"], False
        elif item.outputs and not self.synchronous:
            self._overlap(item.axis, item.seconds, self.computed)
            self._arrivals |= dict.fromkeys(item.outputs, self._free[item.axis])
        elif self.synchronous or not (overlaps or item.axis == "dp_replicate"):
            begin = max(self.host, self.computed)
            self.idle += begin - self.computed
            self.exposed += item.seconds
            self.computed = begin + item.seconds
            self.host = self.computed if self.synchronous else self.host
        elif item.name == "all_gather":
            before = self._copies[0 if forward else 1]
            if item.copy:
                before = self._offloaded = max(self.host, before, self._offloaded) + item.copy
            self._overlap("all_gather", item.seconds, before)
            self._gathers.append(self._free["all_gather"])
        else:
            before = self.computed if overlaps else self._free["reduce_scatter"]
            stream = item.name if overlaps else "replicas"
            self._overlap(stream, item.seconds, before)
            self._free[stream] += item.copy

    def _overlap(self, stream: str, seconds: float, before: float) -> None:
        """Communicate on a stream, not before the time `before`. Computation issued earlier runs slower meanwhile.
        FSDP's streams share the interconnect, so two collectives at a time take as long as one after the other."""
        shared = FSDP_STREAMS if stream in FSDP_STREAMS else {stream}
        begin = max(self.host, before, *(self._free[each] for each in shared))
        self._free[stream] = begin + seconds
        self.computed += self.slowdown * max(min(begin + seconds, self.computed) - begin, 0.0)
