"""The safetensors files of checkpoints, token caches and Hugging Face folders, written tensor by tensor (the
safetensors library needs all tensors in memory) and read block by block. The header has checksums, which other readers
ignore. A file consists of the length of the header (8 bytes, little endian), the header (JSON: dtype, shape and place
of each tensor, and text in `__metadata__`), and the tensors' bytes (https://github.com/huggingface/safetensors)."""

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
"""Bytes of an element, by the safetensors name of its dtype."""
BLOCK_BYTES = 4 * 2**20  # bytes of a block of a tensor, the unit of checksums and reads
CHECKSUMS = "xxh3_64 of every 4 MiB"
"""Key in `__metadata__` for the checksums of each tensor's blocks, as JSON."""
SYNCED_BLOCKS = 8
"""The number of blocks written between two syncs, so that the file's size shows how much is on the disk."""
LARGEST_HEADER = 100_000_000  # largest header in bytes, as in the safetensors library

Tensors = Mapping[str, tuple[str, Sequence[int]]]
"""The dtype and the shape of each tensor of a file, by name, in the order of the tensors in the file."""


class DamagedError(Exception):
    """A file differs from the file that was written; the message tells how."""


def places(tensors: Tensors) -> dict[str, tuple[int, int]]:
    """Return where each tensor begins and ends, in bytes after the header, without gaps between tensors."""
    sizes = [math.prod(shape) * ITEM_BYTES[dtype] for dtype, shape in tensors.values()]
    ends = list(itertools.accumulate(sizes))
    return dict(zip(tensors, zip([0, *ends], ends, strict=False), strict=True))


def encode_header(tensors: Tensors, metadata: Mapping[str, str], length: int = 0) -> bytes:
    """Return the bytes that precede a file's tensors, padded to at least `length` and to a multiple of 8 bytes."""
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
    """Write a file and wait until its data is on the disk. Return the file's size and header. `contents` yields the
    bytes of each tensor; only one tensor is in memory at a time. `metadata` None: `__metadata__` has the checksums.
    Raises OSError if the file cannot be written."""
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

    checksums = {  # placeholders of the final length: the header is written again with the right checksums
        name: ["0" * 16] * math.ceil((end - begin) / BLOCK_BYTES) for name, (begin, end) in places(tensors).items()
    }
    with open(path, "wb", opener=open_own) as file:
        file.write(header())
        for name in tensors:
            checksums[name] = write_blocks(next(contents))  # each tensor is freed before `contents` reads the next
        n_bytes = file.tell()
        file.seek(0)
        file.write(header())
        sync(file)
    return n_bytes, header()


def read_header(file: BinaryIO) -> bytes:
    """Return a file's header and its 8-byte length. Raises DamagedError if the length is impossible."""
    size, begin = os.fstat(file.fileno()).st_size, file.read(8)
    length = int.from_bytes(begin, "little")
    if len(begin) < 8 or length > min(size - 8, LARGEST_HEADER):
        raise DamagedError(f"no safetensors file: its header would be {length} bytes")
    return begin + file.read(length)


def read_blocks(
    file: BinaryIO, begin: int, data: memoryview, checksums: Iterable[str], block_bytes: int = BLOCK_BYTES
) -> Iterator[int]:
    """Fill `data` with the bytes of a file from `begin` on, and verify each block (the last may be shorter) by its
    checksum. Yields the number of bytes of each block. Raises DamagedError for wrong bytes, OSError if a read fails."""
    for index, expected in enumerate(checksums):
        block = data[index * block_bytes : (index + 1) * block_bytes]
        at = begin + index * block_bytes
        read_fully(file, block, at)
        if checksum(block) != expected:
            raise DamagedError(f"the checksum of the {len(block):,} bytes from {at:,} on differs: they are damaged")
        yield len(block)


def read_fully(file: BinaryIO, data: memoryview, begin: int) -> None:
    """Fill `data` with a file's bytes from `begin` on. The file's position is not used: threads may share a file."""
    n_read = 0
    while n_read < len(data):  # preadv may read fewer bytes than asked
        n = os.preadv(file.fileno(), [data[n_read:]], begin + n_read)
        if not n:
            raise DamagedError(f"it ends before byte {begin + len(data):,}")
        n_read += n
