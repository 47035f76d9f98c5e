"""Float8 training: the matrix products of linear layers take their inputs in 8-bit floating point (FP8 Formats for Deep
Learning, arXiv:2209.05433), scaled as they come (torchao.float8).

Only the products: weights, gradients, optimizer states and all between the products keep their types.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from torchao.float8.float8_linear import Float8Linear

from titanlite.model import Llama

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]


def convert_to_float8(
    model: Llama, *, recipe: Recipe, emulate: bool, all_gather: bool, filter_fqns: Sequence[str], tensor_degree: int
) -> int:
    """Convert linear layers of a model or a stage on the meta device, in place, before anything is cut.

    The output head is not converted: its product is the one whose rounding the loss shows. Nor is a layer whose weight
    has, on a rank, a side that is not a multiple of 16: the hardware's product takes no other (torch._scaled_mm).

    Args:
        recipe: tensorwise: one scale a tensor. rowwise: one a row, which is more accurate. rowwise_with_gw_hp: rowwise,
            and gradients of weights from products in the model's own type.
        emulate: round to float8 but multiply in the model's type, on hardware without float8.
        all_gather: FSDP gathers weights in float8 (tensorwise).
        filter_fqns: layers with one of these in their name are left alone.
        tensor_degree: ranks that each weight will be cut over.

    Returns:
        How many layers were converted.
    """

    def wanted(module: nn.Module, name: str) -> bool:
        fits = isinstance(module, nn.Linear) and all(side % (16 * tensor_degree) == 0 for side in module.weight.shape)
        return fits and name != "output" and not any(part in name for part in filter_fqns)

    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe), emulate=emulate, enable_fsdp_float8_all_gather=all_gather
    )
    convert_to_float8_training(model, config=config, module_filter_fn=wanted)
    return sum(isinstance(module, Float8Linear) for module in model.modules())


def precompute_scales(models: Sequence[Llama], optimizer: torch.optim.Optimizer) -> None:
    """Compute the scales of all weights at once after each of the optimizer's steps, with one collective a stage
    instead of one a weight in the next forward."""

    def after_step(*_: object) -> None:
        for model in models:
            precompute_float8_dynamic_scale_for_fsdp(model)

    optimizer.register_step_post_hook(after_step)
