"""Random layouts are drawn, compared with the single-process reference, and shrunk where they fail; and random wrong
configs are rejected in a line."""

import datetime
import os
from collections import Counter
from random import Random
from typing import Any

import pytest

from tests.helpers.config import OPTIONS
from tests.parallel.test_layouts import _replicated_gradients_counted_twice
from titanlite.config.loader import tomllib
from verification.random_layouts import rejected
from verification.random_layouts.__main__ import line
from verification.random_layouts.draw import Layout, draw, layout_of, sections
from verification.random_layouts.options import BY_THE_LAYOUT, CHANCES, NOT_DRAWN, draw_options, not_drawn, values_of
from verification.random_layouts.report import TECHNIQUES, read, report
from verification.random_layouts.run import DIFFERS, EQUAL, Result, Runner, raised
from verification.random_layouts.shrink import shrink

PER_NIGHT = 30


# What is drawn -------------------------------------------------------------------------------------------------------


def test_every_option_is_in_one_table():
    """An option that is added to the schema is drawn, or this fails until it is listed."""
    tables = [set(CHANCES), BY_THE_LAYOUT, not_drawn()]
    assert set.union(*tables) == set(OPTIONS)
    assert sum(map(len, tables)) == len(OPTIONS), "an option is in two tables"
    sections_or_options = {*OPTIONS, *(key.partition(".")[0] for key in OPTIONS)}
    assert {key for keys in NOT_DRAWN.values() for key in keys} <= sections_or_options


def test_every_value_is_drawn():
    drawn: dict[str, list[Any]] = {}
    for seed in range(3000):
        for key, value in draw_options(Random(f"{seed} values")).items():
            drawn.setdefault(key, []).append(value)
    for key in CHANCES:
        assert all(value in drawn[key] for value in values_of(key)), key


def test_a_seed_draws_the_same_layout_and_its_toml_is_that_layout():
    for seed in range(20):
        layout = draw(seed)
        assert draw(seed).options == layout.options
        assert layout_of(tomllib.loads(layout.toml)).config == layout.config


def test_draws_are_accepted_often_and_are_not_plain():
    layouts = [draw(seed) for seed in range(100)]
    n_rejected = sum(len(layout.rejected) for layout in layouts)
    assert 0.3 < len(layouts) / (len(layouts) + n_rejected) < 0.9, "too many draws are rejected, or none"
    for layout in layouts:
        for options, error in layout.rejected:
            assert not rejected.wrong_lines(error.problems), options
    values = [{key: str(value) for key, value in layout.options.items()} for layout in layouts]
    counts = Counter(name for options in values for name, has in TECHNIQUES.items() if has(options))
    assert counts.total() / len(layouts) > 4, "layouts have few techniques"
    assert set(TECHNIQUES) - set(counts) <= {"int8", "compile", "low-bit states"}, "a technique is hardly ever drawn"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("n", [40, pytest.param(1000, marks=pytest.mark.nightly)])
def test_a_wrong_config_is_rejected_in_lines(n):
    counts = Counter()
    for seed in range(n):
        options, launch = rejected.draw_values(Random(f"{seed} wrong"), seed)
        lines = rejected.check(options, launch)
        assert not isinstance(lines, list) or not rejected.wrong_lines(lines), (seed, options)
        counts[isinstance(lines, list)] += 1
    assert 0 < counts[False] < counts[True]


@pytest.mark.parametrize(
    "line", ["a traceback", f"{rejected.FILE}: x.y = 1: unknwon", "layout.toml: model.dim = 1: a\nb"]
)
def test_a_line_that_names_no_option_is_found(line):
    assert rejected.wrong_lines([line]) == [line]


# Layouts -------------------------------------------------------------------------------------------------------------


def assert_equal(runner: Runner, seeds: range) -> None:
    results = [(layout, runner.run(layout)) for layout in sorted(map(draw, seeds), key=lambda layout: layout.ranks)]
    wrong = [line(layout, result) for layout, result in results if not result.is_right]
    assert not wrong, "\n".join([*wrong, "python -m verification.random_layouts --seed SEED --shrink"])


@pytest.fixture
def runner(ranks) -> Any:
    runner = Runner(ranks)
    yield runner
    runner.close_folder()


@pytest.mark.parametrize("seed", [5, 6, 16])
def test_a_layout_matches_the_reference(runner, seed):
    assert_equal(runner, range(seed, seed + 1))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_other_layouts_every_night_match_the_reference(runner):
    """The seeds are those of the date, or from RANDOM_LAYOUTS_SEED on."""
    first = int(os.environ.get("RANDOM_LAYOUTS_SEED") or datetime.date.today().toordinal() * PER_NIGHT)
    assert_equal(runner, range(first, first + PER_NIGHT))


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_an_injected_bug_is_found_and_shrunk(ranks):
    """Gradients of weights that tensor-parallel ranks share count twice in the norm: two ranks and no other option."""
    runner = Runner(ranks, bug=_replicated_gradients_counted_twice)
    options = {"parallelism.tensor_parallel_degree": 2, "parallelism.data_parallel_shard_degree": 2}
    options |= {"model.qk_norm": True, "training.document_mask": True, "training.loss_chunks": 3, "debug.seed": 1}
    options |= {"training.global_batch_size": 8, "activation_checkpoint.mode": "full", "optimizer.name": "Adam"}
    first = runner.run(Layout(options))
    assert (first.kind, first.where) == (DIFFERS, "step 1 norm")
    smallest = shrink(Layout(options), lambda layout: runner.run(layout).kind == DIFFERS)
    assert smallest.options == {"parallelism.tensor_parallel_degree": 2}
    runner.close_folder()


# Shrinking, results and the log --------------------------------------------------------------------------------------


def test_a_layout_is_shrunk_to_what_fails():
    """Of a layout with many options, those that the failure needs remain, as small as it needs them."""
    layout = next(layout for layout in map(draw, range(500)) if layout.config.parallelism.pipeline_parallel_degree > 2)

    def fails(candidate: Layout) -> bool:
        config = candidate.config
        return config.parallelism.pipeline_parallel_degree > 1 and config.model.n_layers > 3

    smallest = shrink(layout, fails)
    assert fails(smallest)
    assert len(layout.options) > 10
    assert set(smallest.options) <= {
        *("parallelism.pipeline_parallel_degree", "model.n_layers", "training.local_batch_size"),
        "parallelism.pipeline_parallel_schedule",
    }
    assert smallest.config.parallelism.pipeline_parallel_degree == 2
    assert smallest.config.model.n_layers == 4
    assert smallest.ranks == 2


def test_the_rank_that_failed_first_is_named():
    message = (
        "rank 0: Traceback\n  x\nRuntimeError: Connection closed by peer\nrank 1: Traceback\na.b.BadError: it is 3"
    )
    assert raised(message) == Result("BadError", where="it is 3")


def test_a_log_is_read_and_counted(tmp_path):
    log = tmp_path / "log"
    layouts = [draw(seed) for seed in range(5)]
    results = [Result(EQUAL, 1e-15, 1e-11, "step 1 loss", 2.0)] * 4 + [Result("RankError", where="a | b", seconds=1.0)]
    log.write_text("# header\n" + "".join(f"{line(*pair)}\n" for pair in zip(layouts, results, strict=True)))
    assert [(seed, kind) for seed, _, kind, _, _ in read(log)] == [(seed, EQUAL) for seed in range(4)] + [
        (4, "RankError")
    ]
    options = [{key: f"{value}".replace(" ", "") for key, value in layout.options.items()} for layout in layouts]
    assert [own for *_, own in read(log)] == options
    assert report(log).startswith("5 layouts: equal 4, RankError 1\n")
    assert report(log).endswith("seed 4: RankError")


def test_sections_of_no_options_are_the_small_config():
    assert sections({})["model"]["dim"] == 32
