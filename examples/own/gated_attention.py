"""Another attention: each head's output is gated by the input (Qwen's gated attention, arXiv:2505.06708).

titanlite train debug_tp --own examples/own/gated_attention.py:own
"""

from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel

from titanlite import Own
from titanlite.build_llama import build_block
from titanlite.model import Attention, Block, Documents, apply_rotary_emb


class GatedAttention(Attention):
    def __init__(self, model):
        super().__init__(model)
        self.gate = nn.Linear(model.dim, model.n_heads * model.head_dim, bias=False)

    def forward(self, x_ND: Tensor, rope_TK2: Tensor, documents: Documents | None) -> Tensor:
        sizes = (-1, rope_TK2.shape[-3])  # heads are counted by -1: a rank of tensor parallel has some of them
        qkv = (w(x_ND).unflatten(-1, (-1, self.head_dim)).unflatten(0, sizes) for w in (self.wq, self.wk, self.wv))
        q_BTHK, k_BTGK, v_BTGK = qkv
        q_BTHK, k_BTGK = apply_rotary_emb(q_BTHK, rope_TK2), apply_rotary_emb(k_BTGK, rope_TK2)
        y_BTHK = self.inner_attention(q_BTHK, k_BTGK, v_BTGK, documents)  # context parallel replaces it
        return self.wo(y_BTHK.flatten(0, 1).flatten(1) * self.gate(x_ND).sigmoid())


def block(model, layer: int) -> Block:
    """Return titanlite's block with another attention."""
    built = build_block(model, layer)
    built.attention = GatedAttention(model)
    return built


own = Own(block=block, styles={"attention.gate": ColwiseParallel()})  # as wq: each rank has its heads' channels
