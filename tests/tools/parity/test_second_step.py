"""titanlite parity --against: the second step shows what the first one hides, betas and bias correction."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tools.parity.test_against import ADAM, CONFIG, MAX_NORM, batch, forward, in_json, take_step, write_folder
from titanlite.launch.cli import run_command

LR = 1e-3


def gradients_of(weights: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> tuple[dict[str, Tensor], float]:
    parameters = {name: each.clone().requires_grad_() for name, each in weights.items()}
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    logits = forward(parameters, tokens, theta=10000.0, eps=1e-5, positions=positions)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    return {name: each.grad for name, each in parameters.items()}, loss.item()


def clipped(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return gradients as torch's clip_grad_norm_ leaves them."""
    norm = torch.stack([each.norm() for each in gradients.values()]).norm()
    return {name: each * min(1.0, MAX_NORM / (float(norm) + 1e-6)) for name, each in gradients.items()}


def take_second(folder: Path, beta1: float = ADAM["beta1"], beta2: float = ADAM["beta2"], count: int = 2) -> None:
    """Write the second step of a hand-written AdamW, in float64. `count` is the step of its bias correction."""
    first, weights = load_file(folder / "gradients.safetensors"), load_file(folder / "weights_after.safetensors")
    tokens, targets, _ = (each.roll(3, 0) for each in batch())
    gradients, loss = gradients_of(weights, tokens, targets)
    one, two, after = clipped(first), clipped(gradients), {}
    for name, weight in weights.items():
        m = (1 - beta1) * (beta1 * one[name] + two[name]) / (1 - beta1**count)
        v = (1 - beta2) * (beta2 * one[name] ** 2 + two[name] ** 2) / (1 - beta2**count)
        decayed = weight * (1 - LR * ADAM["weight_decay"] * (weight.dim() == 2))
        after[name] = decayed - LR * m / (v.sqrt() + ADAM["eps"])
    step = {
        "dtypes": dict.fromkeys(("weights", "compute", "reduce"), "float64"),
        "optimizer": {"name": "AdamW", **ADAM, "lr": LR, "weight_decay_dims": [2]},
        "max_norm": MAX_NORM,
        "loss": loss,
    }
    tensors: dict[str, Any] = {"weights": weights, "gradients": gradients, "weights_after": after}
    write_folder(folder / "second", config=CONFIG, tokens=tokens, targets=targets, step=step, **tensors)


def run(folder: Path, capsys: Any) -> tuple[int, list[str], list[str]]:
    """Return the exit status, and the lines about each step."""
    status = run_command("parity", ["--against", str(folder)])
    first, _, second = capsys.readouterr().out.partition(f"{folder / 'second'}: ")
    return status, first.splitlines(), second.splitlines()


def test_a_right_second_step_is_equal(tmp_path: Path, capsys):
    take_second(take_step(tmp_path, weights="float64"))
    status, first, second = run(tmp_path, capsys)
    assert status == 0
    assert first[-1].startswith("equal: ")
    assert second[-1].startswith("equal: ")


@pytest.mark.parametrize(
    "wrong",
    [{"beta1": ADAM["beta2"], "beta2": ADAM["beta1"]}, {"count": 1}, {"beta2": 0.99}],
    ids=["swapped betas", "bias correction of the first step", "another beta2"],
)
def test_a_wrong_optimizer_is_named_at_the_second_step(wrong: dict[str, Any], tmp_path: Path, capsys):
    take_second(take_step(tmp_path, weights="float64"), **wrong)
    status, first, second = run(tmp_path, capsys)
    assert status == 1
    assert first[-1].startswith("equal: ")
    assert second[second.index("DIFFERENT") + 1].startswith("updates are ")
    assert second[-1] == "equal: loss, gradients"


OTHERS = ["no gradients", "no weights", "other weights", "other options", "other model", "dangling link", "no batch"]


@pytest.mark.parametrize("name", OTHERS)
def test_a_second_step_that_does_not_follow_is_one_line(name: str, tmp_path: Path, capsys):
    take_second(take_step(tmp_path, weights="float64"))
    if name in ("no gradients", "no weights"):
        (tmp_path / {"no gradients": "gradients", "no weights": "weights_after"}[name]).with_suffix(
            ".safetensors"
        ).unlink()
    elif name == "other weights":
        take_second(take_step(tmp_path / "other", weights="float64", adam={"beta1": 0.5}, factor=2.0))
        (tmp_path / "other" / "model.safetensors").rename(tmp_path / "second" / "model.safetensors")
    elif name == "other options":
        in_json("step.json", optimizer={"name": "AdamW", **ADAM, "beta1": 0.7, "weight_decay_dims": [2]})(
            tmp_path / "second"
        )
    elif name == "other model":
        in_json("config.json", num_hidden_layers=1)(tmp_path / "second")
        for file in ("model", "gradients", "weights_after"):
            path = tmp_path / "second" / f"{file}.safetensors"
            save_file({key: each for key, each in load_file(path).items() if "layers.1." not in key}, path)
    elif name == "dangling link":
        shutil.rmtree(tmp_path / "second")
        (tmp_path / "second").symlink_to(tmp_path / "nowhere")
    else:
        (tmp_path / "second" / "batch.safetensors").unlink()
    assert run_command("parity", ["--against", str(tmp_path)]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith(f"error: {tmp_path / 'second'}")
