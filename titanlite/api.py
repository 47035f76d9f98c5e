"""The Python API of titanlite, for scripts and notebooks; docs/extend.md is its guide."""

import gc
import os
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from titanlite import config
from titanlite.config import Config, ConfigError, Launch
from titanlite.config.errors import TrainingError
from titanlite.config.launch import quantity
from titanlite.launch import process, progress
from titanlite.launch.process_group import options_of_run, process_group
from titanlite.parallel import mesh
from titanlite.techniques.own import Own, load_own
from titanlite.tools.parity.standard_set import verdicts
from titanlite.tools.plan.planner import make_plan
from titanlite.tools.plan.result import Plan
from titanlite.torch_workarounds import forget_meshes
from titanlite.train import claim_folders, export_weights, train


class RunResult(NamedTuple):
    """The results of a run."""

    loss: float | None
    """The loss of the last step, in nats per token over all ranks; None if no step was left to train."""
    folder: Path
    """job.dump_folder, with config.toml, metrics.jsonl, tb/ and the checkpoints."""
    metrics: dict[str, float]
    """The logged metrics of the last step, by TensorBoard tag."""


def load(argv: list[str]) -> Config:
    """Return the config of a command line: `argv` is its arguments, such as ["my.toml", "--training.steps=20"].
    Raises ConfigError with a line for each wrong option."""
    return config.load(argv).config


def run(argv: list[str], own: Own | str = "") -> RunResult:
    """Train in this process as `titanlite train` does; under torchrun, every rank must call `run`. No signal handler is
    installed. `argv`: as for `load`; `own`: an Own object, or where to find one, "FILE.py:NAME". Raises ConfigError if
    the config, data, checkpoint or `own` is wrong, or there are too few ranks; TrainingError if too many losses are not
    finite, a checkpoint cannot be written, or another run takes over job.dump_folder."""
    loaded, signals, lost = config.load(argv, load_own(own)), process.Signals(), list[str]()
    launch, parallelism = Launch.from_environment(torch.cuda.device_count()), loaded.config.parallelism
    ranks = parallelism.ranks_per_shard * max(parallelism.data_parallel_shard_degree, 1)
    if ranks > 1 and "WORLD_SIZE" not in os.environ:
        problem = f"{loaded.file}: needs {quantity(ranks, 'rank')}, and this process is one; start this script with "
        raise ConfigError([f"{problem}torchrun --nproc-per-node={ranks}, or use titanlite train"])
    if dist.is_initialized():
        raise ConfigError(["titanlite.run: this process has a process group of its own; destroy it first"])
    options = config.check(loaded, launch)
    folder, is_deterministic = options.job.dump_folder, torch.are_deterministic_algorithms_enabled()

    def end(message: str) -> None:
        lost.append(message)
        signals.stopping = True

    try:
        claim_folders(options, launch, loaded.origins, lost=end)
        group = process_group(launch, options.comm, folder, options_of_run(options))
        with torch.random.fork_rng(range(launch.n_devices)), group:
            metrics = train(options, launch, signals)
        if lost:
            raise TrainingError(lost[0])
        export_weights(options, launch)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        mesh.forget_layouts()
        forget_meshes()
        gc.collect()
        process.clean_up()
        progress.train_timeout = None
        torch.use_deterministic_algorithms(is_deterministic)
    return RunResult(metrics.get("loss_metrics/global_avg_loss"), Path(folder), metrics)


def plan(argv: list[str], own: Own | str = "") -> Plan:
    """Return the planned memory and step time of a config on the hardware in section [plan]. Arguments are as for
    `run`, but an Own object must come from a file. Raises ConfigError as `run` does, and for an unknown plan.device."""
    return make_plan(config.load(argv, load_own(own)))


def parity(argv: list[str], own: Own | str = "", *, dtype: str = "float64", steps: int = 3) -> dict[str, str]:
    """Compare a standard set of layouts with a single process on this machine's CPUs, as `titanlite parity --all` does.
    Return each layout's verdict, which begins with equal, DIFFERENT, FAILED or impossible. Raises ConfigError."""
    return dict(verdicts(argv, load_own(own), dtype, steps))
