"""Read a checkpoint: full tensors in one process, or each rank's slices under any layout."""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from titanlite.checkpoint.files import CheckedFile
from titanlite.checkpoint.folder import state_of
from titanlite.checkpoint.manifest import DTYPES, STATE, read_json, read_manifest
from titanlite.checkpoint.tensors import plain_shard
from titanlite.config.loader import ConfigError
from titanlite.files.durable import Record, parse
from titanlite.parallel.shards import Slice, shard_slice


class _State(Record, extra="allow"):
    """The content of state.json. The data loader parses `data`; other objects parse the extra keys that they saved."""

    step: int = Field(ge=1)
    identity: dict[str, int | float | bool | str | list[Any]]
    config: dict[str, Any] = Field(default={})
    skipped: int = Field(default=0, ge=0)
    data: dict[str, Any]


class CheckpointReader:
    """Reads one complete checkpoint, a step-N folder. Every method raises ConfigError, with one line that names file
    and tensor, if a file is missing, is damaged, is of another checkpoint or has another format."""

    def __init__(self, path: Path):
        self.path, self.manifest = path, read_manifest(path)
        content = read_json(path / STATE, self.manifest.files[STATE])
        self.state: dict[str, Any] = parse(_State, content, f"{path / STATE}").model_dump()
        state = state_of(path)
        if state and state[0] != self.state["step"]:
            raise ConfigError([f"{path / STATE}: step = {self.state['step']}, which is not the folder's"])
        self._files: dict[int, CheckedFile] = {}

    @functools.cached_property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: torch.Size(entry.shape) for name, entry in self.manifest.tensors.items()}

    @functools.cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: DTYPES[entry.dtype] for name, entry in self.manifest.tensors.items()}

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in list(self._files.values()))

    def read(self, name: str) -> Tensor:
        """Return a full tensor in host memory."""
        if name not in self.shapes:
            raise ConfigError([f"{self.path}: {name} is not in the checkpoint"])
        shape = self.shapes[name]
        everything = Slice((0,) * len(shape), tuple(shape))
        self._open(name, everything)  # verify the files' sizes first: a wrong shape must not allocate memory
        full = torch.empty(shape, dtype=self.dtypes[name])
        self._fill(full, name, everything)
        return full

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Check that the checkpoint contains all `tensors`, plain tensors or DTensors, with their full shapes."""
        if missing := [name for name in tensors if name not in self.shapes]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ConfigError([f"{self.path}: {missing[0]}{more} is not in the checkpoint; it is of another model"])
        for name, tensor in tensors.items():
            if self.shapes[name] != tensor.shape:
                shapes = f"{list(self.shapes[name])}, expected {list(tensor.shape)}"
                raise ConfigError([f"{self.path}: {name} has shape {shapes}; it is of another model"])

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill this rank's shards of `tensors` in their own dtypes. Only files with needed elements are opened."""
        self.check(tensors)
        shards = {name: (plain_shard(tensor), shard_slice(tensor)) for name, tensor in tensors.items()}
        for name, (_, wanted) in shards.items():
            self._open(name, wanted)
        for name, (local, wanted) in shards.items():
            self._fill(local, name, wanted)

    def verify(self) -> Iterator[int]:
        """Read all tensors and verify their checksums. Yields the number of bytes of each block read, at most 4 MiB."""
        for index in range(len(self.manifest.file_names)):
            if self.manifest.file_names[index] != STATE:
                yield from self._file(index).verify()

    def _open(self, name: str, wanted: Slice) -> None:
        for index, _ in self.manifest.slices(name, wanted):
            self._file(index)

    def _fill(self, target: Tensor, name: str, wanted: Slice) -> None:
        for index, _ in self.manifest.slices(name, wanted):
            self._file(index).read_into(target, name, wanted)

    def _file(self, index: int) -> CheckedFile:
        if index not in self._files:
            name, tensors = self.manifest.file_names[index], self.manifest.names_of_file(index)
            expected = {each: (self.manifest.tensors[each].dtype, stored) for each, stored in tensors.items()}
            self._files[index] = CheckedFile(self.path / name, self.manifest.files[name], expected)
        return self._files[index]
