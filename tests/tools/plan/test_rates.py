"""Shares of a data sheet's rates: their basis, ranges and page, and what the plan does with them."""

from pathlib import Path

import pytest

from docs.build import rates_page
from titanlite.metrics.devices import DEVICES
from titanlite.tools.plan.cost_model import FULL_WAVES, ROW_BYTES, CostModel
from titanlite.tools.plan.efficiency import ANY, EFFICIENCY, WIDER, Share, reached, slowest_of
from titanlite.tools.plan.op_trace import Allocation, Communication, Work
from titanlite.tools.plan.streams import Collective, Streams

EXPLORE = Path(__file__).parents[3] / "titanlite" / "tools" / "plan" / "explore.html"


def test_the_page_has_every_rate_and_its_source():
    assert rates_page.rates_page() == rates_page.PAGE.read_text()


def test_every_share_of_a_device_is_measured_or_says_that_it_is_an_estimate():
    for efficiency in EFFICIENCY.values():
        for key, share in efficiency:
            if isinstance(share, Share):
                assert share.low <= share.expected <= share.high, key
                assert share.of or "estimate" in share.source, key


def test_a_range_is_wider_only_where_the_figure_is_of_another_device():
    own, other, published = (reached(DEVICES["h100"], "h100"), reached(DEVICES["gh200"], "gh200"), EFFICIENCY["hopper"])
    assert own.matmul == published.matmul
    assert own.matmul.basis("h100") == "measured"
    assert other.matmul.basis("gh200") == "measured on another device"
    assert other.matmul.low == published.matmul.low * (1 - WIDER)
    assert other.matmul.high == published.matmul.high * (1 + WIDER)
    assert other.matmul.expected == published.matmul.expected
    ada = EFFICIENCY["ada"].matmul
    assert ada.basis("l40s") == "an estimate"
    assert reached(DEVICES["l40s"], "l40s").matmul == ada


def test_a_device_has_shares_of_its_own():
    assert reached(DEVICES["gb200"], "gb200").matmul.expected > reached(DEVICES["b200"], "b200").matmul.expected


def test_the_ranges_of_an_h200_contain_what_was_measured_on_one():
    """benchmarks/logs/step_trace_h200.log and gpu_session_h200.log, in TFLOP/s and TB/s"""
    device, shares = DEVICES["h200"], reached(DEVICES["h200"], "h200")
    for share, peak, rates in [
        (shares.matmul, device.bf16, (677e12, 800e12)),
        (shares.matmul_fp8, device.fp8, (1314e12, 1557e12)),
        (shares.memory, device.memory_bandwidth, (4.185e12,)),
    ]:
        assert share.basis("h200") == "measured"
        assert all(share.low * peak <= rate <= share.high * peak for rate in rates)


def test_the_slowest_of_more_devices_is_slower():
    assert slowest_of(1, 0.02) == 1
    assert slowest_of(8, 0.02) == pytest.approx(
        1 + 0.02 * 1.42, abs=1e-3
    )  # the mean largest of 8 normal values is 1.42
    assert slowest_of(128, 0.02) > slowest_of(8, 0.02)
    work = Work("aten.mul", 0, "", 2**30, 2**30, (), ())
    one, many = (CostModel(DEVICES["h100"], {}, 8, n_devices=n).work_seconds(work)[1] for n in (1, 64))
    assert many == pytest.approx(one * slowest_of(64, ANY.device_spread.expected))


@pytest.mark.parametrize(("heads", "waves"), [(128, 128 * 32 / 2 / 132), (1, 32 / 2 / 132)])
def test_attention_with_few_heads_has_few_waves(heads, waves):
    """A tile is 128 queries, and a causal one has half of the keys on average."""
    flops = 2 * 2 * heads * 4096 * 4096 * 128 // 2
    work = Work("aten._scaled_dot_product_flash_attention", flops, "bf16", 0, 0, (), (), (4096, 4096, 128))
    hopper = EFFICIENCY["hopper"]
    rate = 989e12 * hopper.flash.expected * 4096 / (4096 + hopper.half_length[0])
    expected = ANY.kernel.expected + flops / rate * (1 + 1 / waves) * FULL_WAVES
    assert CostModel(DEVICES["h100"], {}, 8).work_seconds(work)[1] == pytest.approx(expected)


@pytest.mark.parametrize(("name", "times"), [("aten._log_softmax", 3), ("aten._log_softmax_backward_data", 1.5)])
def test_a_softmax_reads_a_row_again_that_is_longer_than_shared_memory(name, times):
    def seconds(columns: int) -> float:
        out = Allocation(name, (8192, columns))
        return CostModel(DEVICES["h100"], {}, 8).work_seconds(Work(name, 0, "", 2**30, 2**30, (), (out,)))[1]

    short, long = seconds(ROW_BYTES // 4), seconds(ROW_BYTES // 4 + 1)
    start = ANY.next_kernel.expected
    assert (long - start) / (short - start) == pytest.approx((times + 1) / 2)


def test_collectives_of_fsdp_share_links():
    streams = Streams()
    gather, reduce = (Collective(name, "fsdp", 1.0) for name in ("all_gather", "reduce_scatter"))
    streams.run([gather, reduce], forward=False)
    streams.join()
    assert streams.computed == 2.0


def test_the_host_takes_time_for_each_unit_of_fsdp():
    event = Communication("all_gather", "group", 2**20)
    assert CostModel(DEVICES["h100"], {"group": ("fsdp", [0])}, 8)._unit_seconds(event) == ANY.fsdp_unit.expected
    assert CostModel(DEVICES["h100"], {"group": ("tp", [0])}, 8)._unit_seconds(event) == 0


def test_the_explore_page_has_a_layout_for_phones_and_copies_the_command():
    page = EXPLORE.read_text()
    assert "@media (max-width: 480px)" in page
    assert "navigator.clipboard?.writeText" in page
