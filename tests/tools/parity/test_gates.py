"""titanlite parity --gates: what is compared bit for bit, the other layout, and the gates of a tiny run."""

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.config import problems
from titanlite.config import Launch, check, load
from titanlite.launch.cli import run_command
from titanlite.techniques.fingerprints import file
from titanlite.techniques.fingerprints.file import Description
from titanlite.tools.parity.gates import Run, difference, other_layout, run_gates

DESCRIPTION = {
    "compute_dtype": "float32",
    "weights_dtype": "float32",
    "state_dtype": "float32",
    "counts": {"tokens": 8, "sequences": 1},
}


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Run, Run]:
    """Two equal runs of two steps."""
    folder = tmp_path / "a"
    tensors = {f"input {name}": torch.ones(17, dtype=torch.float64) for name in ("tokens", "targets")}
    for step in (1, 2):
        file.write(folder, Description(step=step, **DESCRIPTION), tensors)
        (folder / f"checkpoint/step-{step}").mkdir(parents=True)
        (folder / f"checkpoint/step-{step}/rank-00000.safetensors").write_bytes(b"weights")
    rows = [
        {"step": step, "loss_metrics/global_avg_loss": 3.0, "grad_norm": 1.0, "n_tokens_seen": 8} for step in (1, 2)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    shutil.copytree(folder, tmp_path / "b")
    return Run(folder, []), Run(tmp_path / "b", [])


def test_equal_runs_are_equal(runs: tuple[Run, Run]):
    assert difference(*runs) == ""
    shutil.rmtree(runs[1].folder / "checkpoint" / "step-1")
    assert difference(*runs) == ""


@pytest.mark.parametrize(
    "what", ["input tokens of step 2", "loss of step 2", "norm of step 1", "checkpoint/step-2/rank-00000.safetensors"]
)
def test_a_difference_is_named(what: str, runs: tuple[Run, Run]):
    folder = runs[1].folder
    if what.startswith("input"):
        tensors = file.read(folder, 2)[1]
        tensors["input tokens"][3] += 1e-15
        file.write(folder, Description(step=2, **DESCRIPTION), tensors)
    elif what.startswith("checkpoint"):
        (folder / what).write_bytes(b"weightz")
    else:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        tag = "grad_norm" if what.startswith("norm") else "loss_metrics/global_avg_loss"
        rows[int(what[-1]) - 1][tag] += 1e-15
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert difference(*runs) == f"DIFFERENT: {what}"


def test_the_other_layout_keeps_the_global_batch():
    one, four = (check(load([name]), Launch(0, 0, n, n, 0)) for name, n in (("debug", 1), ("debug_cp", 4)))
    batch = ["--training.local_batch_size=8", "--training.global_batch_size=16"]
    assert other_layout(one) == ["--parallelism.data_parallel_shard_degree=2", *batch]
    degrees = ["--parallelism.context_parallel_degree=1", "--parallelism.context_parallel_ulysses_degree=1"]
    assert [each for each in other_layout(four) if "parallelism" in each] == degrees


def test_a_baseline_that_lacks_what_is_compared_is_rejected(runs: tuple[Run, Run], tmp_path: Path):
    assert runs[0].is_complete(2)
    config = check(load(["debug"]), Launch(0, 0, 1, 1, 0))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (runs[1].folder / "metrics.jsonl").write_text('{"step": 1}\n')
    for baseline in (*(run.folder for run in runs), tmp_path / "empty", tmp_path / "file"):  # runs have 2 steps of 6
        (message,) = problems(functools.partial(run_gates, config, ["debug"], 6, baseline))
        assert message == f"--baseline {baseline}: expected what --gates recorded of 6 steps, or a new name"
    assert not runs[1].is_complete(2)


@pytest.mark.parametrize("arguments", [["--steps=5"], ["--all"], ["--dtype=float32"]])
def test_options_that_do_not_fit_are_one_line(arguments: list[str], capsys):
    assert run_command("parity", ["debug", "--gates", *arguments]) == 2
    assert (
        "--gates: expected no torchrun, --all, --dtype or --tolerance, and --steps from 6 on" in capsys.readouterr().err
    )
    assert run_command("parity", ["debug", "--baseline=folder"]) == 2
    assert "--baseline is read only with --gates" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.timeout(900)  # 24 runs
def test_the_gates_of_a_right_config_hold(tmp_path: Path, capsys):
    small = ["--training.seq_len=32", "--training.local_batch_size=2", "--validation.enable=false"]
    small += ["--model.dim=64", "--model.n_layers=2", "--lr_scheduler.warmup_steps=2"]
    arguments = ["debug", "--gates", "--steps=6", *small, f"--baseline={tmp_path / 'baseline'}"]
    expected = ["recorded", "equal bit for bit", "DIFFERENT: "]
    for verdict, last in zip(expected, ["1e-3", "1e-3", "2e-3"], strict=True):
        status = run_command("parity", [*arguments, f"--optimizer.lr={last}"])
        repeatability, baseline, replay, layout = capsys.readouterr().out.splitlines()
        assert repeatability.startswith("repeatability: equal bit for bit")
        assert "0 tokens lost" in replay
        assert layout.startswith("layout equivalence: equal: ")
        assert status == (1 if verdict == "DIFFERENT: " else 0)
        assert baseline.startswith(f"baseline equivalence: {verdict}")
