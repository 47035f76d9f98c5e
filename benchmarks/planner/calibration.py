"""Compare plans with a calibrated device with measured step times: the debug model on a CPU, under 24 layouts.

    python -m benchmarks.planner.calibration [--rounds N]

In each of three rounds 1, 2 and 4 gloo ranks of one thread each calibrate as `titanlite calibrate` does, and then take
training steps of the debug model under each layout: one as warm-up, and three that count. Each plan is made with the
calibration of its round and as many ranks. A machine's speed drifts, so planned and measured seconds of a round are
compared, and the medians over the rounds count.

Prints JSON lines, then a table and Spearman's correlation of planned and measured seconds per step. Bounds: 15 % for
each layout, and a correlation of 0.9.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.config import Launch, check, load
from titanlite.launch.process import retain_freed_memory
from titanlite.launch.process_group import device_of
from titanlite.metrics.devices import Device
from titanlite.tools.calibrate.command import write
from titanlite.tools.calibrate.measure import measure_device
from titanlite.tools.parity.process_pool import ProcessPool
from titanlite.tools.parity.training_run import TrainingRun
from titanlite.tools.plan.planner import make_plan

DEBUG = Path(__file__).resolve().parents[2] / "configs" / "debug.toml"
P = "parallelism."
SEQUENCES = {"training.local_batch_size": 8}
LONG = {"training.local_batch_size": 2, "training.seq_len": 1024}
FULL, SELECTIVE = ({"activation_checkpoint.mode": mode} for mode in ("full", "selective"))
SHARD_2, SHARD_4 = ({f"{P}data_parallel_shard_degree": n} for n in (2, 4))
TENSOR_2, TENSOR_4 = ({f"{P}tensor_parallel_degree": n} for n in (2, 4))
RING_2 = {f"{P}context_parallel_degree": 2}
PIPELINE_2 = {f"{P}pipeline_parallel_degree": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, SEQUENCES),
    "one rank, full AC": (1, SEQUENCES | FULL),
    "one rank, selective AC": (1, SEQUENCES | SELECTIVE),
    "one rank, 4 sequences": (1, {"training.local_batch_size": 4}),
    "one rank, accumulation": (1, {"training.local_batch_size": 4, "training.global_batch_size": 8}),
    "one rank, 1024 tokens": (1, LONG),
    "shard 2": (2, SEQUENCES | SHARD_2),
    "shard 2, full AC": (2, SEQUENCES | SHARD_2 | FULL),
    "shard 2, ZeRO-2": (2, SEQUENCES | SHARD_2 | {f"{P}fsdp_reshard_after_forward": "never"}),
    "shard 2, 2 sequences": (2, SHARD_2 | {"training.local_batch_size": 2}),
    "replicate 2": (
        2,
        SEQUENCES | {f"{P}data_parallel_replicate_degree": 2, f"{P}data_parallel_shard_degree": 1},
    ),
    "tensor 2": (2, SEQUENCES | TENSOR_2),
    "tensor 2, full AC": (2, SEQUENCES | TENSOR_2 | FULL),
    "tensor 2, 2 sequences": (2, TENSOR_2 | {"training.local_batch_size": 2}),
    "ring 2": (2, SEQUENCES | RING_2),
    "ring 2, 1024 tokens": (2, LONG | RING_2),
    "ulysses 2": (2, SEQUENCES | RING_2 | {f"{P}context_parallel_ulysses_degree": 2}),
    "GPipe 2": (2, SEQUENCES | PIPELINE_2 | {f"{P}pipeline_parallel_schedule": "GPipe"}),
    "1F1B 2": (2, SEQUENCES | PIPELINE_2),
    "interleaved 2": (2, SEQUENCES | PIPELINE_2 | {f"{P}pipeline_parallel_schedule": "Interleaved1F1B"}),
    "ZBV 2": (2, SEQUENCES | PIPELINE_2 | {f"{P}pipeline_parallel_schedule": "ZBVZeroBubble"}),
    "shard 4": (4, {"training.local_batch_size": 4} | SHARD_4),
    "shard 2 x tensor 2": (4, {"training.local_batch_size": 4} | TENSOR_2),
    "tensor 4": (4, {"training.local_batch_size": 4} | TENSOR_4),
}
ALLOWED, CORRELATION = 0.15, 0.9
RUNS: dict[str, TrainingRun] = {}


def calibrate(ranks: int) -> Device:
    """Return the measured device. Every rank must call it."""
    retain_freed_memory()
    return measure_device(torch.device("cpu"), ranks_per_node=ranks)


def arguments_of(options: dict[str, Any], device: str = "cpu") -> list[str]:
    return [str(DEBUG), *(f"--{key}={value}" for key, value in (options | {"plan.device": device}).items())]


def measure(options: dict[str, Any]) -> list[float]:
    """Return the seconds of three steps. Every rank must call it."""
    launch = Launch.from_environment(0)
    key = json.dumps(options)
    if key not in RUNS:
        RUNS[key] = TrainingRun(check(load(arguments_of(options)), launch), device_of(launch))
    seconds = []
    for _ in range(4):
        batches = RUNS[key].loader.next()
        dist.barrier()
        begin = time.perf_counter()
        RUNS[key].step(batches)
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def ranks_of(values: list[float]) -> list[int]:
    return [sorted(values).index(value) for value in values]


def spearman(one: list[float], other: list[float]) -> float:
    """Return Spearman's rank correlation of two lists without equal values."""
    n = len(one)
    return 1 - 6 * sum((x - y) ** 2 for x, y in zip(ranks_of(one), ranks_of(other), strict=True)) / (n * (n * n - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    worlds = sorted({ranks for ranks, _ in LAYOUTS.values()})
    pools = {ranks: ProcessPool(ranks, timeout_seconds=600) for ranks in worlds}
    measured: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    planned: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        files = [{ranks: Path(folder) / f"{number}_{ranks}.toml" for ranks in worlds} for number in range(rounds)]
        for number in range(rounds):
            for ranks in worlds:
                begin = time.monotonic()
                write(pools[ranks].run(calibrate, ranks=ranks)[0], files[number][ranks])
                print(json.dumps({"round": number, "ranks": ranks, "seconds": time.monotonic() - begin}), flush=True)
            for name, (ranks, options) in LAYOUTS.items():
                seconds = pools[ranks].run(measure, options=options)[0]
                measured[name].append(statistics.median(seconds))
                print(json.dumps({"round": number, "layout": name, "seconds": seconds}), flush=True)
        for pool in pools.values():
            pool.close()
        for name, (ranks, options) in LAYOUTS.items():
            for number in range(rounds):
                loaded = load(arguments_of(options, str(files[number][ranks])))
                planned[name].append(make_plan(loaded, world_size=ranks).step_seconds)
            print(json.dumps({"layout": name, "planned": planned[name]}), flush=True)
    width = max(map(len, LAYOUTS))
    print(f"\n{'seconds per step':{width}} {'ranks':>5} {'measured':>9} {'planned':>8} {'off':>7}")
    medians = {name: (statistics.median(planned[name]), statistics.median(measured[name])) for name in LAYOUTS}
    for name, (plan, run) in medians.items():
        off = statistics.median(p / m for p, m in zip(planned[name], measured[name], strict=True)) - 1
        verdict = "" if abs(off) <= ALLOWED else f"   more than {ALLOWED:.0%}"
        print(f"{name:{width}} {LAYOUTS[name][0]:5} {run:9.3f} {plan:8.3f} {off:+7.1%}{verdict}")
    correlation = spearman([plan for plan, _ in medians.values()], [run for _, run in medians.values()])
    print(f"Spearman's correlation: {correlation:.3f}" + ("" if correlation >= CORRELATION else "   too low"))


if __name__ == "__main__":
    main()
