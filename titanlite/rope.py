"""Rotary position embedding (RoPE, arXiv:2104.09864) on R of a head's K channels, with scaling for long sequences.
Shapes: B batch, T sequence, H heads, K head_dim, R rotated channels."""

import math

import torch
from torch import Tensor

from titanlite.config.schema import Model


def rope_frequencies(model: Model, length: int) -> Tensor:
    """Return the angular frequency of each rotated pair of channels, radians per position, [R/2] in float64.

    A rope_scaling_factor > 1 stretches wavelengths. "linear" stretches all. "llama3" stretches wavelengths above
    rope_original_seq_len / rope_low_freq_factor, keeps wavelengths below rope_original_seq_len / rope_high_freq_factor,
    and blends between (Llama 3.1 model card and reference code). "yarn" (arXiv:2309.00071) is as "llama3" with
    rope_beta_slow and rope_beta_fast as the two factors, but it blends by a pair's index, not its wavelength.
    "longrope" (arXiv:2402.13753) has a factor per pair up to a `length` of rope_original_seq_len, and another above."""
    dim, scaling = model.rope_dim, model.rope_scaling_factor
    frequency = model.rope_theta ** -(torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    if scaling == 1:
        return frequency
    if model.rope_scaling_type == "longrope":
        is_long = length > model.rope_original_seq_len
        return frequency / frequency.new_tensor(model.rope_long_factors if is_long else model.rope_short_factors)
    if model.rope_scaling_type == "linear":
        return frequency / scaling
    if model.rope_scaling_type == "yarn":
        unscaled = 1 - _yarn_ramp(model)
    else:
        low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
        periods = model.rope_original_seq_len * frequency / (2 * math.pi)  # periods in rope_original_seq_len tokens
        unscaled = ((periods - low) / (high - low)).clamp(0, 1)
    return frequency * (unscaled + (1 - unscaled) / scaling)


def _yarn_ramp(model: Model) -> Tensor:
    """Return the share of YaRN's stretching that each pair of channels gets, from 0 to 1, [R/2] in float64. The ramp
    begins and ends at integer pair indices, as in the paper's code, unless rope_yarn_truncate = false."""

    def pair_with(periods: float) -> float:  # fractional index of the pair with `periods` turns in the original length
        wavelength = model.rope_original_seq_len / periods
        return model.rope_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(model.rope_theta))

    down, up = (math.floor, math.ceil) if model.rope_yarn_truncate else (float, float)
    begin = max(down(pair_with(model.rope_beta_fast)), 0)
    end = min(up(pair_with(model.rope_beta_slow)), model.rope_dim - 1)
    pairs = torch.arange(model.rope_dim // 2, dtype=torch.float64, device="cpu")
    return ((pairs - begin) / (end - begin or 0.001)).clamp(0, 1)


def rope_magnitude(model: Model) -> float:
    """Return the factor by which YaRN (arXiv:2309.00071, section 3.4) and LongRoPE scale rotated queries and keys, so
    that attention stays sharp over longer sequences; 1 for other types of scaling."""
    if model.rope_scaling_factor == 1 or model.rope_scaling_type not in ("yarn", "longrope"):
        return 1.0
    if model.rope_attention_factor != -1:
        return model.rope_attention_factor
    growth = math.log(model.rope_scaling_factor)
    if model.rope_scaling_type == "longrope":
        return math.sqrt(1 + growth / math.log(model.rope_original_seq_len))
    return 0.1 * growth + 1


def rope_table(model: Model, length: int, dtype: torch.dtype, angle_dtype: torch.dtype = torch.float64) -> Tensor:
    """Return cos and sin of position * frequency, times rope_magnitude, [length, K/2, 2], in float32 or better.
    Unrotated channels come last (cos 1, sin 0). `angle_dtype` float32 is inaccurate for positions in the millions."""
    frequencies, magnitude = rope_frequencies(model, length).to(angle_dtype), rope_magnitude(model)
    angles = torch.outer(torch.arange(length, dtype=angle_dtype, device="cpu"), frequencies)
    table = magnitude * torch.stack((angles.cos(), angles.sin()), dim=-1)
    rest = torch.tensor([1.0, 0.0], dtype=table.dtype).expand(length, (model.rope_width - model.rope_dim) // 2, 2)
    return torch.cat((table, rest), dim=1).to(torch.promote_types(dtype, torch.float32))


def apply_rotary_emb(x_BTHK: Tensor, rope_TK2: Tensor) -> Tensor:
    """Rotate each pair of neighbouring channels of queries or keys by the angle of its token's position, in float32 or
    better. `rope_TK2` contains cos and sin: [T, K/2, 2], or [B, T, K/2, 2] if positions differ between sequences."""
    pairs = x_BTHK.to(torch.promote_types(x_BTHK.dtype, torch.float32)).unflatten(-1, (-1, 2))
    cos_sin = rope_TK2.unsqueeze(-3)
    if torch.compiler.is_compiling():  # inductor has no complex kernels, but fuses these real operators into one
        (cos, sin), signs = cos_sin.unsqueeze(-1).unbind(-2), 2 * torch.arange(2, device=pairs.device) - 1
        rotated = pairs * cos + pairs.flip(-1) * (sin * signs)
    else:  # a complex product is one pass over memory; in eager mode, the operators above are seven
        rotated = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.view_as_complex(cos_sin))
    return rotated.flatten(-2).to(x_BTHK.dtype)
