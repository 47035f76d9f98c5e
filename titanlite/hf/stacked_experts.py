"""In gpt-oss's files, one tensor stacks all experts of a layer. The released model's tensors are quantized to MXFP4.

    mlp.experts.gate_up_proj       [E, D, 2F]  rows of this model's w1 and w3 in turn, as columns
    mlp.experts.down_proj          [E, F, D]   this model's w2, transposed
    ..._bias                       [E, 2F], [E, D]
    ..._blocks, ..._scales         [E, 2F, D / 32, 16] and [E, 2F, D / 32]; [E, D, F / 32, 16] and [E, D, F / 32]

E: experts, D: model width, F: width of an expert. MXFP4 (OCP Microscaling Formats, 1.0) stores two 4-bit numbers in a
byte, the first in the lower half. Each 32 numbers share a factor, a power of two, stored as its exponent plus 127.
MXFP4 is dequantized when read, and never written."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

TENSORS = {"w1": ("gate_up_proj", 2, 0), "w3": ("gate_up_proj", 2, 1), "w2": ("down_proj", 1, 0)}
"""For each weight of this model: its tensor in the file, how many weights alternate in that tensor, and its index."""
BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of FP4 numbers (E2M1), by the lower three bits; the fourth bit is the sign."""


def hf_name(name: str) -> str:
    """Return the name in the file, within a layer, of experts.w1, experts.w1_bias, and so on."""
    weight, bias = _split(name)
    return f"mlp.experts.{TENSORS[weight][0]}{bias}"


def _split(name: str) -> tuple[str, str]:
    weight, _, bias = name.rpartition("experts.")[2].partition("_")
    return weight, bias and f"_{bias}"


def hf_shape(names: Sequence[str], shapes: Mapping[str, torch.Size]) -> torch.Size:
    """Return the shape of the file's unquantized tensor that contains this model's weights `names`."""
    n_experts, rows, *columns = shapes[names[0]]
    return torch.Size((n_experts, *columns, rows * len(names)))


def quantized_shapes(shape: torch.Size) -> dict[str, torch.Size]:
    """Return the shapes of the blocks and the scales that replace a tensor of this shape."""
    n_experts, columns, rows = shape
    scales = n_experts, rows, -(-columns // GROUP)
    return {BLOCKS: torch.Size((*scales, GROUP // 2)), SCALES: torch.Size(scales)}


def to_hf(names: Sequence[str], weights: Sequence[Tensor]) -> Tensor:
    """Return the file's tensor that contains this model's `weights`, which may be biases."""
    in_turn = torch.stack(list(weights), 2).flatten(1, 2) if len(weights) > 1 else weights[0]
    return in_turn if in_turn.dim() == 2 else in_turn.transpose(1, 2).contiguous()


def from_hf(name: str, tensor: Tensor) -> Tensor:
    """Return a weight of this model from the file's tensor that contains it."""
    _, step, first = TENSORS[_split(name)[0]]
    return (tensor if tensor.dim() == 2 else tensor.transpose(1, 2))[:, first::step]


def read(name: str, slices: Sequence[Any], experts: Tensor, rows: Tensor, columns: Tensor | None) -> Iterator[Tensor]:
    """Yield this rank's shard of each expert's weight from safetensors slices; `columns` None: the weight is a bias."""
    _, step, first = TENSORS[_split(name)[0]]
    there, own = cover(rows * step + first)
    columns_there, own_columns = (slice(0, 0), None) if columns is None else cover(columns)
    for expert in experts.tolist():
        e = slice(expert, expert + 1)
        if len(slices) == 2:
            groups = slice(columns_there.start // GROUP, -(-columns_there.stop // GROUP))
            full = dequantize(*(each[e, there, groups][0] for each in slices))
            yield full[own][:, own_columns + columns_there.start % GROUP]
        elif columns is None:
            yield slices[0][e, there][0][own]
        else:
            yield slices[0][e, columns_there, there][0].T[own][:, own_columns]


def cover(indices: Tensor) -> tuple[slice, Tensor]:
    """Return a slice that covers some indices, and the positions of these indices within the slice."""
    first, last = map(int, indices.aminmax()) if len(indices) else (0, -1)
    return slice(first, last + 1), indices - first


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return float32 numbers [rows, columns] from blocks [rows, groups, 16] and scales [rows, groups]."""
    values = torch.tensor([*MAGNITUDES, *(-each for each in MAGNITUDES)])
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    return torch.ldexp(values[halves.int()], scales.int().unsqueeze(-1) - 127).flatten(-2)
