"""Llama, written as for one device: nothing in this file knows of ranks or parallelism.

RMSNorm before each sublayer, rotary positions (with Llama 3.1's scaling), grouped-query attention, SwiGLU, an
optional tied output head. Sources: LLaMA (arXiv:2302.13971), Llama 2 (arXiv:2307.09288), Llama 3 (arXiv:2407.21783).
Module names are Llama's own, so that checkpoints and tensor-parallel plans read as elsewhere.

Shapes: B batch, T sequence, D model width, H query heads, G key/value heads, K head size, F feed-forward width,
V vocabulary.
"""

import math
from collections.abc import Callable, Collection, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rope_frequencies(
    head_dim: int, *, theta: float, scaling: float, low_factor: float, high_factor: float, original_seq_len: int
) -> Tensor:
    """Angular frequency of each rotated pair, radians a position, [K/2] in float64.

    With `scaling` > 1, wavelengths longer than original_seq_len / low_factor are stretched by it, those shorter than
    original_seq_len / high_factor are kept, and those between are blended (Llama 3.1 model card and reference code).
    """
    frequency = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    if scaling == 1:
        return frequency
    turns = original_seq_len * frequency / (2 * math.pi)  # how often a pair turns within the original sequence
    kept = ((turns - low_factor) / (high_factor - low_factor)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / scaling)


def rope_table(frequencies: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """exp(i * position * frequency), complex [length, K/2]. Computed in float64: positions in the millions times a
    frequency of 1 have no accurate sine in float32. Stored in complex64, or complex128 for a float64 model."""
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), frequencies)
    table = torch.polar(torch.ones_like(angles), angles)
    return table if dtype == torch.float64 else table.to(torch.complex64)


def apply_rotary_emb(x_BTHK: Tensor, rope_TK: Tensor) -> Tensor:
    """Turn each pair of neighbouring channels by its position's angle, in float32 or better.

    Args:
        x_BTHK: queries or keys.
        rope_TK: complex [T, K/2], or [B, T, K/2] where positions differ between sequences.
    """
    pairs = x_BTHK.to(torch.promote_types(x_BTHK.dtype, torch.float32)).unflatten(-1, (-1, 2))
    turned = torch.view_as_complex(pairs) * rope_TK.unsqueeze(-2)
    return torch.view_as_real(turned).flatten(-2).to(x_BTHK.dtype)


class ScaledDotProductAttention(nn.Module):
    """Causal softmax(q k^T / sqrt K) v: the one part of attention that mixes positions, so that it can be replaced."""

    def forward(
        self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, document_positions_BT: Tensor | None = None
    ) -> Tensor:
        """Head h attends with key head h * G // H.

        Args:
            document_positions_BT: position of each token in its document, int64 in host memory: tokens attend only within
                theirs. None: a sequence is one document.

        Returns:
            [B, T, H, K].
        """
        if document_positions_BT is not None:
            return torch.stack(
                [
                    torch.cat(
                        [
                            self(*(x[start:end].unsqueeze(0) for x in row)).squeeze(0)
                            for start, end in bounds(document_positions)
                        ]
                    )
                    for *row, document_positions in zip(q_BTHK, k_BTGK, v_BTGK, document_positions_BT, strict=True)
                ]
            )
        out_BHTK = F.scaled_dot_product_attention(
            q_BTHK.transpose(1, 2),
            k_BTGK.transpose(1, 2),
            v_BTGK.transpose(1, 2),
            is_causal=True,
            enable_gqa=q_BTHK.shape[2] != k_BTGK.shape[2],
        )
        return out_BHTK.transpose(1, 2)


def bounds(document_positions_T: Tensor) -> list[tuple[int, int]]:
    """First token and end of each document of a sequence, from the positions of its tokens in their document_positions."""
    starts = [0, *((document_positions_T[1:] == 0).nonzero().flatten() + 1).tolist()]
    return list(zip(starts, [*starts[1:], len(document_positions_T)], strict=True))


class Attention(nn.Module):
    def __init__(self, *, dim: int, n_heads: int, n_kv_heads: int):
        super().__init__()
        self.head_dim = dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)
        self.inner_attention = ScaledDotProductAttention()

    def forward(self, x_BTD: Tensor, rope_TK: Tensor, document_positions_BT: Tensor | None) -> Tensor:
        # -1 heads: a rank may hold only some of them.
        q_BTHK = self.wq(x_BTD).unflatten(-1, (-1, self.head_dim))
        k_BTGK = self.wk(x_BTD).unflatten(-1, (-1, self.head_dim))
        v_BTGK = self.wv(x_BTD).unflatten(-1, (-1, self.head_dim))
        out_BTHK = self.inner_attention(
            apply_rotary_emb(q_BTHK, rope_TK), apply_rotary_emb(k_BTGK, rope_TK), v_BTGK, document_positions_BT
        )
        return self.wo(out_BTHK.flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): w2(silu(w1 x) * w3 x)."""

    def __init__(self, *, dim: int, ffn_dim: int):
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))


class Block(nn.Module):
    def __init__(self, *, dim: int, n_heads: int, n_kv_heads: int, ffn_dim: int, norm_eps: float):
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.attention = Attention(dim=dim, n_heads=n_heads, n_kv_heads=n_kv_heads)
        self.ffn_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.feed_forward = FeedForward(dim=dim, ffn_dim=ffn_dim)

    def forward(self, x_BTD: Tensor, rope_TK: Tensor, document_positions_BT: Tensor | None = None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rope_TK, document_positions_BT)
        return x_BTD + self.feed_forward(self.ffn_norm(x_BTD))


class Output(nn.Linear):
    """The output head.

    Attributes:
        loss: what makes a scalar of (x, weight, targets), so that the logits need not all exist; to be set by whoever
            gives targets.
    """

    loss: Callable[[Tensor, Tensor, Tensor], Tensor]

    def forward(self, x_BTD: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Logits [B, T, V], or the loss if there are targets."""
        return super().forward(x_BTD) if targets_BT is None else self.loss(x_BTD, self.weight, targets_BT)


class Llama(nn.Module):
    """The whole model, or a part of it: `tok_embeddings`, `norm` and `output` may be None, `layers` may lack some.

    Build it under `torch.device("meta")`, then `materialize` it and fill it with `titanlite.init.init_weights`: the
    constructor itself draws no weights.

    Args:
        max_seq_len: positions that the rotary table holds.
        only: names of the modules to have (tok_embeddings, layers.N, norm, output); None: all.
        The others are the dimensions of titanlite/sizes.py.
    """

    def __init__(
        self,
        *,
        dim: int,
        n_layers: int,
        n_heads: int,
        n_kv_heads: int,
        ffn_dim: int,
        vocab_size: int,
        max_seq_len: int,
        norm_eps: float,
        tie_embeddings: bool,
        rope_theta: float,
        rope_scaling_factor: float,
        rope_low_freq_factor: float,
        rope_high_freq_factor: float,
        rope_original_seq_len: int,
        only: Collection[str] | None = None,
    ):
        super().__init__()

        def has(name: str) -> bool:
            return only is None or name in only

        self.max_seq_len = max_seq_len
        self.rope_frequencies = rope_frequencies(
            dim // n_heads,
            theta=rope_theta,
            scaling=rope_scaling_factor,
            low_factor=rope_low_freq_factor,
            high_factor=rope_high_freq_factor,
            original_seq_len=rope_original_seq_len,
        )
        self.register_buffer("rope", torch.empty(max_seq_len, dim // n_heads // 2, dtype=torch.complex64), False)
        self.tok_embeddings = nn.Embedding(vocab_size, dim) if has("tok_embeddings") else None
        # Keyed by number, so that a layer keeps its name when the model is cut into stages.
        self.layers = nn.ModuleDict(
            {
                str(layer): Block(dim=dim, n_heads=n_heads, n_kv_heads=n_kv_heads, ffn_dim=ffn_dim, norm_eps=norm_eps)
                for layer in range(n_layers)
                if has(f"layers.{layer}")
            }
        )
        self.norm = nn.RMSNorm(dim, eps=norm_eps) if has("norm") else None
        self.output = Output(dim, vocab_size, bias=False) if has("output") else None
        self.tied = tie_embeddings
        self.tie()

    def tie(self) -> None:
        """Have the output head use the embedding's weight, in a model that is meant so. What replaces a module's
        weights by others unties them."""
        if self.tied:
            self.output.weight = self.tok_embeddings.weight

    def materialize(self, device: torch.device, *, weights_on_cpu: bool = False) -> None:
        """Leave the meta device: `to_empty`, and what that loses: the tie, and the rotary table, which is no weight
        and in no checkpoint.

        Args:
            weights_on_cpu: for offloaded weights, which visit `device` only for their turn.
        """
        self.to_empty(device="cpu" if weights_on_cpu else device)
        self.tie()
        table = rope_table(self.rope_frequencies, self.max_seq_len, next(self.parameters()).dtype)
        self.rope = table.to(device)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_positions: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Tensor:
        """Args:
            tokens: [B, T] token numbers; on a stage without embedding, the previous stage's [B, T, D].
            positions: [T] or [B, T] position of each token for the rotation, by default 0 .. T-1.
            document_positions: see ScaledDotProductAttention.
            targets: [B, T] token numbers, -100 where there is nothing to predict.

        Returns:
            Logits [B, T, V], or the loss if there are targets; on a stage without output head, [B, T, D].
        """
        rope_TK = self.rope[: tokens.shape[1]] if positions is None else self.rope[positions]
        if document_positions is not None:
            document_positions = document_positions.cpu()  # once here, not in each layer
        x_BTD = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for block in self.layers.values():
            x_BTD = block(x_BTD, rope_TK, document_positions)
        if self.norm is not None:
            x_BTD = self.norm(x_BTD)
        return self.output(x_BTD, targets) if self.output is not None else x_BTD


def flops_per_token(parameters: Iterable[tuple[str, int]], *, n_layers: int, dim: int, seq_len: int, tied: bool) -> int:
    """Floating-point operations to train on one token: 6 N + 12 L D T, the convention of torchtitan and of the PaLM
    paper (arXiv:2204.02311, appendix B).

    N counts every weight that is multiplied with a token's activations: all but the input embedding, which is a look-up
    (a tied one is also the output head and counts). The second term is attention, counted without the causal mask.
    Recomputed activations do not count.

    Args:
        parameters: (name, number of elements) of the whole model.
    """
    weights = sum(size for name, size in parameters if tied or not name.startswith("tok_embeddings"))
    return 6 * weights + 12 * n_layers * dim * seq_len
