"""The files of shards: written, and read back by whoever builds a token cache. `token_shards` has their format."""

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash
from pydantic import ValidationError

from titanlite.config.regular_file import open_file
from titanlite.data.token_shards import (
    CHECKSUM_BLOCK,
    HEADER,
    DamagedShardError,
    DType,
    Shard,
    Split,
    check_dataset,
    check_size,
    regular_file,
)
from titanlite.files.durable import checksum, sync


class _Blocks:
    """Writes bytes to a file, and computes the checksum of each block."""

    def __init__(self, file: BinaryIO):
        self.file, self.checksums, self._rest = file, list[int](), b""

    def write(self, data: bytes) -> None:
        self.file.write(data)
        data = self._rest + data
        n_complete = len(data) // CHECKSUM_BLOCK * CHECKSUM_BLOCK
        for begin in range(0, n_complete, CHECKSUM_BLOCK):
            self.checksums.append(xxhash.xxh3_64_intdigest(data[begin : begin + CHECKSUM_BLOCK]))
        self._rest = data[n_complete:]

    def finish(self) -> bytes:
        """Return the checksums of all blocks."""
        if self._rest:
            self.checksums.append(xxhash.xxh3_64_intdigest(self._rest))
        return np.array(self.checksums, "<u8").tobytes()


def write_shard(path: Path, dtype: DType, documents: Iterable[tuple[Split, np.ndarray, int]]) -> Shard:
    """Write a shard, and wait until it is on the disk. A document is the split that it belongs to, its tokens, and the
    bytes of its text."""
    lengths: dict[str, list[int]] = {"train": [], "validation": []}
    text_bytes, train_hash = 0, xxhash.xxh3_64()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with (
        open(path, "wb", opener=lambda name, _: os.open(name, flags, 0o644)) as file,
        tempfile.SpooledTemporaryFile(max_size=2**24, dir=path.parent) as validation,
    ):
        file.write(b"\0" * HEADER)
        blocks = _Blocks(file)
        for split, tokens, n_bytes in documents:
            encoded = tokens.astype(dtype).tobytes()
            if split == "train":
                blocks.write(encoded)
                train_hash.update(encoded)
            else:
                validation.write(encoded)
            lengths[split].append(len(tokens))
            text_bytes += n_bytes
        validation.seek(0)
        while chunk := validation.read(2**24):
            blocks.write(chunk)
        for split_lengths in lengths.values():
            blocks.write(np.array(split_lengths, "<u4").tobytes())
        checksums = blocks.finish()
        file.write(checksums)
        shard = Shard(
            dataset=path.parent.name,
            train_tokens=sum(lengths["train"]),
            validation_tokens=sum(lengths["validation"]),
            train_documents=len(lengths["train"]),
            validation_documents=len(lengths["validation"]),
            text_bytes=text_bytes,
            train_xxh3_64=train_hash.hexdigest(),
            checksums_xxh3_64=checksum(checksums),
        )
        file.seek(0)
        file.write(shard.header(dtype))
        sync(file)
    return shard


def read_shard(path: Path, dtype: DType) -> Shard:
    """Return what a shard's file says that it holds. Raises FileNotFoundError if there is none, ConfigError if it is
    not to be trusted or is of another dataset, and DamagedShardError if it is no shard of that type, or has another
    size."""
    regular_file(path)
    with open_file(path) as file:
        header = file.read(HEADER)
    try:
        shard = Shard.model_validate_json(json.loads(header[8:])["__metadata__"]["shard"])
    except (ValidationError, ValueError, KeyError, TypeError, RecursionError):
        raise DamagedShardError(f"{path.name}: the header is damaged") from None
    if header != shard.header(dtype):
        raise DamagedShardError(f"{path.name}: the header is damaged")
    check_dataset(path, [shard])
    check_size(path, shard.file_size(dtype))
    return shard
