"""Steps that are skipped because their gradient norm is an outlier."""

from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers.checkpoint import assert_skipped
from tests.test_train import LOSS, computed, folder, read_metrics, run_train, runs  # noqa: F401
from titanlite import train_step
from titanlite.checkpoint.folder import complete_steps
from titanlite.config.errors import TrainingError
from titanlite.optimizer import scale_gradients
from titanlite.techniques.outlier_steps import OutlierSteps

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
