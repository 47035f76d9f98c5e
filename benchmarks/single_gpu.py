"""Measure tokens/s, MFU and memory of named model sizes on one GPU, in bfloat16 and float8, against a published figure.

    python benchmarks/single_gpu.py [--cases 1b-4096-bf16 ...]    (default: all cases; an H200, some minutes per case)
    python benchmarks/single_gpu.py --dry-run [the same]          (on any machine: checks configs, prints commands)

Each case runs ./run_train.sh on single_gpu.toml: 20 steps of 32768 tokens of Llama 3.2 1B and 3B and Llama 3.1 8B with
sequences of 4096 and 8192, compiled blocks and loss, and chunked cross-entropy in 8 chunks. CASES has the other options
that fit a case into 141 GB. float8 is the recipe "tensorwise". The case "full" computes as the published figure was:
sequences of 4096, a per-device batch size of 4, two gradient accumulation steps, full activation checkpointing, weights
and optimizer states in bfloat16.

Before the first case and after each, a new process measures the rate of a bfloat16 matrix product (matmul) of two
square matrices of side 8192 on the GPU. A case is compared with the mean of the measurements before and after it.

Each matmul measurement and each step (metrics.jsonl) prints a JSON line. The table has for each case

    tokens/s, MFU      medians over the steps after the fifth. MFU (model FLOPs utilization) is the fraction of the data
                       sheet's dense bfloat16 rate, also for float8, under two conventions: with 12 L D T operations for
                       attention, as train.py counts them, and with 6 L D T, the part that a causal mask leaves
    of matmul          the same two as fractions of the measured rate of the matmul
    GiB                the allocator's peak, in tensors and reserved from the device
    B/param            bytes of that peak, in tensors, per parameter: weights, gradients, optimizer states, activations

and the published figure in the same units; what it lacks is nan. A case that fails prints a JSON line with the reason,
and the table says "failed".
"""

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from titanlite import build
from titanlite.config import Config, Launch, check, load
from titanlite.devices import DEVICES
from titanlite.model import flops_per_token

HERE = Path(__file__).resolve().parent
SIDE = 8192  # of the matrices of the measured matmul
WARM_UP = 5  # steps without a measurement: compilation, and clocks that settle
TOKENS = 32768  # of the global batch
THROUGHPUT, TFLOPS, MFU = "throughput(tps)", "tflops", "mfu(%)"
ACTIVE, RESERVED = "memory/max_active(GiB)", "memory/max_reserved(GiB)"
Options = dict[str, str | int]

IN_BF16: Options = {"training.dtype": "bfloat16", "optimizer.stochastic_rounding": "true"}
# On one GPU the all-gather is a cast from float32. Its result, 2 bytes per parameter, stays resident for the step.
GATHERED: Options = {"parallelism.fsdp_reshard_after_forward": "never"}
SELECTIVE: Options = {"activation_checkpoint.mode": "selective"}


class Size(NamedTuple):
    """Tokens of a gradient accumulation step, and options."""

    tokens: int
    options: Options


SIZES = {
    # 16 bytes per parameter for weights, gradients and optimizer states in float32: 18.4 and 47.9 GiB. 1B runs without
    # activation checkpointing.
    "1b": Size(32768, {"model.flavor": "llama3_1b"} | GATHERED),
    "3b": Size(16384, {"model.flavor": "llama3_3b"} | GATHERED | SELECTIVE),
    # In float32 these would be 120 GiB; in bfloat16 they are half of it.
    "8b": Size(8192, {"model.flavor": "llama3_8b"} | IN_BF16 | SELECTIVE),
}
PRECISIONS: dict[str, Options] = {
    "bf16": {},
    "float8": {"float8.enable": "true", "float8.recipe": "tensorwise"},
}


def case(size: Size, seq_len: int, options: Options) -> Options:
    batch = {"training.local_batch_size": size.tokens // seq_len, "training.global_batch_size": TOKENS // seq_len}
    return {**size.options, "training.seq_len": seq_len, **batch, "training.loss_chunks": 8, **options}


FULL = "8b-4096-full"
CASES = {
    f"{name}-{seq_len}-{precision}": case(size, seq_len, options)
    for name, size in SIZES.items()
    for seq_len in (4096, 8192)
    for precision, options in PRECISIONS.items()
}
CASES[FULL] = case(SIZES["8b"]._replace(tokens=16384), 4096, {"activation_checkpoint.mode": "full"})

# KempnerForge, benchmarks/mfu_scaling/mfu_scaling_2026-04-05.md: experiment 1, "7B" of 8.03 billion parameters on one
# H200. It writes GB for an H200 of 140, so its unit is GiB.
PUBLISHED = {THROUGHPUT: 10_471, ACTIVE: 80.7, RESERVED: math.nan}


class Work(NamedTuple):
    """The number of parameters and the operations of a case's model."""

    parameters: int
    flops: int
    """Operations per token, with attention as train.py counts it."""
    causal: float
    """Fraction of them that a causal mask leaves."""


def arguments_of(options: Options) -> list[str]:
    return [str(HERE / "single_gpu.toml"), *(f"--{key}={value}" for key, value in options.items())]


def checked(options: Options) -> Config:
    """Return the config of a case as a single rank resolves it.

    Raises:
        ConfigError: if the config is invalid.
    """
    return check(load(arguments_of(options)), Launch(0, 0, 1, 1, n_devices=1))


def work_of(config: Config) -> Work:
    sizes = build.parameter_sizes(config)
    flops = flops_per_token(sizes, config.model, config.training.seq_len)
    masked = 6 * config.model.n_layers * config.model.dim * config.training.seq_len
    return Work(sum(sizes.values()), flops, 1 - masked / flops)


def train(options: Options) -> list[dict[str, float]]:
    """Run train.py on one GPU and return the lines of its metrics.jsonl.

    Raises:
        subprocess.CalledProcessError: if the run fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [str(HERE.parent / "run_train.sh"), *arguments_of(options | {"job.dump_folder": folder})]
        environment = os.environ | {"NGPU": "1", "PYTHON": sys.executable}
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def matmul_tflops() -> float:
    """Return the median TFLOP/s of bfloat16 matmuls on this process's GPU, timed in groups of ten. The first half is
    warm-up. The matrices are random, because a GPU is faster on zeros."""
    one, other = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    result = torch.empty_like(one)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rates = []
    for _ in range(100):
        start.record()
        for _ in range(10):
            torch.mm(one, other, out=result)
        end.record()
        end.synchronize()
        rates.append(10 * 2 * SIDE**3 / (start.elapsed_time(end) / 1e3) / 1e12)
    return statistics.median(rates[50:])


def measured_matmul() -> float:
    """Return `matmul_tflops` from a process of its own, which leaves the memory of the GPU to the cases."""
    command = [sys.executable, str(Path(__file__).resolve()), "--matmul"]
    tflops = float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    print(json.dumps({"matmul": f"{SIDE}^3 bfloat16", "tflops": tflops}), flush=True)
    return tflops


def report(name: str, work: Work, values: dict[str, float], matmul: float) -> str:
    """Return a line of the table.

    Args:
        values: by the tags of metrics.jsonl.
        matmul: measured rate of the matmul, TFLOP/s.
    """
    tflops, mfu, of_matmul = values[TFLOPS], values[MFU], 100 * values[TFLOPS] / matmul
    fractions = f"{mfu:6.1f} {mfu * work.causal:6.1f} {of_matmul:9.1f} {of_matmul * work.causal:6.1f}"
    memory = f"{values[ACTIVE]:8.1f} {values[RESERVED]:8.1f} {values[ACTIVE] * 2**30 / work.parameters:8.2f}"
    return f"{name:16} {values[THROUGHPUT]:9,.0f} {tflops:8.1f} {fractions} {memory}"


def published(work: Work) -> str:
    """Return the line of the published figure, with operations counted as ours, without the input embedding. With it,
    as the report counts them, its MFU is 57.8 %."""
    flops = PUBLISHED[THROUGHPUT] * work.flops
    values = {**PUBLISHED, TFLOPS: flops / 1e12, MFU: 100 * flops / DEVICES["h200"].bf16}
    return report("published", work, values, math.nan)


def dry_run(names: list[str]) -> None:
    """Check the config of every case for one GPU; print its command and the least memory that it needs."""
    for name in names:
        config = checked(CASES[name])
        work, training = work_of(config), config.training
        size = 4 * getattr(torch, training.dtype).itemsize  # weight, gradient, exp_avg, exp_avg_sq
        print(f"\n{name}")
        memory = work.parameters * size / 2**30
        print(f"  {work.parameters:,} parameters: {memory:.1f} GiB with gradients and optimizer states")
        print(
            f"  {config.gradient_accumulation_steps} gradient accumulation step(s) of {training.local_batch_size} "
            f"sequences of {training.seq_len} tokens"
        )
        print(f"  {work.flops / 1e9:.2f} GFLOP per token, {work.flops * work.causal / 1e9:.2f} with the causal mask")
        print("  NGPU=1 ./run_train.sh " + shlex.join(arguments_of(CASES[name])).replace(f"{HERE.parent}/", ""))
    print(f"\nall {len(names)} configs are valid; the matmul alone: python benchmarks/single_gpu.py --matmul")


def describe_gpu() -> str:
    """Return name, driver, memory and power limit of the first GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,power.limit", "--format=csv,noheader"]
    return subprocess.run(query, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="CASE")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--dry-run", action="store_true", help="check the configs and print the commands")
    kind.add_argument("--matmul", action="store_true", help="only measure the matmul, and print its TFLOP/s")
    arguments = parser.parse_args()
    if arguments.matmul:
        print(matmul_tflops())
        return
    if arguments.dry_run:
        dry_run(arguments.cases)
        return
    if not torch.cuda.is_available():
        sys.exit("error: single_gpu.py needs a GPU; --dry-run checks its configs without one")
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}; {describe_gpu()}", flush=True)
    table, before = [], measured_matmul()
    for name in arguments.cases:
        work = work_of(checked(CASES[name]))
        try:
            steps = train(CASES[name])
        except subprocess.CalledProcessError as error:
            print(json.dumps({"case": name, "failed": (error.stdout + error.stderr)[-2000:]}), flush=True)
            table.append(f"{name:16} failed")
            continue
        for step in steps:
            print(json.dumps({"case": name, **step}), flush=True)
        after = measured_matmul()
        values = {tag: statistics.median(step[tag] for step in steps[WARM_UP:]) for tag in (THROUGHPUT, TFLOPS, MFU)}
        values |= {tag: max(step[tag] for step in steps[WARM_UP:]) for tag in (ACTIVE, RESERVED)}
        table.append(report(name, work, values, matmul=(before + after) / 2))
        before = after
    heads = f"{'tokens/s':>9} {'TFLOP/s':>8} {'MFU %':>6} {'causal':>6} {'of matmul':>9} {'causal':>6}"
    print(f"{'case':16} {heads} {'GiB':>8} {'reserved':>8} {'B/param':>8}")
    print("\n".join([*table, published(work_of(checked(CASES[FULL])))]))


if __name__ == "__main__":
    main()
