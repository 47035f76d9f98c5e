"""Write what plans of mixtures of experts are beside published runs into benchmarks/NOTEBOOK.md.

    python -m docs.build.published_page            (seconds: the plans are those of logs/plan_accuracy_mixtures.log)

`python -m benchmarks.planner.plan_accuracy mixtures` makes the log. tests/tools/plan/test_published_page.py fails until
the page is what this script writes.
"""

import json
import re
import statistics
from typing import Any, NamedTuple

from benchmarks.python_path import ROOT
from docs.build.page_tables import table_lines, with_table
from titanlite.config.loader import read_toml

LOG = ROOT / "benchmarks" / "logs" / "plan_accuracy_mixtures.log"
RUNS = ROOT / "benchmarks" / "planner" / "published_moe_runs.toml"
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


def compared_runs() -> list[Compared]:
    """Return the runs in the order of the file, with their plans of the log."""
    plans = {x["name"]: x for x in map(json.loads, re.findall(r'^\{"name".*$', LOG.read_text(), re.MULTILINE))}
    return [Compared(run, plans[run["name"]]) for run in read_toml(str(RUNS))["run"]]


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
    return with_table(NOTEBOOK.read_text(), "mixtures", f"{text_of_the_notebook(all_runs)}\n")


def main() -> None:
    NOTEBOOK.write_text(page(compared_runs()))


if __name__ == "__main__":
    main()
