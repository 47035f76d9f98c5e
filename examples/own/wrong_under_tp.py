"""Wrong under tensor parallel: a norm inside the feed-forward (NormFormer, arXiv:2110.09456), over the wrong width.

One rank has all channels of hidden_NF. With tensor parallel each rank has a shard of them, and norms its shard alone:
no error, another loss. titanlite parity debug_tp --own examples/own/wrong_under_tp.py:own says so.
"""

import torch.nn.functional as F
from torch import Tensor

from titanlite import Own
from titanlite.build_llama import build_block
from titanlite.model import Block, FeedForward


class NormedFeedForward(FeedForward):
    def forward(self, x_ND: Tensor) -> Tensor:
        hidden_NF = self.activation(self.w1(x_ND)) * self.w3(x_ND)
        return self.w2(F.rms_norm(hidden_NF, hidden_NF.shape[-1:]))


def block(model, layer: int) -> Block:
    """Return titanlite's block with another feed-forward."""
    built = build_block(model, layer)
    built.feed_forward = NormedFeedForward(model.dim, model.ffn_dim)
    return built


own = Own(block=block)
