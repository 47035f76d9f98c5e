"""Attention in pieces and over ranks against plain softmax attention with an explicit mask, in float64."""

import contextlib
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from titanlite.model import ScaledDotProductAttention
from titanlite.parallel import context
from titanlite.parallel.attention import ATTENTION_BACKENDS
from titanlite.parallel.context import ContextAttention, apply_context_parallel, local_positions

TOLERANCE = 1e-13
"""Of the largest value: float64 has 1.1e-16, and sums have some dozens of terms."""
NAMES = ("out", "dq", "dk", "dv")
TOKENS = 32  # of a whole sequence
K = 8  # head size
DOCUMENTS = {
    "short": [[1, 1, 3, 2, 1, 5, 4, 2, 1, 1, 6, 1, 3, 1], [2] * 16, [3, 1] * 8],
    "long": [[32], [1, 31], [31, 1]],
    "chunks": [[4] * 8, [8] * 4, [16] * 2],  # end where chunks do
    "across": [[19, 13], [5, 24, 2, 1], [3, 9, 20]],
}
"""Lengths of the documents of three sequences."""


def documents_of(kind: str) -> Tensor:
    """Positions in documents, [3, TOKENS]."""
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in DOCUMENTS[kind]])


def mask(documents: Tensor | None) -> Tensor:
    """Which query sees which key, [B, T, S] or, without documents, [1, T, S]."""
    t = torch.arange(TOKENS)
    begins = torch.zeros(1, 1) if documents is None else t - documents
    return (t <= t[:, None]) & (t >= begins[..., None])


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """The reference, [B, T, H, K]."""
    v = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    return torch.einsum("bhts,bshk->bthk", scores(q, k, seen).softmax(-1), v)


def scores(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    return (torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(K)).masked_fill(~seen.unsqueeze(1), -math.inf)


def draw(batch: int, heads: int, kv_heads: int, tokens: int = TOKENS) -> list[Tensor]:
    """q, k, v and the output's gradient; scores spread wide, so that parts of the softmax differ in weight."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(batch, tokens, n, K) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) * 1.5 for shape in shapes]


def gradients(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Output and gradients of q, k, v."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def worst(found: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """Largest difference over the largest value, of each."""
    pairs = zip(NAMES, found, expected, strict=True)
    return {name: ((a - b).abs().max() / b.abs().max()).item() for name, a, b in pairs}


def wrong(errors: list[dict[str, float]]) -> set[str]:
    return {name for each in errors for name, error in each.items() if not error < TOLERANCE}


# A case runs on every rank of a pool. -------------------------------------------------------------------------------


def groups(ring: int, ulysses: int) -> dict[str, Any]:
    """ContextAttention's groups, of a mesh over all ranks."""
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    sizes = {"ring": ring, "ulysses": ulysses}
    return {f"{name}_group": mesh.get_group(name) if size > 1 else None for name, size in sizes.items()}


def differences(
    ring: int,
    ulysses: int,
    kind: str = "",
    heads: tuple[int, int] = (8, 4),
    kernel: str = "cpu",
    compiled: bool = False,
    broken: str = "",
) -> dict[str, float]:
    """This rank's output and gradients against its part of the reference's; `broken` names a part to break first."""
    documents = documents_of(kind) if kind else None
    inputs = draw(3 if kind else 2, *heads)
    expected = gradients(lambda *qkv: attention(*qkv, mask(documents)), *inputs)
    with BROKEN[broken]():
        own = context.local_positions(TOKENS, ring=ring, ulysses=ulysses, rank=dist.get_rank())
        together = context.local_positions(TOKENS, ring=ring, ulysses=1, rank=dist.get_rank() // ulysses)
        held = documents if documents is None else documents[:, together]
        attend = ContextAttention(**groups(ring, ulysses), kernel=kernel)
        call = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
        found = gradients(lambda *qkv: call(*qkv, held), *(x[:, own] for x in inputs))
    return worst(found, [x[:, own] for x in expected])


def _neighbouring_chunks() -> Any:
    """Ranks hold chunks in order and attend as if in zig-zag."""
    held = {0: [0, 1], 1: [2, 3]}
    return mock.patch.object(
        context, "local_positions", lambda n, *, ring, ulysses, rank: torch.arange(n).view(4, -1)[held[rank]].flatten()
    )


def _halves_swapped() -> Any:
    """The other chunk of the queries or keys, where only one attends."""
    real = context._pieces

    def swapped(spans: Any, tokens: int, *ranks: int) -> Any:
        def swap(side: tuple[slice, slice]) -> tuple[slice, slice]:
            rows, part = side
            half = slice(0, tokens // 2) if part.start else slice(tokens // 2, tokens)
            return side if part == slice(0, tokens) else (rows, half)

        for piece in real(spans, tokens, *ranks):
            yield context._Piece(swap(piece.queries), swap(piece.keys), piece.causal)

    return mock.patch.object(context, "_pieces", swapped)


def _mean_of_parts() -> Any:
    """Parts of the softmax merged without their weights."""
    return mock.patch.object(context, "_merge", lambda out, lse, part, part_lse: out.add_(part).div_(2))


def _last_step_home_left_out() -> Any:
    """Gradients of keys and values stay with the rank before their owner."""
    real, sent = context._pass_on, []

    def pass_on(ring: str, *buffers: Tensor) -> Any:
        sent.append(len(buffers))
        return (lambda: buffers) if sent.count(2) == dist.get_world_size() else real(ring, *buffers)

    return mock.patch.object(context, "_pass_on", pass_on)


def _documents_too_long() -> Any:
    """Of a document that began in another chunk, a token too many is taken for part of it."""
    real = context._spans

    def late(ends: list[int]) -> list[int]:
        return [0, min(ends[1] + 1, ends[-1]), *ends[2:]]

    return mock.patch.object(
        context, "_spans", lambda *arguments: [[(at, late(ends)) for at, ends in row] for row in real(*arguments)]
    )


BROKEN: dict[str, Callable[[], Any]] = {
    "": contextlib.nullcontext,
    "order": _neighbouring_chunks,
    "halves": _halves_swapped,
    "merge": _mean_of_parts,
    "home": _last_step_home_left_out,
    "documents": _documents_too_long,
}


def errors_in_bfloat16(ring: int, ulysses: int) -> tuple[list[float], list[float]]:
    """Sums of squared errors of out, dq, dk, dv on this rank's tokens: ours, and torch's on the whole sequence."""
    inputs = [x.bfloat16() for x in draw(2, 8, 4)]
    own = local_positions(TOKENS, ring=ring, ulysses=ulysses, rank=dist.get_rank())
    exact = gradients(lambda *qkv: attention(*qkv, mask(None)), *(x.double() for x in inputs))
    torchs = gradients(ScaledDotProductAttention(), *inputs)
    ours = gradients(ContextAttention(**groups(ring, ulysses), kernel="cpu"), *(x[:, own] for x in inputs))

    def squares(found: list[Tensor]) -> list[float]:
        return [(a - b[:, own]).square().sum().item() for a, b in zip(found, exact, strict=True)]

    return squares(ours), squares([x[:, own] for x in torchs])


def traffic(ring: int, ulysses: int, batch: int, heads: int, kv_heads: int) -> dict[str, list[int]]:
    """Elements in each message that this rank sends."""
    sent: dict[str, list[int]] = {}
    p2p, all_to_all = dist.batch_isend_irecv, dist.all_to_all_single

    def count_p2p(operations: list[dist.P2POp]) -> Any:
        sent[part] += [x.tensor.numel() for x in operations if x.op is dist.isend]
        return p2p(operations)

    def count_all_to_all(received: Tensor, send: Tensor, **others: Any) -> Any:
        sent[part].append(send.numel())
        return all_to_all(received, send, **others)

    own = local_positions(TOKENS, ring=ring, ulysses=ulysses, rank=dist.get_rank())
    q, k, v, grad = (x[:, own].requires_grad_() for x in draw(batch, heads, kv_heads))
    attend = ContextAttention(**groups(ring, ulysses), kernel="cpu")
    with mock.patch.multiple(dist, batch_isend_irecv=count_p2p, all_to_all_single=count_all_to_all):
        part = "forward"
        sent[part] = []
        out = attend(q, k, v)
        part = "backward"
        sent[part] = []
        out.backward(grad)
    return sent


# Kernels ------------------------------------------------------------------------------------------------------------

CAUSAL, ALL = mask(None), torch.ones(1, TOKENS, TOKENS, dtype=torch.bool)
by_kernel = pytest.mark.parametrize("kernel", ["cpu", "math"])
by_heads = pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)


@by_kernel
@by_heads
@pytest.mark.parametrize("causal", [True, False])
def test_kernel(kernel, heads, causal):
    inputs = draw(2, *heads)
    seen = CAUSAL if causal else ALL
    q, k, v, grad = (x.transpose(1, 2) for x in inputs)
    out, lse = ATTENTION_BACKENDS[kernel].forward(q, k, v, causal)
    found = [out, *ATTENTION_BACKENDS[kernel].backward(grad, q, k, v, out, lse, causal)]
    assert [x.shape for x in found] == [x.shape for x in (q, q, k, v)]
    expected = gradients(lambda *qkv: attention(*qkv, seen), *inputs)
    assert not wrong([worst([x.transpose(1, 2) for x in found], expected)])
    torch.testing.assert_close(lse, scores(*inputs[:2], seen).logsumexp(-1), rtol=TOLERANCE, atol=TOLERANCE)


@by_kernel
@by_heads
def test_backward_of_a_part_from_the_whole_softmax(kernel, heads):
    """Output and log-sum-exp over all keys, keys in two parts of unequal length."""
    inputs = draw(2, *heads)
    q, k, v, grad = (x.transpose(1, 2) for x in inputs)
    forward, backward = ATTENTION_BACKENDS[kernel]
    parts = [(k[:, :, keys], v[:, :, keys]) for keys in (slice(0, 20), slice(20, None))]
    outs, lses = zip(*(forward(q, *kv, False) for kv in parts), strict=True)
    lse = torch.logaddexp(*lses)
    out = sum(o * (part - lse).exp().unsqueeze(-1) for o, part in zip(outs, lses, strict=True))
    dqs, dks, dvs = zip(*(backward(grad, q, *kv, out, lse, False) for kv in parts), strict=True)
    found = [x.transpose(1, 2) for x in (out, sum(dqs), torch.cat(dks, dim=2), torch.cat(dvs, dim=2))]
    assert not wrong([worst(found, gradients(lambda *qkv: attention(*qkv, ALL), *inputs))])


@pytest.mark.parametrize("kernel", ["flash", "cudnn", "efficient"])
def test_schemas_of_cuda_kernels(kernel):
    """The calls are what the operators take, and give what a Kernel gives; on meta tensors, so no values."""
    q, k, v, grad = (x.to("meta", torch.bfloat16).transpose(1, 2) for x in draw(2, 4, 2))
    k, v = k[:, :, :20], v[:, :, :20]
    out, lse = ATTENTION_BACKENDS[kernel].forward(q, k, v, False)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    found = ATTENTION_BACKENDS[kernel].backward(grad, q, k, v, out, lse, False)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in (q, k, v)]


# The cut ------------------------------------------------------------------------------------------------------------

DEGREES = [(1, 1), (1, 2), (1, 4), (2, 1), (4, 1), (2, 2), (3, 2)]


@pytest.mark.parametrize(("ring", "ulysses"), DEGREES)
def test_positions_are_dealt_out_once_and_evenly(ring, ulysses):
    seq_len = 48
    held = [local_positions(seq_len, ring=ring, ulysses=ulysses, rank=rank) for rank in range(ring * ulysses)]
    assert sorted(torch.cat(held).tolist()) == list(range(seq_len))
    assert {(len(part), part.dtype) for part in held} == {(seq_len // ring // ulysses, torch.int64)}
    pairs = {int((torch.cat(held[r * ulysses : (r + 1) * ulysses]) + 1).sum()) for r in range(ring)}
    assert pairs == {seq_len * (seq_len + 1) // 2 // ring}


def test_positions_of_two_by_two():
    held = [local_positions(8, ring=2, ulysses=2, rank=rank).tolist() for rank in range(4)]
    assert held == [[0, 1], [6, 7], [2, 3], [4, 5]]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_work_of_a_step_is_the_same_on_every_rank(size):
    tokens = 12
    for step in range(size):
        work = []
        for rank in range(size):
            (piece,) = context._pieces(None, tokens, rank, (rank - step) % size, size)
            (_, queries), (_, keys) = piece.queries, piece.keys
            area = (queries.stop - queries.start) * (keys.stop - keys.start)
            work.append(tokens * (tokens + 1) // 2 if piece.causal else area)
        assert len(set(work)) == 1


@pytest.mark.parametrize("kind", DOCUMENTS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_pieces_are_the_mask(size, kind):
    """Every pair that attends is in one piece, and no other is; a causal piece is the first of its queries and keys."""
    documents = documents_of(kind)
    held = [local_positions(TOKENS, ring=size, ulysses=1, rank=rank) for rank in range(size)]
    found = torch.zeros(3, TOKENS, TOKENS, dtype=torch.int64)
    for rank in range(size):
        spans = context._spans(documents[:, held[rank]], size)
        for step in range(size):
            source = (rank - step) % size
            for (rows, queries), (_, keys), causal in context._pieces(spans, TOKENS // size, rank, source, size):
                block = rows, held[rank][queries][:, None], held[source][keys]
                assert not causal or not found[rows, held[rank][queries]].any()
                seen = torch.ones_like(found[block])
                found[block] += seen.tril() if causal else seen
    assert found.equal(mask(documents).long())


@pytest.mark.parametrize(
    ("seq_len", "ring", "ulysses", "rank"), [(6, 2, 1, 0), (12, 2, 4, 0), (10, 1, 4, 0), (8, 2, 1, 2), (8, 2, 1, -1)]
)
def test_positions_that_cannot_be(seq_len, ring, ulysses, rank):
    with pytest.raises(ValueError, match=f"ring {ring} x ulysses {ulysses}"):
        local_positions(seq_len, ring=ring, ulysses=ulysses, rank=rank)


def test_inputs_that_cannot_be_cut():
    attend = ContextAttention(ring_group=None, ulysses_group=None, kernel="cpu")
    q, k, v, _ = draw(2, 4, 2)
    with pytest.raises(ValueError, match=r"expected \[2, 32\] in host memory, got \[2, 31\] on cpu"):
        attend(q, k, v, torch.zeros(2, 31, dtype=torch.int64))
    with pytest.raises(ValueError, match="on meta"):
        attend(q, k, v, torch.zeros(2, 32, dtype=torch.int64, device="meta"))
    attend.ulysses_size = 4
    with pytest.raises(ValueError, match="4 query heads and 2 key heads"):
        attend(q, k, v)
    attend.ulysses_size, attend.ring_size = 1, 2
    with pytest.raises(ValueError, match="31 tokens"):
        attend(q[:, :31], k[:, :31], v[:, :31])


# The attention ------------------------------------------------------------------------------------------------------

KINDS = ["", *DOCUMENTS]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ring", "ulysses"), DEGREES[:-1])
def test_equals_attention_on_the_whole_sequence(ranks, ring, ulysses, kind):
    assert not wrong(ranks(ring * ulysses).run(differences, ring=ring, ulysses=ulysses, kind=kind))


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (6, 2)], ids=str)
@pytest.mark.parametrize("kernel", ["cpu", "math"])
def test_heads_and_kernels(ranks, heads, kernel):
    degrees = [(2, 1), *([(1, 2)] if heads[1] > 1 else [])]
    for ring, ulysses in degrees:
        found = ranks(2).run(differences, ring=ring, ulysses=ulysses, kind="across", heads=heads, kernel=kernel)
        assert not wrong(found)


@pytest.mark.parametrize("kind", ["", "across"])
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (1, 2), (2, 1)])
def test_compiled_without_a_graph_break(ranks, ring, ulysses, kind):
    found = ranks(ring * ulysses).run(differences, ring=ring, ulysses=ulysses, kind=kind, compiled=True)
    assert not wrong(found)


@pytest.mark.parametrize(
    ("broken", "kind", "first"),
    [
        ("order", "", "out"),
        ("halves", "", "out"),
        ("merge", "", "out"),
        ("home", "", "dk"),
        ("documents", "across", "out"),
    ],
)
def test_broken_on_purpose_goes_red(ranks, broken, kind, first):
    found = ranks(2).run(differences, ring=2, ulysses=1, kind=kind, broken=broken)
    assert next(name for name in NAMES if max(each[name] for each in found) > 1e-3) == first


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_model_s_own_attention(kind):
    block = SimpleNamespace(attention=nn.Module())
    apply_context_parallel(SimpleNamespace(layers={"0": block}), ring_group=None, ulysses_group=None, kernel="cpu")
    documents = documents_of(kind) if kind else None
    inputs = draw(3, 4, 2)
    found, expected = (
        gradients(lambda *qkv, attend=attend: attend(*qkv, documents), *inputs)
        for attend in (block.attention.inner_attention, ScaledDotProductAttention())
    )
    assert not wrong([worst(found, expected)])


@pytest.mark.parametrize("kind", ["", "across"])
def test_operator(kind):
    """torch's own checks of schema, fake tensors, autograd and functionalization."""
    q, k, v, _ = (x.requires_grad_() for x in draw(3, 4, 2))
    torch.library.opcheck(context._attention, (q, k, v, documents_of(kind) if kind else None, "", "", "cpu"))


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2)])
def test_bfloat16_is_as_exact_as_torch_s(ranks, ring, ulysses):
    found = ranks(ring * ulysses).run(errors_in_bfloat16, ring=ring, ulysses=ulysses)
    ours, torchs = (torch.tensor(each).sum(0).sqrt() for each in zip(*found, strict=True))
    assert (ours <= 2 * torchs).all(), (ours / torchs).tolist()
    assert (torchs > 0).all()


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (4, 1), (2, 2), (1, 2)])
def test_traffic(ranks, ring, ulysses):
    """Round the ring only key and value heads travel; an all-to-all moves q, k and v in one message."""
    batch, heads, kv_heads = 2, 8, 4
    kv = 2 * batch * kv_heads * (TOKENS // ring // ulysses) * K
    q = batch * heads * (TOKENS // ring // ulysses) * K
    there, back = ([q + kv], [q]) if ulysses > 1 else ([], [])
    messages = {"ring": ring, "ulysses": ulysses, "batch": batch, "heads": heads, "kv_heads": kv_heads}
    for found in ranks(ring * ulysses).run(traffic, **messages):
        assert found["forward"] == [*there, *[kv] * (ring - 1), *back]
        # keys and values once more, and their gradients one step farther, home
        home = ring if ring > 1 else 0
        assert sorted(found["backward"]) == sorted([*back, *[kv] * (ring - 1), *[kv // 2] * 2 * home, *there])
