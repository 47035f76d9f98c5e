"""List and verify the checkpoints of a run, or average several.

    titanlite checkpoint FOLDER
    titanlite checkpoint average OUT FOLDER [FOLDER ...]

FOLDER is a step-N folder, or a folder of step-N folders. Every byte of a checkpoint is compared with its checksum.
Checkpoints that no run resumes from are listed without a comparison: step-N.diverged, step-N.suspect, step-N.damaged.

`average` writes the mean of the weights of all checkpoints (a model soup, arXiv:2203.05482, or stochastic weight
averaging, arXiv:1803.05407) as OUT/checkpoint/step-N, where N is the newest step, and the newest run's config.toml into
OUT. OUT has no optimizer states. titanlite export, generate, eval and checkpoint.initial_load_path can read OUT.

Exit status: 0 every checkpoint that a run may resume from is undamaged; 2 a checkpoint is damaged, or there is none.
"""

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from titanlite.checkpoint.export import config_file_of_run, model_options
from titanlite.checkpoint.files import write_file
from titanlite.checkpoint.folder import SET_ASIDE, UNCONFIRMED, checkpoints, state_of
from titanlite.checkpoint.initial_weights import step_folders
from titanlite.checkpoint.manifest import MANIFEST, STATE, build_manifest
from titanlite.checkpoint.reader import CheckpointReader
from titanlite.config.loader import ConfigError, print_problems
from titanlite.files.durable import write_synced
from titanlite.files.new_folder import new_folder
from titanlite.launch.progress import progress


def main(argv: list[str]) -> int:
    """Run `titanlite checkpoint`. Returns the exit status."""
    if "-h" in argv or "--help" in argv:
        print(__doc__)
        return 0
    if argv[:1] == ["average"]:
        average([Path(name) for name in argv[1:]])
        return 0
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ConfigError(["expected one folder; usage: titanlite checkpoint FOLDER   (--help tells more)"])
    folders, status = step_folders(Path(argv[0]), "", UNCONFIRMED), 0
    for folder in folders:
        try:
            print(f"{folder}: {describe(folder)}", flush=True)
        except ConfigError as error:
            print_problems(error)
            status = 2
    if state_of(Path(argv[0])) is None:
        for folder in checkpoints(folders[0].parent, *SET_ASIDE):
            print(f"{folder}: not read: {SET_ASIDE[state_of(folder)[1]]}")
    return status


def describe(folder: Path) -> str:
    """Verify a checkpoint and return a line that describes it. Raises ConfigError if the checkpoint is damaged."""
    reader, begin = CheckpointReader(folder), time.monotonic()
    size = sum(entry.bytes for entry in reader.manifest.files.values()) / 2**30
    with progress(f"verifying {folder.name}", total=round(size * 1024), unit="MiB") as advance:
        done = 0
        for n_bytes in reader.verify():
            mib, done = divmod(done + n_bytes, 2**20)
            advance(mib)
    n_weights = sum(shape.numel() for name, shape in reader.shapes.items() if name.startswith("model."))
    note = ", unconfirmed: its weights have given no finite step yet" if folder.suffix == UNCONFIRMED else ""
    n_files, seconds = len(reader.manifest.files), time.monotonic() - begin
    return (
        f"step {reader.state['step']}{note}, {n_weights:,} parameters, {len(reader.shapes)} tensors, {size:.2f} GiB in "
        f"{n_files} files; verified at {size / max(seconds, 1e-9):.1f} GiB/s"
    )


def average(places: Sequence[Path]) -> None:
    """Write the mean of the checkpoints in `places[1:]` to the folder `places[0]`, which must not exist. Raises
    ConfigError if there are fewer than two checkpoints, one is damaged, or they are of different models."""
    out, folders = places[0] if places else Path(), [path for place in places[1:] for path in step_folders(place)]
    if len({path.resolve() for path in folders}) < max(2, len(folders)):
        found = ", ".join(map(str, folders)) or "none"
        raise ConfigError([f"checkpoint average OUT FOLDER: expected two or more different checkpoints, not {found}"])
    readers = sorted(map(CheckpointReader, folders), key=lambda reader: reader.state["step"])
    shapes = [{name: shape for name, shape in each.shapes.items() if name.startswith("model.")} for each in readers]
    if adapters := [each.path for each in readers if each.state["identity"].get("lora.rank")]:
        problem = "has adapters (LoRA), and the product of the means of A and B is not the mean of their products"
        raise ConfigError([f"{adapters[0]}: {problem}; average checkpoints of full weights"])
    options = [model_options(each.path, each.state) for each in readers]
    for number in range(len(readers) - 1):
        if (shapes[number], options[number]) != (shapes[-1], options[-1]):
            raise ConfigError([f"{readers[number].path}: of another model than {readers[-1].path}"])
    newest = readers[-1]
    with new_folder(out) as folder, progress(f"writing {out}", total=len(shapes[-1]), unit="tensors") as advance:

        def mean(name: str, target: Tensor) -> Tensor:
            total = sum(reader.read(name).double() for reader in readers)
            advance(1)
            return (total / len(readers)).to(target.dtype)

        path = folder / "checkpoint" / f"step-{newest.state['step']}"
        path.mkdir(parents=True)
        slices = {}
        for name, shape in shapes[-1].items():
            dtype = torch.promote_types(newest.dtypes[name], torch.float32)
            slices[name] = torch.empty(shape, dtype=dtype, device="meta"), (0,) * len(shape), tuple(shape)
        files = {(file := "rank-00000.safetensors"): write_file(path / file, slices, mean)}
        identity = newest.state["identity"] | {"average": [str(each.path) for each in readers]}
        state = json.dumps(newest.state | {"identity": identity, "data": {}}, indent=1).encode()
        write_synced(path / STATE, state)
        write_synced(path / MANIFEST, build_manifest(files, state))
        if (config := config_file_of_run(newest.path)).is_file():
            shutil.copyfile(config, folder / "config.toml")
    print(f"wrote {out}: step-{newest.state['step']}, the mean of {', '.join(str(each.path) for each in readers)}")
