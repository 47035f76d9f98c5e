"""config.json of Hugging Face: both spellings, the families, and what is rejected, in one line each."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.config import FLAVOR, LAYERS, ROOT, WINDOW, load, problems
from titanlite.checkpoint.initial_weights import is_hugging_face
from titanlite.config.hf.config_json import hf_config, model_options
from titanlite.config.hf.families import FAMILIES
from titanlite.config.hf.values import LARGEST_FILE
from titanlite.config.model_sizes import SIZES
from titanlite.config.schema import Model, Moe
from titanlite.data.open import build_tokenizer
from titanlite.hf.config_files import model_of
from titanlite.launch.cli import run_command
from titanlite.tools.generate.folder import open_folder

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 80,
}
"""A config.json as small as one can be."""
QWEN2, QWEN3, MISTRAL = ({**LLAMA, "model_type": name} for name in ("qwen2", "qwen3", "mistral"))
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 8}
OLMOE = {**LLAMA, "model_type": "olmoe", "num_experts_per_tok": 2, "num_experts": 8}
QWEN3_MOE = {**OLMOE, "model_type": "qwen3_moe", "moe_intermediate_size": 24}
DEEPSEEK = {**LLAMA, "model_type": "deepseek_v3", "num_key_value_heads": 4, "first_k_dense_replace": 1}
DEEPSEEK_V2 = {**DEEPSEEK, "model_type": "deepseek_v2", "num_experts_per_tok": 6}
OLMO3, SMOLLM3, PHI3, GEMMA3 = ({**LLAMA, "model_type": name} for name in ("olmo3", "smollm3", "phi3", "gemma3_text"))
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 80}
ASSETS = "model.hf_assets_path"


def write(folder: Path, content: Any) -> Path:
    """Write a config.json, from an object or as text or bytes, and return its folder."""
    content = content if isinstance(content, (str, bytes)) else json.dumps(content)
    (folder / "config.json").write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def options(folder: Path, content: Any) -> dict[str, Any]:
    return model_options(write(folder, content))


# What is read --------------------------------------------------------------------------------------------------------

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ROPE_LLAMA3 = {
    "rope_scaling_type": "llama3",
    "rope_scaling_factor": 8.0,
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "rope_original_seq_len": 8192,
}
YARN = {"factor": 4, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5, "original_max_position_embeddings": 512}
ROPE_YARN = {
    "rope_scaling_type": "yarn",
    "rope_scaling_factor": 4.0,
    "rope_beta_fast": 16.0,
    "rope_beta_slow": 2.0,
    "rope_attention_factor": 1.5,
    "rope_original_seq_len": 512,
}
MLA = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
MOE_OF_DEEPSEEK = {
    **{"n_experts": 256, "n_experts_per_token": 8, "expert_dim": 2048, "n_shared_experts": 1},
    **{"n_first_dense_layers": 1, "score_function": "sigmoid", "normalize_scores": True, "score_scaling": 2.5},
    **{"n_groups": 8, "n_groups_per_token": 4, "balance_bias": True},
}
YARN_OF_DEEPSEEK = {
    **{"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    "original_max_position_embeddings": 4096,
}
ROPE_OF_DEEPSEEK = {"rope_scaling_type": "yarn", "rope_scaling_factor": 40.0, "rope_original_seq_len": 4096}
RELEASED_DEEPSEEK = {
    **{"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "ep_size": 1},
    **{"aux_loss_alpha": 0.001, "bos_token_id": 0, "eos_token_id": 1, "first_k_dense_replace": 3, "hidden_act": "silu"},
    **{"hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512},
    **{"max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048},
    **{"moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True},
    **{"num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128},
    **{"num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128},
    **{"qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": YARN_OF_DEEPSEEK, "rope_theta": 10000},
    **{"routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False},
    **{"topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128},
    **{"vocab_size": 129280, "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}},
}
"""The config.json of deepseek-ai/DeepSeek-V3 without its quantization_config."""
MOONLIGHT = {
    **{**RELEASED_DEEPSEEK, "bos_token_id": 163584, "eos_token_id": 163585, "first_k_dense_replace": 1},
    **{"hidden_size": 2048, "intermediate_size": 11264, "max_position_embeddings": 8192, "n_group": 1},
    **{"moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_attention_heads": 16},
    **{"num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "num_nextn_predict_layers": 0},
    **{"q_lora_rank": None, "rms_norm_eps": 1e-05, "rope_theta": 50000.0, "routed_scaling_factor": 2.446},
    **{"topk_group": 1, "vocab_size": 163840},
}
del MOONLIGHT["rope_scaling"]
KIMI_K2 = {
    **{**RELEASED_DEEPSEEK, "model_type": "kimi_k2", "bos_token_id": 163584, "eos_token_id": 163585},
    **{"first_k_dense_replace": 1, "max_position_embeddings": 131072, "n_group": 1, "n_routed_experts": 384},
    **{"num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "rope_theta": 50000.0},
    **{"routed_scaling_factor": 2.827, "topk_group": 1, "vocab_size": 163840},
    "rope_scaling": {**YARN_OF_DEEPSEEK, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
}
RELEASED_V2_LITE = {
    **{"architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0},
    **{"aux_loss_alpha": 0.001, "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1},
    **{"hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944},
    **{"kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v2"},
    **{"moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64},
    **{"n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6},
    **{"num_hidden_layers": 27, "num_key_value_heads": 16, "pretraining_tp": 1, "q_lora_rank": None},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000},
    "rope_scaling": {**YARN_OF_DEEPSEEK, "mscale": 0.707, "mscale_all_dim": 0.707},
    **{"routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True, "tie_word_embeddings": False},
    **{"topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128},
    **{"vocab_size": 102400, "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}},
}
RELEASED_V2 = {
    **{**RELEASED_V2_LITE, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536},
    **{"n_group": 8, "n_routed_experts": 160, "num_attention_heads": 128, "num_hidden_layers": 60},
    **{"num_key_value_heads": 128, "q_lora_rank": 1536, "routed_scaling_factor": 16.0, "topk_group": 3},
    "topk_method": "group_limited_greedy",
}
"""The config.json of moonshotai/Moonlight-16B-A3B, of moonshotai/Kimi-K2-Instruct without its quantization_config, of
deepseek-ai/DeepSeek-V2-Lite and of DeepSeek-V2."""
SIZE_OF_RELEASED = {
    "moonlight_16b_a3b": MOONLIGHT,
    "kimi_k2_1t": KIMI_K2,
    "deepseek_v2_lite": RELEASED_V2_LITE,
    "deepseek_v2_236b": RELEASED_V2,
    "deepseek_v3_671b": RELEASED_DEEPSEEK,
}
MOE_OF_V2 = {
    **{"n_experts": 64, "n_experts_per_token": 6, "expert_dim": 1407, "n_shared_experts": 2, "n_first_dense_layers": 1},
    **{"score_function": "softmax", "normalize_scores": False, "score_scaling": 1.0, "balance_bias": False},
    **{"n_groups": 1, "n_groups_per_token": 1},
}
SLIDING, FULL = ["sliding_attention"] * 3, ["full_attention"] * 3
# fmt: off
READ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the least":           (LLAMA, {"dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 4, "head_dim": 16,
                                    "ffn_dim": 96, "vocab_size": 80, "norm_eps": 1e-6, "tie_embeddings": False,
                                    "attention_bias": "none", "mlp_bias": False, "qk_norm": False, "sliding_window": 0,
                                    "rope_theta": 10_000.0, "rope_scaling_factor": 1.0}),
    "null":                ({**LLAMA, "num_key_value_heads": None, "head_dim": None, "rope_scaling": None},
                            {"n_kv_heads": 4, "head_dim": 16, "rope_scaling_factor": 1.0}),
    "all":                 ({**LLAMA, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
                             "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
                             "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "pretraining_tp": 1,
                             "attention_dropout": 0.0},
                            {"n_kv_heads": 2, "head_dim": 32, "norm_eps": 1e-5, "rope_theta": 5e5, "mlp_bias": True,
                             "tie_embeddings": True, "attention_bias": "all"}),
    "heads of any width":  ({**MISTRAL, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 12},
                            {"n_heads": 5, "n_kv_heads": 5, "head_dim": 12}),
    "theta, hub":          ({**LLAMA, "rope_theta": 5}, {"rope_theta": 5.0}),
    "theta, 5.0":          ({**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 5.5}},
                            {"rope_theta": 5.5, "rope_scaling_factor": 1.0}),
    "llama3, hub":         ({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
                            {"rope_theta": 5e5, **ROPE_LLAMA3}),
    "llama3, 5.0":         ({**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
                            {"rope_theta": 5e5, **ROPE_LLAMA3}),
    "both spellings":      ({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3},
                             "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
                            {"rope_theta": 5e5, **ROPE_LLAMA3}),
    "linear, old key":     ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2}},
                            {"rope_scaling_type": "linear", "rope_scaling_factor": 2.0}),
    "yarn":                ({**LLAMA, "rope_scaling": {"rope_type": "yarn", **YARN}}, ROPE_YARN),
    "yarn, least":         ({**LLAMA, "max_position_embeddings": 256, "rope_scaling": {"type": "yarn", "factor": 2.0}},
                            {"rope_scaling_type": "yarn", "rope_beta_fast": 32.0, "rope_beta_slow": 1.0,
                             "rope_attention_factor": -1, "rope_original_seq_len": 256}),
    "mistral":             (MISTRAL, {"sliding_window": 4096, "n_kv_heads": 8, "head_dim": 16}),
    "mistral, no window":  ({**MISTRAL, "sliding_window": None, "num_key_value_heads": 2},
                            {"sliding_window": 0, "n_kv_heads": 2}),
    "mistral, window":     ({**MISTRAL, "sliding_window": 7, "layer_types": SLIDING}, {"sliding_window": 7}),
    "qwen2":               (QWEN2, {"attention_bias": "qkv", "qk_norm": False, "sliding_window": 0, "n_kv_heads": 32}),
    "qwen2, unused":       ({**QWEN2, "use_sliding_window": False, "sliding_window": 7, "max_window_layers": 1},
                            {"sliding_window": 0}),
    "qwen2, window":       ({**QWEN2, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
                            {"sliding_window": 7}),
    "qwen2, no layer":     ({**QWEN2, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3},
                            {"sliding_window": 0}),
    "qwen3":               (QWEN3, {"qk_norm": True, "head_dim": 128, "attention_bias": "none", "sliding_window": 0}),
    "qwen3, biases":       ({**QWEN3, "attention_bias": True, "layer_types": FULL},
                            {"attention_bias": "all", "sliding_window": 0}),
    "qwen3, layer types":  ({**QWEN3, "use_sliding_window": True, "sliding_window": 7, "layer_types": SLIDING},
                            {"sliding_window": 7}),
    "mixtral":             (MIXTRAL,
                            {"moe": {"n_experts": 8, "n_experts_per_token": 2, "normalize_scores": True},
                             "n_kv_heads": 8, "norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": 0,
                             "qk_norm": False, "ffn_dim": 96}),
    "mixtral, hub":        ({**MIXTRAL, "sliding_window": 7, "head_dim": 12,
                             "router_jitter_noise": 0.0, "router_aux_loss_coef": 0.02, "output_router_logits": False},
                            {"sliding_window": 7, "head_dim": 12}),
    "qwen3_moe":           (QWEN3_MOE,
                            {"moe": {"n_experts": 8, "n_experts_per_token": 2, "expert_dim": 24, "every_n_layers": 1,
                                     "n_first_dense_layers": 0, "normalize_scores": False},
                             "n_kv_heads": 4, "head_dim": 16, "norm_eps": 1e-6, "qk_norm": True, "ffn_dim": 96}),
    "qwen3_moe, hub":      ({**QWEN3_MOE, "head_dim": 32, "norm_topk_prob": True, "decoder_sparse_step": 2,
                             "mlp_only_layers": [0, 1], "max_window_layers": 48, "use_sliding_window": False,
                             "sliding_window": None, "attention_bias": True, "num_key_value_heads": 2,
                             "num_hidden_layers": 4},
                            {"moe": {"n_experts": 8, "n_experts_per_token": 2, "expert_dim": 24, "every_n_layers": 2,
                                     "n_first_dense_layers": 2, "normalize_scores": True},
                             "n_kv_heads": 2, "head_dim": 32, "attention_bias": "all", "sliding_window": 0}),
    "qwen3_moe, 5.0":      ({**{key: value for key, value in QWEN3_MOE.items() if key != "num_experts"},
                             "num_local_experts": 4, "use_sliding_window": True, "sliding_window": 7},
                            {"sliding_window": 7,
                             "moe": {"n_experts": 4, "n_experts_per_token": 2, "expert_dim": 24, "every_n_layers": 1,
                                     "n_first_dense_layers": 0, "normalize_scores": False}}),
    "olmoe":               (OLMOE,
                            {"moe": {"n_experts": 8, "n_experts_per_token": 2, "normalize_scores": False},
                             "n_kv_heads": 4, "head_dim": 16, "norm_eps": 1e-5, "qk_norm": "all_heads",
                             "rope_theta": 1e4, "sliding_window": 0}),
    "deepseek_v3":         (DEEPSEEK,
                            {"n_kv_heads": 4, "head_dim": 192, "norm_eps": 1e-6, "qk_norm": False, "ffn_dim": 96,
                             "mla": {**MLA, "mscale_all_dim": 0.0}, "moe": MOE_OF_DEEPSEEK, "rope_theta": 1e4}),
    "deepseek_v3, hub":    (RELEASED_DEEPSEEK, {"rope_attention_factor": 1.0, **ROPE_OF_DEEPSEEK,
                             "mla": {**MLA, "mscale_all_dim": 1.0}, "tie_embeddings": False,
                             "moe": {**MOE_OF_DEEPSEEK, "n_first_dense_layers": 3}}),
    "deepseek_v3, 5.0":    ({**DEEPSEEK, "q_lora_rank": None, "head_dim": 64, "qk_head_dim": 192,
                             "rope_interleave": True, "num_nextn_predict_layers": 0,
                             "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, "factor": 40.0,
                                                 "mscale_all_dim": 0.5, "attention_factor": 1.25,
                                                 "original_max_position_embeddings": 4096}},
                            {"rope_attention_factor": 1.25, "rope_theta": 5e4, **ROPE_OF_DEEPSEEK,
                             "mla": {**MLA, "q_lora_rank": 0, "mscale_all_dim": 0.5}}),
    "deepseek_v3, mscale": ({**DEEPSEEK, "rope_scaling": {**YARN_OF_DEEPSEEK, "mscale": 0.5, "mscale_all_dim": 1.0}},
                            {"rope_attention_factor": (0.05 * math.log(40) + 1) / (0.1 * math.log(40) + 1)}),
    "deepseek_v3, mscale of paper": (
                            {**DEEPSEEK, "rope_scaling": {**YARN_OF_DEEPSEEK, "mscale": 1.0, "mscale_all_dim": 0}},
                            {"rope_attention_factor": -1, "mla": {**MLA, "mscale_all_dim": 0.0}}),
    "deepseek_v3, dense":  ({**DEEPSEEK, "first_k_dense_replace": 3, "n_routed_experts": 7},
                            {"mla": {**MLA, "mscale_all_dim": 0.0}}),
    "deepseek_v3, eps":    ({**DEEPSEEK, "rms_norm_eps": 1e-5},
                            {"norm_eps": 1e-5, "mla": {**MLA, "mscale_all_dim": 0.0, "norm_eps": 1e-6}}),
    "deepseek_v3, moonlight": (MOONLIGHT, {"norm_eps": 1e-5}),
    "deepseek_v2":         (DEEPSEEK_V2,
                            {"norm_eps": 1e-6, "mla": {**MLA, "mscale_all_dim": 0.0}, "moe": MOE_OF_V2}),
    "deepseek_v2, groups": ({**DEEPSEEK_V2, "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3},
                            {"moe": {**MOE_OF_V2, "n_groups": 8, "n_groups_per_token": 3, "group_score": "max"}}),
    "deepseek_v2, all groups": (
                            {**DEEPSEEK_V2, "topk_method": "group_limited_greedy", "n_group": 64, "topk_group": 64},
                            {"moe": {**MOE_OF_V2, "n_groups": 64, "n_groups_per_token": 64}}),
    "deepseek_v2, unused groups": ({**DEEPSEEK_V2, "n_group": 3, "topk_group": 2}, {"moe": MOE_OF_V2}),
    "deepseek_v2, lite":   (RELEASED_V2_LITE, {"moe": {**MOE_OF_V2, "expert_dim": 1408}}),
    "deepseek_v2, hub":    (RELEASED_V2, {"rope_attention_factor": 1.0, **ROPE_OF_DEEPSEEK,
                             "mla": {**MLA, "mscale_all_dim": 0.707}}),
    "olmoe, hub":          ({**OLMOE, "clip_qkv": None, "norm_topk_prob": True, "head_dim": 16,
                             "num_key_value_heads": 2, "attention_bias": True, "num_local_experts": 8,
                             "router_aux_loss_coef": 0.01},
                            {"n_kv_heads": 2, "attention_bias": "all",
                             "moe": {"n_experts": 8, "n_experts_per_token": 2, "normalize_scores": True}}),
}
# fmt: on


@pytest.mark.parametrize("name", READ)
def test_values(tmp_path: Path, name: str):
    content, expected = READ[name]
    actual = options(tmp_path, content)
    assert {key: actual[key] for key in expected} == expected
    assert actual.keys() - {"moe", "mla"} == SIZES["debug"].keys()
    Model.model_validate({**actual, "flavor": "from_hf"})  # complete, and of the right types


HF_NAMES_OF_DEEPSEEK = {
    **{"expert_dim": "moe_intermediate_size", "n_shared_experts": "n_shared_experts", "n_groups": "n_group"},
    **{"n_first_dense_layers": "first_k_dense_replace", "n_groups_per_token": "topk_group"},
    "score_scaling": "routed_scaling_factor",
}


@pytest.mark.parametrize("flavor", SIZE_OF_RELEASED)
def test_named_size_is_the_released_model(tmp_path: Path, flavor: str):
    released = Model.model_validate(options(tmp_path, SIZE_OF_RELEASED[flavor]))
    assert released.identity() == Model(flavor=flavor).identity()


@pytest.mark.parametrize("name", READ)
def test_defaults_are_those_of_transformers(tmp_path: Path, name: str):
    """transformers reads the same file: its dimensions are ours."""
    from transformers import AutoConfig

    ours = options(tmp_path, READ[name][0])
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert (ours["dim"], ours["n_heads"], ours["n_kv_heads"]) == (
        theirs.hidden_size,
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
    )
    head_dim = "qk_head_dim" if "mla" in ours else "head_dim"
    assert ours["head_dim"] == (getattr(theirs, head_dim, None) or theirs.hidden_size // theirs.num_attention_heads)
    assert (ours["norm_eps"], ours["tie_embeddings"]) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert ours["rope_theta"] == theirs.rope_parameters["rope_theta"]
    assert ours["rope_scaling_factor"] == theirs.rope_parameters.get("factor", 1.0)
    if "original_max_position_embeddings" in theirs.rope_parameters:
        assert ours["rope_original_seq_len"] == theirs.rope_parameters["original_max_position_embeddings"]
    window = getattr(theirs, "sliding_window", None)
    if hasattr(theirs, "layer_types") and theirs.model_type not in (
        "mistral",
        "qwen3_moe",
        "mixtral",
        "olmoe",
        "deepseek_v2",
        "deepseek_v3",
    ):
        window = window if set(theirs.layer_types) == {"sliding_attention"} else None
    assert ours["sliding_window"] == (window or 0)
    if "moe" in ours:
        moe = {**Moe().model_dump(), **ours["moe"]}
        names = {"n_experts": "num_local_experts", "n_experts_per_token": "num_experts_per_tok"}
        names |= {"normalize_scores": "norm_topk_prob"} if theirs.model_type != "mixtral" else {}
        if "mla" in ours:
            mla, names = ours["mla"], names | HF_NAMES_OF_DEEPSEEK
            if getattr(theirs, "topk_method", "") == "greedy":  # then nothing reads the groups
                names = {key: name for key, name in names.items() if "group" not in key}
            assert (mla["q_lora_rank"] or None) == theirs.q_lora_rank
            assert all(mla[key] == getattr(theirs, key) for key in MLA if key != "q_lora_rank")
            assert mla["mscale_all_dim"] == theirs.rope_parameters.get("mscale_all_dim", 0)
        if theirs.model_type == "deepseek_v2":
            names["n_experts"] = "num_experts"
        if theirs.model_type == "qwen3_moe":
            names |= {"expert_dim": "moe_intermediate_size", "every_n_layers": "decoder_sparse_step"}
            assert list(range(moe["n_first_dense_layers"])) == theirs.mlp_only_layers
        assert {key: moe[key] for key in names} == {key: getattr(theirs, name) for key, name in names.items()}


# fmt: off
READ_BY_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2, some layers":  ({**QWEN2, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
                            {"sliding_window": 0, "layer_pattern": [{}, {"count": 2, "sliding_window": 7}]}),
    "olmo3":               ({**OLMO3, "num_hidden_layers": 9},
                            {"layer_pattern": [{"count": 3, "sliding_window": 4096}, {}], "norm_placement": "after"}),
    "smollm3":             (SMOLLM3, {"rope_theta": 2e6, "sliding_window": 0}),
    "smollm3, interval 2": ({**SMOLLM3, "no_rope_layer_interval": 2},
                            {"layer_pattern": [{}, {"partial_rotary_factor": 0.0}]}),
    "phi3, su":            ({**PHI3, "max_position_embeddings": 8192, "rope_scaling":
                             {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2] * 8}},
                            {"rope_scaling_type": "longrope", "rope_scaling_factor": 2.0, "rope_original_seq_len": 4096,
                             "rope_long_factors": [2.0] * 8}),
    "gpt2":                (GPT2, {"dim": 64, "ffn_dim": 256, "learned_positions": 1024, "tie_embeddings": True}),
    "gemma3":              ({**GEMMA3, "rope_local_base_freq": 9.0, "sliding_window_pattern": 2},
                            {"layer_pattern": [{"rope_theta": 9.0, "sliding_window": 4096}, {}], "rope_theta": 1e6,
                             "embedding_scale": 8.0, "attention_scale": 1 / 16}),
}
# fmt: on
"""Families that are options of the model, and some of what is read."""


@pytest.mark.parametrize("name", READ_BY_OPTIONS)
def test_options_of_families_are_read(tmp_path: Path, name: str):
    content, expected = READ_BY_OPTIONS[name]
    actual = options(tmp_path, content)
    assert {key: actual.get(key) for key in expected} == expected


# What is rejected ----------------------------------------------------------------------------------------------------

SUPPORTED = f"supported: {', '.join(FAMILIES)}"
ONE_OF = 'expected one of "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "olmoe", "deepseek_v3", '
INTEGER = "expected an integer from 1 to 2147483647"


def scaled(**values: Any) -> dict[str, Any]:
    return {**LLAMA, "rope_scaling": values}


# fmt: off
REJECTED: list[tuple[Any, list[str]]] = [
    ({}, [f"model_type is missing: {ONE_OF}"]),
    ({**LLAMA, "model_type": "qwen2_moe"}, [f'model_type = "qwen2_moe": unsupported; {SUPPORTED}']),
    ({**LLAMA, "model_type": "\n\u001b[2J", "rope_parameters": {"alibi": ["x"] * 9 + [{}]}},
     [r'model_type = "\n\u001b[2J": unsupported: it has other positions than rotary and learned ones (alibi)']),
    ({**LLAMA, "model_type": ["llama"]}, [f"model_type = a list: {ONE_OF}"]),
    ({"model_type": "llama"}, [f"{key} is missing: expected an integer from 1 to" for key in (
        "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size")]),
    ({**LLAMA, "hidden_act": "gelu"}, ['hidden_act = "gelu": expected "silu"; the feed-forward layer is SwiGLU']),
    ({**LLAMA, "partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5: expected 1; all channels are rotated"]),
    ({**LLAMA, "is_causal": False}, ["is_causal = false: expected true"]),
    ({**LLAMA, "quantization_config": {"bits": 4}}, ["quantization_config = an object: expected null"]),
    ({**GEMMA3, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
     ["attn_logit_softcapping = 50.0: expected null", "final_logit_softcapping = 30.0: expected null"]),
    # wrong types, and numbers that no model has
    ({**LLAMA, "hidden_size": "64"}, [f'hidden_size = "64": {INTEGER}']),
    ({**LLAMA, "hidden_size": 64.0}, [f"hidden_size = 64.0: {INTEGER}"]),
    ({**LLAMA, "num_hidden_layers": True}, ["num_hidden_layers = true: expected an integer from 1 to 4096"]),
    *(({**LLAMA, "num_hidden_layers": n}, [f"num_hidden_layers = {n}: expected an integer from 1 to 4096"])
      for n in (4097, 2**31 - 1, 2**31)),
    ({**LLAMA, "vocab_size": 10**30}, [f"vocab_size = {10**30}: {INTEGER}"]),
    ({**LLAMA, "intermediate_size": -1}, [f"intermediate_size = -1: {INTEGER}"]),
    ({**LLAMA, "num_key_value_heads": 0}, [f"num_key_value_heads = 0: {INTEGER}"]),
    ({**LLAMA, "head_dim": -1}, [f"head_dim = -1: {INTEGER}"]),
    ({**LLAMA, "rms_norm_eps": 0}, ["rms_norm_eps = 0: expected a finite number > 0"]),
    ({**LLAMA, "rms_norm_eps": 10**400}, ["rms_norm_eps = 1000", ]),
    ({**LLAMA, "rope_theta": "10000"}, ['rope_theta = "10000": expected a finite number > 0']),
    ({**LLAMA, "tie_word_embeddings": 1}, ["tie_word_embeddings = 1: expected true or false"]),
    ({**LLAMA, "rope_scaling": [1]}, ["rope_scaling = a list: expected an object"]),
    ({**LLAMA, "rope_parameters": "x" * 200}, [f'rope_parameters = "{"x" * 79}...: expected an object']),
    # biases and windows
    ({**MISTRAL, "sliding_window": 0}, [f"sliding_window = 0: {INTEGER}"]),
    ({**MISTRAL, "layer_types": FULL}, ['layer_types = a list: expected "sliding_attention" for each of the 3 layers']),
    ({**QWEN3, "use_sliding_window": True, "layer_types": ["linear_attention"] * 3}, ["layer_types = a list"]),
    ({**OLMO3, "rope_parameters": {"rope_type": "default"}}, ["rope_parameters.rope_type = \"default\": expected"]),
    ({**OLMO3, "rope_theta": 1000.0}, ["rope_theta = 1000.0: expected 500000, which layers with a window have"]),
    ({**SMOLLM3, "no_rope_layers": [1, 2, 0]}, ["no_rope_layers = a list: expected 1, or 0 for no rotary embedding"]),
    ({**PHI3, "max_position_embeddings": 8192,
      "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": 2}},
     ["rope_scaling.long_factor = 2: expected a list of finite numbers > 0"]),
    ({**PHI3, "partial_rotary_factor": 1.5}, ["partial_rotary_factor = 1.5: expected a number of at most 1"]),
    ({**GPT2, "activation_function": "relu"}, ['activation_function = "relu": expected one of "gelu_new"']),
    ({**GPT2, "n_embd": 0}, [f"n_embd = 0: {INTEGER}"]),
    ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx = true: expected false"]),
    ({**GEMMA3, "hidden_activation": "gelu"}, ['hidden_activation = "gelu": expected "gelu_pytorch_tanh"; the feed']),
    ({**GEMMA3, "use_bidirectional_attention": True}, ["use_bidirectional_attention = true: expected false"]),
    ({**QWEN3, "layer_types": SLIDING}, ['layer_types = a list: expected "full_attention" for each of the 3 layers']),
    ({**QWEN3, "layer_types": 3}, ["layer_types = 3: expected"]),
    ({**QWEN3, "layer_types": [["full_attention"], {}, None]}, ["layer_types = a list: expected"]),
    # experts
    ({**LLAMA, "model_type": "qwen3_moe"}, [f"{key} is missing: {INTEGER}" for key in (
        "num_experts", "num_experts_per_tok", "moe_intermediate_size")]),
    ({**LLAMA, "model_type": "mixtral"}, [f"{key} is missing: {INTEGER}" for key in (
        "num_local_experts", "num_experts_per_tok")]),
    ({**QWEN3_MOE, "num_experts": 0}, [f"num_experts = 0: {INTEGER}"]),
    ({**OLMOE, "hidden_size": "64", "head_dim": 16}, [f'hidden_size = "64": {INTEGER}']),
    ({**QWEN3, "num_hidden_layers": None, "layer_types": FULL},
     ["num_hidden_layers = null: expected an integer from 1 to 4096"]),
    ({**DEEPSEEK, "num_attention_heads": 0}, [f"num_attention_heads = 0: {INTEGER}"]),
    ({**DEEPSEEK, "n_routed_experts": 0}, [f"n_routed_experts = 0: {INTEGER}"]),
    ({**DEEPSEEK, "n_group": 0, "topk_group": 4}, [f"n_group = 0: {INTEGER}"]),
    ({**OLMOE, "num_experts_per_tok": 9},
     ["num_experts_per_tok = 9: expected at most the number of experts, 8"]),
    ({**OLMOE, "num_local_experts": 4}, ["num_local_experts = 4: expected the same as num_experts; remove one"]),
    ({**QWEN3_MOE, "mlp_only_layers": [1]}, ["mlp_only_layers = a list: expected the first layers in order"]),
    ({**QWEN3_MOE, "mlp_only_layers": [1, 0]}, ["mlp_only_layers = a list: expected the first layers in order"]),
    ({**QWEN3_MOE, "mlp_only_layers": [0, True]}, ["mlp_only_layers = a list: expected a list of integers"]),
    ({**QWEN3_MOE, "mlp_only_layers": 1}, ["mlp_only_layers = 1: expected a list of integers"]),
    ({**QWEN3_MOE, "decoder_sparse_step": 0}, [f"decoder_sparse_step = 0: {INTEGER}"]),
    ({**QWEN3_MOE, "norm_topk_prob": 1}, ["norm_topk_prob = 1: expected true or false"]),
    ({**QWEN3_MOE, "use_sliding_window": True, "max_window_layers": 1}, ["max_window_layers = 1: expected 0"]),
    ({**MIXTRAL, "norm_topk_prob": False}, ["norm_topk_prob = false: expected true"]),
    ({**OLMOE, "decoder_sparse_step": 2, "mlp_only_layers": [0]},
     ["decoder_sparse_step = 2: expected 1", "mlp_only_layers = a list: expected []"]),
    ({**OLMOE, "clip_qkv": 8.0}, ["clip_qkv = 8.0: expected null; queries, keys and values are not clipped"]),
    ({**OLMOE, "head_dim": 32}, ["head_dim = 32: expected 16; the norm of all heads together"]),
    # latent attention
    ({**DEEPSEEK, "rope_interleave": False, "attention_bias": True, "moe_layer_freq": 2,
      "scoring_func": "softmax", "topk_method": "greedy", "num_key_value_heads": 2},
     ["rope_interleave = false: expected true",
      "attention_bias = true: expected false", "moe_layer_freq = 2: expected 1",
      'scoring_func = "softmax": expected "sigmoid"', 'topk_method = "greedy": expected "noaux_tc"',
      "num_key_value_heads = 2: expected 4; latent attention has keys and values of every head"]),
    ({**RELEASED_DEEPSEEK, "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128]}},
     ["quantization_config = an object: expected null; quantized weights are not read; take or make bfloat16 ones"]),
    ({**DEEPSEEK, "qk_rope_head_dim": 7, "v_head_dim": 136, "head_dim": 64, "qk_head_dim": 192},
     ["qk_rope_head_dim = 7: expected an even number", "v_head_dim = 136: expected at most 135",
      "qk_head_dim = 192: expected 135", "head_dim = 64: expected 7"]),
    ({**DEEPSEEK, "kv_lora_rank": 0, "q_lora_rank": 0, "first_k_dense_replace": -1, "sliding_window": 8},
     [f"kv_lora_rank = 0: {INTEGER}",
      f"q_lora_rank = 0: {INTEGER}", "first_k_dense_replace = -1: expected an integer from 0"]),
    ({**DEEPSEEK, "n_group": 7}, ["n_group = 7: expected a divisor of the number of experts, 256"]),
    ({**DEEPSEEK, "n_group": 256}, ["n_group = 256: expected a divisor of the number of experts, 256, with at least"]),
    ({**DEEPSEEK, "topk_group": 9}, ["topk_group = 9: expected at most the number of groups, 8"]),
    ({**DEEPSEEK, "num_experts_per_tok": 129}, ["num_experts_per_tok = 129: expected at most the 128 experts"]),
    ({**DEEPSEEK, "n_shared_experts": 0, "num_local_experts": 8},
     ["num_local_experts = 8: expected 256", f"n_shared_experts = 0: {INTEGER}"]),
    ({**DEEPSEEK_V2, "scoring_func": "sigmoid", "norm_topk_prob": True, "topk_method": "noaux_tc", "sliding_window": 8},
     ['scoring_func = "sigmoid": expected "softmax"',
      "norm_topk_prob = true: expected false; transformers does not divide",
      'topk_method = "noaux_tc": expected one of "greedy", "group_limited_greedy"']),
    ({**DEEPSEEK_V2, "mlp_bias": True}, ["mlp_bias = true: expected false; experts have no biases"]),
    ({**DEEPSEEK_V2, "num_experts_per_tok": None}, [f"num_experts_per_tok = null: {INTEGER}"]),
    ({**DEEPSEEK_V2, "num_experts_per_tok": 65}, ["num_experts_per_tok = 65: expected at most the 64 experts"]),
    ({**DEEPSEEK_V2, "topk_method": "group_limited_greedy"},
     [f"n_group is missing: {INTEGER}", f"topk_group is missing: {INTEGER}"]),
    ({**DEEPSEEK_V2, "topk_method": "group_limited_greedy", "n_group": 7, "topk_group": 3},
     ["n_group = 7: expected a divisor of the number of experts, 64"]),
    ({**DEEPSEEK_V2, "topk_method": "group_limited_greedy", "n_group": 32, "topk_group": 2},
     ["num_experts_per_tok = 6: expected at most the 4 experts of topk_group groups"]),
    ({**DEEPSEEK_V2, "rope_scaling": {**YARN_OF_DEEPSEEK, "mscale": None}},
     ["rope_scaling.mscale_all_dim = 1.0: read in different ways without mscale"]),
    ({**DEEPSEEK, "rope_scaling": {**YARN_OF_DEEPSEEK, "attention_factor": 1.5}},
     ["rope_scaling.attention_factor = 1.5: expected 1, as mscale and mscale_all_dim say; remove it"]),
    ({**DEEPSEEK, "rope_scaling": {**YARN_OF_DEEPSEEK, "mscale": None}},
     ["rope_scaling.mscale_all_dim = 1.0: read in different ways without mscale; set mscale or attention_factor"]),
    ({**DEEPSEEK, "rope_scaling": {**YARN_OF_DEEPSEEK, "mscale": 0.7, "mscale_all_dim": 0}},
     ["rope_scaling.mscale = 0.7: read in different ways without mscale_all_dim"]),
    ({**DEEPSEEK, "rope_scaling": {**YARN_OF_DEEPSEEK, "mscale": "1"}}, ['rope_scaling.mscale = "1": expected a']),
    ({**DEEPSEEK, "rope_scaling": {"type": "linear", "factor": 2, "mscale": 1}}, ["rope_scaling.mscale = 1: the"]),
    # the rotary embedding
    (scaled(type="dynamic", factor=2.0),
     ['rope_scaling.type = "dynamic": expected one of "default", "linear", "llama3", "yarn"']),
    ({**scaled(type="su", short_factor=[1.0], long_factor=[2.0]), "original_max_position_embeddings": "x",
      "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}},
     ['rope_scaling.type = "su": expected one of']),
    (scaled(rope_type="longrope"), ['rope_scaling.rope_type = "longrope": expected one of']),
    (scaled(rope_type="linear"), ["rope_scaling.factor is missing: expected a finite number >= 1"]),
    (scaled(rope_type="linear", factor=0.5), ["rope_scaling.factor = 0.5: expected a finite number >= 1"]),
    (scaled(rope_type="llama3", factor=8.0), [f"max_position_embeddings is missing: {INTEGER}",
     *(f"rope_scaling.{part}_freq_factor is missing: expected a finite number > 0" for part in ("low", "high"))]),
    (scaled(rope_type="yarn", **YARN, mscale=1.0, mscale_all_dim=1.0),
     ["rope_scaling.mscale = 1.0: the rotary embedding of type", "rope_scaling.mscale_all_dim = 1.0"]),
    (scaled(rope_type="yarn", **YARN, ramp=False), ["rope_scaling.ramp = false: the rotary embedding of type"]),
    (scaled(rope_type="yarn", **{**YARN, "factor": 1}), ["rope_scaling.attention_factor = 1.5: read only when factor"]),
    (scaled(mrope_section=[16, 24, 24]), ["rope_scaling.mrope_section = a list: the rotary embedding of type"]),
    (scaled(partial_rotary_factor=0.5), ["rope_scaling.partial_rotary_factor = 0.5: expected 1"]),
    (scaled(**{"\u001b[2J\n": 1}), [r"rope_scaling.\u001b[2J\n = 1: the rotary embedding of type"]),
    ({**scaled(type="linear", factor=2.0), "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
     ["rope_parameters = an object: expected the same as rope_scaling and rope_theta"]),
    ({**LLAMA, "rope_parameters": {"full_attention": {"rope_type": "default"}}},
     ["rope_parameters.full_attention = an object: the rotary embedding of type"]),
]
# fmt: on


NOT_READ: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (LLAMA, {"architectures": ["LLaMAForCausalLM"], "pretraining_tp": 2, "attention_dropout": 0.1}),
    (LLAMA, {"sliding_window": 7, "qk_layernorm": True, "attn_logit_softcapping": 50.0, "clip_qkv": 8.0}),
    (MISTRAL, {"attention_bias": True, "mlp_bias": True}),
    (QWEN2, {"attention_bias": False}),
    (MIXTRAL, {"router_jitter_noise": 0.1, "attention_bias": True}),
    (OLMOE, {"sliding_window": 8}),
    (PHI3, {"resid_pdrop": 0.1}),
]
"""Keys that transformers does not read, or only in training."""


@pytest.mark.parametrize(("content", "further"), NOT_READ, ids=[str([*further]) for _, further in NOT_READ])
def test_keys_that_say_nothing_about_the_function_are_accepted(tmp_path: Path, content: Any, further: dict[str, Any]):
    assert options(tmp_path, {**content, **further}) == options(tmp_path, content)


@pytest.mark.parametrize(("content", "expected"), REJECTED, ids=[lines[0][:60] for _, lines in REJECTED])
def test_rejected_in_one_line_each(tmp_path: Path, content: Any, expected: list[str]):
    lines = problems(lambda: options(tmp_path, content))
    assert len(lines) == len(expected), lines
    for line, text in zip(lines, expected, strict=True):
        assert line.startswith(f"{tmp_path / 'config.json'}: {text}"), (line, text)
        assert "\n" not in line
        assert len(line) < len(str(tmp_path)) + 400


UNSUPPORTED = {
    "gemma2": "capped scores or logits (attn_logit_softcapping)",
    "phi": "attention beside the feed-forward layer",
    "olmo": "norms without weights",
    "gpt_neox": "attention beside the feed-forward layer (use_parallel_residual)",
    "cohere": "attention beside the feed-forward layer",
    "falcon": "attention beside the feed-forward layer (parallel_attn)",
    "mamba": "layers without attention (state_size)",
    "nemotron": "another activation than silu and gelu (hidden_act)",
    "qwen2_moe": "gated shared experts (shared_expert_intermediate_size)",
    "qwen3_next": "layers without attention (linear_conv_kernel_dim), gated shared experts",
    "deepseek_v4": "attention to tokens that an indexer chooses (index_topk), several residual streams (hc_mult)",
    "t5": "an encoder (is_encoder_decoder)",
    "qwen2_vl": "inputs besides text (vision_config)",
}
"""Model types of transformers, and the features that the line about their config.json names in this order."""


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_model_type_names_its_features(name: str, tmp_path: Path):
    from transformers import AutoConfig

    (line,) = problems(lambda: options(tmp_path, json.dumps(AutoConfig.for_model(name).to_dict())))
    before, _, after = line.partition(": unsupported: it has ")
    assert before == f'{tmp_path / "config.json"}: model_type = "{name}"'
    features, _, supported = after.partition("; ")
    assert UNSUPPORTED[name] in features
    assert supported == SUPPORTED


def test_features_that_a_file_turns_off_are_not_named(tmp_path: Path):
    other = {**LLAMA, "model_type": "other", "attn_logit_softcapping": None, "alibi": False, "hidden_act": "silu"}
    (line,) = problems(lambda: options(tmp_path, other))
    assert 'model_type = "other": unsupported; ' in line
    (line,) = problems(lambda: options(tmp_path, {**other, "alibi": True, "attn_logit_softcapping": 50.0}))
    expected = "other positions than rotary and learned ones (alibi), capped scores or logits (attn_logit_softcapping)"
    assert f"unsupported: it has {expected}; " in line


DEEP = '{"model_type": "llama", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
BROKEN: dict[str, tuple[Any, str]] = {
    "a list": ("[1, 2]", "expected a JSON object, got a list"),
    "a number": ("3", "expected a JSON object, got 3"),
    "cut off": ('{"model_type": "lla', "not valid JSON: "),
    "empty": ("", "not valid JSON: "),
    "not UTF-8": (b'{"model_type": "\xff"}', "not valid JSON: "),
    "NaN": ('{"rms_norm_eps": NaN}', "not valid JSON: NaN is no JSON number"),
    "infinity": ('{"rms_norm_eps": -Infinity}', "not valid JSON: -Infinity is no JSON number"),
    "nested deeply": (DEEP, "not valid JSON: "),
    "large": (b" " * (LARGEST_FILE + 1), "cannot be read: expected at most 1,048,576 bytes"),
    "many digits": ('{"vocab_size": ' + "9" * 100_000 + "}", ""),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file_is_one_line(tmp_path: Path, name: str):
    content, text = BROKEN[name]
    (line,) = problems(lambda: options(tmp_path, content))
    assert line.startswith(f"{tmp_path / 'config.json'}: {text}")


def test_infinite_number_is_rejected(tmp_path: Path):
    text = json.dumps(LLAMA)[:-1] + ', "rms_norm_eps": 1e999}'
    (line,) = problems(lambda: options(tmp_path, text))
    assert line.endswith("rms_norm_eps = inf: expected a finite number > 0")


@pytest.mark.parametrize("kind", ["no such file", "Is a directory", "regular file"])
def test_what_is_no_file_is_one_line(tmp_path: Path, kind: str):
    """Nor does a pipe, from which nothing comes, hang."""
    file = tmp_path / "config.json"
    make = {"no such file": lambda: None, "Is a directory": file.mkdir, "regular file": lambda: os.mkfifo(file)}
    make[kind]()
    (line,) = problems(lambda: model_options(tmp_path))
    assert line.startswith(f"{file}: ")
    assert line.endswith(kind)


# flavor = "from_hf" --------------------------------------------------------------------------------------------------


def test_a_name_of_the_hub_is_answered_with_the_command_that_downloads_it(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hint = (
        "; if it is a model of the hub: hf download meta-llama/Llama-3.1-8B --local-dir assets/Llama-3.1-8B, and name"
    )
    place = "meta-llama/Llama-3.1-8B"
    (tmp_path / "here").mkdir()
    lines = problems(lambda: load(tmp_path, {FLAVOR: "from_hf", ASSETS: place}))
    assert lines == [f"{place}/config.json: no such file{hint} that folder"]
    for read in (is_hugging_face, open_folder, lambda path: build_tokenizer(str(path))):
        assert hint in problems(lambda read=read: read(Path(place)))[0]
    assert hint not in problems(lambda: load(tmp_path, {FLAVOR: "from_hf", ASSETS: "here/model"}))[0]


def test_a_model_larger_than_its_weights_or_that_no_run_can_have_is_one_line(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"x" * 10_000)
    file = write(tmp_path, {**LLAMA, "vocab_size": 2**31 - 1}) / "config.json"
    assert [line.partition(", and")[0] for line in problems(lambda: model_of(tmp_path))] == [
        f"{file}: its model has {2 * 64 * (2**31 - 1) + 104_896} parameters"
    ]
    write(tmp_path, {**DEEPSEEK, "qk_nope_head_dim": 2**31 - 1})
    assert problems(lambda: model_of(tmp_path))[0].startswith(f"{file}: model.head_dim = 2147483")
    write(tmp_path, {**LLAMA, "num_key_value_heads": 3})
    assert problems(lambda: model_of(tmp_path))[0].startswith(f"{file}: model.n_kv_heads = 3")


@pytest.mark.parametrize(
    "command",
    [
        *(f"{name} run.toml" for name in ("config", "plan", "tokenize", "parity")),
        "generate . x",
        "eval . --dataset json",
    ],
)
def test_a_number_beyond_its_bound_is_one_line_of_every_command(command: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(write(tmp_path, {**LLAMA, "num_hidden_layers": 2**31}))
    (tmp_path / "run.toml").write_text('[model]\nflavor = "from_hf"\nhf_assets_path = "."')
    name, *arguments = command.split()
    assert run_command(name, arguments) == 2
    problem = "config.json: num_hidden_layers = 2147483648: expected an integer from 1 to 4096"
    assert capsys.readouterr().err.splitlines()[0] == f"error: {problem}"


def test_flavor_from_hf(tmp_path: Path):
    write(tmp_path, QWEN2 | {"num_key_value_heads": 2})
    settings = {FLAVOR: "from_hf", ASSETS: str(tmp_path)}
    loaded = load(tmp_path, settings)
    model = loaded.config.model
    assert (model.dim, model.n_layers, model.attention_bias, model.head_dim) == (64, 3, "qkv", 16)
    changed = load(tmp_path, {**settings, LAYERS: 5, f"--{WINDOW}": 4}).config.model
    assert changed.model_dump() == {**model.model_dump(), "n_layers": 5, "sliding_window": 4}
    (tmp_path / "config.json").unlink()
    assert load(tmp_path, loaded.config.toml()).config == loaded.config  # a resolved config needs the folder no more


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 'model.hf_assets_path = "": expected the folder of a config.json'),
        ({ASSETS: 3}, "model.hf_assets_path = 3: expected the folder of a config.json"),
        ({ASSETS: "/nowhere"}, "/nowhere/config.json: no such file"),
    ],
)
def test_flavor_from_hf_without_a_file(tmp_path: Path, settings: dict[str, Any], expected: str):
    *_, line = problems(lambda: load(tmp_path, {FLAVOR: "from_hf", **settings}))
    assert line.startswith(expected)


def test_the_folder_of_a_model_may_be_in_a_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path, LLAMA)
    monkeypatch.setenv("HOME", str(tmp_path))
    loaded = load(tmp_path, {FLAVOR: "from_hf", ASSETS: "~"})
    assert loaded.config.model.dim == LLAMA["hidden_size"]
    assert loaded.config.initial_weights == str(tmp_path)
    lines = problems(lambda: load(tmp_path, {FLAVOR: "from_hf", ASSETS: "~nosuchuser/a"}))
    assert any(line.endswith("expected a path; its ~ names no home folder (a name: ./~)") for line in lines)


def test_rules_apply_to_a_file_too(tmp_path: Path):
    write(tmp_path, {**LLAMA, "num_key_value_heads": 3})
    (line,) = problems(lambda: load(tmp_path, {FLAVOR: "from_hf", ASSETS: str(tmp_path)}))
    assert "model.n_kv_heads = 3 (default): expected a divisor of model.n_heads = 4" in line


def test_it_needs_no_torch(tmp_path: Path):
    write(tmp_path, LLAMA)
    code = (
        "import sys\nfrom titanlite.config.schema import Model\n"
        f"Model.model_validate({{'flavor': 'from_hf', 'hf_assets_path': {str(tmp_path)!r}}})\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


# Back ----------------------------------------------------------------------------------------------------------------

TOKENS = {"max_seq_len": 1024, "torch_dtype": "bfloat16", "bos": 1, "eos": None}


def model(**values: Any) -> Model:
    return Model.model_validate({"dim": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, **values})


@pytest.mark.parametrize("flavor", SIZES)
def test_every_size_comes_back(tmp_path: Path, flavor: str):
    """What is exported is read as the same options, in both spellings; transformers accepts it."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    section = Model.model_validate({"flavor": flavor})
    exported = hf_config(section, **TOKENS)
    expected = section.model_dump(exclude={"flavor", "hf_assets_path"})
    for dropped in ({}, {"rope_parameters"}, {"rope_theta", "rope_scaling"}):
        kept = {key: value for key, value in exported.items() if key not in dropped}
        actual = options(tmp_path, kept)
        unread = set() if section.rope_scaling_factor > 1 else {"rope_original_seq_len"}
        read = Model.model_validate(actual).model_dump(exclude={"flavor", "hf_assets_path", *unread})
        assert read == {key: value for key, value in expected.items() if key not in unread}
    theirs = AutoConfig.from_pretrained(write(tmp_path, exported))
    expected_class = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[theirs.model_type]
    assert [expected_class] == theirs.architectures == exported["architectures"]
    assert (theirs.hidden_size, str(theirs.dtype), theirs.bos_token_id) == (section.dim, "torch.bfloat16", 1)
    assert theirs.max_position_embeddings == (section.learned_positions or 1024)


OF_DEEPSEEK: dict[str, Any] = {
    **{"n_kv_heads": 4, "head_dim": -1, "norm_eps": 1e-6, "mla": {"kv_lora_rank": 8, "q_lora_rank": 12}},
    "moe": {
        **{"score_function": "sigmoid", "n_shared_experts": 1, "n_first_dense_layers": 2, "balance_bias": True},
        "expert_dim": 24,
    },
}
OF_V2 = {
    **OF_DEEPSEEK,
    "moe": {"n_shared_experts": 2, "n_first_dense_layers": 1, "expert_dim": 24, "score_scaling": 16.0},
}
COMBINATIONS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": "all", "mlp_bias": True},
    "mistral": {"sliding_window": 8},
    "mistral, width": {"dim": 60, "n_heads": 8},
    "qwen2": {"attention_bias": "qkv", "sliding_window": 8},
    "qwen3": {"qk_norm": True, "attention_bias": "all", "sliding_window": 8, "head_dim": 32},
    "mixtral": {"moe": {"normalize_scores": True}, "sliding_window": 8, "ffn_dim": 48, "head_dim": 32},
    "qwen3_moe": {
        **{"qk_norm": True, "attention_bias": "all", "sliding_window": 8, "head_dim": 32, "n_layers": 5},
        "moe": {"expert_dim": 24, "n_first_dense_layers": 3, "every_n_layers": 2},
    },
    "qwen3_moe, scores": {"qk_norm": True, "moe": {"expert_dim": 24, "normalize_scores": True}},
    "qwen3_moe, dense": {"qk_norm": True, "n_layers": 2, "moe": {"expert_dim": 24, "n_first_dense_layers": 2}},
    "olmoe": {"qk_norm": "all_heads", "attention_bias": "all", "moe": {}},
    "olmoe, scores": {"qk_norm": "all_heads", "moe": {"normalize_scores": True}},
    "deepseek_v3": OF_DEEPSEEK,
    "deepseek_v3, dense": {key: value for key, value in OF_DEEPSEEK.items() if key != "moe"},
    "deepseek_v3, yarn": OF_DEEPSEEK
    | {"rope_scaling_factor": 2.0, "rope_scaling_type": "yarn", "rope_attention_factor": 1.25}
    | {"mla": {"kv_lora_rank": 8, "mscale_all_dim": 0.5}},
    "deepseek_v3, yarn of the paper": OF_DEEPSEEK | {"rope_scaling_factor": 2.0, "rope_scaling_type": "yarn"},
    "deepseek_v3, yarn, mscale": OF_DEEPSEEK
    | {"rope_scaling_factor": 2.0, "rope_scaling_type": "yarn", "rope_attention_factor": 1.0}
    | {"mla": {"kv_lora_rank": 8, "mscale_all_dim": 0.5}},
    "deepseek_v3, eps": OF_DEEPSEEK | {"norm_eps": 1e-5, "mla": {"kv_lora_rank": 8, "norm_eps": 1e-6}},
    "deepseek_v2": OF_V2,
    "deepseek_v2, groups": OF_V2
    | {"moe": {**OF_V2["moe"], "n_groups": 8, "n_groups_per_token": 3, "group_score": "max"}},
    "deepseek_v2, yarn": OF_V2
    | {"rope_scaling_factor": 2.0, "rope_scaling_type": "yarn", "rope_attention_factor": 1.0}
    | {"norm_eps": 1e-5, "mla": {"kv_lora_rank": 8, "mscale_all_dim": 0.5, "norm_eps": 1e-6}},
    "deepseek_v3, linear": OF_DEEPSEEK | {"rope_scaling_factor": 2.0, "rope_scaling_type": "linear"},
    "llama, linear": {"rope_scaling_factor": 2.0, "rope_scaling_type": "linear"},
    "llama, yarn": {"rope_scaling_factor": 2.0, "rope_scaling_type": "yarn", "rope_beta_fast": 20.0},
    "llama, yarn, factor": {"rope_scaling_factor": 2.0, "rope_scaling_type": "yarn", "rope_attention_factor": 1.25},
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_combinations_come_back(tmp_path: Path, name: str):
    values = dict(COMBINATIONS[name])
    if "moe" in values:
        values["moe"] = {"n_experts": 8, "n_experts_per_token": 2, **values["moe"]}
    section = model(**values)
    exported = hf_config(section, **TOKENS)
    assert exported["model_type"] == name.split(",")[0]
    actual = options(tmp_path, exported)
    assert Model.model_validate(actual).model_copy(update={"flavor": "debug"}) == section


@pytest.mark.parametrize(
    "values",
    [
        {"qk_norm": True, "mlp_bias": True},
        {"qk_norm": True, "attention_bias": "qkv"},
        {"attention_bias": "qkv", "mlp_bias": True, "norm_placement": "both"},
        {"qk_norm": True, "sliding_window": 8, "mlp_bias": True},
        {"norm": "layer", "mlp_bias": True},
        {"norm_placement": "after", "qk_norm": True},
        {"embedding_scale": 2.0, "activation": "gelu"},
        {"layer_pattern": [{"sliding_window": 8}, {"sliding_window": 4}]},
        {"layer_pattern": [{"rope_theta": 1000.0}, {}]},
        {"qk_norm": "all_heads"},
    ],
)
def test_what_no_family_has_is_rejected(values: dict[str, Any]):
    (line,) = problems(lambda: hf_config(model(**values), **TOKENS))
    assert "no family of transformers has all of these" in line
    assert all(f"model.{key} = " in line for key in values)


@pytest.mark.parametrize(
    ("values", "moe"),
    [
        ({}, {}),  # scores that are not divided by their sum, without norms
        ({}, {"normalize_scores": True, "n_first_dense_layers": 1}),
        ({}, {"normalize_scores": True, "every_n_layers": 2}),
        ({"attention_bias": "all"}, {"normalize_scores": True}),
        ({"qk_norm": True}, {"n_shared_experts": 1}),
        ({"qk_norm": True}, {"score_function": "sigmoid"}),
        ({"qk_norm": True}, {"score_scaling": 2.0}),
        ({"qk_norm": True}, {"n_groups": 2}),
        ({"qk_norm": True, "attention_bias": "qkv"}, {}),
        ({"qk_norm": "all_heads", "sliding_window": 8}, {}),
        ({"qk_norm": "all_heads", "head_dim": 32}, {}),
        ({"qk_norm": "all_heads"}, {"n_first_dense_layers": 1}),
    ],
)
def test_experts_that_no_family_has_are_rejected(values: dict[str, Any], moe: dict[str, Any]):
    section = model(**values, moe={"n_experts": 8, "n_experts_per_token": 2, **moe})
    (line,) = problems(lambda: hf_config(section, **TOKENS))
    assert (
        "no family of transformers has all of these; expected those of gpt_oss, mixtral, qwen3_moe, glm4_moe, olmoe"
        in line
    )
    assert all(f"model.{key} = " in line for key in [*values, *(f"moe.{key}" for key in moe)])


def test_biases_that_balance_experts_are_of_deepseek_and_glm_alone():
    section = model(qk_norm=True, moe={"n_experts": 8, "n_experts_per_token": 2, "balance_bias": True})
    (line,) = problems(lambda: hf_config(section, **TOKENS))
    assert line.startswith("model.moe.balance_bias = true: is in no config.json but those of DeepSeek-V3")


def test_glm_groups_are_ranked_by_two_scores():
    moe = {"n_experts": 8, "n_experts_per_token": 2, **OF_DEEPSEEK["moe"], "n_groups": 4, "n_groups_per_token": 2}
    assert hf_config(model(moe=moe), **TOKENS)["model_type"] == "glm4_moe"
    (line,) = problems(lambda: hf_config(model(moe={**moe, "group_score": "max"}), **TOKENS))
    assert line.startswith("model.moe.balance_bias = true: is in no config.json but those of DeepSeek-V3")


V2 = {"score_function": "softmax", "balance_bias": False}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"norm_eps": 1e-5}, "model.norm_eps = 1e-05: expected 1e-06, as the config.json of deepseek_v3"),
        ({"sliding_window": 8}, "model.sliding_window = 8: expected 0, as"),
        ({"moe": {"every_n_layers": 2}}, "model.moe.every_n_layers = 2: expected 1, as"),
        ({"mla": {"kv_lora_rank": 8, "norm_eps": 1e-5}}, "model.mla.norm_eps = 1e-05: expected 1e-06, as the config"),
        (
            {"moe": {"score_function": "softmax"}},
            "model.moe.balance_bias = true: expected false, as the config.json of deepseek_v2",
        ),
        ({"moe": {**V2, "normalize_scores": True}}, "model.moe.normalize_scores = true: expected false, as"),
        ({"moe": {**V2, "n_shared_experts": 0}}, "model.moe.n_shared_experts = 0: expected 1 or more, as"),
        ({"moe": V2, "dim": 66}, "model.dim = 66: expected a multiple of n_heads = 4, as"),
        (
            {"moe": {**V2, "n_groups": 4, "n_groups_per_token": 2}},
            'model.moe.group_score = "top_2_sum": expected "max", as',
        ),
        (
            {"moe": {"n_groups": 4, "n_groups_per_token": 2, "group_score": "max"}},
            'model.moe.group_score = "max": expected "top_2_sum", as',
        ),
        ({"moe": {"n_shared_experts": 0}}, "model.moe.n_shared_experts = 0: expected 1 or more, as"),
        ({"moe": {"n_groups": 8}}, "model.moe.n_groups = 8: expected groups of 2 experts or more, as"),
    ],
)
def test_latent_attention_that_deepseek_does_not_have_is_rejected(values: dict[str, Any], expected: str):
    moe = {"n_experts": 8, "n_experts_per_token": 2, **OF_DEEPSEEK["moe"], **values.get("moe", {})}
    (line,) = problems(lambda: hf_config(model(**{**OF_DEEPSEEK, **values, "moe": moe}), **TOKENS))
    assert line.startswith(expected)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"model.qk_norm": True, "model.mlp_bias": True}, "no family of transformers has all of these"),
        ({"model.mla.kv_lora_rank": 8, "model.n_kv_heads": 16}, "model.norm_eps = 1e-05: expected 1e-06"),
    ],
)
def test_a_run_that_ends_with_such_a_folder_is_rejected_before_it_begins(
    tmp_path: Path, settings: dict[str, Any], expected: str
):
    asks = {"checkpoint.enable": True, "checkpoint.last_save_in_hf": True}
    load(tmp_path, settings)
    (line,) = problems(lambda: load(tmp_path, settings | asks))
    assert "checkpoint.last_save_in_hf = true: " in line
    assert expected in line
