"""Conversion of the keys that only DeepSeek-V2's and -V3's config.json have: latent attention, experts, YaRN's factors.
Keys that only concern training (aux_loss_alpha, seq_aux, ep_size) are not read."""

import math
from typing import Any

from titanlite.config.hf.families import DEFAULTS, reject_others
from titanlite.config.hf.values import JsonObject
from titanlite.config.loader import ConfigError, Section, show, value_of

NORM_EPS = 1e-6
"""Epsilon of the norms of latents in transformers, which does not depend on rms_norm_eps."""
WIDTHS = DEFAULTS["latents"]


def deepseek_options(config: JsonObject, n_heads: int, n_layers: int, mscale_all_dim: float) -> dict[str, Any]:
    """Return the [model] options that only DeepSeek models have. Problems are added to `config.problems`."""
    model_type = config.values["model_type"]
    is_v2 = model_type == "deepseek_v2"
    reject_others(config, model_type, "deepseek")
    reason = "latent attention has keys and values of every head"
    config.only("num_key_value_heads", n_heads, reason, "num_attention_heads")
    mla = {key: config.integer(key, default) for key, default in WIDTHS.items()}
    has_no_q_latent = "q_lora_rank" in config.values and config.values["q_lora_rank"] is None
    mla["q_lora_rank"] = 0 if has_no_q_latent else config.integer("q_lora_rank", 1536)
    rotated = mla["qk_rope_head_dim"]
    head_dim = mla["qk_nope_head_dim"] + rotated
    if rotated % 2:
        config.reject("qk_rope_head_dim", "expected an even number; rotary embedding acts on pairs of channels")
    if mla["v_head_dim"] > head_dim:
        config.reject("v_head_dim", f"expected at most {head_dim}, the channels of a head of queries and keys")
    config.only("qk_head_dim", head_dim, "it is the sum of qk_nope_head_dim and qk_rope_head_dim")
    config.only("head_dim", rotated, "transformers has the channels with rotary embedding there")
    if config.number("rms_norm_eps", NORM_EPS) != NORM_EPS:
        mla["norm_eps"] = NORM_EPS
    options = {"n_kv_heads": n_heads, "head_dim": head_dim, "mla": {**mla, "mscale_all_dim": mscale_all_dim}}
    n_dense = config.integer("first_k_dense_replace", 0 if is_v2 else 3, least=0)
    if n_dense >= n_layers:
        return options
    return {**options, "moe": _experts_of_v2(config, n_dense) if is_v2 else expert_options(config, n_dense)}


def _experts_of_v2(config: JsonObject, n_dense: int) -> dict[str, Any]:
    """Return the section [model.moe] of a DeepSeek-V2, which ranks groups of experts by their best scores."""
    method = config.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    no_groups = {"n_group": 1, "topk_group": 1} if method == "greedy" else {}  # "greedy" ignores both keys
    config.values.update(no_groups)
    moe = expert_options(config, n_dense, smallest=1)
    limited = moe["n_groups_per_token"] < moe["n_groups"]
    moe |= {"score_function": "softmax", "normalize_scores": False, "balance_bias": False}
    return moe | ({"group_score": "max"} if limited else {})


def expert_options(config: JsonObject, n_dense: int, smallest: int = 2) -> dict[str, Any]:
    """Return [model.moe] of a model whose first n_dense layers are dense. A group needs at least `smallest` experts."""
    defaults = DEFAULTS[config.values["model_type"]]

    def integer(key: str) -> int:
        return config.integer(key, defaults.get(key))

    n_experts, n_chosen = integer("n_routed_experts"), integer("num_experts_per_tok")
    config.only("num_local_experts", n_experts, "it is another name of n_routed_experts", "n_routed_experts")
    n_groups, n_groups_chosen = integer("n_group"), integer("topk_group")
    size, rest = divmod(n_experts, n_groups)
    if rest or size < smallest:
        message = f"expected a divisor of the number of experts, {n_experts}, with at least {smallest} of them in "
        config.reject("n_group", message + "a group", "n_routed_experts")
    elif n_groups_chosen > n_groups:
        config.reject("topk_group", f"expected at most the number of groups, {n_groups}", "n_group")
    elif n_chosen > n_groups_chosen * size:
        message = f"expected at most the {n_groups_chosen * size} experts of topk_group groups"
        config.reject("num_experts_per_tok", message, "n_group", "topk_group", "n_routed_experts")
    return {
        "n_experts": n_experts,
        "n_experts_per_token": n_chosen,
        "expert_dim": integer("moe_intermediate_size"),
        "n_shared_experts": integer("n_shared_experts"),
        "n_first_dense_layers": n_dense,
        "score_function": "sigmoid",
        "normalize_scores": config.boolean("norm_topk_prob", True),
        "score_scaling": config.number("routed_scaling_factor", defaults["routed_scaling_factor"]),
        "n_groups": n_groups,
        "n_groups_per_token": n_groups_chosen,
        "balance_bias": True,
    }


def yarn_factors(rope: JsonObject, scaling: float, attention_factor: float) -> dict[str, float]:
    """Return rope_attention_factor and mscale_all_dim from YaRN's keys; `attention_factor` is the value of the key of
    this name, -1 if it is missing. Keys that transformers and DeepSeek's own code read differently are rejected."""
    if scaling == 1:
        return {}
    absent = [key for key in ("mscale", "mscale_all_dim") if rope.values.get(key) in (None, 0)]
    mscale, all_dim = (0.0 if key in absent else rope.number(key) for key in ("mscale", "mscale_all_dim"))
    if not absent:
        ratio = yarn_magnitude(mscale, scaling) / yarn_magnitude(all_dim, scaling)
        if attention_factor != -1 and not math.isclose(ratio, attention_factor, rel_tol=1e-6):
            rope.reject("attention_factor", f"expected {ratio:g}, as mscale and mscale_all_dim say; remove it")
        attention_factor = ratio if attention_factor == -1 else attention_factor
    elif attention_factor == -1 and (mscale not in (0, 1) or all_dim):
        key, other = ("mscale_all_dim", "mscale") if all_dim else ("mscale", "mscale_all_dim")
        rope.reject(key, f"read in different ways without {other}; set {other} or attention_factor")
    return {"rope_attention_factor": attention_factor, "mscale_all_dim": all_dim}


def yarn_magnitude(mscale: float, scaling: float) -> float:
    return 0.1 * mscale * math.log(scaling) + 1


def deepseek_keys(model: Section, model_type: str) -> dict[str, Any]:
    """Return DeepSeek's own config.json keys. Raises ConfigError for an option that config.json cannot express."""
    _check(model, model_type)
    mla, moe = model.mla, model.moe
    keys = {
        "head_dim": mla.qk_rope_head_dim,
        "qk_head_dim": mla.qk_head_dim,
        **{key: getattr(mla, key) for key in WIDTHS},
        "q_lora_rank": mla.q_lora_rank or None,
        **({"rope_interleave": True, "num_nextn_predict_layers": 0} if model_type == "deepseek_v3" else {}),
        "attention_bias": False,
        "first_k_dense_replace": moe.n_first_dense_layers if moe.n_experts else model.n_layers,
    }
    return keys | expert_keys(model) if moe.n_experts else keys


def expert_keys(model: Section) -> dict[str, Any]:
    moe = model.moe
    of_v2 = "greedy" if moe.n_groups_per_token == moe.n_groups else "group_limited_greedy"
    return {
        "first_k_dense_replace": moe.n_first_dense_layers,
        "n_routed_experts": moe.n_experts,
        "num_experts_per_tok": moe.n_experts_per_token,
        "moe_intermediate_size": model.expert_dim,
        "moe_layer_freq": 1,
        "n_shared_experts": moe.n_shared_experts,
        "norm_topk_prob": moe.normalize_scores,
        "routed_scaling_factor": moe.score_scaling,
        "scoring_func": moe.score_function,
        "topk_method": "noaux_tc" if moe.score_function == "sigmoid" else of_v2,
        "n_group": moe.n_groups,
        "topk_group": moe.n_groups_per_token,
    }


def _check(model: Section, model_type: str) -> None:
    eps = "norm_eps" if model.mla.norm_eps == -1 else "mla.norm_eps"  # the option for the epsilon of latents' norms
    expected: dict[str, Any] = {
        **{eps: NORM_EPS, "n_kv_heads": model.n_heads, "attention_bias": "none", "mlp_bias": False},
        **{"qk_norm": False, "sliding_window": 0},
    }
    if model.moe.n_experts:
        expected |= {"moe.every_n_layers": 1, "moe.expert_bias": False, "moe.router_bias": False, "moe.swiglu_limit": 0}
    if model.moe.n_experts and model.moe.n_groups_per_token < model.moe.n_groups:
        expected["moe.group_score"] = "top_2_sum" if model_type == "deepseek_v3" else "max"
    if model_type == "deepseek_v2":
        expected |= {"moe.normalize_scores": False, "moe.balance_bias": False}
    wrong = {key: show(value) for key, value in expected.items() if value_of(model, key) != value}
    if model_type == "deepseek_v2" and model.dim % model.n_heads:
        wrong["dim"] = f"a multiple of n_heads = {model.n_heads}"
    if model.moe.n_experts and not model.moe.n_shared_experts:
        wrong["moe.n_shared_experts"] = "1 or more"
    if model_type == "deepseek_v3" and model.moe.n_experts and model.moe.n_experts < 2 * model.moe.n_groups:
        wrong["moe.n_groups"] = "groups of 2 experts or more"
    why = f"as the config.json of {model_type}, which has latent attention"
    lines = [f"model.{key} = {show(value_of(model, key))}: expected {value}, {why}" for key, value in wrong.items()]
    if lines:
        raise ConfigError(lines)


def hf_yarn_factors(model: Section) -> dict[str, float]:
    """Return the config.json keys of YaRN's factors for a model with latent attention."""
    factor, all_dim = model.rope_attention_factor, model.mla.mscale_all_dim
    if not all_dim:
        return {} if factor == -1 else {"attention_factor": factor}
    if factor == 1:
        return {"mscale": all_dim, "mscale_all_dim": all_dim}
    factor = yarn_magnitude(1, model.rope_scaling_factor) if factor == -1 else factor
    return {"attention_factor": factor, "mscale_all_dim": all_dim}
