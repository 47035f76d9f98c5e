"""Draw the efficiency by number of devices and by degree of tensor parallel, from the log of guide_plans.py.

python -m docs.build.guide_figure [FILE]        (default: docs/images/scaling.png)
"""

import argparse
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.build import guide_numbers as numbers
from docs.build import guide_plans as plans
from docs.build import guide_tables as tables

FILE = plans.ROOT / "docs" / "images" / "scaling.png"
COLORS = {"FSDP": "#4477aa", "HSDP within 8": "#ee7733", "HSDP within 64": "#228833"}
STYLES = {"2 x 8,192 tokens": "-", "4,096 tokens": "--"}


def percent(values: tuple[float, float, float]) -> tuple[float, ...]:
    """Return an expected value and its range in percent."""
    return tuple(100 * value for value in values)


def draw_lines(axes: Axes, points: list[tuple[int, tuple[float, float, float]]], **style: str) -> None:
    """Draw expected efficiencies as a line, and their ranges as a band."""
    n, values = zip(*((n, percent(values)) for n, values in points), strict=True)
    expected, low, high = zip(*values, strict=True)
    axes.plot(n, expected, marker="o", markersize=3.5, **style)
    axes.fill_between(n, low, high, color=style["color"], alpha=0.12, linewidth=0)


def draw_data_parallel(axes: Axes, log: numbers.Records) -> None:
    """Draw FSDP and HSDP of 8B by number of devices, and published pairs of runs."""
    for batch, line in STYLES.items():
        base = log[f"data: {batch}, FSDP, 8"]
        for name, color in COLORS.items():
            found = ((n, log.get(f"data: {batch}, {name}, {n}")) for n in plans.BATCH_DEVICES[batch])
            points = [(n, numbers.efficiency(record, base)) for n, record in found if record and n > 1]
            draw_lines(axes, points, color=color, linestyle=line, label=f"{name}, {batch}")
    pairs = numbers.published_pairs().values()
    shown = [(large["devices"], 100 * large["tokens/s"] / small["tokens/s"]) for small, large in pairs]
    shown.append((16384, 100 * tables.LLAMA_3[1] / tables.LLAMA_3[0]))
    axes.plot(*zip(*shown, strict=True), "x", color="black", label="published, relative to a smaller run", linestyle="")
    axes.axhspan(90, 95, color="#bbbbbb", alpha=0.4, label="guides", linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(plans.DATA_DEVICES, [f"{n:,}" for n in plans.DATA_DEVICES])
    axes.set_title("Data parallel: Llama 3 8B, H100, relative to FSDP on 8")


def draw_tensor_parallel(axes: Axes, log: numbers.Records) -> None:
    """Draw tensor parallel by degree, guides' ranges and a published run."""
    for size, color in (("8B", "#4477aa"), ("70B", "#aa3377")):
        base = log[f"tensor: {size}, tp 1"]
        points = [(n, numbers.efficiency(log[f"tensor: {size}, tp {n}"], base)) for n in plans.TENSOR_DEGREES]
        draw_lines(axes, points, color=color, linestyle="-", label=f"layers of {size}")
    measured = [(n, 100 * ratio) for n, ratio in numbers.published_tensor().items()]
    axes.plot(*zip(*measured, strict=True), "x", color="black", label="published: KempnerForge, 7B, H200", linestyle="")
    low, high = zip(*numbers.GUIDES_OF_TENSOR.values(), strict=True)
    axes.fill_between([*numbers.GUIDES_OF_TENSOR], low, high, color="#bbbbbb", alpha=0.4, label="guides", linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(plans.TENSOR_DEGREES, [str(n) for n in plans.TENSOR_DEGREES])
    axes.set_title("Tensor parallel, relative to one H100; 16 on two nodes")


def draw(log: numbers.Records, file: Path) -> None:
    """Write the figure."""
    figure = Figure((12, 5.6))
    left, right = figure.subplots(1, 2, sharey=True)
    draw_data_parallel(left, log)
    draw_tensor_parallel(right, log)
    left.set_ylabel("tokens/s per device, relative, %")
    left.set_xlabel("devices")
    right.set_xlabel("tensor-parallel degree")
    for axes in (left, right):
        axes.grid(color="#dddddd", linewidth=0.5)
        axes.legend(fontsize=8, frameon=False, loc="lower left")
        axes.set_ylim(0, 110)
    figure.tight_layout()
    figure.savefig(file, dpi=100)
    print(f"wrote {file}: {file.stat().st_size / 1024:.0f} KiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=FILE)
    draw(plans.read_log(), parser.parse_args().file)


if __name__ == "__main__":
    main()
