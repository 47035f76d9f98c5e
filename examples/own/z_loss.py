"""Another loss: cross entropy + 1e-4 log(Z)^2, which keeps logits small (PaLM, arXiv:2204.02311).
titanlite train debug_tp --own examples/own/z_loss.py:own"""

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite import Own
from titanlite.loss import IGNORED, cross_entropy


class LogZ(torch.autograd.Function):
    """Computes log sum exp over the vocabulary, of which each rank of a group has a shard."""

    @staticmethod
    def forward(ctx, logits_NV: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        largest_N = wide_NV.amax(1)
        if group:
            dist.all_reduce(largest_N, dist.ReduceOp.MAX, group)
        sum_N = (wide_NV - largest_N[:, None]).exp().sum(1)
        if group:
            dist.all_reduce(sum_N, group=group)
        ctx.save_for_backward(wide_NV, log_z_N := largest_N + sum_N.log())
        return log_z_N

    @staticmethod
    def backward(ctx, grad_N: Tensor) -> tuple[Tensor, None]:
        wide_NV, log_z_N = ctx.saved_tensors
        return grad_N[:, None] * (wide_NV - log_z_N[:, None]).exp(), None  # all ranks have this grad_N


def z_loss(logits_NV: Tensor, targets_N: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the loss of each token, [N]; 0 where there is nothing to predict."""
    penalty_N = 1e-4 * LogZ.apply(logits_NV, group).square()
    return cross_entropy(logits_NV, targets_N, group) + penalty_N * (targets_N != IGNORED)


own = Own(loss=z_loss)
