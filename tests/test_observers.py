"""Observers of a run must not change a number: runs with and without them are equal, bit for bit."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

from tests.helpers.cases import cases
from tests.helpers.data import some_texts, write
from tests.parallel.test_parity import resolve
from tests.test_train import computed, folder, read_metrics, run_train, runs  # noqa: F401
from titanlite import build
from titanlite.config import Config
from titanlite.tools.parity.training_run import TrainingRun
from titanlite.train_step import Observer, TrainStep


def run_without_observers(argv: list[str]) -> str:
    with mock.patch.object(build, "add_observers"):
        return run_train(argv)


class Doubling(Observer):
    """An observer that breaks the rule: it doubles the gradient of one weight."""

    def __init__(self, train_step: TrainStep):
        self.train_step = train_step

    def after_backward(self, step: int, *arguments: Any, **keywords: Any) -> None:
        next(self.train_step.model.parameters()).grad.mul_(2)


def run_with_a_wrong_observer(argv: list[str]) -> str:
    def add(run: Any, train_step: TrainStep, *arguments: Any) -> None:
        train_step.observers.append(Doubling(train_step))

    with mock.patch.object(build, "add_observers", add):
        return run_train(argv)


def tensors_of(run: Path) -> dict[str, torch.Tensor]:
    """Return every tensor that the ranks saved with the last step, by file and name."""
    files = sorted((run / "checkpoint" / "step-6").glob("*.safetensors"))
    return {f"{file.name} {name}": tensor for file in files for name, tensor in load_file(file).items()}


def differences(folder: Path, first: str, second: str) -> list[str]:  # noqa: F811
    """Return what two runs have computed differently."""
    a, b = tensors_of(folder / first), tensors_of(folder / second)
    assert len(a) > 80
    names = [name for name in a | b if name not in a or name not in b or not torch.equal(a[name], b[name])]
    same = computed(read_metrics(folder / first)) == computed(read_metrics(folder / second))
    return names if same else [*names, "metrics.jsonl"]


OBSERVED = {
    "mixture with the loss of each dataset": (1, ["--training.datasets=MIXTURE"]),
    "mixture, compiled pipeline": (
        2,
        [
            *("--training.datasets=MIXTURE", "--parallelism.pipeline_parallel_degree=2"),
            *("--compile.enable", "--compile.backend=aot_eager"),
        ],
    ),
    "silent data corruption check": (2, ["--debug.sdc_check_freq=2"]),
    "fingerprints, compiled pipeline with a repeated step": (
        2,
        [
            *("--debug.fingerprint_freq=2", "--debug.sdc_check_freq=2", "--parallelism.pipeline_parallel_degree=2"),
            *("--compile.enable", "--compile.backend=aot_eager", "--activation_checkpoint.mode=full"),
        ],
    ),
    "samples": (
        1,
        [
            *("--validation.enable", "--validation.freq=2", "--validation.fraction=0.1"),
            *('--validation.generate_prompts=["The "]', "--validation.generate_tokens=4"),
        ],
    ),
}


@cases(
    "name",
    OBSERVED,
    always=["mixture with the loss of each dataset", "fingerprints, compiled pipeline with a repeated step"],
)
def test_a_run_with_observers_has_the_numbers_of_one_without(runs, folder, name: str):  # noqa: F811
    n, options = OBSERVED[name]
    files = {key: write(folder / f"{key}.jsonl", some_texts(400)) for key in ("a", "b")}
    tables = [f'{{name = "{key}", dataset = "json", dataset_path = "{file}"}}' for key, file in files.items()]
    options = [option.replace("MIXTURE", f"[{', '.join(tables)}]") for option in options] + ["--checkpoint.enable"]
    for run, train in (("with", run_train), ("without", run_without_observers)):
        argv = [str(folder / "small.toml"), f"--job.dump_folder={folder / run}", *options]
        assert runs.ranks(n).run(train, argv=argv) == [""] * n
    assert differences(folder, "with", "without") == []


def calls_of_a_step(job: Config) -> list[str]:
    """Return what a step calls, in order."""
    run, calls = TrainingRun(job, torch.device("cpu")), mock.Mock()
    runner, observer = run.train_step.runner, mock.Mock(spec=Observer)
    run.train_step.observers.append(observer)
    for name in ("prepare", "forward_backward"):
        patched = mock.patch.object(runner, name, wraps=getattr(runner, name))
        calls.attach_mock(patched.start(), name)
    for name in ("before_backward", "after_backward"):
        calls.attach_mock(getattr(observer, name), name)
    run.gradients(run.loader.next())
    run.loader.close()
    return [name for name, *_ in calls.mock_calls]


def test_no_observer_sees_what_precedes_the_first_step(ranks, tmp_path):
    """A pipeline compiles its stages by a microbatch, whose losses are of no step."""
    (calls,) = ranks(1).run(calls_of_a_step, job=resolve(tmp_path, 1, {}))
    assert calls == ["prepare", "before_backward", "forward_backward", "after_backward"]


def test_an_observer_that_changes_a_number_is_found(runs, folder):  # noqa: F811
    for run, train in (("with", run_with_a_wrong_observer), ("without", run_train)):
        argv = [str(folder / "small.toml"), f"--job.dump_folder={folder / run}", "--checkpoint.enable"]
        assert runs.ranks(1).run(train, argv=argv) == [""]
    assert "metrics.jsonl" in differences(folder, "with", "without")
