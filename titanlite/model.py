"""The Llama model, written for one device: no code in this file depends on ranks or parallelism.

A Llama has RMSNorm before each sublayer, rotary position embedding (rope.py), grouped-query attention (GQA), SwiGLU,
and optionally tied embeddings. Sources: LLaMA (arXiv:2302.13971), Llama 2 (arXiv:2307.09288), Llama 3
(arXiv:2407.21783). Options add features of other families (docs/families.md): sliding-window attention (Mistral,
arXiv:2310.06825), biases (Qwen2, arXiv:2407.10671), norms of queries and keys and any head_dim (Qwen3,
arXiv:2505.09388; OLMoE, arXiv:2409.02060), norms after sublayers (OLMo 2, arXiv:2501.00656), scale factors (Granite),
layers of several kinds (Gemma 3, arXiv:2503.19786). Modules have the names that Meta's Llama code gave them.
Shapes: B batch, T sequence, N = B x T tokens, D model width, H query heads, G KV heads, K head_dim, F feed-forward
width, V vocabulary. Only attention needs the batch dimension: all other modules take tokens, [N, D]."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.config.schema import Model
from titanlite.rope import apply_rotary_emb, rope_table


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """Tells which tokens of a packed sequence belong to the same document: a token attends only within its document.
    fully_shard moves tensors to the device, but not a tensor in this object, which attention reads on the host."""

    positions_BT: Tensor
    """Position of each token in its document, int64 in host memory."""


class ScaledDotProductAttention(nn.Module):
    """Computes causal softmax(q k^T / sqrt K) v over the last `window` tokens (0: all). See also TiledAttention."""

    def __init__(self, window: int = 0):
        super().__init__()
        self.window = window
        self.register_parameter("sinks", None)  # set by techniques/attention_sinks.py

    def forward(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, documents: Documents | None = None) -> Tensor:
        """Return [B, T, H, K]. Query head h attends to KV head h * G // H. `documents` None: a sequence is one
        document."""
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


class NormPlusOne(nn.RMSNorm):
    """RMSNorm whose scale is 1 + weight (Gemma, arXiv:2403.08295): weight decay pulls the scale towards 1."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


NORMS = {"rms": nn.RMSNorm, "rms_plus_one": NormPlusOne, "layer": nn.LayerNorm}


def build_norm(model: Model, width: int) -> nn.Module:
    return NORMS[model.norm](width, eps=model.norm_eps)


class Attention(nn.Module):
    def __init__(self, model: Model):
        super().__init__()
        self.head_dim, bias = model.head_dim, model.attention_bias
        q_width, kv_width = model.n_heads * self.head_dim, model.n_kv_heads * self.head_dim
        self.wq = nn.Linear(model.dim, q_width, bias=bias != "none")
        self.wk = nn.Linear(model.dim, kv_width, bias=bias != "none")
        self.wv = nn.Linear(model.dim, kv_width, bias=bias != "none")
        self.wo = nn.Linear(q_width, model.dim, bias=bias == "all")
        self.norms_all_heads = model.qk_norm == "all_heads"  # a single norm covers the channels of all heads
        widths = (q_width, kv_width) if self.norms_all_heads else (self.head_dim, self.head_dim)
        self.q_norm, self.k_norm = (build_norm(model, n) if model.qk_norm else None for n in widths)
        self.is_rotated, self.query_scale = model.rope_dim > 0, model.query_scale
        self.inner_attention = ScaledDotProductAttention(model.sliding_window)

    def forward(self, x_ND: Tensor, rope_TK2: Tensor, documents: Documents | None) -> Tensor:
        """Return [N, D]. Views infer the number of heads (-1): under tensor parallel, a rank has only some heads."""
        sizes = -1, rope_TK2.shape[-3]
        q, k, v = self.wq(x_ND), self.wk(x_ND), self.wv(x_ND)
        if self.norms_all_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q_BTHK, k_BTGK, v_BTGK = (x.unflatten(-1, (-1, self.head_dim)).unflatten(0, sizes) for x in (q, k, v))
        if self.q_norm is not None and not self.norms_all_heads:
            q_BTHK, k_BTGK = self.q_norm(q_BTHK), self.k_norm(k_BTGK)
        if self.is_rotated:
            q_BTHK, k_BTGK = apply_rotary_emb(q_BTHK, rope_TK2), apply_rotary_emb(k_BTGK, rope_TK2)
        if self.query_scale != 1:
            q_BTHK = q_BTHK * self.query_scale
        return self.wo(self.inner_attention(q_BTHK, k_BTGK, v_BTGK, documents).flatten(0, 1).flatten(1))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): w2(silu(w1 x) * w3 x). `activation` may replace silu; `is_gated` False: without w3."""

    def __init__(self, dim: int, ffn_dim: int, *, bias: bool = False, activation: str = "silu", is_gated: bool = True):
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.w1 = nn.Linear(dim, ffn_dim, bias=bias)
        self.w2 = nn.Linear(ffn_dim, dim, bias=bias)
        self.w3 = nn.Linear(dim, ffn_dim, bias=bias) if is_gated else None

    def forward(self, x_ND: Tensor) -> Tensor:
        hidden_NF = self.activation(self.w1(x_ND))
        return self.w2(hidden_NF if self.w3 is None else hidden_NF * self.w3(x_ND))


class Block(nn.Module):
    """A layer of two sublayers: Attention and FeedForward, or modules in their place. Norms stand before the sublayers,
    after them, or both. `styles`: tensor-parallel styles of modules that the user has added, by module name."""

    styles: Mapping[str, Any] = {}

    def __init__(self, model: Model, attention: nn.Module, feed_forward: nn.Module):
        super().__init__()

        def norm(placement: str) -> nn.Module:
            return build_norm(model, model.dim) if model.norm_placement in (placement, "both") else nn.Identity()

        self.attention_norm, self.attention = norm("before"), attention
        self.attention_post_norm = norm("after")
        self.ffn_norm, self.feed_forward = norm("before"), feed_forward
        self.ffn_post_norm = norm("after")
        self.residual_scale = model.residual_scale

    def forward(self, x_ND: Tensor, rope_TK2: Tensor, documents: Documents | None = None) -> Tensor:
        x_ND, normed_ND = self.attend(x_ND, rope_TK2, documents)
        return torch.add(x_ND, self.ffn_post_norm(self.feed_forward(normed_ND)), alpha=self.residual_scale)

    def attend(self, x_ND: Tensor, rope_TK2: Tensor, documents: Documents | None) -> tuple[Tensor, Tensor]:
        y_ND = self.attention_post_norm(self.attention(self.attention_norm(x_ND), rope_TK2, documents))
        x_ND = torch.add(x_ND, y_ND, alpha=self.residual_scale)
        return x_ND, self.ffn_norm(x_ND)


class Output(nn.Linear):
    """The output head computes logits or, given targets, the loss. For the loss, only some logits exist at a time."""

    loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Function (x_ND, weight, targets_N) -> scalar loss, which must be set before `forward` gets targets."""

    def forward(self, x_ND: Tensor, targets_N: Tensor | None = None) -> Tensor:
        """Return logits [N, V], or the loss if there are targets."""
        return super().forward(x_ND) if targets_N is None else self.loss(x_ND, self.weight, targets_N)


class Llama(nn.Module):
    """The full model, or a pipeline stage, which lacks some layers and may have no `tok_embeddings`, `norm` or
    `output`. build_llama.py builds a Llama on the meta device, `materialize` gives it memory, and init.py draws its
    weights. `max_seq_len`: number of positions in the rotary table. `build_block`: returns the block of a layer by its
    number. `modules`: names of the modules to build (tok_embeddings, layers.N, norm, output); None: all."""

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

        self.max_seq_len, self.tied = max_seq_len, model.tie_embeddings
        self.embedding_scale, self.logits_scale = model.embedding_scale, model.logits_scale
        self.first_norm_weight = 0.0 if model.norm == "rms_plus_one" else 1.0
        self.rope_kinds, self.rope_of_layer = model.rope_kinds()
        self.register_buffer(
            "rope", torch.empty(len(self.rope_kinds), max_seq_len, model.rope_width // 2, 2), persistent=False
        )
        self.tok_embeddings = nn.Embedding(model.vocab_size, model.dim) if has("tok_embeddings") else None
        has_positions = model.learned_positions > 0 and has("tok_embeddings")
        self.position_embeddings = nn.Embedding(model.learned_positions, model.dim) if has_positions else None
        # Keys are layer numbers: a layer has the same name in a pipeline stage as in the full model.
        numbers = [layer for layer in range(model.n_layers) if has(f"layers.{layer}")]
        self.layers = nn.ModuleDict({str(layer): build_block(model.of_layer(layer), layer) for layer in numbers})
        self.norm = build_norm(model, model.dim) if has("norm") else None
        self.output = Output(model.dim, model.vocab_size, bias=False) if has("output") else None
        self.tie()

    def tie(self) -> None:
        """Let the output head use the embedding's weight if they are tied. Call this again if a weight is replaced."""
        if self.tied:
            self.output.weight = self.tok_embeddings.weight

    def materialize(self, device: torch.device, *, weights_on_cpu: bool = False) -> None:
        """Allocate memory for a model on the meta device, tie its weights again, and compute the rotary tables, which
        no checkpoint contains. `weights_on_cpu`: weights are in host memory, for CPU offload."""
        self.to_empty(device="cpu" if weights_on_cpu else device)
        self.tie()
        dtype = next(self.parameters()).dtype
        self.rope = torch.stack([rope_table(kind, self.max_seq_len, dtype) for kind in self.rope_kinds]).to(device)
        for module in self.modules():  # reset_buffers sets a module's buffers to their initial values
            getattr(module, "reset_buffers", lambda device: None)(device)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        targets: Tensor | None = None,
    ) -> Tensor:
        """Return logits [B, T, V], or the loss if there are targets; from a stage without output head, return [N, D].
        `tokens`: [B, T] token ids; in a stage without embedding, hidden states [N, D] instead. `positions`: [T] or [B,
        T], the position of each token for the rotary embedding; None: 0 to T - 1, with max_seq_len as T in a stage
        without embedding. `documents` None: a sequence is one document. `targets`: [B, T] token ids; -100: no loss."""
        length = self.max_seq_len if self.tok_embeddings is None else tokens.shape[1]
        ropes = (self.rope[:, :length] if positions is None else self.rope[:, positions]).unbind()
        x_ND = tokens if self.tok_embeddings is None else self.embed(tokens, positions)
        x_ND = self.run_layers(x_ND, ropes, documents)
        if self.norm is not None:
            x_ND = self.norm(x_ND)
        if self.output is None:
            return x_ND
        if self.logits_scale != 1:
            x_ND = x_ND * self.logits_scale
        if targets is not None:
            return self.output(x_ND, targets.flatten())
        return self.output(x_ND).unflatten(0, (-1, ropes[0].shape[-3]))

    def run_layers(self, x_ND: Tensor, ropes: Sequence[Tensor], documents: Documents | None) -> Tensor:
        for layer, block in self.layers.items():
            x_ND = block(x_ND, ropes[self.rope_of_layer[int(layer)]], documents)
        return x_ND

    def embed(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Return the residual stream before the first layer, [N, D]; arguments as for `forward`."""
        x_ND = self.tok_embeddings(tokens.flatten())
        if self.embedding_scale != 1:
            x_ND = x_ND * self.embedding_scale
        if self.position_embeddings is not None:
            positions = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
            x_ND = x_ND + self.position_embeddings(positions.expand(tokens.shape).flatten())
        return x_ND
