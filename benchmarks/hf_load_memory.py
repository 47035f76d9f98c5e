"""Measure the host memory that a rank needs beyond its shards while it loads a Hugging Face folder.

    python benchmarks/hf_load_memory.py [--ranks 2] [--tp 1]

A folder of about 1 GB with made-up weights in bfloat16 is written, and new ranks on gloo, sharded by FSDP over the
others than --tp, load it into float32 weights. The memory is the growth of the rank's resident set (/proc, Linux only)
from before loading, when its shards exist, to the peak, the mapped pages of files included. glibc is set to return
freed memory at once. The largest slice is what a rank must read of the largest tensor. Prints one line.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from resident_memory import map_each_tensor, reset_peak, resident_bytes
from torch.distributed.tensor import DTensor

from titanlite import build
from titanlite.config import Config, Launch, check, load
from titanlite.hf.export import export
from titanlite.hf.load import load_hf_weights
from titanlite.hf.names import tensor_shapes
from titanlite.parallel.mesh import build_layout
from titanlite.tools.parity.process_pool import ProcessPool

CPU = torch.device("cpu")
MIB = 2**20
DEBUG = Path(__file__).resolve().parents[1] / "configs" / "debug.toml"
MODEL = {"dim": 2048, "n_layers": 8, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 5632, "vocab_size": 32000}


class MadeUp:
    """Weights of 1/64, instead of a checkpoint's."""

    def __init__(self, config: Config):
        self.shapes = {f"model.{name}": shape for name, shape in tensor_shapes(config.model).items()}

    def read(self, name: str) -> torch.Tensor:
        return torch.full(self.shapes[name], 1 / 64, dtype=torch.bfloat16)


def growth(config: Config, folder: Path) -> tuple[float, float, float]:
    """Return the MiB of this rank's shards, by which loading grows it, and of its largest slice."""
    model, _ = build.build_model(config, build_layout(config.parallelism, CPU), CPU)
    shards = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    reset_peak()
    before = resident_bytes("VmRSS")
    load_hf_weights(folder, model, config.model)
    peak = resident_bytes("VmHWM")
    assert all((shard == 1 / 64).all() for shard in shards)
    largest = max(shard.numel() for shard in shards) * torch.bfloat16.itemsize
    return sum(shard.nbytes for shard in shards) / MIB, (peak - before) / MIB, largest / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1)
    options = parser.parse_args()
    values = {f"model.{key}": value for key, value in MODEL.items()}
    values |= {"parallelism.tensor_parallel_degree": options.tp, "training.dtype": "float32"}
    loaded = load([str(DEBUG), *(f"--{key}={value}" for key, value in values.items())])
    config = check(loaded, Launch(0, 0, options.ranks, options.ranks, n_devices=0))
    map_each_tensor()  # the fork server, which starts after this, passes it on to each rank
    with tempfile.TemporaryDirectory() as temporary:
        folder, limit = Path(temporary) / "model", 300_000_000
        export(MadeUp(config), config.model, folder, dtype=torch.bfloat16, max_seq_len=64, max_file_bytes=limit)
        size = sum(file.stat().st_size for file in folder.iterdir()) / MIB
        pool = ProcessPool(options.ranks, timeout_seconds=600)
        ranks = pool.run(growth, config=config, folder=folder)
        pool.close()
    shards, most, largest = (max(values) for values in zip(*ranks, strict=True))
    print(
        f"torch {torch.__version__}; folder {size:.0f} MiB, {options.ranks} ranks, tp {options.tp}: shards {shards:.0f}"
        f" MiB per rank, peak beyond them {most:.0f} MiB, largest slice {largest:.0f} MiB"
    )


if __name__ == "__main__":
    main()
