"""The options of a mixture of experts, [model.moe]."""

from __future__ import annotations

from typing import Any, Literal, Union

from titanlite.config.loader import Section
from titanlite.config.types import Count, CountOrZero, NotNegative, Positive


class Moe(Section):
    """Mixture of experts (arXiv:1701.06538): feed-forward layers of many experts, of which a router chooses a few for
    each token. No token is dropped. All but n_experts is read only when that is above 0."""

    n_experts: CountOrZero = 0
    """Number of routed experts of a layer; 0: every feed-forward layer is dense."""
    n_experts_per_token: Count = 1
    """Number of experts that the router chooses for a token."""
    expert_dim: Union[Literal[-1], Count] = -1
    """Width of the SwiGLU feed-forward layer that an expert is; -1: model.ffn_dim."""
    n_shared_experts: CountOrZero = 0
    """Shared experts, which every token passes (DeepSeekMoE, arXiv:2401.06066): together one feed-forward layer of this
    many times expert_dim."""
    n_first_dense_layers: CountOrZero = 0
    """Layers at the beginning that are dense."""
    every_n_layers: Count = 1
    """Of the others, the layers that have experts: every n-th, counted from the first layer of the model."""
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's logits become scores. softmax: over all experts; sigmoid: each by itself (DeepSeek-V3,
    arXiv:2412.19437)."""
    normalize_scores: bool = False
    """Divide the scores of a token's experts by their sum."""
    score_scaling: Positive = 1.0
    """Factor on the scores of a token's experts."""
    n_groups: Count = 1
    """Groups of experts for routing that is limited to some of them (DeepSeek-V3's node-limited routing)."""
    n_groups_per_token: Count = 1
    """Number of groups that a token's experts may be in: those with the largest sum of their two best scores."""
    balance_bias: bool = False
    """Balance the experts' load without a loss (arXiv:2408.15664): the router chooses by scores to which each expert's
    bias is added. The biases are saved in checkpoints."""
    balance_bias_rate: NotNegative = 0.001
    """What an optimizer step adds to the bias of an expert with less than the mean load, and takes from one with
    more."""
    balance_loss_weight: NotNegative = 0.0
    """Weight of the auxiliary loss of each layer with experts, E times the sum over the E experts of share of the load
    times mean score, 1 if balanced (Switch Transformer, arXiv:2101.03961). Shares are those of the global batch of the
    step before, mean scores those of this one."""
    z_loss_weight: NotNegative = 0.0
    """Weight of the router z-loss of each layer with experts (ST-MoE, arXiv:2202.08906): the mean over the global batch
    of the squared log-sum-exp of a token's logits."""

    def identity(self) -> dict[str, Any]:
        """Return what a resumed run must share with the one that saved, as plain JSON."""
        return self.model_dump(exclude={"balance_bias_rate", "balance_loss_weight", "z_loss_weight"})
