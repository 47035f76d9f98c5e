"""Opening regular files only: no pipes and devices, from which a read may never end, and none that are too large."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_file(path: Path, buffering: int = -1, flags: int = 0) -> BinaryIO:
    """Open a regular file to read its bytes, with further flags of open(2). Raises OSError for anything else, at
    once."""
    # O_NONBLOCK: else opening a pipe waits for its writer.
    descriptor = os.open(path, flags | os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    return open(_regular(descriptor, path), "rb", buffering)


def open_own(path: str, flags: int, mode: int = 0o666) -> int:
    """Open a file that this process writes, as an opener of `open`. Raises OSError at once if there is anything else
    than a regular file: a link would lead to a file of others."""
    return _regular(os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, mode), path)


def _regular(descriptor: int, path: Path | str) -> int:
    """Return the descriptor of a regular file. Raises OSError for another."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    number, problem = (
        (errno.EISDIR, "Is a directory") if stat.S_ISDIR(mode) else (errno.EINVAL, "expected a regular file")
    )
    raise OSError(number, problem, str(path))


def read_file(path: Path, limit: int) -> bytes:
    """Return the content of a regular file. Raises OSError if it cannot be read, or has more bytes than the limit."""
    with open_file(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"expected at most {limit:,} bytes", str(path))
    return content
