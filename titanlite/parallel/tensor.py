"""Tensor parallel (TP), sequence parallel and loss parallel: one explicit plan for parallelize_module (Megatron-LM,
arXiv:1909.08053 and arXiv:2205.05198).

Linear layers that produce heads, feed-forward channels or logits are sharded column-wise, and wo and w2, which sum over
heads or channels, row-wise. In norms and residuals, each rank has a shard of the sequence: an all-gather precedes each
attention and feed-forward layer, a reduce-scatter follows, and no two ranks store the same activations."""

import functools
from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from titanlite.model import Llama
from titanlite.parallel.own_rules import ShardsWeights
from titanlite.torch_workarounds import ignore_warnings_of_views, look_up

SEQUENCE = Shard(0)  # placement of an activation [N, D] whose tokens are sharded
HEADS = 2  # index of the dimension of heads in [B, T, heads, K]
FULL = Replicate()


class RowsParallel(ParallelStyle):
    """Shards a module's weight over its first dimension: the vocabulary, or the channels of a norm. `forward(module,
    mesh, *inputs)` replaces the module's forward."""

    def __init__(self, forward: Callable[..., Tensor]):
        self.forward = forward

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        weight = distribute_tensor(module.weight, mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter("weight", nn.Parameter(weight))
        module.forward = functools.partial(self.forward, module, mesh)
        return module


def project(module: nn.Module, mesh: DeviceMesh, x_ND: DTensor, targets_N: Tensor | None = None) -> Tensor:
    """Return the output head's logits, gathered over the vocabulary, or the loss if there are targets. The sequence
    dimension of the input is gathered first."""
    output = type(module).forward(module, x_ND.redistribute(placements=[FULL]), targets_N)
    return output.redistribute(placements=[FULL]).to_local() if targets_N is None else output


# A bias of a column-wise layer is sharded like the layer's outputs. Every rank has the full bias of a row-wise layer,
# and torch adds this bias on one rank, before the sum over ranks.
# fmt: off
BLOCK_STYLES: dict[str, ParallelStyle] = {
    "attention_norm":   SequenceParallel(sequence_dim=0),
    # Of the inputs (x, rope, documents), x is gathered; every rank already has all of rope and documents.
    "attention":        PrepareModuleInput(input_layouts=(SEQUENCE, None, None),
                                           desired_input_layouts=(FULL, None, None)),
    "attention.wq":     ColwiseParallel(),
    "attention.wk":     ColwiseParallel(),
    "attention.wv":     ColwiseParallel(),
    # Each rank normalizes all channels of each head in its shard.
    "attention.q_norm": SequenceParallel(sequence_dim=HEADS, use_local_output=True),
    "attention.k_norm": SequenceParallel(sequence_dim=HEADS, use_local_output=True),
    "attention.wo":     RowwiseParallel(output_layouts=SEQUENCE),
    "attention_post_norm": SequenceParallel(sequence_dim=0, use_local_output=True),
    "ffn_norm":         SequenceParallel(sequence_dim=0),
    "feed_forward":     PrepareModuleInput(input_layouts=(SEQUENCE,), desired_input_layouts=(FULL,)),
    "feed_forward.w1":  ColwiseParallel(),
    "feed_forward.w3":  ColwiseParallel(),
    "feed_forward.w2":  RowwiseParallel(output_layouts=SEQUENCE),
    "ffn_post_norm":    SequenceParallel(sequence_dim=0, use_local_output=True),
}
ENDS: dict[str, ParallelStyle] = {
    "tok_embeddings":   RowsParallel(look_up),
    "position_embeddings": RowsParallel(look_up),
    "norm":             SequenceParallel(sequence_dim=0),
    "output":           RowsParallel(project),
}
# fmt: on


def apply_tensor_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Shard a model or a pipeline stage over a one-dimensional mesh, in place, except its ShardsWeights modules."""
    ignore_warnings_of_views()
    parallelize_module(model, mesh, {name: style for name, style in ENDS.items() if getattr(model, name) is not None})
    for block in model.layers.values():
        modules = {name: each for name, each in block.named_modules() if not isinstance(each, nn.Identity)}
        own = [f"{name}." for name, module in modules.items() if isinstance(module, ShardsWeights)]
        names = {name for name in modules if not f"{name}.".startswith(tuple(own))}
        styles = {**BLOCK_STYLES, **block.styles}
        parallelize_module(block, mesh, {name: style for name, style in styles.items() if name in names})
    model.tie()
