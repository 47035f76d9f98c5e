"""The slice of a sharded tensor that this rank has."""

import math
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


class Slice(NamedTuple):
    """A box of a tensor: in each dimension, the index of the first element and the number of elements."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def indices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + n) for start, n in zip(self.offset, self.size, strict=True))

    def overlap(self, other: "Slice") -> "Slice | None":
        """Return the intersection of both slices; None if it is empty."""
        starts = tuple(map(max, self.offset, other.offset))
        ends = (min(a + m, b + n) for a, m, b, n in zip(self.offset, self.size, other.offset, other.size, strict=True))
        size = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Slice(starts, size) if all(n > 0 for n in size) else None

    def inside(self, other: "Slice") -> tuple[slice, ...]:
        """Return the indices that select this slice from a tensor that is the `other` slice of the full tensor."""
        return Slice(tuple(a - b for a, b in zip(self.offset, other.offset, strict=True)), self.size).indices


def shard_slice(tensor: Tensor) -> Slice:
    """Return which slice of the full tensor this rank has: all of it for a plain tensor. Uses the private function
    compute_local_shape_and_global_offset (tested with torch 2.11, 2.13 and 2.15)."""
    if not isinstance(tensor, DTensor):
        return Slice((0,) * tensor.dim(), tuple(tensor.shape))
    size, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Slice(tuple(offset), tuple(size))


def n_replicas(tensor: Tensor) -> int:
    """Return the number of ranks that have the same shard of a tensor. Raises ValueError for unreduced partial sums."""
    if not isinstance(tensor, DTensor):
        return 1
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"expected sharded or replicated tensors, got partial sums: {tensor.placements}")
    return math.prod(tensor.device_mesh.size(axis) for axis, p in enumerate(tensor.placements) if p.is_replicate())


def local_shard(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
