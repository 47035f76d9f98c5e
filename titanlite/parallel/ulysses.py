"""Before attention, an all-to-all over Ulysses ranks turns sequence shards into head shards; after it, another
all-to-all turns them back. Each rank computes some heads for the tokens of all Ulysses ranks (arXiv:2309.14509).
Shapes: B batch, T tokens of this rank, S tokens of all U Ulysses ranks, N heads in a message, K head_dim."""

import torch
import torch.distributed as dist
from torch import Tensor


def sequence_to_heads(tensors: list[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Turn [B, T, heads, K] tensors into one [B, S, N, K] tensor: this rank's heads, for all Ulysses ranks' tokens."""
    send_UBTNK = torch.cat([x.unflatten(2, (group.size(), -1)).movedim(2, 0) for x in tensors], dim=3)
    return _all_to_all(send_UBTNK, group).movedim(0, 1).flatten(1, 2)


def heads_to_sequence(tensors: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Turn [B, S, heads, K] tensors into [B, T, heads x U, K] tensors: all heads, for this rank's tokens."""
    send_UBTNK = torch.cat([x.unflatten(1, (group.size(), -1)).movedim(1, 0) for x in tensors], dim=3)
    received = _all_to_all(send_UBTNK, group).split([x.shape[2] for x in tensors], dim=3)
    # Clone each output: the splits may share memory, but the outputs of a custom operator must not.
    return [x.movedim(0, 2).clone(memory_format=torch.contiguous_format).flatten(2, 3) for x in received]


def _all_to_all(send: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    return received
