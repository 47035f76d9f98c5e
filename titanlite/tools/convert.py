"""Convert the weights of a Llama checkpoint of torchtitan 0.2.2 to a checkpoint that a run can start from.

    titanlite convert CHECKPOINT CONFIG NEW

CHECKPOINT is torchtitan's step-N folder, in the format of PyTorch's distributed checkpoint (DCP), from any layout.
CONFIG has the model's dimensions. NEW does not exist yet: name it as checkpoint.initial_load_path. Weights and the
number of the step are converted, optimizer states are not.

The file .metadata is a pickle, which can run code when it is read. Here it may contain nothing but the classes that DCP
itself writes; anything else is rejected before it is built. The tensors' files are read with weights_only.

Exit status: 0 converted; 2 the checkpoint cannot be read, or is not of this model.
"""

import enum
import io
import json
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from titanlite.checkpoint.files import write_file
from titanlite.checkpoint.manifest import DTYPE_NAMES, LARGEST_MANIFEST, MANIFEST, STATE, build_manifest
from titanlite.checkpoint.reader import CheckpointReader
from titanlite.config import load
from titanlite.config.loader import ConfigError, show
from titanlite.config.regular_file import open_file, read_file
from titanlite.config.schema import Model
from titanlite.files.durable import write_synced
from titanlite.files.new_folder import new_folder
from titanlite.hf.export import partition
from titanlite.hf.names import tensor_shapes
from titanlite.launch.progress import progress

USAGE = "usage: titanlite convert CHECKPOINT CONFIG NEW   (--help tells more)"
FILE_BYTES = 2 * 2**30
"""Most bytes of tensors in a file, unless it is a single one; so many are in host memory at a time."""
NOT_WEIGHTS = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")
STEP = "train_state.step"
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
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
}
"""What .metadata may name: classes that only hold values, and _get_layout, which looks one of torch's up."""


def _enum_member(kind: Any, name: str) -> Any:
    """Stand for getattr, by which Python 3.11.0 to 3.11.3 pickles members of enums. It has no other attributes."""
    if not (isinstance(kind, enum.EnumMeta) and name in kind.__members__):
        raise pickle.UnpicklingError(f"getattr of {name} is not what DCP writes there")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    """Builds only what DCP writes into .metadata."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if name not in ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not what DCP writes there")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """Reads DCP's tensors without running code."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.folder, path = folder, folder / ".metadata"
        try:
            self.metadata = _Unpickler(io.BytesIO(read_file(path, LARGEST_MANIFEST))).load()
            self.entries = dict(self.metadata.state_dict_metadata)
            self.places = {index.fqn: place for index, place in self.metadata.storage_data.items()}
            names = {place.relative_path for place in self.metadata.storage_data.values()}
            others = [name for name in names if not re.fullmatch(r"__\d+_\d+\.distcp", name)]
        except Exception as error:  # a damaged pickle raises nearly anything
            raise ConfigError([f"{path}: rejected: {error or type(error).__name__}"]) from None
        if not isinstance(self.metadata, Metadata) or others:
            raise ConfigError([f"{path}: rejected: it does not describe a checkpoint"])
        self.metadata.storage_meta = None  # DCP fills it in again

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def step(self) -> int:
        """Return the number of the step: that of the trainer or, of weights alone, that of the folder's name."""
        place, name = self.places.get(STEP), re.fullmatch(r"step-(\d{1,18})", self.folder.name)
        if place is None and name is None:
            raise ConfigError([f"{self.folder}: has no {STEP}; expected a folder with torchtitan's name, step-N"])
        if place is None:
            return int(name[1])
        try:
            with open_file(self.folder / place.relative_path) as file:
                file.seek(place.offset)
                step = torch.load(io.BytesIO(file.read(min(place.length, 2**20))), weights_only=True)
        except Exception as error:
            raise ConfigError([f"{self.folder}: {STEP} cannot be read: {_first_line(error)}"]) from None
        if type(step) is not int or step < 1:
            raise ConfigError([f"{self.folder}: {STEP}: expected an integer >= 1"])
        return step

    def read(self, names: list[str]) -> dict[str, torch.Tensor]:
        """Return some tensors. Those that the checkpoint has are unsharded here, whatever the layout was."""
        tensors = {
            name: torch.full(self.entries[name].size, torch.nan, dtype=self.entries[name].properties.dtype)
            for name in names
        }
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that there is one process
                dcp.load(dict(tensors), storage_reader=self, no_dist=True)
        except BaseException as error:  # DCP wraps what its readers raise in an exception of its own
            if isinstance(error, KeyboardInterrupt):
                raise
            raise ConfigError([f"{self.folder}: {names[0]} cannot be read: {_first_line(error)}"]) from None
        for name, tensor in tensors.items():
            if tensor.isnan().any():
                raise ConfigError([f"{self.folder}: {name} is not complete, or has numbers that are NaN"])
        return tensors


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _check(reader: _Reader, model: Model) -> list[str]:
    """Return the names of the weights. Raises ConfigError if they are not those of the model."""
    shapes, folder = tensor_shapes(model), reader.folder
    fields = Model.model_fields
    of_families = [key for key in model.identity() if key not in fields or not fields[key].is_required()]
    if model.qk_norm or of_families:  # torchtitan's order of channels is another one
        raise ConfigError([f"{folder}: only a Llama is converted; have torchtitan export this model to Hugging Face"])
    found = {name for name in reader.entries if not name.startswith(NOT_WEIGHTS)}
    problems = [f"{folder}: lacks {name}, which the model has" for name in sorted(shapes.keys() - found)[:1]]
    problems += [f"{folder}: has {show(name)}, which the model lacks" for name in sorted(found - shapes.keys())[:1]]
    for name in sorted(found & shapes.keys()):
        entry = reader.entries[name]
        if not isinstance(entry, TensorStorageMetadata) or not entry.properties.dtype.is_floating_point:
            problems.append(f"{folder}: {name} is no tensor of weights")
        elif entry.size != shapes[name]:
            problems.append(f"{folder}: {name} is {list(entry.size)}, and the model's is {list(shapes[name])}")
    if problems:
        raise ConfigError(problems[:3])
    return list(shapes)


def convert(old: Path, model: Model, new: Path) -> None:
    """Write the weights of torchtitan's checkpoint `old` as a checkpoint of titanlite, folder `new`.

    Raises:
        ConfigError: if `old` is not such a checkpoint, is damaged, or contains code; if `new` exists.
    """
    if not (old / ".metadata").is_file():
        raise ConfigError([f"{old}: expected a step-N folder of torchtitan, which has a .metadata file"])
    reader = _Reader(old)
    names, state = _check(reader, model), {"step": reader.step(), "identity": model.identity()}
    content = json.dumps({**state, "data": {"next_sequence": 0}}, indent=1).encode()
    sizes = {name: reader.entries[name].size.numel() * reader.entries[name].properties.dtype.itemsize for name in names}
    with new_folder(new) as unfinished:
        files = {}
        with progress(f"converting {old.name}", total=len(names), unit="tensors") as advance:
            for number, group in enumerate(partition(sizes, FILE_BYTES)):
                tensors, file = reader.read(group), f"part-{number:05d}.safetensors"
                slices = {
                    f"model.{name}": (each, (0,) * each.dim(), tuple(each.shape)) for name, each in tensors.items()
                }
                files[file] = write_file(unfinished / file, slices)
                advance(len(group))
        write_synced(unfinished / STATE, content)
        write_synced(unfinished / MANIFEST, build_manifest(files, content))
    CheckpointReader(new)


def main(argv: list[str]) -> int:
    """Run `titanlite convert`. Returns the exit status."""
    if "-h" in argv or "--help" in argv:
        print(__doc__)
        return 0
    if len(argv) != 3 or any(argument.startswith("-") for argument in argv):
        raise ConfigError([f"expected a checkpoint, a config and a folder to write; {USAGE}"])
    convert(Path(argv[0]), load([argv[1]]).config.model, Path(argv[2]))
    print(f"wrote {argv[2]}")
    return 0
