"""Float8 training: the matrix products of linear layers take their inputs in 8-bit floating point (FP8 Formats for Deep
Learning, arXiv:2209.05433), with dynamic scaling (torchao.float8).

Weights, gradients, optimizer states and everything between the matrix products keep their dtypes.
"""

import dataclasses
from collections.abc import Collection, Sequence

import torch
from torch._inductor import config as inductor_config
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

from titanlite.config.schema import Float8
from titanlite.model import Llama


def convert_to_float8(stage: Llama, float8: Float8, names: Collection[str]) -> None:
    """Convert the named linear layers of a model or a pipeline stage on the meta device, in place, before weights are
    sharded."""
    # A compiled backward recomputes the cast of its input from a value that fusion has not rounded. With a scale per
    # row, products can then be NaN (pytorch 150859). This option rounds as eager does.
    inductor_config.emulate_precision_casts = float8.recipe != "tensorwise"
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(float8.recipe),
        emulate=float8.emulate,
        enable_fsdp_float8_all_gather=float8.enable_fsdp_float8_all_gather,
    )
    convert_to_float8_training(stage, config=config, module_filter_fn=lambda module, name: name in names)


def precompute_scales(stages: Sequence[Llama], optimizer: torch.optim.Optimizer) -> None:
    """Compute the scales of all weights after each optimizer step, with one collective per stage, not per weight."""

    def after_step(*_: object) -> None:
        for stage in stages:
            precompute_float8_dynamic_scale_for_fsdp(stage)

    optimizer.register_step_post_hook(after_step)
