"""Read the folder of `titanlite parity --against FOLDER`: what another program did in one optimizer step.

docs/verify_your_trainer.md lists the folder's files, and RecordedOptions describes step.json. Tensors have the names
and row order of transformers (model.layers.0.self_attn.q_proj.weight), or those of Llama and titanlite
(layers.0.attention.wq.weight; neighbouring rows of wq and wk are rotated together). The tensors' data type is the type
of the program's weights, or a wider one. The step is the optimizer's first: all optimizer states were zero. Files of
other programs are not trusted: no pickle is read, and any mistake in them raises a ConfigError with one line."""

import dataclasses
import functools
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from titanlite.config import ConfigError
from titanlite.config.hf.values import read_json_object
from titanlite.config.loader import show
from titanlite.config.schema import Model
from titanlite.config.types import Count, Fraction, NotNegative, Positive, Ranks
from titanlite.files.durable import Record, parse
from titanlite.hf.config_files import model_of
from titanlite.hf.load import EMBEDDING, NOT_A_WEIGHT, PREFIXES, STACKED, first_of, open_safetensors, tensor_files
from titanlite.hf.names import BALANCE_BIAS, OUTPUT_HEAD, from_hf, hf_shape, hf_tensors, tensor_shapes
from titanlite.hf.stacked_experts import TENSORS
from titanlite.loss import IGNORED

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Data types of weights and gradients, by their names in safetensors."""
EXPERTS = ".feed_forward.experts."  # part of the name of every expert's weight
Dtype = Literal["float64", "float32", "bfloat16", "float16"]


class Dtypes(Record):
    """Data types of the step, by their names in torch; they decide how large a difference rounding explains."""

    weights: Dtype  # the type of the weights that the optimizer updates
    compute: Dtype  # the type of forward and backward
    reduce: Dtype  # the type in which gradients are summed over ranks and accumulation steps


class AdamOptions(Record):
    """Options of the optimizer, as in torch.optim."""

    name: Literal["AdamW", "Adam"]
    lr: Positive  # learning rate of this step
    beta1: Fraction
    beta2: Fraction
    eps: Positive
    weight_decay: NotNegative
    weight_decay_dims: list[Literal[1, 2]]  # numbers of dimensions of the weights that decay; 1: norms, biases


class Degrees(Record):
    """Numbers by which a program may multiply or divide its gradients, used only to explain a ratio."""

    dp: Ranks = 1  # data-parallel ranks, sharded and replicated
    ep: Ranks = 1
    tp: Ranks = 1
    cp: Ranks = 1
    pp: Ranks = 1
    microbatches: Count = 1  # microbatches of a pipeline in an accumulation step
    accumulation_steps: Count = 1
    loss_scale: Annotated[float, Field(ge=2**-64, le=2**64)] = 1.0


class BalanceLoss(Record):
    """The loss that balances experts (arXiv:2101.03961): `weight` x number of experts x the sum over experts of (the
    expert's share of tokens) x (its mean score). A token's scores sum to 1. step.json's `loss` excludes this loss."""

    weight: Positive
    layers: Literal["apart", "together"]
    """"together": shares and scores are means over all layers, as in transformers; "apart": each layer has a loss."""
    parts: Count = 1  # number of contiguous parts of the batch; the balance loss is the mean of one loss per part


class RecordedOptions(Record):
    """The content of step.json. A result that is null or missing is not compared."""

    program: Annotated[str, Field(max_length=1000)] = ""  # the program that took the step, as the report names it
    dtypes: Dtypes
    optimizer: AdamOptions | None = None  # None: no optimizer is compared
    max_norm: Positive | None = None  # the 2-norm to which all gradients are clipped; None: no clipping
    degrees: Degrees = Degrees()
    loss: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Nats per token: the sum of token losses over the number of valid tokens of the global batch."""
    gradient_norm: NotNegative | None = None  # 2-norm over all gradients before clipping
    balance_loss: BalanceLoss | None = None  # None: gradients include no balance loss
    z_loss_weight: Positive | None = None  # factor of the mean of logsumexp(logits)^2 (arXiv:2204.02311) in gradients


@dataclasses.dataclass(frozen=True)
class RecordedStep:
    """The content of a step's folder. Weights and gradients are float64, with titanlite's names and row order."""

    step: RecordedOptions
    model: Model
    weights: dict[str, Tensor]
    tokens_BT: Tensor
    targets_BT: Tensor
    positions_BT: Tensor | None
    experts: dict[str, Tensor] | None  # experts that the program chose, by layer: [B, T, experts per token]
    gradients: dict[str, Tensor] | None
    weights_after: dict[str, Tensor] | None
    previous: "RecordedStep | None" = None  # the first step, if this is the second one

    @property
    def n_valid(self) -> int:
        return int((self.targets_BT != IGNORED).sum())


def read_steps(folder: Path) -> list[RecordedStep]:
    """Read and check the first step and, if there is a folder "second", the second step. Raises ConfigError as
    `read_step` does, or if "second" does not contain the next step of the same optimizer."""
    first, place, problem = read_step(folder), folder / "second", ""
    if not (place.exists() or place.is_symlink()):
        return [first]
    second = read_step(place)
    same = [each.step.optimizer and each.step.optimizer.model_copy(update={"lr": 1.0}) for each in (first, second)]
    if first.gradients is None or first.weights_after is None or same[0] != same[1] or first.model != second.model:
        problem = "expected the first step's model, gradients, weights_after and options of the optimizer, except lr"
    elif other := [name for name, each in first.weights_after.items() if not torch.equal(each, second.weights[name])]:
        problem = f"{other[0]} of model.safetensors: expected that of weights_after.safetensors of the first step"
    if problem:
        raise ConfigError([f"{place}: {problem}"])
    return [first, dataclasses.replace(second, previous=first)]


def read_step(folder: Path) -> RecordedStep:
    """Read and check a step's folder. Raises ConfigError if a file is missing or wrong, or changes while it is read."""
    before = _files(folder)
    step = parse(RecordedOptions, read_json_object(folder / "step.json"), str(folder / "step.json"))
    model = model_of(folder)
    most = model.most_positions or read_json_object(folder / "config.json").get("max_position_embeddings")
    batch = _read_batch(folder / "batch.safetensors", model, most)
    gradients, after, chosen = (folder / f"{name}.safetensors" for name in ("gradients", "weights_after", "experts"))
    experts = _read_experts(chosen, model, batch[0].shape) if chosen in before else None
    if step.balance_loss and (experts is None or len(batch[0]) % step.balance_loss.parts):
        problem = "balance_loss needs experts.safetensors, and parts that divide the sequences of the batch"
        raise ConfigError([f"{folder / 'step.json'}: {problem}"])
    if after in before and step.optimizer is None:
        raise ConfigError([f"{after}: {folder / 'step.json'} has no optimizer; add its options or remove the file"])
    if step.loss is None and step.gradient_norm is None and before.keys().isdisjoint((gradients, after)):
        expected = f"a loss, a gradient_norm, {gradients.name} or {after.name}"
        raise ConfigError([f"{folder}: has no result of the step to compare; expected {expected}"])
    read = functools.partial(_read_weights, model=model, narrowest=getattr(torch, step.dtypes.weights))
    weights = read(folder, tensor_shapes(model))
    trained = {name: tensor.shape for name, tensor in weights.items() if not name.endswith(BALANCE_BIAS)}
    results = (read(place, trained) if place in before else None for place in (gradients, after))
    if changed := before.items() ^ _files(folder).items():
        raise ConfigError([f"{min(changed)[0]}: changed while it was read; compare the folder when it is complete"])
    return RecordedStep(step, model, weights, *batch, experts, *results)


def _files(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """Return the inode, size and modification time of each file of a folder, to find out whether a file changes."""
    paths = [path for path in folder.glob("*") if path.suffix in (".json", ".safetensors")]
    stats = {path: path.lstat() if path.is_symlink() and not path.exists() else path.stat() for path in paths}
    return {path: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def _read_batch(file: Path, model: Model, most_positions: Any) -> list[Tensor | None]:
    """Return tokens, targets, document positions: [B, T]. Raises ConfigError if a tensor does not fit the model."""
    known, batch = ("tokens", "targets", "document_positions"), {}
    with open_safetensors(file, "write") as tensors:
        found = set(tensors.keys())
        _check_names(file, found - {known[2]}, {*known[:2]}, ", ".join(known))
        for name in sorted(found):
            header = tensors.get_slice(name)
            shape = header.get_shape()
            if header.get_dtype() != "I64" or len(shape) != 2 or 0 in shape:
                problem = f"{name} has dtype {header.get_dtype()} and shape {shape}"
                raise ConfigError([f"{file}: {problem}; expected I64 and [sequences, tokens]"])
            batch[name] = tensors.get_tensor(name)
    if problem := _batch_problem(batch, model.vocab_size, most_positions):
        raise ConfigError([f"{file}: {problem}"])
    return [batch.get(name) for name in known]


def _read_experts(file: Path, model: Model, shape: torch.Size) -> dict[str, Tensor]:
    """Return the experts that the program chose, by layer. Raises ConfigError if a tensor does not fit the model."""
    expected, n = torch.Size((*shape, model.moe.n_experts_per_token)), model.moe.n_experts
    layers = [f"layers.{layer}" for layer in range(model.n_layers) if model.has_experts(layer)]
    with open_safetensors(file, "write") as tensors:
        _check_names(file, {*tensors.keys()}, {*layers}, "a tensor for each layer with experts")
        read = {layer: tensors.get_tensor(layer) for layer in layers}
    for layer, experts in read.items():
        if experts.dtype != torch.int64 or experts.shape != expected:
            found = f"{layer} has dtype {experts.dtype} and shape {list(experts.shape)}"
            raise ConfigError([f"{file}: {found}; expected int64 and {list(expected)}"])
        ordered = experts.sort(-1).values
        if ordered.min() < 0 or ordered.max() >= n or (ordered[..., 1:] == ordered[..., :-1]).any():
            raise ConfigError([f"{file}: {layer}: expected different experts of a token, from 0 to {n - 1}"])
    return read


def _batch_problem(batch: dict[str, Tensor], vocab_size: int, most_positions: Any) -> str:
    """Return what is wrong with a batch, or an empty string."""
    tokens, targets, positions = batch["tokens"], batch["targets"], batch.get("document_positions")
    for name, tensor in batch.items():
        if tensor.shape != tokens.shape:
            return f"{name} has shape {list(tensor.shape)}, and tokens has {list(tokens.shape)}"
    valid = targets != IGNORED
    for name, ids in (("tokens", tokens), ("targets", targets[valid])):
        for wrong in ids[(ids < 0) | (ids >= vocab_size)][:1].tolist():
            return f"{name} has the id {wrong}, and the model has {vocab_size}; was it another model's tokenizer?"
    if not valid.any():
        return f"targets has no valid token: all are {IGNORED}"
    if type(most_positions) is int and tokens.shape[1] > most_positions:
        return f"{tokens.shape[1]} tokens a sequence, and max_position_embeddings of config.json is {most_positions}"
    if torch.equal(targets[valid], tokens[valid]) and len(tokens.unique()) > 1:
        return "targets are the tokens themselves; expected the id to predict at each position, that of the next token"
    if positions is not None:
        continues = positions[:, 1:] == positions[:, :-1] + 1
        if positions[:, 0].any() or not (continues | (positions[:, 1:] == 0)).all():
            return "document_positions: expected 0 where a document begins, as at position 0, and one more each token"
    return ""


def _read_weights(
    place: Path, shapes: dict[str, torch.Size], *, model: Model, narrowest: torch.dtype
) -> dict[str, Tensor]:
    """Return the tensors of a file or folder in float64, by titanlite's names. Raises ConfigError for wrong tensors."""
    if place.is_dir():
        files = tensor_files(place)
    else:
        with open_safetensors(place, "write") as tensors:
            files = dict.fromkeys(tensors.keys(), place)
    is_hf = any(name.startswith(("lm_head.", *PREFIXES)) for name in files)
    # In memory, transformers stacks w1 and w3 of all experts of a layer; in files, each expert has its own tensors.
    is_stacked = is_hf and not model.moe.expert_bias and any(name.endswith(STACKED) for name in files)
    sources, expected = {name: (name,) for name in shapes}, dict(shapes)
    if is_hf:
        sources, expected = _sources(shapes, model, is_stacked=is_stacked)
    head = (OUTPUT_HEAD if is_hf else "output.weight") if model.tie_embeddings else None
    expected |= {head: shapes[EMBEDDING]} if head in files else {}
    expectation = "the tensors of the model of config.json, with the names of transformers or of Llama"
    _check_names(place, {*files}, {*expected}, expectation)
    read: dict[str, Tensor] = {}
    for file in sorted({files[name] for name in expected}):
        own = {name: shape for name, shape in expected.items() if files[name] == file}
        read |= _read_tensors(file, own, narrowest)
    if head in files and not torch.equal(read[head], read[sources[EMBEDDING][0]]):
        problem = f"{head} differs from {sources[EMBEDDING][0]}, and tie_word_embeddings of config.json is true"
        raise ConfigError([f"{files[head]}: {problem}"])
    if not is_hf:
        return {name: read[name] for name in shapes}
    return {
        name: _own_tensor(name, [read[each] for each in there], model, is_stacked=is_stacked)
        for name, there in sources.items()
    }


def _check_names(place: Path, found: set[str], expected: set[str], expectation: str) -> None:
    unknown = {name for name in found - expected if not NOT_A_WEIGHT.fullmatch(name)}
    for problem, wrong in (("lacks", expected - found), ("has the unknown tensor", unknown)):
        if wrong:
            raise ConfigError([f"{place}: {problem} {first_of(sorted(wrong))}; expected {expectation}"])


def _sources(
    shapes: dict[str, torch.Size], model: Model, *, is_stacked: bool
) -> tuple[dict[str, tuple[str, ...]], dict[str, torch.Size]]:
    """Return, for each tensor of titanlite, the names of transformers' tensors that contain it, and their shapes."""
    sources, expected = {}, {}
    for names, ours in hf_tensors(model, shapes).items():
        shape = hf_shape(ours, shapes, model)
        if is_stacked:
            names = tuple(name.replace(".block_sparse_moe.", ".mlp.") for name in names)
        if is_stacked and EXPERTS in ours[0]:
            tensor, n, _ = TENSORS[ours[0].rpartition(".")[2]]
            names = (f"{names[0].partition('.experts.')[0]}.experts.{tensor}",)
            shape = torch.Size((model.moe.n_experts, n * shape[0], shape[1]))
        sources |= dict.fromkeys(ours, names)
        expected |= dict.fromkeys(names, shape)
    return sources, expected


def _own_tensor(name: str, tensors: list[Tensor], model: Model, *, is_stacked: bool) -> Tensor:
    """Return the tensor `name` of titanlite, made from the tensors of transformers that contain it."""
    if len(tensors) > 1:
        return torch.stack(tensors)
    if is_stacked and EXPERTS in name:
        _, n, index = TENSORS[name.rpartition(".")[2]]
        return tensors[0].chunk(n, 1)[index]
    return from_hf(name, tensors[0], model)


def _read_tensors(file: Path, shapes: dict[str, torch.Size], narrowest: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a file in float64. Raises ConfigError if names or shapes differ from `shapes`."""
    read = {}
    with open_safetensors(file, "write") as tensors:
        for name in sorted(shapes.keys() - tensors.keys())[:1]:
            raise ConfigError([f"{file}: lacks {show(name)}, which its index says it has"])
        for name, shape in shapes.items():
            header = tensors.get_slice(name)
            if header.get_shape() != list(shape):
                problem = f"{name} has shape {header.get_shape()}, and the model of config.json {list(shape)}"
                raise ConfigError([f"{file}: {problem}"])
            dtype = DTYPES.get(header.get_dtype())
            if dtype is None or torch.promote_types(dtype, narrowest) != dtype:
                weights = str(narrowest).removeprefix("torch.")
                problem = f"{name} has dtype {header.get_dtype()}, and dtypes.weights of step.json is {weights}"
                raise ConfigError([f"{file}: {problem}; expected that or a wider one"])
            read[name] = tensors.get_tensor(name).double()
            if not read[name].isfinite().all():
                raise ConfigError([f"{file}: {name} has a number that is NaN or infinite; expected finite ones"])
    return read
