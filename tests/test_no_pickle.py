"""No file is read as a pickle, and no message of a worker is one: whoever writes a pickle chooses code that its reader
runs."""

import ast
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.helpers.data import Code, rejection
from tests.test_architecture import SOURCES, relative
from tests.verification.test_fuzz import outcome
from titanlite.data.hf_tokenizer import HuggingFaceTokenizer
from titanlite.data.tokenizer import ByteTokenizer
from titanlite.data.worker import Worker, named
from verification.fuzz.targets import TARGETS

# The sources ---------------------------------------------------------------------------------------------------------

UNPICKLES = (
    *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "multiprocessing"),
    *("concurrent.futures.ProcessPoolExecutor", "torch.load", "torch.jit.load", "torch.package", "torch.export.load"),
    *("torch.multiprocessing", "torch.serialization", "torch.distributed.checkpoint.load", "numpy.load"),
    *("torch.distributed.checkpoint.FileSystemReader", "pandas.read_pickle"),
)
"""Modules and functions that read pickles."""
METHODS = ("recv", "all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list", "scatter_object")
"""Names of methods that do, of whatever module: connections of multiprocessing, and collectives of Python objects."""
AMONG_OWN_PROCESSES = {
    "checkpoint/checkpointer.py": {".gather_object", ".broadcast_object_list"},
    "checkpoint/ranks.py": {".all_gather_object"},
    "techniques/data/streaming.py": {".all_gather_object"},
    "data/token_cache.py": {".all_gather_object"},
    "tools/forkserver.py": {"multiprocessing"},
    "launch/process_group.py": {".all_gather_object"},
    "launch/same_config.py": {".all_gather_object", ".broadcast_object_list"},
    "techniques/muon.py": {".all_gather_object"},
    "techniques/replicas/torchft.py": {".broadcast_object_list"},
    "techniques/sdc.py": {".all_gather_object"},
    "tools/parity/process_pool.py": {".recv", "multiprocessing"},
    "tools/parity/training_run.py": {".all_gather_object"},
    "tools/plan/planner.py": {"multiprocessing", "concurrent.futures.ProcessPoolExecutor"},
}
"""What ranks of one run tell each other, and what a command passes to processes that it has started: they read no file
as a pickle, and run no tokenizer."""


def unpicklers(source: str) -> set[str]:
    """Return what a Python file uses of UNPICKLES and METHODS, under whatever name it is imported."""
    tree, full_names, found = ast.parse(source), dict[str, str](), set[str]()
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else []:
            full = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
            root = full if isinstance(node, ast.ImportFrom) or alias.asname else alias.name.split(".")[0]
            full_names[alias.asname or root.rpartition(".")[2]] = root
            found.add(full)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            found |= {f"{full_names.get(root, root)}.{rest}", f".{node.attr}"}
    methods = {f".{name}" for name in METHODS}
    return found & methods | {name for name in UNPICKLES if any(f"{each}.".startswith(f"{name}.") for each in found)}


def test_the_package_reads_no_pickle():
    found = {relative(path).removeprefix("titanlite/"): unpicklers(path.read_text()) for path in SOURCES}
    assert {name: own for name, own in found.items() if own} == AMONG_OWN_PROCESSES


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", "pickle"),
        ("def f():\n    from pickle import loads as read", "pickle"),
        ("import torch\ntorch.load(file, weights_only=True)", "torch.load"),
        ("import torch as t\nt.load(file)", "torch.load"),
        ("from torch import load", "torch.load"),
        ("import numpy as np\nnp.load(file, allow_pickle=True)", "numpy.load"),
        ("import torch.distributed.checkpoint as dcp\ndcp.load(state)", "torch.distributed.checkpoint.load"),
        ("from multiprocessing.connection import Client", "multiprocessing"),
        ("pipe.recv()", ".recv"),
        ("import torch.distributed as dist\ndist.all_gather_object(a, b)", ".all_gather_object"),
    ],
)
def test_a_file_that_reads_pickles_is_found(source: str, found: str):
    assert found in unpicklers(source)
    assert not unpicklers("import torch\nimport numpy as np\nnp.save(torch.loadtxt, json.load(file))")


# What is read --------------------------------------------------------------------------------------------------------

PICKLES = {f"protocol {protocol}": pickle.dumps(Code(), protocol) for protocol in (0, 2, 5)}


@pytest.fixture(autouse=True)
def no_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert not Path("code_ran").exists()


def with_pickles(data: Any, content: bytes) -> Any:
    """Return an input of a reader with a pickle for each file."""
    if isinstance(data, tuple):
        return tuple(with_pickles(each, content) for each in data)
    return content if isinstance(data, bytes) else data


@pytest.mark.parametrize("name", TARGETS)
def test_a_pickle_runs_in_no_reader_of_files(name: str, tmp_path: Path):
    (strategy, check), seen = TARGETS[name](tmp_path), set[tuple[str, ...]]()

    @settings(max_examples=40, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def run(data: Any) -> None:
        files = tuple(each for each in data if isinstance(each, str)) if isinstance(data, tuple) else ()
        for content in PICKLES.values() if files not in seen else ():
            outcome(check, with_pickles(data, content))
        seen.add(files)

    run()


# The pipe of a worker ------------------------------------------------------------------------------------------------


def message(kind: bytes, content: bytes) -> bytes:
    return kind + b" " + content + b"\n"


NO_ANSWERS = {
    **{name: content + b"\n" for name, content in PICKLES.items()},
    **{f"{name} in a message": message(b"result", content) for name, content in PICKLES.items()},
    "a pickle of another kind": message(b"pickle", PICKLES["protocol 5"]),
    "a text that is no text": message(b"result", b"5"),
    "nested lists": message(b"result", b"[" * 100_000 + b"]" * 100_000),
    "a place that is none": message(b"at", b'["a", 3.5]'),
    "an error without lines": message(b"error", b"[true, 5]"),
    "a report that is none": message(b"report", b'["1", 2]'),
    "a name that is not UTF-8": message(b"\xff", b"5"),
    "a line of nothing": b"\n",
}


@pytest.mark.parametrize("answer", NO_ANSWERS)
def test_what_a_worker_sends_is_checked(answer: str, tmp_path: Path):
    """A file has taken the worker over, which goes on running."""
    worker = Worker("folder")
    worker.close()
    (tmp_path / "answer").write_bytes(NO_ANSWERS[answer])
    code = "import sys, time; sys.stdout.buffer.write(open('answer', 'rb').read()); sys.stdout.flush(); time.sleep(600)"
    worker.process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    line = rejection(lambda: worker.call(HuggingFaceTokenizer.decode, [1]))
    assert line == "folder: its tokenizer.json or chat template makes a process send what is no answer; correct it"
    assert worker.process.wait(10) < 0
    worker.close()


@pytest.mark.parametrize("content", PICKLES)
def test_a_worker_runs_no_pickle(content: str):
    worker = Worker("")
    worker.process.stdin.write(PICKLES[content] + b"\n")
    worker.process.stdin.close()
    assert worker.process.wait(30) == 1
    worker.close()


@pytest.mark.parametrize("name", ["posix:system", "titanlite.data.worker:os.system"])
def test_a_call_names_a_function_of_titanlite(name: str):
    with pytest.raises(ValueError, match=f"^{name} is no function of titanlite$"):
        named(name)
    worker = Worker("")
    worker.process.stdin.write(message(name.encode(), b'["touch code_ran"]'))
    worker.process.stdin.flush()
    line = rejection(lambda: worker.call(ByteTokenizer.decode, [97]))
    assert line.endswith(f"{name} is no function of titanlite")
    worker.close()
