"""Write the comparison of two runs as one HTML page, with figures of all steps and of the first step that differs."""

import math
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from titanlite.tools.diff.compare import Step
from titanlite.tools.diff.report import PHASES, WORDS, judge, report
from titanlite.tools.html_page import WIDTH, figure_style, page, printed, svg_figure

SMALLEST = 1e-18  # smaller distances, and 0, are drawn at this height
PHASE_COLOURS = dict(zip(PHASES, ("#999999", "#4477aa", "#cc6677", "#ddaa33", "#117733"), strict=True))
CAPTIONS = WORDS["captions"]


def write_html(steps: list[Step], a: Path, b: Path, target: Path) -> None:
    """Write a self-contained page to `target`, and overwrite an existing file."""
    _, shown = judge(steps)
    with figure_style():
        figures = [svg_figure(step_figure(shown), "step", CAPTIONS["one_step"], title=f"Step {shown.number}")]
        if len(steps) > 1:
            figures.append(svg_figure(steps_figure(steps), "steps", CAPTIONS["all_steps"], title="All steps"))
    numbers = f"<h2>In numbers</h2>\n{printed(report(steps, a, b))}"
    body = "".join(["<h1>titanlite diff</h1>\n", *figures, numbers])
    target.write_text(page(f"titanlite diff: {a.name} and {b.name}", body), encoding="utf-8", newline="\n")


def step_figure(step: Step) -> Figure:
    """Return a figure of a step's distances and allowed distances, in the order of computation."""
    figure = Figure(figsize=(WIDTH, 4.0), layout="constrained")
    axes, ring = figure.subplots(), {"markersize": 9, "fillstyle": "none", "color": "#b00020"}
    for phase, colour in PHASE_COLOURS.items():
        if own := [(x, _drawn(e.distance)) for x, e in enumerate(step.entries) if e.name.startswith(f"{phase} ")]:
            axes.plot(*zip(*own, strict=True), ".", color=colour, markersize=4, label=phase)
    axes.plot([_drawn(entry.allowed) for entry in step.entries], color="#555555", linewidth=0.8, label="explained")
    if wrong := [(x, _drawn(entry.distance)) for x, entry in enumerate(step.entries) if entry.differs]:
        axes.plot(*zip(*wrong, strict=True), "o", label="not explained", **ring)
        x, y = wrong[0]
        axes.annotate(step.entries[x].name, (x, y), textcoords="offset points", xytext=(8, 8), color="#b00020")
    axes.set_yscale("log")
    _label_order(axes, step)
    axes.set_ylabel("relative distance")
    axes.legend(loc="best", ncols=len(PHASES) + 2, frameon=False)
    return figure


def steps_figure(steps: list[Step]) -> Figure:
    """Return a figure with the distances of all steps as an image: rows are steps, columns are tensors."""
    longest = max(steps, key=lambda step: len(step.entries))
    place = {entry.name: x for x, entry in enumerate(longest.entries)}
    image = np.full((len(steps), len(place)), np.nan)
    for row, step in enumerate(steps):
        for entry in [entry for entry in step.entries if entry.name in place]:
            image[row, place[entry.name]] = math.log10(_drawn(entry.distance))
    figure = Figure(figsize=(WIDTH, min(1.5 + 0.2 * len(steps), 6.0)), layout="constrained")
    axes = figure.subplots()
    drawn = axes.imshow(image, aspect="auto", cmap="viridis", interpolation="nearest")
    figure.colorbar(drawn, label="log10 of the distance")
    numbers = sorted({round(n) for n in np.linspace(0, len(steps) - 1, min(len(steps), 10))})
    axes.set_yticks(numbers, [str(steps[n].number) for n in numbers])
    axes.set_ylabel("step")
    _label_order(axes, longest)
    return figure


def _label_order(axes: Axes, step: Step) -> None:
    """Label the axis where each phase begins, on alternating lines, because labels of short phases would overlap."""
    phases = [entry.name.partition(" ")[0] for entry in step.entries]
    kinds = ["backward" if phase == "gradient" else phase for phase in phases]
    begins = [x for x in range(len(kinds)) if x == 0 or kinds[x] != kinds[x - 1]]
    axes.set_xticks(begins, ["\n" * (n % 2) + kinds[x] for n, x in enumerate(begins)], ha="left")


def _drawn(number: float) -> float:
    return min(max(number, SMALLEST), 1e3)
