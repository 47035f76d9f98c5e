"""Small models of transformers with random weights, and the same [model] options for ours."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.test_model import draw_weights
from titanlite.build_llama import build_llama
from titanlite.config.schema import Model
from titanlite.hf.names import (
    BALANCE_BIAS,
    OUTPUT_HEAD,
    from_hf,
    hf_names,
    hf_tensors,
    is_stacked,
    named_weights,
    to_hf,
)
from titanlite.model import Llama

CPU = torch.device("cpu")
SEQ_LEN = 24
OURS: dict[str, Any] = {
    "dim": 32,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 48,
    "vocab_size": 60,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
THEIRS = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 60,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": SEQ_LEN,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "llama": ({}, "llama", {}),
    "llama, tied": ({"tie_embeddings": True}, "llama", {"tie_word_embeddings": True}),
    "llama, biases": (
        {"attention_bias": "all", "mlp_bias": True},
        "llama",
        {"attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ({"sliding_window": 8}, "mistral", {"sliding_window": 8}),
    "qwen2": ({"attention_bias": "qkv"}, "qwen2", {}),
    "qwen3": ({"qk_norm": True, "head_dim": 16}, "qwen3", {"head_dim": 16}),
    "qwen3, biases": (
        {"qk_norm": True, "head_dim": 16, "attention_bias": "all"},
        "qwen3",
        {"head_dim": 16, "attention_bias": True},
    ),
    "mixtral": (
        {"moe": {"n_experts": 4, "n_experts_per_token": 2, "normalize_scores": True}},
        "mixtral",
        {"num_local_experts": 4},
    ),
    "qwen3_moe": (
        {
            **{"qk_norm": True, "head_dim": 16},
            "moe": {
                **{"n_experts": 6, "n_experts_per_token": 3, "expert_dim": 24, "normalize_scores": True},
                "n_first_dense_layers": 1,
            },
        },
        "qwen3_moe",
        {
            **{"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
            **{"norm_topk_prob": True, "mlp_only_layers": [0]},
        },
    ),
    "olmoe": (
        {"qk_norm": "all_heads", "moe": {"n_experts": 8, "n_experts_per_token": 3}},
        "olmoe",
        {"num_experts": 8, "num_experts_per_tok": 3, "pad_token_id": None},
    ),
}
"""Our options that differ from OURS, transformers' model type, and its settings that differ from THEIRS."""
DEEPSEEK: dict[str, Any] = {
    "ours": {
        **{"n_kv_heads": 4, "norm_eps": 1e-6, "head_dim": -1},
        "mla": {
            **{"q_lora_rank": 20, "kv_lora_rank": 16},
            **{"qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12},
        },
        "moe": {
            **{"n_experts": 8, "n_experts_per_token": 3, "expert_dim": 16, "n_shared_experts": 2},
            **{"n_first_dense_layers": 1, "n_groups": 4, "n_groups_per_token": 2, "score_function": "sigmoid"},
            **{"normalize_scores": True, "score_scaling": 1.5, "balance_bias": True},
        },
    },
    "theirs": {
        **{"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "q_lora_rank": 20, "kv_lora_rank": 16},
        **{"qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12, "n_routed_experts": 8},
        **{"num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_shared_experts": 2, "first_k_dense_replace": 1},
        **{"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.5},
    },
}
YARN_OF_DEEPSEEK: dict[str, Any] = {
    "ours": {
        **{"rope_scaling_type": "yarn", "rope_scaling_factor": 40.0, "rope_original_seq_len": 16},
        "rope_attention_factor": 1.0,
    },
    "theirs": {
        **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 16},
        **{"mscale": 0.7, "mscale_all_dim": 0.7},
    },
}
FAMILIES["deepseek_v3"] = (DEEPSEEK["ours"], "deepseek_v3", DEEPSEEK["theirs"])
FAMILIES["deepseek_v3, yarn, no latent of queries"] = (
    {
        **{**DEEPSEEK["ours"], **YARN_OF_DEEPSEEK["ours"]},
        "mla": {**DEEPSEEK["ours"]["mla"], "q_lora_rank": 0, "mscale_all_dim": 0.7},
    },
    "deepseek_v3",
    {**DEEPSEEK["theirs"], "q_lora_rank": None, "rope_parameters": YARN_OF_DEEPSEEK["theirs"]},
)
GPT_OSS: dict[str, Any] = {
    "ours": {
        **{"head_dim": 16, "attention_bias": "all", "attention_sinks": True, "rope_yarn_truncate": False},
        **{"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "rope_original_seq_len": 16},
        "layer_pattern": [{"sliding_window": 8}, {}],
        "moe": {
            **{"n_experts": 4, "n_experts_per_token": 2, "normalize_scores": True, "expert_bias": True},
            **{"router_bias": True, "swiglu_limit": 1.5},
        },
    },
    "theirs": {
        **{"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 1.5, "sliding_window": 8},
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "truncate": False},
            **{"original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0},
        },
    },
}
FAMILIES["gpt_oss"] = (GPT_OSS["ours"], "gpt_oss", GPT_OSS["theirs"])
V2: dict[str, Any] = {
    "ours": {"score_function": "softmax", "normalize_scores": False, "balance_bias": False},
    "theirs": {key: value for key, value in DEEPSEEK["theirs"].items() if key != "norm_topk_prob"},
}
"""What DeepSeek-V2 has otherwise than -V3."""
FAMILIES["deepseek_v2"] = (
    {
        **DEEPSEEK["ours"],
        "moe": {**DEEPSEEK["ours"]["moe"], **V2["ours"], "n_groups": 1, "n_groups_per_token": 1},
    },
    "deepseek_v2",
    {**V2["theirs"], "topk_method": "greedy"},
)
FAMILIES["deepseek_v2, groups, yarn, no latent of queries"] = (
    {
        **{**DEEPSEEK["ours"], **YARN_OF_DEEPSEEK["ours"]},
        "mla": {**DEEPSEEK["ours"]["mla"], "q_lora_rank": 0, "mscale_all_dim": 0.7},
        "moe": {**DEEPSEEK["ours"]["moe"], **V2["ours"], "group_score": "max"},
    },
    "deepseek_v2",
    {
        **{**V2["theirs"], "topk_method": "group_limited_greedy", "q_lora_rank": None},
        "rope_parameters": YARN_OF_DEEPSEEK["theirs"],
    },
)
FAMILIES["deepseek_v3, epsilon of Moonlight"] = (
    {**DEEPSEEK["ours"], "norm_eps": 1e-3, "mla": {**DEEPSEEK["ours"]["mla"], "norm_eps": 1e-6}},
    "deepseek_v3",
    {**DEEPSEEK["theirs"], "rms_norm_eps": 1e-3},
)
WITH_EXPERTS = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "deepseek_v2", "gpt_oss")
CORRECTION = "e_score_correction_bias"
"""The end of names of DeepSeek-V3's biases that balance experts, which are buffers."""


def model_options(family: str = "llama", **options: Any) -> Model:
    return Model.model_validate({**OURS, **FAMILIES[family][0], **options})


def build_hf(family: str = "llama", dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """Return a model of transformers whose weights are larger than initial ones, and nowhere 0 or 1."""
    from transformers import AutoConfig, AutoModelForCausalLM

    _, kind, different = FAMILIES[family]
    config = AutoConfig.for_model(kind, **{**THEIRS, **different, **settings})
    # Of experts, transformers' own choices differ between devices and lack float64: "eager" is a loop over them.
    loop = {"experts_implementation": "eager"} if kind in WITH_EXPERTS else {}
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, **loop).eval()
    draw_weights(model)
    draw_biases(model)
    return model


@torch.no_grad()
def draw_biases(model: Any) -> None:
    """Fill the biases that balance experts, ours or transformers', with numbers as different as scores are."""
    generator = torch.Generator().manual_seed(4)
    for name, buffer in model.named_buffers():
        if name.endswith((CORRECTION, BALANCE_BIAS)):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))


def save_hf(folder: Path, family: str = "llama", **arguments: Any) -> Any:
    """Save a small model of transformers into a folder, and return it."""
    model = build_hf(family, dtype=arguments.pop("dtype", torch.float32))
    model.save_pretrained(folder, **arguments)
    return model


def empty_model(options: Model, dtype: torch.dtype = torch.float32) -> Llama:
    """Return our model in this process, its weights and the biases that balance experts NaN."""
    model = build_llama(options, max_seq_len=SEQ_LEN).to(dtype)
    model.materialize(CPU)
    with torch.no_grad():
        for tensor in named_weights(model).values():
            tensor.fill_(torch.nan)
    return model


def released(hf: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights or gradients of transformers' model by the names that released files have, as views: in memory,
    transformers stacks experts, the first two layers of each one on the other."""
    result = {}
    for name, tensor in tensors.items():
        start, _, kind = name.rpartition("experts.")
        stacked = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind if start else "")
        if stacked is None or hf.config.model_type == "gpt_oss":
            result[name] = tensor
            continue
        for layer, of_layer in zip(stacked, tensor.chunk(len(stacked), dim=1), strict=True):
            result |= {f"{start}experts.{e}.{layer}.weight": of_expert for e, of_expert in enumerate(of_layer)}
    if hf.config.model_type != "mixtral":
        return result
    for theirs, mixtral in (("mlp", "block_sparse_moe"), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        result = {name.replace(theirs, mixtral): tensor for name, tensor in result.items()}
    return result


def weights(hf: Any) -> dict[str, Tensor]:
    """Return what files of transformers' model have, by the names of released files."""
    tensors = released(hf, hf.state_dict())
    return {name: tensors[name] for name in tensors if name != OUTPUT_HEAD or not hf.config.tie_word_embeddings}


def ours(name: str, tensors: dict[str, Tensor], options: Model) -> Tensor:
    """Return what a parameter of ours is of tensors that have the names of released files."""
    parts = [from_hf(name, tensors[each], options) for each in hf_names(name, options)]
    return torch.stack(parts) if ".experts." in name and not is_stacked(name, options) else parts[0]


def theirs(tensors: dict[str, Tensor], options: Model) -> dict[str, Tensor]:
    """Return what our parameters, or their gradients, are by the names of released files."""
    found: dict[str, Tensor] = {}
    for there, names in hf_tensors(options, tensors).items():
        tensor = to_hf(names, [tensors[name] for name in names], options)
        of_each = ".experts." in names[0] and not is_stacked(names[0], options)
        found |= dict(zip(there, tensor if of_each else [tensor], strict=True))
    return found


def expected_weights(hf: Any, model: Llama, options: Model) -> dict[str, Tensor]:
    """Return what each of our parameters must be, from transformers' model in memory."""
    tensors = released(hf, hf.state_dict())
    return {name: ours(name, tensors, options) for name in named_weights(model)}


def draw_tokens(n_sequences: int = 2) -> Tensor:
    return torch.randint(OURS["vocab_size"], (n_sequences, SEQ_LEN), generator=torch.Generator().manual_seed(2))


LOGITS_TOLERANCE = 5e-5
"""As in tests/test_model.py: in float32 a product of n terms is off by up to n x 6e-8 of its terms' sizes, some 5e-6
for the 48 of the widest one here, and there are some 60 such products on the path, whose errors add up at random."""
