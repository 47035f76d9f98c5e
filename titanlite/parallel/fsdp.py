"""DDP, ZeRO-1 to ZeRO-3 and HSDP by fully_shard (FSDP2, arXiv:2304.11277). A single rank uses it to cast weights."""

import functools

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from titanlite.config.schema import Parallelism, Training
from titanlite.model import Llama
from titanlite.parallel.mesh import Layout
from titanlite.parallel.own_rules import RunsUncompiled
from titanlite.torch_workarounds import NothingToReduce


def apply_fsdp(model: Llama, layout: Layout, parallelism: Parallelism, training: Training) -> None:
    """Shard every parameter of a model or a pipeline stage over the mesh's axis fsdp, and replicate it over
    dp_replicate. Each block is an FSDP unit. `parallelism` and `training` are sections of a resolved config."""
    param_dtype = getattr(torch, training.mixed_precision_param)
    reduce_dtype = getattr(torch, training.mixed_precision_reduce)
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if training.enable_cpu_offload else OffloadPolicy()
    settings = {
        "mesh": axes_of(layout.mesh, "fsdp"),
        # Inputs are not cast: activations have the weights' dtype already, and the rotary table must stay in float32.
        "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False),
        "offload_policy": offload,
    }
    reshard = {"always": True, "never": False}.get(option := parallelism.fsdp_reshard_after_forward, option)
    of_block = settings | {"reshard_after_forward": reshard}
    blocks, units, mesh_of = list(model.layers.values()), list[list[nn.Module]](), dict[nn.Module, DeviceMesh]()
    for block in blocks:
        units.append([block])
        if isinstance(block.feed_forward, RunsUncompiled):
            own = block.feed_forward.fully_shard_block(block, layout, training, **of_block)
            units[-1], mesh_of = [*own, block], mesh_of | own
        else:
            fully_shard(block, **of_block)
    # The last unit's backward follows its forward at once, so resharding in between would gather its weights twice.
    head = [module for module in (model.tok_embeddings if model.tied else None, model.norm, model.output) if module]
    if model.tok_embeddings and not model.tied:
        fully_shard(model.tok_embeddings, **of_block)
    if head:
        fully_shard(head, reshard_after_forward=False, **settings)
    fully_shard(model, **of_block)
    forward, backward = parallelism.fsdp_forward_prefetch, parallelism.fsdp_backward_prefetch  # 0: FSDP's default
    for index, block in enumerate(blocks):
        later, earlier = units[index + 1 : index + 1 + forward], units[max(index - backward, 0) : index][::-1]
        block.set_modules_to_forward_prefetch([module for unit in later for module in unit])
        block.set_modules_to_backward_prefetch([module for unit in earlier for module in unit])
    for module in _units(model):
        # Gradients are summed, not averaged: the loss is divided by the global token count, and gloo has no averages.
        module.set_force_sum_reduction_for_comms(True)
        if mesh_of.get(module, settings["mesh"]).size() > 1:
            module.set_gradient_divide_factor(1.0)
        else:  # one rank: a divide factor, even of 1, would cost a pass over the gradients
            module.set_custom_reduce_scatter(NothingToReduce())


def axes_of(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """Return the submesh for fully_shard: dp_replicate and `axis` under HSDP, otherwise `axis` alone."""
    return mesh["dp_replicate", axis] if mesh["dp_replicate"].size() > 1 else mesh[axis]


def use_in_place(model: nn.Module, parallelism: Parallelism, training: Training) -> None:
    """If there is one shard, and the weights are in the compute dtype, let fully_shard use the weights without copies,
    and on a single rank also the gradients. Call this before the first forward. fully_shard calls two methods of a
    local tensor if they exist: `fsdp_pre_all_gather` returns the tensors to gather (here an empty one), and
    `fsdp_post_all_gather` the gathered weight. Uses the private `_local_tensor` (tested with torch 2.11 and 2.13)."""
    if training.mixed_precision_param != training.dtype or training.enable_cpu_offload:
        return
    shards = list(model.parameters())
    param_dtype, reduce_dtype = (getattr(torch, name) for name in (training.dtype, training.mixed_precision_reduce))
    nothing = (shards[0]._local_tensor.new_empty(0),)
    for shard in shards:
        local, axes = shard._local_tensor, zip(shard.device_mesh.mesh_dim_names, shard.device_mesh.shape, strict=True)
        is_plain = local.dtype == param_dtype and not hasattr(local, "fsdp_pre_all_gather")
        if is_plain and all(n == 1 for name, n in axes if name.endswith("fsdp")):
            local.fsdp_pre_all_gather = lambda mesh: (nothing, None)
            local.fsdp_post_all_gather = lambda *_, out=None, own=local: (own, ()) if out is None else None
    # Move gradients to the shards without a copy, unless fully_shard would round them or sum them in a wider dtype.
    widest = reduce_dtype if parallelism.fsdp_reduce_gradients == "every_accumulation_step" else param_dtype
    if parallelism.world_size == 1 and reduce_dtype == torch.promote_types(param_dtype, widest):
        for module in _units(model):
            module.unshard()
        for shard, weight in zip(shards, model.parameters(), strict=True):
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(functools.partial(_move_gradient, shard))
        reshard(model)


def _move_gradient(shard: nn.Parameter, weight: nn.Parameter) -> None:
    if shard.grad is None:
        shard.grad = DTensor.from_local(weight.grad, shard.device_mesh, shard.placements, run_check=False)
    else:
        shard.grad.to_local().add_(weight.grad)
    weight.grad = None


def prepare_accumulation_step(model: nn.Module, parallelism: Parallelism, *, last: bool) -> None:
    """Tell FSDP whether the backward of this gradient accumulation step reduces gradients and reshards weights. Under
    fsdp_reshard_after_forward = "never", weights stay gathered until the backward of the `last` accumulation step."""
    reduces = last or parallelism.fsdp_reduce_gradients == "every_accumulation_step"
    reshards = last or parallelism.fsdp_reshard_after_forward != "never"
    NothingToReduce.release()
    for module in _units(model):
        module.set_requires_gradient_sync(reduces, recurse=False)
        module.set_requires_all_reduce(last, recurse=False)  # all-reduce over dp_replicate only once per step
        module.set_reshard_after_backward(reshards, recurse=False)


def reshard(model: nn.Module) -> None:
    """Free all gathered weights after a forward without backward, so that `model.parameters()` returns shards again."""
    for module in _units(model):
        module.reshard()


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
