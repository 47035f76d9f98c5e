"""Build the model that the [model] options ask for: choose latent attention, norms over all heads, attention sinks and
experts. This code is not in build.py, to avoid an import cycle: hf/names.py, which checkpoint/ imports, calls it."""

from collections.abc import Callable, Collection

import torch
from torch import nn

from titanlite.config.schema import Model
from titanlite.model import Attention, Block, FeedForward, Llama


def build_llama(
    model: Model, *, max_seq_len: int, modules: Collection[str] | None = None, block: Callable[..., Block] | None = None
) -> Llama:
    """Build a model on the meta device from the named `modules` (None: all). `block`, if set, replaces build_block."""
    with torch.device("meta"):
        return Llama(model, block or build_block, max_seq_len=max_seq_len, modules=modules)


def build_block(model: Model, layer: int) -> Block:
    """Build the block of a layer by its number. A technique is imported only if the model uses it."""
    attention: nn.Module
    if model.mla.kv_lora_rank:
        from titanlite.techniques.latent_attention_tensor import ShardableLatentAttention

        attention = ShardableLatentAttention(model)
    else:
        attention = Attention(model)
        if model.qk_norm == "all_heads":
            from titanlite.techniques.norm_over_heads import NormOverHeads

            widths = attention.wq.out_features, attention.wk.out_features
            attention.q_norm, attention.k_norm = (NormOverHeads(width, eps=model.norm_eps) for width in widths)
    if model.attention_sinks:
        from titanlite.techniques.attention_sinks import SinkAttention

        attention.inner_attention = SinkAttention(model)
    if model.has_experts(layer):
        from titanlite.techniques.moe.parallel import ShardableMixture

        return Block(model, attention, ShardableMixture(model))
    kind = {"bias": model.mlp_bias, "activation": model.activation, "is_gated": model.gated_ffn}
    return Block(model, attention, FeedForward(model.dim, model.ffn_dim, **kind))
