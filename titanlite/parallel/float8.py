"""Float8 training: the matrix products of linear layers take their inputs in 8-bit floating point (FP8 Formats for Deep
Learning, arXiv:2209.05433), with dynamic scaling (torchao.float8). All other values keep their dtypes."""

import dataclasses
from collections.abc import Collection, Sequence

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

from titanlite.config.schema import Float8
from titanlite.model import Llama
from titanlite.torch_workarounds import round_casts_as_eager


def convert_to_float8(stage: Llama, float8: Float8, names: Collection[str]) -> None:
    """Convert a stage's linear layers in `names` to float8, in place, on the meta device and before FSDP."""
    round_casts_as_eager(float8.recipe != "tensorwise")
    options = {"emulate": float8.emulate, "enable_fsdp_float8_all_gather": float8.enable_fsdp_float8_all_gather}
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(float8.recipe), **options)
    convert_to_float8_training(stage, config=config, module_filter_fn=lambda module, name: name in names)


def precompute_scales(stages: Sequence[Llama], optimizer: torch.optim.Optimizer) -> None:
    """Compute the float8 scales of all weights after each optimizer step, with one collective per pipeline stage."""

    def after_step(*_: object) -> None:
        for stage in stages:
            precompute_float8_dynamic_scale_for_fsdp(stage)

    optimizer.register_step_post_hook(after_step)
