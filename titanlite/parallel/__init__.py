"""The only place where the order of parallelisms stands."""

import torch
from torch.distributed.device_mesh import DeviceMesh

from titanlite.model import Llama
from titanlite.parallel.fsdp import Reshard, apply_fsdp


def parallelize(
    model: Llama,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: Reshard,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    cpu_offload: bool,
) -> None:
    """Cut a model on the meta device over the mesh, in place.

    1. Data: last, because fully_shard takes the parameters as everything before it left them.
    """
    apply_fsdp(
        model,
        mesh,
        reshard_after_forward=reshard_after_forward,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        cpu_offload=cpu_offload,
    )
