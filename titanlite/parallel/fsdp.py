"""Data parallelism, all of it through fully_shard (FSDP2, arXiv:2304.11277): DDP, ZeRO-1 to ZeRO-3, HSDP.

docs/parallelism.md has the table from those names to the options. One rank takes the same path, which also carries
the mixed precision.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from titanlite.config.schema import Parallelism, Training
from titanlite.model import Llama
from titanlite.parallel.mesh import Layout


def fully_shard_block(block: nn.Module, **settings: Any) -> dict[nn.Module, DeviceMesh]:
    """Shard a block as one unit. Return the modules of it that are units of their own, with their meshes: none."""
    fully_shard(block, **settings)
    return {}


def apply_fsdp(
    model: Llama,
    layout: Layout,
    parallelism: Parallelism,
    training: Training,
    shard_block: Callable[..., dict[nn.Module, DeviceMesh]] = fully_shard_block,
) -> None:
    """Shard every parameter of a model or a pipeline stage over the mesh's axis fsdp and replicate it over
    dp_replicate, one block at a time, by `shard_block`. The sections are of a resolved config."""
    param_dtype = getattr(torch, training.mixed_precision_param)
    reduce_dtype = getattr(torch, training.mixed_precision_reduce)
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if training.enable_cpu_offload else OffloadPolicy()
    settings = {
        "mesh": axes_of(layout.mesh, "fsdp"),
        # Inputs are not cast: activations have the weights' dtype already, and the rotary table keeps its precision.
        "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False),
        "offload_policy": offload,
    }
    option = parallelism.fsdp_reshard_after_forward
    reshard = option if isinstance(option, int) else option == "always"
    blocks = list(model.layers.values())
    units: list[list[nn.Module]] = []
    mesh_of = {}
    for block in blocks:
        own = shard_block(block, reshard_after_forward=reshard, **settings)
        units.append([*own, block])
        mesh_of |= own
    # The backward of the last unit comes at once, so resharding it would gather its weights twice and save no memory.
    head = [module for module in (model.norm, model.output) if module is not None]
    if model.tied:
        head.insert(0, model.tok_embeddings)
    elif model.tok_embeddings is not None:
        fully_shard(model.tok_embeddings, reshard_after_forward=reshard, **settings)
    if head:
        fully_shard(head, reshard_after_forward=False, **settings)
    fully_shard(model, reshard_after_forward=reshard, **settings)
    forward, backward = parallelism.fsdp_forward_prefetch, parallelism.fsdp_backward_prefetch  # 0: FSDP's default
    for index, block in enumerate(blocks):
        later, earlier = units[index + 1 : index + 1 + forward], units[max(index - backward, 0) : index][::-1]
        block.set_modules_to_forward_prefetch([*itertools.chain(*later)])
        block.set_modules_to_backward_prefetch([*itertools.chain(*earlier)])
    for module in _units(model):
        # The loss is divided by the global number of tokens before the backward, so gradients are only summed. Plain
        # sums, since gloo lacks NCCL's pre-multiplied ones.
        module.set_force_sum_reduction_for_comms(True)
        if mesh_of.get(module, settings["mesh"]).size() > 1:
            module.set_gradient_divide_factor(1.0)
        else:  # a factor, even of 1, is one more pass over the gradients
            module.set_custom_reduce_scatter(NothingToReduce())


def axes_of(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """Return the axes that weights are sharded over and replicated over: one, or two for hybrid sharding (HSDP), of
    which the second may be of size 1."""
    return mesh["dp_replicate", axis] if mesh["dp_replicate"].size() > 1 else mesh[axis]


class NothingToReduce:
    """Stands for the reduce-scatter of one rank, where fully_shard copies the gradients from a buffer to another. It
    takes both from here in turn, and gets the same one twice, so that there is nothing to copy.

    fully_shard asks for the input on the compute stream, whose allocator then owns the buffer, and for the output on
    the reduce-scatter stream. It lets go of the buffer before that stream has read it (torch 2.11 and 2.13), so the
    allocator is told of that stream, or the compute stream could overwrite gradients that are still to be accumulated.
    """

    buffer: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.buffer is None:
            self.buffer = torch.empty(*size, dtype=dtype, device=device)
            return self.buffer
        output, self.buffer = self.buffer, None
        if output.is_cuda:
            output.record_stream(torch.cuda.current_stream(output.device))
        return output


def prepare_accumulation_step(model: nn.Module, parallelism: Parallelism, *, last: bool) -> None:
    """Tell FSDP what the backward of this gradient accumulation step does with gradients and weights. (DDP has
    `no_sync` for it.)

    fsdp_reduce_gradients says when gradients are reduced; fsdp_reshard_after_forward = "never" also keeps the weights
    gathered between gradient accumulation steps. `last` is the last one of the optimizer step.
    """
    reduces = last or parallelism.fsdp_reduce_gradients == "every_accumulation_step"
    reshards = last or parallelism.fsdp_reshard_after_forward != "never"
    for module in _units(model):
        module.set_requires_gradient_sync(reduces, recurse=False)
        module.set_requires_all_reduce(last, recurse=False)  # over replicas, sums of shards are reduced only once
        module.set_reshard_after_backward(reshards, recurse=False)


def reshard(model: nn.Module) -> None:
    """Free all gathered weights after a forward without backward, so that `model.parameters()` are the shards."""
    for module in _units(model):
        module.reshard()


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
