"""Start a config's ranks on this node with torchrun's agent.

    titanlite train CONFIG [--section.key=value ...] [--own FILE.py:NAME]

Environment:
    NGPU=N          ranks on this node, instead of what the config's degrees ask for
    LOG_RANK=0,1    ranks of this node whose lines are shown (default 0); those of all ranks are in DUMP_FOLDER/logs
    MAX_RESTARTS=N  how often all ranks are started anew after one has failed, to resume from the newest checkpoint
                    (default 0)
    NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, JOB_ID   for a multi-node run; run the command on each node.
                    NNODES=MIN:MAX starts, and restarts, with all nodes that have joined

The config is checked once, here, before any rank starts: a mistake is one line, not a traceback of every rank."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from titanlite.config import Config, ConfigError, Launch, LoadedConfig, check, load
from titanlite.config.launch import count_from_environment as count
from titanlite.config.launch import plan_command, quantity, raise_open_file_limit, require_torchft
from titanlite.config.loader import check_all, show
from titanlite.config.own import take_own
from titanlite.config.reference import help_text
from titanlite.config.schema import count_parameters
from titanlite.launch.checked_config import CHECKED_CONFIG, write_for_ranks
from titanlite.launch.other_processes import listen_as_launcher
from titanlite.launch.process import ENDS_WITH_STDIN, LOG_FOLDER, STARTED_BY, available_cores

BYTES_PER_PARAMETER = 6
"""Minimum number of bytes of persistent memory per parameter: weight, exp_avg and exp_avg_sq in bfloat16."""
VARIABLES = {
    "NNODES": ("[1-9][0-9]{0,8}(:[1-9][0-9]{0,8})?", "an integer >= 1"),
    "LOG_RANK": ("[0-9]{1,9}(,[0-9]{1,9})*", "ranks of this node, as in 0,1"),
    "OMP_NUM_THREADS": ("[1-9][0-9]{0,8}(,[1-9][0-9]{0,8})*", "an integer >= 1"),
    "LOGLEVEL": ("CRITICAL|FATAL|ERROR|WARNING|WARN|INFO|DEBUG|NOTSET", "a level of Python's logging, as in INFO"),
    "MASTER_ADDR": (r"[\w.-]+|[0-9a-fA-F:.]+(%\w+)?", "the name of a node, or its IP address"),
    "JOB_ID": ("[^\0-\x1f\x7f\ud800-\udfff]+", "text without control characters"),
}
"""Environment variables whose value is text: the value's pattern, and a description of the pattern for messages."""


def ranks_wanted(loaded: LoadedConfig[Config], environment: Mapping[str, str], n_devices: int) -> int:
    """Return the number of ranks on all nodes: NGPU per node; without NGPU, the degrees' product (-1: all devices)."""
    _, nodes = nodes_of(environment)
    if environment.get("NGPU"):
        return nodes * count(environment, "NGPU", 1)
    parallelism = loaded.config.parallelism
    if parallelism.data_parallel_shard_degree == -1:
        return max(parallelism.ranks_per_shard, nodes * max(n_devices, 1))
    return parallelism.world_size


def ranks_per_node(loaded: LoadedConfig[Config], environment: Mapping[str, str], n_devices: int) -> int:
    """Return the number of ranks on this node. Raises ConfigError if nodes cannot have equally many ranks, `check`
    rejects the launch, or ranks on CPUs need more memory for weights and optimizer states than the nodes have."""
    (least, nodes), wanted = nodes_of(environment), ranks_wanted(loaded, environment, n_devices)
    needed = count_parameters(loaded.config.model) * BYTES_PER_PARAMETER
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if not n_devices and needed > nodes * memory:
        problem = f"{loaded.file}: needs {quantity(wanted, 'device')}, and this node has none; its memory of "
        problem += f"{memory / 2**30:.0f} GiB is too small for weights and optimizer states of "
        raise ConfigError([f"{problem}{needed / 2**30:,.0f} GiB; {plan_command(loaded.file)}"])
    if wanted % nodes:
        ranks = quantity(wanted, "rank")
        raise ConfigError([f"{loaded.file}: {ranks} cannot be divided evenly among NNODES = {nodes} nodes"])
    ranks = wanted // nodes
    for number in {least, nodes}:
        check(loaded, Launch(0, 0, number * ranks, ranks, n_devices))
    return ranks


def check_folders(loaded: LoadedConfig[Config]) -> None:
    """Raise ConfigError with a line for each folder or file that a run cannot use: initial weights, tokenizer, data."""
    from titanlite.checkpoint.initial_weights import check_initial_weights  # late imports: these modules import launch/
    from titanlite.data.open import check_data

    config = loaded.config.replace(checkpoint__initial_load_path=loaded.config.initial_weights)
    sections = config.model, config.checkpoint, config.parallelism, config.training, config.validation
    check_all(
        lambda: check_initial_weights(config.job, config.checkpoint, config.model, loaded.origins),
        lambda: config.own.data or check_data(*sections),
    )


def load_and_check(argv: list[str], use: Callable[[LoadedConfig[Config]], Any]) -> LoadedConfig[Config]:
    """Load a config and call `use` with it. Raises ConfigError with all problems of options, folders and `use`."""
    problems, checks, (own, options) = list[str](), [use, check_folders], take_own(argv)
    try:
        loaded = load(options, own)
    except ConfigError as error:
        loaded, problems, checks = error.loaded, error.problems, [check_folders] if error.loaded else []
    check_all(*(functools.partial(check_of, loaded) for check_of in checks), problems=problems)
    return loaded


def count_devices() -> int:
    """Return the number of this node's accelerators. torch, a slow import, is imported only if there is a driver."""
    if not shutil.which("nvidia-smi") and not Path("/dev/kfd").exists():
        return 0
    import torch

    return torch.cuda.device_count()


def nodes_of(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return the smallest and the largest number of nodes, from NNODES. Raises ConfigError if NNODES is wrong."""
    text = text_of(environment, "NNODES", "1")
    least, most = map(int, (text.split(":") * 2)[:2])
    if least > most:
        raise ConfigError([f"environment: NNODES = {show(text)}: expected MIN <= MAX"])
    return least, most


def text_of(environment: Mapping[str, str], name: str, default: str = "") -> str:
    """Return the value of one of VARIABLES, or `default` if it is unset or empty. Raises ConfigError if it is wrong."""
    pattern, expected = VARIABLES[name]
    if (text := environment.get(name) or default) and not re.fullmatch(pattern, text, re.ASCII):
        raise ConfigError([f"environment: {name} = {show(text)}: expected {expected}"])
    return text


def require_place(environment: Mapping[str, str], ranks: int = 1) -> None:
    """Raise ConfigError if a variable of the launch is wrong, or if one that several nodes need is missing."""
    nodes = nodes_of(environment)[1]
    missing = [name for name in ("NODE_RANK", "MASTER_ADDR") if not environment.get(name)]
    if missing and nodes > 1:
        raise ConfigError([f"environment: {name}: expected a value where NNODES is above 1" for name in missing])
    for name in ("OMP_NUM_THREADS", "LOGLEVEL", *(("MASTER_ADDR", "JOB_ID") if nodes > 1 else ())):
        text_of(environment, name)
    if nodes > 1:
        count(environment, "MASTER_PORT", 1, 65535)
        count(environment, "NODE_RANK", 0, nodes - 1)
    first = min(text_of(environment, "LOG_RANK", "0").split(","), key=int)
    count({"LOG_RANK": first}, "LOG_RANK", 0, ranks - 1)  # a rank's number is at most ranks - 1


def launch_variables(loaded: LoadedConfig[Config]) -> dict[str, str]:
    """Write the ranks' config file, and return their environment variables. Raises ConfigError if writing fails."""
    dump_folder = loaded.config.job.dump_folder
    folder = Path(dump_folder) / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = write_for_ranks(loaded, folder)
    except OSError as error:
        raise ConfigError([f"job.dump_folder = {show(dump_folder)}: cannot be written: {error.strerror}"]) from None
    return {STARTED_BY: str(os.getpid()), LOG_FOLDER: str(folder), CHECKED_CONFIG: file}


def main(argv: list[str]) -> int:
    """Check a config, start its ranks on this node, and return the run's exit status."""
    if "--help" in argv or "-h" in argv:
        print(f"{__doc__}\n{help_text(argv)}")
        return 0
    signals = listen_as_launcher()
    n_devices, found = count_devices(), list[int]()
    loaded = load_and_check(argv, lambda loaded: found.append(ranks_per_node(loaded, os.environ, n_devices)))
    (ranks,) = found
    require_place(os.environ, ranks)
    if loaded.config.fault_tolerance.enable:
        require_torchft()
    restarts = count(os.environ, "MAX_RESTARTS", 0)
    environment = environment_of_ranks(ranks) | launch_variables(loaded)
    raise_open_file_limit(2 * ranks * nodes_of(os.environ)[1] if os.environ.get("NODE_RANK", "0") == "0" else 0)
    from titanlite.launch.agent import run_ranks  # imported after the checks, since it imports torch

    command = [sys.executable, "-m", "titanlite.rank", *argv]
    return run_ranks(command, ranks, environment, signals, max_restarts=restarts)


def run_on_ranks(ranks: int, arguments: list[str]) -> int:
    """Run `titanlite` with torchrun on this node and return its status. The ranks end when this process ends."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
    command += [f"--nproc-per-node={ranks}", "-m", "titanlite", *arguments]
    environment = {**environment_of_ranks(ranks), ENDS_WITH_STDIN: "1"}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True) as torchrun:
        try:
            return torchrun.wait()
        except BaseException:  # Ctrl-C is no Exception
            torchrun.kill()
            raise


def environment_of_ranks(ranks: int) -> dict[str, str]:
    return {
        # Without OMP_NUM_THREADS, torchrun's agent gives each rank a single thread.
        "OMP_NUM_THREADS": str(max(available_cores() // ranks, 1)),
        # Expandable segments lose less memory to fragmentation. torch also reads the older name PYTORCH_CUDA_ALLOC_CONF
        # (2.13 prefers it), so a user's value of the older name is kept.
        **({} if "PYTORCH_CUDA_ALLOC_CONF" in os.environ else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        **{name: text for name, text in os.environ.items() if text or name != "OMP_NUM_THREADS"},
    }
