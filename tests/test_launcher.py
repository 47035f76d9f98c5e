"""The launcher and its ranks: signals, exit statuses, restarts, output. The ranks here do not train."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAUNCHER = """
import os, sys
from titanlite.launcher import environment_of_ranks
from titanlite.config.launch import raise_open_file_limit
from titanlite.reliability.process import LauncherSignals
signals = LauncherSignals()
signals.listen(signals.received)
from pathlib import Path
from titanlite.reliability import agent
agent.SECONDS_AFTER_A_FAILURE = 1
raise_open_file_limit()
environment = environment_of_ranks(2, Path("."))
sys.exit(agent.run_ranks([sys.executable, "-c", sys.argv[1]], 2, environment, signals, max_restarts=int(sys.argv[2])))
"""
RANK = """
import os, resource, sys, time
from titanlite.reliability import process
process.start_rank()
process.signals.nothing_to_save = False
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
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
FIRST_LINE = "rank 0 started True\n"

Launch = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """A function that starts the launcher with two ranks, which run a script."""

    def start(script: str, *, max_restarts: int = 0, hangup: signal.Handlers = signal.SIG_DFL) -> subprocess.Popen[str]:
        def before() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # whatever the tests were started with
            signal.signal(signal.SIGHUP, hangup)
            resource.setrlimit(resource.RLIMIT_NOFILE, (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

        return subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, RANK + script, str(max_restarts)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            preexec_fn=before,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, error = process.communicate(timeout=30)
    return process.returncode, out, error


def test_signals_are_passed_on(launch: Launch):
    process = launch(WAIT)
    assert process.stdout.readline() == FIRST_LINE, "the soft limit on open files is not the hard one, or not rank 0"
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "saves\n"
    process.send_signal(signal.SIGTERM)
    assert finish(process) == (0, "stops\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_interrupt_and_a_hangup_stop(launch: Launch, number: signal.Signals):
    process = launch(WAIT)
    process.stdout.readline()
    process.send_signal(number)
    assert finish(process) == (0, "stops\n", "")


def test_a_second_interrupt_ends_the_ranks_at_once(launch: Launch):
    process = launch("print('busy', flush=True)\ntime.sleep(60)")
    assert process.stdout.readline() + process.stdout.readline() == f"{FIRST_LINE}busy\n"
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)  # two at once may count as one
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert finish(process) == (1, "", "interrupted twice: ended without saving\n")


def test_under_nohup_a_hangup_is_ignored(launch: Launch):
    process = launch(WAIT, hangup=signal.SIG_IGN)
    process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert finish(process) == (0, "stops\n", "")


def test_a_signal_to_torchrun_before_there_are_ranks_ends_it(launch: Launch):
    process = launch(WAIT)
    time.sleep(0.5)  # it imports torch
    process.send_signal(signal.SIGTERM)
    assert finish(process)[::2] == (0, "asked to stop before the ranks were started: nothing to save\n")


def test_the_status_of_a_rank_is_the_launchers(launch: Launch):
    begin = time.monotonic()
    script = "print('attempt', attempt)\nsys.exit(2) if rank == 1 else time.sleep(60)"
    status, out, error = finish(launch(script, max_restarts=3))
    assert (status, error) == (2, "")
    assert out.count("started") == 1, "a wrong config is not started again"
    assert time.monotonic() - begin < 15, "the other rank is ended"


def test_a_killed_rank_is_named(launch: Launch):
    status, _, error = finish(launch("if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(1)"))
    assert status == 1
    assert error.startswith("error: rank 1 on ")
    assert "was killed by SIGKILL" in error
    assert error.count("\n") == 1


def test_ranks_are_started_again(launch: Launch):
    status, out, error = finish(launch("sys.exit(1 if attempt < 2 and rank == 0 else 0)", max_restarts=2))
    assert (status, out, error) == (0, FIRST_LINE * 3, "")
    assert finish(launch("sys.exit(1)", max_restarts=1))[:2] == (1, FIRST_LINE * 2)


def test_ranks_end_with_their_launcher(launch: Launch):
    process = launch("print(os.getpid(), flush=True)\ntime.sleep(60)")
    process.stdout.readline()
    rank = int(process.stdout.readline())
    process.kill()
    process.wait()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{rank}").exists() and "\nState:\tZ" not in Path(f"/proc/{rank}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_lines_of_ranks_that_are_not_shown_are_in_files(launch: Launch, tmp_path: Path):
    status, out, error = finish(launch("process.print_to_console(f'from {rank}')"))
    assert (status, out) == (0, FIRST_LINE)
    assert sorted(error.splitlines()) == ["from 0", "from 1"]
    assert (tmp_path / "rank-00001.log").read_text() == "rank 1 started True\n"
