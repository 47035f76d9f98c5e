"""The Llama model, written for one device: nothing in this file knows of ranks or parallelism.

RMSNorm before each sublayer, rotary position embedding (RoPE, with Llama 3.1's scaling), grouped-query attention (GQA),
SwiGLU, optionally tied embeddings. Sources: LLaMA (arXiv:2302.13971), Llama 2 (arXiv:2307.09288), Llama 3
(arXiv:2407.21783). Other families are options: sliding-window attention (Mistral, arXiv:2310.06825), biases (Qwen2,
arXiv:2407.10671), norms of queries and keys and heads of any size (Qwen3, arXiv:2505.09388; OLMoE, arXiv:2409.02060),
linear (arXiv:2306.15595) and YaRN (arXiv:2309.00071) scaling. Module names are Llama's own, so that checkpoints and
tensor-parallel plans read as elsewhere.

Shapes: B batch, T sequence, N = B x T tokens, D model width, H query heads, G KV heads, K head_dim, F feed-forward
width, V vocabulary. Only attention tells sequences apart: everything else sees tokens, [N, D].
"""

import dataclasses
import math
from collections.abc import Callable, Collection
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.config.schema import Model


def rope_frequencies(model: Model) -> Tensor:
    """Return the angular frequency of each rotated pair of channels, radians per position, [K/2] in float64.

    With rope_scaling_factor > 1, wavelengths are stretched by it. "linear": all. "llama3": those longer than
    rope_original_seq_len / rope_low_freq_factor; those shorter than rope_original_seq_len / rope_high_freq_factor stay,
    and those between are blended (Llama 3.1 model card and reference code). "yarn": as llama3 with rope_beta_slow and
    rope_beta_fast, but the pairs between are blended by their number and not by their wavelength.
    """
    dim, scaling = model.rope_dim, model.rope_scaling_factor
    frequency = model.rope_theta ** -(torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    if scaling == 1:
        return frequency
    if model.rope_scaling_type == "linear":
        return frequency / scaling
    if model.rope_scaling_type == "yarn":
        unscaled = 1 - _yarn_ramp(model)
    else:
        low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
        periods = model.rope_original_seq_len * frequency / (2 * math.pi)  # of a pair within the original sequence
        unscaled = ((periods - low) / (high - low)).clamp(0, 1)
    return frequency * (unscaled + (1 - unscaled) / scaling)


def _yarn_ramp(model: Model) -> Tensor:
    """Return how far each pair of channels is stretched under YaRN, from 0 to 1, [K/2] in float64. The ramp begins and
    ends at whole numbers of pairs, as in the paper's code and in transformers."""

    def pair_with(periods: float) -> float:  # within the original sequence; between two pairs, in general
        wavelength = model.rope_original_seq_len / periods
        return model.rope_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(model.rope_theta))

    begin = max(math.floor(pair_with(model.rope_beta_fast)), 0)
    end = min(math.ceil(pair_with(model.rope_beta_slow)), model.rope_dim - 1)
    pairs = torch.arange(model.rope_dim // 2, dtype=torch.float64, device="cpu")
    return ((pairs - begin) / (end - begin or 0.001)).clamp(0, 1)


def rope_magnitude(model: Model) -> float:
    """Return the factor on rotated queries and keys, which YaRN scales so that attention over more tokens is as sharp
    as before (section 3.4 of its paper)."""
    if model.rope_scaling_factor == 1 or model.rope_scaling_type != "yarn":
        return 1.0
    factor = model.rope_attention_factor
    return factor if factor != -1 else 0.1 * math.log(model.rope_scaling_factor) + 1


def rope_table(frequencies: Tensor, length: int, dtype: torch.dtype, *, magnitude: float = 1.0) -> Tensor:
    """Return cos and sin of position * frequency, times the magnitude, [length, K/2, 2]. Angles are computed in
    float64: positions in the millions have no accurate sine in float32. The table is in float32, or in float64 for a
    float64 model."""
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), frequencies)
    table = magnitude * torch.stack((angles.cos(), angles.sin()), dim=-1)
    return table.to(torch.promote_types(dtype, torch.float32))


def apply_rotary_emb(x_BTHK: Tensor, rope_TK2: Tensor) -> Tensor:
    """Rotate each pair of neighbouring channels of queries or keys by its position's angle, in float32 or better.
    `rope_TK2` is cos and sin, [T, K/2, 2], or [B, T, K/2, 2] where positions differ between sequences."""
    pairs = x_BTHK.to(torch.promote_types(x_BTHK.dtype, torch.float32)).unflatten(-1, (-1, 2))
    cos_sin = rope_TK2.unsqueeze(-3)
    if torch.compiler.is_compiling():  # inductor has no kernels for complex numbers, and fuses this into one
        (cos, sin), signs = cos_sin.unsqueeze(-1).unbind(-2), 2 * torch.arange(2, device=pairs.device) - 1
        rotated = pairs * cos + pairs.flip(-1) * (sin * signs)
    else:  # one pass instead of seven
        rotated = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.view_as_complex(cos_sin))
    return rotated.flatten(-2).to(x_BTHK.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """Says which tokens of a packed sequence are one document: tokens attend only within theirs.

    It is not a bare tensor, since fully_shard moves tensors that a model is given to its device. Attention computes the
    sizes of its calls from this one, and reading those back would wait for the device.
    """

    positions_BT: Tensor
    """Position of each token in its document, int64 in host memory."""


class ScaledDotProductAttention(nn.Module):
    """Computes causal softmax(q k^T / sqrt K) v, over the last `window` tokens; 0: over all. Nothing else mixes
    positions; as a module it can be replaced."""

    def __init__(self, window: int = 0):
        super().__init__()
        self.window = window

    def forward(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, documents: Documents | None = None) -> Tensor:
        """Return [B, T, H, K]. Query head h attends to KV head h * G // H. Without documents a sequence is one."""
        if documents is None:
            q_BHTK, k_BGTK, v_BGTK = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
            grouped, length = q_BHTK.shape[1] != k_BGTK.shape[1], q_BHTK.shape[2]
            mask: dict[str, Any] = {"is_causal": True}
            if 0 < self.window < length:
                causal_TT = torch.ones(length, length, dtype=torch.bool, device=q_BHTK.device).tril()
                mask = {"attn_mask": causal_TT.triu(1 - self.window)}
            return F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTK, **mask, enable_gqa=grouped).transpose(1, 2)
        sequences = []
        for b, positions_T in enumerate(documents.positions_BT):
            starts = (positions_T[1:] == 0).nonzero().flatten() + 1
            bounds = pairwise([0, *starts.tolist(), len(positions_T)])
            qkv = q_BTHK[b : b + 1], k_BTGK[b : b + 1], v_BTGK[b : b + 1]
            sequences.append(torch.cat([self(*(x[:, start:end] for x in qkv)) for start, end in bounds], dim=1))
        return torch.cat(sequences)


class Attention(nn.Module):
    def __init__(self, model: Model):
        super().__init__()
        self.head_dim, bias = model.head_dim, model.attention_bias
        q_width, kv_width = model.n_heads * self.head_dim, model.n_kv_heads * self.head_dim
        self.wq = nn.Linear(model.dim, q_width, bias=bias != "none")
        self.wk = nn.Linear(model.dim, kv_width, bias=bias != "none")
        self.wv = nn.Linear(model.dim, kv_width, bias=bias != "none")
        self.wo = nn.Linear(q_width, model.dim, bias=bias == "all")
        self.norms_all_heads = model.qk_norm == "all_heads"  # together, and not each by itself
        widths = (q_width, kv_width) if self.norms_all_heads else (self.head_dim, self.head_dim)
        self.q_norm, self.k_norm = (nn.RMSNorm(n, eps=model.norm_eps) if model.qk_norm else None for n in widths)
        self.inner_attention = ScaledDotProductAttention(model.sliding_window)

    def forward(self, x_ND: Tensor, rope_TK2: Tensor, documents: Documents | None) -> Tensor:
        """Return [N, D]. Sequences and heads are counted by -1: a rank may have only some of them."""
        sizes = -1, rope_TK2.shape[-3]
        q, k, v = self.wq(x_ND), self.wk(x_ND), self.wv(x_ND)
        if self.norms_all_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q_BTHK, k_BTGK, v_BTGK = (x.unflatten(-1, (-1, self.head_dim)).unflatten(0, sizes) for x in (q, k, v))
        if self.q_norm is not None and not self.norms_all_heads:
            q_BTHK, k_BTGK = self.q_norm(q_BTHK), self.k_norm(k_BTGK)
        q_BTHK, k_BTGK = apply_rotary_emb(q_BTHK, rope_TK2), apply_rotary_emb(k_BTGK, rope_TK2)
        return self.wo(self.inner_attention(q_BTHK, k_BTGK, v_BTGK, documents).flatten(0, 1).flatten(1))


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202) computes w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, ffn_dim: int, *, bias: bool = False):
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=bias)
        self.w2 = nn.Linear(ffn_dim, dim, bias=bias)
        self.w3 = nn.Linear(dim, ffn_dim, bias=bias)

    def forward(self, x_ND: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_ND)) * self.w3(x_ND))


class Block(nn.Module):
    """A layer: `attention` is an Attention or does what it does, `feed_forward` a FeedForward or what does the same."""

    def __init__(self, model: Model, attention: nn.Module, feed_forward: nn.Module):
        super().__init__()
        self.attention_norm = nn.RMSNorm(model.dim, eps=model.norm_eps)
        self.attention = attention
        self.ffn_norm = nn.RMSNorm(model.dim, eps=model.norm_eps)
        self.feed_forward = feed_forward

    def forward(self, x_ND: Tensor, rope_TK2: Tensor, documents: Documents | None = None) -> Tensor:
        x_ND, normed_ND = self.attend(x_ND, rope_TK2, documents)
        return x_ND + self.feed_forward(normed_ND)

    def attend(self, x_ND: Tensor, rope_TK2: Tensor, documents: Documents | None) -> tuple[Tensor, Tensor]:
        x_ND = x_ND + self.attention(self.attention_norm(x_ND), rope_TK2, documents)
        return x_ND, self.ffn_norm(x_ND)


class Output(nn.Linear):
    """The output head projects to logits, or computes the loss, so that the logits need not all exist."""

    loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Of (x_ND, weight, targets_N), a scalar. Whoever passes targets sets it."""

    def forward(self, x_ND: Tensor, targets_N: Tensor | None = None) -> Tensor:
        """Return logits [N, V], or the loss if there are targets."""
        return super().forward(x_ND) if targets_N is None else self.loss(x_ND, self.weight, targets_N)


class Llama(nn.Module):
    """The full model, or a stage of it: `tok_embeddings`, `norm`, `output` may be None, `layers` may lack some.

    build_llama.py builds it on the meta device. Then `materialize` it and fill it with `titanlite.init.init_weights`:
    the constructor itself draws no weights. The rotary table has `max_seq_len` positions. `build_block` returns the
    block of a layer by its number. `modules` are the names of the modules to build (tok_embeddings, layers.N, norm,
    output); None: all.
    """

    def __init__(
        self,
        model: Model,
        build_block: Callable[[Model, int], Block],
        *,
        max_seq_len: int,
        modules: Collection[str] | None = None,
    ):
        super().__init__()

        def has(name: str) -> bool:
            return modules is None or name in modules

        self.max_seq_len, self.sliding_window, self.tied = max_seq_len, model.sliding_window, model.tie_embeddings
        self.rope_frequencies, self.rope_magnitude = rope_frequencies(model), rope_magnitude(model)
        rope = torch.empty(max_seq_len, len(self.rope_frequencies), 2)
        self.register_buffer("rope", rope, persistent=False)
        self.tok_embeddings = nn.Embedding(model.vocab_size, model.dim) if has("tok_embeddings") else None
        # Keyed by number, so that a layer keeps its name when the model is split into stages.
        numbers = [layer for layer in range(model.n_layers) if has(f"layers.{layer}")]
        self.layers = nn.ModuleDict({str(layer): build_block(model, layer) for layer in numbers})
        self.norm = nn.RMSNorm(model.dim, eps=model.norm_eps) if has("norm") else None
        self.output = Output(model.dim, model.vocab_size, bias=False) if has("output") else None
        self.tie()

    def tie(self) -> None:
        """Have the output head use the embedding's weight, if embeddings are tied. Whatever replaces a module's weights
        by others unties them."""
        if self.tied:
            self.output.weight = self.tok_embeddings.weight

    def materialize(self, device: torch.device, *, weights_on_cpu: bool = False) -> None:
        """Leave the meta device by `to_empty`, and restore what that loses: the tied weight, and the rotary table,
        which is no weight and in no checkpoint. `weights_on_cpu` is for CPU offload."""
        self.to_empty(device="cpu" if weights_on_cpu else device)
        self.tie()
        dtype, magnitude = next(self.parameters()).dtype, self.rope_magnitude
        self.rope = rope_table(self.rope_frequencies, self.max_seq_len, dtype, magnitude=magnitude).to(device)
        for block in self.layers.values():
            if hasattr(block.feed_forward, "router"):
                block.feed_forward.router.reset_buffers(device)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        targets: Tensor | None = None,
    ) -> Tensor:
        """Return logits [B, T, V], or the loss if there are targets; on a stage without output head, [N, D].

        Args:
            tokens: [B, T] token ids; on a stage without embedding, the previous stage's [N, D].
            positions: [T] or [B, T] position of each token for the rotary embedding; None: 0 .. T-1, where T is
                max_seq_len on a stage without embedding.
            documents: see Documents; None: a sequence is one document.
            targets: [B, T] token ids, -100 where there is nothing to predict.
        """
        length = self.max_seq_len if self.tok_embeddings is None else tokens.shape[1]
        rope_TK2 = self.rope[:length] if positions is None else self.rope[positions]
        x_ND = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens.flatten())
        for block in self.layers.values():
            x_ND = block(x_ND, rope_TK2, documents)
        if self.norm is not None:
            x_ND = self.norm(x_ND)
        if self.output is None:
            return x_ND
        if targets is not None:
            return self.output(x_ND, targets.flatten())
        return self.output(x_ND).unflatten(0, (-1, rope_TK2.shape[-3]))
