"""Mixture of experts: the layer against transformers and against a loop, and every layout with experts against one
process in float64."""

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.helpers.cases import Case, cases
from tests.parallel.test_layouts import (
    COMPILED,
    CP,
    DOCUMENTS,
    EVERY_SECOND_MM,
    FLOAT8,
    FULL,
    GROUPS_OF_3,
    INT8_PRODUCTS,
    MODEL,
    MUON,
    MXFP8,
    OFFLOAD,
    PP,
    REPLICATE,
    SAVED_ATTENTION,
    SELECTIVE,
    SHARD,
    TOLERANCE,
    TP,
    ULYSSES,
    USP,
    final_weights,
    graphs,
    local_fractions,
    schedule,
    two_steps,
    values_of_steps,
    with_batches,
    world_size,
)
from tests.parallel.test_parity import CPU, CountCalls, compare, forward_backward, resolve
from titanlite import build
from titanlite.build_llama import build_llama
from titanlite.config import Config
from titanlite.config.schema import Model
from titanlite.init import init_weights
from titanlite.metrics.flops import flops_per_token
from titanlite.model import Llama
from titanlite.parallel import fsdp, mesh
from titanlite.techniques.moe import fsdp as moe_fsdp
from titanlite.techniques.moe import layer, operators, parallel
from titanlite.techniques.moe.balance import LoadBalance
from titanlite.techniques.moe.layer import MixtureOfExperts
from titanlite.tools.parity.compare import differences
from titanlite.tools.parity.reference import run_reference

DIM, TOKENS = 32, 50


def mixture(dtype: torch.dtype, **options: Any) -> MixtureOfExperts:
    """Return a mixture of 8 experts of width 16 with random weights."""
    moe = {"n_experts": 8, "n_experts_per_token": 3, "expert_dim": 16, **options}
    section = Model(flavor="debug", dim=DIM, moe=moe)
    module = MixtureOfExperts(section).to(dtype)
    for index, parameter in enumerate(module.parameters()):
        nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(index))
    return module


def routing(module: MixtureOfExperts) -> layer.Router:
    """Return the router of a mixture, whose loads of the last step are not equal."""
    module.router.load = torch.tensor([7, 0, 1, 30, 2, 2, 5, 3])
    module.router.tokens_per_step = 4 * TOKENS
    return module.router


def tokens(dtype: torch.dtype) -> Tensor:
    return torch.randn(TOKENS, DIM, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()


def outputs_and_gradients(module: nn.Module, x_ND: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    out = module(x_ND)
    weighting = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(2))
    gradients = torch.autograd.grad((out * weighting).sum(), [x_ND, *weights.values()])
    return {"output": out.detach(), **dict(zip(["x", *weights], gradients, strict=True))}


# The layer against a loop --------------------------------------------------------------------------------------------


def loop_over_tokens(module: MixtureOfExperts, x_ND: Tensor) -> Tensor:
    """Compute the layer by its definition: token by token, expert by expert."""
    moe, experts, rows = module.router.moe, module.experts, []
    for x_D in x_ND:
        logits_E = module.router.weight @ x_D
        scores_E = logits_E.sigmoid() if moe.score_function == "sigmoid" else logits_E.softmax(0)
        groups = scores_E.detach().view(moe.n_groups, -1)
        best_groups = groups.topk(2).values.sum(-1).topk(moe.n_groups_per_token).indices.tolist()
        allowed = [e for e in range(8) if e // groups.shape[1] in best_groups]
        chosen = sorted(allowed, key=lambda e: -scores_E[e].item())[: moe.n_experts_per_token]
        total = sum(scores_E[e] for e in chosen) if moe.normalize_scores else 1
        out_D = torch.zeros_like(x_D)
        for e in chosen:
            hidden = nn.functional.silu(experts.w1[e] @ x_D) * (experts.w3[e] @ x_D)
            out_D = out_D + moe.score_scaling * scores_E[e] / total * (experts.w2[e] @ hidden)
        rows.append(out_D if module.shared is None else out_D + module.shared(x_D))
    return torch.stack(rows)


OPTIONS = {
    "softmax": {},
    "one expert": {"n_experts_per_token": 1},
    "all experts": {"n_experts_per_token": 8},
    "normalized, shared": {"normalize_scores": True, "n_shared_experts": 2},
    "sigmoid, groups, scaled": {
        **{"score_function": "sigmoid", "normalize_scores": True, "score_scaling": 2.5},
        **{"n_groups": 4, "n_groups_per_token": 2},
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_layer_is_its_definition(name):
    module, x_ND = mixture(torch.float64, **OPTIONS[name]), tokens(torch.float64)
    weights = dict(module.named_parameters())
    actual = outputs_and_gradients(module, x_ND, weights)
    with mock.patch.object(module, "forward", lambda x: loop_over_tokens(module, x)):
        expected = outputs_and_gradients(module, x_ND, weights)
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_compiled_operators_are_the_eager_ones(backend):
    """Also without a token, and under selective AC, where the compiler ignores a function that is not an operator."""
    compiled, graphs = operators.compiled(backend), counters["stats"]["unique_graphs"]
    for n_tokens, n_per_token in ((5, 3), (7, 3), (0, 3), (1, 1)):
        draws = torch.Generator().manual_seed(n_tokens)
        n = n_tokens * n_per_token
        order_M = torch.randperm(n, generator=draws)
        x_ND, y_MD, gate, up, gradient = (
            torch.randn(size, DIM, dtype=torch.float64, generator=draws) for size in (n_tokens, n, n, n, n)
        )
        scores_M, row_NK = torch.rand(n, dtype=torch.float64), layer.inverse(order_M).view(n_tokens, n_per_token)
        for name, arguments in {
            "spread": (x_ND, order_M, n_per_token),
            "collect": (y_MD, row_NK),
            "swiglu": (gate, up, scores_M),
            "swiglu_backward": (gradient, gate, up, scores_M),
        }.items():
            expected = getattr(operators.EAGER, name)(*arguments)
            with create_selective_checkpoint_contexts([])[0]:
                actual = getattr(compiled, name)(*arguments)
            torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)
    assert counters["stats"]["unique_graphs"] >= graphs + 4


def test_the_backward_of_swiglu_is_its_gradient():
    arguments = [torch.randn(6, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    arguments.append(torch.rand(6, dtype=torch.float64, requires_grad=True))
    gradient = torch.randn(6, 4, dtype=torch.float64)
    out = operators.swiglu(*arguments)
    expected = *torch.autograd.grad(out, arguments, gradient), out
    torch.testing.assert_close(operators.swiglu_backward(gradient, *arguments), expected, rtol=1e-13, atol=1e-13)


def test_products_of_all_experts_at_once_equal_one_by_one():
    """In float32, grouped_mm; an expert without a token gets a gradient of 0."""
    module, x_ND = mixture(torch.float32), tokens(torch.float32)
    with torch.no_grad():
        x_ND.abs_()
        module.router.weight[5] = -1
    calls = mock.Mock(side_effect=torch._grouped_mm)
    weights = dict(module.named_parameters())
    with mock.patch.object(torch, "_grouped_mm", calls):
        grouped = outputs_and_gradients(module, x_ND, weights)
    assert calls.call_count == 3
    assert not grouped["experts.w2"][5].any()
    with mock.patch.object(layer, "GROUPED_MM_DTYPES", {}):
        one_by_one = outputs_and_gradients(module, x_ND, weights)
    assert calls.call_count == 3
    for key, value in one_by_one.items():
        torch.testing.assert_close(grouped[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_all_tokens_may_choose_one_expert(dtype):
    module, x_ND = mixture(dtype, n_experts_per_token=1), tokens(dtype)
    with torch.no_grad():
        x_ND.abs_()
        module.router.weight.fill_(-1)
        module.router.weight[3] = 1
    _, experts_NK, _ = module.router(x_ND)
    assert set(experts_NK.flatten().tolist()) == {3}
    gradients = outputs_and_gradients(module, x_ND, dict(module.named_parameters()))
    for name in ("experts.w1", "experts.w2", "experts.w3"):
        assert [bool(part.any()) for part in gradients[name]] == [e == 3 for e in range(8)]


def test_of_equal_scores_the_first_expert_is_chosen():
    module = mixture(torch.float64)
    with torch.no_grad():
        module.router.weight[:] = module.router.weight[0]
    _, experts_NK, _ = module.router(tokens(torch.float64))
    assert (experts_NK == torch.arange(3)).all()


# The balance of the load ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_auxiliary_losses_have_the_gradients_of_their_definition(score_function, scale):
    weights = {"balance_loss_weight": 0.3, "z_loss_weight": 0.2}
    with_losses = mixture(torch.float64, score_function=score_function, **weights)
    without, x_ND = mixture(torch.float64, score_function=score_function), tokens(torch.float64)
    router = routing(with_losses)
    router.loss_scale = scale
    logits_NE = x_ND @ router.weight.T
    scores_NE = logits_NE.softmax(-1) if score_function == "softmax" else logits_NE.sigmoid()
    means_E = (scores_NE / scores_NE.sum(-1, keepdim=True)).sum(0) / (4 * TOKENS)  # of the global batch
    balance_loss = 8 * (router.load.double() / 50 * means_E).sum()
    z_loss = logits_NE.exp().sum(-1).log().square().sum() / (4 * TOKENS)
    expected = torch.autograd.grad(scale * (0.3 * balance_loss + 0.2 * z_loss), [x_ND, router.weight])
    plain = outputs_and_gradients(without, x_ND, {"weight": without.router.weight})
    actual = outputs_and_gradients(with_losses, x_ND, {"weight": router.weight})
    assert torch.equal(actual["output"], plain["output"])
    for key, gradient in zip(("x", "weight"), expected, strict=True):
        torch.testing.assert_close(actual[key] - plain[key], gradient, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(router.record[8:16], (means_E * 4 * TOKENS).detach())
    torch.testing.assert_close(router.record[16], (z_loss * 4 * TOKENS).detach())


def test_a_backward_counts_tokens_once():
    module, x_ND = mixture(torch.float64), tokens(torch.float64)
    _, experts_NK, counts_E = module.router(x_ND)
    assert counts_E.tolist() == experts_NK.flatten().bincount(minlength=8).tolist()
    with torch.no_grad():
        module(x_ND)
    assert not module.router.record.any()
    checkpoint(module, x_ND, use_reentrant=False).sum().backward()
    assert module.router.record[:8].tolist() == counts_E.tolist()


def test_the_bias_changes_the_choice_and_not_the_scores():
    module, x_ND = mixture(torch.float64, balance_bias=True), tokens(torch.float64)
    expected_NE = (x_ND @ module.router.weight.T).softmax(-1)
    module.router.balance_bias[2] = 1
    scores_NK, experts_NK, _ = module.router(x_ND)
    assert (experts_NK[:, 0] == 2).all()
    torch.testing.assert_close(scores_NK, expected_NE.gather(-1, experts_NK))


def test_an_update_adjusts_the_biases_by_the_sign_of_the_load():
    module = llama(n_experts=4, n_experts_per_token=2, balance_bias=True, balance_bias_rate=0.5)
    module.materialize(torch.device("cpu"))
    balance = LoadBalance(module, SMALL, tokens_per_step=10, device=torch.device("cpu"))
    router = module.layers["3"].feed_forward.router
    for expected in ([-0.5, 0.0, 0.5, 0.5], [-1.0, 0.0, 1.0, 1.0]):
        balance.begin_step(1.0)
        for block in module.layers.values():
            block.feed_forward.router.record[:4] = torch.tensor([9, 5, 4, 2])
        balance.update(torch.tensor(True), all_reduce=False)
        assert router.balance_bias.tolist() == expected
        assert router.load.tolist() == [9, 5, 4, 2]
    balance.begin_step(1.0)
    assert router.record.tolist() == [0] * 9, "the load of an earlier step"
    router.record[:4] = torch.tensor([2, 4, 5, 9])
    balance.update(torch.tensor(False), all_reduce=False)  # a step that was skipped
    assert router.balance_bias.tolist() == expected
    assert router.load.tolist() == [9, 5, 4, 2]


def test_metrics_of_the_load():
    module = llama(n_experts=4, n_experts_per_token=2, balance_bias=True, balance_bias_rate=0.5)
    module.materialize(torch.device("cpu"))
    balance = LoadBalance(module, SMALL, tokens_per_step=10, device=torch.device("cpu"))
    for block in module.layers.values():
        block.feed_forward.router.record[:] = torch.tensor([10, 10, 0, 0, 4, 4, 1, 1, 0])
    balance.update(torch.tensor(True), all_reduce=False)
    values = balance.metrics()
    assert values["moe/tokens_per_expert_min"] == 0
    assert values["moe/tokens_per_expert_max"] == 2
    assert values["moe/load_entropy"] == pytest.approx(0.5)
    assert values["moe/balance_loss"] == pytest.approx(4 * (0.5 * 0.4 + 0.5 * 0.4))
    assert values["moe/dropped_tokens"] == 0
    assert balance.metrics()["moe/tokens_per_expert"].tolist() == [2, 2, 0, 0] * 4


# The layer against transformers --------------------------------------------------------------------------------------


def qwen3_moe() -> tuple[nn.Module, dict[str, Any]]:
    from transformers.models.qwen3_moe import configuration_qwen3_moe, modeling_qwen3_moe

    sizes = {"hidden_size": DIM, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3}
    config = configuration_qwen3_moe.Qwen3MoeConfig(**sizes, norm_topk_prob=True)
    return modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(config), {"normalize_scores": True}


def mixtral() -> tuple[nn.Module, dict[str, Any]]:
    from transformers.models.mixtral import configuration_mixtral, modeling_mixtral

    sizes = {"hidden_size": DIM, "intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 3}
    config = configuration_mixtral.MixtralConfig(**sizes)
    return modeling_mixtral.MixtralSparseMoeBlock(config), {"normalize_scores": True}


def olmoe() -> tuple[nn.Module, dict[str, Any]]:
    from transformers.models.olmoe import configuration_olmoe, modeling_olmoe

    sizes = {"hidden_size": DIM, "intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3}
    return modeling_olmoe.OlmoeSparseMoeBlock(configuration_olmoe.OlmoeConfig(**sizes)), {}


@pytest.mark.parametrize("family", [qwen3_moe, mixtral, olmoe], ids=lambda family: family.__name__)
def test_the_layer_equals_that_of_transformers(family: Callable[[], tuple[nn.Module, dict[str, Any]]]):
    theirs, options = family()
    ours = mixture(torch.float32, **options)
    with torch.no_grad():
        theirs.gate.weight.copy_(ours.router.weight)
        theirs.experts.gate_up_proj.copy_(torch.cat((ours.experts.w1, ours.experts.w3), 1))
        theirs.experts.down_proj.copy_(ours.experts.w2)
    theirs.experts.config._experts_implementation = "eager"
    x_ND = tokens(torch.float32)
    expected_ND = theirs(x_ND.unsqueeze(0))
    expected_ND = expected_ND[0] if isinstance(expected_ND, tuple) else expected_ND
    expected_ND = expected_ND.flatten(0, -2)
    torch.testing.assert_close(ours(x_ND), expected_ND, rtol=1e-5, atol=1e-6)
    weighting = torch.randn(expected_ND.shape, generator=torch.Generator().manual_seed(2))
    for gradients in zip(
        torch.autograd.grad((ours(x_ND) * weighting).sum(), [x_ND, ours.router.weight, ours.experts.w2]),
        torch.autograd.grad((expected_ND * weighting).sum(), [x_ND, theirs.gate.weight, theirs.experts.down_proj]),
        strict=True,
    ):
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


# The model -----------------------------------------------------------------------------------------------------------


SMALL = Model(flavor="debug", n_layers=4, moe={"n_experts": 4, "n_experts_per_token": 2, "balance_bias_rate": 0.5})


def llama(**moe: Any) -> Llama:
    section = Model(flavor="debug", n_layers=4, moe={"n_experts": 4, "expert_dim": 64, **moe})
    return build_llama(section, max_seq_len=8)


def layers_with_experts(model: Llama) -> list[int]:
    return [int(name) for name, block in model.layers.items() if isinstance(block.feed_forward, MixtureOfExperts)]


def test_which_layers_have_experts():
    assert layers_with_experts(llama()) == [0, 1, 2, 3]
    assert layers_with_experts(llama(n_first_dense_layers=3)) == [3]
    assert layers_with_experts(llama(every_n_layers=2)) == [1, 3]
    assert layers_with_experts(llama(every_n_layers=2, n_first_dense_layers=2)) == [3]
    assert layers_with_experts(llama(n_experts=0)) == []


def test_the_initial_weights_of_an_expert_do_not_depend_on_how_many_there_are():
    models = [llama(n_experts=n) for n in (4, 6)]
    for model in models:
        model.materialize(torch.device("cpu"))
        init_weights(model, seed=1, n_layers=4, device=torch.device("cpu"))
    few, many = (model.layers["2"].feed_forward.experts for model in models)
    for name, weight in few.named_parameters():
        assert torch.equal(weight, many.get_parameter(name)[:4])
        assert not torch.equal(weight[0], weight[1])
    assert few.w1.std().item() == pytest.approx(0.02, rel=0.05)
    assert few.w2.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.05)


def test_operations_count_the_experts_of_a_token():
    """The published active weights of Qwen3-30B-A3B are 3.3 billion, embedding included."""
    section = Model(flavor="qwen3_30b_a3b")
    sizes = {name: p.numel() for name, p in build_llama(section, max_seq_len=8).named_parameters()}
    attention = 12 * section.n_layers * section.n_heads * section.head_dim * 1000
    active = (flops_per_token(sizes, section, 1000) - attention) / 6 + section.dim * section.vocab_size
    assert active == pytest.approx(3.35e9, rel=0.01)


# Layouts -------------------------------------------------------------------------------------------------------------

EXPERTS = {
    "model__moe__n_experts": 4,
    "model__moe__n_experts_per_token": 2,
    "model__moe__expert_dim": 24,
    "model__moe__n_shared_experts": 1,
    "model__moe__n_first_dense_layers": 1,
    "model__moe__normalize_scores": True,
}
EP, EP_4, SHARD_4 = ({key: n} for key, n in (
    ("expert_parallel_degree", 2), ("expert_parallel_degree", 4), ("data_parallel_shard_degree", 4)
))  # fmt: skip
EP_8 = {"expert_parallel_degree": 8, "model__moe__n_experts": 8}
SHARD_EP = SHARD | EP
BIAS = {"model__moe__balance_bias": True, "model__moe__balance_bias_rate": 0.05}
LOSSES = {"model__moe__balance_loss_weight": 0.1, "model__moe__z_loss_weight": 0.01}
LAYOUTS = {
    "shard": Case(SHARD, always=True),
    "tp": Case(TP, always=True),
    "shard, ep": SHARD_EP,
    "tp, ep": Case(TP | EP, always=True),
    "cp, ep": Case(CP | EP, always=True),
    "shard 4, fewer experts than ranks": SHARD_4 | {"model__moe__n_experts": 2},
    "shard x tp, ep 4": SHARD | TP | EP_4,
    "pp x shard, ep": Case(PP | SHARD_EP, always=True),
    "shard, ep, full AC": SHARD_EP | FULL,
    **{
        f"{name}, {mode} AC, groups of 3": Case(
            options | GROUPS_OF_3 | {"activation_checkpoint__mode": mode},
            always=(name, mode) == ("shard, ep, balanced by losses", "full"),
        )
        for mode in ("full", "none")
        for name, options in (
            ("shard, ep, balanced by losses", SHARD_EP | LOSSES),
            ("tp", TP),
            ("pp x shard x tp, ep 4", PP | SHARD | TP | EP_4),
            ("cp, ep", CP | EP),
            ("compiled, shard, ep", COMPILED | SHARD_EP),
        )
    },
    "shard, ep, selective AC": SHARD_EP | SELECTIVE,
    "compiled, shard, ep, attention saved": Case(COMPILED | SHARD_EP | SAVED_ATTENTION, always=True),
    "shard, ep, balanced by bias": Case(SHARD_EP | BIAS, always=True),
    "tp, balanced by losses": Case(TP | LOSSES, always=True),
    "compiled, shard, ep, balanced by losses": COMPILED | SHARD_EP | LOSSES,
    "Muon, shard, ep": MUON | SHARD_EP,
    "Muon, shard 4, fewer experts than ranks": MUON | SHARD_4 | {"model__moe__n_experts": 2},
}
LAYOUTS |= {
    "pp": PP,
    "Muon, shard x tp": MUON | SHARD | TP,
    "Muon, shard x tp, ep 4": MUON | SHARD | TP | EP_4,
    "Muon, replicate x shard, ep": MUON | REPLICATE | SHARD_EP,
    "ulysses, ep": ULYSSES | EP,
    "shard 4, ep": SHARD_4 | EP,
    "shard 4, ep 4": SHARD_4 | EP_4,
    "replicate x shard, ep": REPLICATE | SHARD_EP,
    "shard x tp": SHARD | TP,
    "shard x tp, ep": SHARD | TP | EP,
    "tp, ep, balanced by losses, full AC": TP | EP | LOSSES | FULL,
    "pp, balanced by bias and losses": PP | BIAS | LOSSES,
    "compiled, tp, selective AC": COMPILED | TP | SELECTIVE,
    "cp": CP,
    "cp x tp, ep": CP | TP | EP,
    "cp x tp, ep 4": CP | TP | EP_4,
    "shard x cp, ep 4": SHARD | CP | EP_4,
    "ring x ulysses, ep 4": USP | EP_4,
    "replicate x tp, ep": REPLICATE | TP | EP,
    "pp x tp, ep": PP | TP | EP,
    "pp x cp, ep": PP | CP | EP,
    "shard, ep, CPU offload": SHARD_EP | OFFLOAD,
    "shard, ep, document mask": SHARD_EP | DOCUMENTS,
    "tp, ep, full AC": TP | EP | FULL,
    "tp, selective AC, every second mm": TP | EVERY_SECOND_MM,
    "pp x shard x tp, ep 4": PP | SHARD | TP | EP_4,
    "replicate x shard x tp, ep 4": REPLICATE | SHARD | TP | EP_4,
    "compiled, pp, full AC": COMPILED | PP | FULL,
    "compiled, cp x tp, ep 4": COMPILED | CP | TP | EP_4,
    "compiled, shard x tp, ep, selective AC": COMPILED | SHARD | TP | EP | SELECTIVE,
    "shard 4 x tp, fewer experts than ranks": SHARD_4 | TP | {"model__moe__n_experts": 2},
    "shard 4 x tp, ep, fewer experts than ranks": SHARD_4 | TP | EP | {"model__moe__n_experts": 2},
    "replicate x shard 4, fewer experts than ranks": REPLICATE | SHARD_4 | {"model__moe__n_experts": 2},
    "replicate x cp, ep": REPLICATE | CP | EP,
    "pp x replicate x shard, ep": PP | REPLICATE | SHARD_EP,
    "pp x shard x cp x tp, ep 4": PP | SHARD | CP | TP | EP_4 | BIAS | LOSSES,
    "pp x shard x cp x tp, ep 8": PP | SHARD | CP | TP | EP_8,
    "all five axes, ep 8": PP | REPLICATE | SHARD | CP | TP | EP_8 | BIAS | LOSSES,
    "all five axes, ep 4, ZBVZeroBubble": schedule("ZBVZeroBubble") | REPLICATE | SHARD | CP | TP | EP_4,
    "tp, balanced by bias": TP | BIAS,
    "cp, balanced by losses": CP | LOSSES,
    "ulysses, ep, balanced by losses": ULYSSES | EP | LOSSES,
    "replicate x shard, ep, balanced by bias and losses": REPLICATE | SHARD_EP | BIAS | LOSSES,
    "shard x tp, ep 4, balanced by bias and losses, selective AC": SHARD | TP | EP_4 | BIAS | LOSSES | SELECTIVE,
    "pp x shard, ep, balanced by losses": PP | SHARD_EP | LOSSES,
    "zero bubble, balanced by bias and losses": schedule("InterleavedZeroBubble") | SHARD_EP | BIAS | LOSSES,
    "shard x cp x tp, ep 8": SHARD | CP | TP | EP_8,
    **{
        f"{name}, shard, ep": schedule(name) | SHARD_EP
        for name in ("GPipe", "Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble", "DualPipeV")
    },
    "InterleavedZeroBubble, shard, ep": Case(schedule("InterleavedZeroBubble") | SHARD_EP, always=True),
}


@pytest.mark.timeout(900)  # 32 ranks take five minutes on two busy cores
@cases("name", LAYOUTS)
def test_layout_matches_reference(ranks, tmp_path, name):
    layout = EXPERTS | LAYOUTS[name]
    actual = compare(ranks, tmp_path, world_size(layout), with_batches(layout))
    assert {name: d for name, d in actual.items() if d > TOLERANCE} == {}
    assert len([name for name in actual if name.endswith(".router.load")]) >= 1
    assert len([name for name in actual if name.startswith("step 1") and ".experts." in name]) >= 3


def _all_tokens_to_the_first(rank: int) -> Any:
    def choose(router: layer.Router, scores_NE: Tensor) -> Tensor:
        return torch.arange(router.moe.n_experts_per_token).expand(len(scores_NE), -1)

    return mock.patch.object(layer.Router, "choose", choose)


@pytest.mark.parametrize(
    "layout",
    [SHARD_4 | EP_4, pytest.param(TP | EP, marks=pytest.mark.nightly), SHARD],
    ids=["shard 4, ep 4", "tp, ep", "shard"],
)
def test_all_tokens_may_choose_the_experts_of_one_rank(ranks, tmp_path, layout):
    """The other ranks of the layer get no row."""
    with _all_tokens_to_the_first(0):
        options = with_batches(EXPERTS | {"model__moe__n_experts_per_token": 1} | layout)
        actual = compare(ranks, tmp_path, world_size(layout), options, _all_tokens_to_the_first)
    assert {name: d for name, d in actual.items() if d > TOLERANCE} == {}


# What a layout does --------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_attention_of_blocks_with_experts_is_compiled_once(ranks, tmp_path):
    counts = []
    for n_layers in (2, 4):
        only_experts = {"model__moe__n_first_dense_layers": 0, "compile__components": '["model"]'}
        job = resolve(tmp_path, 1, MODEL | EXPERTS | COMPILED | only_experts | {"model__n_layers": n_layers})
        counts += ranks(1).run(graphs, job=job)
    assert counts[0] == counts[1] > 0


def calls(job: Config) -> Counter[str]:
    """Count the calls of aten's operators, and of the collectives that DTensor makes, in a forward and backward."""
    operators, collectives, returned = CountCalls("aten"), CountCalls("_c10d_functional"), CountCalls("c10d")
    with operators, returned:
        forward_backward(job, collectives)
    return operators.calls + collectives.calls + returned.calls


SDPA = "_scaled_dot_product_flash_attention_for_cpu"


def test_what_activation_checkpointing_repeats(ranks, tmp_path):
    """Of a layer with 2 experts on each rank, full AC repeats the products of attention (4), router (1) and shared
    experts (3), and those with w1 and w3 of each expert; and it sends counts, scores and rows there again. Neither it
    nor selective AC repeats the products with w2, or returns rows again. Both repeat 6 products of a dense layer."""
    assert (MODEL["model__n_layers"], EXPERTS["model__moe__n_shared_experts"]) == (2, 1)
    none, selective, attention, full = (
        ranks(2).run(calls, job=resolve(tmp_path, 2, MODEL | EXPERTS | SHARD_EP | mode))[0]
        for mode in ({}, SELECTIVE, SAVED_ATTENTION, FULL)
    )
    repeated = {"mm": 6 + 4 + 1 + 3 + 2 * 2, "all_to_all_single": 1 + 1 + 2, "alltoall_base_": 0}
    for name, n in repeated.items():
        assert none[name] == selective[name] > 0
        assert full[name] - none[name] == attention[name] - none[name] == n, name
    assert none["alltoall_base_"] == 2 * 2  # rows of each expert, forward and backward
    assert (none[SDPA], attention[SDPA], full[SDPA]) == (2, 2, 4)


def waits(job: Config) -> int:
    """Count how often a forward and backward read numbers of rows from the device."""
    real, reads = Tensor.tolist, 0

    def tolist(tensor: Tensor) -> list[Any]:
        nonlocal reads
        reads += 1
        return real(tensor)

    forward_backward(job, mock.patch.object(Tensor, "tolist", tolist))
    return reads


def test_the_host_waits_once_a_layer(ranks, tmp_path):
    job = resolve(tmp_path, 2, MODEL | EXPERTS | SHARD_EP | {"training__dtype": "float32"})
    assert ranks(2).run(waits, job=job) == 2 * [MODEL["model__n_layers"] - 1]


class Order(TorchDispatchMode):
    """This mode lists the operators that are called, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function).split(".")[1])
        return function(*args, **(kwargs or {}))


def order_of_a_layer(job: Config) -> list[list[str]]:
    """Return the operators of the forward and of the backward of one mixture of experts, in order."""
    layout = mesh.build_layout(job.parallelism, CPU)
    model, _ = build.build_model(job, layout, CPU)
    block, x_ND = model.layers["1"], torch.ones(8, job.model.dim, dtype=torch.float64, requires_grad=True)
    block.unshard()
    block.feed_forward.experts.unshard()
    with Order() as forward:
        out = block.feed_forward(x_ND).sum()
    with Order() as backward:
        out.backward()
    return [forward.names, backward.names]


def test_rows_travel_while_experts_compute(ranks, tmp_path):
    """Of a layer with a router, 3 products of shared experts and 2 experts on each rank. Counts, scores and the rows of
    all experts are sent before the first of them is waited for. The result of the first expert travels while the second
    computes, and in the backward so does its gradient while those of weights are computed."""
    job = resolve(tmp_path, 2, MODEL | EXPERTS | SHARD_EP)
    forward, backward = ranks(2).run(order_of_a_layer, job=job)[0]
    short = {"mm": "mm", "addmm_": "mm", "wait_tensor": "wait", "alltoall_base_": "return", "all_to_all_single": "send"}
    forward, backward = (" ".join(short[name] for name in names if name in short) for names in (forward, backward))
    router, shared, counts, scores, rows = "mm", "mm mm mm", "send wait", "send", "send send"
    arrive, result = "wait mm mm", "mm return"  # two products with what arrived
    assert forward == f"{router} {shared} {counts} {scores} {rows} wait {arrive} {arrive} {result} {result}"
    through_w2, of_rows, of_weights = "mm", "mm mm return", "mm mm mm"
    expert = f"wait {through_w2} {of_rows} {of_weights}"
    assert backward == f"{rows} {expert} {expert} {scores} wait {router} {router} {shared} {shared}"


@pytest.mark.parametrize(
    "layout",
    [SHARD_4 | {"model__moe__n_experts": 2}, SHARD | TP | EP, SHARD | TP | EP_4, SHARD_4 | EP],
    ids=["fewer experts than ranks", "shard x tp, ep", "shard x tp, ep 4", "shard 4, ep"],
)
def test_each_rank_has_one_shard_of_every_expert_weight(ranks, tmp_path, layout):
    for fractions in ranks(4).run(local_fractions, job=resolve(tmp_path, 4, MODEL | EXPERTS | layout)):
        assert {fraction for name, fraction in fractions.items() if ".experts." in name} == {1 / 4}


KINDS = ("Float8Linear", "LowPrecisionLinear")


def converted(job: Config) -> list[str]:
    """Return the names of the layers that float8 or int8 converts."""
    layout = mesh.build_layout(job.parallelism, CPU)
    model, _ = build.build_model(job, layout, CPU)
    return [name for name, module in model.named_modules() if type(module).__name__ in KINDS]


@pytest.mark.parametrize(
    "options", [pytest.param(FLOAT8, marks=pytest.mark.nightly), MXFP8, INT8_PRODUCTS], ids=["float8", "mxfp8", "int8"]
)
def test_low_precision_converts_all_but_experts(ranks, tmp_path, options):
    ((*names,),) = ranks(1).run(converted, job=resolve(tmp_path, 1, MODEL | EXPERTS | options))
    attention = [f"layers.{n}.attention.w{name}" for n in range(MODEL["model__n_layers"]) for name in "qkvo"]
    assert sorted(names) == sorted(attention + [f"layers.0.feed_forward.w{n}" for n in "123"])


RESUMED = {
    "ep 4 on tp": SHARD | TP | EP_4,
    "no ep, tp": TP,
    "pp x ep": PP | SHARD_EP,
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", RESUMED)
def test_resume_under_another_expert_parallel_degree(ranks, tmp_path, name):
    """Biases and loads of the last step are in the checkpoint: steps after it match those of the reference."""
    experts, folder = EXPERTS | BIAS | LOSSES, tmp_path / "checkpoint"
    _, before = two_steps(ranks, tmp_path, experts | SHARD_EP, folder)
    job, after = two_steps(ranks, tmp_path, experts | RESUMED[name], folder)
    reference = run_reference(job, CPU, steps=4)
    resumed = values_of_steps(before, "loss") + values_of_steps(after, "loss")
    assert resumed == pytest.approx(values_of_steps(reference, "loss"), abs=TOLERANCE)
    actual = differences(final_weights(reference), final_weights(after))
    assert {name: difference for name, difference in actual.items() if difference > TOLERANCE} == {}
    biases = [tensor for name, tensor in final_weights(after).items() if name.endswith(".balance_bias")]
    assert len(biases) == 3
    assert any(bias.any() for bias in biases)


# Injected bugs -------------------------------------------------------------------------------------------------------


def _scores_of_other_rows(rank: int) -> Any:
    real = parallel._transposed
    return mock.patch.object(parallel, "_transposed", lambda counts, n_rows: real(counts, n_rows).roll(1))


def _results_of_another_expert(rank: int) -> Any:
    real = parallel._Exchange.return_rows

    def return_rows(exchange: Any, number: int, y: Tensor, out_MD: Tensor) -> Any:
        return real(exchange, number, y.roll(1, 0), out_MD)

    return mock.patch.object(parallel._Exchange, "return_rows", return_rows)


def _no_gradient_of_the_router(rank: int) -> Any:
    real = layer.Router.forward

    def forward(self: layer.Router, x_ND: Tensor) -> tuple[Tensor, ...]:
        scores_NK, *rest = real(self, x_ND)
        return scores_NK.detach() + 0 * scores_NK, *rest

    return mock.patch.object(layer.Router, "forward", forward)


def _shared_experts_counted_twice(rank: int) -> Any:
    real = MixtureOfExperts.forward
    return mock.patch.object(MixtureOfExperts, "forward", lambda self, x: real(self, x) + self.shared(x))


def _gradients_are_not_summed_over_shards(rank: int) -> Any:
    real = fsdp.axes_of
    return mock.patch.object(moe_fsdp, "axes_of", lambda mesh, axis: real(mesh, "pp" if axis == "efsdp" else axis))


def _router_gradient_is_not_summed(rank: int) -> Any:
    return mock.patch.object(parallel, "local_weight", lambda weight: weight.to_local())


def _load_is_not_summed_over_ranks(rank: int) -> Any:
    real = LoadBalance.update
    return mock.patch.object(LoadBalance, "update", lambda self, taken: real(self, taken, all_reduce=False))


def _auxiliary_losses_of_every_tensor_parallel_rank(rank: int) -> Any:
    always = property(lambda self: True, lambda self, value: None)
    return mock.patch.object(layer.Router, "contributes", always, create=True)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("bug", "layout", "first"),
    [
        (_scores_of_other_rows, SHARD_EP, "step 1 loss"),
        (_results_of_another_expert, SHARD_EP, "step 1 loss"),
        (_no_gradient_of_the_router, SHARD_EP, "step 1 norm"),
        (_shared_experts_counted_twice, TP, "step 1 loss"),
        (_router_gradient_is_not_summed, TP | EP, "step 1 norm"),
        (_gradients_are_not_summed_over_shards, SHARD_4 | EP, "step 1 norm"),
        (_load_is_not_summed_over_ranks, SHARD_EP | LOSSES, "step 2 norm"),
        (_load_is_not_summed_over_ranks, SHARD_EP | BIAS, "step 2 loss"),
        (_auxiliary_losses_of_every_tensor_parallel_rank, TP | LOSSES, "step 1 norm"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_injected_bug_fails(ranks, tmp_path, bug, layout, first):
    actual = compare(ranks, tmp_path, world_size(layout), with_batches(EXPERTS | layout), bug)
    assert next(name for name, d in actual.items() if d > 10 * TOLERANCE) == first
