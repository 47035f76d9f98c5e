"""Steps that are skipped because their gradient norm is an outlier."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.helpers.cases import cases
from tests.helpers.checkpoint import assert_skipped
from tests.parallel.test_layouts import HOST_STATES, MUON, with_batches
from tests.parallel.test_parity import resolve
from tests.techniques.moe.test_moe import BIAS, EXPERTS
from tests.test_train import LOSS, computed, folder, read_metrics, run_train, runs  # noqa: F401
from titanlite import train_step
from titanlite.checkpoint.folder import complete_steps
from titanlite.checkpoint.tensors import named_tensors
from titanlite.config import Config
from titanlite.config.errors import TrainingError
from titanlite.optimizer import scale_gradients
from titanlite.parallel.shards import local_shard
from titanlite.techniques.low_bit_adam import _float32
from titanlite.techniques.outlier_steps import OutlierSteps
from titanlite.tools.parity.training_run import TrainingRun

ON = ["--training.skip_outlier_sigma=6", "--training.outlier_window=4", "--checkpoint.enable"]
ON.append("--checkpoint.interval=1")


def train_with_outliers(argv: list[str], steps: tuple[int, ...], first: int = 1) -> str:
    """Train as run_train, where the gradients of some steps are a thousand times as large. `first`: of this start."""
    norm, calls = train_step.gradient_norm, iter(range(first, 1000))

    def gradient_norm(parameters: Any, device: Any) -> Any:
        parameters = list(parameters)
        if next(calls) in steps:
            scale_gradients(parameters, 1000.0)
        return norm(parameters, device)

    with mock.patch.object(train_step, "gradient_norm", gradient_norm):
        return run_train(argv)


def test_an_outlier_is_skipped_on_all_ranks_and_a_resume_is_the_same(runs, folder):  # noqa: F811
    def start(run: str, *arguments: str, first: int = 1) -> list[dict[str, Any]]:
        argv = [str(folder / "small.toml"), f"--job.dump_folder={folder / run}", *ON, *arguments]
        assert runs.ranks(2).run(train_with_outliers, argv=argv, steps=(4, 6), first=first) == ["", ""]
        return read_metrics(folder / run)

    steps = start("run")
    assert [values["skipped_steps"] for values in steps] == [0, 0, 0, 1, 1, 2]
    assert steps[3]["grad_norm"] > 100
    assert_skipped(folder / "run" / "checkpoint", step=4)
    assert complete_steps(folder / "run" / "checkpoint") == [1, 2, 3, 4, 5, 6], "a skipped step is finite"
    start("resumed", "--training.steps=5")
    resumed = start("resumed", first=6)
    assert computed(resumed) == computed(steps)
    assert resumed[5]["skipped_steps"] == 2, "the window was not resumed"


@pytest.mark.nightly
def test_without_outliers_nothing_changes(runs):  # noqa: F811
    off = runs(1, "off")
    on = runs(1, "on", "--training.skip_outlier_sigma=1000", "--training.outlier_window=4")
    assert computed(on) == computed(off)
    assert "skipped_steps" not in off[0]
    assert [values["skipped_steps"] for values in on] == [0] * 6
    assert on[-1][LOSS] < on[0][LOSS]


KEPT = {
    "fused": {"training__dtype": "float32"},
    "foreach": {"optimizer__implementation": "foreach", "training__dtype": "float32"},
    "float64": {},
    "bfloat16, stochastic rounding": {"training__dtype": "bfloat16", "optimizer__stochastic_rounding": True},
    "Adam, int8 states": {"optimizer__name": "Adam", "optimizer__state_dtype": "int8", "training__dtype": "float32"},
    "states in host memory": HOST_STATES | {"training__dtype": "float32"},
    "Muon, heads above the threshold of QK-clip": MUON
    | {"optimizer__qk_clip_threshold": 1e-3, "optimizer__muon_dtype": "float32", "training__dtype": "float32"},
    "Muon, float64, heads above the threshold": MUON | {"optimizer__qk_clip_threshold": 1e-3},
}
"""What trains the models of the next test."""


def kinds_that_change(job: Config) -> tuple[set[str], set[str], set[str]]:
    """Return which kinds of weights, buffers and optimizer states change in a second update that is not taken, in one
    that is, and all of them."""
    run = TrainingRun(job, torch.device("cpu"))
    run.step(run.loader.next())  # creates the states

    def everything() -> dict[str, Tensor]:
        tensors = {f"{name.split('.')[-1]} of {name}": tensor for name, tensor in named_tensors(run.model).items()}
        for number, states in enumerate(run.optimizer.state.values()):
            tensors |= {f"{key} of {number}": state for key, state in states.items()}
        return {name: _float32(local_shard(tensor)).clone() for name, tensor in tensors.items()}

    before, changed = everything(), []
    for taken in (False, True):
        totals = run.totals(*run.gradients(run.loader.next()))
        run.train_step.update(run.optimizer, totals.norm, torch.tensor(taken))
        run.optimizer.zero_grad()
        after = everything()
        changed.append({name.split(" of ")[0] for name in before if not torch.equal(before[name], after[name])})
    run.loader.close()
    return *changed, {name.split(" of ")[0] for name in before}


@cases("name", KEPT, always=["fused", "Adam, int8 states", "Muon, heads above the threshold of QK-clip"])
def test_a_step_that_is_not_taken_changes_nothing_bit_for_bit(ranks, tmp_path, name):
    """Of weights, optimizer states, averages, and what balances the experts: all of which a step changes."""
    job = resolve(tmp_path, 1, with_batches(EXPERTS | BIAS | {"ema__decay": 0.5} | KEPT[name]))
    ((not_taken, taken, kinds),) = ranks(1).run(kinds_that_change, job=job)
    assert not_taken == set()
    assert taken == kinds
    assert {"weight", "balance_bias", "load", "ema", "ema_step"} < kinds


def take(outliers: OutlierSteps, *norms: float) -> list[bool]:
    return [
        outliers.taken(torch.tensor(norm, dtype=torch.float64), torch.tensor(norm < torch.inf)).item() for norm in norms
    ]


def test_the_limit_is_that_of_the_window():
    """Against the definition: mean and standard deviation (of the population) of the norms that were taken."""
    outliers = OutlierSteps(2.0, 4, torch.device("cpu"))
    assert take(outliers, 1.0, 100.0) == [True, True], "half a window must be known"
    outliers = OutlierSteps(2.0, 4, torch.device("cpu"))
    assert take(outliers, 1.0, 3.0) == [True, True]  # mean 2, deviation 1: the limit is 4
    assert take(outliers, 4.001, float("inf"), 4.0) == [False, False, True]
    known = torch.tensor([1.0, 3.0, 4.0]).double()
    limit = (known.mean() + 2 * known.std(correction=0)).item()
    assert take(outliers, limit * (1 + 1e-12), limit * (1 - 1e-12)) == [False, True]
    other = OutlierSteps(2.0, 4, torch.device("cpu"))
    other.load(outliers.state())
    assert torch.equal(other._norms, outliers._norms)


def test_a_full_window_of_outliers_ends_the_run():
    outliers = OutlierSteps(2.0, 4, torch.device("cpu"))
    take(outliers, 1.0, 1.0)
    for _ in range(3):
        take(outliers, 9.0)
        assert outliers.skipped(9.0)
    take(outliers, 9.0)
    with pytest.raises(TrainingError, match=r"^4 steps in a row, a full training\.outlier_window"):
        outliers.skipped(9.0)
