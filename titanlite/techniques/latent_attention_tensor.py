"""Tensor parallelism of latent attention: heads are sharded; latents, which all heads share, are not. Each rank
computes the latents of its own shard of the sequence, with replicated weights, and its own heads from the gathered
latents. The wider residual stream is gathered only if queries have no latent."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from titanlite.techniques.latent_attention import LatentAttention

SEQUENCE = Shard(0)  # placement of activations [N, D] whose tokens are sharded over the tensor-parallel ranks

# fmt: off
PLAN: dict[str, ParallelStyle] = {
    "wq":      ColwiseParallel(input_layouts=SEQUENCE),
    "wq_a":    SequenceParallel(sequence_dim=0),
    "q_norm":  SequenceParallel(sequence_dim=0),
    "wq_b":    ColwiseParallel(),
    "wkv_a":   SequenceParallel(sequence_dim=0),
    "kv_norm": SequenceParallel(sequence_dim=0),
    "wkv_b":   ColwiseParallel(),
    "wo":      RowwiseParallel(output_layouts=SEQUENCE),
}
# fmt: on


class ShardableLatentAttention(LatentAttention):
    def shard_weights(self, tensor: DeviceMesh | None, expert: DeviceMesh | None) -> None:
        if tensor:
            plan = {name: style for name, style in PLAN.items() if getattr(self, name) is not None}
            parallelize_module(self, tensor, plan)
            self.latents = functools.partial(_gathered, self.latents)


def _gathered(latents: Callable[[DTensor], list[DTensor]], x_ND: DTensor) -> list[Tensor]:
    """Return the latents of all tokens. In the backward, one collective sums and scatters the heads' gradients."""
    shards = latents(x_ND)
    full = torch.cat(shards, dim=-1).redistribute(placements=[Replicate()])
    *for_weights, k_NR = full.split([shard.shape[-1] for shard in shards], dim=-1)
    return [*for_weights, k_NR.to_local(grad_placements=[Partial()])]
