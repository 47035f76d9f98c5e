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
import tomli_w
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.helpers.cases import cases
from tests.helpers.hf import CPU, draw_biases, draw_weights, empty_model, theirs, weights
from tests.parallel import test_parity
from tests.parallel.test_layouts import CP, DOCUMENTS, PP, SHARD, TP, USP, schedule, with_batches, world_size
from tests.parallel.test_layouts import TOLERANCE as LAYOUT_TOLERANCE
from tests.test_families import compare_with_hf
from tests.test_model import SMALL, build, draw_tokens, section
from titanlite import config
from titanlite.config.hf.config_json import hf_config, model_options
from titanlite.config.loader import tomllib
from titanlite.config.schema import Model
from titanlite.hf.export import export
from titanlite.hf.load import load_hf_weights
from titanlite.hf.names import named_weights
from titanlite.tools.generate.folder import open_folder
from titanlite.tools.generate.generator import Generator
from titanlite.tools.generate.sampling import Sampling, choose
from titanlite.tools.parity.compare import differences
from titanlite.tools.parity.reference import run_reference

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
    **{"head_dim": 16, "partial_rotary_factor": 0.75},
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
    "phi3, short": {**LONG, "rope_original_seq_len": 64, "tie_embeddings": True},
    "phi3, long": {**LONG, "rope_original_seq_len": 16},
    "glm": {**GLM, "hf_model_type": "glm"},
    "glm4": {**GLM, "norm_placement": "both"},
    "glm4moe": {**GLM, "moe": GLM_EXPERTS},
    "glm4moe, norms": {**GLM, "qk_norm": True, "moe": {**GLM_EXPERTS, "n_groups": 1, "n_groups_per_token": 1}},
    "starcoder2": {**GPT, "tie_embeddings": True},
    "starcoder2, window": {**GPT, **WINDOW, "attention_bias": "none", "mlp_bias": False, "activation": "gelu"},
    "gpt2": {**GPT, "n_kv_heads": 4, "learned_positions": 48, "partial_rotary_factor": 0.0, "tie_embeddings": True},
    "stablelm": {"norm": "layer", "partial_rotary_factor": 0.25, "head_dim": 16, "attention_bias": "qkv"},
    "seedoss": {"attention_bias": "qkv", "mlp_bias": True, "head_dim": 24, "hf_model_type": "seed_oss"},
    "gemma": {
        **{"norm": "rms_plus_one", "activation": "gelu_tanh", "head_dim": 24, "embedding_scale": 8.0},
        **{"tie_embeddings": True, "attention_bias": "all"},
    },
    "gemma3": {**GEMMA, "layer_pattern": [{**LOCAL, "rope_theta": 10_000.0}, {}]},
    "gemma3, linear": {
        **{**GEMMA, "rope_scaling_type": "linear", "rope_scaling_factor": 8.0, "attention_bias": "all"},
        "layer_pattern": [{**WINDOW, "rope_theta": 10_000.0, "rope_scaling_factor": 1.0}, {}],
    },
}
"""By the beginning of transformers' class and, behind a comma, what is special: options besides those of SMALL."""
OF_CLASSES = [family for family in FAMILIES if ", " not in family]
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


def loop_over_experts(model: Model) -> dict[str, str]:
    """Return the argument with which transformers computes one expert after the other, in any data type."""
    return {"experts_implementation": "eager"} if model.moe.n_experts else {}


def build_hf(model: Model, dtype: torch.dtype, attention: str) -> Any:
    """Return transformers' model of the exported config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**hf_config(model, **TOKENS))
    return AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=dtype, **loop_over_experts(model)
    ).eval()


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


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_transformers(family: str):
    size = {**SMALL, **FAMILIES[family]}
    model, llama = section(size), build(torch.float64, **size)
    model_type = hf_config(model, **TOKENS)["model_type"]
    with float64_for_float32(*modeling(model_type)):
        hf = build_hf(model, torch.float64, "sdpa")
        assert type(hf).__name__.lower().startswith(family.split(",")[0])
        copy_weights(llama, hf, model)
        differences = compare_with_hf(llama, hf, model)
    assert {name: d for name, d in differences.items() if not d < TOLERANCE} == {}


@cases("family", FAMILIES, always=OF_CLASSES)
def test_unchanged_transformers_in_float32(family: str):
    """Compare with transformers as it is: TOLERANCE for the 2^29 times larger rounding of float32."""
    size = {**SMALL, **FAMILIES[family]}
    model, llama = section(size), build(torch.float32, **size)
    hf = build_hf(model, torch.float32, "eager")
    copy_weights(llama, hf, model)
    differences = compare_with_hf(llama, hf, model)
    assert {name: d for name, d in differences.items() if not d < TOLERANCE * 2**29} == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_is_read_as_it_was_written(family: str, tmp_path: Path):
    model = section({**SMALL, **FAMILIES[family]})
    (tmp_path / "config.json").write_text(json.dumps(hf_config(model, **TOKENS)))
    again = Model.model_validate(model_options(tmp_path))
    differing = {key for key, value in again.identity().items() if model.identity().get(key) != value}
    assert differing <= {"hf_model_type"}
    assert model.identity().keys() <= again.identity().keys()


# Folders -------------------------------------------------------------------------------------------------------------


class InMemory:
    """Stands for the reader of a checkpoint that has a model's weights."""

    def __init__(self, llama: nn.Module):
        self.tensors = {f"model.{name}": tensor.detach() for name, tensor in named_weights(llama).items()}
        self.shapes = {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        return self.tensors[name].clone()


@cases("family", FAMILIES, always=OF_CLASSES)
def test_weights_come_in_and_go_out_bit_for_bit(family: str, tmp_path: Path):
    """A folder that transformers has written is loaded and exported again. With it, transformers computes the same."""
    from transformers import AutoModelForCausalLM

    written = build_hf(section({**SMALL, **FAMILIES[family]}), torch.float32, "sdpa")
    draw_weights(written)
    draw_biases(written)
    written.save_pretrained(tmp_path / "in")
    model = Model.model_validate(model_options(tmp_path / "in"))
    llama = empty_model(model)
    load_hf_weights(tmp_path / "in", llama, model)
    export(InMemory(llama), model, tmp_path / "out", dtype=torch.float32, max_seq_len=48, source=tmp_path / "in")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **loop_over_experts(model)).eval()
    tokens = draw_tokens(2, 40)
    assert type(again) is type(written)
    assert torch.equal(again(tokens).logits, written(tokens).logits)


@cases("family", FAMILIES, always=["olmo3", "gpt2", "gemma3"])
def test_greedy_text_is_that_of_transformers(family: str, tmp_path: Path):
    """Texts in which the largest two logits are too close for float32's rounding are left out. Of LongRoPE, all are
    longer than its original length: transformers has the short factors until a text is."""
    hf = build_hf(section({**SMALL, **FAMILIES[family]}), torch.float32, "sdpa")
    draw_weights(hf)
    draw_biases(hf)
    hf.save_pretrained(tmp_path)
    lengths = (17, 19, 20, 18) if family == "phi3, long" else (3, 20, 1, 9, 12, 6)
    prompts, compared = [draw_tokens(1, length)[0].tolist() for length in lengths], 0
    arguments = {"dtype": torch.float64, "device": CPU, "mesh": None, "max_new_tokens": 20, "batch_size": 4}
    generator = Generator(open_folder(tmp_path), longest=20, **arguments)
    texts = list(generator.generate(prompts, set(), lambda logits, batch: choose(logits, Sampling(), [])))
    options = {"do_sample": False, "max_new_tokens": 20, "output_logits": True, "return_dict_in_generate": True}
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = torch.tensor([prompt])
        hf.generation_config.eos_token_id = None
        theirs = hf.generate(tokens, attention_mask=torch.ones_like(tokens), pad_token_id=0, **options)
        best = torch.stack([logits[0].topk(2).values for logits in theirs.logits])
        if (best[:, 0] - best[:, 1]).min() > 1e-3:
            compared += 1
            assert text == theirs.sequences[0, len(prompt) :].tolist()
    assert compared >= 2


# Layouts -------------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, dict[str, Any]] = {
    "shard x tp": SHARD | TP,
    "cp, documents": CP | DOCUMENTS,
    "tp x pp x cp": TP | PP | CP,
    "ring 2 x ulysses 2": USP,
    "zero-bubble": schedule("InterleavedZeroBubble"),
}
CASES = [(family, name) for family in FAMILIES for name in LAYOUTS]
LAYOUTS["ep, shard x tp"] = SHARD | TP | {"expert_parallel_degree": 4}
CASES += [(family, "ep, shard x tp") for family in FAMILIES if "moe" in FAMILIES[family]]
ALWAYS = [(family, "tp x pp x cp") for family in ("olmo3", "gpt2", "gemma3")]
ALWAYS += [("smollm3", "cp, documents"), ("granite", "shard x tp"), ("phi3, long", "ring 2 x ulysses 2")]
ALWAYS += [("glm4moe", "ep, shard x tp")]


@cases(("family", "name"), CASES, always=ALWAYS, ids=[f"{family}, {name}" for family, name in CASES])
def test_layout_matches_reference(ranks, family: str, name: str, tmp_path: Path):
    layout = LAYOUTS[name]
    options = {**with_batches(layout), "model__n_kv_heads": 4}
    if FAMILIES[family].get("head_dim"):
        options["model__head_dim"] = FAMILIES[family]["head_dim"]
    base = tomllib.loads(test_parity.SMALL)
    own = {key: value for key, value in FAMILIES[family].items() if key not in ("n_kv_heads", "head_dim")}
    own |= {"tie_embeddings": False} if "pipeline_parallel_degree" in layout else {}
    (tmp_path / "config.toml").write_text(tomli_w.dumps({**base, "model": {**base.get("model", {}), **own}}))
    loaded = config.load([str(tmp_path / "config.toml"), *test_parity.arguments_of(options)])
    n_ranks = world_size(layout)
    job = config.check(loaded, config.Launch(0, 0, n_ranks, n_ranks, 0))
    (actual, *_) = ranks(n_ranks).run(test_parity.trace, job=job)
    found = differences(run_reference(job, CPU, steps=test_parity.STEPS), actual)
    assert {name: d for name, d in found.items() if d > LAYOUT_TOLERANCE} == {}
    assert all(d == 0 for name, d in found.items() if name.startswith("initial weight")), "not bit for bit"
