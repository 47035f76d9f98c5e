"""titanlite beside transformers' LlamaForCausalLM in a plain PyTorch loop, on the CPU of this machine.

The same 6.16 million parameters, sequence length, batch, precision (float32) and optimizer (fused AdamW); alone, and
on two ranks: DDP and FSDP2 in the plain loop against dp_replicate = 2 and dp_shard = 2. Both sides are whole
processes. They take their steps in turn, one stopped (SIGSTOP) while the other runs, so a machine whose speed drifts
slows both alike.

    python benchmarks/vs_transformers.py [--rounds N] [--steps N] [--modes alone ddp fsdp]

Prints for each mode: tokens/s (median over all steps but the first two of a launch), peak resident memory (summed over
ranks, median over launches), seconds from launch to the end of the first step (median over launches); and the medians
of the ratios of neighbouring steps and of launches. Above 1 is better for tokens/s, below 1 for the others.
"""

import argparse
import json
import os
import platform
import queue
import re
import signal
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


def titanlite(mode: str, steps: int) -> list[str]:
    arguments = [str(HERE / "vs_transformers.toml"), f"--training.steps={steps}", *OURS_LAYOUT[mode]]
    if mode == "alone":
        return [sys.executable, str(HERE.parent / "train.py"), *arguments]
    return [*TORCHRUN, str(HERE.parent / "train.py"), *arguments, "--training.local_batch_size=4"]


def plain_loop(mode: str, steps: int) -> list[str]:
    script = str(HERE / "transformers_loop.py")
    if mode == "alone":
        return [sys.executable, script, str(steps), "8"]
    return [*TORCHRUN, script, str(steps), "4", mode]


class Side:
    """A program that prints a line "step N ..." after each step, and runs only when it is told to."""

    def __init__(self, command: list[str], ranks: int):
        threads = str(max((os.cpu_count() or 1) // ranks, 1))
        environment = os.environ | {"OMP_NUM_THREADS": threads, "PYTHONPATH": str(HERE.parent)}
        start = time.perf_counter()
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        self.alone = ranks == 1
        self.ends: queue.Queue[float | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.first_step = self._wait() - start
        self.stop()

    def _read(self) -> None:
        for line in self.process.stdout:
            if re.match(r"step +\d+", line):
                self.ends.put(time.perf_counter())
        self.ends.put(None)

    def _wait(self) -> float:
        end = self.ends.get(timeout=300)
        if end is None:
            raise SystemExit(f"failed: {self.process.args}")
        return end

    def ranks(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root] if self.alone else root.children()

    def stop(self) -> None:
        for rank in self.ranks():
            rank.send_signal(signal.SIGSTOP)

    def step(self) -> float:
        """Seconds that the next step takes."""
        start = time.perf_counter()
        for rank in self.ranks():
            rank.send_signal(signal.SIGCONT)
        seconds = self._wait() - start
        self.stop()
        return seconds

    def peak_mib(self) -> float:
        """Peak resident memory, summed over the ranks."""
        statuses = [Path(f"/proc/{rank.pid}/status").read_text() for rank in self.ranks()]
        return sum(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) for status in statuses) / 1024

    def kill(self) -> None:
        for process in [*self.ranks(), self.process]:
            process.kill()
        self.process.wait()


def compare(mode: str, rounds: int, steps: int) -> None:
    """Measure one mode; print a line of JSON a launch and the medians."""
    ranks = 1 if mode == "alone" else 2
    seconds, launches = [], []
    for number in range(rounds):
        sides = []
        for command in (titanlite, plain_loop):  # one more step than is taken: the last one is followed by the end
            sides.append(Side(command(mode, steps + 1), ranks))
        pairs = [[side.step() for side in sides] for _ in range(steps - 1)][1:]
        launch = [{"peak MiB": side.peak_mib(), "first step s": side.first_step} for side in sides]
        for side in sides:
            side.kill()
        seconds += pairs
        launches.append(launch)
        print(json.dumps({"mode": mode, "round": number, "launch": launch, "seconds": pairs}), flush=True)
    report(mode, "tokens/s", [[TOKENS / one, TOKENS / other] for one, other in seconds])
    for what in launches[0][0]:
        report(mode, what, [[side[what] for side in launch] for launch in launches])


def report(mode: str, what: str, pairs: list[list[float]]) -> None:
    one, other = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    ratio = statistics.median(pair[0] / pair[1] for pair in pairs)
    print(f"{mode:6} {what:14} titanlite {one:8.1f}   plain loop {other:8.1f}   ratio {ratio:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--modes", nargs="+", default=list(OURS_LAYOUT), choices=OURS_LAYOUT)
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {options.rounds} launches of each side")
    for mode in options.modes:
        compare(mode, options.rounds, options.steps)


if __name__ == "__main__":
    main()
