"""The `titanlite` command finds its subcommands, and each of them explains itself."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from docs.build.config_page import PAGE, reference_markdown
from tests.helpers.cases import cases
from tests.helpers.launches import wait_until
from titanlite.config.errors import TrainingError
from titanlite.config.loader import printable, tomllib
from titanlite.launch import cli
from titanlite.launch.cli import COMMANDS

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "docs" / "reference" / "config.schema.json"


def titanlite(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "titanlite", *arguments], cwd=ROOT, capture_output=True, text=True)


def test_help_names_every_command():
    done = titanlite("--help")
    assert done.returncode == 0
    assert all(f"  {name} " in done.stdout for name in COMMANDS)
    assert titanlite().stdout == done.stdout


@cases("command", COMMANDS, always=["train", "calibrate", "diff", "tokenize", "config", "generate", "eval", "export"])
def test_every_command_has_help(command: str):
    done = titanlite(command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"titanlite {command}" in done.stdout


def test_an_unknown_command_is_one_line():
    done = titanlite("trian", "debug")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: titanlite trian: unknown command; did you mean train?\n"
    assert "expected one of train, plan, calibrate, advise, parity, " in titanlite("abacus").stderr


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("can't start new thread"),
        ImportError("x.so: failed to map segment from shared object"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_too_little_memory_is_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(sys, "argv", ["titanlite", "plan", "debug"])
    monkeypatch.setattr(cli, "run", mock.Mock(side_effect=error))
    monkeypatch.setattr(cli, "exit_process", sys.exit)
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: titanlite plan: out of memory: ")


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
        ["checkpoint", LONG], ["generate", LONG, "text"],
        ["eval", LONG, "--dataset=pydoc_topics"], ["export", LONG, "out"], ["config", f"{LONG}.toml"],
        ["train", f"{LONG}.toml"],
        ["tokenize", f"{LONG}.toml"], ["plan", f"{LONG}.toml"], ["config", "debug", f"--job.dump_folder={LONG}"],
    ],
    ids=lambda arguments: " ".join(arguments).replace(LONG, "LONG"),
)  # fmt: skip
def test_a_name_that_no_file_can_have_is_one_line(monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["titanlite", *arguments])
    monkeypatch.setattr(cli, "listen_as_launcher", lambda: None)
    monkeypatch.setattr("titanlite.launch.launcher.listen_as_launcher", lambda: None)
    monkeypatch.setattr("titanlite.launch.process.signals.listen", lambda received: None)
    monkeypatch.setattr(cli, "exit_process", sys.exit)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert LONG in line
    assert "File name too long" in line or "each name at most 255" in line


def test_the_reference_of_all_options_is_up_to_date():
    assert reference_markdown() == PAGE.read_text()


def problem_of_an_editor(file: Path, schema: dict[str, Any]) -> str:
    """Return what an editor would mark in a config: no schema in its first line, or an option that the schema lacks."""
    first, *_ = file.read_text().splitlines()
    if (file.parent / first.removeprefix("#:schema ")).resolve() != SCHEMA or not first.startswith("#:schema "):
        return first
    for name, values in tomllib.loads(file.read_text()).items():
        section = schema["properties"].get(name, {})
        section = schema["$defs"][section["$ref"].rpartition("/")[2]] if "$ref" in section else section
        if unknown := values.keys() - section.get("properties", {}).keys():
            return f"{name}.{min(unknown)}"
    return ""


def test_an_editor_finds_the_schema_of_every_shipped_config():
    schema = json.loads(SCHEMA.read_text())
    files = sorted((ROOT / "configs").rglob("*.toml"))
    assert len(files) > 20
    assert {str(file): found for file in files if (found := problem_of_an_editor(file, schema))} == {}


@pytest.mark.parametrize(
    "text",
    ["[job]\n", "#:schema ../config.schema.json\n", "{first}\n[trainin]\nsteps = 1\n", "{first}\n[model]\nx = 1\n"],
)
def test_a_config_that_an_editor_marks_is_found(text: str, tmp_path: Path):
    first = f"#:schema {os.path.relpath(SCHEMA, tmp_path)}"
    (tmp_path / "a.toml").write_text(text.format(first=first))
    assert problem_of_an_editor(tmp_path / "a.toml", json.loads(SCHEMA.read_text()))


def test_the_json_schema_is_up_to_date():
    assert titanlite("config", "--schema").stdout == (ROOT / "docs" / "reference" / "config.schema.json").read_text()


def test_config_prints_what_differs_between_two_configs_and_runs(tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    arguments = ("--training.steps=7", "--training.cache_folder=elsewhere", '--validation.generate_prompts=["a"]')
    (run / "config.toml").write_text("# torch 2.13\n" + titanlite("config", "debug", *arguments).stdout)
    done = titanlite("config", "debug", str(run))
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines() == [
        'training.cache_folder  "~/.cache/titanlite" -> "elsewhere"',
        "training.steps  120 -> 7",
        'validation.generate_prompts  [] -> ["a"]',
    ]
    same = titanlite("config", f"{run}/", str(run / "config.toml"))
    assert (same.returncode, same.stdout, same.stderr) == (0, "", "")


def test_config_prints_the_options_of_tables_that_differ(tmp_path: Path):
    table = '[[training.datasets]]\nname = "{}"\n'
    (tmp_path / "one.toml").write_text(table.format("a"))
    (tmp_path / "two.toml").write_text(table.format("a") + table.format("b") + "epochs = 2.0\n")
    lines = titanlite("config", str(tmp_path / "two.toml"), str(tmp_path / "one.toml")).stdout.splitlines()
    assert 'training.datasets.1.name  "b" -> unset' in lines
    assert "training.datasets.1.epochs  2.0 -> unset" in lines
    assert all(line.startswith("training.datasets.1.") for line in lines)


def test_a_wrong_config_is_not_compared(tmp_path: Path):
    (tmp_path / "wrong.toml").write_text("training.steps = 0")
    done = titanlite("config", "debug", str(tmp_path / "wrong.toml"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {tmp_path / 'wrong.toml'}: training.steps = 0: expected an integer >= 1\n"
    done = titanlite("config", "debug", "debug_tp", "--training.steps=7")
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected one config, got debug debug_tp" in done.stderr


def test_a_command_imports_nothing_heavy_for_its_help():
    light = [[], *([name] for name in COMMANDS if name != "checkpoint")]
    code = f"""
import sys
from titanlite.launch import cli
cli.exit_process = sys.exit
for arguments in {light}:
    sys.argv = ["titanlite", *arguments, "--help"]
    try:
        cli.main()
    except SystemExit as end:
        assert end.code == 0, arguments
    assert not {{"torch", "matplotlib"}} & set(sys.modules), arguments
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Wrong arguments -----------------------------------------------------------------------------------------------------

BIG = "1" + "0" * 30
LAYOUT = "advise --model debug --seq-len 8 --gpus"
WRONG: dict[str, tuple[list[str], str]] = {
    "an empty command": ([""], "unknown command"),
    "bytes that are not UTF-8": (
        ["train", "\udcff"],
        "command line: \\udcff: expected UTF-8 without control characters",
    ),
    "bytes in a value": (["config", "debug", "--job.dump_folder=\udcff"], "--job.dump_folder=\\udcff: expected UTF-8"),
    "escapes in a command": (["\x1b[31m"], "\\x1b[31m: expected UTF-8 without control characters"),
    "escapes in a key": (["config", "debug", "--job.\x1b]0;x\x07=1"], "--job.\\x1b]0;x\\x07=1: expected UTF-8"),
    "a bidirectional override": (["plan", "a\u202eb.toml"], "a\\u202eb.toml: expected UTF-8"),
    "an empty config": (["plan", ""], "expected one config, got none"),
    "help of a misspelled section": (
        ["train", "--help", "trainin"],
        "command line: --help trainin: an unknown section; did you mean training?",
    ),
    "two configs": (["parity", "a", "b"], "expected one config, got a b"),
    "an unknown flag of plan": (["plan", "debug", "--nope"], "--nope: expected --section.key=value"),
    "a flag without its value": (["plan", "debug", "--html"], "argument --html: expected one argument"),
    "a file without a folder": (
        ["plan", "debug", "--html", "/no/x.html"],
        "/no/x.html: expected a file in a folder that",
    ),
    "an empty file": (["plan", "debug", "--html", ""], "argument --html: : expected a file in a folder that exists"),
    "no steps": (["parity", "debug", "--steps", "0"], "argument --steps: 0: expected an integer >= 1"),
    "fewer than no steps": (["parity", "debug", "--steps=-1"], "argument --steps: -1: expected an integer >= 1"),
    "no dtype": (["parity", "debug", "--dtype", ""], "argument --dtype: invalid choice"),
    "advise without arguments": (["advise"], "the following arguments are required"),
    "no devices": ([*LAYOUT.split(), "0"], "argument --gpus: 0: expected an integer >= 1 and <= 16384"),
    "too many devices": ([*LAYOUT.split(), "1000000000"], "1000000000: expected an integer >= 1 and <= 16384"),
    "devices of many digits": ([*LAYOUT.split(), "9" * 5000], "expected an integer >= 1 and <= 16384"),
    "a file that is a folder": ([*LAYOUT.split(), "8", "--write", "/"], "/: expected a file in a folder that exists"),
    "calibrate without a file": (["calibrate"], "the following arguments are required: FILE.toml"),
    "calibrate without ranks": (
        ["calibrate", "x.toml", "--ranks", "0"],
        "argument --ranks: 0: expected an integer >= 1",
    ),
    "too many ranks": (["calibrate", "x.toml", "--ranks", BIG], f"argument --ranks: {BIG}: expected an integer >= 1"),
    "two folders": (["checkpoint", "a", "b"], "expected one folder"),
    "generate without a folder": (["generate"], "the following arguments are required: FOLDER"),
    "many tokens": (["generate", "/", "x", "--max-new-tokens", BIG], f"{BIG}: expected an integer >= 1"),
    "eval without a dataset": (["eval", "/"], "the following arguments are required: --dataset"),
    "a long sequence": (["eval", "/", "--dataset", "text", "--seq-len", BIG], f"{BIG}: expected an integer >= 1"),
    "export without a folder": (["export"], "the following arguments are required: CHECKPOINT, OUT"),
    "a length below 0": (["export", "a", "b", "--max-seq-len", "-1"], "-1: expected an integer >= 1"),
    "a number of many digits": (["config", "debug", f"--training.steps=0x{'f' * 6000}"], "more than 4300 digits"),
    "a rate that overflows": (
        ["config", "debug", "--optimizer.lr=1e400"],
        "optimizer.lr = inf: expected a finite number",
    ),
    "a price that overflows": (["plan", "debug", "--plan.price=1e400"], "plan.price = inf: expected a finite number"),
    "a length that is no number": (
        ["plan", "debug", "--training.seq_len=nan"],
        "seq_len = nan: expected an integer >= 1",
    ),
    "scores of too many bytes": (["plan", "debug", "--training.seq_len=2147483646"], "more bytes than an int64 counts"),
    "too many chunks": (
        ["plan", "debug", "--training.local_batch_size=2147483646"],
        "loss chunks: expected at most 4096",
    ),
    "too many parameters": (
        ["plan", "debug", "--model.dim=1073741824", "--model.ffn_dim=1073741824"],
        "float64 counts",
    ),
    "too large a product": (
        ["plan", "debug", "--training.global_batch_size=1073741824", "--training.seq_len=16777216"],
        "18014398509481984 tokens in a step: expected at most 9007199254740992",
    ),
    "too many ranks in all": (
        ["plan", "debug", "--parallelism.data_parallel_shard_degree=65536", "--parallelism.tensor_parallel_degree=2"],
        "131072 ranks: expected at most 65536; lower a degree",
    ),
    "too many microbatches": (
        ["plan", "debug", "--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=131074"],
        "131074 microbatches x 2 stages are more than the 65536 that a schedule can list",
    ),
}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """Run a command in this process, and return its exit status."""
    monkeypatch.setattr(sys, "argv", ["titanlite", *arguments])
    monkeypatch.setattr(cli, "listen_as_launcher", lambda: None)
    monkeypatch.setattr(cli, "exit_process", sys.exit)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as end:
            cli.main()
    finally:
        signal.signal(signal.SIGTERM, handler)
    return end.value.code


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_lines_and_exit_status_2(name: str, monkeypatch, capsys, tmp_path: Path):
    arguments, expected = WRONG[name]
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *arguments) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert all(line.startswith("error: ") for line in errors.splitlines()), errors
    assert expected in errors
    assert printable(errors, "\n") == errors


@pytest.mark.parametrize("command", ["train", "plan", "parity", "source", "tokenize"])
def test_without_a_config_no_command_prints_the_usage_of_another(command: str, monkeypatch, capsys):
    assert run(monkeypatch, command, "") == 2
    assert capsys.readouterr() == ("", "error: command line: expected one config, got none; --help tells more\n")
    assert run(monkeypatch, command, "--help") == 0
    assert f"titanlite {command} " in capsys.readouterr().out


@pytest.mark.parametrize(("command", "n_lines"), [("plan", 1), ("advise", 1), ("generate", 0), ("eval", 0)])
def test_only_a_command_that_may_be_a_rank_leaves_its_lines_to_the_first(monkeypatch, capsys, command, n_lines):
    """A task of torchrun or Slurm may run any command."""
    ranks = {"TORCHELASTIC_RUN_ID": "1", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    assert run(monkeypatch, command) == 2
    assert len(capsys.readouterr().err.splitlines()) == n_lines
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert run(monkeypatch, command) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "content",
    [
        "a" + ".a" * 100_000 + " = 1",
        "[" + "a." * 100_000 + "a]",
        "[training]\nsteps = " + "[" * 300 + "]" * 300,
        "[training]\nsteps = " + "[" * 100_000,
        "[training]\nsteps = " + "{a = " * 100 + "1" + "}" * 100,
    ],
    ids=["dots", "header", "arrays", "open arrays", "tables"],
)
def test_toml_that_is_nested_too_deep_is_one_line(content: str, monkeypatch, capsys, tmp_path: Path):
    (tmp_path / "deep.toml").write_text(content)
    begin = time.monotonic()
    assert run(monkeypatch, "config", str(tmp_path / "deep.toml")) == 2
    assert time.monotonic() - begin < 10
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path / 'deep.toml'}: not valid TOML: ")


def test_a_text_with_many_dots_is_a_value(monkeypatch, capsys):
    assert run(monkeypatch, "config", "debug", "--job.description=" + ". . . ... a.b.c" * 100) == 0


def test_control_characters_are_shown_as_escapes():
    """C0, DEL, C1, and what changes a text's direction; letters of any language remain."""
    odd = "\x00\n\x1b\x7f\x85\x9b\u200f\u202e\u2066\u2028\udcff"
    assert printable(odd) == r"\x00\n\x1b\x7f\x85\x9b\u200f\u202e\u2066\u2028\udcff"
    assert printable("é 漢字 🙂 \xa0 ע") == "é 漢字 🙂 \xa0 ע"
    assert printable("a\nb\x1b", keep="\n") == "a\nb\\x1b"
    assert str(TrainingError("a\x1b]0;x\x07")) == r"a\x1b]0;x\x07"


def test_control_characters_of_a_file_are_shown_as_escapes(monkeypatch, capsys, tmp_path: Path):
    (tmp_path / "odd.toml").write_text('[training]\n"\\u001b]0;x\\u0007" = "\\u009b\\u202e"\n')
    assert run(monkeypatch, "config", str(tmp_path / "odd.toml")) == 2
    assert 'training.\\x1b]0;x\\x07 = "\\x9b\\u202e": unknown key' in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("titanlite.tools.config.main", lambda argv: Path("/").write_text(""))
    assert run(monkeypatch, "config", "debug") == 1
    assert capsys.readouterr().err == "error: titanlite config: /: Is a directory\n"


# Ends ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["", "train", "config", "plan"])
def test_output_into_a_closed_pipe_is_no_traceback(command: str):
    read_end, write_end = os.pipe()
    os.close(read_end)
    arguments = [sys.executable, "-m", "titanlite", *command.split(), "--help"]
    done = subprocess.run(arguments, cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert done.stderr == ""
    assert done.returncode in (0, 1)  # argparse itself ignores it


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_behind_the_output_is_one_line():
    with open("/dev/full", "w") as full:
        arguments = [sys.executable, "-m", "titanlite", "config", "debug"]
        done = subprocess.run(arguments, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    expected = "error: titanlite config: standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, expected)


def processes_of(session: int) -> list[str]:
    """Return the processes of a session that still run."""
    found = subprocess.run(["ps", "-A", "-o", "sid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    lines = [line.split(None, 2) for line in found.splitlines()]
    return [command for sid, state, command in lines if int(sid) == session and not state.startswith("Z")]


@pytest.mark.nightly
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
@pytest.mark.parametrize(
    "command", ["plan debug --model.n_layers=4000", "parity debug_4d --steps=100", "advise", "calibrate"]
)
def test_a_command_that_is_ended_leaves_no_process(command: str, how: signal.Signals, tmp_path: Path):
    """Ctrl-C reaches every process of the terminal's group."""
    more = {"advise": "--gpus 64 --model llama3_8b --seq-len 8192", "calibrate": f"{tmp_path / 'x.toml'} --ranks 2"}
    arguments = [*command.split(), *more.get(command, "").split()]
    with subprocess.Popen(
        [sys.executable, "-m", "titanlite", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        measures = arguments[0] == "calibrate"  # in its own process first
        wait_until(lambda: measures or len(processes_of(process.pid)) > 1, "it has started others")
        time.sleep(10 if measures else 5)
        assert process.poll() is None
        if how == signal.SIGINT:
            os.killpg(process.pid, how)
        else:
            process.send_signal(how)
        _, errors = process.communicate(timeout=60)
    for _ in itertools.takewhile(lambda _: processes_of(process.pid), range(100)):
        time.sleep(0.1)
    assert processes_of(process.pid) == []
    lines = [line for line in errors.splitlines() if ", 0:0" not in line]  # without those of progress
    ended = [] if how == signal.SIGKILL else [f"error: titanlite {arguments[0]}: interrupted"]
    assert (process.returncode, lines) == (-9 if how == signal.SIGKILL else 1, ended)
