"""The only place where the order of parallelisms stands."""

from collections.abc import Collection
from typing import Literal

import torch

from titanlite.model import Llama
from titanlite.parallel.activation_checkpoint import Mode, apply_activation_checkpoint
from titanlite.parallel.compile import apply_compile
from titanlite.parallel.context import apply_context_parallel
from titanlite.parallel.fsdp import Reshard, apply_fsdp
from titanlite.parallel.mesh import Layout
from titanlite.parallel.tensor import apply_tensor_parallel


def parallelize(
    model: Llama,
    layout: Layout,
    *,
    attention_backend: str,
    checkpoint_mode: Mode,
    checkpoint_option: Literal["op"] | int,
    memory_budget: float,
    compile_components: Collection[str],
    compile_backend: Literal["inductor", "aot_eager"],
    async_tensor_parallel: bool,
    reshard_after_forward: Reshard,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    cpu_offload: bool,
    forward_prefetch: int,
    backward_prefetch: int,
) -> None:
    """Cut a model, or a pipeline's stage of it, on the meta device over the mesh, in place.

    1. Tensor: replaces weights by DTensors on its axis, so everything after it sees a layer's share of heads and
       channels.
    2. Context: replaces the inner product of attention, which gets this rank's heads from step 1.
    3. Activation checkpointing: what a block computes, with 1 and 2 in it.
    4. Compile: a block with all of this in it, so that the compiler sees what is computed again; but without FSDP's
       hooks, which cannot be traced.
    5. Data: last, because fully_shard takes the parameters as everything before it left them.

    Float8 comes before all of it, since it replaces layers; and stages are cut before that, since a module that is not
    there need not be replaced.

    Args:
        attention_backend: "auto": leave attention to torch, which needs one device, whole sequences and no documents.
        compile_components: empty: do not compile.
        The others: see the options of the same names in titanlite/config.py.
    """
    tensor_mesh = layout.mesh["tp"]
    if tensor_mesh.size() > 1:
        apply_tensor_parallel(model, tensor_mesh)
    if attention_backend != "auto":
        apply_context_parallel(
            model, ring_group=layout.ring_group, ulysses_group=layout.ulysses_group, kernel=attention_backend
        )
    apply_activation_checkpoint(model, mode=checkpoint_mode, option=checkpoint_option, budget=memory_budget)
    if compile_components:
        group = tensor_mesh.get_group() if async_tensor_parallel and tensor_mesh.size() > 1 else None
        apply_compile(model, components=compile_components, backend=compile_backend, async_tensor_group=group)
    apply_fsdp(
        model,
        layout.mesh,
        reshard_after_forward=reshard_after_forward,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        cpu_offload=cpu_offload,
        forward_prefetch=forward_prefetch,
        backward_prefetch=backward_prefetch,
    )
