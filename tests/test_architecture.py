"""The rules of the house that code can check."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*(ROOT / "titanlite").rglob("*.py"), ROOT / "train.py"])
SEE_THE_WHOLE_CONFIG = {"train.py", "titanlite/build.py", "titanlite/parity.py"}
SEE_THE_WHOLE_CONFIG |= {"titanlite/config.py", "titanlite/rules.py"}
SEE_THE_WHOLE_CONFIG |= {"titanlite/plan/__init__.py", "titanlite/plan/rehearsal.py"}


def names_used(source: str) -> set[str]:
    """Every name, attribute and annotation in a Python file."""
    tree = ast.parse(source)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return names | {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_wiring_sees_the_whole_config(path):
    sees = "Config" in names_used(path.read_text())
    assert not sees or str(path.relative_to(ROOT)) in SEE_THE_WHOLE_CONFIG


def test_that_rule_can_fail():
    assert "Config" in names_used("def f(config: Config): ...")
    assert "Config" in names_used("from titanlite import config\ndef f(c: config.Config): ...")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_public_functions_and_classes_say_what_they_do(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the file itself"
    undocumented = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and not node.name.startswith("_")
        and len(node.body) > 5
        and not ast.get_docstring(node)
        and "Section" not in names_used(ast.unparse(node))  # each option has its own
    ]
    assert set(undocumented) <= {"main"}


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff(command):
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "--no-cache", "."], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
