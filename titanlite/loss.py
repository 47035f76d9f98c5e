"""One rule for the loss, in training, validation and logging: the sum of token losses over the number of valid tokens
of the whole global batch. Whatever the ranks, microsteps and padding, every valid token weighs the same.

Shapes: B batch, T tokens, N = B x T, D model width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

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


Piece = Callable[..., Tensor]
"""`chunk_loss`, or the same compiled."""


def chunked_cross_entropy(
    x_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    *,
    n_chunks: int,
    loss_parallel: bool,
    piece: Piece | None = None,
) -> Tensor:
    """Sum of the token losses from what goes into the output head, a scalar in float32 or better; the same on all ranks
    that share the vocabulary.

    Args:
        x_BTD: [B, T, D]; where the weight is cut, a DTensor that is whole on each of its ranks.
        weight_VD: the head's weight; a DTensor if it is cut by vocabulary.
        targets_BT: as of `cross_entropy_sum`.
        n_chunks: how many parts the tokens are taken in, one after the other. Of more than one, each part's gradients
            are computed along with its loss, so the logits of only one exist at any time and none is computed twice (as
            in Liger-Kernel, arXiv:2410.10989).
        loss_parallel: leave logits cut as the weight is, instead of gathering them.
        piece: what computes a part; None: `chunk_loss`.
    """
    mesh = None
    if isinstance(weight_VD, DTensor):
        mesh = weight_VD.device_mesh
        # Each rank's part of the vocabulary gives a part of the gradient of x.
        x_BTD, weight_VD = x_BTD.to_local(grad_placements=[Partial()]), weight_VD.to_local()
    x_ND, targets_N = x_BTD.flatten(0, 1), targets_BT.flatten()
    arguments = mesh, loss_parallel
    piece = piece or chunk_loss
    if n_chunks > 1 and torch.is_grad_enabled():
        return _Chunked.apply(x_ND, weight_VD, targets_N, n_chunks, piece, arguments)
    pieces = zip(x_ND.tensor_split(n_chunks), targets_N.tensor_split(n_chunks), strict=True)
    return torch.stack([piece(x, weight_VD, targets, *arguments) for x, targets in pieces]).sum()


def chunk_loss(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, mesh: DeviceMesh | None, loss_parallel: bool
) -> Tensor:
    """Sum of the losses of some tokens.

    Args:
        weight_VD: this rank's part of the vocabulary.
        mesh: of the ranks that have the other parts; None: there are none.
    """
    logits_NV = F.linear(x_ND, weight_VD)
    if mesh is not None and not loss_parallel:
        logits_NV = DTensor.from_local(logits_NV, mesh, [Shard(-1)]).redistribute(placements=[Replicate()]).to_local()
        mesh = None
    return cross_entropy_sum(logits_NV[None], targets_N[None], mesh.get_group() if mesh is not None else None)


class _Chunked(torch.autograd.Function):
    """Losses of parts of the tokens, with gradients computed in the forward."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, n_chunks: int, piece: Piece, arguments: tuple
    ) -> Tensor:
        """Sum of the losses. Kept for the backward: the gradients, but for a factor."""
        weight_VD = weight_VD.detach().requires_grad_()
        # Summed in float32 or better: as many roundings as there are parts would otherwise be one matrix product's.
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.promote_types(weight_VD.dtype, torch.float32))
        losses, grads_x = [], []
        for x, targets in zip(x_ND.tensor_split(n_chunks), targets_N.tensor_split(n_chunks), strict=True):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                loss = piece(x, weight_VD, targets, *arguments)
            grad_x, grad_weight = torch.autograd.grad(loss, (x, weight_VD))
            losses.append(loss.detach())
            grads_x.append(grad_x)
            grad_weight_VD += grad_weight
        ctx.save_for_backward(torch.cat(grads_x), grad_weight_VD.to(weight_VD.dtype))
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Not in place, since a zero-bubble schedule asks for one of the two at a time; and not in a type that would
        # round the factor, which is 1 over the number of tokens.
        wide = torch.promote_types(grad.dtype, torch.float32)
        products = [(saved.to(wide) * grad.to(wide)).to(saved.dtype) for saved in ctx.saved_tensors]
        return *products, None, None, None, None


def count_valid(targets: list[Tensor], device: torch.device) -> Tensor:
    """Number of valid targets in this rank's microbatches; a float64 scalar on `device`, ready to be summed over ranks
    (exact up to 2^53 tokens)."""
    count = sum(int((target != IGNORED).sum()) for target in targets)
    return torch.full((), count, dtype=torch.float64, device=device)  # filled there: a copy would wait for the device
