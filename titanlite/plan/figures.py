"""A plan as one HTML file: memory over the step, the pipeline's schedule and where the time goes, drawn, and the tables
of the terminal.

Pictures are SVG inside the page, with their text as text. The same plan gives the same bytes.
"""

import html
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as Outline
from rich.console import Console

from titanlite.plan import Plan, RankPlan
from titanlite.plan.memory_timeline import Point
from titanlite.plan.report import GIB, report, speed_line, time_shares, verdict

# What stays for all of the step lies lowest, so that what comes and goes is seen against a level ground. Neighbours
# differ in lightness too: they can be told apart on grey paper.
KIND_COLOURS = {
    "parameters": "#332288",
    "optimizer": "#88ccee",
    "gradients": "#117733",
    "communication": "#ddcc77",
    "activations": "#cc6677",
    "gathered": "#44aa99",
    "logits": "#882255",
    "temporary": "#bbbbbb",
}
ACTIONS = {
    "F": ("#8fbce6", "forward"),
    "B": ("#c8553d", "backward"),
    "I": ("#e8a33d", "backward, for inputs"),
    "W": ("#3f8f5f", "backward, for weights"),
}
UPDATE_COLOUR, LIMIT_COLOUR = "#555555", "#b00020"
WAITING = {"facecolor": "#ffffff", "edgecolor": "#999999", "hatch": "/////", "linewidth": 0}
SHARE_COLOURS = ("#4477aa", "#88ccee", "#117733", "#ddcc77", "#cccccc")
"""In time_shares' order."""
WIDTH = 11.0
"""Of a picture, inches of 96 pixels on a screen."""
MOST_POINTS, MOST_POINTS_OF_SMALL = 1000, 120
"""Of a curve of memory; more than its picture has room for would only make the file larger."""
REPORT_WIDTH = 150
"""Columns of text: the memory table's names are not cut off."""

STYLE = {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"], "font.size": 9, "axes.titlesize": 9}
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>titanlite plan: {file}</title>
<style>
body {{ margin: 2em auto; max-width: 1080px; padding: 0 1em; font: 15px/1.45 sans-serif; color: #111; \
background: #fff; }}
h1 {{ font-size: 1.5em; margin-bottom: 0.2em; }}
h2 {{ font-size: 1.15em; margin: 2em 0 0.3em; }}
p {{ margin: 0.3em 0; }}
figure {{ margin: 0.5em 0 1.5em; break-inside: avoid; }}
figcaption {{ font-size: 0.87em; color: #444; max-width: 60em; }}
svg {{ display: block; width: 100%; height: auto; }}
pre {{ font: 12px/1.2 "DejaVu Sans Mono", Menlo, Consolas, monospace; overflow-x: auto; }}
@media print {{ body {{ margin: 0; max-width: none; padding: 0; }} pre {{ font-size: 6.5pt; overflow: visible; }} }}
</style>
</head>
<body>
<h1>titanlite plan: {model}</h1>
<p>Config <code>{file}</code>{description}</p>
<p><strong>{verdict}</strong></p>
<p>{speed}</p>
{pictures}<h2>The plan in numbers</h2>
{report}
</body>
</html>
"""


def write_html(plan: Plan, file: str, target: Path) -> None:
    """Write the page, with all that it shows inside.

    Args:
        file: name of the config's file.
        target: overwritten if it is there.
    """
    with style.context(["default", STYLE]):  # not what a user's matplotlibrc says
        pictures = [
            _section("Memory over the step", _svg(memory_picture(plan), "memory"), _memory_caption(plan)),
            *([_figure(_svg(ranks_picture(plan), "ranks"), RANKS_CAPTION)] if len(plan.ranks) > 1 else []),
            *([_section("Schedule", _svg(schedule_picture(plan), "schedule"), SCHEDULE_CAPTION)] if plan.spans else []),
            _section("Where the time goes", _svg(time_picture(plan), "time"), TIME_CAPTION),
        ]
    description = plan.config.job.description
    page = PAGE.format(
        file=html.escape(file),
        model=html.escape(f"{plan.config.model.flavor} on {plan.world_size} x {plan.config.plan.device}"),
        description=f": {html.escape(description)}" if description else "",
        verdict=html.escape(verdict(plan)[1]),
        speed=html.escape(speed_line(plan)),
        pictures="".join(pictures),
        report=_report_in_html(plan, file),
    )
    target.write_text(page, encoding="utf-8", newline="\n")


RANKS_CAPTION = (
    "Each pipeline rank, in the same colours, with its peak. Ranks that differ only in their place on other axes need "
    "the same."
)
SCHEDULE_CAPTION = (
    "What each pipeline rank does when. Numbers are of microbatches, where a box has room for one; of a rank with "
    "several stages, the paler a box the later its stage. The update, with the reduction of gradients, begins when the "
    "last rank is done."
)
TIME_CAPTION = "Seconds of the busiest rank's step."


def _memory_caption(plan: Plan) -> str:
    rank = f"Pipeline rank {plan.worst.rank}, which needs the most." if len(plan.ranks) > 1 else "Of every rank."
    skipped = (
        "" if plan.spans else " Of more than three microsteps the first, one that stands for all between, and the last."
    )
    return (
        f"{rank} What is on the device at each moment, in the program's order, not to the scale of time: of each "
        f"part of the step, such as a block's forward, its peak and its end.{skipped} The limit is the device's memory "
        "less an allowance for all that is not tensors."
    )


def memory_picture(plan: Plan) -> Figure:
    """GiB on the device by kind, stacked, over the moments of the worst rank's step, with its peak and its limit."""
    figure = Figure((WIDTH, 4.2), layout="constrained")
    axes, rank, kinds = figure.add_subplot(), plan.worst, _kinds(plan)
    _stack(axes, rank, kinds, MOST_POINTS)
    limit, peak = _limit(plan, rank), rank.peak.total / GIB
    # A line far above would leave the picture itself no height.
    near = limit < 2.5 * peak
    top = 1.2 * max(peak, limit if near else 0)
    axes.set_ylim(0, top)
    axes.set_ylabel("GiB")
    at = rank.points.index(rank.peak)
    side = "right" if at > len(rank.points) / 2 else "left"
    above = peak if limit > 1.25 * peak else max(peak, limit)  # not across the line
    axes.annotate(
        f"peak: {peak:.2f} GiB in {rank.peak.label}",
        xy=(at, peak),
        xytext=(at, above + 0.09 * top),
        ha=side,
        va="bottom",
        arrowprops={"arrowstyle": "-|>", "color": "#111111", "linewidth": 0.8, "relpos": (side == "right", 0)},
    )
    _name_phases(axes, rank.points)
    handles = [Patch(color=KIND_COLOURS[kind], label=kind) for kind in reversed(kinds)]
    words = f"device's memory\nless allowance:\n{limit:.1f} GiB"
    if near:
        axes.axhline(limit, color=LIMIT_COLOUR, linewidth=1.2, linestyle="--")
        handles.append(Line2D([], [], color=LIMIT_COLOUR, linewidth=1.2, linestyle="--", label=words))
    else:
        handles.append(Line2D([], [], linestyle="none", label=f"{words},\nfar above"))
    figure.legend(handles=handles, loc="outside right upper", frameon=False)
    return figure


def ranks_picture(plan: Plan) -> Figure:
    """GiB on the device by kind over the moments of the step, a small picture for each pipeline rank."""
    columns = min(4, len(plan.ranks))
    rows = math.ceil(len(plan.ranks) / columns)
    figure = Figure((WIDTH, 0.3 + 1.6 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    worst = plan.worst
    peak = worst.peak.total / GIB
    limits = [_limit(plan, rank) for rank in plan.ranks]
    for axes in grid.flat[len(plan.ranks) :]:
        axes.set_axis_off()
    kinds = _kinds(plan)
    for axes, rank, limit in zip(grid.flat, plan.ranks, limits, strict=False):
        _stack(axes, rank, kinds, MOST_POINTS_OF_SMALL)
        axes.set_xticks([])
        if limit < 2.5 * peak:
            axes.axhline(limit, color=LIMIT_COLOUR, linewidth=1, linestyle="--")
        weight = "bold" if rank is worst else "normal"
        axes.set_title(f"pipeline rank {rank.rank}: {rank.peak.total / GIB:.2f} GiB", fontweight=weight)
    near = [limit for limit in limits if limit < 2.5 * peak]
    grid[0, 0].set_ylim(0, 1.05 * max([peak, *near]))
    figure.supylabel("GiB", fontsize=9)
    return figure


def schedule_picture(plan: Plan) -> Figure:
    """Seconds of the step from left to right, a row for each pipeline rank: a box for each action, and the update."""
    rows = len(plan.spans)
    height = 0.3 if rows <= 16 else 0.2
    size = (WIDTH, 0.95 + height * rows)
    figure = Figure(size)
    # Placed by hand: which numbers fit their boxes depends on how wide the axes are.
    left, right, below, above = 0.5, 0.15, 0.5, 0.45
    axes = figure.add_axes(
        (left / size[0], below / size[1], 1 - (left + right) / size[0], 1 - (below + above) / size[1])
    )
    digits = len(str(max(span.action.microbatch for spans in plan.spans for span in spans)))
    points_a_second = 72 * (size[0] - left - right) / plan.step_seconds
    end = plan.step_seconds - plan.update_seconds
    boxes: dict[tuple[str, int], list[tuple[float, float, int]]] = {}
    for row, spans in enumerate(plan.spans):
        stages = sorted({span.action.stage for span in spans})
        for span in spans:
            place = stages.index(span.action.stage)
            boxes.setdefault((span.action.kind, place), []).append((span.start, span.end, row))
            colour = _paler(ACTIONS[span.action.kind][0], place, len(stages))
            # As large as it fits, down to what can be read when one zooms in.
            font = min(7.0, (span.end - span.start) * points_a_second / (0.7 * digits))
            if font >= 3.5:
                axes.text(
                    (span.start + span.end) / 2,
                    row,
                    str(span.action.microbatch),
                    size=round(font, 1),
                    ha="center",
                    va="center_baseline",
                    color=_ink(colour),
                )
    n_stages = max(place for _, place in boxes) + 1
    longest = max(len(spans) for spans in plan.spans)
    line = min(0.5, 0.1 * points_a_second * end / longest)  # thin enough to leave short boxes their colour
    axes.add_patch(_boxes([(0, end, row) for row in range(rows)], **WAITING))
    for (kind, place), those in sorted(boxes.items()):
        colour = _paler(ACTIONS[kind][0], place, n_stages)
        patch = _boxes(those, facecolor=colour, edgecolor="white", linewidth=line)
        patch.set_gid(f"boxes-{kind}-{place}")
        axes.add_patch(patch)
    update = [(end, plan.step_seconds, row) for row in range(rows)]
    axes.add_patch(_boxes(update, facecolor=UPDATE_COLOUR, linewidth=0))
    axes.set_xlim(0, plan.step_seconds)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_yticks(range(rows))
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("seconds")
    axes.set_ylabel("pipeline rank")
    used = [ACTIONS[kind] for kind in ACTIONS if any(kind == of for of, _ in boxes)]
    handles = [Patch(color=colour, label=name) for colour, name in (*used, (UPDATE_COLOUR, "update"))]
    handles.append(Patch(**WAITING, label="waiting"))
    figure.legend(handles=handles, loc="upper right", ncols=len(handles), frameon=False)
    return figure


def time_picture(plan: Plan) -> Figure:
    """Seconds of the busiest rank's step, one bar of what they go to."""
    figure = Figure((WIDTH, 1.75), layout="constrained")
    axes, begin = figure.add_subplot(), 0.0
    for (name, seconds), colour in zip(time_shares(plan).items(), SHARE_COLOURS, strict=False):
        share = seconds / plan.step_seconds
        label = f"{name}: {seconds:.3g} s, {share:.1%}"
        axes.barh(0, seconds, left=begin, color=colour, edgecolor="white", linewidth=0.8, label=label)
        if share > 0.04:
            axes.text(begin + seconds / 2, 0, f"{share:.0%}", ha="center", va="center", color=_ink(colour))
        begin += seconds
    axes.set_xlim(0, plan.step_seconds)
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("seconds")
    figure.legend(loc="outside upper left", ncols=3, frameon=False)
    return figure


def thinned(points: Sequence[Point], most: int) -> list[int]:
    """Which points to draw, about `most` of them: the first, the last, and the highest and the lowest of each stretch,
    so that no peak is lost."""
    if len(points) <= most:
        return list(range(len(points)))
    stretch, chosen = math.ceil(2 * len(points) / most), {0, len(points) - 1}
    for begin in range(0, len(points), stretch):
        numbers = range(begin, min(begin + stretch, len(points)))
        chosen |= {choose(numbers, key=lambda number: points[number].total) for choose in (max, min)}
    return sorted(chosen)


def _kinds(plan: Plan) -> list[str]:
    """That any rank ever has on its device, from the lowest."""
    return [kind for kind in KIND_COLOURS if any(point.bytes[kind] > 0 for rank in plan.ranks for point in rank.points)]


def _limit(plan: Plan, rank: RankPlan) -> float:
    """GiB that a rank's tensors can have."""
    return (plan.device.memory - sum(rank.allowance.values())) / GIB


def _stack(axes: Axes, rank: RankPlan, kinds: Sequence[str], most: int) -> None:
    numbers = thinned(rank.points, most)
    # Rounded pieces can leave a kind some bytes below nothing.
    heights = [[max(rank.points[number].bytes[kind], 0) / GIB for number in numbers] for kind in kinds]
    axes.stackplot(numbers, heights, colors=[KIND_COLOURS[kind] for kind in kinds], linewidth=0)
    axes.set_xlim(0, len(rank.points) - 1)
    axes.spines[["top", "right"]].set_visible(False)


def _name_phases(axes: Axes, points: Sequence[Point]) -> None:
    """Ticks where a forward, a backward, ... ends, and its name between two of them; a pipeline has too many."""
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
    """Boxes (start, end, row) as one outline: thousands of shapes of their own would be most of the file."""
    corners, codes = [], []
    for start, end, row in boxes:
        corners += [(start, row - 0.4), (end, row - 0.4), (end, row + 0.4), (start, row + 0.4), (start, row - 0.4)]
        codes += [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY]
    return PathPatch(Outline(corners, codes), **looks)


def _paler(colour: str, place: int, of: int) -> str:
    """A colour for a rank's first, second, ... stage."""
    white = 0.5 * place / max(of - 1, 1)
    return to_hex([part + (1 - part) * white for part in to_rgb(colour)])


def _ink(colour: str) -> str:
    """What can be read on a colour."""
    red, green, blue = to_rgb(colour)
    return "#111111" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "#ffffff"


def _svg(figure: Figure, name: str) -> str:
    """A picture as an element of a page.

    Args:
        name: begins all its ids, which several pictures of a page would share otherwise.
    """
    file = io.StringIO()
    with style.context({"svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = file.getvalue()
    text = text[text.index("<svg") :]  # without the head of a file of its own
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    # A hundredth of a point is enough.
    return re.sub(r'\bd="[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), text)


def _figure(picture: str, caption: str) -> str:
    return f"<figure>\n{picture}<figcaption>{html.escape(caption)}</figcaption>\n</figure>\n"


def _section(title: str, picture: str, caption: str) -> str:
    return f"<h2>{html.escape(title)}</h2>\n{_figure(picture, caption)}"


def _report_in_html(plan: Plan, file: str) -> str:
    """The terminal's report."""
    console = Console(record=True, width=REPORT_WIDTH, file=io.StringIO(), highlight=False)
    console.print(report(plan, file))
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
