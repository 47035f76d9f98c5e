"""The optimizer, its learning-rate schedule, and the gradient norm over any mesh."""

import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def init_optimizer(
    model: nn.Module,
    *,
    name: Literal["AdamW", "Adam"],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    implementation: Literal["fused", "foreach", "for-loop"],
) -> torch.optim.Optimizer:
    """Adam (arXiv:1412.6980) or AdamW (arXiv:1711.05101). Matrices decay, embeddings too; norms and biases do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return getattr(torch.optim, name)(
        groups,
        lr=lr,
        betas=(beta1, beta2),
        eps=eps,
        fused=implementation == "fused",
        foreach=implementation == "foreach",
    )


def lr_factor(
    step: int,
    *,
    warmup_steps: int,
    total_steps: int,
    decay_ratio: float,
    decay_type: Literal["linear", "sqrt", "cosine"],
    min_lr_factor: float,
) -> float:
    """Factor on the peak learning rate at a step, counted from 1: warm-up, stable, decay (arXiv:2404.06395; the sqrt
    decay is arXiv:2405.18392's). Steps 1 .. warmup_steps rise linearly and the last of them is at the peak; the decay
    would reach min_lr_factor one step after total_steps, so that no step is wasted on a rate of zero.

    Args:
        decay_ratio: share of total_steps that decays; -1: all after the warm-up.
    """
    decay_steps = max(total_steps - warmup_steps, 0) if decay_ratio == -1 else round(total_steps * decay_ratio)
    up = min(step / warmup_steps, 1.0) if warmup_steps else 1.0
    progress = max(step - (total_steps - decay_steps), 0) / (decay_steps + 1)
    down = {
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }[decay_type]
    return min(up, min_lr_factor + (1 - min_lr_factor) * down)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """2-norm of all gradients together, as if there were one device; a plain scalar, the same on every rank."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients, norm_type=2.0)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply every gradient by a scalar, shard by shard."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    torch._foreach_mul_(local, factor.to(local[0].device))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What brings gradients of this norm down to max_norm, if they exceed it; as torch.nn.utils.clip_grad_norm_ has
    it."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
