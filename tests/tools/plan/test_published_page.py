"""The notebook has the plans of published mixtures of experts that the log has, and the bounds are what they say."""

import functools
import math
from pathlib import Path

import pytest

from benchmarks.planner import moe_bounds
from docs.build import published_page
from titanlite.config import load
from titanlite.metrics.devices import DEVICES
from titanlite.tools.plan.cost_model import CostModel
from titanlite.tools.plan.planner import resolve

ROOT = Path(__file__).parents[3]

MIB = 2**20


def test_the_page_is_what_the_script_writes():
    assert published_page.page(published_page.compared_runs()) == published_page.NOTEBOOK.read_text()


def test_every_run_has_its_source_its_group_and_what_differs():
    for each in published_page.compared_runs():
        run = each.run
        assert run["url"].startswith("https://"), run["name"]
        assert all(run[key] for key in ("group", "differs", "unknown")), run["name"]
        assert each.planned["tokens/s"] == run["tokens_per_second"]


def test_every_dense_run_is_of_one_program_of_the_table():
    for each in published_page.dense_runs():
        assert sum(each.run["framework"].startswith(program) for program in published_page.PROGRAMS) == 1


def test_the_width_of_ranges_that_contain_a_share_of_the_runs():
    logs = [math.log(ratio) for ratio in (0.8, 1.0, 1.1, 1.25, 2.0)]
    assert published_page.width_for(logs, 0.8) == pytest.approx(1.25**2)
    assert published_page.width_for(logs, 1) == pytest.approx(4)
    assert published_page.median_error(logs) == pytest.approx(0.2)


def seconds(changed: str, ranks: range, size: int = 256 * MIB, share: float = 0.5) -> float:
    make = functools.partial(moe_bounds.BoundedCostModel, share)
    return make(DEVICES["h100"], {}, 8, changed, faster=True).collective_seconds("all_to_all", size, list(ranks))


@pytest.mark.parametrize("n_ranks", [8, 64])
def test_without_all_to_alls_they_take_no_time_and_other_collectives_do(n_ranks):
    assert seconds(moe_bounds.NO_ALL_TO_ALL, range(n_ranks)) == 0
    model = moe_bounds.BoundedCostModel(0.5, DEVICES["h100"], {}, 8, moe_bounds.NO_ALL_TO_ALL, faster=True)
    assert model.collective_seconds("all_gather", MIB, list(range(n_ranks))) > 0


def test_sent_once_per_node_is_faster_over_nodes_alone():
    plan = CostModel(DEVICES["h100"], {}, 8)
    within, over = (plan.collective_seconds("all_to_all", 256 * MIB, list(range(n))) for n in (8, 64))
    assert seconds(moe_bounds.ONCE_PER_NODE, range(8)) == within
    assert within < seconds(moe_bounds.ONCE_PER_NODE, range(64)) < 0.6 * over
    assert seconds(moe_bounds.ONCE_PER_NODE, range(64), share=0.01) == within  # NVLink has all rows


@pytest.mark.parametrize(
    ("flavor", "degree", "share"),
    [
        ("deepseek_v3_671b", 64, 4 * (1 - 0.75**8) / 8),  # a token's experts are on at most 4 of 8 nodes
        ("qwen3_235b_a22b", 32, 4 * (1 - 0.75**8) / 8),
        ("gpt_oss_120b", 64, 8 * (1 - 0.875**4) / 4),
        ("qwen3_30b_a3b", 8, 1 / 8),  # one node
    ],
)
def test_the_mean_number_of_nodes_of_a_token(flavor, degree, share):
    options = {"model.flavor": flavor, "parallelism.expert_parallel_degree": degree, "plan.device": "h100"}
    loaded = load([str(ROOT / "configs" / "debug.toml"), *(f"--{key}={value}" for key, value in options.items())])
    config, _, _ = resolve(loaded, degree)
    assert moe_bounds.sent_once(config, 8) == pytest.approx(share)
