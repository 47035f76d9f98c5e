"""The rules between the options of multi-head latent attention and others."""

from titanlite.config.loader import Rejections, show
from titanlite.config.schema import Config

LATENT, HEAD_DIM = "model.mla.kv_lora_rank", "model.head_dim"
NOPE, ROPE = "model.mla.qk_nope_head_dim", "model.mla.qk_rope_head_dim"


def latent_attention_rules(config: Config, reject: Rejections) -> None:
    """Reject options that contradict those of the latent attention of a model that has it."""
    model, mla = config.model, config.model.mla
    if model.head_dim != mla.qk_head_dim:
        message = f"with {LATENT} it is the sum of {NOPE} and {ROPE}, {mla.qk_head_dim}; remove it"
        reject(HEAD_DIM, message, LATENT, NOPE, ROPE)
    if mla.qk_rope_head_dim % 2:
        reject(ROPE, "expected an even number; rotary embedding acts on pairs of channels", LATENT)
    if mla.v_head_dim > mla.qk_head_dim:
        message = f"expected at most {mla.qk_head_dim}, the channels of a head of queries and keys"
        reject("model.mla.v_head_dim", message, LATENT, NOPE, ROPE)
    if model.n_kv_heads != model.n_heads:
        message = f"expected model.n_heads = {model.n_heads}; latent attention has keys and values of every head"
        reject("model.n_kv_heads", message, "model.n_heads", LATENT)
    if model.attention_bias != "none":
        reject("model.attention_bias", 'latent attention has no biases; set "none"', LATENT)
    if model.qk_norm:
        reject("model.qk_norm", "latent attention has norms of its latents; set false", LATENT)
    if mla.mscale_all_dim and (model.rope_scaling_type != "yarn" or model.rope_scaling_factor == 1):
        scaling = f"{show(model.rope_scaling_type)}, by {model.rope_scaling_factor}"
        message = f'read only when the rotary embedding is scaled by "yarn", and it is {scaling}; set 0'
        reject("model.mla.mscale_all_dim", message, "model.rope_scaling_type", "model.rope_scaling_factor", LATENT)
