"""Print the lines of titanlite that a config executes: building a run, one training step, a validation where enabled.

The model is shrunk and the layout stays, as in titanlite parity. The ranks are processes on this machine's CPUs, and
train without torch.compile, checkpoints and replica groups, on pydoc_topics unless --own gives data. Lines that no rank
executes, or only on import, are folded. Exit status: 0 done; 2 the config is wrong.
"""

import ast
import contextlib
import inspect
import os
import re
import sys
import tempfile
import threading
from itertools import chain, groupby
from pathlib import Path
from types import FrameType

from titanlite.config import Config, Launch, load
from titanlite.config.own import take_own
from titanlite.config.schema import SEEDED, DatasetOptions
from titanlite.launch.arguments import Parser
from titanlite.launch.launcher import ranks_wanted
from titanlite.launch.process import Signals
from titanlite.tools.parity.command import check_memory
from titanlite.tools.parity.shrink import smaller

PACKAGE = Path(__file__).parents[1]
HEART = re.escape(f"{PACKAGE}/")
HEART += r"((?!_|api|rank|torch)|parallel/(?!_|float8|logits|sinks)|data/(?=packing|loader))\w+\.py"


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    parser = Parser("titanlite source CONFIG [--section.key=value ...] [--own FILE.py:NAME] [--all]", __doc__)
    parser.add_argument("--all", action="store_true", help="print files that are neither heart nor techniques, too")
    arguments, argv = parser.parse_known_args(argv)
    own, argv = take_own(argv)
    loaded = load(argv, own)
    n_ranks, training = ranks_wanted(loaded, os.environ, n_devices=0), loaded.config.training
    config, _ = smaller(loaded, Launch(0, 0, n_ranks, n_ranks, 0), training.mixed_precision_param)
    check_memory(loaded.file, n_ranks)
    from titanlite.tools.parity.process_pool import ProcessPool  # late import: it imports torch

    others = "" if arguments.all else "(parallel/|techniques/|torch_)"
    files = rf"{HEART}|{re.escape(f'{PACKAGE}/')}{others}.*|{re.escape(own.place.rpartition(':')[0])}"
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(ProcessPool(n_ranks, timeout_seconds=600)) as pool:
        config = one_step(config.replace(training__max_norm=training.max_norm, job__dump_folder=folder))
        ranks = pool.run(lines_of_a_step, config=config, files=files)
    ran = {file: set[int]().union(*(each.get(file, ()) for each in ranks)) for lines in ranks for file in lines}
    print(f"{Path(loaded.file).name}, shrunk: {n_ranks} rank(s), compile.enable = false")
    n_run, n_all = map(sum, zip(*(print_lines(Path(file), lines) for file, lines in ran.items()), strict=True))
    heart = sum(len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py") if re.fullmatch(HEART, f"{path}"))
    print(f"\n{n_run:,} lines of {len(ran)} files run, {n_all:,} with docstrings and comments; the heart has {heart:,}")
    return 0


def one_step(config: Config) -> Config:
    """Return a config with one step and, unless the user gives data, with data that need no download."""
    values = {f"training__{key}": field.default for key, field in DatasetOptions.model_fields.items()}
    values |= {"training__datasets": [], "training__streaming": False, "training__cache_folder": config.job.dump_folder}
    values |= {"training__steps": 1, "compile__enable": False, "checkpoint__enable": False, "model__hf_assets_path": ""}
    values |= {"validation__dataset_path": "", "validation__dataset_split": "", "validation__fraction": 0.1}
    values |= {"validation__steps": 1, "checkpoint__initial_load_path": SEEDED}
    size = 258 + -258 % config.parallelism.tensor_parallel_degree  # 256 bytes, BOS and EOS, rounded up
    return config.replace(**values, model__vocab_size=config.model.vocab_size if config.own.data else size)


def lines_of_a_step(config: Config, files: str) -> dict[str, set[int]]:
    """Train on a rank of a pool. Return the lines that run in functions, by file, for files that match `files`."""
    from titanlite.train import train  # late import: --help need not wait for torch

    ran: dict[str, set[int]] = {}

    def trace(frame: FrameType, event: str, _: object) -> object:
        if event == "line" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a line of a function, not of a module
            ran.setdefault(frame.f_code.co_filename, set()).add(frame.f_lineno)
        return trace if re.fullmatch(files, frame.f_code.co_filename) else None

    threading.settrace(trace)
    sys.settrace(trace)
    with contextlib.redirect_stdout(None):
        train(config, Launch.from_environment(n_devices=0), Signals())
    return ran


def print_lines(file: Path, ran: set[int]) -> tuple[int, int]:
    """Print the lines of a file that ran. Return the numbers of lines that ran and of printed lines (with comments)."""
    lines, nodes = (text := file.read_text()).splitlines(), list(ast.walk(ast.parse(text)))
    functions = [range(node.lineno, node.end_lineno + 1) for node in nodes if isinstance(node, ast.FunctionDef)]
    ran = ran.intersection(chain(*functions))  # lines outside functions run at the import
    others = {n for n, line in enumerate(lines, 1) if re.fullmatch(r"\s*([#@].*|(else|try|finally):.*)?", line)}
    statements = set[int]()  # lines of statements that ran; of a statement with a block, only the header
    for node in nodes:
        extent = range(node.lineno, node.end_lineno + 1) if isinstance(node, (ast.stmt, ast.excepthandler)) else ()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # docstrings do not run
            others.update(extent)
        elif not ran.isdisjoint(extent):
            statements.update(range(node.lineno, node.body[0].lineno) if hasattr(node, "body") else extent)
    shown = set(statements)
    for number in sorted(others, reverse=True):
        shown |= {number} if number + 1 in shown else set()
    print(f"\n{str(file).removeprefix(f'{PACKAGE.parent}/')}: {len(statements)} of {len(lines)} lines run")
    for is_shown, numbered in groupby(enumerate(lines, 1), key=lambda item: item[0] in shown):
        chunk = dict(numbered)
        if is_shown:
            print(*(f"{number:5}  {line}".rstrip() for number, line in chunk.items()), sep="\n")
        else:
            print(" " * 7 + re.sub(r"\S.*", f"... {len(chunk)} line(s) not run", next(filter(None, chunk.values()))))
    return len(statements), len(shown)
