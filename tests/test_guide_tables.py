"""The tables of docs/memory_tables.md and docs/scaling.md are those of their log. Nightly, cases are planned again."""

from pathlib import Path

import pytest

from docs.build import guide_numbers, guide_plans, guide_tables

LOG = guide_plans.read_log()
CASES = guide_plans.all_cases()
PLANNED_AGAIN = (
    "memory: 7B, ZeRO-1, 8",
    "communication: 7B, ZeRO-3, bfloat16, 1 steps",
    "schedule: ZBVZeroBubble, 16 microbatches",
    "saving: 8-bit optimizer states",
    "tensor: 8B, tp 16",
    "data: 2 x 8,192 tokens, HSDP within 64, 16384",
    "cost: 70B, b200, bf16, attention saved, batch 4",
)
"""One case of each group."""


@pytest.mark.parametrize("path", guide_tables.TABLES, ids=lambda path: path.name)
def test_the_pages_have_the_tables_of_the_log(path: Path):
    assert path.read_text() == guide_tables.page(path, LOG), "run `python -m docs.build.guide_tables`"


def test_the_log_has_the_cases():
    assert {name: record["arguments"] for name, record in LOG.items()} == {
        name: case.arguments for name, case in CASES.items()
    }


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PLANNED_AGAIN)
def test_the_log_is_true(name: str):
    """Memory, bytes and seconds agree to 2 %, by which versions of torch may differ."""
    planned, logged = guide_plans.planned(name, CASES[name]), LOG[name]
    for key in ("total", "step_seconds", "at_peak", "most"):
        assert planned[key] == pytest.approx(logged[key], rel=0.02, abs=1e-3 if key == "step_seconds" else 2**20), key
    assert guide_numbers.sent_bytes(planned) == pytest.approx(guide_numbers.sent_bytes(logged), rel=1e-6)


def test_a_page_without_markers_is_rejected():
    text = "<!-- a: begin -->\nold\n<!-- a: end -->\nrest"
    assert guide_tables.with_tables(text, {"a": "new\n"}) == "<!-- a: begin -->\n\nnew\n\n<!-- a: end -->\nrest"
    with pytest.raises(ValueError, match="markers of b"):
        guide_tables.with_tables(text, {"b": "new\n"})


def record(tokens: int, devices: int, seconds: float, **spread: tuple[float, float]) -> guide_plans.Record:
    return {"tokens_per_step": tokens, "world_size": devices, "step_seconds": seconds, "spread": spread}


def test_the_efficiency_of_a_plan_by_hand():
    """Half the speed per device. Matrix products that are slower in both make no difference; the network is only in
    one, whose step is 4 to 8 s instead of 5."""
    base = record(100, 1, 2.0, matmul=(-1.0, 2.0), network=(0.0, 0.0))
    other = record(200, 2, 4.0, matmul=(-2.0, 4.0), network=(-0.8, 4.0))
    assert guide_numbers.efficiency(other, base) == pytest.approx((0.5, 0.25, 0.625))
    both = record(200, 2, 4.0, matmul=(0.0, 4.0), network=(0.0, 4.0))
    base = record(100, 1, 2.0, matmul=(0.0, 0.0), network=(0.0, 0.0))
    assert guide_numbers.efficiency(both, base) == pytest.approx((0.5, 0.5 - 0.25 * 2**0.5, 0.5))
    above = record(100, 1, 2.0, matmul=(-0.5, 3.0)), record(200, 2, 4.0, matmul=(-2.0, 4.0))
    assert guide_numbers.efficiency(*reversed(above)) == pytest.approx((0.5, 0.5, 0.75))


def test_sent_bytes_by_hand():
    """Of 4 ranks, three quarters of the tensor, and twice that in an all-reduce."""
    communication = [["fsdp", "all_gather", 3, 400], ["fsdp", "reduce_scatter", 1, 800], ["tp", "all_reduce", 1, 100]]
    counted = {"communication": communication, "ranks_of_axis": {"fsdp": 4, "tp": 2}}
    assert guide_numbers.sent_bytes(counted) == 300 + 600 + 100


@pytest.mark.parametrize(
    ("mode", "dtype", "ratio"),
    [("ZeRO-1", "bfloat16", 1.0), ("ZeRO-2", "bfloat16", 1.0), ("ZeRO-3", "bfloat16", 1.5), ("ZeRO-3", "float32", 1.0)],
)
def test_what_the_page_says_of_communication(mode: str, dtype: str, ratio: float):
    own, base = (LOG[f"communication: 7B, {name}, {dtype}, 1 steps"] for name in (mode, "data parallel"))
    assert guide_numbers.sent_bytes(own) / guide_numbers.sent_bytes(base) == pytest.approx(ratio, abs=0.02)


@pytest.mark.nightly
def test_the_figure_is_drawn_from_the_log(tmp_path: Path):
    pytest.importorskip("matplotlib")
    from docs.build import guide_figure

    guide_figure.draw(LOG, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
