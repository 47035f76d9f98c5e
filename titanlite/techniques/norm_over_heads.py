"""RMSNorm of all heads of queries or keys together (OLMoE, arXiv:2409.02060), with heads sharded by tensor parallel."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from titanlite.parallel.tensor import RowsParallel


class NormOverHeads(nn.RMSNorm):
    def shard_weights(self, tensor: DeviceMesh | None, expert: DeviceMesh | None) -> None:
        if tensor:
            parallelize_module(self, tensor, RowsParallel(norm_over_heads))


def norm_over_heads(module: nn.Module, mesh: DeviceMesh, x: Tensor) -> Tensor:
    """Return this rank's heads, normalized by the mean square over the heads of all tensor-parallel ranks."""
    wide = DTensor.from_local(x, mesh, [Shard(1)]).to(torch.promote_types(x.dtype, torch.float32))
    mean = wide.square().sum(-1, keepdim=True).redistribute(placements=[Replicate()]) / wide.shape[-1]
    return (wide * torch.rsqrt(mean + module.eps) * module.weight).to_local().to(x.dtype)
