"""Complete training runs: the files that they write, how they stop, and how they resume from checkpoints."""

import contextlib
import errno
import io
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open

from tests.helpers.cases import cases
from tests.helpers.checkpoint import assert_skipped, change_state, flip
from tests.helpers.launches import finish
from tests.parallel.test_step_costs import alone, no_value_is_read  # noqa: F401
from tests.test_architecture import (
    LINES_OF_A_DEBUG_RUN,
    LINES_OF_A_RANK_OF_MANY_TECHNIQUES,
    LINES_WITH_A_TOKEN_CACHE,
)
from titanlite import build, config, step_guard, train, train_step
from titanlite.build import meta_model, optimizer_for
from titanlite.checkpoint import checkpointer
from titanlite.checkpoint.folder import complete_steps
from titanlite.checkpoint.reader import CheckpointReader
from titanlite.config import Config
from titanlite.config.errors import TrainingError
from titanlite.data.loader import Loader
from titanlite.files import safetensors
from titanlite.launch import process_group, progress
from titanlite.launch.other_processes import children
from titanlite.launch.process import Signals
from titanlite.metrics import logger as metrics
from titanlite.metrics import summary
from titanlite.step_guard import StepGuard
from titanlite.techniques.loss_scale import LossScale
from titanlite.tools.parity.training_run import TrainingRun
from titanlite.train_step import Totals, TrainStep

ROOT = Path(__file__).parents[1]
SMALL = """
[job]
dump_folder = "{folder}/run"

[model]
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
ffn_dim = 48

[training]
cache_folder = "{folder}/cache"
seq_len = 64
local_batch_size = 2
global_batch_size = 8
steps = 6

[optimizer]
lr = 1e-2

[lr_scheduler]
warmup_steps = 2
total_steps = 12

[metrics]
log_freq = 1

[checkpoint]
enable = false
interval = 3
"""
TAGS = {
    "loss_metrics/global_avg_loss",
    "loss_metrics/global_max_loss",
    "grad_norm",
    "lr",
    "throughput(tps)",
    "tflops",
    "time_metrics/end_to_end(s)",
    "time_metrics/data_loading(%)",
    "memory/max_active(GiB)",
    "memory/max_reserved(GiB)",
    "n_tokens_seen",
    "n_padding_seen",
}
LOSS = "loss_metrics/global_avg_loss"
COMPUTED = (LOSS, "loss_metrics/global_max_loss", "grad_norm", "lr", "n_tokens_seen", "n_padding_seen")
"""Tags whose values do not depend on the clock."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(SMALL.format(folder=tmp_path))
    return tmp_path


class Runs:
    """Trains the small config in the ranks of a process pool."""

    def __init__(self, ranks: Any, folder: Path):
        self.ranks, self.folder = ranks, folder

    def __call__(self, world_size: int, run: str, *arguments: str, **case: Any) -> list[dict[str, Any]]:
        """Train into a folder to the end, and return the lines of its metrics.jsonl."""
        argv = [str(self.folder / "small.toml"), f"--job.dump_folder={self.folder / run}", *arguments]
        assert set(self.ranks(world_size).run(run_train, argv=argv, **case)) == {""}
        return read_metrics(self.folder / run)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def computed(steps: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return the step numbers with the values that do not depend on the clock."""
    tags = "step", *COMPUTED, metrics.VALIDATION_LOSS
    return [tuple(values.get(tag) for tag in tags) for values in steps]


@pytest.fixture
def runs(ranks: Any, folder: Path) -> Runs:
    return Runs(ranks, folder)


class StopAfter(Signals):
    """Signals that ask to stop during a step of the run; each step looks at it once."""

    def __init__(self, step: int):
        self.finished_steps, self.saves, self.answered_saves, self.step = itertools.count(1), 0, 0, step

    @property
    def stopping(self) -> bool:
        return next(self.finished_steps) >= self.step


Steps = tuple[tuple[int, int], ...]
"""(rank, step)"""


def run_train(
    argv: list[str],
    stop_after: int = 10**9,
    not_finite: Steps = (),
    overflow: Steps = (),
    signals: Signals | None = None,
) -> str:
    """Train on every rank, and return the message of the error that ended it; without one, "".

    Args:
        stop_after: rank 0 is asked to stop during this step.
        signals: what this rank is asked, instead of `stop_after`.
        not_finite: where the loss is replaced by infinity.
        overflow: where a gradient is replaced by infinity, and the loss is not.
    """
    launch = config.Launch.from_environment(n_devices=0)
    job = config.check(config.load(argv), launch)
    real, calls = TrainStep.forward_backward, itertools.count(1)

    def forward_backward(*arguments: Any, **keywords: Any) -> Any:
        loss_sum, valid = real(*arguments, **keywords)
        step = launch.rank, next(calls)
        if step in overflow:
            next(arguments[0].model.parameters()).grad.to_local().fill_(math.inf)
        return loss_sum * (math.inf if step in not_finite else 1), valid

    try:
        with mock.patch.object(TrainStep, "forward_backward", forward_backward):
            train.train(job, launch, signals or StopAfter(stop_after if launch.rank == 0 else 10**9))
    except (config.ConfigError, TrainingError) as error:
        return str(error)
    return ""


def error_message(runs: Runs, world_size: int, run: str, *arguments: str, **case: Any) -> str:
    """Return the one message that every rank ends with."""
    argv = [str(runs.folder / "small.toml"), f"--job.dump_folder={runs.folder / run}", *arguments]
    (message,) = set(runs.ranks(world_size).run(run_train, argv=argv, **case))
    return message


def train_without_reading(argv: list[str]) -> str:
    """Train as run_train, where no value of a tensor may be read between the backward and the optimizer's step."""
    watch, norm, step = contextlib.ExitStack(), train_step.gradient_norm, train_step.clipped_step

    def gradient_norm(*arguments: Any) -> Any:
        watch.enter_context(no_value_is_read())
        return norm(*arguments)

    def clipped_step(*arguments: Any) -> None:
        with watch:
            step(*arguments)

    with mock.patch.multiple(train_step, gradient_norm=gradient_norm, clipped_step=clipped_step):
        return run_train(argv)


def test_no_value_is_read_between_backward_and_optimizer_step(runs, folder):
    argv = [str(folder / "small.toml"), f"--job.dump_folder={folder / 'run'}"]
    assert runs.ranks(2).run(train_without_reading, argv=argv) == ["", ""]
    assert len(read_metrics(folder / "run")) == 6


# The last step's loss -------------------------------------------------------------------------------------------------


def lines_of_a_run(argv: list[str], not_finite: Steps = ()) -> list[str]:
    """Train as run_train, and return what rank 0 prints."""
    lines: list[str] = []
    with mock.patch.object(process_group, "print", lambda line, **keywords: lines.append(line), create=True):
        assert run_train(argv, not_finite=not_finite) == ""
    return lines


@pytest.mark.nightly
def test_a_run_that_ends_worse_than_a_uniform_guess_says_so(runs, folder):
    """Its loss is finite, so that nothing else tells it."""
    argv = [str(folder / "small.toml"), f"--job.dump_folder={folder / 'run'}", "--training.nonfinite_steps_allowed=1"]
    ends = "is above 6.606, 1 more than a uniform guess has: it has diverged"  # log 272 + 1
    (lines,) = runs.ranks(1).run(lines_of_a_run, argv=[*argv, "--optimizer.lr=3"])
    loss = read_metrics(folder / "run")[-1][LOSS]
    assert loss > 20
    assert lines[-1] == f"the last loss, {loss:,.4g}, {ends}"
    (lines,) = runs.ranks(1).run(lines_of_a_run, argv=argv, not_finite=((0, 6),))
    assert lines[-1] == f"the last loss, inf, {ends}"
    (lines,) = runs.ranks(1).run(lines_of_a_run, argv=argv)
    assert "uniform guess" not in lines[-1]


# Activities -----------------------------------------------------------------------------------------------------------

ACTIVITIES = {
    "build.build_data": "building the run",
    "build.build_model": "building the model",
    "build.build_loader": "starting the loop",
    "MetricsLogger.begin": "starting the loop",
    "Checkpointer.resume": "loading a checkpoint",
    "Loader.next": "waiting for data",
    "TrainStep.forward_backward": "forward and backward",
    "train_step.gradient_norm": "updating the weights",
    "train_step.clipped_step": "updating the weights",
    "step_guard.explain_nonfinite": "updating the weights",
    "TrainStep.largest_loss": "logging",
    "MetricsLogger.log": "logging",
    "build.build_validation_batches": "validation",
    "Checkpointer.save": "saving a checkpoint",
    "Checkpointer.finish": "waiting for the last checkpoint",
    "Checkpointer.confirm_last": "testing the last checkpoint",
    "Checkpointer.close": "ending the run",
}
"""What a rank does, as the watchdog names it, when it calls a function."""


def activities(argv: list[str]) -> dict[str, list[str]]:
    """Train as run_train, where a step is not finite, and return what the rank was doing at each call."""
    places = {
        "build": build,
        "train_step": train_step,
        "step_guard": step_guard,
        "MetricsLogger": metrics.MetricsLogger,
    }
    places |= {"Checkpointer": checkpointer.Checkpointer, "TrainStep": TrainStep, "Loader": Loader}
    seen: dict[str, list[str]] = {name: [] for name in ACTIVITIES}

    def watched(name: str, real: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            seen[name].append(progress.current.name)
            return real(*arguments, **keywords)

        return call

    with contextlib.ExitStack() as stack:
        for name in ACTIVITIES:
            place, _, attribute = name.rpartition(".")
            watch = watched(name, getattr(places[place], attribute))
            stack.enter_context(mock.patch.object(places[place], attribute, watch))
        assert run_train(argv, not_finite=((0, 2),)) == ""
    return {name: [*dict.fromkeys(names)] for name, names in seen.items()}


def test_what_a_rank_does_has_its_name(runs, folder):
    """The watchdog would name another activity otherwise."""
    argv = [str(folder / "small.toml"), f"--job.dump_folder={folder / 'run'}", "--checkpoint.enable"]
    argv += ["--validation.enable", "--validation.freq=2", "--validation.fraction=0.1"]
    (seen,) = runs.ranks(1).run(activities, argv=[*argv, "--training.nonfinite_steps_allowed=1"])
    expected = {name: [activity] for name, activity in ACTIVITIES.items()}
    for name in ("Loader.next", "TrainStep.forward_backward"):
        expected[name].append("testing the last checkpoint")
    for name in ("train_step.gradient_norm", "train_step.clipped_step"):  # in the first step, other ranks may compile
        expected[name].insert(0, "forward and backward")
    # A save waits for an earlier one first, and a run that ends for any.
    expected["Checkpointer.finish"] = ["saving a checkpoint", *expected["Checkpointer.finish"], "ending the run"]
    assert seen == expected


# Files and metrics of a run -------------------------------------------------------------------------------------------


def test_files_of_a_run(runs, folder):
    steps = runs(1, "run", "--validation.enable", "--validation.freq=4", "--validation.fraction=0.1")
    assert [values["step"] for values in steps] == [1, 2, 3, 4, 5, 6]
    validated = {step: {metrics.VALIDATION_LOSS} for step in (4, 6)}  # every fourth step, and the last one
    assert [set(values) - {"step"} for values in steps] == [TAGS | validated.get(step, set()) for step in range(1, 7)]
    assert steps[-1][LOSS] < steps[0][LOSS] - 0.5
    assert abs(steps[0][LOSS] - math.log(272)) < 0.1, "the first loss is not that of a uniform distribution"
    assert all(values["n_tokens_seen"] == values["step"] * 8 * 64 for values in steps)
    assert all(values["n_padding_seen"] == 0 for values in steps)
    assert all(values["memory/max_active(GiB)"] > 0.05 and values["tflops"] > 0 for values in steps)
    assert all(values["loss_metrics/global_max_loss"] == values[LOSS] for values in steps)

    resolved = config.load([str(folder / "run" / "config.toml")]).config
    assert resolved.parallelism.data_parallel_shard_degree == 1
    assert resolved.training.mixed_precision_param == "float32"
    assert f"torch {torch.__version__}" in (folder / "run" / "config.toml").read_text()


def test_tensorboard_has_the_same_values(runs, folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps = runs(1, "run")
    events = EventAccumulator(str(folder / "run" / "tb")).Reload()
    assert set(events.Tags()["scalars"]) == TAGS
    for tag in COMPUTED:
        points = [(event.step, event.value) for event in events.Scalars(tag)]
        assert points == [(values["step"], pytest.approx(values[tag], rel=1e-6)) for values in steps]  # it has float32
    (text,) = events.Tensors("config/text_summary")
    assert b"global_batch_size = 8" in text.tensor_proto.string_val[0]


@pytest.mark.nightly
def test_float16_scales_the_loss(runs, folder):
    """A loss scale at which gradients overflow is halved until they do not; a checkpoint saves it."""
    half = ["--training.mixed_precision_param=float16", "--checkpoint.enable", "--lr_scheduler.total_steps=12"]
    half += ["--training.loss_scale_growth_interval=2", f"--training.initial_loss_scale={2**18}"]
    steps = runs(2, "run", *half)
    state = json.loads((folder / "run" / "checkpoint" / "step-6" / "state.json").read_text())
    good = [values for values in steps if values["grad_norm"] is not None]
    assert len(good) < len(steps), "no step has overflowed"
    assert state["skipped"] == 0, "an overflow is not a step that went wrong"
    assert len(good) > 2
    assert good[-1][LOSS] < steps[0][LOSS] - 0.05
    float32 = runs(2, "float32", "--lr_scheduler.total_steps=12", "--training.steps=1")
    assert good[0]["grad_norm"] == pytest.approx(float32[0]["grad_norm"], rel=0.02), "not of the unscaled gradients"
    uninterrupted = runs(2, "uninterrupted", *half, "--training.steps=8")
    resumed = runs(2, "run", *half, "--training.steps=8")
    assert computed(uninterrupted)[6:] == computed(resumed)[6:]


@pytest.mark.nightly
def test_one_ranks_overflow_skips_the_step_on_all(runs, folder):
    half = ["--training.mixed_precision_param=float16", "--checkpoint.enable"]
    steps = runs(2, "run", *half, overflow=((1, 3),))
    assert [values["step"] for values in steps if values["grad_norm"] is None] == [3]
    state = json.loads((folder / "run" / "checkpoint" / "step-6" / "state.json").read_text())
    assert (state["loss_scale"], state["skipped"]) == ([2**15, 3], 0)
    assert "the gradient norm is inf" in error_message(runs, 2, "float32", overflow=((1, 3),))


def test_loss_scale():
    scale = LossScale(8.0, growth_interval=2)
    values = []
    for overflowed in (True, False, True, False, False, False, False, False):
        scale.update(overflowed=overflowed)
        values.append(scale.value)
    assert values == [4, 4, 2, 2, 4, 4, 8, 8]
    other = LossScale(1.0, growth_interval=2)
    other.load(json.loads(json.dumps(scale.state())))
    other.update(overflowed=False)
    assert other.value == 16


def test_an_overflow_at_a_loss_scale_of_one_is_a_step_that_is_not_finite(alone):  # noqa: F811
    """A smaller scale would not help: without the limit, all later steps could be skipped in silence."""
    checkpoints = mock.Mock(after_divergence=lambda: "")
    guard = StepGuard(n_allowed=1, loss_scale=LossScale(2.0, growth_interval=2))
    overflow = (1.0, math.inf, torch.ones((), dtype=torch.float64), checkpoints)
    guard.settle(1, *overflow)
    assert (guard.loss_scale, guard.n_nonfinite) == (1, 0)
    guard.settle(2, *overflow)
    assert guard.n_nonfinite == 1
    with pytest.raises(TrainingError, match=r"^step 3: the gradient norm is inf .*nonfinite_steps_allowed = 1, all"):
        guard.settle(3, *overflow)
    checkpoints.confirm.assert_not_called()


def test_a_run_that_goes_on_in_float16_begins_with_the_initial_loss_scale():
    saved = StepGuard(n_allowed=0).state()
    resumed = StepGuard(n_allowed=0, loss_scale=LossScale(8.0, growth_interval=2))
    resumed.load(json.loads(json.dumps(saved)))
    assert resumed.loss_scale == 8


def test_an_update_is_taken_if_the_loss_and_the_norm_are_finite():
    guard = StepGuard(n_allowed=2)
    rows = [(1.0, 2.0), (math.nan, 2.0), (1.0, math.inf), (math.inf, math.nan)]
    totals = [Totals(torch.tensor([*row, 0, 0], dtype=torch.float64)) for row in rows]
    assert [guard.taken(each).item() for each in totals] == [True, False, False, False]
    guard.n_nonfinite = 1
    resumed = StepGuard(n_allowed=2)
    resumed.load(json.loads(json.dumps(guard.state())))
    assert resumed.n_nonfinite == 1


@pytest.mark.parametrize("stochastic", [True, False])
def test_stochastic_rounding_keeps_small_updates(stochastic):
    """An update of 1e-3 is a quarter of the last digit of 1 in bfloat16.

    Rounding to nearest loses it each time. With stochastic rounding the mean of many weights moves as it should, within
    3 of its standard deviations.
    """
    steps, lr, digit = 10, 1e-3, 2**-8
    model = meta_model(Config()).to(torch.bfloat16).to_empty(device="cpu")
    weight = model.layers["0"].feed_forward.w1.weight
    with torch.no_grad():
        weight.fill_(1)
    options = config.schema.Optimizer(lr=lr, weight_decay=0.0, stochastic_rounding=stochastic)
    optimizer = optimizer_for(model, options)
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    moved = 1 - weight.double().mean().item()
    allowed = 3 * digit * math.sqrt(steps) / math.sqrt(weight.numel())
    assert moved == (pytest.approx(steps * lr, abs=allowed) if stochastic else 0)


@pytest.mark.nightly
@pytest.mark.parametrize("state_dtype", ["int8", "bfloat16"])
def test_low_bit_optimizer_states_train(runs, state_dtype):
    wide = ["--model.dim=128", "--model.ffn_dim=256", "--optimizer.lr=2e-3"]
    low_bit, float32 = runs(2, "run", *wide, f"--optimizer.state_dtype={state_dtype}"), runs(2, "float32", *wide)
    losses, expected = ([values[LOSS] for values in steps] for steps in (low_bit, float32))
    assert losses[-1] < losses[0] - 0.5
    assert losses == pytest.approx(expected, rel=0.01)
    assert losses != expected


PRECISIONS = {
    "float32": (
        "float32, compute float32, gradients float32, reduced in float32, optimizer states float32: 16 bytes",
        [],
    ),
    "bfloat16 compute": (
        "float32, compute bfloat16, gradients float32, reduced in float32, optimizer states float32: 16 bytes",
        ["training.mixed_precision_param=bfloat16"],
    ),
    "bfloat16": (
        "bfloat16 (stochastic rounding), compute bfloat16, gradients bfloat16, reduced in float32, "
        "optimizer states bfloat16: 8 bytes",
        ["training.dtype=bfloat16", "optimizer.stochastic_rounding=true"],
    ),
    "bfloat16, float32 optimizer states": (
        "bfloat16 (stochastic rounding), compute bfloat16, gradients bfloat16, reduced in float32, "
        "optimizer states float32: 12 bytes",
        ["training.dtype=bfloat16", "optimizer.stochastic_rounding=true", "optimizer.state_dtype=float32"],
    ),
    "bfloat16 optimizer states": (
        "float32, compute float32, gradients float32, reduced in float32, optimizer states bfloat16: 12 bytes",
        ["optimizer.state_dtype=bfloat16"],
    ),
    "4-bit optimizer states": (
        "float32, compute float32, gradients float32, reduced in float32, optimizer states int4: 9.062 bytes",
        ["optimizer.state_dtype=int4"],
    ),
    "float8 optimizer states": (
        "float32, compute float32, gradients float32, reduced in float32, optimizer states float8: 10.03 bytes",
        ["optimizer.state_dtype=float8"],
    ),
    "Muon": (
        "float32, compute float32, gradients float32, reduced in float32, optimizer states float32: 12 bytes",
        ["optimizer.name=Muon"],
    ),
    "8-bit optimizer states": (
        "float32, compute float32, gradients float32, reduced in float32, optimizer states int8: 10.03 bytes",
        ["optimizer.state_dtype=int8"],
    ),
}


def measured_precision(argv: list[str]) -> tuple[str, float]:
    """Return the run summary's line on precision, and the measured bytes per parameter of feed-forward matrices."""
    launch = config.Launch.from_environment(n_devices=0)
    job, device = config.check(config.load(argv), launch), torch.device("cpu")
    run = TrainingRun(job, device)
    run.train_step.forward_backward(run.loader.next())
    run.optimizer.step()
    run.loader.close()
    size, elements = 0, 0
    for name, weight in run.model.named_parameters():
        if "feed_forward" in name:
            tensors = [weight.to_local(), weight.grad.to_local()]
            for key in run.optimizer.state[weight].keys() - {"step"}:
                state = run.optimizer.state[weight][key].to_local()
                tensors += [state.codes, state.scale] if hasattr(state, "codes") else [state]
            size += sum(tensor.numel() * tensor.itemsize for tensor in tensors)
            elements += weight.to_local().numel()
    return summary.describe_precision(job), size / elements


@pytest.mark.parametrize("name", PRECISIONS)
def test_run_summary_states_the_bytes_per_parameter(ranks, folder, name):
    expected, options = PRECISIONS[name]
    wide = ["--model.dim=128", "--model.ffn_dim=256", *(f"--{option}" for option in options)]
    for text, size in ranks(2).run(measured_precision, argv=[str(folder / "small.toml"), *wide]):
        assert text == f"weights {expected} per parameter"
        assert float(expected.split(": ")[1].split()[0]) == pytest.approx(size, abs=0.01)


def test_global_max_loss_is_the_worst_ranks(runs):
    steps = runs(2, "run", "--metrics.enable_tensorboard=false")
    assert all(values["loss_metrics/global_max_loss"] > values[LOSS] for values in steps)


def test_log_freq(runs):
    steps = runs(1, "run", "--metrics.log_freq=4")
    assert [values["step"] for values in steps] == [1, 4, 6]


def test_a_new_run_moves_the_files_of_the_previous_one(runs, folder):
    first = runs(1, "run", "--training.steps=2")
    second = runs(1, "run", "--training.steps=3")
    assert len(second) == 3
    (previous,) = (folder / "run" / "previous").iterdir()
    assert read_metrics(previous) == first
    assert {path.name for path in previous.iterdir()} == {"metrics.jsonl", "config.toml", "tb"}


def test_profile_traces(runs, folder):
    runs(2, "run", "--profiling.enable_profiling", "--profiling.profile_freq=4")
    traces = sorted(path.relative_to(folder / "run") for path in (folder / "run").rglob("*.json"))
    assert traces == [Path(f"profile_traces/step_4/rank{rank}.json") for rank in (0, 1)]
    events = json.loads((folder / "run" / traces[0]).read_text())["traceEvents"]
    assert any("scaled_dot_product" in event.get("name", "") for event in events)


@pytest.mark.nightly
def test_validation_does_not_change_the_training(runs):
    without = runs(2, "without")
    validated = runs(2, "validated", "--validation.enable", "--validation.freq=1")
    assert [[values[tag] for tag in COMPUTED] for values in without] == [
        [values[tag] for tag in COMPUTED] for values in validated
    ]


@pytest.mark.parametrize("reshard", ["always", pytest.param("never", marks=pytest.mark.nightly)])
def test_validation_loss_is_the_same_on_any_number_of_ranks(runs, reshard):
    arguments = ["--validation.enable", "--validation.freq=3", "--training.dtype=float64"]
    arguments += [f"--parallelism.fsdp_reshard_after_forward={reshard}"]
    one, two, four = (runs(n, f"ranks{n}", *arguments) for n in (1, 2, 4))
    for a, b, c in zip(computed(one), computed(two), computed(four), strict=True):
        for value in (b, c):
            assert [value[i] for i in (1, 3, -1)] == [a[i] and pytest.approx(a[i], rel=1e-11) for i in (1, 3, -1)]


# Stopping and resuming -----------------------------------------------------------------------------------------------


@cases(("world_size", "async_mode"), itertools.product([1, 2], ["disabled", "async"]), always=[(2, "async")])
def test_a_resumed_run_gives_bit_for_bit_the_same(runs, folder, world_size, async_mode):
    arguments = ["--checkpoint.enable", f"--checkpoint.async_mode={async_mode}"]
    arguments += ["--validation.enable", "--validation.freq=2"]
    uninterrupted = runs(world_size, "uninterrupted", *arguments)
    runs(world_size, "run", *arguments, "--training.steps=2")
    resumed = runs(world_size, "run", *arguments)
    assert computed(resumed) == computed(uninterrupted)
    assert len(resumed) == 6
    assert sorted(path.name for path in (folder / "run" / "checkpoint").iterdir()) == ["step-2", "step-3", "step-6"]


@pytest.mark.nightly
def test_wrapped_weights_are_saved_and_resumed(runs, folder):
    """With float8 all-gather a shard is a wrapper of torchao's around the weight."""
    arguments = ["--checkpoint.enable", "--float8.enable", "--float8.emulate", "--float8.enable_fsdp_float8_all_gather"]
    uninterrupted = runs(2, "uninterrupted", *arguments)
    runs(2, "run", *arguments, "--training.steps=3")
    assert computed(runs(2, "run", *arguments)) == computed(uninterrupted)


def test_a_killed_run_resumes_from_its_newest_complete_checkpoint(runs, folder):
    """Steps 4 and 5 were logged but not saved: they are repeated, and logged once."""
    uninterrupted = runs(1, "uninterrupted", "--checkpoint.enable")
    killed = folder / "killed"
    runs(1, "killed", "--checkpoint.enable", "--training.steps=5")
    for path in (killed / "checkpoint" / "step-5").iterdir():
        path.unlink()
    (killed / "checkpoint" / "step-5").rename(killed / "checkpoint" / "step-5.tmp")
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss')
    assert computed(runs(1, "killed", "--checkpoint.enable")) == computed(uninterrupted)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 4), pytest.param(4, 2, marks=pytest.mark.nightly)])
def test_a_run_resumes_on_another_number_of_ranks(runs, before, after):
    arguments = ["--checkpoint.enable", "--training.dtype=float64"]
    uninterrupted = runs(1, "uninterrupted", *arguments)
    runs(before, "run", *arguments, "--training.steps=3")
    resumed = runs(after, "run", *arguments)
    for values, reference in zip(resumed, uninterrupted, strict=True):
        for tag in (LOSS, "grad_norm"):
            assert values[tag] == pytest.approx(reference[tag], rel=1e-11)


@pytest.mark.nightly
def test_the_resume_tests_can_fail(runs, folder):
    """A data position that is off by one sequence shows in the losses."""
    uninterrupted = runs(1, "uninterrupted", "--checkpoint.enable")
    runs(1, "run", "--checkpoint.enable", "--training.steps=3")
    data = {"next_sequence": 25, "counts": [25 * 64, 0, 0, 0]}
    change_state(folder / "run" / "checkpoint" / "step-3", lambda state: state.update(data=data))
    resumed = computed(runs(1, "run", "--checkpoint.enable"))
    assert resumed[:3] == computed(uninterrupted)[:3]
    assert resumed[3] != computed(uninterrupted)[3]


def test_initial_load_path_loads_weights_without_optimizer_states(runs, folder):
    uninterrupted = runs(1, "uninterrupted", "--checkpoint.enable")
    runs(1, "run", "--checkpoint.enable", "--training.steps=3")
    checkpoint = folder / "run" / "checkpoint" / "step-3"
    fresh = runs(1, "fresh", f"--checkpoint.initial_load_path={checkpoint}")
    assert fresh[0][LOSS] < uninterrupted[0][LOSS] - 0.3, "the weights were not loaded"
    assert fresh[1]["grad_norm"] != uninterrupted[4]["grad_norm"]


def test_a_run_writes_no_pickle(runs, folder):
    """Every file that it writes is opened: tensors are in safetensors files, all else of a checkpoint is JSON."""
    runs(2, "run", "--checkpoint.enable", "--validation.enable")
    step = folder / "run" / "checkpoint" / "step-6"
    files = ("rank-00000.safetensors", "rank-00001.safetensors")
    assert {path.name for path in step.iterdir()} == {"manifest.json", "state.json", *files}
    state = json.loads((step / "state.json").read_text())
    counts = state["data"].pop("counts")
    assert (state["step"], state["skipped"], state["data"]) == (6, 0, {"next_sequence": 48})
    assert counts[0] == 48 * 64
    names = set()
    for path in (each for each in (folder / "run").rglob("*") if each.is_file()):
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                names |= set(file.keys())
        elif path.suffix in (".json", ".jsonl"):
            for line in [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines():
                json.loads(line)
        else:
            assert path.name == "config.toml" or path.name.startswith("events.out.tfevents."), path
    assert {name.split(".")[0] for name in names} == {"model", "optimizer", "random"}


def test_shards_and_replicas_are_saved_once(runs, folder):
    """On two replicas of two shards each element is in one file, and both replicas' ranks write about as much."""
    arguments = ["--checkpoint.enable", "--training.steps=1", "--parallelism.data_parallel_replicate_degree=2"]
    runs(4, "run", *arguments)
    step = folder / "run" / "checkpoint" / "step-1"
    sizes = [path.stat().st_size for path in sorted(step.glob("rank-*"))]
    n_elements = sum(shape.numel() for name, shape in CheckpointReader(step).shapes.items() if "random" not in name)
    assert n_elements * 4 < sum(sizes) < n_elements * 4 * 1.3 + 4 * 30_000, "more than headers and random states"
    assert max(sizes) < 1.5 * min(sizes)


@pytest.mark.parametrize("damaged", ["model", pytest.param("optimizer", marks=pytest.mark.nightly)])
def test_a_damaged_checkpoint_stops_every_rank(runs, folder, damaged):
    """Only rank 1 reads the damaged bytes."""
    runs(2, "run", "--checkpoint.enable")
    file = folder / "run" / "checkpoint" / "step-6" / "rank-00001.safetensors"
    with safe_open(file, "pt") as opened:
        names = sorted(opened.keys())
    name = next(name for name in names if name.startswith(damaged) and name.endswith(("weight", "avg_sq")))
    begin = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8:begin])
    first, last = (begin + place for place in header[name]["data_offsets"])
    flip(file, first)
    message = error_message(runs, 2, "run", "--checkpoint.enable", "--training.steps=7")
    hint = 'checkpoint.on_corrupt = "previous" resumes from the one before'
    problem = f"the checksum of the {min(last - first, 2**22):,} bytes from {first:,} on differs: they are damaged"
    assert message == f"{file}: {name}: {problem}; {hint}"
    assert "they are damaged" in error_message(runs, 2, "new", f"--checkpoint.initial_load_path={file.parent}") or (
        damaged == "optimizer"
    )


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_on_corrupt_previous_resumes_from_the_one_before(runs, folder, world_size):
    uninterrupted = runs(world_size, "uninterrupted", "--checkpoint.enable")
    arguments = ["--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.on_corrupt=previous"]
    runs(world_size, "run", *arguments, "--training.steps=4")
    checkpoints = folder / "run" / "checkpoint"
    flip(checkpoints / "step-4" / "rank-00000.safetensors", -5000)
    assert computed(runs(world_size, "run", *arguments)) == computed(uninterrupted)
    names = {"step-2", "step-4", "step-4.damaged", "step-6"}
    assert {path.name for path in checkpoints.iterdir()} == names
    for step in (2, 4, 6):
        (checkpoints / f"step-{step}" / "manifest.json").unlink()
    message = error_message(runs, world_size, "run", *arguments, "--training.steps=8")
    assert message.endswith("; no other checkpoint is left")
    assert {path.name for path in checkpoints.iterdir()} == names, "the next start would begin anew"


def run_with_a_failing_disk(argv: list[str]) -> str:
    """Train as run_train, where no tensor of a checkpoint can be read, but those of the token cache can."""
    real = safetensors.read_fully

    def read_fully(file: Any, data: memoryview, begin: int) -> None:
        if "/checkpoint/" in os.readlink(f"/proc/self/fd/{file.fileno()}"):
            raise OSError(errno.EIO, "Input/output error")
        real(file, data, begin)

    with mock.patch.object(safetensors, "read_fully", read_fully):
        return run_train(argv)


def test_a_checkpoint_is_not_damaged_because_the_disk_fails_once(runs, folder):
    uninterrupted = runs(1, "uninterrupted", "--checkpoint.enable")
    arguments = ["--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.on_corrupt=previous"]
    runs(1, "run", *arguments, "--training.steps=4")
    checkpoints = folder / "run" / "checkpoint"
    argv = [str(folder / "small.toml"), f"--job.dump_folder={folder / 'run'}", *arguments]
    (message,) = runs.ranks(1).run(run_with_a_failing_disk, argv=argv)
    assert message.startswith(f"{checkpoints / 'step-4' / 'rank-00000.safetensors'}: ")
    assert message.endswith(": cannot be read: Input/output error")
    assert complete_steps(checkpoints) == [2, 4]
    assert computed(runs(1, "run", *arguments)) == computed(uninterrupted)


def run_with_a_full_disk(argv: list[str]) -> str:
    """Train as run_train, where rank 1 cannot write its file of the second checkpoint."""
    write_file, calls = checkpointer.write_file, itertools.count(1)

    def write(path: Path, slices: Any) -> Any:
        if os.environ["RANK"] == "1" and next(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write_file(path, slices)

    with mock.patch.object(checkpointer, "write_file", write):
        return run_train(argv)


@pytest.mark.parametrize("async_mode", ["disabled", pytest.param("async", marks=pytest.mark.nightly)])
def test_a_full_disk_stops_every_rank_and_the_checkpoint_before_stays(runs, folder, async_mode):
    uninterrupted = runs(2, "uninterrupted", "--checkpoint.enable")
    arguments = ["--checkpoint.enable", "--checkpoint.interval=2", f"--checkpoint.async_mode={async_mode}"]
    argv = [str(folder / "small.toml"), f"--job.dump_folder={folder / 'run'}", *arguments]
    (message,) = set(runs.ranks(2).run(run_with_a_full_disk, argv=argv))
    checkpoints = folder / "run" / "checkpoint"
    file = checkpoints / "step-4.tmp" / "rank-00001.safetensors"
    reason = f"[Errno 28] No space left on device: '{file}'"
    assert message == f"{checkpoints / 'step-4'} could not be saved: {reason}"
    assert complete_steps(checkpoints) == [2]
    assert computed(runs(2, "run", *arguments)) == computed(uninterrupted)


def test_weights_of_a_deeper_or_wider_model_are_rejected(runs, folder):
    runs(1, "run", "--checkpoint.enable", "--training.steps=1", "--model.n_layers=3")
    path = folder / "run" / "checkpoint" / "step-1"
    arguments = [f"--checkpoint.initial_load_path={path}"]
    message = error_message(runs, 2, "new", *arguments)
    assert message == f"{path}: 30 tensors, and the model has 21; it is of another model"
    message = error_message(runs, 2, "new", *arguments, "--model.n_layers=4")
    missing = "model.layers.3.attention_norm.weight and 8 more"
    assert message == f"{path}: {missing} is not in the checkpoint; it is of another model"
    message = error_message(runs, 2, "new", *arguments, "--model.n_layers=3", "--model.ffn_dim=64")
    assert message == (
        f"{path}: model.layers.0.feed_forward.w1.weight has shape [48, 32], expected [64, 32]; it is of another model"
    )


def test_keep_latest_k(runs, folder):
    runs(1, "run", "--checkpoint.enable", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=2")
    assert sorted(path.name for path in (folder / "run" / "checkpoint").iterdir()) == ["step-5", "step-6"]


def test_when_asked_to_stop_all_ranks_end_after_the_same_step_and_save(runs, folder):
    uninterrupted = runs(2, "uninterrupted", "--checkpoint.enable")
    stopped = runs(2, "run", "--checkpoint.enable", "--metrics.log_freq=100", stop_after=2)
    assert [values["step"] for values in stopped] == [1, 2]
    assert sorted(path.name for path in (folder / "run" / "checkpoint").iterdir()) == ["step-2"]
    assert computed(runs(2, "run", "--checkpoint.enable")) == computed(uninterrupted)


WAITS = {
    "waiting for data": 2,
    "forward and backward": 2,
    "updating the weights": 2,
    "logging": 2,
    "validation": 2,
    "saving a checkpoint": 3,
    "waiting for the last checkpoint": 4,
    "testing the last checkpoint": 4,
}
"""The activities of a run of four steps that saves after every second one; and the last step of a run that is asked to
stop during an activity of step 2, or of step 4 for those of its end."""


class Asked(Signals):
    """Signals that ask to stop once `asked` is set, from the look after `patience` more looks on."""

    def __init__(self, patience: int):
        self.saves, self.answered_saves, self.asked, self.patience = 0, 0, False, patience

    @property
    def stopping(self) -> bool:
        self.patience -= self.asked
        return self.patience < 0


def train_until_asked(argv: list[str], wait: str, step: int) -> str:
    """Train as run_train, where rank 0 is asked to stop when it begins an activity of a step, or in the second batch of
    a validation, when weights are gathered."""
    signals, activity = Asked(patience=int(wait == "validation")), progress.Activity

    def begin(name: str, step_of_activity: int, *others: Any) -> progress.Activity:
        signals.asked |= (name, step_of_activity, os.environ["RANK"]) == (wait, step, "0")
        return activity(name, step_of_activity, *others)

    with mock.patch.object(progress, "Activity", begin):
        return run_train(argv, signals=signals)


@cases("wait", WAITS, always=["validation", "saving a checkpoint"])
def test_a_stop_at_any_wait_leaves_a_checkpoint_that_continues_the_curve(runs, folder, wait):
    """Without resharding after the forward pass, weights are gathered while a step or a validation runs."""
    options = ["--checkpoint.enable", "--checkpoint.interval=2", "--training.steps=4", "--validation.steps=2"]
    options += ["--validation.enable", "--validation.freq=1", "--parallelism.fsdp_reshard_after_forward=never"]
    uninterrupted, last = runs(2, "uninterrupted", *options), WAITS[wait]
    argv = [str(folder / "small.toml"), f"--job.dump_folder={folder / 'run'}", *options]
    asked = {"wait": wait, "step": 4 if last == 4 else 2}
    assert runs.ranks(2).run(train_until_asked, argv=argv, **asked) == ["", ""]
    stopped = read_metrics(folder / "run")
    assert [values["step"] for values in stopped] == list(range(1, last + 1))
    assert complete_steps(folder / "run" / "checkpoint")[-1] == last
    resumed = runs(2, "run", *options)
    assert (metrics.VALIDATION_LOSS in stopped[-1]) == (last == 4), "a stop ends a validation, or none begins"
    resumed[last - 1][metrics.VALIDATION_LOSS] = uninterrupted[last - 1][metrics.VALIDATION_LOSS]
    assert computed(resumed) == computed(uninterrupted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--debug.seed=7"], "saved with seed = 42, and this run has 7"),
        (["--model.n_layers=3"], "saved with n_layers = 2, and this run has 3"),
        (["--optimizer.name=Muon"], 'saved with optimizer.name = "Adam or AdamW", and this run has "Muon"; resume'),
        (["--training.seq_len=32"], "; resume with the same (changed: training.seq_len 64 -> 32), or start"),
        (["--checkpoint.load_step=2"], "checkpoint.load_step = 2: expected the newest step in "),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_resume_rejects_another_run(runs, arguments, message):
    runs(2, "run", "--checkpoint.enable", "--training.steps=3")
    assert message in error_message(runs, 2, "run", "--checkpoint.enable", *arguments)


def test_a_validation_set_that_is_added_at_a_resume_says_why_the_data_differ(runs, folder):
    for name in ("train", "valid"):
        (folder / f"{name}.jsonl").write_text((json.dumps({"text": name * 20}) + "\n") * 60)
    options = ["--checkpoint.enable", "--training.dataset=json", f"--training.dataset_path={folder}/train.jsonl"]
    runs(1, "run", *options, "--training.steps=2")
    line = error_message(
        runs, 1, "run", *options, "--validation.enable", f"--validation.dataset_path={folder}/valid.jsonl"
    )
    assert f'same (changed: validation.dataset_path "" -> "{folder}/valid.jsonl"; without data of its own, val' in line


CHANGES = {
    (): "",
    ("--training.cache_folder={folder}/another",): "",
    ("--optimizer.weight_decay=0.5", "--training.max_norm=2"): (
        "training.max_norm 1.0 -> 2.0, optimizer.weight_decay 0.1 -> 0.5"
    ),
    ("--training.steps=5", "--lr_scheduler.total_steps=-1"): (
        "training.steps 3 -> 5, lr_scheduler.total_steps 12 -> 5; the learning-rate schedule is computed anew: lr "
        "9.091e-03 at step 3, 5.000e-03 at step 4"
    ),
    ("--training.steps=2", "--lr_scheduler.total_steps=-1"): (
        "training.steps 3 -> 2, lr_scheduler.total_steps 12 -> 2; the learning-rate schedule is computed anew: lr "
        "9.091e-03 at step 3, it ends at step 2"
    ),
    ("--optimizer.lr=1",): (
        "optimizer.lr 0.01 -> 1.0; the learning-rate schedule is computed anew: lr 9.091e-03 at step 3, 8.182e-01 at "
        "step 4"
    ),
}
"""Options of a run that resumes after step 3, and the line about them."""


def lines_of_run(argv: list[str], stop_after: int = 10**9) -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert run_train(argv, stop_after) == ""
    return out.getvalue().splitlines()


def test_a_stop_without_checkpoints_says_that_nothing_was_saved(runs):
    argv = [str(runs.folder / "small.toml"), f"--job.dump_folder={runs.folder / 'run'}"]
    (lines,) = runs.ranks(1).run(lines_of_run, argv=argv, stop_after=1)
    assert lines[-1] == "asked to stop: ended after step 1; nothing was saved: checkpoint.enable = false"


def lines_after_resume(runs: Runs, *arguments: str) -> list[str]:
    """Resume a copy of the run, and return the line after the one that says so, if it is about changes."""
    shutil.rmtree(runs.folder / "copy", ignore_errors=True)
    shutil.copytree(runs.folder / "saved", runs.folder / "copy")
    argv = [str(runs.folder / "small.toml"), "--checkpoint.enable", "--training.steps=3", *arguments]
    (lines,) = runs.ranks(1).run(lines_of_run, argv=[*argv, f"--checkpoint.folder={runs.folder}/copy/checkpoint"])
    number = next(number for number, line in enumerate(lines) if line.startswith("weights    resumed after step 3 "))
    return [line for line in lines[number + 1 : number + 2] if line.startswith("changed")]


def test_a_resumed_run_says_what_has_changed(runs, folder):
    copy = f"--checkpoint.folder={folder}/copy/checkpoint"
    runs(1, "run", "--checkpoint.enable", "--training.steps=3", copy)
    (folder / "copy").rename(folder / "saved")
    for arguments, expected in CHANGES.items():
        given = [argument.format(folder=folder) for argument in arguments]
        found = lines_after_resume(runs, *given)
        assert found == ([f"changed since the checkpoint: {expected}"] if expected else [])
    change_state(folder / "saved" / "checkpoint" / "step-3", lambda state: state.pop("config"))
    assert lines_after_resume(runs, "--optimizer.lr=1") == [], "a checkpoint of an older version has no config"


# Steps that are not finite ------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_every_rank(runs, folder):
    message = error_message(runs, 2, "run", not_finite=((1, 3),))
    option = "training.nonfinite_steps_allowed = N skips N such steps"
    assert message == f"step 3: the loss is inf because of rank 1 ({option})"
    assert [values["step"] for values in read_metrics(folder / "run")] == [1, 2]


def test_allowed_steps_are_skipped_without_an_update(runs, folder):
    allowed = ["--training.nonfinite_steps_allowed=1", "--checkpoint.enable", "--checkpoint.interval=1"]
    finite = runs(2, "finite")
    skipped = runs(2, "run", *allowed, "--training.steps=4", not_finite=((1, 3),))
    assert skipped[2][LOSS] is None
    assert computed(skipped[:2]) == computed(finite[:2])
    assert_skipped(folder / "run" / "checkpoint", step=3)
    message = error_message(runs, 2, "run", *allowed, not_finite=((0, 1),))  # the first step of this run is step 5
    reason = "step 5: the loss is inf because of rank 0 (training.nonfinite_steps_allowed = 1, all used)"
    newest = "the newest good checkpoint is step-4, and the next start resumes from step-4"
    assert message.startswith(f"{reason}; {newest}; to get past this step, lower optimizer.lr ")


def test_a_loss_that_is_not_finite_on_all_ranks_names_the_step(runs):
    """The learning rate is so large that weights overflow: the forward is not finite on any rank."""
    message = error_message(runs, 2, "run", "--optimizer.lr=1e38", "--optimizer.weight_decay=0")
    assert message.startswith("step 2: the loss is nan because of rank 0, 1 (")


# Processes ----------------------------------------------------------------------------------------------------------


def start(*command: str, cwd: Path = ROOT, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_script(folder: Path, script: str, *arguments: str) -> tuple[int, str, str]:
    """Run a Python script with the small config and overrides as its arguments; return status, output and errors."""
    (folder / "script.py").write_text(script)
    command = [sys.executable, str(folder / "script.py"), str(folder / "small.toml"), *arguments]
    return finish(start(*command, PYTHONPATH=str(ROOT)))


HEAVY = ("torchao", "transformers", "matplotlib", "datasets", "tokenizers", "pandas", "torchft")
COUNT_IMPORTS = f"""
import os, sys
from titanlite import train
exit_process = os._exit
def count_and_exit(status):
    own = [module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "titanlite"]
    lines = sum(len(open(file).readlines()) for file in own)
    print(f"lines {{lines}}; imported {{[name for name in {HEAVY} if name in sys.modules]}}", flush=True)
    exit_process(status)
os._exit = count_and_exit
train.main(sys.argv[1:])
"""
"""A rank that prints, when it ends, how many lines of titanlite it has imported, and which heavy packages."""


def test_a_run_on_one_rank_imports_only_what_it_uses(folder):
    """train.main without torchrun is one rank; packages that a run does not use are not imported, and the lines of
    titanlite that it does import have limits, with checkpoints: of a run that builds its token cache, of one that finds
    it, and of one that resumes."""
    counts = []
    for run, steps in (("run", 2), ("other", 2), ("run", 3)):
        arguments = [f"--training.steps={steps}", "--lr_scheduler.total_steps=12", "--checkpoint.enable"]
        status, out, error = run_script(folder, COUNT_IMPORTS, *arguments, f"--job.dump_folder={folder / run}")
        assert (status, error) == (0, "")
        assert f"step {steps}/{steps}  loss" in out
        counts += map(int, re.findall(r"lines (\d+); imported \[\]\n$", out))
    builds, finds, resumes = counts
    assert 5000 < finds < builds <= LINES_OF_A_DEBUG_RUN
    assert finds <= LINES_WITH_A_TOKEN_CACHE
    assert finds < resumes <= LINES_OF_A_DEBUG_RUN


@pytest.mark.nightly
def test_a_rank_of_many_techniques_imports_only_what_it_uses(folder):
    (folder / "script.py").write_text(COUNT_IMPORTS)
    parallel = ["--parallelism.tensor_parallel_degree=2", "--parallelism.pipeline_parallel_degree=2"]
    compiled = ["--compile.enable", "--compile.backend=aot_eager", "--float8.enable", "--float8.emulate"]
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(folder / "script.py")
    arguments = [*parallel, *compiled, "--checkpoint.enable", "--checkpoint.async_mode=async", "--training.steps=2"]
    command = [sys.executable, *launcher, str(folder / "small.toml"), *arguments]
    status, out, error = finish(start(*command, PYTHONPATH=str(ROOT)))
    assert status == 0, error
    counts = re.findall(r"lines (\d+); imported \['torchao'\]", out)
    assert len(counts) == 4
    assert 5000 < max(map(int, counts)) <= LINES_OF_A_RANK_OF_MANY_TECHNIQUES


@pytest.mark.nightly
def test_saving_and_loading_print_progress(folder):
    script = (
        "import sys\n"
        "from titanlite import train\n"
        "from titanlite.launch import progress\n"
        "progress.INTERVAL_SECONDS = 1e-4\n"
        "train.main(sys.argv[1:])\n"
    )
    arguments = ["--checkpoint.enable", "--lr_scheduler.total_steps=12"]
    _, _, saved = run_script(folder, script, *arguments, "--training.steps=2", "--checkpoint.async_mode=async")
    status, _, resumed = run_script(folder, script, *arguments, "--training.steps=3")
    assert status == 0
    lines = [{line.rpartition(": ")[0] for line in error.splitlines()} for error in (saved, resumed)]
    saved, resumed = ({line for line in of_run if "checkpoint" in line} for of_run in lines)
    assert saved == {"saving checkpoint step-2 (0.0 GiB)"}
    assert resumed == {"loading checkpoint step-2 (0.0 GiB)", "saving checkpoint step-3 (0.0 GiB)"}


@pytest.mark.nightly
@pytest.mark.parametrize("axis", ["data_parallel_shard", "pipeline_parallel", "tensor_parallel", "context_parallel"])
def test_torchrun(folder, axis):
    """In processes of its own, unlike those of a pool, a layout has only the imports that it does itself."""
    status, out, error = finish(
        start(
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"),
            *(str(folder / "small.toml"), "--training.steps=2", f"--parallelism.{axis}_degree=2"),
        )
    )
    assert status == 0, error
    assert out.count("step 2/2  loss") == 1, "not only rank 0 logs"
    assert axis != "data_parallel_shard" or "dp_shard 2" in out


def test_run_train_starts_the_ranks_and_stops_on_sigterm(folder):
    """In a folder with files that have the names of Python's modules, on a console without UTF-8, with the variables
    that another rank has left."""
    for name in ("copy", "random", "queue", "socket", "threading"):
        (folder / f"{name}.py").write_text("import os\nos._exit(3)\n")
    surroundings = {
        "PYTHONIOENCODING": "ascii",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_PORT": "tcp://",
    }
    arguments = ["--parallelism.data_parallel_shard_degree=2", "--checkpoint.enable", "--training.steps=100000"]
    arguments += ["--lr_scheduler.total_steps=-1", "--job.description=Größe"]
    process = start(str(ROOT / "run_train.sh"), "small.toml", *arguments, cwd=folder, **surroundings)
    for line in process.stdout:
        if "step      4/" in line:
            process.send_signal(signal.SIGTERM)
            break
    status, out, error = finish(process)
    assert status == 0, error
    last_line = out.rstrip().splitlines()[-1]
    assert last_line.startswith("asked to stop: ended after step ")
    newest = folder / "run" / "checkpoint" / f"step-{last_line.split()[-1]}"
    assert json.loads((newest / "state.json").read_text())["step"] == read_metrics(folder / "run")[-1]["step"]


@pytest.mark.nightly
@pytest.mark.parametrize("kills", [1, 3])
def test_a_killed_rank_is_started_again_and_the_curve_is_the_same(runs, folder, kills):
    """torchrun's agent starts all ranks anew, and they resume. What is written to the file in between is of another
    run."""
    arguments = ["--checkpoint.enable", "--checkpoint.interval=1", "--training.steps=12"]
    expected = computed(runs(2, "undisturbed", *arguments))
    command = ["./run_train.sh", str(folder / "small.toml"), *arguments, "--parallelism.data_parallel_shard_degree=2"]
    process = start(*command, MAX_RESTARTS=str(kills))
    for number in range(1, kills + 1):
        next(line for line in process.stdout if f"step {3 * number:>2}/" in line)
        (folder / "small.toml").write_text(SMALL.format(folder=folder).replace("lr = 1e-2", "lr = 1e-5"))
        os.kill(children(process.pid)[-1], signal.SIGKILL)
    status, _, error = finish(process)
    assert status == 0, error
    assert error.count("was killed by SIGKILL") == kills
    assert computed(read_metrics(folder / "run")) == expected


@pytest.mark.nightly
def test_sigterm_before_the_first_step_is_done_ends_a_run_at_once(folder):
    process = start(sys.executable, "train.py", str(folder / "small.toml"), "--checkpoint.enable")
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    status, _, error = finish(process)
    assert (status, error) == (0, "asked to stop before the first step was done: nothing to save\n")
    assert list((folder / "run" / "checkpoint").glob("*")) == []


@pytest.mark.parametrize(
    "command",
    [pytest.param([sys.executable, "train.py"], marks=pytest.mark.nightly), ["./run_train.sh"]],
    ids=["train.py", "run_train.sh"],
)
def test_a_wrong_config_is_one_line_and_status_2(folder, command):
    status, out, error = finish(start(*command, str(folder / "small.toml"), "--training.stepss=3"))
    line = "error: command line: training.stepss = 3: unknown key; did you mean training.steps?\n"
    assert (status, out, error) == (2, "", line)


@pytest.mark.nightly
def test_missing_data_is_one_line_and_status_2(folder):
    arguments = ["--training.dataset=text", "--training.dataset_path=/nowhere/*.txt"]
    status, _, error = finish(start(sys.executable, "train.py", str(folder / "small.toml"), *arguments))
    line = 'error: training.dataset_path = "/nowhere/*.txt": no such file or folder\n'
    assert (status, error) == (2, line)


@pytest.mark.nightly
def test_a_second_run_in_a_folder_is_one_line_and_status_2(folder):
    """The first one is not disturbed: stopped between two steps, its files are as they were."""
    arguments = ["--training.steps=100000", "--lr_scheduler.total_steps=-1"]
    first = start(sys.executable, "train.py", str(folder / "small.toml"), *arguments)
    try:
        while "step      2/" not in first.stdout.readline():
            assert first.poll() is None
        first.send_signal(signal.SIGSTOP)
        before = {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
        status, out, error = finish(start(sys.executable, "train.py", str(folder / "small.toml")))
        assert (status, out) == (2, "")
        assert error.startswith(f'error: job.dump_folder = "{folder}/run": in use by process {first.pid} on node ')
        assert error.count("\n") == 1
        after = {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
        before.pop(folder / "run" / "run.lock"), after.pop(folder / "run" / "run.lock")  # the heartbeat
        assert after == before
    finally:
        first.kill()
        finish(first)
    status, out, _ = finish(start(sys.executable, "train.py", str(folder / "small.toml"), "--training.steps=1"))
    assert status == 0, "the lock of a killed run is not taken over"
    assert "which is dead" in out.splitlines()[0]
    assert not (folder / "run" / "run.lock").exists()


@pytest.mark.nightly
def test_an_unwritable_folder_is_one_line_and_status_2(folder):
    (folder / "run").write_text("a file")
    status, out, error = finish(start(sys.executable, "train.py", str(folder / "small.toml")))
    assert (status, out, error.count("\n")) == (2, "", 2)
    assert error.startswith(f'error: job.dump_folder = "{folder}/run": cannot be written: File exists; ')


@pytest.mark.nightly
def test_a_failure_is_status_1(folder):
    arguments = ["--optimizer.lr=1e38", "--training.steps=4"]
    status, _, error = finish(start(sys.executable, "train.py", str(folder / "small.toml"), *arguments))
    assert status == 1
    assert error.startswith("error: step 2: the loss is nan because of rank 0")
    assert error.count("\n") == 1
