"""Create folders that get their final name only when all of their content is on the disk."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from titanlite.config.loader import ConfigError
from titanlite.files.durable import sync_folder


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder whose name ends with .tmp. After the body, rename the folder to `path`; remove the folder if
    the body raises. Raises ConfigError if `path` or an earlier command's `path`.tmp exists."""
    unfinished = path.with_name(f"{path.name}.tmp")
    for each, advice in ((path, "choose another folder"), (unfinished, "left by a command that was ended; delete it")):
        if os.path.lexists(each):
            raise ConfigError([f"{each}: exists; {advice}"])
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        sync_folder(unfinished)
        unfinished.rename(path)
        sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
