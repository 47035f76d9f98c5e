"""The folder of a run's checkpoints. The name of a checkpoint tells its state, and a rename changes the state.

    step-100/               good: its weights have given a finite loss and gradient norm
    step-200.unconfirmed/   complete, but its weights have given no finite loss yet
    step-300.tmp/           being written, or left by a run that died; never read
    step-200.replaced/      complete, renamed while another checkpoint of the same step takes its name
    step-200.diverged/      its weights gave a loss or gradient norm that was not finite
    step-200.suspect/       saved after the last comparison in which replicas agreed
    step-200.damaged/       renamed by checkpoint.on_corrupt = "previous"

A resume reads the newest good or unconfirmed checkpoint. At any moment at which the process may be killed, the folder
has a complete checkpoint (good, unconfirmed or replaced) of the newest saved step. Only rank 0 changes the folder."""

import contextlib
import errno
import itertools
import os
import re
import shutil
import threading
from pathlib import Path

from titanlite.config.loader import ConfigError
from titanlite.files.durable import sync_folder

UNCONFIRMED, TEMPORARY, REPLACED = ".unconfirmed", ".tmp", ".replaced"
DIVERGED, SUSPECT, DAMAGED = ".diverged", ".suspect", ".damaged"
SET_ASIDE = {
    DIVERGED: "its weights gave a step that was not finite",
    SUSPECT: "it was saved after the last comparison of replicas that agreed",
    DAMAGED: "it is damaged",
}
"""The reason why a resume does not read a checkpoint that was set aside, by the suffix of the checkpoint's name."""


def state_of(path: Path) -> tuple[int, str] | None:
    """Return the step and the suffix of a checkpoint's folder, such as (200, ".unconfirmed"); the suffix of a good
    checkpoint is "". Return None for other names. A number after the suffix, such as 2 in .damaged2, is ignored."""
    match = re.fullmatch(r"step-(\d+)((?:\.[a-z]+)*)\d*", path.name, re.ASCII)
    return (int(match[1]), match[2]) if match else None


def why_not_read(path: Path) -> str:
    """Return why a checkpoint's folder is not read, for an error message; "" if the name does not tell why."""
    state = state_of(path)
    reason = SET_ASIDE.get(state[1], "it is not complete" if state[1].endswith(TEMPORARY) else "") if state else ""
    return f"; {reason}; rename it to step-{state[0]} to read it all the same" if reason and path.is_dir() else ""


def checkpoints(folder: Path, *suffixes: str) -> list[Path]:
    """Return the checkpoints in a folder whose names have one of the suffixes, sorted by step."""
    found = [(state_of(path), path) for path in folder.glob("step-*") if path.is_dir()]
    return [path for state, path in sorted((state, path) for state, path in found if state) if state[1] in suffixes]


def complete_steps(folder: Path) -> list[int]:
    return [state_of(path)[0] for path in checkpoints(folder, "")]


def _remove(path: Path) -> None:
    """Delete a folder. If it is a symbolic link, delete only the link, since its target does not belong to this run."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


class CheckpointFolder:
    """Renames and deletes checkpoints. Every method raises OSError if an operation on the disk fails, or if the folder
    or a checkpoint was replaced by a link to another folder since the run began."""

    def __init__(self, path: Path, keep_latest_k: int):
        self._path, self._place, self.keep_latest_k = path, os.path.realpath(path), keep_latest_k
        self._deleting: list[threading.Thread] = []

    @property
    def path(self) -> Path:
        if os.path.realpath(self._path) != self._place:
            raise OSError(errno.ELOOP, "leads to another folder since the run has begun", str(self._path))
        return self._path

    def recover(self) -> None:
        """Delete unfinished checkpoints of a killed run; finish its renames. Raises ConfigError if step-N is a file."""
        for path in self.path.glob("step-*"):
            if (state_of(path) or path.name.endswith(TEMPORARY)) and not path.is_dir():
                raise ConfigError([f"{path}: expected the folder of a checkpoint; move or remove this"])
        for path in checkpoints(self.path, REPLACED):
            step, _ = state_of(path)
            if any(self.named(step, suffix).exists() for suffix in ("", UNCONFIRMED)):
                _remove(path)
            else:
                path.rename(self.named(step, UNCONFIRMED))
        for path in self.path.glob(f"step-*{TEMPORARY}"):
            _remove(path)

    def named(self, step: int, suffix: str = "") -> Path:
        path = self.path / f"step-{step}{suffix}"
        if path.is_symlink():
            raise OSError(errno.ELOOP, "expected the folder of a checkpoint, not a link", str(path))
        return path

    def to_resume(self) -> list[str]:
        """Return the names of good and unconfirmed checkpoints, sorted by step; if a step has both, good comes last."""
        paths = checkpoints(self._path, "", UNCONFIRMED)
        return [path.name for path in sorted(paths, key=lambda path: (state_of(path)[0], path.suffix != UNCONFIRMED))]

    def create(self, step: int) -> Path:
        """Create the empty folder into which a checkpoint is written. Good checkpoints beyond the newest keep_latest_k
        are deleted first: after a full disk, a user may have lowered keep_latest_k to free space."""
        self._delete_oldest("")
        self.close()
        path = self.named(step, TEMPORARY)
        self.remove_unfinished(step)
        path.mkdir(parents=True)
        return path

    def remove_unfinished(self, step: int) -> None:
        with contextlib.suppress(OSError):
            shutil.rmtree(self.named(step, TEMPORARY))

    def publish(self, step: int) -> None:
        """Rename a complete checkpoint from .tmp to .unconfirmed. Keep the newest keep_latest_k unconfirmed ones."""
        self._rename(self.named(step, TEMPORARY), self.named(step, UNCONFIRMED))
        self._delete_oldest(UNCONFIRMED)

    def confirm(self, step: int) -> None:
        """Mark an unconfirmed checkpoint as good by a rename. Delete good ones beyond the newest keep_latest_k."""
        if (unconfirmed := self.named(step, UNCONFIRMED)).exists():  # `publish` may have deleted this checkpoint
            self._rename(unconfirmed, self.named(step))
            self._delete_oldest("")

    def set_aside(self, path: Path, suffix: str) -> str:
        """Rename a checkpoint so that later starts ignore it. Return the new name."""
        step, _ = state_of(path)
        names = (f"step-{step}{suffix}{number}" for number in itertools.chain([""], itertools.count(2)))
        target = next(path.with_name(name) for name in names if not path.with_name(name).exists())
        path.rename(target)
        sync_folder(self.path)
        return target.name

    def delete_set_aside(self, suffix: str) -> None:
        """Delete the checkpoints with this suffix that earlier failures have left, since many would fill the disk."""
        for path in checkpoints(self.path, suffix):
            self._delete(path)

    def close(self) -> None:
        """Wait for deletions in the background, for at most 10 seconds each. The next start deletes what remains."""
        for thread in self._deleting:
            thread.join(timeout=10)

    def _rename(self, source: Path, target: Path) -> None:
        """Rename a checkpoint to `target`. An existing `target` is renamed to .replaced first, and deleted last."""
        replaced = self.named(state_of(target)[0], REPLACED)
        if target.exists():
            target.rename(replaced)
        source.rename(target)
        sync_folder(self.path)  # wait until the new name is on the disk
        if replaced.exists():
            self._delete(replaced)

    def _delete_oldest(self, suffix: str) -> None:
        for path in checkpoints(self.path, suffix)[: -self.keep_latest_k] if self.keep_latest_k else []:
            self._delete(path)

    def _delete(self, path: Path) -> None:
        """Rename a checkpoint to NAME.old.tmp, which is never read, and delete its files in the background."""
        renamed = path.rename(path.with_name(f"{path.name}.old{TEMPORARY}"))
        thread = threading.Thread(target=_remove, args=(renamed,), name="delete checkpoint")
        thread.start()
        self._deleting = [other for other in self._deleting if other.is_alive()] + [thread]
