"""The optimizer, its learning-rate schedule, and gradient clipping by the global norm."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.config.schema import LRScheduler, Optimizer
from titanlite.parallel.shards import local_shard, n_replicas


def parameter_groups(parameters: Iterable[tuple[str, nn.Parameter]], optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the trained parameters in groups for an optimizer: matrices with weight decay, and vectors without it.
    Experts have separate groups, since their DTensors may have another mesh."""
    groups = {(of_experts, decays): [] for of_experts in (False, True) for decays in (True, False)}
    for name, parameter in filter(lambda each: each[1].requires_grad, parameters):  # frozen weights have no states
        groups[".experts." in name, parameter.dim() > 1 and not name.endswith("bias")].append(parameter)
    return [
        {"params": members, "weight_decay": optimizer.weight_decay if decays else 0.0}
        for (_, decays), members in groups.items()
        if members
    ]


def build_adam(groups: list[dict[str, Any]], optimizer: Optimizer, name: str) -> torch.optim.Optimizer:
    """Build torch's Adam or AdamW by its `name`."""
    betas = optimizer.beta1, optimizer.beta2
    implementation = {name: name == optimizer.implementation for name in ("fused", "foreach")}
    return getattr(torch.optim, name)(groups, optimizer.lr, betas, optimizer.eps, **implementation)


def lr_factor(step: int, lr_scheduler: LRScheduler) -> float:
    """Return the factor on the peak learning rate at a step, counted from 1. The learning-rate schedule is
    warmup-stable-decay (WSD, arXiv:2404.06395; sqrt decay: arXiv:2405.18392). The last warmup step has factor 1. The
    decay reaches min_lr_factor one step after total_steps, so no step has a rate of 0, even if min_lr_factor = 0."""
    warmup_steps, total_steps = lr_scheduler.warmup_steps, lr_scheduler.total_steps
    decay_ratio = lr_scheduler.decay_ratio
    decay_steps = max(total_steps - warmup_steps, 0) if decay_ratio == -1 else round(total_steps * decay_ratio)
    up = min(step / warmup_steps, 1.0) if warmup_steps else 1.0
    progress = max(step - (total_steps - decay_steps), 0) / (decay_steps + 1)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    down = {"linear": 1 - progress, "sqrt": 1 - math.sqrt(progress), "cosine": cosine}[lr_scheduler.decay_type]
    return min(up, lr_scheduler.min_lr_factor + (1 - lr_scheduler.min_lr_factor) * down)


def set_lr(optimizer: torch.optim.Optimizer, step: int, section: Optimizer, lr_scheduler: LRScheduler) -> float:
    """Set the learning rate of a step, counted from 1, in all parameter groups, and return the rate."""
    lr = section.lr * lr_factor(step, lr_scheduler)
    for group in optimizer.param_groups:
        # A learning rate in a tensor is an argument of the compiled update, so fill this tensor in place.
        group["lr"] = group["lr"].fill_(lr) if isinstance(group["lr"], Tensor) else lr
    return lr


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """Return the 2-norm of all gradients together, over all pipeline stages and shards: a float64 scalar on `device`,
    the same on every rank. Every rank must call it."""
    squares = torch.zeros((), dtype=torch.float64, device=device)
    by_replicas: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_replicas.setdefault(n_replicas(parameter.grad), []).append(local_shard(parameter.grad))
    for replicas, shards in by_replicas.items():
        wide = torch.promote_types(shards[0].dtype, torch.float32)  # a bfloat16 norm would be rounded to 8 bits
        norms = torch.stack(torch._foreach_norm(shards, 2, wide)).to(device, torch.float64)
        squares += norms.square().sum() / replicas  # each of n ranks with the same shard adds 1/n of the squared norm
    dist.all_reduce(squares)
    return squares.sqrt()


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor | float) -> None:
    """Multiply this rank's shards of all gradients by a scalar, in place."""
    local = [local_shard(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(local, factor.to(local[0].device) if isinstance(factor, Tensor) else factor)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the gradient clipping factor of `torch.nn.utils.clip_grad_norm_`: at most 1, about max_norm / norm."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def scales_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's `step` itself scales gradients and skips updates, according to the optimizer's
    attributes grad_scale and found_inf. False for float64 weights: the fused step would round the factor to float32."""
    in_float64 = optimizer.param_groups[0]["params"][0].dtype == torch.float64
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not in_float64


def clipped_step(optimizer: torch.optim.Optimizer, factor: Tensor, finite: Tensor) -> None:
    """If `finite`, multiply the gradients by `factor` and take an optimizer step. Both are scalars on the device, the
    same on all ranks. A fused or low-bit optimizer reads the scalars on the device, in its own pass over the gradients.
    With other optimizers, and in float64, the host waits for `finite`, and another pass multiplies the gradients."""
    if scales_gradients(optimizer):
        device = optimizer.param_groups[0]["params"][0].device
        optimizer.grad_scale = (1 / factor).to(device, torch.float32)
        optimizer.found_inf = (~finite).to(device, torch.float32)
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
    elif finite.item():
        scale_gradients((weight for group in optimizer.param_groups for weight in group["params"]), factor)
        optimizer.step()
