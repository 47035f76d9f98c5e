"""From a resolved Config to the parts of a run.

train.py, the plan and the parity proof all build their run here, so what they plan and prove is what trains. Together
with them this is the only file that sees the whole Config: the parts take the values they need, by keyword.
"""

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite import data, profiling
from titanlite.config import Config
from titanlite.config.loader import ConfigError
from titanlite.config.schema import stage_modules
from titanlite.config.stage_split import rank_of_stage
from titanlite.data.tokenizer import build_tokenizer
from titanlite.init import init_weights
from titanlite.loss import chunked_cross_entropy
from titanlite.model import Llama, flops_per_token
from titanlite.optimizer import LossScale, init_optimizer
from titanlite.parallel import mesh
from titanlite.parallel.context import local_positions
from titanlite.parallel.mesh import Layout
from titanlite.parallel.parallelize import parallelize
from titanlite.parallel.pipeline import Pipeline
from titanlite.train_step import SingleStageRunner, TrainStep


def build_layout(config: Config, device: torch.device) -> Layout:
    parallelism = config.parallelism
    return mesh.build_layout(
        device.type,
        pp=parallelism.pipeline_parallel_degree,
        dp_replicate=parallelism.data_parallel_replicate_degree,
        dp_shard=parallelism.data_parallel_shard_degree,
        ring=parallelism.ring_degree,
        ulysses=parallelism.context_parallel_ulysses_degree,
        tp=parallelism.tensor_parallel_degree,
    )


def describe_mesh(config: Config) -> str:
    """The degrees, outermost first."""
    parallelism = config.parallelism
    ring, ulysses = parallelism.ring_degree, parallelism.context_parallel_ulysses_degree
    inner = f" (ring {ring} x ulysses {ulysses})" if ulysses > 1 else ""
    return (
        f"pp {parallelism.pipeline_parallel_degree} x dp_replicate {parallelism.data_parallel_replicate_degree} x "
        f"dp_shard {parallelism.data_parallel_shard_degree} x cp {parallelism.context_parallel_degree}{inner} x "
        f"tp {parallelism.tensor_parallel_degree}"
    )


def model_dimensions(config: Config) -> dict[str, int | float | bool]:
    """What makes two models the same but for their weights."""
    return config.model.model_dump(exclude={"flavor", "hf_assets_path"})


def meta_model(config: Config, only: Collection[str] | None = None) -> Llama:
    """The model, or the named modules of it, without memory for its weights."""
    with torch.device("meta"):
        model = Llama(**model_dimensions(config), max_seq_len=config.training.seq_len, only=only)
    return model.to(getattr(torch, config.training.dtype))


def build_model(config: Config, layout: Layout, device: torch.device) -> tuple[Llama, dict[int, Llama]]:
    """All modules that this rank has, cut over the mesh and with their initial weights, under their names in the whole
    model; and the pipeline stages that they make up, by number: without a pipeline one, which is the model itself."""
    parallelism = config.parallelism
    stages: dict[int, Llama] = {}
    names = [None]
    if parallelism.pipeline_parallel_degree > 1:
        names = stage_modules(config)
    ranks = rank_of_stage(parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree, len(names))
    for number, (only, rank) in enumerate(zip(names, ranks, strict=True)):
        if rank == layout.mesh.get_local_rank("pp"):
            stage = stages[number] = build_stage(config, layout, only, device)
            stage.materialize(device, weights_on_cpu=config.training.enable_cpu_offload)
            init_weights(stage, seed=config.debug.seed, n_layers=config.model.n_layers, device=device)
    model, *others = stages.values()
    if others:
        model = meta_model(config, only=())
        for stage in stages.values():
            model.layers.update(stage.layers)
            model.tok_embeddings = model.tok_embeddings or stage.tok_embeddings
            model.norm, model.output = model.norm or stage.norm, model.output or stage.output
            stage.rope = next(iter(stages.values())).rope  # one table for all
    return model, stages


def build_stage(config: Config, layout: Layout, only: Collection[str] | None, device: torch.device) -> Llama:
    """The named modules, or all, cut over the mesh, still on the meta device."""
    training, parallelism = config.training, config.parallelism
    stage = meta_model(config, only)
    if config.float8.enable:
        convert_to_float8(config, stage, device)
    if stage.output is not None:
        stage.output.loss = functools.partial(
            chunked_cross_entropy, n_chunks=training.loss_chunks, loss_parallel=not parallelism.disable_loss_parallel
        )
    parallelize(
        stage,
        layout,
        checkpoint_mode=config.activation_checkpoint.mode,
        checkpoint_option=config.activation_checkpoint.selective_ac_option,
        memory_budget=config.activation_checkpoint.memory_budget,
        attention_backend=training.attention_backend,
        compile_components=config.compile.components if config.compile.enable else (),
        compile_backend=config.compile.backend,
        async_tensor_parallel=parallelism.enable_async_tensor_parallel,
        reshard_after_forward=parallelism.fsdp_reshard_after_forward,
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        cpu_offload=training.enable_cpu_offload,
        forward_prefetch=parallelism.fsdp_forward_prefetch,
        backward_prefetch=parallelism.fsdp_backward_prefetch,
    )
    return stage


def convert_to_float8(config: Config, stage: Llama, device: torch.device) -> None:
    """Convert a stage on the meta device.

    Raises:
        ConfigError: if the device has no float8, or no layer is to be converted.
    """
    from titanlite.parallel import float8  # here: the import takes a second

    options = config.float8
    if not options.emulate and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(
            [f"float8.enable = true: {name} has no float8 products; set float8.emulate = true, or this to false"]
        )
    converted = float8.convert_to_float8(
        stage,
        recipe=options.recipe,
        emulate=options.emulate,
        all_gather=options.enable_fsdp_float8_all_gather,
        filter_fqns=options.filter_fqns,
        tensor_degree=config.parallelism.tensor_parallel_degree,
    )
    if not converted:
        raise ConfigError(["float8.enable = true: no layer is converted; see float8.filter_fqns, or set false"])


def _build_runner(
    config: Config, layout: Layout, stages: dict[int, Llama], device: torch.device
) -> SingleStageRunner | Pipeline:
    """How a microbatch passes through the stages of this rank and of others."""
    parallelism, training = config.parallelism, config.training
    if parallelism.pipeline_parallel_degree == 1:
        return SingleStageRunner(stages[0])
    return Pipeline(
        stages,
        n_stages=parallelism.n_stages,
        group=layout.mesh["pp"].get_group(),
        schedule=parallelism.pipeline_parallel_schedule,
        n_microbatches=config.n_microbatches,
        hidden_shape=config.hidden_shape,
        n_tokens=training.seq_len // parallelism.context_parallel_degree,
        dtype=getattr(torch, training.mixed_precision_param),
        device=device,
    )


def build_step(
    config: Config, layout: Layout, model: Llama, stages: dict[int, Llama], device: torch.device
) -> TrainStep:
    """What takes this rank's batches through what `build_model` gave."""
    return TrainStep(
        model,
        _build_runner(config, layout, stages, device),
        device=device,
        # Of the ranks that work on the same tokens, one speaks for all.
        contributes_loss=model.output is not None and layout.mesh.get_local_rank("tp") == 0,
        reshard_after_forward=config.parallelism.fsdp_reshard_after_forward,
        reduce_gradients=config.parallelism.fsdp_reduce_gradients,
    )


def build_optimizer(config: Config, model: Llama, stages: Collection[Llama] = ()) -> torch.optim.Optimizer:
    """Args:
    stages: what `build_model` gave beside the model, where weights are FSDP's.
    """
    optimizer = init_optimizer(model, **config.optimizer.model_dump())
    if stages and config.float8.precompute_float8_dynamic_scale_for_fsdp:
        from titanlite.parallel.float8 import precompute_scales

        precompute_scales(stages, optimizer)
    return optimizer


def build_loss_scale(config: Config) -> LossScale:
    """Only float16 needs one."""
    training = config.training
    if training.mixed_precision_param != "float16":
        return LossScale()
    return LossScale(training.initial_loss_scale, training.loss_scale_growth_interval)


def parameter_sizes(config: Config) -> dict[str, int]:
    """Elements of each parameter of the whole model."""
    return {name: parameter.numel() for name, parameter in meta_model(config).named_parameters()}


def describe_precision(config: Config) -> str:
    """The types of everything that is kept, and the bytes that a weight costs, over all ranks that it is sharded over:
    itself, its gradient and its two moments. A bit of int8 moments is not: their scales, and embeddings and norms."""
    training, state = config.training, config.optimizer.state_dtype
    kept = training.dtype if state == "auto" else state
    moment = 1 + 4 / 256 if state == "int8" else getattr(torch, kept).itemsize
    size = 2 * getattr(torch, training.dtype).itemsize + 2 * moment
    rounded = " (rounded by chance)" if config.optimizer.stochastic_rounding else ""
    return (
        f"weights {training.dtype}{rounded}, compute {training.mixed_precision_param}, gradients {training.dtype}, "
        f"reduced in {training.mixed_precision_reduce}, moments {kept}: {size:.4g} bytes a parameter"
    )


def count_flops_per_token(config: Config, sizes: dict[str, int]) -> int:
    """Args:
    sizes: what `parameter_sizes` gave.
    """
    return flops_per_token(
        sizes.items(),
        n_layers=config.model.n_layers,
        dim=config.model.dim,
        seq_len=config.training.seq_len,
        tied=config.model.tie_embeddings,
    )


def build_data(config: Config, *, builds_cache: bool) -> tuple[data.Sequences, data.ValidationSequences | None, str]:
    """Training sequences, validation sequences if they are wanted, and the identity of what they are made of.

    Raises:
        ConfigError: if the data cannot be had or is not the same on all ranks, or the tokenizer does not fit the model.
    """
    training, validation = config.training, config.validation
    tokenizer = build_tokenizer(config.model.hf_assets_path)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            [
                f"model.vocab_size = {config.model.vocab_size}: expected at least the {tokenizer.vocab_size} tokens of "
                "the tokenizer; set it, or choose another model.hf_assets_path"
            ]
        )
    sequences, validation_sequences, identity = data.open_sequences(
        tokenizer, training, validation, seed=config.debug.seed, builds_cache=builds_cache
    )
    identities: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(identities, identity)
    if set(identities) != {identity}:
        other = next(rank for rank, found in enumerate(identities) if found != identities[0])
        raise ConfigError(
            [f"training.dataset_path: rank {other} reads other data than rank 0; give all hosts the same"]
        )
    return sequences, validation_sequences, identity


def _share_of_data(config: Config, layout: Layout) -> dict[str, Any]:
    """Which sequences this rank takes, how many at once, and which tokens of each: arguments of the Loader and of
    validation_batches alike."""
    parallelism, ulysses = config.parallelism, config.parallelism.context_parallel_ulysses_degree
    positions = functools.partial(local_positions, config.training.seq_len, ring=parallelism.ring_degree)
    shard = data.SequenceShard(
        own=positions(ulysses=ulysses, rank=layout.context_rank).numpy(),
        ring=positions(ulysses=1, rank=layout.context_rank // ulysses).numpy(),
    )
    return {
        "data_rank": layout.data_rank,
        "data_parallel_degree": config.parallelism.data_parallel_degree,
        "shard": shard,
    }


def build_loader(
    config: Config, layout: Layout, sequences: data.Sequences, *, device: torch.device, state: dict | None
) -> data.Loader:
    """This rank's batches from where a saved run stood (`state`), or from the first."""
    return data.Loader(
        sequences,
        config.training,
        **_share_of_data(config, layout),
        pin=device.type == "cuda",
        state=state,
    )


def build_validation_batches(
    config: Config, layout: Layout, held_out: data.ValidationSequences
) -> Iterator[data.Batch]:
    """This rank's batches of one pass over the validation split."""
    return data.validation_batches(held_out, config.training, config.validation, **_share_of_data(config, layout))


def build_profilers(config: Config, rank: int) -> list[AbstractContextManager[Callable[[int], None]]]:
    """Contexts for the loop; what each yields is to be called with every step's number after it."""
    options, dump_folder, contexts = config.profiling, Path(config.job.dump_folder), []
    if options.enable_profiling:
        folder = dump_folder / options.save_traces_folder
        contexts.append(profiling.traces(folder, freq=options.profile_freq, rank=rank))
    if options.enable_memory_snapshot:
        folder = dump_folder / options.save_memory_snapshot_folder
        contexts.append(profiling.memory_snapshots(folder, freq=options.profile_freq, rank=rank))
    return contexts
