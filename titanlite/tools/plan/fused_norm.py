"""Record RMSNorm as a single operator that saves its input, which it is on CUDA and to the compiler. On a CPU it is a
dozen operators, whose autograd saves two copies in float32."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from titanlite.tools.plan.op_trace import OpTrace

NORM, NORM_BACKWARD = "aten._fused_rms_norm", "aten._fused_rms_norm_backward"


@contextlib.contextmanager
def fused_norm(trace: OpTrace, local: Callable[[Tensor], list[Tensor]]) -> Iterator[None]:
    """Record each norm in the body as a single operator. `local` returns a tensor's plain tensors on this rank."""
    composite = F.rms_norm

    def record(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        trace.record_work(name, *([x for tensor in side for x in local(tensor)] for side in (inputs, outputs)))

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
            with trace.paused():
                out, scale = composite(x, x.shape[-1:], weight, eps), x.new_empty((*x.shape[:-1], 1)).float()
            record(NORM, (x, weight), (out, scale))
            context.save_for_backward(x, weight, scale)
            context.eps = eps
            return out

        @staticmethod
        def backward(context: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
            x, weight, scale = context.saved_tensors
            with trace.paused(), torch.enable_grad():
                leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
                out = composite(leaves[0], x.shape[-1:], leaves[1], context.eps)
                grads = torch.autograd.grad(out, leaves, grad)
            record(NORM_BACKWARD, (grad, x, scale, weight), grads)
            return grads[0], grads[1], None

    F.rms_norm = lambda x, shape, weight, eps: Norm.apply(x, weight, eps)
    try:
        yield
    finally:
        F.rms_norm = composite
