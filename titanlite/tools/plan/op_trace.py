"""Record the operations of a program on fake tensors: every allocation and release, every operator and collective.
Nothing is computed and nothing is sent, so any number of ranks can be planned."""

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from titanlite.config.loader import read_toml
from titanlite.parallel import tiled_attention


@contextlib.contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Start the process group of one rank without the other ranks. Its collectives return at once and leave buffers
    unchanged. Uses the private torch.testing._internal.distributed.fake_pg (tested with torch 2.11 to 2.15)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an object, a class or a module to `value` inside the with block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class Allocation:
    """The memory of a torch storage, which a tensor and its views share.

    Attributes:
        size, largest: current bytes, and the largest number of bytes so far.
        maker: the operator that allocated the memory, or `OpTrace.naming`'s argument; BUFFER for a module's buffer.
        kind: kind of memory (see titanlite/tools/plan/memory_timeline.py); "" until the kind is known.
        shape: shape of the tensor that the memory was allocated for."""

    __slots__ = ("kind", "largest", "maker", "shape", "size")

    def __init__(self, maker: str, shape: tuple[int, ...]):
        self.size, self.largest, self.maker, self.kind, self.shape = 0, 0, maker, "", shape


class Memory(NamedTuple):
    """A change of an allocation's bytes: it is allocated, resized or freed."""

    allocation: Allocation
    change: int


class Work(NamedTuple):
    """An operator on the device."""

    name: str
    flops: int  # FLOPs of matrix multiplication and attention; 0 for all other operators
    dtype: str  # name of the device's peak rate for `flops`: "bf16", "fp8" or "fp32"; "" without flops
    read: int  # bytes read from inputs
    written: int  # bytes written to outputs
    inputs: tuple[Allocation, ...]
    outputs: tuple[Allocation, ...]
    sizes: tuple[int, ...] = ()  # (number, m, n, k) of products [m, k] x [k, n]; (queries, keys, head_dim) of attention
    kernels: int = 1  # number of kernels into which a matrix multiplication is split by rows

    def of_rows(self, share: float) -> "Work":
        """Return this matrix multiplication with only a share (0 to 1) of the rows of [m, k]."""
        times, m, n, k = self.sizes
        read, sizes = self.read * (m * share + n) / (m + n), (times, math.ceil(m * share), n, k)
        amounts = {"flops": round(self.flops * share), "read": round(read), "written": round(self.written * share)}
        return self._replace(kernels=1, sizes=sizes, **amounts)


class Dispatch(NamedTuple):
    """The host dispatches operators before the next event."""

    operators: int  # operators on plain tensors, including views
    on_dtensors: int  # operators on DTensors; the operators that these dispatch on plain tensors count in `operators`


class Communication(NamedTuple):
    """A collective in the process group named `group`, or a message."""

    name: str
    group: str
    size: int  # bytes of the full tensor; in an all-to-all, the larger of the bytes that a rank sends and receives
    outputs: tuple[Allocation, ...] = ()  # allocations that the collective writes
    inputs: tuple[Allocation, ...] = ()  # allocations that the collective reads
    products: tuple[Work, ...] = ()  # matrix multiplications that the collective overlaps with
    kernels: int = 1


class HostWait(NamedTuple):
    """The host waits for the device, so the device is idle when the host issues the next event."""


Event = Memory | Work | Communication | HostWait | Dispatch


class Segment(NamedTuple):
    """The events from one mark to the next. titanlite/tools/plan/segments.py lists the marks."""

    mark: tuple[Any, ...]
    events: list[Event]


ALL, BUFFER = -1, "buffer"
NORM, NORM_BACKWARD = "aten._fused_rms_norm", "aten._fused_rms_norm_backward"

_TABLES = read_toml(str(Path(__file__).with_name("op_trace.toml")))
VIEWS, COPIES = frozenset(_TABLES["views"]), frozenset(_TABLES["copies"])
"""Operators of VIEWS move no data. Operators of COPIES overwrite an argument without reading it."""
COLLECTIVES: dict[str, list[Any]] = _TABLES["collectives"]
"""By operator: the name of its collective, and the index of the argument that is the full tensor. With the index ALL,
the largest argument or result is the full tensor; without an index, the result is."""
COPY_IN = "fsdp.all_gather_copy_in"


class OpTrace(TorchDispatchMode):
    """Records the operators, collectives and allocations inside its with block."""

    def __init__(self) -> None:
        super().__init__()
        self.segments: list[Segment] = [Segment(("begin",), [])]  # segments in the order of the host's events
        self.live: dict[int, Allocation] = {}  # current allocations, by the address of the torch storage
        self.enabled, self._maker = True, ""  # enabled: whether operators are recorded
        self._operators, self._on_dtensors = 0, 0  # operators dispatched since the last event

    def mark(self, *label: Any) -> None:
        self._record_dispatch()
        self.segments.append(Segment(label, []))

    def record(self, event: Event) -> None:
        if not isinstance(event, Memory):
            self._record_dispatch()
        self.segments[-1].events.append(event)

    def _record_dispatch(self) -> None:
        if self._operators or self._on_dtensors:
            self.segments[-1].events.append(Dispatch(self._operators, self._on_dtensors))
            self._operators, self._on_dtensors = 0, 0

    def naming(self, maker: str) -> contextlib.AbstractContextManager[None]:
        """Set the maker of the allocations that are made inside the with block."""
        return replaced(self, "_maker", maker)

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Record no operators inside the with block."""
        return replaced(self, "enabled", False)

    def record_work(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Record an operator without FLOPs, from the plain tensors that it reads and writes."""
        self._operators += 1
        written_to = self._allocations(name, outputs)
        sizes = (sum(map(_n_bytes, tensors)) for tensors in (inputs, outputs))
        self.record(Work(name, 0, "", *sizes, self._known(inputs), tuple(written_to)))

    def allocation_of(self, tensor: Tensor) -> Allocation | None:
        """Return the allocation of a plain tensor; None if it was allocated outside the trace."""
        return self.live.get(tensor.untyped_storage()._cdata)

    def _known(self, tensors: list[Tensor]) -> tuple[Allocation, ...]:
        return tuple(allocation for x in tensors if (allocation := self.allocation_of(x)))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind not in (FakeTensor, Tensor, torch.nn.Parameter) for kind in types):
            self._on_dtensors += self.enabled
            return NotImplemented  # a subclass such as DTensor then dispatches on its inner tensors
        kwargs = kwargs or {}
        name = str(func._schema.name).replace("::", ".")
        if implementation := DECOMPOSED.get(name):
            with self:
                return implementation(*args, **kwargs)
        out = RESULTS.get(name, func)(*args, **kwargs)
        if self.enabled and not name.startswith("prim."):  # real tensors never dispatch prim.device
            self._record(name, func, args, kwargs, out)
        return out

    def _record(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self._operators += 1
        inputs, outputs = _tensors_in((args, kwargs)), _tensors_in(out)
        if name in COLLECTIVES:
            self._record_collective(name, args, inputs, outputs)
            return
        if name == COPY_IN:  # COPY_IN writes only its first output, this shard's slice of the second output
            inputs, outputs = list(args[0]), outputs[:1]
        before = {x.untyped_storage()._cdata for x in inputs}
        written_to = self._allocations(name, outputs)
        short = name.partition(".")[2]
        moves_data = func._schema.is_mutable or any(x.untyped_storage()._cdata not in before for x in outputs)
        copies_to_itself = short == "copy_" and args[0] is args[1]
        if short in VIEWS or copies_to_itself or not moves_data or not (inputs or outputs):
            return
        flops, dtype, sizes = _flops(short, inputs, args, kwargs)
        changed = _changed(func, args, kwargs)
        overwritten = {id(x) for x in changed if name in COPIES or x is kwargs.get("out")}
        read = sum(_n_bytes(x) for x in inputs if id(x) not in overwritten)
        written = sum(map(_n_bytes, outputs or changed))
        self.record(Work(name, flops, dtype, read, written, self._known(inputs), tuple(written_to), sizes))

    def _record_collective(self, name: str, args: tuple[Any, ...], inputs: list[Tensor], outputs: list[Tensor]) -> None:
        written_to = self._allocations(name, [args[0]] if name == "c10d.alltoall_base_" else outputs)
        collective, *index = COLLECTIVES[name]
        if index == [ALL]:
            size = max(map(_n_bytes, inputs + outputs))
        else:
            size = sum(map(_n_bytes, _tensors_in(args[index[0]]) if index else outputs))
        self.record(Communication(collective, _group_of(args), size, tuple(written_to), self._known(inputs)))

    def _allocations(self, name: str, tensors: list[Tensor]) -> list[Allocation]:
        """Return the allocations of some tensors, and record those that are new."""
        allocations = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            allocation = self.live.get(key)
            if allocation is None and tensor.device.type != "meta":
                allocation = self.live[key] = Allocation(self._maker or name, tuple(tensor.shape))
                self.resize(allocation, storage.nbytes())
                weakref.finalize(storage, self._free, key).atexit = False
            if allocation is not None:
                allocations.append(allocation)
        return allocations

    def _free(self, key: int) -> None:
        if allocation := self.live.pop(key, None):
            self.resize(allocation, 0)

    def resize(self, allocation: Allocation, size: int) -> None:
        """Record an allocation's new size in bytes."""
        if change := size - allocation.size:
            allocation.size = size
            allocation.largest = max(allocation.largest, size)
            self.record(Memory(allocation, change))


DECOMPOSED: dict[str, Callable[..., Any]] = {
    "titanlite.tiled_attention": tiled_attention._attention._init_fn,
    "titanlite.tiled_attention_backward": tiled_attention._attention_backward._init_fn,
}
"""Custom operators of titanlite. The trace records the operators that they call instead."""


def _grouped_mm(
    left: Tensor, right: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    groups = [] if left.dim() != right.dim() else [len(offs)] if left.dim() == 2 else [len(left)]
    return left.new_empty((*groups, left.shape[-2], right.shape[-1]), dtype=out_dtype)


RESULTS: dict[str, Callable[..., Any]] = {
    "aten._grouped_mm": _grouped_mm,
    "_c10d_functional.wait_tensor": lambda tensor: tensor,
}
"""Replaced operators: fake tensors lack _grouped_mm in float32 (torch 2.11 to 2.14), and wait_tensor must not copy."""


def _group_of(args: tuple[Any, ...]) -> str:
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            with contextlib.suppress(RuntimeError, TypeError):  # `unbox` raises if `arg` is no process group
                return dist.ProcessGroup.unbox(arg).group_name
    return next(arg for arg in reversed(args) if isinstance(arg, str) and arg not in ("sum", "max", "min", "avg"))


def _n_bytes(tensor: Tensor) -> int:
    """Return the bytes of memory that an operator reads or writes in a tensor; an expanded dimension counts once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments that an operator changes, according to its schema."""
    parameters = func._schema.arguments
    given = {**{parameter.name: arg for parameter, arg in zip(parameters, args, strict=False)}, **kwargs}
    writes = [parameter.name for parameter in parameters if parameter.alias_info and parameter.alias_info.is_write]
    return _tensors_in([given.get(name) for name in writes])


def _tensors_in(tree: Any) -> list[Tensor]:
    return [x for x in tree_iter(tree) if isinstance(x, Tensor)]


def _flops(
    name: str, inputs: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, str, tuple[int, ...]]:
    """Return `flops`, `dtype` and `sizes` of Work for an operator; a causal mask halves attention's FLOPs."""
    if name in ("mm", "addmm", "addmm_", "bmm", "_scaled_mm", "_grouped_mm"):  # _grouped_mm multiplies each row once
        left, right = (inputs[1], inputs[2]) if name.startswith("addmm") else (inputs[0], inputs[1])
        sizes = left.shape[0] if name == "bmm" else 1, left.shape[-2], right.shape[-1], left.shape[-1]
        return 2 * math.prod(sizes), "fp8" if name == "_scaled_mm" else _rate_dtype(left), sizes
    if "scaled_dot_product" in name:
        backward = "backward" in name
        q, k = (inputs[1], inputs[2]) if backward else (inputs[0], inputs[1])
        products = 5 if backward else 2  # the backward recomputes the scores
        sizes = q.shape[2], k.shape[2], q.shape[3]
        causal = next((arg for arg in reversed(args) if isinstance(arg, bool)), False)  # the last bool is is_causal
        flops = products * 2 * q.shape[0] * q.shape[1] * math.prod(sizes) // (2 if causal else 1)
        return flops, _rate_dtype(q), sizes
    if name == "record_largest_logits":  # causal mask: half the pairs of this rank's queries and all ranks' keys
        q, length = inputs[1], inputs[2].shape[1] * tiled_attention._size(args[5]) * tiled_attention._size(args[6])
        sizes = q.shape[0] * q.shape[2], q.shape[1], length, q.shape[3]
        return math.prod(sizes), _rate_dtype(q), sizes
    if name in ("_flash_attention_forward", "_flash_attention_backward"):  # packed sequences, q [N, H, K]
        backward = "backward" in name
        q, length = (inputs[1], args[8]) if backward else (inputs[0], args[5])  # max_q, the length of every sequence
        window = min(kwargs.get("window_size_left", length) + 1, length)
        pairs = window * (2 * length - window)  # twice the query-key pairs of a sequence
        flops = (5 if backward else 2) * q.numel() * pairs // length
        return flops, _rate_dtype(q), (length, window, q.shape[-1])
    return 0, "", ()


def _rate_dtype(tensor: Tensor) -> str:
    return "bf16" if tensor.dtype in (torch.bfloat16, torch.float16) else "fp32"


@contextlib.contextmanager
def recording() -> Iterator[OpTrace]:
    """Enter a FakeTensorMode and record an op trace of the operations in it.

    This replaces UntypedStorage.resize_, with which FSDP frees and allocates gathered weights without an operator, and
    a private method of ShardingPropagator (torch 2.11 to 2.15), with which DTensor runs operators on fake full tensors
    to learn a result's shape. Those operators are not recorded: a real run does not allocate their tensors."""
    trace, name = OpTrace(), "_propagate_tensor_meta_non_cached"
    resize, propagate = torch.UntypedStorage.resize_, getattr(ShardingPropagator, name)

    def recorded_resize(storage: torch.UntypedStorage, size: int) -> Any:
        if allocation := trace.live.get(storage._cdata):
            allocation.kind = "gathered"
            trace.resize(allocation, size)
        return resize(storage, size)

    def unrecorded_propagate(*args: Any) -> Any:
        with trace.paused():
            return propagate(*args)

    with (
        replaced(torch.UntypedStorage, "resize_", recorded_resize),
        replaced(ShardingPropagator, name, unrecorded_propagate),
        FakeTensorMode(allow_non_fake_inputs=True),
        trace,
    ):
        yield trace


def fused_norm(trace: OpTrace, local: Callable[[Tensor], list[Tensor]]) -> contextlib.AbstractContextManager[None]:
    """Record each RMSNorm inside the with block as one operator that saves its input, as CUDA and the compiler run it;
    a CPU runs a dozen operators, which save two float32 copies. `local` returns the plain tensors of a tensor."""
    composite = F.rms_norm

    def record(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        trace.record_work(name, *([x for tensor in side for x in local(tensor)] for side in (inputs, outputs)))

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
            with trace.paused():
                out, scale = composite(x, x.shape[-1:], weight, eps), x.new_empty((*x.shape[:-1], 1)).float()
            record(NORM, (x, weight), (out, scale))
            context.save_for_backward(x, weight, scale)
            context.eps = eps
            return out

        @staticmethod
        def backward(context: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
            x, weight, scale = context.saved_tensors
            with trace.paused(), torch.enable_grad():
                leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
                out = composite(leaves[0], x.shape[-1:], leaves[1], context.eps)
                grads = torch.autograd.grad(out, leaves, grad)
            record(NORM_BACKWARD, (grad, x, scale, weight), grads)
            return grads[0], grads[1], None

    return replaced(F, "rms_norm", lambda x, shape, weight, eps: Norm.apply(x, weight, eps))
