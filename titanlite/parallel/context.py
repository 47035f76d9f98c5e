"""Context parallel (CP): every sequence is split over ranks, and only attention communicates between its shards.

Ring x Ulysses (USP, arXiv:2405.07719). Ulysses ranks (DeepSpeed-Ulysses, arXiv:2309.14509) exchange sequence for heads
in an all-to-all before attention and back after it, so that each attends with some heads of all their tokens. Ring
ranks (Ring Attention, arXiv:2310.01889) keep their queries and send keys and values to the next rank, once per ring
step, while they attend to those that they have; results over different keys are merged by their log-sum-exp
(FlashAttention, arXiv:2205.14135). In the backward, keys and values are sent around the ring again, one step ahead of
their gradients, to which every rank adds and which end at their owner.

Zig-zag load balancing: later queries attend to more keys. The sequence is split into 2 x ring chunks, and ring rank r
has chunks r and 2 x ring - 1 - r (Llama 3, arXiv:2407.21783, section 3.3.2; ring-flash-attention). So each rank has the
same work in each ring step, and after the first none of it is masked: of an earlier rank's keys all queries attend to
the first chunk and none to the second; to a later rank's keys only the second chunk of queries attends.

Documents need no mask either: of two chunks the pairs that share a document form a rectangle, and within a chunk each
document is a causal triangle. Both are called tiles of the attention matrix.

Nor does a sliding window (Longformer, arXiv:2004.05150; Mistral 7B, arXiv:2310.06825), which bounds the keys of a query
from the left: a triangle that is longer than the window becomes triangles of its length, and where the bound moves
through a block of earlier keys, what a query sees of them is a triangle of the opposite kind. It is causal once queries
and keys are in reverse order, so that every attention backend computes it. Of keys that no query sees nothing is
computed, and ring steps in which no rank's queries see a key are skipped.

Shapes: B batch, T tokens of this rank, S tokens of all its Ulysses ranks (two chunks, or one without a ring), H query
heads, G KV heads, N heads of all in a message, U Ulysses ranks, K head_dim. Where S stands, heads are a U-th of them.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.model import Documents, Llama
from titanlite.parallel.attention import ATTENTION_BACKENDS, PACKED_ATTENTION, float32_or_better


def local_positions(seq_len: int, *, ring: int, ulysses: int, rank: int) -> Tensor:
    """Return the positions of a rank's tokens in their sequence of `seq_len`, int64 [seq_len / (ring * ulysses)].

    `rank` is ring rank * ulysses + Ulysses rank. Raise ValueError if it does not exist, or the split is not even.
    """
    n_chunks = 2 * ring if ring > 1 else 1
    if seq_len % n_chunks or seq_len // ring % ulysses:
        raise ValueError(f"{seq_len} tokens cannot be split evenly over ring {ring} x ulysses {ulysses}")
    if not 0 <= rank < ring * ulysses:
        raise ValueError(f"rank {rank} is not one of ring {ring} x ulysses {ulysses}")
    chunks = torch.arange(seq_len, device="cpu").view(n_chunks, -1)
    return chunks[_chunks(rank // ulysses, ring)].flatten().chunk(ulysses)[rank % ulysses]


class ContextAttention(nn.Module):
    """Computes model.ScaledDotProductAttention over sequences that `local_positions` splits.

    The ranks of `ring_group` send keys and values around a ring, those of `ulysses_group` exchange sequence for heads;
    None: only this rank. `backend` is a name in attention.ATTENTION_BACKENDS. With a `window` above 0, position t of a
    sequence attends to positions t - window + 1 to t of its document only.
    """

    def __init__(
        self,
        ring_group: dist.ProcessGroup | None,
        ulysses_group: dist.ProcessGroup | None,
        backend: str,
        window: int = 0,
    ):
        super().__init__()
        self.ring, self.ulysses, self.backend = _register(ring_group), _register(ulysses_group), backend
        self.window = window
        self.ring_size, self.ulysses_size = _rank_and_size(self.ring)[1], _rank_and_size(self.ulysses)[1]

    def forward(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, documents: Documents | None = None) -> Tensor:
        """Return [B, T, H, K]. Query head h attends to KV head h * G // H. Raise ValueError if heads or tokens cannot
        be split evenly, or the positions in documents have another shape or device.

        Args:
            documents: of all tokens of this rank's Ulysses ranks, [B, S], not only of this rank's. None: a sequence is
                one document.
        """
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
        window = self.window if self.window < sequence * self.ring_size else 0  # which is the same
        return _attention(q_BTHK, k_BTGK, v_BTGK, positions, self.ring, self.ulysses, self.backend, window)[0]


def apply_context_parallel(
    model: Llama,
    ring_group: dist.ProcessGroup | None,
    ulysses_group: dist.ProcessGroup | None,
    backend: str,
    window: int = 0,
) -> None:
    """Replace the inner attention of every block of a model or a stage. The arguments are ContextAttention's."""
    for block in model.layers.values():
        block.attention.inner_attention = ContextAttention(ring_group, ulysses_group, backend, window)


_GROUPS: dict[str, dist.ProcessGroup | None] = {}  # by name: arguments of operators are tensors, numbers and strings


def _register(group: dist.ProcessGroup | None) -> str:
    """Return the name by which operators find a process group; "" for this rank only."""
    name = group.group_name if group is not None and group.size() > 1 else ""
    _GROUPS[name] = group
    return name


def _rank_and_size(group: str) -> tuple[int, int]:
    return (_GROUPS[group].rank(), _GROUPS[group].size()) if group else (0, 1)


# The operators: opaque to torch.compile, so that it neither breaks its graph here nor moves the communication. --------
@torch.library.custom_op("titanlite::context_attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_positions: Tensor | None,
    ring: str,
    ulysses: str,
    backend: str,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the output [B, T, H, K] and, saved for backward, the log-sum-exp [B, H, S] and, with Ulysses only, the
    inputs and the output of attention between the all-to-alls: q, k, v in one [B, S, N, K], and [B, S, H, K]."""
    if not ulysses:
        empty = q.new_empty(0), q.new_empty(0)  # outputs must not be inputs
        return *_ring_forward(q, k, v, document_positions, ring, backend, window), *empty
    qkv_BSNK = _sequence_to_heads([q, k, v], ulysses)
    qkv = qkv_BSNK.split(_local_heads(q, k, ulysses), dim=2)
    inner_BSHK, lse_BHS = _ring_forward(*qkv, document_positions, ring, backend, window)
    (out_BTHK,) = _heads_to_sequence([inner_BSHK], ulysses)
    return out_BTHK, lse_BHS, qkv_BSNK, inner_BSHK


@_attention.register_fake
def _(q, k, v, document_positions, ring, ulysses, backend, window):
    batch, tokens, _, head_dim = q.shape
    heads, sequence = _local_heads(q, k, ulysses), tokens * _rank_and_size(ulysses)[1]
    lse = q.new_empty(batch, heads[0], sequence, dtype=float32_or_better(q))
    qkv, inner = (batch, sequence, sum(heads), head_dim), (batch, sequence, heads[0], head_dim)
    return q.new_empty(q.shape), lse, q.new_empty(qkv if ulysses else 0), q.new_empty(inner if ulysses else 0)


@torch.library.custom_op("titanlite::context_attention_backward", mutates_args=())
def _attention_backward(
    grad_out: Tensor,
    saved: list[Tensor],
    document_positions: Tensor | None,
    ring: str,
    ulysses: str,
    backend: str,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, from grad_out [B, T, H, K] and saved (q, k, v, out, lse), all with S tokens."""
    grad_out = _sequence_to_heads([grad_out], ulysses) if ulysses else grad_out.contiguous()
    grads = _ring_backward([grad_out, *saved], document_positions, ring, backend, window)
    return tuple(_heads_to_sequence(grads, ulysses)) if ulysses else grads


@_attention_backward.register_fake
def _(grad_out, saved, document_positions, ring, ulysses, backend, window):
    batch, tokens, _, head_dim = grad_out.shape
    n = _rank_and_size(ulysses)[1]
    return tuple(x.new_empty(batch, tokens, x.shape[2] * n, head_dim) for x in saved[:3])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, document_positions, *ctx.options = inputs
    out, lse, qkv, inner = output
    ulysses = ctx.options[1]
    ctx.set_materialize_grads(False)  # of the other outputs: they have none
    ctx.mark_non_differentiable(lse, qkv, inner)
    attended = (*qkv.split(_local_heads(q, k, ulysses), dim=2), inner) if ulysses else (q, k, v, out)
    ctx.save_for_backward(*attended, lse, document_positions)


def _backward(ctx: Any, grad_out: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    *saved, document_positions = ctx.saved_tensors
    return *_attention_backward(grad_out, saved, document_positions, *ctx.options), None, None, None, None, None


_attention.register_autograd(_backward, setup_context=_setup_context)


# Ulysses --------------------------------------------------------------------------------------------------------------
def _local_heads(q_BTHK: Tensor, k_BTGK: Tensor, ulysses: str) -> list[int]:
    """Return the numbers of heads of q, k and v that a rank attends with."""
    return [x.shape[2] // _rank_and_size(ulysses)[1] for x in (q_BTHK, k_BTGK, k_BTGK)]


def _sequence_to_heads(tensors: list[Tensor], ulysses: str) -> Tensor:
    """Turn several [B, T, heads, K] into one [B, S, N, K]: of each, this rank's shard of heads for all tokens."""
    send_UBTNK = torch.cat([x.unflatten(2, (_rank_and_size(ulysses)[1], -1)).movedim(2, 0) for x in tensors], dim=3)
    return _all_to_all(send_UBTNK, ulysses).movedim(0, 1).flatten(1, 2)


def _heads_to_sequence(tensors: list[Tensor], ulysses: str) -> list[Tensor]:
    """Turn several [B, S, heads, K] into as many [B, T, heads x U, K]."""
    send_UBTNK = torch.cat([x.unflatten(1, (_rank_and_size(ulysses)[1], -1)).movedim(1, 0) for x in tensors], dim=3)
    received = _all_to_all(send_UBTNK, ulysses).split([x.shape[2] for x in tensors], dim=3)
    # Cloned, since outputs of an operator must not share memory, and with one head each these would.
    return [x.movedim(0, 2).clone(memory_format=torch.contiguous_format).flatten(2, 3) for x in received]


def _all_to_all(send: Tensor, group: str) -> Tensor:
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=_GROUPS[group])
    return received


# Ring -----------------------------------------------------------------------------------------------------------------
def _ring_forward(
    q: Tensor, k: Tensor, v: Tensor, document_positions: Tensor | None, ring: str, backend: str, window: int
) -> tuple[Tensor, Tensor]:
    """Return the output [B, S, H, K] in q's dtype, and the log-sum-exp over all keys, [B, H, S]."""
    if _is_packed(document_positions, ring, backend, window):
        return _packed_forward(q, k, v, document_positions, backend, window)
    out = lse_BSH = None
    dtype = float32_or_better(q) if ring or window else q.dtype  # in which results over other keys are merged
    for _, k_step, v_step, tiles in _ring_steps(k, v, document_positions, ring, window):
        for tile in tiles:
            (q_,) = _heads_first(tile.queries, tile.flipped, q)
            k_, v_ = _heads_first(tile.keys, tile.flipped, k_step, v_step)
            results = ATTENTION_BACKENDS[backend].forward(q_, k_, v_, tile.causal)
            tile_out, tile_lse = _tokens_first(tile.flipped, *results)
            if tile.on_diagonal:
                out = _write(out, tile.queries, tile_out, q.shape, dtype)
                lse_BSH = _write(lse_BSH, tile.queries, tile_lse, q.shape[:3], tile_lse.dtype)
            else:
                _merge(out[tile.queries], lse_BSH[tile.queries], tile_out, tile_lse)
    return out.to(q.dtype), lse_BSH.transpose(1, 2).contiguous()


def _ring_backward(
    saved: list[Tensor], document_positions: Tensor | None, ring: str, backend: str, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v in their dtypes, from (grad_out, q, k, v, out, lse_BHS)."""
    grad_out, q, k, v, out, lse_BHS = saved
    if _is_packed(document_positions, ring, backend, window):
        return _packed_backward(saved, document_positions, backend, window)
    lse_BSH, dtype = lse_BHS.transpose(1, 2), float32_or_better(q) if ring or window else q.dtype
    dq = dk = dv = None
    distance = 0  # by which keys and values are sent from their owner so far, in ring ranks
    for hop, k_step, v_step, tiles in _ring_steps(k, v, document_positions, ring, window):
        # The sums arrive from the previous rank while this rank computes what it adds to them.
        wait = _send_ahead(ring, hop, dk, dv) if hop else None
        distance += hop
        added = []
        for tile in tiles:
            grad_, q_, out_, lse_ = _heads_first(tile.queries, tile.flipped, grad_out, q, out, lse_BSH)
            k_, v_ = _heads_first(tile.keys, tile.flipped, k_step, v_step)
            grads = ATTENTION_BACKENDS[backend].backward(grad_, q_, k_, v_, out_, lse_, tile.causal)
            tile_dq, tile_dk, tile_dv = _tokens_first(tile.flipped, *grads)
            if tile.on_diagonal:
                dq = _write(dq, tile.queries, tile_dq, q.shape, dtype)
                dk = _write(dk, tile.keys, tile_dk, k.shape, dtype)
                dv = _write(dv, tile.keys, tile_dv, v.shape, dtype)
            else:
                dq[tile.queries].add_(tile_dq)
                added.append((tile.keys, tile_dk, tile_dv))
        dk, dv = wait() if wait else (dk, dv)
        for keys, tile_dk, tile_dv in added:
            dk[keys].add_(tile_dk)
            dv[keys].add_(tile_dv)
    if distance:
        dk, dv = _send_ahead(ring, _rank_and_size(ring)[1] - distance, dk, dv)()
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _ring_steps(
    k_BSGK: Tensor, v_BSGK: Tensor, document_positions_BS: Tensor | None, ring: str, window: int
) -> Iterator[tuple[int, Tensor, Tensor, Iterator["_Tile"]]]:
    """Yield the keys and values of each ring rank, this one's first, and the tiles to compute as they are sent on; and
    before them, by how many ring ranks they were sent on since the previous ones."""
    rank, size = _rank_and_size(ring)
    documents, tokens = _documents(document_positions_BS, size), k_BSGK.shape[1]
    kv = torch.stack((k_BSGK, v_BSGK)) if ring else (k_BSGK, v_BSGK)
    steps = _steps(tokens, size, window)
    for previous, step, following in zip([0, *steps], steps, [*steps[1:], None], strict=False):
        wait = _send_ahead(ring, following - step, kv) if following else None
        yield step - previous, *kv, _tiles(documents, tokens, rank, (rank - step) % size, size, window)
        if wait:
            (kv,) = wait()


def _send_ahead(ring: str, hop: int, *buffers: Tensor) -> Callable[[], list[Tensor]]:
    """Start sending to the ring rank that is `hop` ahead, and receiving from the one as far behind; return a function
    that waits for it."""
    rank, size = _rank_and_size(ring)
    received = [torch.empty_like(buffer) for buffer in buffers]
    sends = [dist.P2POp(dist.isend, x, group=_GROUPS[ring], group_peer=(rank + hop) % size) for x in buffers]
    receives = [dist.P2POp(dist.irecv, x, group=_GROUPS[ring], group_peer=(rank - hop) % size) for x in received]
    works = dist.batch_isend_irecv(sends + receives)

    def wait() -> list[Tensor]:
        for work in works:
            work.wait()
        return received

    return wait


def _heads_first(index: tuple[slice, slice], flipped: bool, *tensors: Tensor) -> list[Tensor]:
    """Slice [B, S, heads, ...] tensors, with heads before tokens as attention backends take them; with the order of
    tokens reversed if the tile is `flipped`."""
    return [(x[index].flip(1) if flipped else x[index]).transpose(1, 2) for x in tensors]


def _tokens_first(flipped: bool, *tensors: Tensor) -> list[Tensor]:
    """Undo the transposition and the reversal of `_heads_first`."""
    return [(x.flip(2) if flipped else x).transpose(1, 2) for x in tensors]


def _write(
    total: Tensor | None, index: tuple[slice, slice], value: Tensor, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    """Set total[index] = value, for tiles that fill it without overlap; one that fills it alone is not copied."""
    if value.shape == shape:
        return value.to(dtype).contiguous()
    if total is None:
        total = value.new_empty(shape, dtype=dtype)
    total[index] = value
    return total


def _merge(out_BSHK: Tensor, lse_BSH: Tensor, tile_out_BSHK: Tensor, tile_lse_BSH: Tensor) -> None:
    """Extend, in place, a softmax over some keys by the keys of a tile."""
    weight = torch.sigmoid(tile_lse_BSH - lse_BSH)  # exp(tile_lse) of exp(lse) + exp(tile_lse)
    out_BSHK.lerp_(tile_out_BSHK.to(out_BSHK.dtype), weight.unsqueeze(-1))
    lse_BSH.copy_(torch.logaddexp(lse_BSH, tile_lse_BSH))


# Documents, or a window, without a ring: one call for all ------------------------------------------------------------
def _is_packed(document_positions: Tensor | None, ring: str, backend: str, window: int) -> bool:
    return not ring and backend in PACKED_ATTENTION and (document_positions is not None or window > 0)


def _packed_forward(
    q: Tensor, k: Tensor, v: Tensor, document_positions: Tensor | None, backend: str, window: int
) -> tuple[Tensor, Tensor]:
    qkv, bounds = (x.flatten(0, 1) for x in (q, k, v)), _bounds(document_positions, q)
    out_NHK, lse_HN = PACKED_ATTENTION[backend].forward(*qkv, *bounds, window)
    return out_NHK.view(q.shape), lse_HN.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()


def _packed_backward(
    saved: list[Tensor], document_positions: Tensor | None, backend: str, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, lse_BHS = saved
    lse_HN, bounds = lse_BHS.transpose(0, 1).flatten(1), _bounds(document_positions, saved[1])
    grads = PACKED_ATTENTION[backend].backward(*(x.flatten(0, 1) for x in tensors), lse_HN, *bounds, window)
    return tuple(grad.view(x.shape) for grad, x in zip(grads, saved[1:4], strict=True))


def _bounds(document_positions_BS: Tensor | None, q_BSHK: Tensor) -> tuple[Tensor, int]:
    """Return PackedAttention's bounds and longest. Those of documents are computed on the host, and copied without
    waiting."""
    batch, length = q_BSHK.shape[:2]
    if document_positions_BS is None:
        return torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=q_BSHK.device), length
    begins = document_positions_BS == 0
    begins[:, 0] = True  # also where a sequence begins in the middle of a document
    bounds = torch.cat([begins.flatten().nonzero().flatten(), torch.tensor([begins.numel()], device="cpu")]).int()
    return bounds.to(q_BSHK.device, non_blocking=True), int(bounds.diff().max())


# Which queries attend to which keys -----------------------------------------------------------------------------------
class _Tile(NamedTuple):
    """A tile is one call of an attention backend: indices of its queries and of its keys into [B, S, ...]."""

    queries: tuple[slice, slice]
    keys: tuple[slice, slice]
    causal: bool
    flipped: bool = False
    """The backend gets queries and keys in reverse order: if `causal`, each of them attends to its own key and those
    after it."""

    @property
    def on_diagonal(self) -> bool:
        """Whether queries attend to their own keys. Each query has one such tile, and merges the others into it."""
        return self.causal and not self.flipped


def _chunks(rank: int, size: int) -> list[int]:
    """Return the chunks of the sequence that a ring rank has, in its order."""
    return [rank, 2 * size - 1 - rank] if size > 1 else [0]


Documents = list[list[tuple[int, list[int]]]]  # of each sequence, of each chunk of a rank


def _documents(document_positions_BS: Tensor | None, size: int) -> Documents | None:
    """Return, for each chunk, its first token's position in its document, and where documents begin and end in it. They
    are plain numbers, so that nothing waits for a device."""
    if document_positions_BS is None:
        return None

    def of_chunk(positions_C: Tensor) -> tuple[int, list[int]]:
        starts = (positions_C[1:] == 0).nonzero().flatten() + 1
        return int(positions_C[0]), [0, *starts.tolist(), len(positions_C)]

    n_chunks = len(_chunks(0, size))
    return [[of_chunk(chunk) for chunk in positions.chunk(n_chunks)] for positions in document_positions_BS]


def _steps(tokens: int, size: int, window: int) -> list[int]:
    """Return the ring steps in which a query of any rank sees a key. They are the same on every rank.

    In step s, some ranks have keys of chunks that are s before theirs, and the others, by zig-zag, of chunks that are
    size - s before theirs; all other pairs of chunks are farther from each other.
    """
    length, window = tokens // len(_chunks(0, size)), window or tokens * size
    return [step for step in range(size) if step == 0 or (min(step, size - step) - 1) * length + 1 < window]


def _tiles(
    documents: Documents | None, tokens: int, rank: int, source: int, size: int, window: int = 0
) -> Iterator[_Tile]:
    """Yield tiles of all pairs that attend, of queries of ring rank `rank` and keys of `source`, `tokens` (S) each. If
    both are one rank, those on the diagonal cover each query and key once, before other tiles that have them."""
    own, others = _chunks(rank, size), _chunks(source, size)
    length, window = tokens // len(own), window or tokens * size
    if documents is None and window >= (own[-1] + 1 - others[0]) * length:  # from the first key to the last query
        queries = slice(None), slice(length if source > rank else 0, tokens)
        keys = slice(None), slice(0, length if source < rank else tokens)
        yield _Tile(queries, keys, causal=source == rank)
        return
    if documents is None:
        sequences = [(slice(None), [(chunk * length, [0, length]) for chunk in own])]
    else:
        sequences = [(slice(b, b + 1), chunks) for b, chunks in enumerate(documents)]
    for b, chunks in sequences:
        for i, (chunk, (position, bounds)) in enumerate(zip(own, chunks, strict=True)):
            for j, other in reversed(list(enumerate(others))):
                distance = (chunk - other) * length
                for queries, keys, *kind in _band(position, bounds, distance, length, window):
                    yield _Tile((b, _slice(queries, i * length)), (b, _slice(keys, j * length + distance)), *kind)


_Part = tuple[range, range, bool, bool]  # queries and keys, counted from a chunk's first token; causal, flipped


def _band(position: int, bounds: list[int], distance: int, length: int, window: int) -> Iterator[_Part]:
    """Yield what queries of a chunk, which `_documents` describes, see of the keys of the one `distance` before it."""
    if distance == 0:
        for begin, end in pairwise(bounds):
            yield from _triangle(begin, end, window)
    elif distance > 0:
        # Only the document of this chunk's first token can have begun in the other one.
        keys = range(max(-position, -distance), length - distance)
        if keys:
            yield from _rectangle(range(bounds[1]), keys, window)


def _triangle(begin: int, end: int, window: int) -> Iterator[_Part]:
    """Yield what tokens begin to end see of each other: blocks of the window's length, and of the block before each."""
    for start in range(begin, end, window):
        block = range(start, min(start + window, end))
        yield block, block, True, False
        if start > begin:
            yield from _rectangle(block, range(start - window, start), window)


def _rectangle(queries: range, keys: range, window: int) -> Iterator[_Part]:
    """Yield what queries see of keys before them: the first ones all of them; those whose window begins within the keys
    a triangle, and all keys to the right of it; and the last ones none."""
    begin = min(max(keys.start + window, queries.start), queries.stop)
    end = max(min(keys.stop + window - 1, queries.stop), begin)
    if begin > queries.start:
        yield range(queries.start, begin), keys, False, False
    if end > begin:
        partly, left = range(begin, end), range(begin - window + 1, end - window + 1)
        if left.stop < keys.stop:
            yield partly, range(left.stop, keys.stop), False, False
        yield partly, left, True, True


def _slice(tokens: range, shift: int) -> slice:
    return slice(tokens.start + shift, tokens.stop + shift)
