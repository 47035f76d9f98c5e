"""What a program does on fake tensors, written down: every allocation and its end, every operator's work, every
collective. Nothing is computed and nothing is sent, so the world can have any size.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from titanlite.parallel import context


@contextlib.contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """One rank's process group without the others: collectives return at once, with whatever their buffers held.

    Private: torch.testing._internal.distributed.fake_pg (tried on torch 2.11 to 2.15).
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Piece:
    """Memory that one tensor or several views of it lie in.

    Attributes:
        size: bytes now.
        largest: bytes at most, so far.
        maker: what allocated it: an operator's name, or what `OpTrace.naming` said.
        kind: what it is for (see titanlite/plan/memory.py); "" until somebody knows.
        shape: of the tensor it was allocated for.
    """

    __slots__ = ("kind", "largest", "maker", "shape", "size")

    def __init__(self, maker: str, shape: tuple[int, ...]):
        self.size, self.largest, self.maker, self.kind, self.shape = 0, 0, maker, "", shape


class Memory(NamedTuple):
    """A piece grows or shrinks, in bytes: allocated or freed."""

    piece: Piece
    change: int


class Work(NamedTuple):
    """An operator on the device.

    Attributes:
        name: as in aten.mm.
        flops: of matrix products and attention; 0 for all else.
        rate: what its matrix rate is of: "bf16", "fp8", "fp32"; "" without flops.
        read, written: bytes.
        inputs, outputs: the pieces these lie in.
    """

    name: str
    flops: int
    rate: str
    read: int
    written: int
    inputs: tuple[Piece, ...]
    outputs: tuple[Piece, ...]


class Traffic(NamedTuple):
    """A collective, or a message.

    Attributes:
        name: all_gather, reduce_scatter, all_reduce, all_to_all, send, receive, broadcast.
        group: its process group's name.
        size: bytes of the whole tensor: what is gathered, reduced, exchanged or sent.
    """

    name: str
    group: str
    size: int


class Mark(NamedTuple):
    """Where the program is: see titanlite/plan/rehearsal.py."""

    what: tuple[Any, ...]


Event = Memory | Work | Traffic | Mark

COLLECTIVES = {
    "c10d._allgather_base_": ("all_gather", 0),
    "c10d.allgather_": ("all_gather", 0),
    "c10d.allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d.reduce_scatter_": ("reduce_scatter", 1),
    "c10d.reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d.allreduce_": ("all_reduce", 0),
    "c10d.allreduce_coalesced_": ("all_reduce", 0),
    "c10d.alltoall_base_": ("all_to_all", 0),
    "c10d.broadcast_": ("broadcast", 0),
    "c10d.send": ("send", 0),
    "c10d.recv_": ("receive", 0),
    "_c10d_functional.all_gather_into_tensor": ("all_gather", None),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional.all_reduce": ("all_reduce", 0),
    "_c10d_functional.all_to_all_single": ("all_to_all", 0),
}
"""Operator to the collective's name and which argument is the whole tensor; None: the result is."""

FREE = {
    # They move nothing: memory of any content, and what only looks at it.
    *(
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "detach",
        "alias",
        "view",
        "_unsafe_view",
    ),
    *("_reshape_alias", "wait_tensor", "lift_fresh", "set_", "is_same_size", "resize_"),
}


class OpTrace(TorchDispatchMode):
    """Writes down what happens inside its context, which must be inside a FakeTensorMode.

    Attributes:
        events: in the order in which the CPU issues them.
        live: pieces that exist, by their storage's number.
        listens: whether operators are written down.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.live: dict[int, Piece] = {}
        self._watched: dict[int, Any] = {}
        self.listens, self._namer = True, ""

    def mark(self, *what: Any) -> None:
        self.events.append(Mark(what))

    @contextlib.contextmanager
    def naming(self, maker: str) -> Iterator[None]:
        """What is allocated in the body has this maker."""
        before, self._namer = self._namer, maker
        yield
        self._namer = before

    def piece_of(self, tensor: Tensor) -> Piece | None:
        """Where a plain tensor lies; None if it was made outside."""
        return self.live.get(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind not in (FakeTensor, Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # DTensor and the like: what they are made of comes back here
        kwargs = kwargs or {}
        name = str(func._schema.name).replace("::", ".")
        inner = INSIDE.get(name)
        if inner is not None:
            with self:
                return inner(*args, **kwargs)
        out = func(*args, **kwargs)
        if self.listens:
            self._record(name, func, args, kwargs, out)
        return out

    def _record(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        inputs = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_iter(out) if isinstance(x, Tensor)]
        if name in COLLECTIVES:
            self._pieces(name, outputs)
            what, whole = COLLECTIVES[name]
            tensors = [x for x in tree_iter(out if whole is None else args[whole]) if isinstance(x, Tensor)]
            self.events.append(Traffic(what, _group_of(args), sum(map(_n_bytes, tensors))))
            return
        before = {x.untyped_storage()._cdata for x in inputs}
        written_to = self._pieces(name, outputs)
        short = name.partition(".")[2]
        mutates = func._schema.is_mutable
        moves = mutates or any(x.untyped_storage()._cdata not in before for x in outputs)
        if short in FREE or not moves or (not inputs and not outputs):
            return
        flops, rate = _flops(short, inputs, args)
        self.events.append(
            Work(
                name,
                flops,
                rate,
                sum(map(_n_bytes, inputs)),
                sum(map(_n_bytes, outputs)) if outputs else (_n_bytes(inputs[0]) if mutates else 0),
                tuple(piece for x in inputs if (piece := self.piece_of(x))),
                tuple(written_to),
            )
        )

    def _pieces(self, name: str, tensors: list[Tensor]) -> list[Piece]:
        """The pieces of some tensors; those that are new begin here."""
        found = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            piece = self.live.get(key)
            if piece is None and tensor.device.type != "meta":
                piece = self.live[key] = Piece(self._namer or name, tuple(tensor.shape))
                self.change(piece, storage.nbytes())
                self._watched[key] = weakref.ref(storage, self._ender(key))
            if piece is not None:
                found.append(piece)
        return found

    def _ender(self, key: int) -> Callable[[Any], None]:
        def end(_: Any) -> None:
            self._watched.pop(key, None)
            piece = self.live.pop(key, None)
            if piece is not None:
                self.change(piece, -piece.size)

        return end

    def change(self, piece: Piece, change: int) -> None:
        """Bytes that a piece grows by."""
        if change:
            piece.size += change
            piece.largest = max(piece.largest, piece.size)
            self.events.append(Memory(piece, change))


INSIDE: dict[str, Callable[..., Any]] = {
    "titanlite.context_attention": context._attention._init_fn,
    "titanlite.context_attention_backward": context._attention_backward._init_fn,
}
"""Operators of our own, which are written down as what they consist of."""


def _group_of(args: tuple[Any, ...]) -> str:
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            with contextlib.suppress(RuntimeError, TypeError):
                return dist.ProcessGroup.unbox(arg).group_name
    return next(arg for arg in reversed(args) if isinstance(arg, str) and arg not in ("sum", "max", "min", "avg"))


def _n_bytes(tensor: Tensor) -> int:
    """Of what an operator touches: a view that repeats itself is read once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _flops(name: str, inputs: list[Tensor], args: tuple[Any, ...]) -> tuple[int, str]:
    """Operations of a matrix product or of attention (causal: of the half that counts), and at what rate they run."""
    if name in ("mm", "addmm", "bmm", "_scaled_mm"):
        left, right = (inputs[1], inputs[2]) if name == "addmm" else (inputs[0], inputs[1])
        flops = 2 * left.shape[-2] * left.shape[-1] * right.shape[-1] * (left.shape[0] if name == "bmm" else 1)
        return flops, "fp8" if name == "_scaled_mm" else _rate(left)
    if "scaled_dot_product" in name:
        backward = "backward" in name
        q, k = (inputs[1], inputs[2]) if backward else (inputs[0], inputs[1])
        products = 5 if backward else 2  # the backward computes the scores again
        pairs = q.shape[2] * k.shape[2]
        causal = next((arg for arg in reversed(args) if isinstance(arg, bool)), False)  # the last one in all schemas
        return products * 2 * q.shape[0] * q.shape[1] * pairs * q.shape[3] // (2 if causal else 1), _rate(q)
    return 0, ""


def _rate(tensor: Tensor) -> str:
    return "bf16" if tensor.dtype in (torch.bfloat16, torch.float16) else "fp32"


@contextlib.contextmanager
def recording() -> Iterator[OpTrace]:
    """Fake tensors, and a tape of what is done with them.

    Private: what FSDP frees and restores, past all operators, through UntypedStorage.resize_; and that DTensor tries
    operators on fake whole tensors, to learn what shape comes out, which no run with real ones spends memory on
    (ShardingPropagator; the same name in torch 2.11 to 2.15).
    """
    tape, name = OpTrace(), "_propagate_tensor_meta_non_cached"
    resize, propagate = torch.UntypedStorage.resize_, getattr(ShardingPropagator, name)

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        piece = tape.live.get(storage._cdata)
        if piece is not None:
            piece.kind = "gathered"
            tape.change(piece, size - piece.size)
        return resize(storage, size)

    def propagate_quietly(*args: Any) -> Any:
        before, tape.listens = tape.listens, False
        try:
            return propagate(*args)
        finally:
            tape.listens = before

    torch.UntypedStorage.resize_ = resize_
    setattr(ShardingPropagator, name, propagate_quietly)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), tape:
            yield tape
    finally:
        torch.UntypedStorage.resize_ = resize
        setattr(ShardingPropagator, name, propagate)
