"""Benchmarks import and use functions and options that exist; pages, scripts and raw logs refer to each other."""

import argparse
import ast
import builtins
import functools
import importlib.metadata
import importlib.util
import inspect
import io
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from titanlite.config import Config, Launch, check, load
from titanlite.config.loader import LoadedConfig, read_toml
from titanlite.config.schema import LRScheduler, count_parameters
from titanlite.data.open import build_tokenizer
from titanlite.optimizer import lr_factor

ROOT = Path(__file__).parents[1]
BENCHMARKS, VERIFICATION = ROOT / "benchmarks", ROOT / "verification"
FOLDERS = ("benchmarks", "benchmarks/*", "verification", "docs/build")
SCRIPTS = [path for folder in FOLDERS for path in sorted(ROOT.glob(f"{folder}/*.py")) if path.name != "__init__.py"]
LOGS = sorted((BENCHMARKS / "logs").iterdir())
TABLES = [BENCHMARKS / "README.md", VERIFICATION / "README.md"]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [BENCHMARKS / "NOTEBOOK.md", *TABLES]
FILES = {"debug.toml", "metrics.jsonl", "plan.md"}  # that look like options
TORCHTITAN = {"torchtitan_cpu": "0.2.2", "torchtitan_recorded": "0.2.2", "torchtitan_sft": "0.3.0"}
"""Scripts that run in torchtitan's environment."""
ONLY_IN_TORCHTITAN = {"job.config_file", "metrics.disable_color_printing"}


@pytest.fixture
def load_script(monkeypatch):
    """Import a script under a name of its own."""

    def load(path: Path) -> types.ModuleType:
        if version := TORCHTITAN.get(path.stem):
            pytest.importorskip("torchtitan", reason="runs in torchtitan's environment")
            if importlib.metadata.version("torchtitan") != version:
                pytest.skip(f"needs torchtitan {version}")
        spec = importlib.util.spec_from_file_location(f"benchmark_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


def resolve(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return what a dotted name means in a module; None if it begins with a local name or is no dotted name.

    Raises:
        AttributeError: if a module or class on the way lacks the name.
    """
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = resolve(node.value, names)
        if isinstance(owner, types.ModuleType | type):
            return getattr(owner, node.attr)
    return None


def unknown_names_and_arguments(source: str, names: dict[str, Any]) -> Iterator[str]:
    """Find attributes that an imported module lacks, and calls that a function of titanlite would not accept.

    Args:
        names: the globals of the module.
    """
    for node in ast.walk(ast.parse(source)):
        try:
            if isinstance(node, ast.Attribute):
                resolve(node, names)
            if not isinstance(node, ast.Call):
                continue
            function = resolve(node.func, names)
        except AttributeError as error:
            yield f"line {node.lineno}: {error}"
            continue
        of_titanlite = (getattr(function, "__module__", "") or "").startswith("titanlite.")
        spread = any(isinstance(argument, ast.Starred) for argument in node.args)
        spread |= any(keyword.arg is None for keyword in node.keywords)
        if of_titanlite and not spread:
            try:
                inspect.signature(function).bind(*node.args, **{word.arg: word.value for word in node.keywords})
            except TypeError as error:
                yield f"line {node.lineno}: {ast.unparse(node.func)}: {error}"


def unknown_options(source: str) -> Iterator[str]:
    """Find string constants "section.key", with or without "--" and "=value", that name no option of a config."""
    sections = {name: set(field.annotation.model_fields) for name, field in Config.model_fields.items()}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = re.fullmatch(r"(?:--)?([a-z]\w*)\.([a-z]\w*)(?:=.*)?", node.value)
            if match and match[1] in sections and match[2] not in sections[match[1]]:
                yield f"{match[1]}.{match[2]}"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_benchmark_imports_without_running(path, load_script, capfd):
    module = load_script(path)
    assert module.__doc__
    assert not capfd.readouterr().out


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_benchmark_uses_names_and_arguments_that_exist(path, load_script):
    source, names = path.read_text(), vars(load_script(path))
    assert not [*unknown_names_and_arguments(source, names)]
    assert not set(unknown_options(source)) - FILES - ONLY_IN_TORCHTITAN


@pytest.mark.parametrize(
    "path", [path for path in SCRIPTS if "parse_args" in path.read_text()], ids=lambda path: path.stem
)
def test_benchmark_prints_its_help(path, load_script, capsys, monkeypatch):
    module = load_script(path)
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit) as end:
        module.main()
    assert end.value.code == 0
    assert module.__doc__.strip().splitlines()[0] in capsys.readouterr().out


def missing_files(text: str) -> set[str]:
    """Return the scripts, configs and logs that a text names, by their paths or as modules, and that do not exist."""
    names = re.findall(r"(?<![\w/])(?:benchmarks|verification|docs/build)/(?:\w+/)*\w+\.(?:py|toml|log)", text)
    modules = re.findall(r"-m\s+((?:benchmarks|verification|docs\.build|tests)(?:\.[a-z]\w*)+)", text)
    missing = {name for name in names if not any((folder / name).is_file() for folder in (ROOT, ROOT / "tests"))}
    return missing | {name for name in modules if not is_program(name)}


def is_program(module: str) -> bool:
    """Return whether `python -m MODULE` runs a file of the repository."""
    path = ROOT / module.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


@pytest.mark.parametrize("path", [*PAGES, *SCRIPTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_benchmark_files_that_a_page_or_script_names_exist(path):
    assert not missing_files(path.read_text())


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.name)
def test_each_log_is_quoted_by_a_page(log):
    assert any(log.name in page.read_text() for page in PAGES)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_each_script_is_named_by_a_page_or_used_by_a_script(path):
    used = any(path.stem in other.read_text() for other in SCRIPTS if other != path)
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    named = re.compile(rf"(?:[/(]{re.escape(path.name)}|{re.escape(module)})\b")
    assert used or any(named.search(page.read_text()) for page in PAGES)


def rows_of_table(page: Path) -> set[str]:
    """Return what the rows of a page's tables link to in their first cell."""
    return set(re.findall(r"^\| \[[\w ]+\]\(([\w/.]+)\) \|", page.read_text(), re.MULTILINE))


def test_the_table_of_benchmarks_has_every_script_that_runs():
    runs = [path for path in SCRIPTS if path.is_relative_to(BENCHMARKS) and "__main__" in path.read_text()]
    assert rows_of_table(BENCHMARKS / "README.md") == {path.relative_to(BENCHMARKS).as_posix() for path in runs}


def test_the_table_of_verification_has_every_campaign():
    folders = {f"{path.name}/" for path in VERIFICATION.iterdir() if path.is_dir() and list(path.glob("*.py"))}
    scripts = {path.name for path in SCRIPTS if path.parent == VERIFICATION}
    assert rows_of_table(VERIFICATION / "README.md") == folders | scripts


def test_these_checks_can_fail(load_script):
    names = vars(load_script(ROOT / "verification" / "wide_run.py"))
    assert [*unknown_names_and_arguments("mesh.no_such_function()", names)]
    assert [*unknown_names_and_arguments("mesh.build_layout(parallelism, device, no_such_argument=1)", names)]
    assert [*unknown_names_and_arguments("mesh.build_layout()", names)]
    assert not [*unknown_names_and_arguments("mesh.build_layout(parallelism, device)", names | vars(builtins))]
    assert [*unknown_options('{"training.no_such_option": 1}')] == ["training.no_such_option"]
    assert [*unknown_options('["--model.no_such_option=2"]')] == ["model.no_such_option"]
    assert not [*unknown_options('["--training.seq_len=2", "torch.float32"]')]
    assert missing_files("see benchmarks/logs/no_such.log") == {"benchmarks/logs/no_such.log"}
    assert missing_files("run `python -m\nbenchmarks.speed.no_such`") == {"benchmarks.speed.no_such"}
    assert not missing_files("run `python -m verification.chaos` and `python -m benchmarks.speed.startup_time`")


# Two checkouts compared -----------------------------------------------------------------------------------------------


def test_runs_of_two_checkouts_have_valid_options(tmp_path, load_script, monkeypatch):
    script = load_script(ROOT / "verification" / "same_numbers.py")
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://localhost:1")
    config = tmp_path / "config.toml"
    config.write_text("")
    script.write_data(tmp_path)
    for run in script.RUNS.values():
        for options in [run.options, *([run.options | run.then] if run.then else [])]:
            own = {"fault_tolerance.replica_id": 0} if run.groups > 1 else {}
            loaded = load([str(config), *script.arguments_of(options | own, tmp_path)])
            check(loaded, Launch(0, 0, run.ranks, run.ranks, n_devices=0))


def test_differences_of_two_checkouts_are_all_found(load_script):
    differences = load_script(ROOT / "verification" / "same_numbers.py").differences
    nan, tensor = float("nan"), ("torch.float32", (1,), b"abcd")
    old = {"loss": nan, "w": tensor, "rank 0": [["send", 1], ["recv", 0]], "rank 1": Counter(item=2), "lr": 0.0}
    assert not differences(old, {**old, "loss": float("nan"), "rank 1": Counter(tolist=2)})
    new = {"loss": 0.5, "w": (*tensor[:2], b"abce"), "rank 0": [["send", 1]], "rank 1": Counter(item=3), "lr": -0.0}
    assert [line.split(":")[0] for line in differences(old, new)] == [*old]
    assert differences(old, {})
    assert differences({}, new)


# Layouts and one process over many steps ------------------------------------------------------------------------------


@pytest.fixture
def figure(load_script) -> types.ModuleType:
    return load_script(ROOT / "docs" / "build" / "layout_distance_figure.py")


@pytest.fixture
def layout_distance(load_script) -> types.ModuleType:
    return load_script(ROOT / "verification" / "layout_distance.py")


def test_runs_of_layout_distance_have_valid_options(layout_distance):
    for kind in (*layout_distance.KINDS.values(), layout_distance.RECIPE_OF_BOTH):
        assert {*kind.in_turn} <= {*kind.runs}
        assert all(one != following for one, following in itertools.pairwise(kind.in_turn))
        for options in kind.runs.values():
            loaded = load(["debug", *layout_distance.arguments_of(layout_distance.options_of(Path(), kind, options))])
            ranks = loaded.config.parallelism.world_size
            assert check(loaded, Launch(0, 0, ranks, ranks, n_devices=0)).parallelism.world_size == ranks


def test_the_distance_of_tensors_by_hand(layout_distance):
    reference = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]], dtype=torch.float64)}
    assert layout_distance.distance(reference, reference) == 0
    moved = {"a": torch.tensor([3.0, 0.3]), "b": torch.tensor([[3.6]], dtype=torch.float64)}
    assert layout_distance.distance(moved, reference) == pytest.approx(0.5 / 5, rel=1e-7)  # 0.3 and 3 are float32
    tiny = {"a": reference["a"], "b": reference["b"] + 2**-50}
    assert layout_distance.distance(tiny, reference) == 2**-50 / 5
    with pytest.raises(ValueError, match=r"\['b'\]"):
        layout_distance.distance({"a": moved["a"]}, reference)


def write_run(folder: Path, losses: list[float], weight: float, *, first_step: int = 1) -> None:
    """Write what layout_distance.py reads of a run, with a checkpoint after the second step."""
    folder.mkdir(parents=True)
    rows = [{"step": step, "loss_metrics/global_avg_loss": loss} for step, loss in enumerate(losses, first_step)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    save_file({"w": torch.tensor([weight], dtype=torch.float64)}, folder / "step-2.safetensors")


def test_a_log_of_distances_is_written_and_read(tmp_path, layout_distance, figure):
    runs, folder_of = ["same, again", "TP 2"], functools.partial(layout_distance.folder_of, tmp_path, "a, kind")
    write_run(folder_of("one process"), [4.0, 2.0], 8.0)
    write_run(folder_of("same, again"), [4.0, 2.0], 8.0)
    write_run(folder_of("TP 2"), [4.0, 1.5], 8.5)
    log = tmp_path / "distances.log"
    with log.open("w") as out:
        layout_distance.write_kind(out, tmp_path, "a, kind", runs, steps=2, interval=2)
    read = figure.read_log(log)
    assert read == {
        "a, kind": {
            "loss": {"same, again": [(1, 0), (2, 0)], "TP 2": [(1, 0), (2, 0.25)]},
            "weights": {"same, again": [(2, 0)], "TP 2": [(2, 0.0625)]},
        }
    }
    lines = [*figure.table(read)][2:]
    assert lines == ["| a, kind | same, again | 0 | 0 | 0 |", "| a, kind | TP 2 | 2.5e-01 | 6.2e-02 | 6.2e-02 |"]
    figure.draw(read, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="steps"):
        layout_distance.write_kind(io.StringIO(), tmp_path, "a, kind", runs, steps=3, interval=2)
    write_run(folder_of("CP 2"), [4.0, 2.0], 8.0, first_step=2)
    with pytest.raises(ValueError, match="its steps are not 1, 2, 3"):
        layout_distance.write_kind(io.StringIO(), tmp_path, "a, kind", ["CP 2"], steps=2, interval=2)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_layouts_and_a_killed_run_are_compared_with_one_process(tmp_path, layout_distance, figure):
    layouts = {name: layout_distance.LAYOUTS[name] for name in ("FSDP 2", "PP 2 (GPipe)")}
    kind = layout_distance.KINDS["float64"]._replace(steps=18, interval=3, layouts=layouts, in_turn=(*layouts,))
    layout_distance.train_missing(tmp_path, {"float64": kind}, ["one process", *layouts, "killed, resumed"])
    runs, log = [*layouts, "killed, resumed"], tmp_path / "distances.log"
    with log.open("w") as out:
        layout_distance.write_kind(out, tmp_path, "float64", runs, steps=kind.steps, interval=kind.interval)
    kill = re.search(r"killed after step (\d+) of FSDP 2, resumed after step (\d+) as PP 2 \(GPipe\)", log.read_text())
    assert kill
    assert 10 <= int(kill[1]) < 18
    assert int(kill[2]) in (6, 9, 12, 15)
    for quantity in figure.read_log(log)["float64"].values():
        assert all(distance < 1e-11 for run in runs for _, distance in quantity[run])
        assert all(any(distance for _, distance in quantity[run]) for run in runs)  # they are other runs


# The session on one GPU -----------------------------------------------------------------------------------------------

QUICK_STEPS = ("environment", "rates", "debug-compiled", "recorded-step", "trace", "torchtitan")


@pytest.fixture
def gpu_session(load_script) -> types.ModuleType:
    return load_script(BENCHMARKS / "gpu" / "gpu_session.py")


def dry_run(out: Path, *arguments: str) -> str:
    """Run gpu_session.py on a CPU and return what it prints."""
    command = [sys.executable, str(BENCHMARKS / "gpu" / "gpu_session.py"), "--dry-run", f"--out={out}", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def rows_of(summary: str) -> list[str]:
    """Return the first cells of all rows of the tables in a page."""
    rows = [line.split("|")[1].strip() for line in summary.splitlines() if line.startswith("|")]
    return [row for row in rows if row not in ("step", "---")]


@pytest.mark.nightly
def test_dry_run_of_a_gpu_session_is_resumed(tmp_path, gpu_session):
    first, second = tmp_path / "first", tmp_path / "second"
    dry_run(first, "--steps", *QUICK_STEPS)
    ((card, results),) = json.loads((first / "state.json").read_text())["cards"].items()
    assert card.startswith("CPU")
    assert {name: result["status"] for name, result in results.items()} == {
        **dict.fromkeys(QUICK_STEPS[:4], "done"),
        "trace": "not there",
        "torchtitan": "not there",
    }
    summary = (first / "summary.md").read_text()
    assert "dry run on a CPU: toy sizes, no figure here is of a GPU" in summary
    groups: dict[str, list[str]] = {}
    for step in gpu_session.all_steps(140):
        groups.setdefault(step.group, []).append(step.name)
    in_tables = rows_of(summary.partition("## Seconds")[0])
    assert in_tables == [name for names in groups.values() for name in names]  # and no published figure
    before = {file.name: file.read_bytes() for file in first.iterdir()}
    assert "done" in dry_run(second, f"--resume-from={first}", "--steps", *QUICK_STEPS)
    after = {file.name: file.read_bytes() for file in second.iterdir()}
    assert after.keys() == before.keys()
    assert after["recorded.tar"] == before["recorded.tar"]
    results.pop("environment")  # every call asks for the card
    assert results == {
        name: result for name, result in json.loads(after["state.json"])["cards"][card].items() if name != "environment"
    }


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_full_dry_run_of_a_gpu_session(tmp_path, gpu_session):
    dry_run(tmp_path)
    (results,) = json.loads((tmp_path / "state.json").read_text())["cards"].values()
    statuses = {step.name: results[step.name]["status"] for step in gpu_session.all_steps(140)}
    for name in ("torchtitan", "torchtitan-compiled"):
        assert statuses.pop(name) in ("done", "not there")
    assert statuses.pop("published-card") == "not there"  # without --text
    assert {name: status for name, status in statuses.items() if status != "done"} == {}
    assert (tmp_path / "trace.json.gz").stat().st_size > 1000


@pytest.mark.nightly
def test_a_step_that_a_gpu_has_recorded_is_judged_elsewhere(tmp_path, gpu_session):
    session = gpu_session.Session(tmp_path, "cpu", sys.executable, {"CPU": {}}, card="CPU")
    (step,) = (step for step in session.steps("CPU") if step.kind == "recorded")
    gpu_session.take(session, step, 120)
    assert session.results[step.name]["status"] == "done"
    with tarfile.open(tmp_path / "recorded.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    command = [sys.executable, "-m", "titanlite", "parity", "--against", str(tmp_path / "recorded")]
    judge = subprocess.run(command, capture_output=True, text=True)
    assert judge.returncode == 0
    assert "bfloat16" in (tmp_path / "recorded" / "step.json").read_text()
    gradients = load_file(tmp_path / "recorded" / "gradients.safetensors")
    gradients["layers.1.attention.wv.weight"] *= 2
    save_file(gradients, tmp_path / "recorded" / "gradients.safetensors")
    judge = subprocess.run(command, capture_output=True, text=True)
    assert judge.returncode == 1
    assert "gradient layers.1.attention.wv.weight is 2.0 x too large" in judge.stdout


def arguments(**changed: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"retry": False, "steps": None, "seconds": None} | changed)


H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


@pytest.fixture
def session(tmp_path, gpu_session, monkeypatch):
    """A session on an H200, whose steps take no time: each result has the limit that the step was given."""
    environments = {H100: {"memory GiB": 79.2}, H200: {"memory GiB": 139.8}}
    cards = {card: {"environment": {"status": "done", "seconds": 6, **values}} for card, values in environments.items()}
    session = gpu_session.Session(tmp_path, "", sys.executable, cards, card=H200)
    monkeypatch.setattr(gpu_session, "missing", lambda session, step: "")
    monkeypatch.setattr(gpu_session, "run_step", lambda session, step, limit: {"limit": limit})
    return session


def test_a_gpu_session_starts_the_steps_that_are_expected_to_end_in_time(gpu_session, session):
    base = "8b-b4-selective"
    chosen = arguments(seconds=80, steps=["rates", base, "tests-attention"])
    waiting = gpu_session.run_session(session, chosen, time.monotonic() - 10)
    # 65 seconds are left, and nothing here takes any of them.
    assert session.results["rates"]["limit"] == 60
    assert session.results[base]["limit"] == pytest.approx(65, abs=1)  # not 240
    assert session.results["tests-attention"]["limit"] == pytest.approx(65, abs=1)
    assert waiting == []
    waiting = gpu_session.run_session(session, arguments(seconds=80, steps=["8b-*"]), time.monotonic() - 20)
    assert f"{base}-rowwise" in waiting
    assert "8b-published" in waiting
    assert base not in waiting


def test_steps_without_a_speed_share_the_card(gpu_session, session, monkeypatch):
    monkeypatch.setattr(gpu_session.os, "cpu_count", lambda: 6)  # two cores for each step
    now, most, lock = [0], [0], threading.Lock()

    def run_step(session: Any, step: Any, limit: float) -> dict[str, Any]:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.05)
        with lock:
            now[0] -= 1
        return {}

    monkeypatch.setattr(gpu_session, "run_step", run_step)
    gpu_session.run_session(session, arguments(steps=["rates", "debug-compiled"]), time.monotonic())
    assert most == [1]
    gpu_session.run_session(session, arguments(steps=["tests-*", "parity-*"]), time.monotonic())
    assert most == [3]
    names = [step.name for step in session.steps(H200) if step.name.startswith(("tests-", "parity-"))]
    assert {session.results[name]["status"] for name in names} == {"done"}


def test_a_gpu_session_that_is_ended_ends_the_steps_that_share_the_card(tmp_path):
    """They have no result: the next call takes them again."""
    code = f"""
import os, signal, sys, threading
sys.argv[1:] = ["--out", {str(tmp_path)!r}, "--dry-run", "--steps", "tests-*"]
os.cpu_count = lambda: 4
from benchmarks.gpu import gpu_session

started = threading.Barrier(2, lambda: threading.Timer(1, os.kill, [os.getpid(), signal.SIGTERM]).start())

def run_step(session, step, limit):
    started.wait()
    session.run(["sleep", "86398"], limit)

gpu_session.run_step, gpu_session.missing = run_step, lambda session, step: ""
gpu_session.main()
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=120)
    assert ended.returncode == 128 + signal.SIGTERM
    (results,) = json.loads((tmp_path / "state.json").read_text())["cards"].values()
    assert list(results) == ["environment"]
    commands = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists()]
    assert b"sleep\x0086398\x00" not in commands


def test_a_gpu_session_lists_what_fits(gpu_session):
    _, *lines = gpu_session.listed(gpu_session.all_steps(79.2), 100)
    assert [line.split() for line in lines[:5]] == [
        ["environment", "6", "6", "fits"],
        ["rates", "14", "20", "fits"],
        ["debug-compiled", "30", "50", "fits"],
        ["8b-b2-attention", "60", "110"],
        ["tests-attention", "30", "114", "fits"],
    ]
    assert not any("fits" in line for line in gpu_session.listed(gpu_session.all_steps(79.2), math.inf))
    assert [line.partition(" ")[0] for line in lines] == [step.name for step in gpu_session.all_steps(79.2)]


def test_results_of_a_gpu_session_belong_to_a_card(gpu_session, session):
    """What is right on one card is right; speed, memory and what did not fit are measured on each card anew."""
    done, no = {"status": "done", "seconds": 9}, {"status": "does not fit", "seconds": 9, "reason": "out of memory"}
    session.cards[H100] |= {"tests-attention": done, "rates": done, "8b-published": no, "torchtitan": done}
    session.cards[H200] |= {"debug-compiled": no}
    due = [step.name for step in gpu_session.due(session, arguments())]
    assert {"rates", "8b-published", "torchtitan", "tests-reference"} <= {*due}
    assert not {"environment", "tests-attention", "debug-compiled"} & {*due}
    assert not any(name.startswith("plan-") for name in due)  # a GPU has more to do
    assert "debug-compiled" in [step.name for step in gpu_session.due(session, arguments(retry=True))]
    session.card = H100
    assert "tests-reference" in [step.name for step in gpu_session.due(session, arguments())]
    plans = [step.name for step in gpu_session.due(session, arguments(steps=["plan-*"]))]
    assert "plan-8b-b2-attention" in plans
    assert "plan-8b-b4-selective" not in plans


def test_the_sizes_of_a_gpu_session_are_those_of_the_card(gpu_session):
    large, small = ({step.name: step for step in gpu_session.all_steps(memory)} for memory in (139.8, 79.2))
    bases = [next(step for step in steps.values() if step.group == "Llama 3 8B") for steps in (large, small)]
    assert [step.options["training.local_batch_size"] for step in bases] == [4, 2]
    assert bases[1].options["activation_checkpoint.selective_ac_option"] == "attention"
    for base, steps in zip(bases, (large, small), strict=True):
        rowwise = steps[f"{base.name}-rowwise"]
        changed = {"float8.enable": "true", "float8.recipe": "rowwise", "training.steps": 30}
        assert rowwise.options == base.options | changed
    assert small["3b-4096"].options["training.local_batch_size"] == 2


def test_a_training_run_that_is_killed_at_its_limit_counts_as_far_as_it_came(tmp_path, gpu_session, monkeypatch):
    session = gpu_session.Session(tmp_path, "", sys.executable, {H200: {}}, card=H200)
    (step,) = (step for step in session.steps(H200) if step.name == "debug-compiled")
    row = {"loss_metrics/global_avg_loss": 5.0, "tflops": 100.0, "mfu(%)": 10.0, "time_metrics/end_to_end(s)": 1.0}
    row |= {"memory/max_active(GiB)": 1.0, "memory/max_reserved(GiB)": 2.0, "time_metrics/data_loading(%)": 0.0}
    rows = [row | {"step": n, "throughput(tps)": 1000.0 * n} for n in range(1, 8)]

    def killed(command: list[str], limit: float, **_: Any) -> str:
        folder = Path(next(each for each in command if each.startswith("--job.dump_folder")).partition("=")[2])
        lines = [json.dumps(row) for row in rows]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"loss_metr')
        summary = "model debug: 6 layers, dim 256, 16 heads, 8 KV heads; 4,861,184 parameters"
        raise gpu_session.TimeLimit(f"time limit of {limit:.0f} s", summary)

    monkeypatch.setattr(session, "run", killed)
    gpu_session.take(session, step, 50)
    result = session.results[step.name]
    assert (result["status"], result["reason"]) == ("stopped", "time limit of 50 s, after 7 steps")
    assert result["throughput(tps)"] == 6000.0  # the median of steps 5 to 7
    del rows[4:]
    gpu_session.take(session, step, 50)
    assert session.results[step.name]["status"] == "failed"
    rows[2] |= {"loss_metrics/global_avg_loss": math.nan}
    rows += rows
    gpu_session.take(session, step, 50)
    assert session.results[step.name]["reason"] == "loss nan in step 3"


def test_a_gpu_session_says_what_does_not_fit(tmp_path, gpu_session, monkeypatch):
    session = gpu_session.Session(tmp_path, "", sys.executable, {H200: {}}, card=H200)
    step = session.steps(H200)[2]

    def run(*_: Any) -> Any:
        raise gpu_session.StepFailed("error: out of memory in step 1: ...")

    monkeypatch.setattr(gpu_session, "run_step", run)
    gpu_session.take(session, step, 50)
    assert session.results[step.name]["status"] == "does not fit"


@pytest.mark.nightly
def test_a_gpu_session_kills_what_a_step_started_at_its_time_limit(tmp_path, gpu_session):
    session = gpu_session.Session(tmp_path, "cpu", sys.executable, {})
    code = "import subprocess; subprocess.run(['sleep', '86399'], start_new_session=True)"
    with pytest.raises(gpu_session.TimeLimit, match="time limit of 5 s"):
        session.run([sys.executable, "-c", code], 5)
    commands = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists()]
    assert b"sleep\x0086399\x00" not in commands


def test_a_gpu_session_says_why_a_step_failed(tmp_path, gpu_session):
    session = gpu_session.Session(tmp_path, "cpu", sys.executable, {})
    with pytest.raises(gpu_session.StepFailed, match=r"^ValueError: no memory$"):
        session.run([sys.executable, "-c", "raise ValueError('no memory')"], 60)
    assert "ValueError: no memory" in (tmp_path / "session.log").read_text()


def test_a_gpu_session_does_not_mix_with_a_dry_run(tmp_path, gpu_session):
    (tmp_path / "state.json").write_text('{"dry_run": "cpu", "cards": {}}')
    options = argparse.Namespace(out=tmp_path, dry_run="", resume_from=None, torchtitan_python=sys.executable)
    with pytest.raises(SystemExit, match="has the results of a dry run"):
        gpu_session.load_session(options)


@pytest.mark.parametrize("memory_gib", [79.2, 139.8])
def test_configs_of_a_gpu_session_are_valid_and_their_runs_have_names(gpu_session, memory_gib):
    steps = gpu_session.all_steps(memory_gib)
    assert len({step.name for step in steps}) == len(steps)
    for step in (step for step in steps if step.kind in ("train", "plan")):
        check(load([str(gpu_session.TOML), *gpu_session.arguments_of(step.options)]), Launch(0, 0, 1, 1, n_devices=1))
        options = gpu_session.arguments_of(gpu_session.toy(step).options)
        check(load([str(gpu_session.TOML), *options]), Launch(0, 0, 1, 1, n_devices=0))


def test_a_gpu_session_shows_planned_and_published_figures_beside_its_own(gpu_session):
    values = {"tflops": 500.0, "mfu(%)": 50.6, "causal": 0.9, "parameters": 2**30, "flops per token": 5e10}
    values |= {"throughput(tps)": 10_000.0, "memory/max_active(GiB)": 70.0, "memory/max_reserved(GiB)": 72.0}
    values |= {"shared": False}
    results = {"rates": {"status": "done", "seconds": 9, "matmul TFLOP/s": 800.0}}
    results["8b-published"] = {"status": "done", "seconds": 90, **values}
    results["plan-8b-published"] = {"status": "done", "seconds": 9, "planned GiB": 67.2, "planned tokens/s": 11_000.0}
    results["8b-b4-selective"] = {"status": "done", "seconds": 70, **values}
    results["8b-b4-selective-rowwise"] = {"status": "done", "seconds": 70, **values, "throughput(tps)": 12_500.0}
    results["memory-1b"] = {"status": "done", "seconds": 30, **values, "shared": True}
    results["plan-memory-1b"] = results["plan-8b-published"]
    results["8b-b4-none"] = {"status": "does not fit", "seconds": 90, "reason": "out | of", "lines": ["the output"]}
    cards = {H200: (gpu_session.all_steps(139.8), results), H100: (gpu_session.all_steps(79.2), {})}
    page = gpu_session.summary(cards, dry_run="")
    lines = page.splitlines()
    own = "10,000 |  | 500.0 | 50.6 | 45.5 | 62.5 | 56.2 | 11,000 | 1.100 | 70.00 | 67.20 | 72.00 | 70.00 |"
    assert f"| 8b-published | done | {own}" in lines
    # A run that shares the card has memory, but no speed.
    of_shared = next(line for line in lines if line.startswith("| memory-1b |")).split("|")
    assert [cell.strip() for cell in of_shared[3:-1]] == [""] * 9 + ["70.00", "67.20", "72.00", "70.00"]
    assert any(line.startswith("| KempnerForge, one H200 | published | 10,471 |  | 523.5 |") for line in lines)
    assert any(line.startswith("| 8b-b4-selective-rowwise | done | 12,500 | 1.250 |") for line in lines)
    assert any(line.startswith("| 8b-b4-none | does not fit: out \\| of |") for line in lines)
    assert "the output" in lines
    assert "| 8b-b4-selective-rowwise | 125 | 70 |" in lines
    assert "12,500" not in page.partition(f"# {H100}")[2]


def test_kernels_of_a_trace_are_summed(gpu_session):
    event = {"ph": "X", "cat": "kernel", "dur": 1500}
    names = ["matmul", "copy", "matmul", "an operator"]
    events = [{**event, "name": name} for name in names[:3]] + [{**event, "cat": "cpu_op", "name": names[3]}]
    lines = [line.split() for line in gpu_session.kernel_times({"traceEvents": events})]
    assert lines == [["4.50", "ms", "in", "3", "kernels"], ["3.00", "2", "matmul"], ["1.50", "1", "copy"]]


def test_a_gpu_session_runs_every_gpu_test_once(gpu_session):
    tree = ast.parse((ROOT / "tests" / "test_gpu.py").read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    grouped = [name for step in gpu_session.all_steps(140) if step.kind == "pytest" for name in step.options]
    assert sorted(grouped) == sorted(names)


# Curves that others have published ------------------------------------------------------------------------------------


@pytest.fixture
def curves(load_script) -> types.ModuleType:
    return load_script(BENCHMARKS / "others" / "published_curves.py")


@pytest.fixture
def published_sft(load_script) -> types.ModuleType:
    return load_script(BENCHMARKS / "others" / "published_sft.py")


TEXT = "First Citizen:\nWe know't, we know't.\n\n" * 40


def test_characters_are_tokens(curves, tmp_path):
    options = curves.prepare(TEXT, tmp_path)
    splits = [Path(options[f"{section}.dataset_path"]).read_text() for section in ("training", "validation")]
    assert "".join(splits) == TEXT
    assert len(splits[0]) == int(0.9 * len(TEXT))
    tokenizer, characters = build_tokenizer(str(tmp_path)), sorted(set(TEXT))
    (tokens,) = tokenizer.encode([TEXT])
    assert tokens.tolist() == [characters.index(character) for character in TEXT]
    assert (tokenizer.bos, tokenizer.eos, tokenizer.vocab_size) == (None, len(characters), len(characters) + 1)
    assert tokenizer.decode(tokens.tolist()) == TEXT


def test_another_text_than_the_published_one_is_rejected(curves, tmp_path):
    file = tmp_path / "input.txt"
    file.write_text(TEXT)
    with pytest.raises(SystemExit, match=f"is not data/tinyshakespeare.* {curves.SHA256}"):
        curves.read_text(file)


def test_published_models_have_the_published_number_of_parameters(curves, tmp_path):
    """nanoGPT prints 0.80M, without the positions; the card says 10.6M. Both have 65 tokens, and no EOS."""

    def loaded(name: str, options: dict[str, Any]) -> LoadedConfig[Config]:
        arguments = [f"--{key}={value}" for key, value in (curves.prepare(TEXT, tmp_path) | options).items()]
        return load([str(BENCHMARKS / "others" / name), *arguments])

    for options in curves.RUNS.values():
        check(loaded("published_nanogpt.toml", options), Launch(0, 0, 1, 1, n_devices=0))
    model = loaded("published_nanogpt.toml", {}).config.model
    gpt_2 = model.n_layers * (12 * model.dim**2 + 2 * model.dim) + model.dim + 65 * model.dim
    assert round(gpt_2 / 1e6, 2) == 0.80
    # EOS has a row of the embedding. In a layer, 3 x 341 is one less than 2 x 512.
    assert count_parameters(model) - gpt_2 == model.dim - model.n_layers * model.dim
    model = loaded("published_card.toml", {}).config.model
    assert round((count_parameters(model) - model.dim) / 1e6, 1) == 10.6


def test_the_curve_is_read_from_what_nanogpt_prints(curves):
    output = "number of parameters: 0.80M\nstep 0: train loss 4.1676, val loss 4.1649\niter 0: loss 4.1750, time 9ms\n"
    output += "iter 10: loss 3.1, time 9ms, mfu 0.01%\nstep 250: train loss 2.4293, val loss 2.4447\n"
    assert curves.nanogpt_curve(output) == [
        {"step": 0, "loss": 4.175, "validation": 4.1649},
        {"step": 10, "loss": 3.1},
        {"step": 250, "validation": 2.4447},
    ]


def test_tables_of_published_curves(curves, published_sft):
    last = {"seed 0": 1.6, "seed 1": 1.7, "nanoGPT": 1.885}
    rows = [{"run": run, "step": 2000, "validation": loss} for run, loss in last.items()]
    rows += [{"run": "seed 2", "step": 500, "validation": 2.0}, {"run": "nanoGPT", "step": 2000, "all windows": 1.9}]
    lines = [line.split() for line in curves.nanogpt_table(rows)]
    assert [line[-2:] for line in lines[1:4]] == [["1.6000", "+0.2800"], ["1.7000", "+0.1800"], ["1.9000", "-0.0200"]]
    assert lines[4] == ["seeds:", "mean", "1.6500,", "standard", "deviation", "0.0707"]
    card = [{"step": 400, "loss": 1.7}, {"step": 500, "loss": 1.41, "validation": 1.56}]
    assert curves.card_table(card)[1:] == ["  500   1.4100      1.5600   (1.47, 1.67)  (1.37, 1.59)"]
    rows = [{"run": f"{published_sft.SEED} {seed}", "step": 1, "loss": 8.0 + seed} for seed in (0, 1)]
    rows.append({"run": f"{published_sft.AS_PUBLISHED} 0", "step": 1, "loss": 5.0})
    assert published_sft.seeds_table(rows, published_sft.SEED)[-1].split() == [
        "1",
        "8.2968",
        "8.5000",
        "0.7071",
        "-0.3",
    ]


def test_learning_rates_of_the_fine_tuning_are_those_of_torchtitan(published_sft):
    options = read_toml(str(published_sft.TOML))
    assert options["training"]["steps"] == len(published_sft.GOLDEN) == 10
    schedule = LRScheduler(**options["lr_scheduler"], total_steps=10)
    factors = [lr_factor(step, schedule) for step in range(1, 11)]
    assert factors == pytest.approx([0.5, 1, 1, *(1 - step / 8 for step in range(1, 8))]), (
        "torchtitan_sft.py prints them"
    )


def test_a_conversation_is_written_as_torchtitan_writes_it(published_sft, assets):
    data, folder = assets.folder / "data.json", assets.folder / "model"
    folder.mkdir()
    data.write_text(json.dumps([{"question": "What is 2 + 3?", "answer": "5"}]))
    tokenizer = assets.open(bos_token="<s>", eos_token="</s>")
    published_sft.write_tokenizer(assets.folder, folder)
    ((inputs, labels),) = published_sft.conversations(assets.folder, folder)
    asked, answered = (tokens.tolist() for tokens in tokenizer.encode(["user\nWhat is 2 + 3?assistant\n", "5"]))
    assert inputs == [tokenizer.bos, *asked, *answered]
    assert labels == [*[published_sft.IGNORED] * len(asked), *answered, tokenizer.eos]


def test_a_gpu_session_without_the_text_says_so(tmp_path, gpu_session):
    (step,) = (step for step in gpu_session.all_steps(140) if step.kind == "card")
    session = gpu_session.Session(tmp_path, "cpu", sys.executable, {})
    assert gpu_session.missing(session, step) == "no --text: tinyshakespeare's input.txt"
    session.text = tmp_path / "input.txt"
    assert not gpu_session.missing(session, step)


@pytest.mark.nightly
def test_a_published_curve_is_trained_and_printed(curves, tmp_path, capsys):
    options = curves.prepare(TEXT, tmp_path) | {"training.steps": 20, "validation.freq": 20}
    rows = curves.train(
        BENCHMARKS / "others" / "published_nanogpt.toml", options | {"lr_scheduler.warmup_steps": 2}, tmp_path / "run"
    )
    curves.report("a run", rows)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert abs(lines[0]["loss"] - math.log(66)) < 0.2
    ((step, validation),) = curves.curve(lines, "a run", "validation")
    assert step == 20
    assert validation < 3


@pytest.mark.nightly
def test_the_figure_of_published_curves_is_drawn_from_the_logs(curves, tmp_path):
    pytest.importorskip("matplotlib")
    curves.plot(argparse.Namespace(file=tmp_path / "figure.png"))
    assert (tmp_path / "figure.png").stat().st_size > 10_000
