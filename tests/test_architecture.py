"""The conventions of the architecture that code can check."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*(ROOT / "titanlite").rglob("*.py"), ROOT / "train.py"])
SEE_THE_FULL_CONFIG = ("train.py", "build.py", "summary.py", "launcher.py", "config/", "plan/", "advise/", "parity/")
SEE_THE_FULL_CONFIG += ("tokenize_dataset.py",)
LONGEST_FILE, LONGEST_FUNCTION = 500, 60
SCHEMA = "titanlite/config/schema.py"
"""It may be longer, since it has declarations: a reader looks for an option in one place, and reads no more of it."""
# Of a technique that a plain run does without, the run has the options and the place where they are read. Of the
# package, some 900 lines convert torchtitan's files, and 650 are replica groups.
LINES_OF_A_LLAMA_RUN, LINES_OF_CHECKPOINTS, LINES_OF_RELIABILITY, LINES_OF_THE_PACKAGE = 7480, 1500, 1600, 25_300
DEEPEST_IMPORT = 9


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


def names_used(source: str) -> set[str]:
    """Return every name, attribute and imported name of a Python file."""
    tree = ast.parse(source)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return names | {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_only_the_wiring_sees_the_full_config(path: Path):
    sees = "Config" in names_used(path.read_text())
    assert not sees or relative(path).removeprefix("titanlite/").startswith(SEE_THE_FULL_CONFIG)


def test_a_file_that_sees_the_full_config_is_found():
    assert "Config" in names_used("def f(config: Config): ...")
    assert "Config" in names_used("from titanlite import config\ndef f(c: config.Config): ...")


# Docstrings ----------------------------------------------------------------------------------------------------------


def docstring_problems(source: str) -> list[str]:
    """Return what lacks a docstring, or has one that does not begin with a sentence."""
    tree = ast.parse(source)
    problems = []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)):
            continue
        name, text = getattr(node, "name", "the file"), ast.get_docstring(node)
        if text is None:
            # A section of options has a docstring for each option; a short function shows what it does.
            is_section = isinstance(node, ast.ClassDef) and "Section" in names_used(ast.unparse(node))
            if not name.startswith("_") and len(node.body) > 5 and not is_section:
                problems.append(f"{name}: no docstring")
            continue
        first = text.split("\n\n")[0].strip()
        if first.startswith(("Args:", "Returns:", "Raises:", "Yields:")) or not first.endswith((".", ":", ")")):
            problems.append(f"{name}: does not begin with a sentence: {first[:60]!r}")
        elif len(first.split()) < 3:
            problems.append(f"{name}: no sentence: {first!r}")
    return problems


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_docstrings_begin_with_a_sentence(path: Path):
    assert docstring_problems(path.read_text()) == []


@pytest.mark.parametrize("text", ["Args:\n    x: a number.", "Rates.", "What a step does"])
def test_a_docstring_without_a_sentence_is_found(text: str):
    assert docstring_problems(f'"""This file does something."""\ndef f():\n    """{text}"""\n') != []


# Sizes ---------------------------------------------------------------------------------------------------------------


def n_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def long_functions(source: str) -> list[str]:
    """Return the functions of a file that are longer than allowed."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return [node.name for node in functions if node.end_lineno - node.lineno + 1 > LONGEST_FUNCTION]


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_file_and_no_function_is_too_long(path: Path):
    loop = {"train"} if relative(path) == "titanlite/train.py" else set()
    assert n_lines(path) <= LONGEST_FILE or relative(path) == SCHEMA
    assert set(long_functions(path.read_text())) <= loop


def test_a_long_function_is_found():
    assert long_functions("def f():\n" + "    x = 1\n" * LONGEST_FUNCTION) == ["f"]


def test_a_llama_run_and_the_package_are_short_enough():
    """A technique that an option turns on is imported where the option is read, inside a function. A reader of a plain
    run need not read it."""
    run = reachable("titanlite.train", in_functions=False)
    checkpoints = reachable("titanlite.checkpoint.checkpointer", in_functions=False) - run
    reliability = {module for module in MODULES if folder_of(module) == "titanlite.reliability"}
    assert sum(n_lines(MODULES[module]) for module in run - reliability) <= LINES_OF_A_LLAMA_RUN
    assert sum(n_lines(MODULES[module]) for module in checkpoints - reliability) <= LINES_OF_CHECKPOINTS
    assert sum(n_lines(MODULES[module]) for module in reliability) <= LINES_OF_RELIABILITY
    assert sum(map(n_lines, SOURCES)) <= LINES_OF_THE_PACKAGE


# Imports -------------------------------------------------------------------------------------------------------------


@functools.cache
def imports(module: str, in_functions: bool = True) -> frozenset[str]:
    """Return the project's modules that a module imports, anywhere in it or outside functions, and the packages that
    these are in.

    A package does not count as imported by the modules inside it.
    """
    names = set()
    tree = ast.parse(MODULES[module].read_text())
    for node in ast.walk(tree) if in_functions else tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    names |= {name.rpartition(".")[0] for name in names}
    return frozenset(name for name in names & MODULES.keys() - {module} if not f"{module}.".startswith(f"{name}."))


def reachable(start: str, in_functions: bool = True) -> set[str]:
    """Return a module and all that it imports, directly or not."""
    modules, waiting = set(), [start]
    while waiting:
        module = waiting.pop()
        if module not in modules:
            modules.add(module)
            waiting += imports(module, in_functions)
    return modules


def longest_chain(graph: dict[str, frozenset[str]]) -> list[str]:
    """Return the longest chain of imports.

    Raises:
        ValueError: if a chain returns to where it began.
    """
    chains: dict[str, list[str]] = {}

    def chain(module: str, above: tuple[str, ...]) -> list[str]:
        if module in above:
            raise ValueError(f"import cycle: {' -> '.join([*above[above.index(module) :], module])}")
        if module not in chains:
            longest = max((chain(other, (*above, module)) for other in sorted(graph[module])), key=len, default=[])
            chains[module] = [module, *longest]
        return chains[module]

    return max((chain(module, ()) for module in graph), key=len)


def folder_of(module: str) -> str:
    """Return the folder that a module is in; a module of the package itself stands for itself."""
    return ".".join(module.split(".")[:2])


def imports_of_folders() -> dict[str, frozenset[str]]:
    """Return which folders (and single modules of the package) each of them imports."""
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        others = {folder_of(name) for name in imports(module)} - {folder_of(module), "titanlite"}
        graph.setdefault(folder_of(module), set()).update(others)
    return {folder: frozenset(others) for folder, others in graph.items()}


def test_imports_have_no_cycle():
    longest_chain({module: imports(module) for module in MODULES})


def test_imports_are_not_deep():
    chain = longest_chain(imports_of_folders())
    assert len(chain) - 1 <= DEEPEST_IMPORT, " -> ".join(chain)


def test_generation_is_apart_from_training():
    """Only its commands import it and, where prompts are configured, the training loop."""
    inside = {module for module in MODULES if folder_of(module) == "titanlite.generate"}
    importers = {folder_of(module) for module in MODULES.keys() - inside if imports(module) & inside}
    assert importers == {"titanlite.train", "titanlite.evaluate"}
    assert not imports("titanlite.train", in_functions=False) & inside


def test_a_cycle_is_found():
    with pytest.raises(ValueError, match="a -> b -> a"):
        longest_chain({"a": frozenset("b"), "b": frozenset("a")})


# Style ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff(command: list[str]):
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "--no-cache", "."], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
