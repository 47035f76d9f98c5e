"""Attention in tiles, for context parallel (CP), document masks, sliding windows and attention sinks.

Context parallel splits every sequence over ranks, and only attention communicates between the shards of a sequence:
ring x Ulysses (USP, arXiv:2405.07719). Ulysses ranks exchange sequence shards for heads (ulysses.py); ring ranks send
keys and values around a ring (ring.py). tiles.py determines which queries attend to which keys.
Shapes: B batch, T tokens of this rank, S tokens of all Ulysses ranks together (two chunks, or one without a ring), H
query heads, G KV heads, N = H + 2 G heads, K head_dim. A tensor with S tokens has the heads of one Ulysses rank."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from titanlite.model import Documents
from titanlite.parallel.attention import PACKED_ATTENTION, float32_or_better
from titanlite.parallel.ring import Group, ring_backward, ring_forward
from titanlite.parallel.shards import local_shard
from titanlite.parallel.sinks import gradient_of_sinks, with_sinks
from titanlite.parallel.ulysses import heads_to_sequence, sequence_to_heads


class TiledAttention(nn.Module):
    """Computes model.ScaledDotProductAttention over sequences that tiles.local_positions splits over ranks. The groups
    are from mesh.Layout, `backend` is a name in ATTENTION_BACKENDS. With `window` > 0, position t of a sequence attends
    only to positions t - window + 1 to t of the same document. `sinks`: for each head, the score of one more key with
    value 0 (techniques/attention_sinks.py)."""

    def __init__(
        self, ring_group: Group, ulysses_group: Group, backend: str, window: int = 0, sinks: nn.Parameter | None = None
    ):
        super().__init__()
        self.ring, self.ulysses, self.backend = _register(ring_group), _register(ulysses_group), backend
        self.window, self.sinks = window, sinks
        self.ring_size, self.ulysses_size = _size(self.ring), _size(self.ulysses)

    def forward(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, documents: Documents | None = None) -> Tensor:
        """Return [B, T, H, K]. Query head h attends to KV head h * G // H. `documents`: the positions of all Ulysses
        ranks' tokens, [B, S] in host memory; None: a sequence is one document. Raises ValueError if heads or tokens
        cannot be split evenly, or the positions have a wrong shape or device."""
        batch, tokens, heads, _ = q_BTHK.shape
        ranks, kv_heads = self.ulysses_size, k_BTGK.shape[2]
        sequence = tokens * ranks
        if heads % ranks or kv_heads % ranks:
            raise ValueError(f"{heads} query heads and {kv_heads} KV heads cannot be split over {ranks} ranks")
        if self.ring_size > 1 and sequence % 2:
            raise ValueError(f"{sequence} tokens of a ring rank cannot be split into two chunks")
        positions = None if documents is None else documents.positions_BT
        if positions is not None and (positions.shape != (batch, sequence) or not positions.is_cpu):
            actual = f"{list(positions.shape)} on {positions.device}"
            raise ValueError(f"document_positions: expected [{batch}, {sequence}] in host memory, got {actual}")
        window = self.window if self.window < sequence * self.ring_size else 0  # 0 means that no key is hidden
        rank = _GROUPS[self.ulysses].rank() if self.ulysses else 0
        sinks = None if self.sinks is None else local_shard(self.sinks).chunk(ranks)[rank]
        return _attention(q_BTHK, k_BTGK, v_BTGK, positions, sinks, self.ring, self.ulysses, self.backend, window)[0]


# Operators get process groups by name, since their arguments can only be tensors, numbers and strings.
_GROUPS: dict[str, Group] = {"": None}


def _register(group: Group) -> str:
    """Store a process group for the operators, and return its name. A group of one rank is not stored: return ""."""
    if group is None or group.size() == 1:
        return ""
    _GROUPS[group.group_name] = group
    return group.group_name


def _size(group: str) -> int:
    return _GROUPS[group].size() if group else 1


def _local_heads(q_BTHK: Tensor, k_BTGK: Tensor, ulysses: str) -> list[int]:
    """Return the numbers of heads of q, k and v that a Ulysses rank computes."""
    return [x.shape[2] // _size(ulysses) for x in (q_BTHK, k_BTGK, k_BTGK)]


# Custom operators: torch.compile neither breaks its graph at them nor moves their communication ----------------------
@torch.library.custom_op("titanlite::tiled_attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_positions: Tensor | None,
    sinks: Tensor | None,
    ring: str,
    ulysses: str,
    backend: str,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the output [B, T, H, K] and three tensors for the backward: the log-sum-exp [B, H, S]; q, k and v [B, S,
    N, K]; and the output [B, S, H, K] before Ulysses' second all-to-all. Without Ulysses, the last two are empty."""
    if not ulysses:
        empty = q.new_empty(0), q.new_empty(0)  # an operator must not return its inputs q, k, v
        return *with_sinks(*_local_forward(q, k, v, document_positions, ring, backend, window), sinks), *empty
    qkv_BSNK = sequence_to_heads([q, k, v], _GROUPS[ulysses])
    qkv = qkv_BSNK.split(_local_heads(q, k, ulysses), dim=2)
    inner_BSHK, lse_BHS = with_sinks(*_local_forward(*qkv, document_positions, ring, backend, window), sinks)
    (out_BTHK,) = heads_to_sequence([inner_BSHK], _GROUPS[ulysses])
    return out_BTHK, lse_BHS, qkv_BSNK, inner_BSHK


@_attention.register_fake
def _(q, k, v, document_positions, sinks, ring, ulysses, backend, window):
    batch, tokens, _, head_dim = q.shape
    heads, sequence = _local_heads(q, k, ulysses), tokens * _size(ulysses)
    lse = q.new_empty(batch, heads[0], sequence, dtype=float32_or_better(q))
    qkv, inner = (batch, sequence, sum(heads), head_dim), (batch, sequence, heads[0], head_dim)
    return q.new_empty(q.shape), lse, q.new_empty(qkv if ulysses else 0), q.new_empty(inner if ulysses else 0)


@torch.library.custom_op("titanlite::tiled_attention_backward", mutates_args=())
def _attention_backward(
    grad_out: Tensor,
    saved: list[Tensor],
    document_positions: Tensor | None,
    sinks: Tensor | None,
    ring: str,
    ulysses: str,
    backend: str,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and sinks (empty without sinks). `saved`: q, k, v, out, lse with S tokens."""
    grad_out = sequence_to_heads([grad_out], _GROUPS[ulysses]) if ulysses else grad_out.contiguous()
    grads = _local_backward([grad_out, *saved], document_positions, ring, backend, window)
    d_sinks = gradient_of_sinks(sinks, grad_out, *saved[3:])
    return *(heads_to_sequence(grads, _GROUPS[ulysses]) if ulysses else grads), d_sinks


@_attention_backward.register_fake
def _(grad_out, saved, document_positions, sinks, ring, ulysses, backend, window):
    batch, tokens, _, head_dim = grad_out.shape
    d_sinks = grad_out.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return *(x.new_empty(batch, tokens, x.shape[2] * _size(ulysses), head_dim) for x in saved[:3]), d_sinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, document_positions, sinks, *ctx.options = inputs
    out, lse, qkv, inner = output
    ulysses = ctx.options[1]
    ctx.set_materialize_grads(False)  # lse, qkv and inner have no gradients: do not allocate zeros
    ctx.mark_non_differentiable(lse, qkv, inner)
    attended = (*qkv.split(_local_heads(q, k, ulysses), dim=2), inner) if ulysses else (q, k, v, out)
    ctx.save_for_backward(*attended, lse, document_positions, sinks)


def _backward(ctx: Any, grad_out: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    *saved, document_positions, sinks = ctx.saved_tensors
    *grads, d_sinks = _attention_backward(grad_out, saved, document_positions, sinks, *ctx.options)
    return *grads, None, None if sinks is None else d_sinks, None, None, None, None


_attention.register_autograd(_backward, setup_context=_setup_context)


# Attention between the Ulysses all-to-alls: a packed call (without a ring, if the backend has one), or ring.py --------
def _is_packed(document_positions: Tensor | None, ring: str, backend: str, window: int) -> bool:
    return not ring and backend in PACKED_ATTENTION and (document_positions is not None or window > 0)


def _local_forward(
    q: Tensor, k: Tensor, v: Tensor, document_positions: Tensor | None, ring: str, backend: str, window: int
) -> tuple[Tensor, Tensor]:
    if not _is_packed(document_positions, ring, backend, window):
        return ring_forward(q, k, v, document_positions, _GROUPS[ring], backend, window)
    qkv, bounds = (x.flatten(0, 1) for x in (q, k, v)), _bounds(document_positions, q)
    out_NHK, lse_HN = PACKED_ATTENTION[backend].forward(*qkv, *bounds, window)
    return out_NHK.view(q.shape), lse_HN.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()


def _local_backward(
    saved: list[Tensor], document_positions: Tensor | None, ring: str, backend: str, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    if not _is_packed(document_positions, ring, backend, window):
        return ring_backward(saved, document_positions, _GROUPS[ring], backend, window)
    *tensors, lse_BHS = saved
    lse_HN, bounds = lse_BHS.transpose(0, 1).flatten(1), _bounds(document_positions, saved[1])
    grads = PACKED_ATTENTION[backend].backward(*(x.flatten(0, 1) for x in tensors), lse_HN, *bounds, window)
    return tuple(grad.view(x.shape) for grad, x in zip(grads, saved[1:4], strict=True))


# Documents' bounds by the tensor of positions. The module torch.utils.weak is private (as of torch 2.11 to 2.14).
_BOUNDS = WeakTensorKeyDictionary()  # all layers share the tensor of positions


def _bounds(document_positions_BS: Tensor | None, q_BSHK: Tensor) -> tuple[Tensor, int]:
    """Return `bounds` and `longest` as PackedAttention takes them, computed on the host from document positions."""
    batch, length = q_BSHK.shape[:2]
    if document_positions_BS is None:
        return torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=q_BSHK.device), length
    if document_positions_BS not in _BOUNDS:
        begins = document_positions_BS == 0
        begins[:, 0] = True  # a sequence may begin in the middle of a document
        bounds = torch.cat([begins.flatten().nonzero().flatten(), torch.tensor([begins.numel()], device="cpu")]).int()
        on_device = bounds.pin_memory().to(q_BSHK.device, non_blocking=True) if q_BSHK.is_cuda else bounds
        _BOUNDS[document_positions_BS] = on_device, int(bounds.diff().max())
    return _BOUNDS[document_positions_BS]
