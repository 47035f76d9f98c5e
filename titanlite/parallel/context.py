"""Context parallelism: every sequence is cut over ranks, and only attention talks across the cuts.

Ring x Ulysses (USP, arXiv:2405.07719). Ulysses ranks (DeepSpeed-Ulysses, arXiv:2309.14509) trade heads for sequence in
an all-to-all before attention and back after it: each then has some heads of all tokens that they hold together. Ring
ranks (Ring Attention, arXiv:2310.01889) keep their queries and pass keys and values on to the next rank, a step a rank,
while they attend with those that they have; results over different keys are merged by their log-sum-exp
(FlashAttention, arXiv:2205.14135), in float32 or better. In the backward, keys and values go round again, a step ahead
of their gradients, which every rank adds to and which end at their owner.

Zig-zag: under a causal mask later queries see more keys. The sequence is cut into 2 x ring chunks, and ring rank r
holds chunks r and 2 x ring - 1 - r (Llama 3, arXiv:2407.21783, section 3.3.2; ring-flash-attention), so that each rank
has the same work in each step, with no masked part in it after the first: of the keys of a rank before, the first
chunk is seen by all queries and the second by none; the keys of a rank behind are all seen by the second chunk of
queries and not by the first.

Documents need no mask either. They are contiguous, so of two chunks the pairs that share a document form a rectangle,
and within a chunk each document is a causal triangle.

Shapes: B batch, T tokens that this rank holds, S tokens that its Ulysses ranks hold together (T x Ulysses ranks; two
chunks, or one without a ring), H query heads, G key and value heads, N heads of all that a message holds, U Ulysses
ranks, K head size. Heads are a U-th of the layer's wherever S stands with them.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.model import Llama
from titanlite.parallel.attention import ATTENTION_BACKENDS


def local_positions(seq_len: int, *, ring: int, ulysses: int, rank: int) -> Tensor:
    """Which tokens of a sequence a rank holds, in the order in which it holds them.

    Args:
        seq_len: tokens of the whole sequence.
        ring: ring ranks.
        ulysses: Ulysses ranks.
        rank: ring rank * ulysses + Ulysses rank.

    Returns:
        int64 [seq_len / (ring * ulysses)].

    Raises:
        ValueError: if the sequence cannot be cut evenly, or there is no such rank.
    """
    chunks = 2 * ring if ring > 1 else 1
    if seq_len % chunks or seq_len // ring % ulysses:
        raise ValueError(f"{seq_len} tokens cannot be cut evenly over ring {ring} x ulysses {ulysses}")
    if not 0 <= rank < ring * ulysses:
        raise ValueError(f"rank {rank} is not one of ring {ring} x ulysses {ulysses}")
    ring_rank, ulysses_rank = divmod(rank, ulysses)
    positions = torch.arange(seq_len, device="cpu").view(chunks, -1)
    return positions[_chunks(ring_rank, ring)].flatten().chunk(ulysses)[ulysses_rank]


def apply_context_parallel(
    model: Llama, *, ring_group: dist.ProcessGroup | None, ulysses_group: dist.ProcessGroup | None, kernel: str
) -> None:
    """Replace the inner attention of every block of a model or a stage. Arguments: see ContextAttention."""
    for block in model.layers.values():
        block.attention.inner_attention = ContextAttention(
            ring_group=ring_group, ulysses_group=ulysses_group, kernel=kernel
        )


class ContextAttention(nn.Module):
    """model.ScaledDotProductAttention over sequences that are cut as `local_positions` says.

    Args:
        ring_group: ranks that pass keys and values on; None: only this one.
        ulysses_group: ranks that trade heads for sequence; None: only this one.
        kernel: name in attention.ATTENTION_BACKENDS.
    """

    def __init__(
        self, *, ring_group: dist.ProcessGroup | None, ulysses_group: dist.ProcessGroup | None, kernel: str
    ) -> None:
        super().__init__()
        self.ring, self.ulysses, self.kernel = _register(ring_group), _register(ulysses_group), kernel
        self.ring_size, self.ulysses_size = _place(self.ring)[1], _place(self.ulysses)[1]

    def forward(
        self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, document_positions_BS: Tensor | None = None
    ) -> Tensor:
        """Head h attends with key head h * G // H.

        Args:
            document_positions_BS: position in its document of each token that this rank's Ulysses ranks hold together (not
                only this rank's), int64 in host memory: tokens attend only within theirs. None: a sequence is one
                document.

        Returns:
            [B, T, H, K].

        Raises:
            ValueError: if heads or tokens cannot be cut evenly, or the documents' shape or device is another.
        """
        batch, tokens, *_ = q_BTHK.shape
        sequence = tokens * self.ulysses_size
        if q_BTHK.shape[2] % self.ulysses_size or k_BTGK.shape[2] % self.ulysses_size:
            raise ValueError(
                f"{q_BTHK.shape[2]} query heads and {k_BTGK.shape[2]} key heads cannot be cut evenly over ulysses "
                f"{self.ulysses_size}"
            )
        if self.ring_size > 1 and sequence % 2:
            raise ValueError(f"{sequence} tokens of a ring rank cannot be cut into two chunks")
        if document_positions_BS is not None and (
            document_positions_BS.shape != (batch, sequence) or not document_positions_BS.is_cpu
        ):
            raise ValueError(
                f"documents: expected [{batch}, {sequence}] in host memory, got {list(document_positions_BS.shape)} on "
                f"{document_positions_BS.device}"
            )
        return _attention(q_BTHK, k_BTGK, v_BTGK, document_positions_BS, self.ring, self.ulysses, self.kernel)[0]


# Groups reach the operators by name, since arguments of operators are tensors, numbers and strings.
_GROUPS: dict[str, dist.ProcessGroup] = {}


def _register(group: dist.ProcessGroup | None) -> str:
    """A name to find it by; "" for one that is not needed."""
    if group is None or group.size() == 1:
        return ""
    _GROUPS[group.group_name] = group
    return group.group_name


def _place(group: str) -> tuple[int, int]:
    """This rank's number in a group, and the number of ranks in it."""
    return (_GROUPS[group].rank(), _GROUPS[group].size()) if group else (0, 1)


# The operators: opaque to torch.compile, so that it neither breaks its graph here nor moves the messages. -------------


@torch.library.custom_op("titanlite::context_attention", mutates_args=())
def _attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    document_positions_BS: Tensor | None,
    ring: str,
    ulysses: str,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output [B, T, H, K] and, for the backward, log-sum-exp [B, H, S] and, with Ulysses only, what was attended with
    and what came out of it before the way back: q, k, v in one [B, S, N, K], and [B, S, H, K]."""
    if not ulysses:
        out_BTHK, lse_BHS = _ring_forward(q_BTHK, k_BTGK, v_BTGK, document_positions_BS, ring, kernel)
        return out_BTHK, lse_BHS, q_BTHK.new_empty(0), q_BTHK.new_empty(0)  # outputs must not be inputs
    qkv_BSNK = _sequence_for_heads([q_BTHK, k_BTGK, v_BTGK], ulysses)
    q, k, v = qkv_BSNK.split(_heads(q_BTHK, k_BTGK, ulysses), dim=2)
    inner_BSHK, lse_BHS = _ring_forward(q, k, v, document_positions_BS, ring, kernel)
    (out_BTHK,) = _heads_for_sequence([inner_BSHK], ulysses)
    return out_BTHK, lse_BHS, qkv_BSNK, inner_BSHK


@_attention.register_fake
def _(q_BTHK, k_BTGK, v_BTGK, document_positions_BS, ring, ulysses, kernel):
    batch, tokens, heads, head_dim = q_BTHK.shape
    own_heads, n_ulysses = _heads(q_BTHK, k_BTGK, ulysses), _place(ulysses)[1]
    sequence = tokens * n_ulysses
    lse = q_BTHK.new_empty(batch, own_heads[0], sequence, dtype=_lse_type(q_BTHK))
    qkv, inner = (
        q_BTHK.new_empty((batch, sequence, n, head_dim) if ulysses else 0) for n in (sum(own_heads), own_heads[0])
    )
    return q_BTHK.new_empty(batch, tokens, heads, head_dim), lse, qkv, inner


@torch.library.custom_op("titanlite::context_attention_backward", mutates_args=())
def _attention_backward(
    grad_out_BTHK: Tensor,
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    out_BSHK: Tensor,
    lse_BHS: Tensor,
    document_positions_BS: Tensor | None,
    ring: str,
    ulysses: str,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out = _sequence_for_heads([grad_out_BTHK], ulysses) if ulysses else grad_out_BTHK.contiguous()
    saved = grad_out, q_BSHK, k_BSGK, v_BSGK, out_BSHK, lse_BHS
    grads = _ring_backward(*saved, documents=document_positions_BS, ring=ring, kernel=kernel)
    return tuple(_heads_for_sequence(grads, ulysses)) if ulysses else grads


@_attention_backward.register_fake
def _(grad_out_BTHK, q_BSHK, k_BSGK, v_BSGK, out_BSHK, lse_BHS, document_positions_BS, ring, ulysses, kernel):
    batch, tokens, _, head_dim = grad_out_BTHK.shape
    n = _place(ulysses)[1]
    return tuple(x.new_empty(batch, tokens, x.shape[2] * n, head_dim) for x in (q_BSHK, k_BSGK, v_BSGK))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, documents, *ctx.names = inputs
    out, lse, qkv, inner = output
    ulysses = ctx.names[1]
    ctx.set_materialize_grads(False)  # of the other outputs: they have none
    ctx.mark_non_differentiable(lse, qkv, inner)
    attended = (*qkv.split(_heads(q, k, ulysses), dim=2), inner) if ulysses else (q, k, v, out)
    ctx.save_for_backward(*attended, lse, documents)


def _backward(ctx: Any, grad_out: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    return *_attention_backward(grad_out, *ctx.saved_tensors, *ctx.names), None, None, None, None


_attention.register_autograd(_backward, setup_context=_setup_context)


# Ulysses --------------------------------------------------------------------------------------------------------------


def _heads(q_BTHK: Tensor, k_BTGK: Tensor, ulysses: str) -> list[int]:
    """Heads of q, k and v that a rank attends with."""
    return [x.shape[2] // _place(ulysses)[1] for x in (q_BTHK, k_BTGK, k_BTGK)]


def _sequence_for_heads(held: list[Tensor], ulysses: str) -> Tensor:
    """Several [B, T, heads, K] to one [B, S, N, K]: of each, all tokens of this rank's share of heads."""
    send_UBTNK = torch.cat([x.unflatten(2, (_place(ulysses)[1], -1)).movedim(2, 0) for x in held], dim=3)
    return _all_to_all(send_UBTNK, ulysses).movedim(0, 1).flatten(1, 2)


def _heads_for_sequence(held: list[Tensor], ulysses: str) -> list[Tensor]:
    """The way back: several [B, S, heads, K] to as many [B, T, heads x U, K]."""
    send_UBTNK = torch.cat([x.unflatten(1, (_place(ulysses)[1], -1)).movedim(1, 0) for x in held], dim=3)
    parts = _all_to_all(send_UBTNK, ulysses).split([x.shape[2] for x in held], dim=3)
    # Cloned, since outputs of an operator must not share memory, and with one head each these would.
    return [part.movedim(0, 2).clone(memory_format=torch.contiguous_format).flatten(2, 3) for part in parts]


def _all_to_all(send: Tensor, group: str) -> Tensor:
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=_GROUPS[group])
    return received


# Ring -----------------------------------------------------------------------------------------------------------------


def _ring_forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, ring: str, kernel: str
) -> tuple[Tensor, Tensor]:
    """Output [B, S, H, K] in q's type, and the log-sum-exp over all keys, [B, H, S]."""
    out = lse_BSH = None
    for k_held, v_held, pieces in _rounds(k, v, documents, ring):
        for piece in pieces:
            qkv = *_at(piece.queries, q), *_at(piece.keys, k_held, v_held)
            part, part_lse = (x.transpose(1, 2) for x in ATTENTION_BACKENDS[kernel].forward(*qkv, piece.causal))
            if piece.causal:
                out = _assign(out, piece.queries, part, q.shape, _sum_type(q, ring))
                lse_BSH = _assign(lse_BSH, piece.queries, part_lse, q.shape[:3], part_lse.dtype)
            else:
                _merge(out[piece.queries], lse_BSH[piece.queries], part, part_lse)
    return out.to(q.dtype), lse_BSH.transpose(1, 2).contiguous()


def _ring_backward(*saved: Tensor, documents: Tensor | None, ring: str, kernel: str) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v in their types, from (grad_out, q, k, v, out, lse_BHS)."""
    grad_out, q, k, v, out, lse_BHS = saved
    lse_BSH = lse_BHS.transpose(1, 2)
    dq = dk = dv = None
    for step, (k_held, v_held, pieces) in enumerate(_rounds(k, v, documents, ring)):
        # The sums arrive from the rank before while this rank works on its own share of them.
        arrive = _pass_on(ring, dk, dv) if step else None
        shares = []
        for piece in pieces:
            grad_, q_, out_, lse_ = _at(piece.queries, grad_out, q, out, lse_BSH)
            k_, v_ = _at(piece.keys, k_held, v_held)
            grads = ATTENTION_BACKENDS[kernel].backward(grad_, q_, k_, v_, out_, lse_, piece.causal)
            dq_part, dk_part, dv_part = (x.transpose(1, 2) for x in grads)
            if piece.causal:
                dq = _assign(dq, piece.queries, dq_part, q.shape, _sum_type(q, ring))
                dk = _assign(dk, piece.keys, dk_part, k.shape, _sum_type(k, ring))
                dv = _assign(dv, piece.keys, dv_part, v.shape, _sum_type(v, ring))
            else:
                dq[piece.queries].add_(dq_part)
                shares.append((piece.keys, dk_part, dv_part))
        dk, dv = arrive() if arrive else (dk, dv)
        for keys, dk_part, dv_part in shares:
            dk[keys].add_(dk_part)
            dv[keys].add_(dv_part)
    if ring:
        dk, dv = _pass_on(ring, dk, dv)()
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _rounds(
    k_BSGK: Tensor, v_BSGK: Tensor, document_positions_BS: Tensor | None, ring: str
) -> Iterator[tuple[Tensor, Tensor, Iterator["_Piece"]]]:
    """Keys and values of each ring rank, this one's first, and what is to be done with them; meanwhile they travel."""
    rank, size = _place(ring)
    spans = _spans(document_positions_BS, size)
    held = torch.stack((k_BSGK, v_BSGK)) if ring else (k_BSGK, v_BSGK)
    for step in range(size):
        arrive = _pass_on(ring, held) if step < size - 1 else None
        yield *held, _pieces(spans, k_BSGK.shape[1], rank, (rank - step) % size, size)
        if arrive:
            (held,) = arrive()


def _pass_on(ring: str, *buffers: Tensor) -> Callable[[], list[Tensor]]:
    """Begin to send to the next ring rank and to receive as much from the one before; the result waits for it."""
    rank, size = _place(ring)
    received = [torch.empty_like(buffer) for buffer in buffers]
    to, by = ({"group": _GROUPS[ring], "group_peer": (rank + shift) % size} for shift in (1, -1))
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, **to) for x in buffers] + [dist.P2POp(dist.irecv, x, **by) for x in received]
    )

    def arrive() -> list[Tensor]:
        for work in works:
            work.wait()
        return received

    return arrive


def _sum_type(x: Tensor, ring: str) -> torch.dtype:
    """In which partial results over other keys are added up; with no other rank there are none."""
    return _lse_type(x) if ring else x.dtype


def _lse_type(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _at(index: tuple[slice, slice], *tensors: Tensor) -> list[Tensor]:
    """Parts of [B, S, heads, ...] as kernels take them, heads before tokens."""
    return [x[index].transpose(1, 2) for x in tensors]


def _assign(
    total: Tensor | None, index: tuple[slice, slice], part: Tensor, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    """total[index] = part, for parts that fill it without overlap; one that fills it alone is not copied."""
    if part.shape == shape:
        return part.to(dtype).contiguous()
    if total is None:
        total = part.new_empty(shape, dtype=dtype)
    total[index] = part
    return total


def _merge(out_BSHK: Tensor, lse_BSH: Tensor, part_BSHK: Tensor, part_lse_BSH: Tensor) -> None:
    """Turn, in place, softmax over some keys into that over these and a part's keys."""
    weight = torch.sigmoid(part_lse_BSH - lse_BSH)  # exp(part_lse) of exp(lse) + exp(part_lse)
    out_BSHK.lerp_(part_BSHK.to(out_BSHK.dtype), weight.unsqueeze(-1))
    lse_BSH.copy_(torch.logaddexp(lse_BSH, part_lse_BSH))


# Which queries attend to which keys -----------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """A call of the kernel: which part of [B, S, ...] are its queries and which its keys."""

    queries: tuple[slice, slice]
    keys: tuple[slice, slice]
    causal: bool


def _chunks(rank: int, size: int) -> list[int]:
    """The chunks of the whole sequence that a ring rank holds, in its order."""
    return [rank, 2 * size - 1 - rank] if size > 1 else [0]


Spans = list[list[tuple[int, list[int]]]]
"""Of each sequence, of each chunk held: the first token's position in its document; where documents begin and end."""


def _spans(document_positions_BS: Tensor | None, size: int) -> Spans | None:
    """See Spans; in plain numbers, so that nothing waits for a device."""
    if document_positions_BS is None:
        return None

    def span(positions_C: Tensor) -> tuple[int, list[int]]:
        begins = (positions_C[1:] == 0).nonzero().flatten().add(1).tolist()
        return int(positions_C[0]), [0, *begins, len(positions_C)]

    return [[span(chunk) for chunk in row.chunk(len(_chunks(0, size)))] for row in document_positions_BS]


def _pieces(spans: Spans | None, tokens: int, rank: int, source: int, size: int) -> Iterator[_Piece]:
    """All pairs of queries that ring rank `rank` holds and keys that `source` does, `tokens` (S) each, that attend.

    The causal ones, which there are if both are one rank, come first for their queries and for their keys, and cover
    every one of them once.
    """
    length = tokens // len(_chunks(rank, size))
    if spans is None:
        queries = slice(None), slice(length if source > rank else 0, tokens)
        keys = slice(None), slice(0, length if source < rank else tokens)
        yield _Piece(queries, keys, causal=source == rank)
        return
    for b, row in enumerate(spans):
        for i, (chunk, (position, ends)) in enumerate(zip(_chunks(rank, size), row, strict=True)):
            for j, other in reversed(list(enumerate(_chunks(source, size)))):
                if other == chunk:
                    for begin, end in pairwise(ends):
                        document = slice(b, b + 1), slice(i * length + begin, i * length + end)
                        yield _Piece(document, document, causal=True)
                elif other < chunk:
                    # Only the document that holds this chunk's first token can have begun in the other one.
                    begin = max((chunk - other) * length - position, 0)
                    if begin < length:
                        queries = slice(b, b + 1), slice(i * length, i * length + ends[1])
                        keys = slice(b, b + 1), slice(j * length + begin, (j + 1) * length)
                        yield _Piece(queries, keys, causal=False)
