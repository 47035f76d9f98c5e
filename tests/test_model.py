"""The model is Llama: it has the published sizes, transformers' logits and gradients, the initial weights that init.py
states, and one rule for the loss."""

import ast
import cmath
import copy
import decimal
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.utils import run_and_get_code

from titanlite import init, model, rope
from titanlite.build_llama import build_llama
from titanlite.config.model_sizes import SIZES
from titanlite.config.schema import Model
from titanlite.hf.names import hf_name, to_hf
from titanlite.init import init_weights, parameter_seed
from titanlite.loss import IGNORED, chunked_cross_entropy, count_valid, cross_entropy
from titanlite.metrics.flops import flops_per_token
from titanlite.model import Llama
from titanlite.rope import apply_rotary_emb, rope_frequencies, rope_table
from titanlite.techniques import latent_attention, moe

CPU = torch.device("cpu")

SMALL: dict[str, Any] = {
    **SIZES["debug"],
    "dim": 64,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 96,
    "vocab_size": 80,
    "max_seq_len": 48,
}
SCALED: dict[str, Any] = {"rope_scaling_factor": 8.0, "rope_original_seq_len": 64}
"""With head_dim 16 and theta 10,000, a pair of channels has 10.2, 3.2, 1.02, 0.32, ... periods within 64 positions:
there are unscaled (4 periods and more), blended and stretched (1 and fewer) frequencies."""
VARIANTS = {
    "multi-head": {"n_kv_heads": 4},
    "grouped-query": {},
    "tied": {"tie_embeddings": True},
    "rope-scaled": SCALED,
}


def section(size: dict[str, Any]) -> Model:
    """Return the config section of a size; its max_seq_len is no option of the model."""
    return Model.model_validate({name: value for name, value in size.items() if name != "max_seq_len"})


def on_meta(**options: Any) -> Llama:
    size = {**SMALL, **options}
    return build_llama(section(size), max_seq_len=size["max_seq_len"])


def build(dtype: torch.dtype = torch.float64, **options: Any) -> Llama:
    """Build a small model with weights larger than initial ones, so that no layer is close to linear; no bias is 0."""
    llama = on_meta(**options).to(dtype)
    llama.materialize(CPU)
    draw_weights(llama)
    return llama


@torch.no_grad()
def draw_weights(module: nn.Module) -> None:
    """Fill every weight with random numbers: biases are not zero, and norms not one."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in module.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.copy_(1 + 0.3 * drawn if "norm" in name else 0.15 * drawn)


def draw_tokens(*shape: int, vocab_size: int = SMALL["vocab_size"]) -> Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(2))


def relative(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest value."""
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max()).item()


# Sizes ---------------------------------------------------------------------------------------------------------------

PARAMETERS = {
    "debug": 4_861_184,
    # huggingface.co/meta-llama: the sums over each model card's safetensors, tied weights once
    "llama3_1b": 1_235_814_400,
    "llama3_3b": 3_212_749_824,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama_30b": 32_528_943_616,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    # huggingface.co/Qwen, mistralai, HuggingFaceTB and TinyLlama, likewise
    "qwen3_0.6b": 596_049_920,
    "qwen3_1.7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "qwen2.5_0.5b": 494_032_768,
    "qwen2.5_1.5b": 1_543_714_304,
    "qwen2.5_7b": 7_615_616_512,
    "mistral_7b": 7_241_732_096,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_620_634_112,
    "olmoe_1b_7b": 6_919_161_856,
    "smollm2_135m": 134_515_008,
    "smollm2_360m": 361_821_120,
    "smollm2_1.7b": 1_711_376_384,
    "tinyllama_1.1b": 1_100_048_384,
    # 671,026,419,200 without the module for multi-token prediction, less 58 x 256 biases that balance the experts
    "deepseek_v3_671b": 671_026_404_352,
    # huggingface.co/openai: arXiv:2508.10925 has 20.91 and 116.83 billion
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    # huggingface.co/moonshotai, less 26 x 64 and 60 x 384 such biases. The reports say 16 billion and 1.04 trillion.
    "moonlight_16b_a3b": 15_960_110_208 - 26 * 64,
    "kimi_k2_1t": 1_026_408_232_448 - 60 * 384,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v2_236b": 235_741_434_880,
    "gpt_175b": 174_604_836_864,
    # huggingface.co/openai-community, bigcode, microsoft, zai-org and google, likewise
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "starcoder2_3b": 3_030_371_328,
    "starcoder2_7b": 7_173_923_840,
    "starcoder2_15b": 15_957_889_024,
    "phi3_mini_3.8b": 3_821_079_552,
    "phi4_14b": 14_659_507_200,
    "glm4_9b": 9_400_279_040,
    "gemma3_1b": 999_885_952,
    "smollm3_3b": 3_075_098_624,
    "olmo2_7b": 7_298_617_344,
    # from the dimensions in config.json: rounded, they are the counts of the model cards
    "olmo2_1b": 1_484_916_736,
    "olmo2_13b": 13_716_198_400,
    "olmo2_32b": 32_234_279_936,
    "olmo3_7b": 7_298_011_136,
    "olmo3_32b": 32_233_522_176,
    "granite3_2b": 2_533_525_504,
    "granite3_8b": 8_170_835_968,
    "glm4_32b": 32_566_081_536,
    # without the module for multi-token prediction
    "glm4.5_air_106b": 106_852_245_504,
    "glm4.5_355b": 352_797_814_784,
    # without the encoder of images
    "gemma3_4b": 3_880_263_168,
    "gemma3_12b": 11_766_034_176,
    "gemma3_27b": 27_009_346_304,
}


def parameter_sizes(section: Model) -> dict[str, int]:
    return {name: p.numel() for name, p in build_llama(section, max_seq_len=8).named_parameters()}


def count_parameters(flavor: str) -> int:
    return sum(parameter_sizes(Model(flavor=flavor)).values())


@pytest.mark.parametrize("flavor", SIZES)
def test_parameter_counts_are_the_published_ones(flavor):
    assert count_parameters(flavor) == PARAMETERS[flavor]


def test_every_size_has_a_published_count():
    assert SIZES.keys() == PARAMETERS.keys()
    assert PARAMETERS["debug"] == pytest.approx(5e6, rel=0.03)
    assert PARAMETERS["gpt_175b"] == pytest.approx(175e9, rel=0.01)


@pytest.mark.parametrize(
    ("flavor", "seq_len", "billions"), [("llama3_8b", 8192, 57.9), ("llama3_8b", 4096, 51.5)], ids=str
)
def test_flops_per_token_as_torchtitan_counts_them(flavor, seq_len, billions):
    size = Model(flavor=flavor)
    assert round(flops_per_token(parameter_sizes(size), size, seq_len) / 1e9, 1) == billions


def test_a_tied_embedding_is_multiplied_with_and_counts():
    tied, untied = (section({**SMALL, "tie_embeddings": tie}) for tie in (True, False))
    flops = flops_per_token(parameter_sizes(tied), tied, 10)
    # Untied, the output head's 80 x 64 weights are multiplied with; tied, the embedding's, which are the same.
    assert flops == flops_per_token(parameter_sizes(untied), untied, 10)
    assert flops == 6 * sum(parameter_sizes(tied).values()) + 12 * 3 * 64 * 10


# The same as transformers ------------------------------------------------------------------------------------------


def hf_config(size: dict[str, Any], **options: Any) -> Any:
    from transformers import LlamaConfig

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": size["rope_theta"]}
    if size["rope_scaling_factor"] > 1:
        rope |= {
            "rope_type": "llama3",
            "factor": size["rope_scaling_factor"],
            "low_freq_factor": size["rope_low_freq_factor"],
            "high_freq_factor": size["rope_high_freq_factor"],
            "original_max_position_embeddings": size["rope_original_seq_len"],
        }
    return LlamaConfig(
        hidden_size=size["dim"],
        num_hidden_layers=size["n_layers"],
        num_attention_heads=size["n_heads"],
        num_key_value_heads=size["n_kv_heads"],
        intermediate_size=size["ffn_dim"],
        vocab_size=size["vocab_size"],
        rms_norm_eps=size["norm_eps"],
        tie_word_embeddings=size["tie_embeddings"],
        max_position_embeddings=size["max_seq_len"],
        rope_parameters=rope,
        **options,
    )


def in_their_order(name: str, tensor: Tensor, model: Model) -> Tensor:
    return to_hf([name], [tensor], model)


def build_hf(llama: Llama, size: dict[str, Any], attention: str, permute: Any = in_their_order) -> Any:
    """Return transformers' model with the weights of ours."""
    from transformers import LlamaForCausalLM

    hf = LlamaForCausalLM(hf_config(size, attn_implementation=attention)).to(next(llama.parameters()).dtype)
    ours = {
        hf_name(name, section(size)): permute(name, p.detach(), section(size)) for name, p in llama.named_parameters()
    }
    missing, unexpected = hf.load_state_dict(ours, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if size["tie_embeddings"] else [])
    return hf


@pytest.fixture
def hf_in_float64(monkeypatch) -> None:
    """Compute transformers' norms in float64: its own are in float32 whatever the weights' dtype."""
    from transformers.models.llama import modeling_llama

    def norm(self: Any, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)


def gradients(module: nn.Module, logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    cross_entropy(logits.flatten(0, -2), targets.flatten()).sum().backward()
    return {name: p.grad for name, p in module.named_parameters()}


def compare_with_hf(size: dict[str, Any], permute: Any = in_their_order) -> dict[str, float]:
    """Return the relative differences of the logits and of every gradient, in float64."""
    llama = build(**size)
    hf = build_hf(llama, size, "sdpa", permute)

    def rotary(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        # transformers' own table is in float32; test_rotary_angles_are_those_of_transformers compares it with ours.
        table = llama.rope[0, position_ids]
        return tuple(torch.cat((half, half), -1) for half in table.unbind(-1))

    hf.model.rotary_emb.forward = rotary
    tokens, targets = draw_tokens(2, 41).split([40, 1], dim=1)[0], draw_tokens(2, 41)[:, 1:]
    ours, theirs = llama(tokens), hf(tokens, use_cache=False).logits
    assert ours.dtype == theirs.dtype == torch.float64
    differences = {"logits": relative(ours, theirs)}
    expected = gradients(hf, theirs, targets)
    for name, gradient in gradients(llama, ours, targets).items():
        permuted = permute(name, gradient, section(size))
        differences[name] = relative(permuted, expected.pop(hf_name(name, section(size))))
    assert not expected
    return differences


def differences_from(llama: Llama, hf: Any, in_their_names: Callable[[dict[str, Tensor]], Any]) -> dict[str, float]:
    """Return the relative differences of the logits and of every gradient, of which transformers' model has names and
    order of its own."""
    tokens, targets = draw_tokens(2, 41)[:, :40], draw_tokens(2, 41)[:, 1:]
    ours, theirs = llama(tokens), hf(tokens, use_cache=False).logits
    expected, actual = gradients(hf, theirs, targets), in_their_names(gradients(llama, ours, targets))
    assert actual.keys() == expected.keys()
    return {"logits": relative(ours, theirs), **{name: relative(actual[name], expected[name]) for name in expected}}


TOLERANCE = 1e-13
"""A product of n terms in float64 is off by up to n x 1.1e-16 of its terms' sizes: 1e-14 for the 96 of the widest one
here. A gradient has some 60 such products behind it, whose errors add up like a random walk: sqrt(60) times as much."""


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_equal_transformers(hf_in_float64, variant):
    differences = compare_with_hf({**SMALL, **VARIANTS[variant]})
    assert {name: d for name, d in differences.items() if not d < TOLERANCE} == {}


def test_another_convention_of_pairs_would_show(hf_in_float64):
    differences = compare_with_hf(SMALL, permute=lambda name, value, model: value)
    assert min(differences.values()) > 1e-3


def test_unchanged_transformers_in_float32():
    """Compare with transformers' own norms, rotary table and softmax, in float32. That rounds to 2^-24 and float64 to
    2^-53, so TOLERANCE becomes 5e-5."""
    size = {**SMALL, **SCALED}
    llama = build(torch.float32, **size)
    tokens = draw_tokens(2, 48)
    theirs = build_hf(llama, size, "eager")(tokens, use_cache=False).logits
    assert relative(llama(tokens), theirs) < TOLERANCE * 2**29


def table_of(size: dict[str, Any], length: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return our frequencies and rotary table of a size."""
    model = section(size)
    return rope_frequencies(model, length), rope_table(model, length, dtype)


@pytest.mark.parametrize("flavor", ["llama2_7b", "llama3_8b", "llama3_1b"])
def test_rotary_angles_are_those_of_transformers(flavor):
    """Compare cos and sin at positions 0 .. 8191, unscaled, scaled by 8 and by 32.

    transformers computes frequencies and angles in float32: about 8 roundings of 2^-24 each, the product with the
    position scales them up, so an angle p f is off by up to p f 2^-21. That of cos itself adds 2^-24.
    """
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    size, length = SIZES[flavor] | {"max_seq_len": 131_072}, 8192
    theirs = LlamaRotaryEmbedding(hf_config(size))
    cos, sin = theirs(torch.zeros(1), torch.arange(length)[None])
    frequencies, ours = table_of(size, length)
    torch.testing.assert_close(theirs.inv_freq.double(), frequencies, rtol=2**-21, atol=0)
    half = len(frequencies)
    tolerance = torch.outer(torch.arange(length), frequencies) * 2**-21 + 2**-23
    assert ((ours[..., 0] - cos[0, :, :half]).abs() <= tolerance).all()
    assert ((ours[..., 1] - sin[0, :, :half]).abs() <= tolerance).all()


def test_rope_scaling_leaves_blends_and_stretches_frequencies():
    (plain, _), (scaled, _) = table_of(SMALL, 1), table_of({**SMALL, **SCALED}, 1)
    periods = 64 * plain / (2 * math.pi)
    unscaled, stretched = periods >= 4, periods <= 1
    ratio = scaled / plain
    assert unscaled.any()
    assert stretched.any()
    assert (~unscaled & ~stretched).sum() == 2  # blended
    assert (ratio[unscaled] == 1).all()
    torch.testing.assert_close(ratio[stretched], torch.full_like(ratio[stretched], 1 / 8), rtol=1e-15, atol=0)
    assert (ratio[~unscaled & ~stretched] > 1 / 8).all()
    assert (ratio[~unscaled & ~stretched] < 1).all()


# Rotary positions --------------------------------------------------------------------------------------------------


def test_rotary_table_is_accurate_at_position_a_million():
    """Compare with 40 digits. A frequency is off by two roundings of 2^-53 and the angle by another one, a million
    times as large as the frequency; then come cos and sin. (Angles in float32 would be off by 0.06.)"""
    position, theta, head_dim = 1_000_000, 500_000.0, 8
    size = {**SIZES["llama2_7b"], "rope_theta": theta, "dim": head_dim, "n_heads": 1}
    frequencies, _ = table_of(size, 1)
    tables = {dtype: table_of(size, position + 1, dtype)[1] for dtype in (torch.float64, torch.float32)}
    with decimal.localcontext(decimal.Context(prec=40)):
        two_pi = 2 * decimal.Decimal("3.141592653589793238462643383279502884197")
        for pair, frequency in enumerate(frequencies.tolist()):
            angle = position * decimal.Decimal(theta) ** (decimal.Decimal(-2 * pair) / head_dim)
            exact = cmath.rect(1, float(angle % two_pi))
            tolerance = position * frequency * 4 * 2**-53 + 2**-52
            assert abs(complex(*tables[torch.float64][position, pair].tolist()) - exact) <= tolerance
            assert abs(complex(*tables[torch.float32][position, pair].tolist()) - exact) <= tolerance + 2**-24


@pytest.mark.parametrize(
    ("dtype", "table"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
    ids=str,
)
def test_rotation_is_in_float32_or_better(dtype, table):
    llama = build(dtype)
    assert llama.rope.dtype == table
    assert not [name for name in llama.state_dict() if "rope" in name]
    assert [name for name, _ in llama.named_buffers()] == ["rope"]
    x = torch.randn(2, 5, 4, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    rotated = apply_rotary_emb(x, llama.rope[0, :5])
    assert rotated.dtype == dtype
    expected = apply_rotary_emb(x.double(), llama.rope[0, :5].double())
    round_off = {torch.float64: 2**-52, torch.float32: 2**-22, torch.bfloat16: 2**-8}[dtype]
    assert relative(rotated.double(), expected) <= round_off


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 2**-51), (torch.float32, 2**-22)], ids=str)
def test_the_compiled_rotation_is_the_eager_one(dtype, tolerance):
    """Compiled code has the rotation in real numbers. Both round two products and a sum of each pair."""
    llama = build(dtype)
    x = torch.randn(2, 5, 4, 16, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    compiled = torch.compile(apply_rotary_emb, fullgraph=True, backend="aot_eager")
    rotated = [rotate(x, llama.rope[0, :5]) for rotate in (apply_rotary_emb, compiled)]
    grads = [torch.autograd.grad(each.square().sum() + each.sum(), x)[0] for each in rotated]
    assert relative(*rotated) <= tolerance
    assert relative(*grads) <= 2 * tolerance


def test_a_compiled_block_has_no_complex_numbers():
    """inductor has no kernels for them. (The nightly test sees its code.)"""
    llama, dtypes = build(torch.bfloat16), set()

    def collect(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        values = (node.meta.get("val") for node in graph.graph.nodes)
        dtypes.update(value.dtype for value in values if isinstance(value, Tensor))
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=collect)
    block = torch.compile(llama.layers["0"].forward, fullgraph=True, backend=backend)
    x = torch.randn(40, SMALL["dim"], dtype=torch.bfloat16, requires_grad=True)
    block(x, llama.rope[0, :20]).sum().backward()
    assert dtypes == {torch.bfloat16, torch.float32, torch.int64}  # the last: which channels are the second of a pair


@pytest.mark.nightly
def test_inductor_has_kernels_for_all_of_a_block_but_attention():
    """An operator without one is a pass of its own over activations, as rotation in complex numbers was."""
    llama = build(torch.bfloat16)
    block, x = llama.layers["0"], torch.randn(40, SMALL["dim"], dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        block.forward(x, llama.rope[0, :20]).sum().backward()

    with torch._inductor.config.patch(force_disable_caches=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that caches are disabled
        block.forward = torch.compile(block.forward, fullgraph=True)
        _, code = run_and_get_code(step)
    called = set(re.findall(r"torch\.ops\.(\w+\.\w+)\.\w+\(", "".join(code)))
    assert any("attention" in name for name in called)
    assert {name for name in called if "attention" not in name} <= {"aten.mm", "mkldnn._linear_pointwise"}


def test_the_dtype_changes_without_a_warning(recwarn):
    build(torch.bfloat16)
    build(torch.float64)
    assert [str(warning.message) for warning in recwarn] == []


def test_explicit_positions():
    llama, tokens = build(), draw_tokens(2, 20)
    default = llama(tokens)
    assert torch.equal(llama(tokens, torch.arange(20)), default)
    assert torch.equal(llama(tokens, torch.arange(20).expand(2, -1)), default)
    assert relative(llama(tokens, torch.arange(20) + 11), default) < TOLERANCE  # only distances count
    assert relative(llama(tokens, torch.arange(20) * 2), default) > 1e-3  # and they do


def test_positions_of_their_own_for_each_sequence():
    llama, tokens = build(), draw_tokens(2, 20)
    positions = torch.stack([torch.arange(20) * 2, torch.cat([torch.arange(8), torch.arange(12)])])
    together = llama(tokens, positions)
    for b in range(2):
        alone = llama(tokens[b : b + 1], positions[b])
        torch.testing.assert_close(together[b : b + 1], alone, rtol=TOLERANCE, atol=TOLERANCE)


# Structure ---------------------------------------------------------------------------------------------------------


def test_inner_attention_by_hand():
    """Query head h attends to KV head h * G // H, and to no later position."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 7, heads, 8, dtype=torch.float64, generator=generator) for heads in (6, 3, 3))
    actual = model.ScaledDotProductAttention()(q, k, v)
    for head in range(6):
        scores = q[:, :, head] @ k[:, :, head * 3 // 6].transpose(1, 2) / math.sqrt(8)
        later = torch.ones(7, 7, dtype=torch.bool).triu(1)
        expected = scores.masked_fill(later, -math.inf).softmax(-1) @ v[:, :, head * 3 // 6]
        torch.testing.assert_close(actual[:, :, head], expected, rtol=1e-13, atol=1e-14)


def test_no_token_attends_to_a_later_one():
    llama, tokens = build(), draw_tokens(1, 20)
    changed = tokens.clone()
    changed[0, 12] = (changed[0, 12] + 1) % 80
    before, after = llama(tokens)[0], llama(changed)[0]
    assert torch.equal(before[:12], after[:12])
    assert (before[12:] != after[12:]).any(1).all()


def distributed_uses(source: str) -> Iterator[str]:
    """Yield what a module imports or names of torch.distributed, of titanlite, or relatively."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "titanlite" if node.level else node.module
            names = [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        yield from (n for n in names if f"{n}.".startswith(("torch.distributed.", "titanlite.")))


def test_model_knows_no_parallelism():
    """Its section of the config and rope.py are all of titanlite that it imports. Layers of experts and latent
    attention import these and the model."""
    section, experts = "titanlite.config.schema.Model", Path(moe.__file__).parent
    of_rope = [f"titanlite.rope.{name}" for name in ("apply_rotary_emb", "rope_table")]
    assert list(distributed_uses(Path(rope.__file__).read_text())) == [section]
    assert list(distributed_uses(Path(model.__file__).read_text())) == [section, *of_rope]
    assert list(distributed_uses((experts / "layer.py").read_text())) == [
        section,
        "titanlite.model.FeedForward",
        "titanlite.techniques.moe.counts",
        "titanlite.techniques.moe.operators",
        "titanlite.techniques.moe.operators.Operators",
        "titanlite.techniques.moe.router.Router",
    ]
    assert list(distributed_uses((experts / "counts.py").read_text())) == []
    assert list(distributed_uses((experts / "router.py").read_text())) == [section]
    of_model = [
        f"titanlite.{name}" for name in ("model.Documents", "model.ScaledDotProductAttention", "rope.apply_rotary_emb")
    ]
    assert list(distributed_uses(Path(latent_attention.__file__).read_text())) == [section, *of_model]


@pytest.mark.parametrize(
    "line",
    [
        "import torch.distributed as dist",
        "from torch.distributed.tensor import DTensor",
        "from torch import distributed",
        "x = torch.distributed.get_rank()",
        "from titanlite import config",
        "from titanlite.config.schema import Parallelism",
        "import titanlite.parallel.mesh",
        "from . import mesh",
        "from .mesh import init_mesh",
    ],
)
def test_a_use_of_parallelism_would_be_found(line):
    assert list(distributed_uses(f"import torch\n\ndef f():\n    {line}\n"))


def test_construction_on_meta_draws_nothing():
    before = torch.get_rng_state()
    llama = on_meta()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(t.is_meta for t in [*llama.parameters(), *llama.buffers()])
    llama.materialize(CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(t.is_meta for t in [*llama.parameters(), *llama.buffers()])


def test_parameter_names_are_those_of_llama():
    of_a_layer = ["attention.wq", "attention.wk", "attention.wv", "attention.wo", "attention_norm", "ffn_norm"]
    of_a_layer += ["feed_forward.w1", "feed_forward.w2", "feed_forward.w3"]
    names = {f"layers.{layer}.{module}.weight" for layer in range(3) for module in of_a_layer}
    names |= {"tok_embeddings.weight", "norm.weight"}
    assert {name for name, _ in on_meta().named_parameters()} == names | {"output.weight"}
    assert {name for name, _ in on_meta(tie_embeddings=True).named_parameters()} == names


def test_tie_survives_materialize():
    llama = build(tie_embeddings=True)
    assert llama.output.weight is llama.tok_embeddings.weight
    assert "output.weight" not in dict(llama.named_parameters())


def stage_of(llama: Llama, layers: range, *, embedding: bool = False, head: bool = False) -> Llama:
    """Return a stage of a model, as a pipeline would split it."""
    stage = copy.deepcopy(llama)
    for layer in range(len(llama.layers)):
        if layer not in layers:
            del stage.layers[str(layer)]
    if not embedding:
        stage.tok_embeddings = None
    if not head:
        stage.norm = stage.output = None
    return stage


@pytest.mark.parametrize("ends", [[0, 1, 3], [0, 0, 1, 2, 3, 3]], ids=["2 stages", "embedding and head alone"])
def test_chained_stages_equal_the_full_model(ends):
    """Run stage after stage, where stage i has the layers ends[i] .. ends[i + 1] - 1."""
    llama, tokens = build(**SCALED), draw_tokens(2, 20)
    names: list[str] = []
    x, last = tokens, len(ends) - 2
    for number in range(last + 1):
        layers = range(ends[number], ends[number + 1])
        stage = stage_of(llama, layers, embedding=number == 0, head=number == last)
        names += dict(stage.named_parameters())
        x = stage(x, torch.arange(20))
    assert torch.equal(x, llama(tokens))
    assert sorted(names) == sorted(dict(llama.named_parameters()))


def test_stages_split_on_meta_have_the_full_models_weights():
    """Split the model before materialize, as a large one must be."""
    full = on_meta()
    full.materialize(CPU)
    init_weights(full, seed=5, n_layers=3, device=CPU)
    expected, tokens = dict(full.named_parameters()), draw_tokens(1, 20)
    x = tokens
    for stage in (stage_of(on_meta(), range(2), embedding=True), stage_of(on_meta(), range(2, 3), head=True)):
        stage.materialize(CPU)
        init_weights(stage, seed=5, n_layers=3, device=CPU)
        assert all(torch.equal(p, expected[name]) for name, p in stage.named_parameters())
        x = stage(x, torch.arange(20))
    assert torch.equal(x, full(tokens))


# Initial weights ---------------------------------------------------------------------------------------------------


def initial_weights(
    flavor: dict[str, Any] = SMALL, *, seed: int = 0, dtype: torch.dtype = torch.float32, n_layers: int | None = None
) -> dict[str, Tensor]:
    llama = on_meta(**flavor).to(dtype)
    llama.materialize(CPU)
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.fill_(math.nan)
    init_weights(llama, seed=seed, n_layers=n_layers or flavor["n_layers"], device=CPU)
    return {name: p.detach() for name, p in llama.named_parameters()}


def test_weights_follow_from_seed_and_name():
    one = initial_weights()
    torch.manual_seed(123)  # the global generator is not theirs
    state = torch.get_rng_state()
    other = initial_weights()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one[name], other[name]) for name in one)
    fewer_layers = initial_weights(SMALL | {"n_layers": 2}, n_layers=3)
    assert all(torch.equal(one[name], weight) for name, weight in fewer_layers.items())


def test_another_seed_or_name_gives_other_weights():
    one, other = initial_weights(seed=0), initial_weights(seed=1)
    drawn = {(seed, n): w for seed, ws in enumerate((one, other)) for n, w in ws.items() if w.dim() == 2}
    for (a, first), (b, second) in itertools.combinations(drawn.items(), 2):
        if first.shape == second.shape:
            # independent: a correlation of n normal pairs has a standard deviation of 1 / sqrt(n)
            correlation = torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]
            assert abs(correlation) < 5 / math.sqrt(first.numel()), (a, b)


def test_the_seed_of_a_name_is_the_same_everywhere():
    assert parameter_seed(42, "tok_embeddings.weight") == 4_967_264_572_154_237_680
    assert len({parameter_seed(seed, name) for seed in range(20) for name in ("a", "b", "1/a", "/a")}) == 80
    assert all(0 <= parameter_seed(seed, "a") < 2**63 for seed in range(200))


def test_initial_distribution():
    """Compare the debug model's weights with theory, to 5 standard errors: the standard deviation of n normal numbers
    is off by 1 / sqrt(2 n) of itself, their mean by 1 / sqrt(n) of the standard deviation."""
    for name, weight in initial_weights({**SIZES["debug"], "max_seq_len": 8}).items():
        if weight.dim() == 1:
            assert (weight == 1).all(), name
            continue
        writes_residual = name.endswith(("attention.wo.weight", "feed_forward.w2.weight"))
        std = 0.02 / math.sqrt(2 * 6) if writes_residual else 0.02
        assert weight.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * weight.numel())), name
        assert abs(weight.mean().item()) < 5 * std / math.sqrt(weight.numel()), name
        within = (weight.abs() < std).double().mean().item()
        assert within == pytest.approx(0.6827, abs=5 * math.sqrt(0.6827 * 0.3173 / weight.numel())), name
    assert init.STD == 0.02


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_every_dtype_has_the_same_draw(dtype):
    drawn = initial_weights()
    for name, weight in initial_weights(dtype=dtype).items():
        assert weight.dtype == dtype
        assert torch.equal(weight, drawn[name].to(dtype)), name


# Loss --------------------------------------------------------------------------------------------------------------


def loss_by_hand(logits: Tensor, targets: Tensor) -> float:
    """Return the sum of -log softmax in Python's floats."""
    total = 0.0
    for values, target in zip(logits.tolist(), targets.tolist(), strict=True):
        if target != IGNORED:
            total += math.log(sum(math.exp(value) for value in values)) - values[target]
    return total


def draw_logits(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(18, 20, dtype=torch.float64, generator=generator)).to(dtype)
    targets = torch.randint(20, (18,), generator=generator)
    targets[3:10] = IGNORED
    return logits, targets


def test_loss_is_the_sum_over_valid_tokens():
    logits, targets = draw_logits()
    losses = cross_entropy(logits, targets)
    assert losses.dtype == torch.float64
    assert losses.shape == (18,)
    assert (losses[targets == IGNORED] == 0).all()
    loss = losses.sum()
    assert loss.item() == pytest.approx(loss_by_hand(logits, targets), rel=1e-14)
    valid = count_valid([targets[:9], targets[9:]], CPU)
    assert valid.item() == 3 + 8
    assert valid.dtype == torch.float64
    halves = [cross_entropy(*half) for half in zip(logits.split(9), targets.split(9), strict=True)]
    assert torch.equal(torch.cat(halves), losses)


def test_ignored_targets_have_no_gradient():
    logits, targets = draw_logits()
    logits.requires_grad_()
    cross_entropy(logits, targets).sum().backward()
    assert (logits.grad[targets == IGNORED] == 0).all()
    one_hot = nn.functional.one_hot(targets.clamp(min=0), 20)
    expected = (logits.detach().softmax(-1) - one_hot) * (targets != IGNORED)[..., None]
    torch.testing.assert_close(logits.grad, expected, rtol=1e-13, atol=1e-15)


def test_a_batch_without_valid_targets_adds_nothing():
    logits, targets = draw_logits()
    logits.requires_grad_()
    loss = cross_entropy(logits, torch.full_like(targets, IGNORED)).sum()
    loss.backward()
    assert loss.item() == 0
    assert (logits.grad == 0).all()
    assert count_valid([torch.full_like(targets, IGNORED)], CPU).item() == 0


def test_the_factor_of_a_chunked_loss_is_not_rounded_to_bfloat16():
    """Gradients in bfloat16 are those of the sum times 1 / 3, which bfloat16 has only to 9 bits, rounded once."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 8, generator=generator).bfloat16() for n in (6, 20))
    targets = torch.randint(20, (6,), generator=generator)
    grads = []
    for n_valid in (1.0, 3.0):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = chunked_cross_entropy(*leaves, targets, n_chunks=2, loss_parallel=False)
        (loss / torch.tensor(n_valid, dtype=torch.float64)).backward()
        grads.append([leaf.grad for leaf in leaves])
    of_sum, of_mean = grads
    assert torch.equal(of_mean[0], (of_sum[0].float() * (1 / 3)).bfloat16())


def test_bfloat16_logits_are_summed_in_float32():
    """Only the logits themselves are rounded to bfloat16 (2^-9)."""
    logits, targets = draw_logits(torch.bfloat16)
    loss = cross_entropy(logits, targets).sum()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(loss_by_hand(logits.double(), targets), rel=1e-6)
