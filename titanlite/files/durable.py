"""Write files that survive a crash, parse JSON into records of checked types, and compute checksums."""

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
    """The content of a JSON object. Parsing converts no types, and rejects unknown keys."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


_Record = TypeVar("_Record", bound=BaseModel)


def parse(record: type[_Record], content: dict[str, Any], what: str) -> _Record:
    """Return a JSON object as a record. Raises ConfigError with the first problem of the file `what`."""
    try:
        return record.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise ConfigError([f"{what}: {first_problem(error)}"]) from None


def parse_part(state: Mapping[str, Any], place: str, kind: Any) -> Any:
    """Return the value at `place` in a checkpoint's state.json, such as "data.mixture"; `state` is the object that
    contains the value. Raises ConfigError with the first problem if the value is not of type `kind`."""
    try:
        return TypeAdapter(kind).validate_json(json.dumps(state.get(place.rpartition(".")[2])), strict=True)
    except ValidationError as error:
        raise ConfigError([f"checkpoint: state.json: {first_problem(error, place)}"]) from None


def first_problem(error: ValidationError, *around: str) -> str:
    """Return the first problem as `key.key: message`; the path of keys begins with the keys `around`."""
    first = error.errors()[0]
    return printable(": ".join(filter(None, (".".join(map(str, (*around, *first["loc"]))), first["msg"]))))


def checksum(data: bytes | memoryview) -> str:
    """Return the 64-bit XXH3 hash of bytes, in hexadecimal. The hash detects damage, but not an attacker's changes."""
    return xxhash.xxh3_64_hexdigest(data)


_NAMES = "ENOENT EACCES EPERM EISDIR ENOTDIR ELOOP ENAMETOOLONG EINVAL EFBIG ENXIO"
LASTING = [getattr(errno, name) for name in _NAMES.split()]
"""Error numbers that a new start cannot avoid: a file is missing, forbidden, misnamed, too large or not regular."""


def is_transient(error: BaseException) -> bool:
    """Return whether the disk or the network caused an error, so that another start may succeed. An OSError without
    errno does not count: a library raised it for a damaged file."""
    failed = isinstance(error, OSError) and error.errno is not None
    return (failed and error.errno not in LASTING) or isinstance(error, (ConnectionError, TimeoutError))


def cannot_read(what: str, error: OSError) -> Exception:
    """Return the error to raise for a file that cannot be read: TrainingError if transient, otherwise ConfigError."""
    problem = f"{what}: cannot be read: {error.strerror or error}"
    return TrainingError(problem) if is_transient(error) else ConfigError([problem])


def sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names of files that were created or renamed in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file, and wait until its data is on the disk. A new file gets the permissions `mode`, less the umask."""
    with open(path, "wb", opener=lambda name, flags: open_own(name, flags, mode)) as file:
        file.write(data)
        sync(file)


def replace_file(path: Path, data: bytes, *, by_one: bool = True) -> None:
    """Replace a file atomically: after a crash, the file has the old content or the new. Raises OSError if the new
    content cannot be written. `by_one`: only one process at a time replaces the file, and a killed process's temporary
    file is overwritten. Otherwise, several processes may replace the file at once, and its mode is 0644."""
    replacement = path.with_name(f"{path.name}.tmp" if by_one else f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        write_synced(replacement, data, 0o666 if by_one else 0o644)
        replacement.replace(path)
    except OSError:
        replacement.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
