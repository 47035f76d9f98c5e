"""titanlite parity: its output, and the exit status that scripts rely on."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from titanlite import Own, config
from titanlite.data.packing import Sequence
from titanlite.launch import launcher
from titanlite.launch.cli import run_command as run_in_process
from titanlite.loss import IGNORED
from titanlite.tools.parity import command
from titanlite.tools.parity.compare import FLOAT64_TOLERANCE, print_comparison, print_tolerances, tolerances
from titanlite.tools.parity.reference import RandomSequences, Trace, run_reference
from titanlite.tools.parity.shrink import adapt_to_cpu, shrink

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "configs").rglob("*.toml"), key=lambda path: path.stem)
CPU = torch.device("cpu")
DEBUG = str(ROOT / "configs" / "debug_tp.toml")


def run_command(*arguments: str) -> tuple[int, str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK", "NGPU")}
    done = subprocess.run(
        [sys.executable, "-m", "titanlite", "parity", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout, done.stderr


def without_progress(error: str) -> str:
    """Return standard error without the lines of launch/progress.py, which long work on a busy machine prints."""
    line = r"(starting 4 ranks|layout|single-process reference): .*\d:\d\d:\d\d( left)?\n"
    return re.sub(line, "", error)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float64", *(dtype for dtype in ("float32", "bfloat16"))])
def test_correct_layout_is_equal(dtype):
    status, out, error = run_command(DEBUG, "--parallelism.context_parallel_degree=2", f"--dtype={dtype}")
    assert (status, without_progress(error)) == (0, ""), out
    assert "cp 2 x tp 2 = 4 rank(s)" in out
    assert "\nequal: the largest difference" in out
    assert "DIFFERS" not in out


def test_invalid_config_is_one_line():
    status, out, error = run_command(DEBUG, "--parallelism.tensor_parallel_degree=3")
    assert (status, out) == (2, "")
    assert all(line.startswith("error: ") for line in error.splitlines())
    assert "expected a divisor of model.n_heads = 16" in error


@pytest.mark.nightly
def test_under_torchrun():
    arguments = ["--nproc-per-node=2", "-m", "titanlite", "parity", DEBUG]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\nequal: the largest difference") == 1


def traces(dtype: str, error: float) -> tuple[config.Config, Trace, Trace]:
    """Return a shrunk config, its reference, and the same with one gradient of step 2 off by a relative error."""
    loaded = config.load([DEBUG, "--parallelism.tensor_parallel_degree=1"])
    launch = config.Launch(0, 0, 1, 1, 0)
    smaller, _ = shrink(dataclasses.replace(loaded, config=config.check(loaded, launch)), dtype)
    job = config.check(smaller, launch)
    reference, layout = (run_reference(job, CPU, steps=2) for _ in range(2))
    layout["step 2 gradient layers.1.attention.wk.weight"] *= 1 + error
    return job, reference, layout


@pytest.mark.parametrize(("dtype", "error"), [("float64", 1e-7), ("float32", 1e-2), ("bfloat16", 10.0)])
def test_first_difference_is_named(capsys, dtype, error):
    job, reference, layout = traces(dtype, error)
    assert not print_comparison(reference, layout, tolerances(job, reference, CPU, steps=2))
    out = capsys.readouterr().out
    assert "\nDIFFERENT: first in step 2 gradient layers.1.attention.wk.weight" in out
    assert out.count("DIFFERS") == 1


def test_initial_weights_must_be_bit_equal(capsys):
    job, reference, layout = traces("float32", 0.0)
    layout["initial weight norm.weight"] *= 1 + 2**-23
    assert not print_comparison(reference, layout, tolerances(job, reference, CPU, steps=2))
    assert "first in initial weight norm.weight" in capsys.readouterr().out


def test_missing_parameter_is_different():
    job, reference, layout = traces("float64", 0.0)
    del layout["final weight norm.weight"]
    assert not print_comparison(reference, layout, tolerances(job, reference, CPU, steps=2))


@pytest.mark.nightly
def test_difference_ends_in_status_1(capsys):
    def off(*arguments: Any, **kwargs: Any) -> Trace:
        trace = run_reference(*arguments, **kwargs)
        trace["step 1 loss"] += 1e-9
        return trace

    with mock.patch("titanlite.tools.parity.reference.run_reference", off):
        assert command.main([DEBUG, "--parallelism.tensor_parallel_degree=1"]) == 1
    assert "DIFFERENT: first in step 1 loss, by 1.0e-09" in capsys.readouterr().out


def test_too_many_ranks_are_rejected():
    status, _, error = run_command(DEBUG, "--parallelism.data_parallel_shard_degree=8192")
    assert status == 2
    assert "16384 ranks need about" in error


def test_what_is_not_rounded_may_differ_as_in_float64():
    """With Muon's iterations in bfloat16, only what follows the first update is rounded."""
    launch = config.Launch(0, 0, 1, 1, 0)
    loaded = config.load([DEBUG, "--parallelism.tensor_parallel_degree=1", "--optimizer.name=Muon"])
    smaller, _ = shrink(dataclasses.replace(loaded, config=config.check(loaded, launch)), "float64")
    job = config.check(smaller, launch).replace(optimizer__muon_dtype="bfloat16")
    allowed = tolerances(job, run_reference(job, CPU, steps=2), CPU, steps=2)
    assert allowed["step 1 gradient output.weight"] == FLOAT64_TOLERANCE
    assert allowed["step 2 gradient output.weight"] > 1e3 * FLOAT64_TOLERANCE


def test_the_largest_seed_draws_tokens():
    jobs = [
        config.check(config.load([DEBUG, f"--debug.seed={seed}"]), config.Launch(0, 0, 2, 2, 0))
        for seed in (0, 2**63 - 1)
    ]
    (first, *_), (largest, *_) = (RandomSequences(job)[5] for job in jobs)
    assert first.shape == largest.shape
    assert (first != largest).any()


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_shrinking_keeps_the_layout(file):
    """Every config of configs/ keeps its degrees, schedule and stages, with a model that fits a laptop."""
    loaded = adapt_to_cpu(config.load([str(file)]))
    ranks = launcher.ranks_wanted(loaded, {}, 0)
    launch = config.Launch(0, 0, ranks, ranks, 0)
    resolved = config.check(loaded, launch)
    small = config.check(shrink(dataclasses.replace(loaded, config=resolved), "float64")[0], launch)
    changed = {"pipeline_parallel_microbatch_size"}
    assert small.parallelism.model_dump(exclude=changed) == resolved.parallelism.model_dump(exclude=changed)
    assert small.training.global_batch_size % small.training.local_batch_size == 0
    assert len(config.schema.stage_modules(small)) == len(config.schema.stage_modules(resolved))
    assert small.model.dim <= 256
    assert small.training.seq_len <= 512


def test_every_random_sequence_has_a_valid_target():
    """Otherwise some steps of a global batch of one sequence have no loss: 0 / 0."""
    for seed in range(100):
        job = config.load([DEBUG, "--training.seq_len=32", f"--debug.seed={seed}"]).config
        assert all((RandomSequences(job)[index].targets != IGNORED).any() for index in range(10))


def test_own_data_without_a_valid_target_is_a_line():
    nothing = Sequence(np.arange(32), np.full(32, IGNORED), np.arange(32))
    loaded = config.load(["debug", "--training.seq_len=32"], Own(data=lambda *arguments: [nothing] * 8))
    with pytest.raises(config.ConfigError, match=r"own\.data: the sequences of step 1 have no valid target"):
        run_reference(config.check(loaded, config.Launch(0, 0, 1, 1, 0)), CPU, steps=1)


# --tolerance ---------------------------------------------------------------------------------------------------------


def test_tolerances_of_every_tensor_are_relative(capsys):
    reference = {"step 1 loss": torch.tensor(4.0), "step 1 gradient w": torch.tensor([0.0, -2.0])}
    layout = {"step 1 loss": torch.tensor(4.0), "step 1 gradient w": torch.tensor([0.5, -2.0])}
    assert print_tolerances(reference, layout, {"step 1 loss": 0.4, "step 1 gradient w": 1.0})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:3]] == [
        ["step", "1", "loss", "0.0e+00", "1.0e-01", "equal"],
        ["step", "1", "gradient", "w", "2.5e-01", "5.0e-01", "equal"],
    ]
    assert not print_tolerances(reference, layout, {"step 1 loss": 0.4, "step 1 gradient w": 0.4})
    assert "2.5e-01   2.0e-01  DIFFERS" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--all", "--dtype=float32", "--gates"])
def test_tolerance_takes_no_other_precision(option: str, capsys):
    assert run_in_process("parity", ["debug", "--tolerance", option]) == 2
    assert "--tolerance" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dtype", "param", "compared"),
    [("float32", "auto", "bfloat16"), ("float64", "auto", "float64"), ("float32", "float32", "float32")],
)
def test_tolerance_is_of_the_precision_that_a_gpu_computes_in(monkeypatch, dtype: str, param: str, compared: str):
    asked = []
    monkeypatch.setattr(command, "_compare", lambda loaded, arguments, launched: asked.append(arguments.dtype))
    command.main(["debug", "--tolerance", f"--training.dtype={dtype}", f"--training.mixed_precision_param={param}"])
    assert asked == [compared]


@pytest.mark.nightly
def test_the_precision_of_a_config_is_compared():
    status, output, _ = run_command("debug_tp", "--tolerance", "--steps=1", "--training.mixed_precision_param=bfloat16")
    assert (status, "bfloat16, 1 steps" in output) == (0, True), output
    rows = [line.split() for line in output.splitlines() if "gradient" in line and line.endswith("equal")]
    assert len(rows) > 10
    assert all(0 < float(measured) < float(allowed) < 0.2 for *_, measured, allowed, _ in rows)
