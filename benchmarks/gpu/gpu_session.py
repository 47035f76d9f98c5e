"""Measure on one GPU what needs one: tests, tokens/s, MFU and memory of Llama 3, attention, a trace, planned memory.

    python benchmarks/gpu/gpu_session.py --out FOLDER [--seconds 540] [--steps '8b-*' ...] [--retry]
    python benchmarks/gpu/gpu_session.py --out FOLDER --dry-run  (on any machine: every step on a CPU, at toy size)
    python benchmarks/gpu/gpu_session.py --out FOLDER --dry-run null-cuda  (training runs as they are, without a GPU)
    python benchmarks/gpu/gpu_session.py --list [SECONDS] [--memory GIB]   (the steps, and which of them fit)

gpu_steps.py has the steps, in order of worth, with sizes for the memory of the card, and the seconds that each is
expected to take; gpu_wheels.txt and torchtitan_wheels.txt what to install where only torch is (gpu_wheels.py downloads
it). Each step runs in a process of its own, which is killed at the step's time limit. The folder gets session.log (the
output of every command, once it has ended, and the metrics of training steps), trace.json.gz (of the profiler),
device.toml (of `titanlite calibrate`), recorded.tar (a step for `titanlite parity --against`), state.json (the result
of each step, by card) and summary.md (tables, rewritten after each step). Consecutive steps that measure no speed,
tests among them, share the card, as far as there are two cores for each.

A session may take several calls: a step that is done or has failed is not run again (--retry: those that failed are).
--seconds N starts a step only if its expected seconds fit into what is left of N, and no limit exceeds that.
--resume-from FOLDER copies the files of earlier calls from another folder first. Results belong to a card: on another
one, what depends on its speed or memory is run again. A step whose modules are missing is recorded as "not there" and
tried again by the next call. Plans need no GPU: --steps 'plan-*' completes a session on another machine.
--torchtitan-python names the Python of an environment with torchtitan 0.2.2, --text the text of a published curve
(published_curves.py has its address).

With `--dry-run null-cuda` torch's CUDA build runs on the null CUDA (verification/null_cuda/build.py), whose kernels
compute nothing: sizes, compilation, memory and time limits are those of a session, speeds and losses mean nothing.
NULL_CUDA_MIB and NULL_CUDA_NAME are the memory and the name of its card.

Training runs take train.py through 10 steps of 32768 tokens, the first four of which are warm-up. The tables have

    tokens/s, MFU      medians of the other steps. MFU (model FLOPs utilization) is the fraction of the data sheet's
                       dense bfloat16 rate, also for float8, under two conventions: with 12 L D T operations for
                       attention, as train.py counts them, and with 6 L D T, the part that a causal mask leaves
    of base            tokens/s relative to the first run of Llama 3 8B
    planned            the plan's tokens/s for the same config on the card's data sheet, and that over the measured
    of matmul          MFU relative to the rate of a bfloat16 matrix product (matmul) measured in this session
    GiB                the allocator's peak, in tensors and reserved from the device; planned: in tensors
    B/param            bytes of that peak, in tensors, per parameter: weights, gradients, optimizer states, activations
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import fnmatch
import gzip
import importlib
import importlib.util
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this script runs by its path, too
from benchmarks.gpu.gpu_steps import (
    CORRECTNESS,
    HERE,
    LARGE_GIB,
    LLAMA_8B,
    TOML,
    TORCHTITAN_TOML,
    Options,
    Step,
    all_steps,
    toy,
)
from benchmarks.gpu.gpu_summary import THROUGHPUT, one_line, summary
from benchmarks.python_path import ROOT, with_python_path

WARM_UP = 4  # steps without a measurement: compilation, and clocks that settle
MEDIANS = (THROUGHPUT, "tflops", "mfu(%)", "time_metrics/data_loading(%)")
PEAKS = ("memory/max_active(GiB)", "memory/max_reserved(GiB)")
RESERVE = 5  # seconds of a call that no step gets: to end a process, to write the summary
LAST_LINES = 15  # lines of a failed step's output that the summary shows
KERNELS = 25  # lines of the trace's table
ON_NULL_CUDA = ("environment", "rates", "train", "pytest", "card", "recorded", "torchtitan", "plan")
KEPT = ("state.json", "session.log", "summary.md", "trace.json.gz", "device.toml", "recorded.tar")
TOY_LIMIT = 600  # seconds, of a step of a dry run on a busy machine
LOSS = "loss_metrics/global_avg_loss"
TITAN_STEP = re.compile(r"memory: +([\d.]+)GiB.*?tps: +([\d,]+).*?tflops: +([\d.,]+).*?mfu: +([\d.]+)%")
LAYERS = re.compile(r"(\d+) layers, dim (\d+),.*; ([\d,]+) parameters")
Result = dict[str, Any]


class StepFailed(Exception):
    """A step did not do its work; the message is the reason in a line, `lines` are what to read of its output."""

    def __init__(self, message: str, output: str = ""):
        super().__init__(message)
        self.output = output
        lines = output.strip().splitlines()
        self.lines = [line for line in lines if line.startswith("FAILED ")] or lines[-LAST_LINES:]


class TimeLimit(StepFailed):
    """A step was killed at its time limit."""


@dataclasses.dataclass
class Session:
    """A session writes the results of its steps into a folder."""

    out: Path
    dry_run: str
    """"cpu", "null-cuda", or "" on a GPU."""
    torchtitan_python: str
    cards: dict[str, dict[str, Result]]
    """The results of each card, by the names of the steps."""
    text: Path | None = None
    card: str = ""
    """The name of the card that runs, as torch reports it."""
    processes: set[subprocess.Popen] = dataclasses.field(default_factory=set)
    """The processes of the steps that run."""
    ended: bool = False
    """Whether this program was asked to end: steps that fail from then on have no result."""
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @property
    def results(self) -> dict[str, Result]:
        """The results of the card that runs."""
        return self.cards.setdefault(self.card, {})

    def steps(self, card: str) -> list[Step]:
        """Return the steps of a card, with the sizes for its memory."""
        steps = all_steps(self.cards[card].get("environment", {}).get("memory GiB", LARGE_GIB))
        return [toy(step) if self.dry_run == "cpu" else step for step in steps]

    def save(self, name: str, result: Result) -> None:
        """Record the result of a step, rewrite state.json and summary.md, and print the step's line."""
        with self.lock:
            self.results[name] = result
            self._write()
            print(f"{result['status']:9} {name:30} {result['seconds']:5.0f} s  {one_line(result)}", flush=True)

    def _write(self) -> None:
        replacement = self.out / "state.tmp"
        replacement.write_text(json.dumps({"dry_run": self.dry_run, "cards": self.cards}, indent=1))
        replacement.replace(self.out / "state.json")
        cards = {card: (self.steps(card), results) for card, results in self.cards.items()}
        (self.out / "summary.md").write_text(summary(cards, dry_run=self.dry_run))

    def run(self, command: list[str], limit: float, *, folder: Path = ROOT) -> str:
        """Run a command, append its output to session.log, and return it.

        Raises:
            TimeLimit: if the command takes longer than the limit in seconds.
            StepFailed: if it fails.
        """
        environment = with_python_path(os.environ) | {"PYTHONUNBUFFERED": "1"}
        if self.dry_run == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        elif self.dry_run:
            environment |= null_cuda().environment(self.out / "null_cuda")
        if "PYTORCH_CUDA_ALLOC_CONF" not in environment:  # as titanlite train sets it
            environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        with tempfile.TemporaryFile() as log:
            options = {"stdout": log, "stderr": subprocess.STDOUT, "cwd": folder, "env": environment}
            process = subprocess.Popen(command, start_new_session=True, **options)
            self.processes.add(process)
            status = None
            try:
                limit = 0 if self.ended else limit
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(timeout=limit)
            finally:  # also if this program is interrupted or asked to end
                kill_tree(process)
                self.processes.remove(process)
                log.seek(0)
                output = log.read().decode(errors="replace")
                self.note([f"\n$ {shlex.join(command)}", output])
        if status is None:
            raise TimeLimit(f"time limit of {limit:.0f} s", output)
        if status:
            raise StepFailed(reason(output) or f"exit status {status}", output)
        return output

    def note(self, lines: list[str]) -> None:
        """Append lines to session.log."""
        with self.lock, (self.out / "session.log").open("a") as log:
            log.write("".join(f"{line}\n" for line in lines))


def null_cuda() -> Any:
    """Return the module that builds the null CUDA."""
    return importlib.import_module("verification.null_cuda.build")


def kill_tree(process: subprocess.Popen) -> None:
    """Kill a process and all that it started, and wait for their end: one that stays keeps the memory of the GPU."""
    tree, parents = [process.pid], running()
    for pid in tree:
        tree += [child for child, parent in parents.items() if parent == pid]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in tree[1:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    end = time.monotonic() + 60
    while time.monotonic() < end and running().keys() & set(tree[1:]):
        time.sleep(0.1)


def running() -> dict[int, int]:
    """Return the parent of each process that runs, by process IDs (Linux only: /proc)."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":  # one that has ended, and whose parent does not know yet
                parents[int(stat.parent.name)] = int(parent)
    return parents


def reason(output: str) -> str:
    """Return the line of a failed command's output that says why."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if lines and re.search(r"\d+ (failed|errors?)\b", lines[-1]):  # pytest's closing line
        return lines[-1].strip("= ")
    errors = [line for line in lines if re.search(r"Error\b|error:|expected", line)]
    return (errors or lines or [""])[-1][:300]


# The kinds of steps ---------------------------------------------------------------------------------------------------


def measure(session: Session, step: Step, limit: float) -> Result:
    """Run a command of gpu_measurements.py and return its values."""
    arguments = [sys.executable, str(HERE / "gpu_measurements.py"), step.kind]
    if step.kind == "rates" and session.dry_run:
        arguments.append("--small")
    if step.kind == "plan":
        arguments += ["cpu" if session.dry_run == "cpu" else session.card, str(TOML), *arguments_of(step.options)]
    return json.loads(session.run(arguments, limit).splitlines()[-1])


def arguments_of(options: Options) -> list[str]:
    return [f"--{key}={value}" for key, value in options.items()]


def train(session: Session, step: Step, limit: float, folder: Path) -> Result:
    """Run train.py on one GPU, write its metrics into the log, and return what the tables show. A run that is killed at
    its limit counts as far as it came, if that is past the warm-up."""
    options, killed = step.options | {"job.dump_folder": str(folder)}, None
    try:
        output = session.run([sys.executable, str(ROOT / "train.py"), str(TOML), *arguments_of(options)], limit)
    except TimeLimit as error:
        output, killed = error.output, error
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]  # a kill may cut the last line
    session.note([json.dumps({"case": step.name, **row}) for row in rows])
    if killed and len(rows) <= WARM_UP:
        raise TimeLimit(f"{killed}, after {len(rows)} steps", output)
    for row in rows:
        if not math.isfinite(row[LOSS]):
            raise StepFailed(f"loss {row[LOSS]} in step {row['step']}", output)
    measured = rows[min(WARM_UP, len(rows) - 1) :]
    n_layers, dim, parameters = (int(number.replace(",", "")) for number in LAYERS.search(output).groups())
    # A device whose peak is not known, as a CPU, has no MFU.
    result: Result = {tag: statistics.median(row.get(tag, math.nan) for row in measured) for tag in MEDIANS}
    result |= {tag: max(row[tag] for row in measured) for tag in PEAKS}
    flops = 1e12 * result["tflops"] / result[THROUGHPUT]  # per token
    seq_len = int(step.options["training.seq_len"])
    result |= {
        "parameters": parameters,
        "flops per token": flops,
        "steps": len(rows),
        "first step s": rows[0]["time_metrics/end_to_end(s)"],
        "causal": 1 - 6 * n_layers * dim * seq_len / flops,
        "shared": step.together > 1,
    }
    if killed:
        result |= {"status": "stopped", "reason": f"{killed}, after {len(rows)} steps"}
    return result


def trace(session: Session, step: Step, limit: float, folder: Path) -> Result:
    """Profile a step of the fastest run of Llama 3 8B, with one gradient accumulation step."""
    best = best_run(session)
    options = best.options | {"profiling.enable_profiling": "true", "profiling.profile_freq": 6, "training.steps": 6}
    options["training.global_batch_size"] = options["training.local_batch_size"]
    train(session, best._replace(options=options), limit, folder)
    (file,) = (folder / "profile_traces").glob("*/*.json")
    with file.open("rb") as source, gzip.open(session.out / "trace.json.gz", "wb") as target:
        shutil.copyfileobj(source, target)
    return {"profiled": best.name, "lines": kernel_times(json.loads(file.read_text()))}


def best_run(session: Session) -> Step | None:
    """Return the fastest run of Llama 3 8B that is done, or None."""
    ended = [step for step in session.steps(session.card) if step.group == LLAMA_8B]
    ended = [step for step in ended if THROUGHPUT in session.results.get(step.name, {})]
    return max(ended, key=lambda step: session.results[step.name][THROUGHPUT], default=None)


def kernel_times(content: dict[str, Any]) -> list[str]:
    """Return the kernels of a trace that take most of the time, as lines: ms, count, name. On a CPU, its operators."""
    events = [event for event in content["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    milliseconds, counts = Counter[str](), Counter[str]()
    for event in kernels or [event for event in events if event.get("cat") == "cpu_op"]:
        milliseconds[event["name"]] += event["dur"] / 1e3
        counts[event["name"]] += 1
    total = (
        f"{sum(milliseconds.values()):9.2f} ms in {sum(counts.values())} {'kernels' if kernels else 'CPU operators'}"
    )
    rows = [f"{ms:9.2f} {counts[name]:6} {name[:100]}" for name, ms in milliseconds.most_common(KERNELS)]
    return [total, *rows]


def tests(session: Session, step: Step, limit: float) -> Result:
    """Run tests of tests/test_gpu.py; a dry run only collects them."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-rf"]
    command += ["--collect-only"] if session.dry_run else []
    output = session.run([*command, *(f"tests/test_gpu.py::{name}" for name in step.options)], limit)
    return {"result": output.strip().splitlines()[-1].strip("= ")}


def calibrate(session: Session, step: Step, limit: float) -> Result:
    """Measure the device for plans, into device.toml."""
    command = [sys.executable, "-m", "titanlite", "calibrate", str(session.out / "device.toml")]
    session.run(command + (["--ranks", "1"] if session.dry_run else []), limit)
    return {"result": "device.toml"}


def ring(session: Session, step: Step, limit: float) -> Result:
    """Run ring_attention.py at one rank."""
    arguments = ["--device=cuda", "--lengths", "4096", "8192", "--shape", "1", "32", "8", "128", "--repeats=10"]
    if session.dry_run:
        arguments = ["--rings", "--lengths", "256", "--shape", "1", "4", "2", "16", "--repeats", "1"]
    output = session.run([sys.executable, str(HERE.parent / "speed" / "ring_attention.py"), *arguments], limit)
    return {"lines": [line for line in output.splitlines() if not line.startswith("{")]}


def parity(session: Session, step: Step, limit: float) -> Result:
    """Compare a layout whose ranks share the GPU with one process."""
    options = step.options.copy()
    n_ranks, config = options.pop("ranks"), ROOT / "configs" / f"{options.pop('config')}.toml"
    command = [sys.executable, str(HERE / "gpu_measurements.py"), "parity", str(n_ranks), str(config)]
    return json.loads(session.run([*command, *arguments_of(options)], limit).splitlines()[-1])


def recorded(session: Session, step: Step, limit: float, folder: Path) -> Result:
    """Record an optimizer step into recorded.tar, which `titanlite parity --against` judges on another machine."""
    session.run([sys.executable, str(HERE / "gpu_measurements.py"), "recorded", str(folder / "recorded")], limit)
    with tarfile.open(session.out / "recorded.tar", "w") as archive:
        archive.add(folder / "recorded", "recorded")
    return {"result": "recorded.tar"}


def torchtitan(session: Session, step: Step, limit: float, folder: Path) -> Result:
    """Run torchtitan's configuration of Llama 3 8B; a dry run on a CPU only checks its options."""
    flags = [f"--{name}" for name in step.options]  # torchtitan's booleans take no value
    options = arguments_of({"job.config_file": str(TORCHTITAN_TOML), "job.dump_folder": str(folder)})
    command = [session.torchtitan_python, str(HERE.parent / "others" / "torchtitan_cpu.py"), *options, *flags]
    if session.dry_run == "cpu":
        command[1:2] = ["-m", "torchtitan.config.manager"]
    output = session.run(command, limit, folder=folder)
    if session.dry_run == "cpu":
        return {"result": "its options are valid"}
    steps = [[float(x.replace(",", "")) for x in found] for found in TITAN_STEP.findall(output)][WARM_UP:]
    if not steps:
        raise StepFailed("no step after the warm-up", output)
    _, tokens, tflops, mfu = (statistics.median(values) for values in zip(*steps, strict=True))
    reserved = max(memory for memory, *_ in steps)
    return {"tokens/s": tokens, "TFLOP/s": tflops, "MFU %": mfu, "reserved GiB": reserved, "steps": len(steps)}


def card(session: Session, step: Step, limit: float) -> Result:
    """Run the first 500 steps of the published curve of published_curves.py, beside what a CPU has computed; a dry run
    takes two."""
    command = [sys.executable, str(HERE.parent / "others" / "published_curves.py"), "card", "--text", str(session.text)]
    output = session.run([*command, "--steps", "2" if session.dry_run else "500"], limit)
    result: Result = {"lines": [line for line in output.splitlines() if not line.startswith("{")]}
    found, on_cpu = (
        losses(text) for text in (output, (HERE.parent / "logs" / "published_curves_card.log").read_text())
    )
    for last in (10, 100):
        if distances := [abs(found[n] - on_cpu[n]) for n in found.keys() & on_cpu.keys() if n <= last]:
            result[f"largest distance from a CPU's loss in steps 1 to {last}"] = max(distances)
    return result


def losses(log: str) -> dict[int, float]:
    """Return the losses that the JSON lines of published_curves.py have, by step."""
    rows = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return {row["step"]: row["loss"] for row in rows}


IN_A_FOLDER = {"train": train, "trace": trace, "torchtitan": torchtitan, "recorded": recorded}
KINDS = {"pytest": tests, "calibrate": calibrate, "card": card, "parity": parity, "ring": ring}


def run_step(session: Session, step: Step, limit: float) -> Result:
    """Run a step within its limit in seconds, and return its result."""
    if step.kind in IN_A_FOLDER:
        with tempfile.TemporaryDirectory() as name:
            return IN_A_FOLDER[step.kind](session, step, limit, Path(name))
    return KINDS.get(step.kind, measure)(session, step, limit)


def missing(session: Session, step: Step) -> str:
    """Return what a step needs and this machine or session does not have; empty: nothing."""
    modules = [name for name in step.needs if importlib.util.find_spec(name) is None]
    if modules:
        return f"no module {', '.join(modules)}"
    if session.dry_run == "null-cuda" and step.kind not in ON_NULL_CUDA:
        return "means nothing on the null CUDA"
    if step.kind == "trace" and best_run(session) is None:
        return "no run of Llama 3 8B is done"
    if step.kind == "card" and session.text is None:
        return "no --text: tinyshakespeare's input.txt"
    if step.kind == "plan" and THROUGHPUT not in session.results.get(step.name.removeprefix("plan-"), {}):
        return "its run has no figures"
    if step.kind == "torchtitan":
        imported = subprocess.run([session.torchtitan_python, "-c", "import torchtitan"], capture_output=True)
        return "no module torchtitan" if imported.returncode else ""
    return ""


# The session ----------------------------------------------------------------------------------------------------------


def resume(folder: Path, out: Path) -> None:
    """Copy the files of earlier calls that a folder has and the output folder lacks."""
    for name in KEPT:
        if (folder / name).exists() and not (out / name).exists():
            shutil.copyfile(folder / name, out / name)


def load_session(arguments: argparse.Namespace) -> Session:
    """Return the session of the output folder, with the results of earlier calls."""
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    if arguments.resume_from:
        resume(arguments.resume_from, out)
    state, cards = out / "state.json", {}
    if state.exists():
        content = json.loads(state.read_text())
        if content["dry_run"] != arguments.dry_run:
            kind = f"a dry run ({content['dry_run']})" if content["dry_run"] else "a session on a GPU"
            sys.exit(f"error: {out} has the results of {kind}; name another folder with --out")
        cards = content["cards"]
    text = arguments.text and arguments.text.resolve()
    return Session(out.resolve(), arguments.dry_run, arguments.torchtitan_python, cards, text)


def listed(steps: list[Step], seconds: float) -> list[str]:
    """Return a line for each step: its expected seconds, their sum so far, and whether a call of so many seconds
    reaches it."""
    lines, total, left = [f"{'step':32} {'expected s':>10} {'sum':>6}"], 0.0, seconds - RESERVE
    for step in steps:
        share = step.seconds / step.together
        total += share
        fits = step.kind != "plan" and step.seconds <= left
        left -= share if fits else 0
        lines.append(f"{step.name:32} {step.seconds:10} {total:6.0f}{'  fits' if fits and seconds < math.inf else ''}")
    return lines


def due(session: Session, arguments: argparse.Namespace) -> Iterator[Step]:
    """Yield the steps that this call is asked for and that have no result yet. Plans are made when asked for by name,
    or in a dry run on a CPU: they need no GPU."""
    settled = {"done", "stopped"} | (set() if arguments.retry else {"failed", "does not fit"})
    for step in session.steps(session.card):
        chosen = not arguments.steps or any(fnmatch.fnmatch(step.name, pattern) for pattern in arguments.steps)
        if not chosen or (step.kind == "plan" and not (arguments.steps or session.dry_run == "cpu")):
            continue
        places = session.cards.values() if step.kind in CORRECTNESS else [session.results]
        statuses = [results[step.name]["status"] for results in places if step.name in results]
        if session.results.get(step.name, {}).get("status") not in settled and "done" not in statuses:
            yield step


def run_session(session: Session, arguments: argparse.Namespace, begin: float) -> list[str]:
    """Run the steps that are due and fit into the seconds since `begin`; return the names of those that wait for
    another call."""
    waiting = []

    def take_in_time(step: Step) -> None:
        if gap := missing(session, step):
            if session.results.get(step.name, {}).get("reason") != gap:
                session.save(step.name, {"status": "not there", "seconds": 0, "reason": gap})
            return
        left = (arguments.seconds or math.inf) - RESERVE - (time.monotonic() - begin)
        if step.seconds > left:
            waiting.append(step.name)
        else:
            take(session, step, min(TOY_LIMIT if session.dry_run == "cpu" else step.limit, left))

    for together, steps in itertools.groupby(due(session, arguments), key=lambda step: step.together):
        at_once = max(1, min(together, (os.cpu_count() or 1) // 2))
        if at_once == 1:
            for step in steps:
                take_in_time(step)
        else:
            take_together(session, list(steps), take_in_time, at_once)
    return waiting


def take_together(session: Session, steps: list[Step], take_step: Callable[[Step], None], at_once: int) -> None:
    """Take steps, several at a time. If this program is asked to end, their processes end with it."""
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        try:
            list(pool.map(take_step, steps))
        except BaseException:
            session.ended = True
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(session.processes):
                kill_tree(process)
            raise


def take(session: Session, step: Step, limit: float) -> None:
    """Run a step within a limit in seconds, and record its result."""
    session.note([f"\n=== {step.name} (limit {limit:.0f} s)"])
    start = time.monotonic()
    try:
        result = {"status": "done", "seconds": 0, **run_step(session, step, limit)}
    except StepFailed as error:
        if session.ended:
            return
        status = "does not fit" if "out of memory" in str(error) else "failed"
        result = {"status": status, "seconds": 0, "reason": str(error), "lines": error.lines}
    session.save(step.name, result | {"seconds": round(time.monotonic() - start, 1)})


def find_card(session: Session) -> None:
    """Ask for the card that runs, by the first step of every call, and make it the session's."""
    first, start = all_steps(LARGE_GIB)[0], time.monotonic()
    result = measure(session, first, first.limit)
    session.card = result["device"]
    session.save(first.name, {"status": "done", "seconds": round(time.monotonic() - start, 1), **result})


def main() -> None:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--out", type=Path, help="the folder of the results")
    seconds = {"nargs": "?", "type": float, "const": math.inf, "metavar": "SECONDS"}
    task.add_argument("--list", **seconds, help="print the steps, and which of them fit into a call")
    parser.add_argument(
        "--memory", type=float, default=140, metavar="GIB", help="memory of --list's card (default: 140)"
    )
    parser.add_argument("--resume-from", type=Path, metavar="FOLDER", help="copy earlier results from this folder")
    parser.add_argument("--seconds", type=float, help="start no step that is expected to end later")
    parser.add_argument("--steps", nargs="+", metavar="PATTERN", help="only the steps of these names (default: all)")
    parser.add_argument("--retry", action="store_true", help="also run steps that failed")
    kinds = {"nargs": "?", "choices": ["cpu", "null-cuda"], "const": "cpu", "default": ""}
    parser.add_argument("--dry-run", **kinds, help="without a GPU: every step on a CPU at toy size, or the null CUDA")
    parser.add_argument("--torchtitan-python", default=sys.executable, help="Python of torchtitan's environment")
    parser.add_argument("--text", type=Path, metavar="FILE", help="tinyshakespeare's input.txt, for published-card")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(listed(all_steps(arguments.memory), arguments.list)))
        return
    if arguments.dry_run == "null-cuda" and (why := null_cuda().why_not()):
        sys.exit(f"error: no null CUDA: {why}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    session, waiting = load_session(arguments), []
    if arguments.dry_run or torch.cuda.is_available():
        find_card(session)
        waiting = run_session(session, arguments, begin)
    elif all(pattern.startswith("plan-") for pattern in arguments.steps or [""]):
        for card in list(session.cards):
            session.card = card
            waiting += run_session(session, arguments, begin)
    else:
        sys.exit("error: gpu_session.py needs a GPU, except for --dry-run and --steps 'plan-*'")
    statuses = Counter(result["status"] for results in session.cards.values() for result in results.values())
    counts = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    print(f"{counts or 'no step'}; results in {session.out}")
    if waiting:
        print(f"waiting for another call: {', '.join(waiting)}")


if __name__ == "__main__":
    main()
