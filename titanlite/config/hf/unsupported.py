"""The unsupported features of a config.json of an unsupported model type, found by its keys."""

from typing import Any

FEATURES = {
    "an encoder": ("is_encoder_decoder",),
    "inputs besides text": ("vision_config", "audio_config"),
    "layers without attention": ("mamba_d_state", "state_size", "linear_conv_kernel_dim", "conv_L_cache"),
    "layers of other kinds": ("layers_block_type",),
    "other positions than rotary and learned ones": ("alibi", "relative_attention_num_buckets"),
    "another activation than silu and gelu": ("hidden_act", "hidden_activation", "activation_function", "activation"),
    "attention beside the feed-forward layer": ("parallel_attn", "use_parallel_residual"),
    "capped scores or logits": ("attn_logit_softcapping", "final_logit_softcapping"),
    "gated shared experts": ("shared_expert_intermediate_size",),
    "attention to tokens that an indexer chooses": ("index_topk", "index_topk_blocks"),
    "several residual streams": ("hc_mult",),
}
"""Keys of each feature. Some features are supported, but not in the combinations that some types have."""
NEUTRAL = (0, 1, "silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast")
"""Values of these keys, besides null and false, that mean that a model does not have the feature."""
PARALLEL = ["attention beside the feed-forward layer"]
OF_TYPE = {"olmo": ["norms without weights"], "phi": PARALLEL, "cohere": PARALLEL, "cohere2": PARALLEL}
"""Features of a type that no key of its config.json shows."""


def features(values: dict[str, Any]) -> list[str]:
    """Return the unsupported features of a config.json, each with its key, but not the value: it is never shown."""
    rope = values.get("rope_parameters")
    values = {**rope, **values} if isinstance(rope, dict) else values
    found = {name: next((key for key in keys if _has(values.get(key))), None) for name, keys in FEATURES.items()}
    return [f"{name} ({key})" for name, key in found.items() if key] + OF_TYPE.get(values["model_type"], [])


def _has(value: Any) -> bool:
    if isinstance(value, list):
        return any(each != value[0] for each in value)
    return value is True or not (value is None or value in NEUTRAL)
