"""The file of a step's fingerprints: one fingerprint per tensor, and a description of the run.

    FOLDER/fingerprints/step-N.safetensors

A tensor in the file is named "PHASE TENSOR". The phases are "input" (weights, optimizer states and tokens before the
step), "forward" (the output of a module), "backward" (the gradient of the loss with respect to the output), "gradient"
(of a weight, before clipping) and "update" (a weight or optimizer state after the step)."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from safetensors import SafetensorError, deserialize
from safetensors.torch import save
from torch import Tensor

from titanlite.config.hf.values import read_json_object
from titanlite.config.loader import ConfigError, show
from titanlite.config.regular_file import read_file
from titanlite.files.durable import Int63, Record, parse, replace_file
from titanlite.techniques.fingerprints.sketch import N_PRODUCTS, SIZE

FOLDER = "fingerprints"
KEY = "titanlite.fingerprints"  # metadata key under which the file has its Description, as JSON
LARGEST_FILE = 2**27  # maximum size of a fingerprint file in bytes, enough for half a million tensors
LARGEST_SQUARE = 64
"""Largest accepted ratio of the 16 inner products' mean square to the squared norm. The expected ratio is 1. The ratio
times 16 is chi-squared with 16 degrees of freedom, and exceeds 16 x 64 with a probability below 1e-200."""
NAME = re.compile(r"(input|forward|backward|gradient|update) [\w.]{1,200}( \w{1,40})?", re.ASCII)
Dtype = Literal["float64", "float32", "bfloat16", "float16", "float8", "int8", "int4"]
Name, Number = Annotated[str, Field(pattern="^[A-Za-z][A-Za-z0-9_ -]{0,39}$")], Annotated[float, Field(ge=1, le=2**53)]


class Description(Record):
    """Describes the run that wrote fingerprints: its step, its dtypes, and numbers that may explain a difference."""

    step: Int63
    compute_dtype: Dtype  # type in which matrix products are computed
    weights_dtype: Dtype
    state_dtype: Dtype  # type of the optimizer states
    counts: Annotated[dict[Name, Number], Field(max_length=40)]
    """Factors by which a wrong layout could scale gradients: degrees of parallelism, and numbers of tokens."""
    sequences: list[Annotated[int, Field(ge=-(2**53), le=2**53)]] = Field(default_factory=list, max_length=N_PRODUCTS)
    """A hash of all (position, token, target) in the global batch, whatever the order of sequences; empty: unknown."""


def write(folder: Path, description: Description, fingerprints: Mapping[str, Tensor]) -> None:
    metadata = {KEY: description.model_dump_json()}
    tensors = {name: tensor.cpu() for name, tensor in fingerprints.items()}
    path = _path(folder, description.step)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, save(tensors, metadata))


def steps_of(folder: Path) -> list[int]:
    name = re.compile(r"step-(0|[1-9][0-9]{0,17})\.safetensors")
    names = (name.fullmatch(path.name) for path in (folder / FOLDER).glob("step-*"))
    return sorted(int(name[1]) for name in names if name)


def read(folder: Path, step: int) -> tuple[Description, dict[str, Tensor]]:
    """Return the description and fingerprints of a step. Raises ConfigError if the file is unreadable or damaged."""
    path, fingerprints = _path(folder, step), {}
    try:
        content = read_file(path, LARGEST_FILE)
        tensors = deserialize(content)
        header = read_json_object(path, content[8 : 8 + int.from_bytes(content[:8], "little")])
        description = read_json_object(path, (header.get("__metadata__") or {}).get(KEY, "{}").encode())
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
    except (SafetensorError, ValueError) as error:
        raise ConfigError([f"{path}: cannot be read as safetensors ({error}); write it again"]) from None
    described = parse(Description, description, f"{path}: {KEY} in its metadata")
    if described.step != step or not {"sequences", "tokens"} <= described.counts.keys() or not tensors:
        expected = f"expected some tensors, step = {step}, and counts of sequences and tokens"
        raise ConfigError([f"{path}: {KEY} in its metadata: {expected}"])
    for name, tensor in tensors:
        if NAME.fullmatch(name) and (tensor["dtype"], tensor["shape"]) == ("F64", [SIZE]):
            fingerprints[name] = own = torch.frombuffer(tensor["data"], dtype=torch.float64)
            if not (own[0] < 0 or own[1:].square().mean() > LARGEST_SQUARE * own[0]):  # NaN makes this true
                continue
        expected = f"expected a phase, the name of a tensor, and {SIZE} float64 numbers: squared norm, inner products"
        raise ConfigError([f"{path}: {show(name[:80])}: {expected}"])
    return described, fingerprints


def _path(folder: Path, step: int) -> Path:
    return folder / FOLDER / f"step-{step}.safetensors"
