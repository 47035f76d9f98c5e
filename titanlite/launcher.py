"""Start a config's ranks on this node with torchrun.

    titanlite train CONFIG [--section.key=value ...]

Environment:
    NGPU=N          ranks on this node, instead of what the config's degrees ask for
    LOG_RANK=0,1    ranks of this node whose lines are shown (default 0)
    NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, JOB_ID   for a multi-node run; run the command on each node

The config is checked once, here, before any rank starts: a mistake is one line, not a traceback of every rank.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from titanlite.config import Config, ConfigError, Launch, LoadedConfig, check, load
from titanlite.config.launch import count_from_environment, plan_command, quantity, raise_open_file_limit
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


def torchrun_arguments(ranks: int, environment: Mapping[str, str]) -> list[str]:
    """Return torchrun's own arguments for this node.

    Raises:
        ConfigError: if NNODES is above 1 and NODE_RANK or MASTER_ADDR is not set.
    """
    arguments = [f"--nproc-per-node={ranks}", f"--local-ranks-filter={environment.get('LOG_RANK') or 0}"]
    arguments += ["--role=rank", "--tee=3"]
    if count_from_environment(environment, "NNODES", 1) == 1:
        return ["--standalone", "--local-addr=localhost", *arguments]  # or torchrun asks DNS for the node's own name
    missing = [name for name in ("NODE_RANK", "MASTER_ADDR") if not environment.get(name)]
    if missing:
        raise ConfigError([f"environment: {name}: expected a value where NNODES is above 1" for name in missing])
    port = environment.get("MASTER_PORT") or "29500"
    return [
        f"--nnodes={environment['NNODES']}",
        f"--node-rank={environment['NODE_RANK']}",
        "--rdzv-backend=c10d",
        f"--rdzv-id={environment.get('JOB_ID') or 'titanlite'}",
        f"--rdzv-endpoint={environment['MASTER_ADDR']}:{port}",
        *arguments,
    ]


def main(argv: list[str]) -> int:
    """Check a config, start its ranks with torchrun, and return torchrun's exit status; 2 if the config is wrong."""
    if "--help" in argv or "-h" in argv:
        print(f"{__doc__}\n{help_text()}")
        return 0
    try:
        ranks = ranks_per_node(load(argv), os.environ, count_devices())
        arguments = torchrun_arguments(ranks, os.environ)
    except ConfigError as error:
        print_problems(error)
        return 2
    command = [sys.executable, "-m", "torch.distributed.run", *arguments, "-m", "titanlite.train", *argv]
    raise_open_file_limit()  # torchrun on the first node has a connection to every rank
    signals: list[int] = []  # that have come, and are not passed on yet
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, frame: signals.append(number))
    # A session of its own: Ctrl-C and a hangup of the terminal reach the launcher alone, which passes them on once.
    torchrun = subprocess.Popen(command, env=environment_of_ranks(ranks), start_new_session=True)
    stops, signaled = False, set()
    while True:
        try:
            return torchrun.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            while signals:
                number = signals.pop(0)
                if number == signal.SIGTERM:
                    stops = True
                else:
                    torchrun.send_signal(number)
            # SIGTERM goes to the ranks and not to torchrun, which would kill them: they finish the step, save and exit
            # with 0. A rank that starts later gets it too.
            for rank in set(children(torchrun.pid)) - signaled if stops else ():
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(rank, signal.SIGTERM)
                signaled.add(rank)


def environment_of_ranks(ranks: int) -> dict[str, str]:
    """Return the environment that torchrun passes to the ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        # torchrun gives each rank one thread; on a CPU they share the cores instead.
        "OMP_NUM_THREADS": str(max(cores // ranks, 1)),
        # Fewer, larger segments: less memory lost to fragmentation. The older name of this variable,
        # PYTORCH_CUDA_ALLOC_CONF, is read too (2.11 warns of it, 2.13 prefers it), so whoever sets that one means it.
        **({} if "PYTORCH_CUDA_ALLOC_CONF" in os.environ else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        **os.environ,
    }


def children(process: int) -> list[int]:
    """Return the process IDs of a process's children: from /proc on Linux, from ps elsewhere."""
    if not Path("/proc/self").exists():
        done = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
        pairs = (line.split() for line in done.stdout.splitlines())
        return [int(child) for child, parent in pairs if int(parent) == process]
    pids: list[int] = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread, or the process, has just ended
            pids += map(int, file.read_text().split())
    return pids
