"""The weights' names here and in transformers, and the order of the rows that the rotary embedding pairs.

Here a head's channels 2i and 2i + 1 are rotated together, as in Meta's checkpoints; in transformers channels i and
i + K/2. So within each head, row 2i here is row i there, and row 2i + 1 here is row i + K/2 there. This applies to all
that computes the channels of q and k: the rows of wq and wk, their biases, and the weights of q_norm and k_norm.
"""

import torch
from torch import Tensor

from titanlite.config.schema import Model
from titanlite.model import Llama

MODULES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    # of layers.N here and model.layers.N there
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}
"""Module: its name in transformers."""
EXPERTS = {
    "feed_forward.router.weight": ("mlp.gate", "block_sparse_moe.gate"),
    "feed_forward.experts.w1": ("mlp.experts.{}.gate_proj", "block_sparse_moe.experts.{}.w1"),
    "feed_forward.experts.w3": ("mlp.experts.{}.up_proj", "block_sparse_moe.experts.{}.w3"),
    "feed_forward.experts.w2": ("mlp.experts.{}.down_proj", "block_sparse_moe.experts.{}.w2"),
}
"""Parameter of a mixture of experts: its module in Qwen3-MoE and OLMoE, and in Mixtral. {} is the number of an expert,
which has a tensor of its own there; here the experts of a layer are stacked."""
ROTATED = ("attention.wq", "attention.wk", "attention.q_norm", "attention.k_norm")
"""Modules whose rows are channels that the rotary embedding pairs."""
OUTPUT_HEAD = "lm_head.weight"


def parameter_shapes(model: Model) -> dict[str, torch.Size]:
    """Return the shape of each parameter of the full model; tied embeddings are one parameter, the embedding's."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in Llama(model, max_seq_len=1).named_parameters()}


def hf_name(name: str) -> str:
    """Return the name in transformers of a parameter outside a mixture of experts. Its shape is the same there."""
    module, _, kind = name.rpartition(".")
    prefix = ""
    if module.startswith("layers."):
        _, layer, module = module.split(".", 2)
        prefix = f"model.layers.{layer}."
    return f"{prefix}{MODULES[module]}.{kind}"


def hf_names(name: str, model: Model) -> list[str]:
    """Return the names in transformers of a parameter's tensors: one or, of experts, one for each. Of the families with
    experts, only Mixtral has no norms of queries and keys."""
    layer, _, rest = name.removeprefix("layers.").partition(".")
    if rest not in EXPERTS:
        return [hf_name(name)]
    module = EXPERTS[rest][not model.qk_norm]
    n_tensors = model.moe.n_experts if "{}" in module else 1
    return [f"model.layers.{layer}.{module.format(expert)}.weight" for expert in range(n_tensors)]


def is_rotated(name: str) -> bool:
    """Return whether the rows of a parameter are in another order in transformers."""
    return name.rpartition(".")[0].endswith(ROTATED)


def hf_rows(name: str, rows: Tensor, model: Model) -> Tensor:
    """Return which rows of the tensor in transformers are these rows of the parameter."""
    if not is_rotated(name):
        return rows
    channel, half = rows % model.head_dim, model.head_dim // 2
    return rows - channel + channel // 2 + channel % 2 * half


def from_hf(name: str, tensor: Tensor, model: Model) -> Tensor:
    """Return a full tensor of transformers with its rows in the order of the parameter."""
    return tensor[hf_rows(name, torch.arange(len(tensor)), model)] if is_rotated(name) else tensor


def to_hf(name: str, tensor: Tensor, model: Model) -> Tensor:
    """Return a full parameter with its rows in the order of transformers."""
    if not is_rotated(name):
        return tensor
    return tensor.unflatten(0, (-1, model.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
