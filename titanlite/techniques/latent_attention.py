"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv:2405.04434, section 2.1), written for one device.

The keys and values of all heads are computed from one small vector per token, the latent. If q_lora_rank is set, the
queries are computed from a second latent. All heads share the key channels with rotary embedding, which are computed
from the residual stream and not from the latent. DeepSeek-V3 (arXiv:2412.19437) uses the same layer.
Shapes: B batch, T sequence, N = B x T tokens, D model width, H heads, Q q_lora_rank, L kv_lora_rank. A head of queries
or keys has K = P + R channels, P without and R with rotary embedding; a head of values has V channels."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.config.schema import Model
from titanlite.model import Documents, ScaledDotProductAttention
from titanlite.rope import apply_rotary_emb


class LatentAttention(nn.Module):
    """Replaces model.Attention, and computes queries, keys and values from latents. torch's fused attention requires
    the same width of keys and values, so values are padded with zeros from V to K channels."""

    def __init__(self, model: Model):
        super().__init__()
        mla = model.mla
        self.head_dim, self.v_head_dim = mla.qk_head_dim, mla.v_head_dim
        self.nope_dim, self.rope_dim, self.kv_rank = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.kv_lora_rank
        self.query_scale = query_scale(model)
        q_dim, eps = model.n_heads * self.head_dim, model.norm_eps if mla.norm_eps == -1 else mla.norm_eps

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        has_latent = mla.q_lora_rank > 0
        self.wq = None if has_latent else linear(model.dim, q_dim)
        self.wq_a = linear(model.dim, mla.q_lora_rank) if has_latent else None
        self.q_norm = nn.RMSNorm(mla.q_lora_rank, eps=eps) if has_latent else None
        self.wq_b = linear(mla.q_lora_rank, q_dim) if has_latent else None
        self.wkv_a = linear(model.dim, self.kv_rank + self.rope_dim)
        self.kv_norm = nn.RMSNorm(self.kv_rank, eps=eps)
        self.wkv_b = linear(self.kv_rank, model.n_heads * (self.nope_dim + self.v_head_dim))
        self.wo = linear(model.n_heads * self.v_head_dim, model.dim)
        self.inner_attention = ScaledDotProductAttention(model.sliding_window)

    def latents(self, x_ND: Tensor) -> list[Tensor]:
        """Return the tensors that all heads share: the latent of queries [N, Q] (only if q_lora_rank is set), the
        latent of keys and values [N, L], and the key channels for the rotary embedding, not yet rotated, [N, R]."""
        kv_NL, k_NR = self.wkv_a(x_ND).split((self.kv_rank, self.rope_dim), dim=-1)
        q_latent = [self.q_norm(self.wq_a(x_ND))] if self.wq is None else []
        return [*q_latent, self.kv_norm(kv_NL), k_NR]

    def forward(self, x_ND: Tensor, rope_TK2: Tensor, documents: Documents | None) -> Tensor:
        """Return the output [N, D]. Arguments: as for model.Attention.forward."""
        sizes = -1, rope_TK2.shape[-3]  # (sequences, tokens of each): unflatten infers this rank's number of sequences
        *q_latent, kv_NL, k_NR = self.latents(x_ND)
        q_NHK = (self.wq_b(*q_latent) if self.wq is None else self.wq(x_ND)).unflatten(-1, (-1, self.head_dim))
        q_BTHP, q_BTHR = q_NHK.unflatten(0, sizes).split((self.nope_dim, self.rope_dim), dim=-1)
        kv_NHC = self.wkv_b(kv_NL).unflatten(-1, (-1, self.nope_dim + self.v_head_dim))
        k_BTHP, v_BTHV = kv_NHC.unflatten(0, sizes).split((self.nope_dim, self.v_head_dim), dim=-1)
        k_BT1R = apply_rotary_emb(k_NR.unflatten(0, sizes).unsqueeze(2), rope_TK2)
        q_BTHK = torch.cat((q_BTHP, apply_rotary_emb(q_BTHR, rope_TK2)), dim=-1)
        k_BTHK = torch.cat((k_BTHP, k_BT1R.expand_as(q_BTHR)), dim=-1)
        v_BTHK = F.pad(v_BTHV, (0, self.head_dim - self.v_head_dim))
        if self.query_scale != 1:
            q_BTHK = q_BTHK * self.query_scale
        out_BTHK = self.inner_attention(q_BTHK, k_BTHK, v_BTHK, documents)
        return self.wo(out_BTHK[..., : self.v_head_dim].flatten(0, 1).flatten(1))


def query_scale(model: Model) -> float:
    """Return the factor on queries, apart from the 1 / sqrt(K) of inner attention. Under YaRN, DeepSeek multiplies
    scores by the square of the factor that YaRN's paper applies to rotated queries and keys each."""
    if model.rope_scaling_factor == 1:
        return 1.0
    return (0.1 * model.mla.mscale_all_dim * math.log(model.rope_scaling_factor) + 1) ** 2
