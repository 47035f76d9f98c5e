"""One rule for the loss, in training, validation and logging: the sum of token losses over the number of valid tokens
of the whole global batch. Whatever the ranks, microsteps and padding, every valid token weighs the same."""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""Target of a position that has nothing to predict: padding, and the end of a document."""


def cross_entropy_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Sum of the token losses in nats over the valid targets, in float32 or better; a scalar.

    Args:
        logits_BTV: [B, T, V] in any precision.
        targets_BT: [B, T] token numbers, IGNORED where there is nothing to predict.
    """
    logits = logits_BTV.flatten(0, 1).to(torch.promote_types(logits_BTV.dtype, torch.float32))
    return F.cross_entropy(logits, targets_BT.flatten(), reduction="sum", ignore_index=IGNORED)


def count_valid(targets: list[Tensor], device: torch.device) -> Tensor:
    """Number of valid targets in this rank's microbatches; a float64 scalar on `device`, ready to be summed over ranks
    (exact up to 2^53 tokens)."""
    count = sum(int((target != IGNORED).sum()) for target in targets)
    return torch.tensor(count, dtype=torch.float64, device=device)
