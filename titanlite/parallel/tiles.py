"""Which queries attend to which keys, as tiles of the attention matrix: plain geometry, without communication.

Zig-zag load balancing: since later queries attend to more keys, the sequence is split into 2 x ring chunks, and ring
rank r has chunks r and 2 x ring - 1 - r (Llama 3, arXiv:2407.21783, section 3.3.2; ring-flash-attention). Each rank
then has the same work in each ring step, and only ring step 0 needs a causal mask. In later ring steps, all queries
attend to the first chunk of an earlier rank's keys, or the second chunk of queries attends to both chunks of a later
rank's keys. Example for two ranks (c: a causal triangle in ring step 0; a digit: the ring step of a full block):

                  keys  0 1 2 3    chunk
                        0 1 1 0    of rank
    queries  0, rank 0  c
             1, rank 1  1 c
             2, rank 1  1 0 c
             3, rank 0  0 1 1 c

Documents need no mask: within a chunk, each document is a causal triangle, and between two chunks, the tokens of a
document that is in both form a rectangle.

A sliding window (Longformer, arXiv:2004.05150; Mistral 7B, arXiv:2310.06825) needs no mask either. A triangle longer
than the window becomes several triangles of the window's length. Where the window ends within a block of earlier keys,
queries see an upper triangle. Every attention backend can compute it, since it is a causal (lower) triangle in reverse
order of queries and keys. Keys that no query sees cost nothing, and ring steps without visible keys are skipped.
Shapes: B batch, S tokens of a ring rank (two chunks, or one without a ring)."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


def local_positions(seq_len: int, *, ring: int, ulysses: int, rank: int) -> Tensor:
    """Return the positions of a rank's tokens in a sequence of `seq_len`, int64 [seq_len / (ring * ulysses)]. `rank` is
    ring rank * ulysses + Ulysses rank. Raises ValueError if `rank` is too large, or the split is not even."""
    n_chunks = 2 * ring if ring > 1 else 1
    if seq_len % n_chunks or seq_len // ring % ulysses:
        raise ValueError(f"{seq_len} tokens cannot be split evenly over ring {ring} x ulysses {ulysses}")
    if not 0 <= rank < ring * ulysses:
        raise ValueError(f"rank {rank} is not one of ring {ring} x ulysses {ulysses}")
    chunks = torch.arange(seq_len, device="cpu").view(n_chunks, -1)
    return chunks[chunk_numbers(rank // ulysses, ring)].flatten().chunk(ulysses)[rank % ulysses]


class Tile(NamedTuple):
    """A tile is one call of an attention backend, given by the indices of queries and keys in [B, S, ...] tensors."""

    queries: tuple[slice, slice]
    keys: tuple[slice, slice]
    causal: bool
    flipped: bool = False
    """Whether the backend gets queries and keys in reverse order, so that `causal` hides the keys before a query."""

    @property
    def on_diagonal(self) -> bool:
        """Whether the tile contains the diagonal. A query's tile on the diagonal is computed first."""
        return self.causal and not self.flipped


def chunk_numbers(rank: int, size: int) -> list[int]:
    """Return the numbers of the chunks that a ring rank has, ascending; `size` is the number of ring ranks."""
    return [rank, 2 * size - 1 - rank] if size > 1 else [0]


class Chunk(NamedTuple):
    """The documents of a chunk, as Python ints: reading them does not wait for a device."""

    position: int
    """Position of the chunk's first token in its document."""
    bounds: list[int]
    """Indices at which documents begin in the chunk, and the end of its last document."""


def chunks_of(document_positions_BS: Tensor | None, size: int) -> list[list[Chunk]] | None:
    """Return the chunks of a ring rank for each sequence of its batch; None if each sequence is one document."""
    if document_positions_BS is None:
        return None

    def chunk_of(positions_C: Tensor) -> Chunk:
        starts = (positions_C[1:] == 0).nonzero().flatten() + 1
        return Chunk(int(positions_C[0]), [0, *starts.tolist(), len(positions_C)])

    n_chunks = len(chunk_numbers(0, size))
    return [[chunk_of(chunk) for chunk in positions.chunk(n_chunks)] for positions in document_positions_BS]


def ring_steps(tokens: int, size: int, window: int) -> list[int]:
    """Return the ring steps in which some rank's queries see a key; every rank gets the same list. In step s of the
    zig-zag, keys are at least s chunks before the queries on some ranks, and at least size - s on the others."""
    length, window = tokens // len(chunk_numbers(0, size)), window or tokens * size
    return [step for step in range(size) if step == 0 or (min(step, size - step) - 1) * length + 1 < window]


def tiles_of_step(
    documents: list[list[Chunk]] | None, tokens: int, rank: int, source: int, size: int, window: int = 0
) -> Iterator[Tile]:
    """Yield tiles that cover all pairs of a query of ring rank `rank` and a visible key of ring rank `source`.
    `tokens`: the number of tokens of a ring rank. If rank = source, a query's tile on the diagonal comes first."""
    own, others = chunk_numbers(rank, size), chunk_numbers(source, size)
    length, window = tokens // len(own), window or tokens * size
    if documents is None and window >= (own[-1] + 1 - others[0]) * length:  # documents and window hide no keys
        queries = slice(None), slice(length if source > rank else 0, tokens)
        keys = slice(None), slice(0, length if source < rank else tokens)
        yield Tile(queries, keys, causal=source == rank)
        return
    if documents is None:
        sequences = [(slice(None), [Chunk(chunk * length, [0, length]) for chunk in own])]
    else:
        sequences = [(slice(b, b + 1), chunks) for b, chunks in enumerate(documents)]
    for b, chunks in sequences:
        for i, (chunk, (position, bounds)) in enumerate(zip(own, chunks, strict=True)):
            for j, other in reversed(list(enumerate(others))):
                distance = (chunk - other) * length
                for queries, keys, *kind in _band(position, bounds, distance, length, window):
                    yield Tile((b, _slice(queries, i * length)), (b, _slice(keys, j * length + distance)), *kind)


_Part = tuple[range, range, bool, bool]  # queries, keys (positions in the queries' chunk), causal, flipped (of Tile)


def _band(position: int, bounds: list[int], distance: int, length: int, window: int) -> Iterator[_Part]:
    """Yield parts that cover the keys that a chunk's queries see in another chunk, `distance` tokens earlier."""
    if distance == 0:
        for begin, end in pairwise(bounds):
            yield from _triangle(begin, end, window)
    elif distance > 0:
        # Only the first document of the queries' chunk can have begun in the keys' chunk.
        keys = range(max(-position, -distance), length - distance)
        if keys:
            yield from _rectangle(range(bounds[1]), keys, window)


def _triangle(begin: int, end: int, window: int) -> Iterator[_Part]:
    """Yield parts that cover a causal triangle of tokens `begin` to `end`, in blocks of `window` tokens: a query sees
    keys of its own block and the previous block only."""
    for start in range(begin, end, window):
        block = range(start, min(start + window, end))
        yield block, block, True, False
        if start > begin:
            yield from _rectangle(block, range(start - window, start), window)


def _rectangle(queries: range, keys: range, window: int) -> Iterator[_Part]:
    """Yield parts that cover the earlier keys that queries see. The first queries see all keys; queries whose window
    begins within the keys see a triangle of them and all later keys; the last queries see none."""
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
