"""titanlite beside transformers' LlamaForCausalLM in a plain PyTorch loop, on the CPU, in turn on the same machine.

The same 6.16 million parameters, sequence length, batch, precision (float32) and optimizer (fused AdamW); alone, and
on two ranks with DDP and FSDP2 in the plain loop against dp_replicate = 2 and dp_shard = 2. Both sides are whole
processes.

    python benchmarks/vs_transformers.py [--rounds N] [--steps N] [--modes alone ddp fsdp]

Prints, for each mode, medians over the rounds of: tokens/s (median step of a process, without the first two), peak
resident memory (summed over ranks), seconds from launch to the end of the first step; and the median of the rounds'
ratios, where above 1 is better for tokens/s and below 1 for the others.
"""

import argparse
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import torch
import transformers

HERE = Path(__file__).resolve().parent
TOKENS = 8 * 512  # a step over all ranks
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
OURS_LAYOUT = {
    "alone": [],
    "ddp": [
        "--parallelism.data_parallel_replicate_degree=2",
        "--parallelism.data_parallel_shard_degree=1",
        "--parallelism.fsdp_reshard_after_forward=never",
    ],
    "fsdp": ["--parallelism.data_parallel_shard_degree=2"],
}


def ours(mode: str, steps: int) -> list[str]:
    arguments = [str(HERE / "vs_transformers.toml"), f"--training.steps={steps}", *OURS_LAYOUT[mode]]
    if mode == "alone":
        return [sys.executable, str(HERE.parent / "train.py"), *arguments]
    return [*TORCHRUN, str(HERE.parent / "train.py"), *arguments, "--training.local_batch_size=4"]


def plain(mode: str, steps: int) -> list[str]:
    script = str(HERE / "transformers_loop.py")
    if mode == "alone":
        return [sys.executable, script, str(steps), "8"]
    return [*TORCHRUN, script, str(steps), "4", mode]


def measure(command: list[str], ranks: int) -> dict[str, float]:
    """Run a command to its end. Step times are taken where its "step N" lines arrive, so both sides are timed alike."""
    environment = os.environ | {"OMP_NUM_THREADS": str(max(os.cpu_count() // ranks, 1)), "PYTHONPATH": str(HERE.parent)}
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    peaks: dict[int, int] = {}
    threading.Thread(target=watch_memory, args=(process.pid, peaks, ranks), daemon=True).start()
    arrivals = [time.perf_counter() for line in process.stdout if re.match(r"step +\d+", line)]
    if process.wait() != 0:
        raise SystemExit(f"failed: {' '.join(command)}")
    steps = [later - earlier for earlier, later in itertools.pairwise(arrivals)][1:]
    return {
        "tokens/s": TOKENS / statistics.median(steps),
        "peak MiB": sum(sorted(peaks.values())[-ranks:]) / 1024,
        "first step s": arrivals[0] - start,
    }


def watch_memory(pid: int, peaks: dict[int, int], ranks: int) -> None:
    """Keep the peak resident KiB of a process (one rank) or of its children (torchrun's ranks) while they live."""
    while True:
        try:
            root = psutil.Process(pid)
            for process in [root] if ranks == 1 else root.children():
                status = Path(f"/proc/{process.pid}/status").read_text()
                peaks[process.pid] = int(re.search(r"VmHWM:\s+(\d+)", status)[1])
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError, TypeError):
            if not psutil.pid_exists(pid):
                return
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--modes", nargs="+", default=list(OURS_LAYOUT), choices=OURS_LAYOUT)
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {options.rounds} rounds")
    for mode in options.modes:
        ranks = 1 if mode == "alone" else 2
        rounds = []
        for number in range(options.rounds):
            pair = measure(ours(mode, options.steps), ranks), measure(plain(mode, options.steps), ranks)
            rounds.append(pair)
            print(json.dumps({"mode": mode, "round": number, "titanlite": pair[0], "plain": pair[1]}), flush=True)
        for what in rounds[0][0]:
            mine, other = (statistics.median(pair[side][what] for pair in rounds) for side in (0, 1))
            ratio = statistics.median(pair[0][what] / pair[1][what] for pair in rounds)
            print(
                f"{mode:6} {what:14} titanlite {mine:10.1f}   plain loop {other:10.1f}   ratio {ratio:.3f}", flush=True
            )


if __name__ == "__main__":
    main()
