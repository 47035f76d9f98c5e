"""Write docs/testing.md, "How titanlite is tested", from the tables of the tests and the logs of benchmarks/.

    python -m tests.testing_page

Every number of the page is counted here from a file of the repository; dates and commands stand in its tables. Only
what was not counted by a program (which versions were tried, what is not tested) is written by hand, in this file.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from tests import pages
from tests.mutants.table import MUTANTS
from tests.parallel.test_layouts import world_size
from titanlite.config.loader import tomllib

ROOT = Path(__file__).parents[1]
PAGE, LOGS = ROOT / "docs" / "testing.md", ROOT / "benchmarks" / "logs"
NIGHTLY = "pytest -m nightly"


class Evidence(NamedTuple):
    """A row of the first table."""

    what: str
    result: str
    date: str
    command: str
    log: str
    """A file of benchmarks/logs, or a page."""

    def cells(self) -> list[str]:
        return [self.what, self.result, self.date, f"`{self.command}`", self.log]


def log(name: str) -> str:
    return f"[log](../benchmarks/logs/{name})"


def json_lines(*names: str) -> list[dict[str, Any]]:
    """Return the objects of some logs, one a line."""
    return [json.loads(line) for name in names for line in (LOGS / name).read_text().splitlines()]


# Layouts --------------------------------------------------------------------------------------------------------------


def ranks_of(name: str, options: dict[str, Any]) -> int:
    """Return the number of ranks of a case; cases of data parallel alone say it in their name."""
    named = re.match(r"(\d) ranks", name)
    return int(named[1]) if named else world_size(options)


def layouts_by_ranks() -> tuple[list[list[str]], int, int]:
    """Return a row for each number of ranks: the layouts of every run and the nightly ones; and the two sums."""
    always, nightly = Counter(), Counter()
    for cases, at_night in pages.tables().values():
        for name, options in cases.items():
            (nightly if name in at_night else always)[ranks_of(name, options)] += 1
    rows = [[str(n), str(always[n]), str(nightly[n])] for n in sorted(always | nightly)]
    return rows, always.total(), nightly.total()


# Injected bugs --------------------------------------------------------------------------------------------------------


def mutants_by_folder() -> list[list[str]]:
    """Return a row for each folder of the package: its mutants, those that a test noticed, and one of them."""
    results = json.loads((ROOT / "tests" / "mutants" / "results.json").read_text())
    folders: dict[str, list[Any]] = {}
    for mutant in MUTANTS:
        folder = mutant.file.rpartition("/")[0]
        folders.setdefault(f"titanlite/{folder}".rstrip("/"), []).append(mutant)
    rows = []
    for folder, mutants in sorted(folders.items()):
        noticed = sum(bool(results.get(mutant.what, {}).get("noticed by")) for mutant in mutants)
        rows.append([folder, str(len(mutants)), str(noticed), mutants[0].what])
    return rows


def named_bugs() -> str:
    """Return what `titanlite diff` said of injected bugs."""
    last = (LOGS / "injected_bugs.log").read_text().splitlines()[-1]
    bugs, layouts, differ, named = re.findall(r"\d+", last)
    return f"{bugs} bugs under {layouts} layouts: {named} of the {differ} runs that differ are named rightly"


# Faults ---------------------------------------------------------------------------------------------------------------

CHAOS = [f"chaos_seed_{seed}.jsonl" for seed in (0, 1, 2)]


def chaos() -> str:
    """Return what the campaigns found. Rounds do not count in which no fault struck, or, with seed 0, SIGINT, which the
    shell of that campaign had its processes ignore."""
    rounds = [
        each
        for each in json_lines(*CHAOS[1:]) + [each for each in json_lines(CHAOS[0]) if "SIGINT" not in each["fault"]]
        if each["outcome"] not in ("rejected", "ended before the fault")
    ]
    faults = [each for each in rounds if not each["fault"].startswith("none")]
    completed, problems = len(rounds) - len(faults), sum(bool(each["problems"]) for each in rounds)
    kinds = len({each["fault"] for each in faults})
    return f"{len(faults)} faults of {kinds} kinds, {completed} completed trainings; {problems} problems"


def hostile_inputs() -> tuple[int, int]:
    """Return how many kinds of hostile input docs/reliability.md lists, and the cases of their tests."""
    text = (ROOT / "docs" / "reliability.md").read_text()
    table = text.partition("## Hostile and damaged input")[2].partition("\n## ")[0]
    counts = re.findall(r"`test_\w+` (\d+)", table)
    return sum(line.startswith("| ") for line in table.splitlines()) - 2, sum(map(int, counts))


# The page -------------------------------------------------------------------------------------------------------------


def evidence() -> list[Evidence]:
    """Return the rows of the first table."""
    _, always, nightly = layouts_by_ranks()
    kinds, inputs = hostile_inputs()
    noticed = sum(int(row[2]) for row in mutants_by_folder())
    published = len(tomllib.loads((ROOT / "benchmarks" / "published_runs.toml").read_text())["run"])
    return [
        Evidence(
            "layouts that equal one process in float64",
            f"{always} in every run of the tests, {nightly} more nightly; all pass",
            "2026-11-24",
            f"{NIGHTLY} tests/parallel tests/techniques tests/test_families.py",
            "[list](reference/support.md)",
        ),
        Evidence(
            "bugs injected into the package, one at a time",
            f"{noticed} of {len(MUTANTS)} noticed by the tests of every run",
            "2026-11-24",
            "python -m tests.mutants",
            "[list](../tests/mutants/README.md)",
        ),
        Evidence("bugs that `titanlite diff` must name", named_bugs(), "2026-11-25", "python -m tests.tools.diff.bugs",
                 log("injected_bugs.log")),
        Evidence("faults during a run", chaos(), "2026-11-22", "python -m tests.chaos --seed 1 --minutes 30",
                 " ".join(map(log, CHAOS))),
        Evidence("hostile and damaged inputs", f"{inputs} cases of {kinds} kinds", "every commit", "pytest",
                 "[list](reliability.md#hostile-and-damaged-input)"),
        Evidence("published training runs beside the plan's estimate", f"{published}", "2026-11-23",
                 "python benchmarks/plan_accuracy.py published", log("plan_accuracy_published.log")),
    ]  # fmt: skip


VERSIONS = [
    ("torch 2.13.0, Python 3.11", "everything on this page that names no other version", "every commit", "pytest"),
    ("torch 2.11.0, 2.12.1, 2.14.1, 2.15.0", "all layouts of pp, tp, cp and their combinations; data parallel; the "
     "plan; the reference configs", "2026-11-22", f"{NIGHTLY} tests/parallel tests/tools/plan"),
    ("torch 2.11.0+cu130 and 2.13.0+cu130 on a null CUDA", "every option and axis takes three steps; memory, waits, "
     "kernels, races", "2026-11-25", f"{NIGHTLY} tests/null_cuda"),
    ("Python 3.12, 3.13", "the default tests, once", "2026-11-22", "pytest"),
    ("Python 3.10", "parts of the default tests", "2026-11-22", "pytest"),
]  # fmt: skip

NOT_TESTED = """\
- **GPUs.** Nothing has run on a GPU: not NCCL, not flash attention, cuDNN or float8's kernels, no speed and no curve.
  The CUDA build runs on a null CUDA, which replaces the driver and the libraries: it shows kernels that are launched,
  memory, waits and the order of streams, and computes nothing.
- **More than 64 real processes**, more than two nodes, and nodes on real networks. What is said of 16,384 ranks was
  computed with made-up ones.
- **Long trainings to a loss that matters.** The longest curve on this page is of minutes on two CPU cores.
- **NFS, Lustre and object stores**, and the network to the Hugging Face hub.
- **Python 3.14**, Windows and macOS.
- **Compiled layouts with inductor**: the tests compile with the backend `aot_eager`, except for some on the null CUDA.
- **One failure is not explained**: a gloo rank in a pool of test processes died of a corrupted heap twice in some 700
  cases, and four times since. The tests run such a case again, once, with a warning
  ([what is known](../benchmarks/NOTEBOOK.md#a-known-failure-without-an-explanation))."""


def page() -> str:
    """Return the page."""
    by_ranks, always, nightly = layouts_by_ranks()
    parts = [
        "# How titanlite is tested\n",
        pages.wrapped(
            "titanlite promises that every layout computes what one process computes. This page says how that and the "
            "rest is tested, with what result, when, and with which command. `python -m tests.testing_page` writes it, "
            "and counts each number from the tests and the logs. Where a row has a command, it reproduces the result."
        ),
        pages.table(["what", "result", "date", "command", "evidence"], [row.cells() for row in evidence()]),
        "## Layouts against one process\n",
        pages.wrapped(
            "Real processes on gloo take three AdamW steps with clipping, with different numbers of valid tokens on "
            "the ranks. Loss, gradient norm, every gradient, every updated weight and the validation loss must equal "
            "those of a single process in float64: to 1e-12 for data parallel, else to 1e-11, relative to the largest "
            "element of a tensor. The reference is not the program run on one rank: it is a second, plain "
            "implementation of the step ([reference.py](../titanlite/tools/parity/reference.py)). "
            f"{always + nightly} cases, {always} of them in every run:"
        ),
        pages.table(["ranks", "every run", "nightly"], by_ranks),
        "## Injected bugs\n",
        pages.wrapped(
            "A test counts by the bugs that it notices. Each mutant is one wrong edit of the package, of the kind that "
            "people make: a missing sum, a wrong divisor, a stale buffer, an off-by-one. The default tests must notice "
            "it, or its survival is explained. The example is the first of its folder:"
        ),
        pages.table(["folder", "mutants", "noticed", "example"], mutants_by_folder()),
        "## Versions\n",
        pages.table(["versions", "what passed", "date", "command"], [[*row[:3], f"`{row[3]}`"] for row in VERSIONS]),
        "## What is not tested\n",
        NOT_TESTED + "\n",
    ]
    return "\n".join(parts)


def main() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
