"""Multi-head latent attention: the model against transformers' DeepSeek-V3, and every layout with latent attention
against one process in float64."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import SequenceParallel
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.cases import Case, cases
from tests.helpers.config import assert_rejected, load, modules_of_a_plain_llama, on
from tests.helpers.hf import empty_model
from tests.parallel.test_layouts import (
    COMPILED,
    CP,
    DOCUMENTS,
    EVERY_SECOND_MM,
    FLOAT8,
    FULL,
    FULL_PRECISION,
    OFFLOAD,
    ONE_ACCUMULATION_STEP,
    PP,
    REPLICATE,
    SELECTIVE,
    SHARD,
    TIED,
    TP,
    ULYSSES,
    USP,
    largest,
    schedule,
    with_batches,
    world_size,
)
from tests.parallel.test_layouts import TOLERANCE as LAYOUT_TOLERANCE
from tests.parallel.test_parity import CPU, STEPS, compare, forward_backward, resolve, trace
from tests.test_families import in_float64
from tests.test_model import (
    SMALL,
    TOLERANCE,
    build,
    differences_from,
    parameter_sizes,
    relative,
    section,
)
from titanlite import config, rope
from titanlite.build import meta_model
from titanlite.checkpoint.export import model_options
from titanlite.config.schema import Model, Parallelism, count_parameters, layer_parameters
from titanlite.init import init_weights
from titanlite.metrics.flops import flops_per_token
from titanlite.model import ScaledDotProductAttention
from titanlite.parallel import mesh
from titanlite.techniques import latent_attention
from titanlite.techniques import latent_attention_tensor as parallel
from titanlite.techniques.latent_attention import LatentAttention
from titanlite.tools.generate.cache import CachedAttention
from titanlite.tools.generate.folder import ModelFolder
from titanlite.tools.generate.generator import Generator
from titanlite.tools.generate.sampling import Sampling, choose
from titanlite.tools.parity.compare import differences, tolerances
from titanlite.tools.parity.reference import run_reference
from titanlite.tools.parity.shrink import shrink

MLA = {"kv_lora_rank": 24, "q_lora_rank": 40, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
SIZE: dict[str, Any] = {**SMALL, "n_kv_heads": 4, "norm_eps": 1e-6, "head_dim": -1, "mla": MLA}
YARN = {
    "rope_scaling_type": "yarn",
    "rope_scaling_factor": 40.0,
    "rope_original_seq_len": 16,
    "rope_attention_factor": 1.0,
}
"""With 8 rotated channels and theta 10,000, the four pairs have 2.5, 0.25, 0.025 and 0.0025 periods within 16 tokens:
the ramp from beta_fast to beta_slow (32 to 1) begins and ends at the first two pairs."""
VARIANTS: dict[str, dict[str, Any]] = {
    "latents of keys and of queries": {},
    "latents of keys only": {"mla": MLA | {"q_lora_rank": 0}},
    "values as wide as keys": {"mla": MLA | {"v_head_dim": 20}},
    "odd widths": {"mla": MLA | {"kv_lora_rank": 23, "qk_nope_head_dim": 11, "v_head_dim": 9}},
    "yarn": YARN | {"mla": MLA | {"mscale_all_dim": 1.0}},
    "yarn, no latents of queries": YARN | {"mla": MLA | {"mscale_all_dim": 0.7, "q_lora_rank": 0}},
    "yarn, factor on cos and sin": YARN | {"rope_attention_factor": 1.2, "mla": MLA | {"mscale_all_dim": 0.5}},
    "yarn, no factor on the scores": YARN,
}
EXPERTS = {
    "n_experts": 8,
    "n_experts_per_token": 3,
    "expert_dim": 16,
    "n_shared_experts": 2,
    "n_first_dense_layers": 1,
    "score_function": "sigmoid",
    "normalize_scores": True,
    "score_scaling": 2.5,
    "n_groups": 4,
    "n_groups_per_token": 2,
}


# transformers --------------------------------------------------------------------------------------------------------

MODULES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.router": "mlp.gate",
    "feed_forward.shared.w1": "mlp.shared_experts.gate_proj",
    "feed_forward.shared.w2": "mlp.shared_experts.down_proj",
    "feed_forward.shared.w3": "mlp.shared_experts.up_proj",
}


def in_transformers(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return parameters, or their gradients, under the names of transformers: w1 and w3 of experts are one there."""
    theirs = {}
    for name, value in parameters.items():
        prefix, module = "", name
        if name.startswith("layers."):
            _, layer, module = name.split(".", 2)
            prefix = f"model.layers.{layer}."
        if module == "feed_forward.experts.w1":
            value, name = torch.cat((value, parameters[name.removesuffix("w1") + "w3"]), 1), "mlp.experts.gate_up_proj"
        elif module == "feed_forward.experts.w2":
            name = "mlp.experts.down_proj"
        elif module == "feed_forward.experts.w3":
            continue
        else:
            name = f"{MODULES[module.removesuffix('.weight')]}.weight"
        theirs[prefix + name] = value
    return theirs


def deepseek_v3(size: dict[str, Any], weights: dict[str, Tensor], attention: str, dtype: torch.dtype) -> Any:
    """Return transformers' model of these options, with these weights of ours."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    model, mla, moe = section(size), section(size).mla, section(size).moe
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_scaling_factor > 1:
        rope |= {
            "rope_type": "yarn",
            "factor": model.rope_scaling_factor,
            "original_max_position_embeddings": model.rope_original_seq_len,
            "attention_factor": model.rope_attention_factor,
            "mscale_all_dim": mla.mscale_all_dim,
        }
    settings = DeepseekV3Config(
        hidden_size=model.dim,
        num_hidden_layers=model.n_layers,
        num_attention_heads=model.n_heads,
        num_key_value_heads=model.n_heads,
        intermediate_size=model.ffn_dim,
        vocab_size=model.vocab_size,
        rms_norm_eps=model.norm_eps,
        max_position_embeddings=size["max_seq_len"],
        rope_parameters=rope,
        q_lora_rank=mla.q_lora_rank or None,
        **{key: getattr(mla, key) for key in MLA if key != "q_lora_rank"},
        first_k_dense_replace=moe.n_first_dense_layers if moe.n_experts else model.n_layers,
        n_routed_experts=moe.n_experts or 8,
        num_experts_per_tok=moe.n_experts_per_token,
        moe_intermediate_size=model.expert_dim,
        n_shared_experts=moe.n_shared_experts,
        routed_scaling_factor=moe.score_scaling,
        norm_topk_prob=moe.normalize_scores,
        n_group=moe.n_groups,
        topk_group=moe.n_groups_per_token,
        attn_implementation=attention,
        experts_implementation="eager",
    )
    hf = DeepseekV3ForCausalLM(settings).to(dtype)
    missing, unexpected = hf.load_state_dict(in_transformers(weights), strict=False)
    assert not unexpected
    assert [name for name in missing if not name.endswith("e_score_correction_bias")] == []
    return hf


def differences_from_transformers(size: dict[str, Any], dtype: torch.dtype, attention: str) -> dict[str, float]:
    """Return the relative differences of logits and of every gradient."""
    llama = build(dtype, **{key: value for key, value in size.items() if key not in SMALL or SMALL[key] != value})
    hf = deepseek_v3(size, {name: p.detach() for name, p in llama.named_parameters()}, attention, dtype)
    if dtype == torch.float64:
        in_float64(hf, llama)
    return differences_from(llama, hf, in_transformers)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_gradients_equal_transformers(name):
    """In float64, transformers' norms and rotary table are replaced, as both are in float32 there."""
    actual = differences_from_transformers({**SIZE, **VARIANTS[name]}, torch.float64, "sdpa")
    assert {key: d for key, d in actual.items() if not d < TOLERANCE} == {}


@pytest.mark.parametrize("name", ["latents of keys only", "yarn", "yarn, factor on cos and sin"])
def test_unchanged_transformers_in_float32(name):
    """TOLERANCE for the 2^29 times larger rounding of float32, as in test_families.py."""
    actual = differences_from_transformers({**SIZE, **VARIANTS[name]}, torch.float32, "eager")
    assert {key: d for key, d in actual.items() if not d < TOLERANCE * 2**29} == {}


def test_a_small_deepseek_v3_with_experts_equals_transformers():
    """Of all families, transformers computes the router in float32 only."""
    size = {**SIZE, **VARIANTS["yarn"], "moe": EXPERTS}
    actual = differences_from_transformers(size, torch.float32, "sdpa")
    assert len([name for name in actual if ".experts." in name]) == 4
    assert {key: d for key, d in actual.items() if not d < TOLERANCE * 2**29} == {}


# Layouts -------------------------------------------------------------------------------------------------------------

LATENT: dict[str, Any] = {
    "model__n_kv_heads": 8,
    **{f"model__{key}": value for key, value in YARN.items()},
    "model__mla__kv_lora_rank": 12,
    "model__mla__q_lora_rank": 20,
    "model__mla__qk_nope_head_dim": 6,
    "model__mla__qk_rope_head_dim": 4,
    "model__mla__v_head_dim": 5,
    "model__mla__mscale_all_dim": 1.0,
}
KEYS_ONLY = {"model__mla__q_lora_rank": 0}
WITH_EXPERTS = {f"model__moe__{key}": value for key, value in EXPERTS.items()}
OF_V2 = WITH_EXPERTS | {
    **{
        "model__moe__score_function": "softmax",
        "model__moe__normalize_scores": False,
        "model__moe__group_score": "max",
    },
    **{"model__moe__score_scaling": 16.0, "model__mla__mscale_all_dim": 0.707, "model__mla__norm_eps": 1e-3},
}
EP = {"expert_parallel_degree": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "shard": SHARD,
    "tp": Case(TP, always=True),
    "tp, no latents of queries": TP | KEYS_ONLY,
    "pp": Case(PP, always=True),
    "cp x tp": CP | TP,
    "ulysses, document mask": ULYSSES | DOCUMENTS,
    "selective AC, tp": SELECTIVE | TP,
    "experts, shard x tp, ep": SHARD | TP | EP | WITH_EXPERTS,
}
LAYOUTS |= {
    "cp": CP,
    "ulysses": ULYSSES,
    "ring 2 x ulysses 2": USP,
    "cp, math backend": CP | {"training__attention_backend": "math"},
    "cp, window": CP | {"model__sliding_window": 5},
    "document mask, cp x tp": DOCUMENTS | CP | TP,
    "shard x tp": SHARD | TP,
    "replicate x tp": REPLICATE | TP,
    "pp x tp": PP | TP,
    "pp x cp x tp, no latents of queries": PP | CP | TP | KEYS_ONLY,
    "zero-bubble": schedule("InterleavedZeroBubble"),
    "zero-bubble, tp": schedule("InterleavedZeroBubble") | TP | ONE_ACCUMULATION_STEP,
    "full AC, tp": FULL | TP,
    "full AC, cp": FULL | CP,
    "selective AC, every second mm, tp": EVERY_SECOND_MM | TP,
    "compiled, shard": COMPILED | SHARD,
    "compiled, tp": COMPILED | TP,
    "compiled, tp, no latents of queries": COMPILED | TP | KEYS_ONLY,
    "compiled, selective AC, cp x tp": COMPILED | SELECTIVE | CP | TP,
    "tied, tp": TIED | TP,
    "CPU offload, tp": OFFLOAD | TP,
    "experts, tp": TP | WITH_EXPERTS,
    "experts, compiled, selective AC, shard x tp, ep": COMPILED | SELECTIVE | SHARD | TP | EP | WITH_EXPERTS,
    "experts, pp x shard, ep": PP | SHARD | EP | WITH_EXPERTS,
    "DeepSeek-V2, shard x tp, ep": SHARD | TP | EP | OF_V2,
    "DeepSeek-V2, pp x cp x tp": PP | CP | TP | OF_V2,
    "DeepSeek-V2, shard, ep": SHARD | EP | OF_V2,
}
N_WEIGHTS = {True: 7, False: 5}
"""Of a layer's attention, with and without a latent of queries."""


@cases("name", LAYOUTS)
def test_layout_matches_reference(ranks, tmp_path, name):
    layout = LATENT | LAYOUTS[name]
    actual = compare(ranks, tmp_path, world_size(layout), with_batches(layout))
    assert {name: d for name, d in actual.items() if d > LAYOUT_TOLERANCE} == {}
    assert all(d == 0 for name, d in actual.items() if name.startswith("initial weight")), "not bit for bit"
    weights = [name for name in actual if name.startswith("final weight layers.1.attention.")]
    assert len(weights) == N_WEIGHTS[layout["model__mla__q_lora_rank"] > 0]
    assert len([name for name in actual if name.startswith("step 3 gradient layers.1.attention.")]) == len(weights)


class Widths(TorchDispatchMode):
    """This mode counts all-gathers and reduce-scatters of activations by the number of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[tuple[str, int]]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name, *_ = str(function).split(".")
        if namespace == "_c10d_functional" and name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            self.counts[name.removesuffix("_tensor").removesuffix("_into"), args[0].shape[-1]] += 1
        return function(*args, **(kwargs or {}))


def widths(job: config.Config) -> dict[tuple[str, int], int]:
    watch = Widths()
    forward_backward(job, watch)
    return watch.counts


def test_tensor_parallel_gathers_latents(ranks, tmp_path):
    """The latents of queries, 20 channels, of keys and values, 12, and rotated keys, 4, are gathered at once instead of
    the residual stream's 32, and so are the sums of their gradients scattered. Without a latent of queries, the
    residual stream is gathered as well."""
    one_layer = ONE_ACCUMULATION_STEP | TP | {"model__n_layers": 1}
    plain, latents, keys_only = (
        Counter(ranks(2).run(widths, job=resolve(tmp_path, 2, with_batches(one_layer | options)))[0])
        for options in ({}, LATENT, LATENT | KEYS_ONLY)
    )
    wide, narrow, narrower = (Counter({("all_gather", n): 1, ("reduce_scatter", n): 1}) for n in (32, 36, 16))
    assert latents == plain - wide + narrow
    assert keys_only == plain + narrower


# Injected bugs -------------------------------------------------------------------------------------------------------


def _rotated_keys_are_not_rotated() -> Any:
    real = latent_attention.apply_rotary_emb
    return mock.patch.object(
        latent_attention, "apply_rotary_emb", lambda x, rope: x if x.shape[2] == 1 else real(x, rope)
    )


def _rotated_keys_differ_between_heads() -> Any:
    real = latent_attention.apply_rotary_emb

    def per_head(x_BTHR: Tensor, rope: Tensor) -> Tensor:
        rotated = real(x_BTHR, rope)
        return torch.cat([rotated.roll(head, -1) for head in range(4)], 2) if x_BTHR.shape[2] == 1 else rotated

    return mock.patch.object(latent_attention, "apply_rotary_emb", per_head)


def _pairs_are_halves_of_the_channels() -> Any:
    real = latent_attention.apply_rotary_emb

    def halves(x_BTHR: Tensor, rope: Tensor) -> Tensor:
        return real(x_BTHR.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2), rope)

    return mock.patch.object(latent_attention, "apply_rotary_emb", halves)


def _factor_on_the_scores_is_missing() -> Any:
    return mock.patch.object(latent_attention, "query_scale", return_value=1.0)


def _rotary_embedding_of_all_channels() -> Any:
    """The frequencies are those of the full head_dim, of which the first ones are taken."""
    real = rope.rope_frequencies

    def of_head_dim(options: Model, length: int) -> Tensor:
        plain = options.model_copy(update={"mla": options.mla.model_copy(update={"kv_lora_rank": 0})})
        return real(plain, length)[: options.mla.qk_rope_head_dim // 2]

    return mock.patch.object(rope, "rope_frequencies", of_head_dim)


@pytest.mark.parametrize(
    "bug",
    [
        _rotated_keys_are_not_rotated,
        _rotated_keys_differ_between_heads,
        _pairs_are_halves_of_the_channels,
        _factor_on_the_scores_is_missing,
        _rotary_embedding_of_all_channels,
    ],
    ids=lambda bug: bug.__name__,
)
def test_a_bug_in_the_model_fails(bug: Callable[[], Any]):
    """In float32, where transformers has a rotary table of its own."""
    with bug():
        actual = differences_from_transformers({**SIZE, **VARIANTS["yarn"]}, torch.float32, "sdpa")
    assert actual["logits"] > 10 * TOLERANCE * 2**29


class LocalWeight(SequenceParallel):
    """This style computes a linear layer from a replicated weight whose gradient is taken to be the same everywhere."""

    def _apply(self, module: nn.Module, mesh: Any) -> nn.Module:
        module = super()._apply(module, mesh)

        def forward(x_ND: DTensor) -> DTensor:
            y_NL = F.linear(x_ND.to_local(), module.weight.to_local())
            return DTensor.from_local(y_NL, mesh, x_ND.placements)

        module.forward = forward
        return module


def _gradient_of_wkv_a_is_not_summed(rank: int) -> Any:
    return mock.patch.dict(parallel.PLAN, {"wkv_a": LocalWeight(sequence_dim=0)})


def _gradient_of_rotated_keys_is_not_summed(rank: int) -> Any:
    return mock.patch.object(parallel, "Partial", Replicate)


def _latents_of_another_order(rank: int) -> Any:
    """Each rank takes the gathered tokens from its own on."""
    real = parallel._gathered

    def rolled(latents: Any, x_ND: Tensor) -> list[Tensor]:
        own = rank * len(x_ND) // 2  # torch 2.11 has no roll of DTensors
        return [torch.cat((each[own:], each[:own])) for each in real(latents, x_ND)]

    return mock.patch.object(parallel, "_gathered", rolled)


def _scale_is_missing(rank: int) -> Any:
    return _factor_on_the_scores_is_missing()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("bug", "layout", "first"),
    [
        (_gradient_of_wkv_a_is_not_summed, TP, "step 1 norm"),
        (_gradient_of_rotated_keys_is_not_summed, TP, "step 1 norm"),
        (_latents_of_another_order, TP, "step 1 loss"),
        (_scale_is_missing, SHARD, "step 1 loss"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_injected_bug_fails(ranks, tmp_path, bug, layout, first):
    actual = compare(ranks, tmp_path, world_size(layout), with_batches(LATENT | layout), bug)
    assert next(name for name, d in actual.items() if d > 10 * LAYOUT_TOLERANCE) == first


# Float8 --------------------------------------------------------------------------------------------------------------

LATENT_FLOAT8 = FLOAT8 | {
    "model__mla__kv_lora_rank": 32,
    "model__mla__q_lora_rank": 32,
    "model__mla__qk_nope_head_dim": 16,
    "model__mla__qk_rope_head_dim": 32,
    "model__mla__v_head_dim": 16,
}
"""All sides of weights are multiples of 16 on two ranks: wkv_a has 64 rows."""


LATENT_BLOCKS = LATENT_FLOAT8 | {
    "model__dim": 64,
    "model__ffn_dim": 128,
    "model__mla__kv_lora_rank": 64,
    "model__mla__q_lora_rank": 64,
    "model__mla__qk_rope_head_dim": 64,
    "model__mla__v_head_dim": 32,
    "training__seq_len": 128,
}
"""And of 32, for MXFP8: wkv_a has 128 rows."""


LATENT_INT8 = {key: value for key, value in LATENT_FLOAT8.items() if "float8" not in key} | {"int8__enable": True}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "layout"),
    [
        (LATENT_FLOAT8 | {"float8__recipe": "tensorwise"}, TP),
        (LATENT_FLOAT8 | {"float8__recipe": "rowwise"}, TP),
        (LATENT_FLOAT8 | {"float8__recipe": "tensorwise"}, SHARD),
        (LATENT_FLOAT8 | {"float8__recipe": "rowwise_with_gw_hp"}, CP | TP),
        (LATENT_BLOCKS | {"float8__recipe": "mxfp8"}, TP),
        (LATENT_INT8, TP),
    ],
    ids=["tensorwise, tp", "rowwise, tp", "tensorwise, shard", "rowwise_with_gw_hp, cp x tp", "mxfp8, tp", "int8, tp"],
)
def test_float8_layout_matches_reference(ranks, tmp_path, options, layout):
    """As in test_layouts.py: within a few times the reference's own rounding, and as far as it from full precision."""
    options = options | layout | ONE_ACCUMULATION_STEP
    n = world_size(options)
    job = resolve(tmp_path, n, with_batches(options))
    reference = run_reference(job, CPU, steps=STEPS)
    allowed = tolerances(job, reference, CPU, steps=STEPS)
    full_precision = run_reference(job.replace(**FULL_PRECISION), CPU, steps=STEPS)
    actual, *_ = ranks(n).run(trace, job=job)
    assert {name: (d, allowed[name]) for name, d in differences(reference, actual).items() if d > allowed[name]} == {}
    by_option = largest(differences(full_precision, reference))
    assert 0.2 * by_option < largest(differences(full_precision, actual)) < 5 * by_option
    if job.float8.recipe == "mxfp8":
        assert max(differences(reference, actual).values()) < LAYOUT_TOLERANCE


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (LATENT_FLOAT8, "Float8Linear"),
        (LATENT_BLOCKS | {"float8__recipe": "mxfp8"}, "LowPrecisionLinear"),
        (LATENT_INT8, "LowPrecisionLinear"),
    ],
    ids=["float8", "mxfp8", "int8"],
)
def test_low_precision_converts_every_linear_layer(tmp_path, options, kind):
    from titanlite.techniques.low_precision import convert_linear_layers

    job = resolve(tmp_path, 2, with_batches(options | TP))
    llama = meta_model(job)
    convert_linear_layers(llama, job.float8, job.int8, tensor_parallel_degree=2, device=CPU)
    attention = llama.layers["0"].attention
    converted = [name for name, module in attention.named_children() if type(module).__name__ == kind]
    assert converted == ["wq_a", "wq_b", "wkv_a", "wkv_b", "wo"]


# Generation ----------------------------------------------------------------------------------------------------------

PROMPTS = [[5, 7, 9], [*range(3, 20)], [4, 8, 4, 8, 1, 30, 12, 44, 70]]
NEW = 8


def generator(dtype: torch.dtype, mesh: Any = None, **options: Any) -> Generator:
    """Return a generator of the model of these options, with weights that do not depend on the layout."""
    model = section({**SIZE, **VARIANTS["yarn"], **options})
    folder = ModelFolder(Path("none"), model, dtype, False, {})
    longest = max(map(len, PROMPTS))
    arguments = {"batch_size": 3, "longest": longest, "max_new_tokens": NEW}
    with mock.patch.object(ModelFolder, "load", lambda self, llama: draw_larger_weights(llama)):
        return Generator(folder, dtype=dtype, device=CPU, mesh=mesh, **arguments)


@torch.no_grad()
def draw_larger_weights(llama: Any) -> None:
    init_weights(llama, seed=3, n_layers=3, device=CPU)
    for parameter in llama.parameters():
        parameter.mul_(8 if parameter.dim() > 1 else 1)


def generate(on: Generator) -> tuple[list[list[int]], list[Tensor]]:
    """Return the texts, and the logits of each of their tokens for all prompts."""
    seen = []

    def record(logits: Tensor, batch: range) -> list[int]:
        seen.append(logits.clone())
        return choose(logits, Sampling(), [])

    return list(on.generate(PROMPTS, set(), record)), seen


@pytest.mark.parametrize("q_lora_rank", [40, 0])
def test_logits_with_a_cache_are_those_of_the_full_model(q_lora_rank: int):
    mla = MLA | {"q_lora_rank": q_lora_rank, "mscale_all_dim": 1.0}
    on = generator(torch.float64, mla=mla)
    texts, seen = generate(on)
    full = empty_model(section({**SIZE, **YARN, "mla": mla}), torch.float64)
    draw_larger_weights(full)
    full.rope = on.model.rope  # a longer one
    for sequence, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        with torch.no_grad():
            logits = full(torch.tensor([[*prompt, *text[:-1]]]))[0, len(prompt) - 1 :]
        actual = torch.stack([each[sequence] for each in seen])
        assert relative(actual, logits) < 1e-13
        assert torch.equal(actual.argmax(-1), torch.tensor(text))
    assert len(set(texts[0] + texts[1] + texts[2])) > 5, "the texts are of one token"


def test_the_cache_has_expanded_keys_and_values():
    caches = [module for module in generator(torch.float32).model.modules() if isinstance(module, CachedAttention)]
    assert [cache.k_BGSK.shape for cache in caches] == [(3, 4, 17 + NEW, 20)] * 3
    assert [cache.v_BGSK.shape for cache in caches] == [(3, 4, 17 + NEW, 20)] * 3


def generate_on_a_rank() -> list[list[int]]:
    parallelism = Parallelism(tensor_parallel_degree=2, data_parallel_shard_degree=1)
    return generate(generator(torch.float64, mesh.build_layout(parallelism, CPU).mesh["tp"]))[0]


def test_tensor_parallel_generates_the_same(ranks):
    first, second = ranks(2).run(generate_on_a_rank)
    assert first == second == generate(generator(torch.float64))[0]


# Options -------------------------------------------------------------------------------------------------------------

RANK, Q_RANK, NOPE, ROPE, VALUE, MSCALE, EPS = (
    f"model.mla.{key}"
    for key in (
        "kv_lora_rank",
        "q_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "mscale_all_dim",
        "norm_eps",
    )
)
ON = {RANK: 8, "model.n_kv_heads": 16}
REJECTED = [
    ({RANK: 8}, {"model.n_kv_heads": "expected model.n_heads = 16; latent attention has keys and values of every"}),
    ({RANK: 8, "model.n_kv_heads": 3}, {"model.n_kv_heads": "expected model.n_heads = 16"}),
    ({**ON, "model.head_dim": 16}, {"model.head_dim": "the sum of model.mla.qk_nope_head_dim and"}),
    ({**ON, "model.head_dim": 15}, {"model.head_dim": "model.mla.qk_rope_head_dim, 192; remove it"}),
    ({**ON, ROPE: 7}, {ROPE: "expected an even number"}),
    ({**ON, NOPE: 8, ROPE: 4, VALUE: 13}, {VALUE: "expected at most 12, the channels of a head of queries"}),
    ({**ON, "model.attention_bias": "qkv"}, {"model.attention_bias": "latent attention has no biases"}),
    ({**ON, "model.qk_norm": True}, {"model.qk_norm": "latent attention has norms of its latents"}),
    ({**ON, MSCALE: 1.0}, {MSCALE: 'scaled by "yarn", and it is "llama3", by 1.0; set 0'}),
    ({**ON, MSCALE: 1.0, "model.rope_scaling_factor": 8.0}, {MSCALE: 'it is "llama3", by 8.0; set 0'}),
    ({**ON, "parallelism.tensor_parallel_degree": 32}, {"parallelism.tensor_parallel_degree": (
        "divisor of model.n_heads = 16", "divisor of model.n_kv_heads = 16", "divisor of model.vocab_size")}),
    ({RANK: -1}, {RANK: "expected an integer >= 0"}),
    ({**ON, NOPE: 0}, {NOPE: "expected an integer >= 1"}),
    ({**ON, MSCALE: -1.0}, {MSCALE: "expected a finite number >= 0"}),
    *(
        ({key: 2}, {key: "read only when model.mla.kv_lora_rank is above 0; set that, or remove it"})
        for key in (Q_RANK, NOPE, ROPE, VALUE, MSCALE, EPS)
    ),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "rejected"), REJECTED, ids=str)
def test_rejected(tmp_path: Path, settings: dict[str, Any], rejected: dict[str, Any]):
    assert_rejected(lambda: load(tmp_path, settings), settings, rejected)


@pytest.mark.parametrize(
    "settings",
    [
        ON,
        {**ON, "model.dim": 100},  # no multiple of the heads
        {**ON, NOPE: 7, ROPE: 2, VALUE: 9},
        {**ON, "model.head_dim": 192},
        {"model.flavor": "deepseek_v3_671b"},
        {"model.flavor": "qwen3_8b", "model.qk_norm": False, RANK: 8, "model.n_kv_heads": 32},  # a size with head_dim
        {"model.flavor": "deepseek_v3_671b", RANK: 0, "model.head_dim": 56},
    ],
    ids=str,
)
def test_accepted_and_the_resolved_config_loads_again(tmp_path: Path, settings: dict[str, Any]):
    loaded = load(tmp_path, settings)
    resolved = config.check(loaded, on(1))
    assert load(tmp_path, resolved.toml()).config == resolved


def test_head_dim_is_that_of_queries_and_keys(tmp_path: Path):
    assert load(tmp_path, ON).config.model.head_dim == 192
    assert load(tmp_path, {**ON, f"--{NOPE}": 70, "model.dim": 512}).config.model.head_dim == 134
    assert load(tmp_path, {}).config.model.head_dim == 16


@pytest.mark.parametrize(
    ("flavor", "parameters", "billions"),
    [
        ("deepseek_v3_671b", 671_026_419_200, 37.55),  # of which the paper says 37 billion
        ("moonlight_16b_a3b", 15_960_110_208, 2.91),  # arXiv:2502.16982: 16 and 3 billion
        ("kimi_k2_1t", 1_026_408_232_448, 32.86),  # arXiv:2507.20534: 1.04 trillion and 32.6 billion
        ("deepseek_v2_lite", 15_706_484_224, 2.66),  # arXiv:2405.04434: 15.7 and 2.4 billion, without the embedding
        ("deepseek_v2_236b", 235_741_434_880, 21.38),  # arXiv:2405.04434: 236 and 21 billion
    ],
)
def test_named_size_has_the_published_options_and_weights(flavor, parameters, billions):
    """huggingface.co/deepseek-ai and moonshotai, without modules for multi-token prediction. Biases that balance the
    experts of a layer are among the published parameters."""
    size = Model(flavor=flavor)
    sizes = parameter_sizes(size)
    biases = sum(size.has_experts(layer) for layer in range(size.n_layers)) * size.moe.n_experts * size.moe.balance_bias
    assert sum(sizes.values()) == count_parameters(size) == parameters - biases
    attention = 6 * size.n_layers * size.n_heads * (192 + 128) * 1000
    active = (flops_per_token(sizes, size, 1000) - attention) / 6 + size.dim * size.vocab_size
    assert active == pytest.approx(billions * 1e9, rel=0.002)


@pytest.mark.parametrize("q_lora_rank", [40, 0])
def test_parameters_of_a_layer_are_counted(q_lora_rank: int):
    size = section({**SIZE, "mla": MLA | {"q_lora_rank": q_lora_rank}})
    assert layer_parameters(size, 1) == sum(n for name, n in parameter_sizes(size).items() if "layers.1." in name)


def test_a_checkpoint_has_the_options_and_a_plain_one_has_none():
    plain, latent = section({**SMALL}), section({**SIZE, **VARIANTS["yarn"]})
    of_v3 = section({**SIZE, "moe": EXPERTS})
    of_v2 = section({**SIZE, "mla": MLA | {"norm_eps": 1e-3}, "moe": {**EXPERTS, "group_score": "max"}})
    assert not [key for key in plain.identity() if "lora" in key or key.startswith("mla")]
    assert not {"mla.norm_eps", "moe.group_score"} & of_v3.identity().keys()  # as before there were these options
    for options in (plain, latent, of_v3, of_v2):
        again = model_options(Path("step-1"), {"identity": options.identity()})
        assert again == options.model_copy(update={"flavor": again.flavor})


def test_a_parity_test_shrinks_the_latents(tmp_path: Path):
    loaded = load(tmp_path, {"model.flavor": "deepseek_v3_671b", "parallelism.tensor_parallel_degree": 2})
    loaded = dataclasses.replace(loaded, config=config.check(loaded, on(4)))
    smaller, _ = shrink(loaded, "float64")
    checked = config.check(smaller, on(4))
    assert count_parameters(checked.model) < 1e6
    assert checked.model.mla.q_lora_rank > 0
    assert checked.model.mla.v_head_dim < checked.model.mla.qk_head_dim


# The model's file ----------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_plain_llama_imports_nothing_of_it():
    assert not [name for name in modules_of_a_plain_llama() if "latent_attention" in name]


def test_initial_weights():
    llama = build(torch.float32, **SIZE)
    init_weights(llama, seed=1, n_layers=3, device=CPU)
    attention = llama.layers["2"].attention
    assert isinstance(attention, LatentAttention)
    assert isinstance(attention.inner_attention, ScaledDotProductAttention)
    for name in ("wq_a", "wq_b", "wkv_a", "wkv_b"):
        assert getattr(attention, name).weight.std().item() == pytest.approx(0.02, rel=0.1), name
    assert attention.wo.weight.std().item() == pytest.approx(0.02 / 6**0.5, rel=0.1)
    assert (attention.q_norm.weight == 1).all()
    assert (attention.kv_norm.weight == 1).all()
