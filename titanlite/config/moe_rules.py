"""The rules between the options of a mixture of experts and others."""

from titanlite.config.loader import Rejections
from titanlite.config.schema import Config, Moe

EXPERTS, EXPERT = "model.moe.n_experts", "parallelism.expert_parallel_degree"
AC_MODE = "activation_checkpoint.mode"
TENSOR, RESHARD = "parallelism.tensor_parallel_degree", "parallelism.fsdp_reshard_after_forward"


def expert_rules(config: Config, reject: Rejections) -> None:
    """Reject options that contradict those of the experts of a model that has some."""
    model, moe, tensor = config.model, config.model.moe, config.parallelism.tensor_parallel_degree
    if not any(model.has_experts(layer) for layer in range(model.n_layers)):
        reads = ("model.n_layers", "model.moe.n_first_dense_layers", "model.moe.every_n_layers")
        reject(EXPERTS, f"none of {model.n_layers} layers has experts; set {' or '.join(reads[1:])} lower", *reads)
    if moe.n_experts_per_token > moe.n_experts:
        reject("model.moe.n_experts_per_token", f"expected at most {EXPERTS} = {moe.n_experts}", EXPERTS)
    else:
        _group_rules(moe, reject)
    if model.mlp_bias:
        reject("model.mlp_bias", "experts have no biases; set false", EXPERTS)
    if moe.n_experts % config.parallelism.expert_parallel_degree:
        reject(EXPERT, f"expected a divisor of {EXPERTS} = {moe.n_experts}, partitioned over these ranks", EXPERTS)
    degree = config.parallelism.expert_parallel_degree
    most = max(min(degree, moe.n_experts / moe.n_experts_per_token), 1)
    if degree > 1 and config.plan.expert_imbalance > most:
        message = f"expected at most {most:.4g}, with which a rank receives all that can be sent to it"
        reject("plan.expert_imbalance", message, EXPERT, EXPERTS, "model.moe.n_experts_per_token")
    if config.parallelism.expert_parallel_degree == 1 and model.expert_dim % tensor:
        message = f"expected a divisor of the experts' width {model.expert_dim}, sharded over these ranks, or a larger "
        reject(TENSOR, message + EXPERT, "model.moe.expert_dim", EXPERT)
    if config.activation_checkpoint.mode == "memory_budget":
        reject(AC_MODE, 'unsupported with experts, which are not compiled; set "full", "selective" or "none"', EXPERTS)
    if isinstance(config.parallelism.fsdp_reshard_after_forward, int):
        reject(RESHARD, 'unsupported with experts; set "always" or "never"', EXPERTS)


def _group_rules(moe: Moe, reject: Rejections) -> None:
    size, rest = divmod(moe.n_experts, moe.n_groups)
    if rest:
        reject("model.moe.n_groups", f"expected a divisor of {EXPERTS} = {moe.n_experts}", EXPERTS)
    elif moe.n_groups_per_token > moe.n_groups:
        reject("model.moe.n_groups_per_token", f"expected at most model.moe.n_groups = {moe.n_groups}", EXPERTS)
    elif moe.n_groups_per_token < moe.n_groups and size < 2:
        reject("model.moe.n_groups", "expected at least two experts in a group, whose scores rank the groups", EXPERTS)
    elif moe.n_groups_per_token * size < moe.n_experts_per_token:
        message = f"expected groups with at least model.moe.n_experts_per_token = {moe.n_experts_per_token} experts"
        reject("model.moe.n_groups_per_token", message, "model.moe.n_experts_per_token", EXPERTS)
