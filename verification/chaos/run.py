"""One run of a tiny model on two ranks, as a user starts it, and what can be seen of it from outside."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Scale:
    """How many ranks a run has, and how long it is."""

    ranks: int = 2
    parallelism: str = "data_parallel_shard_degree = 2"
    local_batch_size: int = 2
    global_batch_size: int = 8
    n_layers: int = 2
    steps: int = 60
    validation_interval: int = 5
    save_interval: int = 3
    startup_timeout: int = 20
    """comm.init_timeout_seconds"""
    timeout: int = 8
    """comm.train_timeout_seconds"""
    slack: float = 0.0
    """Seconds to add to every limit, where ranks are many and cores are few."""

    @property
    def config(self) -> str:
        """The config of the run, as TOML."""
        return f"""
[model]
dim = 128
n_layers = {self.n_layers}
n_heads = 4
n_kv_heads = 2
ffn_dim = 256

[training]
seq_len = 64
local_batch_size = {self.local_batch_size}
global_batch_size = {self.global_batch_size}
steps = {self.steps}

[parallelism]
{self.parallelism}

[metrics]
log_freq = 1

[validation]
enable = true
freq = {self.validation_interval}
steps = 4

[checkpoint]
enable = true
interval = {self.save_interval}
keep_latest_k = 3
on_corrupt = "previous"

[comm]
init_timeout_seconds = {self.startup_timeout}
train_timeout_seconds = {self.timeout}
"""


TWO_RANKS = Scale()
MANY_RANKS = Scale(
    ranks=64,
    parallelism="data_parallel_shard_degree = 64",  # gloo has threads for each group, which wake all the time
    local_batch_size=1,
    global_batch_size=64,
    n_layers=1,
    steps=8,
    validation_interval=8,
    save_interval=2,
    startup_timeout=600,
    timeout=30,
    slack=420.0,
)
CURVE = "loss_metrics/global_avg_loss", "loss_metrics/global_max_loss", "grad_norm", "lr", "n_tokens_seen"
SAVED = re.compile(r"step-(\d+)(\.unconfirmed)?")
"""Names of checkpoints from which a run may resume."""


class Ended(Exception):
    """The run ended before the moment that was waited for."""


class Run:
    """A started run, all of whose processes are killed after the body of a with statement.

    They are found by a variable of their environment, orphans too.
    """

    def __init__(self, folder: Path, save: str, scale: Scale = TWO_RANKS):
        """Start `titanlite train` with folder/run as its dump folder; `save` is checkpoint.async_mode."""
        self.scale = scale
        self.folder, self.mark = folder, f"TITANLITE_CHAOS={uuid.uuid4().hex}"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)
        self._files_before = set(self.temporary.iterdir())
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it is not in the folder, whose disk may be full
        (folder / "chaos.toml").write_text(scale.config)
        inherited = {key: value for key, value in os.environ.items() if key not in ("NGPU", "NNODES", "RANK")}
        name, value = self.mark.split("=")
        variables = {name: value, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        options = [f"--job.dump_folder={folder / 'run'}", f"--training.cache_folder={folder / 'cache'}"]
        options += [f"--checkpoint.async_mode={save}"]
        self.launcher = subprocess.Popen(
            [sys.executable, "-m", "titanlite", "train", str(folder / "chaos.toml"), *options],
            cwd=ROOT,
            env=inherited | variables,
            stdout=self._log,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
        )

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    # What can be seen -------------------------------------------------------------------------------------------------

    def output(self) -> str:
        """Return what the run has printed so far, on both streams."""
        descriptor = self._log.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def processes(self) -> dict[int, str]:
        """Return the environment of every process of the run that has not ended."""
        result = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                if entry.name.isdigit() and self.mark in (text := (entry / "environ").read_bytes().decode("latin-1")):
                    result[int(entry.name)] = text
        return result

    def ranks(self) -> dict[int, int]:
        """Return the process of each rank that torchrun has started."""
        found = {pid: re.search(r"\0RANK=(\d+)\0", f"\0{text}") for pid, text in self.processes().items()}
        return {int(match[1]): pid for pid, match in found.items() if match}

    def torchrun(self) -> list[int]:
        """Return the processes that are neither the launcher nor a rank."""
        return [pid for pid in self.processes() if pid != self.launcher.pid and pid not in self.ranks().values()]

    def step(self) -> int:
        """Return the last step that the run has printed; 0 before the first one."""
        return max((int(step) for step in re.findall(rf"step +(\d+)/{self.scale.steps} ", self.output())), default=0)

    def resumed_after(self) -> int | None:
        """Return the step that the run says it resumed after; 0 if it trained from the first step; None if unknown."""
        if resumed := re.search(r"resumed after step (\d+) of", self.output()):
            return int(resumed[1])
        return 0 if self.step() else None

    def new_temporary_files(self) -> list[str]:
        """Return what the run has left in the folder for temporary files, apart from the compiler's cache."""
        names = {path.name for path in set(self.temporary.iterdir()) - self._files_before}
        return sorted(name for name in names if not name.startswith("torchinductor_"))

    # Waiting and ending -----------------------------------------------------------------------------------------------

    def wait_until(self, condition: Callable[[], bool], seconds_between: float = 0.02) -> None:
        """Wait for a condition. Raise Ended if the run ended first, or nothing happened for two minutes."""
        deadline = time.monotonic() + 120 + self.scale.slack
        while not condition():
            if self.launcher.poll() is not None or time.monotonic() > deadline:
                raise Ended
            time.sleep(seconds_between)

    def ends_within(self, seconds: float) -> bool:
        """Wait until no process of the run is left, at most so long; return whether that was so."""
        deadline = time.monotonic() + seconds
        while self.launcher.poll() is None or self.processes():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def signal(self, processes: list[int], number: int) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def kill(self) -> None:
        """Kill every process of the run."""
        while processes := list(self.processes()):
            self.signal(processes, signal.SIGKILL)
            time.sleep(0.02)
        self.launcher.wait()


def rows(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl by step, without those that are torn."""
    result = {}
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / "run" / "metrics.jsonl").read_bytes().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                row = json.loads(line)
                result[row["step"]] = row
    return result


def curve(folder: Path) -> dict[int, tuple[Any, ...]]:
    """Return what must not depend on faults, by step."""
    return {step: tuple(row.get(tag) for tag in CURVE) for step, row in rows(folder).items()}


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints from which a run may resume, in order."""
    checkpoints = folder / "run" / "checkpoint"
    names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    return sorted({int(match[1]) for name in names if (match := SAVED.fullmatch(name))})
