"""Data parallelism, all of it through fully_shard (FSDP2, arXiv:2304.11277): replicate, ZeRO-1, -2, -3, HSDP.

docs/data_parallel.md has the table from those names to the settings. At one rank the same path carries the mixed
precision, so there is no other one.
"""

from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from titanlite.model import Llama

Reshard = Literal["always", "never"] | int


def apply_fsdp(
    model: Llama,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: Reshard,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    cpu_offload: bool,
    forward_prefetch: int,
    backward_prefetch: int,
) -> None:
    """Shard every parameter of a model or a stage over `fsdp` and replicate it over `dp_replicate`, a block at a time.

    Args:
        mesh: with the axes dp_replicate and fsdp.
        reshard_after_forward: see config.Parallelism.fsdp_reshard_after_forward.
        param_dtype: type in which weights are gathered and the model computes.
        reduce_dtype: type in which gradients are accumulated and reduced.
        cpu_offload: keep shards in host memory.
        forward_prefetch, backward_prefetch: see config.Parallelism.fsdp_forward_prefetch.
    """
    replicated = mesh["dp_replicate"].size() > 1
    settings = {
        # Two axes are hybrid sharding; one of them may be of size 1.
        "mesh": mesh["dp_replicate", "fsdp"] if replicated else mesh["fsdp"],
        # Inputs are not cast: activations have the weights' type already, and the rotary table keeps its precision.
        "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if cpu_offload else OffloadPolicy(),
    }
    reshard = reshard_after_forward if isinstance(reshard_after_forward, int) else reshard_after_forward == "always"
    for block in model.layers.values():
        fully_shard(block, reshard_after_forward=reshard, **settings)
    # The backward of the last unit comes at once, so gathering its weights twice would save no memory.
    head = [module for module in (model.norm, model.output) if module is not None]
    if model.tied:
        fully_shard([model.tok_embeddings, *head], reshard_after_forward=False, **settings)
    else:
        if model.tok_embeddings is not None:
            fully_shard(model.tok_embeddings, reshard_after_forward=reshard, **settings)
        if head:
            fully_shard(head, reshard_after_forward=False, **settings)
    fully_shard(model, reshard_after_forward=reshard, **settings)
    blocks = list(model.layers.values())
    for number, block in enumerate(blocks):
        if forward_prefetch:
            block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + forward_prefetch])
        if backward_prefetch:
            block.set_modules_to_backward_prefetch(blocks[max(number - backward_prefetch, 0) : number][::-1])
    for module in _units(model):
        # The loss is divided by the global number of tokens before the backward, so gradients are summed and nothing
        # else. Plain sums, since gloo lacks NCCL's pre-multiplied ones.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def prepare_accumulation_step(
    model: nn.Module,
    *,
    last: bool,
    reshard_after_forward: Reshard,
    reduce_gradients: Literal["every_accumulation_step", "last_accumulation_step"],
) -> None:
    """Tell FSDP what the backward of this microstep does with gradients and weights.

    Args:
        last: whether it is the last one of the optimizer step.
        reshard_after_forward: "never" also keeps the weights gathered between microsteps.
        reduce_gradients: see config.Parallelism.fsdp_reduce_gradients.
    """
    for module in _units(model):
        module.set_requires_gradient_sync(last or reduce_gradients == "every_accumulation_step", recurse=False)
        # over replicas, the shards' sums need to travel only once
        module.set_requires_all_reduce(last, recurse=False)
        module.set_reshard_after_backward(last or reshard_after_forward != "never", recurse=False)


def reshard(model: nn.Module) -> None:
    """Free all gathered weights, so that `model.parameters()` are the shards, after a forward without backward."""
    for module in _units(model):
        module.reshard()


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
