"""The safetensors files of a checkpoint: slices of tensors, written with checksums and verified when they are read."""

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.checkpoint.manifest import DTYPE_NAMES, DTYPES, FileEntry, Stored
from titanlite.config.loader import ConfigError
from titanlite.config.regular_file import open_file
from titanlite.files import safetensors
from titanlite.files.durable import cannot_read, checksum
from titanlite.files.safetensors import BLOCK_BYTES, CHECKSUMS
from titanlite.parallel.shards import Slice


def write_file(
    path: Path,
    tensors: dict[str, tuple[Tensor, tuple[int, ...], tuple[int, ...]]],
    read: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor,
) -> Stored:
    """Write slices of tensors, each given with its offset in the full tensor and the full tensor's shape. Return the
    file's entry for the manifest. Slices are copied to host memory one at a time. `read` returns the data to write for
    a slice, and is needed for slices on the meta device. Raises OSError if the file cannot be written."""
    entries, slices = {}, {}
    for name, (tensor, offset, shape) in tensors.items():
        dtype = DTYPE_NAMES[tensor.dtype]
        entries[name] = dtype, tuple(tensor.shape)
        slices.setdefault((dtype, shape, Slice(offset, tuple(tensor.shape))), []).append(name)
    contents = (bytes_of(read(name, tensor).detach().cpu()) for name, (tensor, *_) in tensors.items())
    n_bytes, header = safetensors.write(path, entries, contents)
    return Stored(FileEntry(bytes=n_bytes, xxh3_64=checksum(header)), slices)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory: its own memory if the tensor is contiguous, otherwise a copy."""
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


class CheckedFile:
    """Reads slices of tensors from one file. Raises ConfigError, with the names of file and tensor, if the file's size,
    its header or any byte that is read differs from the manifest."""

    def __init__(self, path: Path, entry: FileEntry, expected: dict[str, tuple[str, Slice]]):
        """Check the file's size and header. `expected`: the dtype and the slice of each tensor in the file."""
        self.bytes_read = 0
        self.path, self._dtypes = path, {name: DTYPES[dtype] for name, (dtype, _) in expected.items()}
        try:
            with open_file(path) as file:
                self._size = size = os.fstat(file.fileno()).st_size
                if size != entry.bytes:
                    problem = f"{size} bytes, expected {entry.bytes}: truncated, or of another checkpoint"
                    raise ConfigError([f"{path}: {problem}"])
                header = safetensors.read_header(file)
        except safetensors.DamagedError as error:
            raise ConfigError([f"{path}: {error}"]) from None
        except OSError as error:
            raise cannot_read(f"{path}", error) from None
        if checksum(header) != entry.xxh3_64:
            raise ConfigError([f"{path}: the header's checksum differs: damaged, or of another checkpoint"])
        self._begin = len(header)
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
        """Return where a tensor's bytes begin and end in the file, and which slice of the full tensor they contain.
        Raises ValueError if the header and the manifest differ."""
        (begin, end), blocks = content[name]["data_offsets"], self._checksums[name]
        n_bytes = math.prod(stored.size) * DTYPES[dtype].itemsize
        inside = type(begin) is type(end) is int and begin >= 0 and end - begin == n_bytes
        inside = inside and self._begin + end <= self._size and isinstance(blocks, list)
        as_expected = content[name]["dtype"] == dtype and content[name]["shape"] == list(stored.size)
        if not inside or not as_expected or len(blocks) != math.ceil(n_bytes / BLOCK_BYTES):
            raise ValueError(name)
        return self._begin + begin, self._begin + end, stored

    def read_into(self, target: Tensor, name: str, wanted: Slice) -> None:
        """Copy the elements of the slice `wanted` that this file has into `target`, which has the shape of `wanted`."""
        begin, end, stored = self._places[name]
        part = stored.overlap(wanted)
        target = target[part.inside(wanted)]
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
        """Read consecutive blocks of a tensor's bytes, and verify each block's checksum."""
        begin = self._places[name][0] + blocks.start * BLOCK_BYTES
        checksums = self._checksums[name][blocks.start : blocks.stop]
        try:
            with open_file(self.path, buffering=0) as file:
                for n_bytes in safetensors.read_blocks(file, begin, data, checksums):
                    self.bytes_read += n_bytes
        except safetensors.DamagedError as error:
            raise ConfigError([f"{self.path}: {name}: {error}"]) from None
        except OSError as error:
            raise cannot_read(f"{self.path}: {name}", error) from None

    def verify(self) -> Iterator[int]:
        """Read all tensors of the file and verify their checksums. Yields the number of bytes of each block read."""
        buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        for name, (begin, end, _) in self._places.items():
            for block in range(len(self._checksums[name])):
                n_bytes = min(BLOCK_BYTES, end - begin - block * BLOCK_BYTES)
                self._read_blocks(name, range(block, block + 1), bytes_of(buffer[:n_bytes]))
                yield n_bytes
