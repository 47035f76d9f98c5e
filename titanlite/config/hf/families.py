"""The transformers model types that can be read and written, and how each differs from Llama (families.toml)."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from titanlite.config.hf.values import JsonObject
from titanlite.config.loader import Section, read_toml

_TABLES = read_toml(str(Path(__file__).with_name("families.toml")))
PLAIN: dict[str, Any] = _TABLES["plain"]  # default values of the options in which model types differ
TOGETHER = [set(keys) for keys in _TABLES["together"]]
"""Sets of keys that depend on each other: if one key of a set has changed, the export writes the full set anew."""
DEFAULTS: dict[str, dict[str, Any]] = _TABLES["defaults"]
"""Defaults of the keys for latent attention and, by model type, of DeepSeek's keys for experts."""
OLD = ("qk_norm", "attention_bias", "mlp_bias", "sliding_window")
"""Options that the error message about an unsupported model always shows."""
AMBIGUOUS: list[str] = _TABLES["ambiguous"]
"""Model types that share options with other types, so that model.hf_model_type must tell which type is meant."""


@dataclasses.dataclass(frozen=True)
class Family:
    """A model type of transformers: its class, its options, and the defaults of missing keys. A default of None means
    n_heads for n_kv_heads, and hidden_size / num_attention_heads for head_dim."""

    architecture: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options with a fixed value for all models of this type, which differs from PLAIN."""
    free: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options that vary between models of this type, with their additional values; "any": every value."""
    n_kv_heads: int | None = None
    head_dim: int | None = None
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    tied: bool = False
    experts: str = ""
    """Key of the number of experts in config.json; empty: models of this type have no experts."""
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The type's own names of config.json keys, by Llama's name of the key."""
    activations: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"silu": "silu"})
    """model.activation for each value of hidden_act; the first value is the type's default."""
    bias: str = ""
    """model.attention_bias if the key attention_bias is true; empty: the type does not read the key."""
    has_bias: bool = False  # default of the key attention_bias
    has_mlp_bias: bool = False
    """Whether the type reads the key mlp_bias."""
    window: int | None = None
    """Default of the key sliding_window, 0 for no window; None: the type does not read the key."""
    kinds: str = ""
    """How layers may differ. "windows": in their sliding window; "rope": in the window, and in RoPE scaling, which
    layers with a window lack; "no_rope": in whether they have RoPE."""
    rotated: float | None = None  # default of partial_rotary_factor; None: all channels are rotated
    fits: Callable[[Section], bool] = lambda _: True
    """Function of [model] that returns whether this type supports a combination of options."""

    def allows(self, model: Section) -> bool:
        """Return whether this type supports a model's options, apart from differences between layers."""
        for key, value in {**PLAIN, **self.options}.items():
            actual, further = getattr(model, key), self.free.get(key, ())
            if not (actual == value or further == "any" or actual in further):
                return False
        return self.fits(model)


def is_long(model: Section) -> bool:
    return model.rope_scaling_factor > 1 and model.rope_scaling_type == "longrope"


def scores_divisor(model: Section) -> float:
    """Return the square of the number that attention scores are divided by."""
    return model.head_dim if model.attention_scale == -1 else model.attention_scale**-2


def _heads_are_as_wide(model: Section) -> bool:
    return model.n_heads * model.head_dim == model.dim


def _embeds_as_gemma(model: Section) -> bool:
    return math.isclose(model.embedding_scale**2, model.dim)


def _has_integer_divisor(model: Section) -> bool:
    divisor = scores_divisor(model)
    return math.isclose(divisor, round(divisor)) and round(divisor) > 0


def _own_of_gpt_oss(model: Section) -> set[bool]:
    """Return {True} if experts have all features that only gpt-oss has, {False} for none, {True, False} for some."""
    return {model.moe.expert_bias, model.moe.router_bias, model.moe.swiglu_limit > 0}


def _routes(model: Section, own: bool = False, in_every_layer: bool = True, normalizes: bool = True) -> bool:
    """Return whether routing is a softmax over all experts and meets the conditions that the other arguments add."""
    moe = model.moe
    plain = moe.score_function == "softmax" and moe.score_scaling == 1 and not moe.n_shared_experts
    plain = plain and moe.n_groups_per_token == moe.n_groups and (moe.normalize_scores or not normalizes)
    fits = not in_every_layer or all(map(model.has_experts, range(model.n_layers)))
    return plain and fits and _own_of_gpt_oss(model) == {own} and model.rope_scaling_type != "longrope"


def _routes_as_glm(model: Section) -> bool:
    """Return whether experts have sigmoid scores, balance biases and shared experts, as in GLM-4.5."""
    moe = model.moe
    is_routed = moe.score_function == "sigmoid" and moe.every_n_layers == 1 and moe.n_shared_experts > 0
    fits_groups = moe.n_experts >= 2 * moe.n_groups and moe.group_score == "top_2_sum"
    return is_routed and fits_groups and moe.balance_bias and _own_of_gpt_oss(model) == {False}


FITS: dict[str, Callable[[Section], bool]] = {
    "llama": lambda model: model.dim % model.n_heads == 0,  # transformers requires this of Llama only
    "mixtral": _routes,
    "qwen3_moe": lambda model: _routes(model, in_every_layer=False, normalizes=False),
    "olmoe": lambda model: _routes(model, normalizes=False) and _heads_are_as_wide(model),
    "phi3": lambda model: model.hf_model_type == "phi3" or is_long(model),
    "glm": lambda model: model.hf_model_type == "glm",  # models with the same options may have other tensor names
    "glm4_moe": _routes_as_glm,
    "starcoder2": lambda model: (model.attention_bias == "all") == model.mlp_bias,
    "gpt2": lambda model: _heads_are_as_wide(model) and model.n_kv_heads == model.n_heads,
    "gpt_oss": lambda model: _routes(model, own=True),
    "gemma": _embeds_as_gemma,
    "gemma3_text": lambda model: _embeds_as_gemma(model) and _has_integer_divisor(model),
}
"""Family.fits of the model types that support only some combinations of options."""
FAMILIES = {name: Family(**row, fits=FITS.get(name, lambda _: True)) for name, row in _TABLES["families"].items()}
"""The model types by model_type in config.json."""


def reject_others(config: JsonObject, model_type: str, table: str) -> None:
    """Reject unsupported values of the keys that families.toml lists in [only] under `table` ("any" or "deepseek")."""
    for row in _TABLES["only"][table]:
        if model_type in row.get("types", [model_type]) and model_type not in row.get("except", ()):
            config.only(row["key"], row.get("value"), row["reason"])


def unsupported_features(values: dict[str, Any]) -> list[str]:
    """Return the features of a config.json of an unsupported type, each with the key that sets it."""
    rope = values.get("rope_parameters")
    values = {**rope, **values} if isinstance(rope, dict) else values
    keys = {
        name: next((key for key in keys if _has(values.get(key))), "") for name, keys in _TABLES["features"].items()
    }
    found = [f"{name} ({key})" for name, key in keys.items() if key]
    return found + _TABLES["features_of_type"].get(values["model_type"], [])


def _has(value: Any) -> bool:
    if isinstance(value, list):
        return any(each != value[0] for each in value)
    neutral = (None, False, 0, 1, "silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast")
    return value is True or value not in neutral
