"""Two programs that train, measured side by side: what vs_transformers.py and vs_torchtitan.py share.

Both are whole processes, of one or more ranks, that print a line "step N loss X ..." when a step has ended: loss and
gradient norm are known and the optimizer has stepped. A step's time is from one such line to the next, with all that
the program does in between: data, forward, backward, clipping, optimizer, reports. On a CPU the programs take their
steps in turn, one stopped (SIGSTOP) from its line on while the other runs, so a machine whose speed drifts slows both
alike. On a GPU, whose memory two large models do not share, one program runs after the other.

Programs that say "N parameters" or "N sequences x M tokens" (of a step) must say the same, and losses must fall.
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

ROOT = Path(__file__).resolve().parent.parent
STEP = re.compile(r"step +\d+\S* +loss +(\S+)")
TRAINED = (re.compile(r"([\d,]+) (?:total )?parameters"), re.compile(r"(\d+) sequences x (\d+) tokens"))
PATIENCE = 600  # seconds for a step; the first one starts the program, and may compile
Options = dict[str, int | float | str | bool]


class Program(NamedTuple):
    name: str
    ranks: int
    command: list[str]


def program(name: str, ranks: int, script: Iterable[str], options: Options, *, python: str) -> Program:
    """A script and its options, under torchrun if it has several ranks."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return Program(name, ranks, [python, *(torchrun if ranks > 1 else []), *script, *arguments_of(options)])


def arguments_of(options: Options) -> list[str]:
    return [f"--{key}" if value is True else f"--{key}={value}" for key, value in options.items()]


class Side:
    """A program that runs, and is killed when its context ends.

    Args:
        gpu: it goes on from step to step by itself, and prints its peak memory with each; else it has no GPU, and runs
            only while `step` does.
    """

    def __init__(self, program: Program, *, gpu: bool):
        threads = str(max((os.cpu_count() or 1) // program.ranks, 1))
        environment = os.environ | {"OMP_NUM_THREADS": threads, "PYTHONPATH": str(ROOT)}
        environment |= {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
        self.start = time.perf_counter()
        self.process = subprocess.Popen(
            program.command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        self.alone, self.gpu = program.ranks == 1, gpu
        self.lines: list[str] = []
        self.ends: queue.Queue[float | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # one that failed may have ended by itself
            for process in [*self.ranks(), self.process]:
                process.kill()
        self.process.wait()

    def begin(self) -> None:
        """Wait for the end of its first step."""
        self.end = self._wait()
        self.first_step = self.end - self.start
        self._stop()

    def _read(self) -> None:
        for line in self.process.stdout:
            end = time.perf_counter()
            self.lines.append(line)
            if STEP.match(line):
                self.ends.put(end)
        self.ends.put(None)

    def _wait(self) -> float:
        end = self.ends.get(timeout=PATIENCE)
        if end is None:
            raise SystemExit(f"{''.join(self.lines[-20:])}\nfailed: {shlex.join(self.process.args)}")
        return end

    def ranks(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root] if self.alone else root.children()

    def _stop(self) -> None:
        for rank in [] if self.gpu else self.ranks():
            rank.send_signal(signal.SIGSTOP)

    def step(self) -> float:
        """Seconds that the next step takes."""
        start = self.end if self.gpu else time.perf_counter()
        for rank in [] if self.gpu else self.ranks():
            rank.send_signal(signal.SIGCONT)
        self.end = self._wait()
        self._stop()
        return self.end - start

    def peak_mib(self) -> float:
        """Peak memory: resident, summed over the ranks; on a GPU what the program says that its allocator reserved."""
        if self.gpu:
            return 1024 * max(float(re.search(r"([\d.]+) *GiB", line)[1]) for line in self.lines if STEP.match(line))
        statuses = [Path(f"/proc/{rank.pid}/status").read_text() for rank in self.ranks()]
        return sum(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) for status in statuses) / 1024

    def result(self) -> dict[str, float]:
        """What is measured of the launch besides its steps."""
        return {"peak MiB": self.peak_mib(), "first step s": self.first_step}

    def losses(self) -> list[float]:
        return [float(match[1]) for match in map(STEP.match, self.lines) if match]

    def trains(self) -> list[tuple[int, ...] | None]:
        """The numbers behind TRAINED, None for what the program does not say."""
        matches = [re.search(pattern, "".join(self.lines)) for pattern in TRAINED]
        return [match and tuple(int(group.replace(",", "")) for group in match.groups()) for match in matches]


def launch(
    programs: Iterable[Program], steps: int, *, gpu: bool
) -> tuple[list[list[float]], list[dict[str, float]], list[Side]]:
    """Start both programs once and take so many steps of each.

    Returns:
        Seconds of each pair of steps but the first two; what else is measured; the sides, which have ended.
    """
    columns, results, sides = [], [], []
    for group in [[one] for one in programs] if gpu else [programs]:
        with contextlib.ExitStack() as stack:
            running = []
            for one in group:
                running.append(stack.enter_context(Side(one, gpu=gpu)))
                running[-1].begin()
            rows = [[side.step() for side in running] for _ in range(steps - 1)]
            results += [side.result() for side in running]
        columns += zip(*rows[1:], strict=True)
        sides += running
    return [list(pair) for pair in zip(*columns, strict=True)], results, sides


def check(sides: list[Side], names: list[str]) -> None:
    """The sides must train the same, and both must learn."""
    for side, name in zip(sides, names, strict=True):
        first, *_, last = side.losses()
        if not last < first:
            raise SystemExit(f"{name}: the loss does not fall: {side.losses()}")
    for one, other in zip(*(side.trains() for side in sides), strict=True):
        if one and other and one != other:
            raise SystemExit(f"not the same: {names[0]} trains {one}, {names[1]} trains {other}")


def compare(
    mode: str, programs: tuple[Program, Program], *, rounds: int, steps: int, tokens: int, gpu: bool = False
) -> None:
    """Measure one mode; print a line of JSON a launch and the medians.

    Args:
        programs: must be about to take one more step than `steps`, since the last one is followed by the end.
        tokens: of a step, over all ranks.
    """
    seconds, launches, names = [], [], [one.name for one in programs]
    for number in range(rounds):
        pairs, results, sides = launch(programs, steps, gpu=gpu)
        check(sides, names)
        seconds += pairs
        launches.append(results)
        losses = [[side.losses()[0], side.losses()[-1]] for side in sides]
        row = {"mode": mode, "round": number, "launch": results, "seconds": pairs, "losses": losses}
        print(json.dumps(row), flush=True)
    report(mode, "tokens/s", names, [[tokens / one, tokens / other] for one, other in seconds])
    for what in launches[0][0]:
        report(mode, what, names, [[side[what] for side in both] for both in launches])


def report(mode: str, what: str, names: list[str], pairs: list[list[float]]) -> None:
    one, other = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    ratio = statistics.median(pair[0] / pair[1] for pair in pairs)
    print(f"{mode:6} {what:14} {names[0]} {one:8.1f}   {names[1]} {other:8.1f}   ratio {ratio:.3f}", flush=True)


def parser(description: str, modes: Iterable[str]) -> argparse.ArgumentParser:
    """The options that both benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="launches of each side")
    parser.add_argument("--steps", type=int, default=12, help="steps of a launch; the first two warm up")
    names = list(modes)
    parser.add_argument("--modes", nargs="+", default=names, choices=names)
    return parser
