"""Measure on one GPU what needs one: tests, tokens/s, MFU and memory of Llama 3, attention, a trace, planned memory.

    python benchmarks/gpu_session.py --out FOLDER [--seconds 540] [--steps '8b-*' ...] [--retry]
    python benchmarks/gpu_session.py --out FOLDER --dry-run    (on any machine: every step on a CPU, at toy size)
    python benchmarks/gpu_session.py --out FOLDER --dry-run null-cuda    (training runs as they are, without a GPU)
    python benchmarks/gpu_session.py --list                    (the parts, of at most ten minutes, and their steps)

gpu_steps.py has the steps, in order of worth; gpu_wheels.txt what to install where only torch is. Each step runs in a
process of its own, which is killed at the step's time limit. The folder gets session.log (the output of every step as
it comes, and the metrics of every training step), trace.json.gz (of the profiler), device.toml (of `titanlite
calibrate`), state.json (the result of each step) and summary.md (tables, rewritten after each step).

A session may take several calls: a step that is done or has failed is not run again (--retry: those that failed are).
--seconds N starts no step whose time limit could end after N seconds. --resume-from FOLDER copies the files of earlier
calls from another folder first. A step whose modules are missing is recorded as "not there" and tried again by the next
call. Plans need no GPU: --steps 'plan-*' completes a session on another machine. --torchtitan-python names the Python
of an environment with torchtitan 0.2.2, --text the text of a published curve (published_curves.py has its address).

With `--dry-run null-cuda` torch's CUDA build runs on the null CUDA (tests/null_cuda/build.py), whose kernels compute
nothing: sizes, compilation, memory and time limits are those of a session, speeds and losses mean nothing.

Training runs take train.py through 10 steps of 32768 tokens, the first four of which are warm-up. The tables have

    tokens/s, MFU      medians of the other steps. MFU (model FLOPs utilization) is the fraction of the data sheet's
                       dense bfloat16 rate, also for float8, under two conventions: with 12 L D T operations for
                       attention, as train.py counts them, and with 6 L D T, the part that a causal mask leaves
    of matmul          MFU relative to the rate of a bfloat16 matrix product (matmul) measured in this session
    GiB                the allocator's peak, in tensors and reserved from the device
    B/param            bytes of that peak, in tensors, per parameter: weights, gradients, optimizer states, activations
"""

import argparse
import contextlib
import dataclasses
import fnmatch
import gzip
import importlib
import importlib.util
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
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from gpu_steps import HERE, TOML, Options, Step, all_steps, toy
from gpu_summary import THROUGHPUT, one_line, summary
from python_path import ROOT, with_python_path

WARM_UP = 4  # steps without a measurement: compilation, and clocks that settle
MEDIANS = (THROUGHPUT, "tflops", "mfu(%)", "time_metrics/data_loading(%)")
PEAKS = ("memory/max_active(GiB)", "memory/max_reserved(GiB)")
PART = 600  # seconds
LAST_LINES = 15  # of the output of a step that failed, in the summary
KERNELS = 25  # lines of the trace's table
ON_NULL_CUDA = ("environment", "train", "plan")
LAYERS = re.compile(r"(\d+) layers, dim (\d+),.*; ([\d,]+) parameters")
Result = dict[str, Any]


class StepFailed(Exception):
    """A step did not do its work; the message is the reason in a line, `lines` are what to read of its output."""

    def __init__(self, message: str, output: str = ""):
        super().__init__(message)
        lines = output.strip().splitlines()
        self.lines = [line for line in lines if line.startswith("FAILED ")] or lines[-LAST_LINES:]


@dataclasses.dataclass
class Session:
    """A session writes the results of its steps into a folder."""

    out: Path
    dry_run: str
    """"cpu", "null-cuda", or "" on a GPU."""
    torchtitan_python: str
    results: dict[str, Result]
    text: Path | None = None

    def save(self, name: str, result: Result, steps: list[Step]) -> None:
        """Record the result of a step, rewrite state.json and summary.md, and print the step's line."""
        self.results[name] = result
        replacement = self.out / "state.tmp"
        replacement.write_text(json.dumps({"dry_run": self.dry_run, "steps": self.results}, indent=1))
        replacement.replace(self.out / "state.json")
        (self.out / "summary.md").write_text(summary(steps, self.results, dry_run=self.dry_run))
        print(f"{result['status']:9} {name:30} {result['seconds']:5.0f} s  {one_line(result)}", flush=True)

    def run(self, command: list[str], limit: float, *, folder: Path = ROOT) -> str:
        """Run a command, append its output to session.log, and return it. Raise StepFailed if the command fails, or if
        it takes longer than the limit in seconds."""
        environment = with_python_path(os.environ) | {"PYTHONUNBUFFERED": "1"}
        if self.dry_run == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        elif self.dry_run:
            environment |= null_cuda().environment(self.out / "null_cuda")
        if "PYTORCH_CUDA_ALLOC_CONF" not in environment:  # as titanlite train sets it
            environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        with (self.out / "session.log").open("a+b") as log:
            log.write(f"\n$ {shlex.join(command)}\n".encode())
            log.flush()
            begin = log.tell()
            options = {"stdout": log, "stderr": subprocess.STDOUT, "cwd": folder, "env": environment}
            process = subprocess.Popen(command, start_new_session=True, **options)
            status = None
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(timeout=limit)
            finally:  # also if this program is interrupted or asked to end
                kill_tree(process)
            log.seek(begin)
            output = log.read().decode(errors="replace")
        if status is None:
            raise StepFailed(f"time limit of {limit:.0f} s", output)
        if status:
            raise StepFailed(reason(output) or f"exit status {status}", output)
        return output

    def note(self, lines: list[str]) -> None:
        """Append lines to session.log."""
        with (self.out / "session.log").open("a") as log:
            log.write("".join(f"{line}\n" for line in lines))


def null_cuda() -> Any:
    """Return the module that builds the null CUDA."""
    sys.path.insert(0, str(ROOT))  # tests are not installed
    return importlib.import_module("tests.null_cuda.build")


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
    if lines and re.search(r"\d+ (failed|errors?)\b", lines[-1]):  # of pytest
        return lines[-1].strip("= ")
    errors = [line for line in lines if re.search(r"Error\b|error:|expected", line)]
    return (errors or lines or [""])[-1][:300]


# The kinds of steps ---------------------------------------------------------------------------------------------------


def measure(session: Session, step: Step, command: str) -> Result:
    """Run a command of gpu_measurements.py and return its values."""
    arguments = [sys.executable, str(HERE / "gpu_measurements.py"), command]
    if command == "rates" and session.dry_run:
        arguments.append("--small")
    if command == "plan":
        device = "cpu" if session.dry_run == "cpu" else "h200"
        arguments += [str(TOML), *arguments_of(step.options | {"plan.device": device})]
    return json.loads(session.run(arguments, step.limit).splitlines()[-1])


def arguments_of(options: Options) -> list[str]:
    return [f"--{key}={value}" for key, value in options.items()]


def train(session: Session, step: Step, folder: Path) -> Result:
    """Run train.py on one GPU, write its metrics into the log, and return what the tables show."""
    options = step.options | {"job.dump_folder": str(folder)}
    output = session.run([sys.executable, str(ROOT / "train.py"), str(TOML), *arguments_of(options)], step.limit)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    session.note([json.dumps({"case": step.name, **json.loads(line)}) for line in lines])
    rows = [json.loads(line) for line in lines]
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
        "first step s": rows[0]["time_metrics/end_to_end(s)"],
    }
    return result | {"causal": 1 - 6 * n_layers * dim * seq_len / flops}


def trace(session: Session, step: Step, folder: Path) -> Result:
    """Profile a step of the fastest run of Llama 3 8B, with one gradient accumulation step."""
    best = best_run(session)
    options = best.options | {"profiling.enable_profiling": "true", "profiling.profile_freq": 6, "training.steps": 6}
    options["training.global_batch_size"] = options["training.local_batch_size"]
    train(session, best._replace(options=options, limit=step.limit), folder)
    (file,) = (folder / "profile_traces").glob("*/*.json")
    with file.open("rb") as source, gzip.open(session.out / "trace.json.gz", "wb") as target:
        shutil.copyfileobj(source, target)
    return {"profiled": best.name, "lines": kernel_times(json.loads(file.read_text()))}


def best_run(session: Session) -> Step | None:
    """Return the fastest run of Llama 3 8B that is done, or None."""
    steps = [toy(step) if session.dry_run == "cpu" else step for step in all_steps() if step.group == "Llama 3 8B"]
    ended = [step for step in steps if session.results.get(step.name, {}).get("status") == "done"]
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


def tests(session: Session, step: Step) -> Result:
    """Run tests of tests/test_gpu.py; a dry run only collects them."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-rf"]
    command += ["--collect-only"] if session.dry_run else []
    output = session.run([*command, *(f"tests/test_gpu.py::{name}" for name in step.options)], step.limit)
    return {"result": output.strip().splitlines()[-1].strip("= ")}


def calibrate(session: Session, step: Step) -> Result:
    """Measure the device for plans, into device.toml."""
    command = [sys.executable, "-m", "titanlite", "calibrate", str(session.out / "device.toml")]
    session.run(command + (["--ranks", "1"] if session.dry_run else []), step.limit)
    return {"result": "device.toml"}


def ring(session: Session, step: Step) -> Result:
    """Run ring_attention.py at one rank."""
    command = [sys.executable, str(HERE / "ring_attention.py")]
    if session.dry_run:
        command += ["--rings", "--lengths", "256", "--shape", "1", "4", "2", "16", "--repeats", "1"]
    else:
        command += [
            "--device",
            "cuda",
            "--lengths",
            "4096",
            "8192",
            "--shape",
            "1",
            "32",
            "8",
            "128",
            "--repeats",
            "10",
        ]
    output = session.run(command, step.limit)
    return {"lines": [line for line in output.splitlines() if not line.startswith("{")]}


def parity(session: Session, step: Step) -> Result:
    """Compare a layout whose ranks share the GPU with one process."""
    options = step.options.copy()
    n_ranks, config = options.pop("ranks"), ROOT / "configs" / f"{options.pop('config')}.toml"
    command = [sys.executable, str(HERE / "gpu_measurements.py"), "parity", str(n_ranks), str(config)]
    return json.loads(session.run([*command, *arguments_of(options)], step.limit).splitlines()[-1])


def torchtitan(session: Session, step: Step, folder: Path) -> Result:
    """Run vs_torchtitan.py; a dry run only checks the options of both programs."""
    command = [sys.executable, str(HERE / "vs_torchtitan.py"), "--torchtitan-python", session.torchtitan_python]
    if session.dry_run:
        command += ["--modes", "alone", "--dry-run"]
    else:
        command += ["--device", "cuda", "--rounds", "1", "--steps", "10"]
    output = session.run(command, step.limit, folder=folder)
    return {"lines": [line for line in output.splitlines() if "ratio" in line or line.startswith("titanlite")]}


def card(session: Session, step: Step) -> Result:
    """Run the first 500 steps of the published curve of published_curves.py; a dry run takes two."""
    command = [sys.executable, str(HERE / "published_curves.py"), "card", "--text", str(session.text)]
    output = session.run([*command, "--steps", "2" if session.dry_run else "500"], step.limit)
    return {"lines": [line for line in output.splitlines() if not line.startswith("{")]}


def run_step(session: Session, step: Step) -> Result:
    """Run a step and return its result."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if step.kind == "train":
            return train(session, step, folder)
        if step.kind == "trace":
            return trace(session, step, folder)
        if step.kind == "torchtitan":
            return torchtitan(session, step, folder)
    if step.kind == "pytest":
        return tests(session, step)
    if step.kind == "calibrate":
        return calibrate(session, step)
    if step.kind == "card":
        return card(session, step)
    if step.kind == "parity":
        return parity(session, step)
    return ring(session, step) if step.kind == "ring" else measure(session, step, step.kind)


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
    if step.kind == "torchtitan":
        imported = subprocess.run([session.torchtitan_python, "-c", "import torchtitan"], capture_output=True)
        return "no module torchtitan" if imported.returncode else ""
    return ""


# The session ----------------------------------------------------------------------------------------------------------


def resume(folder: Path, out: Path) -> None:
    """Copy the files of earlier calls that a folder has and the output folder lacks."""
    for name in ("state.json", "session.log", "summary.md", "trace.json.gz"):
        if (folder / name).exists() and not (out / name).exists():
            shutil.copyfile(folder / name, out / name)


def load_session(arguments: argparse.Namespace) -> Session:
    """Return the session of the output folder, with the results of earlier calls."""
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    if arguments.resume_from:
        resume(arguments.resume_from, out)
    state, results = out / "state.json", {}
    if state.exists():
        content = json.loads(state.read_text())
        if content["dry_run"] != arguments.dry_run:
            kind = f"a dry run ({content['dry_run']})" if content["dry_run"] else "a session on a GPU"
            sys.exit(f"error: {out} has the results of {kind}; name another folder with --out")
        results = content["steps"]
    text = arguments.text and arguments.text.resolve()
    return Session(out.resolve(), arguments.dry_run, arguments.torchtitan_python, results, text)


def parts(steps: list[Step]) -> list[str]:
    """Return a line for each part of a session: as many steps as end within ten minutes by their time limits."""
    lines: list[str] = []
    names, seconds = [], 0
    for step in [*steps, None]:
        if step is None or seconds + step.limit > PART:
            lines.append(f"part {len(lines) + 1}, at most {seconds} s: {', '.join(names)}")
            names, seconds = [], 0
        if step is not None:
            names, seconds = [*names, step.name], seconds + step.limit
    return lines


def run_session(session: Session, arguments: argparse.Namespace) -> list[str]:
    """Run the steps that are due and fit into the seconds; return the names of those that wait for another call."""
    begin, waiting = time.monotonic(), []
    steps = [toy(step) if session.dry_run == "cpu" else step for step in all_steps()]
    for step in steps:
        earlier = session.results.get(step.name, {"status": "not run"})
        settled = ["done"] if arguments.retry else ["done", "failed"]
        chosen = not arguments.steps or any(fnmatch.fnmatch(step.name, pattern) for pattern in arguments.steps)
        if earlier["status"] in settled or not chosen:
            continue
        if gap := missing(session, step):
            if earlier.get("reason") != gap:
                session.save(step.name, {"status": "not there", "seconds": 0, "reason": gap}, steps)
            continue
        if not (session.dry_run or step.kind == "plan" or torch.cuda.is_available()):
            sys.exit("error: gpu_session.py needs a GPU, except for --dry-run and --steps 'plan-*'")
        start = time.monotonic()
        if arguments.seconds and start - begin + step.limit > arguments.seconds:
            waiting.append(step.name)
            continue
        session.note([f"\n=== {step.name} (limit {step.limit} s)"])
        try:
            result = {"status": "done", "seconds": 0, **run_step(session, step)}
        except StepFailed as error:
            result = {"status": "failed", "seconds": 0, "reason": str(error), "lines": error.lines}
        session.save(step.name, result | {"seconds": round(time.monotonic() - start, 1)}, steps)
    return waiting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--out", type=Path, help="the folder of the results")
    task.add_argument("--list", action="store_true", help="print the parts of at most ten minutes and their steps")
    parser.add_argument("--resume-from", type=Path, metavar="FOLDER", help="copy earlier results from this folder")
    parser.add_argument("--seconds", type=float, help="start no step that its time limit could take past this")
    parser.add_argument("--steps", nargs="+", metavar="PATTERN", help="only the steps of these names (default: all)")
    parser.add_argument("--retry", action="store_true", help="also run steps that failed")
    kinds = {"nargs": "?", "choices": ["cpu", "null-cuda"], "const": "cpu", "default": ""}
    parser.add_argument("--dry-run", **kinds, help="without a GPU: every step on a CPU at toy size, or the null CUDA")
    parser.add_argument("--torchtitan-python", default=sys.executable, help="Python of torchtitan's environment")
    parser.add_argument("--text", type=Path, metavar="FILE", help="tinyshakespeare's input.txt, for published-card")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(parts(all_steps())))
        return
    if arguments.dry_run == "null-cuda" and (why := null_cuda().why_not()):
        sys.exit(f"error: no null CUDA: {why}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    session = load_session(arguments)
    waiting = run_session(session, arguments)
    statuses = Counter(result["status"] for result in session.results.values())
    counts = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    print(f"{counts or 'no step'}; results in {session.out}")
    if waiting:
        print(f"waiting for another call: {', '.join(waiting)}")


if __name__ == "__main__":
    main()
