"""The output head and the loss without the full logits: `training.loss_chunks` beside torch's own
linear_cross_entropy (torch 2.13 and later) and beside all logits at once.

    python benchmarks/loss_head.py [--tokens 1024] [--dim 256] [--vocabulary 128256] [--rounds 5]

Forward and backward of the head and the loss alone, on a CPU, in float32 and bfloat16. Each way has a process of its
own, which says how much its resident set grew at most; they take their turns, and the ratio is the median of those of
neighbouring turns. Beside them, the loss that each finds.

Prints a line of JSON a way, then the tables.
"""

import argparse
import json
import math
import os
import statistics
import time

import torch
from resident import forget_peak, map_each_tensor, resident_bytes
from torch import Tensor, nn
from torch.nn import functional

from titanlite.loss import chunked_cross_entropy
from titanlite.parity.process_pool import ProcessPool

WAYS = ("all at once", "loss_chunks = 8", "loss_chunks = 16", "torch's own, chunked")


def loss_of(way: str, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Sum of the token losses."""
    if way.startswith("torch"):
        options = nn.LinearCrossEntropyOptions()
        return functional.linear_cross_entropy(x_ND, weight_VD, targets_N, reduction="sum", options=options)
    n_chunks = int(way.rpartition(" ")[2]) if "=" in way else 1
    return chunked_cross_entropy(x_ND[None], weight_VD, targets_N[None], n_chunks=n_chunks, loss_parallel=True)


def turn(way: str, shape: tuple[int, int, int], dtype: torch.dtype, threads: int) -> tuple[float, float, float]:
    """(loss a token, seconds, MiB that it grew by)."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    tokens, dim, vocabulary = shape
    x_ND = torch.randn(tokens, dim, generator=generator).to(dtype).requires_grad_()
    weight_VD = (torch.randn(vocabulary, dim, generator=generator) / math.sqrt(dim)).to(dtype).requires_grad_()
    targets_N = torch.randint(vocabulary, (tokens,), generator=generator)
    forget_peak()
    before, began = resident_bytes("VmRSS"), time.perf_counter()
    loss = loss_of(way, x_ND, weight_VD, targets_N)
    loss.backward()
    seconds = time.perf_counter() - began
    return loss.item() / tokens, seconds, (resident_bytes("VmHWM") - before) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    shape, threads = (options.tokens, options.dim, options.vocabulary), os.cpu_count() or 1
    map_each_tensor()  # each process is forked from a server that begins after this
    print(f"torch {torch.__version__}, {threads} threads, tokens x dim x vocabulary {shape}", flush=True)
    pools = {way: ProcessPool(1, timeout_seconds=600) for way in WAYS}
    lines = []
    for dtype in (torch.float32, torch.bfloat16):
        turns: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
        for _ in range(options.rounds + 1):
            for way, pool in pools.items():
                turns[way] += pool.run(turn, way=way, shape=shape, dtype=dtype, threads=threads)
        first, *_ = turns.values()
        lines += ["", f"{dtype!s:>21} {'MiB':>8} {'seconds':>8} {'ratio':>6} {'loss':>9}"]
        for way, found in turns.items():
            losses, seconds, grown = zip(*found[1:], strict=True)  # the first turn warms up
            ratio = statistics.median(own / other for own, (_, other, _) in zip(seconds, first[1:], strict=True))
            print(json.dumps({"way": way, "dtype": str(dtype), "turns: loss, seconds, MiB": found}), flush=True)
            middle = statistics.median(grown), statistics.median(seconds)
            lines.append(f"{way:>21} {middle[0]:8.0f} {middle[1]:8.3f} {ratio:6.3f} {losses[0]:9.5f}")
    print("\n".join(lines))
    for pool in pools.values():
        pool.close()


if __name__ == "__main__":
    main()
