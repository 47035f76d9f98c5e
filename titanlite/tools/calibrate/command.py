"""Measure the devices at hand, for plans of runs on them.

    titanlite calibrate FILE.toml [--ranks N] [--checkpoint-folder DIR]   on this node
    torchrun ... -m titanlite calibrate FILE.toml                        on several nodes, one rank per device

Measures matrix multiplication by shape, attention by length, memory-bound operators by size, the host's time to
dispatch an operator, each collective by size within a node and between nodes, the host's memory and its link to the
device, and with --checkpoint-folder how fast a checkpoint is written to DIR. Takes one to three minutes, in which
nothing else should run. Writes FILE.toml, for `titanlite plan CONFIG --plan.device=FILE.toml`. Ranks on a CPU share its
cores, so calibrate with as many ranks as the run will have.

Exit status: 0 the file is written; 2 the arguments are wrong; 1 anything else.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w

from titanlite.config import Launch
from titanlite.config.loader import ConfigError
from titanlite.config.schema import Comm
from titanlite.config.types import MOST_RANKS
from titanlite.launch.arguments import Parser, count, new_file
from titanlite.launch.launcher import count_devices, run_on_ranks

if TYPE_CHECKING:
    from titanlite.metrics.devices import Device


def main(argv: list[str]) -> int:
    """Run `titanlite calibrate` on torchrun's ranks, or start ranks on this node. Returns the exit status."""
    parser = Parser("titanlite calibrate FILE.toml [--ranks N] [--checkpoint-folder DIR]", __doc__)
    parser.add_argument("file", type=new_file, metavar="FILE.toml", help="the file to write")
    parser.add_argument("--ranks", type=count(MOST_RANKS), metavar="N", help="of this node (default: its GPUs, or 1)")
    what = "the folder of a run's checkpoints, to measure how fast they are written"
    parser.add_argument("--checkpoint-folder", type=Path, metavar="DIR", help=what)
    launched = "WORLD_SIZE" in os.environ
    arguments, n_devices = parser.parse_args(argv), count_devices()
    file, folder, ranks = arguments.file, arguments.checkpoint_folder, arguments.ranks or max(n_devices, 1)
    if folder is not None and not folder.is_dir():
        raise ConfigError([f"--checkpoint-folder {folder}: no such folder"])
    if file.suffix != ".toml":
        raise ConfigError([f"{file}: expected a TOML file"])
    if n_devices and ranks > n_devices:
        raise ConfigError([f"--ranks {ranks}: expected 1 to {n_devices}"])
    launch = Launch.from_environment(n_devices)
    if ranks > 1 and not launched:
        options = ["--checkpoint-folder", str(folder)] if folder else []
        return 1 if run_on_ranks(ranks, ["calibrate", str(file), *options]) else 0
    from titanlite.launch.process import retain_freed_memory
    from titanlite.launch.process_group import device_of, process_group
    from titanlite.tools.calibrate.measure import measure_device

    begin = time.monotonic()
    retain_freed_memory()
    with process_group(launch, Comm(), str(file.parent)):
        is_first, per_node = launch.rank == 0, launch.local_world_size
        device = measure_device(
            device_of(launch), ranks_per_node=per_node, checkpoint_folder=folder, show_progress=is_first
        )
        if is_first:
            write(device, file)
            rates = f"{device.bf16 / 1e12:.3g} TFLOP/s in bfloat16, {device.memory_bandwidth / 1e9:,.0f} GB/s of memory"
            dispatch = f"{device.measured.operator_seconds * 1e6:.1f} us to dispatch an operator"
            print(f"{device.source}: at best {rates}; {dispatch}")
            print(f"wrote {file} in {time.monotonic() - begin:.0f} s")
    return 0


def write(device: Device, file: Path) -> None:
    from titanlite.files.durable import replace_file

    values = device.model_dump(exclude_none=True)
    replace_file(file, f"# Written by titanlite calibrate; for plan.device.\n{tomli_w.dumps(values)}".encode())
