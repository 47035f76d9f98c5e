"""One rule for the loss, in training, validation and logging: the sum of token losses over the number of valid tokens
of the whole global batch. Whatever the ranks, microsteps and padding, every valid token weighs the same."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""Target of a position that has nothing to predict: padding, and the end of a document."""


def cross_entropy_sum(logits_BTV: Tensor, targets_BT: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum of the token losses in nats over the valid targets, in float32 or better; a scalar.

    Args:
        logits_BTV: [B, T, V] in any precision.
        targets_BT: [B, T] token numbers, IGNORED where there is nothing to predict.
        group: the ranks that hold an equal part of the vocabulary each, in order; `logits_BTV` is this rank's part. All
            must call it, and each gets the loss. None: the vocabulary is whole.
    """
    logits, targets = logits_BTV.flatten(0, 1), targets_BT.flatten()
    if group is not None:
        return _VocabularyParallel.apply(logits, targets, group)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)


class _VocabularyParallel(torch.autograd.Function):
    """Cross entropy of logits that are cut by vocabulary: what travels is three numbers a token, never the logits
    (arXiv:1909.08053, section 3)."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Sum of the losses, the same on each rank. Kept for the backward: the logits as they came, and log Z."""
        own_N = targets_N - group.rank() * logits_NV.shape[1]  # number within this part
        here_N = (own_N >= 0) & (own_N < logits_NV.shape[1])
        own_N = own_N.where(here_N, 0)

        shifted = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        largest_N = shifted.amax(1)
        dist.all_reduce(largest_N, dist.ReduceOp.MAX, group)
        shifted = shifted - largest_N[:, None]
        at_target_N = shifted.gather(1, own_N[:, None])[:, 0].where(here_N, 0)
        sums = torch.stack([shifted.exp_().sum(1), at_target_N])
        dist.all_reduce(sums, group=group)
        log_sum_N = sums[0].log()
        ctx.save_for_backward(logits_NV, largest_N + log_sum_N, own_N, here_N, targets_N != IGNORED)
        return (log_sum_N - sums[1]).where(targets_N != IGNORED, 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """softmax - one-hot, of this rank's part; nothing travels."""
        logits_NV, log_sum_N, own_N, here_N, valid_N = ctx.saved_tensors
        grad_NV = (logits_NV.to(log_sum_N.dtype) - log_sum_N[:, None]).exp_()
        grad_NV.scatter_add_(1, own_N[:, None], -here_N.to(grad_NV.dtype)[:, None])
        return (grad_NV.mul_((grad * valid_N)[:, None])).to(logits_NV.dtype), None, None


def count_valid(targets: list[Tensor], device: torch.device) -> Tensor:
    """Number of valid targets in this rank's microbatches; a float64 scalar on `device`, ready to be summed over ranks
    (exact up to 2^53 tokens)."""
    count = sum(int((target != IGNORED).sum()) for target in targets)
    return torch.tensor(count, dtype=torch.float64, device=device)
