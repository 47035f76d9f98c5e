"""The streams of a device: what overlaps, what waits for what, and what is exposed, by hand-computed cases; what the
host dispatches; and rates that depend on sizes."""

import contextlib

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from titanlite.metrics.devices import DEVICES
from titanlite.tools.plan.cost_model import CostModel
from titanlite.tools.plan.efficiency import ANY, EFFICIENCY
from titanlite.tools.plan.fusion import fuse, overlap
from titanlite.tools.plan.op_trace import (
    Allocation,
    Communication,
    Dispatch,
    Event,
    Segment,
    Work,
    fake_world,
    recording,
)
from titanlite.tools.plan.streams import Arrival, Collective, CopyIn, CopyOut, Run, Streams, Wait


def layer(seconds: float, gather: float, axis: str = "fsdp") -> list:
    """Return a layer's forward: its weights are gathered and copied out, and it computes."""
    return [Collective("all_gather", axis, gather), CopyOut(), Run(seconds, 0, seconds)]


def run(*items, forward: bool = True, **options) -> Streams:
    streams = Streams(**options)
    streams.run(items, forward=forward)
    return streams


def test_only_the_first_all_gather_is_exposed_where_computation_takes_longer():
    streams = run(*layer(3, 1), *layer(3, 1), *layer(3, 1))
    assert (streams.computed, streams.exposed) == (10, 1)


def test_all_gathers_are_exposed_by_what_they_take_longer():
    streams = run(*layer(1, 3), *layer(1, 3), *layer(1, 3))
    assert (streams.computed, streams.exposed) == (10, 7)


@pytest.mark.parametrize(("forward", "begins"), [(True, 1), (False, 6)])
def test_an_all_gather_waits_for_the_last_copy_but_one_in_the_forward_and_for_the_last_one_in_the_backward(
    forward, begins
):
    # Three all-gathers of a second each; the weights of the first two are copied out at 1 and, after 5 s of
    # computation, at 6. The third begins when two buffers are not in use any more.
    gather = Collective("all_gather", "fsdp", 1)
    items = [gather, CopyOut(), Run(5, 0, 5), gather, CopyOut(), gather]
    streams = run(*items, forward=forward)
    streams.join()
    assert streams.computed == max(6, begins + 1)


def test_a_reduce_scatter_overlaps_until_the_next_one_needs_its_buffer():
    reduce = Collective("reduce_scatter", "fsdp", 4)
    streams = run(Run(1, 0, 1), CopyIn(), reduce, Run(3, 0, 3), CopyIn(), reduce, forward=False)
    assert (streams.computed, streams.exposed) == (5, 1)  # the first ends at 5, and the copy waited from 4 on
    streams.join()
    assert (streams.computed, streams.exposed) == (9, 5)


def test_an_all_to_all_runs_until_what_it_writes_is_read():
    first, second = (Collective("all_to_all", "ep", 4, outputs=(name,)) for name in ("first", "second"))
    items = [Run(1, 0, 1), first, second, Run(3, 0, 3), Arrival("first"), Run(1, 0, 1), Arrival("second")]
    streams = run(*items)  # the first ends at 5, the second at 9
    assert (streams.computed, streams.exposed) == (9, 1 + 3)
    assert run(*items, synchronous=True).computed == 1 + 4 + 4 + 3 + 1


def test_cpu_offload_copies_weights_ahead_of_their_all_gather():
    gather = Collective("all_gather", "fsdp", 1, copy=2)
    streams = run(gather, CopyOut(), gather, Run(4, 0, 4), CopyOut())
    # Copied until 2 and 4, gathered until 3 and 5; the first layer computes from 3 to 7.
    assert (streams.computed, streams.exposed) == (7, 3)


@pytest.mark.parametrize(("accumulates", "host", "end"), [(False, 0, 11), (True, 6.5, 11.5)])
def test_cpu_offload_copies_gradients_after_their_reduce_scatter(accumulates, host, end):
    reduce = Collective("reduce_scatter", "fsdp", 2, copy=3, addition=0.5)
    streams = Streams()
    streams.run([Run(1, 0, 1), reduce], forward=False, accumulates=accumulates)
    assert (streams.computed, streams.host) == (1, host)
    streams.run([reduce], forward=False)  # begins when the first copy has ended, and the host has issued it
    streams.join()
    assert streams.computed == end


def test_the_all_reduce_over_replicas_follows_the_reduce_scatter():
    items = Run(1, 0, 1), CopyIn(), Collective("reduce_scatter", "fsdp", 2), Collective("all_reduce", "dp_replicate", 3)
    streams = run(*items, forward=False)
    assert streams.computed == 1
    streams.join()
    assert streams.computed == 6


@pytest.mark.parametrize("axis", ["tp", "ulysses", "ep", "all"])
def test_other_collectives_are_exposed(axis):
    streams = run(Run(2, 0, 2), Collective("all_gather", axis, 1), Run(2, 0, 2))
    assert (streams.computed, streams.exposed) == (5, 1)


def test_the_norm_s_all_reduce_over_fsdp_is_exposed():
    streams = run(Run(2, 0, 2), Collective("all_reduce", "fsdp", 1), Run(2, 0, 2))
    assert (streams.computed, streams.exposed) == (5, 1)


@pytest.mark.parametrize(("message", "computed"), [(2, 6), (5, 8)])
def test_a_message_of_a_ring_overlaps_with_one_attention(message, computed):
    attention, send = Run(3, 0, 3, attends=True), Collective("send", "ring", message)
    streams = run(send, attention, attention)
    assert (streams.computed, streams.exposed) == (computed, computed - 6)


def test_the_device_waits_for_the_host():
    streams = run(Run(1, 3, 3.5), Run(1, 3, 3.5))  # the host issues three seconds, and the device needs one
    assert (streams.computed, streams.idle) == (6.5, 4.5)


def test_the_host_runs_ahead_of_a_long_operator():
    streams = run(Run(5, 1, 5.5), Run(1, 3, 3.5))
    assert streams.computed == 6.5  # the second run is issued while the first one runs, which takes until 5.5


def test_the_device_is_idle_after_the_host_has_waited_for_it():
    streams = run(Run(5, 1, 5), Wait(0.5), Run(1, 1, 2))
    assert (streams.computed, streams.host) == (7.5, 6.5)


def test_computation_beside_communication_is_slower():
    streams = run(*layer(3, 1), *layer(3, 1), slowdown=0.5)
    # The second all-gather runs for a second of the first layer's three, which therefore takes half a second longer.
    assert streams.computed == 1 + 3.5 + 3


def test_a_cpu_does_one_thing_after_the_other():
    streams = run(*layer(3, 1), *layer(3, 1), Run(1, 0.5, 1.5), synchronous=True)
    assert (streams.computed, streams.host, streams.exposed, streams.idle) == (9.5, 9.5, 2, 0.5)


# What the host dispatches --------------------------------------------------------------------------------------------


def dispatched(events: list[Event]) -> tuple[int, int]:
    """Return how many operators the host dispatches, and how many of them are on DTensors."""
    found = [event for event in events if isinstance(event, Dispatch)]
    return sum(x.operators for x in found), sum(x.on_dtensors for x in found)


def test_views_are_dispatched_and_what_a_dtensor_dispatches_is_counted_once():
    with fake_world(rank=0, world_size=2), contextlib.ExitStack() as stack:
        mesh = init_device_mesh("cpu", (2,))
        trace = stack.enter_context(recording())
        x = torch.ones(8, 8)
        sharded = DTensor.from_local(x, mesh, [Shard(0)])
        _ = sharded * 2  # DTensor learns the result's shape
        trace.mark("plain")
        x.view(64).mul(2).view(8, 8)
        trace.mark("DTensor")
        _ = sharded * 2
        trace.mark("end")
    assert dispatched(trace.segments[1].events) == (3, 0)
    assert dispatched(trace.segments[2].events) == (1, 1)


def test_a_fused_kernel_is_dispatched_once():
    with recording() as trace:
        x = torch.ones(64)
        trace.mark("here")
        ((x * 2 + 1) * 3).exp()
        trace.mark("end")
    events = trace.segments[1].events
    assert dispatched(events) == (4, 0)
    assert dispatched(fuse([events])[0]) == (1, 0)


# Rates that depend on sizes ------------------------------------------------------------------------------------------


def seconds_of_product(m: int, n: int, k: int) -> float:
    model = CostModel(DEVICES["h100"], {}, 8)
    return model.work_seconds(Work("aten.mm", 2 * m * n * k, "bf16", 0, 0, (), (), (1, m, n, k)))[1]


def test_a_product_takes_full_waves_of_tiles():
    one_wave = seconds_of_product(128 * 132, 128, 4096)
    assert seconds_of_product(128 * 66, 128, 4096) == pytest.approx(one_wave), "half of the multiprocessors are idle"
    assert seconds_of_product(128 * 133, 128, 4096) > 1.9 * one_wave - ANY.kernel.expected, (
        "one tile more is a wave more"
    )


@pytest.mark.parametrize("backward", ["", "_backward"])
def test_attention_is_slower_over_short_sequences_and_faster_by_cudnn(backward):
    def rate(length: int, *, cudnn: bool) -> float:
        name = f"aten._scaled_dot_product_flash_attention{backward}"
        work = Work(name, 10**15, "bf16", 0, 0, (), (), (length, length, 128))
        return 1e15 / CostModel(DEVICES["h100"], {}, 8, cudnn=cudnn).work_seconds(work)[1]

    assert rate(512, cudnn=False) < 0.6 * rate(8192, cudnn=False)
    assert rate(8192, cudnn=True) > 1.5 * rate(8192, cudnn=False)


def test_networks_are_slower_over_more_nodes():
    size = 10**9
    model = CostModel(DEVICES["h100"], {}, 8)
    seconds = [model.collective_seconds("all_gather", size, list(range(8 * nodes))) for nodes in (1, 4, 32, 256)]
    assert seconds == sorted(seconds)
    slower = CostModel(DEVICES["h100"], {}, 8, "network").collective_seconds("all_gather", size, list(range(256)))
    assert slower > seconds[2]
    assert CostModel(DEVICES["h100"], {}, 8, "network").collective_seconds("all_gather", size, [0, 1]) == (
        model.collective_seconds("all_gather", size, [0, 1])
    )


def test_an_all_reduce_sends_twice_what_a_reduce_scatter_does():
    """It is a reduce-scatter and an all-gather. Differences of two sizes are without latencies."""
    model = CostModel(DEVICES["h100"], {}, 8, "network")

    def seconds_of_a_gigabyte(name: str) -> float:
        one, two = (model.collective_seconds(name, size * 10**9, list(range(32))) for size in (1, 2))
        return two - one

    assert seconds_of_a_gigabyte("all_reduce") == pytest.approx(2 * seconds_of_a_gigabyte("reduce_scatter"))


# Async TP ------------------------------------------------------------------------------------------------------------


def product_of(rows: int, columns: int, inner: int, n: int = 1) -> Work:
    """Return a product in bfloat16, split into n of fewer rows."""
    read, written = 2 * inner * (rows + columns), 2 * rows * columns
    sizes = 1, rows, columns, inner
    return Work("aten.mm", 2 * rows * columns * inner, "bf16", read, written, (), (), sizes, n)


def test_a_product_of_some_rows_reads_all_of_the_other_operand():
    part = product_of(1024, 256, 64, n=8).of_rows(1 / 4)
    assert part == product_of(256, 256, 64)


def test_split_products_run_two_at_a_time():
    model = CostModel(DEVICES["h100"], {}, 8)
    pair = model.work_seconds(product_of(2048, 1024, 8192))[1]
    assert model.work_seconds(product_of(8192, 1024, 8192, n=8))[1] == pytest.approx(4 * pair)
    alone = model.work_seconds(product_of(8192, 1024, 8192))[1]
    assert 4 * pair > alone, "fewer rows fill the multiprocessors less"


@pytest.mark.parametrize(
    ("columns", "inner", "bound"), [(8192, 128, "copies"), (8192, 2**15, "products"), (1024, 2**14, "both")]
)
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_an_overlapped_collective_takes_longer_than_its_products_by_what_they_do_not_hide(name, columns, inner, bound):
    """Eight ranks, 16 MiB each. Copies follow each other, and one product is left; or products take longer, and are
    slower beside copies; or each of two streams waits for its copies and its products, which two could share."""
    device, hopper, rows = DEVICES["h100"], EFFICIENCY["hopper"], 8192
    model = CostModel(device, {"group": ("tp", list(range(8)))}, 8)
    product, size = product_of(rows, columns, inner, n=8), 128 * 2**20
    event = Communication(name, "group", size, products=(product,), kernels=24)
    copy = ANY.message_latency.expected + size / 8 / (device.interconnect_bandwidth * hopper.interconnect.expected)
    products, one = (model.work_seconds(work)[1] for work in (product, product_of(rows // 8, columns, inner)))
    moved = 2 * size / 8 if name == "all_gather" else size + size / 8  # a copy of a chunk, or the sum of all
    own = ANY.next_kernel.expected + moved / (device.memory_bandwidth * hopper.memory.expected)
    slowed = products + ANY.slowdown.expected * min(7 * copy, products)
    expected = {"copies": 7 * copy + one, "products": slowed, "both": 4 * (copy + one)}
    assert expected[bound] == max(expected.values())
    cost = model.cost([[event, product]])
    assert cost.elapsed == pytest.approx(hopper.latency.expected + expected[bound] + own)
    assert cost.seconds["matmul"] == pytest.approx(products)
    assert cost.communication == {("tp", f"{name}, overlapped"): (1, size)}
    exposed = cost.elapsed - cost.seconds["matmul"] - cost.seconds["memory"]
    assert cost.seconds["communication: tp"] - cost.seconds["overlapped"] == pytest.approx(exposed)


@pytest.mark.parametrize("n", [1, 4])
def test_a_group_of_one_rank_has_nothing_to_overlap(n):
    gathered, weight = Allocation("", (64, 64)), Allocation("", (64, 64))
    weight.kind = "gathered"
    gather, product = Communication("all_gather", "group", 2**13, (gathered,)), product_of(64, 64, 64)
    events = [gather, product._replace(inputs=(gathered, weight))]
    segment = Segment(("layer F", 0), list(events))
    overlap([segment], {"group": n})
    assert (segment.events == events) == (n == 1)


def test_the_host_issues_each_chunk():
    product = product_of(64, 64, 64, n=4)
    events = [Communication("all_gather", "group", 2**13, products=(product,), kernels=12), product]
    assert dispatched(fuse([events])[0]) == (12 + 4, 0)
