"""The average of the weights (EMA): a direct computation of it from the weights of each step, under every layout, after
skipped steps, after a resume, in validations and in exports; and the mean of checkpoints."""

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.cases import Case, cases
from tests.helpers.checkpoint import write_checkpoint
from tests.helpers.config import assert_rejected, load, on
from tests.parallel.test_layouts import (
    CP,
    HOST_STATES,
    MUON,
    OFFLOAD,
    PP,
    REPLICATE,
    SHARD,
    TIED,
    TP,
    schedule,
    with_batches,
    world_size,
)
from tests.parallel.test_layouts import TOLERANCE as LAYOUT_TOLERANCE
from tests.parallel.test_parity import CPU, STEPS, ZERO_1, ZERO_2, CountCalls, resolve
from tests.parallel.test_step_costs import OPTIMIZERS, no_value_is_read, small_model
from tests.test_train import LOSS, error_message, folder, lines_of_a_run, read_metrics, runs  # noqa: F401
from titanlite import build, config
from titanlite.build import optimizer_for
from titanlite.checkpoint.average_reader import AverageReader
from titanlite.checkpoint.reader import CheckpointReader
from titanlite.config.schema import Ema
from titanlite.launch.cli import run_command
from titanlite.metrics import logger as metrics
from titanlite.metrics import summary
from titanlite.optimizer import clipped_step, set_lr
from titanlite.techniques import ema
from titanlite.tools.parity.compare import differences
from titanlite.tools.parity.reference import Trace, run_reference, trace_of
from titanlite.tools.parity.training_run import TrainingRun

EMA = {"ema__decay": 0.6, "ema__warmup": True}
EXPERTS = {
    "model__moe.n_experts": 4,
    "model__moe.n_experts_per_token": 2,
    "data_parallel_shard_degree": 2,
    "expert_parallel_degree": 2,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "shard x tp": Case(SHARD | TP, always=True),
    "Interleaved1F1B x shard": Case(schedule("Interleaved1F1B") | SHARD, always=True),
    "expert parallel 2": Case(EXPERTS, always=True),
    "CPU offload, shard": Case(SHARD | OFFLOAD, always=True),
    "one rank, tied embeddings": TIED,
    "replicate": REPLICATE,
    "ZeRO-1": SHARD | ZERO_1,
    "ZeRO-2, cp": CP | ZERO_2,
    "zero-bubble": schedule("InterleavedZeroBubble"),
    "tp, tied embeddings": TP | TIED,
    "Muon, shard x tp": MUON | SHARD | TP,
    "Muon, pp": MUON | PP,
    "optimizer offload, shard x tp": HOST_STATES | SHARD | TP,
    "foreach, shard": SHARD | {"optimizer__implementation": "foreach"},
    "pp x shard x cp x tp": PP | SHARD | CP | TP,
}


def averages(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the average of each weight by name."""
    return {name: optimizer.state[weight][ema.AVERAGE] for name, weight in model.named_parameters()}


def direct(weights: list[Tensor], options: Ema) -> Tensor:
    """Return the average of the weights after each step, by its definition."""
    average = weights[0]
    for update, weight in enumerate(weights, 1):
        n = update - options.start_step
        decay = min(options.decay, (1 + n) / (10 + n)) if options.warmup else options.decay
        average = weight if n <= 0 else decay * average + (1 - decay) * weight
    return average


# Under every layout ---------------------------------------------------------------------------------------------------


def trace(job: config.Config, steps: int) -> Trace:
    """Take some steps under a layout. Return the weights after each, and the averages after the last."""
    run, result = TrainingRun(job, CPU), {}
    for step in range(1, steps + 1):
        set_lr(run.optimizer, step, job.optimizer, job.lr_scheduler)
        run.step(run.loader.next())
        result |= run.trace_of_all_stages(f"{step} weight", run.parameters)
    result |= run.trace_of_all_stages("average", averages(run.model, run.optimizer))
    run.loader.close()
    return result


def reference(job: config.Config) -> Trace:
    """Return the averages of the single-process reference."""
    built, real = [], build.build_optimizer

    def build_optimizer(job: config.Config, model: torch.nn.Module) -> torch.optim.Optimizer:
        built.append((model, real(job, model)))
        return built[0][1]

    with mock.patch.object(build, "build_optimizer", build_optimizer):
        run_reference(job, CPU, steps=STEPS)
    return trace_of("average", averages(*built[0]))


@cases("name", LAYOUTS)
def test_layout_matches_reference(ranks, tmp_path, name):
    """The averages are those of a single process, and follow from the layout's own weights by definition."""
    n = world_size(LAYOUTS[name])
    job = resolve(tmp_path, n, with_batches(LAYOUTS[name] | EMA))
    layout, *_ = ranks(n).run(trace, job=job, steps=STEPS)
    found = {key: value for key, value in layout.items() if key.startswith("average")}
    expected = reference(job)
    assert {key: d for key, d in differences(expected, found).items() if d > LAYOUT_TOLERANCE} == {}
    for key, value in expected.items():
        weights = [layout[f"{step} weight {key.removeprefix('average ')}"] for step in range(1, STEPS + 1)]
        assert (direct(weights, job.ema) - value).abs().max() < LAYOUT_TOLERANCE
        assert (weights[-1] - value).abs().max() > 1e-4, "the average is the weights"


# One step -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"start_step": 3}, {"warmup": True}, {"warmup": True, "decay": 0.2}], ids=str)
def test_the_average_is_that_of_its_definition(options: dict[str, Any]):
    """The warmup's n-th decay, (1 + n) / (10 + n), is below 0.9 in all of these steps, and above 0.2 from n = 2 on."""
    options = Ema(**{"decay": 0.9} | options)
    weight, weights = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)), []
    optimizer = torch.optim.AdamW([weight])
    ema.follow(optimizer, options)
    for step in range(6):
        weight.data.fill_(step**2)
        optimizer.param_groups[0]["lr"], weight.grad = 0.0, torch.zeros(3, dtype=torch.float64)
        optimizer.step()
        weights.append(weight.detach().clone())
        assert (optimizer.state[weight][ema.AVERAGE] - direct(weights, options)).abs().max() < 1e-14
    assert optimizer.state[weight][ema.COUNT] == 6


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_is_not_taken_does_not_move_the_average(name: str):
    """Nor does the host wait for the device, nor do ranks communicate: see the next test."""
    model = small_model()
    optimizer = optimizer_for(model, OPTIMIZERS[name])
    ema.follow(optimizer, options := Ema(decay=0.5))
    weights: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    taken = [True, True, False, True]
    for finite in taken:
        before = {} if finite else {name: value.clone() for name, value in averages(model, optimizer).items()}
        clipped_step(optimizer, torch.tensor(1.0, dtype=torch.float64), torch.tensor(finite))
        for name, weight in model.named_parameters():
            if finite:
                weights[name].append(weight.detach().clone())
            else:
                assert torch.equal(optimizer.state[weight][ema.AVERAGE], before[name])
    for name, weight in model.named_parameters():
        state = optimizer.state[weight]
        assert state[ema.COUNT] == 3
        assert torch.allclose(state[ema.AVERAGE], direct(weights[name], options), atol=1e-6, rtol=0)
        assert not torch.equal(weights[name][0], weights[name][-1])


def collectives_of_an_update(job: config.Config, averages: bool) -> int:
    """Return how many collectives the second update of a rank starts, in which no value of a tensor may be read."""
    run = TrainingRun(job.replace(ema__decay=0.5 * averages), CPU)
    run.step(run.loader.next())  # the first step of Muon assigns matrices to ranks
    totals = run.totals(*run.gradients(run.loader.next()))
    with CountCalls("c10d") as counted, no_value_is_read():
        run.train_step.update(run.optimizer, totals.norm, run.guard.taken(totals))
    run.loader.close()
    return sum(counted.calls.values())


@pytest.mark.parametrize(
    "options", [{}, {"optimizer__name": "Muon", "optimizer__muon_dtype": "float32"}], ids=["", "Muon"]
)
def test_an_average_does_not_communicate(ranks, tmp_path, options):
    job = resolve(tmp_path, 2, options | SHARD | {"training__dtype": "float32"})
    with_ema, without = (ranks(2).run(collectives_of_an_update, job=job, averages=each) for each in (True, False))
    assert with_ema == without
    assert (sum(without) > 0) == bool(options), "Muon's collectives are counted"


def test_an_average_of_bfloat16_weights_is_in_float32():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([weight], lr=0.0)
    ema.follow(optimizer, Ema(decay=0.999))
    for value in (1.0, 2.0):
        weight.data.fill_(value)
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    average = optimizer.state[weight][ema.AVERAGE]
    assert average.dtype == torch.float32
    assert average.tolist() == pytest.approx([1.001] * 2, rel=1e-6), "in bfloat16 it would still be 1"


# Runs -----------------------------------------------------------------------------------------------------------------

RUN = ["--ema.decay=0.8", "--checkpoint.enable"]
STATE = "optimizer.state.{}.ema"


def tensors_of(step: Path) -> dict[str, Tensor]:
    reader = CheckpointReader(step)
    return {name: reader.read(name) for name in reader.shapes if not name.startswith("random.")}


def different(a: Path, b: Path, tolerance: float = 0.0) -> list[str]:
    """Return which tensors of two checkpoints differ by more than a tolerance."""
    first, second = tensors_of(a), tensors_of(b)
    assert any(name.endswith(".ema") for name in first)
    assert first.keys() == second.keys()
    return [name for name in first if (first[name].double() - second[name].double()).abs().max() > tolerance]


def test_a_resumed_run_has_the_same_average(runs, folder):  # noqa: F811
    """Bit for bit under the same layout, and in float64 to 1e-11 under another."""
    wide = [*RUN, "--ema.warmup", "--training.dtype=float64"]
    runs(2, "full", *wide)
    runs(2, "stopped", *wide, stop_after=3)
    for layout, options, tolerance in (("same", [], 0.0), ("other", ["--parallelism.tensor_parallel_degree=2"], 1e-11)):
        target = folder / layout / "checkpoint"
        shutil.copytree(folder / "stopped" / "checkpoint", target)
        runs(2, layout, *wide, *options)
        assert different(folder / "full" / "checkpoint" / "step-6", target / "step-6", tolerance) == []


def test_an_average_that_appears_or_disappears_on_resume_is_rejected_and_another_decay_said(runs, folder):  # noqa: F811
    runs(1, "run", *RUN, "--training.steps=2")
    message = error_message(runs, 1, "run", "--checkpoint.enable")
    assert 'saved with ema.decay = "above 0", and this run has "0"; resume with the same, or start' in message
    argv = [str(folder / "small.toml"), f"--job.dump_folder={folder / 'run'}", *RUN, "--ema.decay=0.7"]
    (lines,) = runs.ranks(1).run(lines_of_a_run, argv=argv)
    assert any("changed since the checkpoint" in line and "ema.decay 0.8 -> 0.7" in line for line in lines)


def test_validation_with_the_average(runs, folder):  # noqa: F811
    """Its loss is that of a run which starts from the average; the training has the numbers that it has without."""
    options = [*RUN, "--validation.enable", "--validation.freq=3", "--validation.fraction=0.1"]
    by_weights, by_average = runs(2, "weights", *options), runs(2, "average", *options, "--ema.validation")
    last = folder / "average" / "checkpoint" / "step-6"
    assert different(folder / "weights" / "checkpoint" / "step-6", last) == []
    losses = [
        [line[metrics.VALIDATION_LOSS] for line in lines if line["step"] in (3, 6)]
        for lines in (by_weights, by_average)
    ]
    assert all(a != b for a, b in zip(*losses, strict=True))
    assert [line[LOSS] for line in by_weights] == [line[LOSS] for line in by_average]
    average = folder / "written" / "step-6"
    tensors = {name: value for name, value in tensors_of(last).items() if name.startswith("model.")}
    averages = {f"model.{name[16:-4]}": value for name, value in tensors_of(last).items() if name.endswith(".ema")}
    write_checkpoint(average, tensors | averages, step=6)
    start = ["--checkpoint.enable=false", f"--checkpoint.initial_load_path={average}", "--optimizer.lr=1e-30"]
    (line, *_) = runs(2, "again", *options[2:], *start, "--training.steps=1", "--lr_scheduler.total_steps=1")
    assert line[metrics.VALIDATION_LOSS] == pytest.approx(losses[1][1], rel=1e-6)


# Files ----------------------------------------------------------------------------------------------------------------


def test_export_of_the_average(runs, folder, capsys):  # noqa: F811
    runs(1, "run", *RUN)
    last = folder / "run" / "checkpoint" / "step-6"
    for arguments in ([], ["--ema"]):
        assert run_command("export", [str(folder / "run"), str(folder / f"hf{len(arguments)}"), *arguments]) == 0
    assert "EMA, float32" in capsys.readouterr().out
    weights, averages = (load_file(folder / name / "model.safetensors") for name in ("hf0", "hf1"))
    tensors, name = tensors_of(last), "layers.1.feed_forward.w2.weight"
    exported = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(weights[exported], tensors[f"model.{name}"])
    assert torch.equal(averages[exported], tensors[STATE.format(name)])
    assert not torch.equal(averages[exported], weights[exported])
    assert weights.keys() == averages.keys()


def test_export_of_an_average_that_is_not_there_is_one_line(tmp_path):
    path = write_checkpoint(tmp_path / "step-7")
    with pytest.raises(config.ConfigError, match="has no average of its weights; expected a checkpoint of a run with"):
        AverageReader(path)
    shape = {"optimizer.state.a.ema": torch.zeros(2, 2), "model.a": torch.zeros(3)}
    with pytest.raises(config.ConfigError, match="has an average of another shape than its weight"):
        AverageReader(write_checkpoint(tmp_path / "other" / "step-7", shape))


def test_the_mean_of_checkpoints(runs, folder, capsys):  # noqa: F811
    """A run starts from it, export and the check of checkpoints read it, and no run resumes from it."""
    runs(2, "run", *RUN)
    steps = [folder / "run" / "checkpoint" / f"step-{step}" for step in (3, 6)]
    assert run_command("checkpoint", ["average", str(folder / "mean"), str(folder / "run")]) == 0
    mean, (old, new) = tensors_of(folder / "mean" / "checkpoint" / "step-6"), map(tensors_of, steps)
    assert mean.keys() == {name for name in new if name.startswith("model.")}
    for name, value in mean.items():
        assert (value - (old[name].double() + new[name].double()) / 2).abs().max() < 1e-7
    assert run_command("checkpoint", [str(folder / "mean")]) == 0
    assert run_command("export", [str(folder / "mean"), str(folder / "hf")]) == 0
    exported = load_file(folder / "hf" / "model.safetensors")["model.norm.weight"]
    assert torch.equal(exported, mean["model.norm.weight"])
    assert "resume with the same, or start in another" in error_message(runs, 2, "mean", "--checkpoint.enable")
    start = f"--checkpoint.initial_load_path={folder / 'mean' / 'checkpoint' / 'step-6'}"
    assert runs(2, "started", start, "--training.steps=1")[0][LOSS] < read_metrics(folder / "run")[0][LOSS]


def test_checkpoints_that_have_no_mean_are_one_line(runs, folder, capsys):  # noqa: F811
    runs(1, "a", "--checkpoint.enable")
    runs(1, "b", "--checkpoint.enable", "--model.rope_theta=2", "--training.steps=1", "--lr_scheduler.total_steps=1")
    for arguments, phrase in (
        ([], "expected two or more different checkpoints, not none"),
        ([folder / "a" / "checkpoint" / "step-3"], "expected two or more different checkpoints, not"),
        ([folder / "a" / "checkpoint" / "step-3"] * 2, "expected two or more different checkpoints, not"),
        ([folder / "a", folder / "b"], "step-1: of another model than"),
    ):
        assert run_command("checkpoint", ["average", str(folder / "mean"), *map(str, arguments)]) == 2
        assert phrase in capsys.readouterr().err
    assert not (folder / "mean").exists()


# Options --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "rejected"),
    [
        ({"ema.start_step": 3}, {"ema.start_step": "read only when ema.decay is above 0"}),
        ({"ema.decay": 0.9, "ema.validation": True}, {"ema.validation": "read only when validation.enable is true"}),
        (
            {"ema.decay": 0.9, "ema.start_step": 4, "training.steps": 3},
            {"ema.start_step": "at most training.steps = 3"},
        ),
        ({"ema.decay": 1.0}, {"ema.decay": "expected a finite number >= 0 and < 1"}),
        (
            {"ema.decay": 0.9, "fault_tolerance.enable": True, "fault_tolerance.group_size": 2},
            {"ema.decay": "the average is that of one group; set 0, or fault_tolerance.enable = false"},
        ),
        (
            {
                **{"ema.decay": 0.9, "ema.validation": True, "validation.enable": True, "float8.enable": True},
                "float8.enable_fsdp_float8_all_gather": True,
                "float8.precompute_float8_dynamic_scale_for_fsdp": True,
            },
            {"ema.validation": "the scales are those of the weights; set false, or float8.precompute"},
        ),
    ],
    ids=lambda value: " ".join(value),
)
def test_an_option_is_used_or_rejected(settings, rejected, tmp_path):
    assert_rejected(lambda: load(tmp_path, settings), settings, rejected)


def test_the_summary_and_the_plan_count_the_average(tmp_path):
    plain, averaging = (load(tmp_path, settings) for settings in ({}, {"ema.decay": 0.9}))
    words = [summary.describe_precision(config.check(each, on(1))) for each in (plain, averaging)]
    assert words[0].endswith("optimizer states float32: 16 bytes per parameter")
    assert words[1].endswith("optimizer states float32, EMA: 20 bytes per parameter")
