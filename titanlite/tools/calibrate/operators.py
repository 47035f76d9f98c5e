"""Measure operators of one device: matrix multiplication by shape, attention by length, and memory-bound operators by
size. All ranks measure at the same time, since ranks may share resources, such as a CPU's cores."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlite.tools.calibrate.timing import Timer
from titanlite.tools.plan.op_trace import OpTrace, Work

aten = torch.ops.aten
SIDES = {"cpu": (64, 256, 1024, 4096), "cuda": (128, 512, 2048, 8192, 32768)}  # values of m, n and k
MOST_FLOPS = {"cpu": 2e9, "cuda": 1e14}  # largest FLOPs of a measured matrix product; attention: up to 4 times as many
LENGTHS = {"cpu": (128, 256, 512, 1024, 2048, 4096), "cuda": (512, 1024, 2048, 4096, 8192, 16384, 32768)}
HEAD_DIMS = {"cpu": (16, 64, 128), "cuda": (64, 128)}
TOKENS_TIMES_HEADS = {"cpu": 2**15, "cuda": 2**20}
ELEMENTS = {"cpu": [2**i for i in range(10, 24, 2)], "cuda": [2**i for i in range(10, 30, 3)]}
ROW = 256  # elements of a row; a reduction sums over a row
UNCACHED = {"cpu": 2**26, "cuda": 2**28}
"""Bytes of the operands and results among which a measured operator alternates: more than most caches hold."""
MOST_TURNS = 256  # largest number of operand lists that a measured operator takes in turn

MEASURED_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def measure_matmul(timer: Timer) -> dict[str, list[list[float]]]:
    """Return rows (m, n, k, FLOP/s) by data type. The FLOP/s cover a linear layer's three products (output, input
    gradient, weight gradient), which read operands in different orders; in bfloat16 on a CPU, the output alone."""
    kind, rows = timer.device.type, {}
    for name, dtype in MEASURED_DTYPES.items():
        operands = RandomOperands(timer.device, dtype)
        # A GPU takes some 16 times longer in float32 than in bfloat16: measure smaller products in float32.
        sizes = _sizes(kind, MOST_FLOPS[kind] / (16 if (kind, name) == ("cuda", "fp32") else 1))
        rows[name] = [[*size, 2 * math.prod(size) / _product_seconds(timer, operands, *size)] for size in sizes]
    if kind == "cuda" and torch.cuda.get_device_capability(timer.device) >= (8, 9):
        operands = RandomOperands(timer.device, torch.bfloat16)
        sizes = _sizes(kind, MOST_FLOPS[kind])
        rows["fp8"] = [[*size, 2 * math.prod(size) / timer(_scaled_product(operands, *size))] for size in sizes]
    return rows


def _sizes(kind: str, most_flops: float) -> list[tuple[int, ...]]:
    """Return every (m, n, k) of SIDES[kind] whose matrix product takes at most `most_flops` FLOPs."""
    return [size for size in itertools.product(SIDES[kind], repeat=3) if 2 * math.prod(size) <= most_flops]


class RandomOperands:
    """Returns random tensors, which are views of one buffer that grows to the largest request. A measured operator gets
    different operands at each call: operands used again would still be in a cache, which is rare in a training step.
    Operands are random, since a GPU needs less power for zeros and is faster on them."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self.buffer = torch.empty(0)

    def turns(self, *shapes: tuple[int, ...], result: int = 0) -> list[list[Tensor]]:
        """Return lists of tensors, each list with the given shapes. Together with a result of `result` elements per
        list, the lists exceed the caches, unless MOST_TURNS limits their number."""
        sizes = [math.prod(shape) for shape in shapes]
        size = (sum(sizes) + result) * self.dtype.itemsize
        n = min(math.ceil(UNCACHED[self.device.type] / size), MOST_TURNS)
        if n * sum(sizes) > self.buffer.numel():
            self.buffer = torch.empty(0)  # free the smaller buffer before allocating
            self.buffer = torch.randn(n * sum(sizes), device=self.device).to(self.dtype)
        parts = self.buffer[: n * sum(sizes)].split(sizes * n)
        views = [part.view(shape) for part, shape in zip(parts, shapes * n, strict=True)]
        return [views[i : i + len(shapes)] for i in range(0, len(views), len(shapes))]


def _in_turn(call: Callable[..., object], turns: Sequence[Sequence]) -> Callable[[], object]:
    """Return a function that calls `call` with the next operands and keeps results, so that each gets new memory."""
    numbers, results = itertools.cycle(range(len(turns))), [None] * len(turns)

    def next_turn() -> None:
        number = next(numbers)
        results[number] = call(*turns[number])

    return next_turn


def _product_seconds(timer: Timer, operands: RandomOperands, m: int, n: int, k: int) -> float:
    output = [(left, right.t()) for left, right in operands.turns((m, k), (n, k), result=m * n)]
    input_gradient = operands.turns((m, k), (k, n), result=m * n)
    weight_gradient = [(left.t(), right) for left, right in operands.turns((k, m), (k, n), result=m * n)]
    orders = (output, input_gradient, weight_gradient)
    if operands.dtype == torch.bfloat16 and timer.device.type == "cpu":
        orders = orders[:1]
    return sum(timer(_in_turn(torch.mm, turns)) for turns in orders) / len(orders)


def _scaled_product(operands: RandomOperands, m: int, n: int, k: int) -> Callable[[], object]:
    """Return a function that computes a float8 product with one scale per tensor, as torchao does. This uses the
    private torch._scaled_mm, with its arguments in torch 2.11 to 2.15; no GPU has run it."""
    dtype, scale = torch.float8_e4m3fn, torch.ones((), device=operands.device)
    call = functools.partial(torch._scaled_mm, out_dtype=torch.bfloat16, use_fast_accum=True)
    pairs = operands.turns((m, k), (n, k), result=m * n)
    return _in_turn(call, [(x.to(dtype), weight.to(dtype).t(), scale, scale) for x, weight in pairs])


def measure_attention(timer: Timer) -> tuple[list[list[float]], list[list[float]]]:
    """Return rows (length, head_dim, FLOP/s) of causal attention, for the forward and for the backward."""
    kind, attend = timer.device.type, functools.partial(F.scaled_dot_product_attention, is_causal=True)
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    forward, backward = [], []
    for head_dim, length in itertools.product(HEAD_DIMS[kind], LENGTHS[kind]):
        n_heads = max(TOKENS_TIMES_HEADS[kind] // length, 4)
        flops = 2 * n_heads * length * length * head_dim  # two products, half of each masked
        if flops > 4 * MOST_FLOPS[kind]:
            continue
        q, k, v, grad = (torch.randn(1, n_heads, length, head_dim, device=timer.device).to(dtype) for _ in range(4))
        forward.append([length, head_dim, flops / timer(functools.partial(attend, q, k, v))])
        inputs = [x.requires_grad_() for x in (q, k, v)]
        call = functools.partial(torch.autograd.grad, attend(*inputs), inputs, grad, retain_graph=True)
        backward.append([length, head_dim, 2.5 * flops / timer(call)])
    return forward, backward


def measure_operators(timer: Timer) -> dict[str, list[list[float]]]:
    """Return points (bytes, seconds) by operator, with bytes as OpTrace (plan/op_trace.py) counts them."""
    kind, points = timer.device.type, {}
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    pools = RandomOperands(timer.device, dtype), RandomOperands(timer.device, torch.float32)
    for elements in ELEMENTS[kind]:
        rows = elements // ROW
        turns = [
            (Operands(*inputs, *wide, *(torch.zeros_like(wide[0]) for _ in range(2))),)
            for inputs, wide in zip(*(pool.turns(*2 * [(rows, ROW)]) for pool in pools), strict=False)
        ]
        for operator in _operators(timer.device, rows):
            work = _work_of(lambda operator=operator, first=turns[0]: operator(*first))
            name = work.name.partition(".")[2].removesuffix("_")
            points.setdefault(name, []).append([work.read + work.written, timer(_in_turn(operator, turns))])
    return {name: sorted(rows) for name, rows in points.items()}


class Operands(NamedTuple):
    """Tensors of one shape; the last four are float32: a weight, its gradient and its optimizer states."""

    x: Tensor
    y: Tensor
    weight: Tensor
    gradient: Tensor
    mean: Tensor
    variance: Tensor


def _work_of(call: Callable[[], object]) -> Work:
    """Return the operator that a call runs; if it runs several, the one that reads and writes the most bytes."""
    with OpTrace() as trace:
        call()
    works = [event for event in trace.segments[-1].events if isinstance(event, Work)]
    return max(works, key=lambda work: work.read + work.written)


def _operators(device: torch.device, rows: int) -> Iterator[Callable[[Operands], object]]:
    """Yield the memory-bound operators of a training step, on `rows` rows."""
    yield lambda of: of.x * of.y
    yield lambda of: of.x + of.y
    yield lambda of: of.x / of.y
    yield lambda of: of.x.pow(2)
    yield lambda of: of.x.sum(-1)
    yield lambda of: of.x.mean(-1)
    yield lambda of: F.silu(of.x)
    yield lambda of: aten.silu_backward(of.x, of.y)
    yield lambda of: torch.zeros_like(of.x)
    yield lambda of: of.x.clone()
    yield lambda of: of.x.copy_(of.y)
    yield lambda of: of.weight.to(torch.bfloat16)
    yield lambda of: torch.log_softmax(of.weight, -1)
    yield lambda of: aten._log_softmax_backward_data(of.gradient, of.weight, -1, torch.float32)
    yield lambda of: torch._foreach_norm([of.weight])
    indices = torch.arange(rows, device=device)
    yield lambda of: F.embedding(indices, of.weight)
    yield lambda of: aten.embedding_dense_backward(of.gradient, indices, rows, -1, False)
    step = [torch.ones((), device=device)]
    options = {"lr": 0.0, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
    options |= {"amsgrad": False, "maximize": False}
    yield lambda of: torch._fused_adamw_([of.weight], *([x] for x in of[3:]), [], step, **options)


def best_rates(matmul: dict[str, list[list[float]]], operators: dict[str, list[list[float]]]) -> dict[str, float]:
    """Return the best measured rates: FLOP/s by data type, and bytes/s of the largest elementwise product."""
    rates = {name: max(row[-1] for row in rows) for name, rows in matmul.items()}
    size, seconds = operators["mul"][-1]
    return {"fp8": 0.0, **rates, "memory_bandwidth": size / seconds}
