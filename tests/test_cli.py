"""The `titanlite` command finds its subcommands, and each of them explains itself."""

import subprocess
import sys
from pathlib import Path

import pytest

from titanlite import cli
from titanlite.cli import COMMANDS

ROOT = Path(__file__).parents[1]


def titanlite(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "titanlite", *arguments], cwd=ROOT, capture_output=True, text=True)


def test_help_names_every_command():
    done = titanlite("--help")
    assert done.returncode == 0
    assert all(f"  {name} " in done.stdout for name in COMMANDS)
    assert titanlite().stdout == done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str):
    done = titanlite(command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"titanlite {command}" in done.stdout


def test_an_unknown_command_is_one_line():
    done = titanlite("trian", "debug")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "train, plan, calibrate, advise, parity, " in done.stderr


def test_config_prints_a_config_that_loads_to_the_same(tmp_path: Path):
    printed = titanlite("config", "debug", "--training.steps=7").stdout
    assert "steps = 7" in printed
    (tmp_path / "again.toml").write_text(printed)
    assert titanlite("config", str(tmp_path / "again.toml")).stdout == printed


def test_a_wrong_config_is_one_line_and_exit_status_2():
    done = titanlite("config", "debug", "--training.stepz=7")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "training.stepz" in line
    assert "did you mean training.steps?" in line


LONG = "a" * 5000


@pytest.mark.parametrize(
    "arguments",
    [
        ["checkpoint", LONG], ["generate", LONG, "text"], ["convert", LONG, "new"],
        ["eval", LONG, "--dataset=pydoc_topics"], ["export", LONG, "out"], ["config", f"{LONG}.toml"],
        ["train", f"{LONG}.toml"],
        ["tokenize", f"{LONG}.toml"], ["plan", f"{LONG}.toml"], ["config", "debug", f"--job.dump_folder={LONG}"],
    ],
    ids=lambda arguments: " ".join(arguments).replace(LONG, "LONG"),
)  # fmt: skip
def test_a_name_that_no_file_can_have_is_one_line(monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["titanlite", *arguments])
    monkeypatch.setattr(cli, "listen_as_launcher", lambda: None)
    monkeypatch.setattr("titanlite.launcher.listen_as_launcher", lambda: None)
    monkeypatch.setattr("titanlite.reliability.process.signals.listen", lambda received: None)
    monkeypatch.setattr("titanlite.reliability.process.exit_process", sys.exit)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert LONG in line
    assert "File name too long" in line or "each name at most 255" in line


def test_the_reference_of_all_options_is_up_to_date(tmp_path: Path):
    target = tmp_path / "config.md"
    assert titanlite("config", "--reference", str(target)).returncode == 0
    assert target.read_text() == (ROOT / "docs" / "reference" / "config.md").read_text()


def test_a_command_imports_nothing_heavy_for_its_help():
    code = "import sys; sys.argv = ['titanlite', '--help']\ntry:\n    import titanlite.cli; titanlite.cli.main()\n"
    code += "except SystemExit: pass\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
