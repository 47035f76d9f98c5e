"""Chaos: runs that are killed, stopped and damaged end as they should, resume, and keep their curve bitwise."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from verification.chaos import runner
from verification.chaos.faults import FAULTS, restore, tear, unmount
from verification.chaos.moments import MOMENTS
from verification.chaos.run import CURVE, MANY_RANKS, TWO_RANKS, curve
from verification.chaos.runner import Campaign, final_problems, table

BY_DAY = [
    ("checkpoint write", "SIGKILL to all"),
    ("imports", "SIGTERM to the launcher"),
    ("step", "torn checkpoint"),
]
FAULTS_BY_NIGHT = 60
OF_MANY_RANKS = [
    ("step", "SIGKILL to a rank"),
    ("checkpoint write", "SIGSTOP to a rank"),
    ("step", "SIGTERM to the launcher"),
]


@pytest.fixture
def campaign(tmp_path: Path) -> Iterator[Campaign]:
    yield Campaign(tmp_path, seed=0)
    for folder in tmp_path.glob("folder-*"):
        unmount(folder)


def assert_no_problems(campaign: Campaign) -> None:
    found = [(record.moment, record.fault, record.problems) for record in campaign.records if record.problems]
    assert not found, table(campaign.records)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_aimed_faults(campaign):
    for moment, fault in BY_DAY:
        campaign.round(moment, fault)
    campaign.complete()
    assert_no_problems(campaign)
    outcomes = [record.outcome for record in campaign.records]
    assert "ended before the fault" not in outcomes
    assert outcomes[-1] == "completed"


@pytest.mark.nightly
@pytest.mark.timeout(3 * 3600)
def test_many_faults(campaign):
    while sum(bool(record.seconds) for record in campaign.records) < FAULTS_BY_NIGHT:
        campaign.any_round()
    campaign.complete()
    assert_no_problems(campaign)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_64_ranks(tmp_path):
    campaign = Campaign(tmp_path, seed=0, scale=MANY_RANKS)
    try:
        for moment, fault in OF_MANY_RANKS:
            campaign.round(moment, fault)
        campaign.complete()
    finally:
        for folder in tmp_path.glob("folder-*"):
            unmount(folder)
    assert_no_problems(campaign)
    assert [record.outcome for record in campaign.records][-1] == "completed"


def test_each_fault_names_moments_that_exist():
    assert not [moment for fault in FAULTS.values() for moment in fault.moments if moment not in MOMENTS]


# The checks can fail --------------------------------------------------------------------------------------------------


@pytest.fixture
def completed(tmp_path: Path) -> Path:
    """A folder with three steps, as a completed run leaves it."""
    (tmp_path / "run" / "checkpoint" / "step-3").mkdir(parents=True)
    write_rows(tmp_path, [1.0, 2.0, 3.0])
    return tmp_path


def write_rows(folder: Path, losses: list[float]) -> None:
    lines = [json.dumps({"step": step, **dict.fromkeys(CURVE, loss)}) for step, loss in enumerate(losses, start=1)]
    (folder / "run" / "metrics.jsonl").write_text("\n".join(lines))


def test_another_curve_is_found(completed):
    expected = curve(completed)
    assert final_problems(completed, expected) == []
    write_rows(completed, [1.0, 2.0 + 2**-51, 3.0])
    assert final_problems(completed, expected) == ["the curve differs from step 2 on, in 1 steps"]
    write_rows(completed, [1.0, 2.0])
    assert final_problems(completed, expected) == ["the curve differs from step 3 on, in 1 steps"]
    (completed / "lost_rows").write_text("3\n")
    assert final_problems(completed, expected) == [], "the row was torn by the test itself"


@pytest.mark.parametrize("name", ["run/checkpoint/step-2.tmp", "run/checkpoint/step-3.unconfirmed", "run/run.lock"])
def test_what_is_left_is_found(completed, name):
    (completed / name).mkdir()
    (problem,) = final_problems(completed, curve(completed))
    assert Path(name).name in problem


@pytest.mark.parametrize(("step", "problems"), [(12, []), (30, ["21 steps were taken after the signal"])])
def test_a_stop_that_is_ignored_is_found(tmp_path, step, problems):
    run = mock.MagicMock(folder=tmp_path, scale=TWO_RANKS)
    run.launcher.returncode = 0
    run.step.return_value, run.resumed_after.return_value, run.new_temporary_files.return_value = step, 9, []
    record = runner.Round(1, "imports", "SIGINT twice", "async")
    with mock.patch.object(runner, "saved_steps", return_value=[step]), mock.patch.object(runner, "rows"):
        runner.Campaign.check_end(mock.Mock(), run, record, FAULTS[record.fault], 0.0)
    assert record.problems == problems


@pytest.mark.parametrize("seed", range(4))
def test_a_torn_file_differs_and_is_restored(tmp_path, seed):
    file = tmp_path / "file"
    file.write_bytes(content := bytes(range(256)))
    tear(file, random.Random(seed))
    assert file.read_bytes() != content
    restore(tmp_path)
    assert file.read_bytes() == content
    assert list(tmp_path.iterdir()) == [file]
