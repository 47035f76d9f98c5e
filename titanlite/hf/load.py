"""Loading the weights of a Hugging Face folder into a model of any layout: each rank reads only the experts, rows and
columns of its own shards, one tensor after the other.

    folder/model.safetensors                                         all weights, or
    folder/model.safetensors.index.json                              the file of each tensor, and
    folder/model-00001-of-00004.safetensors ...                      the files

A layer's E experts are one parameter [E, F, D] of the model, and E tensors [F, D] in these files. The buffers that
balance experts are loaded like parameters. No file can contain code: pickles of older models (*.bin) are rejected."""

import contextlib
import itertools
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from titanlite.config.hf.config_json import WEIGHTS
from titanlite.config.hf.values import read_json_object
from titanlite.config.loader import ConfigError, show
from titanlite.config.schema import Model
from titanlite.hf.names import (
    OUTPUT_HEAD,
    hf_name,
    hf_names,
    hf_rows,
    hf_shape,
    hf_tensors,
    is_stacked,
    is_transposed,
    named_weights,
    tensor_shapes,
)
from titanlite.hf.stacked_experts import BLOCKS, SCALES, cover, quantized_shapes, read
from titanlite.launch.progress import progress

SINGLE, INDEX = WEIGHTS
HF_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Names of the supported dtypes in safetensors, and in torch."""
EMBEDDING = "tok_embeddings.weight"
ROWS_AT_A_TIME = 2**14
"""Number of rows of a tensor that are read together to compute the mean of all rows."""
EXPERT_DIMS = 3  # dimensions of a parameter of experts: experts, rows, columns
PREFIXES = ("model.", "transformer.")
"""Prefixes of tensors' names. Folders of models without an output head lack the prefix, as in GPT-2's release."""
NOT_A_WEIGHT = re.compile(
    r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|(transformer\.)?h\.\d+\.attn\.(masked_)?bias"
)
"""Names of rotary frequencies and masks: older versions of transformers saved them, but the config determines them."""
STACKED = "experts.gate_up_proj"
"""End of the name of a tensor of all experts, which transformers writes only with save_original_format = False."""
QUANTIZED = re.compile(r"(scales?|scale_inv|zero_point|qzeros|qweight|g_idx|absmax|quant_map|quant_state[\w.]*)$")
"""End of the names of tensors that quantized models have in addition to weights or instead of weights."""


def load_hf_weights(folder: Path, model: nn.Module, options: Model) -> None:
    """Load a Hugging Face folder's weights into this rank's modules, as plain tensors or DTensors of any placement.
    Weights are cast to their parameters' dtypes. `options` is the section [model] of the full model, of which `model`
    may be a pipeline stage. The caller must tell all ranks if one rank raised. Raises ConfigError for another model's
    folder or an unreadable file, before any weight changes, and later for a weight that is NaN or infinite."""
    parameters, files = named_weights(model), tensor_files(folder)
    of_folder = _shapes_in(files, options)
    is_rank0 = not dist.is_initialized() or dist.get_rank() == 0
    if options.mla.kv_lora_rank:
        files = _without_predictors(folder, files, prints=is_rank0)
    if problems := _name_problems(folder, set(files), set(of_folder), tied=options.tie_embeddings):
        raise ConfigError(problems)
    tensors = {name: _tensors(parameter, name, files, options) for name, parameter in parameters.items()}
    shapes = {each: of_folder[each] for names in tensors.values() for each in names}
    has_both = options.tie_embeddings and OUTPUT_HEAD in files and EMBEDDING in parameters
    if has_both:
        shapes[OUTPUT_HEAD] = parameters[EMBEDDING].shape
    grows = {OUTPUT_HEAD, name_in(files, hf_name(EMBEDDING, options))} if options.new_tokens == "mean" else set()
    for file in sorted({files[name] for name in shapes}):
        problems += _file_problems(file, {name: shape for name, shape in shapes.items() if files[name] == file}, grows)
    if problems:
        raise ConfigError(problems)
    if has_both:
        _check_tied(files, parameters[EMBEDDING], options)
    with progress(f"loading {folder}", total=len(parameters), unit="tensors", enabled=is_rank0) as advance:
        for name, parameter in parameters.items():
            _fill(parameter, name, {tensor: files[tensor] for tensor in tensors[name]}, options)
            advance()
    if is_rank0:
        _print_new_rows(folder, {name: files[name] for name in grows & shapes.keys()}, options.vocab_size)


def _shapes_in(files: Mapping[str, Path], options: Model) -> dict[str, torch.Size]:
    """Return the shape of each tensor of the model, by the tensor's name in the folder. `files`: each tensor's file."""
    all_shapes, shapes = tensor_shapes(options), {}
    for names, ours in hf_tensors(options, all_shapes).items():
        shape = hf_shape(ours, all_shapes, options)
        for name in (name_in(files, each) for each in names):
            quantized = quantized_shapes(shape) if name + BLOCKS in files else {"": shape}
            shapes |= {name + kind: own for kind, own in quantized.items()}
    return shapes


def _print_new_rows(folder: Path, grows: Mapping[str, Path], n_rows: int) -> None:
    """Print how many of the model's `n_rows` rows are missing in the file of each tensor in `grows`."""
    for name, file in grows.items():
        with open_safetensors(file) as of_file:
            n = n_rows - of_file.get_slice(name).get_shape()[0]
        if n:
            print(f"{folder}: {n} new rows of {name}, the mean of the others (model.new_tokens)", flush=True)


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor in a Hugging Face folder. Raises ConfigError if no safetensors file is valid."""
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file() and index.is_file():
        raise ConfigError([f"{folder}: has both {SINGLE} and {INDEX}; remove the one that is not of this model"])
    if single.is_file():
        with open_safetensors(single) as tensors:
            return dict.fromkeys(tensors.keys(), single)
    if not index.is_file():
        problem = f"{folder}: expected the folder of a Hugging Face model, with {SINGLE} or {INDEX}"
        if any(folder.glob("*.bin")):
            problem += "; *.bin files are pickles, which are never loaded: convert them to safetensors"
        raise ConfigError([problem])
    files = read_json_object(index).get("weight_map")
    if not isinstance(files, dict):
        raise ConfigError([f'{index}: expected an object with "weight_map", from names of tensors to names of files'])
    for name, file in files.items():
        if not isinstance(file, str) or not re.fullmatch(r"\w[\w.-]*\.safetensors", file):
            problem = f"{index}: weight_map has {show(file)} for {show(name)}: expected the name of a .safetensors file"
            raise ConfigError([f"{problem} in the same folder"])
    return {name: folder / file for name, file in files.items()}


def name_in(files: Mapping[str, Path], name: str) -> str:
    """Return the name in `files` of the tensor `name`, whose prefix may be missing there."""
    bare = name.partition(".")[2] if name.startswith(PREFIXES) else name
    return bare if bare in files or bare + BLOCKS in files else name


def _without_predictors(folder: Path, files: dict[str, Path], *, prints: bool) -> dict[str, Path]:
    """Return the files of a DeepSeek-V3's tensors, without the layers for multi-token prediction. Raises ConfigError if
    rotated rows of queries and keys are not neighbours."""
    config = read_json_object(folder / "config.json")
    if config.get("rope_interleave") is False:
        problem = "rope_interleave = false: expected true, neighbouring rows of queries and keys rotated together"
        raise ConfigError([f"{folder / 'config.json'}: {problem}"])
    n_layers, n_further = (config.get(key) for key in ("num_hidden_layers", "num_nextn_predict_layers"))
    if type(n_layers) is not int or type(n_further) is not int:
        return files
    layers = {name: re.match(r"(?:model\.)?layers\.(\d{1,9})\.", name) for name in files}
    further = {name for name, found in layers.items() if found and 0 <= int(found[1]) - n_layers < n_further}
    if further and prints:
        what = f"skipped {len(further)} tensors of layers for multi-token prediction, from layer {n_layers} on"
        print(f"{folder}: {what}", file=sys.stderr, flush=True)
    return {name: file for name, file in files.items() if name not in further}


def _name_problems(folder: Path, found: set[str], expected: set[str], *, tied: bool) -> list[str]:
    """Return a line for tensors that the folder lacks, and a line for tensors that only the folder has."""
    problems = []
    stacked = sorted(name for name in found - expected if name.endswith(STACKED) and name + BLOCKS not in expected)
    if stacked:
        what = "expected a tensor for each expert; save it again with save_original_format = True"
        return [f"{folder}: has {first_of(stacked)}: {what}"]
    missing = sorted(expected - found)
    other = sorted(name for name in found - expected if not NOT_A_WEIGHT.fullmatch(name))
    if tied and OUTPUT_HEAD in other:
        other.remove(OUTPUT_HEAD)  # _check_tied compares the head with the embedding
    hint = "set [model] to the options of this folder's model"
    if missing:
        unless = " unless model.tie_embeddings = true" if missing == [OUTPUT_HEAD] else ""
        problems.append(f"{folder}: lacks {first_of(missing)}, which the model needs{unless}; {hint}")
    quantized = [name for name in other if QUANTIZED.search(name)]
    if quantized:
        what = "quantized weights are not read; take or make ones in bfloat16 or float32 (docs/hugging_face.md)"
        problems.append(f"{folder}: has {first_of(quantized)}: {what}")
    elif other:
        problems.append(f"{folder}: has {first_of(other)}, which the model lacks; {hint}")
    return problems


def first_of(names: list[str]) -> str:
    return show(names[0]) + (f" and {len(names) - 1} other tensors" if len(names) > 1 else "")


def _file_problems(file: Path, shapes: dict[str, torch.Size], grows: set[str]) -> list[str]:
    """Return an error for each tensor that a file lacks, or that has a wrong dtype or (unless in `grows`) shape."""
    problems = []
    try:
        with open_safetensors(file) as tensors:
            inside = set(tensors.keys())
            for name, shape in shapes.items():
                if name not in inside:
                    problems.append(
                        f"{file}: lacks {show(name)}, which {INDEX} says it has; download or export the folder again"
                    )
                    continue
                header = tensors.get_slice(name)
                found, needed = header.get_shape(), list(shape)
                if found != needed and not (name in grows and found[1:] == needed[1:] and 0 < found[0] < needed[0]):
                    problem = f"{file}: {name} has shape {found}, and the model needs {needed}"
                    problems.append(f"{problem}; set [model] to the options of this folder's model")
                dtypes = ("U8",) if name.endswith((BLOCKS, SCALES)) else HF_DTYPES
                if header.get_dtype() not in dtypes:
                    problem = f"{file}: {name} has dtype {header.get_dtype()}: expected one of {', '.join(dtypes)}"
                    problems.append(f"{problem}; use the model's release in one of them")
    except ConfigError as error:
        return error.problems
    return problems


@contextlib.contextmanager
def open_safetensors(file: Path, again: str = "download or export") -> Iterator[Any]:
    """Open a safetensors file. Raises ConfigError for a damaged file, with advice such as "download it again"."""
    if not file.is_file():  # a pipe is rejected, too: reading it would wait
        raise ConfigError([f"{file}: no such file; {again} the folder again"])
    try:
        tensors = safe_open(file, framework="pt")
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise ConfigError([f"{file}: cannot be read as safetensors ({error}); {again} it again"]) from None
    with tensors:
        yield tensors


def _tensors(parameter: Tensor, name: str, files: Mapping[str, Path], options: Model) -> list[str]:
    """Return the names of a parameter's tensors that this rank needs: one, or one per expert in its shard."""
    names = [name_in(files, each) for each in hf_names(name, options)]
    if is_stacked(name, options):
        return [names[0] + kind for kind in (BLOCKS, SCALES)] if names[0] + BLOCKS in files else names
    if parameter.dim() < EXPERT_DIMS or len(names) < len(parameter):
        return names
    return [names[expert] for expert in local_indices(parameter, 0)]


def _check_tied(files: dict[str, Path], embedding: nn.Parameter, options: Model) -> None:
    """Raise ConfigError if embeddings are tied, but the folder's head and embedding differ in this rank's rows."""
    name = name_in(files, hf_name(EMBEDDING, options))
    with open_safetensors(files[name]) as one, open_safetensors(files[OUTPUT_HEAD]) as other:
        tensors, ranges = (one.get_slice(name), other.get_slice(OUTPUT_HEAD)), _ranges(embedding, EMBEDDING, options)
        if not torch.equal(*(_read(tensor, ranges).to(embedding.dtype) for tensor in tensors)):
            problem = f"{files[OUTPUT_HEAD]}: {OUTPUT_HEAD} differs from {name}, and model.tie_embeddings = true"
            raise ConfigError([f"{problem}; set model.tie_embeddings = false"])


@torch.no_grad()
def _fill(parameter: Tensor, name: str, files: dict[str, Path], options: Model) -> None:
    """Copy this rank's shard of tensors into a parameter. The files are opened again for each parameter, since an open
    file keeps all read data in memory."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if local.numel() and is_stacked(name, options):
        with contextlib.ExitStack() as stack:
            slices = [stack.enter_context(open_safetensors(file)).get_slice(each) for each, file in files.items()]
            experts, *rest = (local_indices(parameter, dim) for dim in range(parameter.dim()))
            of_experts = read(name, slices, experts, *(rest if len(rest) == 2 else [*rest, None]))
            for shard, numbers in zip(local, of_experts, strict=True):
                shard.copy_(_finite(numbers, *next(iter(files.items()))))
    elif local.numel():
        ranges = _ranges(parameter, name, options)
        targets = zip(files, local if parameter.dim() == EXPERT_DIMS else [local], strict=True)
        for file, group in itertools.groupby(targets, lambda target: files[target[0]]):
            with open_safetensors(file) as tensors:
                for tensor, shard in group:
                    numbers = _finite(_read(tensors.get_slice(tensor), ranges), tensor, file)
                    shard.copy_(numbers.T if is_transposed(name, options) else numbers)


def _finite(numbers: Tensor, tensor: str, file: Path) -> Tensor:
    """Return the numbers of a tensor in a file. Raises ConfigError if a number is NaN or infinite."""
    if not torch.stack(numbers.aminmax()).isfinite().all():  # aminmax copies nothing and passes NaN on
        problem = f"{file}: {tensor} has a number that is NaN or infinite; expected finite ones"
        raise ConfigError([f"{problem}; download or export the file again, or take another model"])
    return numbers


def _ranges(parameter: Tensor, name: str, options: Model) -> list[tuple[slice, Tensor]]:
    """Return a pair for the rows of this rank's shard: a slice of the file's tensor that covers them, and their indices
    in the slice, in the parameter's order. Columns have another pair, which comes first for a transposed matrix."""
    dims = range(parameter.dim())[-2:]
    rows = hf_rows(name, local_indices(parameter, dims[0]), options)
    ranges = [cover(rows), *(cover(local_indices(parameter, dim)) for dim in dims[1:])]
    return ranges[::-1] if is_transposed(name, options) else ranges


def _read(tensor: Any, ranges: list[tuple[slice, Tensor]]) -> Tensor:
    """Return a shard of a tensor in a safetensors file; a row that the file lacks is the mean of the file's rows."""
    result, rows = tensor[tuple(covered for covered, _ in ranges)], ranges[0][0]
    if rows.stop > (n := tensor.get_shape()[0]):
        parts = (slice(begin, begin + ROWS_AT_A_TIME) for begin in range(0, n, ROWS_AT_A_TIME))
        mean = sum(tensor[(part, *(covered for covered, _ in ranges[1:]))].double().sum(0) for part in parts) / n
        new = mean.to(result.dtype).expand(rows.stop - max(rows.start, n), -1)
        result = torch.cat([result, new])
    for dim, (_, places) in enumerate(ranges):
        is_in_order = torch.equal(places, torch.arange(result.shape[dim]))
        result = result if is_in_order else result.index_select(dim, places)
    return result


def local_indices(parameter: Tensor, dim: int) -> Tensor:
    """Return the indices along a dimension of the full tensor that this rank's shard has, in order. DTensor shards the
    indices, so that every placement is supported, including torch's private placements."""
    shape = [1] * parameter.dim()
    shape[dim] = parameter.shape[dim]
    indices = torch.arange(shape[dim]).view(shape)
    if isinstance(parameter, DTensor):
        # The placements Replicate and Partial have no `dim`.
        placements = [each if getattr(each, "dim", None) == dim else Replicate() for each in parameter.placements]
        # With src_data_rank=None nothing is communicated: every rank already has all indices.
        indices = distribute_tensor(indices, parameter.device_mesh, placements, src_data_rank=None).to_local().cpu()
    return indices.flatten()
