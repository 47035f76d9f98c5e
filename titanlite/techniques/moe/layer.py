"""A mixture of experts: a router sends each token to a few of many feed-forward layers (arXiv:1701.06538).

Token choice without dropped tokens: the pairs of a token and one of its experts are sorted by expert, so that each
expert sees its tokens as neighbouring rows, however many they are.

Shapes: N tokens, D model width, E experts, F width of an expert, K experts per token, M = N x K pairs.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.config.schema import Model
from titanlite.model import FeedForward
from titanlite.techniques.moe import counts
from titanlite.techniques.moe.router import Router

GROUPED_MM_DTYPES = {"cpu": (torch.bfloat16, torch.float32), "cuda": (torch.bfloat16,)}
"""Data types with which torch's grouped_mm multiplies the rows of all experts in one call, by device. Others, and rows
whose bytes are no multiple of 16, take one product for each expert."""
ROW_BYTES = 16


class MixtureOfExperts(nn.Module):
    """Computes the sum over a token's experts of their outputs times their scores, and of the shared experts."""

    def __init__(self, model: Model):
        super().__init__()
        n_shared = model.moe.n_shared_experts
        self.router = Router(model)
        self.experts = Experts(model.moe.n_experts, model.dim, model.expert_dim)
        self.shared = FeedForward(model.dim, n_shared * model.expert_dim) if n_shared else None

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return [N, D]."""
        scores_NK, experts_NK, counts_E = self.router(x_ND)
        order_M = order_by_expert(experts_NK.flatten(), self.router.n_experts)
        inverse_M = inverse(order_M)
        compute = self.dispatch(_Dispatch.apply(x_ND, order_M, inverse_M), counts_E)
        shared_ND = None if self.shared is None else self.shared(x_ND)  # while rows are sent to other ranks
        y_NKD = permute(compute(), inverse_M, order_M).unflatten(0, experts_NK.shape)
        out_ND = torch.bmm(scores_NK.unsqueeze(1).to(y_NKD.dtype), y_NKD).squeeze(1)
        return out_ND if shared_ND is None else out_ND + shared_ND

    def dispatch(self, x_MD: Tensor, counts_E: Tensor) -> Callable[[], Tensor]:
        """Return a function that computes the experts of all rows, [M, D]; expert parallel replaces this by one that
        starts to send rows."""
        return functools.partial(self.experts, x_MD, counts_E)


class Experts(nn.Module):
    """Holds the weights of E feed-forward layers (SwiGLU), each stacked in one parameter."""

    def __init__(self, n_experts: int, dim: int, expert_dim: int):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(n_experts, expert_dim, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, expert_dim))
        self.w3 = nn.Parameter(torch.empty(n_experts, expert_dim, dim))

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return w1, w2, w3 as this process computes with them; parallelism replaces it."""
        return self.w1, self.w2, self.w3

    def forward(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        """Return [M, D]. The first counts_E[0] rows are of expert 0, and so on; what is returned for rows after those
        of the last expert has no meaning."""
        w1, w2, w3 = self.weights()
        product = _grouped_product(x_MD, w1, counts_E)
        return product(F.silu(product(x_MD, w1)) * product(x_MD, w3), w2)


def _grouped_product(x_MD: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Any:
    """Return a function of rows and the experts' weights, [E, outputs, inputs], which multiplies them."""
    sides = weight_EFD.shape[1:]
    fits = all(side * x_MD.element_size() % ROW_BYTES == 0 for side in sides)
    if fits and x_MD.dtype in GROUPED_MM_DTYPES.get(x_MD.device.type, ()):
        ends_E = counts_E.cumsum(0).to(torch.int32)
        return lambda x, weight: torch._grouped_mm(x, weight.transpose(-2, -1), offs=ends_E)
    sizes = counts.read(counts_E)
    n_padding = len(x_MD) - sum(sizes)

    def product(x: Tensor, weight: Tensor) -> Tensor:
        *rows, padding = x.split([*sizes, n_padding])
        outputs = [F.linear(x_e, w_e) for x_e, w_e in zip(rows, weight, strict=True)]
        return torch.cat([*outputs, padding.new_zeros(n_padding, weight.shape[1])])

    return product


class _Dispatch(torch.autograd.Function):
    """Copies each token to the rows of its experts. The backward sums a token's rows in a fixed order, which that of
    indexing does not on CUDA."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_M: Tensor, inverse_M: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_M)
        ctx.n_tokens = len(x_ND)
        return x_ND[order_M // (len(order_M) // len(x_ND))] if len(x_ND) else x_ND[order_M]

    @staticmethod
    def backward(ctx: Any, gradient_MD: Tensor) -> tuple[Tensor, None, None]:
        (inverse_M,) = ctx.saved_tensors
        return gradient_MD[inverse_M].unflatten(0, (ctx.n_tokens, -1)).sum(1), None, None


def order_by_expert(experts_M: Tensor, n_experts: int) -> Tensor:
    """Return the permutation that sorts rows by their experts and changes nothing else in their order. CUDA sorts keys
    of 8 bits in one pass, and those of 64 in eight."""
    return experts_M.to(torch.uint8 if n_experts <= 256 else torch.int16).argsort(stable=True)


def inverse(order_M: Tensor) -> Tensor:
    """Return the permutation that undoes another."""
    return torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))


def permute(x_MD: Tensor, order_M: Tensor, inverse_M: Tensor) -> Tensor:
    """Return the rows in another order; `inverse_M` restores it, so that the backward need not add."""
    return _Permute.apply(x_MD, order_M, inverse_M)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, order_M: Tensor, inverse_M: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_M)
        return x_MD[order_M]

    @staticmethod
    def backward(ctx: Any, gradient_MD: Tensor) -> tuple[Tensor, None, None]:
        (inverse_M,) = ctx.saved_tensors
        return gradient_MD[inverse_M], None, None
