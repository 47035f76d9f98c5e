"""The number of ranks that a config asks for on this node, for run_train.sh and `titanlite train`.

python -m titanlite.launcher CONFIG [--section.key=value ...]     print the number of ranks of this node
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from titanlite.config import Config, ConfigError, Launch, LoadedConfig, check, load
from titanlite.config.launch import count_from_environment, plan_command, quantity
from titanlite.config.loader import print_problems
from titanlite.config.reference import help_text
from titanlite.config.schema import count_parameters

BYTES_PER_PARAMETER = 6
"""Persistent memory of a parameter, at least: weight, exp_avg and exp_avg_sq in bfloat16."""


def ranks_wanted(loaded: LoadedConfig[Config], environment: Mapping[str, str], n_devices: int) -> int:
    """Return the number of ranks on all nodes: the product of the degrees; one per device if the shard degree is -1;
    NGPU per node if that is set.

    Args:
        environment: NGPU and NNODES are read from it.
        n_devices: accelerators of a node.
    """
    nodes = count_from_environment(environment, "NNODES", 1)
    if environment.get("NGPU"):
        return nodes * count_from_environment(environment, "NGPU", 1)
    parallelism = loaded.config.parallelism
    if parallelism.data_parallel_shard_degree == -1:
        return max(parallelism.ranks_per_shard, nodes * max(n_devices, 1))
    return parallelism.world_size


def ranks_per_node(loaded: LoadedConfig[Config], environment: Mapping[str, str], n_devices: int) -> int:
    """Return the number of ranks to start on this node.

    Args:
        environment: NGPU and NNODES are read from it.
        n_devices: accelerators of a node.

    Raises:
        ConfigError: if the nodes cannot have equally many ranks, `check` rejects the launch, or nodes without devices
            have too little memory for weights and optimizer states.
    """
    nodes, wanted = count_from_environment(environment, "NNODES", 1), ranks_wanted(loaded, environment, n_devices)
    needed = count_parameters(loaded.config.model) * BYTES_PER_PARAMETER
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if not n_devices and needed > nodes * memory:
        problem = (
            f"{loaded.file}: needs {quantity(wanted, 'device')}, and this node has none; its memory of "
            f"{memory / 2**30:.0f} GiB is too small for weights and optimizer states of {needed / 2**30:,.0f} GiB; "
            f"{plan_command(loaded.file)}"
        )
        raise ConfigError([problem])
    if wanted % nodes:
        ranks = quantity(wanted, "rank")
        raise ConfigError([f"{loaded.file}: {ranks} cannot be divided evenly among NNODES = {nodes} nodes"])
    check(loaded, Launch(0, 0, wanted, wanted // nodes, n_devices))
    return wanted // nodes


def count_devices() -> int:
    """Return the number of accelerators of this node. Importing torch takes seconds, so it is asked only where a driver
    is installed."""
    if not shutil.which("nvidia-smi") and not Path("/dev/kfd").exists():
        return 0
    import torch

    return torch.cuda.device_count()


def main(argv: list[str]) -> int:
    """Print the number of ranks to start on this node, and return the exit status."""
    if "--help" in argv or "-h" in argv:
        print(help_text())
        return 0
    try:
        print(ranks_per_node(load(argv), os.environ, count_devices()))
    except ConfigError as error:
        print_problems(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
