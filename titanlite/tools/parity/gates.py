"""Train a config several times, as `titanlite train` does, and compare the runs, for `titanlite parity --gates`."""

import dataclasses
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from titanlite.checkpoint.reader import CheckpointReader
from titanlite.config import Config, ConfigError
from titanlite.config.loader import printable
from titanlite.files.appended_file import row_of
from titanlite.techniques.fingerprints import file
from titanlite.tools.parity.compare import allowed_for, differences, judge
from titanlite.tools.parity.reference import Trace

INTERVAL = 3  # steps from one checkpoint to the next
NUMBERS = {"loss": "loss_metrics/global_avg_loss", "norm": "grad_norm"}
IN_FLOAT64 = ["--training.dtype=float64", "--training.mixed_precision_param=float64"]


@dataclasses.dataclass(frozen=True)
class Run:
    """A run in a folder, which resumes if it is started again."""

    folder: Path
    arguments: list[str]

    def until(self, step: int, how: int = 0) -> dict[int, dict[str, Any]]:
        """Start the run and, once `step` is logged, send it the signal number `how`; if `how` is 0, wait for the run's
        end. Return the logged rows by step. Raises ConfigError if the run fails, or ends before `step`."""
        self.folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "titanlite", "train", *self.arguments, f"--job.dump_folder={self.folder}"]
        with (self.folder / "output.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            while process.poll() is None and not (how and step in self.rows()):
                time.sleep(0.01)
            process.send_signal(how)  # ends the launcher and its ranks; has no effect on an ended process
            status, rows = process.wait(), self.rows()
        finally:
            process.kill()  # does nothing unless this command is interrupted
        if step not in rows or status not in (0, -how):
            reason = (self.folder / "output.log").read_text(errors="replace").strip().rpartition("\n")[2]
            raise ConfigError([f"{' '.join(command)}: exit status {status} in step {max(rows)}: {printable(reason)}"])
        return rows

    def rows(self) -> dict[int, dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        rows = map(row_of, path.read_bytes().splitlines() if path.exists() else [])
        return {0: {"n_tokens_seen": 0}} | {row["step"]: row for row in rows if row}

    def is_complete(self, steps: int) -> bool:
        """Return whether the folder has everything that `difference` compares for a run of `steps` steps."""
        numbers, saved = self.rows(), (self.folder / f"checkpoint/step-{steps}").is_dir()
        logged = [step for step, row in numbers.items() if set(NUMBERS.values()) <= row.keys()]
        return saved and file.steps_of(self.folder) == logged == [*range(1, steps + 1)]

    def resumed(self, name: str, step: int, options: list[str]) -> "Run":
        """Resume from this run's checkpoint in a new folder, with additional `options`, up to this run's last step."""
        run, checkpoint = Run(self.folder.with_name(name), [*self.arguments, *options]), f"checkpoint/step-{step}"
        shutil.copytree(self.folder / checkpoint, run.folder / checkpoint)
        run.until(max(self.rows()))
        return run

    def weights(self) -> Trace:
        """Return the weights of the last checkpoint in float64."""
        reader = CheckpointReader(self.folder / f"checkpoint/step-{max(self.rows())}")
        names = [name.removeprefix("model.") for name in reader.shapes if name.startswith("model.")]
        return {f"final weight {name}": reader.read(f"model.{name}").double() for name in names}


def run_gates(config: Config, arguments: list[str], steps: int, baseline: Path | None) -> int:
    """Print a line for each gate; return the exit status, 0 if all hold, else 1. Raises ConfigError if a run fails."""
    arguments = [*arguments, f"--training.steps={steps}", "--metrics.log_freq=1", "--debug.fingerprint_freq=1"]
    arguments += ["--checkpoint.enable=true", f"--checkpoint.interval={INTERVAL}"]
    recorded = Run(baseline, []) if baseline and baseline.exists() else None
    if recorded and not recorded.is_complete(steps):
        raise ConfigError([f"--baseline {baseline}: expected what --gates recorded of {steps} steps, or a new name"])
    middle, verdicts = steps // 2 // INTERVAL * INTERVAL, list[str]()

    def gate(name: str, verdict: str, what: str) -> None:
        verdicts.append(verdict or "equal bit for bit")
        print(f"{name}: {verdicts[-1]}: {what}", flush=True)

    with tempfile.TemporaryDirectory() as temporary:
        first, second, replay = (Run(Path(temporary) / name, arguments) for name in ("first", "second", "replay"))
        rows = first.until(steps)
        second.until(steps)
        gate("repeatability", difference(first, second), f"two runs of {steps} steps")
        text, verdict = "--baseline FOLDER records one, to compare with later", "no baseline given"
        if recorded:
            text, verdict = f"the run in {baseline}", difference(recorded, first)
        elif baseline:
            shutil.copytree(first.folder, baseline)
            text, verdict = f"in {baseline}, to compare with later", "recorded"
        gate("baseline equivalence", verdict, text)
        ends, repeated = [], 0
        for third, how in enumerate(("killed", "stopped", "killed")):
            step = random.randrange(steps * third // 3 + 1, steps * (third + 1) // 3)
            seen = replay.until(step, signal.SIGTERM if how == "stopped" else signal.SIGKILL)
            saved = [path.name.partition("-")[2] for path in replay.folder.glob("checkpoint/step-*")]
            last = max([int(step) for step in saved if step.isdigit()], default=0)
            repeated += seen[max(seen)]["n_tokens_seen"] - seen[last]["n_tokens_seen"]
            ends.append(f"{how} after step {max(seen)}")
        lost = rows[steps]["n_tokens_seen"] - replay.until(steps)[steps]["n_tokens_seen"]
        text = f"{', '.join(ends)}; {lost:,} tokens lost, {repeated:,} repeated"
        gate("restart replay", difference(first, replay), text)
        own = other_layout(config)
        runs = first, first.resumed("float64", middle, IN_FLOAT64), first.resumed("other", middle, own)
        reference, exact, other = (run.weights() for run in runs)
        allowed = allowed_for(differences(reference, exact))
        gate("layout equivalence", judge(reference, other, allowed)[3], f"resumed after step {middle}: {' '.join(own)}")
    return int(not all(verdict.startswith(("equal", "no baseline", "recorded")) for verdict in verdicts))


def other_layout(config: Config) -> list[str]:
    """Return options for one process (two FSDP ranks if the config has one process), with the config's global batch."""
    degrees = dict.fromkeys((name for name, _ in config.parallelism if name.endswith("_degree")), 1)
    ranks = 2 if all(getattr(config.parallelism, name) == 1 for name in degrees) else 1
    size = config.training.global_batch_size
    batch = [f"--training.local_batch_size={size // ranks}", f"--training.global_batch_size={size}"]
    degrees["data_parallel_shard_degree"] = ranks
    changed = [name for name in degrees if getattr(config.parallelism, name) != degrees[name]]
    return [*(f"--parallelism.{name}={degrees[name]}" for name in changed), *batch]


def difference(a: Run, b: Run) -> str:
    """Return a text about the first bitwise difference of two runs: in the fingerprints of a step's tokens or targets,
    in its loss or norm, or in the weights, optimizer states or random states of a checkpoint; "" for equal runs."""
    rows = a.rows(), b.rows()
    for step in file.steps_of(a.folder):
        one, other = (file.read(run.folder, step)[1] for run in (a, b))
        wrong = [name for name in ("input tokens", "input targets") if not torch.equal(one[name], other[name])]
        if wrong := wrong or [name for name, tag in NUMBERS.items() if rows[0][step][tag] != rows[1][step][tag]]:
            return f"DIFFERENT: {wrong[0]} of step {step}"
    for path in sorted(a.folder.glob("checkpoint/step-*/rank-*")):
        theirs = b.folder / path.relative_to(a.folder)
        if theirs.exists() and path.read_bytes() != theirs.read_bytes():  # run b may have deleted it
            return f"DIFFERENT: {path.relative_to(a.folder)}"
    return ""
