"""The files of a token cache, and how tokens are read from them.

    tokens.json          the description of each shard, by number
    00000.safetensors    a shard: the tokens of some of the dataset's documents, in their order

A shard is a safetensors file (https://github.com/huggingface/safetensors) with the tensors

    train, validation                         uint16 or uint32: the tokens of each split, documents end to end
    train_documents, validation_documents     uint32: the number of tokens of each document
    checksums                                 uint64: XXH3 of each CHECKSUM_BLOCK bytes of the tensors above

A block's checksum is verified when a process first reads the block, so that a cache of any size opens at once."""

import contextlib
import functools
import grp
import json
import math
import os
import pwd
import shlex
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, TypeVar

import numpy as np
from pydantic import Field, ValidationError

from titanlite.config.errors import TrainingError
from titanlite.config.loader import ConfigError
from titanlite.config.regular_file import open_file, read_file
from titanlite.files import safetensors
from titanlite.files.durable import Checksum, Int63, Record, cannot_read, checksum, first_problem, replace_file

FORMAT = 6  # version in a cache's name; increase it if the files' names, number or contents change
INDEX = "tokens.json"
HEADER, CHECKSUM_BLOCK = 4096, 2**16  # bytes of a shard's header; bytes per checksum
LARGEST_INDEX = 2**28  # maximum size of tokens.json in bytes
OPEN_FILES = 64  # maximum number of files that a token cache or a packing keeps open in a process
UNKNOWN_USER = 65534
"""Owner of root's files in a container whose user namespace does not map root (user_namespaces(7))."""

Split = Literal["train", "validation"]
DType = Literal["uint16", "uint32"]
_Record = TypeVar("_Record", bound="RecordWithChecksum")


class DamagedShardError(Exception):
    """A file of a token cache is damaged; the message says how."""


class Shard(Record):
    """The description of a shard, which its header and tokens.json contain."""

    dataset: Annotated[str, Field(max_length=256)]
    """The name of the token cache's folder, which is a hash of the tokens' sources."""
    train_tokens: Int63
    validation_tokens: Int63
    train_documents: Int63
    validation_documents: Int63
    text_bytes: Int63  # bytes of the documents' text in UTF-8, in both splits
    train_xxh3_64: Checksum  # checksum of the training split's tokens
    checksums_xxh3_64: Checksum  # checksum of the tensor `checksums`

    def tensors(self, dtype: DType) -> safetensors.Tensors:
        kind = dtype.replace("uint", "U")
        tensors = {
            "train": (kind, [self.train_tokens]),
            "validation": (kind, [self.validation_tokens]),
            "train_documents": ("U32", [self.train_documents]),
            "validation_documents": ("U32", [self.validation_documents]),
        }
        _, n_bytes = safetensors.places(tensors)["validation_documents"]
        return {**tensors, "checksums": ("U64", [math.ceil(n_bytes / CHECKSUM_BLOCK)])}

    def header(self, dtype: DType) -> bytes:
        """Return the first HEADER bytes of the shard's file."""
        return safetensors.encode_header(self.tensors(dtype), {"shard": self.model_dump_json()}, HEADER)

    def file_size(self, dtype: DType) -> int:
        return HEADER + safetensors.places(self.tensors(dtype))["checksums"][1]


class RecordWithChecksum(Record):
    """The content of a JSON file that contains its own checksum."""

    xxh3_64: Checksum = "0" * 16  # checksum of all other fields of the file

    def checksum(self) -> str:
        return checksum(json.dumps(self.model_dump(exclude={"xxh3_64"})).encode())

    def publish(self, path: Path) -> None:
        replace_file(path, json.dumps({**self.model_dump(), "xxh3_64": self.checksum()}).encode(), by_one=False)


class Index(RecordWithChecksum):
    """The content of tokens.json."""

    dtype: DType
    shards: Annotated[list[Shard], Field(min_length=1)]


def dtype_for(vocab_size: int, *, has_targets: bool = False) -> DType:
    """Return the data type of stored tokens. With `has_targets`, a bit is reserved to mark tokens not trained on."""
    return "uint16" if vocab_size <= 2 ** (15 if has_targets else 16) else "uint32"


def not_trained_bit(dtype: DType) -> int:
    """Return the bit that marks a stored token that is not trained on, in a cache of fine-tuning data."""
    return 2 ** (8 * np.dtype(dtype).itemsize - 1)


def shard_name(number: int) -> str:
    return f"{number:05}.safetensors"


def check_trusted(path: Path) -> os.stat_result:
    """Return the status of a file or folder. Raises ConfigError if anybody except this user and root owns it or may
    write it, since whoever writes it chooses the training data; FileNotFoundError if it is missing."""
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


def check_folder_trusted(folder: Path) -> os.stat_result:
    """Return a folder's status as check_trusted does, and check its parents, whose writers could replace the folder. In
    a parent with the sticky bit, such as /tmp, only an entry's owner can replace the entry."""
    for parent in {*folder.absolute().parents, *folder.resolve().parents}:
        status = parent.lstat()
        others = stat.S_IWOTH if _is_own_group(status.st_gid) else stat.S_IWOTH | stat.S_IWGRP
        keeps_owners = status.st_mode & stat.S_ISVTX or stat.S_ISLNK(status.st_mode)
        is_open = status.st_mode & others and not keeps_owners
        if is_open or status.st_uid not in (os.geteuid(), 0, UNKNOWN_USER):
            problem = f"{parent}: other users may rename what is in it, and so choose what is trained on; choose "
            problem += "another training.cache_folder" + f", or run chmod +t {shlex.quote(str(parent))}" * bool(is_open)
            raise ConfigError([problem])
    return check_trusted(folder)


def _is_own_group(number: int) -> bool:
    """Return whether this user is the only member of a group, as in the personal groups of many systems."""
    try:
        user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(number)
    except KeyError:
        return False
    return group.gr_name == user and not set(group.gr_mem) - {user}


def check_dataset(path: Path, shards: list[Shard]) -> None:
    """Raise ConfigError if the shards' dataset differs from the dataset in the name of `path`'s folder."""
    if any(shard.dataset != path.parent.name for shard in shards):
        problem = f"{path}: is of another dataset, whose folder was renamed to this one; remove the folder"
        raise ConfigError([f"{problem} to have it built again"])


def regular_file(path: Path) -> int:
    """Return a trusted file's size. Raises FileNotFoundError if it is missing, DamagedShardError if not regular."""
    status = check_trusted(path)
    if not stat.S_ISREG(status.st_mode):
        raise DamagedShardError(f"{path.name} is not a regular file")
    return status.st_size


def check_size(path: Path, expected: int) -> None:
    """Raise DamagedShardError if a file is missing or has another size, and ConfigError if it is untrusted."""
    try:
        size = regular_file(path)
    except FileNotFoundError:
        raise DamagedShardError(f"{path.name} is missing") from None
    if size != expected:
        raise DamagedShardError(f"{path.name} has {size:,} bytes, not {expected:,}")


def read_record(file: Path, kind: type[_Record]) -> _Record:
    """Return the object, of type `kind`, in a JSON file. Raises FileNotFoundError if there is no file, ConfigError if
    it or its folder is untrusted, and DamagedShardError if its content is of another type or its checksum is wrong."""
    if not stat.S_ISDIR(check_folder_trusted(file.parent).st_mode):
        raise DamagedShardError("it is not a folder")
    if (size := regular_file(file)) > LARGEST_INDEX:
        raise DamagedShardError(f"{file.name} has {size:,} bytes")
    try:
        record = kind.model_validate_json(read_file(file, LARGEST_INDEX))
    except ValidationError as error:
        raise DamagedShardError(f"{file.name}: {first_problem(error)}") from None
    if record.xxh3_64 != record.checksum():
        raise DamagedShardError(f"{file.name}: the checksum differs")
    return record


def read_index(folder: Path, dtype: DType) -> Index:
    """Return tokens.json. Raises the errors of read_record, ConfigError for another dataset, and DamagedShardError for
    another dtype."""
    index = read_record(folder / INDEX, Index)
    check_dataset(folder / INDEX, index.shards)
    if index.dtype != dtype:
        raise DamagedShardError(f"{INDEX}: dtype {index.dtype}, not {dtype}")
    return index


class TokenCache:
    """A complete token cache, whose shards are opened when read. `is_builder`: this rank rebuilds damaged shards."""

    def __init__(self, folder: Path, index: Index, *, is_builder: bool = False):
        self.folder, self.index, self.is_builder = folder, index, is_builder
        self._open = functools.lru_cache(maxsize=OPEN_FILES)(self._open_shard)
        self._checksums = functools.lru_cache(maxsize=OPEN_FILES)(self._read_checksums)
        self._verified: dict[int, np.ndarray] = {}
        self._places = [safetensors.places(shard.tensors(index.dtype)) for shard in index.shards]
        self.n_bytes = sum(HEADER + places["checksums"][1] for places in self._places)

    @property
    def identity(self) -> str:
        """A hash of the training split's tokens and of their division into shards."""
        hashes = "/".join(shard.train_xxh3_64 for shard in self.index.shards)
        return f"{self.index.dtype}/{checksum(hashes.encode())}"

    def tokens(self, split: Split) -> "Tokens":
        return Tokens(self, split)

    def read(self, number: int, tensor: str, begin: int, end: int) -> np.ndarray:
        """Return a slice of a shard's tensor. Raises TrainingError if the shard cannot be read now, or is damaged; a
        damaged shard is removed, so that the next start builds it again."""
        dtype = np.dtype("uint32" if tensor.endswith("_documents") else self.index.dtype).newbyteorder("<")
        first, last = self._places[number][tensor]
        first, last = first + begin * dtype.itemsize, min(first + end * dtype.itemsize, last)
        path = self.folder / shard_name(number)
        try:
            return np.frombuffer(self._read(number, first, last), dtype)
        except DamagedShardError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            problem = f"token cache {self.folder}: {error}; it is removed, and the next start builds it again"
            raise TrainingError(problem) from None
        except OSError as error:
            raise cannot_read(str(path), error) from None

    def check_sizes(self) -> None:
        for number, shard in enumerate(self.index.shards):
            check_size(self.folder / shard_name(number), shard.file_size(self.index.dtype))

    def verify(self, advance: Callable[[int], None]) -> list[str]:
        """Verify all blocks, remove damaged shards, and return the problems. `advance` gets the size of each read."""
        problems = []
        for number, places in enumerate(self._places):
            n_bytes, _ = places["checksums"]
            try:
                for begin in range(0, n_bytes, CHECKSUM_BLOCK):
                    advance(len(self._read(number, begin, min(begin + CHECKSUM_BLOCK, n_bytes))))
            except DamagedShardError as error:
                problems.append(str(error))
                (self.folder / shard_name(number)).unlink(missing_ok=True)
        return problems

    def _open_shard(self, number: int) -> BinaryIO:
        path = self.folder / shard_name(number)
        check_size(path, self.index.shards[number].file_size(self.index.dtype))
        return open_file(path, buffering=0)

    def _read(self, number: int, begin: int, end: int) -> memoryview:
        """Return bytes that follow a shard's header, after verifying the checksums of their blocks."""
        file, (n_bytes, _) = self._open(number), self._places[number]["checksums"]
        if number not in self._verified:
            self._verified[number] = np.zeros(math.ceil(n_bytes / CHECKSUM_BLOCK), bool)
        first, last = begin // CHECKSUM_BLOCK, math.ceil(end / CHECKSUM_BLOCK)
        is_verified = self._verified[number][first:last].all()
        start, stop = (begin, end) if is_verified else (first * CHECKSUM_BLOCK, min(last * CHECKSUM_BLOCK, n_bytes))
        data = memoryview(bytearray(stop - start))
        try:
            if is_verified:
                safetensors.read_fully(file, data, HEADER + start)
            else:
                checksums = self._checksums(number)[first:last]
                list(safetensors.read_blocks(file, HEADER + start, data, checksums, CHECKSUM_BLOCK))
        except safetensors.DamagedError as error:
            raise DamagedShardError(f"{shard_name(number)}: {error}") from None
        self._verified[number][first:last] = True
        return data[begin - start : end - start]

    def _read_checksums(self, number: int) -> list[str]:
        begin, end = self._places[number]["checksums"]
        data = memoryview(bytearray(end - begin))
        safetensors.read_fully(self._open(number), data, HEADER + begin)
        if checksum(data) != self.index.shards[number].checksums_xxh3_64:
            raise DamagedShardError(f"{shard_name(number)}: the checksums are damaged")
        return [f"{each:016x}" for each in np.frombuffer(data, "<u8")]


class Tokens:
    """The tokens of a split as one flat array, whose slices are read on demand."""

    def __init__(self, cache: TokenCache, split: Split):
        self.cache, self.split = cache, split
        self._ends = np.cumsum([getattr(shard, f"{split}_tokens") for shard in cache.index.shards])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, part: slice) -> np.ndarray:
        begin, end, _ = part.indices(len(self))
        end = max(begin, end)
        first, last = np.searchsorted(self._ends, (begin, end - 1), side="right").tolist()
        slices = [np.empty(0, self.cache.index.dtype)]
        for number in range(first, last + 1):
            offset = int(self._ends[number - 1]) if number else 0
            slices.append(self.cache.read(number, self.split, max(begin - offset, 0), end - offset))
        return slices[1] if len(slices) == 2 else np.concatenate(slices)
