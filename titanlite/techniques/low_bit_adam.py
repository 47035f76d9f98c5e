"""Low-bit Adam: 4-bit or 8-bit optimizer states, or states in another type than the weights, and stochastic rounding.
torchao implements the quantized states and stochastic rounding. The optimizer step of this file computes in float32,
and on a GPU is compiled once for each shape and type of a weight."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.optim.quant_utils import _fp32_to_bf16_sr as round_stochastically
from torchao.optim.quant_utils import quantize_4bit_with_qmap, quantize_8bit_with_qmap
from torchao.utils import TorchAOBaseTensor

from titanlite.config import ConfigError
from titanlite.config.schema import QUANTIZED_STATES, Optimizer
from titanlite.parallel.shards import local_shard
from titanlite.torch_workarounds import eager_on_cpu

QUANTIZED = {"float8": AdamWFp8, "int8": AdamW8bit, "int4": AdamW4bit}
"""torchao's optimizers with quantized states, by optimizer.state_dtype."""
LARGEST_FLOAT8 = 448.0
SMALLEST_FLOAT8 = 2**-9 / LARGEST_FLOAT8
"""Ratio of the smallest value above 0 to the largest value of float8 (e4m3)."""


def store(state: Tensor, values: Tensor, takes: Tensor, *, is_square: bool = False) -> None:
    """If the step is taken (`takes`), write `values` to an optimizer state, which may be quantized by blocks.

    The scale of a block is the block's value of largest magnitude, with its sign, because torchao's tables of values
    contain 1 but not -1. (torchao's own scale is the magnitude, at least 1e-12, which shrinks a block whose largest
    value is negative.) With signed scales, quantizing the values of a quantized state again changes nothing. With
    `is_square`, no value is rounded to 0, since the next step would then divide exp_avg by eps alone."""
    if not isinstance(state, TorchAOBaseTensor):
        state.copy_(values.to(state.dtype).where(takes, state))
        return
    blocks = values.float().view(-1, state.block_size)
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    relative = blocks / largest.where(largest != 0, 1)
    table = getattr(state, "qmap", None)
    if is_square:
        smallest = SMALLEST_FLOAT8 if table is None else table.masked_fill(table <= 0, 1).amin()
        relative = relative.clamp(min=smallest)
    if table is None:
        codes, largest = (relative * LARGEST_FLOAT8).to(state.codes.dtype), largest / LARGEST_FLOAT8
    elif len(table) == 16:
        codes = quantize_4bit_with_qmap(relative.flatten(), table)
        codes = (codes[::2] << 4) | codes[1::2]
    else:
        codes = quantize_8bit_with_qmap(relative.flatten(), table)
    state.codes.copy_(codes.view(state.codes.shape).where(takes, state.codes))
    state.scale.copy_(largest.flatten().where(takes, state.scale))


class LowBitAdam(AdamW8bit):
    """Adam or AdamW with optimizer states (exp_avg, exp_avg_sq) of type `optimizer.state_dtype`.

    States in float8, int8 (arXiv:2110.02861) and int4 (arXiv:2309.01507) are quantized: the elements of a block share a
    scale. Instead, a state is in float32 if a rank's shard has fewer than 4096 elements (mostly norms), or a number of
    elements that is no multiple of a block. bfloat16 states with fewer than 4096 elements keep their weight's type.

    The states of weights in `full_precision`, such as embeddings, keep the weight's type: the exp_avg_sq of a rare
    token's row is too small to share a scale with the rest of its block (arXiv:2110.02861, section 2.3).

    Raises ConfigError for float8 states on a GPU below compute capability 8.9, for which the step cannot be compiled.
    """

    _step_supports_amp_scaling = True  # `step` reads grad_scale and found_inf
    store = staticmethod(store)

    def __init__(self, groups: Iterable[dict[str, Any]], optimizer: Optimizer, *, full_precision: Iterable[Tensor]):
        self.state_dtype, self._full_precision = optimizer.state_dtype, {id(weight) for weight in full_precision}
        betas, block = (optimizer.beta1, optimizer.beta2), QUANTIZED_STATES.get(self.state_dtype, 1)
        rounding = {"bf16_stochastic_round": optimizer.stochastic_rounding}
        super().__init__(groups, optimizer.lr, betas, optimizer.eps, block_size=block, **rounding)
        self.is_adamw = optimizer.name == "AdamW"
        device = self.param_groups[0]["params"][0].device
        if self.state_dtype == "float8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            name = torch.cuda.get_device_name(device)
            raise ConfigError([f'optimizer.state_dtype = "float8": {name} cannot convert to float8; set "int8"'])
        self._update = torch.compile(_update, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step (eagerly on a CPU) with gradients divided by `grad_scale`; change nothing if `found_inf` is 1."""
        device = self.param_groups[0]["params"][0].device
        none = {"grad_scale": 1.0, "found_inf": 0.0}
        scaling = [getattr(self, name, torch.full((), value, device=device)) for name, value in none.items()]
        # torch.compile's default limit is 8 recompilations, but a model has more shapes and types of weights.
        with eager_on_cpu(device), torch._dynamo.config.patch(recompile_limit=64):
            for group in self.param_groups:
                numbers = *group["betas"], group["weight_decay"], group["eps"], self.is_adamw
                for weight in group["params"]:
                    if weight.grad is not None:
                        state = self._state_of(weight)
                        rounds = self.bf16_stochastic_round and weight.dtype == torch.bfloat16
                        # Pass local shards: the dispatch of DTensors would take longer than the update on the device.
                        tensors = map(local_shard, (weight, weight.grad, *state.values()))
                        self._update(*tensors, group["lr"], *scaling, *numbers, rounds)

    def _state_of(self, weight: Tensor) -> dict[str, Tensor]:
        if not (state := self.state[weight]):
            state["step"] = torch.zeros((), device=weight.device)
            state["exp_avg"], state["exp_avg_sq"] = self._new_buffer(weight, True), self._new_buffer(weight, False)
        return {name: state[name] for name in ("step", "exp_avg", "exp_avg_sq")}

    def _new_buffer(self, weight: Tensor, signed: bool) -> Tensor:
        if self.state_dtype == "float32":
            return torch.zeros_like(weight, dtype=torch.float32)
        if id(weight) in self._full_precision:
            return torch.zeros_like(weight)
        if self.state_dtype in QUANTIZED:  # states of a shard too small for quantization are float32
            weight = torch.empty_like(weight, dtype=torch.float32)
        return super()._new_buffer(weight, signed)

    def _subclass_zeros(self, weight: Tensor, signed: bool, block_size: int) -> Tensor:
        if self.state_dtype in QUANTIZED:
            return QUANTIZED[self.state_dtype]._subclass_zeros(weight, signed, block_size)
        return torch.zeros_like(weight, dtype=torch.bfloat16 if self.state_dtype == "bfloat16" else weight.dtype)


def create_value_tables(state_dtype: str) -> None:
    """Have torchao create and cache the table of a quantized type's values now: it cannot do so under fake tensors."""
    block = QUANTIZED_STATES[state_dtype]
    for signed in (True, False):
        QUANTIZED[state_dtype]._subclass_zeros(torch.empty(block), signed, block)


def _update(
    weight: Tensor,
    gradient: Tensor,
    step: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    lr: Tensor,
    grad_scale: Tensor,
    found_inf: Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    decoupled: bool,
    stochastic: bool,
) -> None:
    """Update a weight and its states in place (arXiv:1412.6980, algorithm 1; decoupled: arXiv:1711.05101)."""
    takes = found_inf == 0
    step += takes
    gradient_f32, weight_f32 = gradient.float() / grad_scale, weight.float()
    if decoupled:
        weight_f32 = weight_f32 - lr * weight_decay * weight_f32
    else:
        gradient_f32 = gradient_f32 + weight_decay * weight_f32
    first, second = _float32(exp_avg), _float32(exp_avg_sq)
    new_first, new_second = first.lerp(gradient_f32, 1 - beta1), second.lerp(gradient_f32.square(), 1 - beta2)
    size = (new_second / (1 - beta2**step)).sqrt() + eps
    weight_f32 = weight_f32 - lr * (new_first / (1 - beta1**step)) / size
    store(exp_avg, new_first, takes)
    store(exp_avg_sq, new_second, takes, is_square=True)
    new = round_stochastically(weight_f32) if stochastic else weight_f32.to(weight.dtype)
    weight.copy_(new.where(takes, weight))


def _float32(state: Tensor) -> Tensor:
    return state.dequantize() if isinstance(state, TorchAOBaseTensor) else state.float()
