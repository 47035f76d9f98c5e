"""Compare ways to sum the gradient of the output head's weight over the chunks of chunked cross-entropy.

    python -m benchmarks.speed.head_gradient [--tokens 1024] [--dim 256] [--vocabulary 16384] [--chunks 2] [--rounds 9]

    products, added      loss.py: a product for each chunk, rounded to the weight's type, added in float32 or better
    addmm_               a product for each chunk that is added as it is computed, in the weight's type
    one product          the gradients of all logits are kept, in the weight's type, for one product

On a CPU, in float64, float32 and bfloat16, from the same gradients of logits. It prints whether the result is that of
the first way bit for bit, its relative distance from float64, the bytes that copies and sums read and write per element
of the weight, counted from operators, and the median over rounds, whose ways alternate, of seconds over the first's.
Then what each way keeps between the first chunk and the backward, in GiB for the models of configs/, computed.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.loss import _scaled

Chunks = list[tuple[Tensor, Tensor]]  # gradients of logits [N, V] and inputs [N, D] of each chunk of tokens
MODELS = {"llama3_8b": (128_256, 4096), "llama3_70b": (128_256, 8192), "llama2_7b": (32_000, 4096)}


class Passes(TorchDispatchMode):
    """Counts the bytes that operators except products read and write."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function._schema.name.removeprefix("aten::") in ("_to_copy", "add_", "mul"):
            self.bytes += sum(x.nbytes for x in (*args, result) if isinstance(x, Tensor) and x.dim())
        return result


def added(chunks: Chunks, dtype: torch.dtype) -> Tensor:
    total = None
    for grad_NV, x_ND in chunks:
        product = grad_NV.T @ x_ND
        if total is None:
            total = product.to(torch.promote_types(dtype, torch.float32))
        else:
            total += product
    return total


def addmm(chunks: Chunks, dtype: torch.dtype) -> Tensor:
    total = chunks[0][0].T @ chunks[0][1]
    for grad_NV, x_ND in chunks[1:]:
        total.addmm_(grad_NV.T, x_ND)
    return total


def one_product(chunks: Chunks, dtype: torch.dtype) -> Tensor:
    whole_NV, whole_ND = chunks[0][0]._base, chunks[0][1]._base  # the chunks are views of them
    return whole_NV.T @ whole_ND


WAYS: dict[str, Callable[[Chunks, torch.dtype], Tensor]] = {
    "products, added": added,
    "addmm_": addmm,
    "one product": one_product,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"tokens": 1024, "dim": 256, "vocabulary": 16_384, "chunks": 2, "rounds": 9}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randn(options.tokens, options.dim, generator=generator, dtype=torch.float64)
    logits_NV = x_ND @ torch.randn(options.dim, options.vocabulary, generator=generator, dtype=torch.float64)
    grad_NV = (logits_NV / math.sqrt(options.dim)).softmax(1)
    grad_NV[
        torch.arange(options.tokens), torch.randint(options.vocabulary, (options.tokens,), generator=generator)
    ] -= 1
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {vars(options)}")
    print(f"{'':>9} {'':>16} {'same bits':>10} {'distance':>10} {'bytes':>6} {'seconds':>8} {'ratio':>6}")
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        parts = (whole.to(dtype).tensor_split(options.chunks) for whole in (grad_NV, x_ND))
        chunks = [*zip(*parts, strict=True)]
        exact = grad_NV.to(dtype).double().T @ x_ND.to(dtype).double()
        seconds: dict[str, list[float]] = {name: [] for name in WAYS}
        for _ in range(options.rounds):
            for name, way in WAYS.items():
                start = time.perf_counter()
                _scaled(way(chunks, dtype), torch.ones(()), dtype)
                seconds[name].append(time.perf_counter() - start)
        first = added(chunks, dtype).to(dtype)
        for name, way in WAYS.items():
            with Passes() as passes:
                result = _scaled(way(chunks, dtype), torch.ones(()), dtype)
            distance = ((result.double() - exact).norm() / exact.norm()).item()
            ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds["products, added"], strict=True))
            same, size = "yes" if torch.equal(result, first) else "no", result.numel()
            line = f"{str(dtype).removeprefix('torch.'):>9} {name:>16} {same:>10} {distance:10.1e}"
            print(f"{line} {passes.bytes / size:6.0f} {statistics.median(seconds[name]):8.3f} {ratio:6.3f}")
    print("\nGiB in bfloat16: the sum in float32 and a chunk's product, or the gradients of logits and the product")
    for name, (vocabulary, dim) in MODELS.items():
        for tokens in (4096, 8192, 16_384, 32_768):
            of_sum, of_all = vocabulary * dim * (4 + 2) / 2**30, vocabulary * (2 * tokens + 2 * dim) / 2**30
            print(f"{name:>12} {tokens:>7} tokens: {of_sum:5.2f} {of_all:5.2f}")


if __name__ == "__main__":
    main()
