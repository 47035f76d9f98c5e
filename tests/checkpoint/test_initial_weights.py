"""Where a run's weights are from: its first lines say it, and a folder without them, or of another model, is one line
before any rank starts."""

import contextlib
import io
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers.config import problems
from tests.helpers.hf import build_hf
from tests.hf.test_hf_round_trip import CONFIG, VOCABULARY
from tests.test_train import run_train
from titanlite import config
from titanlite.launch.launcher import check_folders

NONE = 'or set checkpoint.initial_load_path = "none" to train from initial weights'


@pytest.fixture
def folder(tmp_path: Path, assets: Any) -> Path:
    """Folders `hf` and `other` of released models with different options, and run.toml, which names the first once."""
    for name, settings in (("hf", {}), ("other", {"rms_norm_eps": 1e-3})):
        build_hf(vocab_size=VOCABULARY, **settings).save_pretrained(tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_bytes(assets.file.read_bytes())
    (tmp_path / "text.txt").write_text("some text\n" * 500)
    text = CONFIG.format(folder=tmp_path).replace(f'initial_load_path = "{tmp_path}/hf"\n', "")
    (tmp_path / "run.toml").write_text(text)
    return tmp_path


def printed(argv: list[str]) -> list[str]:
    """Train on this rank, and return the lines that it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert run_train(argv) == ""
    return out.getvalue().splitlines()


@pytest.mark.nightly
def test_the_first_lines_say_where_the_weights_are_from(folder: Path, ranks: Any):
    """from_hf loads the weights of the folder that it names, as checkpoint.initial_load_path would."""
    cases = {
        "implied": ([], f"loaded from {folder}/hf"),
        "named": ([f"--checkpoint.initial_load_path={folder}/hf"], f"loaded from {folder}/hf"),
        "none": (["--checkpoint.initial_load_path=none"], "initial, by debug.seed = 42"),
    }
    losses = {}
    for name, (arguments, where) in cases.items():
        argv = [str(folder / "run.toml"), f"--job.dump_folder={folder / name}", "--training.steps=1", *arguments]
        (lines,) = ranks(1).run(printed, argv=argv)
        first = next(number for number, line in enumerate(lines) if line.startswith("step 1/1"))
        assert lines[first - 1] == f"weights    {where}"
        record = json.loads((folder / name / "metrics.jsonl").read_text().splitlines()[0])
        losses[name] = record["loss_metrics/global_avg_loss"]
    assert losses["implied"] == losses["named"]
    assert losses["none"] == pytest.approx(math.log(VOCABULARY), abs=0.05)
    assert abs(losses["implied"] - losses["none"]) > 0.2
    argv = [str(folder / "run.toml"), f"--job.dump_folder={folder / 'implied'}", "--training.steps=2"]
    (lines,) = ranks(1).run(printed, argv=argv)
    assert f"weights    resumed after step 1 of 2 from {folder}/implied/checkpoint" in lines
    resolved = config.load([str(folder / "implied" / "config.toml")]).config
    assert resolved.checkpoint.initial_load_path == f"{folder}/hf"


def check(folder: Path, *arguments: str) -> None:
    with mock.patch("titanlite.data.open.check_data"):  # it starts the process of a tokenizer
        check_folders(config.load([str(folder / "run.toml"), *arguments]))


def remove_weights(folder: Path) -> None:
    (folder / "hf" / "model.safetensors").unlink()


OTHER, LOAD = "model.norm_eps = 0.001 (this run: 1e-05); set [model]", "--checkpoint.initial_load_path"
WRONG: dict[str, tuple[Callable[[Path], Any], list[str], str]] = {
    "no weights": (
        remove_weights, [],
        'model.hf_assets_path = "{0}/hf": has a config.json, but no model.safetensors or model.safetensors.index.json; '
        f"put the weights there, {NONE}"),
    "config of another repository": (
        lambda folder: None, [f"{LOAD}={{0}}/other"],
        f'checkpoint.initial_load_path = "{{0}}/other": its config.json has {OTHER} to the options of its weights, '
        f'{NONE.replace("set ", "")}'),
    "a named flavor": (
        lambda folder: None, [f"{LOAD}={{0}}/hf", "--model.flavor=debug", "--model.rope_theta=3.0"],
        'checkpoint.initial_load_path = "{0}/hf": its config.json has model.dim = 32 (this run: 256), '),
    "another size": (
        lambda folder: None, ["--model.n_layers=2"],
        'model.hf_assets_path = "{0}/hf": its config.json has model.n_layers = 3 (this run: 2); set [model]'),
    "no config.json": (
        lambda folder: (folder / "hf" / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors"),
        [f"{LOAD}={{0}}"],
        'checkpoint.initial_load_path = "{0}": has weights, but no config.json; put the model\'s there'),
    "nowhere": (
        lambda folder: None, [f"{LOAD}={{0}}/nowhere"],
        "checkpoint.initial_load_path = \"{0}/nowhere\": expected a checkpoint's step-N folder, or a Hugging Face"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_folder_that_a_run_cannot_start_from_is_one_line(case: str, folder: Path):
    spoil, arguments, expected = WRONG[case]
    check(folder)
    spoil(folder)
    (line,) = problems(lambda: check(folder, *(argument.format(folder) for argument in arguments)))
    assert line.startswith(expected.format(folder))
    assert "rope_theta" not in line  # where it was set, the user wants another value than the folder has
    check(folder, "--checkpoint.initial_load_path=none")
    (folder / "run" / "checkpoint" / "step-3").mkdir(parents=True)  # then the run resumes, and needs the folder no more
    check(folder, *(argument.format(folder) for argument in arguments))


def test_an_option_that_was_set_may_differ_from_the_folder(folder: Path):
    check(folder, f"{LOAD}={folder}/other", "--model.norm_eps=1e-5")


def test_the_launcher_starts_no_rank_without_weights(folder: Path):
    remove_weights(folder)
    command = [sys.executable, "-m", "titanlite", "train", str(folder / "run.toml")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=60)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f'error: model.hf_assets_path = "{folder}/hf": has a config.json, but no model.safetensors')
    assert not (folder / "run").exists()
