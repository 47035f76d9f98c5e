"""No process of a run or a command imports a file of the user's folder that has the name of a module of Python's."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.test_train import SMALL
from titanlite.launch.safe_path import keep_children_safe

ROOT = Path(__file__).parents[2]
MODULES = "array", "copy", "dataclasses", "pickle", "queue", "random", "selectors", "shutil", "socket", "threading"
"""Modules that ranks and helpers import, some of them before their first line."""


def write_modules(folder: Path) -> None:
    """Write files that have the names of modules, and end the process that imports them."""
    for name in MODULES:
        (folder / f"{name}.py").write_text(f"import os\nos.write(2, b'the file {name}.py was imported\\n')\n1 / 0\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with such files, and with a config."""
    write_modules(tmp_path)
    (tmp_path / "small.toml").write_text(SMALL.format(folder=tmp_path))
    return tmp_path


def run(folder: Path, *command: str, **environment: str) -> str:
    """Run a command in a folder and return its output."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    options = {"env": inherited | environment, "stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(command, cwd=folder, timeout=200, check=False, **options)
    assert "was imported" not in done.stdout + done.stderr, done.stderr
    assert done.returncode == 0, done.stderr
    return done.stdout


def command(tmp_path: Path) -> str:
    """Return a script like the one that pip installs."""
    (tmp_path / "commands").mkdir()
    script = tmp_path / "commands" / "titanlite"
    script.write_text(f"#!{sys.executable}\nimport sys\nsys.path.append({str(ROOT)!r})\n")
    with script.open("a") as file:
        file.write("from titanlite.launch.cli import main\nif __name__ == '__main__':\n    main()\n")
    script.chmod(0o755)
    return str(script)


def test_a_module_of_the_package(folder: Path):
    """python -m puts the working directory first on the path."""
    run(folder, sys.executable, "-m", "titanlite", "--version", PYTHONPATH=str(ROOT))


@pytest.mark.nightly
def test_ranks(folder: Path):
    run(folder, command(folder), "train", "small.toml", "--training.steps=1")


@pytest.mark.parametrize("path", ["", ":", ":/a::/b:", f"/a:{ROOT}"])
@pytest.mark.parametrize("installed", [True, False])
def test_no_entry_of_pythonpath_is_empty(path: str, installed: bool, monkeypatch):
    """An empty entry is the working directory, as after PYTHONPATH=$PYTHONPATH:/a. The folder of a clone, where a user
    may work, is among them only if children would not find the package otherwise."""
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    spec = SimpleNamespace(origin=str(ROOT / "titanlite" / "__init__.py")) if installed else None
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=lambda *_: spec)])
    keep_children_safe()
    expected = [each for each in path.split(":") if each]
    if not installed and str(ROOT) not in expected:
        expected.insert(0, str(ROOT))
    assert (os.environ["PYTHONSAFEPATH"], os.environ["PYTHONPATH"]) == ("1", ":".join(expected))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "arguments",
    [
        ["parity", "small.toml", "--steps=1"],
        ["plan", "small.toml", "--parallelism.data_parallel_shard_degree=2"],
        ["tokenize", "small.toml"],
        ["calibrate", "rates.toml", "--ranks=2"],
    ],
    ids=["parity", "plan", "tokenize", "calibrate"],
)
def test_helpers_of_commands(folder: Path, arguments: list[str]):
    run(folder, command(folder), *arguments)


@pytest.mark.nightly
def test_an_uninstalled_clone(folder: Path):
    """It starts in a folder with such files, and its ranks find the package."""
    run(folder, str(ROOT / "run_train.sh"), "small.toml", "--training.steps=1", PYTHON=sys.executable)


@pytest.mark.nightly
def test_a_script_of_the_clone_is_started_by_torchrun(folder: Path):
    """torchrun itself is the user's; what it starts is titanlite's."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run(ROOT, *torchrun, str(ROOT / "train.py"), str(folder / "small.toml"), "--training.steps=1")
