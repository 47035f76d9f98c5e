"""Write a plan as one HTML file with figures of memory over the step, pipeline schedule and step time, and with the
terminal's tables. Figures are SVG inside the page, with selectable text. Equal plans give byte-identical files."""

import html
import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as Outline

from titanlite.tools.html_page import WIDTH, figure_style, page, printed, svg_figure
from titanlite.tools.plan.memory_timeline import Point
from titanlite.tools.plan.report import GIB, WORDS, report, speed_line, time_shares, verdict
from titanlite.tools.plan.result import Plan
from titanlite.tools.plan.segments import Pass

KIND_COLOURS, SHARE_COLOURS = WORDS["kind_colours"], WORDS["share_colours"]
ACTIONS = {Pass(letter): looks for letter, looks in WORDS["actions"].items()}  # colour and name
UPDATE_COLOUR, LIMIT_COLOUR = "#555555", "#b00020"
IDLE = {"facecolor": "#ffffff", "edgecolor": "#999999", "hatch": "/////", "linewidth": 0}
MAX_POINTS = 1000  # largest number of points of a memory curve; the figure has no room for more
BODY = Path(__file__).with_name("figures.html").read_text(encoding="utf-8")


def write_html(plan: Plan, file: str, target: Path) -> None:
    """Write a self-contained page about the plan of the config `file`. Overwrites `target` if it exists."""
    rank = f"Pipeline rank {plan.worst.rank}, which needs the most." if len(plan.ranks) > 1 else "Every rank."
    skipped = "" if plan.spans else " Of its gradient accumulation steps the first, a middle and the last are shown."
    captions = WORDS["captions"]
    with figure_style():
        caption = captions["memory"].format(rank, skipped)
        figures = [svg_figure(memory_figure(plan), "memory", caption, title="Memory over the step")]
        if plan.spans:
            drawn = schedule_figure(plan)
            figures.append(svg_figure(drawn, "schedule", captions["schedule"], title="Pipeline schedule"))
        shortest, longest = plan.step_range
        caption = f"Seconds of the busiest rank's step; the step takes from {shortest:.3f} to {longest:.3f} s."
        figures.append(svg_figure(time_figure(plan), "time", caption, title="Step time"))
    model = f"{plan.config.model.flavor} on {plan.world_size} x {plan.config.plan.device}"
    description = f": {plan.config.job.description}" if plan.config.job.description else ""
    texts = map(html.escape, (model, file, description, verdict(plan)[1], speed_line(plan)))
    body = BODY.format(*texts, "".join(figures), printed(report(plan, file)))
    target.write_text(page(f"titanlite plan: {file}", body), encoding="utf-8", newline="\n")


def memory_figure(plan: Plan) -> Figure:
    """Draw memory in GiB by kind, stacked, over a step of the rank that needs the most, with the peak and the limit."""
    figure = Figure((WIDTH, 4.2), layout="constrained")
    axes, rank = figure.add_subplot(), plan.worst
    kinds = [kind for kind in KIND_COLOURS if any(point.bytes[kind] > 0 for point in rank.points)]
    numbers = thinned(rank.points, MAX_POINTS)
    # Rounding of allocations can leave the bytes of a kind of memory slightly below zero.
    heights = [[max(rank.points[number].bytes[kind], 0) / GIB for number in numbers] for kind in kinds]
    axes.stackplot(numbers, heights, colors=[KIND_COLOURS[kind] for kind in kinds], linewidth=0)
    axes.set_xlim(0, len(rank.points) - 1)
    axes.spines[["top", "right"]].set_visible(False)
    limit, peak = (plan.device.memory - sum(rank.overhead.values())) / GIB, rank.peak.total / GIB
    near = limit < 2.5 * peak  # an axis up to a limit far above the peak would flatten the curve
    top = 1.2 * max(peak, limit if near else 0)
    axes.set(ylim=(0, top), ylabel="GiB")
    at = rank.points.index(rank.peak)
    side = "right" if at > len(rank.points) / 2 else "left"
    above = peak if limit > 1.25 * peak else max(peak, limit)  # the peak's label avoids the limit's line
    arrow = {"arrowstyle": "-|>", "color": "#111111", "linewidth": 0.8, "relpos": (side == "right", 0)}
    place = {"xy": (at, peak), "xytext": (at, above + 0.09 * top), "ha": side, "va": "bottom"}
    axes.annotate(f"peak: {peak:.2f} GiB in {rank.peak.label}", **place, arrowprops=arrow)
    _name_phases(axes, rank.points)
    handles = [Patch(color=KIND_COLOURS[kind], label=kind) for kind in reversed(kinds)]
    looks = {"color": LIMIT_COLOUR, "linewidth": 1.2, "linestyle": "--" if near else "none"}
    if near:
        axes.axhline(limit, **looks)
    name = f"device memory\nwithout overhead:\n{limit:.1f} GiB" + ("" if near else ",\nfar above")
    handles.append(Line2D([], [], **looks, label=name))
    figure.legend(handles=handles, loc="outside right upper", frameon=False)
    return figure


def schedule_figure(plan: Plan) -> Figure:
    """Draw the pipeline schedule over the seconds of a step: a line for each rank and a box for each action."""
    n_ranks = len(plan.spans)
    width, height = WIDTH, 0.95 + (0.3 if n_ranks <= 16 else 0.2) * n_ranks
    figure = Figure((width, height))
    # The position of the axes is fixed, since the width of the axes decides which microbatch numbers fit into boxes.
    axes = figure.add_axes((0.5 / width, 0.5 / height, 1 - 0.65 / width, 1 - 0.95 / height))
    points_per_second = 72 * (width - 0.65) / plan.step_seconds
    end = plan.step_seconds - plan.update_seconds
    line = min(0.5, 0.1 * points_per_second * end / max(map(len, plan.spans)))  # thick lines would hide short boxes
    digits = len(str(max(span.action.microbatch for spans in plan.spans for span in spans)))
    boxes: dict[tuple[str, int, str], list[tuple[float, float, int]]] = {}
    for rank, spans in enumerate(plan.spans):
        stages = sorted({span.action.stage for span in spans})
        for action, start, stop in spans:
            place = stages.index(action.stage)
            white = 0.5 * place / max(len(stages) - 1, 1)  # a later stage of a rank is paler
            colour = to_hex([part + (1 - part) * white for part in to_rgb(ACTIONS[action.kind][0])])
            boxes.setdefault((action.kind, place, colour), []).append((start, stop, rank))
            font = min(7.0, (stop - start) * points_per_second / (0.7 * digits))
            if font >= 3.5:  # smaller digits are unreadable even when zoomed
                looks = {"size": round(font, 1), "color": _ink(colour), "ha": "center", "va": "center_baseline"}
                axes.text((start + stop) / 2, rank, str(action.microbatch), **looks)
    axes.add_patch(_boxes([(0, end, rank) for rank in range(n_ranks)], **IDLE))
    for (kind, place, colour), spans in sorted(boxes.items()):
        axes.add_patch(_boxes(spans, facecolor=colour, edgecolor="white", linewidth=line, gid=f"boxes-{kind}-{place}"))
    update = [(end, plan.step_seconds, rank) for rank in range(n_ranks)]
    axes.add_patch(_boxes(update, facecolor=UPDATE_COLOUR, linewidth=0))
    axes.set(xlim=(0, plan.step_seconds), ylim=(n_ranks - 0.5, -0.5), yticks=range(n_ranks))
    axes.set(xlabel="seconds", ylabel="pipeline rank")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    used = [ACTIONS[kind] for kind in ACTIONS if any(kind == other for other, *_ in boxes)]
    handles = [Patch(color=colour, label=name) for colour, name in (*used, (UPDATE_COLOUR, "update"))]
    handles.append(Patch(**IDLE, label="idle"))
    figure.legend(handles=handles, loc="upper right", ncols=len(handles), frameon=False)
    return figure


def time_figure(plan: Plan) -> Figure:
    """Draw the seconds of the busiest rank's step as one bar, divided by report.time_shares."""
    figure = Figure((WIDTH, 1.75), layout="constrained")
    axes, begin = figure.add_subplot(), 0.0
    for name, seconds in time_shares(plan).items():
        share, colour = seconds / plan.step_seconds, SHARE_COLOURS[name]
        label = f"{name}: {seconds:.3g} s, {share:.1%}"
        axes.barh(0, seconds, left=begin, color=colour, edgecolor="white", linewidth=0.8, label=label)
        if share > 0.04:
            axes.text(begin + seconds / 2, 0, f"{share:.0%}", ha="center", va="center", color=_ink(colour))
        begin += seconds
    axes.set(xlim=(0, plan.step_seconds), yticks=[], xlabel="seconds")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside upper left", ncols=3, frameon=False)
    return figure


def thinned(points: Sequence[Point], most: int) -> list[int]:
    """Return the indices of about `most` points to draw: first, last, and each stretch's highest and lowest point."""
    if len(points) <= most:
        return list(range(len(points)))
    stretch, chosen = math.ceil(2 * len(points) / most), {0, len(points) - 1}
    for begin in range(0, len(points), stretch):
        numbers = range(begin, min(begin + stretch, len(points)))
        chosen |= {choose(numbers, key=lambda number: points[number].total) for choose in (max, min)}
    return sorted(chosen)


def _name_phases(axes: Axes, points: Sequence[Point]) -> None:
    """Write the names of up to 12 phases (each forward, backward and update) below the axis, separated by ticks."""
    phases = [point.label.split(",")[0] for point in points]
    begins = [number for number in range(1, len(points)) if phases[number] != phases[number - 1]]
    if len(begins) > 12:
        axes.set_xlabel("moments of the step")
        return
    axes.set_xticks(begins, [])
    for begin, after in zip([0, *begins], [*begins, len(points)], strict=True):
        if after - begin > 0.05 * len(points):  # "between steps" and "update" are too narrow for their names
            place = ((begin + after) / 2, -0.02)
            axes.text(*place, phases[begin], transform=axes.get_xaxis_transform(), ha="center", va="top")
    axes.set_xlabel("moments of the step", labelpad=16)


def _boxes(boxes: Sequence[tuple[float, float, int]], **looks: object) -> PathPatch:
    """Return all boxes (start, end, row) as one path; a file of thousands of separate shapes would be large."""
    corners, codes = [], []
    for start, end, row in boxes:
        corners += [(start, row - 0.4), (end, row - 0.4), (end, row + 0.4), (start, row + 0.4), (start, row - 0.4)]
        codes += [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY]
    return PathPatch(Outline(corners, codes), **looks)


def _ink(colour: str) -> str:
    """Return a text colour that is readable on the background `colour`."""
    red, green, blue = to_rgb(colour)
    return "#111111" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "#ffffff"
