"""Data parallelism, all of it through fully_shard (FSDP2, arXiv:2304.11277): DDP, ZeRO-1 to ZeRO-3, HSDP.

docs/parallelism.md has the table from those names to the options. One rank takes the same path, which also carries
the mixed precision.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from titanlite.config.schema import Parallelism, Training
from titanlite.model import Llama
from titanlite.parallel.mesh import Layout
from titanlite.parallel.shards import local_shard


def apply_fsdp(model: Llama, layout: Layout, parallelism: Parallelism, training: Training) -> None:
    """Shard every parameter of a model or a pipeline stage over the mesh's axis fsdp and replicate it over
    dp_replicate, one block at a time; expert-parallel experts over efsdp. The sections are of a resolved config."""
    param_dtype = getattr(torch, training.mixed_precision_param)
    reduce_dtype = getattr(torch, training.mixed_precision_reduce)
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if training.enable_cpu_offload else OffloadPolicy()
    settings = {
        **_mesh_settings(layout.mesh, "fsdp"),
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
        own_settings = _own_settings(block, layout, training)
        for module, changed in own_settings.items():
            fully_shard(module, reshard_after_forward=reshard, **settings | changed)
            _gather_with(block, module)
        fully_shard(block, reshard_after_forward=reshard, **settings)
        units.append([*own_settings, block])
        mesh_of |= {module: changed["mesh"] for module, changed in own_settings.items() if "mesh" in changed}
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


def _mesh_settings(mesh: DeviceMesh, axis: str) -> dict[str, Any]:
    """Return the axes that weights are sharded over and replicated over, as an argument of fully_shard, and which
    dimension is sharded. Two axes are hybrid sharding (HSDP), of which the former may be of size 1."""
    both = mesh["dp_replicate", axis] if mesh["dp_replicate"].size() > 1 else mesh[axis]
    return {"mesh": both, "shard_placement_fn": functools.partial(_dimension_of_experts, mesh[axis].size())}


def _dimension_of_experts(n_ranks: int, parameter: nn.Parameter) -> Shard | None:
    """Return the dimension to shard over the ranks if the experts, which are stacked, cannot be divided among them. By
    default it is the first, as that of every matrix."""
    if parameter.dim() < 3:
        return None
    sharded = [placement.dim for placement in getattr(parameter, "placements", ()) if placement.is_shard()]
    n_experts, *sides = local_shard(parameter).shape
    fits = [dim for dim, side in enumerate(sides, 1) if dim not in sharded and side % n_ranks == 0]
    return Shard(fits[0]) if n_experts % n_ranks and fits else None


def _own_settings(block: nn.Module, layout: Layout, training: Training) -> dict[nn.Module, dict[str, Any]]:
    """Return the modules of a block that are not sharded with it, and their settings of fully_shard: experts under
    expert parallel are on another mesh, and a router's weight is not rounded to the precision of mixed precision."""
    modules, changed = dict(block.feed_forward.named_children()), {}
    if "experts" in modules and layout.expert_mesh:
        changed[modules["experts"]] = _mesh_settings(layout.expert_mesh, "efsdp")
    if "router" in modules and training.mixed_precision_param != training.dtype:
        wide = MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=False)
        changed[modules["router"]] = {"mp_policy": wide}
    return changed


def _gather_with(block: nn.Module, module: nn.Module) -> None:
    """Have FSDP gather the weights of a module of a block before the block and not before the module, so that neither
    activation checkpointing, which would run FSDP's operators again, nor the compiler sees it.

    Private: the handles of a module's two hooks (tried on torch 2.11 and 2.13).
    """
    state = module._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    state._pre_forward_hook_handle = block.register_forward_pre_hook(state._pre_forward, with_kwargs=True)
    state._post_forward_hook_handle = block.register_forward_hook(state._post_forward)


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
    """Tell FSDP what the backward of this gradient accumulation step does with gradients and weights.

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
