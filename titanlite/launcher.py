"""How many ranks a config wants on this node, for run_train.sh and `titanlite train`."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from titanlite.config import USAGE, Config, ConfigError, Launch, LoadedConfig, check, load
from titanlite.config.launch import count_from_environment, other_degrees, plan_command, ranks_in_words
from titanlite.config.loader import help_text, print_problems
from titanlite.config.schema import count_parameters


def ranks_wanted(loaded: LoadedConfig[Config], environment: Mapping[str, str], n_devices: int) -> int:
    """How many ranks a launch of a config has over all hosts: what the degrees ask for; where the shards are what
    remains, one a device; or NGPU a host.

    Args:
        environment: of which NGPU and NNODES are read.
    """
    hosts = count_from_environment(environment, "NNODES", 1)
    if environment.get("NGPU"):
        return hosts * count_from_environment(environment, "NGPU", 1)
    parallelism = loaded.config.parallelism
    product, shard = math.prod(other_degrees(parallelism).values()), parallelism.data_parallel_shard_degree
    return product * shard if shard != -1 else max(product, hosts * max(n_devices, 1))


BYTES_KEPT = 6
"""Of a weight from step to step, at the least: itself and two moments in bfloat16."""


def ranks_per_node(loaded: LoadedConfig[Config], environment: Mapping[str, str], n_devices: int) -> int:
    """How many ranks run_train.sh starts on this host.

    Args:
        environment: of which NGPU and NNODES are read.

    Raises:
        ConfigError: if the degrees and the hosts do not fit together, `check` refuses the resulting launch, or there is
            no device and the host's memory does not hold what the ranks keep from step to step.
    """
    hosts, wanted = count_from_environment(environment, "NNODES", 1), ranks_wanted(loaded, environment, n_devices)
    kept = count_parameters(loaded.config.model) * BYTES_KEPT
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if not n_devices and kept > hosts * memory:
        devices = f"{wanted} {'device' if wanted == 1 else 'devices'}"
        raise ConfigError(
            [
                f"{loaded.file}: needs {devices}, and this host has none; nor has its memory of "
                f"{memory / 2**30:.0f} GiB room for weights and optimizer states of {kept / 2**30:,.0f} GiB; "
                f"{plan_command(loaded.file)}"
            ]
        )
    if wanted % hosts:
        raise ConfigError([f"{loaded.file}: {ranks_in_words(wanted)} cannot be dealt evenly to NNODES = {hosts} hosts"])
    check(loaded, Launch(0, 0, wanted, wanted // hosts, n_devices))
    return wanted // hosts


def count_devices() -> int:
    """Accelerators of this host. torch is asked only where a driver is installed: importing it takes seconds."""
    if not shutil.which("nvidia-smi") and not Path("/dev/kfd").exists():
        return 0
    import torch

    return torch.cuda.device_count()


def main(argv: list[str]) -> None:
    if "--help" in argv or "-h" in argv:
        print(help_text(Config, USAGE))
        return
    try:
        if argv[:1] == ["--ranks-per-node"]:  # run_train.sh: the launch is checked once, before any rank is started
            print(ranks_per_node(load(argv[1:]), os.environ, count_devices()))
        else:
            print(load(argv).config.toml(), end="")
    except ConfigError as error:
        print_problems(error)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
