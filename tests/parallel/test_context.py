"""Compare context parallel attention with plain softmax attention under an explicit mask, in float64."""

import contextlib
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.helpers.cases import cases
from titanlite.model import Documents, ScaledDotProductAttention
from titanlite.parallel import attention as attention_backends
from titanlite.parallel import ring as ring_attention
from titanlite.parallel import tiled_attention, tiles
from titanlite.parallel.attention import ATTENTION_BACKENDS
from titanlite.parallel.tiled_attention import TiledAttention
from titanlite.parallel.tiles import local_positions

TOLERANCE = 1e-13
"""Of the largest value: float64 has 1.1e-16, and sums have some dozens of terms."""
NAMES = ("out", "dq", "dk", "dv")
TOKENS = 32  # of a full sequence
K = 8  # head_dim
DOCUMENTS = {
    "short": [[1, 1, 3, 2, 1, 5, 4, 2, 1, 1, 6, 1, 3, 1], [2] * 16, [3, 1] * 8],
    "long": [[32], [1, 31], [31, 1]],
    "chunks": [[4] * 8, [8] * 4, [16] * 2],  # end where chunks do
    "across": [[19, 13], [5, 24, 2, 1], [3, 9, 20]],
}
"""Lengths of the documents of three sequences."""


def document_positions_of(kind: str) -> Tensor:
    """Return positions in documents, [3, TOKENS]."""
    return torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in DOCUMENTS[kind]])


def mask(document_positions: Tensor | None, window: int = 0, tokens: int = TOKENS) -> Tensor:
    """Return which query attends to which key, [B, T, S] or, without documents, [1, T, S]."""
    t = torch.arange(tokens)
    begins = torch.zeros(1, 1) if document_positions is None else t - document_positions
    return (t <= t[:, None]) & (t >= begins[..., None]) & (t > t[:, None] - (window or tokens))


def attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Return the reference, [B, T, H, K]."""
    v = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    return torch.einsum("bhts,bshk->bthk", scores(q, k, allowed).softmax(-1), v)


def scores(q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    return (torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(K)).masked_fill(~allowed.unsqueeze(1), -math.inf)


def draw(batch: int, heads: int, kv_heads: int, tokens: int = TOKENS) -> list[Tensor]:
    """Draw q, k, v and the output's gradient; scores spread wide, so that keys differ in their weight."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(batch, tokens, n, K) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) * 1.5 for shape in shapes]


def gradients(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Return the output and the gradients of q, k, v."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def worst(actual: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """Return the largest difference over the largest value, of each; or over 1, which inputs are like: with a window of
    one token, queries and keys have no gradient."""
    pairs = zip(NAMES, actual, expected, strict=True)
    return {name: ((a - b).abs().max() / b.abs().max().clamp(min=1)).item() for name, a, b in pairs}


def wrong(errors: list[dict[str, float]]) -> set[str]:
    return {name for each in errors for name, error in each.items() if not error < TOLERANCE}


# A test case runs on every rank of a pool. ---------------------------------------------------------------------------


def groups(ring: int, ulysses: int) -> dict[str, Any]:
    """Return TiledAttention's process groups, of a mesh over all ranks."""
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    sizes = {"ring": ring, "ulysses": ulysses}
    return {f"{name}_group": mesh.get_group(name) if size > 1 else None for name, size in sizes.items()}


def differences(
    ring: int,
    ulysses: int,
    kind: str = "",
    heads: tuple[int, int] = (8, 4),
    backend: str = "cpu",
    compiled: bool = False,
    bug: str = "",
    window: int = 0,
) -> dict[str, float]:
    """Compare this rank's output and gradients with its shard of the reference's; `bug` names one of INJECTED_BUGS."""
    document_positions = document_positions_of(kind) if kind else None
    inputs = draw(3 if kind else 2, *heads)
    expected = gradients(lambda *qkv: attention(*qkv, mask(document_positions, window)), *inputs)
    with INJECTED_BUGS[bug]():
        own = tiles.local_positions(TOKENS, ring=ring, ulysses=ulysses, rank=dist.get_rank())
        of_ring_rank = tiles.local_positions(TOKENS, ring=ring, ulysses=1, rank=dist.get_rank() // ulysses)
        documents = Documents(document_positions[:, of_ring_rank]) if kind else None
        attend = TiledAttention(**groups(ring, ulysses), backend=backend, window=window)
        call = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
        actual = gradients(lambda *qkv: call(*qkv, documents), *(x[:, own] for x in inputs))
    return worst(actual, [x[:, own] for x in expected])


def differences_of_windows(ring: int, ulysses: int, windows: list[int], **options: Any) -> list[dict[str, float]]:
    """Return `differences` of several windows; they share process groups, which take long to make."""
    made = groups(ring, ulysses)
    with mock.patch.dict(globals(), groups=lambda *_: made):
        return [differences(ring, ulysses, window=window, **options) for window in windows]


def _neighbouring_chunks() -> Any:
    """Give ranks chunks in order, and attend as if in zig-zag."""
    chunks = {0: [0, 1], 1: [2, 3]}
    return mock.patch.object(
        tiles,
        "local_positions",
        lambda n, *, ring, ulysses, rank: torch.arange(n).view(4, -1)[chunks[rank]].flatten(),
    )


def _chunks_swapped() -> Any:
    """Take the other chunk of the queries or keys, where only one attends."""
    real = tiles.tiles_of_step

    def swapped(documents: Any, tokens: int, *ranks: int) -> Any:
        def swap(index: tuple[slice, slice]) -> tuple[slice, slice]:
            sequences, chunk = index
            other = slice(0, tokens // 2) if chunk.start else slice(tokens // 2, tokens)
            return index if chunk == slice(0, tokens) else (sequences, other)

        for tile in real(documents, tokens, *ranks):
            yield tiles.Tile(swap(tile.queries), swap(tile.keys), tile.causal)

    return mock.patch.object(ring_attention, "tiles_of_step", swapped)


def _mean_of_tiles() -> Any:
    """Merge tiles of the softmax without their weights."""
    return mock.patch.object(ring_attention, "_merge", lambda out, lse, tile, tile_lse: out.add_(tile).div_(2))


def _last_ring_step_left_out() -> Any:
    """Leave the gradients of keys and values with the rank before their owner."""
    real, sent = ring_attention._send_ahead, []

    def send_ahead(ring: Any, hop: int, *buffers: Tensor) -> Any:
        sent.append(len(buffers))
        return (lambda: buffers) if sent.count(2) == dist.get_world_size() else real(ring, hop, *buffers)

    return mock.patch.object(ring_attention, "_send_ahead", send_ahead)


def _documents_too_long() -> Any:
    """End a document that began in another chunk one token too late."""
    real = tiles.chunks_of

    def late(bounds: list[int]) -> list[int]:
        return [0, min(bounds[1] + 1, bounds[-1]), *bounds[2:]]

    def chunks_of(*arguments: Any) -> Any:
        return [[tiles.Chunk(position, late(bounds)) for position, bounds in chunks] for chunks in real(*arguments)]

    return mock.patch.object(ring_attention, "chunks_of", chunks_of)


def _window_too_long() -> Any:
    """Let queries see one key too many of another block."""
    real = tiles._rectangle
    return mock.patch.object(tiles, "_rectangle", lambda queries, keys, window: real(queries, keys, window + 1))


def _not_flipped_back() -> Any:
    """Return results of flipped tiles as they come."""
    return mock.patch.object(ring_attention, "_tokens_first", lambda _, *tensors: [x.transpose(1, 2) for x in tensors])


INJECTED_BUGS: dict[str, Callable[[], Any]] = {
    "": contextlib.nullcontext,
    "order": _neighbouring_chunks,
    "chunks": _chunks_swapped,
    "merge": _mean_of_tiles,
    "last step": _last_ring_step_left_out,
    "documents": _documents_too_long,
    "window": _window_too_long,
    "flip": _not_flipped_back,
}


def torchs_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Return torch's own attention on the full sequence, which has no window but a mask."""
    if not window:
        return ScaledDotProductAttention()(q, k, v)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    allowed = mask(None, window).unsqueeze(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True).transpose(1, 2)


def errors_in_bfloat16(ring: int, ulysses: int, window: int) -> tuple[list[float], list[float]]:
    """Return sums of squared errors of out, dq, dk, dv on this rank's tokens: ours, torch's on the full sequence."""
    inputs = [x.bfloat16() for x in draw(2, 8, 4)]
    own = local_positions(TOKENS, ring=ring, ulysses=ulysses, rank=dist.get_rank())
    exact = gradients(lambda *qkv: attention(*qkv, mask(None, window)), *(x.double() for x in inputs))
    torchs = gradients(lambda *qkv: torchs_attention(*qkv, window), *inputs)
    attend = TiledAttention(**groups(ring, ulysses), backend="cpu", window=window)
    ours = gradients(attend, *(x[:, own] for x in inputs))

    def squares(actual: list[Tensor]) -> list[float]:
        return [(a - b[:, own]).square().sum().item() for a, b in zip(actual, exact, strict=True)]

    return squares(ours), squares([x[:, own] for x in torchs])


def message_sizes(
    ring: int, ulysses: int, batch: int, heads: int, kv_heads: int, window: int = 0
) -> dict[str, list[int]]:
    """Return the number of elements in each message that this rank sends, by pass."""
    sent: dict[str, list[int]] = {}
    p2p, all_to_all = dist.batch_isend_irecv, dist.all_to_all_single

    def count_p2p(operations: list[dist.P2POp]) -> Any:
        sent[phase] += [x.tensor.numel() for x in operations if x.op is dist.isend]
        return p2p(operations)

    def count_all_to_all(received: Tensor, send: Tensor, **arguments: Any) -> Any:
        sent[phase].append(send.numel())
        return all_to_all(received, send, **arguments)

    own = local_positions(TOKENS, ring=ring, ulysses=ulysses, rank=dist.get_rank())
    q, k, v, grad = (x[:, own].requires_grad_() for x in draw(batch, heads, kv_heads))
    attend = TiledAttention(**groups(ring, ulysses), backend="cpu", window=window)
    with mock.patch.multiple(dist, batch_isend_irecv=count_p2p, all_to_all_single=count_all_to_all):
        phase = "forward"
        sent[phase] = []
        out = attend(q, k, v)
        phase = "backward"
        sent[phase] = []
        out.backward(grad)
    return sent


# Attention backends --------------------------------------------------------------------------------------------------

CAUSAL, ALL = mask(None), torch.ones(1, TOKENS, TOKENS, dtype=torch.bool)
by_backend = pytest.mark.parametrize("backend", ["cpu", "math"])
by_heads = pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)


@by_backend
@by_heads
@pytest.mark.parametrize("causal", [True, False])
def test_backend(backend, heads, causal):
    inputs = draw(2, *heads)
    allowed = CAUSAL if causal else ALL
    q, k, v, grad = (x.transpose(1, 2) for x in inputs)
    out, lse = ATTENTION_BACKENDS[backend].forward(q, k, v, causal)
    actual = [out, *ATTENTION_BACKENDS[backend].backward(grad, q, k, v, out, lse, causal)]
    assert [x.shape for x in actual] == [x.shape for x in (q, q, k, v)]
    expected = gradients(lambda *qkv: attention(*qkv, allowed), *inputs)
    assert not wrong([worst([x.transpose(1, 2) for x in actual], expected)])
    torch.testing.assert_close(lse, scores(*inputs[:2], allowed).logsumexp(-1), rtol=TOLERANCE, atol=TOLERANCE)


@by_backend
@by_heads
def test_backward_of_some_keys_from_the_softmax_over_all(backend, heads):
    """Pass the output and log-sum-exp over all keys, and the keys in two slices of unequal length."""
    inputs = draw(2, *heads)
    q, k, v, grad = (x.transpose(1, 2) for x in inputs)
    forward, backward = ATTENTION_BACKENDS[backend]
    slices = [(k[:, :, keys], v[:, :, keys]) for keys in (slice(0, 20), slice(20, None))]
    outs, lses = zip(*(forward(q, *kv, False) for kv in slices), strict=True)
    lse = torch.logaddexp(*lses)
    out = sum(o * (slice_lse - lse).exp().unsqueeze(-1) for o, slice_lse in zip(outs, lses, strict=True))
    dqs, dks, dvs = zip(*(backward(grad, q, *kv, out, lse, False) for kv in slices), strict=True)
    actual = [x.transpose(1, 2) for x in (out, sum(dqs), torch.cat(dks, dim=2), torch.cat(dvs, dim=2))]
    assert not wrong([worst(actual, gradients(lambda *qkv: attention(*qkv, ALL), *inputs))])


def _one_by_one(tensors: list[Tensor], bounds: Tensor) -> Iterator[list[Tensor]]:
    """Yield each document of some [N, ...] as a batch of one."""
    for begin, end in pairwise(bounds.tolist()):
        yield [x[None, begin:end] for x in tensors]


def emulated_packed_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    *qkv, bounds, longest, window = arguments
    assert bounds.dtype == torch.int32
    assert longest == bounds.diff().max()
    results = [ring_attention.ring_forward(*each, None, None, "math", window) for each in _one_by_one(qkv, bounds)]
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, dim=1)[0], torch.cat(lses, dim=2)[0]


def emulated_packed_backward(*arguments: Any) -> tuple[Tensor, ...]:
    *tensors, lse_HN, bounds, _, window = arguments
    documents = _one_by_one([*tensors, lse_HN.T], bounds)
    grads = [
        ring_attention.ring_backward([*each[:-1], each[-1].transpose(1, 2)], None, None, "math", window)
        for each in documents
    ]
    return tuple(torch.cat(x, dim=1)[0] for x in zip(*grads, strict=True))


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("kind", ["", *DOCUMENTS])
def test_varlen_attention_in_one_call(kind, window):
    """What goes to varlen attention and comes back, with its CUDA operators emulated. The first sequence begins in the
    middle of a document."""
    inputs, positions, documents, calls = draw(3, 4, 2), None, None, []
    if kind:
        positions = document_positions_of(kind)
        positions[0, : DOCUMENTS[kind][0][0]] += 7
        documents = Documents(positions)

    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        calls.append(arguments)
        return emulated_packed_forward(*arguments)

    emulated = attention_backends.PackedAttention(forward, emulated_packed_backward)
    attend = TiledAttention(ring_group=None, ulysses_group=None, backend="cpu", window=window)
    expected = gradients(lambda *qkv: attention(*qkv, mask(positions, window)), *inputs)
    with mock.patch.dict(attention_backends.PACKED_ATTENTION, {"cpu": emulated}):
        assert not wrong([worst(gradients(lambda *qkv: attend(*qkv, documents), *inputs), expected)])
    assert len(calls) == (1 if kind or window else 0)


@pytest.mark.parametrize("window", [0, 5])
def test_schemas_of_varlen_attention(window):
    """As test_schemas_of_cuda_backends."""
    q, k, v, grad = (x.to("meta", torch.bfloat16).flatten(0, 1) for x in draw(2, 4, 2))
    bounds = torch.zeros(3, dtype=torch.int32, device="meta")
    out, lse = attention_backends.PACKED_ATTENTION["flash"].forward(q, k, v, bounds, TOKENS, window)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (4, 2 * TOKENS), torch.float32)
    actual = attention_backends.PACKED_ATTENTION["flash"].backward(grad, q, k, v, out, lse, bounds, TOKENS, window)
    assert [(x.shape, x.dtype) for x in actual] == [(x.shape, x.dtype) for x in (q, k, v)]


@pytest.mark.parametrize("backend", ["flash", "cudnn", "efficient"])
def test_schemas_of_cuda_backends(backend):
    """The operators take these calls and return what an AttentionBackend does; on meta tensors, so no values."""
    q, k, v, grad = (x.to("meta", torch.bfloat16).transpose(1, 2) for x in draw(2, 4, 2))
    k, v = k[:, :, :20], v[:, :, :20]
    out, lse = ATTENTION_BACKENDS[backend].forward(q, k, v, False)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    actual = ATTENTION_BACKENDS[backend].backward(grad, q, k, v, out, lse, False)
    assert [(x.shape, x.dtype) for x in actual] == [(x.shape, x.dtype) for x in (q, k, v)]


# The split of the sequence -------------------------------------------------------------------------------------------

DEGREES = [(1, 1), (1, 2), (1, 4), (2, 1), (4, 1), (2, 2), (3, 2)]


@pytest.mark.parametrize(("ring", "ulysses"), DEGREES)
def test_each_position_is_on_one_rank_and_work_is_even(ring, ulysses):
    seq_len = 48
    positions = [local_positions(seq_len, ring=ring, ulysses=ulysses, rank=rank) for rank in range(ring * ulysses)]
    assert sorted(torch.cat(positions).tolist()) == list(range(seq_len))
    assert {(len(each), each.dtype) for each in positions} == {(seq_len // ring // ulysses, torch.int64)}
    pairs = {int((torch.cat(positions[r * ulysses : (r + 1) * ulysses]) + 1).sum()) for r in range(ring)}
    assert pairs == {seq_len * (seq_len + 1) // 2 // ring}


def test_positions_of_two_by_two():
    positions = [local_positions(8, ring=2, ulysses=2, rank=rank).tolist() for rank in range(4)]
    assert positions == [[0, 1], [6, 7], [2, 3], [4, 5]]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_work_of_a_ring_step_is_the_same_on_every_rank(size):
    tokens = 12
    for step in range(size):
        work = []
        for rank in range(size):
            (tile,) = tiles.tiles_of_step(None, tokens, rank, (rank - step) % size, size)
            (_, queries), (_, keys) = tile.queries, tile.keys
            area = (queries.stop - queries.start) * (keys.stop - keys.start)
            work.append(tokens * (tokens + 1) // 2 if tile.causal else area)
        assert len(set(work)) == 1


def covered(tokens: int, size: int, document_positions: Tensor | None, window: int) -> np.ndarray:
    """Return in how many tiles of all ring steps each pair is, [B, T, S]. Assert that tiles on the diagonal come before
    the others of their queries and keys."""
    batch = 1 if document_positions is None else len(document_positions)
    positions = [local_positions(tokens, ring=size, ulysses=1, rank=rank).numpy() for rank in range(size)]
    count = np.zeros((batch, tokens, tokens), np.int64)
    for rank in range(size):
        local = None if document_positions is None else document_positions[:, positions[rank]]
        documents = tiles.chunks_of(local, size)
        for step in tiles.ring_steps(tokens // size, size, window):
            source = (rank - step) % size
            for tile in tiles.tiles_of_step(documents, tokens // size, rank, source, size, window):
                (b, queries), (_, keys) = tile.queries, tile.keys
                queries, keys = positions[rank][queries], positions[source][keys]
                for own in (queries, keys) if step == 0 else ():
                    before = count[b, own, own]
                    assert not before.any() if tile.on_diagonal else before.all()
                if tile.causal:
                    assert len(queries) == len(keys)
                pairs = np.tri(len(queries), dtype=np.int64) if tile.causal else 1
                count[b, queries[:, None], keys] += pairs[::-1, ::-1] if tile.flipped else pairs
    return count


@pytest.mark.parametrize("kind", DOCUMENTS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_tiles_cover_the_mask(size, kind):
    """Every pair that attends is in one tile, and no other is."""
    document_positions = document_positions_of(kind)
    for window in (0, 1, 2, 3, 4, 5, 7, 11, 20, 31):
        count = covered(TOKENS, size, document_positions, window)
        assert (count == mask(document_positions, window).numpy()).all(), window


@pytest.mark.parametrize(("tokens", "size"), [(7, 1), (24, 1), (12, 2), (24, 2), (24, 3), (8, 4), (24, 4), (40, 5)])
def test_tiles_cover_every_window(tokens, size):
    for window in range(tokens + 2):
        assert (covered(tokens, size, None, window) == mask(None, window, tokens).numpy()).all(), window


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_ring_steps_are_those_in_which_a_query_sees_a_key(size):
    tokens = 6
    for window in range(tokens * size + 2):
        steps = [
            step
            for step in range(size)
            if any(
                list(tiles.tiles_of_step(None, tokens, rank, (rank - step) % size, size, window))
                for rank in range(size)
            )
        ]
        assert tiles.ring_steps(tokens, size, window) == steps
    assert tiles.ring_steps(tokens, size, 0) == list(range(size))


@pytest.mark.parametrize("kind", ["", *DOCUMENTS])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_window_that_does_not_bind_leaves_tiles_as_they_are(size, kind):
    tokens, equal = TOKENS // size, 0
    for rank in range(size):
        own = local_positions(TOKENS, ring=size, ulysses=1, rank=rank)
        documents = tiles.chunks_of(document_positions_of(kind)[:, own], size) if kind else None
        for source in range(size):
            pair = documents, tokens, rank, source, size
            without = list(tiles.tiles_of_step(*pair))
            keys = local_positions(TOKENS, ring=size, ulysses=1, rank=source)
            farthest = int(own.max() - keys.min())
            for window in range(1, TOKENS + 2):
                if window > farthest:
                    assert list(tiles.tiles_of_step(*pair, window)) == without
                    equal += window < TOKENS
    assert equal or size == 1
    if kind:
        longest = max(length for lengths in DOCUMENTS[kind] for length in lengths)
        assert list(tiles.tiles_of_step(*pair, longest)) == without


@pytest.mark.parametrize("window", [1, 2, 5, 8, 16, 31])
@pytest.mark.parametrize("kind", ["", "across"])
def test_number_of_calls_of_a_window(kind, window):
    """Calls compute the pairs of the band and no others, so none is masked; their number grows with length / window."""
    documents = Documents(document_positions_of(kind)) if kind else None
    shapes, (forward, backward) = {"forward": [], "backward": []}, ATTENTION_BACKENDS["cpu"]

    def count_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
        shapes["forward"].append((len(q), q.shape[2], k.shape[2], causal))
        return forward(q, k, v, causal)

    def count_backward(grad: Tensor, q: Tensor, k: Tensor, *rest: Any) -> Any:
        shapes["backward"].append((len(q), q.shape[2], k.shape[2], rest[-1]))
        return backward(grad, q, k, *rest)

    counting = attention_backends.AttentionBackend(count_forward, count_backward)
    attend = TiledAttention(ring_group=None, ulysses_group=None, backend="cpu", window=window)
    with mock.patch.dict(ATTENTION_BACKENDS, {"cpu": counting}):
        gradients(lambda *qkv: attend(*qkv, documents), *draw(3, 4, 2))
    assert shapes["forward"] == shapes["backward"]
    pairs = sum(b * (n * (n + 1) // 2 if causal else n * m) for b, n, m, causal in shapes["forward"])
    allowed = mask(document_positions_of(kind) if kind else None, window).expand(3, -1, -1)
    assert pairs == allowed.sum()
    lengths = [length for document in DOCUMENTS[kind] for length in document] if kind else [TOKENS]
    # All blocks have a triangle, all but the first also a flipped one, and a shorter last one also a rectangle.
    assert len(shapes["forward"]) <= sum(2 * math.ceil(length / window) for length in lengths)


@pytest.mark.parametrize(
    ("seq_len", "ring", "ulysses", "rank"), [(6, 2, 1, 0), (12, 2, 4, 0), (10, 1, 4, 0), (8, 2, 1, 2), (8, 2, 1, -1)]
)
def test_positions_that_are_rejected(seq_len, ring, ulysses, rank):
    with pytest.raises(ValueError, match=f"ring {ring} x ulysses {ulysses}"):
        local_positions(seq_len, ring=ring, ulysses=ulysses, rank=rank)


def test_inputs_that_are_rejected():
    attend = TiledAttention(ring_group=None, ulysses_group=None, backend="cpu")
    q, k, v, _ = draw(2, 4, 2)
    with pytest.raises(
        ValueError, match=r"document_positions: expected \[2, 32\] in host memory, got \[2, 31\] on cpu"
    ):
        attend(q, k, v, Documents(torch.zeros(2, 31, dtype=torch.int64)))
    with pytest.raises(ValueError, match="on meta"):
        attend(q, k, v, Documents(torch.zeros(2, 32, dtype=torch.int64, device="meta")))
    attend.ulysses_size = 4
    with pytest.raises(ValueError, match="4 query heads and 2 KV heads"):
        attend(q, k, v)
    attend.ulysses_size, attend.ring_size = 1, 2
    with pytest.raises(ValueError, match="31 tokens"):
        attend(q[:, :31], k[:, :31], v[:, :31])


# The attention ------------------------------------------------------------------------------------------------------

KINDS = ["", *DOCUMENTS]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ring", "ulysses"), DEGREES[:-1])
def test_equals_attention_on_the_full_sequence(ranks, ring, ulysses, kind):
    assert not wrong(ranks(ring * ulysses).run(differences, ring=ring, ulysses=ulysses, kind=kind))


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (6, 2)], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "math"])
def test_heads_and_backends(ranks, heads, backend):
    degrees = [(2, 1), *([(1, 2)] if heads[1] > 1 else [])]
    for ring, ulysses in degrees:
        errors = ranks(2).run(differences, ring=ring, ulysses=ulysses, kind="across", heads=heads, backend=backend)
        assert not wrong(errors)


WINDOWS = [1, 2, 3, 4, 5, 8, 13, 31, 32, 100]
"""Chunks of rings of 2 and 4 ranks have 8 and 4 tokens."""


@cases(
    ("ring", "ulysses", "kind"),
    [(*degrees, kind) for degrees in DEGREES[:-1] for kind in KINDS],
    always=[(1, 4, "across"), *((*each, kind) for each in ((1, 1), (1, 2), (2, 1), (4, 1)) for kind in KINDS)],
)
def test_windows(ranks, ring, ulysses, kind):
    errors = ranks(ring * ulysses).run(differences_of_windows, ring=ring, ulysses=ulysses, windows=WINDOWS, kind=kind)
    for window, *of_ranks in zip(WINDOWS, *errors, strict=True):
        assert not wrong(of_ranks), window


@pytest.mark.parametrize("kind", ["", "across"])
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (2, 1), (1, 2)])
def test_windows_with_the_math_backend(ranks, ring, ulysses, kind):
    options = {"ring": ring, "ulysses": ulysses, "windows": WINDOWS, "kind": kind, "backend": "math"}
    assert not wrong(
        [error for errors in ranks(ring * ulysses).run(differences_of_windows, **options) for error in errors]
    )


@pytest.mark.nightly
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("kind", ["", "across"])
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (1, 2), (2, 1)])
def test_compiled_without_a_graph_break(ranks, ring, ulysses, kind, window):
    options = {"ring": ring, "ulysses": ulysses, "kind": kind, "compiled": True, "window": window}
    assert not wrong(ranks(ring * ulysses).run(differences, **options))


@pytest.mark.parametrize(
    ("bug", "kind", "window", "first"),
    [
        ("order", "", 0, "out"),
        ("chunks", "", 0, "out"),
        ("merge", "", 0, "out"),
        ("last step", "", 0, "dk"),
        ("documents", "across", 0, "out"),
        ("window", "", 3, "out"),
        ("window", "across", 5, "out"),
        ("flip", "", 5, "out"),
    ],
)
def test_injected_bug_fails(ranks, bug, kind, window, first):
    errors = ranks(2).run(differences, ring=2, ulysses=1, kind=kind, bug=bug, window=window)
    assert next(name for name in NAMES if max(each[name] for each in errors) > 1e-3) == first


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_models_own_attention(kind):
    tiled = TiledAttention(ring_group=None, ulysses_group=None, backend="cpu")
    documents = Documents(document_positions_of(kind)) if kind else None
    inputs = draw(3, 4, 2)
    actual, expected = (
        gradients(lambda *qkv, attend=attend: attend(*qkv, documents), *inputs)
        for attend in (tiled, ScaledDotProductAttention())
    )
    assert not wrong([worst(actual, expected)])


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("kind", ["", "across"])
def test_operator(kind, window):
    """Run torch's own checks of schema, fake tensors, autograd and functionalization."""
    q, k, v, _ = (x.requires_grad_() for x in draw(3, 4, 2))
    positions = document_positions_of(kind) if kind else None
    torch.library.opcheck(tiled_attention._attention, (q, k, v, positions, None, "", "", "cpu", window))


@pytest.mark.nightly
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2)])
def test_bfloat16_is_as_exact_as_torchs(ranks, ring, ulysses, window):
    errors = ranks(ring * ulysses).run(errors_in_bfloat16, ring=ring, ulysses=ulysses, window=window)
    ours, torchs = (torch.tensor(each).sum(0).sqrt() for each in zip(*errors, strict=True))
    assert (ours <= 2 * torchs).all(), (ours / torchs).tolist()
    assert (torchs > 0).all()


def tiles_without_products() -> attention_backends.AttentionBackend:
    """Return a backend whose results show how tiles are summed: an output is the queries, or twice the queries of a
    tile off the diagonal, and all log-sum-exps are 0; a gradient is 256, or 1 off the diagonal."""

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        return q * (2 - causal), q.new_zeros(q.shape[:3], dtype=attention_backends.float32_or_better(q))

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Any:
        return tuple(torch.full_like(x, 256 if causal else 1) for x in (q, k, v))

    return attention_backends.AttentionBackend(forward, backward)


def sums_of_tiles(dtype: torch.dtype, ring: int) -> list[Tensor]:
    """Return the output and the gradients of q, k and v on this rank, with queries from 1 to 2."""
    q = (1 + torch.rand(2, TOKENS // ring, 4, K, generator=torch.Generator().manual_seed(0))).bfloat16().to(dtype)
    with mock.patch.dict(ATTENTION_BACKENDS, stub=tiles_without_products()):
        return gradients(TiledAttention(**groups(ring, 1), backend="stub"), q, q[:, :, :2], q[:, :, :2], q)


def bfloat16_against_float64(ring: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(sums_of_tiles(dtype, ring) for dtype in (torch.bfloat16, torch.float64)), strict=True))


def test_sums_over_a_ring_are_rounded_to_bfloat16_once(ranks):
    """Sums of gradients are whole numbers, exact in float32: bfloat16 would lose each 1 that is added to 256. A mean of
    outputs may differ by one rounding, 2^-8, and by those of up to 8 merges in float32."""
    for (out, exact_out), *of_gradients in ranks(4).run(bfloat16_against_float64, ring=4):
        assert ((out - exact_out).abs() <= (2**-8 + 8 * 2**-22) * exact_out).all()
        for gradient, exact in of_gradients:
            assert torch.equal(gradient, exact.bfloat16())
            assert exact.max() >= 258


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (4, 1), (2, 2), (1, 2)])
def test_communication_volume(ranks, ring, ulysses):
    """Only KV heads are sent around the ring; an all-to-all sends q, k and v in one message."""
    batch, heads, kv_heads = 2, 8, 4
    kv = 2 * batch * kv_heads * (TOKENS // ring // ulysses) * K
    q = batch * heads * (TOKENS // ring // ulysses) * K
    before, after = ([q + kv], [q]) if ulysses > 1 else ([], [])
    options = {"ring": ring, "ulysses": ulysses, "batch": batch, "heads": heads, "kv_heads": kv_heads}
    for sent in ranks(ring * ulysses).run(message_sizes, **options):
        assert sent["forward"] == [*before, *[kv] * (ring - 1), *after]
        # keys and values once more, and their gradients one ring step farther, to their owner
        grads = [kv // 2] * 2 * (ring if ring > 1 else 0)
        assert sorted(sent["backward"]) == sorted([*after, *[kv] * (ring - 1), *grads, *before])


@pytest.mark.parametrize(("window", "hops"), [(1, 0), (2, 2), (5, 2), (6, 3), (0, 3)])
def test_ring_steps_that_a_window_skips_are_not_sent(ranks, window, hops):
    """Of a ring of 4, with chunks of 4 tokens. Neighbouring chunks are on neighbouring ranks, in either direction."""
    options = {"ring": 4, "ulysses": 1, "batch": 2, "heads": 4, "kv_heads": 2, "window": window}
    kv = 2 * options["batch"] * options["kv_heads"] * (TOKENS // 4) * K
    for sent in ranks(4).run(message_sizes, **options):
        assert sent["forward"] == [kv] * hops
        assert sorted(sent["backward"]) == sorted([kv] * hops + [kv // 2] * 2 * (hops + 1 if hops else 0))
