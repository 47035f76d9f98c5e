"""titanlite beside transformers' LlamaForCausalLM in a plain PyTorch loop, on the CPU of this machine.

The same 6.16 million parameters, sequence length, global batch, precision (float32) and optimizer (fused AdamW). Both
sides are whole processes. They take their steps in turn, one stopped (SIGSTOP) while the other runs, so a machine whose
speed drifts slows both alike. A mode is a pair of programs:

    alone, ddp, fsdp         titanlite and the plain loop, in one process, or on two ranks: dp_replicate = 2 and DDP,
                             dp_shard = 2 and FSDP2
    tp, pp, cp, ulysses      titanlite on two ranks that share one copy of the model or each sequence, for which a plain
                             loop has no counterpart, and titanlite in one process that has both ranks' threads
    tp-fsdp, ... (the same)  titanlite on the same two ranks, and the plain loop on two ranks of FSDP2

    python benchmarks/vs_transformers.py [--rounds N] [--steps N] [--modes alone ddp ...]     (default: all modes)

Prints for each mode: tokens/s (median over all steps but the first two of a launch), peak resident memory (summed over
ranks, median over launches), seconds from launch to the end of the first step (median over launches); and the medians
of the ratios of neighbouring steps and of launches, the first program of the pair over the second. Above 1 is better
for tokens/s, below 1 for the others. Before that, a line of JSON a launch: its peaks and first steps, and the seconds
of each pair of steps.
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
from typing import NamedTuple

import psutil
import torch
import transformers

HERE = Path(__file__).resolve().parent
TOKENS = 8 * 512  # a step over all ranks
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


class Program(NamedTuple):
    name: str
    ranks: int
    command: list[str]


def titanlite(steps: int, ranks: int, folder: str, local_batch: int, **parallelism: int | str) -> Program:
    """train.py. Each side of a pair writes to a folder of its own."""
    options = {"training.steps": steps, "training.local_batch_size": local_batch}
    options |= {"job.dump_folder": f"./outputs/vs_transformers/{folder}"}
    options |= {f"parallelism.{key}": value for key, value in parallelism.items()}
    script = [str(HERE.parent / "train.py"), str(HERE / "vs_transformers.toml")]
    launcher = [sys.executable] if ranks == 1 else TORCHRUN
    return Program("titanlite", ranks, [*launcher, *script, *(f"--{key}={value}" for key, value in options.items())])


def plain_loop(steps: int, kind: str) -> Program:
    """transformers_loop.py, `kind` being alone, ddp or fsdp."""
    script = str(HERE / "transformers_loop.py")
    if kind == "alone":
        return Program("plain loop", 1, [sys.executable, script, str(steps), "8"])
    return Program("plain loop", 2, [*TORCHRUN, script, str(steps), "4", kind])


def modes(steps: int) -> dict[str, tuple[Program, Program]]:
    """The pairs, for runs of so many steps."""
    replicate = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}
    pipeline = {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 2}  # four microbatches, 1F1B
    alone = titanlite(steps, 1, "alone", 8)
    fsdp = plain_loop(steps, "fsdp")
    axes = {
        "tp": titanlite(steps, 2, "tp", 8, tensor_parallel_degree=2),
        "pp": titanlite(steps, 2, "pp", 8, **pipeline),
        "cp": titanlite(steps, 2, "cp", 8, context_parallel_degree=2),
        "ulysses": titanlite(steps, 2, "ulysses", 8, context_parallel_degree=2, context_parallel_ulysses_degree=2),
    }
    return {
        "alone": (alone, plain_loop(steps, "alone")),
        "ddp": (
            titanlite(steps, 2, "ddp", 4, **replicate, fsdp_reshard_after_forward="never"),
            plain_loop(steps, "ddp"),
        ),
        "fsdp": (titanlite(steps, 2, "fsdp", 4, data_parallel_shard_degree=2), fsdp),
        **{name: (axis, alone._replace(name="one process")) for name, axis in axes.items()},
        **{f"{name}-fsdp": (axis, fsdp) for name, axis in axes.items()},
    }


class Side:
    """A program that prints a line "step N ..." after each step, and runs only when it is told to."""

    def __init__(self, program: Program):
        threads = str(max((os.cpu_count() or 1) // program.ranks, 1))
        environment = os.environ | {"OMP_NUM_THREADS": threads, "PYTHONPATH": str(HERE.parent)}
        start = time.perf_counter()
        self.process = subprocess.Popen(
            program.command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        self.alone = program.ranks == 1
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
    programs = modes(steps + 1)[mode]  # one more step than is taken: the last one is followed by the end
    seconds, launches = [], []
    for number in range(rounds):
        sides = [Side(program) for program in programs]
        pairs = [[side.step() for side in sides] for _ in range(steps - 1)][1:]
        launch = [{"peak MiB": side.peak_mib(), "first step s": side.first_step} for side in sides]
        for side in sides:
            side.kill()
        seconds += pairs
        launches.append(launch)
        print(json.dumps({"mode": mode, "round": number, "launch": launch, "seconds": pairs}), flush=True)
    names = [program.name for program in programs]
    report(mode, "tokens/s", names, [[TOKENS / one, TOKENS / other] for one, other in seconds])
    for what in launches[0][0]:
        report(mode, what, names, [[side[what] for side in launch] for launch in launches])


def report(mode: str, what: str, names: list[str], pairs: list[list[float]]) -> None:
    one, other = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    ratio = statistics.median(pair[0] / pair[1] for pair in pairs)
    print(f"{mode:6} {what:14} {names[0]} {one:8.1f}   {names[1]} {other:8.1f}   ratio {ratio:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    names = list(modes(0))
    parser.add_argument("--modes", nargs="+", default=names, choices=names)
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {options.rounds} launches of each side")
    for mode in options.modes:
        compare(mode, options.rounds, options.steps)


if __name__ == "__main__":
    main()
