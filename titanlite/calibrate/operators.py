"""Measure operators of one device: matrix multiplication by shape, attention by length, and memory-bound operators by
size. Ranks that share a device's resources, as those of a CPU do, measure at the same time."""

import itertools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlite.calibrate.timing import Timer
from titanlite.plan.op_trace import OpTrace, Work

aten = torch.ops.aten
SIDES = {"cpu": (64, 256, 1024, 4096), "cuda": (128, 512, 2048, 8192, 32768)}
"""Sides of the matrices: every m, n and k of them."""
MOST_FLOPS = {"cpu": 2e9, "cuda": 1e14}
"""FLOPs of a product, at most; of an attention four times as many."""
LENGTHS = {"cpu": (128, 256, 512, 1024, 2048, 4096), "cuda": (512, 1024, 2048, 4096, 8192, 16384, 32768)}
HEAD_DIMS = {"cpu": (16, 64, 128), "cuda": (64, 128)}
TOKENS_TIMES_HEADS = {"cpu": 2**15, "cuda": 2**20}
ELEMENTS = {"cpu": [2**i for i in range(10, 24, 2)], "cuda": [2**i for i in range(10, 30, 3)]}
ROW = 256
"""Elements of a row, over which reductions go."""

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def measure_matmul(timer: Timer) -> dict[str, list[list[float]]]:
    """Return rows of m, n, k and FLOP/s, by data type. A product is measured as the three of a linear layer: output,
    input gradient and weight gradient, which read the operands in other orders; in bfloat16 on a CPU, as the first."""
    kind, rows = timer.device.type, {}
    for name, dtype in DTYPES.items():
        rows[name] = [
            [m, n, k, 2 * m * n * k / _product_seconds(timer, dtype, m, n, k)]
            for m, n, k in itertools.product(SIDES[kind], repeat=3)
            if 2 * m * n * k <= MOST_FLOPS[kind]
        ]
    if kind == "cuda" and torch.cuda.get_device_capability(timer.device) >= (8, 9):
        rows["fp8"] = [
            [m, n, k, 2 * m * n * k / timer(_scaled_product(timer.device, m, n, k))]
            for m, n, k in itertools.product(SIDES[kind], repeat=3)
            if 2 * m * n * k <= MOST_FLOPS[kind]
        ]
    return rows


def _product_seconds(timer: Timer, dtype: torch.dtype, m: int, n: int, k: int) -> float:
    left, right = _random(timer.device, dtype, m, k), _random(timer.device, dtype, k, n)
    orders = (left, right.t().contiguous().t()), (left, right), (left.t().contiguous().t(), right)
    if dtype == torch.bfloat16 and timer.device.type == "cpu":
        orders = orders[:1]
    return sum(timer(lambda pair=pair: torch.mm(*pair)) for pair in orders) / len(orders)


def _scaled_product(device: torch.device, m: int, n: int, k: int) -> Callable[[], Tensor]:
    """Return a call of the float8 product with one scale per tensor, as torchao calls it.

    Private: torch._scaled_mm (its arguments are those of torch 2.11 to 2.15; run on no GPU).
    """
    left = _random(device, torch.float32, m, k).to(torch.float8_e4m3fn)
    right = _random(device, torch.float32, n, k).to(torch.float8_e4m3fn).t()
    scale = torch.ones((), device=device)
    return lambda: torch._scaled_mm(left, right, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return random numbers: a GPU is faster on zeros, which take less power."""
    return torch.randn(*shape, device=device).to(dtype)


def measure_attention(timer: Timer) -> tuple[list[list[float]], list[list[float]]]:
    """Return rows of length, head_dim and FLOP/s of causal attention: of its forward and of its backward."""
    kind = timer.device.type
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    forward, backward = [], []
    for head_dim, length in itertools.product(HEAD_DIMS[kind], LENGTHS[kind]):
        n_heads = max(TOKENS_TIMES_HEADS[kind] // length, 4)
        flops = 2 * n_heads * length * length * head_dim  # two products, and half of each
        if flops > 4 * MOST_FLOPS[kind]:
            continue
        q, k, v, grad = (_random(timer.device, dtype, 1, n_heads, length, head_dim) for _ in range(4))
        forward.append([length, head_dim, flops / timer(lambda q=q, k=k, v=v: _attend(q, k, v))])
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = _attend(*inputs)
        call = lambda out=out, inputs=inputs, grad=grad: torch.autograd.grad(out, inputs, grad, retain_graph=True)  # noqa: E731
        backward.append([length, head_dim, 2.5 * flops / timer(call)])
    return forward, backward


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def measure_operators(timer: Timer) -> dict[str, list[list[float]]]:
    """Return points (bytes, seconds) by operator. The bytes are those that an op trace counts."""
    kind, points = timer.device.type, {}
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    for elements in ELEMENTS[kind]:
        for call in _operators(timer.device, dtype, elements):
            work = _work_of(call)
            name = work.name.partition(".")[2].removesuffix("_")
            points.setdefault(name, []).append([work.read + work.written, timer(call)])
    return {name: sorted(rows) for name, rows in points.items()}


def _work_of(call: Callable[[], object]) -> Work:
    """Return the operator that a call runs; the one with the most bytes, if it runs several."""
    with OpTrace() as trace:
        call()
    works = [event for event in trace.segments[-1].events if isinstance(event, Work)]
    return max(works, key=lambda work: work.read + work.written)


def _operators(device: torch.device, dtype: torch.dtype, elements: int) -> Iterator[Callable[[], object]]:
    """Yield calls of operators that a training step spends its time on, over so many elements."""
    rows = elements // ROW
    x, y, wide = (_random(device, kind, rows, ROW) for kind in (dtype, dtype, torch.float32))
    yield lambda: x * y
    yield lambda: x + y
    yield lambda: x / y
    yield lambda: x.pow(2)
    yield lambda: x.sum(-1)
    yield lambda: x.mean(-1)
    yield lambda: F.silu(x)
    yield lambda: aten.silu_backward(x, y)
    yield lambda: torch.zeros_like(x)
    yield lambda: x.clone()
    yield lambda: x.copy_(y)
    yield lambda: wide.to(torch.bfloat16)
    yield lambda: torch.log_softmax(wide, -1)
    yield lambda: aten._log_softmax_backward_data(wide, wide, -1, torch.float32)
    yield lambda: torch._foreach_norm([wide])
    indices = torch.arange(rows, device=device)
    yield lambda: F.embedding(indices, wide)
    yield lambda: aten.embedding_dense_backward(wide, indices, rows, -1, False)
    state, step = [[wide.clone()] for _ in range(3)], [torch.ones((), device=device)]
    options = {"lr": 0.0, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
    flags = {"amsgrad": False, "maximize": False}
    yield lambda: torch._fused_adamw_([wide], *state, [], step, **options, **flags)


def best_rates(matmul: dict[str, list[list[float]]], operators: dict[str, list[list[float]]]) -> dict[str, float]:
    """Return the best of the measured rates: FLOP/s by data type, and the bandwidth of the largest product of two
    tensors, in bytes/s."""
    rates = {name: max(row[-1] for row in rows) for name, rows in matmul.items()}
    size, seconds = operators["mul"][-1]
    return {"fp8": 0.0, **rates, "memory_bandwidth": size / seconds}
