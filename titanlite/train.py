"""Train a model, top to bottom: config, mesh, data, model, loop.

    titanlite train CONFIG [--section.key=value ...]             as many ranks on this node as the config asks for
    ./run_train.sh CONFIG.toml [--section.key=value ...]         the same, from a checkout
    torchrun --nproc-per-node=N train.py CONFIG.toml [...]       N ranks
    python train.py CONFIG.toml [...]                            one rank

Exit status: 0 done, or asked to stop and saved (reliability/process.py has the signals); 2 the config, the launch, the
data or the checkpoint is wrong (one line per problem); 1 anything else.
"""

import contextlib
import dataclasses
import functools
import gc
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite import build, metrics, provenance
from titanlite.config import USAGE, Config, Launch, check
from titanlite.config.schema import SEEDED
from titanlite.data.loader import Batch
from titanlite.errors import TrainingError
from titanlite.loss import count_valid
from titanlite.model import flops_per_token
from titanlite.optimizer import build_loss_scale, clip_factor, clipped_step, gradient_norm, lr_factor, set_lr
from titanlite.parallel import mesh
from titanlite.profiling import build_profilers
from titanlite.progress import first_step_done, mark, progress
from titanlite.reliability import process, watchdog
from titanlite.reliability.checked_config import load_for_rank
from titanlite.reliability.process import Signals
from titanlite.reliability.run_folders import check_writable, folders_of_run, lock_run
from titanlite.reliability.same_config import options_of_run, require_same
from titanlite.summary import run_summary


def train(config: Config, launch: Launch, signals: Signals) -> None:
    """Train to the last step, or to the end of the step during which some rank was asked to stop.

    Raises:
        ConfigError: if the data or the checkpoint does not fit the config.
        TrainingError: if more steps than training.nonfinite_steps_allowed have no finite loss and gradient norm, or a
            checkpoint cannot be written.
    """
    training, rank = config.training, launch.rank
    device, dump_folder = mesh.device_of(launch), Path(config.job.dump_folder)
    torch.manual_seed(config.debug.seed + rank)
    if config.debug.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # NVIDIA's condition for repeatable cuBLAS products
        torch.use_deterministic_algorithms(True)

    def log_rank0(message: str) -> None:
        if rank == 0:
            print(message, flush=True)

    # Build the run.
    mark("building the run")
    layout = mesh.build_layout(config.parallelism, device)
    sequences, validation, data_identity = build.build_data(config, builds_cache=launch.local_rank == 0)
    mark("building the model")
    model, stages = build.build_model(config, layout, device)
    train_step = build.build_train_step(config, layout, model, stages, device)
    optimizer = build.build_optimizer(config, model, stages.values(), layout)
    mesh.set_timeout(device, config.comm.init_timeout_seconds)  # new groups have torch's default
    loss_scale = build_loss_scale(training)
    outliers = None
    if training.skip_outlier_sigma:
        from titanlite.outlier_steps import OutlierSteps  # here, since most runs skip none

        outliers = OutlierSteps(training.skip_outlier_sigma, training.outlier_window, device)
    parameters = list(model.parameters())
    sizes = build.parameter_sizes(config)
    peak = metrics.PeakFlops(device, getattr(torch, training.mixed_precision_param))
    outer = None
    if config.fault_tolerance.uses_diloco:
        from titanlite.diloco import DiLoCo, OuterOptimizer  # here, since most runs are one group

        outer = OuterOptimizer(dict(model.named_parameters()), config.fault_tolerance)
    log_rank0(run_summary(config, sum(sizes.values()), sequences, validation, peak.source))

    # Load the newest checkpoint, or given weights, or keep the initial ones.
    last_step, n_skipped, n_saves_asked, data_state, checkpointer, replicas, saved = 0, 0, 0, None, None, None, {}

    def state_to_save() -> dict[str, Any]:
        state = {"skipped": n_skipped, "loss_scale": loss_scale.state(), "data": loader.state()}
        state |= {"outliers": outliers.state()} if outliers else {}
        return state | (replicas.state() if replicas else {})

    def load_state(state: dict[str, Any]) -> None:
        nonlocal n_skipped
        n_skipped = state["skipped"]
        loss_scale.load(state["loss_scale"])
        if outliers and state["outliers"]:
            outliers.load(**state["outliers"])
        if replicas:  # of another replica group
            loader.close()
            loader.start(state["data"])

    initial_weights, weights = config.checkpoint.initial_load_path, f"initial, by debug.seed = {config.debug.seed}"
    if config.checkpoint.enable or initial_weights != SEEDED:
        mark("loading a checkpoint")
        from titanlite.checkpoint import checkpointer as checkpoints  # here: half a second, and a run may do without
    if config.checkpoint.enable:
        identity = {"seed": config.debug.seed, "data": data_identity, **config.model.identity()}
        may_differ = {"mixture"} if training.change_mixture_on_resume else set()
        if training.datasets:
            identity["mixture"] = sequences.identity
        further = outer.tensors() if outer else {}
        own = options_of_run(config)
        options = config.checkpoint, identity, config.comm, may_differ, further, own
        checkpointer = checkpoints.Checkpointer(dump_folder, *options)
        saved = checkpointer.resume(model, optimizer) or {}
        if saved:
            last_step, data_state = saved["step"], saved["data"]
            load_state(saved)
            weights = f"resumed after step {last_step} of {training.steps} from {checkpointer.folder}"
    if not last_step and initial_weights != SEEDED:
        checkpoints.load_weights(Path(initial_weights), model, config.model)
        weights = f"loaded from {initial_weights}"
    log_rank0(f"weights    {weights}")
    if saved and saved["config"] and saved["config"] != own:
        from titanlite.changed_options import changes  # here, since most runs change none

        log_rank0(changes(saved["config"], own, last_step))

    corruption = None
    if config.debug.sdc_check_freq:
        from titanlite.sdc import CorruptionCheck  # here, since most runs do without

        corruption = CorruptionCheck(model, optimizer, checkpointer)
    mark("starting the loop")
    loader = build.build_loader(config, layout, sequences, device=device, state=data_state, last_step=last_step)
    if config.fault_tolerance.enable:
        from titanlite.config.schema import numerics  # here, since most runs are one group
        from titanlite.fault_tolerance import Replicas

        mark("connecting to the lighthouse")
        identity = [*numerics(config), data_identity]
        arguments = config.fault_tolerance, config.comm, model, optimizer, identity, device, signals
        size = config.training.global_batch_size
        replicas = DiLoCo(outer, size, *arguments) if outer else Replicas(*arguments)
        replicas.continue_from(last_step, saved, state_to_save, load_state)
        replicas.abandon = lambda last_shared_step: logger.remove_after(last_shared_step) if logger else None
        mark("starting the loop")
        train_step = dataclasses.replace(train_step, count_over_groups=replicas.count)
    logger, samples, dataset_losses = None, None, None
    if loader.mixture:
        from titanlite.dataset_losses import DatasetLosses  # here, since most runs have one dataset

        dataset_losses = DatasetLosses(loader.mixture, train_step, training, data_rank=layout.data_rank)
    if config.validation.generate_prompts:
        from titanlite.generate.samples import Samples  # here, since most runs have none

        samples = Samples(training, config.validation, config.model.hf_assets_path)
    if rank == 0:
        resolved = provenance.describe(device, launch.world_size) + config.toml()
        logger = metrics.MetricsLogger(
            dump_folder, config.metrics, last_step=last_step, steps=training.steps, config=resolved
        )
    meter = metrics.ThroughputMeter(
        device,
        tokens_per_step=config.tokens_per_step / config.fault_tolerance.n_groups / launch.world_size,
        flops_per_token=flops_per_token(sizes, config.model, training.seq_len),
        peak=peak,
    )

    with contextlib.ExitStack() as stack:
        if checkpointer:
            stack.enter_context(checkpointer.finished_on_error())
        profilers = [stack.enter_context(each) for each in build_profilers(dump_folder, config.profiling, rank)]
        # Python collects garbage when told to, on all ranks in the same step.
        gc.collect()
        gc.freeze()
        gc.disable()
        stack.callback(gc.enable)
        step, is_first, is_last, loss = last_step, True, False, 0.0
        for step in replicas.steps(training.steps) if replicas else range(last_step + 1, training.steps + 1):
            mark("waiting for data", step)
            with meter.waiting_for_data():
                batches = loader.next()
            lr = config.optimizer.lr * lr_factor(step, config.lr_scheduler)
            set_lr(optimizer, lr)
            mark(watchdog.COMPILES)
            with progress(f"step {step}: compiling", enabled=rank == 0 and is_first and config.compile.enable):
                if is_first and config.compile.enable and config.parallelism.pipeline_parallel_degree > 1:
                    train_step.runner.warm_up(batches[0].to(device), validates=validation is not None)
                if dataset_losses:
                    dataset_losses.begin_step()
                loss_sum, n_valid = train_step.forward_backward(batches, loss_scale.value)
                if dataset_losses:
                    dataset_losses.end_step(loader.position)
                if corruption and step % config.debug.sdc_check_freq == 0:
                    again = functools.partial(train_step.forward_backward, batches, loss_scale.value)
                    corruption.check(step, loss_sum, again)
            if not is_first:  # then, a rank that is done waits for those that compile, and none is behind
                mark("updating the weights")
            if replicas:
                replicas.sum_gradients(parameters)
            norm = gradient_norm(parameters, device)

            # One small all-reduce tells every rank the loss and whether some rank was asked to stop or to save. All
            # take the step, or none does; whether it is finite is read after it, so that the device need not wait.
            asked = [torch.full_like(loss_sum, flag) for flag in (signals.stopping, signals.saves > n_saves_asked)]
            totals = torch.stack([loss_sum, *asked])
            dist.all_reduce(totals)
            if replicas:
                totals[0], norm = replicas.agree(totals[0], norm)
                if not replicas.commits():
                    optimizer.zero_grad()
                    loader.take_back(batches)
                    continue
            numbers = torch.stack([totals[0] / n_valid, norm, totals[1], totals[2]])
            taken = numbers.isfinite().all()
            if outliers:
                taken = outliers.taken(norm, taken)
            clipped_step(optimizer, clip_factor(norm, training.max_norm), taken)
            if train_step.balance:
                train_step.balance.update(taken)
            loss, norm_value, stopping, saving = numbers.tolist()
            overflowed = loss_scale.dynamic and math.isfinite(loss) and not math.isfinite(norm_value)
            if overflowed and loss_scale.value > 1:
                log_rank0(
                    f"step {step}: gradients overflow at loss scale {loss_scale.value:g}; skipped, and the scale halved"
                )
            elif not (math.isfinite(loss) and math.isfinite(norm_value)):
                reason = explain_nonfinite(step, loss, norm_value, loss_sum)
                if n_skipped == training.nonfinite_steps_allowed:
                    allowed = f"{n_skipped}, all used" if n_skipped else "N skips N such steps"
                    reason += f" (training.nonfinite_steps_allowed = {allowed})"
                    raise TrainingError(reason + (checkpointer.after_divergence() if checkpointer else ""))
                n_skipped += 1
                allowed = training.nonfinite_steps_allowed
                log_rank0(f"{reason}; skipped without an update, {n_skipped} of {allowed} allowed")
            elif checkpointer:
                checkpointer.confirm(step)
            if outliers and outliers.skipped(norm_value):
                log_rank0(f"step {step}: {outliers.message}")
            loss_scale.update(overflowed=overflowed)
            optimizer.zero_grad()
            meter.step_done()
            if step % training.gc_freq == 0:
                gc.collect()
            if is_first:
                mesh.set_timeout(device, config.comm.train_timeout_seconds)
                first_step_done(config.comm.train_timeout_seconds)
                signals.nothing_to_save = False
            if replicas:
                if not replicas.updated(step, stopping=stopping > 0):
                    is_first = False
                    continue
                stopping = stopping or replicas.stopping

            # Log, validate, save.
            is_last = step == training.steps or stopping > 0
            values = {}
            if step % config.metrics.log_freq == 0 or is_first or is_last:
                mark("logging")
                values = {
                    "loss_metrics/global_avg_loss": loss,
                    "loss_metrics/global_max_loss": largest_loss(loss_sum, batches, train_step.contributes_loss),
                    "grad_norm": norm_value,
                    "lr": lr,
                    "n_tokens_seen": loader.position * training.seq_len,
                    **(replicas.metrics(config.tokens_per_step) if replicas else {}),
                    **meter.read(),
                }
                if dataset_losses:
                    values |= loader.mixture.metrics(loader.position) | dataset_losses.metrics()
                if checkpointer:
                    values["time_metrics/checkpoint(s)"] = checkpointer.take_seconds()
                if outliers:
                    values["skipped_steps"] = outliers.n_skipped
                if train_step.balance:
                    values |= train_step.balance.metrics()
            with meter.paused():
                if validation is not None and (step % config.validation.freq == 0 or is_last) and not stopping:
                    mark("validation")
                    validation_batches, total = build.build_validation_batches(config, layout, validation)
                    with progress("validation", total=total, unit="batches", enabled=rank == 0) as advance:
                        validation_loss = train_step.validate(validation_batches, advance, signals)
                    if validation_loss is None:
                        stopping = is_last = True
                    else:
                        values[metrics.VALIDATION_LOSS] = validation_loss
                    if samples and not stopping:
                        texts = samples.generate(model, device)
                        if logger:
                            logger.log_samples(step, samples.prompts, texts)
                    mark("logging")
                if logger and values:
                    logger.log(step, values, meter.seconds_per_step)
                    if train_step.balance:
                        logger.log_histogram(step, "moe/tokens_per_expert", train_step.balance.relative_loads())
                if checkpointer:
                    mark("saving a checkpoint")
                    checkpointer.poll()
                    if step % config.checkpoint.interval == 0 or is_last or saving:
                        n_saves_asked = signals.saves
                        if saving:
                            log_rank0(f"asked to save: checkpoint step-{step}")
                        checkpointer.save(step, model, optimizer, state_to_save(), is_last=is_last)
            for step_done in profilers:
                mark("profiling")
                step_done(step)
            is_first = False
            if stopping:
                log_rank0(f"asked to stop: ended after step {step}")
                break
        if checkpointer:
            if replicas and replicas.has_state_of_another and not is_last:  # the other has taken the last step
                step = training.steps
                mark("saving a checkpoint")
                checkpointer.save(step, model, optimizer, state_to_save())
            mark("waiting for the last checkpoint")
            checkpointer.finish()
            if checkpointer.unconfirmed:
                mark("testing the last checkpoint")  # does the last step's model still give a finite loss?
                batches = loader.next()
                loss_sum, n_valid = train_step.forward_backward(batches, loss_scale.value)
                if corruption:
                    corruption.check(step + 1, loss_sum, lambda: train_step.forward_backward(batches, loss_scale.value))
                optimizer.zero_grad()
                dist.all_reduce(loss_sum)
                may_fail = n_skipped < training.nonfinite_steps_allowed
                checkpointer.confirm_last(step, (loss_sum / n_valid).item(), may_fail=may_fail)
    mark("ending the run")
    loader.close()
    if logger:
        logger.close()
    if checkpointer:
        checkpointer.close()
    if not loss <= (limit := math.log(config.model.vocab_size) + 1):  # also if it is nan
        log_rank0(f"the last loss, {loss:,.4g}, is above {limit:.4g}, 1 more than a uniform guess has: it has diverged")


def largest_loss(loss_sum: Tensor, batches: list[Batch], contributes_loss: bool) -> float:
    """Return the largest of the ranks' own mean losses, in nats."""
    own = loss_sum / count_valid([batch.targets for batch in batches], loss_sum.device)
    own = own.nan_to_num(nan=-math.inf) if contributes_loss else torch.full_like(own, -math.inf)  # 0 / 0: no target
    dist.all_reduce(own, dist.ReduceOp.MAX)
    return own.item()


def explain_nonfinite(step: int, loss: float, norm: float, loss_sum: Tensor) -> str:
    """Return which value of a step is not finite, and on which ranks. Every rank must call it."""
    sums = [torch.empty_like(loss_sum) for _ in range(dist.get_world_size())]
    dist.all_gather(sums, loss_sum)
    ranks = [str(rank) for rank, value in enumerate(sums) if not math.isfinite(value.item())]
    if ranks or not math.isfinite(loss):
        where = f"rank {', '.join(ranks)}" if ranks else "another replica group"
        return f"step {step}: the loss is {loss} because of {where}"
    return f"step {step}: the gradient norm is {norm} though the loss is finite on every rank ({loss:.4f})"


def main(argv: list[str]) -> None:
    """Run one rank, as the launcher or torchrun starts it, and end its process with the exit status."""
    if "--help" in argv or "-h" in argv:
        print(USAGE)
        return
    process.start_rank()
    mesh.retain_freed_memory()
    heartbeat = None
    try:
        launch = Launch.from_environment(torch.cuda.device_count())
        config = check(loaded := load_for_rank(argv), launch)
        heartbeat = watchdog.Watchdog(launch, config.comm, Path(config.job.dump_folder))
        with heartbeat:
            folders = folders_of_run(config.job, config.checkpoint, config.metrics, config.profiling)
            if launch.local_rank == 0:
                if config.checkpoint.initial_load_path != SEEDED:
                    from titanlite.checkpoint.initial_weights import check_initial_weights  # here, as few runs need it

                    check_initial_weights(config.job, config.checkpoint, config.model, loaded.origins)
                check_writable(folders)
            if launch.rank == 0:
                lock_run(folders, config.job, lost=lambda message: heartbeat.end(f"error: {message}", status=1))
            process.keep_log(os.path.join(config.job.dump_folder, "logs"))
            with mesh.process_group(launch, config.comm, config.job.dump_folder):
                require_same(options_of_run(config))
                train(config, launch, process.signals)
        if config.checkpoint.last_save_in_hf and launch.rank == 0:  # the other ranks need not wait for it
            from titanlite.checkpoint.export import export_last_step

            folder = Path(config.job.dump_folder) / config.checkpoint.folder
            export_last_step(folder, config.training.steps, config.checkpoint.export_dtype)
    except Exception as error:
        from titanlite.out_of_memory import explain_out_of_memory  # here, since most runs do without

        watchdog.fail(explain_out_of_memory(error), heartbeat)
    process.exit_process(0)


if __name__ == "__main__":
    main(sys.argv[1:])
