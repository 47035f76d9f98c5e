"""Ring attention (arXiv:2310.01889): ranks keep their queries and send keys and values to the next rank, once per ring
step, while they attend to the keys that they have. Results over different keys are merged by their log-sum-exp
(FlashAttention, arXiv:2205.14135). In the backward, keys and values are sent around the ring again. Their gradients
follow a step later: every rank adds its terms, and the sums arrive at the keys' owner. A ring of one rank has one step.
Shapes: B batch, S tokens of a ring rank, H query heads, G KV heads, K head_dim."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.parallel.attention import ATTENTION_BACKENDS, float32_or_better
from titanlite.parallel.tiles import Tile, chunks_of, ring_steps, tiles_of_step

Group = dist.ProcessGroup | None  # None stands for a ring of this rank alone


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, document_positions: Tensor | None, ring: Group, backend: str, window: int
) -> tuple[Tensor, Tensor]:
    """Return the output [B, S, H, K] in q's dtype, and the log-sum-exp over all keys, [B, H, S]."""
    out = lse_BSH = None
    dtype = float32_or_better(q) if ring or window else q.dtype  # several tiles are merged in float32 or better
    for _, k_step, v_step, tiles in _keys_of_steps(k, v, document_positions, ring, window):
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


def ring_backward(
    saved: list[Tensor], document_positions: Tensor | None, ring: Group, backend: str, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v in their dtypes. `saved`: grad_out, q, k, v, out, lse_BHS."""
    grad_out, q, k, v, out, lse_BHS = saved
    lse_BSH, dtype = lse_BHS.transpose(1, 2), float32_or_better(q) if ring or window else q.dtype
    dq = dk = dv = None
    distance = 0  # ring steps from the owner of the keys and values to this rank
    for hop, k_step, v_step, tiles in _keys_of_steps(k, v, document_positions, ring, window):
        # Sums of dk and dv arrive from the previous rank while this rank computes its own terms.
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
        dk, dv = _send_ahead(ring, ring.size() - distance, dk, dv)()
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _keys_of_steps(
    k_BSGK: Tensor, v_BSGK: Tensor, document_positions_BS: Tensor | None, ring: Group, window: int
) -> Iterator[tuple[int, Tensor, Tensor, Iterator[Tile]]]:
    """Yield a tuple for each ring step that is not skipped: the number of ring steps since the previous tuple, keys,
    values (first this rank's, then other ranks'), and the tiles to compute. During a step, the next keys arrive."""
    rank, size = (ring.rank(), ring.size()) if ring else (0, 1)
    documents, tokens = chunks_of(document_positions_BS, size), k_BSGK.shape[1]
    kv = torch.stack((k_BSGK, v_BSGK)) if ring else (k_BSGK, v_BSGK)
    steps = ring_steps(tokens, size, window)
    for previous, step, following in zip([0, *steps], steps, [*steps[1:], None], strict=False):
        wait = _send_ahead(ring, following - step, kv) if following else None
        yield step - previous, *kv, tiles_of_step(documents, tokens, rank, (rank - step) % size, size, window)
        if wait:
            (kv,) = wait()


def _send_ahead(ring: dist.ProcessGroup, hop: int, *buffers: Tensor) -> Callable[[], list[Tensor]]:
    """Start to send buffers to the ring rank that is `hop` ranks ahead, and to receive from the rank `hop` ranks
    behind. The returned function waits for the received buffers."""
    rank, size = ring.rank(), ring.size()
    received = [torch.empty_like(buffer) for buffer in buffers]
    sends = [dist.P2POp(dist.isend, x, group=ring, group_peer=(rank + hop) % size) for x in buffers]
    receives = [dist.P2POp(dist.irecv, x, group=ring, group_peer=(rank - hop) % size) for x in received]
    works = dist.batch_isend_irecv(sends + receives)

    def wait() -> list[Tensor]:
        for work in works:
            work.wait()
        return received

    return wait


def _heads_first(index: tuple[slice, slice], flipped: bool, *tensors: Tensor) -> list[Tensor]:
    """Slice a tile from [B, S, heads, ...] tensors. Return [B, heads, S, ...], in reverse order of S if `flipped`."""
    return [(x[index].flip(1) if flipped else x[index]).transpose(1, 2) for x in tensors]


def _tokens_first(flipped: bool, *tensors: Tensor) -> list[Tensor]:
    """Undo the transposition and the reversal of `_heads_first`."""
    return [(x.flip(2) if flipped else x).transpose(1, 2) for x in tensors]


def _write(
    total: Tensor | None, index: tuple[slice, slice], value: Tensor, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    """Return `total` (None: a new tensor) with a tile written at `index`, or the tile itself if it has the `shape`."""
    if value.shape == shape:
        return value.to(dtype).contiguous()
    if total is None:
        total = value.new_empty(shape, dtype=dtype)
    total[index] = value
    return total


def _merge(out_BSHK: Tensor, lse_BSH: Tensor, tile_out_BSHK: Tensor, tile_lse_BSH: Tensor) -> None:
    """Merge a tile's output and log-sum-exp, in place, into the output and log-sum-exp over other keys."""
    weight = torch.sigmoid(tile_lse_BSH - lse_BSH)  # exp(tile_lse) / (exp(lse) + exp(tile_lse))
    out_BSHK.lerp_(tile_out_BSHK.to(out_BSHK.dtype), weight.unsqueeze(-1))
    lse_BSH.copy_(torch.logaddexp(lse_BSH, tile_lse_BSH))
