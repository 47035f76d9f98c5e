"""Convert names of weights, and the order of their rows, between this model and transformers.

This model rotates a head's channels 2i and 2i + 1 together, as Meta's checkpoints do; transformers rotates channels i
and i + R/2 of R rotated channels. So within each head, row 2i of this model is row i in transformers, and row 2i + 1 is
row i + R/2. This holds for the weights and biases of wq and wk and the weights of q_norm and k_norm. In DeepSeek and
GLM-4, transformers pairs neighbouring channels, too, so rows keep their order. In some families, a tensor contains
several weights of this model (Phi-3, GLM-4, GPT-2), and GPT-2's matrices are transposed."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from titanlite.build_llama import build_llama
from titanlite.config.loader import read_toml
from titanlite.config.schema import LORA_FACTORS, Model
from titanlite.hf import stacked_experts

Q_NORM, Q_LATENT_NORM = "self_attn.q_norm", "self_attn.q_a_layernorm"
"""The names of attention.q_norm in transformers, without and with latent attention."""
_QUERIES_KEYS_VALUES = ("attention.wq", "attention.wk", "attention.wv")
_TABLES = read_toml(str(Path(__file__).with_name("names.toml")))
MODULES: dict[str, str] = _TABLES["modules"]  # name of each module in transformers
EXPERTS: dict[str, list[str]] = _TABLES["experts"]
"""Names of experts' tensors in Qwen3-MoE, OLMoE and DeepSeek, and in Mixtral; {} is the number of an expert."""


@dataclasses.dataclass(frozen=True)
class Names:
    """The differences between the tensor names of a model family and MODULES."""

    modules: dict[str, str] = dataclasses.field(default_factory=dict)
    """Names of the modules whose names differ from MODULES."""
    fused: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """Tensors that contain several weights of this model, in this order."""
    layer: str = "model.layers"
    ends: dict[str, str] = dataclasses.field(default_factory=dict)
    neighbours: bool = False
    """Whether rows 2i and 2i + 1 are rotated together, as in this model."""
    transposed: Sequence[str] = ()  # modules whose matrices transformers stores as [inputs, outputs]


NAMES = {model_type: Names(**row) for model_type, row in _TABLES["families"].items()}
"""Names by model type, for the model types that differ from MODULES."""
BALANCE_BIAS = ".router.balance_bias"
"""End of the names of the biases that balance experts, which are buffers in float32."""
ROTATED = ("attention.wq", "attention.wk", "attention.q_norm", "attention.k_norm")
"""Modules whose rows are channels that are rotated in pairs."""
OUTPUT_HEAD = "lm_head.weight"


def names_of(model: Model) -> Names:
    """Return how the names of a model's tensors differ from MODULES."""
    if model.hf_model_type in NAMES:
        return NAMES[model.hf_model_type]
    if model.rope_scaling_type == "longrope" and model.rope_scaling_factor > 1:
        return NAMES["phi3"]
    if not model.gated_ffn:
        return NAMES["gpt2" if model.learned_positions else "starcoder2"]
    both = "gemma3_text" if model.norm == "rms_plus_one" else "glm4"
    return NAMES[{"before": "llama", "after": "olmo2", "both": both}[model.norm_placement]]


def tensor_shapes(model: Model) -> dict[str, torch.Size]:
    """Return the shapes of the full model's parameters (tied embeddings once) and of the experts' balance biases."""
    return {name: tensor.shape for name, tensor in named_weights(build_llama(model, max_seq_len=1)).items()}


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model, except adapters, and the buffers that transformers stores as weights."""
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith(BALANCE_BIAS)}
    parameters = {name: each for name, each in model.named_parameters() if not name.endswith(LORA_FACTORS)}
    return {**parameters, **biases}


def _split(name: str) -> tuple[str, str, str]:
    """Split a tensor's name into its layer ("" outside layers), its module in the layer, and its name in the module."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("layers."):
        return "", module, kind
    _, layer, module = module.split(".", 2)
    return layer, module, kind


def hf_name(name: str, model: Model) -> str:
    """Return the name in transformers of a tensor outside a mixture of experts."""
    names, (layer, module, kind) = names_of(model), _split(name)
    fused = [tensor for tensor, modules in names.fused.items() if layer and module in modules]
    own = fused[0] if fused else {**MODULES, **names.modules, **names.ends}[module]
    if own == Q_NORM and model.mla.kv_lora_rank:
        own = Q_LATENT_NORM
    return f"{names.layer}.{layer}.{own}.{kind}" if layer else f"{own}.{kind}"


def hf_names(name: str, model: Model) -> list[str]:
    """Return the names of a tensor in transformers: one, or one per expert. A model with experts is a Mixtral if it has
    no norms of queries and keys, no latent attention and no sigmoid scores."""
    layer, _, rest = name.removeprefix("layers.").partition(".feed_forward.")
    if rest.startswith(("experts.", "router.")) and model.moe.expert_bias:
        own = stacked_experts.hf_name(rest) if is_stacked(name, model) else f"mlp.{rest}"
        return [f"model.layers.{layer}.{own}"]
    if rest not in EXPERTS:
        return [hf_name(name, model)]
    is_mixtral = not (model.qk_norm or model.mla.kv_lora_rank or model.moe.score_function == "sigmoid")
    tensor = EXPERTS[rest][is_mixtral]
    n_tensors = model.moe.n_experts if "{}" in tensor else 1
    return [f"model.layers.{layer}.{tensor.format(expert)}" for expert in range(n_tensors)]


def is_stacked(name: str, model: Model) -> bool:
    """Return whether transformers stacks a tensor's experts, too: only in gpt-oss, whose experts alone have biases."""
    return model.moe.expert_bias and ".experts." in name


def is_transposed(name: str, model: Model) -> bool:
    """Return whether a tensor is a matrix that is transposed in transformers."""
    _, module, kind = _split(name)
    return kind == "weight" and module in names_of(model).transposed


def rotated_channels(name: str, model: Model) -> int:
    """Return how many of the first rows of each head in a weight are reordered in transformers; 0: none."""
    layer, module, _ = _split(name)
    if model.mla.kv_lora_rank or names_of(model).neighbours or module not in ROTATED:
        return 0
    return model.of_layer(int(layer)).rope_dim


def _rows(name: str, model: Model) -> slice:
    """Return the rows of a transformers tensor that are the tensor `name`: all, unless it contains several tensors."""
    layer, module, _ = _split(name)
    queries, keys = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    sizes = dict(zip(_QUERIES_KEYS_VALUES, (queries, keys, keys), strict=True))
    for modules in names_of(model).fused.values() if layer else ():
        if module in modules:
            begin = sum(sizes.get(each, model.ffn_dim) for each in modules[: modules.index(module)])
            return slice(begin, begin + sizes.get(module, model.ffn_dim))
    return slice(0, None)


def hf_rows(name: str, rows: Tensor, model: Model) -> Tensor:
    """Return the indices that `rows` of the tensor `name` have in transformers' tensor before it is transposed."""
    if rotated := rotated_channels(name, model):
        channel = rows % model.head_dim
        there = rows - channel + channel // 2 + channel % 2 * (rotated // 2)
        rows = there.where(channel < rotated, rows)
    return rows + _rows(name, model).start


def from_hf(name: str, tensor: Tensor, model: Model) -> Tensor:
    """Extract this model's full tensor `name` from the transformers tensor that contains it."""
    if is_stacked(name, model):
        return stacked_experts.from_hf(name, tensor)
    tensor = tensor.T if is_transposed(name, model) else tensor
    own = _rows(name, model)
    if own.stop is None and not rotated_channels(name, model):
        return tensor
    n_rows = len(tensor) if own.stop is None else own.stop - own.start
    return tensor[hf_rows(name, torch.arange(n_rows), model)]


def to_hf(names: Sequence[str], tensors: Sequence[Tensor], model: Model) -> Tensor:
    """Return the transformers tensor that contains these full tensors of this model, in the order of `names`."""
    if is_stacked(names[0], model):
        return stacked_experts.to_hf(names, tensors)
    ordered = [
        tensor[hf_rows(name, torch.arange(len(tensor)), model).argsort()] if rotated_channels(name, model) else tensor
        for name, tensor in zip(names, tensors, strict=True)
    ]
    tensor = ordered[0] if len(ordered) == 1 else torch.cat(ordered)
    return tensor.T.contiguous() if is_transposed(names[0], model) else tensor


def hf_tensors(model: Model, names: Iterable[str]) -> dict[tuple[str, ...], list[str]]:
    """Return which of this model's tensors each transformers tensor contains; a layer's experts count as one tensor."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        found.setdefault(tuple(hf_names(name, model)), []).append(name)
    return {there: sorted(ours, key=lambda name: _rows(name, model).start) for there, ours in found.items()}


def hf_shape(names: Sequence[str], shapes: Mapping[str, torch.Size], model: Model) -> torch.Size:
    """Return the shape of the transformers tensor, or of one expert's tensor, that contains the tensors `names`."""
    if is_stacked(names[0], model):
        return stacked_experts.hf_shape(names, shapes)
    first = shapes[names[0]][-2:]
    shape = torch.Size((sum(shapes[name][-2:][0] for name in names), *first[1:]))
    return shape[::-1] if is_transposed(names[0], model) else shape
