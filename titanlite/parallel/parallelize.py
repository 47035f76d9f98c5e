"""The one place that states the order in which parallelisms are applied to a model."""

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

    1. Tensor parallel replaces weights by DTensors on its axis, so everything after it sees this rank's heads and
       channels only. Experts are sharded with it, over its axis or their own.
    2. Context parallel replaces the inner product of attention, which gets this rank's heads from step 1.
    3. Activation checkpointing wraps what a block computes, steps 1 and 2 included.
    4. Compile takes a block with all of this in it, so that the compiler sees what is recomputed. It comes before FSDP,
       whose hooks cannot be traced.
    5. FSDP comes behind it, because fully_shard takes the parameters as everything before it left them.
    6. Activation checkpointing over groups of blocks comes last, since it gathers the weights to recompute with.

    Float8 comes before all of it, since it replaces layers; and the model is split into pipeline stages before that.
    All sections are of a resolved config: attention_backend is "auto" only where torch's own attention is enough: there
    is no context parallel, no document mask, no sliding window shorter than the sequence, and no sinks.
    """
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
    """Shard the weights of a model, or of one pipeline stage, over a one-dimensional mesh, in place; None: do not.

    `expert_mesh`: the ranks that experts are partitioned over; None: experts are sharded over `tensor_mesh`.
    """
    if tensor_mesh:
        from titanlite.parallel.tensor import apply_tensor_parallel

        apply_tensor_parallel(stage, tensor_mesh)
    for module in [module for module in stage.modules() if isinstance(module, ShardsWeights)]:
        module.shard_weights(tensor_mesh, expert_mesh)
