"""Another feed-forward: w2(relu(w1 x)^2) (Primer, arXiv:2109.08668).

titanlite train debug --own examples/own/squared_relu.py:own
"""

import torch.nn.functional as F
from torch import Tensor, nn

from titanlite import Own
from titanlite.build_llama import build_block
from titanlite.model import Block


class SquaredReLU(nn.Module):
    def __init__(self, dim: int, ffn_dim: int):
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)  # by these names, tensor parallel and init know them
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x_ND: Tensor) -> Tensor:
        return self.w2(F.relu(self.w1(x_ND)).square())


def block(model, layer: int) -> Block:
    """Return titanlite's block with another feed-forward."""
    built = build_block(model, layer)
    built.feed_forward = SquaredReLU(model.dim, model.ffn_dim)
    return built


own = Own(block=block)
