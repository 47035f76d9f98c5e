"""The share of a data sheet's rates that programs reach, by architecture, with the spread of published figures, from
efficiency.toml. The plan uses it for a device that was not calibrated. Each row has its source; none is fitted to a run
of a trainer.

Rates depend on sizes. A matrix product takes time to start, keeps all multiprocessors busy only in full waves of tiles,
and writes its result at the end. Attention reaches half of its rate at some length. A collective has a latency and a
bandwidth; over several nodes the bandwidth falls with their number.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from titanlite.config.loader import read_toml


class Share(NamedTuple):
    """A share of a rate, or seconds: the expected value, and the least and the most that were published."""

    expected: float
    low: float
    high: float
    source: str


ESTIMATE = "an estimate; not measured"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The shares that an architecture reaches.

    Attributes:
        multiprocessors: SMs or compute units, among which a matrix product's tiles are divided.
        matmul, matmul_fp8: share of the peak rate, in full waves; None: as matmul.
        flash, flash_backward, cudnn, cudnn_backward: attention's share of bf16's peak rate for long sequences, by
            torch's two backends; None: as flash. With `half_length` tokens, half of the share is reached.
        memory: share of the bandwidth of device memory.
        interconnect: share of the bandwidth within a node, for all-gather, reduce-scatter and all-to-all.
        interconnect_reduce: the share for all-reduce, which NVLink itself adds up on some architectures; None: the
            same share.
        latency: seconds of a small collective within a node.
    """

    multiprocessors: int
    matmul: Share
    matmul_fp8: Share | None = None
    flash: Share
    flash_backward: Share
    cudnn: Share | None = None
    cudnn_backward: Share | None = None
    half_length: Sequence[int]
    memory: Share
    interconnect: Share
    interconnect_reduce: Share | None = None
    latency: Share


def _read(row: Any) -> Any:
    return Share(*row) if isinstance(row, list) and len(row) == len(Share._fields) else row


XLA = "github.com/openxla/xla, matmul_interpolator_data.h"

_TABLES = read_toml(str(Path(__file__).with_name("efficiency.toml")))
EFFICIENCY = {name: Efficiency(**{key: _read(row) for key, row in rows.items()}) for name, rows in _TABLES.items()}
GROUPED_MATMUL = Share(0.75, 0.55, 0.95, f"of a matrix product's rate: {ESTIMATE}")
NETWORK = Share(0.85, 0.65, 0.92, "360 of 400 GB/s of a node with 8 x 400 Gbit/s: github.com/NVIDIA/nccl/issues/1229")
NETWORK_PER_DOUBLING = Share(0.94, 0.88, 0.98, "360 GB/s over 4 nodes, 260 over 128: the same")
"""The factor on the bandwidth between nodes for each doubling of their number, from 4 nodes on."""
NETWORK_LATENCY = Share(8e-5, 4e-5, 1.5e-4, "100 to 200 us of small all-reduces of two nodes, 350 us of eight")
"""Seconds that each doubling of the number of nodes adds to a collective's latency."""
MESSAGE_LATENCY = Share(1.5e-5, 8e-6, 3.5e-5, "8 us within a node: github.com/microsoft/vidur; 31 us between nodes")
OPERATOR = Share(7e-6, 5e-6, 1.2e-5, "7 to 8 us per operator of eager PyTorch: github.com/flagos-ai/Torch-FL/pull/27")
DTENSOR = Share(3e-5, 2e-5, 5e-5, "24 to 40 us: github.com/pytorch/pytorch/pull/166371")
KERNEL = Share(4e-6, 2.5e-6, 6e-6, f"5 to 6 us of the smallest products: {XLA}; 2.5 us between kernels")
SLOWDOWN = Share(0.19, 0.05, 0.40, "computation beside communication is 18.9 % slower on average (arXiv:2507.03114)")
HOST_WAIT = Share(2e-5, 1e-5, 5e-5, "9 us of a launch and a wait: github.com/flagos-ai/Torch-FL/pull/27")
HOST_LINK = Share(0.86, 0.70, 0.90, "55.6 of 64 GB/s by nvbandwidth, over PCIe 5 x16; the least is an estimate")
"""Share of the bandwidth between host memory and a device."""
HOST_MEMORY = Share(0.45, 0.20, 0.70, f"of the CPU's fused AdamW: {ESTIMATE}")
PINNING = Share(2.8e9, 1.0e9, 4.5e9, "bytes/s of a node: rapidsai/dask-cuda 106, TensorRT-LLM 17773, ik_llama.cpp 1517")
STORAGE = Share(2e9, 0.5e9, 6.4e9, f"6.4 GB/s: awslabs/awsome-distributed-ai, pull request 1225; the rest: {ESTIMATE}")
"""Bytes/s that a node is assumed to write to the folder of checkpoints if its rate is not known."""
TILE = 128
"""Rows, and columns, of a tile of a matrix product's result."""
