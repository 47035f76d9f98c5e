"""Writing a checkpoint's weights as a Hugging Face folder, one parameter in memory at a time: a machine without the
training's memory or devices can export any model. The experts of a layer are one parameter, and tensors of their own in
the folder. The biases that balance experts are in float32, whatever the dtype of the weights.

The safetensors library writes a file from all of its tensors at once, so the format is written here: the header's
length as 8 bytes (little endian), a JSON header with dtype, shape and place of each tensor, and their bytes.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.config.loader import ConfigError, show
from titanlite.config.schema import Model
from titanlite.files.durable import safetensors_header, sync
from titanlite.hf.config_files import config_files
from titanlite.hf.load import HF_DTYPES, INDEX, SINGLE
from titanlite.hf.names import BALANCE_BIAS, hf_names, tensor_shapes, to_hf
from titanlite.launch.progress import progress

LOAD = ".router.load"
"""The end of names of the experts' load, a state of training that no folder has."""
SAFETENSORS_DTYPES = {getattr(torch, name): code for code, name in HF_DTYPES.items()}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def export(
    reader: Any,
    options: Model,
    out: Path,
    *,
    dtype: torch.dtype,
    max_seq_len: int,
    source: Path | None = None,
    tokenizer: Path | None = None,
    bos: int | None = None,
    eos: int | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> int:
    """Write the model as a folder that transformers loads, and return the number of its safetensors files.

    The folder gets its name when it is complete; until then it is `out` with .tmp added.

    Args:
        reader: a titanlite.checkpoint.reader.CheckpointReader: `shapes` by name, and `read(name)`.
        options: the [model] section of the checkpoint.
        dtype: of the written weights.
        max_seq_len: positions that config.json states.
        source: folder of the released model that the run started from; None: there is none.
        tokenizer: tokenizer.json, or the folder with it, to copy; None: no tokenizer files.
        bos: token id of BOS; None: the model has none.
        eos: token id of EOS; None: it is not known.
        max_file_bytes: most bytes of tensors in a file; a larger parameter has a file of its own.

    Raises:
        ConfigError: if `out` exists, or the checkpoint is damaged or not of this model, or a weight exceeds the dtype.
    """
    special_tokens = {"bos": bos, "eos": eos}
    configs = config_files(options, source, torch_dtype=_name(dtype), max_seq_len=max_seq_len, **special_tokens)
    _check_shapes(reader, options, dtype)
    options = _with_biases(options)
    folder = out.with_name(f"{out.name}.tmp")
    for path, what in ((out, "choose another folder"), (folder, "left by an export that was ended; delete it")):
        if path.exists():
            raise ConfigError([f"{path}: exists; {what}"])
    folder.mkdir(parents=True)
    try:
        for name, content in zip(("config.json", "generation_config.json"), configs, strict=True):
            _write_json(folder / name, content)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, folder)
        n_files = _write_weights(reader, options, folder, dtype, max_file_bytes)
        folder.rename(out)
    except BaseException:
        shutil.rmtree(folder)
        raise
    return n_files


def _check_shapes(reader: Any, options: Model, dtype: torch.dtype) -> None:
    """Raise ConfigError if the checkpoint's weights are not those of the model, or the dtype is unsupported."""
    if dtype not in SAFETENSORS_DTYPES:
        raise ConfigError([f"--dtype {_name(dtype)}: expected one of {', '.join(HF_DTYPES.values())}"])
    saved = {name.removeprefix("model."): shape for name, shape in reader.shapes.items() if name.startswith("model.")}
    saved = {name: shape for name, shape in saved.items() if not name.endswith(LOAD)}
    layers = {name.split(".")[1] for name in saved if name.startswith("layers.")}
    if len(layers) != options.n_layers:  # before a model of any size is built
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
    """Return the options of the folder's model: every DeepSeek-V3 has biases that balance experts, if only zeros."""
    if not options.mla.kv_lora_rank or not options.moe.n_experts:
        return options
    return options.model_copy(update={"moe": options.moe.model_copy(update={"balance_bias": True})})


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(shape: torch.Size | None) -> str:
    return "no such tensor" if shape is None else f"shape {list(shape)}"


def copy_tokenizer(tokenizer: Path, folder: Path) -> None:
    """Copy the files of a tokenizer. Raises ConfigError if there is no tokenizer.json."""
    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if not file.is_file():
        raise ConfigError([f"{file}: no such file; expected a tokenizer.json, or the folder that contains it"])
    for name in TOKENIZER_FILES:
        if (file.parent / name).is_file():
            shutil.copyfile(file.parent / name, folder / name)
    shutil.copyfile(file, folder / "tokenizer.json")  # a file may have another name


def _write_weights(
    reader: Any,
    options: Model,
    folder: Path,
    dtype: torch.dtype,
    max_file_bytes: int,
) -> int:
    """Write the safetensors files, and their index if there are several. Return how many they are."""
    shapes = tensor_shapes(options)
    dtypes = {name: torch.float32 if name.endswith(BALANCE_BIAS) else dtype for name in shapes}
    sizes = {name: shape.numel() * dtypes[name].itemsize for name, shape in shapes.items()}
    groups = partition(sizes, max_file_bytes)
    total, weight_map = len(groups), {}
    with progress(f"writing {folder}", total=len(shapes), unit="tensors") as advance:

        def tensor(name: str) -> Tensor:
            advance()
            if f"model.{name}" not in reader.shapes:  # biases that the model does without
                return torch.zeros(shapes[name])
            return _cast(name, to_hf(name, reader.read(f"model.{name}"), options), dtypes[name])

        for number, names in enumerate(groups, 1):
            file = SINGLE if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
            tensors = {name: hf_names(name, options) for name in names}
            write_safetensors(folder / file, {name: shapes[name] for name in names}, tensors, dtypes, tensor)
            weight_map |= {each: file for name in names for each in tensors[name]}
    if total > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(folder / INDEX, index)
    return total


def partition(sizes: dict[str, int], most: int) -> list[list[str]]:
    """Return the names in groups, in their order, of which none exceeds `most` bytes unless it is a single tensor."""
    groups: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not groups or filled + size > most:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in another dtype. Raises ConfigError if a finite number is too large for it."""
    if tensor.dtype == dtype:
        return tensor
    result = tensor.to(dtype)
    if result.isfinite().sum() != tensor.isfinite().sum():
        largest = show(tensor[tensor.isfinite()].abs().max().item())
        raise ConfigError(
            [f"--dtype {_name(dtype)}: {name} has {largest}, beyond its range; choose bfloat16 or float32"]
        )
    return result


def write_safetensors(
    file: Path,
    shapes: dict[str, torch.Size],
    tensors: dict[str, list[str]],
    dtypes: dict[str, torch.dtype],
    tensor: Callable[[str], Tensor],
) -> None:
    """Write a safetensors file of parameters, calling `tensor` for one at a time. `tensors` has the names of the
    tensors that each is in the file: itself or, of experts, which are stacked, one for each."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        size = shape.numel() // len(tensors[name]) * dtypes[name].itemsize
        for each in tensors[name]:
            begin, end = end, end + size
            entry = {"dtype": SAFETENSORS_DTYPES[dtypes[name]], "shape": list(shape[-2:]), "data_offsets": [begin, end]}
            header[each] = entry
    with open(file, "xb") as stream:
        stream.write(safetensors_header(header))
        for name in shapes:
            stream.write(tensor(name).contiguous().flatten().view(torch.uint8).numpy())
        sync(stream)


def _write_json(file: Path, content: Any) -> None:
    with open(file, "xb") as stream:
        stream.write(json.dumps(content, indent=2).encode() + b"\n")
        sync(stream)
