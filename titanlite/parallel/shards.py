"""What a rank has of a tensor that may be sharded."""

import math

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def shard_slice(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return which slice of the full tensor this rank has: the index of its first element, and its size, in each
    dimension. A plain tensor is its own slice.

    Private: compute_local_shape_and_global_offset (tried on torch 2.11, 2.13 and 2.15).
    """
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    size, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset), tuple(size)


def n_replicas(tensor: Tensor) -> int:
    """Return the number of ranks that have the same shard of a tensor. Raises ValueError for partial sums."""
    if not isinstance(tensor, DTensor):
        return 1
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"expected sharded or replicated tensors, got partial sums: {tensor.placements}")
    return math.prod(tensor.device_mesh.size(axis) for axis, p in enumerate(tensor.placements) if p.is_replicate())


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, and a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
