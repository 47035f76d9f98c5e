"""Files to which a run appends lines or events. Training continues if an append fails, as on a full disk."""

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

from titanlite.config.regular_file import open_own


def report(what: str, error: OSError, consequence: str) -> None:
    print(f"warning: {what} could not be written: {error.strerror or error}; {consequence}", file=sys.stderr)


def row_of(line: bytes) -> dict[str, Any] | None:
    """Return the values in a line of metrics.jsonl, among them the step; None if the line is damaged."""
    try:
        row = json.loads(line)
        return row if type(row["step"]) is int else None
    except (ValueError, RecursionError, TypeError, LookupError):
        return None


class AppendedFile:
    """Appends records to a file. Records that cannot be written stay in memory, and are written with a later record.
    The first failure and the next success each print a line."""

    def __init__(self, path: Path):
        self.path, self._pending, self._failed, self._place = path, b"", False, os.path.realpath(path.parent)
        self._size: int | None = None  # bytes of the file before the first failed write

    def append(self, record: bytes) -> None:
        """Write all records that could not be written before, then this record."""
        self._pending += record
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if os.path.realpath(self.path.parent) != self._place:  # a link has replaced the folder
                raise OSError(errno.ELOOP, "its folder is another one since the run has begun")
            with open(self.path, "ab", buffering=0, opener=open_own) as file:
                size = file.seek(0, os.SEEK_END)
                if self._size is None:
                    self._size = size
                elif size > self._size:  # a failed write has left part of a record: remove the part
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
        """Try once more to write the records that are still in memory. Print a line if records are lost."""
        if self._failed:
            self.append(b"")
        if self._failed:
            print(f"warning: the last {len(self._pending):,} bytes of {self.path} are lost", file=sys.stderr)
