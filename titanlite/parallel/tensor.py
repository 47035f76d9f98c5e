"""Tensor, sequence and loss parallelism: one literal plan for parallelize_module (Megatron-LM, arXiv:1909.08053 and
arXiv:2205.05198).

Weights are cut by columns where a layer's outputs part (heads, feed-forward channels, vocabulary) and by rows where
they come together again. Outside of those layers, in the norms and residuals, each rank has a piece of the sequence: an
all-gather leads into each attention and feed-forward layer and a reduce-scatter out of it, and no activation exists
twice.
"""

import functools
import warnings
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from titanlite.model import Llama

SEQUENCE = Shard(1)  # of an activation [B, T, D]
WHOLE = Replicate()


class VocabularyParallel(ParallelStyle):
    """The output head's weight cut by vocabulary: the sequence is gathered on its way in, as a DTensor, from which
    loss.chunked_cross_entropy takes what it needs. Logits that are asked for are gathered."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, mesh, self._cut, self._gather_sequence, self._gather_logits)

    @staticmethod
    def _cut(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        weight = distribute_tensor(module.weight, mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter("weight", nn.Parameter(weight))

    @staticmethod
    def _gather_sequence(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        x_BTD, *others = inputs
        return x_BTD.redistribute(placements=[WHOLE]), *others  # a DTensor already, as the norm gives it

    @staticmethod
    def _gather_logits(module: nn.Module, output: Tensor, mesh: DeviceMesh) -> Tensor:
        return output.redistribute(placements=[WHOLE]).to_local() if isinstance(output, DTensor) else output


class VocabularyParallelEmbedding(ParallelStyle):
    """The embedding's weight cut by vocabulary: each rank looks up the tokens that it has rows for, and the sums over
    ranks are scattered over the sequence. (torch's RowwiseParallel does the same, but its backward makes the gradient
    of the whole vocabulary on each rank, in torch 2.11 to 2.15.)"""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        distribute_module(module, mesh, VocabularyParallel._cut)
        module.forward = functools.partial(self._look_up, module, mesh)
        return module

    @staticmethod
    def _look_up(module: nn.Module, mesh: DeviceMesh, tokens_BT: Tensor) -> Tensor:
        weight_VD = module.weight.to_local()
        own_BT = tokens_BT - mesh.get_local_rank() * len(weight_VD)  # number within this rank's rows
        here_BT = (own_BT >= 0) & (own_BT < len(weight_VD))
        part_BTD = F.embedding(own_BT.where(here_BT, 0), weight_VD).where(here_BT.unsqueeze(-1), 0)
        return DTensor.from_local(part_BTD, mesh, [Partial()]).redistribute(placements=[SEQUENCE]).to_local()


# fmt: off
BLOCK: dict[str, ParallelStyle] = {
    "attention_norm":  SequenceParallel(),
    # (x, rope, documents): the sequence is gathered, the others are whole on every rank and stay as they are.
    "attention":       PrepareModuleInput(input_layouts=(SEQUENCE, None, None),
                                          desired_input_layouts=(WHOLE, None, None)),
    "attention.wq":    ColwiseParallel(),
    "attention.wk":    ColwiseParallel(),
    "attention.wv":    ColwiseParallel(),
    "attention.wo":    RowwiseParallel(output_layouts=SEQUENCE),
    "ffn_norm":        SequenceParallel(),
    "feed_forward":    PrepareModuleInput(input_layouts=(SEQUENCE,), desired_input_layouts=(WHOLE,)),
    "feed_forward.w1": ColwiseParallel(),
    "feed_forward.w3": ColwiseParallel(),
    "feed_forward.w2": RowwiseParallel(output_layouts=SEQUENCE),
}
ENDS: dict[str, ParallelStyle] = {
    "tok_embeddings":  VocabularyParallelEmbedding(),
    "norm":            SequenceParallel(),
    "output":          VocabularyParallel(),
}
# fmt: on


def apply_tensor_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Cut a model or a stage over a one-dimensional mesh, in place."""
    # fully_shard warns of each module whose output is a view, since in-place operations on it would lose a hook. The
    # outputs of parallelized modules are views of DTensors, and the model has no in-place operation.
    warnings.filterwarnings("ignore", message=".* returned a view tensor", category=UserWarning)
    parallelize_module(model, mesh, {name: style for name, style in ENDS.items() if getattr(model, name) is not None})
    for block in model.layers.values():
        parallelize_module(block, mesh, BLOCK)
    model.tie()
    if model.tok_embeddings is not None:
        # Its output is still on its way when it is handed on (an AsyncCollectiveTensor). From such a one a compiled
        # block computes wrong gradients (torch 2.13); a copy has arrived.
        model.tok_embeddings.register_forward_hook(lambda module, inputs, output: output.clone())
