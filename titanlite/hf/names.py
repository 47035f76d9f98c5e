"""The weights' names here and in transformers, and the order of the rows that the rotary embedding pairs.

Here a head's channels 2i and 2i + 1 are rotated together, as in Meta's checkpoints; in transformers channels i and
i + K/2. So within each head, row 2i here is row i there, and row 2i + 1 here is row i + K/2 there. This applies to all
that computes the channels of q and k: the rows of wq and wk, their biases, and the weights of q_norm and k_norm. The
files of DeepSeek-V2 and -V3 have neighbouring channels, as here, so rows of latent attention stay.
"""

import torch
from torch import Tensor, nn

from titanlite.build_llama import build_llama
from titanlite.config.schema import Model

Q_NORM, Q_LATENT_NORM = "self_attn.q_norm", "self_attn.q_a_layernorm"
"""attention.q_norm in transformers, and what it is there with latent attention."""
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
    "attention.q_norm": Q_NORM,
    "attention.k_norm": "self_attn.k_norm",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.shared.w1": "mlp.shared_experts.gate_proj",
    "feed_forward.shared.w3": "mlp.shared_experts.up_proj",
    "feed_forward.shared.w2": "mlp.shared_experts.down_proj",
}
"""Module: its name in transformers."""
EXPERTS = {
    "router.weight": ("mlp.gate.weight", "block_sparse_moe.gate.weight"),
    "experts.w1": ("mlp.experts.{}.gate_proj.weight", "block_sparse_moe.experts.{}.w1.weight"),
    "experts.w3": ("mlp.experts.{}.up_proj.weight", "block_sparse_moe.experts.{}.w3.weight"),
    "experts.w2": ("mlp.experts.{}.down_proj.weight", "block_sparse_moe.experts.{}.w2.weight"),
    "router.balance_bias": ("mlp.gate.e_score_correction_bias", ""),
}
"""Tensor of a mixture of experts: its name in Qwen3-MoE, OLMoE and DeepSeek, and in Mixtral. {} is the number of an
expert, which has a tensor of its own there; here the experts of a layer are stacked."""
BALANCE_BIAS = ".router.balance_bias"
"""The end of names of the biases that balance experts: buffers, and always in float32."""
ROTATED = ("attention.wq", "attention.wk", "attention.q_norm", "attention.k_norm")
"""Modules whose rows are channels that the rotary embedding pairs."""
OUTPUT_HEAD = "lm_head.weight"


def tensor_shapes(model: Model) -> dict[str, torch.Size]:
    """Return the shape of each tensor of the full model that a folder has: its parameters, of which tied embeddings are
    one, the embedding's, and the biases that balance experts."""
    return {name: tensor.shape for name, tensor in named_weights(build_llama(model, max_seq_len=1)).items()}


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model and the buffers that are weights in transformers."""
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith(BALANCE_BIAS)}
    return {**dict(model.named_parameters()), **biases}


def hf_name(name: str) -> str:
    """Return the name in transformers of a parameter outside a mixture of experts. Its shape is the same there."""
    module, _, kind = name.rpartition(".")
    prefix = ""
    if module.startswith("layers."):
        _, layer, module = module.split(".", 2)
        prefix = f"model.layers.{layer}."
    return f"{prefix}{MODULES[module]}.{kind}"


def hf_names(name: str, model: Model) -> list[str]:
    """Return the names in transformers of a tensor of ours: one or, of experts, one for each. Of the families with
    experts, only Mixtral has neither norms of queries and keys nor latent attention."""
    is_latent = model.mla.kv_lora_rank > 0
    layer, _, rest = name.removeprefix("layers.").partition(".feed_forward.")
    if rest not in EXPERTS:
        return [hf_name(name).replace(Q_NORM, Q_LATENT_NORM) if is_latent else hf_name(name)]
    tensor = EXPERTS[rest][not (model.qk_norm or is_latent)]
    n_tensors = model.moe.n_experts if "{}" in tensor else 1
    return [f"model.layers.{layer}.{tensor.format(expert)}" for expert in range(n_tensors)]


def is_rotated(name: str, model: Model) -> bool:
    """Return whether the rows of a parameter are in another order in transformers."""
    return not model.mla.kv_lora_rank and name.rpartition(".")[0].endswith(ROTATED)


def hf_rows(name: str, rows: Tensor, model: Model) -> Tensor:
    """Return which rows of the tensor in transformers are these rows of the parameter."""
    if not is_rotated(name, model):
        return rows
    channel, half = rows % model.head_dim, model.head_dim // 2
    return rows - channel + channel // 2 + channel % 2 * half


def from_hf(name: str, tensor: Tensor, model: Model) -> Tensor:
    """Return a full tensor of transformers with its rows in the order of the parameter."""
    return tensor[hf_rows(name, torch.arange(len(tensor)), model)] if is_rotated(name, model) else tensor


def to_hf(name: str, tensor: Tensor, model: Model) -> Tensor:
    """Return a full parameter with its rows in the order of transformers."""
    if not is_rotated(name, model):
        return tensor
    return tensor.unflatten(0, (-1, model.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
