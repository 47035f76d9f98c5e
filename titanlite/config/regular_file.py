"""Opening regular files only: no pipes and devices, from which a read may never end, and none that are too large."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_file(path: Path, buffering: int = -1, flags: int = 0) -> BinaryIO:
    """Open a regular file to read its bytes, with further flags of open(2). Raises OSError for anything else, at
    once."""
    return open(_open(path, flags | os.O_RDONLY), "rb", buffering)


def open_own(path: str, flags: int, mode: int = 0o666) -> int:
    """Open a regular file that this process writes, as an opener of `open`. Raises OSError for anything else, at once,
    also for a link, which would lead to a file of others."""
    return _open(path, flags | os.O_NOFOLLOW, mode)


def _open(path: Path | str, flags: int, mode: int = 0o666) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)  # else opening a pipe waits for its writer
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return descriptor
    os.close(descriptor)
    number = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
    raise OSError(number, "Is a directory" if number == errno.EISDIR else "expected a regular file", str(path))


def read_file(path: Path, limit: int) -> bytes:
    """Return the content of a regular file. Raises OSError if it cannot be read, or has more bytes than the limit."""
    with open_file(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"expected at most {limit:,} bytes", str(path))
    return content
