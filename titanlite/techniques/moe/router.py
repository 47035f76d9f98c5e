"""The router scores the experts and chooses K for each token, in float32, or in float64 for a float64 model.
Shapes: N tokens, D model width, E experts, K experts per token, G groups of experts."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.config.schema import Model


class Router(nn.Module):
    """Returns each token's experts and their scores, and balances the experts' load. Among equal scores, the expert
    with the smaller index is chosen, so that the layout does not change the choice. The backward adds to `record` two
    numbers per expert (its tokens and its sum of scores) and, once, the sum of the z-loss. Since the backward records,
    validation is not recorded, and a forward that activation checkpointing repeats is recorded once."""

    def __init__(self, model: Model):
        super().__init__()
        self.moe, self.n_experts = model.moe, model.moe.n_experts
        self.weight = nn.Parameter(torch.empty(self.n_experts, model.dim))
        self.bias = nn.Parameter(torch.empty(self.n_experts)) if self.moe.router_bias else None
        self.register_buffer("balance_bias", torch.zeros(self.n_experts) if self.moe.balance_bias else None)
        self.register_buffer("load", torch.zeros(self.n_experts, dtype=torch.int64))  # last step's tokens per expert
        self.register_buffer("record", torch.zeros(2 * self.n_experts + 1, dtype=torch.float64), persistent=False)
        self.contributes = True  # whether this rank records the load of tokens that other ranks route too
        self.tokens_per_step, self.loss_scale = 1.0, 1.0

    def reset_buffers(self, device: torch.device) -> None:
        """Set the buffers to zero, in data types that do not depend on the weights' type."""
        if self.balance_bias is not None:
            self.balance_bias = torch.zeros(self.n_experts, device=device)
        self.load = torch.zeros(self.n_experts, dtype=torch.int64, device=device)
        self.record = torch.zeros(2 * self.n_experts + 1, dtype=torch.float64, device=device)

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return each token's scores and experts, both [N, K], and the number of tokens that chose each expert, [E]."""
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        logits_NE = F.linear(x_ND.to(wide), *(weight.to(wide) for weight in self.local_weights()))
        scores_NE = logits_NE.sigmoid() if self.moe.score_function == "sigmoid" else logits_NE.softmax(-1)
        scores_NE.requires_grad_(torch.is_grad_enabled())  # LoRA's frozen routers need a backward, too
        chosen_by_NE = scores_NE.detach()
        experts_NK = self.choose(chosen_by_NE if self.balance_bias is None else chosen_by_NE + self.balance_bias)
        counts_E = _count(experts_NK, self.n_experts)
        if torch.is_grad_enabled() and self.contributes:
            scores_NE = self._balanced(scores_NE, logits_NE, counts_E)
        scores_NK = scores_NE.gather(-1, experts_NK)
        if self.moe.normalize_scores:
            scores_NK = scores_NK / (scores_NK.sum(-1, keepdim=True) + 1e-20)
        return scores_NK * self.moe.score_scaling, experts_NK, counts_E

    def local_weights(self) -> list[Tensor]:
        """Return the weight, and any bias, as plain tensors. Parallelism replaces this method."""
        return list(self.parameters())

    def _balanced(self, scores_NE: Tensor, logits_NE: Tensor, counts_E: Tensor) -> Tensor:
        """Return the scores, with a backward that records the load and adds the gradients of the auxiliary losses. The
        losses are divided by the tokens of the global batch, because gradients are summed over ranks, not averaged."""
        sums_E = (scores_NE / scores_NE.sum(-1, keepdim=True)).sum(0)  # normalized: each token's scores sum to 1
        loss = z_loss = sums_E.new_zeros(())
        if self.moe.balance_loss_weight:
            load_E = self.load.where(self.load.any(), 1).to(sums_E.dtype)  # loads count as equal in the first step
            shares_E = load_E / load_E.sum()
            loss = loss + self.moe.balance_loss_weight * self.n_experts * (shares_E * sums_E).sum()
        if self.moe.z_loss_weight:
            z_loss = logits_NE.logsumexp(-1).square().sum()
            loss = loss + self.moe.z_loss_weight * z_loss
        record = torch.cat([each.detach().to(torch.float64) for each in (counts_E, sums_E, z_loss.unsqueeze(0))])
        return _Balance.apply(scores_NE, loss / self.tokens_per_step, record, self)

    def choose(self, scores_NE: Tensor) -> Tensor:
        """Return the experts of each token, [N, K]. `scores_NE` include the balance bias."""
        n_groups, n_chosen = self.moe.n_groups, self.moe.n_groups_per_token
        if n_chosen < n_groups:
            scores_NGE = scores_NE.unflatten(-1, (n_groups, -1))
            n_best = 2 if self.moe.group_score == "top_2_sum" else 1
            best_NG = _largest(scores_NGE.topk(n_best, dim=-1).values.sum(-1), n_chosen)
            allowed_NG = torch.zeros_like(scores_NGE[..., 0], dtype=torch.bool).scatter_(-1, best_NG, True)
            scores_NE = scores_NGE.where(allowed_NG.unsqueeze(-1), -torch.inf).flatten(-2)
        return _largest(scores_NE, self.moe.n_experts_per_token)


def _largest(scores: Tensor, n: int) -> Tensor:
    """Return the indices of the n largest scores of each row, the largest first. (torch.topk does not order ties.)"""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :n]


def _count(experts_NK: Tensor, n_experts: int) -> Tensor:
    chosen_M = experts_NK.flatten()
    zeros_E = torch.zeros(n_experts, dtype=torch.int64, device=chosen_M.device)
    return zeros_E.scatter_add_(0, chosen_M, torch.ones_like(chosen_M))


class _Balance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_NE: Tensor, loss: Tensor, record: Tensor, router: Router) -> Tensor:
        ctx.save_for_backward(record)
        ctx.router, ctx.loss_dtype = router, loss.dtype
        return scores_NE.view_as(scores_NE)

    @staticmethod
    def backward(ctx: Any, gradient_NE: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (record,), router = ctx.saved_tensors, ctx.router
        router.record += record
        return gradient_NE, torch.full((), router.loss_scale, dtype=ctx.loss_dtype, device=record.device), None, None
