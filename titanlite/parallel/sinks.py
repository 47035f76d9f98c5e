"""Attention sinks, computed from the log-sum-exp (techniques/attention_sinks.py). A sink is one more key of each head,
with a trained score and value 0, in the softmax over all keys. B batch, S tokens, H query heads, K head_dim."""

import torch
from torch import Tensor


def with_sinks(out_BSHK: Tensor, lse_BHS: Tensor, sinks_H: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the attention output, changed in place, and log-sum-exp over all keys and the sinks. Given these two, an
    attention backend's backward computes the right gradients of queries, keys and values."""
    if sinks_H is None:
        return out_BSHK, lse_BHS
    sinks_H1 = sinks_H.to(lse_BHS.dtype).unsqueeze(1)
    share_BSH = (lse_BHS - sinks_H1).sigmoid().transpose(1, 2)
    return out_BSHK.mul_(share_BSH.unsqueeze(-1)), torch.logaddexp(lse_BHS, sinks_H1)


def gradient_of_sinks(sinks_H: Tensor | None, grad_BSHK: Tensor, out_BSHK: Tensor, lse_BHS: Tensor) -> Tensor:
    """Return the gradient of the sinks' scores, -sum exp(sink - lse) (grad . out), or an empty tensor without sinks.
    `out_BSHK` and `lse_BHS` are from `with_sinks`. A sink is the score of a key with the value 0."""
    if sinks_H is None:
        return grad_BSHK.new_empty(0)
    share_BHS = (sinks_H.to(lse_BHS.dtype).unsqueeze(1) - lse_BHS).exp()
    dots_BSH = (grad_BSHK * out_BSHK).sum(-1, dtype=lse_BHS.dtype)
    return -(share_BHS * dots_BSH.transpose(1, 2)).sum((0, 2)).to(sinks_H.dtype)
