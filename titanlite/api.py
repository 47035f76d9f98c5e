"""What titanlite offers to Python, in scripts and notebooks; docs/extend.md is the guide."""

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
    """The loss of the last step, in nats per token over all ranks; None if all steps were done before."""
    folder: Path
    """job.dump_folder, with config.toml, metrics.jsonl, tb/ and the checkpoints."""
    metrics: dict[str, float]
    """The values of the last step, by their TensorBoard tags."""


def load(argv: list[str]) -> Config:
    """Return the options that a config and arguments set: `argv` is what the command line takes, as in
    ["my.toml", "--training.steps=20"]. Raises ConfigError with a line for each wrong one."""
    return config.load(argv).config


def run(argv: list[str], own: Own | str = "") -> RunResult:
    """Train in this process, as `titanlite train` does, and return. Under torchrun every rank calls it; otherwise this
    process is the only one. Signal handlers stay as they are. `argv` is that of `load`, `own` an Own or "FILE.py:NAME".
    Raises ConfigError if the config, the data, the checkpoint or the own part is wrong, or more ranks are needed.
    Raises TrainingError if the loss is not finite too often, a checkpoint cannot be written, or another run has taken
    the folder over."""
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
    """Return the memory and step time of a config on the hardware that it names. The arguments are those of `run`,
    except that an Own must come from a file. Raises ConfigError as `run` does, and if the device is unknown."""
    return make_plan(config.load(argv, load_own(own)))


def parity(argv: list[str], own: Own | str = "", *, dtype: str = "float64", steps: int = 3) -> dict[str, str]:
    """Compare a standard set of layouts with a single process on this machine's CPUs, as `titanlite parity --all` does.
    Return a verdict by layout, which begins with equal, DIFFERENT, FAILED or impossible. Raises as `plan` does."""
    return dict(verdicts(argv, load_own(own), dtype, steps))
