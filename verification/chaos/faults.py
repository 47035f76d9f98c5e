"""What can happen to a run: signals, a full disk, and torn files; and how the run must then end."""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from verification.chaos.run import TWO_RANKS, Run, rows, saved_steps

EARLY = "before ranks", "imports", "first step"
TRAINING = "step", "checkpoint write", "validation"
ANY = (*EARLY, *TRAINING, "end")


@dataclass(frozen=True)
class Fault:
    """A fault, and what it must lead to."""

    apply: Callable[[Run, random.Random], None]
    end: Literal["stopped", "failed", "either"]
    """stopped: exit status 0 and no traceback, with everything saved; failed: another exit status; either: both are
    right, as for a run that goes on after the fault and is then stopped."""
    seconds: float
    """Within which every process must have ended, on a busy machine."""
    moments: tuple[str, ...] = ANY
    needs_mount: bool = False
    """The disk of the folder must be one of its own."""


def send(number: int, *, to: str, times: int = 1) -> Callable[[Run, random.Random], None]:
    """Return a fault that sends a signal to the launcher, a random rank, or all processes at once."""

    def processes(run: Run, draw: random.Random) -> list[int]:
        ranks = list(run.ranks().values())
        return {
            "launcher": [run.launcher.pid],
            "rank": [draw.choice(ranks)] if ranks else [],
            "all": list(run.processes()),
        }[to]

    def apply(run: Run, draw: random.Random) -> None:
        run.wait_until(lambda: bool(processes(run, draw)))
        targets = processes(run, draw)
        for index in range(times):
            time.sleep(0.3 if index else 0)
            run.signal(targets, number)

    return apply


def save_and_go_on(run: Run, draw: random.Random) -> None:
    """SIGUSR1 asks for a checkpoint; the run goes on, and is then stopped."""
    run.signal([run.launcher.pid], signal.SIGUSR1)
    run.ends_within(1)
    run.signal([run.launcher.pid], signal.SIGTERM)


def full_disk(run: Run, draw: random.Random) -> None:
    """The disk is full for three seconds. A run that goes on is then stopped."""
    filler = run.folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(2**16)):
            pass
    run.ends_within(3)
    filler.unlink()
    run.signal([run.launcher.pid], signal.SIGTERM)


# Torn files: the run is killed, and a file of it damaged before the next start ----------------------------------------


def tear(file: Path, draw: random.Random) -> None:
    """Truncate a file, or overwrite some bytes of it with others. The original is kept beside it as NAME.whole."""
    data = file.read_bytes()
    file.with_name(file.name + ".whole").write_bytes(data)
    at = draw.randrange(len(data))
    if draw.random() < 0.5:
        file.write_bytes(data[:at])
    else:
        inverted = bytes(byte ^ 0xFF for byte in data[at : at + 16])
        file.write_bytes(data[:at] + inverted + data[at + 16 :])


def restore(folder: Path) -> None:
    """Undo what `tear` did, as the user does whose run was rejected."""
    for whole in folder.rglob("*.whole"):
        whole.replace(whole.with_name(whole.name.removesuffix(".whole")))


def forget(folder: Path) -> None:
    """Delete the originals of torn files."""
    for whole in folder.rglob("*.whole"):
        whole.unlink()


def torn_metrics(run: Run, draw: random.Random) -> None:
    run.kill()
    file = run.folder / "run" / "metrics.jsonl"
    if draw.random() < 0.5:
        whole = rows(run.folder)
        tear(file, draw)
        lost = sorted(set(whole) - set(rows(run.folder)))
        with (run.folder / "lost_rows").open("a") as record:
            record.writelines(f"{step}\n" for step in lost)
    else:
        file.with_name(file.name + ".whole").write_bytes(file.read_bytes())
        with file.open("ab") as end:
            end.write(draw.choice([bytes(100), b'{"step": ', b"\xff\xfe garbage\n"]))


def torn_checkpoint(run: Run, draw: random.Random) -> None:
    run.kill()
    if steps := saved_steps(run.folder):
        names = f"step-{steps[-1]}", f"step-{steps[-1]}.unconfirmed"
        newest = next(path for path in (run.folder / "run" / "checkpoint").iterdir() if path.name in names)
        tear(draw.choice(sorted(path for path in newest.iterdir() if path.stat().st_size)), draw)


def torn_token_cache(run: Run, draw: random.Random) -> None:
    run.kill()
    files = [path for path in (run.folder / "cache").rglob("*") if path.is_file() and path.stat().st_size]
    tear(draw.choice(sorted(files)), draw)


STOP, KILL, HANG = 30, 15, TWO_RANKS.timeout + 15
RANKS_EXIST = "imports", "first step", *TRAINING
FAULTS: dict[str, Fault] = {
    "SIGKILL to the launcher": Fault(send(signal.SIGKILL, to="launcher"), "failed", KILL),
    "SIGKILL to a rank": Fault(send(signal.SIGKILL, to="rank"), "failed", KILL, RANKS_EXIST),
    "SIGKILL to all": Fault(send(signal.SIGKILL, to="all"), "failed", KILL),
    "SIGTERM to the launcher": Fault(send(signal.SIGTERM, to="launcher"), "stopped", STOP),
    "SIGTERM to a rank": Fault(send(signal.SIGTERM, to="rank"), "stopped", STOP, RANKS_EXIST),
    "SIGTERM to all": Fault(send(signal.SIGTERM, to="all"), "stopped", STOP),
    "SIGINT to the launcher": Fault(send(signal.SIGINT, to="launcher"), "stopped", STOP),
    "SIGINT twice": Fault(send(signal.SIGINT, to="launcher", times=2), "either", KILL),
    "SIGUSR1 to the launcher": Fault(save_and_go_on, "stopped", STOP),
    "SIGSTOP to a rank": Fault(send(signal.SIGSTOP, to="rank"), "failed", HANG, TRAINING),
    "full disk": Fault(full_disk, "either", STOP, TRAINING, needs_mount=True),
    "torn metrics.jsonl": Fault(torn_metrics, "failed", KILL, TRAINING),
    "torn checkpoint": Fault(torn_checkpoint, "failed", KILL, TRAINING),
    "torn token cache": Fault(torn_token_cache, "failed", KILL, TRAINING),
}


def disk_of_its_own(folder: Path, megabytes: int = 96) -> bool:
    """Mount a small disk in memory at a folder. Return False where that is not permitted."""
    if os.name != "posix" or os.geteuid() != 0:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)
