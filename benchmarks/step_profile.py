"""Measure what a training step spends its time on, on a CPU: matrix products, attention, and everything else.

    python benchmarks/step_profile.py [--rounds N]

One process trains the model of vs_torchtitan.py (6,163,712 parameters, 8 sequences of 512 tokens, float32), eager and
with compiled blocks and loss. The two take their steps in turn. Each has a line with the median seconds of a step, and
the share of the operators' time by kind, from torch's profiler over the last steps. Raw times come first, as JSON.
"""

import argparse
import json
import statistics
import time
from collections import Counter

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from vs_torchtitan import CPU_SEQ_LEN, FLAVORS, TOML

from titanlite.config import Launch, check, load
from titanlite.launch.process import exit_process
from titanlite.launch.process_group import retain_freed_memory
from titanlite.tools.parity.training_run import TrainingRun

OPTIONS = FLAVORS["debug"][0] | {"training.local_batch_size": 8, "training.seq_len": CPU_SEQ_LEN}
VARIANTS = {"eager": {}, "compiled": {"compile.enable": "true"}}
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "mkl::_mkl_linear", "mkldnn::_linear_pointwise")
PROFILED = 2  # steps


def build_run(options: dict[str, object]) -> TrainingRun:
    job = check(load([str(TOML), *(f"--{key}={value}" for key, value in options.items())]), Launch(0, 0, 1, 1, 0))
    return TrainingRun(job, torch.device("cpu"))


def kind_of(operator: str) -> str:
    if operator in PRODUCTS:
        return "products"
    return "attention" if "attention" in operator else "other"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=12, help="steps of each")
    rounds = options.parse_args().rounds
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    retain_freed_memory()
    runs = {name: build_run(OPTIONS | changes) for name, changes in VARIANTS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 2):
        for name, run in runs.items():
            batches, begin = run.loader.next(), time.perf_counter()
            run.step(batches)
            seconds[name].append(time.perf_counter() - begin)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name, run in runs.items():
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(PROFILED):
                run.step(run.loader.next())
        times: Counter[str] = Counter()
        for event in profiler.key_averages():
            times[kind_of(event.key)] += event.self_cpu_time_total / 1e6 / PROFILED
        print(json.dumps({"variant": name, "seconds": seconds[name][2:], "by kind": dict(times)}), flush=True)
        shares = ", ".join(f"{kind} {100 * value / times.total():.1f} %" for kind, value in times.most_common())
        print(f"{name:9} {statistics.median(seconds[name][2:]):.3f} s a step: {shares}")
    pairs = zip(seconds["eager"][2:], seconds["compiled"][2:], strict=True)
    print(f"eager / compiled: {statistics.median(a / b for a, b in pairs):.3f}")
    exit_process(0)


if __name__ == "__main__":
    main()
