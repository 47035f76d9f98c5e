"""List and verify the checkpoints of a run.

    titanlite checkpoint FOLDER

FOLDER is a step-N folder, or one that contains such folders. Every byte is read and compared with its checksum. The
checkpoints that no start resumes from are listed afterwards: step-N.diverged, step-N.suspect, step-N.damaged.

Exit status: 0 every checkpoint that a start may resume from is complete and undamaged; 2 one is not, or there is none.
"""

import time
from pathlib import Path

from titanlite.checkpoint.folder import SET_ASIDE, UNCONFIRMED, checkpoints, state_of
from titanlite.checkpoint.initial_weights import step_folders
from titanlite.checkpoint.reader import CheckpointReader
from titanlite.config.loader import ConfigError, print_problems
from titanlite.launch.progress import progress


def main(argv: list[str]) -> int:
    """Run `titanlite checkpoint`. Returns the exit status."""
    if "-h" in argv or "--help" in argv:
        print(__doc__)
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
    """Verify a checkpoint and return a line about it. Raises ConfigError if it is damaged."""
    reader, begin = CheckpointReader(folder), time.monotonic()
    size = sum(entry.bytes for entry in reader.manifest.files.values()) / 2**30
    with progress(f"verifying {folder.name}", total=round(size * 1024), unit="MiB") as advance:
        done = 0
        for n_bytes in reader.verify():
            done += n_bytes
            advance(done // 2**20)
            done %= 2**20
    n_weights = sum(shape.numel() for name, shape in reader.shapes.items() if name.startswith("model."))
    note = ", unconfirmed: its weights have given no finite step yet" if folder.suffix == UNCONFIRMED else ""
    n_files, seconds = len(reader.manifest.files), time.monotonic() - begin
    return (
        f"step {reader.state['step']}{note}, {n_weights:,} parameters, {len(reader.shapes)} tensors, {size:.2f} GiB in "
        f"{n_files} files; verified at {size / max(seconds, 1e-9):.1f} GiB/s"
    )
