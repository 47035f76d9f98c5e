"""Make the figures of the README and of the pages from the programs themselves.

    python -m docs.build.images plan                plan_70b.png, from configs/70b.toml: about a minute
    python -m docs.build.images experts             expert_parallel.png, from a router
    python -m docs.build.images layout              choose_a_layout.png, the questions of docs/choose_a_layout.md
    python -m docs.build.images parity              parity_all.png, from benchmarks/logs/parity_all.log
    python -m docs.build.images verify              verify_torchtitan.png, from benchmarks/logs/verify_torchtitan.log
    python -m docs.build.images tensorboard [LOGDIR] tensorboard.png, from the runs in outputs/ or LOGDIR

`plan` draws the figures of `titanlite plan configs/70b.toml --html`, in larger type and one below the other.
`tensorboard` starts TensorBoard on this machine and takes a screenshot of its loss curve with headless Chromium.
Chromium must be on PATH. First run ./run_train.sh configs/debug.toml.
"""

import base64
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image, ImageChops, ImageDraw

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
CONFIG = "configs/70b.toml"
DPI = 160
MARGIN, RADIUS = 28, 28
"""Pixels around the figures, and of the rounded corners."""
COLORS = 160
"""Colors of a file: a third of the bytes of a PNG with all colors."""
TYPE = {"font.size": 12, "axes.titlesize": 12, "legend.fontsize": 11, "hatch.linewidth": 0.5}
"""The README shows the figures at about half their size."""
TENSORBOARD_SETTINGS = {
    "timeSeriesSettingsPaneOpened": False,
    "timeSeriesCardMinWidth": 480,
    "stepSelectorEnabled": False,
    "scalarSmoothing": 0,
    "ignoreOutliers": False,
    "sideBarWidthInPercent": 15,
}


def make_plan_figure() -> None:
    """Draw the plan of configs/70b.toml on white with rounded corners, readable on a light and on a dark page."""
    from titanlite.config import load
    from titanlite.tools.html_page import STYLE
    from titanlite.tools.plan.figures import memory_figure, schedule_figure, time_figure
    from titanlite.tools.plan.planner import make_plan

    plan = make_plan(load([str(ROOT / CONFIG)]))
    tokens = f"{plan.config.tokens_per_step:,} tokens"
    speed = f"{plan.tokens_per_second:,.0f} tokens/s per GPU, MFU {plan.mfu:.1%}"
    with style.context(["default", STYLE | TYPE]):
        panels = [
            heading(f"titanlite plan {CONFIG}", 19, 0.5),
            heading("Llama 3 70B on 64 H100s: pp 4 x dp 2 x tp 8, interleaved 1F1B, float8", 13, 0.3, bold=False),
            heading(
                f"Planned on a CPU, without the GPUs: {plan.step_seconds:.1f} s per step of {tokens}, {speed}",
                13,
                0.3,
                bold=False,
            ),
            heading("Memory over the step, GiB per GPU", 14, 0.55),
            render(lambda: with_height(memory_figure(plan), 3.5)),
            heading(f"Pipeline schedule, bubble {plan.pipeline_bubble:.1%}", 14, 0.55),
            render(lambda: without_numbers(schedule_figure(plan))),
            heading("Where the time goes", 14, 0.55),
        ]
        with style.context({"legend.fontsize": 9.7}):
            panels.append(render(lambda: time_figure(plan)))
    save(rounded(stack(panels)), "plan_70b.png")


def heading(text: str, size: float, inches: float, *, bold: bool = True) -> Image.Image:
    """Return a line of text as an image as wide as the figures."""
    figure = Figure((11, inches))
    figure.text(0.006, 0.12, text, fontsize=size, fontweight="bold" if bold else "normal", va="bottom")
    return render(lambda: figure)


def with_height(figure: Figure, inches: float) -> Figure:
    """Change the height of a figure."""
    figure.set_figheight(inches)
    return figure


def without_numbers(figure: Figure) -> Figure:
    """Take the numbers of microbatches out of a schedule, which are too small to read in the README."""
    for text in list(figure.axes[0].texts):
        text.remove()
    return figure


def render(figure_of: Callable[[], Figure]) -> Image.Image:
    """Return a figure as an image."""
    file = io.BytesIO()
    figure_of().savefig(file, format="png", dpi=DPI)
    return Image.open(file).convert("RGB")


def stack(images: list[Image.Image]) -> Image.Image:
    """Return images one below the other, on white."""
    width, height = max(image.width for image in images), sum(image.height for image in images)
    result = Image.new("RGB", (width + 2 * MARGIN, height + 2 * MARGIN), "white")
    top = MARGIN
    for image in images:
        result.paste(image, (MARGIN, top))
        top += image.height
    return result


def rounded(image: Image.Image) -> Image.Image:
    """Return an image of few colors with transparent corners."""
    inside = Image.new("L", image.size, 0)
    ImageDraw.Draw(inside).rounded_rectangle((0, 0, image.width - 1, image.height - 1), RADIUS, fill=255)
    result = image.quantize(COLORS, dither=Image.Dither.NONE)
    result.paste(COLORS, mask=ImageChops.invert(inside))
    result.info["transparency"] = COLORS
    return result


def make_experts_figure() -> None:
    """Draw where the tokens of two ranks go that have two experts each, as a router with random weights sends them."""
    import torch

    from titanlite.config.schema import Model
    from titanlite.techniques.moe.router import Router

    n_tokens, n_experts, n_chosen = 3, 4, 2
    model = Model(flavor="debug", moe={"n_experts": n_experts, "n_experts_per_token": n_chosen})
    router, generator = Router(model), torch.Generator().manual_seed(7)
    torch.nn.init.normal_(router.weight, generator=generator)
    with torch.no_grad():
        _, experts, _ = router(torch.randn(2 * n_tokens, model.dim, generator=generator))
    of_rank = [range(rank * n_tokens, (rank + 1) * n_tokens) for rank in range(2)]
    pairs = [[(token, expert) for token in own for expert in experts[token].tolist()] for own in of_rank]
    # The first experts of all ranks, then the second ones: an all-to-all for each
    sent = [sorted(own, key=lambda pair: (pair[1] % 2, pair[1] // 2)) for own in pairs]
    arrived = [[p for e in own for rows in sent for p in rows if p[1] == e] for own in ((0, 1), (2, 3))]
    columns = {
        "tokens": [[(token, None) for token in own] for own in of_rank],
        "sorted by expert of a rank": sent,
        "computed, after two all-to-alls": arrived,
        "after two all-to-alls back": sent,
        "summed": [[(token, None) for token in own] for own in of_rank],
    }
    figure = Figure((11, 5), layout="constrained")
    axes = figure.add_subplot()
    of_expert = ["#c6dbef", "#6baed6", "#fdd0a2", "#fd8d3c"]
    places: list[dict[tuple[int, int | None], tuple[float, float]]] = []
    for column, (title, ranks) in enumerate(columns.items()):
        axes.text(column * 2 + 0.5, -0.7, title.replace(", ", ",\n"), ha="center", va="bottom", fontsize=10)
        places.append({})
        for rank, rows in enumerate(ranks):
            for row, (token, expert) in enumerate(rows):
                y = rank * 8.5 + row
                color = "white" if expert is None else of_expert[expert]
                axes.add_patch(Rectangle((column * 2, y), 1, 0.85, facecolor=color, edgecolor="black", linewidth=0.8))
                text = f"token {token}" if expert is None else f"{token} → {expert}"
                axes.text(column * 2 + 0.5, y + 0.43, text, ha="center", va="center", fontsize=9)
                places[-1][token, expert] = (column * 2, y + 0.43)
    for column in range(len(columns) - 1):
        for (token, expert), (x, y) in places[column].items():
            for (other, other_expert), (to_x, to_y) in places[column + 1].items():
                if token == other and (expert == other_expert or None in (expert, other_expert)):
                    axes.plot([x + 1, to_x], [y, to_y], color="gray", linewidth=0.8)
    for rank in range(2):
        text = f"rank {rank}\nexperts {2 * rank} and {2 * rank + 1}"
        axes.text(-0.3, rank * 8.5 + 3, text, ha="right", va="center", fontsize=11)
    axes.axhline(7.75, color="black", linestyle="--", linewidth=0.8)
    axes.set_xlim(-2, 9.2)
    axes.set_ylim(14.8, -2)
    axes.axis("off")
    save(rounded(stack([render(lambda: figure)])), "expert_parallel.png")


QUESTIONS = (
    ("1. Do weights, gradients and optimizer states\n(16 bytes per parameter) and activations\nfit one device?", "yes"),
    ("2. Sharded over the devices of a node,\ndo they fit?", "yes"),
    ("3. Has the global batch a sequence for each\ndevice, and does the network keep up?", "yes"),
)
ANSWERS = (
    ("Replicate (DDP)", "data_parallel_replicate_degree"),
    ("FSDP within the node", "data_parallel_shard_degree"),
    ("FSDP over all devices, full AC if needed;\nHSDP over many nodes", "data_parallel_shard_degree"),
    ("Tensor parallel within a node, pipeline across\nnodes (4 microbatches per rank), FSDP over the rest", ""),
)
"""Layouts with the option of [parallelism] that each needs most."""
ADDITIONS = (
    ("4. Sequences above about 32k tokens?", "Context parallel", "context_parallel_degree"),
    ("A mixture of experts?", "Expert parallel within a node", "expert_parallel_degree"),
)


def make_layout_figure() -> None:
    """Draw the questions that lead to a layout, from top to bottom, with the layouts on the right."""
    figure = Figure((11, 6.4), layout="constrained")
    axes = figure.add_subplot()

    def box(x: float, y: float, text: str, color: str, option: str = "") -> None:
        axes.add_patch(Rectangle((x, y), 4.4, 0.9, facecolor=color, edgecolor="black", linewidth=0.8))
        shift = 0.14 if option else 0
        axes.text(x + 2.2, y + 0.45 + shift, text, ha="center", va="center", fontsize=10)
        axes.text(x + 2.2, y + 0.14, option, ha="center", va="center", fontsize=8.5, family="monospace")

    def arrow(start: tuple[float, float], end: tuple[float, float], text: str) -> None:
        axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "-|>", "color": "black"})
        middle = (start[0] + end[0]) / 2 + 0.08, (start[1] + end[1]) / 2 + 0.08
        axes.text(*middle, text, fontsize=10, ha="left", va="bottom")

    for number, (question, answer) in enumerate(QUESTIONS):
        y = -1.5 * number
        box(0, y, question, "#dbe9f6")
        box(6, y, ANSWERS[number][0], "#e5f5e0", ANSWERS[number][1])
        arrow((4.4, y + 0.45), (6, y + 0.45), answer)
        if number:
            arrow((2.2, y + 1.5), (2.2, y + 0.9), "no")
    box(6, -4.5, ANSWERS[-1][0], "#e5f5e0")
    axes.plot([2.2, 2.2], [-3.0, -4.05], color="black", linewidth=1)
    axes.text(2.28, -3.4, "no", fontsize=10)
    arrow((2.2, -4.05), (6, -4.05), "")
    for number, (question, answer, option) in enumerate(ADDITIONS):
        y = -5.9 - 1.2 * number
        box(0, y, question, "#dbe9f6")
        box(6, y, answer, "#fdd0a2", option)
        arrow((4.4, y + 0.45), (6, y + 0.45), "yes: add")
    axes.set_xlim(-0.1, 10.5)
    axes.set_ylim(-7.2, 1)
    axes.axis("off")
    save(rounded(stack([render(lambda: figure)])), "choose_a_layout.png")


def make_verify_figure() -> None:
    """Draw the ratios of torchtitan's gradients to those of titanlite in float64, by layout."""
    runs = (
        (ROOT / "benchmarks" / "logs" / "verify_torchtitan.log")
        .read_text()
        .split("$ titanlite parity --against step\n")
    )
    row = re.compile(r"^gradient (\S+\.\S+) +(\S+) +(\S+) ", re.MULTILINE)
    layouts = {  # by what the log says of a run
        "dp_replicate 1 dp_shard 2 tp 1 pp 1": ("FSDP 2", "o", "#117733"),
        "dp_replicate 1 dp_shard 1 tp 2 pp 1": ("TP 2", "x", "#4477aa"),
        "dp_replicate 2 dp_shard 1 tp 1 pp 1": ("DDP 2", "s", "#cc6677"),
        "dp_replicate 1 dp_shard 1 tp 1 pp 2": ("PP 2", "D", "#b00020"),
    }

    def draw() -> Figure:
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        axes = figure.subplots()
        for described, (label, marker, colour) in layouts.items():
            text = next(run for run in runs if described in run and "compute float32" in run)
            ratios = [float(theirs) / float(ours) for _, theirs, ours in row.findall(text)]
            axes.plot(ratios, marker, color=colour, label=label, fillstyle="none")
            names = [name for name, *_ in row.findall(text)]
        axes.axhline(1, color="#555555", linewidth=0.8)
        axes.set_yscale("log")
        axes.set_ylabel("norm of the gradient,\ntorchtitan 0.2.2 / float64")
        axes.set_xticks(range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
        axes.legend(ncols=4, frameon=False, loc="center right", bbox_to_anchor=(1, 0.7))
        return figure

    save(render(draw), "verify_torchtitan.png")


def make_parity_figure() -> None:
    """Draw the table that `titanlite parity --all` has printed."""
    lines = (ROOT / "benchmarks" / "logs" / "parity_all.log").read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("$ titanlite parity"))
    largest = r"the largest difference, in (.*), is (\S+) of (\S+) allowed"
    text = [re.sub(largest, r"at most \2 in \1 (\3 allowed)", line) for line in lines[first:]]
    colours = {"equal": "#9ece6a", "DIFFERENT": "#ff7a85"}

    def draw() -> Figure:
        figure = Figure(figsize=(10, 0.21 * len(text)), facecolor="#1e2430")
        for number, line in enumerate(text):
            place, colour = 1 - (number + 0.75) / len(text), colours.get(line[31:].partition(":")[0], "#e0e0e0")
            figure.text(0.01, place, line, family="monospace", fontsize=9, color=colour)
        return figure

    save(render(draw), "parity_all.png")


def make_tensorboard_screenshot() -> None:
    """Take a screenshot of the loss curve of a run in TensorBoard."""
    runs = Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "outputs"
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next((path for name in names if (path := shutil.which(name))), None)
    if not list(runs.rglob("*tfevents*")) or chromium is None:
        sys.exit(f"error: needs a run in {runs} (./run_train.sh configs/debug.toml) and chromium on PATH")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(runs), "--host", "127.0.0.1"]
    server = subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.DEVNULL)
    try:
        wait_for(f"http://127.0.0.1:{port}")
        png = screenshot(chromium, f"http://127.0.0.1:{port}/?darkMode=false&tagFilter=global_avg_loss#timeseries")
    finally:
        server.terminate()
        server.wait()
    save(Image.open(io.BytesIO(png)).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE), "tensorboard.png")


def screenshot(chromium: str, page: str) -> bytes:
    """Open a page of TensorBoard with its settings pane closed and return a PNG of it.

    Chromium is driven by its DevTools protocol over pipes: JSON that ends with a zero byte, on descriptors 3 and 4.
    """
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
    flags += ["--disable-component-update", "--no-first-run", "--remote-debugging-pipe"]
    (commands, to_commands), (from_replies, replies) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        shell = ["sh", "-c", f'exec "$@" 3<&{commands} 4>&{replies}', "sh", chromium, *flags]
        fds = (commands, replies)
        browser = subprocess.Popen([*shell, f"--user-data-dir={profile}"], pass_fds=fds, stderr=subprocess.DEVNULL)
        os.close(commands), os.close(replies)
        try:
            with open(to_commands, "wb", buffering=0) as out, open(from_replies, "rb") as answers:
                return screenshot_by_devtools(DevTools(out, answers), page)
        finally:
            browser.terminate()
            browser.wait()


class DevTools:
    """A connection to a browser by Chromium's DevTools protocol."""

    def __init__(self, out: BinaryIO, answers: BinaryIO):
        self.out, self.answers, self.session = out, answers, {}

    def call(self, method: str, **arguments: object) -> dict:
        """Call a method and return its result."""
        self.out.write(json.dumps({"id": 1, "method": method, "params": arguments, **self.session}).encode() + b"\0")
        while True:
            message = bytearray()
            while (byte := self.answers.read(1)) != b"\0":
                if not byte:
                    sys.exit("error: Chromium ended")
                message += byte
            reply = json.loads(message)
            if "error" in reply:
                sys.exit(f"error: {method}: {reply['error']}")
            if "id" in reply:
                return reply["result"]


def screenshot_by_devtools(browser: DevTools, page: str) -> bytes:
    """Open a page twice, the second time with TENSORBOARD_SETTINGS, and return a PNG of it."""
    target = browser.call("Target.createTarget", url="about:blank")["targetId"]
    session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    browser.session = {"sessionId": session}
    size = {"width": 1200, "height": 540, "deviceScaleFactor": 1.5, "mobile": False}
    clip = {"x": 0, "y": 0, "width": 1200, "height": 500, "scale": 1}
    browser.call("Emulation.setDeviceMetricsOverride", **size)
    browser.call("Page.navigate", url=page)
    time.sleep(8)
    settings = json.dumps(json.dumps(TENSORBOARD_SETTINGS))
    browser.call("Runtime.evaluate", expression=f"localStorage.setItem('_tb_global_settings', {settings})")
    browser.call("Page.navigate", url="about:blank")
    browser.call("Page.navigate", url=page)
    time.sleep(25)  # the curves are drawn some time after the page has loaded
    return base64.b64decode(browser.call("Page.captureScreenshot", clip=clip)["data"])


def wait_for(url: str) -> None:
    """Wait until a server answers, two minutes at most."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    sys.exit(f"error: {url} does not answer")


def save(image: Image.Image, name: str) -> None:
    """Write an image into docs/images."""
    path = IMAGES / name
    image.save(path, optimize=True)
    print(f"wrote {path.relative_to(ROOT)}: {image.width} x {image.height}, {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    makers = {
        "plan": make_plan_figure,
        "experts": make_experts_figure,
        "layout": make_layout_figure,
        "parity": make_parity_figure,
        "verify": make_verify_figure,
        "tensorboard": make_tensorboard_screenshot,
    }
    if len(sys.argv) < 2 or sys.argv[1] not in makers:
        sys.exit(__doc__)
    makers[sys.argv[1]]()
