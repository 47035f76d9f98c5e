"""The KV cache stores keys and values of earlier tokens, so that a forward computes the new tokens only.

CachedAttention replaces each block's inner attention. A forward either adds one whole prompt, without padding, or adds
one token to each sequence, at that sequence's position.

Shapes: B sequences, T tokens, S positions of the cache, H query heads, G KV heads, M = H / G, K head_dim."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.model import Documents, Llama


class Step:
    """Says which tokens the next forward adds to the caches of all layers."""

    sequence: int | None = None
    """Index of the sequence whose prompt the next forward adds; None: the forward adds one token to each sequence."""
    sequences_B: Tensor
    positions_B: Tensor  # position of each sequence's new token
    keys: dict[int, tuple[slice, Tensor]]
    """By sliding window: the positions to which any sequence attends, and the mask of each sequence, [B, 1, 1, S]."""

    def decode(self, positions: list[int], windows: Iterable[int], device: torch.device) -> None:
        """Make the next forward add one token per sequence, at `positions`. `windows`: sliding windows; 0: none."""
        self.sequence, self.sequences_B = None, torch.arange(len(positions), device=device)
        self.positions_B = torch.tensor(positions, device=device)
        end, last_B1 = max(positions) + 1, self.positions_B[:, None]
        self.keys = {}
        for window in windows:
            first = max(min(positions) - window + 1, 0) if window else 0
            keys_S = torch.arange(first, end, device=device)
            mask_BS = keys_S <= last_B1
            if window:
                mask_BS &= keys_S > last_B1 - window
            self.keys[window] = slice(first, end), mask_BS[:, None, None]


class CachedAttention(nn.Module):
    """Computes attention within a prompt or, for one new token per sequence, over all cached tokens. The cache is
    initialized to zeros: uninitialized memory may contain NaN, and a masked key's weight 0 times NaN is NaN."""

    def __init__(self, inner: nn.Module, step: Step, cache_2BGSK: Tensor):
        super().__init__()
        self.inner, self.step = inner, step
        self.k_BGSK, self.v_BGSK = cache_2BGSK

    def forward(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, documents: Documents | None = None) -> Tensor:
        """Return the output [B, T, H, K] for one prompt (B = 1) or one token of each sequence (T = 1)."""
        step = self.step
        if step.sequence is not None:
            for cache_BGSK, x_BTGK in ((self.k_BGSK, k_BTGK), (self.v_BGSK, v_BTGK)):
                cache_BGSK[step.sequence, :, : x_BTGK.shape[1]] = x_BTGK[0].transpose(0, 1)
            return self.inner(q_BTHK, k_BTGK, v_BTGK)
        for cache_BGSK, x_BTGK in ((self.k_BGSK, k_BTGK), (self.v_BGSK, v_BTGK)):
            cache_BGSK[step.sequences_B, :, step.positions_B] = x_BTGK[:, 0]
        # Treat the M query heads of a KV head as M queries: few attention backends support masks with grouped queries.
        q_BGMK = q_BTHK[:, 0].unflatten(1, (k_BTGK.shape[2], -1))
        keys, mask_B11S = step.keys[self.inner.window]
        k_BGSK, v_BGSK = self.k_BGSK[:, :, keys], self.v_BGSK[:, :, keys]
        attend = getattr(self.inner, "attend_cached", F.scaled_dot_product_attention)  # SinkAttention has attend_cached
        return attend(q_BGMK, k_BGSK, v_BGSK, attn_mask=mask_B11S).flatten(1, 2).unsqueeze(1)


def attach_cache(model: Llama, *, n_sequences: int, length: int, n_kv_heads: int) -> Step:
    """Give each block's attention a cache for this rank's KV heads. Returns the Step to set before each forward."""
    step = Step()
    for block in model.layers.values():
        attention, weight = block.attention, block.attention.wo.weight
        shape = 2, n_sequences, n_kv_heads, length, attention.head_dim
        cache_2BGSK = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        attention.inner_attention = CachedAttention(attention.inner_attention, step, cache_2BGSK)
    return step
