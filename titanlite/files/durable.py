"""Files that must survive a crash, JSON records that are checked before they are trusted, and checksums."""

import errno
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import xxhash
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from titanlite.config.errors import TrainingError
from titanlite.config.loader import ConfigError, printable
from titanlite.config.regular_file import open_own

Int63 = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""A count, a size or an index in a record: an integer from 0 to the largest int64."""
Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class Record(BaseModel):
    """The content of a JSON file, or a part of it. It converts no type and takes no unknown key."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


_Record = TypeVar("_Record", bound=BaseModel)


def parse(record: type[_Record], content: dict[str, Any], what: str) -> _Record:
    """Return a JSON object's content as a record. Raises ConfigError with the first problem; `what` names it."""
    try:
        return record.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise ConfigError([f"{what}: {first_problem(error)}"]) from None


def parse_part(state: Mapping[str, Any], place: str, kind: Any) -> Any:
    """Return what an owner has at a place of a checkpoint's state.json, as "data.mixture"; `state` is the object around
    it. Raises ConfigError with the first problem if it is not of a kind: a Record, or another type."""
    try:
        return TypeAdapter(kind).validate_json(json.dumps(state.get(place.rpartition(".")[2])), strict=True)
    except ValidationError as error:
        raise ConfigError([f"checkpoint: state.json: {first_problem(error, place)}"]) from None


def first_problem(error: ValidationError, *around: str) -> str:
    """Return the place of the first problem, as `files.state.bytes`, and what is wrong there. `around`: keys of it."""
    first = error.errors()[0]
    return printable(": ".join(filter(None, (".".join(map(str, (*around, *first["loc"]))), first["msg"]))))


def checksum(data: bytes | memoryview) -> str:
    """Return the 64-bit XXH3 hash of bytes, in hexadecimal. It finds damage, but not an attacker's changes."""
    return xxhash.xxh3_64_hexdigest(data)


_NAMES = "ENOENT EACCES EPERM EISDIR ENOTDIR ELOOP ENAMETOOLONG EINVAL EFBIG ENXIO"
LASTING = [getattr(errno, name) for name in _NAMES.split()]
"""Errors of files that are missing, forbidden, misnamed or, by titanlite.config.regular_file, of another kind."""


def is_transient(error: BaseException) -> bool:
    """Return whether an error is of the disk or the network, so that another start may succeed. A file that is missing,
    forbidden or damaged remains so; what libraries raise for damaged files has no error number."""
    failed = isinstance(error, OSError) and error.errno is not None
    return (failed and error.errno not in LASTING) or isinstance(error, (ConnectionError, TimeoutError))


def cannot_read(what: str, error: OSError) -> Exception:
    """Return the error for a file that cannot be read: a TrainingError if the cause may pass, else a ConfigError."""
    problem = f"{what}: cannot be read: {error.strerror or error}"
    return TrainingError(problem) if is_transient(error) else ConfigError([problem])


def sync(file: BinaryIO) -> None:
    """Wait until what was written to a file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until what was created or renamed in a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file, and wait until it is on the disk. A new file has this mode, less the umask."""
    with open(path, "wb", opener=lambda name, flags: open_own(name, flags, mode)) as file:
        file.write(data)
        sync(file)


def replace_file(path: Path, data: bytes, *, by_one: bool = True) -> None:
    """Replace a file as a whole: after a crash, or on a full disk, it has the old content or the new. Raises OSError,
    and leaves the old content, if the new cannot be written.

    `by_one`: only one process may do so at a time, and a temporary file that it left when it was killed is overwritten.
    Otherwise several processes may, and only this user may write the file that results.
    """
    replacement = path.with_name(f"{path.name}.tmp" if by_one else f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        write_synced(replacement, data, 0o666 if by_one else 0o644)
        replacement.replace(path)
    except OSError:
        replacement.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
