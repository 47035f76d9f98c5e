"""Launches of ranks that run a script in place of training."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LAUNCHER = """
import sys
from titanlite.config import load_values
from titanlite.config.launch import raise_open_file_limit
from titanlite.launch.launcher import environment_of_ranks, launch_variables
from titanlite.launch.other_processes import listen_as_launcher
signals = listen_as_launcher()
print("listening", flush=True)
from titanlite.launch import agent
script, ranks, max_restarts, agent.SECONDS_AFTER_A_FAILURE = sys.argv[1], *map(int, sys.argv[2:])
raise_open_file_limit()
environment = environment_of_ranks(ranks) | launch_variables(load_values({"job": {"dump_folder": "."}}, "test", []))
sys.exit(agent.run_ranks([sys.executable, "-c", script], ranks, environment, signals, max_restarts=max_restarts))
"""


@contextlib.contextmanager
def launched(
    folder: Path, script: str, *, ranks: int = 2, max_restarts: int = 0, grace: int = 7, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Start the launcher, and kill it with its ranks after the body. Its first line is "listening".

    Args:
        folder: the working folder, and that of the lines of ranks that are not shown.
        grace: seconds that the other ranks have to end after one has failed.
        options: of subprocess.Popen.
    """
    command = [sys.executable, "-c", LAUNCHER, script, str(ranks), str(max_restarts), str(grace)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | options.pop("env", {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes, **options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)  # its ranks end with it
        process.communicate()


def finish(process: subprocess.Popen[str], seconds: float = 120) -> tuple[int, str, str]:
    """Wait for the end of a process, and return its status, output and errors."""
    out, error = process.communicate(timeout=seconds)
    return process.returncode, out, error


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)
