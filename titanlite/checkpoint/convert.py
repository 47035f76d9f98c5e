"""Convert a checkpoint of the older format, that of PyTorch's distributed checkpoint (DCP), to the present one.

    titanlite convert OLD NEW

OLD is a step-N folder with a .metadata file; NEW is a folder that does not exist yet. The layout does not matter.

.metadata is a pickle, which can run code when it is read. Here it may contain nothing but the classes that DCP itself
writes; anything else is rejected before it is built. The tensors' files are read with weights_only.

Exit status: 0 converted; 2 the checkpoint cannot be read, or is not what it should be.
"""

import io
import json
import os
import pickle
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from pydantic import ValidationError
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from titanlite.checkpoint.files import write_file
from titanlite.checkpoint.manifest import DTYPE_NAMES, LARGEST_MANIFEST, MANIFEST, STATE, build_manifest, read_json
from titanlite.checkpoint.reader import CheckpointReader
from titanlite.config.loader import ConfigError, print_problems
from titanlite.config.regular_file import read_file
from titanlite.config.schema import Model
from titanlite.hf.export import partition
from titanlite.progress import progress
from titanlite.reliability.files import first_problem, sync_folder, write_synced

USAGE = "usage: titanlite convert OLD NEW   (--help tells more)"
FILE_BYTES = 2 * 2**30
"""Most bytes of tensors in a file, unless it is a single one; so many are in host memory at a time."""
ALLOWED = {
    "pathlib": ("PosixPath", "PurePosixPath"),
    "torch": ("Size", *(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
}
"""What .metadata may name: classes that only hold values, and _get_layout, which looks one of torch's up."""


class _Unpickler(pickle.Unpickler):
    """Builds only what DCP writes into .metadata for tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not what DCP writes there")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """Reads DCP's tensors without running code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return .metadata. Raises ConfigError if it is damaged, or has anything but descriptions of tensors."""
        path = Path(self.path) / ".metadata"
        try:
            metadata = _Unpickler(io.BytesIO(read_file(path, LARGEST_MANIFEST))).load()
        except Exception as error:  # a damaged pickle raises nearly anything
            raise ConfigError([f"{path}: rejected: {error or type(error).__name__}"]) from None
        entries = getattr(metadata, "state_dict_metadata", None)
        if not isinstance(metadata, Metadata) or not isinstance(entries, dict):
            raise ConfigError([f"{path}: rejected: it does not describe a checkpoint"])
        for name, entry in entries.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise ConfigError([f"{path}: rejected: {name} is no tensor"])
        metadata.storage_meta = None  # DCP fills it in again
        return metadata


def convert(old: Path, new: Path) -> None:
    """Write the checkpoint in folder `old` again in the present format, as folder `new`.

    Raises:
        ConfigError: if `old` is not such a checkpoint, is damaged, or contains code; if `new` exists.
    """
    unfinished = new.with_name(f"{new.name}.tmp")
    for path, what in ((new, "name a folder that does not"), (unfinished, "if no other conversion runs, delete it")):
        if os.path.lexists(path):
            raise ConfigError([f"{path}: it exists already; {what}"])
    if not (old / ".metadata").is_file():
        raise ConfigError([f"{old}: expected a step-N folder of the older format, which has a .metadata file"])
    unfinished.mkdir(parents=True)
    try:
        _convert(old, new, unfinished)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _convert(old: Path, new: Path, unfinished: Path) -> None:
    reader = _Reader(old)
    entries = reader.read_metadata().state_dict_metadata
    state = _state(old)
    sizes = {name: entry.size.numel() * entry.properties.dtype.itemsize for name, entry in entries.items()}
    files = {}
    with progress(f"converting {old.name}", total=len(entries), unit="tensors") as advance:
        for index, names in enumerate(partition(sizes, FILE_BYTES)):
            tensors = {}
            for name in names:
                tensors[name] = torch.empty(entries[name].size, dtype=entries[name].properties.dtype)
                try:
                    warnings.simplefilter("ignore", UserWarning)  # that there is one process
                    dcp.load({name: tensors[name]}, storage_reader=reader, no_dist=True)
                except Exception as error:  # DCP wraps what its readers raise in its own exception
                    cause = str(error).strip().splitlines() or [type(error).__name__]
                    raise ConfigError([f"{old}: {name} cannot be read: {cause[-1]}"]) from None
                advance()
            slices = {name: (tensor, (0,) * tensor.dim(), tuple(tensor.shape)) for name, tensor in tensors.items()}
            file = f"part-{index:05d}.safetensors"
            files[file] = write_file(unfinished / file, slices)
    write_synced(unfinished / STATE, state)
    write_synced(unfinished / MANIFEST, build_manifest(files, state))
    sync_folder(unfinished)
    unfinished.rename(new)
    sync_folder(new.parent)
    CheckpointReader(new)


def _state(old: Path) -> bytes:
    """Return state.json for the present format: options of the model that are newer than the checkpoint have the values
    that the model had without them."""
    content = read_json(old / STATE)
    identity = content.get("identity")
    if not isinstance(identity, dict):
        raise ConfigError([f"{old / STATE}: identity: expected an object"])
    try:
        model = Model.model_validate({key: value for key, value in identity.items() if key in Model.model_fields})
    except ValidationError as error:
        raise ConfigError([f"{old / STATE}: identity.{first_problem(error)}"]) from None
    return json.dumps({**content, "identity": {**identity, **model.identity()}}, indent=1).encode()


def main(argv: list[str]) -> int:
    """Run `titanlite convert`. Returns the exit status."""
    if "-h" in argv or "--help" in argv:
        print(__doc__)
        return 0
    if len(argv) != 2 or any(argument.startswith("-") for argument in argv):
        print(f"error: expected two folders; {USAGE}", file=sys.stderr)
        return 2
    try:
        convert(Path(argv[0]), Path(argv[1]))
    except ConfigError as error:
        print_problems(error)
        return 2
    print(f"wrote {argv[1]}")
    return 0
