"""Checkpoints of a few made-up tensors, and ways to change their files."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.checkpoint.files import write_file
from titanlite.checkpoint.manifest import MANIFEST, STATE, build_manifest
from titanlite.checkpoint.reader import CheckpointReader
from titanlite.files.durable import checksum

STATE_CONTENT = {"step": 7, "identity": {"seed": 1, "dim": 4}, "skipped": 0, "loss_scale": [1.0, 0]}
STATE_CONTENT |= {"data": {"next_sequence": 0}}
FILES = ("rank-00000.safetensors", "rank-00001.safetensors")


@functools.cache
def tensors(seed: int = 0) -> dict[str, Tensor]:
    """Return tensors of several types and shapes, one of more than one 4 MiB block, one that is a number."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.a": torch.randn(2600, 1024, generator=generator),
        "model.b": torch.randn(8, 6, generator=generator).bfloat16(),
        "optimizer.state.a.step": torch.tensor(3.0 + seed),
        "random.cpu.0": torch.randint(0, 256, (40,), generator=generator, dtype=torch.uint8),
    }


def write_checkpoint(folder: Path, values: dict[str, Tensor] | None = None, **state: Any) -> Path:
    """Write a checkpoint of two files: of what has rows, each has half of them. Return its folder."""
    folder.mkdir(parents=True)
    values, files = values or tensors(), {}
    for rank, name in enumerate(FILES):
        slices = {}
        for key, value in values.items():
            half = len(value) // 2 if value.dim() else 0
            if half:
                rows = value[:half] if rank == 0 else value[half:]
                slices[key] = rows, (rank * half, *(0,) * (value.dim() - 1)), tuple(value.shape)
            elif rank == 0:
                slices[key] = value, (), ()
        files[name] = write_file(folder / name, slices)
    content = json.dumps(STATE_CONTENT | state).encode()
    (folder / STATE).write_bytes(content)
    (folder / MANIFEST).write_bytes(build_manifest(files, content))
    return folder


def change_manifest(folder: Path, change: Callable[[Any], None]) -> None:
    """Change the manifest as somebody would who also updates its checksum."""
    path = folder / MANIFEST
    content = json.loads(path.read_text())
    change(content)
    rest = {key: value for key, value in content.items() if key != "xxh3_64"}
    path.write_text(json.dumps({**rest, "xxh3_64": checksum(json.dumps(rest, sort_keys=True).encode())}))


def change_state(folder: Path, change: Callable[[Any], None]) -> None:
    """Change state.json, and its checksum in the manifest."""
    content = json.loads((folder / STATE).read_text())
    change(content)
    replace_file(folder, STATE, json.dumps(content).encode())


def replace_file(folder: Path, name: str, data: bytes) -> None:
    """Replace a file, and enter it into the manifest as if it had always been there."""
    (folder / name).write_bytes(data)
    header = data if name == STATE else data[: 8 + int.from_bytes(data[:8], "little")]
    entry = {"bytes": len(data), "xxh3_64": checksum(header)}
    change_manifest(folder, lambda content: content["files"].__setitem__(name, entry))


def change_header(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Change the header of a safetensors file, and enter the file into the manifest."""
    data = (folder / name).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header = change(header) or header
    text = json.dumps(header).encode()
    replace_file(folder, name, len(text).to_bytes(8, "little") + text + data[8 + length :])


def flip(path: Path, position: int) -> None:
    """Flip one bit of a byte, counted from the end if negative."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def assert_skipped(checkpoints: Path, step: int) -> None:
    """Assert that the weights after a step are those before it, and that those after the next one are not."""
    readers = [CheckpointReader(checkpoints / f"step-{number}") for number in (step - 1, step, step + 1)]
    before, after, later = [reader.read("model.layers.0.attention.wq.weight") for reader in readers]
    assert torch.equal(before, after)
    assert not torch.equal(after, later)
