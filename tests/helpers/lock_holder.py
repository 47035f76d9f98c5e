"""A process that locks a folder until it is killed: python -m tests.helpers.lock_holder FOLDER [MACHINE]."""

import sys
import time
from pathlib import Path

from titanlite.config.loader import ConfigError, print_problems
from titanlite.launch import folder_lock
from titanlite.launch.folder_lock import FolderLock

BEAT_SECONDS, PATIENCE = 0.02, 10


class Lock(FolderLock):
    """A lock that a body holds."""

    def __enter__(self) -> FolderLock:
        self.acquire()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def open_lock(folder: Path, **options) -> Lock:
    """Return a lock with a fast heartbeat."""
    defaults = {"name": "run.lock", "purpose": "the folder", "advice": "wait", "lost": print}
    return Lock(folder, **{**defaults, "beat_seconds": BEAT_SECONDS, "patience": PATIENCE, **options})


if __name__ == "__main__":
    if len(sys.argv) > 2:  # as if on another node
        folder_lock.machine = lambda: sys.argv[2]
    try:
        with open_lock(Path(sys.argv[1]), lost=lambda message: print(f"lost: {message}", flush=True)):
            print("locked", flush=True)
            time.sleep(60)
    except ConfigError as error:
        print_problems(error)
        sys.exit(2)
