"""The only place where the order of parallelisms stands."""

import torch

from titanlite.mesh import Layout
from titanlite.model import Llama
from titanlite.parallel.context import apply_context_parallel
from titanlite.parallel.fsdp import Reshard, apply_fsdp
from titanlite.parallel.tensor import apply_tensor_parallel


def parallelize(
    model: Llama,
    layout: Layout,
    *,
    loss_parallel: bool,
    attention_kernel: str,
    document_mask: bool,
    reshard_after_forward: Reshard,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    cpu_offload: bool,
) -> None:
    """Cut a model, or a pipeline's stage of it, on the meta device over the mesh, in place.

    1. Tensor: replaces weights by DTensors on its axis, so everything after it sees a layer's share of heads and
       channels.
    2. Context: replaces the inner product of attention, which gets this rank's heads from step 1.
    3. Data: last, because fully_shard takes the parameters as everything before it left them.

    Stages are cut before all of it, since a module that is not there need not be parallelized.
    """
    tensor_mesh = layout.mesh["tp"]
    if tensor_mesh.size() > 1:
        apply_tensor_parallel(model, tensor_mesh, loss_parallel=loss_parallel)
    if layout.ring_group or layout.ulysses_group or document_mask:
        apply_context_parallel(
            model, ring_group=layout.ring_group, ulysses_group=layout.ulysses_group, kernel=attention_kernel
        )
    apply_fsdp(
        model,
        layout.mesh,
        reshard_after_forward=reshard_after_forward,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        cpu_offload=cpu_offload,
    )
