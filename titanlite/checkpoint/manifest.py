"""The index of a checkpoint: manifest.json tells which file has which slice of which tensor. The manifest contains no
code. Types, sizes and checksums are verified, and so is whether a tensor's slices cover each element exactly once."""

import functools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import PrivateAttr

from titanlite.config.loader import ConfigError, show
from titanlite.config.regular_file import read_file
from titanlite.files.durable import Checksum, Int63, Record, cannot_read, checksum, parse
from titanlite.parallel.shards import Slice

MANIFEST, STATE = "manifest.json", "state.json"
FORMAT, VERSION = "titanlite checkpoint", 1
DTYPES = {  # keys: names of dtypes in safetensors files
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
LARGEST_MANIFEST = 2**27  # maximum size of a manifest in bytes
LARGEST_GRID = 10_000_000
"""Maximum number of cells of the grid in which a tensor's slices are checked; 4096 ranks need at most 4096 cells."""


class FileEntry(Record):
    """A file's size in bytes and its checksum: of a safetensors file's header, or of all bytes of a JSON file."""

    bytes: Int63
    xxh3_64: Checksum


class TensorEntry(Record):
    dtype: Literal[tuple(DTYPES)]  # type: ignore[valid-type]
    shape: list[Int63]
    layout: Int63  # index in Manifest.layouts


class Manifest(Record):
    """The content of manifest.json. Parsing checks only its types."""

    format: Literal["titanlite checkpoint"]
    version: Literal[1]
    files: dict[str, FileEntry]
    layouts: list[list[tuple[Int63, list[Int63], list[Int63]]]]
    """Ways in which tensors are split into slices. A slice is described by its file (an index into `files`), its offset
    and its size. Tensors that are split in the same way share a layout."""
    tensors: dict[str, TensorEntry]
    xxh3_64: Checksum  # checksum of all other keys of manifest.json
    _overlaps: dict[tuple[int, Slice], list[tuple[int, Slice]]] = PrivateAttr(default_factory=dict)

    @functools.cached_property
    def file_names(self) -> list[str]:
        """Names of the files, in the order of the indices in `layouts`."""
        return list(self.files)

    def slices(self, name: str, wanted: Slice) -> list[tuple[int, Slice]]:
        """Return the stored slices of a tensor that overlap the slice `wanted`, each with the index of its file."""
        layout = self.tensors[name].layout
        if (layout, wanted) not in self._overlaps:
            stored = ((file, Slice(tuple(offset), tuple(size))) for file, offset, size in self.layouts[layout])
            self._overlaps[layout, wanted] = [(file, each) for file, each in stored if each.overlap(wanted)]
        return self._overlaps[layout, wanted]

    def names_of_file(self, file: int) -> dict[str, Slice]:
        """Return the slices in a file, by the name of the tensor."""
        return {name: each for layout, each in self._layouts_of_files[file] for name in self._names_of_layouts[layout]}

    @functools.cached_property
    def _layouts_of_files(self) -> list[list[tuple[int, Slice]]]:
        of_files: list[list[tuple[int, Slice]]] = [[] for _ in self.files]
        for layout, slices in enumerate(self.layouts):
            for file, offset, size in slices:
                of_files[file].append((layout, Slice(tuple(offset), tuple(size))))
        return of_files

    @functools.cached_property
    def _names_of_layouts(self) -> list[list[str]]:
        of_layouts: list[list[str]] = [[] for _ in self.layouts]
        for name, entry in self.tensors.items():
            of_layouts[entry.layout].append(name)
        return of_layouts


class Stored(NamedTuple):
    """A description of one safetensors file, which the writing rank sends to rank 0."""

    entry: FileEntry
    slices: dict[tuple[str, tuple[int, ...], Slice], list[str]]
    """Names of the tensors in the file, by what they have in common: dtype, full shape and slice."""


def build_manifest(files: Mapping[str, Stored], state: bytes) -> bytes:
    """Return the content of manifest.json for the safetensors files in `files` and a state.json that has `state`."""
    layouts: dict[tuple[int, int, Slice], int] = {}  # (prefix layout's number, last slice's file, last slice) -> number
    layout_of: dict[str, int] = {}
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for index, stored in enumerate(files.values()):
        for (dtype, shape, each), names in stored.slices.items():
            for name in names:
                longer = layout_of.get(name, -1), index, each
                layout_of[name] = layouts.setdefault(longer, len(layouts))
                tensors[name] = dtype, shape
    entries = list(layouts)
    number: dict[int, int] = {}
    written = []
    for last in sorted(set(layout_of.values())):
        number[last], slices, layout = len(written), [], last
        while layout != -1:
            layout, index, each = entries[layout]
            slices.append([index, each.offset, each.size])
        written.append(slices[::-1])
    described = {name: stored.entry.model_dump() for name, stored in files.items()}
    content = {
        "format": FORMAT,
        "version": VERSION,
        "files": {**described, STATE: {"bytes": len(state), "xxh3_64": checksum(state)}},
        "layouts": written,
        "tensors": {
            name: {"dtype": dtype, "shape": shape, "layout": number[layout_of[name]]}
            for name, (dtype, shape) in sorted(tensors.items())
        },
    }
    return json.dumps({**content, "xxh3_64": _checksum_of(content)}).encode()


def _checksum_of(content: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != "xxh3_64"}
    return checksum(json.dumps(rest, sort_keys=True).encode())


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint. Raises ConfigError, in one line, if the manifest is missing or wrong."""
    path = folder / MANIFEST
    if not path.exists():
        hint = "; if it is of torchtitan, export it there to Hugging Face" if (folder / ".metadata").exists() else ""
        raise ConfigError([f"{path}: no such file, so {folder} is not a complete checkpoint{hint}"])
    content = read_json(path)
    found = {key: content.get(key) for key in ("format", "version")}
    if found != {"format": FORMAT, "version": VERSION}:
        problem = f"format {show(found['format'])}, version {show(found['version'])}: expected {show(FORMAT)}, version "
        raise ConfigError([f"{path}: {problem}{VERSION}; another version of titanlite may have written it"])
    if content.get("xxh3_64") != _checksum_of(content):
        raise ConfigError([f"{path}: the checksum differs: the file is damaged"])
    manifest = parse(Manifest, content, str(path))
    if problem := _problem_of(manifest):
        raise ConfigError([f"{path}: {problem}"])
    return manifest


def _problem_of(manifest: Manifest) -> str:
    """Return the first problem of a manifest's names and slices; "" if there is none."""
    for name in manifest.files:
        if name != STATE and not re.fullmatch(r"[A-Za-z0-9_-]{1,100}\.safetensors", name):
            return f"files: {show(name)} is no name of a checkpoint's file"
    if STATE not in manifest.files:
        return f"files: {STATE} is missing"
    n_files = len(manifest.files)
    checked = {}
    for name, entry in manifest.tensors.items():
        if entry.layout >= len(manifest.layouts):
            return f"tensors.{name}: there is no layout {entry.layout}"
        if (case := (entry.layout, tuple(entry.shape))) not in checked:
            checked[case] = _problem_of_slices(manifest.layouts[entry.layout], entry.shape, n_files)
        if checked[case]:
            return f"tensors.{name}: {checked[case]}"
    return ""


def _problem_of_slices(slices: list[tuple[int, list[int], list[int]]], shape: list[int], n_files: int) -> str:
    """Return the problem of a tensor's slices, which must cover each element exactly once; "" if there is none."""
    files = [file for file, _, _ in slices]
    if len(set(files)) < len(files) or max(files, default=-1) >= n_files:
        return "each slice must be in another file, and the file must exist"
    for _, offset, size in slices:
        fits = len(offset) == len(size) == len(shape)
        if not fits or not all(n > 0 and a + n <= m for a, n, m in zip(offset, size, shape, strict=True)):
            return f"a slice of size {size} at {offset} is not inside the shape {shape}"
    if math.prod(shape) == 0:
        return ""
    # The boundaries of all slices divide the tensor into a grid, each cell of which exactly one slice must cover.
    bounds = [
        sorted({0, n, *(each for _, offset, size in slices for each in (offset[d], offset[d] + size[d]))})
        for d, n in enumerate(shape)
    ]
    if math.prod(len(each) - 1 for each in bounds) > LARGEST_GRID:
        return "the slices have too many different boundaries"
    index = [dict(zip(each, range(len(each)), strict=True)) for each in bounds]
    covered = np.zeros([len(each) - 1 for each in bounds], dtype=np.int32)
    for _, offset, size in slices:
        covered[tuple(slice(i[a], i[a + n]) for i, a, n in zip(index, offset, size, strict=True))] += 1
    return "" if (covered == 1).all() else "its slices overlap or leave gaps"


def read_json(path: Path, entry: FileEntry | None = None) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ConfigError if the file has no JSON object, or differs from `entry`."""
    try:
        data = read_file(path, LARGEST_MANIFEST)
        if entry and (len(data), checksum(data)) != (entry.bytes, entry.xxh3_64):
            raise ConfigError([f"{path}: it is not the file that the manifest describes: damaged or changed"])
        content = json.loads(data)
    except OSError as error:
        raise cannot_read(f"{path}", error) from None
    except (ValueError, RecursionError):
        raise ConfigError([f"{path}: not valid JSON: the file is damaged"]) from None
    if not isinstance(content, dict):
        raise ConfigError([f"{path}: expected a JSON object"])
    return content
