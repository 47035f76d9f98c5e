"""A plan beside what a run of the same config has measured."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from tests.helpers.data import rejection
from titanlite import config
from titanlite.launch.cli import run_command
from titanlite.tools.plan.comparison import comparison_table
from titanlite.tools.plan.planner import make_plan
from titanlite.tools.plan.report import range_line
from titanlite.tools.plan.result import Plan, spread_of_difference

ROOT = Path(__file__).parents[3]
DEBUG = str(ROOT / "configs" / "debug.toml")
OPTIONS = ["--model.n_layers=1", "--parallelism.data_parallel_shard_degree=2"]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(config.load([DEBUG, *OPTIONS, "--plan.device=h100"]))


def write_metrics(file: Path, plan: Plan, seconds: list[float]) -> Path:
    """The metrics of a run that logs every 10 steps, each of which has taken these seconds, and validates once."""
    tokens, lines = plan.config.tokens_per_step, list[dict[str, Any]]()
    for number, each in enumerate(seconds, 1):
        seen = {"n_tokens_seen": 7 * number * tokens, "n_padding_seen": 3 * number * tokens}
        lines.append({"step": 10 * number, **seen, "time_metrics/end_to_end(s)": each})
        lines[-1] |= {"throughput(tps)": tokens / plan.world_size / each, "memory/max_active(GiB)": 1 / number}
    lines.insert(2, {"step": 25, "validation_metrics/global_avg_loss": 1.0})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def cells(table: Table) -> dict[str, tuple[Any, ...]]:
    return {str(row): rest for row, *rest in zip(*(column.cells for column in table.columns), strict=True)}


def test_the_first_line_does_not_count_and_the_median_of_the_others_does(plan, tmp_path):
    seconds = [factor * plan.step_seconds for factor in (9, 2, 1.25, 1)]
    table = comparison_table(plan, write_metrics(tmp_path / "metrics.jsonl", plan, seconds))
    rows = cells(table)
    assert rows["seconds of a step"] == [f"{plan.step_seconds:.3f}", f"{1.25 * plan.step_seconds:.3f}", "-20.0%"]
    assert rows["tokens/s per device"][2] == "+25.0%"
    memory = plan.ranks[0].peak.total / 2**30
    assert rows["peak memory of rank 0 in tensors, GiB"] == [f"{memory:.2f}", "0.50", f"{memory / 0.5 - 1:+.1%}"]
    assert "median of 3 logged lines" in str(table.caption)


@pytest.mark.nightly
def test_memory_of_a_cpu_is_not_compared(tmp_path):
    plan = make_plan(config.load([DEBUG, *OPTIONS, "--plan.device=cpu"]))
    table = comparison_table(plan, write_metrics(tmp_path / "metrics.jsonl", plan, [1, 1]))
    assert list(cells(table)) == ["seconds of a step", "tokens/s per device"]
    assert "memory is not compared" in str(table.caption)


def changed(key: str, factor: float) -> Callable[[str], str]:
    """Multiply a value in all lines."""

    def change(text: str) -> str:
        lines = [json.loads(line) for line in text.splitlines()]
        for line in lines:
            line |= {key: line[key] * factor} if key in line else {}
        return "\n".join(map(json.dumps, lines))

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda text: text.splitlines()[0], "has no logged step but the first; train more steps"),
        (lambda text: "", "has no logged step but the first; train more steps"),
        (lambda text: "{", "is not the metrics.jsonl of a run: JSONDecodeError: "),
        (lambda text: text.replace("n_tokens_seen", "tokens"), "is not the metrics.jsonl of a run: KeyError: "),
        (changed("n_tokens_seen", 2), "tokens per step, and the plan "),
        (changed("throughput(tps)", 0.5), "the run has 4 ranks, and the plan 2; plan the run's config.toml"),
    ],
)
def test_metrics_of_another_run_are_rejected(plan, tmp_path, change, problem):
    file = write_metrics(tmp_path / "metrics.jsonl", plan, [1, 1, 1])
    comparison_table(plan, file)
    file.write_text(change(file.read_text()))
    line = rejection(lambda: comparison_table(plan, file))
    assert line.startswith(f"{file}: ")
    assert problem in line


@pytest.mark.nightly
def test_the_command_prints_the_comparison(tmp_path, capsys, plan):
    file = write_metrics(tmp_path / "metrics.jsonl", plan, [1, 2 * plan.step_seconds])
    arguments = [DEBUG, *OPTIONS, "--plan.device=h100", "--against"]
    assert run_command("plan", [*arguments, str(file)]) == 0
    assert "-50.0%" in capsys.readouterr().out
    assert run_command("plan", [*arguments, str(tmp_path / "nowhere.jsonl")]) == 2
    assert f"{tmp_path / 'nowhere.jsonl'}: cannot be read: No such file" in capsys.readouterr().err


def test_the_range_adds_the_squares_of_what_is_uncertain(plan):
    spread = {"matmul": (-3.0, 4.0), "network": (-4.0, 3.0), "host": (0.0, 0.0)}
    changed = dataclasses.replace(plan, step_seconds=10.0, spread=spread)
    assert changed.step_range == (pytest.approx(5), pytest.approx(15))
    assert "from 5.000 to 15.000 s per step" in range_line(changed)
    assert "least certain: matrix multiplication (-3.000, +4.000 s), communication between nodes" in range_line(changed)
    assert "the host" not in range_line(changed)


def test_what_is_wrong_for_two_layouts_alike_does_not_matter():
    one = {"matmul": (-3.0, 4.0), "network": (-1.0, 1.0)}
    assert spread_of_difference(one, one) == (0.0, "matmul")
    other = {"matmul": (-3.0, 4.0), "network": (-1.5, 4.0)}
    assert spread_of_difference(one, other) == (3.0, "network")
    assert spread_of_difference({}, {}) == (0.0, "")
