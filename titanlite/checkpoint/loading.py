"""Load a checkpoint into a run that resumes, under any layout, or load only the weights of a checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.checkpoint.changed_options import OF_DATA, listed
from titanlite.checkpoint.initial_weights import is_hugging_face
from titanlite.checkpoint.ranks import collected_problems, with_all_ranks
from titanlite.checkpoint.reader import CheckpointReader
from titanlite.checkpoint.tensors import (
    dequantized,
    is_on_first_rank,
    load_quantized,
    model_tensors,
    optimizer_tensors,
    random_states,
)
from titanlite.config.loader import ConfigError, show
from titanlite.config.schema import Model
from titanlite.launch.progress import progress


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, checkpointer: Any
) -> tuple[dict[str, Any], list[str]]:
    """Load a checkpoint into the model and optimizer of a Checkpointer's run. Return the checkpoint's state, and a line
    for each problem on any rank. Raises ConfigError if the identities of checkpoint and run differ."""
    with collected_problems(checkpointer.group) as problems:
        reader = CheckpointReader(path)
    if problems:
        return {}, problems
    state, options = reader.state, {"mixture": ", set training.change_mixture_on_resume = true"}
    if changed := listed(state["config"], checkpointer.config, OF_DATA):
        why = "; without data of its own, validation takes validation.fraction of the documents from the training"
        options["data"] = f" (changed: {changed}{why * ('validation.' in changed)})"
    saved = _with_optimizer(state["identity"], state["config"])
    own = _with_optimizer(checkpointer.identity, checkpointer.config if state["config"] else {})
    options["lora.base"] = " weights in checkpoint.initial_load_path, whose hash it is"
    both_lora = "lora.rank" in saved and "lora.rank" in own  # if false, the only listed option of [lora] is lora.rank
    differences = [
        f"{path}: saved with {f'{key} = ' * (key in saved)}{_value(key, saved)}, and this run has {_value(key, own)}; "
        f"resume with the same{options.get(key, '')}, or start in another job.dump_folder "
        "(checkpoint.initial_load_path loads only the weights)"
        for key in {**saved, **own}
        if saved.get(key) != own.get(key) and key not in checkpointer.may_differ
        if both_lora or key == "lora.rank" or not key.startswith("lora.")
    ]
    if differences:
        raise ConfigError(differences)
    return state, _load(reader, model, optimizer, checkpointer)


def _load(reader: CheckpointReader, model: nn.Module, optimizer: torch.optim.Optimizer, checkpointer: Any) -> list[str]:
    """Load a checkpoint's tensors, and return a line for each problem on any rank."""
    n_saved = sum(name.startswith("random.cpu.") for name in reader.shapes)
    generators = random_states() if n_saved == dist.get_world_size() else {}  # {}: load no random states
    states = optimizer_tensors(model, optimizer)
    portable = {name: dequantized(state) for name, state in states.items()}
    tensors = model_tensors(model) | portable
    limits = {"group": checkpointer.group, "timeout": checkpointer.comm.init_timeout_seconds}
    problems = load_tensors(reader, tensors, generators, ("model.", "optimizer."), **limits)
    if not problems:
        for name, state in states.items():
            if state is not portable[name]:
                load_quantized(state, portable[name], optimizer.store, is_square=name.endswith(".exp_avg_sq"))
        with collected_problems(checkpointer.group, RuntimeError) as problems:
            for name, value in generators.items():
                (torch.cuda if name.startswith("random.cuda.") else torch).set_rng_state(value)
    return problems


def load_weights(path: Path, model: nn.Module, options: Model) -> None:
    """Load the weights of a checkpoint or of a Hugging Face folder into a model, sharded or not. Every rank must call
    it. `options`: the section [model] of the full model. A checkpoint of LoRA adapters is merged with its base weights;
    the adapters of `model` itself stay unchanged. Raises ConfigError if weights are missing, damaged or do not fit."""
    base = ""
    with collected_problems() as problems:
        if is_hf := is_hugging_face(path):
            from titanlite.hf.load import load_hf_weights

            load_hf_weights(path, model, options)
        else:
            reader = CheckpointReader(path)
            if reader.state["identity"].get("lora.rank"):
                from titanlite.checkpoint.adapters import base_of, merge  # imported here: few checkpoints have adapters

                base = base_of(reader)
    if not problems and base:
        load_weights(Path(base), model, options)
        with collected_problems() as problems:
            merge(reader, model)
    elif not problems and not is_hf:
        problems = load_tensors(reader, model_tensors(model, of_base=True), {}, ("model.",))
    if problems:
        raise ConfigError(problems)


def load_tensors(
    reader: CheckpointReader,
    tensors: Mapping[str, Tensor],
    generators: Mapping[str, Tensor],
    prefixes: tuple[str, ...],
    group: dist.ProcessGroup | None = None,
    timeout: float = 0,
) -> list[str]:
    """Load this rank's shards of `tensors` and its random states, `generators`. Together, the ranks must load every
    tensor of the checkpoint whose name has one of the `prefixes`. Return a line for each problem on any rank. If
    `group` is given, reading has no time limit, but a rank must read at least one byte every `timeout` seconds."""
    saved = {name for name in reader.shapes if name.startswith(prefixes)}
    own = torch.tensor(sum(is_on_first_rank(name, tensors) for name in tensors))
    if dist.is_initialized():
        dist.all_reduce(own, group=group)  # the model's number of tensors: each pipeline stage has some of them
    with collected_problems(group) as problems:
        reader.check(tensors)
        if own < len(saved):
            problem = f"{len(saved)} tensors, and the model has {own}; it is of another model"
            raise ConfigError([f"{reader.path}: {problem}"])
    if not problems:
        size = sum(entry.bytes for entry in reader.manifest.files.values())
        description = f"loading checkpoint {reader.path.name} ({size / 2**30:.1f} GiB)"
        is_rank0 = not dist.is_initialized() or dist.get_rank() == 0
        with progress(description, enabled=is_rank0), collected_problems(group) as problems:
            wanted = {**tensors, **generators}
            if group is None:
                reader.load(wanted)
            else:
                options = {"description": f"reading {reader.path}", "group": group, "timeout": timeout}
                with_all_ranks(lambda: reader.load(wanted), lambda: reader.bytes_read, **options)
    return problems


def _value(key: str, identity: Mapping[str, Any]) -> str:
    return show(identity[key]) if key in identity else f"no {key}"


def _with_optimizer(identity: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Add to a run's identity which optimizer states its checkpoints contain, if `config` names the optimizer."""
    name, ema = config.get("optimizer.name"), "above 0" if config.get("ema.decay") else "0"
    states = {"optimizer.name": "Muon" if name == "Muon" else "Adam or AdamW", "ema.decay": ema}
    return identity | (states if name else {})
