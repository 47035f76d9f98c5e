"""RMSNorm of all heads of queries or keys together (OLMoE, arXiv:2409.02060), under tensor parallel."""

import functools

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from titanlite.parallel.tensor import VocabularyParallel


def shard_norms(attention: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the norms of queries and of keys over a one-dimensional mesh, in place."""
    parallelize_module(attention, mesh, {"q_norm": NormOverHeads(), "k_norm": NormOverHeads()})


class NormOverHeads(ParallelStyle):
    """Shards an RMSNorm of all heads together, of which each rank has some: the mean of squares is one over ranks."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        distribute_module(module, mesh, VocabularyParallel._shard)
        module.forward = functools.partial(self._norm, module, mesh)
        return module

    @staticmethod
    def _norm(module: nn.Module, mesh: DeviceMesh, x: Tensor) -> Tensor:
        wide = DTensor.from_local(x, mesh, [Shard(1)]).to(torch.promote_types(x.dtype, torch.float32))
        mean = wide.square().sum(-1, keepdim=True).redistribute(placements=[Replicate()]) / wide.shape[-1]
        return (wide * torch.rsqrt(mean + module.eps) * module.weight).to_local().to(x.dtype)
