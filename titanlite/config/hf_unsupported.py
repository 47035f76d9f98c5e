"""What a config.json of an unsupported model type has that the model lacks, by its keys."""

from typing import Any

FEATURES = {
    "an encoder": ("is_encoder_decoder",),
    "inputs besides text": ("vision_config", "audio_config"),
    "layers without attention": ("mamba_d_state", "state_size", "linear_conv_kernel_dim", "conv_L_cache"),
    "layers of several kinds": ("layer_types", "sliding_window_pattern", "layers_block_type"),
    "layers without rotary embedding": ("no_rope_layers",),
    "other positions than rotary ones": ("n_positions", "learned_pos_emb", "alibi", "relative_attention_num_buckets"),
    "rotary embedding of some channels only": ("partial_rotary_factor", "rotary_pct", "rotary_dim"),
    "LayerNorm": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "layer_norm_elementwise_affine"),
    "another activation than silu": ("hidden_act", "hidden_activation", "activation_function", "activation"),
    "attention beside the feed-forward layer": ("parallel_attn", "use_parallel_residual"),
    "capped scores or logits": ("attn_logit_softcapping", "final_logit_softcapping"),
    "a factor on embeddings": ("embedding_multiplier", "scale_emb"),
    "a factor on scores of attention": ("attention_multiplier", "query_pre_attn_scalar"),
    "a factor on logits": ("logits_scaling", "logit_scale"),
    "gated shared experts": ("shared_expert_intermediate_size",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "latent attention": ("kv_lora_rank",),
}
"""Keys of each feature. Some types have supported features in combinations that no supported type has."""
NEUTRAL = (0, 1, "silu", "swish")
"""Values of these keys, besides null and false, with which a model does without the feature."""
OF_TYPE = {"gemma": ["norms that multiply by 1 + weight"], "phi3": ["queries, keys and values in one tensor"]}
OF_TYPE |= {"olmo": ["norms without weights"], "olmo2": ["norms behind layers"], "glm4": ["norms behind layers"]}
"""What types have that no key says."""


def features(values: dict[str, Any]) -> list[str]:
    """Return the features of a config.json, each with its key. Whatever the values are, they are not printed."""
    rope = values.get("rope_parameters")
    values = {**rope, **values} if isinstance(rope, dict) else values
    found = {name: next((key for key in keys if _has(values.get(key))), None) for name, keys in FEATURES.items()}
    return [f"{name} ({key})" for name, key in found.items() if key] + OF_TYPE.get(values["model_type"], [])


def _has(value: Any) -> bool:
    if isinstance(value, list):
        return any(each != value[0] for each in value)
    return value is True or not (value is None or value in NEUTRAL)
