"""A mixture of experts: a router sends each token to a few of many feed-forward layers (arXiv:1701.06538).

No tokens are dropped: an expert's tokens are consecutive rows, whose number has no limit. Shapes: N tokens, D model
width, E experts, F width of an expert, K experts per token, M = N x K token-expert pairs."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.config.schema import Model
from titanlite.model import FeedForward
from titanlite.techniques.moe import counts, operators
from titanlite.techniques.moe.operators import Operators
from titanlite.techniques.moe.router import Router

GROUPED_MM_DTYPES = {"cpu": (torch.bfloat16, torch.float32), "cuda": (torch.bfloat16,)}
"""Data types, by device, in which torch's grouped_mm multiplies the rows of all experts in one call. For other types,
and for rows whose bytes are no multiple of ROW_BYTES, each expert has a separate product."""
ROW_BYTES = 16


class MixtureOfExperts(nn.Module):
    """Computes, for each token, the sum of its experts' outputs times their scores, plus the shared experts' output."""

    def __init__(self, model: Model):
        super().__init__()
        n_shared = model.moe.n_shared_experts
        self.router = Router(model)
        self.experts = Experts(model)
        self.shared = FeedForward(model.dim, n_shared * model.expert_dim) if n_shared else None

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return the sum of the experts' weighted outputs for each token, [N, D]."""
        operators = self.experts.operators
        scores_NK, experts_NK, counts_E = self.router(x_ND)
        order_M = order_by_expert(self.sort_key(experts_NK).flatten(), self.router.n_experts)
        row_M = inverse(order_M)
        x_MD = _Spread.apply(x_ND, order_M, row_M, operators)
        scores_M = Permute.apply(scores_NK.flatten(), order_M, row_M)
        shared_ND = None if self.shared is None else self.shared(x_ND)
        kept = Keep.apply(scores_M, order_M)
        out_ND = _Collect.apply(self.compute(x_MD, scores_M, counts_E), row_M.view_as(experts_NK), kept, operators)
        return out_ND if shared_ND is None else out_ND + shared_ND

    def sort_key(self, experts_NK: Tensor) -> Tensor:
        """Return the keys by which rows are sorted. Expert parallel replaces this method."""
        return experts_NK

    def compute(self, x_MD: Tensor, scores_M: Tensor, counts_E: Tensor) -> Tensor:
        """Return each row's expert output times the row's score, [M, D]. Expert parallel replaces this method."""
        return self.experts(x_MD, scores_M, counts_E)

    def compile_operators(self, backend: str) -> None:
        """Compile the operators between the matrix products; the products have data-dependent sizes."""
        self.experts.operators = operators.compiled(backend)


class Experts(nn.Module):
    """Holds E feed-forward layers (SwiGLU). One parameter stacks a weight, or a bias, of all E experts."""

    def __init__(self, model: Model):
        super().__init__()
        n_experts, dim, expert_dim = model.moe.n_experts, model.dim, model.expert_dim
        self.w1 = nn.Parameter(torch.empty(n_experts, expert_dim, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, expert_dim))
        self.w3 = nn.Parameter(torch.empty(n_experts, expert_dim, dim))
        if model.moe.expert_bias:
            self.w1_bias = nn.Parameter(torch.empty(n_experts, expert_dim))
            self.w2_bias = nn.Parameter(torch.empty(n_experts, dim))
            self.w3_bias = nn.Parameter(torch.empty(n_experts, expert_dim))
        self.adapters = nn.ModuleDict()  # adapters by the name of a weight (techniques/lora.py)
        self.operators = operators.EAGER
        self.clamp = (model.moe.swiglu_limit, model.moe.swiglu_alpha) if model.moe.swiglu_limit else ()

    def weights(self) -> list[Tensor]:
        """Return w1, w2, w3 and any biases as plain tensors. Parallelism replaces `weights`, to return local shards."""
        return list(self.parameters(recurse=False))

    def forward(self, x_MD: Tensor, scores_M: Tensor, counts_E: Tensor) -> Tensor:
        """Return the rows' outputs times their scores, [M, D]. The first counts_E[0] rows belong to expert 0, the next
        counts_E[1] rows to expert 1, and so on. The scores are factors on the input of w2."""
        w1, w2, w3, *biases = self.weights()
        of_w1, of_w2, of_w3 = (self.adapters[key]() if key in self.adapters else () for key in ("w1", "w2", "w3"))
        product = _grouped_product(x_MD, [w1, *of_w1, *of_w2, *of_w3], counts_E)
        gate_MF, up_MF = _sum(product, x_MD, w1, *of_w1), _sum(product, x_MD, w3, *of_w3)
        if not biases:
            return _sum(product, _SwiGLU.apply(gate_MF, up_MF, scores_M, self.operators, self.clamp), w2, *of_w2)
        numbers_E = torch.arange(len(counts_E), device=counts_E.device)
        expert_M = numbers_E.repeat_interleave(counts_E, output_size=len(x_MD))
        of_gate, of_out, of_up = (F.embedding(expert_M, bias) for bias in biases)  # backward sums in a fixed order
        hidden_MF = _SwiGLU.apply(gate_MF + of_gate, up_MF + of_up, scores_M, self.operators, self.clamp)
        return _sum(product, hidden_MF, w2, *of_w2) + of_out * scores_M.to(of_out.dtype).unsqueeze(1)


def _sum(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, *factors: Tensor) -> Tensor:
    """Return the product of x and a weight; with an adapter's two `factors`, plus the adapter's product."""
    out = product(x, weight)
    return out + product(product(x, factors[0]), factors[1]) if factors else out


def _grouped_product(x_MD: Tensor, weights: list[Tensor], counts_E: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function (x, weight) that multiplies each row of x by its expert's matrix in weight [E, outputs,
    inputs]. `weights` have the same shapes as the weights that the function will get."""
    fits = all(side * x_MD.element_size() % ROW_BYTES == 0 for weight in weights for side in weight.shape[1:])
    if fits and len(x_MD) and x_MD.dtype in GROUPED_MM_DTYPES.get(x_MD.device.type, ()):
        ends_E = counts_E.cumsum(0).to(torch.int32)
        return lambda x, weight: torch._grouped_mm(x, weight.transpose(-2, -1), offs=ends_E)
    sizes = counts.read(counts_E)
    return lambda x, weight: torch.cat([F.linear(x_e, w_e) for x_e, w_e in zip(x.split(sizes), weight, strict=True)])


class _Spread(torch.autograd.Function):
    """Copies each token to its experts' rows. Unlike indexing's backward on CUDA, this one sums in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_M: Tensor, row_M: Tensor, operators: Operators) -> Tensor:
        n_per_token = len(order_M) // len(x_ND) if len(x_ND) else 1
        ctx.save_for_backward(row_M.view(len(x_ND), n_per_token))
        ctx.operators = operators
        return operators.spread(x_ND, order_M, n_per_token)

    @staticmethod
    def backward(ctx: Any, gradient_MD: Tensor) -> tuple[Tensor | None, ...]:
        (row_NK,) = ctx.saved_tensors
        return ctx.operators.collect(gradient_MD, row_NK), None, None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_MD: Tensor, row_NK: Tensor, kept: Tensor, operators: Operators) -> Tensor:
        ctx.keeper, ctx.n_per_token, ctx.operators = kept.grad_fn, row_NK.shape[1], operators
        return operators.collect(y_MD, row_NK)

    @staticmethod
    def backward(ctx: Any, gradient_ND: Tensor) -> tuple[Tensor | None, ...]:
        (order_M,) = ctx.keeper.saved_tensors
        return ctx.operators.spread(gradient_ND, order_M, ctx.n_per_token), None, None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate_MF: Tensor, up_MF: Tensor, scores_M: Tensor, operators: Operators, clamp: tuple[float, ...]
    ) -> Tensor:
        ctx.save_for_backward(gate_MF, up_MF, scores_M)
        ctx.operators, ctx.clamp = operators, clamp
        return operators.swiglu(gate_MF, up_MF, scores_M, *clamp)

    @staticmethod
    def backward(ctx: Any, gradient_MF: Tensor) -> tuple[Tensor | None, ...]:
        *gradients, _ = ctx.operators.swiglu_backward(gradient_MF, *ctx.saved_tensors, *ctx.clamp)
        return *gradients, None, None


def order_by_expert(experts_M: Tensor, n_experts: int) -> Tensor:
    """Return the permutation that stably sorts rows by expert. Keys have a short type: CUDA sorts 8 bits per pass."""
    return experts_M.to(torch.uint8 if n_experts <= 256 else torch.int16).argsort(stable=True)


def inverse(order_M: Tensor) -> Tensor:
    return torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))


class Permute(torch.autograd.Function):
    """Sorts rows, or their scores. `row_M` is the inverse of the permutation `order_M`."""

    @staticmethod
    def forward(ctx: Any, x_M: Tensor, order_M: Tensor, row_M: Tensor) -> Tensor:
        ctx.save_for_backward(row_M)
        return x_M[order_M]

    @staticmethod
    def backward(ctx: Any, gradient_M: Tensor) -> tuple[Tensor, None, None]:
        (row_M,) = ctx.saved_tensors
        return gradient_M[row_M], None, None


class Keep(torch.autograd.Function):
    """Saves tensors for the backward of a later function, which takes Keep's result as an input and saves nothing
    itself. Activation checkpointing recomputes only until all saved tensors exist, so it skips the later function,
    whose backward reads the result's `grad_fn.saved_tensors`. `anchor` requires a gradient, so grad_fn exists."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)
