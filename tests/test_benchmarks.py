"""Benchmarks import and use functions and options that exist; pages, scripts and raw logs refer to each other."""

import ast
import builtins
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from titanlite.config import Config

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = sorted(BENCHMARKS.glob("*.py"))
LOGS = sorted((BENCHMARKS / "logs").iterdir())
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FILES = {"debug.toml", "metrics.jsonl"}  # that look like options
ONLY_IN_TORCHTITAN = {"job.config_file", "metrics.disable_color_printing"}


@pytest.fixture
def load_script(monkeypatch):
    """Import a script of benchmarks/ under a name of its own, with its folder on the path as when it runs."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(path: Path) -> types.ModuleType:
        if path.stem == "torchtitan_cpu":
            pytest.importorskip("torchtitan", reason="runs in torchtitan's environment")
            if importlib.metadata.version("torchtitan") != "0.2.2":
                pytest.skip("needs torchtitan 0.2.2")
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
        of_titanlite = getattr(function, "__module__", "").startswith("titanlite.")
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
    """Return the scripts, configs and logs of benchmarks/ that a text names and that do not exist."""
    names = re.findall(r"benchmarks/(?:logs/)?\w+\.(?:py|toml|log)", text)
    return {name for name in names if not (ROOT / name).is_file()}


# The page of renamed things names the old scripts.
@pytest.mark.parametrize(
    "path",
    [path for path in [*PAGES, *SCRIPTS] if path.name != "renamed.md"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_benchmark_files_that_a_page_or_script_names_exist(path):
    assert not missing_files(path.read_text())


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.name)
def test_each_log_is_quoted_by_a_page(log):
    assert any(log.name in page.read_text() for page in PAGES)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_each_script_is_named_by_a_page_or_used_by_a_script(path):
    used = any(path.stem in other.read_text() for other in SCRIPTS if other != path)
    assert used or any(f"benchmarks/{path.name}" in page.read_text() for page in PAGES)


def test_these_checks_can_fail(load_script):
    names = vars(load_script(BENCHMARKS / "metrics_overhead.py"))
    assert [*unknown_names_and_arguments("metrics.NoSuchMeter()", names)]
    assert [*unknown_names_and_arguments("metrics.PeakFlops(device, dtype, no_such_argument=1)", names)]
    assert [*unknown_names_and_arguments("metrics.PeakFlops()", names)]
    assert not [*unknown_names_and_arguments("metrics.PeakFlops(device, dtype)", names | vars(builtins))]
    assert [*unknown_options('{"training.no_such_option": 1}')] == ["training.no_such_option"]
    assert [*unknown_options('["--model.no_such_option=2"]')] == ["model.no_such_option"]
    assert not [*unknown_options('["--training.seq_len=2", "torch.float32"]')]
    assert missing_files("see benchmarks/logs/no_such.log") == {"benchmarks/logs/no_such.log"}
