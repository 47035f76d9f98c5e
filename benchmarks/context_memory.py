"""Memory that a rank needs for longer and longer sequences, by the number of ranks that share each one.

    python benchmarks/context_memory.py [--cp 1 2 4 8] [--ulysses 1] [--longest 65536] [--layers 2] [--limit-gib G]

For every length, doubling from 4096, and every context-parallel degree: new ranks on gloo build the debug model with
--layers blocks (configs/debug.toml, titanlite.build) and take one step's forward and backward on one sequence. Memory
is what the rank's resident set grows by at its peak over what it was before the step: activations, mostly, and also
gradients and gathered weights, a few MiB that do not depend on the length. glibc is told to return what is freed at
once, so the resident set is the live tensors; a training run keeps freed memory instead. Linux only (/proc).

--ulysses is the inner degree (1: all ranks are in the ring); degrees that it does not divide are left out. It ends with
--longest, since attention's time grows with the square of the length, or before the length at which the ranks of some
degree would need more than --limit-gib together (default: what is free now), judged by the length before.

Prints a line of JSON a case with each rank's growth, then a table: GiB of the rank that needs most and, below it, its
ratio to one rank (ideal: 1 / degree).
"""

import argparse
import json
import os
from pathlib import Path

import psutil
import torch
from resident import forget_peak, map_each_tensor, resident_bytes

from titanlite.config import Config, Launch, check, load
from titanlite.parity.process_pool import ProcessPool
from titanlite.parity.training_run import TrainingRun

SHORTEST = 4096
DEBUG = Path(__file__).resolve().parents[1] / "configs" / "debug.toml"


def growth_gib(config: Config, threads: int) -> tuple[float, float]:
    """(before the step, peak over that) of this rank of the process group. Every rank must call it."""
    torch.set_num_threads(threads)
    run = TrainingRun(config, torch.device("cpu"))
    batch = run.loader.next()
    forget_peak()
    before = resident_bytes("VmRSS")
    run.train_step.forward_backward(batch)
    peak = resident_bytes("VmHWM")
    run.loader.close()
    return before / 2**30, (peak - before) / 2**30


def measure(length: int, degree: int, ulysses: int, n_layers: int) -> list[tuple[float, float]]:
    """`growth_gib` of each of a case's ranks."""
    options = {
        "model.n_layers": n_layers,
        "training.seq_len": length,
        "training.local_batch_size": 1,
        "parallelism.context_parallel_degree": degree,
        "parallelism.context_parallel_ulysses_degree": ulysses,
    }
    loaded = load([str(DEBUG), *(f"--{key}={value}" for key, value in options.items())])
    config = check(loaded, Launch(0, 0, degree, degree, n_devices=0))
    pool = ProcessPool(degree, timeout_seconds=3600)
    ranks = pool.run(growth_gib, config=config, threads=max((os.cpu_count() or 1) // degree, 1))
    pool.close()
    print(json.dumps({"length": length, "cp": degree, "ulysses": ulysses, "before, growth GiB": ranks}), flush=True)
    return ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--ulysses", type=int, default=1)
    parser.add_argument("--longest", type=int, default=65536)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--limit-gib", type=float, default=psutil.virtual_memory().available / 2**30)
    options = parser.parse_args()
    degrees = [degree for degree in options.cp if degree % options.ulysses == 0]
    map_each_tensor()  # each rank is forked from a server that begins after this
    print(f"torch {torch.__version__}; debug model with {options.layers} layers; Ulysses {options.ulysses}")
    table: dict[int, dict[int, float]] = {}
    length, need = SHORTEST, 0.0  # GiB of all ranks together at this length, judged by the one before
    while length <= options.longest and need <= options.limit_gib:
        row, need = {}, 0.0
        for degree in degrees:
            ranks = measure(length, degree, options.ulysses, options.layers)
            row[degree] = max(growth for _, growth in ranks)
            need = max(need, sum(before + 2 * growth for before, growth in ranks))
        table[length] = row
        length *= 2
    print(f"{'GiB a rank':>10} " + "".join(f"{f'cp {degree}':>9}" for degree in degrees))
    for length, row in table.items():
        print(f"{length:10} " + "".join(f"{gib:9.3f}" for gib in row.values()))
        if 1 in row:
            print(f"{'ratio':>10} " + "".join(f"{gib / row[1]:9.3f}" for gib in row.values()))


if __name__ == "__main__":
    main()
