"""Compare the speed and memory of two training programs by interleaving their steps.

vs_transformers.py and vs_torchtitan.py share this method. Each program is a separate process, or several under
torchrun. It prints a line "step N loss X ..." at the end of a step, when the loss and the gradient norm are known and
the optimizer has stepped. The time of a step is measured from one such line to the next, so it includes everything
that the program does between them: data loading, forward, backward, clipping, optimizer, logging.

On a CPU the two programs take steps alternately: one is stopped (SIGSTOP) while the other runs. A shared machine whose
speed drifts then slows both alike. On a GPU, whose memory does not fit two large models, one program runs after the
other.

Where both programs print "N parameters" or "N sequences x M tokens" (the global batch), the numbers must agree. The
loss of each program must fall.
"""

import argparse
import contextlib
import json
import os
import queue
import re
import shlex
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.python_path import with_python_path

STEP = re.compile(r"step +\d+\S* +loss +(\S+)")
MODEL_AND_BATCH = (re.compile(r"([\d,]+) (?:total )?parameters"), re.compile(r"(\d+) sequences x (\d+) tokens"))
STEP_TIMEOUT_SECONDS = 600  # the first step includes the start of the program, and may compile
Options = dict[str, int | float | str | bool]


class Program(NamedTuple):
    """A training program under its name in the results, its number of ranks, and its command line."""

    name: str
    ranks: int
    command: list[str]


def program(name: str, ranks: int, script: Iterable[str], options: Options, *, python: str) -> Program:
    """Build the command line of a script with its options, under torchrun if there are several ranks."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return Program(name, ranks, [python, *(torchrun if ranks > 1 else []), *script, *arguments_of(options)])


def arguments_of(options: Options) -> list[str]:
    return [f"--{key}" if value is True else f"--{key}={value}" for key, value in options.items()]


class RunningProgram:
    """A program that has been started, as a context manager that kills it on exit.

    Args:
        gpu: whether the program uses a GPU. It then runs freely and prints its peak memory with each step. Otherwise
            it has no GPU, and it runs only during `step`.
    """

    def __init__(self, program: Program, *, gpu: bool):
        threads = str(max((os.cpu_count() or 1) // program.ranks, 1))
        environment = with_python_path(os.environ | {"OMP_NUM_THREADS": threads})
        environment |= {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
        self.start = time.perf_counter()
        self.process = subprocess.Popen(
            program.command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        self.under_torchrun, self.gpu = program.ranks > 1, gpu
        self.lines: list[str] = []
        self.step_ends: queue.Queue[float | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> "RunningProgram":
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # a program that failed may have ended by itself
            for process in [*self.ranks(), self.process]:
                process.kill()
        self.process.wait()

    def wait_for_first_step(self) -> None:
        """Wait for the end of the first step and record `first_step`, its seconds since the launch."""
        self.end = self._wait()
        self.first_step = self.end - self.start
        self._stop()

    def _read(self) -> None:
        for line in self.process.stdout:
            end = time.perf_counter()
            self.lines.append(line)
            if STEP.match(line):
                self.step_ends.put(end)
        self.step_ends.put(None)

    def _wait(self) -> float:
        end = self.step_ends.get(timeout=STEP_TIMEOUT_SECONDS)
        if end is None:
            raise SystemExit(f"{''.join(self.lines[-20:])}\nfailed: {shlex.join(self.process.args)}")
        return end

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of the ranks: the children of torchrun, or the program itself."""
        root = psutil.Process(self.process.pid)
        return root.children() if self.under_torchrun else [root]

    def _stop(self) -> None:
        for rank in [] if self.gpu else self.ranks():
            rank.send_signal(signal.SIGSTOP)

    def step(self) -> float:
        """Run the program for one step and return the seconds that it takes."""
        start = self.end if self.gpu else time.perf_counter()
        for rank in [] if self.gpu else self.ranks():
            rank.send_signal(signal.SIGCONT)
        self.end = self._wait()
        self._stop()
        return self.end - start

    def peak_mib(self) -> float:
        """Return the peak memory in MiB: resident and summed over the ranks, or as reported by the program on a GPU."""
        if self.gpu:
            return 1024 * max(float(re.search(r"([\d.]+) *GiB", line)[1]) for line in self.lines if STEP.match(line))
        statuses = [Path(f"/proc/{rank.pid}/status").read_text() for rank in self.ranks()]
        return sum(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) for status in statuses) / 1024

    def launch_results(self) -> dict[str, float]:
        """Return what is measured once per launch, by name."""
        return {"peak MiB": self.peak_mib(), "first step s": self.first_step}

    def losses(self) -> list[float]:
        return [float(match[1]) for match in map(STEP.match, self.lines) if match]

    def model_and_batch(self) -> list[tuple[int, ...] | None]:
        """Return the numbers that MODEL_AND_BATCH finds in the output; None for a line that was not printed."""
        matches = [re.search(pattern, "".join(self.lines)) for pattern in MODEL_AND_BATCH]
        return [match and tuple(int(group.replace(",", "")) for group in match.groups()) for match in matches]


def launch(
    programs: Iterable[Program], steps: int, *, gpu: bool
) -> tuple[list[list[float]], list[dict[str, float]], list[RunningProgram]]:
    """Start both programs once and take this many steps of each.

    Returns:
        Seconds of each pair of steps except the first two pairs; the results of each launch; the programs, which have
        ended.
    """
    seconds, results, ended = [], [], []
    for group in [[entry] for entry in programs] if gpu else [programs]:
        with contextlib.ExitStack() as stack:
            running = []
            for entry in group:
                running.append(stack.enter_context(RunningProgram(entry, gpu=gpu)))
                running[-1].wait_for_first_step()
            rounds = [[program.step() for program in running] for _ in range(steps - 1)]
            results += [program.launch_results() for program in running]
        seconds += zip(*rounds[1:], strict=True)
        ended += running
    return [list(pair) for pair in zip(*seconds, strict=True)], results, ended


def check(programs: list[RunningProgram], names: list[str]) -> None:
    """Exit with an error unless both losses fall and both programs train the same model on the same batch size."""
    for program, name in zip(programs, names, strict=True):
        first, *_, last = program.losses()
        if not last < first:
            raise SystemExit(f"{name}: the loss does not fall: {program.losses()}")
    for one, other in zip(*(program.model_and_batch() for program in programs), strict=True):
        if one and other and one != other:
            raise SystemExit(f"not the same: {names[0]} trains {one}, {names[1]} trains {other}")


def compare(
    mode: str, programs: tuple[Program, Program], *, rounds: int, steps: int, tokens: int, gpu: bool = False
) -> None:
    """Measure one mode and print a JSON line for each launch, then the medians.

    Args:
        programs: each configured for one step more than `steps`, because a program ends after its last step.
        tokens: tokens of the global batch.
    """
    seconds, launches, names = [], [], [program.name for program in programs]
    for number in range(rounds):
        pairs, results, ended = launch(programs, steps, gpu=gpu)
        check(ended, names)
        seconds += pairs
        launches.append(results)
        losses = [[program.losses()[0], program.losses()[-1]] for program in ended]
        sample = {"mode": mode, "round": number, "launch": results, "seconds": pairs, "losses": losses}
        print(json.dumps(sample), flush=True)
    report(mode, "tokens/s", names, [[tokens / one, tokens / other] for one, other in seconds])
    for quantity in launches[0][0]:
        report(mode, quantity, names, [[results[quantity] for results in pair] for pair in launches])


def report(mode: str, quantity: str, names: list[str], pairs: list[list[float]]) -> None:
    """Print the median of each program and the median of the pairs' ratios."""
    one, other = (statistics.median(pair[index] for pair in pairs) for index in (0, 1))
    ratio = statistics.median(pair[0] / pair[1] for pair in pairs)
    print(f"{mode:6} {quantity:14} {names[0]} {one:8.1f}   {names[1]} {other:8.1f}   ratio {ratio:.3f}", flush=True)


def parser(description: str, modes: Iterable[str]) -> argparse.ArgumentParser:
    """Return a parser with the options that both benchmarks share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="launches of each program")
    parser.add_argument("--steps", type=int, default=12, help="steps per launch; the first two are warm-up")
    names = list(modes)
    parser.add_argument("--modes", nargs="+", default=names, choices=names)
    return parser
