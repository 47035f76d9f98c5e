"""Conversion of a config.json's rotary options, under the old key rope_scaling and the new key rope_parameters."""

from collections.abc import Callable, Set
from typing import Any, NamedTuple

from titanlite.config.hf.deepseek import hf_yarn_factors, yarn_factors
from titanlite.config.hf.values import JsonObject
from titanlite.config.loader import Section, show

ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
LONGROPE = {"su": "longrope", "yarn": "longrope"}
"""Names of LongRoPE in early config.json files of Phi-3."""


def rope_options(config: JsonObject, theta: float, rotated: float | None) -> dict[str, Any]:
    """Return rotary options from rope_scaling or rope_parameters. `rotated`: default share of rotated channels."""
    spellings = [key for key in ("rope_scaling", "rope_parameters") if config.values.get(key) not in (None, {})]
    first, *second = spellings or ["rope_scaling"]
    options = rope_at(config, first, theta, rotated)
    if second and not config.problems and rope_at(config, *second, theta, rotated) != options:
        config.reject("rope_parameters", "expected the same as rope_scaling and rope_theta; remove one of the two")
    return options


def rope_at(config: JsonObject, key: str, theta: float, rotated: float | None = None) -> dict[str, Any]:
    """Return the rotary options in the object at `key` of `config`, which is config.json or an object in it."""
    rope, model_type = config.object(key), config.values.get("model_type", "")
    options: dict[str, Any] = {"rope_theta": rope.number("rope_theta", config.number("rope_theta", theta))}
    options |= _share(config, rope, rotated)
    name = "rope_type" if "rope_type" in rope.values else "type"
    if model_type == "phi3":
        rope.values[name] = LONGROPE.get(rope.values.get(name), rope.values.get(name))
    kinds = [each for each in SCALINGS if each != "longrope" or model_type == "phi3"]
    kind = rope.choice(name, tuple(kinds), "default")
    if name in rope.rejected:  # without a type, it is unknown which other keys are valid
        return options
    known = ROPE_KEYS | SCALINGS[kind].keys
    if kind == "yarn" and model_type in MSCALES:
        known |= {"mscale", "mscale_all_dim"}
    if model_type == "ministral3":
        known |= {"llama_4_scaling_beta", "max_position_embeddings"}
        beta = rope.values.get("llama_4_scaling_beta")
        options["llama4_scaling_beta"] = 0.0 if beta in (None, 0) else rope.number("llama_4_scaling_beta")
    for other in sorted(rope.values.keys() - known):
        if rope.values[other] is not None:
            rope.reject(other, f"the rotary embedding of type {show(kind)} has no such option; unsupported")
    return options | SCALINGS[kind].read(config, rope)


def _share(config: JsonObject, rope: JsonObject, rotated: float | None) -> dict[str, float]:
    key = "partial_rotary_factor"
    if rotated is None:
        for holder in (rope, config):
            holder.only(key, 1, "all channels are rotated")
        return {}
    holder = rope if rope.values.get(key) is not None else config
    share = holder.number(key, rotated)
    if share > 1:
        holder.reject(key, "expected a number of at most 1")
    return {key: min(share, 1.0)}


def _scaled(kind: str, rope: JsonObject) -> dict[str, Any]:
    return {"rope_scaling_type": kind, "rope_scaling_factor": rope.number("factor", least=1.0)}


def _llama3(config: JsonObject, rope: JsonObject) -> dict[str, Any]:
    options = {**_scaled("llama3", rope), "rope_original_seq_len": _original_length(config, rope)}
    return options | {f"rope_{part}_freq_factor": rope.number(f"{part}_freq_factor") for part in ("low", "high")}


def _yarn(config: JsonObject, rope: JsonObject) -> dict[str, Any]:
    options = {**_scaled("yarn", rope), "rope_original_seq_len": _original_length(config, rope)}
    options |= {"rope_beta_fast": rope.number("beta_fast", 32.0), "rope_beta_slow": rope.number("beta_slow", 1.0)}
    options["rope_attention_factor"] = rope.number("attention_factor", -1)
    if not rope.boolean("truncate", True):
        options["rope_yarn_truncate"] = False
    if options["rope_scaling_factor"] == 1 and options["rope_attention_factor"] not in (-1, 1):
        rope.reject("attention_factor", "read only when factor is above 1; remove it")
    mscale = MSCALES.get(config.values.get("model_type"), lambda *_: {})
    return options | mscale(rope, options["rope_scaling_factor"], options["rope_attention_factor"])


def _longrope(config: JsonObject, rope: JsonObject) -> dict[str, Any]:
    """Return the options of LongRoPE, whose factor is by default max_position_embeddings / the original length."""
    key = "original_max_position_embeddings"
    original = (rope if rope.values.get(key) is not None else config).integer(key, 4096, least=2)
    factor = rope.number("factor", max(config.integer("max_position_embeddings", 4096) / original, 1.0), least=1.0)
    if factor == 1:
        rope.reject("long_factor", f"expected max_position_embeddings above {key}: nothing is scaled", key)
    return {
        "rope_scaling_type": "longrope",
        "rope_scaling_factor": factor,
        "rope_original_seq_len": original,
        "rope_attention_factor": rope.number("attention_factor", -1),
        "rope_short_factors": rope.numbers("short_factor"),
        "rope_long_factors": rope.numbers("long_factor"),
    }


def _original_length(config: JsonObject, rope: JsonObject) -> int:
    """Return the sequence length before scaling. transformers reads config.json's key first, then the one in `rope`."""
    key = "original_max_position_embeddings"
    holders = [each for each in (config, rope) if each.values.get(key) is not None]
    return holders[0].integer(key) if holders else config.integer("max_position_embeddings")


class Scaling(NamedTuple):
    """A type of RoPE scaling: the keys that only it has, and the function that reads them."""

    keys: Set[str] = frozenset()
    read: Callable[[JsonObject, JsonObject], dict[str, Any]] = lambda config, rope: {}


SCALINGS = {
    "default": Scaling(),
    "linear": Scaling({"factor"}, lambda _, rope: _scaled("linear", rope)),
    "llama3": Scaling({"factor", "low_freq_factor", "high_freq_factor"}, _llama3),
    "yarn": Scaling({"factor", "beta_fast", "beta_slow", "attention_factor", "finetuned", "truncate"}, _yarn),
    "longrope": Scaling({"factor", "short_factor", "long_factor", "attention_factor"}, _longrope),
}


def _mscale_of_ministral(rope: JsonObject, scaling: float, attention_factor: float) -> dict[str, float]:
    for each in ("mscale", "mscale_all_dim"):
        rope.only(each, 1, "with both 1, rotated queries and keys have no factor")
    has_both = rope.values.get("mscale") and rope.values.get("mscale_all_dim")
    return {"rope_attention_factor": rope.number("attention_factor", 1.0) if has_both else attention_factor}


MSCALES = {"deepseek_v2": yarn_factors, "deepseek_v3": yarn_factors, "ministral3": _mscale_of_ministral}
"""Functions that read YaRN's factors mscale and mscale_all_dim, by the model types that have these factors."""


def hf_rope(model: Section, model_type: str = "") -> dict[str, Any]:
    """Return the rotary options under the old keys (rope_theta, rope_scaling) and the new one (rope_parameters)."""
    kind, scaling, own = model.rope_scaling_type, None, {}
    if model.partial_rotary_factor != 1:
        own["partial_rotary_factor"] = model.partial_rotary_factor
    if model.rope_scaling_factor > 1 and kind == "longrope":
        scaling = {"type": kind, "short_factor": model.rope_short_factors, "long_factor": model.rope_long_factors}
        if model.rope_attention_factor != -1:
            scaling["attention_factor"] = model.rope_attention_factor
        own["original_max_position_embeddings"] = model.rope_original_seq_len
        own["max_position_embeddings"] = round(model.rope_original_seq_len * model.rope_scaling_factor)
    elif model.rope_scaling_factor > 1:
        scaling = {"rope_type": kind, "factor": model.rope_scaling_factor}
        if kind != "linear":
            scaling["original_max_position_embeddings"] = model.rope_original_seq_len
        if kind == "llama3":
            scaling |= {f"{part}_freq_factor": getattr(model, f"rope_{part}_freq_factor") for part in ("low", "high")}
        if kind == "yarn":
            scaling |= {"beta_fast": model.rope_beta_fast, "beta_slow": model.rope_beta_slow}
            scaling |= {} if model.rope_yarn_truncate else {"truncate": False}
            if model.mla.kv_lora_rank:
                scaling |= hf_yarn_factors(model)
            elif model.rope_attention_factor != -1:
                scaling["attention_factor"] = model.rope_attention_factor
            if model_type == "ministral3":
                scaling["llama_4_scaling_beta"] = model.llama4_scaling_beta
    parameters = {"rope_theta": model.rope_theta, **(scaling or {"rope_type": "default"}), **own}
    parameters |= {"rope_type": kind} if scaling else {}
    parameters.pop("max_position_embeddings", None)
    return {"rope_theta": model.rope_theta, "rope_scaling": scaling, "rope_parameters": parameters, **own}


def hf_rope_of_kinds(full: Section, local: Section) -> dict[str, Any]:
    """Return config.json's rotary keys. `full`: options of layers without a window; `local`: of layers with one."""
    keys = hf_rope(full)
    sliding = {"rope_theta": local.rope_theta, "rope_type": "default"}
    keys["rope_parameters"] = {"full_attention": keys["rope_parameters"], "sliding_attention": sliding}
    return {**keys, "rope_local_base_freq": local.rope_theta}
