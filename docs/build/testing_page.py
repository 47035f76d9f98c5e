"""Write docs/testing.md, "How titanlite is tested", from the tables of the tests and the logs of benchmarks/.

    python -m docs.build.testing_page

Every number of the page is counted here from a file of the repository; dates and commands stand in its tables. Only
what was not counted by a program (which versions were tried, what is not tested) is written by hand, in this file.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from docs.build import pages
from docs.build.published_page import dense_runs, summary
from tests.parallel.test_layouts import world_size
from verification.mutants import public_bugs
from verification.mutants.table import MUTANTS

ROOT = Path(__file__).parents[2]
PAGE, LOGS = ROOT / "docs" / "testing.md", ROOT / "benchmarks" / "logs"
NIGHTLY = "pytest -m nightly"
BUGS = ("public_bugs.log", "public_bugs_lora.log")


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


class Layouts(NamedTuple):
    """The cases of the support page that are compared in float64, by their number of ranks, and those in low
    precision."""

    always: Counter[int]
    nightly: Counter[int]
    low_precision: int

    def rows(self) -> list[list[str]]:
        """Return a row for each number of ranks: the cases of every run of the tests and the nightly ones."""
        return [[str(n), str(self.always[n]), str(self.nightly[n])] for n in sorted(self.always | self.nightly)]


def count_layouts() -> Layouts:
    always, nightly, low_precision = Counter[int](), Counter[int](), 0
    for title, (cases, at_night) in pages.tables().items():
        if title.startswith("Low precision"):
            low_precision += len(cases)
            continue
        for name, options in cases.items():
            (nightly if name in at_night else always)[ranks_of(name, options)] += 1
    return Layouts(always, nightly, low_precision)


# Injected bugs --------------------------------------------------------------------------------------------------------


def mutants_by_folder() -> list[list[str]]:
    """Return a row for each folder of the package: its mutants, those that a test noticed, and one of them."""
    results = json.loads((ROOT / "verification" / "mutants" / "results.json").read_text())
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
    return f"{bugs} bugs under {layouts} layouts: {named} of the {differ} runs that differ have the right place named"


def caught_bugs() -> str:
    """Return how many mistakes of public bugs fail a test."""
    counts = [re.findall(r"\d+", each.read_text().splitlines()[-1]) for each in map(LOGS.joinpath, BUGS)]
    caught, bugs = (sum(map(int, column)) for column in zip(*counts, strict=True))
    projects = len({bug.repository for bug in public_bugs.PUBLIC_BUGS})
    assert bugs == len(public_bugs.PUBLIC_BUGS), "public_bugs.log is of other bugs"
    return f"{caught} of {bugs}, from {projects} projects, are noticed by the test that is named"


# Random layouts -------------------------------------------------------------------------------------------------------


def random_layouts() -> str:
    """Return what became of random layouts. The one that differed is equal under a tolerance that was derived since."""
    drawn, equal, late, differs = re.findall(r"\d+", (LOGS / "random_layouts_report.log").read_text().splitlines()[0])
    in_float64 = len(re.findall(r"\| equal \| \S+ of 1\.0e-11 allowed", (LOGS / "random_layouts.log").read_text()))
    return (
        f"{equal} of {drawn} equal, {in_float64} of them in float64 to 1e-11; {late} rejected with an error message "
        f"while being built; {differs} differed, in bfloat16, by 1 % more than allowed, and is equal under a tolerance "
        "that was derived later"
    )


def wrong_configs() -> str:
    last = (LOGS / "random_wrong_configs.log").read_text().splitlines()[1]
    *_, accepted, rejected, wrong = re.findall(r"\d+", last)
    return f"{rejected} rejected with messages that name an option, {accepted} accepted and built, {wrong} tracebacks"


def published_runs() -> str:
    """Return how far the plan's speeds are from published ones."""
    runs = dense_runs()
    return f"speed of {len(runs)} dense runs: {summary(runs)}"


def long_run() -> str:
    """Return how many steps the longest run has taken, and what its last ones gave when they were taken again."""
    text = (LOGS / "long_run_1000000.log").read_text()
    (steps,), (again,) = (
        re.findall(rf"^{line}", text, re.MULTILINE) for line in (r"([\d,]+) steps in", r"from (step .*)")
    )
    again = again.replace(" on again:", " gives")
    return f"{steps} steps; running again from {again}; the notebook has memory and time per step"


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


def many_ranks() -> str:
    """Return what the campaign on 64 ranks found. Its test compares the completed curve with an undisturbed one."""
    rounds = json_lines("chaos_64_ranks.jsonl")
    faults = [each for each in rounds if not each["fault"].startswith("none")]
    problems = sum(bool(each["problems"]) for each in rounds)
    return f"{len(faults)} faults, completed trainings: {len(rounds) - len(faults)}; {problems} problems"


def hostile_inputs() -> tuple[int, int]:
    """Return how many kinds of hostile input docs/reliability.md lists, and the cases of their tests."""
    text = (ROOT / "docs" / "reliability.md").read_text()
    table = text.partition("## Hostile and damaged input")[2].partition("\n## ")[0]
    counts = re.findall(r"`test_\w+` (\d+)", table)
    return sum(line.startswith("| ") for line in table.splitlines()) - 2, sum(map(int, counts))


# The page -------------------------------------------------------------------------------------------------------------


def evidence(layouts: Layouts, noticed: int) -> list[Evidence]:
    """Return the rows of the first table. `noticed` is the number of mutants that a test noticed."""
    kinds, inputs = hostile_inputs()
    return [
        Evidence(
            "layouts that equal one process in float64",
            f"{layouts.always.total()} in every run of the tests, {layouts.nightly.total()} more nightly; all pass",
            "2026-11-24",
            f"{NIGHTLY} tests/parallel tests/techniques tests/test_families.py",
            "[list](reference/support.md)",
        ),
        Evidence("layouts drawn at random within the rules", random_layouts(), "2026-11-25",
                 "python -m verification.random_layouts --seed 0 --count 500",
                 " ".join(log(f"random_layouts{name}.log") for name in ("", "_report", "_seed_363"))),
        Evidence("configs drawn without regard to the rules", wrong_configs(), "2026-11-25",
                 "python -m verification.random_layouts --wrong 2000", log("random_wrong_configs.log")),
        Evidence("layouts and one process over many steps", "eight layouts, and a run killed five times (below)",
                 "2026-11-25",
                 "python -m verification.layout_distance train FOLDER", log("layout_distance.log")),
        Evidence(
            "bugs injected into the package, one at a time",
            f"{noticed} of {len(MUTANTS)} noticed by the tests of every run",
            "2026-11-28",
            "python -m verification.mutants",
            "[list](../verification/mutants/README.md)",
        ),
        Evidence("bugs that `titanlite diff` must name", named_bugs(), "2026-11-25", "python -m tests.tools.diff.bugs",
                 log("injected_bugs.log")),
        Evidence("public bugs of other trainers, injected into titanlite", caught_bugs(), "2026-11-25",
                 "python -m verification.mutants.public_bugs", " ".join(map(log, BUGS))),
        Evidence("faults during a run", chaos(), "2026-11-22", "python -m verification.chaos --seed 1 --minutes 30",
                 " ".join(map(log, CHAOS))),
        Evidence("faults on 64 ranks, on two cores", many_ranks(), "2026-11-25",
                 "pytest -m nightly tests/verification/test_chaos.py::test_64_ranks", log("chaos_64_ranks.jsonl")),
        Evidence("a long run, killed in the middle", long_run(), "2026-11-25", "python -m verification.long_run",
                 log("long_run_1000000.log")),
        Evidence("hostile and damaged inputs", f"{inputs} cases of {kinds} kinds", "every commit", "pytest",
                 "[list](reliability.md#hostile-and-damaged-input)"),
        Evidence("published training runs beside the plan's estimate", published_runs(), "2026-11-28",
                 "python -m benchmarks.planner.plan_accuracy published 2026",
                 f"{log('plan_accuracy_published.log')} {log('plan_accuracy_2026.log')}"),
        Evidence("curves that others published", "nanoGPT's and torchtitan's (below); 100 steps of a third",
                 "2026-11-25",
                 "python -m benchmarks.others.published_curves nanogpt --text FILE",
                 "[notebook](../benchmarks/NOTEBOOK.md#published-curves)"),
    ]  # fmt: skip


VERSIONS = [
    ("torch 2.13.0, Python 3.11", "everything on this page that names no other version", "every commit", "pytest"),
    ("torch 2.11.0, 2.12.1, 2.14.1, 2.15.0", "all layouts of pp, tp, cp and their combinations; data parallel; the "
     "plan; the reference configs", "2026-11-22", f"{NIGHTLY} tests/parallel tests/tools/plan"),
    ("torch 2.11.0+cu130 and 2.13.0+cu130 on a null CUDA", "three steps with every option and axis; memory, waits, "
     "kernels, races", "2026-11-25", f"{NIGHTLY} tests/verification/test_null_cuda.py"),
    ("Python 3.12, 3.13", "the default tests, once", "2026-11-22", "pytest"),
    ("Python 3.10", "parts of the default tests", "2026-11-22", "pytest"),
]  # fmt: skip

NOT_TESTED = """\
- **Several GPUs.** titanlite has run on one GPU, for a [quarter of an hour](benchmarks.md#on-one-h200). NCCL has
  connected only ranks that shared this GPU. titanlite also runs with torch's CUDA build on a null
  CUDA, which replaces the CUDA driver and libraries: it computes nothing, but shows launched
  kernels, memory, waits and the order of streams.
- **Many ranks.** titanlite has not run with more than 64 real processes, with more than two nodes,
  or on nodes with a real network. Figures for 16,384 ranks were measured by calling the functions
  that a rank would call, [without starting the ranks](../benchmarks/NOTEBOOK.md#many-ranks).
- **Long curves.** The longest run, of a million steps, trains a model of 4,600 parameters. The
  longest curve of a model that learns has 2,000 steps.
- **NFS, Lustre and object stores**, and the Hugging Face hub, from which no run has read.
- **Python 3.14**, Windows and macOS.
- **Layouts compiled with inductor.** The tests compile with the backend `aot_eager`; inductor runs
  on the null CUDA, which computes no numbers to compare.
- **Types of local tensors** are not checked by `spmd-types` 0.3.1: the checker of spmd-types skips
  operations on DTensors, and stops in the backward, for which it would need annotations in
  titanlite.
- **One failure is not explained.** A gloo rank in a pool of test processes dies now and then; in
  the deaths that were examined, the rank's heap was corrupted. A test case whose rank has died this
  way runs once more, with a warning
  ([what is known](../benchmarks/NOTEBOOK.md#a-known-failure-without-an-explanation))."""


def page() -> str:
    """Return the page."""
    layouts, mutants = count_layouts(), mutants_by_folder()
    cells = [row.cells() for row in evidence(layouts, sum(int(noticed) for _, _, noticed, _ in mutants))]
    n_float64 = layouts.always.total() + layouts.nightly.total()
    parts = [
        "# How titanlite is tested\n",
        pages.wrapped(
            "titanlite promises that every layout computes what one process computes. This page says how this promise "
            "and the rest of titanlite are tested, with what result, when, and with which command. `python -m "
            "docs.build.testing_page` writes this page, and counts each number from the tests and the logs. The "
            "command in a row of the table reproduces the row's result. Measured speeds are on "
            "[Benchmarks](benchmarks.md)."
        ),
        pages.table(["what", "result", "date", "command", "evidence"], cells),
        "## Layouts against one process\n",
        pages.wrapped(
            "A parity test starts real processes on gloo, which take three AdamW steps with gradient clipping, with "
            "different numbers of valid tokens on the ranks. In float64, loss, gradient norm, every gradient, every "
            "updated weight and the validation loss must equal those of a single process: no element may differ by "
            "more than 1e-12 with data parallel alone, or 1e-11 with other layouts. The single-process reference is "
            "not titanlite run on one rank: the reference shares the model and the loss with titanlite, but uses no "
            "FSDP, gradient accumulation or torch.distributed "
            f"([reference.py](../titanlite/tools/parity/reference.py)). In this way the tests compare {n_float64} "
            f"cases, each a layout with its options, {layouts.always.total()} of them in every run of the tests. "
            f"{layouts.low_precision} more cases, in low precision, are compared with a reference in the same "
            "precision, and must agree within 8 times the rounding error of the reference."
        ),
        pages.table(["ranks", "every run", "nightly"], layouts.rows()),
        "## Random layouts\n",
        pages.wrapped(
            "A table of test cases that people write lacks the combinations that nobody thought of. Therefore a "
            "generator draws degrees of all parallel axes (1 to 16 ranks), schedules, families, experts, precisions, "
            "optimizers and data at random, until titanlite accepts the config. The config's layout then takes two "
            "steps, which are compared with the single-process reference; a config that fails the comparison is "
            "shrunk to a smallest config that still fails. The generator draws every option of the schema, or lists "
            "the reason why not. Nightly runs draw 30 new configs "
            "([last](../benchmarks/logs/random_layouts_nightly.log)). The 500 random configs found no "
            "wrong number, but three bugs: latent attention with odd widths ended in an error, "
            "and `titanlite parity` itself had two bugs. Each of these three bugs is fixed, with a test."
        ),
        "## Layouts and one process over many steps\n",
        "![Distances from one process, by step](images/layouts_equal_one_process.png)\n",
        pages.wrapped(
            "One model trains in one process, under eight layouts with up to 16 ranks, and in a run that is killed "
            "five times and resumed under another layout each time. In float64, over 200 steps, losses of all layouts "
            "and of the killed run stay within a relative distance of 5.3e-13 from those of one process, and weights "
            "within 2.2e-12. As a control, the run in one process is repeated with another order of sums, which "
            "changes nothing in mathematics: the control's losses are up to 2.3e-13 and its weights up to 9.6e-13 "
            "away from those of the first run. In float32, over 1,000 steps, training magnifies rounding: the weights "
            "of layouts are up to 8.0e-3 away from those of one process (on 16 ranks; 7.8e-3 on 8), and the weights "
            "of a control, which sums in another order in one process, up to 1.9e-3. The figure's last column "
            "compares torchtitan 0.2.2 and titanlite, trained with another recipe, with torchtitan in one process. "
            "After 50 steps, the distance of the weights is 2.4e-7 with torchtitan's FSDP 2, 2.1e-7 with titanlite in "
            "one process, 4.6e-2 with torchtitan's DDP 2 and 2.8e-2 with its PP 2 "
            "([notebook](../benchmarks/NOTEBOOK.md#layouts-and-one-process-over-many-steps))."
        ),
        "## Curves that others published\n",
        "![Published losses, and those of the same settings here](images/published_curves.png)\n",
        pages.wrapped(
            "nanoGPT's README gives a validation loss of 1.88 for 2,000 steps on tinyshakespeare. Our run of nanoGPT, "
            "with the README's command, has a loss of 1.898 over the full validation text. After the same training, "
            "titanlite's Llama with as many parameters has a loss of 1.674 (mean of three seeds, standard deviation "
            "0.005), and of 1.903 without its rotary embedding. On the conversations of torchtitan's fine-tuning "
            "test, torchtitan 0.3.0 and titanlite start from the same weights and have the same losses in all ten "
            "steps, to 1e-6. The losses that torchtitan publishes for this test start from weights that are not "
            "public. These published losses are within 1.7 standard deviations of the mean over our four runs of "
            "torchtitan with four seeds ([notebook](../benchmarks/NOTEBOOK.md#published-curves))."
        ),
        "## Injected bugs\n",
        pages.wrapped(
            "A test is worth the bugs that it notices. Each mutant is one wrong edit of titanlite's package, of the "
            "kind that people make: a missing sum, a wrong divisor, a stale buffer, an off-by-one. The default tests "
            "must notice each mutant, or the list of mutants explains why they do not. The example in a row of the "
            "table is the first mutant of the row's folder:"
        ),
        pages.table(["folder", "mutants", "noticed", "example"], mutants),
        "## Public bugs of other trainers\n",
        pages.wrapped(
            "The table lists silent bugs that users or authors of other programs reported in public, each with the "
            "nearest edit of titanlite that makes the same mistake, and the test that fails after this edit. A "
            "report's state (open, closed or merged) is of September 2026 or earlier. A bug in the table is no sign "
            "of a bad program: every trainer is exposed to silent bugs."
        ),
        public_bugs.table(),
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
