"""Print and draw how far layouts are from one process, from the log of layout_distance.py.

    python -m docs.build.layout_distance_figure [LOG]

The table has the largest distances of each run, and the distance of the weights at the end. The figure is written to
docs/images/layouts_equal_one_process.png.
"""

import argparse
import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.python_path import ROOT
from verification.layout_distance import ACCUMULATION, AGAIN, CHUNKED, MATH, RESUMED

LOG = ROOT / "benchmarks" / "logs" / "layout_distance.log"
FIGURE = ROOT / "docs" / "images" / "layouts_equal_one_process.png"
COLORS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee7733", "#aa3377", "#999933", "#44aa99", "#882255")
CONTROLS: dict[str, dict[str, Any]] = {
    AGAIN: {"color": "black"},
    ACCUMULATION: {"color": "black", "linestyle": "--", "linewidth": 1.8},
    CHUNKED: {"color": "black", "linestyle": ":", "linewidth": 1.8},
    MATH: {"color": "black", "linestyle": "-.", "linewidth": 1.8},
    RESUMED: {"color": "#d00000", "linewidth": 1.8},
}
Distances = dict[str, dict[str, list[tuple[int, float]]]]
"""By quantity, loss or weights, and by run: pairs of a step and a distance."""


def read_log(file: Path) -> dict[str, Distances]:
    """Return the distances that a log has, by kind, quantity and run."""
    result: dict[str, Distances] = {}
    for row in csv.reader(line for line in file.read_text().splitlines() if not line.startswith("#")):
        if row[0] == "kind":
            distances = result[row[1]] = {}
        elif row[0] == "quantity":
            runs = row[3:]
        else:
            quantity = distances.setdefault(row[0], {run: [] for run in runs})
            for run, number in zip(runs, row[3:], strict=True):
                quantity[run].append((int(row[1]), float(number)))
    return result


def table(log: Mapping[str, Distances]) -> Iterator[str]:
    """Yield the lines of a Markdown table of the largest distances of each run."""
    yield "| kind | run | losses, largest | weights, largest | weights, at the end |"
    yield "| --- | --- | --- | --- | --- |"
    for kind, distances in log.items():
        for run, losses in distances["loss"].items():
            weights = distances["weights"][run]
            numbers = max(number for _, number in losses), max(number for _, number in weights), weights[-1][1]
            yield " | ".join((f"| {kind}", run, *(f"{number:.1e}" if number else "0" for number in numbers))) + " |"


def draw(log: Mapping[str, Distances], file: Path) -> None:
    """Draw the distances of losses and weights, a column for each kind. Of ten neighbouring losses the largest distance
    is drawn; what is 0 is not."""
    figure = Figure((15, 8.6))
    grid = figure.subplots(2, len(log), sharey="row", sharex="col", squeeze=False)
    for column, (kind, distances) in enumerate(log.items()):
        for row, quantity in enumerate(("loss", "weights")):
            axes = grid[row][column]
            layouts = [run for run in distances[quantity] if run not in CONTROLS]
            for run, points in distances[quantity].items():
                style = CONTROLS.get(run) or {"color": COLORS[layouts.index(run) % len(COLORS)]}
                points = largest_of(points, 10) if quantity == "loss" else points
                points = [(step, distance) for step, distance in points if distance]
                if points:
                    axes.plot(*zip(*points, strict=True), label=run, **({"linewidth": 1.2} | style))
            axes.set_yscale("log")
            axes.grid(color="#dddddd", linewidth=0.5)
        grid[0][column].set_title(kind)
        grid[1][column].set_xlabel("step")
        grid[1][column].legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    grid[0][0].set_ylabel("loss: distance from one process")
    grid[1][0].set_ylabel("weights: distance from one process")
    figure.subplots_adjust(left=0.06, right=0.99, top=0.96, bottom=0.33, wspace=0.06, hspace=0.06)
    figure.savefig(file, dpi=110)
    print(f"wrote {file}: {file.stat().st_size / 1024:.0f} KiB")


def largest_of(points: list[tuple[int, float]], n: int) -> list[tuple[int, float]]:
    """Return the largest of every n neighbouring distances, at the last of their steps."""
    groups = [points[first : first + n] for first in range(0, len(points), n)]
    return [(group[-1][0], max(distance for _, distance in group)) for group in groups]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, nargs="?", default=LOG)
    log = read_log(parser.parse_args().log)
    print(*table(log), sep="\n")
    draw(log, FIGURE)


if __name__ == "__main__":
    main()
