"""FSDP of blocks with experts: the experts and the router of a block may be separate FSDP units."""

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from titanlite.config.schema import Training
from titanlite.parallel.fsdp import axes_of
from titanlite.parallel.mesh import Layout
from titanlite.parallel.shards import local_shard
from titanlite.torch_workarounds import gather_with


def shard_block_with_experts(
    block: nn.Module, layout: Layout, training: Training, **settings: Any
) -> dict[nn.Module, DeviceMesh]:
    """Shard a block by FSDP, and return the block's inner FSDP units with their meshes. Under expert parallel, experts
    are sharded over the mesh axis efsdp. A router's weight stays unrounded under mixed precision."""
    modules, units = dict(block.feed_forward.named_children()), {}
    settings["shard_placement_fn"] = functools.partial(_dimension_of_experts, layout.mesh["fsdp"].size())
    if "experts" in modules and layout.expert_mesh:
        over = functools.partial(_dimension_of_experts, layout.expert_mesh["efsdp"].size())
        own = {"shard_placement_fn": over, "mesh": axes_of(layout.expert_mesh, "efsdp")}
        units[modules["experts"]] = settings | own
    if "router" in modules and training.mixed_precision_param != training.dtype:
        wide = MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=False)
        units[modules["router"]] = settings | {"mp_policy": wide}
    for module, own_settings in units.items():
        fully_shard(module, **own_settings)
        gather_with(block, module)
    fully_shard(block, **settings)
    return {module: own_settings["mesh"] for module, own_settings in units.items()}


def _dimension_of_experts(n_ranks: int, parameter: nn.Parameter) -> Shard | None:
    """Return which dimension of stacked experts to shard: the first (None), unless `n_ranks` divides only another."""
    if parameter.dim() < 3:
        return None
    sharded = [placement.dim for placement in getattr(parameter, "placements", ()) if placement.is_shard()]
    n_experts, *sides = local_shard(parameter).shape
    fits = [dim for dim, side in enumerate(sides, 1) if dim not in sharded and side % n_ranks == 0]
    return Shard(fits[0]) if n_experts % n_ranks and fits else None
