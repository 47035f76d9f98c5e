"""python -m titanlite.parity: what a user is told, and the exit status that scripts rely on."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from titanlite import config, launcher, parity

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
DEBUG = str(ROOT / "configs" / "debug_tp.toml")


def command(*arguments: str) -> tuple[int, str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK", "NGPU")}
    done = subprocess.run(
        [sys.executable, "-m", "titanlite.parity", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "dtype", ["float64", *(pytest.param(dtype, marks=pytest.mark.nightly) for dtype in ("float32", "bfloat16"))]
)
def test_a_right_layout_is_equal(dtype):
    status, out, error = command(DEBUG, "--parallelism.context_parallel_degree=2", f"--dtype={dtype}")
    assert (status, error) == (0, ""), out
    assert "cp 2 x tp 2 = 4 rank(s)" in out
    assert "\nequal: the largest difference" in out
    assert "DIFFERS" not in out


def test_a_wrong_config_is_one_line():
    status, out, error = command(DEBUG, "--parallelism.tensor_parallel_degree=3")
    assert (status, out) == (2, "")
    assert all(line.startswith("error: ") for line in error.splitlines())
    assert "expected a divisor of model.n_heads = 16" in error


def test_under_torchrun():
    arguments = ["--nproc-per-node=2", "-m", "titanlite.parity", DEBUG]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\nequal: the largest difference") == 1


def traces(dtype: str, fault: float) -> tuple[config.Config, parity.Trace, parity.Trace]:
    """A shrunk config, one process, and the same with one parameter's second gradient off by a share of itself."""
    loaded = config.load([DEBUG, "--parallelism.tensor_parallel_degree=1"])
    launch = config.Launch(0, 0, 1, 1, 0)
    job = config.check(
        parity.shrink(dataclasses.replace(loaded, config=config.check(loaded, launch)), dtype)[0], launch
    )
    one, other = (parity.run_alone(job, torch.device("cpu"), steps=2) for _ in range(2))
    other.gradients[1]["layers.1.attention.wk.weight"] *= 1 + fault
    return job, one, other


@pytest.mark.parametrize(("dtype", "fault"), [("float64", 1e-7), ("float32", 1e-2), ("bfloat16", 10.0)])
def test_a_fault_is_named(capsys, dtype, fault):
    job, one, other = traces(dtype, fault)
    assert not parity.report(one, other, parity.allowed(job, one, torch.device("cpu"), steps=2))
    out = capsys.readouterr().out
    assert "\nDIFFERENT: first in step 2 gradient layers.1.attention.wk.weight" in out
    assert out.count("DIFFERS") == 1


def test_initial_weights_must_be_bit_equal(capsys):
    job, one, other = traces("float32", 0.0)
    other.initial["norm.weight"] = other.initial["norm.weight"] * (1 + 2**-23)
    assert not parity.report(one, other, parity.allowed(job, one, torch.device("cpu"), steps=2))
    assert "first in initial weight norm.weight" in capsys.readouterr().out


def test_a_missing_parameter_is_different():
    job, one, other = traces("float64", 0.0)
    del other.weights["norm.weight"]
    assert not parity.report(one, other, parity.allowed(job, one, torch.device("cpu"), steps=2))


def test_a_fault_ends_in_status_1(capsys):
    real = parity.run_alone

    def off(*arguments: Any, **others: Any) -> parity.Trace:
        trace = real(*arguments, **others)
        trace.losses[0] += 1e-9
        return trace

    with mock.patch.object(parity, "run_alone", off):
        assert parity.main([DEBUG, "--parallelism.tensor_parallel_degree=1"]) == 1
    assert "DIFFERENT: first in step 1 loss, by 1.0e-09" in capsys.readouterr().out


def test_too_many_ranks_are_refused():
    status, _, error = command(DEBUG, "--parallelism.data_parallel_shard_degree=8192")
    assert status == 2
    assert "16384 ranks need about" in error


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_shrinking_keeps_the_layout(file):
    """Every config that is here: the same degrees, schedule and stages, and a model that fits a laptop."""
    loaded = parity.runnable(config.load([str(file)]), on_cpu=True)
    ranks = launcher.ranks_wanted(loaded, {}, 0)
    launch = config.Launch(0, 0, ranks, ranks, 0)
    resolved = config.check(loaded, launch)
    small = config.check(parity.shrink(dataclasses.replace(loaded, config=resolved), "float64")[0], launch)
    changed = {"pipeline_parallel_microbatch_size"}
    assert small.parallelism.model_dump(exclude=changed) == resolved.parallelism.model_dump(exclude=changed)
    assert small.training.global_batch_size % small.training.local_batch_size == 0
    assert len(config.schema.stage_modules(small)) == len(config.schema.stage_modules(resolved))
    assert small.model.dim <= 256
    assert small.training.seq_len <= 512
