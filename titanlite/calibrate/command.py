"""Measure the devices at hand, for plans of runs on them.

    titanlite calibrate FILE.toml [--ranks N] [--checkpoint-folder DIR]   on this node
    torchrun ... -m titanlite calibrate FILE.toml                        on several nodes, one rank per device

Measures matrix multiplication by shape, attention by length, memory-bound operators by size, what the host needs to
dispatch an operator, each collective by size, within a node and between nodes, the host's memory and its link to the
device, and with --checkpoint-folder how fast a checkpoint is written there. Takes one to three minutes in which
nothing else should run. Writes FILE.toml: `titanlite plan CONFIG --plan.device=FILE.toml` plans with it. On a CPU the
ranks share its cores, so calibrate with as many ranks as the run will have.

Exit status: 0 the file is written; 2 the arguments are wrong; 1 anything else.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import tomli_w
import torch
from rich.console import Console
from rich.table import Table

from titanlite.calibrate.measure import measure_device
from titanlite.config import Launch
from titanlite.config.loader import ConfigError, print_problems
from titanlite.config.schema import Comm
from titanlite.devices import Device
from titanlite.launcher import environment_of_ranks
from titanlite.parallel import mesh
from titanlite.plan.report import empty_table
from titanlite.reliability.files import replace_file


def main(argv: list[str]) -> int:
    """Run `titanlite calibrate`: on the ranks that torchrun has started, or on ranks of this node that it starts."""
    usage = "titanlite calibrate FILE.toml [--ranks N] [--checkpoint-folder DIR]"
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(usage=usage, description=__doc__, formatter_class=style, allow_abbrev=False)
    parser.add_argument("file", type=Path, metavar="FILE.toml", help="the file to write")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks of this node (default: its GPUs; 1 without any)")
    what = "the folder of a run's checkpoints, to measure how fast they are written"
    parser.add_argument("--checkpoint-folder", type=Path, metavar="DIR", help=what)
    arguments = parser.parse_args(argv)
    folder = arguments.checkpoint_folder
    if folder is not None and not folder.is_dir():
        print(f"error: --checkpoint-folder {folder}: no such folder", file=sys.stderr)
        return 2
    if arguments.file.suffix != ".toml" or not arguments.file.absolute().parent.is_dir():
        print(f"error: {arguments.file}: expected a TOML file in a folder that exists", file=sys.stderr)
        return 2
    launched, n_devices = "WORLD_SIZE" in os.environ, torch.cuda.device_count()
    ranks = arguments.ranks if arguments.ranks is not None else max(n_devices, 1)
    if ranks < 1 or (n_devices and ranks > n_devices):
        print(f"error: --ranks {ranks}: expected 1 to {n_devices or 'as many as a run will have'}", file=sys.stderr)
        return 2
    if ranks > 1 and not launched:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
        command = [*launcher, f"--nproc-per-node={ranks}", "-m", "titanlite", "calibrate", str(arguments.file)]
        command += ["--checkpoint-folder", str(folder)] if folder else []
        return 1 if subprocess.run(command, env=environment_of_ranks(ranks), check=False).returncode else 0
    try:
        launch = Launch.from_environment(n_devices)
    except ConfigError as error:
        print_problems(error)
        return 2
    begin = time.monotonic()
    mesh.retain_freed_memory()
    with mesh.process_group(launch, Comm(), str(arguments.file.parent)):
        is_first, per_node = launch.rank == 0, launch.local_world_size
        device = measure_device(
            mesh.device_of(launch), ranks_per_node=per_node, checkpoint_folder=folder, show_progress=is_first
        )
        if is_first:
            write(device, arguments.file)
            Console(highlight=False).print(rates_table(device))
            print(f"wrote {arguments.file} in {time.monotonic() - begin:.0f} s")
    return 0


def write(device: Device, file: Path) -> None:
    """Write a device as a TOML file that `plan.device` can name."""
    values = device.model_dump(exclude_none=True)
    replace_file(file, f"# Written by titanlite calibrate; for plan.device.\n{tomli_w.dumps(values)}".encode())


def rates_table(device: Device) -> Table:
    """Return the best of the measured rates, for a reader to compare with a data sheet."""
    measured = device.measured
    table = empty_table(device.source, "", right=("measured", "unit"))
    for name, rows in measured.matmul.items():
        m, n, k, rate = max(rows, key=lambda row: row[-1])
        table.add_row(f"matrix multiplication, {name}, {m:.0f} x {n:.0f} x {k:.0f}", f"{rate / 1e12:.3g}", "TFLOP/s")
    for name, rows in (("forward", measured.attention), ("backward", measured.attention_backward)):
        length, head_dim, rate = max(rows, key=lambda row: row[-1])
        where = f"{length:,.0f} tokens, head_dim {head_dim:.0f}"
        table.add_row(f"attention, {name}, {where}", f"{rate / 1e12:.3g}", "TFLOP/s")
    table.add_row("memory, the largest product of two tensors", f"{device.memory_bandwidth / 1e9:,.0f}", "GB/s")
    table.add_row("host memory, by the fused AdamW of a rank", f"{device.host_memory_bandwidth / 1e9:,.1f}", "GB/s")
    if device.kind == "gpu":
        table.add_row("copies between host and device", f"{device.host_bandwidth / 1e9:,.1f}", "GB/s")
    table.add_row("dispatch of an operator", f"{measured.operator_seconds * 1e6:.1f}", "us")
    table.add_row("dispatch of an operator on DTensors, besides", f"{measured.dtensor_seconds * 1e6:.1f}", "us")
    for row in measured.collectives:
        size, seconds = row.points[-1]
        where = f"{row.name} of {size / 2**20:.0f} MiB, {row.ranks} ranks on {row.nodes} nodes"
        table.add_row(where, f"{seconds * 1e3:.2f}", "ms")
    return table
