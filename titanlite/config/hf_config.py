"""Hugging Face's config.json to the options of [model], and back: the families Llama, Mistral, Qwen2 and Qwen3, and
with experts Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V2 and -V3 (hf_deepseek.py).

A key that asks for what the model cannot do is rejected in one line, and so is a value of the wrong type, since anyone
can write such a file. Missing keys have the defaults of transformers (verified with 5.23). It has two spellings of the
rotary embedding's options: rope_theta and rope_scaling, as most files on the hub, and rope_parameters from 5.0 on.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple, Union

from titanlite.config.loader import ConfigError, Rejections, Section, show, value_of
from titanlite.config.model_sizes import COMMON
from titanlite.config.regular_file import read_file

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
"""The file of all weights, or the index of several; a folder has one of the two."""
LARGEST_FILE, LARGEST = 2**20, 2**31 - 1
"""Bytes of a config.json, and the largest integer in one."""


class Family(NamedTuple):
    """A model type of transformers: its class, its norms of queries and keys, and its defaults of some keys. Those of
    num_key_value_heads and head_dim are num_attention_heads and hidden_size / num_attention_heads where they are
    None."""

    architecture: str
    qk_norm: Union[bool, str] = False
    n_kv_heads: int | None = None
    head_dim: int | None = None
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    experts: str = ""
    """Key of the number of experts; empty: the type has none."""


FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", n_kv_heads=8),
    "qwen2": Family("Qwen2ForCausalLM", n_kv_heads=32),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, n_kv_heads=32, head_dim=128),
    "mixtral": Family(
        "MixtralForCausalLM", n_kv_heads=8, norm_eps=1e-5, rope_theta=1_000_000.0, experts="num_local_experts"
    ),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qk_norm=True, n_kv_heads=4, experts="num_experts"),
    "olmoe": Family("OlmoeForCausalLM", qk_norm="all_heads", norm_eps=1e-5, experts="num_experts"),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", experts="n_routed_experts"),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", experts="n_routed_experts"),
}
"""By model_type."""
ONLY: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "the feed-forward layer is SwiGLU"),
    "attention_dropout": (0, "there is no dropout"),
    "pretraining_tp": (1, "projections are not split"),
    "partial_rotary_factor": (1, "all channels are rotated"),
    "is_causal": (True, "attention is causal"),
    "clip_qkv": (None, "queries, keys and values are not clipped"),
    "router_jitter_noise": (0, "the router has no noise"),
    "quantization_config": (None, "quantized weights are not read; take or make bfloat16 ones (docs/hugging_face.md)"),
    "attn_logit_softcapping": (None, "attention scores are not capped"),
    "final_logit_softcapping": (None, "logits are not capped"),
}
"""Keys with the only value that the model has, and the reason. A key that is missing or null has that value."""
ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
ROPE_KEYS_OF_TYPE: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "beta_fast", "beta_slow", "attention_factor", "finetuned"},
}


def options_from_hf(folder: Any) -> dict[str, Any]:
    """Return the [model] values of model.flavor = "from_hf", from the value of model.hf_assets_path."""
    if not isinstance(folder, str) or not folder:
        problem = f"model.hf_assets_path = {show(folder)}: expected the folder of a config.json"
        raise ConfigError([f'{problem}; model.flavor = "from_hf" reads it'])
    return model_options(Path(folder))


def model_options(folder: Path) -> dict[str, Any]:
    """Return the values of [model] that describe the model of a folder's config.json: all but flavor and
    hf_assets_path. Raises ConfigError with a line for each key that is wrong or not supported."""
    problems: list[str] = []
    config = _Object(f"{folder / 'config.json'}: ", read_json_object(folder / "config.json"), problems)
    if config.values.get("model_type") == "kimi_k2":  # which transformers lacks: a DeepSeek-V3 by another name
        config.values["model_type"] = "deepseek_v3"
    model_type = config.values.get("model_type")
    if isinstance(model_type, str) and model_type not in FAMILIES:
        from titanlite.config.hf_unsupported import features  # here, since few files need it

        has, supported = ", ".join(features(config.values)), ", ".join(map(show, FAMILIES))
        config.reject("model_type", f"unsupported{has and ': it has '}{has}; supported: {supported}")
    else:
        config.choice("model_type", tuple(FAMILIES))
    if problems:  # what the other keys mean depends on it
        raise ConfigError(problems)
    family = FAMILIES[model_type]
    architectures = config.values.get("architectures")
    if architectures not in (None, [family.architecture]):
        config.reject("architectures", f"expected {show([family.architecture])}, the model_type's language model")
    for key, (value, reason) in ONLY.items():
        config.only(key, value, reason)
    dim, n_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    n_layers = config.integer("num_hidden_layers")
    # null is as many as query heads in every family
    n_kv_heads = n_heads if "num_key_value_heads" in config.values else family.n_kv_heads or n_heads
    options = {
        **COMMON,
        "dim": dim,
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_kv_heads": config.integer("num_key_value_heads", n_kv_heads),
        "head_dim": config.integer("head_dim", family.head_dim or (dim // n_heads if dim % n_heads == 0 else -1)),
        "ffn_dim": config.integer("intermediate_size"),
        "vocab_size": config.integer("vocab_size"),
        "norm_eps": config.number("rms_norm_eps", family.norm_eps),
        "tie_embeddings": config.boolean("tie_word_embeddings", False),
        "qk_norm": family.qk_norm,
        **_bias_options(config, model_type),
        "sliding_window": _sliding_window(config, model_type, n_layers),
        **_rope_options(config, family.rope_theta),
    }
    if model_type.startswith("deepseek"):
        from titanlite.config.hf_deepseek import deepseek_options

        options |= deepseek_options(config, n_heads, n_layers, options.pop("mscale_all_dim", 0.0))
    elif family.experts:
        options["moe"] = _expert_options(config, model_type)
    if model_type == "olmoe":
        reads = ("hidden_size", "num_attention_heads")
        config.only("head_dim", dim // n_heads, "the norm of all heads together is as wide as the model", *reads)
    if problems:
        raise ConfigError(problems)
    return options


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ConfigError if it cannot be read, is large, or is anything else."""
    try:
        value = json.loads(read_file(file, LARGEST_FILE).decode("utf-8-sig"), parse_constant=_no_constant)
    except FileNotFoundError:
        problem = "no such file"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        problem = f"not valid JSON: {str(error) or 'nested too deeply'}"
    else:
        if isinstance(value, dict):
            return value
        problem = f"expected a JSON object, got {_shown(value)}"
    raise ConfigError([f"{file}: {problem}"])


def token_ids(values: dict[str, Any], key: str, file: Path) -> list[int]:
    """Return the token ids that a key of config.json or generation_config.json has: one, several, or none (null)."""
    ids = values.get(key)
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if any(type(each) is not int for each in ids):
        raise ConfigError([f"{file}: {key} = {_shown(values[key])}: expected token ids"])
    return ids


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _shown(value: Any) -> str:
    """Return a value as it is written, if it is short."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = show(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


class _Object:
    """The values of a JSON object, by type. Each wrong one adds a line to `problems`, and a right one stands in."""

    def __init__(self, where: str, values: dict[str, Any], problems: list[str], rejected: set[str] | None = None):
        self.where, self.values, self.problems = where, values, problems
        self.rejected = set() if rejected is None else rejected

    def reject(self, key: str, message: str, *reads: str) -> None:
        """Add a line for a key. There is none if another key that the rule reads has one: it stands in for a value."""
        if not self.rejected.isdisjoint(reads):
            return
        self.rejected.add(key)
        value = f" = {_shown(self.values[key])}" if key in self.values else " is missing"
        self.problems.append(f"{self.where}{_shown(key)[1:-1]}{value}: {message}")

    def only(self, key: str, value: Any, reason: str, *reads: str) -> None:
        """Reject every other value of a key. 1 is also 1.0, but not true. For `reads` see `reject`."""
        actual = self.values.get(key)
        if actual is not None and (actual != value or isinstance(actual, bool) != isinstance(value, bool)):
            self.reject(key, f"expected {show(value)}; {reason}", *reads)

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Return an integer; the default where it is missing or null, without which it must be there."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if type(value) is int and least <= value <= LARGEST:
            return value
        self.reject(key, f"expected an integer from {least} to {LARGEST}")
        return least

    def number(self, key: str, default: float | None = None, *, least: float = 0.0) -> float:
        """Return a finite number above 0 and not below `least`; for the default see `integer`."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if type(value) in (int, float) and 0 < value <= sys.float_info.max and value >= least:
            return float(value)
        self.reject(key, f"expected a finite number {f'>= {least:g}' if least else '> 0'}")
        return 1.0

    def boolean(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if not (value is None or isinstance(value, bool)):
            self.reject(key, "expected true or false")
        return value if isinstance(value, bool) else default

    def choice(self, key: str, choices: tuple[str, ...], default: str | None = None) -> str:
        """Return one of some strings; for the default see `integer`."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, str) and value in choices:
            return value
        self.reject(key, f"expected one of {', '.join(map(show, choices))}")
        return choices[0]

    def object(self, key: str) -> "_Object":
        """Return the object at a key; an empty one where it is missing or null."""
        value = self.values.get(key)
        if not (value is None or isinstance(value, dict)):
            self.reject(key, "expected an object")
        return _Object(f"{self.where}{key}.", value if isinstance(value, dict) else {}, self.problems, self.rejected)


def _bias_options(config: _Object, model_type: str) -> dict[str, Any]:
    """Return the options for biases. Where transformers does not read a key, it must not contradict."""
    attention = config.boolean("attention_bias", model_type == "qwen2")
    mlp = config.boolean("mlp_bias", False)
    if model_type in ("mistral", "qwen2", "mixtral") and attention != (model_type == "qwen2"):
        config.reject("attention_bias", f"{show(model_type)} does not read it; remove it")
    if mlp and model_type != "llama":
        config.reject("mlp_bias", f"{show(model_type)} does not read it; remove it")
    return {"attention_bias": "qkv" if model_type == "qwen2" else "all" if attention else "none", "mlp_bias": mlp}


def _sliding_window(config: _Object, model_type: str, n_layers: int) -> int:
    """Return the sliding window of all layers; 0: none. Layers that differ are rejected."""
    has_default = model_type in ("mistral", "qwen2", "qwen3", "qwen3_moe")
    default = 4096 if "sliding_window" not in config.values and has_default else 0
    window, windowed = config.integer("sliding_window", default), n_layers
    if model_type == "llama" and window:
        config.reject("sliding_window", '"llama" does not read it; remove it, or set model_type "mistral"')
    if model_type in ("olmoe", "deepseek_v2", "deepseek_v3") and window:
        config.reject("sliding_window", f"{show(model_type)} does not read it; remove it")
    if model_type in ("qwen2", "qwen3", "qwen3_moe"):
        window = window if config.boolean("use_sliding_window", False) else 0
    if model_type == "qwen3_moe" and window:
        config.only("max_window_layers", 0, "all layers have the same window")
    if model_type in ("qwen2", "qwen3"):
        windowed = n_layers - min(config.integer("max_window_layers", 28, least=0), n_layers) if window else 0
    types = config.values.get("layer_types")
    if types is not None:
        kind = "sliding_attention" if window else "full_attention"
        if not isinstance(types, list) or len(types) != n_layers or any(each != kind for each in types):
            message = f"expected {show(kind)} for each of the {n_layers} layers: all layers are alike"
            config.reject("layer_types", message, "num_hidden_layers", "sliding_window", "use_sliding_window")
    elif windowed not in (0, n_layers):
        message = f"expected 0, or at least the {n_layers} layers: all have the same window"
        config.reject("max_window_layers", message, "num_hidden_layers")
    return window if types is not None or windowed else 0


def _expert_options(config: _Object, model_type: str) -> dict[str, Any]:
    """Return the section [model.moe] of a type with experts."""
    own, both = FAMILIES[model_type].experts, ("num_experts", "num_local_experts")
    numbers = [config.integer(key) for key in both if config.values.get(key) is not None] or [config.integer(own)]
    if numbers[0] != numbers[-1]:
        config.reject("num_local_experts", "expected the same as num_experts; remove one of the two")
    moe = {"n_experts": numbers[0], "n_experts_per_token": config.integer("num_experts_per_tok")}
    if moe["n_experts_per_token"] > moe["n_experts"]:
        config.reject("num_experts_per_tok", f"expected at most the number of experts, {moe['n_experts']}", *both)
    if model_type == "qwen3_moe":
        moe["expert_dim"] = config.integer("moe_intermediate_size")
        moe["every_n_layers"] = config.integer("decoder_sparse_step", 1)
        moe["n_first_dense_layers"] = _first_dense_layers(config)
    else:
        config.only("decoder_sparse_step", 1, f"{show(model_type)} has experts in every layer")
        config.only("mlp_only_layers", [], f"{show(model_type)} has experts in every layer")
    if model_type == "mixtral":
        config.only("norm_topk_prob", True, '"mixtral" divides scores by their sum')
    return {**moe, "normalize_scores": model_type == "mixtral" or config.boolean("norm_topk_prob", False)}


def _first_dense_layers(config: _Object) -> int:
    """Return the number of layers in mlp_only_layers, which must be the first ones."""
    layers = config.values.get("mlp_only_layers")
    if layers is None:
        return 0
    if not isinstance(layers, list) or any(type(each) is not int for each in layers):
        config.reject("mlp_only_layers", "expected a list of integers")
    elif layers != list(range(len(layers))):
        config.reject("mlp_only_layers", "expected the first layers in order, as in [0, 1]: only these can be dense")
    else:
        return len(layers)
    return 0


def _rope_options(config: _Object, theta: float) -> dict[str, Any]:
    """Return the options of the rotary embedding, in either spelling; where a file has both, they must agree."""
    spellings = [key for key in ("rope_scaling", "rope_parameters") if config.values.get(key) not in (None, {})]
    first, *second = spellings or ["rope_scaling"]
    options = _rope_options_at(config, first, theta)
    if second and not config.problems and _rope_options_at(config, *second, theta) != options:
        config.reject("rope_parameters", "expected the same as rope_scaling and rope_theta; remove one of the two")
    return options


def _rope_options_at(config: _Object, key: str, theta: float) -> dict[str, Any]:
    rope = config.object(key)
    rope.only("partial_rotary_factor", *ONLY["partial_rotary_factor"])
    options: dict[str, Any] = {"rope_theta": rope.number("rope_theta", config.number("rope_theta", theta))}
    name = "rope_type" if "rope_type" in rope.values else "type"
    kind = rope.choice(name, tuple(ROPE_KEYS_OF_TYPE), "default")
    if name in rope.rejected:  # the other keys are of that type
        return options
    has_mscale = kind == "yarn" and config.values["model_type"].startswith("deepseek")
    known = ROPE_KEYS | ROPE_KEYS_OF_TYPE[kind] | ({"mscale", "mscale_all_dim"} if has_mscale else set())
    for other in sorted(rope.values.keys() - known):
        if rope.values[other] is not None:
            rope.reject(other, f"the rotary embedding of type {show(kind)} has no such option; unsupported")
    if kind == "default":
        return options
    options |= {"rope_scaling_type": kind, "rope_scaling_factor": rope.number("factor", least=1.0)}
    if kind in ("llama3", "yarn"):
        # transformers prefers the key outside the object, and falls back to the length that the model has now.
        key = "original_max_position_embeddings"
        holders = [each for each in (config, rope) if each.values.get(key) is not None]
        original = holders[0].integer(key) if holders else config.integer("max_position_embeddings")
        options["rope_original_seq_len"] = original
    if kind == "llama3":
        options |= {f"rope_{part}_freq_factor": rope.number(f"{part}_freq_factor") for part in ("low", "high")}
    if kind == "yarn":
        options |= {"rope_beta_fast": rope.number("beta_fast", 32.0), "rope_beta_slow": rope.number("beta_slow", 1.0)}
        options["rope_attention_factor"] = rope.number("attention_factor", -1)
        if options["rope_scaling_factor"] == 1 and options["rope_attention_factor"] not in (-1, 1):
            rope.reject("attention_factor", "read only when factor is above 1; remove it")
    if has_mscale:
        from titanlite.config.hf_deepseek import yarn_factors

        options |= yarn_factors(rope, options["rope_scaling_factor"], options["rope_attention_factor"])
    return options


def hf_config(
    model: Section, *, max_seq_len: int, torch_dtype: str, bos: int | None, eos: int | None
) -> dict[str, Any]:
    """Return the contents of a config.json with which transformers computes what the model does.

    Args:
        model: the section [model] of a config.
        max_seq_len: tokens of the longest sequence that the model was trained on.
        torch_dtype: data type of the saved weights, as in "bfloat16".
        bos, eos: ids of the tokens that begin and end a text; None: the tokenizer has none.

    Raises:
        ConfigError: if transformers has no family with this combination of options.
    """
    model_type = _model_type(model)
    windowed = model.sliding_window > 0
    config: dict[str, Any] = {
        "architectures": [FAMILIES[model_type].architecture],
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
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        **_hf_rope(model),
    }
    if model_type in ("llama", "qwen3", "qwen3_moe", "olmoe"):
        config["attention_bias"] = model.attention_bias == "all"
    if model_type == "llama":
        config["mlp_bias"] = model.mlp_bias
    elif model_type not in ("olmoe", "deepseek_v2", "deepseek_v3"):
        config["sliding_window"] = model.sliding_window or None
    if model_type.startswith("deepseek"):
        from titanlite.config.hf_deepseek import deepseek_keys

        config |= deepseek_keys(model, model_type)
    elif FAMILIES[model_type].experts:
        config |= _hf_experts(model, model_type)
    if model_type in ("qwen2", "qwen3", "qwen3_moe"):
        config |= {"use_sliding_window": windowed, "max_window_layers": 0 if windowed else model.n_layers}
    return config


def folder_rules(model: Section, reject: Rejections) -> None:
    """Reject checkpoint.last_save_in_hf if transformers has no family with the model's options."""
    try:
        hf_config(model, max_seq_len=1, torch_dtype="float32", bos=None, eos=None)
    except ConfigError as error:
        reads = (f"model.{key}" for key in type(model).model_fields)
        reject("checkpoint.last_save_in_hf", f"{error.problems[0]}; set false", *reads)


def _hf_experts(model: Section, model_type: str) -> dict[str, Any]:
    """Return the keys of a type with experts."""
    moe = model.moe
    config = {FAMILIES[model_type].experts: moe.n_experts, "num_experts_per_tok": moe.n_experts_per_token}
    if model_type == "mixtral":
        return {**config, "intermediate_size": model.expert_dim, "router_jitter_noise": 0.0}
    config["norm_topk_prob"] = moe.normalize_scores
    if model_type == "olmoe":  # whose default pads with token 1, and the embedding of padding is not trained
        return {**config, "intermediate_size": model.expert_dim, "clip_qkv": None, "pad_token_id": None}
    dense = list(range(min(moe.n_first_dense_layers, model.n_layers)))
    layers = {"mlp_only_layers": dense, "decoder_sparse_step": moe.every_n_layers}
    return {**config, "moe_intermediate_size": model.expert_dim, **layers}


def _model_type(model: Section) -> str:
    """Return the model type of transformers that has the model's options. Raises ConfigError if none has."""
    if model.mla.kv_lora_rank:
        return "deepseek_v2" if model.moe.n_experts and model.moe.score_function == "softmax" else "deepseek_v3"
    if model.moe.n_experts and model.moe.balance_bias:
        what = "is in no config.json but that of DeepSeek-V3, which has latent attention"
        raise ConfigError([f"model.moe.balance_bias = true: {what}; this model cannot be a Hugging Face folder"])
    bias, plain = model.attention_bias, model.attention_bias == "none" and not model.mlp_bias
    keys = ["attention_bias", "mlp_bias", "qk_norm", "sliding_window", "dim", "n_heads", "head_dim"]
    if model.moe.n_experts:
        fits = _types_with_experts(model)
        keys += [f"moe.{key}" for key in type(model.moe).model_fields]
    else:
        # transformers rejects a Llama whose width is no multiple of its heads, but no Mistral.
        is_llama = not model.qk_norm and bias != "qkv" and not model.sliding_window and model.dim % model.n_heads == 0
        fits = {
            "llama": is_llama,
            "mistral": not model.qk_norm and plain,
            "qwen2": not model.qk_norm and bias == "qkv" and not model.mlp_bias,
            "qwen3": model.qk_norm is True and bias != "qkv" and not model.mlp_bias,
        }
    found = [name for name, fit in fits.items() if fit]
    if not found:
        values = ", ".join(f"model.{key} = {show(value_of(model, key))}" for key in keys)
        families = ", ".join(fits)
        raise ConfigError([f"{values}: no family of transformers has all of these; expected those of {families}"])
    return found[0]


def _types_with_experts(model: Section) -> dict[str, bool]:
    """Return, for each model type with experts, whether it has the model's options."""
    bias, moe = model.attention_bias, model.moe
    in_every_layer = all(model.has_experts(layer) for layer in range(model.n_layers))
    plain = not model.mlp_bias and not moe.n_shared_experts and moe.n_groups_per_token == moe.n_groups
    plain = plain and moe.score_function == "softmax" and moe.score_scaling == 1
    is_olmoe = model.qk_norm == "all_heads" and bias != "qkv" and not model.sliding_window
    return {
        "mixtral": plain and in_every_layer and not model.qk_norm and bias == "none" and moe.normalize_scores,
        "qwen3_moe": plain and model.qk_norm is True and bias != "qkv",
        "olmoe": plain and in_every_layer and is_olmoe and model.n_heads * model.head_dim == model.dim,
    }


def _hf_rope(model: Section) -> dict[str, Any]:
    """Return the options of the rotary embedding in both spellings."""
    kind, scaling = model.rope_scaling_type, None
    if model.rope_scaling_factor > 1:
        scaling = {"rope_type": kind, "factor": model.rope_scaling_factor}
        if kind != "linear":
            scaling["original_max_position_embeddings"] = model.rope_original_seq_len
        if kind == "llama3":
            scaling |= {f"{part}_freq_factor": getattr(model, f"rope_{part}_freq_factor") for part in ("low", "high")}
        if kind == "yarn":
            scaling |= {"beta_fast": model.rope_beta_fast, "beta_slow": model.rope_beta_slow}
            if model.mla.kv_lora_rank:
                from titanlite.config.hf_deepseek import hf_yarn_factors

                scaling |= hf_yarn_factors(model)
            elif model.rope_attention_factor != -1:
                scaling["attention_factor"] = model.rope_attention_factor
    parameters = {"rope_theta": model.rope_theta, **(scaling or {"rope_type": "default"})}
    return {"rope_theta": model.rope_theta, "rope_scaling": scaling, "rope_parameters": parameters}
