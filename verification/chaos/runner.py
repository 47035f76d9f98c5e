"""Rounds of chaos: start a run, strike, and check how it ends and how the next one starts.

All rounds of a campaign share a dump folder until the training in it is complete. Then the curve in it must be bitwise
that of an undisturbed run, and nothing else may be left: no process, no temporary folder, no lock. The campaign goes on
in a new folder.
"""

import dataclasses
import json
import random
import re
import shutil
import signal
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from verification.chaos.faults import EARLY, FAULTS, Fault, disk_of_its_own, forget, restore, unmount
from verification.chaos.moments import MOMENTS
from verification.chaos.run import TWO_RANKS, Ended, Run, Scale, curve, rows, saved_steps

LIMIT_OF_A_CLEAN_RUN = 180
SAVES = "disabled", "async"


@dataclasses.dataclass
class Round:
    """The record of one start, as a line of the log."""

    number: int
    moment: str
    fault: str
    save: str
    status: int | None = None
    seconds: float = 0.0
    """From the fault until the last process had ended."""
    step: int = 0
    """The last step in metrics.jsonl when the run had ended."""
    resumed_after: int | None = None
    outcome: str = "ended before the fault"
    problems: list[str] = dataclasses.field(default_factory=list)


class Campaign:
    """Rounds with one seed. The choices follow from the seed; the times of the processes do not."""

    def __init__(self, folder: Path, seed: int, scale: Scale = TWO_RANKS):
        self.scale = scale
        self.folder, self.draw, self.records = folder, random.Random(seed), []
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell has it in the background; a run inherits it
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.log = folder / "chaos.jsonl"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.n_folders = self.n_rounds = 0
        self.current: Path | None = None
        self.faults = dict(FAULTS)
        if not disk_of_its_own(folder / "probe"):
            self.faults = {name: fault for name, fault in FAULTS.items() if not fault.needs_mount}
        unmount(folder / "probe")
        self.expected = self.undisturbed()

    def undisturbed(self) -> dict[int, tuple[Any, ...]]:
        folder = self.folder / "undisturbed"
        with Run(folder, "disabled", self.scale) as run:
            ended = run.ends_within(LIMIT_OF_A_CLEAN_RUN + self.scale.slack)
        steps = curve(folder)
        assert (ended, run.launcher.returncode, len(steps)) == (True, 0, self.scale.steps), run.output()
        return steps

    def any_round(self) -> Round:
        """Run a round with a random fault at a random moment that it is meant for."""
        fault = self.draw.choice(sorted(self.faults))
        return self.round(self.draw.choice(self.faults[fault].moments), fault)

    def round(self, moment: str, fault: str) -> Round:
        """Start a run, strike at a moment, and return what happened; then check the folder if it is complete."""
        folder = self.current = self.current or self.new_folder()
        self.n_rounds += 1
        record = Round(self.n_rounds, moment, fault, SAVES[self.n_rounds % len(SAVES)])
        saved = saved_steps(folder)
        torn = any(folder.rglob("*.whole"))
        with Run(folder, record.save, self.scale) as run:
            try:
                MOMENTS[moment](run, self.draw)
                if run.resumed_after() is not None:
                    forget(folder)
                begin = time.monotonic()
                self.faults[fault].apply(run, self.draw)
                self.check_end(run, record, self.faults[fault], begin)
            except Ended:
                if run.launcher.poll() != 0 and not (torn and run.launcher.poll() == 2):
                    record.problems.append(f"did not reach the moment: {last_lines(run)}")
                    restore(folder)
                    self.current = folder if torn else None  # without a torn file the next start would fail as well
        record.status = run.launcher.returncode
        self.check_start(run, record, saved, torn)
        self.write(record, run)
        if saved_steps(folder)[-1:] == [self.scale.steps]:
            self.complete()
        return record

    def check_end(self, run: Run, record: Round, fault: Fault, begin: float) -> None:
        limit = fault.seconds + run.scale.slack
        ended = run.ends_within(limit)
        record.seconds = time.monotonic() - begin
        record.step = max(rows(run.folder), default=0)
        if not ended:
            record.problems.append(f"after {limit} s left: {left_over(run)}")
            record.outcome = "did not end"
            return
        status = run.launcher.returncode
        record.outcome = "stopped" if status == 0 else "failed"
        in_start_of_python = status == 1 and run.output().startswith("Fatal Python error: init_")
        unhandled = in_start_of_python or status in (-signal.SIGTERM, -signal.SIGINT, -signal.SIGUSR1)
        if record.moment == "before ranks" and unhandled:
            return  # the launcher had not begun to handle signals, and nothing had been started
        if record.fault.startswith(("SIGINT", "SIGTERM")) and record.moment in EARLY:
            n_steps = run.step() - (run.resumed_after() or 0)
            if n_steps > 10:
                record.problems.append(f"{n_steps} steps were taken after the signal")
        if fault.end == "stopped" and status != 0:
            record.problems.append(f"exit status {status}: {last_lines(run)}")
        if fault.end == "stopped" and (left := run.new_temporary_files()):
            record.problems.append(f"temporary files: {', '.join(left)}")
        if fault.end != "failed" and "Traceback" in run.output():
            record.problems.append(f"traceback: {last_lines(run)}")
        if status == 0 and run.step() and saved_steps(run.folder)[-1:] != [run.step()]:
            record.problems.append(f"stopped after step {run.step()}, saved {saved_steps(run.folder)[-1:]}")
        if fault.end == "failed" and status == 0 and record.step < run.scale.steps:
            record.problems.append("exit status 0 though it failed")

    def check_start(self, run: Run, record: Round, saved: list[int], torn: bool) -> None:
        """Check that the run resumed from the newest checkpoint, or the one before a torn one; or else was rejected in
        one line, and undo what it was rejected for."""
        record.resumed_after = run.resumed_after()
        if torn and record.status == 2:
            record.outcome = "rejected"
            errors = [line for line in run.output().splitlines() if "error: " in line]
            if len(errors) != 1 or "Traceback" in run.output():
                record.problems.append(f"not rejected in one line: {last_lines(run)}")
            restore(run.folder)
            return
        allowed = saved[-2:] if torn and len(saved) > 1 else saved[-1:] or [0]
        if record.resumed_after is not None:
            if not record.fault.startswith("torn"):
                forget(run.folder)
            if record.resumed_after not in allowed:
                record.problems.append(f"resumed after step {record.resumed_after}, with checkpoints {saved}")

    def complete(self) -> None:
        """Start the run once more, undisturbed, and check what is in the folder in the end."""
        folder, self.current = self.current, None
        if folder is None:
            return
        record = Round(self.n_rounds, "", "none: the run is completed", SAVES[self.n_rounds % len(SAVES)])
        saved, torn = saved_steps(folder), any(folder.rglob("*.whole"))
        begin = time.monotonic()
        with Run(folder, record.save, self.scale) as run:
            if not run.ends_within(LIMIT_OF_A_CLEAN_RUN + self.scale.slack):
                record.problems.append(f"after {LIMIT_OF_A_CLEAN_RUN + self.scale.slack} s left: {left_over(run)}")
        record.seconds, record.status, record.outcome = time.monotonic() - begin, run.launcher.returncode, "completed"
        self.check_start(run, record, saved, torn)
        if record.outcome == "rejected":
            self.write(record, run)
            self.current = folder
            return self.complete()
        record.step = max(rows(run.folder), default=0)
        record.problems += final_problems(folder, self.expected)
        if left := run.new_temporary_files():
            record.problems.append(f"temporary files: {', '.join(left)}")
        if record.status != 0:
            record.problems.append(f"exit status {record.status}: {last_lines(run)}")
        self.write(record, run)
        unmount(folder)
        if not record.problems:
            shutil.rmtree(folder)
        return None

    def new_folder(self) -> Path:
        self.n_folders += 1
        folder = self.folder / f"folder-{self.n_folders}"
        folder.mkdir()
        disk_of_its_own(folder)
        return folder

    def write(self, record: Round, run: Run) -> None:
        self.records.append(record)
        with self.log.open("a") as log:
            log.write(json.dumps(dataclasses.asdict(record)) + "\n")
        if record.problems:
            (self.folder / f"round-{record.number}.txt").write_text(run.output())
        text = "; ".join(record.problems) or "ok"
        print(
            f"{record.number:4} {record.moment:17} {record.fault:25} {record.outcome:12} {record.seconds:5.1f} s  "
            f"resumed after {record.resumed_after}, step {record.step}: {text}",
            flush=True,
        )


def final_problems(folder: Path, expected: dict[int, tuple[Any, ...]]) -> list[str]:
    """Return how the curve of a completed run differs from the expected one, and what is left that should not be."""
    record = folder / "lost_rows"
    lost = set(map(int, record.read_text().split())) if record.exists() else set()
    actual = curve(folder)
    wrong = [step for step in expected if actual.get(step) != expected[step] and step not in lost - set(actual)]
    problems = [f"the curve differs from step {wrong[0]} on, in {len(wrong)} steps"] if wrong else []
    checkpoints = sorted(path.name for path in (folder / "run" / "checkpoint").iterdir())
    odd = [name for name in checkpoints if not re.fullmatch(r"step-\d+(\.damaged\d*)?", name)]
    odd += sorted(str(path.relative_to(folder)) for name in ("*.tmp", "*.lock") for path in folder.rglob(name))
    return problems + ([f"left in the folder: {', '.join(odd)}"] if odd else [])


def left_over(run: Run) -> str:
    ranks = {pid: f"rank {rank}" for rank, pid in run.ranks().items()}
    names = [ranks.get(pid, "launcher" if pid == run.launcher.pid else "torchrun") for pid in run.processes()]
    return ", ".join(sorted(names)) or "launcher"


def last_lines(run: Run) -> str:
    return " | ".join(run.output().splitlines()[-3:])[-300:]


def table(records: list[Round]) -> str:
    """Return the summary per fault, as Markdown."""
    by_fault: dict[str, list[Round]] = defaultdict(list)
    for record in records:
        by_fault[record.fault].append(record)
    lines = [
        "| fault | count | median, s | longest, s | rejected | problems |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for fault, group in sorted(by_fault.items()):
        struck = [record.seconds for record in group if record.seconds]
        median, longest = (f"{value:.1f}" for value in (statistics.median(struck or [0]), max(struck, default=0)))
        rejected = sum(record.outcome == "rejected" for record in group)
        problems = sum(bool(record.problems) for record in group)
        lines.append(f"| {fault} | {len(struck)} | {median} | {longest} | {rejected} | {problems} |")
    return "\n".join(lines)
