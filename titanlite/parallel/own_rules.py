"""Interfaces for modules of a block that the general rules of parallelize.py do not fit."""

from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh


@runtime_checkable
class ShardsWeights(Protocol):
    """A module that the literal table of tensor.py does not shard."""

    def shard_weights(self, tensor: DeviceMesh | None, expert: DeviceMesh | None) -> None:
        """Shard the weights over one-dimensional meshes, in place; None: there is no such axis."""


@runtime_checkable
class RunsUncompiled(Protocol):
    """A `feed_forward` that torch.compile cannot take: its block is compiled and checkpointed in two halves."""

    def compile_operators(self, backend: str) -> None:
        """Compile the operators that can be compiled."""

    def fully_shard_block(self, block: nn.Module, *sections: Any, **settings: Any) -> dict[nn.Module, DeviceMesh]:
        """Shard its block by fully_shard with `settings`. Return the other units of the block, with their meshes.
        `sections`: the Layout and the section [training]."""
