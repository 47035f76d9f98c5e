"""gpt-oss: the model against transformers, and every layout with attention sinks and experts with biases against one
process in float64."""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.cases import Case, cases
from tests.helpers.config import assert_rejected, load, modules_of_a_plain_llama, on
from tests.parallel.test_layouts import (
    COMPILED,
    CP,
    DOCUMENTS,
    FULL,
    OFFLOAD,
    PP,
    REPLICATE,
    SELECTIVE,
    SHARD,
    TP,
    ULYSSES,
    USP,
    schedule,
    with_batches,
    world_size,
)
from tests.parallel.test_layouts import TOLERANCE as LAYOUT_TOLERANCE
from tests.parallel.test_parity import CPU, compare, resolve
from tests.test_model import (
    SMALL,
    TOLERANCE,
    build,
    differences_from,
    on_meta,
    parameter_sizes,
    relative,
    section,
)
from titanlite import config
from titanlite.build import optimizer_for
from titanlite.config.schema import Config, Model, count_parameters, layer_parameters
from titanlite.hf.names import to_hf
from titanlite.init import init_weights
from titanlite.metrics.flops import flops_per_token
from titanlite.model import Documents
from titanlite.parallel import tiled_attention
from titanlite.parallel.tiled_attention import TiledAttention
from titanlite.techniques.attention_sinks import SinkAttention
from titanlite.techniques.moe import operators
from titanlite.techniques.moe import parallel as moe_parallel
from titanlite.tools.parity.compare import differences
from titanlite.tools.parity.reference import run_reference
from titanlite.tools.parity.shrink import shrink

YARN = {"rope_scaling_factor": 8.0, "rope_scaling_type": "yarn", "rope_original_seq_len": 64, "rope_beta_fast": 8.0}
MOE: dict[str, Any] = {
    **{"n_experts": 6, "n_experts_per_token": 3, "expert_dim": 40, "normalize_scores": True},
    **{"expert_bias": True, "router_bias": True, "swiglu_limit": 0.7},
}
SIZE: dict[str, Any] = {
    **SMALL,
    **YARN,
    **{"head_dim": 24, "attention_bias": "all", "attention_sinks": True, "rope_yarn_truncate": False, "moe": MOE},
    "layer_pattern": [{"sliding_window": 7}, {"sliding_window": 0}],
}
"""With weights of tests/test_model.py, a tenth of the gates is above the limit and a fifth of the ups beyond it."""


# transformers --------------------------------------------------------------------------------------------------------

MODULES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.inner_attention": "self_attn",
    "feed_forward.router": "mlp.router",
}


def in_transformers(parameters: dict[str, Tensor], size: dict[str, Any]) -> dict[str, Tensor]:
    """Return parameters, or their gradients, under the names of transformers and in its order."""
    theirs = {}
    for name, value in parameters.items():
        prefix, module = "", name
        if name.startswith("layers."):
            _, layer, module = name.split(".", 2)
            prefix = f"model.layers.{layer}."
        if module.startswith("feed_forward.experts."):
            kind = module.removeprefix("feed_forward.experts.")
            if kind.startswith("w3"):
                continue
            if kind.startswith("w1"):  # the columns of gates and ups alternate
                value = torch.stack((value, parameters[name.replace("w1", "w3")]), 2).flatten(1, 2)
            value = value if kind.endswith("bias") else value.transpose(1, 2)
            module = kind.replace("w1", "gate_up_proj").replace("w2", "down_proj")
            theirs[f"{prefix}mlp.experts.{module}"] = value
        else:
            module, _, kind = module.rpartition(".")
            theirs[f"{prefix}{MODULES[module]}.{kind}"] = to_hf([name], [value], section(size))
    return theirs


def gpt_oss(size: dict[str, Any], weights: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """Return transformers' model of these options, with these weights of ours."""
    from transformers import GptOssConfig, GptOssForCausalLM

    model = section(size)
    rope = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_scaling_factor > 1:
        rope |= {
            **{"rope_type": "yarn", "factor": model.rope_scaling_factor, "beta_fast": model.rope_beta_fast},
            **{"beta_slow": model.rope_beta_slow, "truncate": model.rope_yarn_truncate},
            "original_max_position_embeddings": model.rope_original_seq_len,
        }
    settings = GptOssConfig(
        hidden_size=model.dim,
        num_hidden_layers=model.n_layers,
        num_attention_heads=model.n_heads,
        num_key_value_heads=model.n_kv_heads,
        head_dim=model.head_dim,
        intermediate_size=model.expert_dim,
        vocab_size=model.vocab_size,
        rms_norm_eps=model.norm_eps,
        max_position_embeddings=size["max_seq_len"],
        rope_parameters=rope,
        num_local_experts=model.moe.n_experts,
        num_experts_per_tok=model.moe.n_experts_per_token,
        swiglu_limit=model.moe.swiglu_limit,
        swiglu_alpha=model.moe.swiglu_alpha,
        sliding_window=7,
        layer_types=["sliding_attention" if layer.sliding_window else "full_attention" for layer in model.of_layers()],
        attn_implementation="eager",
        experts_implementation="eager",
    )
    hf = GptOssForCausalLM(settings).to(dtype)
    hf.load_state_dict(in_transformers(weights, size))
    return hf


def in_float64(hf: Any, llama: nn.Module) -> None:
    """Have transformers compute its norms in float64, and take our rotary table: both are in float32 there."""

    def norm(module: Any, x: Tensor) -> Tensor:
        return module.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon))

    norms = [module for module in hf.modules() if type(module).__name__ == "GptOssRMSNorm"]
    assert len(norms) == 7
    for module in norms:
        module.forward = functools.partial(norm, module)
    hf.model.rotary_emb.forward = lambda x, position_ids: llama.rope[0, position_ids].unbind(-1)


def differences_from_transformers(size: dict[str, Any], dtype: torch.dtype) -> dict[str, float]:
    """Return the relative differences of logits and of every gradient."""
    llama = build(dtype, **{key: value for key, value in size.items() if key not in SMALL or SMALL[key] != value})
    hf = gpt_oss(size, {name: p.detach() for name, p in llama.named_parameters()}, dtype)
    if dtype == torch.float64:
        in_float64(hf, llama)
    return differences_from(llama, hf, lambda own: in_transformers(own, size))


VARIANTS: dict[str, dict[str, Any]] = {
    "as released": {},
    "rounded ramp of YaRN": {"rope_yarn_truncate": True},
    "no scaling": {"rope_scaling_factor": 1.0, "rope_yarn_truncate": True},
    "no windows, another alpha": {"layer_pattern": [], "moe": MOE | {"swiglu_alpha": 1.1}},
    "bounds that few reach": {"moe": MOE | {"swiglu_limit": 7.0}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_gradients_equal_transformers(name):
    actual = differences_from_transformers({**SIZE, **VARIANTS[name]}, torch.float64)
    assert {key: d for key, d in actual.items() if not d < TOLERANCE} == {}
    assert len([key for key in actual if key.endswith("sinks")]) == 3


@pytest.mark.parametrize("name", ["as released", pytest.param("rounded ramp of YaRN", marks=pytest.mark.nightly)])
def test_unchanged_transformers_in_float32(name):
    """TOLERANCE for the 2^29 times larger rounding of float32, as in test_families.py."""
    actual = differences_from_transformers({**SIZE, **VARIANTS[name]}, torch.float32)
    assert {key: d for key, d in actual.items() if not d < TOLERANCE * 2**29} == {}


# Attention sinks -----------------------------------------------------------------------------------------------------

HEADS, LENGTH = 6, 23


def by_definition(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, allowed: Tensor) -> Tensor:
    """Return softmax attention whose sum of exponentials has that of the sink as one more term."""
    k, v = (x.repeat_interleave(2, dim=2) for x in (k, v))
    scores = torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(q.shape[-1])
    weights = scores.exp().where(allowed, 0)
    weights = weights / (weights.sum(-1, keepdim=True) + sinks.exp()[:, None, None])
    return torch.einsum("bhts,bshk->bthk", weights, v)


def draw_attention(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return q, k, v, sinks, and weights of the sum of outputs."""
    draws = torch.Generator().manual_seed(0)
    shapes = [(2, LENGTH, n, 8) for n in (HEADS, 3, 3)] + [(HEADS,), (2, LENGTH, HEADS, 8)]
    tensors = [torch.randn(shape, dtype=torch.float64, generator=draws).to(dtype) for shape in shapes]
    return *(tensor.requires_grad_() for tensor in tensors[:4]), tensors[4]


def outputs_and_gradients(attend: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
    *inputs, weighting = draw_attention(dtype)
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad((out * weighting).sum(), inputs)]


def module_with(module: nn.Module, sinks: Tensor) -> nn.Module:
    """Have a module compute with a tensor for sinks, so that its gradient can be asked for."""
    del module.sinks
    module.sinks = sinks
    return module


def attention_of(kind: str, window: int) -> nn.Module:
    """Return attention with sinks: by a backend, or as it is on one device."""
    if kind == "one device":
        return SinkAttention(Model(n_heads=HEADS, sliding_window=window))
    return TiledAttention(None, None, kind, window, nn.Parameter(torch.empty(HEADS)))


def masks(window: int, begins: list[int]) -> tuple[Tensor, Documents | None]:
    """Return which tokens attend to which, and the documents that begin at these tokens."""
    t = torch.arange(LENGTH)
    document = torch.bucketize(t, torch.tensor(begins), right=True)
    distance = t[:, None] - t
    allowed = (distance >= 0) & (distance < (window or LENGTH)) & (document[:, None] == document)
    documents = Documents((t - torch.tensor(begins)[document - 1]).expand(2, -1)) if len(begins) > 1 else None
    return allowed, documents


@pytest.mark.parametrize("begins", [[0], [0, 3, 4, 9]], ids=["one document", "documents"])
@pytest.mark.parametrize("window", [0, 5, LENGTH + 1])
@pytest.mark.parametrize("kind", ["one device", "cpu", "math"])
def test_attention_is_its_definition(kind, window, begins):
    allowed, documents = masks(window, begins)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return module_with(attention_of(kind, window), sinks)(q, k, v, documents)

    actual = outputs_and_gradients(attend, torch.float64)
    expected = outputs_and_gradients(functools.partial(by_definition, allowed=allowed), torch.float64)
    for one, other in zip(actual, expected, strict=True):
        assert relative(one, other) < 1e-13


def test_a_sink_far_below_all_scores_is_none():
    q, k, v, *_ = draw_attention(torch.float64)
    out = module_with(attention_of("cpu", 0), torch.full((HEADS,), -1e4, dtype=torch.float64))(q, k, v)
    assert torch.equal(out, TiledAttention(None, None, "cpu")(q, k, v))


@pytest.mark.parametrize("kind", ["one device", "cpu", "math"])
def test_bfloat16_is_as_exact_as_a_mask(kind):
    """A few roundings more than of the definition with inputs that are rounded."""
    exact = outputs_and_gradients(functools.partial(by_definition, allowed=masks(0, [0])[0]), torch.float64)
    rounded = outputs_and_gradients(
        lambda *inputs: module_with(attention_of(kind, 0), inputs[3])(*inputs[:3]), torch.bfloat16
    )
    for one, other in zip(rounded, exact, strict=True):
        assert relative(one.double(), other) < 2 * 2**-8 * 4


@pytest.mark.parametrize("window", [0, 5])
def test_operator(window):
    """Run torch's own checks of schema, fake tensors, autograd and functionalization."""
    q, k, v, sinks, _ = draw_attention(torch.float64)
    torch.library.opcheck(tiled_attention._attention, (q, k, v, None, sinks, "", "", "cpu", window))


# Experts -------------------------------------------------------------------------------------------------------------

CLAMP = 0.4, 1.7


def draw_rows(n: int) -> list[Tensor]:
    """Return gates, ups, scores, and a gradient; some gates and ups are beyond the bounds, and one at each of them."""
    draws = torch.Generator().manual_seed(n)
    gate, up, gradient = (torch.randn(n, 8, dtype=torch.float64, generator=draws) for _ in range(3))
    if n:
        gate[0, 0] = up[0, 1] = CLAMP[0]
        up[0, 2] = -CLAMP[0]
    return [gate, up, torch.rand(n, dtype=torch.float64, generator=draws), gradient]


def test_the_backward_of_bounded_swiglu_is_its_gradient():
    *arguments, gradient = draw_rows(6)
    arguments = [each.requires_grad_() for each in arguments]
    out = operators.swiglu(*arguments, *CLAMP)
    expected = *torch.autograd.grad(out, arguments, gradient), out
    actual = operators.swiglu_backward(gradient, *arguments, *CLAMP)
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_compiled_operators_are_the_eager_ones(backend):
    compiled = operators.compiled(backend)
    for n in (6, 7, 0, 1):
        gate, up, scores, gradient = draw_rows(n)
        for name, arguments in (("swiglu", (gate, up, scores)), ("swiglu_backward", (gradient, gate, up, scores))):
            actual, expected = (getattr(each, name)(*arguments, *CLAMP) for each in (compiled, operators.EAGER))
            torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


# Initial weights -----------------------------------------------------------------------------------------------------


def test_biases_and_sinks_begin_at_zero_and_do_not_decay():
    llama = on_meta(**SIZE)
    llama.materialize(CPU)
    init_weights(llama, seed=0, n_layers=3, device=CPU)
    for name in ("AdamW", "Muon"):
        section = Config().optimizer.model_copy(update={"name": name, "muon_dtype": "float32"})
        optimizer = optimizer_for(llama, section)
        groups = getattr(optimizer, "adamw", optimizer).param_groups
        decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
        small = {n: p for n, p in llama.named_parameters() if n.endswith(("bias", "sinks"))}
        assert len(small) == 3 * (4 + 1 + 1 + 3)
        for parameter in small.values():
            assert not parameter.any()
            assert decays[id(parameter)] == 0


# Layouts -------------------------------------------------------------------------------------------------------------

GPT_OSS: dict[str, Any] = {
    "model__attention_sinks": True,
    "model__attention_bias": "all",
    "model__head_dim": 8,
    "model__layer_pattern": "[{sliding_window = 5}, {sliding_window = 0}]",
    **{f"model__{key}": value for key, value in YARN.items()},
    "model__rope_yarn_truncate": False,
    "model__moe__n_experts": 4,
    "model__moe__n_experts_per_token": 2,
    "model__moe__expert_dim": 24,
    "model__moe__normalize_scores": True,
    "model__moe__expert_bias": True,
    "model__moe__router_bias": True,
    "model__moe__swiglu_limit": 0.1,
}
EP, EP_4, SHARD_4 = ({key: n} for key, n in (
    ("expert_parallel_degree", 2), ("expert_parallel_degree", 4), ("data_parallel_shard_degree", 4)
))  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "shard": SHARD,
    "tp": TP,
    "tp, ep": Case(TP | EP, always=True),
    "cp": Case(CP, always=True),
    "ulysses": Case(ULYSSES, always=True),
    "pp x tp x cp": PP | TP | CP,
    "shard, ep, document mask": Case(SHARD | EP | DOCUMENTS, always=True),
}
LAYOUTS |= {
    "one rank": {},
    "math backend": SHARD | {"training__attention_backend": "math"},
    "pp": PP,
    "ring 2 x ulysses 2": USP,
    "ring 2 x ulysses 2, documents": USP | DOCUMENTS,
    "ring 2 x ulysses 2 x tp": USP | TP,
    "replicate x shard, ep": REPLICATE | SHARD | EP,
    "shard x tp": SHARD | TP,
    "shard x tp, ep 4": SHARD | TP | EP_4,
    "shard 4 x tp, fewer heads and experts than ranks": SHARD_4 | {"tensor_parallel_degree": 4}
    | {"model__n_heads": 4, "model__moe__n_experts": 2},
    "shard 4, ep, fewer experts than ranks": SHARD_4 | EP | {"model__moe__n_experts": 2},
    "cp x tp, ep, documents": CP | TP | EP | DOCUMENTS,
    "zero-bubble, shard, ep": schedule("InterleavedZeroBubble") | SHARD | EP,
    "zero-bubble, cp": schedule("InterleavedZeroBubble") | CP,
    "full AC, cp x tp": FULL | CP | TP,
    "selective AC, tp, ep": SELECTIVE | TP | EP,
    "selective AC, ulysses": SELECTIVE | ULYSSES,
    "compiled, shard": COMPILED | SHARD,
    "compiled, selective AC, cp x tp": COMPILED | SELECTIVE | CP | TP,
    "compiled, ulysses x tp, ep": COMPILED | ULYSSES | TP | EP,
    "CPU offload, shard x tp": OFFLOAD | SHARD | TP,
    "Muon, shard x tp, ep": SHARD | TP | EP | {"optimizer__name": "Muon"},
}  # fmt: skip


@cases("name", LAYOUTS)
def test_layout_matches_reference(ranks, tmp_path, name):
    layout = GPT_OSS | LAYOUTS[name]
    actual = compare(ranks, tmp_path, world_size(layout), with_batches(layout))
    assert {name: d for name, d in actual.items() if d > LAYOUT_TOLERANCE} == {}
    assert all(d == 0 for name, d in actual.items() if name.startswith("initial weight")), "not bit for bit"
    added = [
        name for name in actual if name.startswith("step 3 gradient layers.1.") and name.endswith(("sinks", "bias"))
    ]
    assert len(added) == 1 + 4 + 1 + 3


@pytest.mark.parametrize(
    "without",
    [
        {"model__attention_sinks": False},
        {"model__moe__swiglu_limit": 0},
        {"model__moe__swiglu_alpha": 1.0},
        {"model__moe__expert_bias": False},
        {"model__moe__router_bias": False},
        {"model__rope_yarn_truncate": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_each_option_changes_what_is_computed(tmp_path, without):
    """The layouts above would agree with the reference, too, if both ignored it. Biases begin at zero."""
    traces = [
        run_reference(resolve(tmp_path, 1, with_batches(GPT_OSS | options)), CPU, steps=3) for options in ({}, without)
    ]
    common = [{name: value for name, value in trace.items() if name.endswith(" loss")} for trace in traces]
    assert differences(*common)["step 3 loss"] > 1e-9


def _log_sum_exp_without_sinks(rank: int) -> Any:
    real = tiled_attention.with_sinks
    return mock.patch.object(tiled_attention, "with_sinks", lambda out, lse, sinks: (real(out, lse, sinks)[0], lse))


def _sinks_in_every_ring_rank(rank: int) -> Any:
    """They count once for each rank of a ring."""
    real = tiled_attention.with_sinks
    return mock.patch.object(tiled_attention, "with_sinks", lambda out, lse, sinks: real(*real(out, lse, sinks), sinks))


def _gradient_of_sinks_is_not_negative(rank: int) -> Any:
    real = tiled_attention.gradient_of_sinks
    return mock.patch.object(tiled_attention, "gradient_of_sinks", lambda *args: -real(*args))


def _sinks_of_other_heads(rank: int) -> Any:
    """Each rank takes its sinks in the opposite order."""
    real = tiled_attention.local_shard
    return mock.patch.object(tiled_attention, "local_shard", lambda sinks: real(sinks).flip(0))


def _every_rank_adds_the_bias(rank: int) -> Any:
    real = moe_parallel._local_weights
    return mock.patch.object(moe_parallel, "_local_weights", lambda experts, adds_bias: real(experts, True))


def _router_gradients_are_not_summed(rank: int) -> Any:
    return mock.patch.object(moe_parallel, "local_weight", lambda weight: weight.to_local())


def _bias_without_scores(rank: int) -> Any:
    real = moe_parallel.torch.sum
    return mock.patch.object(moe_parallel.torch, "sum", lambda x, dim, out: real(2 * x, dim, out=out))


@cases(
    ("bug", "layout", "first"),
    [
        (_log_sum_exp_without_sinks, SHARD, "step 1 norm"),
        (_sinks_in_every_ring_rank, CP, "step 1 loss"),
        (_gradient_of_sinks_is_not_negative, TP, "step 1 gradient layers.0.attention.inner_attention.sinks"),
        (_sinks_of_other_heads, ULYSSES, "step 1 gradient layers.0.attention.inner_attention.sinks"),
        (_every_rank_adds_the_bias, TP, "step 1 norm"),
        (_router_gradients_are_not_summed, TP | EP, "step 1 norm"),
        (_bias_without_scores, SHARD | EP, "step 1 norm"),
    ],
    always=[(_log_sum_exp_without_sinks, SHARD, "step 1 norm"), (_every_rank_adds_the_bias, TP, "step 1 norm")],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_injected_bug_fails(ranks, tmp_path, bug, layout, first):
    actual = compare(ranks, tmp_path, world_size(layout), with_batches(GPT_OSS | layout), bug)
    assert next(name for name, d in actual.items() if d > 10 * LAYOUT_TOLERANCE) == first


# Options -------------------------------------------------------------------------------------------------------------

EXPERTS = {"model.moe.n_experts": 4}
SINKS = {"model.attention_sinks": True}
LATENT = {"model.mla.kv_lora_rank": 8, "model.n_kv_heads": 16}
REJECTED = [
    (SINKS | LATENT, {"model.attention_sinks": "latent attention has no sinks; set false"}),
    *(
        (
            EXPERTS | {"model.moe.n_shared_experts": 1, f"model.moe.{key}": value},
            {"model.moe.n_shared_experts": "shared experts have neither biases nor bounds"},
        )
        for key, value in (("expert_bias", True), ("swiglu_limit", 7.0))
    ),
    (EXPERTS | {"model.mlp_bias": True}, {"model.mlp_bias": "experts have model.moe.expert_bias instead"}),
    (EXPERTS | {"model.moe.swiglu_alpha": 1.0}, {"model.moe.swiglu_alpha": "read only when model.moe.swiglu_limit"}),
    *(
        ({f"model.moe.{key}": value}, {f"model.moe.{key}": "read only when model.moe.n_experts is above 0"})
        for key, value in (("expert_bias", True), ("router_bias", True), ("swiglu_limit", 7.0))
    ),
]


@pytest.mark.parametrize(("settings", "rejected"), REJECTED, ids=str)
def test_rejected(tmp_path: Path, settings: dict[str, Any], rejected: dict[str, Any]):
    assert_rejected(lambda: load(tmp_path, settings), settings, rejected)


def test_sinks_need_attention_that_has_a_log_sum_exp(tmp_path: Path):
    resolved = [config.check(load(tmp_path, settings), on(1)) for settings in ({}, SINKS)]
    assert [each.training.attention_backend for each in resolved] == ["auto", "cpu"]


@pytest.mark.parametrize(("flavor", "billions"), [("gpt_oss_20b", 3.61), ("gpt_oss_120b", 5.13)])
def test_active_weights_are_those_of_the_model_card(flavor, billions):
    """arXiv:2508.10925, table 1: active parameters, with the output head and without the embedding."""
    size = Model(flavor=flavor)
    sizes = parameter_sizes(size)
    assert sum(sizes.values()) == count_parameters(size)
    assert sizes["layers.0.attention.wo.bias"] == 2880
    attention = flops_per_token({}, size, 1000)
    assert (flops_per_token(sizes, size, 1000) - attention) / 6e9 == pytest.approx(billions, abs=0.005)


def test_parameters_of_a_layer_are_counted():
    size = section(SIZE)
    assert layer_parameters(size, 1) == sum(n for name, n in parameter_sizes(size).items() if "layers.1." in name)


def test_a_checkpoint_of_a_model_without_these_options_has_none_of_them():
    later = {"attention_sinks", "rope_yarn_truncate", "moe.expert_bias", "moe.router_bias", "moe.swiglu_limit"}
    plain = section({**SMALL, "moe": {"n_experts": 4}}).identity().keys()
    assert not (later | {"moe.swiglu_alpha"}) & plain
    assert later <= section(SIZE).identity().keys()


def test_a_parity_test_keeps_the_kinds_of_layers(tmp_path: Path):
    loaded = load(tmp_path, {"model.flavor": "gpt_oss_20b", "parallelism.context_parallel_degree": 2})
    loaded = dataclasses.replace(loaded, config=config.check(loaded, on(2)))
    smaller, _ = shrink(loaded, "float64")
    checked = config.check(smaller, on(2))
    assert count_parameters(checked.model) < 1e6
    assert [0 < layer.sliding_window < checked.training.seq_len for layer in checked.model.of_layers()] == [True, False]


def test_a_plain_llama_imports_nothing_of_it():
    assert not [name for name in modules_of_a_plain_llama() if "sinks" in name or "moe" in name]
