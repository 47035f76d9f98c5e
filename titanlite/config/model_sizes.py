"""Dimensions of published Llama models. `model.flavor` selects one; [model] keys override it.

To add a model, add a line here, and its published parameter count to tests/test_model.py.
"""

from typing import Any

_COMMON: dict[str, Any] = {
    "norm_eps": 1e-5,
    "tie_embeddings": False,
    "rope_theta": 500_000.0,
    "rope_scaling_factor": 1.0,
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "rope_original_seq_len": 8192,
}


def _size(
    dim: int, n_layers: int, n_heads: int, n_kv_heads: int, ffn_dim: int, vocab_size: int, **other: Any
) -> dict[str, Any]:
    dimensions = {"dim": dim, "n_layers": n_layers, "n_heads": n_heads, "n_kv_heads": n_kv_heads}
    return {**_COMMON, **dimensions, "ffn_dim": ffn_dim, "vocab_size": vocab_size, **other}


# fmt: off
SIZES: dict[str, dict[str, Any]] = {
    #                     dim  layers heads  kv    ffn   vocab
    # 256 bytes, BOS and EOS, rounded up to a multiple of 16 so that the vocabulary can be sharded evenly.
    "debug":       _size(  256,    6,   16,   8,   768,    272, rope_theta=10_000.0),
    # Llama 3.2 model cards, https://huggingface.co/meta-llama/Llama-3.2-1B and -3B
    "llama3_1b":   _size( 2048,   16,   32,   8,  8192, 128256, tie_embeddings=True, rope_scaling_factor=32.0),
    "llama3_3b":   _size( 3072,   28,   24,   8,  8192, 128256, tie_embeddings=True, rope_scaling_factor=32.0),
    # Llama 2, arXiv:2307.09288
    "llama2_7b":   _size( 4096,   32,   32,  32, 11008,  32000, rope_theta=10_000.0),
    "llama2_13b":  _size( 5120,   40,   40,  40, 13824,  32000, rope_theta=10_000.0),
    # LLaMA, arXiv:2302.13971 (called 33B in the paper)
    "llama_30b":   _size( 6656,   60,   52,  52, 17920,  32000, rope_theta=10_000.0, norm_eps=1e-6),
    # Llama 3.1, arXiv:2407.21783
    "llama3_8b":   _size( 4096,   32,   32,   8, 14336, 128256, rope_scaling_factor=8.0),
    "llama3_70b":  _size( 8192,   80,   64,   8, 28672, 128256, rope_scaling_factor=8.0),
    "llama3_405b": _size(16384,  126,  128,   8, 53248, 128256, rope_scaling_factor=8.0),
    # GPT-3's width, depth and heads (arXiv:2005.14165, table 2.1) in Llama blocks: a SwiGLU layer of 8/3 the width has
    # as many weights as GPT-3's layer of 4 times the width. Vocabulary 50257 rounded up to a multiple of 128.
    "gpt_175b":    _size(12288,   96,   96,  96, 32768,  50304, rope_theta=10_000.0),
}
# fmt: on
