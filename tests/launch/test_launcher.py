"""The launcher and its ranks: signals, exit statuses, restarts, output. The ranks here do not train."""

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.launches import ROOT, finish, launched, wait_until

RANK = """
import os, resource, sys, time
from pathlib import Path
from titanlite.launch import process
process.start_rank()
process.signals.nothing_to_save = False
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
Path(f"{attempt}-{rank}").touch()
while not Path(f"{attempt}-{1 - rank}").exists():
    time.sleep(0.01)  # both listen to signals
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
print("rank", rank, "started", soft == hard, flush=True)
"""
WAIT = """
while not process.signals.stopping:
    time.sleep(0.01)
    if process.signals.saves:
        print("saves", flush=True)
        process.signals.saves = 0
print("stops", flush=True)
"""
FIRST_LINES = "listening\n", "rank 0 started True\n"  # the soft limit on open files is the hard one

Launch = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """A function that starts the launcher with two ranks, which run a script."""
    with contextlib.ExitStack() as stack:

        def start(
            script: str, *, max_restarts: int = 0, hangup: signal.Handlers = signal.SIG_DFL
        ) -> subprocess.Popen[str]:
            def before() -> None:
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # whatever the tests were started with
                signal.signal(signal.SIGHUP, hangup)
                resource.setrlimit(resource.RLIMIT_NOFILE, (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

            options = {"max_restarts": max_restarts, "preexec_fn": before, "grace": 1}
            return stack.enter_context(launched(tmp_path, RANK + script, **options))

        yield start


def wait_for_ranks(process: subprocess.Popen[str]) -> None:
    assert (process.stdout.readline(), process.stdout.readline()) == FIRST_LINES


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.nightly)])
def test_an_interrupt_and_a_hangup_stop(launch: Launch, number: signal.Signals):
    process = launch(WAIT)
    wait_for_ranks(process)
    process.send_signal(number)
    assert finish(process) == (0, "stops\n", "")


def test_a_signal_that_a_library_handles_stops_nothing(tmp_path: Path):
    """Every signal with a handler in Python wakes the thread that reads them, as SIGCHLD of torch's DataLoader."""
    script = """
import os, signal
from titanlite.launch.process import Signals
handled, received = [], []
signal.signal(signal.SIGUSR2, lambda number, frame: handled.append(number))
Signals().listen(received.append)
for number in (signal.SIGUSR2, signal.SIGTERM):
    os.kill(os.getpid(), number)
while signal.SIGTERM not in received:
    pass
print(len(handled), *received)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr) == (f"1 {signal.SIGTERM.value}\n", "")


@pytest.mark.nightly
def test_under_nohup_a_hangup_is_ignored_and_other_signals_are_not(launch: Launch):
    process = launch(WAIT, hangup=signal.SIG_IGN)
    wait_for_ranks(process)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "saves\n"
    process.send_signal(signal.SIGTERM)
    assert finish(process) == (0, "stops\n", "")


@pytest.mark.nightly
def test_a_second_interrupt_ends_the_ranks_at_once(launch: Launch):
    process = launch("while not process.signals.stopping: time.sleep(0.01)\nprint('stops', flush=True)\ntime.sleep(60)")
    wait_for_ranks(process)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "stops\n"
    time.sleep(0.6)  # within half a second they count as one
    process.send_signal(signal.SIGINT)
    assert finish(process) == (1, "", "interrupted twice: ended without saving\n")


def test_a_stop_before_there_are_ranks_ends_the_launcher(launch: Launch):
    process = launch(WAIT)
    assert process.stdout.readline() == "listening\n"  # now it imports torch
    process.send_signal(signal.SIGTERM)
    assert finish(process) == (0, "", "asked to stop before the ranks were started: nothing to save\n")


@pytest.mark.nightly
def test_the_status_of_a_rank_is_the_launchers(launch: Launch, tmp_path: Path):
    """Lines of all ranks are in files, and those of rank 0 on the console too."""
    script = "process.print_to_console(f'from {rank}')\nif rank == 1: sys.exit(2)\ntime.sleep(60)"
    status, out, error = finish(launch(script, max_restarts=3))
    assert status == 2
    assert out == "".join(FIRST_LINES), "a wrong config is not started again"
    assert sorted(error.splitlines()) == ["from 0", "from 1"]
    for rank in (0, 1):
        assert lines_of_one_start(tmp_path / "logs", rank) == f"rank {rank} started True\nfrom {rank}\n"


def lines_of_one_start(logs: Path, rank: int) -> str:
    """Return what is in a rank's file after the line with the date of its only start."""
    first, _, lines = (logs / f"rank-{rank:05d}.log").read_text().partition("\n")
    assert re.fullmatch(r"started \d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}", first)
    return lines


LATER = "time.sleep(0.5)\nprint('checkpoint step-3 was not finished', file=sys.stderr, flush=True)\nsys.exit(1)"


def test_a_killed_rank_is_named_in_the_last_line(launch: Launch, tmp_path: Path):
    """Another rank prints lines until it ends, as when it saves."""
    status, _, error = finish(launch(f"if rank == 1: os.kill(os.getpid(), 9)\n{LATER}"))
    assert status == 1
    first, last = error.splitlines()
    assert first == "checkpoint step-3 was not finished"
    assert last.startswith("error: rank 1 on ")
    assert "was killed by SIGKILL" in last
    assert (tmp_path / "logs" / "rank-00001.log").read_text().splitlines()[-1] == last


@pytest.mark.nightly
def test_a_rank_that_fails_at_its_start_is_named_in_the_last_line(launch: Launch, tmp_path: Path):
    """Before it has a watchdog, as by an import. Its traceback is in its file, since its lines are not shown."""
    status, _, error = finish(launch(f"if rank == 1: import no_such_module\n{LATER}"))
    assert status == 1
    log = tmp_path / "logs" / "rank-00001.log"
    last = error.splitlines()[-1]
    assert last == f"error: rank 1 on {socket.gethostname()} ended with status 1; logs/{log.name} says why"
    assert log.read_text().splitlines()[-1] == "ModuleNotFoundError: No module named 'no_such_module'"


@pytest.mark.nightly
def test_rank_0s_lines_are_in_its_file_though_it_is_killed(launch: Launch, tmp_path: Path):
    _, _, error = finish(launch("print('a\\nb') or os.kill(os.getpid(), 9) if rank == 0 else time.sleep(60)"))
    assert lines_of_one_start(tmp_path / "logs", 0) == f"{FIRST_LINES[1]}a\nb\n{error}"


def test_under_torchrun_a_rank_keeps_its_lines_when_it_knows_its_folder(tmp_path: Path):
    script = "from titanlite.launch import process\nprocess.start_rank()\n"
    script += "process.keep_log('run/logs')\nprint('a line')\nprocess.print_to_console('the error')\n"
    script += "process.print_to_console('the error of another rank', hidden=True)"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RANK": "3", "WORLD_SIZE": "4"}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("a line\n", "the error\n")
    expected = "a line\nthe error\nthe error of another rank\n"
    assert lines_of_one_start(tmp_path / "run" / "logs", 3) == expected


def test_ranks_are_started_again(launch: Launch):
    status, out, error = finish(launch("sys.exit(1 if attempt < 1 and rank == 0 else 0)", max_restarts=1))
    assert (status, out) == (0, "".join([*FIRST_LINES, FIRST_LINES[1]]))
    failed = f"error: rank 0 on {socket.gethostname()} ended with status 1; logs/rank-00000.log says why"
    assert error.splitlines() == [failed, "restart 1 of 1"]


@pytest.mark.nightly
def test_ranks_are_not_started_again_too_often(launch: Launch):
    assert finish(launch("sys.exit(1)", max_restarts=1))[:2] == (1, "".join([*FIRST_LINES, FIRST_LINES[1]]))


@pytest.mark.nightly
def test_ranks_end_with_their_launcher(launch: Launch):
    process = launch("print(os.getpid(), flush=True)\ntime.sleep(60)")
    wait_for_ranks(process)
    rank = Path(f"/proc/{int(process.stdout.readline())}")
    process.kill()
    wait_until(lambda: not rank.exists() or "\nState:\tZ" in (rank / "status").read_text(), "the end of the rank", 5)
