"""Compare the time to save and to load a checkpoint with torch's distributed checkpoint (DCP), on the same tensors.

    python -m benchmarks.speed.checkpoint_speed [--ranks 2] [--mib 1024] [--rounds 20]

Each rank has its shards of the weights and optimizer states of a model, in host memory. In each round both save
and both load, and who is first alternates: the page cache can cost the second one more. Both write to the same disk and
fsync; files are in the page cache when they are loaded. Prints the shortest and the median times, and their ratios; a
ratio above 1 is faster than DCP.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from titanlite.checkpoint import checkpointer
from titanlite.checkpoint.reader import CheckpointReader
from titanlite.checkpoint.tensors import slices_to_save
from titanlite.config.schema import Checkpoint, Comm
from titanlite.tools.parity.process_pool import ProcessPool

WIDTH = 2048


def sharded(mib: int) -> dict[str, Tensor]:
    """Return tensors of so many MiB over all ranks, as a model's weights and both states of Adam."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
    tensors: dict[str, Tensor] = {}
    for index in range(max(mib * 2**20 // full.nbytes // 3, 1)):
        for name in ("model.w{}", "optimizer.state.w{}.exp_avg", "optimizer.state.w{}.exp_avg_sq"):
            tensors[name.format(index)] = distribute_tensor(full + index, mesh, [Shard(0)], src_data_rank=None)
    return tensors


def load_checkpoint(folder: Path, tensors: dict[str, Tensor]) -> None:
    CheckpointReader(folder).load(tensors)


def measure(mib: int, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Save and load in turns on this rank. Return the seconds of each."""
    warnings.simplefilter("ignore")
    tensors, seconds = sharded(mib), {}
    saver = checkpointer.Checkpointer(folder, Checkpoint(), {}, Comm())

    def timed(name: str, call: Any) -> None:
        dist.barrier()
        begin = time.perf_counter()
        call()
        dist.barrier()
        seconds.setdefault(name, []).append(time.perf_counter() - begin)

    for step in range(1, rounds + 2):  # the first is not counted
        ours, theirs = saver.folder / f"step-{step}", folder / f"dcp-{step}"
        if dist.get_rank() == 0:
            ours.with_suffix(".tmp").mkdir(parents=True)
        ours, state = ours.with_suffix(".unconfirmed"), json.dumps({"step": step, "identity": {}, "data": {}}).encode()
        dist.barrier()
        writer = dcp.FileSystemWriter(theirs)
        slices = slices_to_save(tensors)
        saves = (
            ("DCP saves", partial(dcp.save, tensors, storage_writer=writer)),
            (
                "titanlite saves",
                partial(saver._write, step, slices, state),
            ),
        )
        loads = (
            ("DCP loads", partial(dcp.load, tensors, checkpoint_id=theirs)),
            (
                "titanlite loads",
                partial(load_checkpoint, ours, tensors),
            ),
        )
        for calls in (saves, loads):
            for name, call in calls if step % 2 else reversed(calls):
                timed(name, call)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(ours)
            shutil.rmtree(theirs)
    saver.close()
    return {name: values[1:] for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=1024, help="MiB of all tensors on all ranks")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    pool = ProcessPool(arguments.ranks, timeout_seconds=900)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        results = pool.run(measure, mib=arguments.mib, rounds=arguments.rounds, folder=Path(folder))[0]
    pool.close()
    print(f"{arguments.ranks} ranks, {arguments.mib} MiB, torch {torch.__version__}, {arguments.rounds} rounds")
    for action in ("saves", "loads"):
        for name, figure in (("shortest", min), ("median", statistics.median)):
            theirs, ours = (figure(results[f"{who} {action}"]) for who in ("DCP", "titanlite"))
            rate = arguments.mib / 1024 / ours
            line = f"DCP {theirs:.2f} s   titanlite {ours:.2f} s   ratio {theirs / ours:.2f}   {rate:.2f} GiB/s"
            print(f"{action}, {name:8}   {line}")
        print(f"       all: {[round(value, 2) for value in results[f'DCP {action}']]}")
        print(f"            {[round(value, 2) for value in results[f'titanlite {action}']]}")


if __name__ == "__main__":
    main()
