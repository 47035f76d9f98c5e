"""The watchdog: hanging, silent and failing ranks are named, and end all ranks. The ranks here do not train."""

import time
from pathlib import Path
from unittest import mock

import pytest

from tests.helpers.launches import finish, launched
from titanlite.config import ConfigError
from titanlite.config.errors import TrainingError
from titanlite.config.loader import printable
from titanlite.launch import failure, progress

RANK = """
import os, signal, sys, time
from pathlib import Path
from titanlite.config import ConfigError, Launch
from titanlite.config.schema import Comm
from titanlite.config.errors import TrainingError
from titanlite.launch import progress
from titanlite.launch import failure, process, watchdog
from titanlite.launch.progress import alive, mark

process.start_rank()
launch = Launch.from_environment(n_devices=0)
rank = launch.rank
dog = watchdog.Watchdog(launch, Comm(init_timeout_seconds=60), Path("run"))

def run():
    with dog:
        while not dog._store or not all(dog._store.check([f"rank/{other}"]) for other in range(launch.world_size)):
            time.sleep(0.05)  # both have imported torch
        for name in ("waiting for data", "forward", "writing"):
            mark(name, 1)  # each has been seen, and took no time
        progress.first_step_done(TIMEOUT)
        body()
    print(rank, "is done", flush=True)

def main():
    try:
        run()
    except Exception as error:
        failure.fail(error, dog)
    process.exit_process(0)
"""


def run(folder: Path, body: str, ranks: int = 2, timeout: int = 4) -> tuple[int, str, list[str], float]:
    """Run a function of all ranks; return the status, the output, the lines of errors, and the seconds it took."""
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    script = f"{RANK}\nTIMEOUT = {timeout}\ndef body():\n{lines}\nmain()\n"
    with launched(folder, script, ranks=ranks, env={"LOG_RANK": "0,1,2"}) as process:
        status, out, error = finish(process, seconds=150)
    out = out.removeprefix("listening\n")
    begin = float(out.split()[0]) if "." in out.partition("\n")[0] else 0.0
    return status, out, error.splitlines(), time.time() - begin


BEGIN = "if rank == 0: print(time.time(), flush=True)\n"


@pytest.mark.nightly
def test_a_stopped_rank_is_named(tmp_path: Path):
    body = BEGIN + "mark('forward', 7)\nif rank == 1:\n    time.sleep(1.5)\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
    status, _, errors, seconds = run(tmp_path, body + "mark('waiting', limited=False)\ntime.sleep(60)", ranks=3)
    assert (status, len(errors)) == (1, 1)
    assert errors[0].startswith("error: rank 1 on ")
    place = "its last heartbeat came from 'step 7: forward'"
    assert f" has given no sign of life for 4 s; {place}; Python stacks: " in errors[0]
    assert seconds < 1.5 + 4 + 10
    assert "in body" in (tmp_path / "run" / "stacks" / "rank-00000.txt").read_text()


@pytest.mark.nightly
def test_the_rank_behind_the_others_is_named(tmp_path: Path):
    """The others wait for it in a collective, so that all ranks stand still."""
    body = BEGIN + "mark('waiting for data', 7)\nif rank == 1: time.sleep(60)\nmark('forward')\ntime.sleep(60)"
    status, _, errors, seconds = run(tmp_path, body, ranks=3)
    assert (status, len(errors)) == (1, 1)
    assert errors[0].startswith("error: rank 1 on ")
    assert " hangs at 'step 7: waiting for data' for " in errors[0]
    assert "while others wait for it at 'step 7: forward'" in errors[0]
    assert seconds < 4 + 10
    assert {file.name for file in (tmp_path / "run" / "stacks").iterdir()} == {f"rank-0000{n}.txt" for n in range(3)}


@pytest.mark.nightly
def test_ranks_that_hang_at_the_same_place(tmp_path: Path):
    _, _, errors, _ = run(tmp_path, "mark('forward', 7)\ntime.sleep(60)")
    assert [error.split(" for ")[0] for error in errors] == ["error: all ranks hang at 'step 7: forward'"]


@pytest.mark.nightly
def test_slow_ranks_do_not_hang(tmp_path: Path):
    """What makes progress, or waits for what makes progress, or has taken as long before, may go on."""
    body = """
if rank == 0:
    mark("writing")
    for _ in range(12):
        time.sleep(0.5)
        alive()
else:
    mark("waiting for the other rank", limited=False)
    time.sleep(6)
progress._longest["forward"] = 9.0
mark("forward")
time.sleep(6)
"""
    status, out, errors, _ = run(tmp_path, body)
    assert (status, sorted(out.splitlines()), errors) == (0, ["0 is done", "1 is done"], [])


def test_a_suspended_process_does_not_hang(monkeypatch):
    """Its clock stands still meanwhile, since it could not move."""
    seconds = iter([10.0, 11.0, 12.0, 500.0, 501.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(progress, "_seen", 9.0)
    monkeypatch.setattr(progress, "_suspended", 0.0)
    assert [progress.now() for _ in range(5)] == [10, 11, 12, 12, 13]


def test_limits_of_activities(monkeypatch):
    """The first time that something is done it may compile, as the first step and the first validation do."""
    clock = [0.0]
    monkeypatch.setattr(progress, "now", lambda: clock[0])
    monkeypatch.setattr(progress, "train_timeout", None)
    for durations in ("_longest", "_longest_at_first"):
        monkeypatch.setattr(progress, durations, {})
    monkeypatch.setattr(progress, "current", progress.Activity())

    def ends_after(name: str, seconds: float) -> bool:
        """Return whether the activity is over then, and was not a second before."""
        progress.mark(name)
        clock[0] += seconds - 1
        early = progress.is_over(300)
        clock[0] += 2
        return not early and progress.is_over(300)

    assert ends_after("forward", 300)  # 301 s, and the limit is now 300 s longer than that
    progress.first_step_done(100)
    assert ends_after("forward", 100 + 301)
    assert ends_after("validation", 300)
    progress.mark("forward")
    clock[0] += 5
    assert ends_after("validation", 100 + 301)
    progress.mark("waiting", limited=False)
    clock[0] += 1e6
    assert not progress.is_over(300)
    progress.alive()
    assert str(progress.current) == "waiting"


def test_lines_about_long_work_have_no_control_characters(monkeypatch, capsys):
    """They may have the name of a folder, or what the environment calls the first node."""
    monkeypatch.setattr(progress, "INTERVAL_SECONDS", 0.01)
    with progress.progress("verifying a\x1b[2J\nb") as advance:
        advance(1, "\x1b]0;title\x07")
        time.sleep(0.5)
    last = capsys.readouterr().err.split("\n")[-2]
    assert last.startswith("verifying a\\x1b[2J\\nb: 1 , 0:00:0")
    assert last.endswith("; \\x1b]0;title\\x07")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("a\x1b[2J\tb\n\x9b"),
        RuntimeError("Connection closed by peer a\x1b[2J\tb\n\x9b"),
        TrainingError("a\x1b[2J\tb\n\x9b"),
    ],
    ids=["traceback", "lost connection", "line"],
)
def test_what_ends_a_rank_is_printed_without_control_characters(error: Exception, capfd):
    """The texts of other libraries' exceptions may be those of a file; those of other ranks come over the network."""
    alone = mock.Mock(**{"launch.world_size": 1})
    for dog in (None, alone):
        alone.end = lambda message, status, **_: failure.process.print_to_console(message)
        with mock.patch.object(failure.process, "exit_process"):
            failure.fail(error, dog)
    printed = capfd.readouterr().err
    assert r"a\x1b[2J" in printed
    assert r"\x9b" in printed
    assert printable(printed, keep="\n\t") == printed


@pytest.mark.nightly
def test_the_first_error_is_the_last_line(tmp_path: Path):
    """The other rank, which hangs because of it, ends within seconds. What it prints until then comes before."""
    body = f"{BEGIN}if rank == 1: raise ValueError('broken')\n"
    body += "for _ in range(20): time.sleep(0.1), print('step', file=sys.stderr, flush=True)\n"
    body += "\nraise RuntimeError('gloo: Connection closed by peer')"
    status, out, errors, seconds = run(tmp_path, body, timeout=20)
    assert (status, errors[-1]) == (1, "ValueError: broken")
    assert len(out.splitlines()) == 1
    assert "step" in errors
    errors = [line for line in errors if line != "step"]
    assert errors[0].startswith("error: rank 1 on ")
    assert "Traceback" in errors[1]
    assert (tmp_path / "logs" / "rank-00000.log").read_text().endswith("\n".join(errors) + "\n")
    assert seconds < 20


ERRORS = {
    "training": (TrainingError("step 3: the loss is nan"), "error: step 3: the loss is nan", 1, False),
    "config": (ConfigError(["a.toml: wrong", "b.toml: wrong"]), "error: a.toml: wrong\nerror: b.toml: wrong", 2, False),
    "gloo": (RuntimeError("[pair.cc:1] Connection closed by peer"), "Connection closed by peer", 1, True),
    "path": (FileNotFoundError("/data/gloo/timed out"), "FileNotFoundError: /data/gloo/timed out", 1, False),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_an_error_is_reported_as(case: str):
    error, last, status, lost = ERRORS[case]
    dog = mock.Mock(**{"launch.rank": 3, "launch.world_size": 8})
    with mock.patch.object(failure.process, "exit_process"):
        failure.fail(error, dog)
    ((message, reported), options) = dog.end.call_args
    assert message.endswith(last)
    assert (reported, options) == (status, {"lost_connection": lost})
