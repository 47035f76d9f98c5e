"""The model and the batch of the examples: a Llama of two layers, and eight sequences of 32 tokens.

The number of valid targets differs from sequence to sequence, as it does where padding or prompts are masked.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

N_SEQUENCES, SEQ_LEN, VOCAB_SIZE = 8, 32, 128
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": SEQ_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


def batch(*, masked: bool = True) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, int64 [8, 32]; with `masked`, from 4 to 32 targets of a sequence are valid."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB_SIZE, (N_SEQUENCES, SEQ_LEN + 1), generator=generator)
    targets = ids[:, 1:].clone()
    if masked:
        for row in range(N_SEQUENCES):
            targets[row, 4 * (row + 1) :] = -100
    return ids[:, :-1].contiguous(), targets


def batch_loss(logits: Tensor, targets: Tensor, *, n_valid: Tensor | int = 0, parts: int = 1) -> Tensor:
    """Return the cross-entropy of logits [N, V] and targets [N]: its mean over this batch's valid targets. With the
    `n_valid` targets of the global batch, return the sum divided by them, times the `parts` by which a program divides
    the sum of its batches' losses and gradients."""
    if not n_valid:
        return F.cross_entropy(logits, targets)
    return F.cross_entropy(logits, targets, reduction="sum") * parts / n_valid
