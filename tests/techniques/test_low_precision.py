"""Unit tests of MXFP8 and INT8 products: the rounding, against its definition and torchao's; the layers that are
converted; what a plan counts. Layouts are compared in test_layouts.py."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config

from tests.parallel.test_layouts import INT8_PRODUCTS, MODEL, MXFP8, PRODUCT_ERROR, SELECTIVE
from tests.parallel.test_parity import CPU, CountCalls, forward_backward, resolve
from titanlite import build, config
from titanlite.config import ConfigError
from titanlite.metrics.summary import optimization_summary
from titanlite.techniques import low_precision
from titanlite.techniques.low_precision import LowPrecisionLinear, convert_linear_layers, from_mxfp8, to_int8, to_mxfp8
from titanlite.tools.plan.planner import make_plan
from titanlite.tools.plan.result import Plan

ROOT = Path(__file__).parents[2]
EMULATED = "mxfp8, emulated"


def random_rows(dtype: torch.dtype, columns: int = 96) -> Tensor:
    """Return rows of very different sizes, one of which is 0."""
    rows = torch.randn(50, columns, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 50)[:, None]
    rows[7] = 0
    return rows.to(dtype)


# Rounding ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_mxfp8_scales_are_the_least_powers_of_two_without_overflow(dtype):
    x = random_rows(dtype)
    values, exponents = to_mxfp8(x)
    largest = x.double().unflatten(1, (-1, 32)).abs().amax(-1)
    assert (largest <= 448 * exponents.double().exp2()).all()
    assert ((largest > 448 * (exponents.double() - 1).exp2()) | (largest == 0)).all()
    error = (from_mxfp8(values, exponents, torch.float64) - x.double()).abs()
    # Half a unit in the last place: of 3 bits after the point, and 2^-9 of the scale where a number is subnormal.
    unit = (x.double().abs() / 16).maximum(2.0**-10 * exponents.double().exp2().repeat_interleave(32, dim=1))
    assert (error <= unit).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp8_is_torchaos_to_the_bit(dtype):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    mode = pytest.importorskip("torchao.prototype.mx_formats.config").ScaleCalculationMode.RCEIL
    x = random_rows(dtype)
    values, exponents = to_mxfp8(x)
    scales, expected = mx.to_mx(x, torch.float8_e4m3fn, 32, mode)
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal((exponents + 127).to(torch.uint8), scales.view(torch.uint8))
    in_order = low_precision.scales_of_mxfp8(exponents)
    from torchao.prototype.mx_formats.utils import from_blocked

    assert torch.equal(from_blocked(in_order.view(torch.uint8), 50, 3), scales.view(torch.uint8))


def test_int8_rounds_to_the_nearest_of_255_numbers_of_a_row():
    x = random_rows(torch.float64)
    values, scales = to_int8(x)
    assert torch.equal(scales.squeeze(1), x.abs().amax(1) / 127)
    assert values.abs().amax(1).tolist() == [127 * bool(row.any()) for row in x]
    assert ((values * scales - x).abs() <= scales / 2 * (1 + 1e-12)).all()


@pytest.mark.parametrize("kind", [EMULATED, "int8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_stay_so(kind, value):
    """Loss scaling skips a step by them."""
    left, right = torch.ones(3, 64), torch.ones(2, 64)
    left[1, 40] = value
    assert low_precision.PRODUCTS[kind](left, right).isfinite().all(1).tolist() == [True, False, True]


# Layers --------------------------------------------------------------------------------------------------------------


def layers(kind: str, n_tokens: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    """Return the output, input gradient, weight gradient and bias gradient of a layer with such products, and of one
    with torch's."""
    torch.manual_seed(0)
    layer = nn.Linear(128, 96, dtype=dtype)
    x, gradient = torch.randn(2, n_tokens, 128, dtype=dtype), torch.randn(2, n_tokens, 96, dtype=dtype)
    results = []
    for product in kind, "":
        if product:
            layer.__class__, layer.product = LowPrecisionLinear, product
        else:
            layer.__class__ = nn.Linear
        own = x.clone().requires_grad_()
        layer.zero_grad()
        out = layer(own)
        out.backward(gradient)
        results.append([out.detach(), own.grad, layer.weight.grad, layer.bias.grad])
    return results[0], results[1]


@pytest.mark.parametrize("n_tokens", [64, 5], ids=["blocks of tokens", "10 tokens"])
@pytest.mark.parametrize("kind", [EMULATED, "int8"])
def test_each_of_the_three_products_is_rounded(kind, n_tokens):
    rounded, exact = layers(kind, n_tokens)
    error = PRODUCT_ERROR[kind.split(",")[0]]
    for actual, expected in zip(rounded[:3], exact[:3], strict=True):
        assert error / 3 < (actual - expected).norm() / expected.norm() < 1.5 * error
    torch.testing.assert_close(rounded[3], exact[3])


def test_mxfp8_layer_is_torchaos():
    module = pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear")  # torchao 0.18
    from torchao.quantization.quantize_.common import KernelPreference

    torch.manual_seed(0)
    torchaos = module.MXFP8Linear(128, 96, bias=True, kernel_preference=KernelPreference.EMULATED)
    assert_same_layer(torchaos, EMULATED, rtol=0)


def test_int8_layer_is_torchaos():
    module = pytest.importorskip("torchao.prototype.quantized_training")
    torch.manual_seed(0)
    options = module.int8_mixed_precision_training(module_swap=True)
    assert_same_layer(module.Int8MixedPrecisionTrainingLinear(128, 96, config=options), "int8", rtol=1e-6)


def assert_same_layer(torchaos: nn.Module, kind: str, *, rtol: float) -> None:
    own = nn.Linear(128, 96)
    own.load_state_dict(torchaos.state_dict())
    own.__class__, own.product = LowPrecisionLinear, kind
    x, gradient, results = torch.randn(64, 128), torch.randn(64, 96), []
    for layer in own, torchaos:
        inputs = x.clone().requires_grad_()
        layer(inputs).backward(gradient)
        results.append([layer(x), inputs.grad, layer.weight.grad])
    for actual, expected in zip(*results, strict=True):
        assert (actual - expected).abs().max() <= rtol * expected.abs().max()


def test_int8_sums_do_not_overflow():
    left = torch.ones(2, 133_144)  # the most that config/rules.py allows
    torch.testing.assert_close(low_precision.PRODUCTS["int8"](left, left[:1]), torch.full((2, 1), 133_144.0))


# Conversion ----------------------------------------------------------------------------------------------------------


def convert(job: config.Config, degree: int = 1, device: torch.device = CPU) -> list[str]:
    """Return the names of the layers of a model that are converted."""
    model = build.meta_model(job)
    convert_linear_layers(model, job.float8, job.int8, tensor_parallel_degree=degree, device=device)
    return [name for name, module in model.named_modules() if isinstance(module, LowPrecisionLinear)]


@pytest.mark.parametrize("options", [MXFP8, INT8_PRODUCTS], ids=["mxfp8", "int8"])
def test_all_layers_but_the_head_and_those_filtered_are_converted(tmp_path, options):
    section = "int8" if "int8__enable" in options else "float8"
    job = resolve(tmp_path, 1, MODEL | options | {f"{section}__filter_fqns": '["layers.0.", "wk"]'})
    names = [f"layers.1.attention.w{name}" for name in "qvo"] + [f"layers.1.feed_forward.w{n}" for n in "123"]
    assert sorted(convert(job)) == sorted(names)


def test_a_side_is_a_multiple_of_what_the_product_takes_on_a_rank(tmp_path):
    """Heads have 64 channels together, the feed-forward 96."""
    feed_forward = ["layers.0.feed_forward.w1", "layers.1.feed_forward.w1"]
    mxfp8 = resolve(tmp_path, 1, MODEL | MXFP8 | {"model__ffn_dim": 96})
    int8 = resolve(tmp_path, 1, MODEL | INT8_PRODUCTS)
    for job, degrees in ((mxfp8, {1: True, 2: False}), (int8, {1: True, 2: True})):
        for degree, expected in degrees.items():
            names = convert(job, degree)
            assert [name for name in names if name.endswith("w1")] == feed_forward * expected
            assert "layers.0.attention.wq" in names
    for job, degree, section in ((mxfp8, 4, "float8"), (int8, 8, "int8")):
        with pytest.raises(ConfigError, match=f"{section}.enable = true: no layer is converted"):
            convert(job, degree)


@pytest.mark.parametrize("recipe", ["int8", "mxfp8", "rowwise"])
def test_a_pipeline_stage_may_have_no_layer_that_is_converted(tmp_path, recipe):
    options = INT8_PRODUCTS if recipe == "int8" else MXFP8 | {"float8__recipe": recipe}
    section = "int8" if recipe == "int8" else "float8"
    job = resolve(tmp_path, 1, MODEL | options | {f"{section}__filter_fqns": '["layers.0."]'})
    for filters, is_rejected in ((["layers.0."], False), (["layers."], True)):
        filtered = job.replace(**{f"{section}__filter_fqns": filters})
        stage = build.meta_model(filtered, ["tok_embeddings", "layers.0"])
        settings = {"tensor_parallel_degree": 1, "device": CPU, "model": lambda job=filtered: build.meta_model(job)}
        if is_rejected:
            with pytest.raises(ConfigError, match="no layer is converted"):
                convert_linear_layers(stage, filtered.float8, filtered.int8, **settings)
        else:
            convert_linear_layers(stage, filtered.float8, filtered.int8, **settings)
            assert {type(module) for module in stage.modules() if isinstance(module, nn.Linear)} == {nn.Linear}


def test_compiled_products_with_a_scale_per_row_round_casts_as_eager_does(tmp_path, monkeypatch):
    """Without it compiled backwards have had NaN (pytorch 150859). No machine without a GPU shows them."""
    for recipe, expected in (("rowwise", True), ("tensorwise", False), ("rowwise_with_gw_hp", True)):
        monkeypatch.setattr(inductor_config, "emulate_precision_casts", not expected)
        convert(resolve(tmp_path, 1, MODEL | MXFP8 | {"float8__recipe": recipe}))
        assert inductor_config.emulate_precision_casts is expected


def test_a_gpu_before_blackwell_is_rejected(tmp_path, monkeypatch):
    job = resolve(tmp_path, 1, MODEL | MXFP8)
    hardware = job.replace(float8__emulate=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    for capability, is_rejected in (((9, 0), True), ((10, 0), False), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert convert(job, device=torch.device("cuda"))
        if is_rejected:
            with pytest.raises(ConfigError, match=r"NVIDIA H100 has no MXFP8 products; set float8\.emulate"):
                convert(hardware, device=torch.device("cuda"))
        else:
            assert convert(hardware, device=torch.device("cuda"))


def integer_products(job: config.Config) -> int:
    counted = CountCalls("aten")
    forward_backward(job, counted)
    return counted.calls["_int_mm"]


def test_selective_checkpointing_saves_integer_products(ranks, tmp_path):
    counts = [
        ranks(1).run(integer_products, job=resolve(tmp_path, 1, MODEL | INT8_PRODUCTS | options))[0]
        for options in ({}, SELECTIVE, {"activation_checkpoint__mode": "full"})
    ]
    # Full AC computes all seven of a block again, since the last one's operands are saved after it.
    assert counts == [2 * 21, 2 * 21, 2 * 28]


def test_the_summary_names_them(tmp_path):
    assert optimization_summary(resolve(tmp_path, 1, MODEL | MXFP8)) == ["float8     mxfp8, emulated"]
    (line,) = optimization_summary(resolve(tmp_path, 1, MODEL | INT8_PRODUCTS))
    assert line.startswith("int8       ")


# Plan ----------------------------------------------------------------------------------------------------------------


def planned(*options: str) -> Plan:
    sizes = ("--training.local_batch_size=2", "--training.mixed_precision_param=bfloat16")
    return make_plan(config.load([str(ROOT / "configs" / "debug.toml"), *sizes, *options]), world_size=1)


@pytest.mark.nightly
def test_a_plan_counts_mxfp8_products_at_their_rate():
    """Three products of each converted weight, with two operations for each token."""
    plan = planned("--plan.device=b200", "--float8.enable", "--float8.recipe=mxfp8")
    n_layers, dim, vocabulary, tokens = 6, 256, 272, 2 * 256
    converted = plan.n_parameters - 2 * vocabulary * dim - (2 * n_layers + 1) * dim
    assert plan.cost.flops["fp8"] == 6 * converted * tokens


@pytest.mark.nightly
def test_a_plan_counts_emulated_products_in_the_dtype_of_the_model():
    plan = planned("--plan.device=h100", "--float8.enable", "--float8.recipe=mxfp8", "--float8.emulate")
    assert plan.cost.flops == planned("--plan.device=h100").cost.flops
    assert set(plan.cost.flops) == {"bf16"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--int8.enable"], "int8.enable = true: the plan has no rates of INT8 products; set false"),
        (["--float8.enable", "--float8.recipe=mxfp8"], 'float8.recipe = "mxfp8": h100 has no MXFP8 products'),
    ],
    ids=["int8", "mxfp8 before Blackwell"],
)
def test_products_without_a_rate_are_not_planned(options, problem):
    with pytest.raises(ConfigError, match=problem):
        planned("--plan.device=h100", *options)
