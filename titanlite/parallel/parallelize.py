"""Apply all parallelisms to a model, in the only correct order."""

from torch.distributed.device_mesh import DeviceMesh

from titanlite.config.schema import ActivationCheckpoint, Compile, Parallelism, Training
from titanlite.model import Llama
from titanlite.parallel.activation_checkpoint import apply_activation_checkpoint
from titanlite.parallel.compile import apply_compile
from titanlite.parallel.fsdp import apply_fsdp
from titanlite.parallel.mesh import Layout
from titanlite.parallel.own_rules import ShardsWeights


def parallelize(
    stage: Llama,
    layout: Layout,
    *,
    parallelism: Parallelism,
    training: Training,
    activation_checkpoint: ActivationCheckpoint,
    compile: Compile,
) -> None:
    """Parallelize a model, or one pipeline stage of it, on the meta device over the mesh, in place.

    1. Tensor parallel replaces weights by DTensors on the axis tp: later steps see only this rank's heads and channels.
       Step 1 also shards experts, over the axis tp or ep.
    2. Context parallel replaces the inner attention, which gets this rank's heads from step 1.
    3. Activation checkpointing wraps the forward of a block, steps 1 and 2 included.
    4. Compile takes a checkpointed block, so that the compiler sees what is recomputed. FSDP comes after, since its
       hooks cannot be traced.
    5. FSDP comes next, because fully_shard must find the parameters that steps 1 to 4 have put into the model.
    6. Activation checkpointing over groups of blocks comes after FSDP, because it gathers weights to recompute blocks.

    Before step 1, the model is split into pipeline stages, and float8 replaces linear layers. The sections are from a
    resolved config, where attention_backend is "auto" only if torch's attention suffices: if there is no context
    parallel, document mask or sinks, and no sliding window shorter than a sequence."""
    tensor_mesh = layout.mesh["tp"] if layout.mesh["tp"].size() > 1 else None
    shard_weights(stage, tensor_mesh, layout.expert_mesh["ep"] if layout.expert_mesh else None)
    if training.attention_backend != "auto":
        from titanlite.parallel.tiled_attention import TiledAttention

        options = layout.ring_group, layout.ulysses_group, training.attention_backend
        for block in stage.layers.values():
            inner = block.attention.inner_attention
            block.attention.inner_attention = TiledAttention(*options, inner.window, inner.sinks)
    apply_activation_checkpoint(stage, activation_checkpoint)
    if compile.enable:
        if tensor_mesh is not None and parallelism.enable_async_tensor_parallel:
            from titanlite.techniques.async_tensor_parallel import enable_async_tensor_parallel

            enable_async_tensor_parallel(tensor_mesh.get_group())
        apply_compile(stage, compile)
    apply_fsdp(stage, layout, parallelism, training)
    if activation_checkpoint.layers_per_checkpoint > 1:
        from titanlite.techniques.grouped_checkpoint import checkpoint_groups

        checkpoint_groups(stage, activation_checkpoint.layers_per_checkpoint, parallelism)


def shard_weights(stage: Llama, tensor_mesh: DeviceMesh | None, expert_mesh: DeviceMesh | None) -> None:
    """Shard the weights of a model or a pipeline stage over the one-dimensional `tensor_mesh`, if any, in place.
    `expert_mesh`: the ranks over which experts are partitioned; None: experts are sharded over `tensor_mesh`."""
    if tensor_mesh:
        from titanlite.parallel.tensor import apply_tensor_parallel

        apply_tensor_parallel(stage, tensor_mesh)
    for module in [module for module in stage.modules() if isinstance(module, ShardsWeights)]:
        module.shard_weights(tensor_mesh, expert_mesh)
