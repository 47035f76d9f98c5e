"""Files of tensors in the safetensors format, with a checksum of every 4 MiB, written and read slice by slice.

A file is the length of its header (8 bytes, little endian), the header (JSON: type, shape and place of each tensor, and
in `__metadata__` the checksums), and the tensors' bytes (https://github.com/huggingface/safetensors). Any reader of
that format reads these files; only this one verifies them.
"""

import io
import itertools
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.checkpoint.manifest import DTYPE_NAMES, DTYPES, FileEntry, Stored
from titanlite.config.loader import ConfigError
from titanlite.config.regular_file import open_file
from titanlite.files.durable import cannot_read, checksum, safetensors_header, sync
from titanlite.parallel.shards import Slice

BLOCK_BYTES = 4 * 2**20
"""Bytes that share a checksum. A reader of some rows reads no more than the blocks that they are in."""
CHECKSUMS = "xxh3_64 of every 4 MiB"
SYNCED_BLOCKS = 8
"""Blocks that are written before they are synced to the disk: the size of the file is then its true progress, and the
last sync of a large file is short."""
LARGEST_HEADER = 100_000_000
"""Bytes; the safetensors library has the same limit."""


def write_file(path: Path, tensors: dict[str, tuple[Tensor, tuple[int, ...], tuple[int, ...]]]) -> Stored:
    """Write slices of tensors, each with its offset in and the shape of the full tensor, and return what to enter into
    the manifest. They may be on any device; one at a time is copied to host memory.

    Raises:
        OSError: if the file cannot be written, as when the disk is full.
    """
    header: dict[str, Any] = {"__metadata__": {}}
    checksums, slices, position = {}, {}, 0
    for name, (tensor, offset, shape) in tensors.items():
        dtype, end = DTYPE_NAMES[tensor.dtype], position + tensor.nbytes
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        checksums[name] = ["0" * 16] * math.ceil(tensor.nbytes / BLOCK_BYTES)
        slices.setdefault((dtype, shape, Slice(offset, tuple(tensor.shape))), []).append(name)
        position = end
    n_blocks = itertools.count(1)
    placeholder = _encode(header, checksums)  # as long as the header, whose checksums are known after the data
    with path.open("wb") as file:
        file.write(placeholder)
        for name, (tensor, *_) in tensors.items():
            data = bytes_of(tensor.detach().cpu())
            for i, start in enumerate(range(0, len(data), BLOCK_BYTES)):
                block = data[start : start + BLOCK_BYTES]
                checksums[name][i] = checksum(block)
                file.write(block)
                if next(n_blocks) % SYNCED_BLOCKS == 0:
                    sync(file)
        encoded = _encode(header, checksums)
        file.seek(0)
        file.write(encoded)
        sync(file)
    return Stored(FileEntry(bytes=len(encoded) + position, xxh3_64=checksum(encoded)), slices)


def _encode(header: dict[str, Any], checksums: dict[str, list[str]]) -> bytes:
    header["__metadata__"] = {CHECKSUMS: json.dumps(checksums)}
    return safetensors_header(header)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor in host memory; of one that is not contiguous, of a copy."""
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def read_fully(file: io.FileIO, data: memoryview) -> int:
    """Read until the memory is full or the file ends. Return the bytes read: one call may read fewer than asked."""
    n_read = 0
    while n_read < len(data):
        n = file.readinto(data[n_read:])
        if not n:
            break
        n_read += n
    return n_read


class CheckedFile:
    """Reads slices of tensors from one file, which must be what the manifest says: size, header, and every byte read.

    Raises:
        ConfigError: if it is not. The message names the file and the tensor.
    """

    def __init__(self, path: Path, entry: FileEntry, expected: dict[str, tuple[str, Slice]]):
        """`expected` has the data type and the slice of each tensor in the file."""
        self.bytes_read = 0
        self.path, self._dtypes = path, {name: DTYPES[dtype] for name, (dtype, _) in expected.items()}
        try:
            with open_file(path) as file:
                self._size = size = os.fstat(file.fileno()).st_size
                if size != entry.bytes:
                    problem = f"{size} bytes, expected {entry.bytes}: truncated, or of another checkpoint"
                    raise ConfigError([f"{path}: {problem}"])
                header = file.read(8)
                length = int.from_bytes(header, "little")
                if len(header) < 8 or length > min(size - 8, LARGEST_HEADER):
                    raise ConfigError([f"{path}: no safetensors file: its header would be {length} bytes"])
                header += file.read(length)
        except OSError as error:
            raise cannot_read(f"{path}", error) from None
        if checksum(header) != entry.xxh3_64:
            raise ConfigError([f"{path}: the header's checksum differs: damaged, or of another checkpoint"])
        self._begin = 8 + length
        try:
            content = json.loads(header[8:])
            self._checksums = json.loads(content.pop("__metadata__")[CHECKSUMS])
            self._places = {name: self._place(name, content, *each) for name, each in expected.items()}
            superfluous = content.keys() - expected.keys()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ConfigError([f"{path}: the header does not describe the tensors that the manifest has"]) from None
        if superfluous:
            raise ConfigError([f"{path}: {min(superfluous)} is not in the manifest"])

    def _place(self, name: str, content: dict[str, Any], dtype: str, stored: Slice) -> tuple[int, int, Slice]:
        """Return where a tensor's bytes begin and end in the file, and its slice. Raises ValueError if the header and
        the manifest differ."""
        (begin, end), blocks = content[name]["data_offsets"], self._checksums[name]
        n_bytes = math.prod(stored.size) * DTYPES[dtype].itemsize
        inside = type(begin) is type(end) is int and begin >= 0 and end - begin == n_bytes
        inside = inside and self._begin + end <= self._size and isinstance(blocks, list)
        as_expected = content[name]["dtype"] == dtype and content[name]["shape"] == list(stored.size)
        if not inside or not as_expected or len(blocks) != math.ceil(n_bytes / BLOCK_BYTES):
            raise ValueError(name)
        return self._begin + begin, self._begin + end, stored

    def read_into(self, target: Tensor, name: str, wanted: Slice) -> None:
        """Fill `target`, the slice `wanted` of a tensor on any device, as far as this file has it."""
        begin, end, stored = self._places[name]
        part = stored.overlap(wanted)
        target = target[
            tuple(slice(a - b, a - b + n) for a, b, n in zip(part.offset, wanted.offset, part.size, strict=True))
        ]
        dtype = self._dtypes[name]
        if part == stored and target.is_cpu and target.dtype == dtype and target.is_contiguous():
            self._read_blocks(name, range(len(self._checksums[name])), bytes_of(target))
            return
        n_rows, first = (stored.size[0], part.offset[0] - stored.offset[0]) if stored.size else (1, 0)
        row_bytes = (end - begin) // n_rows
        last = first + (part.size[0] if part.size else 1)
        blocks = range(first * row_bytes // BLOCK_BYTES, math.ceil(last * row_bytes / BLOCK_BYTES))
        start = blocks.start * BLOCK_BYTES
        data = torch.empty(min(blocks.stop * BLOCK_BYTES, end - begin) - start, dtype=torch.uint8)
        self._read_blocks(name, blocks, bytes_of(data))
        rows = data[first * row_bytes - start : last * row_bytes - start].view(dtype)
        rows = rows.view(last - first, *stored.size[1:]) if stored.size else rows.view(())
        of_rows = Slice((stored.offset[0] + first, *stored.offset[1:]), tuple(rows.shape)) if stored.size else stored
        target.copy_(rows[part.inside(of_rows)])

    def _read_blocks(self, name: str, blocks: range, data: memoryview) -> None:
        """Read blocks of a tensor's bytes, one behind the other, and check each. The last may be shorter."""
        begin = self._places[name][0] + blocks.start * BLOCK_BYTES
        try:
            with open_file(self.path, buffering=0) as file:
                file.seek(begin)
                for i, block in enumerate(blocks):
                    piece = data[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES]
                    if read_fully(file, piece) < len(piece):
                        raise ConfigError([f"{self.path}: {name}: the file ends too early"])
                    self.bytes_read += len(piece)
                    if checksum(piece) != self._checksums[name][block]:
                        raise ConfigError([f"{self.path}: {name}: a checksum differs: its bytes are damaged"])
        except OSError as error:
            raise cannot_read(f"{self.path}: {name}", error) from None

    def verify(self) -> Iterator[int]:
        """Read every tensor of the file and check it. Yields the bytes of each one read."""
        buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        for name, (begin, end, _) in self._places.items():
            for block in range(len(self._checksums[name])):
                n_bytes = min(BLOCK_BYTES, end - begin - block * BLOCK_BYTES)
                self._read_blocks(name, range(block, block + 1), bytes_of(buffer[:n_bytes]))
                yield n_bytes
