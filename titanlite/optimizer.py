"""The optimizer, its learning-rate schedule, and the gradient norm over any mesh."""

import math
from collections.abc import Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.model import Llama


def init_optimizer(
    model: Llama,
    *,
    name: Literal["AdamW", "Adam"],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    implementation: Literal["fused", "foreach", "for-loop"],
    state_dtype: Literal["auto", "float32", "bfloat16", "int8"],
    stochastic_rounding: bool,
) -> torch.optim.Optimizer:
    """Adam (arXiv:1412.6980) or AdamW (arXiv:1711.05101). Matrices decay, embeddings too; norms and biases do not.

    Args: see config.Optimizer.
    """
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    own_type = state_dtype not in ("auto", str(matrices[0].dtype).removeprefix("torch."))
    if own_type or stochastic_rounding:
        from titanlite.low_bit_adam import LowBitAdam  # here: the import takes a second

        return LowBitAdam(
            groups,
            wide=[] if model.tok_embeddings is None else [model.tok_embeddings.weight],
            name=name,
            state_dtype=state_dtype,
            stochastic_rounding=stochastic_rounding,
            lr=lr,
            betas=(beta1, beta2),
            eps=eps,
        )
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
        if isinstance(group["lr"], Tensor):  # an argument of compiled code
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """2-norm of all gradients of the model, of all pipeline stages and shards, as if there were one device; a float64
    scalar on `device`, the same on every rank. Every rank must call it: one number is summed over all of them."""
    squares = torch.zeros((), dtype=torch.float64, device=device)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    by_copies: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        by_copies.setdefault(_copies(gradient), []).append(_local(gradient))
    for copies, shards in by_copies.items():
        norms = torch.stack(torch._foreach_norm(shards, 2)).to(device, torch.float64)
        squares += norms.square().sum() / copies
    dist.all_reduce(squares)
    return squares.sqrt()


def _copies(tensor: Tensor) -> int:
    """How many ranks hold the same as this one: of a shard that lies on n ranks, each counts 1/n of its square."""
    if not isinstance(tensor, DTensor):
        return 1
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"expected shards or copies, got {tensor.placements}: its ranks' parts are not summed yet")
    return math.prod(tensor.device_mesh.size(axis) for axis, p in enumerate(tensor.placements) if p.is_replicate())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor | float) -> None:
    """Multiply every gradient by a scalar, shard by shard."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    local = [_local(gradient) for gradient in gradients]
    torch._foreach_mul_(local, factor.to(local[0].device) if isinstance(factor, Tensor) else factor)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What brings gradients of this norm down to max_norm, if they exceed it; as torch.nn.utils.clip_grad_norm_ has
    it."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


class LossScale:
    """Dynamic loss scaling (arXiv:1710.03740): float16 has no gradients below 6e-8, so the loss is multiplied before
    the backward and gradients are divided after it.

    Args:
        initial: the factor to begin with.
        growth_interval: steps without overflow after which it is doubled; None: it never changes.
    """

    def __init__(self, initial: float = 1.0, growth_interval: int | None = None):
        self.value, self.growth_interval, self._good_steps = initial, growth_interval, 0

    @property
    def dynamic(self) -> bool:
        return self.growth_interval is not None

    def update(self, *, overflowed: bool) -> None:
        """After each step: whether its gradients had no number, as all ranks see it."""
        self._good_steps = 0 if overflowed else self._good_steps + 1
        if self.dynamic and overflowed:
            self.value /= 2
        elif self.dynamic and self._good_steps == self.growth_interval:
            self.value, self._good_steps = self.value * 2, 0

    def state(self) -> list[float]:
        """Plain JSON, for a checkpoint."""
        return [self.value, self._good_steps]

    def load(self, state: list[float]) -> None:
        """Go on from `state`, if the factor changes at all."""
        if self.dynamic:
            self.value, self._good_steps = state
