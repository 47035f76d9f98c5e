"""Measure ring attention over ranks, and each attention backend alone, against PyTorch's scaled_dot_product_attention.

    python -m benchmarks.speed.ring_attention --cores N [--rings 2 4] [--lengths 2048 4096 8192 16384] [--repeats 5]
    python -m benchmarks.speed.ring_attention --device cuda [the same, without --cores]

--cores is the number of cores that the ranks have for themselves. --shape (default 1 8 2 64) is B, query heads, KV
heads, head_dim. Attention is causal. On a CPU everything is float32, and each process has one thread:

(a) Ring attention: forward and backward of one sequence over 2 and 4 ring ranks (--rings) on gloo, against
    F.scaled_dot_product_attention in one process. The three run alternately. Seconds are those of the slowest rank; the
    ratio is the median of the ratios of each round. The ideal is 1 / (ranks, or --cores where there are fewer): the
    total work is the same.
(b) Attention backends: each backend of titanlite/parallel/attention.py through the same module on one rank, without a
    ring, against F.scaled_dot_product_attention, forward alone and with the backward. The two run alternately, and the
    ratio is that of their medians. It is the overhead of titanlite's operator.

On CUDA only (b) runs, in bfloat16, timed with CUDA events. Each backend is compared with the same one of PyTorch,
selected with torch.nn.attention.sdpa_kernel. (The "efficient" backend has no grouped-query attention: both sides repeat
the KV heads within the measured time.)

Prints its samples as JSON lines, then the medians.
"""

import argparse
import contextlib
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from titanlite.launch.process import retain_freed_memory
from titanlite.parallel.tiled_attention import TiledAttention
from titanlite.tools.parity.process_pool import ProcessPool

CUDA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
Shape = tuple[int, int, int, int]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q_BTHK, k_BTGK, v_BTGK) to out_BTHK"""


def reference(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, *, repeat: bool = False) -> Tensor:
    """Run PyTorch's attention. `repeat` repeats the KV heads, for backends without grouped-query attention."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
    if repeat:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not repeat).transpose(1, 2)


def tensors(length: int, shape: Shape, device: str) -> list[Tensor]:
    """Return random q, k, v and gradient of the output."""
    batch, heads, kv_heads, head_dim = shape
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(batch, length, n, head_dim, device=device, dtype=dtype, generator=generator)
        for n in (heads, kv_heads, kv_heads, heads)
    ]


def step(attention: Attention, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, backward: bool) -> None:
    qkv = [x.detach().requires_grad_(backward) for x in (q, k, v)]
    out = attention(*qkv)
    if backward:
        torch.autograd.grad(out, qkv, grad)


# ---------------------------------------------------------------------------------------------------------------------
# (a) Ring attention


@functools.cache
def prepared(length: int, shape: Shape) -> tuple[Attention, list[Tensor]]:
    """Build the attention and its inputs once per rank and length, so that a sample times nothing but the step."""
    retain_freed_memory()  # as train.py does
    size = dist.get_world_size()
    ring = TiledAttention(ring_group=dist.group.WORLD, ulysses_group=None, backend="cpu")
    return (ring if size > 1 else reference), tensors(length // size, shape, "cpu")


def seconds_of_rank(length: int, shape: Shape) -> float:
    """Time forward and backward on this rank of the process group: ring attention, or PyTorch's on a single rank."""
    attention, inputs = prepared(length, shape)
    dist.barrier()
    start = time.perf_counter()
    step(attention, *inputs, backward=True)
    return time.perf_counter() - start


def compare_rings(rings: list[int], lengths: list[int], shape: Shape, cores: int, repeats: int) -> None:
    """Print the samples, then a line of medians for each length and ring."""
    pools = {size: ProcessPool(size, timeout_seconds=600) for size in (1, *rings)}
    table = []
    for length in lengths:
        samples = []
        for number in range(repeats + 1):
            sample = {size: max(pool.run(seconds_of_rank, length=length, shape=shape)) for size, pool in pools.items()}
            if number:  # the first one is warm-up
                samples.append(sample)
                print(json.dumps({"length": length, "seconds by ranks": sample}), flush=True)
        for size in pools:
            seconds = statistics.median(sample[size] for sample in samples)
            ratio = statistics.median(sample[size] / sample[1] for sample in samples)
            table.append(f"{length:7} {size:5} {seconds:9.3f} {ratio:7.3f} {1 / min(size, cores):7.3f}")
    for pool in pools.values():
        pool.close()
    print(f"{'length':>7} {'ranks':>5} {'seconds':>9} {'ratio':>7} {'ideal':>7}", *table, sep="\n", flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# (b) Attention backends


def seconds_of(call: Callable[[], None], device: str) -> float:
    if device != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def compare_backend(backend: str, length: int, backward: bool, shape: Shape, device: str, repeats: int) -> str:
    """Print the samples of one case, and return its line of the table."""
    ours = TiledAttention(ring_group=None, ulysses_group=None, backend=backend)
    torchs = functools.partial(reference, repeat=backend == "efficient")
    inputs = tensors(length, shape, device)
    calls = [functools.partial(step, attention, *inputs, backward) for attention in (ours, torchs)]
    with sdpa_kernel(CUDA_BACKENDS[backend]) if device == "cuda" else contextlib.nullcontext():
        pairs = [[seconds_of(call, device) for call in calls] for _ in range(repeats + 1)][1:]  # the first is warm-up
    phase = "forward+backward" if backward else "forward"
    print(json.dumps({"backend": backend, "length": length, "pass": phase, "seconds": pairs}), flush=True)
    own, base = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    return f"{backend:10} {length:7} {phase:17} {1000 * own:12.3f} {1000 * base:12.3f} {own / base:7.3f}"


def compare_backends(lengths: list[int], shape: Shape, device: str, repeats: int) -> None:
    """Print the samples, then a line of medians for each backend, length and pass."""
    cases = itertools.product(CUDA_BACKENDS if device == "cuda" else ["cpu"], lengths, (False, True))
    table = [compare_backend(*case, shape, device, repeats) for case in cases]
    print(f"{'backend':10} {'length':>7} {'pass':17} {'titanlite ms':>12} {'PyTorch ms':>12} {'ratio':>7}")
    print(*table, sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--cores", type=int)
    parser.add_argument("--rings", type=int, nargs="*", default=[2, 4], help="sizes of the rings; none: (b) alone")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--shape", type=int, nargs=4, default=[1, 8, 2, 64], metavar=("B", "H", "G", "K"))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    shape = tuple(options.shape)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {device}, B H G K = {shape}")
    if options.device == "cpu" and options.rings:
        if options.cores is None:
            parser.error("--cores is required for rings, to compute the ideal ratio")
        compare_rings(options.rings, options.lengths, shape, options.cores, options.repeats)
    torch.set_num_threads(1)
    compare_backends(options.lengths, shape, options.device, options.repeats)


if __name__ == "__main__":
    main()
