"""Runs that write fingerprints, on a pool of ranks."""

import contextlib
from pathlib import Path

import torch

from tests.parallel.test_parity import Bug
from titanlite import build, config
from titanlite.optimizer import set_lr
from titanlite.techniques.fingerprints.observer import Fingerprints
from titanlite.tools.parity.training_run import TrainingRun


def run(job: config.Config, steps: int, bug: Bug | None = None) -> None:
    """Take steps of a resolved config on this rank, and write their fingerprints to its dump folder."""
    launch = config.Launch.from_environment(n_devices=0)
    torch.compiler.reset()  # what earlier test cases compiled counts towards a limit
    with bug(launch.rank) if bug else contextlib.nullcontext():
        training = TrainingRun(job, torch.device("cpu"))
        shard = build.data_share(job, training.layout).shard
        sections = job.debug, job.job, job.training, job.optimizer, job.float8, job.int8
        objects = build.meta_model(job), training.layout, shard, training.train_step, training.optimizer, training.guard
        training.train_step.observers.append(Fingerprints(*sections, *objects))
        for step in range(1, steps + 1):
            set_lr(training.optimizer, step, job.optimizer, job.lr_scheduler)
            gradients = training.train_step.gradients(step, training.loader.next(), training.guard.loss_scale)
            training.update(training.totals(*gradients))
        training.loader.close()


def single(job: config.Config, folder: Path) -> config.Config:
    """Return the config of the same steps in one process, with another folder."""
    n_sequences = job.training.global_batch_size
    parallelism = {f"parallelism__{name}": 1 for name in job.parallelism.model_dump() if name.endswith("_degree")}
    parallelism |= {"parallelism__pipeline_parallel_schedule": "1F1B", "parallelism__module_fqns_per_model_part": []}
    options = {"training__local_batch_size": n_sequences, "job__dump_folder": str(folder)}
    return job.replace(**parallelism, **options)
