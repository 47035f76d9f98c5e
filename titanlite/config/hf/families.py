"""The model types of transformers that can be read and written, and how each differs from Llama.

Whatever a type does not name here is as in Llama. Defaults of missing keys are those of transformers (verified with
5.23).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from titanlite.config.loader import Section

ANY = object()
"""Stands for every value of an option."""
TANH = {"gelu_pytorch_tanh": "gelu_tanh"}
SILU, GELU = {"silu": "silu"}, {"gelu_new": "gelu_tanh", **TANH, "gelu": "gelu"}
"""Values of hidden_act, of which the first is the default, and the value of model.activation for each."""
AFTER = {"norm_placement": "after", "qk_norm": "all_heads"}
GEMMA = {"norm": "rms_plus_one", "norm_placement": "both", "activation": "gelu_tanh", "qk_norm": True}
GPT = {"norm": "layer", "gated_ffn": False}
SCALES = ("embedding_scale", "attention_scale", "residual_scale", "logits_scale")
PLAIN: dict[str, Any] = {
    **{"qk_norm": False, "attention_bias": "none", "mlp_bias": False, "sliding_window": 0, "learned_positions": 0},
    **{"norm": "rms", "norm_placement": "before", "activation": "silu", "gated_ffn": True},
    **{"embedding_scale": 1.0, "attention_scale": -1, "residual_scale": 1.0, "logits_scale": 1.0},
    **{"layer_pattern": [], "llama4_scaling_beta": 0.0, "attention_sinks": False, "partial_rotary_factor": 1.0},
}
"""Values of the options in which types differ, for a model that does not set them."""
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
    """Options in which its models differ, with the further values that they may have, or ANY."""
    n_kv_heads: int | None = None
    head_dim: int | None = None
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    tied: bool = False
    experts: str = ""
    """Key of the number of experts; empty: the type has none."""
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The type's own names of keys."""
    activations: Mapping[str, str] = dataclasses.field(default_factory=lambda: SILU)
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
            if not (actual == value or further is ANY or actual in further):
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


# fmt: off
_BIASES = {"attention_bias": ("all",)}
_ALL_BIASES = {**_BIASES, "mlp_bias": (True,)}
_WINDOW, _SHARE = {"sliding_window": ANY}, {"partial_rotary_factor": ANY}
_WINDOWS: dict[str, Any] = {**_WINDOW, "layer_pattern": ANY}
_QWEN: dict[str, Any] = {"n_kv_heads": 32, "window": 4096, "kinds": "windows"}
_OLMO: dict[str, Any] = {"norm_eps": 1e-5, "bias": "all", "options": AFTER}
_GLM: dict[str, Any] = {"n_kv_heads": 2, "head_dim": 128, "norm_eps": 1.5625e-07, "bias": "qkv", "has_bias": True}
_QKV_AND_SHARE = {"attention_bias": ("qkv",), **_SHARE}
_NAMES_OF_GPT2 = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "intermediate_size": "n_inner", "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function", "rms_norm_eps": "layer_norm_epsilon",
}
FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM", free=_ALL_BIASES, bias="all", has_mlp_bias=True,
        fits=lambda model: model.dim % model.n_heads == 0),  # transformers requires it of Llama, not of Mistral
    "mistral": Family("MistralForCausalLM", free=_WINDOW, n_kv_heads=8, window=4096),
    "qwen2": Family("Qwen2ForCausalLM", {"attention_bias": "qkv"}, _WINDOWS, **_QWEN),
    "qwen3": Family("Qwen3ForCausalLM", {"qk_norm": True}, {**_BIASES, **_WINDOWS}, head_dim=128, bias="all", **_QWEN),
    "mixtral": Family(
        "MixtralForCausalLM", free=_WINDOW, n_kv_heads=8, norm_eps=1e-5, rope_theta=1_000_000.0,
        experts="num_local_experts", window=0, fits=_routes),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", {"qk_norm": True}, {**_BIASES, **_WINDOW}, n_kv_heads=4, experts="num_experts",
        bias="all", window=4096, fits=lambda model: _routes(model, in_every_layer=False, normalizes=False)),
    "olmoe": Family(
        "OlmoeForCausalLM", {"qk_norm": "all_heads"}, _BIASES, norm_eps=1e-5, experts="num_experts", bias="all",
        fits=lambda model: _routes(model, normalizes=False) and _heads_are_as_wide(model)),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", experts="n_routed_experts", bias="all"),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", experts="n_routed_experts", bias="all", has_mlp_bias=True),
    "olmo2": Family("Olmo2ForCausalLM", free=_BIASES, **_OLMO),
    "olmo3": Family(
        "Olmo3ForCausalLM", free={**_BIASES, **_WINDOWS}, rope_theta=500_000.0, window=4096, kinds="rope", **_OLMO),
    "smollm3": Family(
        "SmolLM3ForCausalLM", free={**_ALL_BIASES, **_WINDOWS}, n_kv_heads=4, rope_theta=2_000_000.0, tied=True,
        bias="all", has_mlp_bias=True, window=0, kinds="no_rope"),
    "granite": Family(
        "GraniteForCausalLM", free={**_ALL_BIASES, **dict.fromkeys(SCALES, ANY)}, bias="all", has_mlp_bias=True),
    "ministral": Family("MinistralForCausalLM", free=_WINDOWS, n_kv_heads=8, window=4096, kinds="windows"),
    "ministral3": Family(
        "Ministral3ForCausalLM", free={**_WINDOW, "llama4_scaling_beta": ANY}, n_kv_heads=8, head_dim=128,
        norm_eps=1e-5, rope_theta=1_000_000.0, window=0),
    "phi3": Family(
        "Phi3ForCausalLM", free={**_WINDOW, **_SHARE}, norm_eps=1e-5, window=0, rotated=1.0,
        fits=lambda model: model.hf_model_type == "phi3" or is_long(model)),
    "glm": Family(
        "GlmForCausalLM", free=_QKV_AND_SHARE, rotated=0.5, **_GLM,
        fits=lambda model: model.hf_model_type == "glm"),  # options do not imply the names of its tensors
    "glm4": Family("Glm4ForCausalLM", {"norm_placement": "both"}, _QKV_AND_SHARE, rotated=0.5, **_GLM),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM", free={**_QKV_AND_SHARE, "qk_norm": (True,)}, n_kv_heads=8, norm_eps=1e-5,
        experts="n_routed_experts", bias="qkv", rotated=0.5, fits=_routes_as_glm),
    "starcoder2": Family(
        "Starcoder2ForCausalLM", GPT, {**_ALL_BIASES, **_WINDOW, "activation": ANY}, n_kv_heads=2, norm_eps=1e-5,
        tied=True, names={"rms_norm_eps": "norm_epsilon"}, activations={**TANH, **GELU}, window=0,
        fits=lambda model: (model.attention_bias == "all") == model.mlp_bias),
    "gpt2": Family(
        "GPT2LMHeadModel", {**GPT, "attention_bias": "all", "mlp_bias": True, "partial_rotary_factor": 0.0},
        {"learned_positions": ANY, "activation": ANY}, norm_eps=1e-5, tied=True, names=_NAMES_OF_GPT2,
        activations=GELU, fits=lambda model: _heads_are_as_wide(model) and model.n_kv_heads == model.n_heads),
    "gpt_oss": Family(
        "GptOssForCausalLM", {"attention_sinks": True}, {**_BIASES, **_WINDOWS}, n_kv_heads=8, head_dim=64,
        norm_eps=1e-5, rope_theta=150_000.0, experts="num_local_experts", bias="all", has_bias=True,
        window=128, kinds="windows", fits=lambda model: _routes(model, own=True)),
    "stablelm": Family(
        "StableLmForCausalLM", {"norm": "layer"}, _QKV_AND_SHARE, norm_eps=1e-5, bias="qkv", rotated=0.25,
        names={"rms_norm_eps": "layer_norm_eps", "attention_bias": "use_qkv_bias"}),
    "gemma": Family(
        "GemmaForCausalLM", {key: value for key, value in GEMMA.items() if key in ("norm", "activation")},
        {**_BIASES, "embedding_scale": ANY}, n_kv_heads=16, head_dim=256, tied=True, bias="all", fits=_embeds_as_gemma,
        activations={**TANH, "gelu": "gelu_tanh"}),  # early files say "gelu" and mean the approximation
    "gemma3_text": Family(
        "Gemma3ForCausalLM", GEMMA, {**_BIASES, **_WINDOWS, "embedding_scale": ANY, "attention_scale": ANY},
        n_kv_heads=4, head_dim=256, rope_theta=1_000_000.0, tied=True, names={"hidden_act": "hidden_activation"},
        activations=TANH, bias="all", window=4096, kinds="rope",
        fits=lambda model: _embeds_as_gemma(model) and _has_integer_divisor(model)),
}
# fmt: on
"""Families by model_type."""
