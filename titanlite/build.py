"""From a resolved Config to the parts of a run.

train.py, the plan and the parity proof all build their run here, so what they plan and prove is what trains. Together
with them this is the only file that sees the whole Config: the parts take the values they need, by keyword.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titanlite import data, profiling
from titanlite.config import Config
from titanlite.data.tokenizer import build_tokenizer
from titanlite.init import init_weights
from titanlite.mesh import init_mesh
from titanlite.model import Llama, flops_per_token
from titanlite.optimizer import init_optimizer
from titanlite.options import ConfigError
from titanlite.parallel import parallelize


def build_mesh(config: Config, device: torch.device) -> DeviceMesh:
    return init_mesh(
        device.type,
        dp_replicate=config.parallelism.data_parallel_replicate_degree,
        dp_shard=config.parallelism.data_parallel_shard_degree,
    )


def model_dimensions(config: Config) -> dict[str, int | float | bool]:
    """What makes two models the same but for their weights."""
    return config.model.model_dump(exclude={"flavor", "hf_assets_path"})


def build_model(config: Config, mesh: DeviceMesh, device: torch.device) -> Llama:
    """The model, cut over the mesh and with its initial weights."""
    training = config.training
    with torch.device("meta"):
        model = Llama(**model_dimensions(config), max_seq_len=training.seq_len).to(getattr(torch, training.dtype))
    parallelize(
        model,
        mesh,
        reshard_after_forward=config.parallelism.fsdp_reshard_after_forward,
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        cpu_offload=training.enable_cpu_offload,
    )
    model.materialize(device, weights_on_cpu=training.enable_cpu_offload)
    init_weights(model, seed=config.debug.seed, n_layers=config.model.n_layers, device=device)
    return model


def build_optimizer(config: Config, model: Llama) -> torch.optim.Optimizer:
    return init_optimizer(model, **config.optimizer.model_dump())


def count_flops_per_token(config: Config, model: Llama) -> int:
    return flops_per_token(
        ((name, parameter.numel()) for name, parameter in model.named_parameters()),
        n_layers=config.model.n_layers,
        dim=config.model.dim,
        seq_len=config.training.seq_len,
        tied=config.model.tie_embeddings,
    )


def build_data(config: Config, *, builds_cache: bool) -> tuple[data.Sequences, data.HeldOutSequences | None, str]:
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
    sequences, held_out, identity = data.open_sequences(
        tokenizer,
        dataset=training.dataset,
        dataset_path=training.dataset_path,
        dataset_config=training.dataset_config,
        dataset_split=training.dataset_split,
        text_key=training.dataset_text_key,
        text_sample_by=training.text_sample_by,
        streaming=training.streaming,
        streams=training.streams,
        shuffle=training.shuffle,
        seed=config.debug.seed,
        seq_len=training.seq_len,
        cache_folder=training.cache_folder,
        validation_path=validation.dataset_path,
        validation_split=validation.dataset_split,
        validation_fraction=validation.fraction,
        validation_enable=validation.enable,
        builds_cache=builds_cache,
    )
    identities: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(identities, identity)
    if set(identities) != {identity}:
        other = next(rank for rank, found in enumerate(identities) if found != identities[0])
        raise ConfigError(
            [f"training.dataset_path: rank {other} reads other data than rank 0; give all hosts the same"]
        )
    return sequences, held_out, identity


def build_loader(
    config: Config, sequences: data.Sequences, *, rank: int, device: torch.device, state: dict | None
) -> data.Loader:
    """This rank's batches from where a saved run stood (`state`), or from the first."""
    return data.Loader(
        sequences,
        rank=rank,
        n_ranks=config.parallelism.data_parallel_replicate_degree * config.parallelism.data_parallel_shard_degree,
        local_batch_size=config.training.local_batch_size,
        global_batch_size=config.training.global_batch_size,
        pin=device.type == "cuda",
        state=state,
    )


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
