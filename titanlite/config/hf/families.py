"""The model types of transformers that can be read and written, and how each differs from Llama, from families.toml."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from titanlite.config.hf.values import JsonObject
from titanlite.config.loader import Section, read_toml

_TABLES = read_toml(str(Path(__file__).with_name("families.toml")))
PLAIN: dict[str, Any] = _TABLES["plain"]
"""Values of the options in which types differ, for a model that does not set them."""
DEFAULTS: dict[str, dict[str, Any]] = _TABLES["defaults"]
"""Defaults of the keys of latent attention and, by model type, of DeepSeek's keys of experts."""
OLD = ("qk_norm", "attention_bias", "mlp_bias", "sliding_window")
"""The options of these in which types with experts differ."""
AMBIGUOUS = ("phi3", "glm", "ministral", "ministral3", "olmo2", "olmo3", "smollm3", "granite", "starcoder2", "gpt2")
"""Types whose options another type may have, too: model.hf_model_type tells them apart."""


@dataclasses.dataclass(frozen=True)
class Family:
    """A model type of transformers: its class, its options, and its defaults of some keys. A default that is None means
    num_attention_heads for num_key_value_heads, and hidden_size / num_attention_heads for head_dim."""

    architecture: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of all its models that differ from PLAIN."""
    free: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options in which its models differ, with the further values that they may have; "any": every value."""
    n_kv_heads: int | None = None
    head_dim: int | None = None
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    tied: bool = False
    experts: str = ""
    """Key of the number of experts; empty: the type has none."""
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The type's own names of keys."""
    activations: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"silu": "silu"})
    """Values of hidden_act, of which the first is the default, and the value of model.activation for each."""
    bias: str = ""
    """model.attention_bias if the key attention_bias is true; empty: the type does not read it."""
    has_bias: bool = False
    """Default of the key attention_bias."""
    has_mlp_bias: bool = False
    """Whether the type reads mlp_bias."""
    window: int | None = None
    """Default of sliding_window, 0: none; None: the type does not read it."""
    kinds: str = ""
    """What layers may differ in: "windows", "rope" (windows, and layers with one do not scale RoPE) or "no_rope"."""
    rotated: float | None = None
    """Default of partial_rotary_factor; None: all channels are rotated."""
    fits: Callable[[Section], bool] = lambda _: True
    """Whether the options of a model also fit together."""

    def allows(self, model: Section) -> bool:
        """Return whether a model of this type can have the options of a model, layers apart."""
        for key, value in {**PLAIN, **self.options}.items():
            actual, further = getattr(model, key), self.free.get(key, ())
            if not (actual == value or further == "any" or actual in further):
                return False
        return self.fits(model)


def is_long(model: Section) -> bool:
    """Return whether the rotary embedding is scaled as by LongRoPE."""
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
    """Return whether experts have the features that only gpt-oss has: {True}: all of them; {False}: none."""
    return {model.moe.expert_bias, model.moe.router_bias, model.moe.swiglu_limit > 0}


def _routes(model: Section, own: bool = False, in_every_layer: bool = True, normalizes: bool = True) -> bool:
    """Return whether tokens are routed to experts by a softmax over all of them, as other types than DeepSeek's and
    GLM-4.5 do, in every layer and with scores divided by their sum, if that is asked."""
    moe = model.moe
    plain = moe.score_function == "softmax" and moe.score_scaling == 1 and not moe.n_shared_experts
    plain = plain and moe.n_groups_per_token == moe.n_groups and (moe.normalize_scores or not normalizes)
    fits = not in_every_layer or all(map(model.has_experts, range(model.n_layers)))
    return plain and fits and _own_of_gpt_oss(model) == {own} and model.rope_scaling_type != "longrope"


def _routes_as_glm(model: Section) -> bool:
    """Return whether a model has scores of each expert by itself, biases that balance experts, and shared experts."""
    moe = model.moe
    is_routed = moe.score_function == "sigmoid" and moe.every_n_layers == 1 and moe.n_shared_experts > 0
    fits_groups = moe.n_experts >= 2 * moe.n_groups and moe.group_score == "top_2_sum"
    return is_routed and fits_groups and moe.balance_bias and _own_of_gpt_oss(model) == {False}


FITS: dict[str, Callable[[Section], bool]] = {
    "llama": lambda model: model.dim % model.n_heads == 0,  # transformers requires it of Llama, not of Mistral
    "mixtral": _routes,
    "qwen3_moe": lambda model: _routes(model, in_every_layer=False, normalizes=False),
    "olmoe": lambda model: _routes(model, normalizes=False) and _heads_are_as_wide(model),
    "phi3": lambda model: model.hf_model_type == "phi3" or is_long(model),
    "glm": lambda model: model.hf_model_type == "glm",  # options do not imply the names of its tensors
    "glm4_moe": _routes_as_glm,
    "starcoder2": lambda model: (model.attention_bias == "all") == model.mlp_bias,
    "gpt2": lambda model: _heads_are_as_wide(model) and model.n_kv_heads == model.n_heads,
    "gpt_oss": lambda model: _routes(model, own=True),
    "gemma": _embeds_as_gemma,
    "gemma3_text": lambda model: _embeds_as_gemma(model) and _has_integer_divisor(model),
}
"""Whether the options of a model also fit together, by the types that ask for more than `free` says."""
FAMILIES = {name: Family(**row, fits=FITS.get(name, lambda _: True)) for name, row in _TABLES["families"].items()}
"""Families by model_type."""


def reject_others(config: JsonObject, model_type: str, table: str) -> None:
    """Reject the values that no model can have of the keys in a table of `only`: "any", or "deepseek"."""
    for row in _TABLES["only"][table]:
        if model_type in row.get("types", [model_type]) and model_type not in row.get("except", ()):
            config.only(row["key"], row.get("value"), row["reason"])


def unsupported_features(values: dict[str, Any]) -> list[str]:
    """Return the features of a config.json of an unsupported type, each with its key, but not the value: it is never
    shown."""
    rope = values.get("rope_parameters")
    values = {**rope, **values} if isinstance(rope, dict) else values
    keys = {
        name: next((key for key in keys if _has(values.get(key))), "") for name, keys in _TABLES["features"].items()
    }
    found = [f"{name} ({key})" for name, key in keys.items() if key]
    return found + _TABLES["features_of_type"].get(values["model_type"], [])


def _has(value: Any) -> bool:
    """Return whether the value of a key says that a model has the feature."""
    if isinstance(value, list):
        return any(each != value[0] for each in value)
    neutral = (None, False, 0, 1, "silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast")
    return value is True or value not in neutral
