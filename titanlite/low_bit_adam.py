"""Adam with moments in another type than the weights, mostly in fewer bits, and stochastic rounding of weights, on
torchao's low-bit optimizers: the step is computed in float32 for each element, and compiled on a GPU."""

import contextlib
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torchao.optim import AdamW8bit


class LowBitAdam(AdamW8bit):
    """Moments of fewer than 4096 elements on a rank (norms, mostly) keep their weight's type where others have fewer
    bits; and, in int8, those whose number of elements is no multiple of 256, the block that shares a scale
    (arXiv:2110.02861).

    Args:
        wide: weights whose moments keep their type. In int8 an embedding's must (the same paper, section 2.3): rows of
            rare tokens have a second moment so much smaller than their block's that it rounds to 0, and are then moved
            by their first over eps.
        name: whether weight decay is apart from the gradient.
        state_dtype: of the moments; auto: their weight's.
        stochastic_rounding: of weights in bfloat16.
        The others: as of torch.optim.AdamW.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        wide: Iterable[Tensor],
        name: Literal["AdamW", "Adam"],
        state_dtype: Literal["auto", "float32", "bfloat16", "int8"],
        stochastic_rounding: bool,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ):
        self.state_dtype, self._wide = state_dtype, {id(weight) for weight in wide}
        block = 256 if state_dtype == "int8" else 1
        super().__init__(groups, lr, betas, eps, block_size=block, bf16_stochastic_round=stochastic_rounding)
        self.is_adamw = name == "AdamW"

    def step(self, closure: Any = None) -> Any:
        """As any optimizer's."""
        # What inductor makes of the 8-bit step for a CPU ends the process (torch 2.13, torchao 0.18).
        on_cpu = self.param_groups[0]["params"][0].device.type == "cpu"
        with torch.compiler.set_stance("force_eager") if on_cpu else contextlib.nullcontext():
            return super().step(closure)

    def _new_buffer(self, weight: Tensor, signed: bool) -> Tensor:
        if self.state_dtype == "float32":
            return torch.zeros_like(weight, dtype=torch.float32)
        return torch.zeros_like(weight) if id(weight) in self._wide else super()._new_buffer(weight, signed)

    def _subclass_zeros(self, weight: Tensor, signed: bool, block_size: int) -> Tensor:
        if self.state_dtype == "int8":
            # It decodes to the type of this one, and a step wants float32.
            return AdamW8bit._subclass_zeros(torch.empty_like(weight, dtype=torch.float32), signed, block_size)
        return torch.zeros_like(weight, dtype=torch.bfloat16 if self.state_dtype == "bfloat16" else weight.dtype)
