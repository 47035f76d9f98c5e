"""Print the comparison of two runs as text and a table."""

import math
from collections import defaultdict
from pathlib import Path

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from titanlite.config.differences import differences, shown
from titanlite.config.loader import read_toml
from titanlite.techniques.fingerprints.file import Description
from titanlite.tools.diff.compare import Entry, Step
from titanlite.tools.diff.computation import in_order, module_of
from titanlite.tools.parity.ratios import reasons
from titanlite.tools.toml_keys import flat

WORDS = read_toml(str(Path(__file__).with_name("words.toml")))
PHASES = tuple(WORDS["phases"])
STYLES = ("green", "bold red", "yellow")  # style of the printed verdict, by exit status
SMALLEST_RATIO = 1e-3
"""The report says which numbers explain a ratio only if the ratio differs from 1 by more than this."""
MOST_NAMES = 5  # largest number of tensor names, or of explanations of a ratio, in a line of the report


def judge(steps: list[Step]) -> tuple[int, Step]:
    """Return the exit status (0: tensors agree, 1: some differ, 2: some are not comparable), and the step to show."""
    differs = next((step for step in steps if step.first), None)
    unknown = next((s for s in steps if any(s.missing) or any(entry.is_coarse for entry in s.entries)), None)
    return (1, differs) if differs else (2, unknown) if unknown else (0, steps[-1])


def report(steps: list[Step], a: Path, b: Path) -> Group:
    """Return the verdict on two runs, and the table of the first step with differing or incomparable tensors."""
    status, shown = judge(steps)
    lines = [f"A: {a}  {_described(shown.descriptions[0])}", f"B: {b}  {_described(shown.descriptions[1])}"]
    lacking = [(run, missing) for run, missing in zip("AB", shown.missing, strict=True) if missing]
    lines += [f"{run} lacks {len(each)} tensors in step {shown.number}: {_some(each)}" for run, each in lacking]
    of_a, of_b = (description.sequences for description in shown.descriptions)
    if of_a and of_b and any(each.differs for each in shown.entries if each.name in ("input tokens", "input targets")):
        said = "the same, in another order or on other ranks" if of_a == of_b else "not the same"
        lines.append(f"the tokens of step {shown.number} are {said}")
    lines += changed_options(a, b)
    lines += ["", f"relative distance of A and B in step {shown.number}, the largest of each module"]
    verdict = [Text(line, style=STYLES[status]) for line in verdict_lines(steps)]
    return Group(*map(Text, lines), _table(shown), Text(), *verdict)


def changed_options(a: Path, b: Path) -> list[str]:
    """Return a line for each option, except folders, that differs between the two runs' saved configs. The runs may be
    of different versions of titanlite, with different options."""
    files = [str(run / "config.toml") for run in (a, b) if (run / "config.toml").exists()]
    changed = differences(*(dict(flat(read_toml(file))) for file in files)) if len(files) == 2 else {}
    names = [key for key in changed if not key.endswith("folder") and key != "job.description"]
    return [f"{key}: {' | '.join(map(shown, changed[key]))}" for key in names]


def verdict_lines(steps: list[Step]) -> list[str]:
    """Return the lines that say whether and where two runs differ."""
    status, step = judge(steps)
    wrong = [each for each in step.entries if each.differs] or [each for each in step.entries if each.is_coarse]
    entry, *others = wrong or [None]
    if not status:
        n = sum(len(step.entries) for step in steps)
        return [f"equal: {n} tensors of {len(steps)} steps differ by no more than their inputs and rounding explain"]
    if entry is None:
        return [f"INCOMPLETE: one run lacks tensors of the other from step {step.number} on; no other tensor differs"]
    phase, _, tensor = entry.name.partition(" ")
    meaning = "the loss" if tensor == "loss" else WORDS["phases"][phase].format(tensor)
    word = "DIFFERENT" if entry.differs else "TOO COARSE TO COMPARE"
    lines = [f"{word}: first in step {step.number}, {phase}: {meaning}"]
    lines.append(f"distance {entry.distance:.1e}, of which its inputs and rounding explain {entry.allowed:.1e}")
    if entry.differs and abs(entry.ratio - 1) > SMALLEST_RATIO:
        precision = min(max(entry.allowed, 1e-6), 1e-2)
        found = reasons(abs(entry.ratio), precision, quantities(*step.descriptions)) if entry.ratio else []
        because = f": {', or '.join(found[:MOST_NAMES])}" if found else ""
        lines.append(f"B is {entry.ratio:.6g} x A{because}")
    elif math.isinf(entry.distance):
        lines.append("it is not finite")
    if others:
        what = "differ by more than their inputs explain" if entry.differs else "may be right or wrong"
        lines.append(f"{len(others)} more tensors of this step {what}: {_some([each.name for each in others])}")
    return lines


def quantities(a: Description, b: Description) -> dict[str, float]:
    """Return, by name, the numbers by which a run may have multiplied a gradient; those of both runs if they differ."""
    same = dict(a.counts.items() & b.counts.items())
    both = [(f"{name} of {run}", name, value) for run, of in (("A", a), ("B", b)) for name, value in of.counts.items()]
    return same | {text: value for text, name, value in both if name not in same}


def _table(step: Step) -> Table:
    """Return the table of the largest distance in each module and phase; ! marks unexplained distances."""
    table = Table("module", *PHASES, box=box.SIMPLE_HEAD, pad_edge=False)
    cells: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in step.entries:
        phase, _, tensor = entry.name.partition(" ")
        cells[module_of(tensor), phase].append(entry)
    for module in in_order(module for module, _ in cells):
        table.add_row(module, *(_cell(cells[module, phase]) for phase in PHASES))
    return table


def _cell(entries: list[Entry]) -> Text:
    largest = max([entry.distance for entry in entries], default=None)
    mark = "!" if any(entry.differs for entry in entries) else ""
    return Text("" if largest is None else f"{largest:.1e}{mark}", style="bold red" if mark else "")


def _described(description: Description) -> str:
    counts = [f"{name} {value:g}" for name, value in description.counts.items() if value != 1]
    return f"({description.compute_dtype}; {', '.join(counts)})"


def _some(names: list[str]) -> str:
    return ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")
