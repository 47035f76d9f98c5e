"""The conventions of the architecture that code can check."""

import ast
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*(ROOT / "titanlite").rglob("*.py"), ROOT / "train.py"])
SEE_THE_FULL_CONFIG = (
    *("train.py", "build.py", "api.py", "launch/launcher.py", "metrics/summary.py", "config/"),
    *(
        "tools/plan/",
        "tools/advise/",
        "tools/parity/",
        "tools/config.py",
        "tools/source.py",
        "tools/from_torchtitan/",
        "tools/tokenize.py",
    ),
)
LONGEST_FILE, LONGEST_FUNCTION = 500, 60
SCHEMA = "titanlite/config/schema.py"
"""It may be longer, since it has declarations: a reader looks for an option in one place, and reads no more of it."""
LINES_OF_THE_LOOP, MOST_COMPLEX = 100, 20
MORE_COMPLEX = {
    "titanlite/tools/parity/against.py findings": "each line of the report depends on those before",
    "titanlite/techniques/data/chat_template.py conversations": "checks what an unknown template has rendered",
    "titanlite/data/files.py files_of": "tells a file, a folder and a glob apart, each with errors of its own",
}
"""The functions that have a cyclomatic complexity above MOST_COMPLEX, and why: three at most."""
HEART = (
    *("train", "train_step", "step_guard", "validation", "build", "build_llama"),
    *("model", "rope", "loss", "init", "optimizer"),
    *("parallel/mesh", "parallel/parallelize", "parallel/tensor", "parallel/fsdp", "parallel/pipeline"),
    *("parallel/activation_checkpoint", "parallel/compile", "parallel/attention"),
    *("parallel/tiled_attention", "parallel/tiles", "parallel/ring", "parallel/ulysses"),
    *("parallel/shards", "parallel/own_rules"),
    *("data/packing", "data/loader"),
)
"""The files of the loop, the step, the model, every parallelism and the data's order, without their endings."""
# What a run with checkpoints imports, with a token cache to build and with one that is there, is counted in
# tests/test_train.py, and so is what a rank of tensor and pipeline parallel imports, with compiled blocks, float8 and
# asynchronous checkpoints.
LINES_OF_A_RANK_OF_MANY_TECHNIQUES = 11_650
LINES_OF_A_DEBUG_RUN, LINES_WITH_A_TOKEN_CACHE = 10_300, 9_950
LINES_OF_THE_PACKAGE = 30_110
"""30,122 before LoRA, averages of the weights, epochs, --show, export --verify, the oracle for experts, recomputed
groups of blocks, logprobs and --gates; 30,643 before comments and docstrings were shortened; 30,087 before adapters of
experts; 30,115 before `titanlite diff` named options and sequences in another order, and --against took a z-loss;
30,122 before repeated code of tools and techniques left, of which the config of Hugging Face took a line (Seed-OSS)."""
CEILINGS = {
    "heart": 3351,
    "config": 2773,
    "config of Hugging Face": 1151,
    "data": 2181,
    "checkpoint": 1881,
    "launch": 1983,
    "metrics": 813,
    "files": 321,
    "hf": 884,
    "techniques": 4779,
    "tools": 9662,
    "other": 331,
}
"""Lines that each part of the package may have. They are fixed: a part that grows takes from itself, and a ceiling is
changed only in a commit that says what left."""
DEEPEST_IMPORT, MOST_IMPORTS, MOST_MODULES = 17, 133, 14


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


def long_functions(source: str, longest: int) -> list[str]:
    """Return the functions of a file that have more lines than `longest`."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return [node.name for node in functions if node.end_lineno - node.lineno + 1 > longest]


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_file_and_no_function_is_too_long(path: Path):
    longest = LINES_OF_THE_LOOP if relative(path) == "titanlite/train.py" else LONGEST_FUNCTION
    assert n_lines(path) <= LONGEST_FILE or relative(path) == SCHEMA
    assert long_functions(path.read_text(), longest) == []


def test_a_long_function_is_found():
    assert long_functions("def f():\n" + "    x = 1\n" * LONGEST_FUNCTION, LONGEST_FUNCTION) == ["f"]


def complexity(function: ast.FunctionDef) -> int:
    """Return the cyclomatic complexity of a function (McCabe, 1976): 1, and 1 for each branch, operand of `and` and
    `or`, and condition of a comprehension."""
    branches = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.comprehension)
    nodes = list(ast.walk(function))
    operands = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    return 1 + sum(isinstance(node, branches) for node in nodes) + operands


def complex_functions(sources: Mapping[str, str]) -> dict[str, int]:
    """Return the complexity of the functions that exceed MOST_COMPLEX, the largest first, by file and name."""
    found = {
        f"{path} {node.name}": complexity(node)
        for path, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and complexity(node) > MOST_COMPLEX
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def complex_functions_of_the_package() -> dict[str, int]:
    return complex_functions({relative(path): path.read_text() for path in SOURCES})


def test_three_functions_are_complex():
    assert complex_functions_of_the_package().keys() == MORE_COMPLEX.keys()
    assert len(MORE_COMPLEX) <= 3


def test_a_complex_function_is_found():
    body = "\n".join(f"    if a{number}:\n        pass" for number in range(MOST_COMPLEX))
    assert complex_functions({"b.py": f"def f():\n{body}\n"}) == {"b.py f": MOST_COMPLEX + 1}
    assert complex_functions({"b.py": f"def f():\n{body.replace('if a0', 'with a0')}\n"}) == {}


def conditions_on_objects(function: ast.FunctionDef) -> list[str]:
    """Return the conditions that ask whether an object exists: a bare name, `not` one, or a comparison with None."""
    conditions = [node.test for node in ast.walk(function) if isinstance(node, (ast.If, ast.IfExp, ast.While))]
    operands = [each for test in conditions for each in (test.values if isinstance(test, ast.BoolOp) else [test])]
    plain = [each.operand if isinstance(each, ast.UnaryOp) else each for each in operands]
    flags = {"is_first", "is_last", "stopping"}
    return [
        ast.unparse(each)
        for each in plain
        if (isinstance(each, ast.Name) and each.id not in flags)
        or (isinstance(each, ast.Compare) and "None" in ast.unparse(each) and ast.unparse(each) != "totals is None")
    ]


def test_the_loop_asks_for_no_object():
    """What a config does not ask for is an object that does nothing. `totals is None` asks what a step has given."""
    source = (ROOT / "titanlite" / "train.py").read_text()
    (loop,) = [node for node in ast.parse(source).body if getattr(node, "name", "") == "train"]
    assert complexity(loop) <= MOST_COMPLEX
    assert conditions_on_objects(loop) == []


def test_a_complex_loop_that_asks_for_an_object_is_found():
    (loop,) = ast.parse("def f():\n  if a and not b:\n    x = [1 for y in z if y] if c is not None else 0\n").body
    assert complexity(loop) == 5
    assert conditions_on_objects(loop) == ["a", "b", "c is not None"]


def budget_of(path: str) -> str:
    """Return the part whose ceiling counts a file, by its path in titanlite/."""
    if path.removesuffix(".py") in HEART:
        return "heart"
    if path.startswith("config/hf/"):
        return "config of Hugging Face"
    folder = path.partition("/")[0]
    return folder if folder in CEILINGS else "other"


def lines_by_part() -> dict[str, int]:
    """Return the lines that each part has; train.py of the clone is the package's, too."""
    lines = dict.fromkeys(CEILINGS, 0)
    for path in SOURCES:
        lines[budget_of(relative(path).removeprefix("titanlite/") if path.parent != ROOT else "")] += n_lines(path)
    return lines


@pytest.mark.parametrize("part", CEILINGS)
def test_no_part_exceeds_its_ceiling(part: str):
    assert lines_by_part()[part] <= CEILINGS[part]


def test_the_package_has_a_ceiling_of_its_own():
    assert sum(map(n_lines, SOURCES)) == sum(lines_by_part().values()) <= LINES_OF_THE_PACKAGE


def test_files_are_counted_for_one_part_each():
    assert budget_of("data/loader.py") == "heart"
    assert budget_of("data/shuffle.py") == "data"
    assert budget_of("config/hf/rope.py") == "config of Hugging Face"
    assert budget_of("config/schema.py") == "config"
    assert budget_of("techniques/moe/layer.py") == "techniques"
    assert budget_of("parallel/float8.py") == budget_of("rank.py") == budget_of("") == "other"


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


def part_of(module: str) -> str:
    """Return the part that a module is in: a folder with its files, a technique or a tool, or a module that is in none
    of them."""
    names = module.split(".")
    return ".".join(names[: 3 if names[1:2] in (["techniques"], ["tools"]) else 2])


def imports_of_parts(in_functions: bool = True) -> dict[str, frozenset[str]]:
    """Return which parts each of them imports."""
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        others = {part_of(name) for name in imports(module, in_functions)} - {part_of(module), "titanlite"}
        graph.setdefault(part_of(module), set()).update(others)
    return {part: frozenset(others) for part, others in graph.items()}


def test_imports_have_no_cycle():
    longest_chain({module: imports(module) for module in MODULES})


def test_parts_import_no_part_above_them():
    """Outside functions. Inside them, a few files choose a technique that an option asks for."""
    chain = longest_chain(imports_of_parts(in_functions=False))
    assert len(chain) - 1 <= DEEPEST_IMPORT, " -> ".join(chain)


def test_folders_import_few_others():
    arrows = {(folder_of(part), folder_of(other)) for part, others in imports_of_parts().items() for other in others}
    assert len([folder for folder, other in arrows if folder != other]) <= MOST_IMPORTS


def test_few_modules_are_in_no_folder():
    modules = [path for path in (ROOT / "titanlite").glob("*.py") if not path.stem.startswith("__")]
    assert len(modules) <= MOST_MODULES


CHOOSE_TECHNIQUES = {
    "titanlite.build",
    "titanlite.build_llama",
    "titanlite.data.open",
    "titanlite.data.token_cache",
    "titanlite.parallel.parallelize",
}


def test_the_core_imports_no_technique_and_no_tool():
    """A technique is imported in a function of one of five files, which choose it; a tool by nothing but its command,
    and by api.py, which offers tools to Python.

    build_llama.py is apart from build.py, since hf/names.py builds a model to know the shapes of its weights, and
    build.py imports what loads them.
    """
    choosing = set()
    for module in MODULES:
        if module.startswith(("titanlite.techniques", "titanlite.tools", "titanlite.api")):
            continue
        names = imports(module)
        assert not any(name.startswith("titanlite.tools") for name in names), module
        if any(name.startswith("titanlite.techniques") for name in names):
            choosing.add(module)
        assert not any(name.startswith("titanlite.techniques") for name in imports(module, in_functions=False)), module
    assert choosing == CHOOSE_TECHNIQUES


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "n_ranks"),
    [
        ("debug_tp", 2),
        ("debug", 1),
        ("debug_pp", 2),
        ("debug_cp", 4),
        ("debug_4d", 16),
    ],
)
def test_without_techniques_and_tools_the_core_trains(tmp_path: Path, name: str, n_ranks: int):
    for folder in ("titanlite", "configs"):
        ignored = shutil.ignore_patterns("techniques", "tools", "__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(ROOT / "train.py", tmp_path)
    launcher = ["torch.distributed.run", "--standalone", "--local-addr=localhost", f"--nproc-per-node={n_ranks}"]
    small = [
        "--training.steps=2",
        "--training.seq_len=64",
        "--training.local_batch_size=8",
        "--validation.enable=false",
    ]
    command = [sys.executable, "-m", *launcher, "train.py", f"configs/{name}.toml", *small, "--job.dump_folder=run"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "step 2/2  loss" in result.stdout


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
