"""Attention sinks (gpt-oss, arXiv:2508.10925; StreamingLLM, arXiv:2309.17453): the softmax of each query head has one
more key, whose score (the sink) is learned and whose value is 0. With a sink, a head can give all keys weights near 0.

SinkAttention appends this key to the others. On parallel layouts, TiledAttention uses the log-sum-exp instead.
Shapes: B batch, T queries, S keys, H query heads, G KV heads, M = H / G, K head_dim."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from titanlite.config.schema import Model
from titanlite.model import Documents, ScaledDotProductAttention
from titanlite.parallel.shards import local_shard


class SinkAttention(ScaledDotProductAttention):
    """Computes attention as its base class does, but with sinks. Scores and mask take memory in proportion to T x S."""

    def __init__(self, model: Model):
        super().__init__(model.sliding_window)
        self.sinks = nn.Parameter(torch.empty(model.n_heads))

    def forward(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, documents: Documents | None = None) -> Tensor:
        """Return the output [B, T, H, K]. Arguments: as for ScaledDotProductAttention.forward."""
        if documents is not None:
            return super().forward(q_BTHK, k_BTGK, v_BTGK, documents)  # the base class calls forward once per document
        q_BHTK, k_BGTK, v_BGTK = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
        full_TT = q_BHTK.new_ones(q_BHTK.shape[2], q_BHTK.shape[2], dtype=torch.bool)
        mask_TT = full_TT.tril().triu(1 - (self.window or len(full_TT)))
        return self._attend(q_BHTK, k_BGTK, v_BGTK, mask_TT, local_shard(self.sinks)[:, None, None]).transpose(1, 2)

    def attend_cached(self, q_BGMK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, *, attn_mask: Tensor) -> Tensor:
        """Attend from one new token of each sequence, and return [B, G, M, K]. `q_BGMK` has the M query heads of a KV
        head in dimension 2, and no dimension for queries. `attn_mask` [B, 1, 1, S] is true for keys to attend to."""
        sinks_GM1 = local_shard(self.sinks).view(*q_BGMK.shape[1:3], 1)
        return self._attend(q_BGMK, k_BGSK, v_BGSK, attn_mask, sinks_GM1)

    def shard_weights(self, tensor: DeviceMesh | None, expert: DeviceMesh | None) -> None:
        if tensor:
            self.sinks = nn.Parameter(distribute_tensor(self.sinks, tensor, [Shard(0)], src_data_rank=None))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
        """Attend to the keys that `mask` allows, and to an added last key of zeros, whose score is the sink."""
        scores = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
        shape = torch.broadcast_shapes(scores.shape[:-1], sinks.shape[:-1])
        scores = torch.cat((scores.expand(*shape, -1), sinks.to(q.dtype).expand(*shape, 1)), dim=-1)
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, scores, enable_gqa=q.shape[1] != k.shape[1])
