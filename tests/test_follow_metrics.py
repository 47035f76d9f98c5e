"""examples/follow_metrics.py passes each step of a run on once, to real trackers where they are installed."""

import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "follow_metrics.py"
TAGS = (
    "loss_metrics/global_avg_loss",
    "throughput(tps)",
    "mfu(%)",
    "time_metrics/end_to_end(s)",
    "memory/max_active(GiB)",
)
NAMES = ("loss_metrics/global_avg_loss", "throughput_tps", "mfu", "time_metrics/end_to_end_s", "memory/max_active_GiB")
OF_MLFLOW = re.compile(r"[\w.:/ -]+", re.ASCII)
"""The names that MLflow takes: letters, digits, and _ . : / - and spaces."""


def lines(first: int, last: int, *, run: float = 0.5) -> str:
    rows = [{"step": step, **{tag: step + run + at for at, tag in enumerate(TAGS)}} for step in range(first, last + 1)]
    return "".join(json.dumps(row) + "\n" for row in rows)


class Fake(types.ModuleType):
    """Records what wandb and trackio would get, by run."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: dict[str, list[tuple[int, dict[str, float]]]] = {}

    def init(self, *, project: str, resume: str, id: str) -> None:
        assert (project, resume) == ("p", "allow")
        self.current = self.runs.setdefault(id, [])

    def log(self, values: dict[str, float], step: int) -> None:
        self.current.append((step, values))

    def finish(self) -> None:
        pass

    def steps(self) -> list[list[int]]:
        return [[step for step, _ in run] for run in self.runs.values()]


@pytest.fixture
def fake(monkeypatch) -> Fake:
    module = Fake()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def follow(file: Path) -> None:
    """Pass on what is in a file, as a new start of the script does."""
    spec = importlib.util.spec_from_file_location("follow_metrics", SCRIPT)
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.follow(file, "wandb", "p", once=True)


def test_each_step_is_passed_on_once(tmp_path: Path, fake: Fake):
    file = tmp_path / "metrics.jsonl"
    file.write_text(lines(1, 3) + '{"step": 4, "loss')
    follow(file)
    assert fake.steps() == [[1, 2, 3]]
    ((_, values), *_) = next(iter(fake.runs.values()))
    assert values == {name: 1.5 + at for at, name in enumerate(NAMES)}
    follow(file)
    file.write_text(lines(1, 5))
    follow(file)
    assert fake.steps() == [[1, 2, 3, 4, 5]]


def test_a_resumed_run_has_no_double_steps(tmp_path: Path, fake: Fake):
    """The trainer removes the steps after the checkpoint, and logs them again."""
    file = tmp_path / "metrics.jsonl"
    file.write_text(lines(1, 5))
    follow(file)
    file.write_text(lines(1, 2))
    follow(file)
    file.write_text(lines(1, 2) + lines(3, 7, run=0.75))
    follow(file)
    assert fake.steps() == [[1, 2, 3, 4, 5, 6, 7]]


def test_a_new_run_in_the_same_folder_is_another_run(tmp_path: Path, fake: Fake):
    file = tmp_path / "metrics.jsonl"
    for run in (0.5, 0.75):
        file.write_text(lines(1, 3, run=run))
        follow(file)
    assert fake.steps() == [[1, 2, 3], [1, 2, 3]]


def test_what_is_not_finite_is_left_out(tmp_path: Path, fake: Fake):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "grad_norm": null, "lr": 0.5}\n')
    follow(tmp_path / "metrics.jsonl")
    assert list(fake.runs.values()) == [[(1, {"lr": 0.5})]]


def test_mlflow_takes_the_names_and_no_two_become_one(tmp_path: Path, fake: Fake):
    page = (SCRIPT.parents[1] / "docs" / "checkpoint.md").read_text().partition("## metrics.jsonl")[2]
    tags = {*TAGS, *re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, **dict.fromkeys(tags, 0.5)}) + "\n")
    follow(tmp_path / "metrics.jsonl")
    (((_, values),),) = fake.runs.values()
    assert len(values) == len(tags) > 12
    assert all(OF_MLFLOW.fullmatch(name) for name in values)


def test_the_script_is_short_and_needs_only_the_tracker():
    source = SCRIPT.read_text()
    assert len(source.splitlines()) <= 60
    modules = re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE)
    assert set(modules) <= sys.stdlib_module_names


# Real trackers -------------------------------------------------------------------------------------------------------


def logged_by_mlflow(folder: Path) -> list[tuple[int, float]]:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert set(run.data.metrics) == set(NAMES)
    return sorted((each.step, each.value) for each in client.get_metric_history(run.info.run_id, NAMES[1]))


def logged_by_trackio(folder: Path) -> list[tuple[int, float]]:
    code = "import json; from trackio.sqlite_storage import SQLiteStorage as S; (run,) = S.get_runs('p'); "
    code += "print(json.dumps(S.get_logs('p', run)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment(folder)
    )
    return sorted((row["step"], row[NAMES[1]]) for row in json.loads(done.stdout.splitlines()[-1]))


def records_of(data: bytes) -> Iterator[bytes]:
    """Yield the records of a .wandb file: a log as LevelDB writes it, in blocks of 32 KiB, behind 7 bytes."""
    position, record = 7, b""
    while position + 7 <= len(data):
        left = 2**15 - position % 2**15
        if left < 7:
            position += left
            continue
        size, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        record, position = record + data[position + 7 : position + 7 + size], position + 7 + size
        if kind in (1, 4):  # a record's only or last part
            yield record
            record = b""


def logged_by_wandb(folder: Path) -> list[tuple[int, float]]:
    """Read the files of the offline runs, which wandb sync uploads under one id."""
    from wandb.proto import wandb_internal_pb2

    files = list(folder.rglob("run-*.wandb"))
    assert len({file.stem for file in files}) == 1
    found = []
    for each in (each for file in files for each in records_of(file.read_bytes())):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(each)
        row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        found += [(row.get("_step", record.history.step.num), row[NAMES[1]])] if NAMES[1] in row else []
    return sorted(found)


def environment(folder: Path) -> dict[str, str]:
    own = {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
    return {**os.environ, **own, "TRACKIO_DIR": str(folder / "trackio"), "WANDB_SILENT": "true", "HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize("tracker", ["trackio", "wandb", "mlflow"])
@pytest.mark.timeout(300)
def test_a_real_tracker_has_each_step_once(tracker: str, tmp_path: Path):
    if not importlib.util.find_spec(tracker):
        pytest.skip(f"needs {tracker}")
    file = tmp_path / "metrics.jsonl"
    for content in (lines(1, 3), lines(1, 3), lines(1, 2), lines(1, 2) + lines(3, 5, run=0.75)):
        file.write_text(content)
        command = [sys.executable, str(SCRIPT), str(file), tracker, "--project", "p", "--once"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    expected = [(1, 2.5), (2, 3.5), (3, 4.5), (4, 5.75), (5, 6.75)]
    assert globals()[f"logged_by_{tracker}"](tmp_path) == expected
