"""The fingerprint of a tensor: its squared norm, and its inner products with random vectors of +1 and -1.

The signs are a hash of (name, global index), so each rank computes the fingerprint of its own slice, and the sum over
ranks is the fingerprint of the full tensor. The squared difference of two tensors' inner products with a vector is, in
expectation, the squared distance of the tensors (Johnson and Lindenstrauss 1984; signs: Achlioptas 2003).

In vector k (1 .. 16), element (r, c) of a matrix has the sign a[k, r] * b[k, c] * s[r, c], where a, b and s are hashes.
s makes the signs within a vector independent; a and b, which are cheap, make the signs of two vectors uncorrelated."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from titanlite.init import parameter_seed

N_PRODUCTS = 16
"""Inner products per fingerprint. With 16, a distance is estimated with a relative standard deviation of 0.18."""
SIZE = 1 + N_PRODUCTS  # numbers per fingerprint: one squared norm, and the inner products
CHUNK_ELEMENTS = {"cpu": 2**16, "cuda": 2**24}
"""Number of elements whose signs are in memory at a time, by device. On a CPU, these signs fit into the cache."""
GOLDEN = -7046029254386353131
"""2**64 / golden ratio, as an int64. Its multiples are spread evenly (Knuth, volume 3, section 6.4)."""
FACTORS = -4658895280553007687, -7723592293110705685
"""Multipliers of the finalizer of SplitMix64 (Steele, Lea and Flood 2014), as int64."""
SIGN_BIT = -(2**63)


@torch.no_grad()
def fingerprint(name: str, matrix: Tensor, rows: Tensor, first_column: int = 0) -> Tensor:
    """Return the fingerprint of a slice of a tensor, [SIZE] in float64 on the slice's device.

    Args:
        name: the tensor's name, which seeds the signs.
        matrix: the slice as [R, C], of any floating-point or integer type.
        rows: [R] int64, the global index of each row.
        first_column: global index of the first column.
    """
    device, seed = matrix.device, parameter_seed(0, name)
    row_hashes = _hash(rows.to(device), seed)
    column_hashes = _hash(torch.arange(first_column, first_column + matrix.shape[1], device=device), seed + 1)
    column_signs, total = _signs(column_hashes), torch.zeros(SIZE, dtype=torch.float64, device=device)
    n_rows = max(CHUNK_ELEMENTS[device.type] // max(matrix.shape[1], 1), 1)
    for chunk, hashes in zip(matrix.split(n_rows), row_hashes.split(n_rows), strict=True):
        # The sign s is the highest bit of the product of an odd row hash and an odd column hash.
        signs = ((hashes | 1)[:, None] * (column_hashes | 1)).bitwise_and_(SIGN_BIT)
        signed = signs.bitwise_xor_(chunk.to(torch.float64).view(torch.int64)).view(torch.float64)
        total[0] += signed.square().sum()
        total[1:] += ((signed @ column_signs) * _signs(hashes)).sum(0)
    return total


def rows_of_slice(offset: Sequence[int], size: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return the global index of each row of a slice of a tensor. A tensor's last dimension is the columns."""
    rows = torch.zeros(1, dtype=torch.int64)
    for first, n, n_full in zip(offset[:-1], size[:-1], shape[:-1], strict=True):
        rows = (rows[:, None] * n_full + torch.arange(first, first + n)).flatten()
    return rows


def scaled(own: Tensor, factor: Tensor | float) -> Tensor:
    return torch.cat([own[:1] * factor * factor, own[1:] * factor])


def distance(a: Tensor, b: Tensor) -> float:
    """Estimate from fingerprints the relative distance of two tensors, the norm of their difference over the larger
    norm. Returns 0 if both tensors are zero, and infinity if a number of a fingerprint is not finite."""
    if not (a.isfinite().all() and b.isfinite().all()):
        return math.inf
    smaller, larger = sorted(fingerprint[0].item() ** 0.5 for fingerprint in (a, b))
    return max((a - b)[1:].square().mean().sqrt().item(), larger - smaller) / larger if larger else 0.0


def _hash(indices: Tensor, seed: int) -> Tensor:
    """Return an int64 hash of each index. int64 products wrap around on overflow."""
    x = indices * GOLDEN + (seed - 2**62)
    for factor in FACTORS:
        x = (x ^ (x >> 31)) * factor
    return x ^ (x >> 29)


def _signs(hashes: Tensor) -> Tensor:
    """Return N_PRODUCTS signs of each hash, [n, N_PRODUCTS] in float64."""
    bits = hashes[:, None] * FACTORS[0] >> torch.arange(32, 32 + N_PRODUCTS, device=hashes.device) & 1
    return 2.0 * bits.to(torch.float64) - 1
