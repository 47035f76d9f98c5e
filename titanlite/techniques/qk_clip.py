"""QK-clip (MuonClip, Kimi K2, arXiv:2507.20534, section 2.1) keeps attention logits from growing without bound.

If a query head's largest logit in the global batch was above the threshold, weights are scaled after the optimizer
step, so that the head's logits change by the factor gamma = threshold / largest:

- If each query head has its own KV head, the weights of queries and of keys are scaled by sqrt(gamma).
- If several query heads share a KV head, only the weights of queries are scaled, by gamma.
- In latent attention, the channels without rotary embedding are scaled by sqrt(gamma) in queries and keys. Rotated
  queries are scaled by gamma; rotated keys, which all heads share, are not scaled.

Attention backends return no logits, so a hook multiplies queries by keys again. This takes B x T x S x K floating-point
operations per query head, as many as one of the 7 products of attention's forward and backward.
Shapes: B batch, T local tokens, S sequence length, H query heads, G KV heads, M = H / G, K head_dim, L layers.
"""

import functools
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.parallel.shards import local_shard, shard_slice

LOGITS, BLOCKS = 2**24, 8
"""LOGITS: maximum number of logits of a block of queries, over all heads: 32 MiB in bfloat16, which fit into a GPU's
cache. BLOCKS: minimum number of blocks. More blocks compute fewer logits above the causal diagonal."""


class QkClip:
    """Records the largest logit of each head of a model, and scales the weights of heads above a threshold. `group`:
    the ranks with this rank's layers; None: this rank alone. `tensor_rank`: this rank's number in tensor parallel."""

    def __init__(self, model: nn.Module, threshold: float, group: dist.ProcessGroup | None, tensor_rank: int):
        self.threshold, self.group, self.tensor_rank = threshold, group, tensor_rank
        self.attentions = [block.attention for block in model.layers.values()]
        weight = _queries(self.attentions[0]).weight
        shape = len(self.attentions), weight.shape[0] // self.attentions[0].head_dim
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.largest_LH = torch.full(shape, -math.inf, dtype=dtype, device=local_shard(weight).device)
        for attention, largest_H in zip(self.attentions, self.largest_LH.unbind(), strict=True):
            attention.inner_attention.register_forward_pre_hook(functools.partial(self._record, largest_H))

    def reset(self) -> None:
        self.largest_LH.fill_(-math.inf)

    def _record(self, largest_H: Tensor, inner_attention: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Record the largest logits of a training forward. Recomputing the forward records the same values."""
        if not torch.is_grad_enabled():
            return
        q_BTHK, k_BTGK, _, documents, *_ = *inputs, None  # None stands for missing `documents`
        n_heads, ring, ulysses = q_BTHK.shape[2], *(getattr(inner_attention, name, "") for name in ("ring", "ulysses"))
        own_H = largest_H[self.tensor_rank * n_heads :][:n_heads]
        positions = None if documents is None else documents.positions_BT
        record(own_H, q_BTHK.detach(), k_BTGK.detach(), positions, inner_attention.window, ring, ulysses)

    def largest(self) -> Tensor:
        """Return the largest logit of each layer's heads since the last reset, [L, H]. Every rank must call this."""
        if self.group is not None:
            dist.all_reduce(self.largest_LH, dist.ReduceOp.MAX, self.group)
        return self.largest_LH

    @torch.no_grad()
    def step(self, skipped: Tensor | None) -> None:
        """Scale the weights of all heads above the threshold. `skipped`: a scalar on the device, 1 if the optimizer
        skipped its step; None: not skipped. Every rank of `group` must call `step`."""
        largest_LH = self.largest()
        gamma_LH = torch.where(largest_LH > self.threshold, self.threshold / largest_LH, 1.0)
        if skipped is not None:
            gamma_LH = gamma_LH.masked_fill(skipped.bool(), 1.0)
        for attention, gamma_H in zip(self.attentions, gamma_LH, strict=True):
            for linear, factors in _factors(attention, gamma_H):
                for parameter in linear.parameters():
                    (first, *_), (n, *_) = shard_slice(parameter)
                    rows = factors[first : first + n].view(-1, *[1] * (parameter.dim() - 1))
                    local_shard(parameter).mul_(rows.to(parameter.dtype))


def _queries(attention: nn.Module) -> nn.Module:
    return attention.wq if attention.wq is not None else attention.wq_b


def _factors(attention: nn.Module, gamma_H: Tensor) -> list[tuple[nn.Module, Tensor]]:
    root, queries = gamma_H.sqrt(), _queries(attention)
    if hasattr(attention, "wkv_b"):
        plain, rotated, values = attention.nope_dim, attention.rope_dim, attention.v_head_dim
        of_plain, of_rotated = root.unsqueeze(1).expand(-1, plain), gamma_H.unsqueeze(1).expand(-1, rotated)
        of_queries = torch.cat([of_plain, of_rotated], dim=1)
        of_keys = torch.cat([of_plain, root.new_ones(len(root), values)], dim=1)
        return [(queries, of_queries.flatten()), (attention.wkv_b, of_keys.flatten())]
    if attention.wk.weight.shape[0] < queries.weight.shape[0]:
        return [(queries, gamma_H.repeat_interleave(attention.head_dim))]
    both = root.repeat_interleave(attention.head_dim)
    return [(queries, both), (attention.wk, both)]


def _on_device(numbers: Tensor, device: torch.device) -> Tensor:
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers


# A custom operator is opaque to torch.compile, and selective AC saves none of the products inside.
@torch.library.custom_op("titanlite::record_largest_logits", mutates_args=("largest_H",))
def record(
    largest_H: Tensor, q: Tensor, k: Tensor, document_positions: Tensor | None, window: int, ring: str, ulysses: str
) -> None:
    """Raise `largest_H` to the largest logit of each head, over queries [B, T, H, K] and the keys [B, T, G, K] that
    they attend to. `document_positions`, `ring` and `ulysses` are as in parallel/tiled_attention.py."""
    batch, tokens, n_heads, head_dim = q.shape
    at_T = torch.arange(tokens, device="cpu")
    if ring or ulysses:
        k, at_T, document_positions = _gathered(k, document_positions, ring, ulysses)
    # A query attends to consecutive keys: from the first key in both its document and its window to its own position.
    before_BT = at_T.unsqueeze(0) if document_positions is None else document_positions
    first_BT = at_T - before_BT.clamp(max=window - 1 if window else None, min=0)
    q_BTGMK, most = q.unflatten(2, (k.shape[2], -1)), LOGITS // (batch * n_heads * k.shape[1])
    for block in torch.arange(tokens, device="cpu").split(max(1, min(most, math.ceil(tokens / BLOCKS)))):
        begin, end = int(first_BT[:, block].min()), int(at_T[block].max()) + 1
        queries, keys = q_BTGMK[:, int(block[0]) : int(block[-1]) + 1], k[:, begin:end]
        logits_BGMTS = torch.einsum("btgmk,bsgk->bgmts", queries, keys)
        first_BT1, at_T1 = (_on_device(x[..., block], q.device).unsqueeze(-1) for x in (first_BT, at_T))
        left, right = int(first_BT[:, block].max()), int(at_T[block].min()) + 1  # keys that need no mask: [left, right)
        for some in ((begin, left), (right, end)) if left < right else ((begin, end),):
            key_S = torch.arange(*some, device=q.device)
            unseen_BTS = (key_S > at_T1) | (key_S < first_BT1)
            logits_BGMTS[..., some[0] - begin : some[1] - begin].masked_fill_(unseen_BTS[:, None, None], -math.inf)
        largest = logits_BGMTS.amax((0, 3, 4)).flatten().to(largest_H.dtype) / math.sqrt(head_dim)
        torch.maximum(largest_H, largest, out=largest_H)


@record.register_fake
def _(largest_H, q, k, document_positions, window, ring, ulysses):
    return None


def _gathered(
    k_BTGK: Tensor, document_positions_BS: Tensor | None, ring: str, ulysses: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the full sequence's keys, in order, and the positions of this rank's tokens in sequence and documents."""
    from titanlite.parallel.tiled_attention import _GROUPS  # imported here: only context parallel needs tiles
    from titanlite.parallel.tiles import local_positions

    groups = _GROUPS[ulysses], _GROUPS[ring]
    n_ulysses, n_ring = (group.size() if group else 1 for group in groups)
    rank, ring_rank = (group.rank() if group else 0 for group in groups)
    seq_len = k_BTGK.shape[1] * n_ulysses * n_ring
    for group in groups:
        if group is not None:
            shards = [torch.empty_like(k_BTGK) for _ in range(group.size())]
            dist.all_gather(shards, k_BTGK.contiguous(), group)
            k_BTGK = torch.cat(shards, dim=1)
    order = torch.cat([local_positions(seq_len, ring=n_ring, ulysses=1, rank=each) for each in range(n_ring)]).argsort()
    own = local_positions(seq_len, ring=n_ring, ulysses=n_ulysses, rank=ring_rank * n_ulysses + rank)
    documents = None if document_positions_BS is None else document_positions_BS.chunk(n_ulysses, dim=1)[rank]
    return k_BTGK[:, _on_device(order, k_BTGK.device)], own, documents
