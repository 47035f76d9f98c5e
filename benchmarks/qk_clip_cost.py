"""Measure what QK-clip adds to a training step on a CPU: the ratio of interleaved steps with it and without it.

    OMP_NUM_THREADS=1 python benchmarks/qk_clip_cost.py [--pairs 9]

One process trains the debug model, with random tokens and Muon in float32, at each sequence length with the same number
of tokens. Its steps are taken alternately with a threshold that no logit reaches and without QK-clip. For each length
it prints the medians in milliseconds, the median of the ratios of neighbouring steps and its quartiles.
"""

import argparse
import os
import platform
import statistics
import tempfile
import time

import torch

from titanlite import config
from titanlite.parallel import mesh
from titanlite.tools.parity.training_run import TrainingRun

TOKENS, LENGTHS = 2048, (256, 2048)
CPU = torch.device("cpu")


def build_run(folder: str, seq_len: int, threshold: float) -> TrainingRun:
    """Return a run of the debug model."""
    batch = TOKENS // seq_len
    options = [
        *(f"--job.dump_folder={folder}", f"--training.seq_len={seq_len}", f"--training.local_batch_size={batch}"),
        *("--optimizer.name=Muon", f"--optimizer.qk_clip_threshold={threshold}", "--validation.enable=false"),
    ]
    return TrainingRun(config.check(config.load(["debug", *options]), config.Launch(0, 0, 1, 1, 0)), CPU)


def seconds(run: TrainingRun) -> float:
    """Return how long a step takes, without its data."""
    batches = run.loader.next()
    start = time.perf_counter()
    run.step(batches)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    pairs = parser.parse_args().pairs
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29541"}
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    print(f"torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} threads, {pairs} pairs of steps")
    with tempfile.TemporaryDirectory() as folder:
        for length in LENGTHS:
            mesh.forget_layouts()
            plain, clipping = build_run(folder, length, 0), build_run(folder, length, 1e9)
            for run in (plain, clipping):
                seconds(run)
            times = [(seconds(plain), seconds(clipping)) for _ in range(pairs)]
            first, median, third = statistics.quantiles([with_it / without for without, with_it in times], n=4)
            without, with_it = (1000 * statistics.median(column) for column in zip(*times, strict=True))
            shape = f"{TOKENS // length} sequences x {length} tokens"
            steps = f"{without:.0f} ms without, {with_it:.0f} ms with QK-clip"
            print(f"{shape}: {steps}, ratio {median:.3f} ({first:.3f} to {third:.3f})")
            for run in (plain, clipping):
                run.loader.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
