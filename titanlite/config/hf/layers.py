"""Conversion of the keys for layers that differ in sliding window or rotary embedding. A key of transformers has one
value per layer (layer_types, no_rope_layers), or it is the period of a pattern of layers."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from titanlite.config.hf.families import FAMILIES
from titanlite.config.hf.rope import rope_at, rope_options
from titanlite.config.hf.values import JsonObject
from titanlite.config.loader import Section, show

FULL, SLIDING = "full_attention", "sliding_attention"
READS = ("num_hidden_layers", "sliding_window", "use_sliding_window")
QWEN = ("qwen2", "qwen3", "qwen3_moe")


def layer_options(config: JsonObject, model_type: str, n_layers: int) -> dict[str, Any]:
    """Return the [model] options for sliding window, rotary embedding and layer pattern."""
    family, window = FAMILIES[model_type], _window(config, model_type)
    rope, local = _rope(config, model_type)
    windowed = _windowed(config, model_type, window, n_layers)
    if family.kinds == "no_rope":
        kinds = [{} if rotated else {"partial_rotary_factor": 0.0} for rotated in _rotated(config, n_layers)]
        window = window if config.boolean("use_sliding_window", False) else 0
        if config.values.get("layer_types") is None:
            windowed = [window > 0 and bool(kind) for kind in kinds]
        elif window == 0:
            windowed = [False] * n_layers
    else:
        kinds = [dict(local) if each else {} for each in windowed]
    if not any(kinds) and len(set(windowed)) == 1:
        return {**rope, "sliding_window": window if windowed[0] else 0}
    kinds = [{**kind, "sliding_window": window} if each else kind for kind, each in zip(kinds, windowed, strict=True)]
    return {**rope, "sliding_window": 0, "layer_pattern": pattern_of(kinds)}


def pattern_of(kinds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the shortest pattern that repeats over the layers; `kinds` has the options of each layer."""
    n = len(kinds)
    period = next(p for p in range(1, n + 1) if all(kinds[i] == kinds[i % p] for i in range(n)))
    runs = [list(run) for _, run in groupby(kinds[:period])]
    return [{**({"count": len(run)} if len(run) > 1 else {}), **run[0]} for run in runs]


def _window(config: JsonObject, model_type: str) -> int:
    """Return the sliding window, in tokens, of the layers that have a window; 0: no layer has one."""
    family = FAMILIES[model_type]
    if family.window is None:
        return 0
    window = config.integer("sliding_window", 0 if "sliding_window" in config.values else family.window)
    if model_type in QWEN:
        window = window if config.boolean("use_sliding_window", False) else 0
    if model_type == "qwen3_moe" and window:
        config.only("max_window_layers", 0, "all layers have the same window")
    return window


def _windowed(config: JsonObject, model_type: str, window: int, n_layers: int) -> list[bool]:
    if (types := config.values.get("layer_types")) is None:
        return [window > 0 and each for each in _default_windowed(config, model_type, n_layers)]
    allowed = [FULL, SLIDING] if FAMILIES[model_type].kinds and window else [SLIDING if window else FULL]
    if not isinstance(types, list) or len(types) != n_layers or any(each not in allowed for each in types):
        kinds = " or ".join(map(show, allowed))
        alike = "" if len(allowed) > 1 else ": all layers are alike"
        config.reject("layer_types", f"expected {kinds} for each of the {n_layers} layers{alike}", *READS)
        return [False] * n_layers
    return [each == SLIDING for each in types]


def _default_windowed(config: JsonObject, model_type: str, n_layers: int) -> list[bool]:
    if model_type in ("qwen2", "qwen3"):
        first = config.integer("max_window_layers", 28, least=0)
        return [layer >= first for layer in range(n_layers)]
    period = {"olmo3": 4, "gpt_oss": 2}.get(model_type, 0)
    if model_type == "gemma3_text":
        period = config.integer("sliding_window_pattern", 6)
    return [not period or (layer + 1) % period != 0 for layer in range(n_layers)]


def _rotated(config: JsonObject, n_layers: int) -> list[bool]:
    layers, interval = config.values.get("no_rope_layers"), config.integer("no_rope_layer_interval", 4)
    if layers is None:
        return [(layer + 1) % interval != 0 for layer in range(n_layers)]
    if not isinstance(layers, list) or len(layers) != n_layers or any(each not in (0, 1) for each in layers):
        config.reject("no_rope_layers", f"expected 1, or 0 for no rotary embedding, for each of the {n_layers} layers")
        return [True] * n_layers
    return [bool(each) for each in layers]


def _rope(config: JsonObject, model_type: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the model's rotary options, and the rotary options that differ in layers with a window."""
    family = FAMILIES[model_type]
    if family.kinds != "rope":
        return rope_options(config, family.rope_theta, family.rotated), {}
    nested, theta = config.object("rope_parameters"), family.rope_theta
    local_theta = config.number("rope_local_base_freq", 10_000.0) if model_type == "gemma3_text" else theta
    if nested.values:
        for key in nested.values.keys() - {FULL, SLIDING}:
            nested.reject(key, f"expected {show(FULL)} and {show(SLIDING)} only, each with its own options")
        full = rope_at(nested, FULL, config.number("rope_theta", theta))
        local = rope_at(nested, SLIDING, local_theta)
        if config.values.get("rope_scaling") and rope_at(config, "rope_scaling", full["rope_theta"]) != full:
            config.reject("rope_scaling", f"expected that of rope_parameters.{FULL}; remove one of the two")
        if "rope_scaling_type" in local:
            nested.reject(SLIDING, "expected no scaling of the rotary embedding of layers with a window")
        local_theta = local["rope_theta"]
    else:
        full = rope_at(config, "rope_scaling", theta)
        if model_type == "olmo3" and full["rope_theta"] != theta:
            config.reject("rope_theta", f"expected {theta:g}, which layers with a window have; set rope_parameters")
    own = {"rope_theta": local_theta} if local_theta != full["rope_theta"] else {}
    return full, own | ({"rope_scaling_factor": 1.0} if full.get("rope_scaling_factor", 1.0) != 1 else {})


def layers_fit(model: Section, model_type: str) -> bool:
    """Return whether a model type supports the differences between the model's layers."""
    kinds, layers = FAMILIES[model_type].kinds, model.of_layers()
    windows = {layer.sliding_window for layer in layers} - {0}
    if len(windows) > 1 or not all(each.experts for each in model.layer_pattern):
        return False
    if kinds == "rope":
        local, full = ({_rope_of(each) for each in layers if bool(each.sliding_window) == has} for has in (True, False))
        return len(full) <= 1 and len(local) <= 1 and all(scaling == 1 for _, scaling, _ in local)
    ropes, (theta, scaling, share) = set(map(_rope_of, layers)), _rope_of(model)
    return ropes <= {(theta, scaling, each) for each in ((0.0, 1.0) if kinds == "no_rope" else (share,))}


def _rope_of(layer: Section) -> tuple[float, float, float]:
    return layer.rope_theta, layer.rope_scaling_factor, layer.partial_rotary_factor


def hf_layers(model: Section, model_type: str) -> dict[str, Any]:
    """Return the config.json keys of the sliding window and of differences between layers."""
    family, layers = FAMILIES[model_type], model.of_layers()
    window = max(layer.sliding_window for layer in layers)
    if family.window is None:
        return {}
    keys: dict[str, Any] = {"sliding_window": window or None}
    if model_type in QWEN:
        keys |= {"use_sliding_window": window > 0, "max_window_layers": 0 if window else model.n_layers}
    if model_type == "smollm3":
        rotated = [int(layer.partial_rotary_factor > 0) for layer in layers]
        keys |= {"use_sliding_window": window > 0, "no_rope_layers": rotated}
    if family.kinds and (model.layer_pattern or family.kinds != "windows" or model_type == "gpt_oss"):
        keys["layer_types"] = [SLIDING if layer.sliding_window else FULL for layer in layers]
    return keys


def rope_of_kinds(model: Section) -> tuple[Section, Section]:
    """Return the options of a layer without a window, and of a layer with one; the model's if it has no such layer."""
    kinds = {bool(layer.sliding_window): layer for layer in model.of_layers()}
    return kinds.get(False, model), kinds.get(True, model)
