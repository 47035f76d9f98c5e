"""Calibration: what is measured, on real ranks with small sizes, and how the plan looks it up."""

import io
import itertools
import math
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tomli_w
import torch
from pydantic import ValidationError
from rich.console import Console

from tests.helpers.data import rejection
from titanlite import config
from titanlite.launch.cli import run_command
from titanlite.metrics.devices import Device, Measured, find_device
from titanlite.tools.calibrate import collectives, command, host, operators, timing
from titanlite.tools.calibrate.collectives import kinds_of_groups
from titanlite.tools.calibrate.measure import measure_device
from titanlite.tools.plan.cost_model import CostModel
from titanlite.tools.plan.measured_rates import collective_seconds, rate_at, seconds_at, work_seconds
from titanlite.tools.plan.op_trace import Communication, Dispatch, Work
from titanlite.tools.plan.planner import make_plan
from titanlite.tools.plan.report import report
from titanlite.tools.plan.result import Plan

DEBUG = str(Path(__file__).parents[3] / "configs" / "debug.toml")


def measured(**changes: Any) -> Measured:
    values: dict[str, Any] = {
        "torch": "2.13.0",
        "ranks": 2,
        "matmul": {"fp32": [[64, 64, 64, 1e9], [1024, 64, 64, 4e9]]},
        "attention": [[128, 16, 1e9], [2048, 16, 4e9]],
        "attention_backward": [[128, 16, 5e8]],
        "operators": {"mul": [[1000, 1e-5], [100000, 1e-3]], "silu": [[1000, 2e-5]]},
        "operator_seconds": 1e-5,
        "dtensor_seconds": 5e-5,
        "slowdown": 0.5,
        "collectives": [
            {"name": "all_reduce", "ranks": 2, "nodes": 1, "points": [[1000, 1e-4], [4000, 2e-4]]},
            {"name": "all_reduce", "ranks": 8, "nodes": 1, "points": [[1000, 1e-3]]},
            {"name": "all_reduce", "ranks": 16, "nodes": 2, "points": [[1000, 1e-2]]},
            {"name": "send", "ranks": 2, "nodes": 1, "points": [[1000, 1e-4]]},
        ],
        "spread": {"matmul": 0.2},
    }
    return Measured.model_validate(values | changes)


def device(**changes: Any) -> Device:
    rates = {"bf16": 1e12, "fp8": 0, "fp32": 1e12, "memory": 1e9, "memory_bandwidth": 1e9}
    rates |= {"interconnect_bandwidth": 1e9, "network_bandwidth": 1e9, "watts": 1, "devices_per_node": 2}
    return Device.model_validate(rates | {"source": "a test", "kind": "cpu", "measured": measured()} | changes)


# Looking up ----------------------------------------------------------------------------------------------------------


def test_seconds_between_two_sizes_are_interpolated_in_logarithms():
    points = [[1000, 1e-5], [100000, 1e-3]]
    assert seconds_at(points, 10000) == pytest.approx(1e-4)
    assert seconds_at(points, 10) == 1e-5, "not less than the smallest"
    assert seconds_at(points, 200000) == pytest.approx(2e-3), "in proportion to the size above the largest"
    assert seconds_at(points, 1000) == pytest.approx(1e-5)


def test_rates_are_interpolated_on_a_grid_with_gaps():
    rows = [[1, 1, 1.0], [100, 1, 100.0], [1, 100, 10.0]]
    assert rate_at(rows, (10, 1)) == pytest.approx(10), "halfway between 1 and 100"
    assert rate_at(rows, (1, 10)) == pytest.approx(math.sqrt(10))
    assert rate_at(rows, (1000, 0.1)) == pytest.approx(100), "moved to the edge"
    assert rate_at(rows, (100, 100)) in (100.0, 10.0), "the corner is missing: a nearest row"
    middle = math.exp((math.log(1) + math.log(100) + math.log(10)) / 3)
    assert rate_at(rows, (10, 10)) == pytest.approx(middle), "the corners that there are"


def test_seconds_of_operators():
    rates = measured()
    product = Work("aten.mm", 2 * 64**3, "fp32", 0, 0, (), (), (1, 64, 64, 64))
    assert work_seconds(rates, product) == pytest.approx(2 * 64**3 / 1e9)
    batched = product._replace(flops=2 * 3 * 1024 * 64**2, sizes=(3, 1024, 64, 64))
    assert work_seconds(rates, batched) == pytest.approx(3 * 2 * 1024 * 64**2 / 4e9)
    attention = Work("aten._scaled_dot_product_flash_attention_for_cpu", 10**9, "fp32", 0, 0, (), (), (128, 128, 16))
    assert work_seconds(rates, attention) == pytest.approx(1)
    assert work_seconds(rates, attention._replace(name=attention.name + "_backward")) == pytest.approx(2)
    assert work_seconds(rates, Work("aten.silu", 0, "", 500, 500, (), ())) == pytest.approx(2e-5)
    assert work_seconds(rates, Work("aten.anything", 0, "", 500, 500, (), ())) == pytest.approx(1e-5)
    assert work_seconds(rates, Work("aten.mul_", 0, "", 500, 500, (), ())) == pytest.approx(1e-5)


def test_a_data_type_that_was_not_measured_is_an_error():
    product = Work("aten.mm", 2 * 64**3, "bf16", 0, 0, (), (), (1, 64, 64, 64))
    assert "no matrix multiplication in bf16" in rejection(lambda: work_seconds(measured(), product))


@pytest.mark.parametrize(
    ("size", "n", "nodes", "seconds"),
    [
        (2000, 2, 1, math.sqrt(2) * 1e-4),
        (1000, 4, 1, 1e-4 * math.sqrt(1.5)),  # 2 ranks are as near as 8 and stand first: 3/4 of the bytes, not 1/2
        (1000, 8, 1, 1e-3),
        (1000, 64, 8, 1e-2 * (63 / 64) / (15 / 16)),  # above the only size, in proportion
    ],
)
def test_of_the_measured_groups_the_nearest_counts(size, n, nodes, seconds):
    assert collective_seconds(measured(), "all_reduce", size, n, nodes) == pytest.approx(seconds)


def test_a_collective_that_was_not_measured_is_an_error():
    assert "no all_to_all" in rejection(lambda: collective_seconds(measured(), "all_to_all", 1000, 2, 1))


def test_a_calibrated_cpu_does_one_thing_after_the_other():
    axes = {"group": ("fsdp", [0, 1])}
    events = [
        Dispatch(3, 1),
        Work("aten.mul", 0, "", 500, 500, (), ()),
        Communication("all_reduce", "group", 1000),
        Work("aten.mul", 0, "", 500, 500, (), ()),
    ]
    cost = CostModel(device(), axes, 2).cost([events])
    assert cost.elapsed == pytest.approx(3e-5 + 5e-5 + 1e-5 + 1e-4 + 1e-5)
    assert cost.seconds["host"] == pytest.approx(8e-5)
    assert cost.seconds["communication: fsdp"] == pytest.approx(1e-4)


@pytest.mark.parametrize(("group", "share"), [("matmul", 0.2), ("memory", 0.05)])
def test_the_range_of_a_calibrated_device_is_its_spread_and_at_least_five_percent(group, share):
    product = Work("aten.mm", 2 * 64**3, "fp32", 0, 0, (), (), (1, 64, 64, 64))
    work = product if group == "matmul" else Work("aten.mul", 0, "", 500, 500, (), ())
    usual = CostModel(device(), {}, 2).work_seconds(work)[1]
    slower, faster = (CostModel(device(), {}, 2, group, faster=x).work_seconds(work)[1] for x in (False, True))
    assert slower == pytest.approx(usual * (1 + share))
    assert faster == pytest.approx(usual / (1 + share))
    other = "memory" if group == "matmul" else "matmul"
    assert CostModel(device(), {}, 2, other).work_seconds(work)[1] == usual


# Measuring -----------------------------------------------------------------------------------------------------------


def test_groups_of_one_node():
    assert kinds_of_groups(1, 1) == []
    assert kinds_of_groups(2, 2) == [[[0, 1]]]
    assert kinds_of_groups(4, 4) == [[[0, 1], [2, 3]], [[0, 1, 2, 3]]]
    assert kinds_of_groups(3, 3) == [[[0, 1, 2]]]


def test_groups_of_two_nodes():
    within, across, everything = kinds_of_groups(4, 2)
    assert (within, across, everything) == ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]])
    assert kinds_of_groups(3, 1) == [[[0, 1, 2]]]


def test_operands_are_taken_in_turn_from_more_than_the_caches_hold():
    pool = operators.RandomOperands(torch.device("cpu"), torch.float32)
    with mock.patch.dict(operators.UNCACHED, cpu=4 * 1000):
        turns = pool.turns((10, 20), (5, 10))
        assert len(turns) == 4, "of 250 values each, not fewer than 1000 in total"
        places = {x.data_ptr() for pair in turns for x in pair}
        assert len(places) == 8
        assert all((x.shape, y.shape) == ((10, 20), (5, 10)) for x, y in turns)
        assert len(pool.turns((1,))) == operators.MOST_TURNS
        assert pool.turns((10, 20))[0][0].data_ptr() in places, "the buffer did not grow"
        assert len(pool.turns((2000,))) == 1
    seen = []
    call = operators._in_turn(lambda *operands: seen.append(operands), [(1, 2), (3, 4)])
    for _ in range(3):
        call()
    assert seen == [(1, 2), (3, 4), (1, 2)]


def calibrate_with_small_sizes() -> dict[str, Any]:
    """Measure on this rank, and return the device's values."""
    with (
        mock.patch.dict(operators.SIDES, cpu=(16, 64)),
        mock.patch.dict(operators.LENGTHS, cpu=(16, 64)),
        mock.patch.dict(operators.HEAD_DIMS, cpu=(16,)),
        mock.patch.dict(operators.ELEMENTS, cpu=[2**10, 2**12]),
        mock.patch.dict(collectives.SIZES, cpu=[2**10, 2**12]),
        mock.patch.object(timing.Timer.__init__, "__defaults__", (0.002,)),
        mock.patch.multiple(host, UPDATED_VALUES=2**12, STORED_VALUES=2**12),
        tempfile.TemporaryDirectory() as folder,
    ):
        n_ranks = torch.distributed.get_world_size()
        measured = measure_device(torch.device("cpu"), ranks_per_node=n_ranks, checkpoint_folder=Path(folder))
        assert not [*Path(folder).iterdir()]
    return measured.model_dump(exclude_none=True)


@pytest.fixture(scope="module")
def calibrated(ranks: Any) -> list[dict[str, Any]]:
    return ranks(2).run(calibrate_with_small_sizes)


@pytest.mark.nightly
def test_all_ranks_measure_the_same(calibrated):
    assert calibrated[0] == calibrated[1]


@pytest.mark.nightly
def test_the_host_is_measured(calibrated):
    usual = Device.model_fields
    for name in ("host_memory_bandwidth", "storage_bandwidth"):
        assert 0 < calibrated[0][name] != usual[name].default
    assert calibrated[0]["host_bandwidth"] == usual["host_bandwidth"].default  # a CPU has no link to itself


@pytest.mark.nightly
def test_everything_is_measured(calibrated):
    rates = Device.model_validate(calibrated[0]).measured
    assert rates.ranks == 2
    assert {tuple(row[:3]) for row in rates.matmul["fp32"]} == set(itertools.product((16, 64), repeat=3))
    assert len(rates.matmul["bf16"]) == 8
    assert [row[:2] for row in rates.attention] == [row[:2] for row in rates.attention_backward] == [[16, 16], [64, 16]]
    names = {"mul", "add", "silu", "silu_backward", "sum", "_log_softmax", "embedding", "_fused_adamw", "copy"}
    assert names <= set(rates.operators)
    assert all(len(points) == 2 for points in rates.operators.values())
    assert {(row.name, row.ranks, row.nodes) for row in rates.collectives} == {
        (name, 2, 1) for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
    }
    assert 0 < rates.operator_seconds < 1e-2
    assert rates.dtensor_seconds > 0


@pytest.mark.nightly
def test_the_bytes_of_an_operator_are_those_of_a_plan(calibrated):
    points = calibrated[0]["measured"]["operators"]
    assert [size for size, _ in points["mul"]] == [3 * 4 * 2**10, 3 * 4 * 2**12]
    assert [size for size, _ in points["silu"]] == [2 * 4 * 2**10, 2 * 4 * 2**12]


@pytest.mark.nightly
def test_a_plan_takes_the_file(calibrated, tmp_path):
    file = tmp_path / "node.toml"
    command.write(Device.model_validate(calibrated[0]), file)
    assert find_device(str(file)).model_dump(exclude_none=True) == calibrated[0]
    options = [DEBUG, "--parallelism.data_parallel_shard_degree=2", f"--plan.device={file}"]
    plan = make_plan(config.load(options))
    assert plan.device.measured.ranks == 2
    shortest, longest = plan.step_range
    assert shortest < plan.step_seconds < longest
    for part in ("matmul", "attention", "memory", "host", "communication: fsdp"):
        assert plan.cost.seconds[part] > 0
    assert not plan.ranks[0].overhead, "as of the device cpu"


def text_of(plan: Plan) -> str:
    text = io.StringIO()
    Console(file=text, width=150).print(report(plan, "some.toml"))
    return text.getvalue()


@pytest.mark.nightly
def test_the_report_says_if_another_number_of_ranks_was_calibrated(tmp_path):
    file = tmp_path / "node.toml"
    every = ["all_gather", "reduce_scatter", "all_reduce"]
    rows = [{"name": name, "ranks": 2, "nodes": 1, "points": [[1000, 1e-4]]} for name in every]
    command.write(device(measured=measured(collectives=rows)), file)
    options = [DEBUG, f"--plan.device={file}"]
    assert "calibrated with 2 ranks, which share the cores: calibrate with 1" in text_of(
        make_plan(config.load(options))
    )
    shard = "--parallelism.data_parallel_shard_degree=2"
    assert "calibrated with" not in text_of(make_plan(config.load([*options, shard])))


# The command ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["node.json"], ["missing/node.toml"], ["node.toml", "--ranks", "0"]])
def test_wrong_arguments(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_command("calibrate", arguments) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not list(tmp_path.iterdir())


def test_points_of_a_wrong_length_are_rejected():
    with pytest.raises(ValidationError):
        measured(operators={"mul": [[1000, 1e-5, 1.0]]})
    with pytest.raises(ValidationError):
        measured(matmul={"fp32": [[64, 64, 1e9]]})


@pytest.mark.parametrize("second", [500, 1000])
def test_points_that_are_not_in_order_are_rejected(second, tmp_path):
    file = tmp_path / "node.toml"
    points = [[1000, 1e-5], [second, 1e-3]]
    collective = {"name": "send", "ranks": 2, "nodes": 1, "points": points}
    for name, value in {"operators": {"mul": points}, "collectives": [collective]}.items():
        values = device().model_dump(exclude_none=True)
        values["measured"][name] = value
        file.write_text(tomli_w.dumps(values))
        line = rejection(lambda: find_device(str(file)))
        assert line.startswith(f"{file}: measured.{name}.")
        assert line.endswith("expected points from fewer bytes to more; calibrate anew")


def test_a_damaged_file_is_one_line(tmp_path):
    file = tmp_path / "node.toml"
    command.write(device(), file)
    file.write_text(file.read_text().replace("operator_seconds = ", "operator_seconds = -"))
    line = rejection(lambda: find_device(str(file)))
    problem = "measured.operator_seconds: input should be greater than or equal to 0.000000000000000001"
    assert line == f"{file}: {problem}; calibrate anew"


def test_a_folder_of_checkpoints_that_does_not_exist_is_rejected(tmp_path, capsys):
    missing = tmp_path / "missing"
    assert run_command("calibrate", [str(tmp_path / "node.toml"), "--checkpoint-folder", str(missing)]) == 2
    assert capsys.readouterr().err == f"error: --checkpoint-folder {missing}: no such folder\n"


@pytest.mark.nightly
@pytest.mark.parametrize("n", [1, 2])
def test_the_command_calibrates_in_less_than_three_minutes(n, tmp_path, capfd):
    begin = time.monotonic()
    arguments = [str(tmp_path / "node.toml"), "--ranks", str(n), "--checkpoint-folder", str(tmp_path)]
    assert run_command("calibrate", arguments) == 0
    assert time.monotonic() - begin < 180
    node = find_device(str(tmp_path / "node.toml"))
    assert node.measured.ranks == n
    assert node.storage_bandwidth > 0
    assert "TFLOP/s" in capfd.readouterr().out
