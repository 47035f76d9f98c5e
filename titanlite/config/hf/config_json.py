"""Conversion between Hugging Face's config.json and the options of [model], for the model types in families.py. A
config.json is untrusted: unsupported keys and values of a wrong type are rejected. Missing keys get transformers 5.23's
defaults. Rotary options are under rope_theta and rope_scaling, or (transformers 5) rope_parameters."""

import math
import os
from pathlib import Path
from typing import Any

from titanlite.config.hf.deepseek import deepseek_keys, deepseek_options
from titanlite.config.hf.experts import expert_options, hf_experts
from titanlite.config.hf.families import (
    AMBIGUOUS,
    FAMILIES,
    OLD,
    PLAIN,
    is_long,
    reject_others,
    scores_divisor,
    unsupported_features,
)
from titanlite.config.hf.layers import hf_layers, layer_options, layers_fit, rope_of_kinds
from titanlite.config.hf.rope import hf_rope, hf_rope_of_kinds
from titanlite.config.hf.values import JsonObject, read_json_object
from titanlite.config.loader import ConfigError, Rejections, Section, show, value_of
from titanlite.config.model_sizes import COMMON
from titanlite.config.types import MOST_LAYERS

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
"""Names of the file with all weights, and of the index of several files with weights; a folder has one of the two."""
NO_OPTION = ("max_position_embeddings", "num_nextn_predict_layers")
"""Keys without an option of [model]; an export compares their values with the released model's config.json."""
WITH_EXPERTS = ("gpt_oss", "mixtral", "qwen3_moe", "glm4_moe", "olmoe")
"""Model types with experts and without latent attention."""
QUANTIZATION = "quantization_config"


def options_from_hf(folder: Any) -> dict[str, Any]:
    """Return the [model] options for model.flavor = "from_hf"; `folder` is the value of model.hf_assets_path."""
    if not isinstance(folder, str) or not folder:
        problem = f"model.hf_assets_path = {show(folder)}: expected the folder of a config.json"
        raise ConfigError([f'{problem}; model.flavor = "from_hf" reads it'])
    return model_options(Path(os.path.expanduser(folder)))


def model_options(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json as options of [model]. Raises ConfigError with a line for each unusable key."""
    config, model_type = _config_and_type(folder)
    family, problems = FAMILIES[model_type], config.problems
    reject_others(config, model_type, "any")
    dim, n_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    n_layers = config.integer("num_hidden_layers", most=MOST_LAYERS)
    # In every family, num_key_value_heads = null means one KV head per query head; only a missing key has a default.
    n_kv_heads = n_heads if "num_key_value_heads" in config.values else family.n_kv_heads or n_heads
    options = {
        **COMMON,
        "dim": dim,
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_kv_heads": config.integer("num_key_value_heads", n_kv_heads),
        "head_dim": config.integer("head_dim", family.head_dim or (dim // n_heads if dim % n_heads == 0 else -1)),
        "ffn_dim": config.integer("intermediate_size", 4 * dim if model_type == "gpt2" else None),
        "vocab_size": config.integer("vocab_size"),
        "norm_eps": config.number("rms_norm_eps", family.norm_eps),
        "tie_embeddings": config.boolean("tie_word_embeddings", family.tied),
        **family.options,
        "activation": _activation(config, model_type),
        **_bias_options(config, model_type),
        **layer_options(config, model_type, n_layers),
        **_own_options(config, model_type, dim),
    }
    if model_type.startswith("deepseek"):
        options |= deepseek_options(config, n_heads, n_layers, options.pop("mscale_all_dim", 0.0))
    elif family.experts:
        options["moe"] = expert_options(config, model_type)
    if model_type == "olmoe":
        reads = ("hidden_size", "num_attention_heads")
        config.only("head_dim", dim // n_heads, "the norm of all heads together is as wide as the model", *reads)
    if problems:
        raise ConfigError(problems)
    options = {key: value for key, value in options.items() if key in COMMON or value != PLAIN.get(key, ())}
    return options | ({"hf_model_type": model_type} if model_type in AMBIGUOUS else {})


def _config_and_type(folder: Path) -> tuple[JsonObject, str]:
    """Return the values and the model type of a folder's config.json. Raises ConfigError for an unsupported type."""
    problems: list[str] = []
    config = JsonObject(f"{folder / 'config.json'}: ", read_json_object(folder / "config.json"), problems)
    if config.values.get("model_type") == "kimi_k2":  # kimi_k2 is a DeepSeek-V3 under another name
        config.values["model_type"] = "deepseek_v3"
    model_type = config.values.get("model_type")
    if isinstance(model_type, str) and model_type not in FAMILIES:
        has, supported = ", ".join(unsupported_features(config.values)), ", ".join(FAMILIES)
        config.reject("model_type", f"unsupported{has and ': it has '}{has}; supported: {supported}")
    else:
        config.choice("model_type", tuple(FAMILIES))
    if problems:  # without a model type, the meaning of the other keys is unknown
        raise ConfigError(problems)
    return JsonObject(config.where, config.values, problems, names=FAMILIES[model_type].names), model_type


def _activation(config: JsonObject, model_type: str) -> str:
    known = FAMILIES[model_type].activations
    default = next(iter(known))
    if len(known) == 1:
        config.only("hidden_act", default, "the feed-forward layer is " + ("SwiGLU" if "silu" in known else "GeGLU"))
        return known[default]
    return known[config.choice("hidden_act", tuple(known), default)]


def _own_options(config: JsonObject, model_type: str, dim: int) -> dict[str, Any]:
    if model_type == "granite":
        return {
            "embedding_scale": config.number("embedding_multiplier", 1.0),
            "attention_scale": config.number("attention_multiplier", 1.0),
            "residual_scale": config.number("residual_multiplier", 1.0),
            "logits_scale": 1 / config.number("logits_scaling", 1.0),
        }
    if model_type == "gemma":
        return {"embedding_scale": math.sqrt(dim)}
    if model_type == "gemma3_text":
        scalar = config.integer("query_pre_attn_scalar", 256)
        return {"embedding_scale": math.sqrt(dim), "attention_scale": 1 / math.sqrt(scalar)}
    if model_type == "gpt2":
        n_heads = config.integer("num_attention_heads")
        config.only("num_key_value_heads", n_heads, "each query head has a KV head", "num_attention_heads")
        config.only("head_dim", dim // n_heads, "it is n_embd / n_head", "num_attention_heads")
        return {"learned_positions": config.integer("max_position_embeddings", 1024)}
    if model_type == "glm4_moe":
        return {"qk_norm": config.boolean("use_qk_norm", False)}
    if model_type == "gpt_oss":
        if config.object(QUANTIZATION).values:
            config.object(QUANTIZATION).choice("quant_method", ("mxfp4",))
        if not (config.values.get("rope_scaling") or config.values.get("rope_parameters")):
            config.reject("rope_scaling", "expected the options of the rotary embedding, which YaRN scales")
    return {}


def _bias_options(config: JsonObject, model_type: str) -> dict[str, Any]:
    family = FAMILIES[model_type]
    has_biases = model_type == "starcoder2" and config.boolean("use_bias", True)
    own = "all" if has_biases else family.options.get("attention_bias", "none")
    mlp = own == "all"
    if family.bias:
        own = family.bias if config.boolean("attention_bias", family.has_bias) else "none"
    return {"attention_bias": own, "mlp_bias": mlp or (family.has_mlp_bias and config.boolean("mlp_bias", False))}


def hf_config(
    model: Section, *, max_seq_len: int, torch_dtype: str, bos: int | None, eos: int | None
) -> dict[str, Any]:
    """Return a config.json with which transformers computes the same as titanlite with section `model`. `max_seq_len`
    is in tokens, `torch_dtype` is the saved weights' data type, such as "bfloat16"; `bos` and `eos` are token ids, None
    if there are none. Raises ConfigError if no model type of transformers supports these options."""
    model_type = _model_type(model)
    family = FAMILIES[model_type]
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": model_type,
        "torch_dtype": torch_dtype,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "hidden_size": model.dim,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": max_seq_len,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "hidden_act": next(name for name, own in family.activations.items() if own == model.activation),
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        **_rotary_keys(model, model_type),
        **hf_layers(model, model_type),
        **_own_keys(model, model_type),
    }
    if family.bias:
        config["attention_bias"] = model.attention_bias != "none"
    if family.has_mlp_bias:
        config["mlp_bias"] = model.mlp_bias
    if model_type.startswith("deepseek"):
        config |= deepseek_keys(model, model_type)
    elif family.experts:
        config |= hf_experts(model, model_type)
    return {family.names.get(key, key): value for key, value in config.items()}


def _rotary_keys(model: Section, model_type: str) -> dict[str, Any]:
    if model_type == "gpt2":
        return {}
    if FAMILIES[model_type].kinds == "rope":
        return hf_rope_of_kinds(*rope_of_kinds(model))
    return hf_rope(model, model_type)


def _own_keys(model: Section, model_type: str) -> dict[str, Any]:
    """Return the keys that only some model types have. pad_token_id is null, since padding is not trained."""
    if model_type == "granite":
        scale = model.attention_scale
        return {
            "embedding_multiplier": model.embedding_scale,
            "attention_multiplier": 1 / math.sqrt(model.head_dim) if scale == -1 else scale,
            "residual_multiplier": model.residual_scale,
            "logits_scaling": float(f"{1 / model.logits_scale:.15g}"),
        }
    if model_type == "gpt2":
        dropout = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
        return {"max_position_embeddings": model.learned_positions, **dropout}
    own = {
        "gemma3_text": {"query_pre_attn_scalar": round(scores_divisor(model))},
        "seed_oss": {"attention_out_bias": False, "residual_dropout": 0.0},
        "starcoder2": {"use_bias": model.mlp_bias, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    }.get(model_type, {})
    pads = ("olmo2", "olmo3", "smollm3", "ministral3", "phi3", "glm", "glm4", "seed_oss", "gemma", "gemma3_text")
    return own | ({"pad_token_id": None} if model_type in pads else {})


def folder_rules(model: Section, reject: Rejections) -> None:
    try:
        hf_config(model, max_seq_len=1, torch_dtype="float32", bos=None, eos=None)
    except ConfigError as error:
        reads = (f"model.{key}" for key in type(model).model_fields)
        reject("checkpoint.last_save_in_hf", f"{error.problems[0]}; set false", *reads)


def _model_type(model: Section) -> str:
    """Return the transformers model type that supports the model's options. Raises ConfigError if there is none."""
    if model.mla.kv_lora_rank:
        return "deepseek_v2" if model.moe.n_experts and model.moe.score_function == "softmax" else "deepseek_v3"
    fits = _types_that_fit(model)
    if model.moe.n_experts and model.moe.balance_bias and not fits["glm4_moe"]:
        what = "is in no config.json but those of DeepSeek-V3, which has latent attention, and GLM-4.5"
        raise ConfigError([f"model.moe.balance_bias = true: {what}; this model cannot be a Hugging Face folder"])
    found = [name for name, fit in fits.items() if fit]
    if model.hf_model_type:
        if model.hf_model_type not in found:
            others = f"; {', '.join(found)} would" if found else ""
            problem = f"a model of this type cannot have all options of [model]{others}; remove it"
            raise ConfigError([f"model.hf_model_type = {show(model.hf_model_type)}: {problem}"])
        return model.hf_model_type
    if not found:
        differing = [key for key, value in PLAIN.items() if getattr(model, key) != value and key not in OLD]
        keys = ["attention_bias", "mlp_bias", "qk_norm", "sliding_window", "dim", "n_heads", "head_dim", *differing]
        keys += [f"moe.{key}" for key in type(model.moe).model_fields] if model.moe.n_experts else []
        values = ", ".join(f"model.{key} = {show(value_of(model, key))}" for key in keys)
        families = ", ".join(fits)
        raise ConfigError([f"{values}: no family of transformers has all of these; expected those of {families}"])
    return found[0]


def _types_that_fit(model: Section) -> dict[str, bool]:
    """Return whether each type fits a model's options. Only dense types, or only types with experts, are considered."""
    names = WITH_EXPERTS if model.moe.n_experts else [name for name in FAMILIES if not FAMILIES[name].experts]
    fits = {name: FAMILIES[name].allows(model) and layers_fit(model, name) for name in names}
    return {name: fit and (name == "phi3" or not is_long(model)) for name, fit in fits.items()}
