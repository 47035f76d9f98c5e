"""Measure the memory and time of chunked cross-entropy against the unchunked loss and torch's linear_cross_entropy.

    python benchmarks/chunked_cross_entropy.py [--tokens 1024] [--dim 256] [--vocabulary 128256] [--rounds 5]

Each variant runs forward and backward of the output head and the loss alone, on a CPU, in float32 and in bfloat16:

    unchunked            the full logits exist at once
    loss_chunks = N      training.loss_chunks: the logits of one chunk of tokens exist at a time
    torch's chunked      torch.nn.functional.linear_cross_entropy (torch 2.13 and later)

Each variant has a process of its own, which measures the growth of its resident set at the peak. The variants run
alternately, and the ratio is the median over rounds of a variant's seconds over the unchunked loss's in the same
round. The losses are printed to show that they agree.

Each variant prints a JSON line. The tables follow.
"""

import argparse
import json
import math
import os
import statistics
import time

import torch
from resident_memory import map_each_tensor, reset_peak, resident_bytes
from torch import Tensor, nn
from torch.nn import functional

from titanlite.loss import chunked_cross_entropy
from titanlite.tools.parity.process_pool import ProcessPool

VARIANTS = ("unchunked", "loss_chunks = 8", "loss_chunks = 16", "torch's chunked")


def loss_of(variant: str, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Return the sum of the token losses."""
    if variant.startswith("torch"):
        options = nn.LinearCrossEntropyOptions()
        return functional.linear_cross_entropy(x_ND, weight_VD, targets_N, reduction="sum", options=options)
    n_chunks = int(variant.rpartition(" ")[2]) if "=" in variant else 1
    return chunked_cross_entropy(x_ND[None], weight_VD, targets_N[None], n_chunks=n_chunks, loss_parallel=True)


def measure(variant: str, shape: tuple[int, int, int], dtype: torch.dtype, threads: int) -> tuple[float, float, float]:
    """Run a variant once and return the loss per token (nats), the seconds, and the growth at the peak (MiB)."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    tokens, dim, vocabulary = shape
    x_ND = torch.randn(tokens, dim, generator=generator).to(dtype).requires_grad_()
    weight_VD = (torch.randn(vocabulary, dim, generator=generator) / math.sqrt(dim)).to(dtype).requires_grad_()
    targets_N = torch.randint(vocabulary, (tokens,), generator=generator)
    reset_peak()
    before, start = resident_bytes("VmRSS"), time.perf_counter()
    loss = loss_of(variant, x_ND, weight_VD, targets_N)
    loss.backward()
    seconds = time.perf_counter() - start
    return loss.item() / tokens, seconds, (resident_bytes("VmHWM") - before) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    shape, threads = (options.tokens, options.dim, options.vocabulary), os.cpu_count() or 1
    map_each_tensor()  # the fork server, which starts after this, passes it on to each process
    print(f"torch {torch.__version__}, {threads} threads, tokens x dim x vocabulary {shape}", flush=True)
    pools = {variant: ProcessPool(1, timeout_seconds=600) for variant in VARIANTS}
    lines = []
    for dtype in (torch.float32, torch.bfloat16):
        samples: dict[str, list[tuple[float, float, float]]] = {variant: [] for variant in VARIANTS}
        for _ in range(options.rounds + 1):
            for variant, pool in pools.items():
                samples[variant] += pool.run(measure, variant=variant, shape=shape, dtype=dtype, threads=threads)
        unchunked = samples["unchunked"][1:]  # the first round is warm-up
        lines += ["", f"{dtype!s:>21} {'MiB':>8} {'seconds':>8} {'ratio':>6} {'loss':>9}"]
        for variant, results in samples.items():
            losses, seconds, growth = zip(*results[1:], strict=True)
            ratio = statistics.median(own / base for own, (_, base, _) in zip(seconds, unchunked, strict=True))
            row = {"variant": variant, "dtype": str(dtype), "rounds: loss, seconds, MiB": results}
            print(json.dumps(row), flush=True)
            medians = statistics.median(growth), statistics.median(seconds)
            lines.append(f"{variant:>21} {medians[0]:8.0f} {medians[1]:8.3f} {ratio:6.3f} {losses[0]:9.5f}")
    print("\n".join(lines))
    for pool in pools.values():
        pool.close()


if __name__ == "__main__":
    main()
