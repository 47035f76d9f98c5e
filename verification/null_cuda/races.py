"""Find memory that two streams use without order, of which one writes or releases it.

Each stream, and the host, has a vector clock: how many of each other's operations are done before its next one. Events
carry clocks from the streams that record them to those that wait (FastTrack, PLDI 2009, doi:10.1145/1542476.1542490, of
which this is the plain form). What an operator reads and writes is taken from its schema; what a collective does, from
NCCL's arguments. Strided tensors count as all the bytes from their first to their last.

The allocator gives released memory to the stream that it was allocated on, at once. So before that stream does anything
else, it must wait for the streams that use the memory, or the allocator must have been told of them
(Tensor.record_stream). torch.distributed tells it of messages, and keeps tensors until their collectives are done.
"""

import bisect
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from titanlite.parallel import tiled_attention
from verification.null_cuda.device import Device, Operation

HOST = -1
"""The stream of what the host does with pinned memory."""
NO_ACCESS = ("c10d", "_c10d_functional", "aten::resize_", "aten::set_", "aten::empty")
"""Operators that only start a collective, which NCCL's arguments tell, or that touch no element."""
OPERATORS = {each._qualname: each for each in (tiled_attention._attention, tiled_attention._attention_backward)}
"""Those of the project are made of others."""

PLAIN = (Tensor, torch.nn.Parameter)

Clock = dict[int, int]
LastUses = dict[tuple[int, bool], tuple[int, str]]
"""By stream, and whether it wrote: when, and the operator."""


class Access(NamedTuple):
    """An operator or a collective uses bytes of memory, or they are released. `position` is the number of operations
    in the device's log before it."""

    position: int
    stream: int
    first: int
    end: int
    writes: bool
    name: str


class Race(NamedTuple):
    """Two uses of the same bytes that nothing orders. The second may be RELEASE."""

    earlier: str
    later: str
    bytes: int


RELEASE, RECORD_STREAM = "release", "aten::record_stream"


class Accesses(TorchDispatchMode):
    """This mode records what operators read and write on the device, and of pinned memory on the host; and which
    memory is released, with the stream that it was allocated on."""

    def __init__(self, device: Device):
        super().__init__()
        self.device, self.accesses, self.alive = device, list[Access](), dict[int, weakref.finalize]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, Tensor) and each not in PLAIN for each in types):
            return NotImplemented  # a DTensor or another wrapper calls operators on what it holds
        kwargs = kwargs or {}
        if function._schema.name in OPERATORS:
            with self:
                return OPERATORS[function._schema.name]._init_fn(*args, **kwargs)
        result = function(*args, **kwargs)
        schema = function._schema
        if schema.name == RECORD_STREAM:
            of = args[1]
            stream = torch.cuda.Stream(stream_id=of.stream_id, device_index=of.device_index, device_type=of.device_type)
            self._record(RECORD_STREAM, [(args[0], False)], stream.cuda_stream)
        elif schema.name.startswith(NO_ACCESS):
            self._watch(tree_iter(result))
        elif not _is_view(schema):
            given = [*args, *(kwargs.get(argument.name) for argument in schema.arguments[len(args) :])]
            returned = () if not schema.returns else result if isinstance(result, tuple) else (result,)
            places = [*zip(schema.arguments, given, strict=True)]
            used = [(value, bool(place.alias_info and place.alias_info.is_write)) for place, value in places]
            places = [*zip(schema.returns, returned, strict=True)]
            used += [(value, True) for place, value in places if not place.alias_info]  # the others are arguments
            tensors = [(each, writes) for value, writes in used for each in tree_iter(value)]
            self._record(schema.name, [use for use in tensors if isinstance(use[0], Tensor) and use[0].numel()])
            self._watch(each for each, _ in tensors)
        return result

    def _record(self, name: str, used: list[tuple[Tensor, bool]], stream: int | None = None) -> None:
        if stream is None:
            devices = [tensor.device for tensor, _ in used if tensor.is_cuda]
            # What copies between host and device is done by the device.
            stream = torch.cuda.current_stream(devices[0]).cuda_stream if devices else HOST
        for tensor, writes in used:
            if tensor.is_cuda or tensor.is_pinned():
                span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
                first, end = tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()
                self.accesses.append(Access(self.device.n_operations(), stream, first, end, writes, name))

    def _watch(self, tensors: Iterator[Any]) -> None:
        """Record when the memory of new tensors is released."""
        for tensor in tensors:
            if type(tensor) in PLAIN and tensor.is_cuda:
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage._cdata not in self.alive:
                    stream, first = torch.cuda.current_stream(tensor.device).cuda_stream, storage.data_ptr()
                    released = weakref.finalize(storage, self._release, storage._cdata, stream, first, storage.nbytes())
                    self.alive[storage._cdata] = released

    def _release(self, storage: int, stream: int, first: int, size: int) -> None:
        del self.alive[storage]
        self.accesses.append(Access(self.device.n_operations(), stream, first, first + size, True, RELEASE))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for released in self.alive.values():
            released.detach()


def _is_view(schema: Any) -> bool:
    """Return whether an operator only makes another tensor of the same memory."""
    returns = schema.returns
    return bool(returns) and all(each.alias_info and not each.alias_info.is_write for each in returns)


class Memory:
    """The last uses of each byte: intervals that do not overlap, sorted."""

    def __init__(self) -> None:
        self.firsts, self.intervals = list[int](), list[tuple[int, LastUses]]()

    def pieces(self, first: int, end: int) -> Iterator[tuple[int, LastUses]]:
        """Yield the size and the uses of each interval of these bytes; intervals that reach beyond are split, and
        bytes without one get one."""
        self._split(first)
        self._split(end)
        at, index = first, bisect.bisect_left(self.firsts, first)
        while at < end:
            begins = self.firsts[index] if index < len(self.firsts) else end
            if begins > at:
                self.firsts.insert(index, at)
                self.intervals.insert(index, (min(begins, end), {}))
            stop, uses = self.intervals[index]
            yield stop - at, uses
            at, index = stop, index + 1

    def _split(self, address: int) -> None:
        index = bisect.bisect_right(self.firsts, address) - 1
        if index >= 0 and self.firsts[index] < address < self.intervals[index][0]:
            end, uses = self.intervals[index]
            self.intervals[index] = address, uses
            self.firsts.insert(index + 1, address)
            self.intervals.insert(index + 1, (end, dict(uses)))


class Streams:
    """The clocks of streams and of the host, and what they use.

    Attributes:
        found: the races so far.
        told: memory whose users the allocator was told of, with the stream.
        released: by the stream that memory returned to, the other streams that use it, until when, and the race if it
            does not wait.
    """

    def __init__(self) -> None:
        self.clocks: dict[int, Clock] = {HOST: {}}
        self.events: dict[int, Clock] = {}
        self.memory, self.found, self.told = Memory(), list[Race](), list[tuple[int, int, int]]()
        self.released: dict[int, list[tuple[int, int, Race]]] = {}

    def order(self, operation: Operation) -> None:
        """Follow an operation that orders streams."""
        clock = self.clocks.setdefault(operation.stream, {})
        if operation.kind == "record":
            self.events[operation.object] = dict(clock)
        elif operation.kind == "wait":
            _join(clock, self.events.get(operation.object, {}))
        elif operation.kind == "sync event":
            _join(self.clocks[HOST], self.events.get(operation.object, {}))
        elif operation.kind == "sync stream":
            _join(self.clocks[HOST], clock)
        elif operation.kind == "sync device":
            for each in list(self.clocks.values()):
                _join(self.clocks[HOST], each)

    def use(self, access: Access) -> None:
        """Find the races of a use of memory with earlier ones."""
        if access.name == RECORD_STREAM:
            self.told.append((access.first, access.end, access.stream))
            return
        clock = self.clocks.setdefault(access.stream, {})
        _join(clock, self.clocks[HOST])  # it was asked for after all that the host has waited for
        if access.name == RELEASE:
            self._release(access, clock)
            return
        for stream, when, race in self.released.pop(access.stream, []):
            if clock.get(stream, 0) < when:
                self.found.append(race)
        clock[access.stream] = clock.get(access.stream, 0) + 1
        for size, last in self.memory.pieces(access.first, access.end):
            for (stream, wrote), (when, name) in last.items():
                if (wrote or access.writes) and clock.get(stream, 0) < when:
                    self.found.append(Race(name, access.name, size))
            if access.writes:
                last.clear()
            last[access.stream, access.writes] = clock[access.stream], access.name

    def _release(self, access: Access, clock: Clock) -> None:
        told = {stream for first, end, stream in self.told if first < access.end and access.first < end}
        self.told = [each for each in self.told if each[1] <= access.first or access.end <= each[0]]
        for size, last in self.memory.pieces(access.first, access.end):
            for (stream, _), (when, name) in last.items():
                if stream not in told and clock.get(stream, 0) < when:
                    self.released.setdefault(access.stream, []).append((stream, when, Race(name, RELEASE, size)))
            last.clear()


def races(operations: list[Operation], accesses: list[Access]) -> list[Race]:
    """Return the races among accesses, given everything that was asked of the device meanwhile, in order."""
    streams = Streams()
    waiting = iter(sorted(accesses, key=lambda access: access.position))
    access = next(waiting, None)
    for position, operation in enumerate(operations):
        while access and access.position <= position:
            streams.use(access)
            access = next(waiting, None)
        if operation.kind in ("collective", "receive") and operation.bytes:
            where = operation.stream, operation.object, operation.object + operation.bytes
            streams.use(Access(position, *where, operation.kind == "receive", operation.name))
            streams.use(Access(position, *where, False, RECORD_STREAM))
        else:
            streams.order(operation)
    return streams.found


def _join(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)
