"""Float8 training: the matrix products of linear layers take their inputs in 8-bit floating point (FP8 Formats for Deep
Learning, arXiv:2209.05433), with dynamic scaling (torchao.float8).

Weights, gradients, optimizer states and everything between the matrix products keep their dtypes.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp
from torchao.float8.float8_linear import Float8Linear

from titanlite.config import ConfigError
from titanlite.config.float8_schema import Float8
from titanlite.model import Llama


def convert_to_float8(stage: Llama, float8: Float8, *, tensor_parallel_degree: int, device: torch.device) -> None:
    """Convert linear layers of a model or a pipeline stage on the meta device, in place, before weights are sharded.

    The output head is not converted: its product is the one whose rounding the loss shows. Nor is a layer whose weight
    has, on a rank, a side that is not a multiple of 16: the hardware's product takes no other (torch._scaled_mm). Nor
    is a mixture of experts, with the shared ones.
    Raise ConfigError if the device has no float8, or no layer is converted.
    """
    if not float8.emulate and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name, advice = torch.cuda.get_device_name(device), "set float8.emulate = true, or this to false"
        raise ConfigError([f"float8.enable = true: {name} has no float8 products; {advice}"])

    def converts(module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear) or name == "output" or any(fqn in name for fqn in float8.filter_fqns):
            return False
        if ".feed_forward.shared." in name:
            return False
        return all(side % (16 * tensor_parallel_degree) == 0 for side in module.weight.shape)

    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(float8.recipe),
        emulate=float8.emulate,
        enable_fsdp_float8_all_gather=float8.enable_fsdp_float8_all_gather,
    )
    convert_to_float8_training(stage, config=config, module_filter_fn=converts)
    if not any(isinstance(module, Float8Linear) for module in stage.modules()):
        raise ConfigError(["float8.enable = true: no layer is converted; see float8.filter_fqns, or set false"])


def precompute_scales(stages: Sequence[Llama], optimizer: torch.optim.Optimizer) -> None:
    """Compute the scales of all weights after each optimizer step, with one collective per stage, not per weight."""

    def after_step(*_: object) -> None:
        for stage in stages:
            precompute_float8_dynamic_scale_for_fsdp(stage)

    optimizer.register_step_post_hook(after_step)
