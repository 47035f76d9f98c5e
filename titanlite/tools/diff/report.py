"""Print the comparison of two runs as text and a table."""

import math
from pathlib import Path

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from titanlite.techniques.fingerprints.file import Description
from titanlite.tools.diff.compare import Entry, Step
from titanlite.tools.diff.computation import in_order, module_of
from titanlite.tools.parity.ratios import reasons

PHASES = ("input", "forward", "backward", "gradient", "update")
MEANING = {
    "input": "{}, which the step begins with",
    "forward": "the output of {}",
    "backward": "the gradient of the loss with respect to the output of {}",
    "gradient": "the gradient of {}",
    "update": "the change of {} by the optimizer",
}
SMALLEST_RATIO = 1e-3
"""Ratios nearer to 1 are no factor of a layout."""
MOST_NAMES = 5
"""Tensors that a line names."""


def report(steps: list[Step], first: Step | None, a: Path, b: Path) -> Group:
    """Return the verdict on the steps of two runs, and the table of the first step that differs, or of the last."""
    shown = first or steps[-1]
    lines = [f"A: {a}  {_described(shown.descriptions[0])}", f"B: {b}  {_described(shown.descriptions[1])}"]
    for missing, run in zip(shown.missing, "AB", strict=True):
        if missing:
            lines.append(f"{run} lacks {len(missing)} tensors in step {shown.number}: {_some(missing)}")
    heading = f"relative distance of A and B in step {shown.number}, the largest of each module"
    verdict = [Text(line, style="bold red" if first else "green") for line in verdict_lines(steps, first)]
    return Group(*map(Text, lines), Text(), Text(heading), _table(shown), Text(), *verdict)


def verdict_lines(steps: list[Step], first: Step | None) -> list[str]:
    """Return what is to be said of the steps of two runs, in lines."""
    if first is None or first.first is None:
        n = sum(len(step.entries) for step in steps)
        return [f"equal: {n} tensors of {len(steps)} steps differ by no more than their inputs and rounding explain"]
    entry = first.first
    phase, _, tensor = entry.name.partition(" ")
    meaning = "the loss" if tensor == "loss" else MEANING[phase].format(tensor)
    lines = [
        f"DIFFERENT: first in step {first.number}, {phase}: {meaning}",
        f"distance {entry.distance:.1e}, of which its inputs and rounding explain {entry.allowed:.1e}",
    ]
    if abs(entry.ratio - 1) > SMALLEST_RATIO:
        lines.append(f"B is {entry.ratio:.6g} x A{_explained(entry, first)}")
    elif not all(map(math.isfinite, entry.norms)):
        lines.append("it is not finite")
    others = [each.name for each in first.entries if each.differs and each is not entry]
    if others:
        lines.append(
            f"{len(others)} more tensors of this step differ by more than their inputs explain: {_some(others)}"
        )
    return lines


def _explained(entry: Entry, step: Step) -> str:
    precision = min(max(entry.allowed, 1e-6), 1e-2)
    found = reasons(abs(entry.ratio), precision, quantities(*step.descriptions)) if entry.ratio else []
    return f": {', or '.join(found[:MOST_NAMES])}" if found else ""


def quantities(a: Description, b: Description) -> dict[str, float]:
    """Return the numbers by which two runs may have multiplied a gradient, by name; those that differ, of each run."""
    same = {name: value for name, value in a.counts.items() if value == b.counts.get(name)}
    both = [(run, name, value) for run, each in (("A", a), ("B", b)) for name, value in each.counts.items()]
    return same | {f"{name} of {run}": value for run, name, value in both if name not in same}


def _table(step: Step) -> Table:
    """Return the largest distance of each module and phase; ! where one is larger than explained."""
    table = Table("module", *PHASES, box=box.SIMPLE_HEAD, pad_edge=False)
    cells: dict[str, dict[str, list[Entry]]] = {}
    for entry in step.entries:
        phase, _, tensor = entry.name.partition(" ")
        module = module_of(tensor)
        cells.setdefault(module, {}).setdefault(phase, []).append(entry)
    for module in in_order(cells):
        table.add_row(module, *(_cell(cells[module].get(phase, [])) for phase in PHASES))
    return table


def _cell(entries: list[Entry]) -> Text:
    if not entries:
        return Text("")
    mark = "!" if any(entry.differs for entry in entries) else ""
    return Text(f"{max(entry.distance for entry in entries):.1e}{mark}", style="bold red" if mark else "")


def _described(description: Description) -> str:
    counts = [f"{name} {value:g}" for name, value in description.counts.items() if value != 1]
    return f"({description.compute_dtype}; {', '.join(counts)})"


def _some(names: list[str]) -> str:
    return ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")
