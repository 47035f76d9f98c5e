"""Watch what grows during a long run: memory, open files, threads, Python's blocks, time per step, files on disk.

    python -m verification.long_run [--case "one rank"] [--steps 1000000] [--every 10000] [--kill-at 500000]

It runs `titanlite train` with a model of a few thousand parameters, so that nearly all of the time is that of the loop:
data, schedule, step guard, metrics, event files, validation, checkpoints, garbage collection. Every --every steps it
prints a JSON line with what /proc has of rank 0 and of the launcher, and what Python counts in rank 0. Once the run has
passed --kill-at steps, all of its processes are killed (SIGKILL), and the same command is started again. After
--minutes it is asked to stop (SIGTERM).

After the run it checks the files that the run has written, and compares the beginning with the end. At last it takes
the run's last steps again, from the oldest checkpoint that is left, and compares the bytes of the last checkpoint.

`cpu ms` is the CPU time of rank 0 per step since the line before, all of its threads together; a machine that other
processes share changes it less than `wall ms`. Both contain validation and saving.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from benchmarks.memory.resident_memory import cpu_seconds
from benchmarks.python_path import ROOT
from titanlite.config import Launch, check, load
from titanlite.config.schema import Config
from titanlite.optimizer import lr_factor

LOG_FREQ, SAVES, VALIDATIONS, KEPT = 100, 50, 100, 3
CASES = {
    "one rank": {},
    "two ranks": {"parallelism.data_parallel_shard_degree": 2},
    "streaming": {"training.streaming": "true", "training.streaming_shards": 1, "training.streaming_shuffle_block": 64},
    "experts": {"model.moe.n_experts": 4, "model.moe.n_experts_per_token": 2, "model.moe.balance_bias": "true"},
}
"""Options of each case, beside those of `options_of`."""
COUNT_BLOCKS = """
import json, os, signal, sys

def write_counts(number, frame):
    path = os.environ["LONG_RUN_COUNTS"]
    with open(path + ".tmp", "w") as file:
        json.dump({"blocks": sys.getallocatedblocks()}, file)
    os.replace(path + ".tmp", path)

if os.environ.get("RANK") == "0":
    signal.signal(signal.SIGRTMIN, write_counts)
"""
"""What Python imports when it starts, as sitecustomize.py: rank 0 writes how many blocks of memory Python has allocated
when it gets a signal. It must not list the objects (gc.get_objects): a tuple that another thread has not finished would
have two references then, by which that thread fails."""


def options_of(case: str, folder: Path, steps: int) -> list[str]:
    """Return the options of a run on the command line."""
    options = {
        "model.dim": 8,
        "model.n_layers": 1,
        "model.n_heads": 1,
        "model.n_kv_heads": 1,
        "model.ffn_dim": 8,
        "model.vocab_size": 258,
        "training.seq_len": 8,
        "training.local_batch_size": 1,
        "training.steps": steps,
        "training.skip_outlier_sigma": 8.0,
        "training.cache_folder": folder / "cache",
        "optimizer.lr": 3e-4,
        "lr_scheduler.decay_type": "cosine",
        "lr_scheduler.total_steps": steps,
        "metrics.log_freq": LOG_FREQ,
        "validation.enable": "true",
        "validation.freq": max(steps // VALIDATIONS, 1),
        "validation.steps": 4,
        "validation.generate_prompts": '["The"]',
        "validation.generate_tokens": 4,
        "checkpoint.enable": "true",
        "checkpoint.interval": max(steps // SAVES, 1),
        "checkpoint.keep_latest_k": KEPT,
        "checkpoint.async_mode": "async",
        "job.dump_folder": folder / "run",
    }
    return ["debug", *(f"--{key}={value}" for key, value in {**options, **CASES[case]}.items())]


class Run:
    """A started run, and what can be seen of it from outside."""

    def __init__(self, folder: Path, options: list[str]):
        self.folder = folder
        (folder / "sitecustomize.py").write_text(COUNT_BLOCKS)
        self.counts, self.output = folder / "counts.json", folder / "output"
        variables = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "LONG_RUN_COUNTS": str(self.counts)}
        with self.output.open("ab") as output:
            self.launcher = subprocess.Popen(
                [sys.executable, "-m", "titanlite", "train", *options],
                env=os.environ | variables,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._read = self.output.stat().st_size
        self._step = 0

    def step(self) -> int:
        """Return the last step that was printed since the start."""
        with self.output.open("rb") as file:
            file.seek(self._read)
            for line in file.read().split(b"\n")[:-1]:
                self._read += len(line) + 1
                if line.startswith(b"step ") and b"/" in (number := line[5:].lstrip().partition(b" ")[0]):
                    self._step = int(number.partition(b"/")[0])
        return self._step

    def rank0(self) -> int:
        """Return the process of rank 0."""
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environment = (entry / "environ").read_bytes().split(b"\0")
                if b"RANK=0" in environment and f"LONG_RUN_COUNTS={self.counts}".encode() in environment:
                    return int(entry.name)
        raise SystemExit(f"no rank 0: {self.output.read_text()[-2000:]}")

    def kill(self) -> None:
        """Kill the launcher and its ranks, at once."""
        rank = self.rank0()
        for process in (self.launcher.pid, rank):  # a rank ends by itself once its launcher has died
            os.kill(process, signal.SIGKILL)
        self.launcher.wait()

    def sample(self) -> dict[str, Any]:
        """Return what the processes have now."""
        rank = self.rank0()
        self.counts.unlink(missing_ok=True)
        os.kill(rank, signal.SIGRTMIN)
        while not self.counts.exists() and self.launcher.poll() is None:
            time.sleep(0.01)
        run = self.folder / "run"
        events = sorted((run / "tb").glob("events*"))
        return {
            "step": self.step(),
            **process_values(rank),
            **json.loads(self.counts.read_text()),
            "launcher": process_values(self.launcher.pid),
            "metrics.jsonl bytes": (run / "metrics.jsonl").stat().st_size,
            "events bytes": sum(each.stat().st_size for each in events),
            "log bytes": sum(each.stat().st_size for each in (run / "logs").iterdir()),
            "checkpoints": sorted(path.name for path in (run / "checkpoint").iterdir()),
            "cpu s": cpu_seconds(rank),
        }


def process_values(process: int) -> dict[str, Any]:
    """Return the resident memory, the open files and the threads of a process. The resident memory that is not
    anonymous is of files, which the kernel drops when memory is short."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return {
        "rss MiB": round(int(status["VmRSS"].split()[0]) / 1024, 2),
        "anonymous MiB": round(int(status["RssAnon"].split()[0]) / 1024, 2),
        "files": len(os.listdir(f"/proc/{process}/fd")),
        "threads": int(status["Threads"]),
    }


def watch(
    folder: Path, options: list[str], every: int, kill_at: int, seconds: float
) -> tuple[int, list[dict[str, Any]]]:
    """Run to the end, and print a line every so many steps. Return the last step, and the lines; those after the kill
    have `resumed`."""
    samples: list[dict[str, Any]] = []
    run, killed, due, last, end = Run(folder, options), False, every, None, time.monotonic() + seconds
    while run.launcher.poll() is None:
        time.sleep(0.2)
        if time.monotonic() > end:
            run.launcher.terminate()
            end = math.inf
        if kill_at and not killed and run.step() >= kill_at:
            run.kill()
            print(json.dumps({"killed after step": run.step()}), flush=True)
            run, killed, last = Run(folder, options), True, None
        if run.step() < due or run.launcher.poll() is not None:
            continue
        with contextlib.suppress(OSError, SystemExit):  # it has just ended
            sample, now = run.sample(), time.monotonic()
            if last:
                steps = sample["step"] - last[0]
                sample["wall ms"] = round(1e3 * (now - last[1]) / steps, 3)
                sample["cpu ms"] = round(1e3 * (sample["cpu s"] - last[2]) / steps, 3)
            last = sample["step"], now, sample["cpu s"]
            samples.append(sample | {"resumed": killed})
            print(json.dumps(samples[-1]), flush=True)
        due = (run.step() // every + 1) * every
    if run.launcher.returncode:
        raise SystemExit(f"exit status {run.launcher.returncode}: {run.output.read_text()[-2000:]}")
    return run.step(), samples


def wrong_rows(folder: Path, config: Config, steps: int) -> Iterator[str]:
    """Yield what is wrong with metrics.jsonl, the event files and the checkpoints of a run that ended after a step."""
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    logged = [row["step"] for row in rows if "lr" in row]
    expected = sorted({1, *range(LOG_FREQ, steps + 1, LOG_FREQ), steps})
    extra = set(logged) - set(expected)  # the first step after a resumption is logged too
    if sorted(set(logged)) != logged or not set(expected) <= set(logged) or len(extra) > 1:
        yield f"metrics.jsonl has {len(logged):,} steps, expected {len(expected):,}; extra {sorted(extra)[:3]}"
    for row in rows:
        if "lr" in row and row["n_tokens_seen"] != row["step"] * config.tokens_per_step:
            yield f"step {row['step']}: n_tokens_seen is {row['n_tokens_seen']}"
        factor = lr_factor(row["step"], config.lr_scheduler)
        if "lr" in row and row["lr"] != config.optimizer.lr * factor:
            yield f"step {row['step']}: lr is {row['lr']}"
    shown: set[int] = set()
    for path in sorted((folder / "run" / "tb").glob("events*")):
        for event in EventFileLoader(str(path)).Load():
            if event.HasField("session_log"):
                shown = {step for step in shown if step < event.step}
            elif any(value.tag == "lr" for value in event.summary.value):
                shown.add(event.step)
    if shown != set(logged):
        yield f"TensorBoard shows {len(shown):,} steps, metrics.jsonl has {len(logged):,}"
    names = sorted(path.name for path in (folder / "run" / "checkpoint").iterdir())
    wanted = sorted(f"step-{step}" for step in saved_steps(config, steps))
    if names != wanted:
        yield f"checkpoints {names}, expected {wanted}"


def saved_steps(config: Config, last: int) -> list[int]:
    """Return the steps whose checkpoints are kept, newest first."""
    interval = config.checkpoint.interval
    return [last, *range((last - 1) // interval * interval, 0, -interval)][:KEPT]


def again(folder: Path, config: Config, options: list[str], last: int) -> str:
    """Take the last steps again from the oldest checkpoint, and return how the last checkpoint differs; "": not."""
    checkpoints, first = folder / "run" / "checkpoint", saved_steps(config, last)[-1]
    copy = folder / "again" / "run" / "checkpoint"
    shutil.copytree(checkpoints / f"step-{first}", copy / f"step-{first}")
    command = [*options, f"--job.dump_folder={folder / 'again' / 'run'}", f"--training.steps={last}"]
    result = subprocess.run(
        [sys.executable, "-m", "titanlite", "train", *command],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode or f"resumed after step {first}" not in result.stdout:
        return f"exit status {result.returncode}: {result.stderr[-500:]}"
    folders = (checkpoints / f"step-{last}", copy / f"step-{last}")
    files = [{path.name: path.read_bytes() for path in each.glob("*.safetensors")} for each in folders]
    return "" if files[0] == files[1] else f"step-{last} differs"


def report(samples: list[dict[str, Any]]) -> None:
    """Print the medians of the first and of the last fifth of the lines of each process, the first one left out."""
    for resumed in (False, True):
        part = [sample for sample in samples if sample["resumed"] == resumed and "cpu ms" in sample]
        n = max(len(part) // 5, 1)
        if len(part) < 2:
            continue
        keys = "anonymous MiB", "rss MiB", "files", "threads", "blocks", "cpu ms", "wall ms"
        pairs = {key: [statistics.median(each[key] for each in some) for some in (part[:n], part[-n:])] for key in keys}
        steps = f"{part[0]['step']:,} to {part[-1]['step']:,}"
        print(f"steps {steps}{', after SIGKILL' if resumed else ''}: medians of the first and of the last {n} lines")
        for key, (first, last) in pairs.items():
            print(f"    {key:13} {first:12,.3f} {last:12,.3f}")
        launcher = [part[0]["launcher"], part[-1]["launcher"]]
        print("    launcher, first and last line:", json.dumps(launcher))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="one rank")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--every", type=int, default=10_000)
    parser.add_argument("--kill-at", type=int, default=500_000, help="0: never")
    parser.add_argument("--minutes", type=float, default=math.inf)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="long-run-") as name:
        folder = Path(name)
        options = options_of(arguments.case, folder, arguments.steps)
        ranks = 2 if arguments.case == "two ranks" else 1
        config = check(load(options), Launch(0, 0, ranks, ranks, n_devices=0))
        print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, {arguments}", flush=True)
        begin = time.monotonic()
        last, samples = watch(folder, options, arguments.every, arguments.kill_at, 60 * arguments.minutes)
        print(f"{last:,} steps in {time.monotonic() - begin:,.0f} s")
        report(samples)
        problems = list(wrong_rows(folder, config, last))
        print("metrics.jsonl, event files, checkpoints:", "; ".join(problems[:5]) or "as expected", flush=True)
        differs, first = again(folder, config, options, last), saved_steps(config, last)[-1]
        print(f"from step {first:,} on again:", differs or "the same bytes in the last checkpoint")
    sys.exit(bool(problems or differs))


if __name__ == "__main__":
    main()
