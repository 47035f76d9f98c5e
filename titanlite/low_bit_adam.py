"""Low-bit Adam: 8-bit optimizer states, or another type than the weights', and stochastic rounding of weights.
It extends torchao's optimizers: the step is computed in float32 for each element, and compiled on a GPU."""

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torchao.optim import AdamW8bit

from titanlite.config.schema import Optimizer


class LowBitAdam(AdamW8bit):
    """Adam or AdamW with optimizer states (exp_avg, exp_avg_sq) of type `optimizer.state_dtype`.

    States of fewer than 4096 elements on a rank (norms, mostly) keep their weight's type where that has more bits. In
    int8 so do those whose number of elements is no multiple of 256, the block that shares a scale (arXiv:2110.02861).

    The states of weights in `full_precision` keep the weight's type. In int8 an embedding's must (the same paper,
    section 2.3): rows of rare tokens have an exp_avg_sq so much smaller than their block's that it rounds to 0, and are
    then moved by their exp_avg over eps.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], optimizer: Optimizer, *, full_precision: Iterable[Tensor]):
        self.state_dtype, self._full_precision = optimizer.state_dtype, {id(weight) for weight in full_precision}
        betas, block = (optimizer.beta1, optimizer.beta2), 256 if self.state_dtype == "int8" else 1
        rounding = {"bf16_stochastic_round": optimizer.stochastic_rounding}
        super().__init__(groups, optimizer.lr, betas, optimizer.eps, block_size=block, **rounding)
        self.is_adamw = optimizer.name == "AdamW"

    def step(self, closure: Any = None) -> Any:
        """Take a step, eagerly on a CPU."""
        # The code that inductor generates for the 8-bit step crashes the process on a CPU (torch 2.13, torchao 0.18).
        on_cpu = self.param_groups[0]["params"][0].device.type == "cpu"
        with torch.compiler.set_stance("force_eager") if on_cpu else contextlib.nullcontext():
            return super().step(closure)

    def _new_buffer(self, weight: Tensor, signed: bool) -> Tensor:
        if self.state_dtype == "float32":
            return torch.zeros_like(weight, dtype=torch.float32)
        return torch.zeros_like(weight) if id(weight) in self._full_precision else super()._new_buffer(weight, signed)

    def _subclass_zeros(self, weight: Tensor, signed: bool, block_size: int) -> Tensor:
        if self.state_dtype == "int8":
            # It decodes to the type of this tensor, and a step needs float32.
            return AdamW8bit._subclass_zeros(torch.empty_like(weight, dtype=torch.float32), signed, block_size)
        return torch.zeros_like(weight, dtype=torch.bfloat16 if self.state_dtype == "bfloat16" else weight.dtype)
