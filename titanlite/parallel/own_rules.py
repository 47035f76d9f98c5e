"""Interfaces of modules that parallelize.py lets shard or compile themselves."""

from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh


@runtime_checkable
class ShardsWeights(Protocol):
    """A module that shards its weights itself, so that tensor.py's plan leaves them out."""

    def shard_weights(self, tensor: DeviceMesh | None, expert: DeviceMesh | None) -> None:
        """Shard the weights over one-dimensional meshes, in place. None: no tensor or no expert parallelism."""


@runtime_checkable
class RunsUncompiled(Protocol):
    """A `feed_forward` that torch.compile cannot trace. Its block is compiled and checkpointed as two halves."""

    def compile_operators(self, backend: str) -> None:
        """Compile those operators of the module that torch.compile can trace."""

    def fully_shard_block(self, block: nn.Module, *sections: Any, **settings: Any) -> dict[nn.Module, DeviceMesh]:
        """Apply fully_shard with `settings` to the module's block. Return the mesh of each submodule that became an
        FSDP unit of its own. `sections`: the Layout and the section [training]."""
