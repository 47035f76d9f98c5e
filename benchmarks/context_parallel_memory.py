"""Measure the memory of a rank over the sequence length and the context-parallel degree (ring attention, Ulysses).

    python benchmarks/context_parallel_memory.py [--cp 1 2 4 8] [--ulysses 1] [--longest 65536] [--layers 2]
                                                 [--limit-gib G]

For every length, doubling from 4096, and every context-parallel degree, new ranks on gloo build the debug model with
--layers blocks (configs/debug.toml, titanlite.build) and run forward and backward of one step on one sequence. The
memory is the growth of the rank's resident set from the start of the step to its peak: activations, mostly, and the
gradients and gathered weights, a few MiB that do not depend on the length. glibc is set to return freed memory at once,
so the resident set is the live tensors; a training run retains freed memory instead. Linux only (/proc).

--ulysses is the inner degree (1: all ranks are in the ring); context-parallel degrees that it does not divide are
skipped. The benchmark ends with --longest, because the time of attention grows with the square of the length. It also
ends before a length at which the ranks of some degree would together need more than --limit-gib, estimated from the
length before (default: the memory that is free now).

Each case prints a JSON line with the growth of each rank. The table has GiB of the rank that needs most and, below it,
the ratio to one rank (ideal: 1 / degree).
"""

import argparse
import json
import os
from pathlib import Path

import psutil
import torch
from resident_memory import map_each_tensor, reset_peak, resident_bytes

from titanlite.config import Config, Launch, check, load
from titanlite.tools.parity.process_pool import ProcessPool
from titanlite.tools.parity.training_run import TrainingRun

SHORTEST = 4096
DEBUG = Path(__file__).resolve().parents[1] / "configs" / "debug.toml"


def growth_gib(config: Config, threads: int) -> tuple[float, float]:
    """Return the GiB resident before the step and the growth at its peak. Every rank of the group must call it."""
    torch.set_num_threads(threads)
    run = TrainingRun(config, torch.device("cpu"))
    batch = run.loader.next()
    reset_peak()
    before = resident_bytes("VmRSS")
    run.train_step.forward_backward(batch)
    peak = resident_bytes("VmHWM")
    run.loader.close()
    return before / 2**30, (peak - before) / 2**30


def measure(length: int, degree: int, ulysses: int, n_layers: int) -> list[tuple[float, float]]:
    """Run a case and return `growth_gib` of each rank."""
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
    map_each_tensor()  # the fork server, which starts after this, passes it on to each rank
    print(f"torch {torch.__version__}; debug model with {options.layers} layers; Ulysses {options.ulysses}")
    table: dict[int, dict[int, float]] = {}
    length, need = SHORTEST, 0.0  # need: estimated GiB of all ranks together at this length
    while length <= options.longest and need <= options.limit_gib:
        results, need = {}, 0.0
        for degree in degrees:
            ranks = measure(length, degree, options.ulysses, options.layers)
            results[degree] = max(growth for _, growth in ranks)
            need = max(need, sum(before + 2 * growth for before, growth in ranks))
        table[length] = results
        length *= 2
    print(f"{'GiB/rank':>10} " + "".join(f"{f'cp {degree}':>9}" for degree in degrees))
    for length, results in table.items():
        print(f"{length:10} " + "".join(f"{gib:9.3f}" for gib in results.values()))
        if 1 in results:
            print(f"{'ratio':>10} " + "".join(f"{gib / results[1]:9.3f}" for gib in results.values()))


if __name__ == "__main__":
    main()
