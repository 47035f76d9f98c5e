"""Muon: the iteration, what each rank is assigned and sends, and the step. Parity with one process over layouts is in
test_layouts.py and test_moe.py."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from titanlite.config.schema import Optimizer
from titanlite.optimizer import clipped_step
from titanlite.parallel.shards import Slice
from titanlite.techniques import muon
from titanlite.techniques.muon import Slices, Unit, assign, build_muon, newton_schulz

LR, DECAY = 0.01, 0.1


def options(dtype: str = "float64", **changes: Any) -> Optimizer:
    return Optimizer(name="Muon", muon_dtype=dtype, lr=LR, weight_decay=DECAY, **changes)


@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (3, 24, 24)], ids=str)
def test_singular_values_become_about_one(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    values = torch.linalg.svdvals(newton_schulz(matrix, 5))
    assert values.min() > 0.6
    assert values.max() < 1.25
    one, _, other = torch.linalg.svd(matrix, full_matrices=False)
    rotated = one.mT @ newton_schulz(matrix, 5) @ other.mT  # the singular vectors stay
    torch.testing.assert_close(rotated, torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1)), atol=1e-12, rtol=0)


def test_a_matrix_of_zeros_stays_zero():
    assert newton_schulz(torch.zeros(4, 8), 5).abs().max() == 0


def two_weights(shape: tuple[int, ...] = (24, 40)) -> tuple[nn.Parameter, nn.Parameter]:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(shape, dtype=torch.float64)), nn.Parameter(torch.ones(5, dtype=torch.float64))


def test_two_steps_are_those_of_the_papers():
    """Nesterov's momentum, then U V^T as the iteration gives it, scaled to an RMS of 0.2 lr, and decoupled decay."""
    weight, bias = two_weights()
    optimizer = build_muon([("layers.0.w", weight), ("layers.0.norm", bias)], options(), None)
    expected, momentum = weight.detach().clone(), torch.zeros_like(weight)
    for number in range(2):
        gradient = torch.randn(24, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        weight.grad, bias.grad = gradient.clone(), torch.ones_like(bias)
        optimizer.step()
        momentum = 0.95 * momentum + 0.05 * gradient
        update = newton_schulz(0.05 * gradient + 0.95 * momentum, 5)
        expected = expected * (1 - LR * DECAY) - LR * 0.2 * math.sqrt(40) * update
        torch.testing.assert_close(weight.detach(), expected, atol=1e-14, rtol=0)
    torch.testing.assert_close(bias.detach(), torch.full_like(bias, 1 - 2 * LR), atol=1e-6, rtol=0)  # AdamW, no decay


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9")
def test_in_bfloat16_it_is_torch_s_to_rounding():
    """bfloat16 rounds each of some 15 products to 2^-9; torch's norm is in bfloat16 too."""
    weight, bias = two_weights((32, 64))
    weight, other = (nn.Parameter(weight.detach().float()) for _ in range(2))
    bias = nn.Parameter(bias.detach().float())
    ours = build_muon([("layers.0.w", weight), ("norm", bias)], options("bfloat16"), None)
    settings = {"lr": LR, "weight_decay": DECAY, "momentum": 0.95, "nesterov": True}
    torchs = torch.optim.Muon([other], **settings, adjust_lr_fn="match_rms_adamw")
    before = weight.detach().clone()
    weight.grad = torch.randn(32, 64)
    other.grad, bias.grad = weight.grad.clone(), torch.zeros(5)
    ours.step()
    torchs.step()
    moved = (other - before).norm()
    assert (weight - other).norm() < 0.05 * moved
    assert (weight - before).norm() > 0.9 * moved


def test_embedding_head_norms_and_biases_are_adamw_s():
    names = {"layers.0.attention.wq.weight": (4, 4), "layers.0.feed_forward.experts.w1": (2, 4, 4)}
    others = {"tok_embeddings.weight": (6, 4), "output.weight": (6, 4), "norm.weight": (4,), "layers.0.wq.bias": (4,)}
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in (names | others).items()}
    optimizer = build_muon(parameters.items(), options("float32"), None)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = {name: set(optimizer.state[parameter]) for name, parameter in parameters.items()}
    assert states == {
        **{name: {"momentum_buffer"} for name in names},
        **{name: {"step", "exp_avg", "exp_avg_sq"} for name in others},
    }
    decayed = {id(x): group["weight_decay"] for group in optimizer.param_groups for x in group["params"]}
    without = {name for name, parameter in parameters.items() if not decayed[id(parameter)]}
    assert without == {"norm.weight", "layers.0.wq.bias"}


def test_a_clipped_step_is_that_of_scaled_gradients():
    results = []
    for scaled in (False, True):
        weight, bias = (nn.Parameter(x.detach().float()) for x in two_weights())
        optimizer = build_muon([("layers.0.w", weight), ("layers.0.norm", bias)], options("float32"), None)
        for number in range(2):
            gradient = torch.randn(24, 40, generator=torch.Generator().manual_seed(number))
            factor = 0.25 if number else 0.5
            weight.grad, bias.grad = gradient * (factor if scaled else 1), torch.ones(5) * (factor if scaled else 1)
            if scaled:
                optimizer.step()
            else:
                clipped_step(optimizer, torch.tensor(factor, dtype=torch.float64), torch.tensor(True))
        results.append([weight.detach(), bias.detach()])
    torch.testing.assert_close(*results, rtol=0, atol=2**-20)


def test_a_step_that_is_not_finite_changes_nothing():
    weight, bias = (nn.Parameter(x.detach().float()) for x in two_weights())
    optimizer = build_muon([("layers.0.w", weight), ("layers.0.norm", bias)], options("float32"), None)
    weight.grad, bias.grad = torch.randn(24, 40), torch.ones(5)
    optimizer.step()
    before = [x.detach().clone() for x in (weight, bias, optimizer.state[weight]["momentum_buffer"])]
    weight.grad[0, 0] = math.nan
    clipped_step(optimizer, torch.tensor(math.nan, dtype=torch.float64), torch.tensor(False))
    after = [x.detach() for x in (weight, bias, optimizer.state[weight]["momentum_buffer"])]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


# What ranks are assigned ---------------------------------------------------------------------------------------------


def test_each_matrix_is_assigned_once_and_a_round_has_units_of_about_the_same_work():
    shapes = [(8, 8), (64, 8), (6, 4, 4), (64, 64), (8, 8), (64, 8)]
    rounds = assign(shapes, 4)
    assert rounds == [
        [Unit(2, (2, 4, 4), 0), Unit(2, (2, 4, 4), 2), Unit(2, (2, 4, 4), 4), Unit(3, (64, 64), 0)],
        [Unit(1, (64, 8), 0), Unit(5, (64, 8), 0), Unit(0, (8, 8), 0), Unit(4, (8, 8), 0)],
    ]
    assert assign(shapes, 1)[0] == [Unit(2, (6, 4, 4), 0)]
    assert sorted(unit.number for units in assign(shapes, 100) for unit in units) == [0, 1, 2, 2, 2, 2, 2, 2, 3, 4, 5]


def test_of_several_replicas_one_sends():
    halves = [Slice((0, 0), (2, 4)), Slice((2, 0), (2, 4))]
    slices = Slices(Unit(0, (4, 4), 0), halves * 3)  # three replicas of two shards
    for owner in range(6):
        sent = [slices.sent(rank, owner) for rank in range(6)]
        assert sum(sent) == 16
        assert sent[owner] == 8, "the owner has its own"
    others = [next(r for r in range(1, 6, 2) if slices.sent(r, owner)) for owner in (0, 2, 4)]
    assert len(set(others)) == 3, "each replica sends to another owner"


def elements_iterated(n_ranks: int) -> int:
    """Return how many elements this rank orthogonalizes in a step."""
    model = nn.Sequential(*(nn.Linear(8, 16, bias=False) for _ in range(8)))
    fully_shard(model)
    parameters = [(f"layers.{name}", x) for name, x in model.named_parameters()]
    vector = nn.Parameter(torch.zeros(2))
    optimizer = build_muon([*parameters, ("norm", vector)], options("float32"), dist.group.WORLD)
    for parameter in (vector, *model.parameters()):
        parameter.grad = torch.ones_like(parameter)
    count = 0

    def counted(matrix: torch.Tensor, n_steps: int) -> torch.Tensor:
        nonlocal count
        count += matrix.numel()
        return newton_schulz(matrix, n_steps)

    with mock.patch.object(muon, "newton_schulz", counted):
        optimizer.step()
    return count


@pytest.mark.parametrize("n", [2, 4])
def test_the_work_is_divided_among_the_ranks(ranks, n):
    assert ranks(n).run(elements_iterated, n_ranks=n) == [8 * 8 * 16 // n] * n
