"""Which share of a data sheet's rates programs reach, by the architecture of a device, with the spread of what was
published. The plan uses it for a device that was not calibrated. Each row has its source; none is fitted to a run of a
trainer.

Rates depend on sizes. A matrix product takes a time to start, and keeps all multiprocessors busy only in full waves of
tiles; it writes its result at the end. Attention reaches half of its rate at some length. A collective has a latency
beside its bandwidth, and over several nodes the bandwidth falls with their number.
"""

import dataclasses
from typing import NamedTuple


class Share(NamedTuple):
    """A share of a rate, or seconds: what to expect, and from the least to the most that was published."""

    expected: float
    low: float
    high: float
    source: str


ESTIMATE = "an estimate; not measured"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Efficiency:
    """What an architecture reaches.

    Attributes:
        multiprocessors: SMs or compute units, among which a matrix product's tiles are divided.
        matmul, matmul_fp8: of the peak rate, in full waves; None: as matmul.
        flash, flash_backward, cudnn, cudnn_backward: of attention by torch's two backends, of bf16's peak rate, over
            sequences of any length; None: as flash. `half_length` is the number of tokens at which half of it is
            reached.
        memory: of the bandwidth of device memory.
        interconnect, interconnect_reduce: of the bandwidth within a node: of all-gather, reduce-scatter and
            all-to-all, and of all-reduce, which NVLink adds up itself on some architectures; None: the same.
        latency: seconds of a small collective within a node.
    """

    multiprocessors: int
    matmul: Share
    matmul_fp8: Share | None = None
    flash: Share
    flash_backward: Share
    cudnn: Share | None = None
    cudnn_backward: Share | None = None
    half_length: tuple[int, int]
    memory: Share
    interconnect: Share
    interconnect_reduce: Share | None = None
    latency: Share


ML_ENGINEERING = "github.com/stas00/ml-engineering"
CUDNN = "github.com/NVIDIA/cudnn-frontend, benchmark/attention_training"
XLA = "github.com/openxla/xla, matmul_interpolator_data.h"
NCCL_B200 = "nccl-tests of an 8 x B200 node and of two, 2026-05"
NCCL_H100 = "nccl-tests of an 8 x H100 node"
AITER = "github.com/ROCm/aiter, op_tests/cpp/mha/README.md"

EFFICIENCY: dict[str, Efficiency] = {
    "ampere": Efficiency(
        multiprocessors=108,
        matmul=Share(0.82, 0.75, 0.87, f"271 of 312 TFLOP/s at best: {ML_ENGINEERING}; less by power: {ESTIMATE}"),
        flash=Share(0.72, 0.65, 0.77, f"217 TFLOP/s at 8,192 tokens of an A100 PCIe: {CUDNN}"),
        flash_backward=Share(0.59, 0.53, 0.65, f"173 TFLOP/s there: {CUDNN}"),
        cudnn=Share(0.60, 0.53, 0.65, f"177 TFLOP/s there: {CUDNN}"),
        cudnn_backward=Share(0.46, 0.40, 0.52, f"136 TFLOP/s there: {CUDNN}"),
        half_length=(450, 450),
        memory=Share(0.85, 0.75, 0.92, "1,581 of 2,039 GB/s of a copy, more of other operators: " + ML_ENGINEERING),
        interconnect=Share(0.76, 0.65, 0.78, f"231 of 300 GB/s, of all-reduce: {ML_ENGINEERING}"),
        latency=Share(5e-5, 3e-5, 1e-4, f"44 us at 32 KiB, 102 us at 1 MiB, of all-reduce: {ML_ENGINEERING}"),
    ),
    "hopper": Efficiency(
        multiprocessors=132,
        matmul=Share(0.78, 0.70, 0.84, f"834 of 989 TFLOP/s of an H200 at best, 755 sustained: {ML_ENGINEERING}"),
        matmul_fp8=Share(0.68, 0.58, 0.77, f"1,403 of 1,979 TFLOP/s of an H100 at best: {ML_ENGINEERING}"),
        flash=Share(0.40, 0.34, 0.45, "FlashAttention-2 reaches about 35 % (arXiv:2407.08608), at limited lengths"),
        flash_backward=Share(0.34, 0.28, 0.40, "about 335 TFLOP/s together with the forward (arXiv:2307.08691)"),
        cudnn=Share(0.70, 0.62, 0.74, f"655 TFLOP/s at 8,192 tokens: {CUDNN}"),
        cudnn_backward=Share(0.58, 0.50, 0.64, f"526 TFLOP/s there: {CUDNN}"),
        half_length=(600, 850),
        memory=Share(0.87, 0.78, 0.92, "2,850 of 3,350 GB/s streamed by XLA; 3,089 by a triad"),
        interconnect=Share(0.77, 0.70, 0.80, f"344 of 450 GB/s at 1 GiB: {NCCL_H100}"),
        interconnect_reduce=Share(1.03, 0.80, 1.06, f"464 GB/s with NVLink SHARP: {NCCL_H100}"),
        latency=Share(3e-5, 2e-5, 4.5e-5, f"73 us at 16 MiB, less 42 us of transfer: {NCCL_H100}"),
    ),
    "blackwell": Efficiency(
        multiprocessors=148,
        matmul=Share(0.68, 0.62, 0.77, f"1,745 of 2,250 TFLOP/s of a B200 at best, 1,429 sustained: {ML_ENGINEERING}"),
        matmul_fp8=Share(0.60, 0.52, 0.66, "2,877 of 5,000 TFLOP/s of a GB200: github.com/Azure/AI-benchmarking-guide"),
        flash=Share(0.19, 0.16, 0.21, f"373 TFLOP/s at 8,192 tokens of torch's: {CUDNN}"),
        flash_backward=Share(0.155, 0.13, 0.17, f"299 TFLOP/s there: {CUDNN}"),
        cudnn=Share(0.64, 0.55, 0.72, f"1,171 to 1,559 TFLOP/s at 8,192 tokens: {CUDNN}"),
        cudnn_backward=Share(0.51, 0.44, 0.60, f"943 to 1,297 TFLOP/s there: {CUDNN}"),
        half_length=(1300, 1300),
        memory=Share(0.83, 0.75, 0.90, "6,420 of 7,700 GB/s of a B300; 6,300 of a copy"),
        interconnect=Share(0.71, 0.65, 0.75, f"632 of 900 GB/s at 1 GiB: {NCCL_B200}"),
        interconnect_reduce=Share(0.85, 0.75, 0.93, f"721 of 900 GB/s at 1 GiB: {ML_ENGINEERING}"),
        latency=Share(2.5e-5, 1.6e-5, 3.5e-5, f"19 us at 256 KiB, 49 us at 16 MiB: {NCCL_B200}"),
    ),
    "cdna3": Efficiency(
        multiprocessors=304,
        matmul=Share(0.50, 0.42, 0.55, "668 to 708 of 1,307 TFLOP/s of an MI300X: ROCm blog, 2025-02"),
        matmul_fp8=Share(0.44, 0.36, 0.49, "1,273 of 2,615 TFLOP/s: ROCm blog, 2025-02"),
        flash=Share(0.42, 0.30, 0.46, f"487 to 547 TFLOP/s at 4,096 to 8,192 tokens, by AITER: {AITER}"),
        flash_backward=Share(0.33, 0.22, 0.38, f"417 to 468 TFLOP/s there: {AITER}"),
        half_length=(800, 800),
        memory=Share(0.75, 0.70, 0.80, "3,948 to 4,256 of 5,300 GB/s: BabelStream"),
        interconnect=Share(0.70, 0.62, 0.71, "314 of 448 GB/s, of all-reduce over eight: ROCm blog, 2025-03"),
        latency=Share(3e-5, 1.4e-5, 6e-5, "14 us at 64 KiB, 149 us at 16 MiB: ROCm blog, 2025-03"),
    ),
    "ada": Efficiency(
        multiprocessors=128,
        matmul=Share(0.80, 0.70, 0.90, ESTIMATE),
        matmul_fp8=Share(0.75, 0.60, 0.85, ESTIMATE),
        flash=Share(0.85, 0.70, 0.95, "151 of 165 TFLOP/s at 2,048 tokens of an RTX 4090: apache/tvm, flash_perf.md"),
        flash_backward=Share(0.62, 0.50, 0.75, "99 TFLOP/s there"),
        half_length=(300, 300),
        memory=Share(0.85, 0.75, 0.92, ESTIMATE),
        interconnect=Share(0.60, 0.40, 0.80, ESTIMATE),
        latency=Share(3e-5, 2e-5, 1e-4, ESTIMATE),
    ),
    "cpu": Efficiency(
        multiprocessors=1,
        matmul=Share(0.60, 0.30, 0.90, ESTIMATE),
        flash=Share(0.30, 0.10, 0.60, ESTIMATE),
        flash_backward=Share(0.25, 0.10, 0.50, ESTIMATE),
        half_length=(100, 100),
        memory=Share(0.50, 0.20, 0.90, ESTIMATE),
        interconnect=Share(0.30, 0.10, 0.80, ESTIMATE),
        latency=Share(1e-3, 3e-4, 3e-3, ESTIMATE),
    ),
}

GROUPED_MATMUL = Share(0.75, 0.55, 0.95, f"of a matrix product's rate: {ESTIMATE}")
NETWORK = Share(0.85, 0.65, 0.92, "360 of 400 GB/s of a node with 8 x 400 Gbit/s: github.com/NVIDIA/nccl/issues/1229")
NETWORK_PER_DOUBLING = Share(0.94, 0.88, 0.98, "360 GB/s over 4 nodes, 260 over 128: the same")
"""The factor by which the bandwidth between nodes falls when there are twice as many, from 4 nodes on."""
NETWORK_LATENCY = Share(8e-5, 4e-5, 1.5e-4, "100 to 200 us of small all-reduces of two nodes, 350 us of eight")
"""Seconds that are added to a collective's latency when there are twice as many nodes."""
MESSAGE_LATENCY = Share(1.5e-5, 8e-6, 3.5e-5, "8 us within a node: github.com/microsoft/vidur; 31 us between nodes")
OPERATOR = Share(7e-6, 5e-6, 1.2e-5, "7 to 8 us per operator of eager PyTorch: github.com/flagos-ai/Torch-FL/pull/27")
DTENSOR = Share(3e-5, 2e-5, 5e-5, "24 to 40 us: github.com/pytorch/pytorch/pull/166371")
KERNEL = Share(4e-6, 2.5e-6, 6e-6, f"5 to 6 us of the smallest products: {XLA}; 2.5 us between kernels")
SLOWDOWN = Share(0.19, 0.05, 0.40, "computation beside communication is 18.9 % slower on average (arXiv:2507.03114)")
HOST_WAIT = Share(2e-5, 1e-5, 5e-5, "9 us of a launch and a wait: github.com/flagos-ai/Torch-FL/pull/27")
HOST_LINK = Share(0.86, 0.70, 0.90, "55.6 of 64 GB/s by nvbandwidth, over PCIe 5 x16; the least is an estimate")
"""Of the bandwidth between host memory and a device."""
HOST_MEMORY = Share(0.45, 0.20, 0.70, f"of the CPU's fused AdamW: {ESTIMATE}")
PINNING = Share(2.8e9, 1.0e9, 4.5e9, "bytes/s of a node: rapidsai/dask-cuda 106, TensorRT-LLM 17773, ik_llama.cpp 1517")
STORAGE = Share(2e9, 0.5e9, 6.4e9, f"6.4 GB/s: awslabs/awsome-distributed-ai, pull request 1225; the rest: {ESTIMATE}")
"""Bytes/s that a node writes to the folder of checkpoints, where that is not known."""
TILE = 128
"""Rows and columns of a tile of a matrix product's result."""
