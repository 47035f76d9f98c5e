"""Export of a checkpoint's weights as a Hugging Face folder, with one parameter in memory at a time, so that any
machine can export any model. A layer's experts are a stacked parameter in titanlite, and separate tensors in the
folder. Biases that balance experts are exported in float32."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.checkpoint.files import bytes_of
from titanlite.checkpoint.manifest import DTYPE_NAMES
from titanlite.config.loader import ConfigError, show
from titanlite.config.schema import Model
from titanlite.files import safetensors
from titanlite.files.durable import write_synced
from titanlite.files.new_folder import new_folder
from titanlite.hf.config_files import config_files
from titanlite.hf.load import EXPERT_DIMS, HF_DTYPES, INDEX, SINGLE
from titanlite.hf.names import BALANCE_BIAS, hf_shape, hf_tensors, is_stacked, tensor_shapes, to_hf
from titanlite.launch.progress import progress

LOAD = ".router.load"
"""End of the names of the buffers for the experts' load, which are for training only and not exported."""


def export(
    reader: Any,
    options: Model,
    out: Path,
    *,
    dtype: torch.dtype,
    max_seq_len: int,
    source: Path | None = None,
    files: Mapping[str, bytes] | None = None,
    bos: int | None = None,
    eos: int | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> int:
    """Write a model as a folder that transformers loads, and return the number of safetensors files. Until the folder
    is complete, its name is `out` with .tmp added. Raises ConfigError if `out` exists, the checkpoint is damaged or of
    another model, or a weight is too large for the dtype.

    Args:
        reader: a checkpoint.reader.CheckpointReader, or an object with the same `shapes` and `read(name)`.
        max_seq_len: the number of positions that config.json states.
        source: folder of the released model that the run started from, if any.
        files: further files of the folder by name, such as a tokenizer's.
        bos, eos: token ids of BOS and EOS, if known.
        max_file_bytes: maximum size of a file's tensors in bytes, unless a single parameter is larger.
    """
    special_tokens = {"bos": bos, "eos": eos}
    configs = config_files(options, source, torch_dtype=_name(dtype), max_seq_len=max_seq_len, **special_tokens)
    _check_shapes(reader, options, dtype)
    options = _with_biases(options)
    with new_folder(out) as folder:
        for name, content in zip(("config.json", "generation_config.json"), configs, strict=True):
            write_json(folder / name, content)
        for name, data in (files or {}).items():
            write_synced(folder / name, data)
        return _write_weights(reader, options, folder, dtype, max_file_bytes)


def _check_shapes(reader: Any, options: Model, dtype: torch.dtype) -> None:
    """Raise ConfigError if the checkpoint's weights do not fit the model, or the dtype is unsupported."""
    if _name(dtype) not in HF_DTYPES.values():
        raise ConfigError([f"--dtype {_name(dtype)}: expected one of {', '.join(HF_DTYPES.values())}"])
    saved = {name.removeprefix("model."): shape for name, shape in reader.shapes.items() if name.startswith("model.")}
    saved = {name: shape for name, shape in saved.items() if not name.endswith(LOAD)}
    layers = {name.split(".")[1] for name in saved if name.startswith("layers.")}
    if len(layers) != options.n_layers:  # check first: tensor_shapes would build n_layers layers, even millions
        problem = f"the checkpoint has {len(layers)} layers, and its [model] options say {options.n_layers}"
        raise ConfigError([f"{problem}; it is damaged"])
    shapes = tensor_shapes(options)
    problems = [
        f"{name}: the checkpoint has {_shape(saved.get(name))}, and its [model] options say {_shape(shapes.get(name))}"
        for name in sorted(saved.keys() | shapes.keys())
        if saved.get(name) != shapes.get(name)
    ]
    if problems:
        raise ConfigError([f"{problems[0]}; {len(problems)} tensors differ, so the checkpoint is damaged"])


def _with_biases(options: Model) -> Model:
    """Return the exported model's options, in which a DeepSeek-V3 always has biases that balance experts."""
    if not options.mla.kv_lora_rank or not options.moe.n_experts or options.moe.score_function == "softmax":
        return options
    return options.model_copy(update={"moe": options.moe.model_copy(update={"balance_bias": True})})


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(shape: torch.Size | None) -> str:
    return "no such tensor" if shape is None else f"shape {list(shape)}"


def _write_weights(reader: Any, options: Model, folder: Path, dtype: torch.dtype, max_file_bytes: int) -> int:
    """Write the safetensors files, and an index if there are several. Return the number of files."""
    shapes = tensor_shapes(options)
    ours = hf_tensors(options, shapes)
    dtypes = {each: torch.float32 if names[0].endswith(BALANCE_BIAS) else dtype for each, names in ours.items()}
    sizes = {each: sum(shapes[n].numel() for n in names) * dtypes[each].itemsize for each, names in ours.items()}
    groups = partition(sizes, max_file_bytes)
    total, weight_map = len(groups), {}
    with progress(f"writing {folder}", total=len(ours), unit="tensors") as advance:

        def contents(group: list[tuple[str, ...]]) -> Iterator[memoryview]:
            for each in group:
                advance()
                yield from map(bytes_of, tensors_of(each))  # each tensor is freed before the next one is read

        def tensors_of(each: tuple[str, ...]) -> Sequence[Tensor]:
            """Return the exported tensors of a parameter: one, or one per expert if it stacks experts."""
            names = ours[each]
            if f"model.{names[0]}" in reader.shapes:
                tensor = to_hf(names, [reader.read(f"model.{name}") for name in names], options)
                tensor = _cast(names[0], tensor, dtypes[each])
            else:
                tensor = torch.zeros(shapes[names[0]])  # balance biases that the run did not train are 0
            return tensor.unbind() if tensor.dim() == EXPERT_DIMS and not is_stacked(names[0], options) else [tensor]

        for number, group in enumerate(groups, 1):
            file = SINGLE if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
            of_group = [(each, DTYPE_NAMES[dtypes[each]], hf_shape(ours[each], shapes, options)) for each in group]
            tensors = {name: (kind, shape) for each, kind, shape in of_group for name in each}
            safetensors.write(folder / file, tensors, contents(group), metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file)
    if total > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / INDEX, index)
    return total


def partition(sizes: dict[Any, int], most: int) -> list[list[Any]]:
    """Partition tensor names, in order, into groups of at most `most` bytes; a larger tensor is a group by itself."""
    groups: list[list[Any]] = []
    filled = 0
    for name, size in sizes.items():
        if not groups or filled + size > most:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in another dtype. Raises ConfigError if a finite number becomes infinite."""
    if tensor.dtype == dtype:
        return tensor
    result = tensor.to(dtype)
    if result.isfinite().sum() != tensor.isfinite().sum():
        problem = f"{name} has {show(tensor[tensor.isfinite()].abs().max().item())}, beyond its range"
        raise ConfigError([f"--dtype {_name(dtype)}: {problem}; choose bfloat16 or float32"])
    return result


def write_json(file: Path, content: Any) -> None:
    write_synced(file, json.dumps(content, indent=2).encode() + b"\n")
