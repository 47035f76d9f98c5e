"""Attention backends for ring attention: a forward returns the output and its log-sum-exp, and a backward takes both.
Given the output and log-sum-exp over all keys, a backward over some keys returns what these keys add to the gradients.

Torch's attention operators are private: only this file calls them, with the schemas of torch 2.11 and 2.13, which
agree. The three backends for CUDA passed their tests (tests/test_gpu.py) on an H200. Without dropout, a backward does
not use its random-state arguments: they are empty tensors.
Shapes: B batch, T queries, S keys, H query heads, G KV heads, K head_dim."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
Grads = tuple[Tensor, Tensor, Tensor]  # the gradients of q, k and v


class AttentionBackend(NamedTuple):
    """An attention backend computes softmax(q k^T / sqrt K) v and its gradients. Query head h attends to KV head
    h * G // H. All tensors are slices and transposes of [B, T, H, K] tensors, contiguous in K."""

    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    """Takes (q_BHTK, k_BGSK, v_BGSK, causal), returns (out_BHTK, lse_BHT): lse is the natural logarithm of the sum over
    keys of exp(q k / sqrt K), in float32 or better. If `causal`, query t attends to keys 0 to t, and S = T."""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], Grads]
    """Takes (grad_BHTK of out, q, k, v, out, lse, causal), returns (dq, dk, dv), like q, k, v in shape and dtype."""


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def _cpu_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Grads:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]


def _flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Grads:
    random, lengths = q.new_empty(0, dtype=torch.uint64), (q.shape[2], k.shape[2])
    lse = lse.contiguous()  # the operator assumes that lse is contiguous
    unpacked = None, None  # bounds of packed documents, unused here
    backward = aten._scaled_dot_product_flash_attention_backward
    return backward(grad, q, k, v, out, lse, *unpacked, *lengths, 0.0, causal, random, random)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse_BHT1, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    return out, lse_BHT1.reshape(q.shape[:3])


def _cudnn_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Grads:
    random, lengths = q.new_empty(0, dtype=torch.int64), (q.shape[2], k.shape[2])
    lse_BHT1 = lse.contiguous().unsqueeze(-1)
    backward = aten._scaled_dot_product_cudnn_attention_backward
    return backward(grad, q, k, v, out, lse_BHT1, random, random, None, None, None, *lengths, 0.0, causal)


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))  # the operator does not support GQA
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    return out, lse[..., : q.shape[2]]  # the operator pads lse to a multiple of 32


def _efficient_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Grads:
    n_kv_heads = k.shape[1]
    k, v = (x.repeat_interleave(q.shape[1] // n_kv_heads, dim=1) for x in (k, v))
    random = q.new_empty(0, dtype=torch.int64)
    lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf).contiguous()  # padding adds exp(x - inf) = 0
    if out.stride(2) != out.shape[1] * out.shape[3]:
        out = out.transpose(1, 2).contiguous().transpose(1, 2)  # the operator needs a token's heads adjacent in memory
    backward = aten._scaled_dot_product_efficient_attention_backward
    dq, dk, dv, _ = backward(grad, q, k, v, None, out, lse, random, random, 0.0, [True, True, True, False], causal)
    return dq, *(x.unflatten(1, (n_kv_heads, -1)).sum(2) for x in (dk, dv))


def _math_scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Return the scores before softmax, [B, G, H / G, T, S] in float32 or better; -inf for masked pairs."""
    scores = torch.einsum("bgmtk,bgsk->bgmts", _grouped(q, k), _precise(k)) / math.sqrt(q.shape[-1])
    if causal:
        scores.masked_fill_(torch.ones_like(scores[0, 0, 0], dtype=torch.bool).triu(1), -math.inf)
    return scores


def _grouped(x_BHTK: Tensor, k: Tensor) -> Tensor:
    """Group query heads by their KV head: [B, H, T, K] to [B, G, H / G, T, K], in float32 or better."""
    return _precise(x_BHTK).unflatten(1, (k.shape[1], -1))


def float32_or_better(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _precise(x: Tensor) -> Tensor:
    return x.to(float32_or_better(x))


def _math_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    scores = _math_scores(q, k, causal)
    out = torch.einsum("bgmts,bgsk->bgmtk", scores.softmax(-1), _precise(v))
    return out.flatten(1, 2).to(q.dtype), scores.logsumexp(-1).flatten(1, 2)


def _math_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Grads:
    weights = (_math_scores(q, k, causal) - lse.unflatten(1, (k.shape[1], -1)).unsqueeze(-1)).exp()
    grad = _grouped(grad, k)
    dv = torch.einsum("bgmts,bgmtk->bgsk", weights, grad)
    # The softmax's backward subtracts each query's weighted mean of dweights, which equals (grad * out).sum(-1).
    dweights = torch.einsum("bgmtk,bgsk->bgmts", grad, _precise(v))
    dscores = weights * (dweights - (grad * _grouped(out, k)).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    dq = torch.einsum("bgmts,bgsk->bgmtk", dscores, _precise(k)).flatten(1, 2)
    dk = torch.einsum("bgmts,bgmtk->bgsk", dscores, _grouped(q, k))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class PackedAttention(NamedTuple):
    """Computes causal attention within each of several concatenated documents, in one call (varlen attention).
    `bounds`: the start of each document and the end of the last, int32 on the device. `longest`: the number of tokens
    in the longest document, a Python int. With `window` > 0, query t attends to keys t - window + 1 to t only."""

    forward: Callable[[Tensor, Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor]]
    """Takes (q_NHK, k_NGK, v_NGK, bounds, longest, window), returns (out_NHK, lse_HN); see AttentionBackend.forward."""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, int], Grads]
    """Takes (grad_NHK of out, q, k, v, out, lse_HN, bounds, longest, window), returns (dq, dk, dv)."""


def _flash_packed_forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, window: int
) -> tuple[Tensor, Tensor]:
    lengths = bounds, bounds, longest, longest
    return aten._flash_attention_forward(q, k, v, *lengths, 0.0, True, False, **_flash_window(window))[:2]


def _flash_packed_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: Tensor, longest: int, window: int
) -> Grads:
    random, lengths = q.new_empty(0, dtype=torch.uint64), (bounds, bounds, longest, longest)
    backward = aten._flash_attention_backward
    return backward(grad, q, k, v, out, lse, *lengths, 0.0, True, random, random, **_flash_window(window))


def _flash_window(window: int) -> dict[str, int]:
    """Return the options of flash attention for a window: how many keys a query sees to its left and to its right."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


PACKED_ATTENTION: dict[str, PackedAttention] = {"flash": PackedAttention(_flash_packed_forward, _flash_packed_backward)}
"""Backends with packed attention, by name. Other backends are called once per document and block of a window."""
ATTENTION_BACKENDS: dict[str, AttentionBackend] = {
    "cpu": AttentionBackend(_cpu_forward, _cpu_backward),
    "flash": AttentionBackend(_flash_forward, _flash_backward),  # float16 and bfloat16 only, head dim a multiple of 8
    "cudnn": AttentionBackend(_cudnn_forward, _cudnn_backward),  # float16 and bfloat16 only
    "efficient": AttentionBackend(_efficient_forward, _efficient_backward),
    "math": AttentionBackend(_math_forward, _math_backward),  # any device and dtype; memory grows with T x S
}
"""Attention backends by name. "cpu" runs on a CPU, "math" on a CPU and on CUDA, all other backends on CUDA."""
