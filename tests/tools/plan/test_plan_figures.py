"""A plan's page is self-contained, names what is in the plan, draws all of it, and is the same each time."""

import dataclasses
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from titanlite.config import load
from titanlite.tools.plan.cost_model import Cost
from titanlite.tools.plan.figures import ACTIONS, KIND_COLOURS, MAX_POINTS, thinned, write_html
from titanlite.tools.plan.memory_timeline import Point
from titanlite.tools.plan.planner import resolve
from titanlite.tools.plan.report import time_shares
from titanlite.tools.plan.result import Plan, RankPlan
from titanlite.tools.plan.schedule import Action, Span
from titanlite.tools.plan.segments import KINDS

GIB = 2**30
ABSENT = "logits"
"""A kind of which the plans here have no bytes."""
CONFIG = str(Path(__file__).parents[3] / "configs" / "debug_pp.toml")


def points(n: int) -> list[Point]:
    """Return points with some GiB of each kind but one, and a peak after two thirds of them."""
    sizes = {kind: (number + 1) * GIB for number, kind in enumerate(KINDS) if kind != ABSENT}
    result = [
        Point(f"forward of stage {i % 3}", {kind: sizes.get(kind, 0) + (i % 7) * GIB // 8 for kind in KINDS})
        for i in range(n)
    ]
    result = [point._replace(bytes={**point.bytes, ABSENT: 0}) for point in result]
    result[2 * n // 3] = Point("backward of stage 1, layer <7>", {**result[0].bytes, "activations": 25 * GIB})
    return result


def spans_of(rank: int, n_ranks: int, n_microbatches: int) -> list[Span]:
    """Return all actions of two stages, one after the other."""
    actions = [
        Action(kind, stage, microbatch)
        for microbatch in range(n_microbatches)
        for stage in (rank, rank + n_ranks)
        for kind in "FBIW"
    ]
    return [Span(action, rank + number, rank + number + 0.9) for number, action in enumerate(actions)]


def plan_of(n_ranks: int, n_microbatches: int, n_points: int) -> Plan:
    """Return a plan with numbers that no config has."""
    config, device, _ = resolve(load([CONFIG, "--plan.device=h100"]))
    spans = [spans_of(rank, n_ranks, n_microbatches) for rank in range(n_ranks)] if n_ranks > 1 else []
    end = max((span.end for rank in spans for span in rank), default=90.0)
    result = points(n_points)
    seconds = Counter({"matmul": 0.5 * end, "attention": 0.2 * end, "memory": 0.1 * end})
    return Plan(
        config=config,
        device=device,
        world_size=n_ranks,
        ranks=[RankPlan(rank, result, {}, {"CUDA context": GIB}) for rank in range(n_ranks)],
        spans=spans,
        cost=Cost(seconds=seconds, elapsed=0.9 * end),
        step_seconds=end + 2,
        spread={"matmul": (-0.3, 0.4), "network": (-0.4, 0.3)},
        update_seconds=2.0,
        flops_per_token=10**6,
        n_parameters=10**6,
        axes={},
    )


class Page(HTMLParser):
    """The content of a page.

    Attributes:
        text: by the figure that it is in, which is the first word of the figure's ids; "" outside of figures.
        shapes: how many closed shapes there are under each id.
    """

    VOID = ("meta", "br", "link", "img")

    def __init__(self, page: str):
        super().__init__()
        self.source, self.ids, self.text, self.shapes = page, Counter(), {"": []}, Counter()
        self.tags: list[str] = []
        self.open: list[tuple[str, str]] = []
        self.figure, self.unbalanced = "", []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.append(tag)
        if "id" in values:
            self.ids[values["id"]] += 1
            self.figure = values["id"].split("-")[0]
        if tag == "path":
            parent = next((name for _, name in reversed(self.open) if name), "")
            self.shapes[parent] += len(re.findall("z", values["d"]))
        if tag not in self.VOID:
            self.open.append((tag, values.get("id", "")))

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open.pop()[0] != tag:
            self.unbalanced.append(tag)
        if tag == "svg":
            self.figure = ""

    def handle_data(self, data):
        self.text.setdefault(self.figure, []).append(data.strip())


def page_of(plan: Plan, folder: Path, file: str = "some.toml") -> Page:
    write_html(plan, file, folder / "plan.html")
    return Page((folder / "plan.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(3, 4, 60)


@pytest.fixture(scope="module")
def page(plan, tmp_path_factory) -> Page:
    return page_of(plan, tmp_path_factory.mktemp("page"))


def test_every_kind_and_action_has_a_colour():
    assert set(KIND_COLOURS) == set(KINDS)
    assert set(ACTIONS) == set("FBIW")


def test_memory_names_kinds_limit_and_peak(page):
    texts = page.text["memory"]
    assert [kind for kind in KINDS if kind in texts] == [kind for kind in KINDS if kind != ABSENT]
    assert "78.2 GiB" in texts  # an H100's 79.2 less 1
    assert any("in backward of stage 1, layer <7>" in text for text in texts)


def test_every_pipeline_rank_is_named(page):
    rows = page.text["schedule"][page.text["schedule"].index("seconds") :]  # what follows are names of ranks
    assert [text for text in rows if text.isdigit()][:3] == ["0", "1", "2"]


def test_schedule_has_a_box_for_each_span(plan, page):
    boxes = Counter()
    for name, count in page.shapes.items():
        if name.startswith("schedule-boxes-"):
            boxes[name.split("-")[2]] += count
    assert boxes == Counter(span.action.kind for spans in plan.spans for span in spans)


def test_time_names_every_share(plan, page):
    texts = page.text["time"]
    assert all(any(text.startswith(f"{name}: ") for text in texts) for name in time_shares(plan))


def test_without_a_pipeline_no_schedule(tmp_path):
    page = page_of(plan_of(1, 0, 60), tmp_path)
    assert {"memory", "time"} == {name for name in page.text if name}


def test_page_is_self_contained_and_well_formed(page):
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page.source)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert [name for name, count in page.ids.items() if count > 1] == []
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', page.source))
    assert used
    assert used <= set(page.ids)
    assert (page.unbalanced, page.open) == ([], [])


def test_names_are_escaped(plan, tmp_path):
    page = page_of(plan, tmp_path, "<b>&.toml")
    assert "b" not in page.tags
    assert page.text[""].count("<b>&.toml") == 1


def test_same_plan_same_bytes(plan, page, tmp_path):
    assert page_of(plan, tmp_path).source == page.source


@pytest.mark.nightly
def test_a_large_plan_is_a_small_file(tmp_path):
    page = page_of(plan_of(16, 64, 1500), tmp_path)
    assert sum(count for name, count in page.shapes.items() if name.startswith("schedule-boxes-")) == 16 * 64 * 2 * 4
    assert len(page.source) < 2e6


def test_thinning_keeps_peak_and_ends():
    curve = points(10_013)[3:]  # neither end is the highest or the lowest near it
    chosen = thinned(curve, MAX_POINTS)
    assert len(chosen) <= MAX_POINTS + 2
    assert chosen == sorted(set(chosen))
    assert {0, len(curve) - 1} <= set(chosen)
    assert max(curve[number].total for number in chosen) == max(point.total for point in curve)
    assert min(curve[number].total for number in chosen) == min(point.total for point in curve)
    assert thinned(curve[:1] * 50, 50) == list(range(50))


def test_negative_bytes_are_drawn_as_zero(plan, tmp_path):
    rank = plan.ranks[0]
    below = [point._replace(bytes={**point.bytes, ABSENT: -512}) for point in rank.points]
    page = page_of(dataclasses.replace(plan, ranks=[dataclasses.replace(rank, points=below)]), tmp_path)
    assert ABSENT not in page.text["memory"]
