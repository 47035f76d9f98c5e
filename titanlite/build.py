"""Build the objects of a run from its resolved config, for train.py, the planner and the parity test. Only this file
decides which techniques a config enables."""

import functools
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from titanlite.build_llama import build_llama
from titanlite.checkpoint.run import NoCheckpoints, Trained
from titanlite.config import Config, Launch
from titanlite.config.schema import Debug, Optimizer, Training, numerics, stage_modules
from titanlite.config.stage_split import rank_of_stage
from titanlite.data.loader import Batch, Loader, SequenceShard, Share, n_validation_batches, validation_batches
from titanlite.data.open import open_sequences, tokenizer_of_run
from titanlite.data.packing import Mixture, Sequences, SplitSequences
from titanlite.init import init_weights
from titanlite.launch.process import Signals
from titanlite.launch.process_group import compared_over_ranks, options_of_run
from titanlite.loss import chunked_cross_entropy, cross_entropy
from titanlite.metrics import logger as metrics
from titanlite.metrics import provenance
from titanlite.metrics.flops import flops_per_token
from titanlite.model import Llama
from titanlite.optimizer import build_adam, parameter_groups
from titanlite.parallel.fsdp import use_in_place
from titanlite.parallel.mesh import Layout
from titanlite.parallel.parallelize import parallelize
from titanlite.step_guard import StepGuard
from titanlite.train_step import Balance, OneGroup, Runner, SingleStageRunner, TrainStep
from titanlite.validation import Validator


class Data(NamedTuple):
    """The packed training and validation sequences of a run."""

    train: Sequences | Mixture
    """The training split; a Mixture if the config has training.datasets."""
    validation: SplitSequences | None
    """The validation sequences; None unless validation.enable."""
    identity: str
    """A string that names datasets and tokenizer: two runs with the same string have the same sequences."""


class Run(NamedTuple):
    """The objects of a run. Tools that do not train leave the last three fields unset."""

    config: Config
    layout: Layout
    device: torch.device
    model: Llama
    """All modules of this rank under their names in the full model, for optimizer, checkpoint and gradient norm."""
    stages: dict[int, Llama]
    """The pipeline stages that this rank runs, by stage number; without a pipeline, stage 0 is the full model."""
    optimizer: torch.optim.Optimizer | None = None
    data: Data | None = None
    signals: Signals | None = None


def set_seed(debug: Debug, rank: int) -> None:
    """Seed this rank's generators, and choose deterministic algorithms if debug.deterministic is set."""
    torch.manual_seed(debug.seed + rank)
    if debug.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS computes repeatable products only with this setting
        torch.use_deterministic_algorithms(True)


def meta_model(config: Config, modules: Collection[str] | None = None) -> Llama:
    """Return the model, or only its modules named in `modules`, on the meta device, without memory for weights."""
    model = build_llama(config.model, max_seq_len=config.training.seq_len, modules=modules, block=config.own.block)
    return model.to(getattr(torch, config.training.dtype))


def parameter_sizes(config: Config) -> dict[str, int]:
    """Return the number of elements of each parameter of the full model, by name."""
    return {name: parameter.numel() for name, parameter in meta_model(config).named_parameters()}


def build_stage(config: Config, layout: Layout, modules: Collection[str] | None, device: torch.device) -> Llama:
    """Return a stage of the named `modules` (None: all), parallelized over the mesh, on the meta device. Raises
    ConfigError if the device lacks the enabled float8 or int8, no layer can use it, or the user's block is wrong."""
    parallelism, training = config.parallelism, config.training
    stage = meta_model(config, modules)
    config.own.prepare(stage, config.model, training, parallelism)
    full_model = functools.partial(meta_model, config)
    if config.lora.rank:
        from titanlite.techniques.lora import Adapters  # imported here: only runs with LoRA need it

        stage.adapters = Adapters(stage, config.lora, full_model)
    if config.float8.enable or config.int8.enable:
        from titanlite.techniques.low_precision import convert_linear_layers  # imported here: few runs use it

        settings = {"model": full_model, "tensor_parallel_degree": parallelism.tensor_parallel_degree, "device": device}
        convert_linear_layers(stage, config.float8, config.int8, **settings)
    if stage.output is not None:
        arguments = {"n_chunks": training.loss_chunks, "loss_parallel": not parallelism.disable_loss_parallel}
        token_loss = config.own.loss or cross_entropy
        stage.output.loss = functools.partial(chunked_cross_entropy, token_loss=token_loss, **arguments)
    sections = {"parallelism": parallelism, "training": training, "compile": config.compile}
    parallelize(stage, layout, **sections, activation_checkpoint=config.activation_checkpoint)
    return stage


def build_model(config: Config, layout: Layout, device: torch.device) -> tuple[Llama, dict[int, Llama]]:
    """Return the `model` and the `stages` of a Run, sharded and with initial weights."""
    schedule, degree = config.parallelism.pipeline_parallel_schedule, config.parallelism.pipeline_parallel_degree
    modules_of_stages = stage_modules(config) if degree > 1 else [None]
    ranks = rank_of_stage(schedule, degree, len(modules_of_stages))
    config.own.check_loss(config.model, config.parallelism, layout.mesh["tp"].get_group(), device)
    stages: dict[int, Llama] = {}
    for number, modules in enumerate(modules_of_stages):
        if ranks[number] == layout.mesh.get_local_rank("pp"):
            stage = stages[number] = build_stage(config, layout, modules, device)
            stage.materialize(device, weights_on_cpu=config.training.enable_cpu_offload)
            init_weights(stage, seed=config.debug.seed, n_layers=config.model.n_layers, device=device)
    first, *others = stages.values()
    if not others:
        return first, stages
    model = meta_model(config, modules=())
    for stage in stages.values():
        model.layers.update(stage.layers)
        model.tok_embeddings = model.tok_embeddings or stage.tok_embeddings
        model.position_embeddings = model.position_embeddings or stage.position_embeddings
        model.norm, model.output = model.norm or stage.norm, model.output or stage.output
        stage.rope = first.rope  # all stages of a rank share one rotary table
    return model, stages


def build_train_step(run: Run, groups: OneGroup | None = None) -> TrainStep:
    """Return the object that computes this rank's optimizer steps. `groups`: replica groups, if any."""
    config, layout, device, model, stages = run[:5]
    parallelism, training = config.parallelism, config.training
    for stage in stages.values():
        use_in_place(stage, parallelism, training)
    runner: Runner = SingleStageRunner(model)
    if parallelism.pipeline_parallel_degree > 1:
        from titanlite.parallel.pipeline import PipelineRunner

        runner = PipelineRunner(
            stages,
            parallelism,
            group=layout.mesh["pp"].get_group(),
            n_microbatches=config.n_microbatches,
            hidden_shape=config.hidden_shape,
            dtype=getattr(torch, training.mixed_precision_param),
            device=device,
            compiles=config.compile.enable,
            validates=config.validation.enable,
        )
    # Several ranks process the same tokens; only the first tp rank of the last pipeline stage adds up the losses.
    contributes_loss = model.output is not None and layout.mesh.get_local_rank("tp") == 0
    return TrainStep(
        model,
        runner,
        parallelism,
        device=device,
        contributes_loss=contributes_loss,
        max_norm=training.max_norm,
        balance=build_balance(config, model, device),
        groups=groups or OneGroup(),
    )


def build_guard(training: Training, device: torch.device) -> StepGuard:
    loss_scale = outliers = None
    if training.mixed_precision_param == "float16":
        from titanlite.techniques.loss_scale import LossScale

        loss_scale = LossScale(training.initial_loss_scale, training.loss_scale_growth_interval)
    if training.skip_outlier_sigma:
        from titanlite.techniques.outlier_steps import OutlierSteps

        outliers = OutlierSteps(training.skip_outlier_sigma, training.outlier_window, device)
    return StepGuard(training.nonfinite_steps_allowed, loss_scale, outliers)


def build_groups(run: Run) -> OneGroup:
    section = run.config.fault_tolerance
    if not section.enable:
        return OneGroup()
    from titanlite.techniques.replicas.torchft import Replicas

    identity = [*numerics(run.config), run.data.identity]
    return Replicas(section, run.config.comm, run.model, run.optimizer, identity, run.device, run.signals)


def build_balance(config: Config, model: Llama, device: torch.device) -> Balance | None:
    if not config.model.moe.n_experts:
        return None
    from titanlite.techniques.moe.balance import LoadBalance

    return LoadBalance(model, config.model, tokens_per_step=config.tokens_per_step, device=device)


def build_optimizer(
    config: Config, model: Llama, stages: Collection[Llama] = (), layout: Layout | None = None
) -> torch.optim.Optimizer:
    """Return the optimizer of a model. `stages`: the stages to which FSDP is applied. Every rank must call it."""
    build = config.own.optimizer or functools.partial(optimizer_for, mesh=layout.mesh if layout else None)
    optimizer = build(model, config.optimizer)
    if stages and config.float8.precompute_float8_dynamic_scale_for_fsdp:
        from titanlite.parallel.float8 import precompute_scales

        precompute_scales(stages, optimizer)
    if config.ema.decay:
        from titanlite.techniques.ema import follow

        follow(optimizer, config.ema)
    return optimizer


def optimizer_for(model: Llama, section: Optimizer, mesh: DeviceMesh | None = None) -> torch.optim.Optimizer:
    """Return Adam (arXiv:1412.6980), AdamW (arXiv:1711.05101) or Muon (techniques/muon.py). Only matrices and
    embeddings have weight decay. `mesh`: the mesh of all ranks, which Muon needs; None: this rank alone."""
    if section.name == "Muon":
        from titanlite.techniques.muon import muon_of

        return muon_of(model, section, mesh)
    groups = parameter_groups(model.named_parameters(), section)
    weights_dtype = str(groups[0]["params"][0].dtype).removeprefix("torch.")
    if section.state_dtype not in ("auto", weights_dtype) or section.stochastic_rounding:
        from titanlite.techniques.low_bit_adam import LowBitAdam  # imported here: the import takes a second

        embedding = [] if model.tok_embeddings is None else [model.tok_embeddings.weight]
        return LowBitAdam(groups, section, full_precision=embedding)
    if section.enable_cpu_offload:
        from titanlite.techniques.offloaded_adam import OffloadedAdam

        return OffloadedAdam(groups, section)
    return build_adam(groups, section, section.name)


def build_data(config: Config, *, builds_cache: bool) -> Data:
    """Return the training and validation sequences. Without a token cache, one rank per node (`builds_cache`) tokenizes
    the dataset. Raises ConfigError if data is unreadable, differs between ranks or does not fit the model."""
    if config.own.data:
        from titanlite.techniques.data.own import open_own

        return Data(*open_own(config.own.data, config.model, config.training, config.debug, config.validation.enable))
    tokenizer = tokenizer_of_run(config.model, config.checkpoint, config.parallelism)
    with compared_over_ranks() as compare:
        sequences, validation, identity = open_sequences(
            tokenizer, config.training, config.validation, seed=config.debug.seed, builds_cache=builds_cache
        )
        compare(identity, sequences.identity if config.training.datasets else "")
    return Data(sequences, validation, identity)


def data_share(config: Config, layout: Layout) -> Share:
    """Return which sequences this rank reads, and which tokens of each sequence it takes."""
    parallelism, shard = config.parallelism, SequenceShard()
    if parallelism.context_parallel_degree > 1:
        from titanlite.parallel.tiles import local_positions

        ulysses = parallelism.context_parallel_ulysses_degree
        positions = functools.partial(local_positions, config.training.seq_len, ring=parallelism.ring_degree)
        shard = SequenceShard(
            own=positions(ulysses=ulysses, rank=layout.context_rank).numpy(),
            ring=positions(ulysses=1, rank=layout.context_rank // ulysses).numpy(),
        )
    return Share(layout.data_rank, parallelism.data_parallel_degree, shard)


def build_loader(run: Run, sequences: Sequences | Mixture, state: dict[str, Any] | None, last_step: int = 0) -> Loader:
    """Return the loader of this rank's batches. `state`: the loader's state in a checkpoint of step `last_step`; None:
    begin with the first batch. Raises ConfigError if a mixture's datasets end before the last step."""
    config = run.config
    if config.training.datasets:
        sequences.check(state, (config.training.steps - last_step) * config.training.global_batch_size)
    share, groups = data_share(config, run.layout), config.fault_tolerance
    n_copies = config.parallelism.world_size // share.degree
    if groups.enable:  # each replica group keeps its fixed share of the sequences, even while it is down
        rank = groups.replica_id * share.degree + share.rank
        share = Share(rank, groups.group_size * share.degree, share.shard)
    return Loader(sequences, config.training, share, n_copies=n_copies, pin=run.device.type == "cuda", state=state)


def build_validation_batches(config: Config, layout: Layout, sequences: SplitSequences) -> tuple[Iterator[Batch], int]:
    arguments = sequences, config.training, config.validation, data_share(config, layout)
    return validation_batches(*arguments), n_validation_batches(*arguments)


def build_metrics(
    config: Config, launch: Launch, device: torch.device, sizes: dict[str, int]
) -> tuple[metrics.ThroughputMeter, metrics.Logger]:
    """Return this rank's throughput meter and logger; only rank 0's logger writes. `sizes`: see `parameter_sizes`."""
    meter = metrics.ThroughputMeter(
        device,
        tokens_per_step=config.tokens_per_step / config.fault_tolerance.n_groups / launch.world_size,
        flops_per_token=flops_per_token(sizes, config.model, config.training.seq_len),
        peak=metrics.PeakFlops(device, getattr(torch, config.training.mixed_precision_param)),
    )
    if launch.rank > 0:
        return meter, metrics.Logger()
    resolved = provenance.describe(device, launch.world_size) + config.toml()
    folder, steps = Path(config.job.dump_folder), config.training.steps
    return meter, metrics.MetricsLogger(folder, config.metrics, steps=steps, config=resolved)


def build_checkpoints(run: Run) -> NoCheckpoints:
    """Return the object that loads and saves the checkpoints of a run. Every rank must call it."""
    config, checkpoint = run.config, run.config.checkpoint
    trained = Trained(run.model, run.optimizer, config.training.steps, run.signals)
    if not checkpoint.enable:
        return NoCheckpoints(checkpoint, trained)
    from titanlite.checkpoint.checkpointer import Checkpointer  # imported here: only runs with checkpoints need it

    identity = {"seed": config.debug.seed, "data": run.data.identity, **config.identity()}
    identity |= {"mixture": run.data.train.identity} if config.training.datasets else {}
    may_differ = {"mixture"} if config.training.change_mixture_on_resume else set()
    options = identity, config.comm, may_differ, options_of_run(config), trained
    return Checkpointer(Path(config.job.dump_folder), checkpoint, *options)


def build_validator(run: Run, train_step: TrainStep) -> Validator:
    batches = functools.partial(build_validation_batches, run.config, run.layout, run.data.validation)
    arguments = run.config.validation, train_step, batches, run.signals
    if run.config.ema.validation:
        from titanlite.techniques.ema import AveragedValidator

        return AveragedValidator(run.optimizer, *arguments)
    return Validator(*arguments)


def add_observers(
    run: Run, train_step: TrainStep, loader: Loader, guard: StepGuard, checkpoints: NoCheckpoints, log: metrics.Logger
) -> None:
    """Add to `train_step` the observers that a config enables. Raises ConfigError if a prompt is too long."""
    config, layout, optimizer = run.config, run.layout, run.optimizer
    training, validation, observers = config.training, config.validation, train_step.observers
    observers += [config.own.metrics(train_step)] if config.own.metrics else []
    if config.debug.fingerprint_freq:
        from titanlite.techniques.fingerprints.observer import Fingerprints

        sections = config.debug, config.job, training, config.optimizer, config.float8, config.int8
        model, shard = meta_model(config), data_share(config, layout).shard
        observers.append(Fingerprints(*sections, model, layout, shard, train_step, optimizer, guard))
    if training.datasets:
        from titanlite.techniques.data.dataset_losses import DatasetLosses

        observers.append(DatasetLosses(loader.stateful, loader, train_step, training, data_rank=layout.data_rank))
    if config.debug.sdc_check_freq:
        from titanlite.techniques.sdc import CorruptionCheck

        freq, checkpointer = config.debug.sdc_check_freq, checkpoints if config.checkpoint.enable else None
        observers.append(CorruptionCheck(freq, train_step, optimizer, guard, checkpointer))
    if validation.generate_prompts:
        from titanlite.techniques.samples import Samples

        observers.append(Samples(training, validation, config.model, train_step, log))
