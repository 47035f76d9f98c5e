"""Every text model type of the installed transformers: what is accepted computes the same, and anything else is
rejected, in one line each. There is no silent difference.

Each key of a supported type's config.json is changed, one at a time, to values that make sense for it. Where titanlite
accepts the file, transformers' model of it, with random weights, is saved, and loaded here: the logits must be equal.
"""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import tomli_w
import torch

from tests.helpers.cases import cases
from tests.helpers.hf import draw_biases, draw_weights, empty_model
from titanlite import config
from titanlite.config import ConfigError
from titanlite.config.hf.config_json import model_options
from titanlite.config.hf.families import FAMILIES
from titanlite.config.schema import Model
from titanlite.hf.load import load_hf_weights

TINY: dict[str, Any] = {
    **{"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 48, "vocab_size": 60, "max_position_embeddings": 64, "pad_token_id": None},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts": 8}
OF_TYPE: dict[str, dict[str, Any]] = {
    "gpt2": {**{"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 60}, "pad_token_id": None},
    "gemma3_text": {"head_dim": 12, "sliding_window": 9, "hidden_size": 36},
    "glm": {"head_dim": 12},
    "glm4": {"head_dim": 12},
    "ministral": {"head_dim": 8},
    "ministral3": {"head_dim": 12},
    "olmo3": {"sliding_window": 9},
    "qwen3": {"head_dim": 12},
    "seed_oss": {"head_dim": 12},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {**EXPERTS, "head_dim": 12},
    "olmoe": {**EXPERTS, "num_key_value_heads": 4},
    "glm4_moe": {**EXPERTS, "head_dim": 12},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12, "sliding_window": 9},
    "deepseek_v2": {
        **{**EXPERTS, "num_key_value_heads": 4, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
        **{"q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12},
    },
    "deepseek_v3": {
        **{**EXPERTS, "num_key_value_heads": 4, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
        **{"q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12},
    },
}
"""Keys besides TINY's, by model type."""
NO_MODEL = {
    *("architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "_name_or_path"),
    *("output_hidden_states", "output_attentions", "return_dict", "problem_type", "id2label", "label2id", "use_cache"),
    *("chunk_size_feed_forward", "is_encoder_decoder", "initializer_range", "bos_token_id", "eos_token_id"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
    *("reorder_and_upcast_attn", "output_router_logits", "router_aux_loss_coef", "tokenizer_class", "_diffusers"),
}
"""Keys that say nothing about what a model computes."""
LAYERS = {
    "layer_types": [["sliding_attention", "full_attention"] * 2, ["full_attention"] * 4, ["sliding_attention"] * 4],
    "no_rope_layers": [[1, 0, 0, 1], [0, 0, 0, 0]],
    "hidden_act": ["gelu", "relu"],
    "hidden_activation": ["silu", "gelu"],
    "activation_function": ["gelu", "relu"],
    "rope_parameters": [
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
        {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1000.0},
        {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0, "original_max_position_embeddings": 16},
    ],
    "sliding_window": [5, None],
    "max_window_layers": [2],
    "mlp_only_layers": [[0, 2], [0]],
    "topk_method": ["greedy", "group_limited_greedy"],
}
"""Values to try of keys that are no number and no boolean."""
FURTHER = {
    **{"attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0, "clip_qkv": 0.1, "attention_bias": True},
    **{"mlp_bias": True, "head_dim": 16, "partial_rotary_factor": 0.5, "use_qk_norm": True, "logits_scaling": 3.0},
    **{"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3, "rope_theta": 77.0},
    **{"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "use_bidirectional_attention": True},
    **{"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False, "add_cross_attention": True},
    **{"pretraining_tp": 2, "attention_dropout": 0.1, "router_jitter_noise": 0.1, "resid_pdrop": 0.1},
    **{"architectures": ["LLaMAForCausalLM"], "qk_layernorm": True, "sliding_window": 7, "use_parallel_residual": True},
    **{"query_pre_attn_scalar": 7, "rope_interleave": False, "norm_topk_prob": False, "use_sliding_window": True},
}
"""Keys that are tried with every model type, whether it has them or not."""


SWEPT = [name for name in FAMILIES if name != "kimi_k2"]  # which transformers reads as deepseek_v3


def types() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def config_of(model_type: str, **values: Any) -> dict[str, Any]:
    from transformers import AutoConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return json.loads(AutoConfig.for_model(model_type, **values).to_json_string(use_diff=False))


def default_config(model_type: str) -> dict[str, Any]:
    """Return the defaults of a type; of a few, transformers has none."""
    try:
        return config_of(model_type)
    except Exception:  # of any kind
        return {"model_type": model_type}


def rejection(folder: Path) -> list[str]:
    """Return the lines with which a config.json is rejected; none if it is accepted."""
    try:
        model_options(folder)
    except ConfigError as error:
        return error.problems
    return []


def test_every_model_type_is_known_or_one_line(tmp_path: Path):
    """The defaults of each type of transformers, as it writes them."""
    accepted, other = [], 0
    for model_type in types():
        content = default_config(model_type)
        (tmp_path / "config.json").write_text(json.dumps(content))
        lines = rejection(tmp_path)
        assert all("\n" not in line and len(line) < 700 for line in lines), model_type
        if not lines:
            accepted.append(content["model_type"])
        elif content["model_type"] not in FAMILIES:
            assert len(lines) == 1
            assert "unsupported" in lines[0]
            other += 1
    assert set(accepted) <= set(FAMILIES)
    assert len(accepted) >= 15
    assert other >= 100


def changes_of(content: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the keys of a config.json, each with a value that it does not have."""
    found: list[tuple[str, Any]] = []
    for key, value in content.items():
        if key in NO_MODEL or key.startswith("_"):
            continue
        if key in LAYERS:
            found += [(key, other) for other in LAYERS[key] if other != value]
        elif isinstance(value, bool):
            found.append((key, not value))
        elif isinstance(value, int):
            found += [(key, 2 * value or 1), (key, max(value // 2, 1))]
        elif isinstance(value, float):
            found += [(key, value / 2 or 0.1), (key, value + 1.5)]
    found += [(key, value) for key, value in FURTHER.items() if content.get(key) != value]
    return [(key, value) for key, value in found if content.get(key, ...) != value]


def write_run(folder: Path) -> Path:
    """Write the config of a run that trains a folder's model. Returns its file."""
    run = {"model": {"flavor": "from_hf", "hf_assets_path": str(folder)}, "training": {"seq_len": 16}}
    (folder / "run.toml").write_text(tomli_w.dumps(run))
    return folder / "run.toml"


def logits(content: dict[str, Any], folder: Path) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return our logits and transformers', of a model of this config.json; None if transformers has none."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokens = torch.randint(60, (2, 20), generator=torch.Generator().manual_seed(0))
    try:
        hf_config = AutoConfig.from_pretrained(folder)
        loop = {"experts_implementation": "eager"} if "expert" in str(content) else {}
        hf = AutoModelForCausalLM.from_config(
            hf_config, attn_implementation="eager", dtype=torch.float32, **loop
        ).eval()
        draw_weights(hf)
        draw_biases(hf)
        with torch.no_grad():
            theirs = hf(tokens, use_cache=False).logits
    except Exception:  # whatever it does not support
        return None
    hf.save_pretrained(folder / "weights")
    model = Model.model_validate({"flavor": "debug", **model_options(folder)})
    llama = empty_model(model)
    load_hf_weights(folder / "weights", llama, model)
    with torch.no_grad():
        return llama(tokens), theirs


def tried(model_type: str, folder: Path) -> dict[str, list[str]]:
    """Return the changes of a model type's keys that are rejected, those that compute the same, those that transformers
    does not support, and those whose logits differ."""
    tiny = {} if model_type == "gpt2" else TINY
    base = config_of(model_type, **{**tiny, **OF_TYPE.get(model_type, {})})
    found: dict[str, list[str]] = {"rejected": [], "equal": [], "no model": [], "different": []}
    for number, (key, value) in enumerate([("", None), *changes_of(base)]):
        content = copy.deepcopy(base) | ({key: value} if key else {})
        own = folder / str(number)
        own.mkdir()
        (own / "config.json").write_text(json.dumps(content))
        name = f"{key} = {json.dumps(value)}"
        try:
            config.load([str(write_run(own))])  # which applies the rules between options, too
        except ConfigError:
            found["rejected"].append(name)
            continue
        try:
            pair = logits(content, own)
        except ConfigError as error:  # the weights are not those of the options
            found["rejected"].append(f"{name}: {error.problems[0]}")
            continue
        if pair is None:
            found["no model"].append(name)
            continue
        difference = ((pair[0] - pair[1]).abs().max() / pair[1].abs().max()).item()
        found["equal" if difference < 1e-4 else "different"].append(name)
    return found


@cases("model_type", SWEPT, always=["gpt2", "olmo3"])
def test_what_is_accepted_is_equal(model_type: str, tmp_path: Path):
    found = tried(model_type, tmp_path)
    assert found["different"] == []
    assert len(found["equal"]) >= 8
    assert len(found["rejected"]) >= 2
