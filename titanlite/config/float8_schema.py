"""The options of matrix products in 8 bits: [float8] and [int8]."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from titanlite.config.loader import Section


class Float8(Section):
    enable: bool = False
    """Compute the matrix products of linear layers in 8-bit floating point."""
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"] = "tensorwise"
    """tensorwise: a scale per tensor; rowwise: a scale per row, more accurate; rowwise_with_gw_hp: rowwise, with weight
    gradients in the model's data type; mxfp8: a power of two as the scale of each 32 values (OCP Microscaling), for
    compute capability 10.0 (Blackwell)."""
    emulate: bool = False
    """Round to float8 but multiply in the model's data type, for hardware without the recipe's products."""
    filter_fqns: list[str] = Field(default=[])
    """Skip layers whose name contains one of these, as in ["layers.0.", "attention.wk"]. The output head is always
    skipped, and layers whose weight on a rank has a dimension that is not a multiple of 16 (mxfp8: 32)."""
    enable_fsdp_float8_all_gather: bool = False
    """FSDP gathers weights in float8. Tensorwise only."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Compute the scales of all weights together after the optimizer step. Needs enable_fsdp_float8_all_gather."""


class Int8(Section):
    enable: bool = False
    """Compute the matrix products of linear layers in 8-bit integers, with a scale per row and column (INT8
    mixed-precision training)."""
    filter_fqns: list[str] = Field(default=[])
    """Skip layers whose name contains one of these. The output head is always skipped, and layers whose weight on a
    rank has a dimension that is not a multiple of 16."""
