"""Files that a run appends to. An error of such a file does not stop the run: on a full disk, training continues."""

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

from titanlite.config.regular_file import open_own


def report(what: str, error: OSError, consequence: str) -> None:
    """Print one line about a file that could not be written."""
    print(f"warning: {what} could not be written: {error.strerror or error}; {consequence}", file=sys.stderr)


def row_of(line: bytes) -> dict[str, Any] | None:
    """Return the values of a line of metrics.jsonl, with its step; None if the line is damaged."""
    try:
        row = json.loads(line)
        return row if type(row["step"]) is int else None
    except (ValueError, RecursionError, TypeError, LookupError):
        return None


class AppendedFile:
    """Appends records to a file. Records that cannot be written are kept in memory, and tried again with the next one.
    One line is printed when that begins, and one when it ends."""

    def __init__(self, path: Path):
        self.path, self._pending, self._failed, self._place = path, b"", False, os.path.realpath(path.parent)
        self._size: int | None = None  # bytes of the file before a write that failed

    def append(self, record: bytes) -> None:
        """Write a record, after those that could not be written before."""
        self._pending += record
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if os.path.realpath(self.path.parent) != self._place:  # the folder was replaced by a link
                raise OSError(errno.ELOOP, "its folder is another one since the run has begun")
            with open(self.path, "ab", buffering=0, opener=open_own) as file:
                size = file.seek(0, os.SEEK_END)
                if self._size is None:
                    self._size = size
                elif size > self._size:  # part of a record was written; records after it would be unreadable
                    file.truncate(self._size)
                rest = memoryview(self._pending)
                while rest:
                    rest = rest[file.write(rest) :]
        except OSError as error:
            if not self._failed:
                report(str(self.path), error, "it is kept in memory and tried again with what is logged next")
            self._failed = True
            return
        if self._failed:
            print(f"{self.path} is written again, with all that was kept", file=sys.stderr, flush=True)
        self._pending, self._failed, self._size = b"", False, None

    def close(self) -> None:
        """Try once more to write what is left, and print a line if it is lost."""
        if self._failed:
            self.append(b"")
        if self._failed:
            print(f"warning: the last {len(self._pending):,} bytes of {self.path} are lost", file=sys.stderr)
