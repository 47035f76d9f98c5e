"""Named sizes on one GPU: tokens/s, MFU and memory, in bfloat16 and float8, beside a published figure.

    python benchmarks/single_gpu.py [--rows 1b-4096-bf16 ...]      (default: all rows; an H200, some minutes a row)
    python benchmarks/single_gpu.py --dry-run [the same]           (on any machine: checks the configs, shows the commands)

Each row is ./run_train.sh on single_gpu.toml: 20 steps of 32768 tokens of Llama 3.2 1B and 3B and Llama 3.1 8B, sequences
of 4096 and 8192, blocks and loss compiled, the loss in 8 parts. ROWS has the rest of what they do to fit 141 GB.
float8 is the recipe "tensorwise". A row "full" computes as the published figure was: sequences of 4096 in microsteps of
4, two a step, every block recomputed in full, weights and states in bfloat16.

Before the first row and after each, a new process measures what the GPU makes of the product of two square matrices of
side 8192 in bfloat16; a row is held against the mean of the two measurements around it.

Prints a line of JSON a product and a step (metrics.jsonl), then for each row

    tokens/s, MFU      medians over the steps after the fifth. MFU is the share of the data sheet's dense bfloat16 rate,
                       also for float8, under two conventions: with 12 L D T operations for attention, as train.py has
                       it, and with 6 L D T, which is what a causal mask leaves of them.
    of product         the same two as shares of the measured product's rate
    GiB                the allocator's peak, as tensors and as reserved from the device
    B/param            bytes of that peak, as tensors, for each parameter: weights, gradients, states, activations

and the published figure in the same units; what it does not have is nan. A row that fails is a line of JSON with the
reason, and "failed" in the table.
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

HERE = Path(__file__).resolve().parent
SIDE = 8192  # of the matrices whose product is measured
WARM_UP = 5  # steps that are left out: compilation, and clocks that settle
TOKENS = 32768  # of a step
THROUGHPUT, TFLOPS, MFU = "throughput(tps)", "tflops", "mfu(%)"
ACTIVE, RESERVED = "memory/max_active(GiB)", "memory/max_reserved(GiB)"
Options = dict[str, str | int]

IN_BF16: Options = {"training.dtype": "bfloat16", "optimizer.stochastic_rounding": "true"}
# Gathering, on one GPU, is a cast from float32: these keep the result, 2 bytes a parameter, for the whole step.
GATHERED: Options = {"parallelism.fsdp_reshard_after_forward": "never"}
SELECTIVE: Options = {"activation_checkpoint.mode": "selective"}


class Size(NamedTuple):
    """Tokens of a microstep, and options."""

    tokens: int
    options: Options


SIZES = {
    # 16 bytes a parameter for weights, gradients and moments in float32: 18.4 and 47.9 GiB. 1B keeps all activations.
    "1b": Size(32768, {"model.flavor": "llama3_1b"} | GATHERED),
    "3b": Size(16384, {"model.flavor": "llama3_3b"} | GATHERED | SELECTIVE),
    # In float32 these would be 120 GiB; in bfloat16 they are half of it.
    "8b": Size(8192, {"model.flavor": "llama3_8b"} | IN_BF16 | SELECTIVE),
}
PRECISIONS: dict[str, Options] = {
    "bf16": {},
    "float8": {"float8.enable": "true", "float8.recipe": "tensorwise"},
}


def row(size: Size, seq_len: int, others: Options) -> Options:
    batch = {"training.local_batch_size": size.tokens // seq_len, "training.global_batch_size": TOKENS // seq_len}
    return {**size.options, "training.seq_len": seq_len, **batch, "training.loss_chunks": 8, **others}


FULL = "8b-4096-full"
ROWS = {
    f"{name}-{seq_len}-{precision}": row(size, seq_len, options)
    for name, size in SIZES.items()
    for seq_len in (4096, 8192)
    for precision, options in PRECISIONS.items()
}
ROWS[FULL] = row(SIZES["8b"]._replace(tokens=16384), 4096, {"activation_checkpoint.mode": "full"})

# KempnerForge, benchmarks/mfu_scaling/mfu_scaling_2026-04-05.md: experiment 1, "7B" of 8.03 billion parameters on one
# H200. It writes GB and has an H200 of 140, so they are GiB.
PUBLISHED = {THROUGHPUT: 10_471, ACTIVE: 80.7, RESERVED: math.nan}


class Work(NamedTuple):
    """What a row's model amounts to."""

    parameters: int
    flops: int
    """Operations a token, with attention as train.py counts it."""
    causal: float
    """Share of them that a causal mask leaves."""


def arguments_of(options: Options) -> list[str]:
    return [str(HERE / "single_gpu.toml"), *(f"--{key}={value}" for key, value in options.items())]


def checked(options: Options) -> Config:
    """The config of a row as the one rank resolves it.

    Raises:
        ConfigError: if it breaks a rule.
    """
    return check(load(arguments_of(options)), Launch(0, 0, 1, 1, n_devices=1))


def work_of(config: Config) -> Work:
    sizes = build.parameter_sizes(config)
    flops = build.count_flops_per_token(config, sizes)
    masked = 6 * config.model.n_layers * config.model.dim * config.training.seq_len
    return Work(sum(sizes.values()), flops, 1 - masked / flops)


def train(options: Options) -> list[dict[str, float]]:
    """Run train.py on one GPU; its rows of metrics.jsonl.

    Raises:
        subprocess.CalledProcessError: if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [str(HERE.parent / "run_train.sh"), *arguments_of(options | {"job.dump_folder": folder})]
        environment = os.environ | {"NGPU": "1", "PYTHON": sys.executable}
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def product_tflops() -> float:
    """Median rate of products in bfloat16 on this process's GPU, in groups of ten; the first half warms up. Factors are
    random, since a GPU is faster on zeros."""
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


def measured_product() -> float:
    """`product_tflops` in a process of its own, which leaves the GPU's memory to the rows."""
    command = [sys.executable, str(Path(__file__).resolve()), "--product"]
    tflops = float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    print(json.dumps({"product": f"{SIDE}^3 bfloat16", "tflops": tflops}), flush=True)
    return tflops


def report(name: str, work: Work, values: dict[str, float], product: float) -> str:
    """A line of the table.

    Args:
        values: by the tags of metrics.jsonl.
        product: TFLOP/s.
    """
    tflops, mfu, of_product = values[TFLOPS], values[MFU], 100 * values[TFLOPS] / product
    shares = f"{mfu:6.1f} {mfu * work.causal:6.1f} {of_product:8.1f} {of_product * work.causal:6.1f}"
    memory = f"{values[ACTIVE]:8.1f} {values[RESERVED]:8.1f} {values[ACTIVE] * 2**30 / work.parameters:8.2f}"
    return f"{name:16} {values[THROUGHPUT]:9,.0f} {tflops:8.1f} {shares} {memory}"


def published(work: Work) -> str:
    """The published figure's line. Operations are counted as ours are, without the input embedding: with it, as the
    report counts them, its MFU is 57.8 %."""
    flops = PUBLISHED[THROUGHPUT] * work.flops
    values = {**PUBLISHED, TFLOPS: flops / 1e12, MFU: 100 * flops / DEVICES["h200"].bf16}
    return report("published", work, values, math.nan)


def dry_run(names: list[str]) -> None:
    """Check every row's config as one GPU would; show its command, and what it at least needs."""
    for name in names:
        config = checked(ROWS[name])
        work, training = work_of(config), config.training
        size = 4 * getattr(torch, training.dtype).itemsize  # weights, gradients, two moments
        microsteps = training.global_batch_size // training.local_batch_size
        print(f"\n{name}")
        print(f"  {work.parameters:,} parameters: {work.parameters * size / 2**30:.1f} GiB with gradients and moments")
        print(f"  {microsteps} microstep(s) of {training.local_batch_size} sequences of {training.seq_len} tokens")
        print(f"  {work.flops / 1e9:.2f} GFLOP a token, {work.flops * work.causal / 1e9:.2f} with the causal mask")
        print("  NGPU=1 ./run_train.sh " + shlex.join(arguments_of(ROWS[name])).replace(f"{HERE.parent}/", ""))
    print(
        f"\nall {len(names)} configs keep the rules; before, between and after: python benchmarks/single_gpu.py --product"
    )


def describe_gpu() -> str:
    """Name, driver, memory and power limit of the first GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,power.limit", "--format=csv,noheader"]
    return subprocess.run(query, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS, metavar="ROW")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--dry-run", action="store_true", help="check the configs and show the commands")
    kind.add_argument("--product", action="store_true", help="only measure the product, and print its TFLOP/s")
    arguments = parser.parse_args()
    if arguments.product:
        print(product_tflops())
        return
    if arguments.dry_run:
        dry_run(arguments.rows)
        return
    if not torch.cuda.is_available():
        sys.exit("error: single_gpu.py needs a GPU, and this host has none; --dry-run checks its configs without")
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}; {describe_gpu()}", flush=True)
    table, before = [], measured_product()
    for name in arguments.rows:
        work = work_of(checked(ROWS[name]))
        try:
            steps = train(ROWS[name])
        except subprocess.CalledProcessError as error:
            print(json.dumps({"row": name, "failed": (error.stdout + error.stderr)[-2000:]}), flush=True)
            table.append(f"{name:16} failed")
            continue
        for step in steps:
            print(json.dumps({"row": name, **step}), flush=True)
        after = measured_product()
        values = {tag: statistics.median(step[tag] for step in steps[WARM_UP:]) for tag in (THROUGHPUT, TFLOPS, MFU)}
        values |= {tag: max(step[tag] for step in steps[WARM_UP:]) for tag in (ACTIVE, RESERVED)}
        table.append(report(name, work, values, product=(before + after) / 2))
        before = after
    heads = f"{'tokens/s':>9} {'TFLOP/s':>8} {'MFU %':>6} {'causal':>6} {'of prod.':>8} {'causal':>6}"
    print(f"{'row':16} {heads} {'GiB':>8} {'reserved':>8} {'B/param':>8}")
    print("\n".join([*table, published(work_of(checked(ROWS[FULL])))]))


if __name__ == "__main__":
    main()
