"""Epochs in place of steps, and a warmup by a fraction of the steps: how many steps they are, and their runs."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.cases import cases
from tests.helpers.config import C4_STREAM, STREAMING, assert_rejected, load, on
from tests.helpers.data import some_texts, write
from tests.test_train import LOSS, computed, error_message, folder, lines_of_a_run, read_metrics, runs  # noqa: F401
from titanlite import config
from titanlite.config import resolve_epochs
from titanlite.config.loader import read_toml, value_of

EPOCHS, STEPS, TOTAL = "training.epochs", "training.steps", "lr_scheduler.total_steps"
RATIO, WARMUP = "lr_scheduler.warmup_ratio", "lr_scheduler.warmup_steps"


@pytest.mark.parametrize(
    ("epochs", "n_sequences", "steps"),
    [
        (1.0, 80, 10),
        (1.0, 87, 10),
        (3.0, 87, 32),
        (0.29, 800, 29),
        (0.1, 80, 1),
    ],
)
def test_epochs_are_full_steps(epochs: float, n_sequences: int, steps: int, tmp_path: Path):
    """The sequences that fill no step are read in the next epoch, and after the last one they are left out."""
    loaded = load(tmp_path, {EPOCHS: epochs, "training.local_batch_size": 8, RATIO: 0.5})
    unresolved = config.check(loaded, on(1))
    resolved = resolve_epochs(unresolved, SimpleNamespace(n_sequences=n_sequences))
    assert (resolved.training.steps, resolved.training.epochs) == (steps, 0)
    assert (resolved.lr_scheduler.total_steps, resolved.lr_scheduler.warmup_steps) == (steps, round(steps / 2))
    assert resolve_epochs(resolved) == resolved
    assert config.load_values(resolved.model_dump(), "resolved", []).config == resolved
    assert config.load_values(unresolved.model_dump(), "unresolved", []).config == unresolved


@pytest.mark.parametrize(("n_sequences", "more"), [(7, {}), (2**62, {}), (39, {"ema.decay": 0.9, "ema.start_step": 5})])
def test_epochs_that_are_no_steps_are_one_line(n_sequences: int, more: dict[str, float], tmp_path: Path):
    job = config.check(load(tmp_path, {EPOCHS: 1.0, **more}), on(1))
    with pytest.raises(
        config.ConfigError, match=r"training.epochs = 1: [\d,]+ sequences in steps of 8 are [\d,]+ steps"
    ):
        resolve_epochs(job, SimpleNamespace(n_sequences=n_sequences))


@pytest.mark.parametrize(
    ("settings", "rejected"),
    [
        ({EPOCHS: 2.0, STEPS: 5}, {STEPS: "training.epochs sets the steps; remove one of the two"}),
        ({RATIO: 0.1, WARMUP: 5}, {WARMUP: "lr_scheduler.warmup_ratio sets the steps of the warmup; remove one"}),
        ({EPOCHS: 2.0, **C4_STREAM}, {STREAMING: "the length of an epoch is not known before it ends"}),
        ({EPOCHS: 2.0, "lr_scheduler.total_steps": 9}, {"lr_scheduler.total_steps": "the schedule has the length of"}),
        ({EPOCHS: -1.0}, {EPOCHS: "expected a finite number >= 0"}),
        ({RATIO: 2.0}, {RATIO: "expected a finite number >= 0 and < 1"}),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_contradicts_epochs_is_rejected(settings, rejected, tmp_path):
    assert_rejected(lambda: load(tmp_path, settings), settings, rejected)


@pytest.mark.parametrize(
    ("in_file", "argument", "expected"),
    [
        ({STEPS: 5, TOTAL: 9}, {EPOCHS: 2.0}, {EPOCHS: 2.0, TOTAL: -1}),
        ({EPOCHS: 2.0}, {STEPS: 5}, {STEPS: 5, EPOCHS: 0}),
        ({STEPS: 5}, {EPOCHS: 0.0}, {STEPS: 5, EPOCHS: 0}),
        ({WARMUP: 5}, {RATIO: 0.1}, {RATIO: 0.1}),
        ({RATIO: 0.1}, {WARMUP: 0}, {WARMUP: 0, RATIO: 0}),
        ({WARMUP: 5}, {RATIO: 0.0}, {WARMUP: 5, RATIO: 0}),
        ({STEPS: 5, TOTAL: 5}, {STEPS: 9}, {STEPS: 9, TOTAL: -1}),
        ({STEPS: 5, TOTAL: 5}, {STEPS: 3}, {STEPS: 3, TOTAL: -1}),
        ({STEPS: 5, TOTAL: 5}, {STEPS: 4, TOTAL: 6}, {STEPS: 4, TOTAL: 6}),
        ({STEPS: 5, TOTAL: 5}, {TOTAL: 6}, {STEPS: 5, TOTAL: 6}),
        ({STEPS: 5, TOTAL: 9}, {STEPS: 6}, {STEPS: 6, TOTAL: 9}),
        ({TOTAL: 12_000}, {STEPS: 6}, {STEPS: 6, TOTAL: 12_000}),
    ],
    ids=lambda value: " ".join(value),
)
def test_the_command_line_replaces_the_length_of_a_file(in_file, argument, expected, tmp_path: Path):
    job = load(tmp_path, in_file | {f"--{key}": value for key, value in argument.items()}).config
    assert {key: value_of(job, key) for key in expected} == expected


def test_epochs_replace_the_steps_of_a_resolved_config(tmp_path: Path):
    """As in the config.toml of a run, whose epochs were converted to steps."""
    loaded = load(tmp_path, {EPOCHS: 1.0, RATIO: 0.5})
    resolved = resolve_epochs(config.check(loaded, on(1)), SimpleNamespace(n_sequences=80))
    again = config.load_values(resolved.model_dump(), "resolved", [f"--{EPOCHS}=2"])
    longer = resolve_epochs(config.check(again, on(1)), SimpleNamespace(n_sequences=80))
    assert (longer.training.steps, longer.lr_scheduler.total_steps) == (20, 20)
    assert longer.lr_scheduler.warmup_steps == resolved.lr_scheduler.warmup_steps == 5


@pytest.mark.parametrize("length", [{EPOCHS: 1.0}, {STEPS: 10}], ids=["epochs", "steps"])
@pytest.mark.parametrize("steps", [5, 12])
def test_steps_replace_those_of_a_resolved_config_and_of_its_schedule(tmp_path: Path, length, steps: int):
    resolved = resolve_epochs(config.check(load(tmp_path, length), on(1)), SimpleNamespace(n_sequences=80))
    assert (resolved.training.steps, resolved.lr_scheduler.total_steps) == (10, 10)
    again = config.check(config.load_values(resolved.model_dump(), "resolved", [f"--{STEPS}={steps}"]), on(1))
    assert (again.training.steps, again.lr_scheduler.total_steps) == (steps, steps)


def test_a_schedule_of_its_own_length_is_kept(tmp_path: Path):
    with pytest.raises(
        config.ConfigError, match=r"lr_scheduler.total_steps = 9: expected at least training.steps = 12"
    ):
        load(tmp_path, {STEPS: 5, TOTAL: 9, f"--{STEPS}": 12})


def test_both_lengths_on_the_command_line_are_rejected(tmp_path: Path):
    with pytest.raises(config.ConfigError, match=r"^command line: training.steps = 5: training.epochs sets the steps"):
        load(tmp_path, {f"--{EPOCHS}": 2.0, f"--{STEPS}": 5})


def test_a_warmup_by_a_fraction(tmp_path: Path):
    by_ratio, by_steps = (
        config.check(load(tmp_path, {STEPS: 40, **each}), on(1)) for each in ({RATIO: 0.25}, {WARMUP: 10})
    )
    assert by_ratio == by_steps


# Runs -----------------------------------------------------------------------------------------------------------------


def data_of(folder: Path, kind: str) -> list[str]:  # noqa: F811
    """Return the options of data of a kind."""
    files = {name: write(folder / f"{name}.jsonl", some_texts(n)) for name, n in (("a", 80), ("b", 160))}
    if kind == "mixture":
        tables = [f'{{name = "{name}", dataset = "json", dataset_path = "{file}"}}' for name, file in files.items()]
        return [f"--training.datasets=[{', '.join(tables)}]"]
    options = ["--training.dataset=json", f"--training.dataset_path={files['a']}"]
    return [*options, f"--training.packing={kind}"]


@cases("kind", ["concatenate", "best_fit", "mixture"], always=["mixture"])
def test_a_run_of_epochs_is_that_of_its_steps(kind: str, runs, folder):  # noqa: F811
    """Its numbers and weights are the same, bit for bit, and it ends after as many sequences as the epochs have."""
    text = (folder / "small.toml").read_text()
    (folder / "small.toml").write_text(text.replace("steps = 6\n", "").replace("total_steps = 12\n", ""))
    options = [*data_of(folder, kind), "--checkpoint.enable"]
    argv = [str(folder / "small.toml"), f"--job.dump_folder={folder / 'epochs'}", *options, "--training.epochs=1.5"]
    (lines, *_) = runs.ranks(2).run(lines_of_a_run, argv=argv)
    by_epochs = read_metrics(folder / "epochs")
    n_steps = by_epochs[-1]["step"]
    assert n_steps > 3
    (summary,) = (line for text in lines for line in text.splitlines() if line.startswith("steps      "))
    epochs = float(summary.split(": ")[1].split(" ")[0])
    assert 1.5 - epochs < 1.5 / n_steps + 0.01
    assert summary == f"steps      {n_steps}: {epochs:.3g} epochs, {n_steps * 512:,} tokens"
    assert computed(runs(2, "steps", *options, f"--training.steps={n_steps}")) == computed(by_epochs)
    training = read_toml(str(folder / "epochs" / "config.toml"))["training"]
    assert (training["steps"], training["epochs"]) == (n_steps, 0), "the export of the last step reads this"
    name = f"checkpoint/step-{n_steps}/rank-00001.safetensors"
    assert (folder / "epochs" / name).read_bytes() == (folder / "steps" / name).read_bytes()


def test_a_run_of_epochs_resumes(runs, folder):  # noqa: F811
    text = (folder / "small.toml").read_text()
    (folder / "small.toml").write_text(text.replace("steps = 6\n", "").replace("total_steps = 12\n", ""))
    options = [*data_of(folder, "concatenate"), "--checkpoint.enable", "--training.epochs=1"]
    full = runs(1, "full", *options)
    n_steps = full[-1]["step"]
    runs(1, "stopped", *options, stop_after=2)
    assert computed(runs(1, "stopped", *options)) == computed(full)
    assert read_metrics(folder / "stopped")[-1]["step"] == n_steps
    options[-1] = "--training.epochs=0.001"
    assert "are 0 steps; expected 1 to" in error_message(runs, 1, "short", *options)
