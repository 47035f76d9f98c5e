"""The rules about the model: its heads, rotary embedding, latent attention, experts and size."""

from titanlite.config.keys import BATCH, EXPERT, EXPERTS, LATENT, RESHARD, TENSOR
from titanlite.config.loader import Rejections, show
from titanlite.config.schema import SEEDED, Config, Moe, count_parameters
from titanlite.config.types import MOST_TOKENS

HEAD_DIM, NOPE, ROPE = "model.head_dim", "model.mla.qk_nope_head_dim", "model.mla.qk_rope_head_dim"
FLOAT64_BYTES = 8


def model_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    """Reject numbers of heads, head dimensions and rotary options that do not fit each other."""
    model = config.model
    if model.mla.kv_lora_rank:
        _latent_attention_rules(config, reject)
    elif model.head_dim == -1:  # n_heads does not divide dim, so head_dim was not computed
        message = f"expected a divisor of model.dim = {model.dim}; the quotient is head_dim, unless that is set"
        reject("model.n_heads", message, "model.dim", HEAD_DIM)
    elif model.head_dim % 2 and model.head_dim * model.n_heads == model.dim and HEAD_DIM not in changed:
        head_dim = f"{model.dim} / {model.n_heads} = {model.head_dim}"
        message = f"expected an even head_dim, got {head_dim}; rotary embedding acts on pairs of channels"
        reject("model.n_heads", message, "model.dim", HEAD_DIM)
    elif model.head_dim % 2:
        reject(HEAD_DIM, "expected an even number; rotary embedding acts on pairs of channels")
    if model.n_heads % model.n_kv_heads and not model.mla.kv_lora_rank:
        message = f"expected a divisor of model.n_heads = {model.n_heads}; each KV head serves a group of query heads"
        reject("model.n_kv_heads", message, "model.n_heads")
    if model.new_tokens != "none" and config.initial_weights == SEEDED:
        place = "checkpoint.initial_load_path"
        reject("model.new_tokens", f'read only with initial weights ({place}); set "none"', place)
    scaling = model.rope_scaling_type if model.rope_scaling_factor > 1 else ""
    reads = ("model.rope_scaling_factor", "model.rope_scaling_type")
    if scaling == "llama3" and model.rope_low_freq_factor >= model.rope_high_freq_factor:
        message = f"expected a number below model.rope_high_freq_factor = {model.rope_high_freq_factor}"
        reject("model.rope_low_freq_factor", message, "model.rope_high_freq_factor", *reads)
    if scaling == "yarn" and model.rope_beta_slow > model.rope_beta_fast:
        message = f"expected at most model.rope_beta_fast = {model.rope_beta_fast}"
        reject("model.rope_beta_slow", message, "model.rope_beta_fast", *reads)
    if scaling == "yarn" and model.rope_theta <= 1:
        reject("model.rope_theta", "expected a number above 1; YaRN takes its logarithm", *reads)


def _latent_attention_rules(config: Config, reject: Rejections) -> None:
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
    if any(layer.partial_rotary_factor != 1 for layer in model.of_layers()):
        message = f"{ROPE} is the number of rotated channels of latent attention; remove model.partial_rotary_factor"
        reject("model.layer_pattern" if model.layer_pattern else "model.partial_rotary_factor", message, LATENT)
    if mla.mscale_all_dim and (model.rope_scaling_type != "yarn" or model.rope_scaling_factor == 1):
        scaling = f"{show(model.rope_scaling_type)}, by {model.rope_scaling_factor}"
        message = f'read only when the rotary embedding is scaled by "yarn", and it is {scaling}; set 0'
        reject("model.mla.mscale_all_dim", message, "model.rope_scaling_type", "model.rope_scaling_factor", LATENT)


def expert_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    """Reject options that contradict each other in a model with experts."""
    if not config.model.moe.n_experts:
        return
    model, moe, degree = config.model, config.model.moe, config.parallelism.expert_parallel_degree
    if not any(model.has_experts(layer) for layer in range(model.n_layers)):
        reads = ("model.n_layers", "model.moe.n_first_dense_layers", "model.moe.every_n_layers")
        reject(EXPERTS, f"none of {model.n_layers} layers has experts; set {' or '.join(reads[1:])} lower", *reads)
    if moe.n_experts_per_token > moe.n_experts:
        reject("model.moe.n_experts_per_token", f"expected at most {EXPERTS} = {moe.n_experts}", EXPERTS)
    else:
        _group_rules(moe, reject)
    for key in ("expert_bias", "swiglu_limit"):
        if getattr(moe, key) and moe.n_shared_experts:
            message = f"shared experts have neither biases nor bounds; remove it, or model.moe.{key}"
            reject("model.moe.n_shared_experts", message, f"model.moe.{key}", EXPERTS)
    if moe.n_experts % degree:
        reject(EXPERT, f"expected a divisor of {EXPERTS} = {moe.n_experts}, partitioned over these ranks", EXPERTS)
    most = max(min(degree, moe.n_experts / moe.n_experts_per_token), 1)
    if degree > 1 and config.plan.expert_imbalance > most:
        message = f"expected at most {most:.4g}, with which a rank receives all that can be sent to it"
        reject("plan.expert_imbalance", message, EXPERT, EXPERTS, "model.moe.n_experts_per_token")
    if degree == 1 and model.expert_dim % config.parallelism.tensor_parallel_degree:
        message = f"expected a divisor of the experts' width {model.expert_dim}, sharded over these ranks, or a larger "
        reject(TENSOR, message + EXPERT, "model.moe.expert_dim", EXPERT)
    if isinstance(config.parallelism.fsdp_reshard_after_forward, int):
        reject(RESHARD, 'unsupported with experts; set "always" or "never"', EXPERTS)


def _group_rules(moe: Moe, reject: Rejections) -> None:
    size, rest = divmod(moe.n_experts, moe.n_groups)
    if rest:
        reject("model.moe.n_groups", f"expected a divisor of {EXPERTS} = {moe.n_experts}", EXPERTS)
    elif moe.n_groups_per_token > moe.n_groups:
        reject("model.moe.n_groups_per_token", f"expected at most model.moe.n_groups = {moe.n_groups}", EXPERTS)
    elif moe.n_groups_per_token < moe.n_groups and size < 2 and moe.group_score == "top_2_sum":
        message = 'expected at least two experts in a group, whose scores rank the groups; or set group_score = "max"'
        reject("model.moe.n_groups", message, EXPERTS, "model.moe.group_score")
    elif moe.n_groups_per_token == moe.n_groups and moe.group_score != "top_2_sum":
        message = f"read only with fewer groups per token than model.moe.n_groups = {moe.n_groups}; remove it"
        reject("model.moe.group_score", message, "model.moe.n_groups", "model.moe.n_groups_per_token", EXPERTS)
    elif moe.n_groups_per_token * size < moe.n_experts_per_token:
        message = f"expected groups with at least model.moe.n_experts_per_token = {moe.n_experts_per_token} experts"
        reject("model.moe.n_groups_per_token", message, "model.moe.n_experts_per_token", EXPERTS)


def size_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    """Reject sizes with which a tensor would have 2**63 bytes or more, which torch cannot even describe."""
    model, tokens = config.model, config.training.local_batch_size * config.training.seq_len
    widest = max(model.dim, model.vocab_size, model.ffn_dim, model.expert_dim * model.moe.n_experts)
    widest = max(widest, model.n_heads * max(model.head_dim, model.v_head_dim, config.training.seq_len))
    reads = BATCH, "model.dim", "model.n_heads", "model.ffn_dim", "model.vocab_size", "model.moe.n_experts"
    if tokens * widest * FLOAT64_BYTES >= 2**63:
        message = f"{tokens} tokens of {BATCH} sequences have activations or scores of {widest} numbers each, of "
        reject("training.seq_len", f"{message}more bytes than an int64 counts; set smaller ones", *reads)
    if (n_parameters := count_parameters(model)) > MOST_TOKENS:
        message = f"{n_parameters} parameters: expected at most {MOST_TOKENS}, which float64 counts exactly"
        reject("model.dim", f"the model has {message}", "model.n_layers", HEAD_DIM, *reads)
