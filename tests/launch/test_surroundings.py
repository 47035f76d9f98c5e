"""Environment, console and the user's account, whatever they are: they fail no run, and hide no error."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.launch.test_cli import run
from tests.test_train import SMALL
from titanlite.config import ConfigError, Launch
from titanlite.config.launch import require_torchft
from titanlite.config.schema import Comm
from titanlite.launch import agent, failure, launcher, process, process_group

ROOT = Path(__file__).parents[2]
STALE = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
"""What a notebook that was a rank has left."""
UNKNOWN_USER = "unshare", "--user", "--map-user=54321"
"""The beginning of a command of a user who is in no password database."""
NO_NAMES = [f"--unset={name}" for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME")]

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
def test_an_error_has_its_line_in_an_environment_of_a_rank(command: str, tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "small.toml").write_text(SMALL.format(folder=tmp_path))
    monkeypatch.chdir(tmp_path)
    for name, value in STALE.items():
        monkeypatch.setenv(name, value)
    assert run(monkeypatch, *WRONG[command]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "RANK" not in os.environ


def test_a_script_without_ranks_is_the_only_one(monkeypatch, capfd):
    """LOCAL_RANK alone, or all variables of a rank without torchrun, do not make it one whose errors are hidden."""
    for name, value in STALE.items():
        monkeypatch.setenv(name, value)
    with mock.patch.object(process, "exit_process"):
        failure.fail(ConfigError(["one line"]), None)
    assert capfd.readouterr().err == "error: one line\n"
    monkeypatch.delenv("WORLD_SIZE")
    process.prepare(is_command=False)
    assert not {"RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} & os.environ.keys()


def test_torchruns_rank_keeps_its_variables(monkeypatch):
    for name, value in {**STALE, "TORCHELASTIC_RUN_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    process.prepare(is_command=True)
    assert STALE.items() <= os.environ.items()


# Variables that a launch reads ----------------------------------------------------------------------------------------

PLACE = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node-0.cluster"}
RIGHT = [
    {"MASTER_PORT": "tcp://10.0.0.1:29500"},  # a Kubernetes service named master; one node reads no port
    {**PLACE},
    {**PLACE, "MASTER_PORT": "1", "LOG_RANK": "0,1", "OMP_NUM_THREADS": "4,2", "JOB_ID": "größer 7"},
    {**PLACE, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "65535", "LOG_RANK": "1,9"},
    {**PLACE, "MASTER_ADDR": "fe80::1%eth0", "MASTER_PORT": "", "LOG_RANK": ""},
    {**PLACE, "NNODES": "1:4", "NODE_RANK": "3"},
    {"NODE_RANK": "5"},  # an allocation has it, each of whose nodes has a run of its own
]
WRONG_VALUES = {
    "MASTER_PORT": ["tcp://10.0.0.1:29500", "0", "99999", "65536", "-1", "http", "29500 ", "٣"],
    "MASTER_ADDR": ["tcp://10.0.0.1", "node0:29500", "node 0", "a,b", "node0\n", "http://node0/"],
    "NODE_RANK": ["two", "2", "-1", "1.0", "0x1"],
    "LOG_RANK": ["all", "2", "0;1", "0,", "-1", "0-1"],
    "LOGLEVEL": ["debug", "10", "nonsense"],  # torch's elastic agent has no line for these
    "OMP_NUM_THREADS": ["0", "-1", "four", "1.5", "4,"],
    "JOB_ID": ["a\nb", "\x1b[31m", "\udcff"],
}


def test_an_empty_number_of_threads_is_none(monkeypatch):
    """OpenMP would take all cores for each rank."""
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    launcher.require_place(os.environ)
    own = str(process.available_cores())
    assert [launcher.environment_of_ranks(ranks)["OMP_NUM_THREADS"] for ranks in (1, 10**6)] == [own, "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launcher.environment_of_ranks(1)["OMP_NUM_THREADS"] == "3"


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


def test_a_wrong_port_is_found_before_any_rank(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "small.toml").write_text(SMALL.format(folder=tmp_path))
    variables = PLACE | {
        "NODE_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "tcp://10.0.0.1:29500",
        "NGPU": "1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launcher, "listen_as_launcher", lambda: None)
    expected = 'error: environment: MASTER_PORT = "tcp://10.0.0.1:29500": expected an integer >= 1 and <= 65535\n'
    arguments = [str(tmp_path / "small.toml"), "--parallelism.data_parallel_shard_degree=-1"]
    assert (run(monkeypatch, "train", *arguments), capsys.readouterr().err) == (2, expected)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("port", ["tcp://10.0.0.1:29500", "", "0"])
def test_ranks_that_are_started_by_hand_need_a_port(port: str, tmp_path: Path, monkeypatch):
    """One rank needs none: Kubernetes sets MASTER_PORT for a service named master."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", port)
    rejected = pytest.raises(ConfigError, match=f'MASTER_ADDR:MASTER_PORT = "localhost:{port}": expected')
    with rejected, process_group.process_group(Launch(0, 0, 2, 2, 0), Comm(), str(tmp_path)):
        pass


@pytest.mark.parametrize("address", ["", "http://", "http://host:port", "http://a b:29510", "tcp://host:29510"])
def test_a_wrong_address_of_the_lighthouse_is_one_line(address: str, monkeypatch):
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", address)
    with pytest.raises(ConfigError, match=r"TORCHFT_LIGHTHOUSE = .*: expected the address of torchft's lighthouse"):
        require_torchft()


NO_ADDRESS = socket.gaierror(socket.EAI_NONAME, "Name or service not known"), UnicodeError("label empty or too long")


@pytest.mark.parametrize("error", NO_ADDRESS, ids=["unknown", "no name"])
def test_a_name_without_an_address_is_one_line(error: Exception, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", mock.Mock(side_effect=error))
    with pytest.raises(ConfigError, match=r"MASTER_ADDR = nowhere: no way to this address: (Name or|label)"):
        agent._address_towards("nowhere", 29500, seconds=0)


# The console and the account ------------------------------------------------------------------------------------------


def close(*numbers: int) -> Callable[[], None]:
    return lambda: [os.close(number) for number in numbers] and None


def full_pipe(*, reader_gone: bool) -> int:
    """Return the end of a full pipe that nobody reads."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while os.write(writer, bytes(4096)):
            pass
    except BlockingIOError:
        os.set_blocking(writer, True)
    if reader_gone:
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
    "reader gone": lambda: {"stdout": full_pipe(reader_gone=True), "stderr": full_pipe(reader_gone=True)},
    "stalled": lambda: {"stdout": full_pipe(reader_gone=False), "stderr": full_pipe(reader_gone=False)},
    "no HOME": lambda: {"before": ["env", *NO_NAMES]},
    "unknown user": lambda: {"before": ["env", *NO_NAMES, *UNKNOWN_USER]},
}


PRINTS = """
import getpass, os, pathlib, sys
from titanlite.launch import process
process.SECONDS_OF_A_STALL = 0.1
process.prepare(is_command=True)
sys.stdout, sys.stderr = process.UnfailingStream(sys.stdout), process.UnfailingStream(sys.stderr)
for number in range(3):
    print("Größe 东京")
    print("Größe 东京", file=sys.stderr)
process.print_to_console("Größe 东京")
assert open(os.devnull).fileno() > 2
assert pathlib.Path.home() and getpass.getuser()
process.exit_process(7)
"""
"""A process that prints, opens a file and asks who its user is, as a rank and its libraries do."""


FEW = "ascii", "no streams", "full disk", "reader gone", "stalled", "unknown user"


@pytest.mark.parametrize(
    "console", [pytest.param(name, marks=() if name in FEW else pytest.mark.nightly) for name in CONSOLES]
)
def test_no_console_and_no_account_fails_a_process(console: str):
    if console == "unknown user" and subprocess.run([*UNKNOWN_USER, "true"], check=False).returncode:
        pytest.skip("this machine has no user namespaces")
    options = CONSOLES[console]()
    command = [*options.pop("before", []), sys.executable, "-c", PRINTS]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | options.pop("env", {})
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    done = subprocess.run(command, env=environment, timeout=60, check=False, **pipes)
    assert done.returncode == 7, done.stderr
    lines = (done.stdout or b"").splitlines()
    assert len(lines) == (3 if pipes["stdout"] == subprocess.PIPE and console not in ("no output", "no streams") else 0)
    assert len(set(lines)) <= 1
    assert console != "ascii" or lines[0] == rb"Gr\xf6\xdfe \u4e1c\u4eac"


@pytest.mark.nightly
@pytest.mark.parametrize("console", [*CONSOLES])
@pytest.mark.parametrize("arguments", [[], ["--training.stepz=ß"]], ids=["run", "error"])
def test_no_console_and_no_account_fails_a_run(console: str, arguments: list[str], tmp_path: Path):
    if console == "unknown user" and subprocess.run([*UNKNOWN_USER, "true"], check=False).returncode:
        pytest.skip("this machine has no user namespaces")
    (tmp_path / "small.toml").write_text(SMALL.format(folder=tmp_path))
    options = CONSOLES[console]()
    more = ["--job.description=Größe 东京", "--training.steps=1", "--checkpoint.enable", *arguments]
    command = [*options.pop("before", []), sys.executable, "-m", "titanlite", "train", "small.toml", *more]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | options.pop("env", {})
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    done = subprocess.run(command, cwd=tmp_path, env=environment, timeout=120, check=False, **pipes)
    assert done.returncode == (2 if arguments else 0), done.stderr
    assert b"Traceback" not in (done.stdout or b"") + (done.stderr or b"")
    assert bool(list(tmp_path.glob("run/checkpoint/step-1*"))) != bool(arguments)
