"""The writers of examples/verify/ take a step of another program, and titanlite parity --against says what it computes.

A writer whose program is not installed is skipped; the logs in benchmarks/logs have all of them.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers.cases import Case, cases
from titanlite.launch.cli import run_command

ROOT = Path(__file__).parents[3]
MEANS = "those of a mean over 4 accumulation steps"
OF_ALL_RANKS = f"{MEANS} of all data-parallel ranks, each a mean over its own tokens"


class Step(NamedTuple):
    """A writer's options, and what the report says of the step."""

    package: str
    writer: str
    options: str = ""
    ranks: int = 1
    verdict: str = "equal: the largest distance, of "


LOOP, TRAINER, ACCELERATE = "transformers_loop", "transformers_trainer", "accelerate_step"
STEPS = {
    "loop": Case({"step": Step("transformers", LOOP)}, always=True),
    "loop, means": {"step": Step("transformers", LOOP, "--accumulate-means", verdict=MEANS)},
    "Trainer": {"step": Step("transformers", TRAINER, ranks=2)},
    "accelerate": {"step": Step("accelerate", ACCELERATE, "--ddp", 2, OF_ALL_RANKS)},
    "accelerate, tokens": {"step": Step("accelerate", ACCELERATE, "--count-tokens", 2)},
    "TRL": {"step": Step("trl", "trl_sft", ranks=2)},
    "TRL, packing": {"step": Step("trl", "trl_sft", "--packing")},
    "DeepSpeed": {"step": Step("deepspeed", "deepspeed_step", "--zero=1", 2, OF_ALL_RANKS)},
    "DeepSpeed, tokens": {"step": Step("deepspeed", "deepspeed_step", "--zero=3 --count-tokens", 2)},
    "Lightning": {"step": Step("lightning", "lightning_step", "", 2, OF_ALL_RANKS)},
    "Lightning, tokens": {"step": Step("lightning", "lightning_step", "--count-tokens", 2)},
    "OLMo-core": {"step": Step("olmo_core", "olmo_core_step")},
    "OLMo-core, FSDP": {
        "step": Step("olmo_core", "olmo_core_step", "", 2, "those of a mean over 2 data-parallel ranks")
    },
}


@cases("name", STEPS)
def test_a_writer_and_its_verdict(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    step: Any = STEPS[name]["step"]
    if importlib.util.find_spec(step.package) is None:
        pytest.skip(f"{step.package} is not installed")
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=localhost",
        f"--nproc-per-node={step.ranks}",
    ]
    launch = launcher if step.ranks > 1 or step.package == "deepspeed" else []
    script = [step.writer, str(tmp_path / "step"), *step.options.split()]
    assert_verdict(launch, script, step.verdict, tmp_path / "step", capsys)


def assert_verdict(launch: list[str], script: list[str], verdict: str, folder: Path, capsys: Any) -> None:
    """Run a script that writes a folder, and find a verdict in the report below its table."""
    command = [sys.executable, *launch, str(ROOT / "examples" / "verify" / f"{script[0]}.py"), *script[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    status = run_command("parity", ["--against", str(folder)])
    report = capsys.readouterr().out
    assert verdict in report.partition("\n\n")[2].partition("\n\n")[2], report
    assert status == (0 if verdict.startswith("equal") else 1)


BUGS = {
    "none": "equal: the largest distance, of ",
    "none_experts": "equal: the largest distance, of ",
    "mean_of_means": f"gradients and loss are {MEANS}, each a mean over its own tokens",
    "sum_in_a_pipeline": "gradients are 144.0 x too large: valid tokens = 144",
    "stages_initialized_again": "gradients are different, and not by a factor",
    "gathered_logits": "loss is 1.14249 x too large",
    "copies_counted": "gradient norm is, for the program's own gradients, too large by 8.4e-05 of its size",
    "scores_of_own_experts": "different, and not by a factor; the most: gradient layers.0.feed_forward.router.weight",
    "balance_loss_of_each_batch": "the balance loss is 4.0 x too large: accumulation steps = 4",
    "experts_omitted": "gradient norm is, for the program's own gradients, too small by 7.8e-04 of its size",
}
"""The bugs of examples/verify/bugs_of_2026.py, and what the report says of each."""


@pytest.mark.nightly
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_of_2026_and_its_verdict(bug: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("transformers")
    script = ["bugs_of_2026", bug, str(tmp_path / "step")]
    assert_verdict([], script, BUGS[bug], tmp_path / "step", capsys)
