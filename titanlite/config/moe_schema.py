"""The options of a mixture of experts, [model.moe]."""

from __future__ import annotations

from typing import Annotated, Literal, Union

from pydantic import Field

from titanlite.config.loader import Section

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


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
