"""The file of a fingerprint step: one fingerprint per tensor, and what the run was.

    FOLDER/fingerprints/step-N.safetensors

A tensor of the file is named "PHASE TENSOR": "input" is what the step began with, "forward" the output of a module,
"backward" the gradient of the loss with respect to that output, "gradient" that of a weight before clipping, and
"update" a weight or optimizer state after the step. Any program can write such a file (examples/fingerprints).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from titanlite.config.loader import ConfigError, printable
from titanlite.files.durable import Record, first_problem, replace_file
from titanlite.hf.load import open_safetensors
from titanlite.techniques.fingerprints.sketch import SIZE

FOLDER = "fingerprints"
KEY = "titanlite.fingerprints"
"""The key of the file's metadata that has the description, as JSON."""


class Description(Record):
    """What the run of a fingerprint was, as far as a comparison needs it."""

    step: int
    compute_dtype: str
    """Of matrix products: a name of torch's, or float8 or int8."""
    weights_dtype: str
    state_dtype: str
    """Of optimizer states: a name of torch's, or int8, int4 or float8."""
    counts: dict[str, float]
    """What gradients could be multiplied by if the layout were wrong: degrees, and numbers of tokens."""


def write(folder: Path, description: Description, fingerprints: Mapping[str, Tensor]) -> None:
    """Write the file of a step as a whole. `folder` is that of the run."""
    metadata = {KEY: description.model_dump_json()}
    tensors = {name: tensor.cpu() for name, tensor in fingerprints.items()}
    path = _path(folder, description.step)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, save(tensors, metadata))


def steps_of(folder: Path) -> list[int]:
    """Return the steps that a run's folder has fingerprints of, ascending."""
    names = (re.fullmatch(r"step-(\d{1,18})\.safetensors", path.name) for path in (folder / FOLDER).glob("step-*"))
    return sorted(int(name[1]) for name in names if name)


def read(folder: Path, step: int) -> tuple[Description, dict[str, Tensor]]:
    """Return the description and the fingerprints of a step of a run.

    Raises:
        ConfigError: if the file cannot be read or is not such a file.
    """
    path = _path(folder, step)
    with open_safetensors(path, "write") as tensors:
        description: Any = (tensors.metadata() or {}).get(KEY, "")
        fingerprints = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118, it has no iterator
    try:
        described = Description.model_validate_json(description)
    except ValueError as error:
        raise ConfigError([f"{path}: {KEY} in its metadata: {first_problem(error)}"]) from None
    for name, tensor in fingerprints.items():
        if tensor.shape != (SIZE,) or not tensor.is_floating_point():
            raise ConfigError([f"{path}: {printable(name)}: expected {SIZE} floating-point numbers"])
    return described, {name: tensor.double() for name, tensor in fingerprints.items()}


def _path(folder: Path, step: int) -> Path:
    return folder / FOLDER / f"step-{step}.safetensors"
