"""Checkpoints that have LoRA adapters but no base weights: find and check the base weights, and merge the adapters."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from titanlite.checkpoint.initial_weights import is_hugging_face
from titanlite.checkpoint.manifest import read_manifest
from titanlite.checkpoint.reader import CheckpointReader
from titanlite.config.loader import ConfigError
from titanlite.config.schema import LORA_FACTORS, SEEDED, Lora
from titanlite.data.documents import content_hash
from titanlite.files.durable import parse
from titanlite.parallel.shards import local_shard


def hash_of_base(place: str) -> str:
    """Return a hash of the weights in a folder: of a checkpoint's manifest, or of a Hugging Face folder's tensor files,
    where only samples of a large file's bytes are hashed. Raises ConfigError if there is no such folder."""
    if place == SEEDED:
        return SEEDED
    path = Path(place)
    if not is_hugging_face(path):
        return read_manifest(path).xxh3_64
    from titanlite.hf.load import tensor_files  # imported here: hf/ imports checkpoint/

    return content_hash(sorted({*tensor_files(path).values()}), with_times=False)


def lora_of(reader: CheckpointReader) -> Lora | None:
    """Return the config section [lora] of the run that saved a checkpoint; None if the checkpoint has full weights."""
    identity, keys = reader.state["identity"], Lora.model_fields
    if not identity.get("lora.rank"):
        return None
    return parse(Lora, {key: identity.get(f"lora.{key}") for key in keys}, f"{reader.path}: the section [lora]")


def dtype_of(reader: CheckpointReader) -> torch.dtype:
    """Return the dtype of a checkpoint's weights, or of its LoRA adapters if it has no other weights."""
    ends = *LORA_FACTORS, "model.tok_embeddings.weight"
    return next(dtype for name, dtype in reader.dtypes.items() if name.endswith(ends))


def base_of(reader: CheckpointReader) -> str:
    """Return the folder of the base weights of a checkpoint's LoRA adapters. Raises ConfigError if there is no such
    folder, or if its weights have changed since the adapters were trained."""
    place = reader.state["config"].get("checkpoint.initial_load_path", SEEDED)
    if place == SEEDED:
        problem = "its adapters belong to weights that were drawn from debug.seed, which are in no folder"
        raise ConfigError([f"{reader.path}: {problem}; train adapters of the weights in checkpoint.initial_load_path"])
    saved, now = reader.state["identity"].get("lora.base"), hash_of_base(place)
    if saved != now:
        problem = f"{place}: has other weights than those that the adapters in {reader.path} belong to"
        raise ConfigError([f"{problem} (hash {now}, expected {saved}); put those back there"])
    return place


def adapters_of(reader: CheckpointReader, lora: Lora, shapes: Mapping[str, torch.Size]) -> dict[str, list[str]]:
    """Return the names of the LoRA factors A and B in a checkpoint, for each base weight that has them. `shapes` has
    the shape of each base weight by name. Raises ConfigError if the factors of a weight do not fit its shape."""
    adapters = {}
    for name, shape in shapes.items():
        experts = name.replace(".experts.", ".experts.adapters.") if len(shape) > 2 else name
        pair = [f"model.{experts.removesuffix('.weight')}.{factor}" for factor in LORA_FACTORS]
        if pair[0] in reader.shapes:
            saved = [list(reader.shapes.get(each, ())) for each in pair]
            expected = [[*shape[:-2], side, lora.rank] for side in (shape[-1], shape[-2])]
            if saved != expected:
                problem = f"the adapter of {name} has shapes {saved}, expected {expected}; it is of another model"
                raise ConfigError([f"{reader.path}: {problem}"])
            adapters[name] = pair
    return adapters


@torch.no_grad()
def merge(reader: CheckpointReader, model: nn.Module) -> None:
    """Merge a checkpoint's LoRA adapters into this rank's shards of the base weights: W + (lora.alpha / lora.rank) B A.
    The sum is rounded once. The base weights are first cast to lora.base_dtype, as in training."""
    from titanlite.hf.load import local_indices  # imported here: hf/ imports checkpoint/

    lora, dtype, parameters = lora_of(reader), dtype_of(reader), dict(model.named_parameters())
    adapters = adapters_of(reader, lora, {name: parameter.shape for name, parameter in parameters.items()})
    for name, parameter in parameters.items():
        local = local_shard(parameter)
        local.copy_(local.to(dtype if lora.base_dtype == "auto" else getattr(torch, lora.base_dtype)))
        if name in adapters:
            *experts, rows, columns = (local_indices(parameter, dim) for dim in range(parameter.dim()))
            wide = torch.promote_types(dtype, torch.float32)
            a_IR, b_OR = (reader.read(each)[tuple(experts)].to(wide) for each in adapters[name])
            update = b_OR[..., rows, :] @ a_IR[..., columns, :].mT * (lora.alpha / lora.rank)
            local.copy_(local.to(wide) + update.to(local.device))
