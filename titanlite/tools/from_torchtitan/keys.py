"""The keys, defaults and models of torchtitan 0.2.2, as conversion.py and groups.py read them; keys.toml has the tables
of keys."""

from pathlib import Path
from typing import Any, NamedTuple

from titanlite.config.loader import read_toml

_TABLES = read_toml(str(Path(__file__).with_name("keys.toml")))
SAME: list[str] = [f"{section}.{name}" for section, names in _TABLES["same"].items() for name in names]
"""Keys with an option of the same name. groups.py converts those that are in none of these tables."""
CHANGED: dict[str, str] = _TABLES["changed"]
"""What means something else under the same name."""
DEFAULTS: dict[str, Any] = _TABLES["defaults"]
"""torchtitan's defaults where an option of the same name has another, or none."""
DETAIL = object()
"""The `off` value of a key that is only read with another key, which is listed if it is on."""


class Missing(NamedTuple):
    """A key without an option: the reason, and the value with which nothing is lost."""

    reason: str
    off: Any = DETAIL


NOT_OFFERED = {key: Missing(**values) for key, values in _TABLES["not_offered"].items()}
OF_0_2: dict[str, str] = _TABLES["of_0_2"]
"""Keys that a 0.2 release still reads, and the later key; [float8] and [mx] are those of 0.1."""

_DEBUG = {"n_kv_heads": 16, "vocab_size": 2048, "rope_theta": 500_000.0, "rope_scaling_factor": 8.0}
_QWEN_DEBUG = {"dim": 256, "n_layers": 8, "n_heads": 16, "n_kv_heads": 8, "ffn_dim": 3072, "vocab_size": 2048}
_SOFTMAX = {
    **{"moe.score_function": "softmax", "moe.normalize_scores": False, "moe.n_groups": 1, "moe.n_groups_per_token": 1},
    **{"moe.score_scaling": 1.0, "moe.n_shared_experts": 2, "moe.n_first_dense_layers": 1},
}


def _deepseek(dim: int, n_layers: int, n_heads: int, ffn_dim: int, vocab_size: int, **other: Any) -> dict[str, Any]:
    dimensions = {"dim": dim, "n_layers": n_layers, "n_heads": n_heads, "n_kv_heads": n_heads, "ffn_dim": ffn_dim}
    return {**dimensions, "vocab_size": vocab_size, "norm_eps": 1e-5, **_SOFTMAX, **other}


_DEEPSEEK_DEBUG = _deepseek(256, 6, 16, 1024, 2048) | {
    **{"moe.n_experts": 8, "moe.n_experts_per_token": 3, "moe.expert_dim": 256},
    **{"mla.q_lora_rank": 0, "mla.mscale_all_dim": 0.7},
}
_DEEPSEEK_16B = _deepseek(2048, 27, 16, 10944, 102400) | {
    **{"moe.n_experts": 64, "moe.n_experts_per_token": 6, "moe.expert_dim": 1408},
    **{"mla.q_lora_rank": 0, "mla.mscale_all_dim": 0.7},
}
_DEEPSEEK_236B = _deepseek(5120, 60, 128, 12288, 102400) | {
    **{"moe.n_experts": 160, "moe.n_experts_per_token": 6, "moe.expert_dim": 1536, "moe.score_scaling": 16.0},
    **{"moe.n_groups": 8, "moe.n_groups_per_token": 3},
}
_DOCUMENTS = {"document_mask": True}

MODELS: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("llama3", "debugmodel"): ("debug", _DEBUG),
    ("llama3", "debugmodel_flex_attn"): ("debug", _DEBUG | _DOCUMENTS),
    ("llama3", "debugmodel_varlen_attn"): ("debug", _DEBUG | _DOCUMENTS),
    ("llama3", "8B"): ("llama3_8b", {}),
    ("llama3", "8B_flex"): ("llama3_8b", _DOCUMENTS),
    ("llama3", "8B_varlen"): ("llama3_8b", _DOCUMENTS),
    ("llama3", "70B"): ("llama3_70b", {}),
    ("llama3", "405B"): ("llama3_405b", {}),
    ("llama2", "7B"): ("llama2_7b", {}),
    ("llama2", "13B"): ("llama2_13b", {}),
    ("qwen3", "debugmodel"): ("qwen3_0.6b", _QWEN_DEBUG),
    ("qwen3", "0.6B"): ("qwen3_0.6b", {}),
    ("qwen3", "1.7B"): ("qwen3_1.7b", {}),
    ("qwen3", "4B"): ("qwen3_4b", {}),
    ("qwen3", "8B"): ("qwen3_8b", {}),
    ("qwen3", "14B"): ("qwen3_14b", {}),
    ("qwen3", "32B"): ("qwen3_32b", {}),
    ("qwen3", "debugmodel_moe"): ("qwen3_30b_a3b", {**_QWEN_DEBUG, "moe.n_experts": 64, "moe.expert_dim": 768}),
    ("qwen3", "30B-A3B"): ("qwen3_30b_a3b", {}),
    ("qwen3", "235B-A22B"): ("qwen3_235b_a22b", {"rope_theta": 5_000_000.0}),
    ("deepseek_v3", "debugmodel"): ("deepseek_v3_671b", _DEEPSEEK_DEBUG),
    ("deepseek_v3", "debugmodel_flex_attn"): ("deepseek_v3_671b", _DEEPSEEK_DEBUG | _DOCUMENTS),
    ("deepseek_v3", "16B"): ("deepseek_v3_671b", _DEEPSEEK_16B | _DOCUMENTS),
    ("deepseek_v3", "236B"): ("deepseek_v3_671b", _DEEPSEEK_236B | _DOCUMENTS),
    ("deepseek_v3", "671B"): ("deepseek_v3_671b", {"norm_eps": 1e-5} | _DOCUMENTS),
}
"""By model.name and model.flavor: our flavor, and what differs from it. The flex and varlen flavors, and the large ones
of DeepSeek-V3, have a document mask."""
DEEPSEEK_ORIGINAL_SEQ_LEN = 4096
"""Up to this training.seq_len torchtitan's DeepSeek-V3 has no YaRN."""

WHATEVER_THE_FILE_SAYS = [
    "Initial weights: every matrix from a normal of standard deviation 0.02, the embedding too (torchtitan's: 1).",
    "Weight decay: norms have none (torchtitan's decays every parameter).",
    "Data: the same documents in another order; the target after an EOS, the next document's BOS, is not trained on.",
    "Checkpoints: the last one is a full checkpoint too, from which a run can resume.",
    "A loss or gradient norm that is not finite ends the run (training.nonfinite_steps_allowed).",
]
"""What differs between the two programs and has no key in torchtitan's file."""
