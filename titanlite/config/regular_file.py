"""Functions that open regular files only, since a read from a pipe or a device may never end."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_file(path: Path, buffering: int = -1, flags: int = 0) -> BinaryIO:
    """Open a regular file to read bytes, with additional `flags` of open(2). Raises OSError at once for other files."""
    return open(_open(path, flags | os.O_RDONLY), "rb", buffering)


def open_own(path: str, flags: int, mode: int = 0o666) -> int:
    """An `opener` for `open`: opens a regular file for writing. Raises OSError for other files and symbolic links."""
    return _open(path, flags | os.O_NOFOLLOW, mode)


def _open(path: Path | str, flags: int, mode: int = 0o666) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)  # O_NONBLOCK: do not wait at a pipe
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return descriptor
    os.close(descriptor)
    number = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
    raise OSError(number, "Is a directory" if number == errno.EISDIR else "expected a regular file", str(path))


def read_file(path: Path, limit: int) -> bytes:
    """Return the content of a regular file. Raises OSError if the file is unreadable or has more bytes than `limit`."""
    with open_file(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"expected at most {limit:,} bytes", str(path))
    return content
