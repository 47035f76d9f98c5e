"""Train a model, top to bottom: config, mesh, data, model, loop.

    titanlite train CONFIG [--section.key=value ...]             as many ranks on this node as the config asks for
    ./run_train.sh CONFIG.toml [--section.key=value ...]         titanlite train, from a checkout
    torchrun --nproc-per-node=N train.py CONFIG.toml [...]       N ranks
    python train.py CONFIG.toml [...]                            one rank

Exit status: 0 after the last step, or after a stop signal (launch/process.py) and a save; 2 if the config, the launch,
the data or the checkpoint is wrong (one line per problem on stderr); 1 after any other error."""

import functools
import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist

from titanlite import build
from titanlite.checkpoint.run import RunState
from titanlite.config import USAGE, Config, Launch, check, resolve_epochs
from titanlite.config.schema import SEEDED
from titanlite.data.loader import Loader
from titanlite.launch import process
from titanlite.launch.checked_config import load_for_rank
from titanlite.launch.failure import fail
from titanlite.launch.process_group import device_of, log_rank0, options_of_run, process_group, set_timeout, watch
from titanlite.launch.progress import COMPILES, first_step_done, mark, progress
from titanlite.launch.run_folders import check_writable, folders_of_run, lock_run
from titanlite.metrics import logger as metrics
from titanlite.metrics.profiling import collected_garbage, profilers
from titanlite.metrics.summary import account, run_summary
from titanlite.optimizer import set_lr
from titanlite.parallel import mesh
from titanlite.train_step import TrainStep


def train(config: Config, launch: Launch, signals: process.Signals) -> dict[str, float]:
    """Train to the last step, or to the end of the step during which some rank was asked to stop. Return the metrics of
    the last step. Raises ConfigError if the data or the checkpoint does not fit the config, TrainingError if more steps
    than training.nonfinite_steps_allowed lack a finite loss or norm, or if a checkpoint cannot be written."""
    device = device_of(launch)
    build.set_seed(config.debug, launch.rank)

    # Build the run. build.py chooses the techniques that the config asks for.
    mark("building the run")
    layout = mesh.build_layout(config.parallelism, device)
    data = build.build_data(config, builds_cache=launch.local_rank == 0)
    config = resolve_epochs(config, data.train)
    mark("building the model")
    model, stages = build.build_model(config, layout, device)
    optimizer = build.build_optimizer(config, model, stages.values(), layout)
    run = build.Run(config, layout, device, model, stages, optimizer, data, signals)
    groups = build.build_groups(run)
    train_step = build.build_train_step(run, groups)
    set_timeout(device, config.comm.init_timeout_seconds)  # new process groups have torch's default timeout
    guard, sizes = build.build_guard(config.training, device), build.parameter_sizes(config)
    meter, logger = build.build_metrics(config, launch, device, sizes)
    log_rank0(run_summary(config, sum(sizes.values()), data.train, data.validation, meter.peak.source, stages))

    # Load the newest checkpoint; without one, load checkpoint.initial_load_path or keep the initial weights.
    checkpoints = build.build_checkpoints(run)
    saved = checkpoints.begin(config.model, config.debug.seed)
    guard.load(saved)
    step = last_step = saved.get("step", 0)
    mark("starting the loop")
    loader = build.build_loader(run, data.train, saved.get("data"), last_step)
    state = RunState(loader, guard, groups)
    groups.begin(last_step, saved, state, logger.remove_after)
    logger.begin(last_step)
    build.add_observers(run, train_step, loader, guard, checkpoints, logger)
    validator = build.build_validator(run, train_step)
    parameters, is_first, is_last, values = list(model.parameters()), True, False, dict[str, float]()

    profiling = profilers(config.job, config.profiling, launch.rank)
    with loader, closing(logger), checkpoints.finished_on_error(), profiling as profile, collected_garbage() as collect:
        for step in groups.steps(last_step, config.training.steps):
            mark("waiting for data", step)
            with meter.waiting_for_data():
                batches = loader.next()
            lr = set_lr(optimizer, step, config.optimizer, config.lr_scheduler)
            mark(COMPILES)
            with progress(f"step {step}: compiling", enabled=is_first and launch.rank == 0 and config.compile.enable):
                loss_sum, valid = train_step.gradients(step, batches, guard.loss_scale)
            if not is_first:  # this rank may wait below for ranks that still compile
                mark("updating the weights")

            # One small all-reduce gives every rank the loss, and tells whether any rank was asked to stop or to save.
            # All ranks or none take the update. The host reads the loss later, so that the device need not wait.
            totals = groups.totals(loss_sum, valid, parameters, signals, *loader.step_counts)
            if totals is None:  # a replica group failed: the other groups repeat this step
                optimizer.zero_grad()
                loader.take_back(batches)
                continue
            train_step.update(optimizer, totals.norm, guard.taken(totals))
            loss, norm, stopping, saving, *counts = totals.read()
            loader.add(counts)
            guard.settle(step, loss, norm, loss_sum, checkpoints)
            optimizer.zero_grad()
            meter.step_done()
            collect(step, config.training.gc_freq)
            if is_first:
                set_timeout(device, config.comm.train_timeout_seconds)
                first_step_done(config.comm.train_timeout_seconds)
                signals.nothing_to_save = False

            # Log, validate, save.
            is_last, values = step == config.training.steps or stopping > 0, {}
            if step % config.metrics.log_freq == 0 or is_first or is_last:
                mark("logging")
                largest = train_step.largest_loss(loss_sum, batches)
                values = metrics.step_values(loss, largest, norm, lr, loader.counts.tolist())
                for source in (groups, meter, *train_step.observers, checkpoints, guard, train_step):
                    values |= source.metrics()
            with meter.paused():
                values |= validator.after_step(step, is_last=is_last, stopping=stopping > 0)
                if validator.was_stopped:
                    stopping = is_last = True
                mark("logging")
                logger.log(step, values, meter.seconds_per_step)
                checkpoints.after_step(step, state, asked=saving > 0, is_last=is_last)
            profile(step)
            is_first = False
            if is_last:
                log_rank0(account(*loader.counts))
            if stopping:
                unsaved = "" if config.checkpoint.enable else "; nothing was saved: checkpoint.enable = false"
                log_rank0(f"asked to stop: ended after step {step}{unsaved}")
                break
        test = functools.partial(loss_after_training, step + 1, loader, train_step, optimizer, guard.loss_scale)
        checkpoints.end(groups.final_step(step), state, test)
        mark("ending the run")
    checkpoints.close()
    guard.report_divergence(config.model.vocab_size)
    return values


def loss_after_training(
    step: int, loader: Loader, train_step: TrainStep, optimizer: torch.optim.Optimizer, loss_scale: float
) -> float:
    """Return the loss of the next batch as a training step computes it, without an update. Every rank must call it."""
    loss_sum, valid = train_step.gradients(step, loader.next(), loss_scale, is_test=True)
    optimizer.zero_grad()
    dist.all_reduce(loss_sum)
    return (loss_sum / valid).item()


def claim_folders(config: Config, launch: Launch, origins: dict[str, str], lost: Callable[[str], None]) -> None:
    """Check the folders that a run reads and writes, and lock written folders against other runs. If another run takes
    over a lock, `lost` is called with a message. Raises ConfigError if a folder is unusable or locked."""
    folders = folders_of_run(config.job, config.checkpoint, config.metrics, config.profiling)
    if launch.local_rank == 0:
        if config.checkpoint.initial_load_path != SEEDED:
            from titanlite.checkpoint.initial_weights import check_initial_weights  # imported here: few runs need it

            check_initial_weights(config.job, config.checkpoint, config.model, origins)
        check_writable(folders)
    if launch.rank == 0:
        lock_run(folders, config.job, lost)


def export_weights(config: Config, launch: Launch) -> None:
    """If checkpoint.last_save_in_hf is set, rank 0 writes the last step as a Hugging Face folder."""
    if config.checkpoint.last_save_in_hf and launch.rank == 0:
        from titanlite.checkpoint.export import export_last_step

        export_last_step(Path(config.job.dump_folder), config.checkpoint)


def main(argv: list[str]) -> None:
    """Run one rank, which the launcher or torchrun has started, and end its process with the exit status."""
    if "--help" in argv or "-h" in argv:
        print(USAGE)
        return
    process.start_rank()
    process.retain_freed_memory()
    rank = None
    try:
        launch = Launch.from_environment(torch.cuda.device_count())
        config = check(loaded := load_for_rank(argv), launch)
        with (rank := watch(launch, config.comm, config.job.dump_folder)):
            claim_folders(config, launch, loaded.origins, lost=lambda message: rank.end(f"error: {message}", status=1))
            process.keep_log(os.path.join(config.job.dump_folder, "logs"))
            with process_group(launch, config.comm, config.job.dump_folder, options_of_run(config)):
                train(config, launch, process.signals)
        export_weights(config, launch)
    except Exception as error:
        from titanlite.metrics.out_of_memory import explain_out_of_memory  # imported here: only a failed run needs it

        fail(explain_out_of_memory(error), rank)
    process.exit_process(0)


if __name__ == "__main__":
    main(sys.argv[1:])
