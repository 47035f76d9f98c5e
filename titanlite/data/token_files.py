"""The files of a token cache: what they must hold, who may own them, and when their checksums are verified.

tokens.json       the data type, the counts and, of each split, the size, the checksum and the largest token
train.bin, validation.bin     tokens of the documents of each split, end to end
verified.json     size, time and inode of these files when their checksums were last verified
"""

import json
import os
import pwd
import shlex
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import xxhash
from pydantic import Field, ValidationError

from titanlite.config.loader import ConfigError
from titanlite.reliability.files import Checksum, Count, Record, checksum, first_problem

FORMAT = 4  # part of a cache's name; raised when the names or the content of its files change
TOKENS, VERIFIED = "tokens.json", "verified.json"
FILES = {"train": "train.bin", "validation": "validation.bin"}
LARGEST_JSON = 2**16  # bytes
CHUNK = 2**26  # bytes that are read at a time


class DamagedCacheError(Exception):
    """A token cache is not what it should be; the message says how."""


class Split(Record):
    bytes: Count
    xxh3_64: Checksum
    largest_token: Annotated[int, Field(ge=-1, le=2**32 - 1)]
    """-1 if there is no token."""


class Summary(Record):
    """The content of tokens.json."""

    dtype: Literal["uint16", "uint32"]
    documents: Count
    tokens: Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Of the training split's tokens and the special tokens; it identifies the data of a run."""
    train: Split
    validation: Split
    xxh3_64: Checksum = "0" * 16
    """Of the rest of this file."""

    def checksum(self) -> str:
        """Return what `xxh3_64` must be."""
        return checksum(json.dumps(self.model_dump(exclude={"xxh3_64"})).encode())

    def encode(self) -> bytes:
        """Return the file, with its checksum."""
        return json.dumps({**self.model_dump(), "xxh3_64": self.checksum()}).encode()


def dtype_for(vocab_size: int) -> str:
    """Return the data type that the tokens of a vocabulary are stored in."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def check_trusted(path: Path) -> os.stat_result:
    """Return the status of a file or folder that belongs to this user or root, and that nobody else may write: whoever
    can write it chooses what is trained on. Raises ConfigError for any other, FileNotFoundError if there is none."""
    status = path.lstat()
    if status.st_uid not in (os.geteuid(), 0):
        try:
            owner = pwd.getpwuid(status.st_uid).pw_name
        except KeyError:
            owner = f"with the ID {status.st_uid}"
        problem = f"{path}: belongs to user {owner}, who could change what is trained on; choose another "
        raise ConfigError([problem + "training.cache_folder, or remove this folder to have it built again"])
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not stat.S_ISLNK(status.st_mode):
        problem = f"{path}: other users may write it, and so choose what is trained on; choose another "
        problem += "training.cache_folder, remove this folder to have it built again or, if you trust its content, run "
        raise ConfigError([problem + f"chmod -R go-w {shlex.quote(str(path))}"])
    return status


def read_summary(folder: Path, vocab_size: int) -> Summary:
    """Return tokens.json of a token cache, after all checks that need not read the tokens.

    Raises:
        FileNotFoundError: if there is no such folder.
        ConfigError: if the folder or a file is not to be trusted.
        DamagedCacheError: if the files are not those of a token cache with this vocabulary.
    """
    if not stat.S_ISDIR(check_trusted(folder).st_mode):
        raise DamagedCacheError("it is not a folder")
    sizes = {name: _file_size(folder, name) for name in (TOKENS, *FILES.values())}
    if sizes[TOKENS] > LARGEST_JSON:
        raise DamagedCacheError(f"{TOKENS} has {sizes[TOKENS]:,} bytes")
    try:
        summary = Summary.model_validate_json((folder / TOKENS).read_bytes())
    except ValidationError as error:
        raise DamagedCacheError(f"{TOKENS}: {first_problem(error)}") from None
    if summary.xxh3_64 != summary.checksum():
        raise DamagedCacheError(f"{TOKENS}: the checksum differs")
    if summary.dtype != dtype_for(vocab_size):
        raise DamagedCacheError(f"{TOKENS}: dtype {summary.dtype} for a vocabulary of {vocab_size:,}")
    size = np.dtype(summary.dtype).itemsize
    if summary.train.bytes % size or summary.train.bytes + summary.validation.bytes != summary.tokens * size:
        raise DamagedCacheError(f"{TOKENS}: the sizes of the files do not fit {summary.tokens:,} tokens")
    for name, file in FILES.items():
        split: Split = getattr(summary, name)
        if sizes[file] != split.bytes:
            raise DamagedCacheError(f"{file} has {sizes[file]:,} bytes, and {TOKENS} says {split.bytes:,}")
        if split.largest_token >= vocab_size:
            raise DamagedCacheError(f"{file} has a token {split.largest_token:,}, and the vocabulary {vocab_size:,}")
    return summary


def _file_size(folder: Path, name: str) -> int:
    try:
        status = check_trusted(folder / name)
    except FileNotFoundError:
        raise DamagedCacheError(f"{name} is missing") from None
    if not stat.S_ISREG(status.st_mode):
        raise DamagedCacheError(f"{name} is not a regular file")
    return status.st_size


def verify(folder: Path, summary: Summary, advance: Callable[[int], Any]) -> None:
    """Read all tokens, and compare their checksums and the largest of them with what read_summary returned. `advance`
    is called with the bytes that were read. Raises DamagedCacheError if they differ."""
    for name, file in FILES.items():
        split: Split = getattr(summary, name)
        content, largest = xxhash.xxh3_64(), -1
        with (folder / file).open("rb") as tokens:
            while chunk := tokens.read(CHUNK):
                content.update(chunk)
                largest = max(largest, int(np.frombuffer(chunk, summary.dtype).max()))
                advance(len(chunk))
        if (content.hexdigest(), largest) != (split.xxh3_64, split.largest_token):
            raise DamagedCacheError(f"{file}: the checksum differs")


def _stamps(folder: Path) -> dict[str, list[int]]:
    """Return what changes when a file is replaced or written again."""
    statuses = {name: (folder / name).lstat() for name in (TOKENS, *FILES.values())}
    return {name: [status.st_size, status.st_mtime_ns, status.st_ino] for name, status in statuses.items()}


def write_verified(folder: Path) -> None:
    """Record that the checksums of the files, as they are now, have been verified."""
    temporary = folder / f"{VERIFIED}.{os.getpid()}.tmp"
    try:
        temporary.touch(mode=0o644)
        temporary.write_text(json.dumps(_stamps(folder)))
        temporary.replace(folder / VERIFIED)
    finally:
        temporary.unlink(missing_ok=True)


def is_verified(folder: Path) -> bool:
    """Return whether the files are those whose checksums have been verified. Raises ConfigError if the record is not to
    be trusted."""
    try:
        if not stat.S_ISREG(check_trusted(folder / VERIFIED).st_mode):
            return False
        with (folder / VERIFIED).open() as file:
            return json.loads(file.read(LARGEST_JSON)) == _stamps(folder)
    except (OSError, ValueError, RecursionError):
        return False
