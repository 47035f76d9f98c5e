"""The router scores experts and chooses some for each token, in float32, or in float64 for a float64 model.

Shapes: N tokens, D model width, E experts, K experts per token, G groups of experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.config.schema import Model


class Router(nn.Module):
    """Returns a token's experts and their scores.

    Of equal scores, the expert with the smaller number is chosen: torch.topk promises no order, and a layout must not
    change the choice.
    """

    def __init__(self, model: Model):
        super().__init__()
        self.moe, self.n_experts = model.moe, model.moe.n_experts
        self.weight = nn.Parameter(torch.empty(self.n_experts, model.dim))

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores and the experts of each token, both [N, K]."""
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        logits_NE = F.linear(x_ND.to(wide), self.local_weight().to(wide))
        scores_NE = logits_NE.sigmoid() if self.moe.score_function == "sigmoid" else logits_NE.softmax(-1)
        experts_NK = self._choose(scores_NE.detach())
        scores_NK = scores_NE.gather(-1, experts_NK)
        if self.moe.normalize_scores:
            scores_NK = scores_NK / (scores_NK.sum(-1, keepdim=True) + 1e-20)
        return scores_NK * self.moe.score_scaling, experts_NK

    def local_weight(self) -> Tensor:
        """Return the weight as this process computes with it; parallelism replaces it."""
        return self.weight

    def _choose(self, scores_NE: Tensor) -> Tensor:
        n_groups, n_chosen = self.moe.n_groups, self.moe.n_groups_per_token
        if n_chosen < n_groups:
            scores_NGE = scores_NE.unflatten(-1, (n_groups, -1))
            best_NG = _largest(scores_NGE.topk(2, dim=-1).values.sum(-1), n_chosen)
            allowed_NG = torch.zeros_like(scores_NGE[..., 0], dtype=torch.bool).scatter_(-1, best_NG, True)
            scores_NE = scores_NGE.where(allowed_NG.unsqueeze(-1), -torch.inf).flatten(-2)
        return _largest(scores_NE, self.moe.n_experts_per_token)


def _largest(scores: Tensor, n: int) -> Tensor:
    """Return the indices of the n largest scores of each row, the largest first and of equal ones the first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :n]
