"""The folders that a run writes, which are checked before the model is built, and locked against other runs."""

import os
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from titanlite.config.loader import ConfigError, show
from titanlite.config.schema import Checkpoint, Job, Metrics, Profiling
from titanlite.launch.folder_lock import FolderLock
from titanlite.launch.process import at_exit


def folders_of_run(job: Job, checkpoint: Checkpoint, metrics: Metrics, profiling: Profiling) -> dict[str, Path]:
    """Return the folders that a run writes, by option, except the token cache, which data/token_cache.py checks."""
    traces, snapshots = profiling.save_traces_folder, profiling.save_memory_snapshot_folder
    folders = {
        "job.dump_folder": (True, ""),
        "checkpoint.folder": (checkpoint.enable, checkpoint.folder),
        "metrics.save_tb_folder": (metrics.enable_tensorboard and metrics.save_tb_folder, metrics.save_tb_folder),
        "profiling.save_traces_folder": (profiling.enable_profiling, traces),
        "profiling.save_memory_snapshot_folder": (profiling.enable_memory_snapshot, snapshots),
    }
    return {option: Path(job.dump_folder) / folder for option, (enabled, folder) in folders.items() if enabled}


def check_writable(folders: Mapping[str, Path]) -> None:
    """Create each folder and a temporary file in it. Raises ConfigError with a line for each folder that cannot be
    written, and for each metrics.jsonl or config.toml that is no regular file."""
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
            continue
        files = [folder / name for name in ("metrics.jsonl", "config.toml")]
        odd = [file for file in files if os.path.lexists(file) and (file.is_symlink() or not file.is_file())]
        problems += [f"{file}: expected a regular file, or none; move or remove this" for file in odd]
    if problems:
        raise ConfigError(problems)


def lock_run(folders: Mapping[str, Path], job: Job, lost: Callable[[str], None]) -> None:
    """Lock each folder against other runs until this process ends. Raises ConfigError if another run holds a lock. If
    another run takes over a lock later, `lost` is called, which must make this run stop writing."""
    options = {folder.resolve(): option for option, folder in reversed(folders.items())}  # a folder's first option wins
    locks = []
    for option in reversed(options.values()):
        purpose = f"{option} = {show(str(folders[option]))}"
        advice = f"wait for that run or stop it, or choose another {option}"
        locks.append(FolderLock(folders[option], "run.lock", purpose, advice, lost, job.take_over_lock))
    at_exit.extend(lock.release for lock in locks)
    with ThreadPoolExecutor(len(locks)) as pool:  # acquiring a lock may wait for heartbeats
        list(pool.map(FolderLock.acquire, locks))
