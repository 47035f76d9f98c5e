"""Run the mutants: each wrong edit is made in a copy of the project, where the tests have to notice it.

    python -m verification.mutants                      all of them; results.json keeps what is known of each
    python -m verification.mutants --new                those that results.json does not have
    python -m verification.mutants --only "loss scale"  those whose description or file has this text
    python -m verification.mutants --baseline           the first tests of all mutants, without any edit: they pass
    python -m verification.mutants --table              write README.md from results.json

The test that noticed a mutant the last time is run first, then the mutant's own tests until one fails. If none does,
the rest of the default suite is run, without the tests of style, pages and sizes, which look at the text of the code. A
test that runs longer than its limit notices too.

Exit status: 0 if every mutant is noticed or its survival is explained, else 1.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from verification.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
CRASHES = (
    "AttributeError",
    "ImportError",
    "NameError",
    "SyntaxError",
    "TypeError",
    "titanlite.tools.parity.process_pool",
)
"""Beginnings of errors that only show that an edit no longer runs, or that ranks of a busy machine gave no answer."""
RESULTS, TABLE = Path(__file__).parent / "results.json", Path(__file__).parent / "README.md"
LOOK_AT_TEXT = ("architecture", "benchmarks", "docs", "language", "support_page", "tutorials", "wheel")
"""Tests that do not run the code, or run all of it once more."""
OPTIONS = ("-x", "-q", "--no-header", "--timeout=120", "-p", "no:cacheprovider", "--hypothesis-profile=mutants")


def mutated(mutant: Mutant, source: str) -> str:
    """Return the text of a file with a mutant's edit. Raises ValueError if its text does not occur exactly once."""
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file}: {mutant.what}: the text occurs {source.count(mutant.old)} times")
    return source.replace(mutant.old, mutant.new)


def copy_project(folder: Path) -> None:
    """Copy the project to a folder, without .git and the files that git ignores."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in (name for name in listed if (ROOT / name).is_file()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


@contextlib.contextmanager
def mutated_copy(mutant: Mutant) -> Iterator[Path]:
    """Copy the project to a temporary folder and make a mutant's edit there."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_project(folder)
        path = folder / "titanlite" / mutant.file
        path.write_text(mutated(mutant, path.read_text()))
        yield folder


def first_failure(folder: Path, arguments: list[str]) -> tuple[str, str]:
    """Run tests in a copy of the project. Return the first test that failed, and its error in a line; "" if all pass.

    Raises:
        RuntimeError: if no test was run, or a file of tests cannot be imported: this says nothing about the edit.
    """
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "400"}
    command = [sys.executable, "-m", "pytest", *OPTIONS, "-rfE", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?::\S+?(?:\[.*?\])?)(?: - (.*))?$", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1, 2) or (done.returncode and not failed):
        raise RuntimeError(
            f"{shlex.join(command)}: status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return (failed[1], failed[2] or "") if failed else ("", "")


def run_tests(folder: Path, arguments: list[str]) -> str:
    """Run tests in a copy of the project. Return the first test that failed; "" if all pass."""
    return first_failure(folder, arguments)[0]


def run_known_test(folder: Path, test: str) -> str:
    """Run the test that noticed a mutant the last time. Return it if it fails; "" if it passes or no longer exists."""
    try:
        return run_tests(folder, [test]) if test else ""
    except RuntimeError:
        return ""


def try_mutant(mutant: Mutant, *, first_only: bool, noticed_by: str = "") -> dict[str, Any]:
    """Make a mutant's edit in a copy of the project and run the tests, `noticed_by` first. Return which test noticed,
    "" if none did, and the seconds that this took."""
    begin = time.monotonic()
    with mutated_copy(mutant) as folder:
        noticed = run_known_test(folder, noticed_by) or run_tests(folder, shlex.split(mutant.tests))
        if not noticed and not first_only and not mutant.survives:
            ignored = [*(f"test_{each}" for each in LOOK_AT_TEXT), "verification/test_mutants"]
            noticed = run_tests(folder, [f"--ignore=tests/{each}.py" for each in ignored])
    return {"noticed by": noticed, "seconds": round(time.monotonic() - begin)}


def known() -> dict[str, dict[str, Any]]:
    """Return the results that are known, by the description of the mutant."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def table(mutants: Iterable[Mutant], results: dict[str, dict[str, Any]]) -> str:
    """Return README.md."""
    rows = []
    for mutant in mutants:
        result = results.get(mutant.what, {})
        test = result.get("noticed by", "not run")
        outcome = test if test == "not run" else f"`{test}`" if test else f"no test: {mutant.survives}"
        rows.append(f"| {mutant.file} | {mutant.what} | {outcome} |")
    n_noticed = sum(bool(result["noticed by"]) for result in results.values())
    return (
        "# Mutation testing\n\n"
        "Each mutant is one wrong edit of a file, in [table.py](table.py). `python -m verification.mutants` makes it\n"
        "in a copy of the project and runs the default suite until a test notices. `--table` writes this page.\n\n"
        f"Run so far: {len(results)} of {len(rows)}; noticed: {n_noticed}.\n\n"
        "| file of titanlite/ | what is wrong | noticed first by |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutants whose file or description has this text")
    parser.add_argument("--new", action="store_true", help="mutants that results.json does not have")
    parser.add_argument("--first-only", action="store_true", help="run no more than each mutant's first tests")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--baseline", action="store_true", help="run the first tests of all mutants without an edit")
    parser.add_argument("--table", action="store_true", help="write README.md from results.json")
    arguments = parser.parse_args(argv)
    results = known()
    if arguments.table:
        TABLE.write_text(table(MUTANTS, results))
        return 0
    chosen = [mutant for mutant in MUTANTS if arguments.only in f"{mutant.file}: {mutant.what}"]
    if arguments.baseline:
        failed = {tests: run_tests(ROOT, shlex.split(tests)) for tests in sorted({each.tests for each in chosen})}
        for tests, name in failed.items():
            print(f"{name or 'pass':60}  {tests}", flush=True)
        return int(any(failed.values()))
    if arguments.new:
        chosen = [mutant for mutant in chosen if mutant.what not in results]

    def run(mutant: Mutant) -> bool:
        try:
            noticed_by = results.get(mutant.what, {}).get("noticed by", "")
            result = try_mutant(mutant, first_only=arguments.first_only, noticed_by=noticed_by)
        except RuntimeError as error:
            print(f"{mutant.file}: {mutant.what}: {error}", flush=True)
            return False
        results[mutant.what] = result
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        noticed = result["noticed by"]
        print(
            f"{'noticed ' if noticed else 'SURVIVES'} {result['seconds']:4} s  {mutant.file}: {mutant.what}: {noticed}",
            flush=True,
        )
        return bool(noticed or mutant.survives)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        return int(not all(list(pool.map(run, chosen))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
