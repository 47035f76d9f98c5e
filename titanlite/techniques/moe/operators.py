"""Memory-bound operators of a mixture of experts: eager, or each compiled to one kernel that reads its inputs once.
Shapes: N tokens, D model width, K experts per token, M = N x K, R rows that a rank's experts get, F expert width."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def spread(x_ND: Tensor, order_M: Tensor, n_per_token: int) -> Tensor:
    """Copy each token to the rows of its experts, [M, D]. `order_M`: index of each row's (token, expert) pair."""
    return x_ND[order_M // n_per_token]


def collect(y_MD: Tensor, row_NK: Tensor) -> Tensor:
    """Sum the rows of each token's experts, [N, D]. `row_NK`: the row of each (token, expert) pair."""
    return y_MD[row_NK].sum(1)


def swiglu(gate_RF: Tensor, up_RF: Tensor, scores_R: Tensor, limit: float = 0.0, alpha: float = 1.0) -> Tensor:
    """Return silu(gate) x up x score, [R, F]. If `limit` is not 0 (gpt-oss, arXiv:2508.10925), `gate` is clamped to at
    most `limit` and `up` to +-limit, and the result is gate x sigmoid(alpha x gate) x (up + 1) x score."""
    if limit:
        gate_RF, up_RF = gate_RF.clamp(max=limit), up_RF.clamp(-limit, limit) + 1
        return gate_RF * (alpha * gate_RF).sigmoid() * up_RF * scores_R.to(gate_RF.dtype).unsqueeze(1)
    return F.silu(gate_RF) * up_RF * scores_R.to(gate_RF.dtype).unsqueeze(1)


def swiglu_backward(
    gradient_RF: Tensor, gate_RF: Tensor, up_RF: Tensor, scores_R: Tensor, limit: float = 0.0, alpha: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of gate, up and scores, and the recomputed output of `swiglu`."""
    if limit:
        return _clamped_backward(gradient_RF, gate_RF, up_RF, scores_R, limit, alpha)
    silu_RF, weighted_RF = F.silu(gate_RF), gradient_RF * scores_R.to(gate_RF.dtype).unsqueeze(1)
    gate_gradient_RF = torch.ops.aten.silu_backward(weighted_RF * up_RF, gate_RF)
    scores_gradient_R = (gradient_RF * silu_RF * up_RF).sum(1, dtype=scores_R.dtype)
    return gate_gradient_RF, weighted_RF * silu_RF, scores_gradient_R, swiglu(gate_RF, up_RF, scores_R)


def _clamped_backward(
    gradient_RF: Tensor, gate_RF: Tensor, up_RF: Tensor, scores_R: Tensor, limit: float, alpha: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weighted_RF = gradient_RF * scores_R.to(gate_RF.dtype).unsqueeze(1)
    clamped_RF, factor_RF = gate_RF.clamp(max=limit), up_RF.clamp(-limit, limit) + 1
    sigmoid_RF = (alpha * clamped_RF).sigmoid()
    active_RF = clamped_RF * sigmoid_RF
    slope_RF = sigmoid_RF * (1 + alpha * clamped_RF * (1 - sigmoid_RF))
    gate_gradient_RF = (weighted_RF * factor_RF * slope_RF).where(gate_RF <= limit, 0)
    up_gradient_RF = (weighted_RF * active_RF).where(up_RF.abs() <= limit, 0)
    scores_gradient_R = (gradient_RF * active_RF * factor_RF).sum(1, dtype=scores_R.dtype)
    return gate_gradient_RF, up_gradient_RF, scores_gradient_R, swiglu(gate_RF, up_RF, scores_R, limit, alpha)


class Operators(NamedTuple):
    """The functions spread, collect, swiglu and swiglu_backward of this file, eager or compiled."""

    spread: Callable[..., Tensor]
    collect: Callable[..., Tensor]
    swiglu: Callable[..., Tensor]
    swiglu_backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


EAGER = Operators(spread, collect, swiglu, swiglu_backward)


@functools.cache
def compiled(backend: str) -> Operators:
    """Return compiled custom operators. Compiled plain functions would stay eager under selective AC."""
    return Operators(*(_compiled_operator(function, backend) for function in EAGER))


def _compiled_operator(function: Callable[..., Any], backend: str) -> Any:
    implementation = torch.compile(function, backend=backend, fullgraph=True)

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        for arg in args:
            if isinstance(arg, Tensor):
                torch._dynamo.maybe_mark_dynamic(arg, 0)  # the number of rows differs between calls
        return implementation(*args)

    operator = torch.library.custom_op(f"titanlite::{function.__name__}_{backend}", run, mutates_args=())
    operator.register_fake(function)
    return operator
