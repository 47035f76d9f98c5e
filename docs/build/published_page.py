"""Write plans beside published runs into benchmarks/NOTEBOOK.md: dense runs by program, mixtures of experts by run.

    python -m docs.build.published_page            (seconds: the plans are those of three logs)

`python -m benchmarks.planner.plan_accuracy published mixtures 2026` makes the logs, one of each table.
tests/tools/plan/test_published_page.py fails until the page is what this script writes.
"""

import json
import math
import re
import statistics
import textwrap
from collections.abc import Iterable
from typing import Any, NamedTuple

from benchmarks.python_path import ROOT
from docs.build.page_tables import table_lines, with_table
from titanlite.config.loader import read_toml

LOGS = {
    "published_runs.toml": "plan_accuracy_published.log",
    "published_moe_runs.toml": "plan_accuracy_mixtures.log",
    "published_runs_2026.toml": "plan_accuracy_2026.log",
}
PROGRAMS = (
    *("torchtitan", "KempnerForge", "NeMo/Megatron", "Megatron-LM", "fms-fsdp", "prime-rl", "NeMo AutoModel"),
    *("MaxText", "LitGPT", "DeepSpeed", "PyTorch FSDP1", "custom PyTorch", "nanotron"),
)
SHARE, WIDTH = 0.85, 1.5  # the goal: this share of speeds in ranges whose highest speed is this multiple of the lowest
NOTEBOOK = ROOT / "benchmarks" / "NOTEBOOK.md"


class Compared(NamedTuple):
    """A published run and its plan, in tokens per second of a device."""

    run: dict[str, Any]
    planned: dict[str, Any]

    @property
    def off(self) -> float:
        """How much faster the plan is than the run, as a share."""
        return self.planned["planned"] / self.planned["tokens/s"] - 1

    @property
    def in_range(self) -> bool:
        """Whether the published speed is in the plan's range."""
        slowest, fastest = self.planned["range"]
        return slowest <= self.planned["tokens/s"] <= fastest

    def against(self, tokens_per_second: float) -> str:
        """Return by how many percent a speed is above that of the run."""
        return f"{tokens_per_second / self.planned['tokens/s'] - 1:+.0%}"


def compared_runs(file: str = "published_moe_runs.toml") -> list[Compared]:
    """Return the runs in the order of a file whose speed was published, with their plans of the log."""
    text = (ROOT / "benchmarks" / "logs" / LOGS[file]).read_text()
    plans = {x["name"]: x for x in map(json.loads, re.findall(r'^\{"name".*$', text, re.MULTILINE))}
    runs = read_toml(str(ROOT / "benchmarks" / "planner" / file))["run"]
    return [Compared(run, plans[run["name"]]) for run in runs if run["tokens_per_second"]]


def dense_runs() -> list[Compared]:
    """Return the runs of models without experts, with their plans."""
    runs = [each for file in LOGS for each in compared_runs(file)]
    return [each for each in runs if "group" not in each.run]


def width_for(logs: Iterable[float], share: float) -> float:
    """Return the width (highest over lowest) of ranges around a ratio of 1 that contain a share of some log ratios."""
    distances = sorted(map(abs, logs))
    return math.exp(2 * distances[math.ceil(share * len(distances)) - 1])


def median_error(logs: Iterable[float]) -> float:
    """Return the median distance from 1 of ratios that are given as logarithms."""
    return statistics.median(abs(math.expm1(log)) for log in logs)


def text_by_program(all_runs: list[Compared]) -> str:
    """Return the table of dense runs by program, and how near plans would be that knew each program's own median."""
    rows, own_median, other_median = [], [], []
    for program in PROGRAMS:
        runs = [each for each in all_runs if each.run["framework"].startswith(program)]
        logs = [math.log1p(each.off) for each in runs]
        middle = statistics.median(logs)
        left = [log - middle for log in logs]
        own_median += left
        if len(logs) > 2:
            other_median += [log - statistics.median(logs[:i] + logs[i + 1 :]) for i, log in enumerate(logs)]
        errors = (f"{median_error(logs):.1%}", f"{math.expm1(middle):+.1%}", f"{median_error(left):.1%}")
        rows.append([program, str(len(runs)), *errors, str(sum(each.in_range for each in runs))])
    n_near = sum(width_for([log], 1) <= WIDTH for log in own_median)
    said = [
        f"{len(all_runs)} runs of dense models: {summary(all_runs)}.",
        f"Ranges of one width that contain {SHARE:.0%} would be"
        f" {width_for([math.log1p(each.off) for each in all_runs], SHARE):.2f} wide.",
        f"If each speed is divided by the median of planned / published of its program, the median error is"
        f" {median_error(own_median):.1%}, and ranges of width {WIDTH} contain {n_near / len(own_median):.0%}.",
        f"If it is divided by that of the program's other runs (two or more), which is no fit to the run itself,"
        f" the median error is {median_error(other_median):.1%}, and ranges that contain {SHARE:.0%} would be"
        f" {width_for(other_median, SHARE):.2f} wide.",
    ]
    head = (
        "program",
        "runs",
        "median error",
        "median of planned / published",
        "error without it",
        "in the plan's range",
    )
    return "\n".join([*textwrap.wrap(" ".join(said), 100), "", *table_lines(head, rows)])


def table_of_groups(all_runs: list[Compared]) -> list[str]:
    """Return the lines of the table that has a line for each group."""
    rows = []
    for group in dict.fromkeys(each.run["group"] for each in all_runs):
        own = [each for each in all_runs if each.run["group"] == group]
        spans = []
        for key in ("planned", "once per node", "no all-to-all"):
            errors = sorted(each.planned[key] / each.planned["tokens/s"] - 1 for each in own)
            spans.append(" to ".join(dict.fromkeys(f"{error:+.0%}" for error in (errors[0], errors[-1]))))
        n_in_range = sum(each.in_range for each in own)
        rows.append([group, str(len(own)), *spans, str(n_in_range)])
    head = ("runs", "number", "error of the speed", "sent once per node", "no all-to-all", "in the plan's range")
    return table_lines(head, rows)


def table_of_runs(all_runs: list[Compared]) -> list[str]:
    """Return the lines of the table that has a line for each run."""
    head = ("run", "program", "batch", "AC", "published", "planned", "error", "range", "sent once per node")
    rows, more = [], ("no all-to-all", "no launches", "what the program does that this one does not")
    for each in all_runs:
        run, planned, options = each.run, each.planned, each.run["options"]
        whole = options.get("training.global_batch_size")
        sequences = str(options["training.local_batch_size"]) + (f" of {whole:,}" if whole else "")
        batch = f"{sequences} x {options['training.seq_len']:,}"
        cells = [f"[{run['name']}]({run['url']})", run["framework"], batch, options["activation_checkpoint.mode"]]
        cells += [f"{planned['tokens/s']:,.0f}", f"{planned['planned']:,.0f}", f"{each.off:+.1%}"]
        cells.append(" to ".join(map(each.against, planned["range"])))
        cells += [each.against(planned[key]) for key in ("once per node", "no all-to-all", "no launches")]
        rows.append([*cells, run["differs"]])
    return table_lines([*head, *more], rows)


def summary(all_runs: list[Compared]) -> str:
    """Return the median error, and how many are near and in the plan's range."""
    errors = [abs(each.off) for each in all_runs]
    within = ", ".join(f"{sum(100 * x <= bound for x in errors)} within {bound} %" for bound in (10, 25))
    n_in_range = sum(each.in_range for each in all_runs)
    return f"median {100 * statistics.median(errors):.1f} %; {within}; {n_in_range} in the plan's range"


def text_of_the_notebook(all_runs: list[Compared]) -> str:
    """Return what stands between the two marks."""
    total = f"{len(all_runs)} runs: {summary(all_runs)}."
    return "\n".join([total, "", *table_of_groups(all_runs), "", *table_of_runs(all_runs)])


def page(all_runs: list[Compared]) -> str:
    """Return the text of the notebook as it should be."""
    text = with_table(NOTEBOOK.read_text(), "programs", f"{text_by_program(dense_runs())}\n")
    return with_table(text, "mixtures", f"{text_of_the_notebook(all_runs)}\n")


def main() -> None:
    NOTEBOOK.write_text(page(compared_runs()))


if __name__ == "__main__":
    main()
