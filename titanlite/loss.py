"""The cross-entropy loss. It can be vocabulary-parallel (loss parallel) and chunked (few logits exist at a time).

Training, validation and logging divide the sum of token losses by the number of valid tokens of the global batch. So
every valid token has the same weight for any number of ranks, accumulation steps and padding tokens. Shapes: N tokens,
D model width, V vocabulary."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

IGNORED = -100
"""Target of a position without a next token to predict: padding, or the end of a document."""

ChunkLoss = Callable[..., Tensor]  # type of `linear_cross_entropy`, eager or compiled
TokenLoss = Callable[[Tensor, Tensor, dist.ProcessGroup | None], Tensor]  # type of `cross_entropy`


def cross_entropy(logits_NV: Tensor, targets_N: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the loss of each token in nats, [N] in float32 or better; 0 where the target is IGNORED. With a group, the
    vocabulary is sharded evenly over the group's ranks, in order, and `logits_NV` is this rank's shard. Every rank of
    the group must call it, and gets all losses."""
    if group is not None:
        return _VocabularyParallel.apply(logits_NV, targets_N, group)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return F.cross_entropy(logits_NV, targets_N, reduction="none", ignore_index=IGNORED)


class _VocabularyParallel(torch.autograd.Function):
    """Cross entropy of vocabulary-sharded logits (arXiv:1909.08053, section 3): ranks exchange 3 numbers per token."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the losses, the same on each rank; save the logits, in their own dtype, and log-sum-exp."""
        own_N = targets_N - group.rank() * logits_NV.shape[1]  # index of the target in this rank's shard
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
        return (log_sum_N - sums[1]).where(targets_N != IGNORED, 0)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient (softmax - one-hot) of this rank's shard of the logits, without communication."""
        logits_NV, log_sum_N, own_N, here_N, valid_N = ctx.saved_tensors
        grad_NV = (logits_NV.to(log_sum_N.dtype) - log_sum_N[:, None]).exp_()
        grad_NV.scatter_add_(1, own_N[:, None], -here_N.to(grad_NV.dtype)[:, None])
        return (grad_NV.mul_((grad_N * valid_N)[:, None])).to(logits_NV.dtype), None, None


def linear_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, mesh: DeviceMesh | None, loss_parallel: bool, loss: TokenLoss
) -> Tensor:
    """Return the loss of each token of one chunk, [N]: the output head's matrix product, then the cross entropy.
    `weight_VD`: this rank's shard of the output head; `mesh`: the ranks with the other shards (None: unsharded)."""
    logits_NV = F.linear(x_ND, weight_VD)
    if mesh is not None and not loss_parallel:
        logits_NV = DTensor.from_local(logits_NV, mesh, [Shard(-1)]).redistribute(placements=[Replicate()]).to_local()
        mesh = None
    return loss(logits_NV, targets_N, mesh.get_group() if mesh is not None else None)


def chunked_cross_entropy(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    n_chunks: int,
    loss_parallel: bool,
    token_loss: TokenLoss = cross_entropy,
    chunk_loss: ChunkLoss = linear_cross_entropy,
    record: Callable[[Tensor, Tensor], None] | None = None,
) -> Tensor:
    """Return the sum of the token losses, a scalar. `x_ND` is the input of the output head, `weight_VD` its weight.

    With several chunks, the forward computes each chunk's gradients along with its loss, so that the logits of only one
    chunk exist at any time and no logits are recomputed (as in Liger-Kernel, arXiv:2410.10989). If `weight_VD` is a
    DTensor, sharded over the vocabulary, x_ND is a DTensor that is replicated over the same ranks. `loss_parallel`
    leaves the logits sharded over the vocabulary. `record` is called with the token losses, [N], and the targets."""
    mesh = None
    if isinstance(weight_VD, DTensor):
        mesh = weight_VD.device_mesh
        # Each rank's shard of the vocabulary contributes a partial sum to the gradient of x.
        x_ND, weight_VD = x_ND.to_local(grad_placements=[Partial()]), weight_VD.to_local()
    chunk_loss = functools.partial(chunk_loss, mesh=mesh, loss_parallel=loss_parallel, loss=token_loss)
    if n_chunks > 1 and torch.is_grad_enabled():
        loss, losses_N = _ChunkedCrossEntropy.apply(x_ND, weight_VD, targets_N, n_chunks, chunk_loss)
    else:
        chunks = zip(x_ND.tensor_split(n_chunks), targets_N.tensor_split(n_chunks), strict=True)
        losses_N = torch.cat([chunk_loss(x, weight_VD, targets) for x, targets in chunks])
        loss = losses_N.sum()
    if record:
        record(losses_N.detach(), targets_N)
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, n_chunks: int, chunk_loss: ChunkLoss
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of all token losses, and the token losses, [N]. Save the sum's gradients for backward."""
        weight_VD = weight_VD.detach().requires_grad_(ctx.needs_input_grad[1])
        losses, grads_x, sums = [], [], list[Tensor]()  # sums: the weight's gradient so far; empty for a frozen weight
        wide = torch.promote_types(weight_VD.dtype, torch.float32)
        for x, targets in zip(x_ND.tensor_split(n_chunks), targets_N.tensor_split(n_chunks), strict=True):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                losses_of_chunk = chunk_loss(x, weight_VD, targets)
                loss = losses_of_chunk.sum()
            grad_x, *own = torch.autograd.grad(loss, (x, weight_VD)[: 1 + weight_VD.requires_grad])
            losses.append(losses_of_chunk.detach())
            grads_x.append(grad_x)
            # Sum in float32 or better: in bfloat16, each chunk after the first would add a rounding error.
            sums = [a.add_(b) for a, b in zip(sums, own, strict=True)] if sums else [each.to(wide) for each in own]
        ctx.save_for_backward(torch.cat(grads_x), *sums)
        losses_N = torch.cat(losses)
        ctx.mark_non_differentiable(losses_N)
        return losses_N.sum(), losses_N

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_ND, *of_weight = ctx.saved_tensors  # both gradients get the dtype of x, which is also the weight's
        grads = [_scaled(each, grad, grad_x_ND.dtype) for each in (grad_x_ND, *of_weight)]
        return grads[0], grads[1] if of_weight else None, None, None, None


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return gradient * factor, on CUDA in one pass over memory. `gradient` stays unchanged, since a zero-bubble
    schedule runs the backward twice. The factor, 1 / number of valid tokens, stays in float32 or wider."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return torch.mul(gradient.to(wide), factor.to(wide), out=torch.empty_like(gradient, dtype=dtype))


def count_valid(targets: list[Tensor], device: torch.device) -> Tensor:
    """Return the number of valid targets in this rank's per-device batches, a float64 scalar (exact up to 2^53)."""
    count = sum(int((target != IGNORED).sum()) for target in targets)
    return torch.full((), count, dtype=torch.float64, device=device)  # torch.full fills on the device without a copy
