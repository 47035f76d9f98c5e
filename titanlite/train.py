"""A run, top to bottom: config, mesh, data, model, loop.

    ./run_train.sh CONFIG.toml [--section.key=value ...]         as many ranks as the config asks for
    torchrun --nproc-per-node=N train.py CONFIG.toml [...]       N ranks
    python train.py CONFIG.toml [...]                            one rank

Exit status: 0 done; 2 the config or the launch is wrong (one line a problem); 1 anything else.
"""

import contextlib
import gc
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite import build, data, metrics, profiling, provenance
from titanlite.config import USAGE, Config, Launch, check, load, loader
from titanlite.config.schema import stage_modules
from titanlite.loss import count_valid
from titanlite.optimizer import build_loss_scale, clip_factor, gradient_norm, lr_factor, scale_gradients, set_lr
from titanlite.parallel import mesh


class TrainingError(Exception):
    """The run cannot go on; the message says at which step, on which ranks, and why."""


def train(config: Config, launch: Launch, asked_to_stop: Callable[[], bool]) -> None:
    """Train to the last step, or to the end of the step during which some rank was asked to stop."""
    training, rank = config.training, launch.rank
    device, dump_folder = mesh.device_of(launch), Path(config.job.dump_folder)
    torch.manual_seed(config.debug.seed + rank)
    if config.debug.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # NVIDIA's condition for repeatable cuBLAS products
        torch.use_deterministic_algorithms(True)

    def say(message: str) -> None:
        if rank == 0:
            print(message, flush=True)

    # The parts
    layout = build.build_layout(config, device)
    sequences, held_out, data_identity = build.build_data(config, builds_cache=launch.local_rank == 0)
    model, stages = build.build_model(config, layout, device)
    work = build.build_step(config, layout, model, stages, device)
    optimizer = build.build_optimizer(config, model, stages.values())
    loss_scale = build_loss_scale(training)
    parameters = list(model.parameters())
    peak = metrics.PeakFlops(device, getattr(torch, training.mixed_precision_param))
    sizes = build.parameter_sizes(config)
    say(run_summary(config, sum(sizes.values()), sequences, held_out, peak.source))

    # Where to start: after the newest checkpoint, or from given weights, or from the initial ones
    last_step, skipped, data_state, checkpointer = 0, 0, None, None
    if config.checkpoint.enable or config.checkpoint.initial_load_path:
        from titanlite import checkpoint  # here: the import takes half a second, and a run may do without
    if config.checkpoint.enable:
        checkpointer = checkpoint.Checkpointer(
            dump_folder,
            config.checkpoint,
            identity={"seed": config.debug.seed, "data": data_identity, **build.model_dimensions(config)},
        )
        saved = checkpointer.resume(model, optimizer)
        if saved:
            last_step, skipped, data_state = saved["step"], saved["skipped"], saved["data"]
            loss_scale.load(saved["loss_scale"])
            say(f"resumed after step {last_step} of {training.steps} from {checkpointer.folder}")
    if not last_step and config.checkpoint.initial_load_path:
        checkpoint.load_weights(Path(config.checkpoint.initial_load_path), model)
        say(f"weights from {config.checkpoint.initial_load_path}")

    loader = build.build_loader(config, layout, sequences, device=device, state=data_state)
    reporter = None
    if rank == 0:
        reporter = metrics.MetricsLogger(
            dump_folder,
            config.metrics,
            last_step=last_step,
            steps=training.steps,
            config=provenance.describe(device, launch.world_size) + config.toml(),
        )
    meter = metrics.ThroughputMeter(
        device,
        tokens_per_step=training.global_batch_size * training.seq_len / launch.world_size,
        flops_per_token=build.count_flops_per_token(config, sizes),
        peak=peak,
    )
    with contextlib.ExitStack() as stack:
        profilers = [
            stack.enter_context(profiler) for profiler in profiling.build_profilers(dump_folder, config.profiling, rank)
        ]

        # The loop. Python collects garbage when it is told to, on all ranks in the same step.
        gc.collect()
        gc.freeze()
        gc.disable()
        stack.callback(gc.enable)
        for step in range(last_step + 1, training.steps + 1):
            with meter.waiting_for_data():
                batch = loader.next()
            lr = config.optimizer.lr * lr_factor(step, config.lr_scheduler)
            set_lr(optimizer, lr)
            loss_sum, valid = work.forward_backward(batch, loss_scale.value)
            norm = gradient_norm(parameters, device)

            # One small sum tells all ranks the loss, and whether one of them was asked to stop.
            totals = torch.stack([loss_sum, torch.full_like(loss_sum, asked_to_stop())])
            dist.all_reduce(totals)
            loss, norm_value, stopping = torch.stack([totals[0] / valid, norm.to(totals), totals[1]]).tolist()
            overflowed = loss_scale.dynamic and math.isfinite(loss) and not math.isfinite(norm_value)
            if math.isfinite(loss) and math.isfinite(norm_value):
                scale_gradients(parameters, clip_factor(norm, training.max_norm))
                optimizer.step()
            elif overflowed and loss_scale.value > 1:
                say(
                    f"step {step}: gradients overflow at loss scale {loss_scale.value:g}; skipped, and the scale halved"
                )
            else:
                why = why_not_finite(step, loss, norm_value, loss_sum)
                if skipped == training.nonfinite_steps_allowed:
                    raise TrainingError(f"{why} (training.nonfinite_steps_allowed = {skipped}, all used)")
                skipped += 1
                say(f"{why}; skipped without an update, {skipped} of {training.nonfinite_steps_allowed} allowed")
            loss_scale.update(overflowed=overflowed)
            optimizer.zero_grad()
            meter.step_done()
            if step % training.gc_freq == 0:
                gc.collect()
            if step == last_step + 1:
                mesh.set_timeout(layout, config.comm.train_timeout_seconds)

            # Reports, validation, checkpoint
            ends = step == training.steps or stopping > 0
            values = {}
            if step % config.metrics.log_freq == 0 or step == last_step + 1 or ends:
                values = {
                    "loss_metrics/global_avg_loss": loss,
                    "loss_metrics/global_max_loss": largest_loss(loss_sum, batch, work.contributes_loss),
                    "grad_norm": norm_value,
                    "lr": lr,
                    "n_tokens_seen": loader.position * training.seq_len,
                    **meter.read(),
                }
            with meter.paused():
                if held_out is not None and (step % config.validation.freq == 0 or ends):
                    batches = build.build_validation_batches(config, layout, held_out)
                    values[metrics.VALIDATION_LOSS] = work.validate(batches)
                if reporter and values:
                    reporter.log(step, values, meter.seconds_per_step)
                if checkpointer:
                    checkpointer.poll()
                    if step % config.checkpoint.interval == 0 or ends:
                        checkpointer.save(
                            step,
                            model,
                            optimizer,
                            {"skipped": skipped, "loss_scale": loss_scale.state(), "data": loader.state()},
                        )
            for step_done in profilers:
                step_done(step)
            if stopping:
                say(f"asked to stop: ended after step {step}")
                break
    loader.close()
    if checkpointer:
        checkpointer.close()


def largest_loss(loss_sum: Tensor, batch: list[data.Batch], contributes_loss: bool) -> float:
    """The largest of the ranks' own mean losses."""
    own = loss_sum / count_valid([microbatch.targets for microbatch in batch], loss_sum.device)
    own = (
        own.nan_to_num(nan=-math.inf) if contributes_loss else torch.full_like(own, -math.inf)
    )  # no valid token: no loss
    dist.all_reduce(own, dist.ReduceOp.MAX)
    return own.item()


def why_not_finite(step: int, loss: float, norm: float, loss_sum: Tensor) -> str:
    """What is wrong with a step, and on which ranks. Every rank must call it."""
    flags = [torch.empty_like(loss_sum) for _ in range(dist.get_world_size())]
    dist.all_gather(flags, loss_sum)
    ranks = [str(rank) for rank, value in enumerate(flags) if not math.isfinite(value.item())]
    if ranks:
        return f"step {step}: the loss is {loss} because of rank {', '.join(ranks)}"
    return f"step {step}: the gradient norm is {norm} though the loss is finite on every rank ({loss:.4f})"


def run_summary(
    config: Config,
    n_parameters: int,
    sequences: data.Sequences,
    held_out: data.ValidationSequences | None,
    peak_source: str,
) -> str:
    """The first lines of a run: what trains on what, in which precision, over which ranks."""
    training, size = config.training, config.model
    batch, microstep = training.global_batch_size, training.local_batch_size * config.parallelism.data_parallel_degree
    lines = [
        *([config.job.description] if config.job.description else []),
        f"model      {size.flavor}: {size.n_layers} layers, dim {size.dim}, {size.n_heads} heads, "
        f"{size.n_kv_heads} kv heads, ffn {size.ffn_dim}, vocabulary {size.vocab_size}; "
        f"{n_parameters:,} parameters",
        f"precision  {build.describe_precision(config)}",
        *optimization_summary(config),
        f"mesh       {build.describe_mesh(config)}",
        *pipeline_lines(config),
        f"data       {training.dataset}: {sequences}; validation: {held_out or 'none'}",
        f"step       {batch} sequences x {training.seq_len} tokens in {batch // microstep} microstep(s)",
        f"MFU        of {peak_source}; 6N + 12LDT operations a token",
    ]
    return "\n".join(lines)


def optimization_summary(config: Config) -> list[str]:
    """What is done to be faster or to need less memory, in a line each."""
    float8, recomputed, chunks = config.float8, config.activation_checkpoint, config.training.loss_chunks
    lines = []
    if float8.enable:
        lines.append(f"float8     {float8.recipe}{', emulated' if float8.emulate else ''}")
    if recomputed.mode != "none":
        option = {"selective": recomputed.selective_ac_option, "memory_budget": recomputed.memory_budget}
        lines.append(f"recompute  {recomputed.mode} {option.get(recomputed.mode, '')}".rstrip())
    if chunks > 1:
        lines.append(f"loss       in {chunks} parts")
    if config.compile.enable:
        lines.append(f"compile    {' and '.join(config.compile.components)}, {config.compile.backend}")
    return lines


def pipeline_lines(config: Config) -> list[str]:
    """The schedule, and the modules of each stage."""
    parallelism = config.parallelism
    if parallelism.pipeline_parallel_degree == 1:
        return []
    parts = " | ".join(part[0] if len(part) == 1 else f"{part[0]} .. {part[-1]}" for part in stage_modules(config))
    microbatches = config.training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    return [f"pipeline   {parallelism.pipeline_parallel_schedule}, {microbatches} microbatch(es), stages {parts}"]


def main(argv: list[str]) -> None:
    if "--help" in argv or "-h" in argv:
        print(loader.help_text(Config, USAGE))
        return
    mesh.retain_freed_memory()
    stop_signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop_signals.append(number))
    try:
        launch = Launch.from_environment(torch.cuda.device_count())
        config = check(load(argv), launch)
        with mesh.process_group(
            launch,
            timeout_seconds=config.comm.init_timeout_seconds,
            trace_buf_size=config.comm.trace_buf_size,
            dump_folder=config.job.dump_folder,
        ):
            train(config, launch, lambda: bool(stop_signals))
        status = 0
    except loader.ConfigError as error:
        status = 2
        if os.environ.get("LOCAL_RANK", "0") == "0":  # all ranks find the same
            loader.print_problems(error)
    except TrainingError as error:
        status = 1
        if launch.rank == 0:
            print(f"error: {error}", file=sys.stderr)
    except Exception:
        status = 1
        traceback.print_exc()
    mesh.leave(status)


if __name__ == "__main__":
    main(sys.argv[1:])
