"""The safetensors files of checkpoints, token caches and Hugging Face folders. They are written tensor by tensor, and
read block by block, each verified by its checksum.

A file is the length of its header (8 bytes, little endian), the header (JSON: type, shape and place of each tensor, and
text in `__metadata__`), and the tensors' bytes (https://github.com/huggingface/safetensors). Any reader of that format
reads these files; only this one verifies them. The safetensors library writes a file from all of its tensors at once.
"""

import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from titanlite.config.regular_file import open_own
from titanlite.files.durable import checksum, sync

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U64": 8, "U32": 4, "U16": 2, "U8": 1}
"""Bytes of a number, by the format's name of its data type."""
BLOCK_BYTES = 4 * 2**20
"""Bytes of a block, which has one checksum. To read some rows, only the blocks that contain them are read."""
CHECKSUMS = "xxh3_64 of every 4 MiB"
"""The key of `__metadata__` whose value is the checksums of each tensor's blocks, as JSON."""
SYNCED_BLOCKS = 8
"""Blocks that are written before they are synced to the disk: the size of the file is then its true progress, and the
last sync of a large file is short."""
LARGEST_HEADER = 100_000_000
"""Bytes of a header at most; the safetensors library has the same limit."""

Tensors = Mapping[str, tuple[str, Sequence[int]]]
"""The data type and the shape of each tensor of a file, by name, in the order of their bytes."""


class DamagedError(Exception):
    """A file is not what was written; the message says how it differs."""


def places(tensors: Tensors) -> dict[str, tuple[int, int]]:
    """Return where each tensor begins and ends, in bytes after the header; there are no gaps between tensors."""
    sizes = [math.prod(shape) * ITEM_BYTES[dtype] for dtype, shape in tensors.values()]
    ends = list(itertools.accumulate(sizes))
    return dict(zip(tensors, zip([0, *ends], ends, strict=False), strict=True))


def encode_header(tensors: Tensors, metadata: Mapping[str, str], length: int = 0) -> bytes:
    """Return the bytes of a file before its tensors, at least `length` bytes. The tensors begin at a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    for name, place in places(tensors).items():
        dtype, shape = tensors[name]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": place}
    text = json.dumps(entries).encode().ljust(length - 8)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(
    path: Path, tensors: Tensors, contents: Iterator[memoryview], metadata: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    """Write a file and wait until it is on the disk. Return its size and its header. `contents` yields the bytes of the
    tensors; only one tensor is in memory at a time. Without `metadata`, the header has the checksums. Raises
    OSError if the file cannot be written, as when the disk is full."""
    n_blocks = itertools.count(1)

    def write_blocks(content: memoryview) -> list[str]:
        checksums = []
        for begin in range(0, len(content), BLOCK_BYTES):
            block = content[begin : begin + BLOCK_BYTES]
            checksums.append(checksum(block))
            file.write(block)
            if next(n_blocks) % SYNCED_BLOCKS == 0:
                sync(file)
        return checksums

    def header() -> bytes:
        return encode_header(tensors, {CHECKSUMS: json.dumps(checksums)} if metadata is None else metadata)

    checksums = {  # placeholders as long as the checksums that follow
        name: ["0" * 16] * math.ceil((end - begin) / BLOCK_BYTES) for name, (begin, end) in places(tensors).items()
    }
    with open(path, "wb", opener=open_own) as file:
        file.write(header())
        for name in tensors:
            checksums[name] = write_blocks(next(contents))  # each is freed before the next is made
        n_bytes = file.tell()
        file.seek(0)
        file.write(header())
        sync(file)
    return n_bytes, header()


def read_header(file: BinaryIO) -> bytes:
    """Return the bytes of a file before its tensors. Raises DamagedError if it cannot be a safetensors file."""
    size, begin = os.fstat(file.fileno()).st_size, file.read(8)
    length = int.from_bytes(begin, "little")
    if len(begin) < 8 or length > min(size - 8, LARGEST_HEADER):
        raise DamagedError(f"no safetensors file: its header would be {length} bytes")
    return begin + file.read(length)


def read_blocks(
    file: BinaryIO, begin: int, data: memoryview, checksums: Iterable[str], block_bytes: int = BLOCK_BYTES
) -> Iterator[int]:
    """Fill `data` with the bytes of a file from `begin` on, and verify each block; the last one may be shorter. Yields
    the number of bytes of each. Raises DamagedError, and OSError if the disk does."""
    for index, expected in enumerate(checksums):
        block = data[index * block_bytes : (index + 1) * block_bytes]
        at = begin + index * block_bytes
        read_fully(file, block, at)
        if checksum(block) != expected:
            raise DamagedError(f"the checksum of the {len(block):,} bytes from {at:,} on differs: they are damaged")
        yield len(block)


def read_fully(file: BinaryIO, data: memoryview, begin: int) -> None:
    """Fill `data` with the bytes of a file from `begin` on. It ignores the file's position: threads may share it."""
    n_read = 0
    while n_read < len(data):  # one call may read fewer than asked
        n = os.preadv(file.fileno(), [data[n_read:]], begin + n_read)
        if not n:
            raise DamagedError(f"it ends before byte {begin + len(data):,}")
        n_read += n
