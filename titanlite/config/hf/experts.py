"""Conversion between a config.json's keys for experts and the section [model.moe]; deepseek.py has DeepSeek's keys."""

from typing import Any

from titanlite.config.hf import deepseek
from titanlite.config.hf.families import FAMILIES
from titanlite.config.hf.values import JsonObject
from titanlite.config.loader import Section, show

SWIGLU = {"limit": 7.0, "alpha": 1.702}  # default values of swiglu_limit and swiglu_alpha in gpt-oss


def expert_options(config: JsonObject, model_type: str) -> dict[str, Any]:
    """Return the section [model.moe] for a model type with experts."""
    if model_type == "glm4_moe":
        return deepseek.expert_options(config, config.integer("first_k_dense_replace", 1, least=0))
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
    if model_type in ("mixtral", "gpt_oss"):
        config.only("norm_topk_prob", True, f"{show(model_type)} divides scores by their sum")
    if model_type == "gpt_oss":
        bounds = {f"swiglu_{key}": config.number(f"swiglu_{key}", value) for key, value in SWIGLU.items()}
        return {**moe, **bounds, "normalize_scores": True, "expert_bias": True, "router_bias": True}
    return {**moe, "normalize_scores": model_type == "mixtral" or config.boolean("norm_topk_prob", False)}


def _first_dense_layers(config: JsonObject) -> int:
    """Return the number of layers in mlp_only_layers, which must be the model's first layers."""
    if (layers := config.values.get("mlp_only_layers")) is None:
        return 0
    if not isinstance(layers, list) or any(type(each) is not int for each in layers):
        config.reject("mlp_only_layers", "expected a list of integers")
    elif layers != list(range(len(layers))):
        config.reject("mlp_only_layers", "expected the first layers in order, as in [0, 1]: only these can be dense")
    else:
        return len(layers)
    return 0


def hf_experts(model: Section, model_type: str) -> dict[str, Any]:
    """Return the config.json keys of experts for a model type with experts."""
    moe = model.moe
    if model_type == "glm4_moe":
        return deepseek.expert_keys(model) | {"use_qk_norm": model.qk_norm}
    config = {FAMILIES[model_type].experts: moe.n_experts, "num_experts_per_tok": moe.n_experts_per_token}
    if model_type == "mixtral":
        return {**config, "intermediate_size": model.expert_dim, "router_jitter_noise": 0.0}
    if model_type == "gpt_oss":
        bounds = {f"swiglu_{key}": getattr(moe, f"swiglu_{key}") for key in SWIGLU}
        return {**config, **bounds, "intermediate_size": model.expert_dim}
    config["norm_topk_prob"] = moe.normalize_scores
    if model_type == "olmoe":  # transformers pads with token 1 by default, and does not train it
        return {**config, "intermediate_size": model.expert_dim, "clip_qkv": None, "pad_token_id": None}
    dense = list(range(min(moe.n_first_dense_layers, model.n_layers)))
    layers = {"mlp_only_layers": dense, "decoder_sparse_step": moe.every_n_layers}
    return {**config, "moe_intermediate_size": model.expert_dim, **layers}
