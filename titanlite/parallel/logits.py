"""Logits of single tokens, under any sharding of the vocabulary.
Shapes: B sequences, N tokens, D model width, V vocabulary."""

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def logits_at(x_ND: Tensor, weight_VD: Tensor, tokens_B: Tensor) -> Tensor:
    """Return the logits of the tokens with indices `tokens_B`, [B, V] on every rank. An output head whose `loss` is
    `logits_at` takes the indices as its targets and computes only these tokens' logits."""
    if not isinstance(weight_VD, DTensor):
        return F.linear(x_ND[tokens_B], weight_VD)
    logits = F.linear(x_ND.to_local()[tokens_B], weight_VD.to_local())
    return DTensor.from_local(logits, weight_VD.device_mesh, [Shard(-1)]).full_tensor()
