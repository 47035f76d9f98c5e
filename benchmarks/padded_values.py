"""Measure attention whose values are narrower than its keys, as DeepSeek-V3's are, with values padded and not.

    python benchmarks/padded_values.py [--repeats 9]

A CPU is enough; the process has one thread. Forward and backward of causal attention, one sequence, 4 heads: queries
and keys of 192 channels and values of 128. "padded": values padded to 192 with zeros, as titanlite/latent_attention.py
does, so that torch takes its fused kernel. "unequal": torch's scaled_dot_product_attention as it is, which computes all
scores. "narrow": all of 128 channels, what no padding can reach. The sides run alternately, and each figure is a
median. Prints its samples as JSON lines, then the table.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

HEADS, KEY, VALUE = 4, 192, 128
DTYPES = (torch.float32, torch.bfloat16)
LENGTHS = (512, 1024, 2048, 4096)

attend = functools.partial(F.scaled_dot_product_attention, is_causal=True)


def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, F.pad(v, (0, KEY - VALUE)))[..., :VALUE]


def narrow(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q[..., :VALUE], k[..., :VALUE], v)


SIDES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"padded": padded, "unequal": attend, "narrow": narrow}


def seconds(side: str, length: int, dtype: torch.dtype) -> float:
    """Return the time of one forward and backward."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, HEADS, length, channels) for channels in (KEY, KEY, VALUE)]
    qkv = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    began = time.perf_counter()
    SIDES[side](*qkv).sum().backward()
    return time.perf_counter() - began


def main() -> None:
    """Measure, and print the samples and the table."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, CPU, one thread")
    rows = []
    for dtype in DTYPES:
        for length in LENGTHS:
            ms: dict[str, list[float]] = {side: [] for side in SIDES}
            for _ in range(repeats):
                for side, samples in ms.items():
                    samples.append(1e3 * seconds(side, length, dtype))
            name = str(dtype).removeprefix("torch.")
            print(json.dumps({"dtype": name, "length": length, "ms": ms}), flush=True)
            rows.append((name, length, *(statistics.median(samples) for samples in ms.values())))
    print(f"\n{'dtype':10}{'tokens':>8}" + "".join(f"{side + ', ms':>14}" for side in SIDES))
    for name, length, *medians in rows:
        print(f"{name:10}{length:8}" + "".join(f"{median:14.0f}" for median in medians))


if __name__ == "__main__":
    main()
