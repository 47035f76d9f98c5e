"""Environment, console and the user's account, whatever they are: they fail no run, and hide no error."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.test_train import SMALL
from titanlite import launcher
from titanlite.config import ConfigError
from titanlite.config.launch import require_torchft
from titanlite.launch import agent

ROOT = Path(__file__).parents[2]
STALE = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
"""What a notebook that was a rank has left."""
UNKNOWN_USER = "unshare", "--user", "--map-user=54321"
"""The beginning of a command of a user who is in no password database."""

NO_NAMES = [f"--unset={name}" for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME")]


def start(folder: Path, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start a command in a folder that has the config small.toml."""
    (folder / "small.toml").write_text(SMALL.format(folder=folder))
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | options.pop("env", {})
    command = [*options.pop("before", []), sys.executable, "-m", "titanlite", *arguments]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen(command, cwd=folder, env=environment, **pipes)


def errors_of(folder: Path, *arguments: str, **options: Any) -> tuple[int, list[str]]:
    """Return the status of a command, and its lines of errors."""
    process = start(folder, *arguments, **options)
    _, error = process.communicate(timeout=120)
    return process.returncode, error.decode().splitlines()


# A rank's variables in the environment of what is no rank -------------------------------------------------------------

WRONG = {
    "train": ["train", "small.toml", "--training.stepz=3"],
    "config": ["config", "small.toml", "--training.stepz=3"],
    "plan": ["plan", "small.toml", "--training.stepz=3"],
    "parity": ["parity", "small.toml", "--training.stepz=3"],
    "tokenize": ["tokenize", "small.toml", "--training.stepz=3"],
    "calibrate": ["calibrate", "rates.txt"],
    "generate": ["generate", "no_such_folder"],
    "eval": ["eval", "no_such_folder", "small.toml"],
}


@pytest.mark.parametrize("command", [*WRONG])
def test_an_error_has_its_line_in_an_environment_of_a_rank(command: str, tmp_path: Path):
    status, lines = errors_of(tmp_path, *WRONG[command], env=STALE)
    assert (status, len(lines)) == (2, 1), lines
    assert lines[0].startswith("error: ")


def test_a_script_without_ranks_is_the_only_one(tmp_path: Path):
    """LOCAL_RANK alone does not make it the second rank of a node."""
    (tmp_path / "small.toml").write_text(SMALL.format(folder=tmp_path))
    command = [sys.executable, str(ROOT / "train.py"), "small.toml", "--training.stepz=3"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"LOCAL_RANK": "1"}, capture_output=True, text=True)
    assert done.returncode == 2
    assert "stepz" in done.stderr


# Variables that a launch reads ----------------------------------------------------------------------------------------

PLACE = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node-0.cluster"}
RIGHT = [
    {"MASTER_PORT": "tcp://10.0.0.1:29500"},  # a Kubernetes service named master; one node reads no port
    {**PLACE},
    {**PLACE, "MASTER_PORT": "1", "LOG_RANK": "0,1", "OMP_NUM_THREADS": "4,2", "JOB_ID": "größer 7"},
    {**PLACE, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "65535", "LOG_RANK": "1,9"},
    {**PLACE, "MASTER_ADDR": "fe80::1%eth0", "MASTER_PORT": "", "LOG_RANK": ""},
    {**PLACE, "NNODES": "1:4", "NODE_RANK": "3"},
    {"NODE_RANK": "5"},  # of an allocation, each of whose nodes has a run of its own
]
WRONG_VALUES = {
    "MASTER_PORT": ["tcp://10.0.0.1:29500", "0", "99999", "65536", "-1", "http", "29500 ", "٣"],
    "MASTER_ADDR": ["tcp://10.0.0.1", "node0:29500", "node 0", "a,b", "node0\n", "http://node0/"],
    "NODE_RANK": ["two", "2", "-1", "1.0", "0x1"],
    "LOG_RANK": ["all", "2", "0;1", "0,", "-1", "0-1"],
    "OMP_NUM_THREADS": ["0", "-1", "four", "1.5", "4,"],
    "JOB_ID": ["a\nb", "\x1b[31m", "\udcff"],
}


@pytest.mark.parametrize("environment", RIGHT)
def test_right_variables(environment: dict[str, str]):
    launcher.require_place(environment, ranks=2)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG_VALUES.items() for value in values]
)
def test_a_wrong_variable_is_one_line(name: str, value: str):
    with pytest.raises(ConfigError) as raised:
        launcher.require_place(PLACE | {name: value}, ranks=2)
    (problem,) = raised.value.problems
    assert problem.startswith(f"environment: {name} = ")
    assert problem.isprintable()


def test_a_wrong_port_is_found_before_any_rank(tmp_path: Path):
    variables = PLACE | {"NODE_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "tcp://10.0.0.1:29500"}
    status, lines = errors_of(tmp_path, "train", "small.toml", env=variables)
    expected = 'error: environment: MASTER_PORT = "tcp://10.0.0.1:29500": expected an integer >= 1 and <= 65535'
    assert (status, lines) == (2, [expected])


@pytest.mark.parametrize("address", ["", "http://", "http://host:port", "http://a b:29510", "tcp://host:29510"])
def test_a_wrong_address_of_the_lighthouse_is_one_line(address: str, monkeypatch):
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", address)
    with pytest.raises(ConfigError, match=r"TORCHFT_LIGHTHOUSE = .*: expected the address of torchft's lighthouse"):
        require_torchft()


def test_a_name_without_an_address_is_one_line(monkeypatch):
    def unknown(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match="MASTER_ADDR = nowhere: no way to this address: Name or service not known"):
        agent._address_towards("nowhere", 29500, seconds=0)


# The console and the account ------------------------------------------------------------------------------------------


def close(*numbers: int) -> Callable[[], None]:
    return lambda: [os.close(number) for number in numbers] and None


def gone() -> int:
    """Return the end of a full pipe that nobody reads."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while os.write(writer, bytes(4096)):
            pass
    except BlockingIOError:
        os.set_blocking(writer, True)
    os.close(reader)
    return writer


CONSOLES: dict[str, Callable[[], dict[str, Any]]] = {
    "ascii": lambda: {"env": {"PYTHONIOENCODING": "ascii"}},
    "latin-1": lambda: {"env": {"PYTHONIOENCODING": "latin-1"}},
    "LANG=C": lambda: {"env": {"LANG": "C", "LC_ALL": "C"}},
    "TERM=dumb": lambda: {"env": {"TERM": "dumb"}},
    "no output": lambda: {"preexec_fn": close(1)},
    "no errors": lambda: {"preexec_fn": close(2)},
    "no streams": lambda: {"preexec_fn": close(0, 1, 2)},
    "full disk": lambda: {"stdout": os.open("/dev/full", os.O_WRONLY), "stderr": os.open("/dev/full", os.O_WRONLY)},
    "reader gone": lambda: {"stdout": gone(), "stderr": gone()},
    "no HOME": lambda: {"before": ["env", *NO_NAMES]},
    "unknown user": lambda: {"before": ["env", *NO_NAMES, *UNKNOWN_USER]},
}


@pytest.mark.parametrize("console", [*CONSOLES])
@pytest.mark.parametrize("arguments", [[], ["--training.stepz=ß"]], ids=["run", "error"])
def test_no_console_and_no_account_fails_a_run(console: str, arguments: list[str], tmp_path: Path):
    if console == "unknown user" and subprocess.run([*UNKNOWN_USER, "true"], check=False).returncode:
        pytest.skip("this machine has no user namespaces")
    options = ["--job.description=Größe 东京", "--training.steps=1", "--checkpoint.enable", *arguments]
    process = start(tmp_path, "train", "small.toml", *options, **CONSOLES[console]())
    out, error = process.communicate(timeout=120)
    assert process.returncode == (2 if arguments else 0), error
    assert b"Traceback" not in (out or b"") + (error or b"")
    assert bool(list(tmp_path.glob("run/checkpoint/step-1*"))) != bool(arguments)
