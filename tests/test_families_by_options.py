"""Families that are options of the model, each against transformers: its config.json in and out, its weights in and out
bit for bit, its logits and all gradients in float64, its tokens; and under layouts, against one process."""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.hf_helpers import draw_biases, released, theirs, weights
from tests.test_model import SMALL, build, draw_tokens, gradients, relative, section
from titanlite.config.hf_config import hf_config, model_options
from titanlite.config.schema import Model
from titanlite.hf.names import named_weights

WINDOW = {"sliding_window": 9}
YARN = {"rope_scaling_factor": 8.0, "rope_scaling_type": "yarn", "rope_original_seq_len": 64, "rope_beta_fast": 8.0}
LOCAL = {**WINDOW, "count": 2}
BIASES = {"attention_bias": "all", "mlp_bias": True}
OLMO = {"norm_placement": "after", "qk_norm": "all_heads"}
GLM = {"attention_bias": "qkv", "partial_rotary_factor": 0.5, "head_dim": 24}
GPT = {"norm": "layer", "gated_ffn": False, "activation": "gelu_tanh", **BIASES}
GEMMA = {
    **{"norm": "rms_plus_one", "norm_placement": "both", "activation": "gelu_tanh", "qk_norm": True, "head_dim": 24},
    **{"embedding_scale": 8.0, "attention_scale": 1 / 32**0.5, "rope_theta": 1_000_000.0, "tie_embeddings": True},
}
GLM_EXPERTS = {
    **{"n_experts": 8, "n_experts_per_token": 3, "expert_dim": 16, "n_shared_experts": 2, "n_first_dense_layers": 1},
    **{"n_groups": 4, "n_groups_per_token": 2, "score_function": "sigmoid", "normalize_scores": True},
    **{"score_scaling": 1.5, "balance_bias": True},
}
LONG = {
    **{"rope_scaling_type": "longrope", "rope_scaling_factor": 4.0},
    "rope_short_factors": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "rope_long_factors": [1.0, 2.1, 3.2, 4.3, 5.4, 6.5],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "olmo2": OLMO,
    "olmo2, biases": {**OLMO, "attention_bias": "all", "n_kv_heads": 4, "tie_embeddings": True, **YARN},
    "olmo3": {**OLMO, "layer_pattern": [LOCAL, {}]},
    "olmo3, yarn": {
        **{**OLMO, **YARN, "rope_theta": 500_000.0},
        "layer_pattern": [{**LOCAL, "rope_scaling_factor": 1.0}, {}],
    },
    "smollm3": {"layer_pattern": [{"count": 2}, {"partial_rotary_factor": 0.0}], "tie_embeddings": True},
    "smollm3, windows": {
        **{**YARN, "mlp_bias": True},
        "layer_pattern": [{}, {**WINDOW, "partial_rotary_factor": 0.0}],
    },
    "granite": {
        **{"embedding_scale": 12.0, "attention_scale": 0.015625, "residual_scale": 0.22, "logits_scale": 1 / 6},
        **BIASES,
    },
    "ministral": {"layer_pattern": [WINDOW, {}], "head_dim": 24, "hf_model_type": "ministral"},
    "ministral3": {
        **{**YARN, "llama4_scaling_beta": 0.1, "rope_attention_factor": 1.0, "head_dim": 24},
        "hf_model_type": "ministral3",
    },
    "phi3": {**WINDOW, "hf_model_type": "phi3"},
    "phi3, short": {**LONG, "partial_rotary_factor": 0.75, "rope_original_seq_len": 64, "tie_embeddings": True},
    "phi3, long": {**LONG, "partial_rotary_factor": 0.75, "rope_original_seq_len": 16},
    "glm": {**GLM, "hf_model_type": "glm"},
    "glm4": {**GLM, "norm_placement": "both"},
    "glm4moe": {**GLM, "moe": GLM_EXPERTS},
    "glm4moe, norms": {**GLM, "qk_norm": True, "moe": {**GLM_EXPERTS, "n_groups": 1, "n_groups_per_token": 1}},
    "starcoder2": {**GPT, "tie_embeddings": True},
    "starcoder2, window": {**GPT, **WINDOW, "attention_bias": "none", "mlp_bias": False, "activation": "gelu"},
    "gpt2": {**GPT, "n_kv_heads": 4, "learned_positions": 48, "partial_rotary_factor": 0.0, "tie_embeddings": True},
    "gemma3": {**GEMMA, "layer_pattern": [{**LOCAL, "rope_theta": 10_000.0}, {}]},
    "gemma3, linear": {
        **{**GEMMA, "rope_scaling_type": "linear", "rope_scaling_factor": 8.0, "attention_bias": "all"},
        "layer_pattern": [{**WINDOW, "rope_theta": 10_000.0, "rope_scaling_factor": 1.0}, {}],
    },
}
"""By the beginning of transformers' class and, behind a comma, what is special: options besides those of SMALL."""
TOLERANCE = 1e-12
"""Of the relative difference in float64. A product of 96 terms is off by up to 1e-14, and a gradient has some 100 such
products behind it, whose errors add up; norms behind layers, and factors, scale them up."""
TOKENS = {"max_seq_len": 48, "torch_dtype": "float32", "bos": None, "eos": None}


class InFloat64:
    """Stands for the module torch, and computes in float64 where float32 is named."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def float64_for_float32(*modules: Any) -> Iterator[None]:
    """Have modules of transformers compute in float64 where they name float32: norms, rotary tables, softmax."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "torch", InFloat64()))
        stack.enter_context(mock.patch.object(Tensor, "float", Tensor.double))
        yield


def modeling(model_type: str) -> list[Any]:
    """Return the modules of transformers that compute a model type."""
    import transformers
    from transformers import modeling_rope_utils
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    return [sys.modules[kind.__module__], modeling_rope_utils]


def build_hf(model: Model, dtype: torch.dtype, attention: str) -> Any:
    """Return transformers' model of the exported config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM

    loop = {"experts_implementation": "eager"} if model.moe.n_experts else {}
    config = AutoConfig.for_model(**hf_config(model, **TOKENS))
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype, **loop).eval()


@torch.no_grad()
def copy_weights(llama: nn.Module, hf: Any, model: Model) -> None:
    """Give transformers' model the weights of ours, after making norms' and biases' differ from 1 and 0."""
    generator = torch.Generator().manual_seed(3)
    for parameter in llama.parameters():
        if parameter.dim() == 1:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    draw_biases(llama)
    expected = weights(hf)
    for name, weight in theirs(named_weights(llama), model).items():
        expected.pop(name).copy_(weight)
    assert not expected


def compare(llama: nn.Module, hf: Any, model: Model) -> dict[str, float]:
    """Return the relative differences of the logits and of every gradient."""
    tokens, targets = draw_tokens(2, 41)[:, :40], draw_tokens(2, 41)[:, 1:]
    our_logits, their_logits = llama(tokens), hf(tokens, use_cache=False).logits
    assert our_logits.dtype == their_logits.dtype == next(llama.parameters()).dtype
    differences = {"logits": relative(our_logits, their_logits)}
    expected = released(hf, gradients(hf, their_logits, targets))
    for name, gradient in theirs(gradients(llama, our_logits, targets), model).items():
        expected_gradient = expected.pop(name)  # zero of an expert without tokens
        unequal = not torch.equal(gradient, expected_gradient)
        differences[name] = relative(gradient, expected_gradient) if unequal else 0.0
    assert not expected
    return differences


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_transformers(family: str):
    size = {**SMALL, **FAMILIES[family]}
    model, llama = section(size), build(torch.float64, **size)
    model_type = hf_config(model, **TOKENS)["model_type"]
    with float64_for_float32(*modeling(model_type)):
        hf = build_hf(model, torch.float64, "sdpa")
        assert type(hf).__name__.lower().startswith(family.split(",")[0])
        copy_weights(llama, hf, model)
        differences = compare(llama, hf, model)
    assert {name: d for name, d in differences.items() if not d < TOLERANCE} == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_unchanged_transformers_in_float32(family: str):
    """Compare with transformers as it is: TOLERANCE for the 2^29 times larger rounding of float32."""
    size = {**SMALL, **FAMILIES[family]}
    model, llama = section(size), build(torch.float32, **size)
    hf = build_hf(model, torch.float32, "eager")
    copy_weights(llama, hf, model)
    differences = compare(llama, hf, model)
    assert {name: d for name, d in differences.items() if not d < TOLERANCE * 2**29} == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_is_read_as_it_was_written(family: str, tmp_path: Path):
    model = section({**SMALL, **FAMILIES[family]})
    (tmp_path / "config.json").write_text(json.dumps(hf_config(model, **TOKENS)))
    again = Model.model_validate(model_options(tmp_path))
    differing = {key for key, value in again.identity().items() if model.identity().get(key) != value}
    assert differing <= {"hf_model_type"}
    assert model.identity().keys() <= again.identity().keys()
