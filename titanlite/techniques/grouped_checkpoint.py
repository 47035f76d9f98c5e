"""Activation checkpointing over groups of blocks: only a group's first block saves its inputs, in O(sqrt(L)) memory for
L layers (arXiv:1604.06174, section 4.2; Megatron-LM's uniform method). A group's backward first recomputes the group;
in doing so, each block saves what activation_checkpoint.mode determines. "none": all its activations. "full": its
inputs, from which the block is recomputed once more; this takes the least memory and the most time."""

import functools
import itertools
from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from titanlite.config.schema import Parallelism
from titanlite.model import Documents, Llama


def checkpoint_groups(stage: Llama, size: int, parallelism: Parallelism) -> None:
    """Checkpoint the blocks of a model or a pipeline stage, in place, in groups of `size`; the last group may be
    smaller. fully_shard must already have been applied to the blocks."""
    layers, reshards = list(stage.layers), parallelism.fsdp_reshard_after_forward != "never"
    groups = [layers[begin : begin + size] for begin in range(0, len(layers), size)]
    stage.run_layers = functools.partial(_run_layers, stage, groups, reshards)
    if reshards and not parallelism.fsdp_backward_prefetch:
        # Before a group's last block runs backward, the group's first block is recomputed: prefetch its weights.
        for first, *_, last in (group for group in groups if len(group) > 2):
            stage.layers[last].set_modules_to_backward_prefetch(_units(stage.layers[first]))


def _run_layers(
    stage: Llama,
    groups: list[list[str]],
    reshards: bool,
    x_ND: Tensor,
    ropes: Sequence[Tensor],
    documents: Documents | None,
) -> Tensor:
    for group in groups:
        calls = [(stage.layers[layer], ropes[stage.rope_of_layer[int(layer)]], documents) for layer in group]
        run = functools.partial(_run_group, calls, itertools.count(), reshards)
        x_ND = checkpoint(run, x_ND, use_reentrant=False, preserve_rng_state=False)
    return x_ND


def _run_group(
    calls: list[tuple[nn.Module, Tensor, Documents | None]], times: Iterator[int], reshards: bool, x_ND: Tensor
) -> Tensor:
    """Run a group's blocks and return the result. `calls`: each block and its arguments except x. `times` counts calls:
    call 0 is the group's forward, later calls recompute it.

    When a group is recomputed, FSDP's hooks free a block's weights only after the block's backward, so all weights of
    the group would be gathered at the same time. Therefore, this function gathers a block's weights while the previous
    block runs, and frees them after the block. The last two blocks keep their weights: their backward comes first."""
    is_forward = next(times) == 0
    for number, (block, rope_TK2, documents) in enumerate(calls):
        if is_forward:
            x_ND = block(x_ND, rope_TK2, documents)
            continue
        for unit in _units(block):
            unit.unshard()
        for unit in _units(*(following for following, *_ in calls[number + 1 : number + 2])):
            unit.unshard(async_op=True)
        x_ND = block.forward(x_ND, rope_TK2, documents)
        for unit in _units(block) if reshards and number < len(calls) - 2 else ():
            unit.reshard()
    return x_ND


def _units(*blocks: nn.Module) -> list[FSDPModule]:
    return [module for block in blocks for module in block.modules() if isinstance(module, FSDPModule)]
