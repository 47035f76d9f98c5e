"""Checkpoints when something goes wrong: a diverged run, a kill at any rename, a full disk, an error during a save."""

import errno
import itertools
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.helpers.cases import cases
from tests.helpers.checkpoint import write_checkpoint
from tests.test_train import computed, error_message, folder, read_metrics, run_train, runs  # noqa: F401
from titanlite import optimizer
from titanlite.checkpoint import checkpointer
from titanlite.checkpoint import ranks as waiting
from titanlite.checkpoint.checkpointer import Checkpointer
from titanlite.checkpoint.folder import CheckpointFolder, state_of
from titanlite.checkpoint.initial_weights import step_folders
from titanlite.config import ConfigError
from titanlite.config.errors import TrainingError
from titanlite.launch.cli import run_command
from titanlite.tools.generate.folder import open_folder

SAVE = "time_metrics/checkpoint(s)"


def names(root: Path) -> set[str]:
    return {path.name for path in (root / "run" / "checkpoint").iterdir()}


# Kills ---------------------------------------------------------------------------------------------------------------

# A process that dies at its k-th rename, before or after it, while the checkpoint of step 2 gets its name.
KILLED = """
import os, sys
from pathlib import Path
from titanlite.checkpoint.folder import CheckpointFolder
scenario, moment, k = sys.argv[1], sys.argv[2], int(sys.argv[3])
rename, calls = os.rename, []
def dying(*arguments, **keywords):
    calls.append(arguments)
    if len(calls) == k and moment == "before":
        os._exit(9)
    rename(*arguments, **keywords)
    if len(calls) == k:
        os._exit(9)
os.rename = dying
folder = CheckpointFolder(Path("."), keep_latest_k=1)
if scenario == "confirmed":
    folder.publish(2)
    folder.confirm(2)
elif scenario == "aside":
    folder.publish(2)
    folder.set_aside(folder.named(2, ".unconfirmed"), ".diverged")
else:
    folder.publish(2)
folder.close()
"""
SCENARIOS = {
    "new": ("published", ("step-1", "step-2.tmp"), {"step-1", "step-2.unconfirmed"}),
    "confirmed": ("confirmed", ("step-1", "step-2.tmp"), {"step-2"}),
    "good one replaced": ("confirmed", ("step-1", "step-2", "step-2.tmp"), {"step-2"}),
    "unconfirmed one replaced": (
        "published",
        ("step-1", "step-2.unconfirmed", "step-2.tmp"),
        {"step-1", "step-2.unconfirmed"},
    ),
    "diverged": ("aside", ("step-1", "step-2.tmp"), {"step-1", "step-2.diverged"}),
}


@cases("case", SCENARIOS, always=["new"])
def test_a_kill_at_any_rename_leaves_a_complete_checkpoint(tmp_path: Path, case: str):
    """After each, what is found is complete (it has a manifest), and of step 2 if there was one of step 2 before."""
    scenario, before, after = SCENARIOS[case]
    had_step_2 = any(name in before for name in ("step-2", "step-2.unconfirmed"))
    for moment in ("before", "after"):
        for k in itertools.count(1):
            place = tmp_path / moment / str(k)
            for name in before:
                (place / name).mkdir(parents=True)
                (place / name / "manifest.json").touch()
            done = subprocess.run([sys.executable, "-c", KILLED, scenario, moment, str(k)], cwd=place)
            found = CheckpointFolder(place, keep_latest_k=1)
            found.recover()
            newest = found.to_resume()[-1]
            left = {path.name for path in place.iterdir()}
            assert (place / newest / "manifest.json").exists()
            assert not had_step_2 or state_of(Path(newest))[0] == 2, f"step 2 is lost {moment} rename {k}"
            assert not any(name.endswith((".tmp", ".replaced")) for name in left)
            if done.returncode == 0:
                assert k > 1, "nothing was renamed"
                assert left == after
                break
            assert done.returncode == 9


# Divergence ----------------------------------------------------------------------------------------------------------

WRECKING = [
    "--checkpoint.enable",
    "--checkpoint.interval=1",
    "--checkpoint.keep_latest_k=1",
    "--optimizer.weight_decay=0",
]


def train_wrecked(argv: list[str], at_step: int) -> str:
    """Train as run_train, with a learning rate of 1e30 in one step."""
    real = optimizer.lr_factor

    def lr_factor(step: int, options: Any) -> float:
        return real(step, options) * (1e32 if step == at_step else 1)

    with mock.patch.object(optimizer, "lr_factor", lr_factor):
        return run_train(argv)


@pytest.mark.nightly
@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_the_step_that_wrecks_the_weights_is_never_good(runs, folder, async_mode):  # noqa: F811
    argv = [str(folder / "small.toml"), f"--job.dump_folder={folder / 'run'}", *WRECKING]
    argv.append(f"--checkpoint.async_mode={async_mode}")
    for _ in range(2):  # the second start resumes from step 3, and ends in the same way
        (message,) = set(runs.ranks(2).run(train_wrecked, argv=argv, at_step=4))
        assert message.startswith("step 5: the loss is nan because of rank ")
        for words in (
            "; step-4 is now step-4.diverged: its weights gave a step that was not finite; ",
            "; the newest good checkpoint is step-3, and the next start resumes from step-3; to get past this step, ",
        ):
            assert words in message
        assert names(folder) == {"step-3", "step-4.diverged"}
    undisturbed = runs(2, "undisturbed", *WRECKING)
    assert computed(runs(2, "run", *WRECKING)) == computed(undisturbed)
    assert names(folder) == {"step-6", "step-4.diverged"}


def test_the_last_steps_weights_are_checked(runs, folder):  # noqa: F811
    """There is no next step: the loss of the next batches decides, and no state of the data moves."""
    argv = [str(folder / "small.toml"), f"--job.dump_folder={folder / 'run'}", *WRECKING, "--training.steps=4"]
    (message,) = set(runs.ranks(2).run(train_wrecked, argv=argv, at_step=4))
    assert message.startswith("the loss is nan with the weights of the last step, 4; step-4 is now step-4.diverged")
    assert names(folder) == {"step-3", "step-4.diverged"}
    runs(2, "run", *WRECKING, "--training.steps=4")
    assert names(folder) == {"step-4", "step-4.diverged"}
    assert '"next_sequence": 32' in (folder / "run" / "checkpoint" / "step-4" / "state.json").read_text()


@pytest.mark.nightly
def test_without_a_good_checkpoint_the_message_says_so(runs, folder):  # noqa: F811
    message = error_message(runs, 1, "run", *WRECKING, "--optimizer.lr=1e30", "--lr_scheduler.warmup_steps=0")
    assert "step-1 is now step-1.diverged" in message
    assert "there is no good checkpoint, and the next start begins anew" in message
    assert names(folder) == {"step-1.diverged"}


def train_until_saved(argv: list[str], step: int) -> None:
    """Train until a step is saved, and end there as a killed run does: nothing after it happens."""
    save = Checkpointer.save

    def killed(self: Checkpointer, *arguments: Any, **options: Any) -> None:
        save(self, *arguments, **options)
        if arguments[0] == step:
            raise KeyboardInterrupt

    try:
        with mock.patch.object(Checkpointer, "save", killed):
            run_train(argv)
    except KeyboardInterrupt:
        return


def test_a_run_killed_before_the_next_step_loses_nothing(runs, folder):  # noqa: F811
    """It resumes from the unconfirmed checkpoint, and keep_latest_k leaves the good one before it until then."""
    undisturbed = runs(1, "undisturbed", *WRECKING)
    argv = [str(folder / "small.toml"), f"--job.dump_folder={folder / 'run'}", *WRECKING]
    runs.ranks(1).run(train_until_saved, argv=argv, step=4)
    assert names(folder) == {"step-3", "step-4.unconfirmed"}
    resumed = runs(1, "run", *WRECKING)
    assert computed(resumed) == computed(undisturbed)
    assert names(folder) == {"step-6"}


def test_a_run_killed_after_its_last_save_is_confirmed_by_the_next_start(runs, folder):  # noqa: F811
    argv = [str(folder / "small.toml"), f"--job.dump_folder={folder / 'run'}", *WRECKING]
    runs.ranks(1).run(train_until_saved, argv=argv, step=6)
    assert names(folder) == {"step-5", "step-6.unconfirmed"}
    runs(1, "run", *WRECKING)
    assert names(folder) == {"step-6"}


def test_commands_read_what_is_good_or_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    place = tmp_path / "checkpoint"
    write_checkpoint(place / "step-7.unconfirmed")
    assert run_command("checkpoint", [str(tmp_path)]) == 0
    assert "step 7, unconfirmed: its weights have given no finite step yet, 2,662," in capsys.readouterr().out
    message = f"; {place}/step-7.unconfirmed, whose weights have given no finite step yet, is read if it is named"
    for read in (step_folders, open_folder):
        with pytest.raises(ConfigError) as error:
            read(tmp_path)
        assert message in str(error.value)
    assert step_folders(place / "step-7.unconfirmed") == [place / "step-7.unconfirmed"]
    (place / "step-7.unconfirmed").rename(place / "step-7.diverged")
    write_checkpoint(place / "step-5", step=5)
    assert run_command("checkpoint", [str(tmp_path)]) == 0
    reason = "its weights gave a step that was not finite"
    assert capsys.readouterr().out.splitlines()[1] == f"{place}/step-7.diverged: not read: {reason}"
    assert run_command("checkpoint", [str(place / "step-7.diverged")]) == 2
    assert f"; {reason}; rename it to step-7 to read it all the same" in capsys.readouterr().err


# Disks ---------------------------------------------------------------------------------------------------------------


def train_on_a_full_disk(argv: list[str], full: tuple[int, ...]) -> tuple[str, list[str]]:
    """Train as run_train, where rank 1 cannot write its file of some saves, counted from 1. Return the lines that the
    checkpointer prints too."""
    write_file, calls, lines = checkpointer.write_file, itertools.count(1), []

    def write(path: Path, slices: Any) -> Any:
        stored = write_file(path, slices)
        if os.environ["RANK"] == "1" and next(calls) in full:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return stored

    watch = mock.patch.object(checkpointer, "print", lambda line, **keywords: lines.append(line), create=True)
    with watch, mock.patch.object(checkpointer, "write_file", write):
        return run_train(argv), lines


@pytest.mark.parametrize("async_mode", [pytest.param("disabled", marks=pytest.mark.nightly), "async"])
def test_training_continues_to_the_next_save(runs, folder, async_mode):  # noqa: F811
    arguments = ["--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.on_error=continue"]
    arguments.append(f"--checkpoint.async_mode={async_mode}")
    argv = [str(folder / "small.toml"), f"--job.dump_folder={folder / 'run'}", *arguments]
    (message, (line,)), other = runs.ranks(2).run(train_on_a_full_disk, argv=argv, full=(2,))
    assert (message, other) == ("", ("", []))
    assert names(folder) == {"step-2", "step-6"}
    assert "/step-4 could not be saved: [Errno 28] No space left on device: '" in line
    assert line.endswith('; the training continues (checkpoint.on_error = "continue")')
    assert len(read_metrics(folder / "run")) == 6


def test_the_last_save_always_fails(runs, folder):  # noqa: F811
    arguments = ["--checkpoint.enable", "--checkpoint.on_error=continue"]
    argv = [str(folder / "small.toml"), f"--job.dump_folder={folder / 'run'}", *arguments]
    (message, _), (same, _) = runs.ranks(2).run(train_on_a_full_disk, argv=argv, full=(2,))
    assert message == same
    assert "/step-6 could not be saved: [Errno 28] No space left on device: '" in message
    assert names(folder) == {"step-3"}


# Asynchronous saves and slow ranks -----------------------------------------------------------------------------------


def train_with_a_slow_disk(argv: list[str], fails_alone: bool) -> str:
    """Train as run_train, where rank 1 needs half a second for its file. The run ends by an error in the step after the
    save, on rank 1 alone or on both."""
    write_file, rank = checkpointer.write_file, int(os.environ["RANK"])

    def write(path: Path, slices: Any) -> Any:
        time.sleep(rank / 2)
        return write_file(path, slices)

    def fail(*arguments: Any) -> float:
        raise ValueError("a bug") if rank == 1 or not fails_alone else KeyboardInterrupt

    real = optimizer.lr_factor
    watch = mock.patch.object(
        optimizer, "lr_factor", lambda step, options: fail() if step == 4 else real(step, options)
    )
    with watch, mock.patch.object(checkpointer, "write_file", write):
        try:
            return run_train(argv)
        except ValueError as error:
            return str(error)
        except KeyboardInterrupt:  # as a rank that waits in a collective: it does nothing until it is killed
            time.sleep(1)
            return "killed"


@pytest.mark.parametrize("fails_alone", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_save_in_flight_is_finished_when_the_run_ends_by_an_error(runs, folder, fails_alone):  # noqa: F811
    argv = [str(folder / "small.toml"), f"--job.dump_folder={folder / 'run'}", "--checkpoint.enable"]
    argv.append("--checkpoint.async_mode=async")
    messages = runs.ranks(2).run(train_with_a_slow_disk, argv=argv, fails_alone=fails_alone)
    assert messages == ["killed" if fails_alone else "a bug", "a bug"]
    assert names(folder) == {"step-3.unconfirmed"}


def wait_for_a_slow_rank(seconds: float, progress: bool) -> str:
    """Rank 1 needs `seconds` for its file, more than the timeouts."""
    rank, done, begin = dist.get_rank(), itertools.count(), time.monotonic()

    def work() -> int:
        time.sleep(seconds if rank else 0)
        return rank

    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
    try:
        with mock.patch.object(waiting, "INTERVAL_SECONDS", 0.1):
            n_done = (lambda: next(done)) if progress else (lambda: 7)
            result = waiting.with_all_ranks(work, n_done, "writing FILE", group=group, timeout=0.5)
    except TrainingError as error:
        return str(error)
    except RuntimeError:
        return "rank 1 does not answer"
    assert result == rank
    assert time.monotonic() - begin >= seconds
    return ""


@pytest.mark.nightly
def test_a_slow_rank_is_not_dead_and_a_stalled_one_is_named(ranks):
    assert ranks(2).run(wait_for_a_slow_rank, seconds=2.5, progress=True) == ["", ""]
    lines = ranks(2).run(wait_for_a_slow_rank, seconds=2.5, progress=False)
    problem = "rank 1: writing FILE: not a byte in 0.5 seconds; does the disk or the network folder answer?"
    assert lines == ["rank 1 does not answer", problem]


def test_the_time_of_saves_is_in_the_metrics(runs, folder):  # noqa: F811
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps = runs(1, "run", "--checkpoint.enable", "--checkpoint.interval=2")
    saved = [values["step"] for values in steps if values[SAVE] > 1e-3]
    assert saved == [3, 5], "a save is logged with the step after it"
    events = EventAccumulator(str(folder / "run" / "tb")).Reload()
    assert [event.step for event in events.Scalars(SAVE)] == [1, 2, 3, 4, 5, 6]
