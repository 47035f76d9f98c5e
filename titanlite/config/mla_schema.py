"""The options of multi-head latent attention, [model.mla]."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from titanlite.config.loader import Section
from titanlite.config.types import Count, CountOrZero, NotNegative


class Mla(Section):
    """Multi-head latent attention (MLA, DeepSeek-V2, arXiv:2405.04434): the keys and values of all heads are computed
    from one small vector per token. All but kv_lora_rank is read only when that is above 0."""

    kv_lora_rank: CountOrZero = 0
    """Width of the vector (latent) from which a token's keys and values are computed; 0: attention has none."""
    q_lora_rank: CountOrZero = 0
    """Width of the vector (latent) from which a token's queries are computed; 0: they are computed from the residual
    stream."""
    qk_nope_head_dim: Count = 128
    """Channels of a head of queries and keys without rotary embedding."""
    qk_rope_head_dim: Count = 64
    """Channels of a head of queries and keys with rotary embedding; those of keys are the same in all heads."""
    v_head_dim: Count = 128
    """Channels of a head of values."""
    mscale_all_dim: NotNegative = 0.0
    """yarn: the scores of attention are multiplied by (0.1 mscale_all_dim ln(rope_scaling_factor) + 1)^2, so that it is
    as sharp as before the scaling."""

    @property
    def qk_head_dim(self) -> int:
        """Channels of a head of queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def parameters(self, dim: int, n_heads: int) -> int:
        """Return the number of parameters of a layer's latent attention."""
        q_lora, kv_lora, q_dim = self.q_lora_rank, self.kv_lora_rank, n_heads * self.qk_head_dim
        queries = q_lora * (dim + 1 + q_dim) if q_lora else dim * q_dim
        latents = dim * (kv_lora + self.qk_rope_head_dim) + kv_lora
        keys_and_values = kv_lora * n_heads * (self.qk_nope_head_dim + self.v_head_dim)
        return queries + latents + keys_and_values + n_heads * self.v_head_dim * dim


def implied_head_dim(values: Any) -> int | None:
    """Return the head_dim that values of [model.mla] imply; None if there is no latent attention, or they are wrong."""
    try:
        mla = Mla.model_validate(values)
    except ValidationError:  # reported by the section that has them
        return None
    return mla.qk_head_dim if mla.kv_lora_rank else None
