"""Dimensions of published models. `model.flavor` selects one; [model] keys override it.

To add a model, add a line here, and its published parameter count to tests/test_model.py.
"""

import math
from typing import Any

COMMON: dict[str, Any] = {
    "head_dim": -1,
    "norm_eps": 1e-5,
    "tie_embeddings": False,
    "attention_bias": "none",
    "mlp_bias": False,
    "qk_norm": False,
    "sliding_window": 0,
    "rope_theta": 500_000.0,
    "rope_scaling_factor": 1.0,
    "rope_scaling_type": "llama3",
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "rope_beta_fast": 32.0,
    "rope_beta_slow": 1.0,
    "rope_attention_factor": -1,
    "rope_original_seq_len": 8192,
}
_QWEN: dict[str, Any] = {"norm_eps": 1e-6, "rope_theta": 1_000_000.0}
_QWEN2 = {**_QWEN, "attention_bias": "qkv"}
_QWEN3 = {**_QWEN, "head_dim": 128, "qk_norm": True}
_MIXTRAL = {"rope_theta": 1_000_000.0, "moe": {"n_experts": 8, "n_experts_per_token": 2, "normalize_scores": True}}
_OLMOE = {"rope_theta": 10_000.0, "qk_norm": "all_heads", "moe": {"n_experts": 64, "n_experts_per_token": 8}}


def _qwen3_moe(expert_dim: int) -> dict[str, Any]:
    experts = {"n_experts": 128, "n_experts_per_token": 8, "expert_dim": expert_dim, "normalize_scores": True}
    return {**_QWEN3, "moe": experts}


_DEEPSEEK_V3: dict[str, Any] = {
    **{"norm_eps": 1e-6, "rope_theta": 10_000.0, "rope_scaling_type": "yarn", "rope_scaling_factor": 40.0},
    **{"rope_original_seq_len": 4096, "rope_attention_factor": 1.0},  # mscale / mscale_all_dim
    "mla": {
        **{"q_lora_rank": 1536, "kv_lora_rank": 512},
        **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mscale_all_dim": 1.0},
    },
    "moe": {
        **{"n_experts": 256, "n_experts_per_token": 8, "expert_dim": 2048, "n_shared_experts": 1},
        **{"n_first_dense_layers": 3, "n_groups": 8, "n_groups_per_token": 4},
        **{"score_function": "sigmoid", "normalize_scores": True, "score_scaling": 2.5, "balance_bias": True},
    },
}
_MOONLIGHT: dict[str, Any] = {
    "rope_theta": 50_000.0,
    "mla": {**_DEEPSEEK_V3["mla"], "q_lora_rank": 0, "mscale_all_dim": 0.0, "norm_eps": 1e-6},
    "moe": {
        **{**_DEEPSEEK_V3["moe"], "n_experts": 64, "n_experts_per_token": 6, "expert_dim": 1408},
        **{"n_shared_experts": 2, "n_first_dense_layers": 1, "n_groups": 1, "n_groups_per_token": 1},
        "score_scaling": 2.446,
    },
}
_KIMI_K2: dict[str, Any] = {
    **{**_DEEPSEEK_V3, "rope_theta": 50_000.0, "rope_scaling_factor": 32.0, "rope_beta_fast": 1.0},
    "moe": {
        **{**_DEEPSEEK_V3["moe"], "n_experts": 384, "n_first_dense_layers": 1, "score_scaling": 2.827},
        **{"n_groups": 1, "n_groups_per_token": 1},
    },
}


def _gpt_oss(n_experts: int) -> dict[str, Any]:
    return {
        **{"head_dim": 64, "attention_bias": "all", "attention_sinks": True, "rope_theta": 150_000.0},
        **{"rope_scaling_type": "yarn", "rope_scaling_factor": 32.0, "rope_original_seq_len": 4096},
        **{"rope_yarn_truncate": False, "layer_pattern": [{"sliding_window": 128}, {}]},
        "moe": {
            **{"n_experts": n_experts, "n_experts_per_token": 4, "normalize_scores": True},
            **{"expert_bias": True, "router_bias": True, "swiglu_limit": 7.0},
        },
    }


def _deepseek_v2(q_lora_rank: int, **moe: Any) -> dict[str, Any]:
    experts = {"n_experts_per_token": 6, "n_shared_experts": 2, "n_first_dense_layers": 1, **moe}
    mla = {**_DEEPSEEK_V3["mla"], "q_lora_rank": q_lora_rank, "mscale_all_dim": 0.707}
    return {**_DEEPSEEK_V3, "mla": mla, "moe": experts}


_GROUPS_OF_V2 = {"n_groups": 8, "n_groups_per_token": 3, "group_score": "max"}
_OLMO2 = {"norm_eps": 1e-6, "norm_placement": "after", "qk_norm": "all_heads", "hf_model_type": "olmo2"}
_OLMO3: dict[str, Any] = {
    **{**_OLMO2, "rope_scaling_type": "yarn", "rope_scaling_factor": 8.0},  # of layers without a window
    "layer_pattern": [{"count": 3, "sliding_window": 4096, "rope_scaling_factor": 1.0}, {}],
    "hf_model_type": "olmo3",
}
_SMOLLM3: dict[str, Any] = {
    **{"norm_eps": 1e-6, "rope_theta": 5_000_000.0, "tie_embeddings": True},
    "layer_pattern": [{"count": 3}, {"partial_rotary_factor": 0.0}],
    "hf_model_type": "smollm3",
}
_GLM4 = {"norm_placement": "both", "partial_rotary_factor": 0.5, "head_dim": 128, "rope_theta": 10_000.0}
_PHI3 = {"hf_model_type": "phi3"}
_GPT: dict[str, Any] = {
    **{"norm": "layer", "activation": "gelu_tanh", "gated_ffn": False, "attention_bias": "all", "mlp_bias": True},
    **{"tie_embeddings": True, "rope_theta": 10_000.0},
}
_GPT2: dict[str, Any] = {**_GPT, "partial_rotary_factor": 0.0, "learned_positions": 1024, "hf_model_type": "gpt2"}


def _starcoder2(theta: float, tied: bool = True) -> dict[str, Any]:
    options = {"rope_theta": theta, "sliding_window": 4096, "tie_embeddings": tied}
    return {**_GPT, **options, "hf_model_type": "starcoder2"}


def _granite(scores: float, logits: float) -> dict[str, Any]:
    factors = {"embedding_scale": 12.0, "residual_scale": 0.22, "attention_scale": scores, "logits_scale": 1 / logits}
    return {**factors, "rope_theta": 10_000_000.0, "tie_embeddings": True, "hf_model_type": "granite"}


def _gemma3(dim: int, window: int, scores: int = 256, head_dim: int = 256, scaling: float = 8.0) -> dict[str, Any]:
    local = {"count": 5, "sliding_window": window, "rope_theta": 10_000.0}
    return {
        **{"norm": "rms_plus_one", "norm_placement": "both", "activation": "gelu_tanh", "qk_norm": True},
        **{"norm_eps": 1e-6, "head_dim": head_dim, "rope_theta": 1_000_000.0, "tie_embeddings": True},
        **{"embedding_scale": math.sqrt(dim), "attention_scale": 1 / math.sqrt(scores)},
        **({"rope_scaling_type": "linear", "rope_scaling_factor": scaling} if scaling > 1 else {}),
        "layer_pattern": [{**local, "rope_scaling_factor": 1.0} if scaling > 1 else local, {}],
    }


def _glm45(expert_dim: int, n_experts: int, n_dense: int, scaling: float) -> dict[str, Any]:
    return {
        **{"attention_bias": "qkv", "partial_rotary_factor": 0.5, "head_dim": 128, "rope_theta": 1_000_000.0},
        "moe": {
            **{"n_experts": n_experts, "n_experts_per_token": 8, "expert_dim": expert_dim, "n_shared_experts": 1},
            **{"n_first_dense_layers": n_dense, "score_function": "sigmoid", "normalize_scores": True},
            **{"score_scaling": scaling, "balance_bias": True},
        },
    }


def _size(
    dim: int, n_layers: int, n_heads: int, n_kv_heads: int, ffn_dim: int, vocab_size: int, **other: Any
) -> dict[str, Any]:
    dimensions = {"dim": dim, "n_layers": n_layers, "n_heads": n_heads, "n_kv_heads": n_kv_heads}
    return {**COMMON, **dimensions, "ffn_dim": ffn_dim, "vocab_size": vocab_size, **other}


# fmt: off
SIZES: dict[str, dict[str, Any]] = {
    #                      dim  layers heads  kv    ffn   vocab
    # 256 bytes, BOS and EOS, rounded up to a multiple of 16 so that the vocabulary can be sharded evenly.
    "debug":         _size(  256,    6,   16,   8,   768,    272, rope_theta=10_000.0),
    # Llama 3.2 model cards, https://huggingface.co/meta-llama/Llama-3.2-1B and -3B
    "llama3_1b":     _size( 2048,   16,   32,   8,  8192, 128256, tie_embeddings=True, rope_scaling_factor=32.0),
    "llama3_3b":     _size( 3072,   28,   24,   8,  8192, 128256, tie_embeddings=True, rope_scaling_factor=32.0),
    # Llama 2, arXiv:2307.09288
    "llama2_7b":     _size( 4096,   32,   32,  32, 11008,  32000, rope_theta=10_000.0),
    "llama2_13b":    _size( 5120,   40,   40,  40, 13824,  32000, rope_theta=10_000.0),
    # LLaMA, arXiv:2302.13971 (called 33B in the paper)
    "llama_30b":     _size( 6656,   60,   52,  52, 17920,  32000, rope_theta=10_000.0, norm_eps=1e-6),
    # Llama 3.1, arXiv:2407.21783; llama3_70b is also Llama 3.3, of the same dimensions
    "llama3_8b":     _size( 4096,   32,   32,   8, 14336, 128256, rope_scaling_factor=8.0),
    "llama3_70b":    _size( 8192,   80,   64,   8, 28672, 128256, rope_scaling_factor=8.0),
    "llama3_405b":   _size(16384,  126,  128,   8, 53248, 128256, rope_scaling_factor=8.0),
    # Qwen3, arXiv:2505.09388 and https://huggingface.co/Qwen/Qwen3-8B
    "qwen3_0.6b":    _size( 1024,   28,   16,   8,  3072, 151936, tie_embeddings=True, **_QWEN3),
    "qwen3_1.7b":    _size( 2048,   28,   16,   8,  6144, 151936, tie_embeddings=True, **_QWEN3),
    "qwen3_4b":      _size( 2560,   36,   32,   8,  9728, 151936, tie_embeddings=True, **_QWEN3),
    "qwen3_8b":      _size( 4096,   36,   32,   8, 12288, 151936, **_QWEN3),
    "qwen3_14b":     _size( 5120,   40,   40,   8, 17408, 151936, **_QWEN3),
    "qwen3_32b":     _size( 5120,   64,   64,   8, 25600, 151936, **_QWEN3),
    # of which 3.3 and 22 billion weights are active; https://huggingface.co/Qwen/Qwen3-30B-A3B and -235B-A22B
    "qwen3_30b_a3b": _size( 2048,   48,   32,   4,  6144, 151936, **_qwen3_moe(768)),
    "qwen3_235b_a22b":_size(4096,   94,   64,   4, 12288, 151936, **_qwen3_moe(1536)),
    # Qwen2.5, arXiv:2412.15115 and https://huggingface.co/Qwen/Qwen2.5-7B
    "qwen2.5_0.5b":  _size(  896,   24,   14,   2,  4864, 151936, tie_embeddings=True, **_QWEN2),
    "qwen2.5_1.5b":  _size( 1536,   28,   12,   2,  8960, 151936, tie_embeddings=True, **_QWEN2),
    "qwen2.5_7b":    _size( 3584,   28,   28,   4, 18944, 152064, **_QWEN2),
    # Mistral 7B v0.1, arXiv:2310.06825. (v0.2 and v0.3 have no window and theta 1e6, v0.3 has 32768 tokens.)
    "mistral_7b":    _size( 4096,   32,   32,   8, 14336,  32000, rope_theta=10_000.0, sliding_window=4096),
    # Mixtral v0.1, arXiv:2401.04088 and https://huggingface.co/mistralai/Mixtral-8x22B-v0.1
    "mixtral_8x7b":  _size( 4096,   32,   32,   8, 14336,  32000, **_MIXTRAL),
    "mixtral_8x22b": _size( 6144,   56,   48,   8, 16384,  32000, **_MIXTRAL),
    # of which 1.3 billion weights are active; arXiv:2409.02060 and https://huggingface.co/allenai/OLMoE-1B-7B-0924
    "olmoe_1b_7b":   _size( 2048,   16,   16,  16,  1024,  50304, **_OLMOE),
    # SmolLM2, arXiv:2502.02737 and https://huggingface.co/HuggingFaceTB/SmolLM2-1.7B
    "smollm2_135m":  _size(  576,   30,    9,   3,  1536,  49152, tie_embeddings=True, rope_theta=100_000.0),
    "smollm2_360m":  _size(  960,   32,   15,   5,  2560,  49152, tie_embeddings=True, rope_theta=100_000.0),
    "smollm2_1.7b":  _size( 2048,   24,   32,  32,  8192,  49152, tie_embeddings=True, rope_theta=130_000.0),
    # TinyLlama, arXiv:2401.02385
    "tinyllama_1.1b":_size( 2048,   22,   32,   4,  5632,  32000, rope_theta=10_000.0),
    # OLMo 2, arXiv:2501.00656, and Olmo 3, https://huggingface.co/allenai/Olmo-3-1025-7B
    "olmo2_1b":      _size( 2048,   16,   16,  16,  8192, 100352, **_OLMO2),
    "olmo2_7b":      _size( 4096,   32,   32,  32, 11008, 100352, **_OLMO2),
    "olmo2_13b":     _size( 5120,   40,   40,  40, 13824, 100352, **_OLMO2),
    "olmo2_32b":     _size( 5120,   64,   40,   8, 27648, 100352, **_OLMO2),
    "olmo3_7b":      _size( 4096,   32,   32,  32, 11008, 100278, **_OLMO3),
    "olmo3_32b":     _size( 5120,   64,   40,   8, 27648, 100278, **_OLMO3),
    # https://huggingface.co/HuggingFaceTB/SmolLM3-3B
    "smollm3_3b":    _size( 2048,   36,   16,   4, 11008, 128256, **_SMOLLM3),
    # Granite 3.1, https://huggingface.co/ibm-granite/granite-3.1-8b-base
    "granite3_2b":   _size( 2048,   40,   32,   8,  8192,  49152, **_granite(0.015625, 8.0)),
    "granite3_8b":   _size( 4096,   40,   32,   8, 12800,  49152, **_granite(0.0078125, 16.0)),
    # Phi-3, arXiv:2404.14219 (with 4K positions), and Phi-4, arXiv:2412.08905
    "phi3_mini_3.8b":_size( 3072,   32,   32,  32,  8192,  32064, rope_theta=10_000.0, sliding_window=2047, **_PHI3),
    "phi4_14b":      _size( 5120,   40,   40,  10, 17920, 100352, rope_theta=250_000.0, **_PHI3),
    # https://huggingface.co/zai-org/GLM-4-9B-0414 and GLM-4-32B-0414; GLM-4.5, arXiv:2508.06471
    "glm4_9b":       _size( 4096,   40,   32,   2, 13696, 151552, attention_bias="qkv", **_GLM4),
    "glm4_32b":      _size( 6144,   61,   48,   2, 23040, 151552, **_GLM4),
    "glm4.5_air_106b":_size(4096,   46,   96,   8, 10944, 151552, **_glm45(1408, 128, 1, 1.0)),
    "glm4.5_355b":   _size( 5120,   92,   96,   8, 12288, 151552, qk_norm=True, **_glm45(1536, 160, 3, 2.5)),
    # StarCoder2, arXiv:2402.19173
    "starcoder2_3b": _size( 3072,   30,   24,   2, 12288,  49152, **_starcoder2(999999.4420358813)),
    "starcoder2_7b": _size( 4608,   32,   36,   4, 18432,  49152, **_starcoder2(1_000_000.0)),
    "starcoder2_15b":_size( 6144,   40,   48,   4, 24576,  49152, **_starcoder2(100_000.0, tied=False)),
    # GPT-2 (Radford et al. 2019), https://huggingface.co/openai-community/gpt2
    "gpt2":          _size(  768,   12,   12,  12,  3072,  50257, **_GPT2),
    "gpt2_medium":   _size( 1024,   24,   16,  16,  4096,  50257, **_GPT2),
    "gpt2_large":    _size( 1280,   36,   20,  20,  5120,  50257, **_GPT2),
    "gpt2_xl":       _size( 1600,   48,   25,  25,  6400,  50257, **_GPT2),
    # Gemma 3, arXiv:2503.19786, without the encoder of images
    "gemma3_1b":     _size( 1152,   26,    4,   1,  6912, 262144, **_gemma3(1152, 512, scaling=1.0)),
    "gemma3_4b":     _size( 2560,   34,    8,   4, 10240, 262208, **_gemma3(2560, 1024)),
    "gemma3_12b":    _size( 3840,   48,   16,   8, 15360, 262208, **_gemma3(3840, 1024)),
    "gemma3_27b":    _size( 5376,   62,   32,  16, 21504, 262208, **_gemma3(5376, 1024, 168, 128)),
    # DeepSeek-V3, arXiv:2412.19437, without its module for multi-token prediction; 37 billion weights are active
    "deepseek_v3_671b":_size(7168,  61,  128, 128, 18432, 129280, **_DEEPSEEK_V3),
    # gpt-oss, arXiv:2508.10925; of which 3.6 and 5.1 billion weights are active
    "gpt_oss_20b":   _size( 2880,   24,   64,   8,  2880, 201088, **_gpt_oss(32)),
    "gpt_oss_120b":  _size( 2880,   36,   64,   8,  2880, 201088, **_gpt_oss(128)),
    # Moonlight, arXiv:2502.16982 and https://huggingface.co/moonshotai/Moonlight-16B-A3B
    "moonlight_16b_a3b":_size(2048, 27,   16,  16, 11264, 163840, **_MOONLIGHT),
    # Kimi K2, arXiv:2507.20534 and https://huggingface.co/moonshotai/Kimi-K2-Instruct; 32 billion weights are active
    "kimi_k2_1t":    _size( 7168,   61,   64,  64, 18432, 163840, **_KIMI_K2),
    # DeepSeek-V2, arXiv:2405.04434 and https://huggingface.co/deepseek-ai/DeepSeek-V2 and -V2-Lite; 21 and 2.4 billion
    # weights are active
    "deepseek_v2_lite":_size(2048,  27,   16,  16, 10944, 102400, **_deepseek_v2(0, n_experts=64, expert_dim=1408)),
    "deepseek_v2_236b":_size(5120,  60,  128, 128, 12288, 102400,
                             **_deepseek_v2(1536, n_experts=160, expert_dim=1536, score_scaling=16.0, **_GROUPS_OF_V2)),
    # GPT-3, arXiv:2005.14165, but dense in all layers: half of them are locally banded sparse there, of a width that is
    # not published. Vocabulary 50257 rounded up to a multiple of 128.
    "gpt_175b":      _size(12288,   96,   96,  96, 49152,  50304, **{**_GPT2, "learned_positions": 2048}),
}
# fmt: on
