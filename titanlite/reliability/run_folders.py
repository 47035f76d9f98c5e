"""The folders that a run writes: they are checked before the model is built, and one run at a time has them."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from titanlite.config.loader import ConfigError, show
from titanlite.config.schema import Checkpoint, Job, Metrics
from titanlite.reliability.folder_lock import FolderLock
from titanlite.reliability.process import at_exit


def folders_of_run(job: Job, checkpoint: Checkpoint, metrics: Metrics) -> dict[str, Path]:
    """Return the folders that a run writes, by the options that name them. The token cache's is not among them: a
    complete cache need not be written, and data.token_cache rejects the folder before it tokenizes."""
    dump_folder = Path(job.dump_folder)
    folders = {"job.dump_folder": dump_folder}
    if checkpoint.enable:
        folders["checkpoint.folder"] = dump_folder / checkpoint.folder
    if metrics.enable_tensorboard and metrics.save_tb_folder:
        folders["metrics.save_tb_folder"] = dump_folder / metrics.save_tb_folder
    return folders


def check_writable(folders: Mapping[str, Path]) -> None:
    """Create each folder, by the option that names it, and a small temporary file in it. Raises ConfigError with a line
    for each folder where that fails, as on a full disk."""
    problems = []
    for option, folder in folders.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".writable-") as file:
                file.write(bytes(4096))
                file.flush()
        except OSError as error:
            reason = f"cannot be written: {error.strerror}; mend that, or choose another folder"
            problems.append(f"{option} = {show(str(folder))}: {reason}")
    if problems:
        raise ConfigError(problems)


def lock_run(job: Job, lost: Callable[[str], None]) -> None:
    """Keep other runs out of job.dump_folder until this process ends. `lost` is called with a message if another run
    takes the folder over; this one must then write nothing more. Raises ConfigError if another run has the folder."""
    lock = FolderLock(
        Path(job.dump_folder),
        name="run.lock",
        purpose=f"job.dump_folder = {show(job.dump_folder)}",
        advice="wait for that run or stop it, or choose another job.dump_folder",
        lost=lost,
        take_over=job.take_over_lock,
    )
    lock.acquire()
    at_exit.append(lock.release)
