"""The model families: with transformers' weights, each has transformers' logits and gradients; and each layout computes
what one process does."""

import functools
import math
import types
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.helpers.cases import Case, cases
from tests.helpers.hf import DEEPSEEK as OF_DEEPSEEK
from tests.helpers.hf import V2 as OF_V2
from tests.helpers.hf import draw_biases, released, theirs, weights
from tests.parallel.test_layouts import (
    COMPILED,
    CP,
    DOCUMENTS,
    FULL,
    OFFLOAD,
    PP,
    SELECTIVE,
    SHARD,
    TIED,
    TP,
    ULYSSES,
    USP,
    schedule,
    with_batches,
    world_size,
)
from tests.parallel.test_layouts import TOLERANCE as LAYOUT_TOLERANCE
from tests.parallel.test_parity import STEPS, compare, resolve
from tests.test_model import SMALL, TOLERANCE, build, draw_tokens, gradients, on_meta, relative, section
from titanlite.build import optimizer_for
from titanlite.config.hf.config_json import hf_config
from titanlite.config.schema import Model
from titanlite.hf.names import named_weights
from titanlite.init import init_weights
from titanlite.metrics.flops import flops_per_token
from titanlite.model import (
    Documents,
    Llama,
    ScaledDotProductAttention,
)
from titanlite.parallel.attention import PACKED_ATTENTION
from titanlite.rope import rope_frequencies, rope_magnitude, rope_table
from titanlite.techniques import norm_over_heads
from titanlite.techniques.moe.parallel import local_weight
from titanlite.tools.plan.op_trace import recording

CPU = torch.device("cpu")
LINEAR = {"rope_scaling_factor": 4.0, "rope_scaling_type": "linear"}
YARN = {"rope_scaling_factor": 8.0, "rope_scaling_type": "yarn", "rope_original_seq_len": 64, "rope_beta_fast": 8.0}
"""With head_dim 16 and theta 10,000, pairs 0 and 7 have 10.2 and 0.0032 periods within 64 positions: the ramp from
beta_fast to beta_slow (8 to 1) begins at pair 0 and ends at pair 3."""
EXPERTS = {"n_experts": 6, "n_experts_per_token": 3}
DEEPSEEK: dict[str, Any] = OF_DEEPSEEK["ours"]
V2 = DEEPSEEK | {"moe": DEEPSEEK["moe"] | OF_V2["ours"] | {"n_groups": 1, "n_groups_per_token": 1}}
GROUPS = {"n_groups": 4, "n_groups_per_token": 2, "group_score": "max"}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama, biases": {"attention_bias": "all", "mlp_bias": True},
    "llama, heads wider than the model": {"head_dim": 24},
    "llama, linear scaling": LINEAR,
    "llama, yarn": YARN,
    "llama, yarn, factor": YARN | {"rope_attention_factor": 1.5},
    "mistral, window": {"sliding_window": 7},
    "mistral, window longer than the sequence": {"sliding_window": 4096},
    "qwen2": {"attention_bias": "qkv", "tie_embeddings": True},
    "qwen2, window": {"attention_bias": "qkv", "sliding_window": 9},
    "qwen3": {"qk_norm": True, "head_dim": 24, "tie_embeddings": True},
    "qwen3, all": {"qk_norm": True, "head_dim": 24, "attention_bias": "all", "sliding_window": 9} | YARN,
    "mixtral": {"moe": EXPERTS | {"normalize_scores": True}},
    "mixtral, all": {"head_dim": 24, "sliding_window": 9, "tie_embeddings": True}
    | {"moe": EXPERTS | {"normalize_scores": True, "expert_dim": 40}} | LINEAR,
    "qwen3moe": {"qk_norm": True, "head_dim": 24, "moe": EXPERTS | {"expert_dim": 40}},
    "qwen3moe, all": {"qk_norm": True, "head_dim": 24, "attention_bias": "all", "sliding_window": 9, "n_layers": 4}
    | {"moe": EXPERTS | {"expert_dim": 40, "normalize_scores": True, "n_first_dense_layers": 1, "every_n_layers": 2}},
    "deepseekv3": DEEPSEEK,
    "deepseekv3, all": DEEPSEEK | YARN | {"rope_attention_factor": 1.2, "tie_embeddings": True}
    | {"mla": DEEPSEEK["mla"] | {"mscale_all_dim": 0.7, "q_lora_rank": 0}}
    | {"moe": DEEPSEEK["moe"] | {"normalize_scores": False, "n_groups": 1, "n_groups_per_token": 1}},
    "deepseekv3, epsilon of Moonlight": DEEPSEEK | {"norm_eps": 1e-3, "mla": DEEPSEEK["mla"] | {"norm_eps": 1e-6}},
    "deepseekv2": V2,
    "deepseekv2, groups": V2 | {"moe": V2["moe"] | GROUPS},
    "deepseekv2, a group has one expert": V2 | {"moe": V2["moe"] | GROUPS | {"n_groups": 8, "n_groups_per_token": 5}},
    "deepseekv2, all": V2 | YARN | {"rope_attention_factor": 1.2, "tie_embeddings": True, "norm_eps": 1e-3}
    | {"mla": DEEPSEEK["mla"] | {"mscale_all_dim": 0.7, "q_lora_rank": 0, "norm_eps": 1e-6}}
    | {"moe": V2["moe"] | GROUPS | {"score_scaling": 16.0}},
    "olmoe": {"qk_norm": "all_heads", "moe": EXPERTS},
    "olmoe, all": {"qk_norm": "all_heads", "attention_bias": "all", "n_kv_heads": 4, "tie_embeddings": True}
    | {"moe": EXPERTS | {"expert_dim": 40, "normalize_scores": True}} | YARN,
}  # fmt: skip


def build_hf(llama: Llama, size: dict[str, Any], attention: str) -> nn.Module:
    """Return transformers' model of the exported config, with the weights of ours."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokens = {"max_seq_len": size["max_seq_len"], "torch_dtype": "float32", "bos": None, "eos": None}
    exported = hf_config(section(size), **tokens)
    loop = {"experts_implementation": "eager"} if "moe" in size else {}
    hf = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**exported), attn_implementation=attention, dtype=next(llama.parameters()).dtype, **loop
    )
    draw_biases(llama)
    expected = weights(hf)
    with torch.no_grad():
        for their_name, our_weight in theirs(named_weights(llama), section(size)).items():
            expected.pop(their_name).copy_(our_weight)
    assert not expected
    return hf


def in_float64(hf: Any, llama: Llama) -> None:
    """Have transformers compute its norms and scores of experts in float64, and take our rotary table, which
    test_rotary_angles_are_those_of_transformers compares with its own: all are in float32 whatever the dtype."""

    def norm(module: Any, x: Tensor) -> Tensor:
        return module.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon))

    def rotary(x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.cat((half, half), -1) for half in llama.rope[0, position_ids].unbind(-1))

    def router(module: Any, divides: bool, x: Tensor) -> tuple[Tensor, ...]:
        logits = nn.functional.linear(x.flatten(0, -2), module.weight)
        scores, experts = logits.softmax(-1).topk(module.top_k)
        return logits, scores / scores.sum(-1, keepdim=True) if divides else scores, experts

    def rotate(x: Tensor, y: Tensor, rope: Tensor) -> list[Tensor]:
        pairs = [torch.view_as_complex(each.unflatten(-1, (-1, 2)).contiguous()) for each in (x, y)]
        return [torch.view_as_real(each * rope.unsqueeze(1)).flatten(-2) for each in pairs]

    for module in hf.modules():
        if type(module).__name__ == "DeepseekV2Attention":
            forward = type(module).forward
            wide = {**forward.__globals__, "apply_rotary_emb": rotate}
            own = types.FunctionType(forward.__code__, wide, argdefs=forward.__defaults__)
            module.forward = types.MethodType(own, module)
        if type(module).__name__ in ("DeepseekV2TopkRouter", "DeepseekV3TopkRouter"):
            module.forward = types.MethodType(with_float64_for_float32(type(module).forward), module)
        if type(module).__name__.endswith("TopKRouter"):
            module.forward = functools.partial(router, module, getattr(module, "norm_topk_prob", True))
    norms = [module for module in hf.modules() if type(module).__name__.endswith("RMSNorm")]
    assert len(norms) >= 7
    for module in norms:
        module.forward = functools.partial(norm, module)
    is_v2 = hf.config.model_type == "deepseek_v2"
    hf.model.rotary_emb.forward = (lambda x, at: torch.view_as_complex(llama.rope[0, at])) if is_v2 else rotary


def with_float64_for_float32(function: Any) -> Any:
    """Return a function of transformers that computes in float64 where it names torch.float32."""

    class Torch:
        float32 = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    return types.FunctionType(function.__code__, {**function.__globals__, "torch": Torch()})


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_transformers(family):
    size = {**SMALL, **FAMILIES[family]}
    llama = build(torch.float64, **size)
    hf = build_hf(llama, size, "sdpa")
    assert type(hf).__name__.lower().startswith(family.split(",")[0])
    in_float64(hf, llama)
    differences = compare_with_hf(llama, hf, section(size))
    assert {name: d for name, d in differences.items() if not d < TOLERANCE} == {}


def compare_with_hf(llama: Llama, hf: Any, model: Model) -> dict[str, float]:
    """Return the relative differences of the logits and of every gradient."""
    tokens, targets = draw_tokens(2, 41)[:, :40], draw_tokens(2, 41)[:, 1:]
    our_logits, their_logits = llama(tokens), hf(tokens, use_cache=False).logits
    assert our_logits.dtype == their_logits.dtype == next(llama.parameters()).dtype
    differences = {"logits": relative(our_logits, their_logits)}
    expected = released(hf, gradients(hf, their_logits, targets))
    for their_name, our_gradient in theirs(gradients(llama, our_logits, targets), model).items():
        their_gradient = expected.pop(their_name)  # of an expert without tokens, both are zeros
        unequal = not torch.equal(our_gradient, their_gradient)
        differences[their_name] = relative(our_gradient, their_gradient) if unequal else 0.0
    assert not expected
    return differences


@pytest.mark.parametrize("family", FAMILIES)
def test_unchanged_transformers_in_float32(family):
    """Compare with transformers' own norms, rotary table, masks and softmax, as test_model.py does: TOLERANCE for the
    2^29 times larger rounding of float32."""
    size = {**SMALL, **FAMILIES[family]}
    llama = build(torch.float32, **size)
    differences = compare_with_hf(llama, build_hf(llama, size, "eager"), section(size))
    assert {name: d for name, d in differences.items() if not d < TOLERANCE * 2**29} == {}


def test_a_plain_llama_has_no_new_parameters():
    plain = {name for name, _ in on_meta().named_parameters()}
    assert not [name for name in plain if "bias" in name or "q_norm" in name or "k_norm" in name]
    every = on_meta(attention_bias="all", mlp_bias=True, qk_norm=True)
    added = {name.split(".", 2)[2] for name, _ in every.named_parameters() if name not in plain}
    assert added == {f"attention.{each}.bias" for each in ("wq", "wk", "wv", "wo")} | {
        f"feed_forward.{each}.bias" for each in ("w1", "w2", "w3")
    } | {"attention.q_norm.weight", "attention.k_norm.weight"}


def test_biases_begin_at_zero_and_do_not_decay():
    llama = on_meta(attention_bias="all", mlp_bias=True, qk_norm=True)
    llama.materialize(CPU)
    init_weights(llama, seed=0, n_layers=3, device=CPU)
    for name, parameter in llama.named_parameters():
        if name.endswith(".bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
    from titanlite.config import Config

    decays = {id(p): group["weight_decay"] for group in optimizer_for(llama, Config().optimizer).param_groups
              for p in group["params"]}  # fmt: skip
    for name, parameter in llama.named_parameters():
        assert decays[id(parameter)] == (0.0 if name.endswith(".bias") or "norm" in name else 0.1), name


# The rotary embedding ------------------------------------------------------------------------------------------------

ROPE = {
    "linear": LINEAR,
    "llama3": {"rope_scaling_factor": 8.0, "rope_original_seq_len": 64},
    "yarn": YARN,
    "yarn, default betas": YARN | {"rope_beta_fast": 32.0},
    "yarn, as Qwen2.5": YARN | {"head_dim": 128, "rope_theta": 1e6, "rope_original_seq_len": 32_768,
                                "rope_scaling_factor": 4.0, "rope_beta_fast": 32.0},
    "yarn, factor": YARN | {"rope_attention_factor": 1.5},
    "yarn, ramp of no width": YARN | {"rope_beta_fast": 1.001, "rope_beta_slow": 1.0, "rope_original_seq_len": 6},
    "yarn, all channels fast": YARN | {"rope_original_seq_len": 2**31 - 1},
}  # fmt: skip


@pytest.mark.parametrize("dropped", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", ROPE)
def test_rotary_angles_are_those_of_transformers(name, dropped):
    """Compare cos and sin at positions 0 .. 511 in both spellings of the config. transformers computes in float32:
    about 16 roundings of 2^-24 for a frequency, scaled up by the position; cos adds one, times the magnitude."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    model = section({**SMALL, **ROPE[name]})
    exported = hf_config(model, max_seq_len=1024, torch_dtype="float32", bos=None, eos=None)
    kept = {key: value for key, value in exported.items() if key not in (dropped, dropped and "rope_theta")}
    kept |= {"rope_theta": model.rope_theta} if dropped == "rope_parameters" else {}
    theirs = LlamaRotaryEmbedding(AutoConfig.for_model(**kept))
    cos, sin = theirs(torch.zeros(1), torch.arange(512)[None])
    frequencies, magnitude = rope_frequencies(model, 512), rope_magnitude(model)
    assert magnitude == pytest.approx(theirs.attention_scaling, rel=1e-15)
    torch.testing.assert_close(theirs.inv_freq.double(), frequencies, rtol=2**-20, atol=0)
    ours = rope_table(model, 512, torch.float64)
    tolerance = magnitude * (torch.outer(torch.arange(512), frequencies) * 2**-20 + 2**-22)
    half = len(frequencies)
    assert ((ours[..., 0] - cos[0, :, :half]).abs() <= tolerance).all()
    assert ((ours[..., 1] - sin[0, :, :half]).abs() <= tolerance).all()


def test_yarn_leaves_blends_and_stretches_frequencies():
    plain, scaled = (rope_frequencies(section(size), 1) for size in (SMALL, {**SMALL, **YARN}))
    ratio = (scaled / plain).tolist()
    assert ratio[0] == 1
    assert ratio[3:] == pytest.approx([1 / 8] * 5, rel=1e-15)
    assert 1 > ratio[1] > ratio[2] > 1 / 8


# Sliding window ------------------------------------------------------------------------------------------------------


def qkv(length: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, length, n, 8, dtype=torch.float64, generator=generator) for n in (6, 3, 3))


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask_TT: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(2, dim=2) for x in (k, v))
    scores = torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(8)
    return torch.einsum("bhts,bshk->bthk", scores.masked_fill(~mask_TT, -math.inf).softmax(-1), v)


@pytest.mark.parametrize("window", [1, 2, 5, 10, 11])
@pytest.mark.parametrize("begins", [[0], [0, 3, 4, 9]], ids=["one document", "documents"])
def test_window_by_hand(window, begins):
    """Token t attends to itself and the window - 1 tokens before it, within its document."""
    tensors, t = qkv(11), torch.arange(11)
    document = torch.bucketize(t, torch.tensor(begins), right=True)
    positions = t - torch.tensor(begins)[document - 1]
    distance = t[:, None] - t
    mask = (distance >= 0) & (distance < window) & (document[:, None] == document)
    documents = Documents(positions.expand(2, -1)) if len(begins) > 1 else None
    actual = ScaledDotProductAttention(window)(*tensors, documents)
    torch.testing.assert_close(actual, masked_attention(*tensors, mask), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("window", [11, 4096])
def test_a_window_that_covers_the_sequence_is_none(window):
    tensors = qkv(11)
    assert torch.equal(ScaledDotProductAttention(window)(*tensors), ScaledDotProductAttention()(*tensors))


def test_flops_of_heads_and_of_a_window():
    sizes = {"layers.0.attention.wq.weight": 100}

    def attention(seq_len: int, **options: Any) -> int:
        return flops_per_token(sizes, section({**SMALL, **options}), seq_len) - 600

    assert attention(10) == 12 * 3 * 64 * 10
    assert attention(10, head_dim=24) == 12 * 3 * 4 * 24 * 10
    assert attention(10, sliding_window=7) == 12 * 3 * 64 * 7
    assert attention(10, sliding_window=10) == attention(10, sliding_window=11) == attention(10)


@pytest.mark.parametrize(("window", "pairs"), [(0, 32), (3, 3 * 8 - 4.5), (8, 32), (1, 8 - 0.5)])
def test_the_plan_counts_what_a_window_leaves(window, pairs):
    """Two sequences of 8 tokens, 4 heads of 16 channels. A causal mask counts as half of all pairs; a window w leaves
    w of 8 keys to each query, except for w^2 / 2 before the beginning."""
    with recording() as trace:
        q, k, v = (torch.empty(16, 4, 16, dtype=torch.bfloat16) for _ in range(3))
        bounds = torch.empty(3, dtype=torch.int32)
        out, lse = PACKED_ATTENTION["flash"].forward(q, k, v, bounds, 8, window)
        PACKED_ATTENTION["flash"].backward(out, q, k, v, out, lse, bounds, 8, window)
        flops = [work.flops for segment in trace.segments for work in segment.events if getattr(work, "flops", 0)]
    assert flops == [products * 2 * (2 * 4 * 16) * pairs for products in (2, 5)]


# Layouts -------------------------------------------------------------------------------------------------------------

QWEN3 = {"model__qk_norm": True, "model__head_dim": 6}
OLMOE = {"model__qk_norm": "all_heads", "model__head_dim": 6}
BIASES = {"model__attention_bias": "all", "model__mlp_bias": True}
WINDOW = {"model__sliding_window": 5}
ALL = QWEN3 | BIASES | WINDOW
"""The sequence has 16 tokens: with two ranks, chunks of a ring have 4."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "shard x tp": ALL | SHARD | TP,
    "pp x tp": ALL | PP | TP,
    "cp": Case(ALL | CP, always=True),
    "window not reached, cp": CP | {"model__sliding_window": 16},
    "norms of all heads, shard x tp": Case(OLMOE | SHARD | TP, always=True),
}
LAYOUTS |= {
    "shard": ALL | SHARD,
    "tp": ALL | TP,
    "zero-bubble": ALL | schedule("InterleavedZeroBubble"),
    "cp x tp": ALL | CP | TP,
    "ulysses": ALL | ULYSSES,
    "ring 2 x ulysses 2": ALL | USP,
    "document mask, cp x tp": ALL | CP | TP | DOCUMENTS,
    "tied, tp": ALL | TIED | TP,
    "compiled, tp": ALL | COMPILED | TP,
    "selective AC, tp": ALL | SELECTIVE | TP,
    "full AC, pp": ALL | FULL | PP,
    "qkv biases, tp": {"model__attention_bias": "qkv"} | TP,
    "q and k norms, shard x tp": QWEN3 | SHARD | TP,
    **{
        f"norms of all heads, {name}": OLMOE | BIASES | layout
        for name, layout in {
            "shard": SHARD,
            "tp 4": {"tensor_parallel_degree": 4},
            "pp x tp": PP | TP,
            "cp x tp": CP | TP,
            "ulysses x tp": ULYSSES | TP,
            "document mask, cp": CP | DOCUMENTS,
            "compiled, tp": COMPILED | TP,
            "selective AC, tp": SELECTIVE | TP,
            "full AC, tp": FULL | TP,
            "zero-bubble x tp": schedule("InterleavedZeroBubble") | TP,
            "CPU offload, tp": OFFLOAD | TP,
        }.items()
    },
    "window, shard": WINDOW | SHARD,
    "biases, CPU offload, tp": BIASES | OFFLOAD | TP,
}


@cases("name", LAYOUTS)
def test_layout_matches_reference(ranks, tmp_path, name):
    layout = LAYOUTS[name]
    options = with_batches(layout)
    actual = compare(ranks, tmp_path, world_size(layout), options)
    assert {name: d for name, d in actual.items() if d > LAYOUT_TOLERANCE} == {}
    assert all(d == 0 for name, d in actual.items() if name.startswith("initial weight")), "not bit for bit"
    of_a_layer = 9 + {"all": 4, "qkv": 3, "none": 0}[options.get("model__attention_bias", "none")]
    of_a_layer += 3 * options.get("model__mlp_bias", False) + 2 * bool(options.get("model__qk_norm"))
    n_parameters = 2 + options["model__n_layers"] * of_a_layer + (not options.get("model__tie_embeddings"))
    assert len(actual) == n_parameters * (STEPS + 2) + 3 * STEPS + 1


def _mean_of_own_heads(rank: int) -> Any:
    def norm(module: nn.Module, mesh: Any, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], local_weight(module.weight), module.eps)

    return mock.patch.object(norm_over_heads, "norm_over_heads", norm)


def _no_gradient_of_the_mean(rank: int) -> Any:
    real = Tensor.rsqrt
    return mock.patch.object(norm_over_heads.torch, "rsqrt", lambda x: real(x.detach()))


@pytest.mark.parametrize(
    ("bug", "first"), [(_mean_of_own_heads, "step 1 loss"), (_no_gradient_of_the_mean, "step 1 norm")]
)
def test_injected_bug_in_the_norm_of_all_heads_fails(ranks, tmp_path, bug, first):
    layout = OLMOE | TP
    actual = compare(ranks, tmp_path, world_size(layout), with_batches(layout), bug)
    assert next(name for name, d in actual.items() if d > 10 * LAYOUT_TOLERANCE) == first


def norms_over_heads_in_bfloat16() -> tuple[Tensor, Tensor]:
    """Return this rank's channels of bfloat16 rows, normed with all ranks' channels, and the same in float64."""
    generator = torch.Generator().manual_seed(0)
    x_ND, weight_D = torch.randn(64, 96, generator=generator).bfloat16(), torch.rand(96, generator=generator).bfloat16()
    module = norm_over_heads.NormOverHeads(96, eps=1e-6, dtype=torch.bfloat16)
    module.weight.data.copy_(weight_D)
    exact_ND = nn.functional.rms_norm(x_ND.double(), [96], weight_D.double(), 1e-6)
    module.shard_weights(mesh := init_device_mesh("cpu", (2,)), None)
    own = mesh.get_local_rank()
    return module(x_ND.chunk(2, dim=1)[own]).detach(), exact_ND.chunk(2, dim=1)[own]


def test_the_norm_of_all_heads_is_rounded_to_bfloat16_once(ranks):
    """One rounding is 2^-8 of the result. In float32, a sum of 96 squares has at most 96 roundings, and its root half
    of their error; 5 more are those of the mean, the root and the products."""
    for actual, exact in ranks(2).run(norms_over_heads_in_bfloat16):
        assert actual.dtype == torch.bfloat16
        assert ((actual - exact).abs() <= (2**-8 + (96 / 2 + 5) * 2**-24) * exact.abs()).all()


def test_window_changes_what_is_computed(tmp_path):
    """The layouts above would agree with the reference, too, if both ignored the window."""
    from titanlite.tools.parity.compare import differences
    from titanlite.tools.parity.reference import run_reference

    traces = [run_reference(resolve(tmp_path, 1, options), CPU, steps=1) for options in ({}, WINDOW)]
    assert differences(*traces)["step 1 loss"] > 1e-6
