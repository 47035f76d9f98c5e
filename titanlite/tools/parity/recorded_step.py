"""The folder of `titanlite parity --against FOLDER`: what another program did in one optimizer step.

    FOLDER/config.json                the model, as transformers writes it: `hidden_size`, `rope_theta`, ...
    FOLDER/model.safetensors          its weights before the step, or model.safetensors.index.json and its files
    FOLDER/batch.safetensors          the global batch, int64 [B, T]: `tokens`; `targets`, the id to predict at each
                                      position, or -100 for none; optionally `document_positions`, the position of each
                                      token in its document, for documents that do not attend to each other
    FOLDER/step.json                  options and results of the step: see RecordedOptions
    FOLDER/gradients.safetensors      optional: the gradients of the step, before clipping and without a loss scale
    FOLDER/weights_after.safetensors  optional: the weights after the step

Weights and gradients have the names and rows of transformers (model.layers.0.self_attn.q_proj.weight), or those of
Llama and titanlite (layers.0.attention.wq.weight; neighbouring rows of wq and wk are rotated together), file by file.
Their data type is that of the program's weights or a wider one. The step is the first one of the optimizer: its states
were zero before.

Files of others are not believed: no pickle is read, and whatever is wrong is a ConfigError of one line.
"""

import dataclasses
from collections.abc import Collection
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
from titanlite.hf.load import EMBEDDING, NOT_A_WEIGHT, PREFIXES, first_of, open_safetensors, tensor_files
from titanlite.hf.names import OUTPUT_HEAD, from_hf, hf_shape, hf_tensors, tensor_shapes
from titanlite.loss import IGNORED

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Data types of weights and gradients, by the names that safetensors has for them."""
Dtype = Literal["float64", "float32", "bfloat16", "float16"]


class Dtypes(Record):
    """Data types of the step, by their names in torch. They say how much rounding explains."""

    weights: Dtype
    """Of the weights that the optimizer updates."""
    compute: Dtype
    """Of forward and backward."""
    reduce: Dtype
    """In which gradients are summed over ranks and accumulation steps."""


class AdamOptions(Record):
    """Options of the optimizer, as torch.optim has them."""

    name: Literal["AdamW", "Adam"]
    lr: Positive
    """Learning rate of this step."""
    beta1: Fraction
    beta2: Fraction
    eps: Positive
    weight_decay: NotNegative
    weight_decay_dims: list[Literal[1, 2]]
    """Which weights decay: 2: matrices and embeddings; 1: norms and biases."""


class Degrees(Record):
    """Numbers by which a program may multiply or divide its gradients. They only give a ratio its name."""

    dp: Ranks = 1
    """Data-parallel ranks, sharded and replicated."""
    tp: Ranks = 1
    cp: Ranks = 1
    pp: Ranks = 1
    microbatches: Count = 1
    """Of a pipeline, in an accumulation step."""
    accumulation_steps: Count = 1
    loss_scale: Positive = 1.0


class RecordedOptions(Record):
    """The content of step.json. A key that is null or missing is not compared, or was not used."""

    program: str = ""
    """What took the step, for the reader of the report."""
    dtypes: Dtypes
    optimizer: AdamOptions | None = None
    """None: no optimizer is compared."""
    max_norm: Positive | None = None
    """Gradients are clipped to this 2-norm over all of them; None: they are not."""
    degrees: Degrees = Degrees()
    loss: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Nats per token: the sum of token losses over the number of valid tokens of the global batch."""
    gradient_norm: NotNegative | None = None
    """2-norm over all gradients before clipping."""


@dataclasses.dataclass(frozen=True)
class RecordedStep:
    """What the folder holds. Weights and gradients are float64, with titanlite's names and order of rows."""

    step: RecordedOptions
    model: Model
    weights: dict[str, Tensor]
    tokens_BT: Tensor
    targets_BT: Tensor
    positions_BT: Tensor | None
    gradients: dict[str, Tensor] | None
    weights_after: dict[str, Tensor] | None

    @property
    def n_valid(self) -> int:
        """Number of valid tokens of the global batch."""
        return int((self.targets_BT != IGNORED).sum())


def read_step(folder: Path) -> RecordedStep:
    """Read and check the folder. Raises ConfigError if a file is missing, damaged or not of this model."""
    step = parse(RecordedOptions, read_json_object(folder / "step.json"), str(folder / "step.json"))
    # The length of the batch is compared with the model's positions below.
    model = model_of(folder)
    if model.moe.n_experts:
        problem = "the model has experts; only dense ones are compared, as rounding sends tokens to other experts"
        raise ConfigError([f"{folder / 'config.json'}: {problem}"])
    most = model.most_positions or read_json_object(folder / "config.json").get("max_position_embeddings")
    batch = _read_batch(folder / "batch.safetensors", model, most)
    gradients, after = folder / "gradients.safetensors", folder / "weights_after.safetensors"
    if after.exists() and step.optimizer is None:
        raise ConfigError([f"{after}: {folder / 'step.json'} has no optimizer; add its options or remove the file"])
    if step.loss is None and step.gradient_norm is None and not gradients.exists() and not after.exists():
        expected = f"a loss, a gradient_norm, {gradients.name} or {after.name}"
        raise ConfigError([f"{folder}: has no result of the step to compare; expected {expected}"])
    shapes = tensor_shapes(model)
    widths = {"model": model, "narrowest": getattr(torch, step.dtypes.weights)}
    results = [
        _read_weights(file, _names_in(file), shapes, **widths) if file.exists() else None for file in (gradients, after)
    ]
    return RecordedStep(step, model, _read_weights(folder, tensor_files(folder), shapes, **widths), *batch, *results)


def _names_in(file: Path) -> dict[str, Path]:
    """Return the file of each tensor in it, as hf.load.tensor_files does."""
    with open_safetensors(file, "write") as tensors:
        return dict.fromkeys(tensors.keys(), file)


def _read_batch(file: Path, model: Model, most_positions: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return tokens, targets and document positions, [B, T] each. Raises ConfigError if they are not of the model."""
    known, batch = ("tokens", "targets", "document_positions"), {}
    with open_safetensors(file, "write") as tensors:
        found = set(tensors.keys())
        for problem, names in (("lacks", {*known[:2]} - found), ("has the unknown tensor", found - {*known})):
            for name in sorted(names)[:1]:
                raise ConfigError([f"{file}: {problem} {show(name)}; expected tokens, targets, document_positions"])
        for name in sorted(found):
            header = tensors.get_slice(name)
            shape = header.get_shape()
            if header.get_dtype() != "I64" or len(shape) != 2 or 0 in shape:
                problem = f"{name} has dtype {header.get_dtype()} and shape {shape}"
                raise ConfigError([f"{file}: {problem}; expected I64 and [sequences, tokens]"])
            batch[name] = tensors.get_tensor(name)
    tokens, targets, positions = (batch.get(name) for name in known)
    if problem := _batch_problem(tokens, targets, positions, model.vocab_size, most_positions):
        raise ConfigError([f"{file}: {problem}"])
    return tokens, targets, positions


def _batch_problem(
    tokens: Tensor, targets: Tensor, positions: Tensor | None, vocab_size: int, most_positions: Any
) -> str:
    """Return what is wrong with a batch, or an empty string."""
    for name, tensor in (("targets", targets), ("document_positions", positions)):
        if tensor is not None and tensor.shape != tokens.shape:
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
    place: Path, files: dict[str, Path], shapes: dict[str, torch.Size], *, model: Model, narrowest: torch.dtype
) -> dict[str, Tensor]:
    """Return tensors by titanlite's names, float64. `files` has the file of each tensor by its name there, `shapes`
    the shape of each one that is needed. Raises ConfigError if a tensor is missing, superfluous or wrong."""
    is_hf = any(name.startswith(("lm_head.", *PREFIXES)) for name in files)
    names, there = {name: name for name in shapes}, dict(shapes)
    for tensors, ours in hf_tensors(model, shapes).items() if is_hf else ():
        names |= dict.fromkeys(ours, tensors[0])
        there |= dict.fromkeys(ours, hf_shape(ours, shapes, model))
    tied_head = (OUTPUT_HEAD if is_hf else "output.weight") if model.tie_embeddings else None
    _check_names(place, files.keys() - {tied_head}, {*names.values()})
    tensors = {name: _read_tensor(files[own], own, there[name], narrowest) for name, own in names.items()}
    if is_hf:
        tensors = {name: from_hf(name, tensor, model) for name, tensor in tensors.items()}
    if tied_head in files:
        head = _read_tensor(files[tied_head], tied_head, shapes[EMBEDDING], narrowest)
        if not torch.equal(head, tensors[EMBEDDING]):
            problem = f"{tied_head} differs from {names[EMBEDDING]}, and tie_word_embeddings of config.json is true"
            raise ConfigError([f"{files[tied_head]}: {problem}"])
    return tensors


def _check_names(place: Path, found: Collection[str], expected: set[str]) -> None:
    missing = sorted(expected - set(found))
    other = sorted(name for name in set(found) - expected if not NOT_A_WEIGHT.fullmatch(name))
    for problem, names in (("lacks", missing), ("has the unknown tensor", other)):
        if names:
            expectation = "expected the tensors of the model of config.json, with the names of transformers or of Llama"
            raise ConfigError([f"{place}: {problem} {first_of(names)}; {expectation}"])


def _read_tensor(file: Path, name: str, shape: torch.Size, narrowest: torch.dtype) -> Tensor:
    """Return a tensor in float64. Raises ConfigError if it is not as expected."""
    with open_safetensors(file, "write") as tensors:
        if name not in set(tensors.keys()):
            raise ConfigError([f"{file}: lacks {show(name)}, which its index says it has"])
        header = tensors.get_slice(name)
        if header.get_shape() != list(shape):
            problem = f"{name} has shape {header.get_shape()}, and the model of config.json {list(shape)}"
            raise ConfigError([f"{file}: {problem}"])
        dtype = DTYPES.get(header.get_dtype())
        if dtype is None or torch.promote_types(dtype, narrowest) != dtype:
            weights = str(narrowest).removeprefix("torch.")
            problem = f"{name} has dtype {header.get_dtype()}, and dtypes.weights of step.json is {weights}"
            raise ConfigError([f"{file}: {problem}; expected that or a wider one"])
        tensor = tensors.get_tensor(name).double()
    if not tensor.isfinite().all():
        raise ConfigError([f"{file}: {name} has a number that is NaN or infinite; expected finite ones"])
    return tensor
