"""QK-clip: the largest logits of a step equal a direct computation, the clipped weights have the threshold as their
largest logit, and every layout does what one process does."""

import itertools
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.helpers.cases import Case, cases
from tests.helpers.config import assert_rejected, load
from tests.parallel.test_layouts import (
    COMPILED,
    CP,
    DOCUMENTS,
    FULL,
    MUON,
    PP,
    REPLICATE,
    SELECTIVE,
    SHARD,
    TP,
    ULYSSES,
    USP,
    final_weights,
    schedule,
    trace_with_checkpoint,
    two_steps,
    with_batches,
    world_size,
)
from tests.parallel.test_layouts import TOLERANCE as LAYOUT_TOLERANCE
from tests.parallel.test_parity import CPU, compare, resolve, trace
from tests.techniques.test_mla import KEYS_ONLY, LATENT
from titanlite import build, config
from titanlite.data.loader import SequenceShard, collate
from titanlite.init import init_weights
from titanlite.model import ScaledDotProductAttention
from titanlite.techniques import qk_clip
from titanlite.techniques.qk_clip import QkClip
from titanlite.tools.parity.reference import RandomSequences, run_reference
from titanlite.tools.parity.training_run import TrainingRun

THRESHOLD = 0.02
"""Below the largest logits of some of the heads in each of three steps: they are from 0.01 to 0.07."""
CLIP = MUON | {"optimizer__qk_clip_threshold": THRESHOLD}
BIASES = {"model__n_kv_heads": 8, "model__attention_bias": "all"}
WINDOW = {"model__sliding_window": 5}
LAYOUTS: dict[str, dict[str, Any]] = {
    "shard x tp": Case(SHARD | TP, always=True),
    "pp x shard, latents": Case(PP | SHARD | LATENT, always=True),
    "cp x tp, document mask": CP | TP | DOCUMENTS,
    "tp, biases": TP | BIASES,
}
LAYOUTS |= {
    "replicate": REPLICATE,
    "shard, latents of keys only": SHARD | LATENT | KEYS_ONLY,
    "tp, latents": TP | LATENT,
    "zero-bubble, tp": schedule("InterleavedZeroBubble") | TP,
    "ring 2 x ulysses 2, window": USP | WINDOW,
    "ring 2 x ulysses 2, document mask": USP | DOCUMENTS,
    "ulysses, latents": ULYSSES | LATENT,
    "shard, window, document mask": SHARD | WINDOW | DOCUMENTS,
    "full AC, cp, latents": FULL | CP | LATENT,
    "selective AC, tp": SELECTIVE | TP,
    "compiled, tp": COMPILED | TP,
    "compiled, full AC, shard": COMPILED | FULL | SHARD,
    "compiled, selective AC, cp": COMPILED | SELECTIVE | CP,
}


# A direct computation ------------------------------------------------------------------------------------------------


def direct(q_BTHK: Tensor, k_BTGK: Tensor, window: int, positions_BT: Tensor | None) -> Tensor:
    """Return the largest logit of each head, [H], from the full matrix of logits."""
    length = q_BTHK.shape[1]
    k_BTHK = k_BTGK.repeat_interleave(q_BTHK.shape[2] // k_BTGK.shape[2], dim=2)
    logits_BHTS = torch.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK) / math.sqrt(q_BTHK.shape[-1])
    seen_TS = torch.ones(length, length, dtype=torch.bool).tril()
    if window:
        seen_TS &= torch.ones(length, length, dtype=torch.bool).triu(1 - window)
    seen_BTS = seen_TS.expand(len(q_BTHK), -1, -1)
    if positions_BT is not None:
        documents_BT = (positions_BT == 0).cumsum(1)
        seen_BTS = seen_BTS & (documents_BT.unsqueeze(1) == documents_BT.unsqueeze(2))
    return logits_BHTS.masked_fill(~seen_BTS.unsqueeze(1), -math.inf).amax((0, 2, 3))


def direct_logits(job: config.Config) -> Tensor:
    """Return the largest logit of each layer and head in the first step of a config, [L, H], in this process."""
    model = build.meta_model(job)
    model.materialize(CPU)
    init_weights(model, seed=job.debug.seed, n_layers=job.model.n_layers, device=CPU)
    largest: list[Tensor] = []

    def record(module: ScaledDotProductAttention, inputs: tuple[Any, ...]) -> None:
        if len(inputs) == 4:  # documents are attended to one by one, by calls with three
            q, k, _, documents = inputs
            largest.append(direct(q, k, module.window, None if documents is None else documents.positions_BT))

    for block in model.layers.values():
        block.attention.inner_attention.register_forward_pre_hook(record)
    sequences = RandomSequences(job)
    read = [sequences[index] for index in range(job.training.global_batch_size)]
    batch = collate(read, SequenceShard(), document_mask=job.training.document_mask, pin=False)
    with torch.no_grad():
        model(batch.tokens, **{key: value for key, value in batch.inputs().items() if key != "targets"})
    return torch.stack(largest)


def logits_of_steps(job: config.Config, n: int) -> list[dict[int, Tensor]]:
    """Return the largest logit of each head before each of n steps on the first batch, by layer, on this rank. A
    validation before a step must not count."""
    run, found = TrainingRun(job, CPU), []
    batches = run.loader.next()
    for _ in range(n):
        run.gradients(batches)
        run.train_step.validate(run.loader.next())
        clip = run.optimizer.clip
        found.append(dict(zip(map(int, run.model.layers), clip.largest().clone(), strict=True)))
        totals = run.totals(*run.gradients(batches))
        run.update(totals)
    run.loader.close()
    return found


def logits_of_layout(ranks: Any, job: config.Config, n: int) -> list[Tensor]:
    """Return the largest logits before each of n steps, [L, H], of a layout. All ranks agree on them."""
    steps = []
    for of_ranks in zip(*ranks(job.parallelism.world_size).run(logits_of_steps, job=job, n=n), strict=True):
        layers: dict[int, Tensor] = {}
        for of_rank in of_ranks:
            for layer, logits_H in of_rank.items():
                assert torch.equal(layers.setdefault(layer, logits_H), logits_H)
        steps.append(torch.stack([layers[layer] for layer in sorted(layers)]))
    return steps


@cases(
    "name",
    [name for name in LAYOUTS if "compiled" not in name],
    always=["cp x tp, document mask", "pp x shard, latents"],
)
def test_the_largest_logits_equal_a_direct_computation(ranks, tmp_path, name):
    """In float64, of sums over at most 10 products."""
    options = with_batches(CLIP | LAYOUTS[name])
    job = resolve(tmp_path, world_size(options), options)
    (actual,) = logits_of_layout(ranks, job, 1)
    torch.testing.assert_close(actual, direct_logits(job), rtol=1e-12, atol=0)


@pytest.mark.parametrize("seed", range(5))
def test_blocks_of_queries_are_all_looked_at(seed):
    torch.manual_seed(seed)
    q, k = torch.randn(2, 16, 4, 6, dtype=torch.float64), torch.randn(2, 16, 2, 6, dtype=torch.float64)
    positions = torch.cat([torch.arange(7), torch.arange(9)]).expand(2, -1)
    for window, documents in ((0, None), (3, None), (0, positions), (5, positions)):
        for size in (2**26, 3 * 2 * 4 * 16, 1):
            largest_H = torch.full((4,), -math.inf, dtype=torch.float64)
            with mock.patch.object(qk_clip, "LOGITS", size):
                qk_clip.record(largest_H, q, k, documents, window, "", "")
            torch.testing.assert_close(largest_H, direct(q, k, window, documents), rtol=1e-14, atol=0)


# What is scaled ------------------------------------------------------------------------------------------------------

ATTENTIONS = {
    "a KV head for two query heads": {},
    "a KV head for each query head": {"model__n_kv_heads": 8},
    "biases": BIASES,
    "latents": LATENT,
    "latents of keys only": LATENT | KEYS_ONLY,
}
STILL = {"model__n_layers": 1, "optimizer__lr": 1e-30, "training__global_batch_size": 8}
"""One layer, since clipping changes what later layers see, and steps that change no weight in float64."""


@cases(
    ("name", "layout"),
    itertools.product(ATTENTIONS, ["one process", "shard x tp"]),
    always=[*((name, "one process") for name in ATTENTIONS), ("latents", "shard x tp")],
)
def test_a_clipped_head_has_the_threshold_as_its_largest_logit(ranks, tmp_path, name, layout):
    parallelism = {} if layout == "one process" else SHARD | TP
    options = with_batches(CLIP | ATTENTIONS[name] | parallelism | {"accumulation_steps": 1}) | STILL
    plain = resolve(tmp_path, world_size(parallelism), options | {"optimizer__qk_clip_threshold": 1e9})
    before = logits_of_layout(ranks, plain, 1)[0]
    threshold = before.median().item()  # half of the heads are clipped
    job = plain.replace(optimizer__qk_clip_threshold=threshold)
    first, second, third = logits_of_layout(ranks, job, 3)
    assert torch.equal(first, before)
    clipped = first > threshold
    assert 0 < clipped.sum() < clipped.numel()
    torch.testing.assert_close(second[clipped], torch.full_like(second[clipped], threshold), rtol=1e-13, atol=0)
    assert torch.equal(second[~clipped], first[~clipped]), "a head below the threshold changed"
    torch.testing.assert_close(third, second, rtol=1e-13, atol=0)


def weights_after_a_step(tmp_path: Path, options: dict[str, Any], threshold: float) -> dict[str, Tensor]:
    """Return the weights of the attention layer after a step that only clips."""
    job = resolve(tmp_path, 1, with_batches(CLIP | options) | STILL | {"optimizer__qk_clip_threshold": threshold})
    prefix = "final weight layers.0.attention."
    trace = run_reference(job, CPU, steps=1)
    return {name.removeprefix(prefix): weight for name, weight in trace.items() if name.startswith(prefix)}


@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name != "biases"])
def test_only_queries_and_keys_of_each_head_are_scaled(tmp_path, name):
    """By gamma, its root or nothing, as the report has it, and nothing for keys that several query heads share."""
    options = ATTENTIONS[name]
    before, after = (weights_after_a_step(tmp_path, options, threshold) for threshold in (1e9, 0.01))
    job = resolve(tmp_path, 1, with_batches(CLIP | options) | STILL)
    root_H = (0.01 / direct_logits(job)[0]).sqrt()
    assert (root_H < 1).all()
    head_dim, ratios = job.model.head_dim, {key: after[key] / before[key] for key in before}
    if "latents" in name:
        mla = job.model.mla
        queries = torch.ones(8, head_dim, dtype=torch.float64) * root_H[:, None]
        queries[:, mla.qk_nope_head_dim :] = root_H[:, None] ** 2
        keys = torch.ones(8, mla.qk_nope_head_dim + mla.v_head_dim, dtype=torch.float64)
        keys[:, : mla.qk_nope_head_dim] = root_H[:, None]
        expected = {"wq.weight" if "only" in name else "wq_b.weight": queries, "wkv_b.weight": keys}
    elif job.model.n_kv_heads == 8:
        factors = root_H[:, None].expand(8, head_dim)
        expected = {"wq.weight": factors, "wk.weight": factors}
    else:
        expected = {"wq.weight": root_H[:, None].expand(8, head_dim) ** 2}
    assert expected.keys() <= ratios.keys()
    for key, ratio in ratios.items():
        factor = expected.get(key, torch.ones(1)).flatten().to(ratio.dtype)
        factors = factor.view(-1, *[1] * (ratio.dim() - 1)).expand_as(ratio)
        torch.testing.assert_close(ratio, factors, rtol=1e-13, atol=0)


def test_biases_are_scaled_with_their_weights(tmp_path):
    job = resolve(tmp_path, 1, with_batches(CLIP | BIASES))
    model = build.meta_model(job)
    model.materialize(CPU)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    clip = build.build_optimizer(job, model).clip
    clip.largest_LH[0].fill_(4 * THRESHOLD)
    clip.step(None)
    for name, factor in {"wq": 0.5, "wk": 0.5, "wv": 1.0, "wo": 1.0}.items():
        for parameter in getattr(model.layers["0"].attention, name).parameters():
            torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, factor), rtol=1e-15, atol=0)


def test_a_step_that_is_not_taken_scales_nothing(tmp_path):
    job = resolve(tmp_path, 1, with_batches(CLIP))
    model = build.meta_model(job)
    model.materialize(CPU)
    init_weights(model, seed=0, n_layers=2, device=CPU)
    clip = build.build_optimizer(job, model).clip
    before = model.layers["0"].attention.wq.weight.detach().clone()
    clip.largest_LH.fill_(1.0)
    clip.step(torch.tensor(1.0))
    assert torch.equal(model.layers["0"].attention.wq.weight, before)
    clip.step(torch.tensor(0.0))
    torch.testing.assert_close(model.layers["0"].attention.wq.weight.detach(), before * THRESHOLD)


# Layouts -------------------------------------------------------------------------------------------------------------


@cases("name", LAYOUTS)
def test_layout_matches_reference(ranks, tmp_path, name):
    options = with_batches(CLIP | LAYOUTS[name])
    actual = compare(ranks, tmp_path, world_size(options), options)
    assert {name: d for name, d in actual.items() if d > LAYOUT_TOLERANCE} == {}


@pytest.mark.nightly
def test_it_changes_the_weights_and_a_high_threshold_does_not(ranks, tmp_path):
    """Bit for bit: without heads above the threshold, and without the option, which registers no hook."""
    layout = with_batches(MUON | SHARD | TP)
    off, high, low = (
        ranks(4).run(trace, job=resolve(tmp_path, 4, layout | {"optimizer__qk_clip_threshold": threshold}))[0]
        for threshold in (0, 1e9, THRESHOLD)
    )
    assert all(torch.equal(off[name], high[name]) for name in off)
    assert not torch.equal(off["step 2 loss"], low["step 2 loss"])


def test_without_the_option_there_is_no_hook(tmp_path):
    for options, n in ((MUON, 0), (CLIP, 1)):
        job = resolve(tmp_path, 1, with_batches(options))
        model = build.meta_model(job)
        model.materialize(CPU)
        assert (build.build_optimizer(job, model).clip is not None) == n
        assert len(model.layers["0"].attention.inner_attention._forward_pre_hooks) == n


@pytest.mark.nightly
def test_a_resumed_run_continues_bit_for_bit(ranks, tmp_path):
    layout = CLIP | SHARD | TP
    job, _ = two_steps(ranks, tmp_path, layout, tmp_path / "two")
    _, resumed = two_steps(ranks, tmp_path, layout, tmp_path / "two")
    straight, *_ = ranks(4).run(trace_with_checkpoint, job=job, folder=tmp_path / "four", steps=4)
    for name, weight in final_weights(straight).items():
        assert torch.equal(weight, resumed[name]), name
    plain = job.replace(optimizer__qk_clip_threshold=0.0)
    other, *_ = ranks(4).run(trace_with_checkpoint, job=plain, folder=tmp_path / "plain", steps=4)
    assert any(not torch.equal(weight, other[name]) for name, weight in final_weights(straight).items())


# Injected bugs -------------------------------------------------------------------------------------------------------


def _largest_of_this_rank_only(rank: int) -> Any:
    return mock.patch.object(QkClip, "largest", lambda self: self.largest_LH)


def _heads_of_the_first_rank(rank: int) -> Any:
    real = QkClip.__init__
    return mock.patch.object(QkClip, "__init__", lambda self, *args: real(self, *args[:-1], 0))


def _rows_of_the_first_shard(rank: int) -> Any:
    real = qk_clip.shard_slice
    return mock.patch.object(qk_clip, "shard_slice", lambda x: real(x)._replace(offset=(0,) * x.dim()))


def _keys_of_this_rank_only(rank: int) -> Any:
    real = qk_clip._gathered

    def own(k: Tensor, *args: Any) -> Any:
        gathered, at_T, documents = real(k, *args)
        far = torch.zeros_like(gathered)
        far[:, at_T] = k
        return far, at_T, documents

    return mock.patch.object(qk_clip, "_gathered", own)


def _logits_of_the_last_step_stay(rank: int) -> Any:
    return mock.patch.object(QkClip, "reset")


@pytest.mark.parametrize(
    ("bug", "layout"),
    [
        (_largest_of_this_rank_only, SHARD),
        (_heads_of_the_first_rank, TP),
        (_rows_of_the_first_shard, SHARD),
        (_keys_of_this_rank_only, CP),
        (_logits_of_the_last_step_stay, SHARD),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_injected_bug_fails(ranks, tmp_path, bug, layout):
    actual = compare(ranks, tmp_path, 2, with_batches(CLIP | layout), bug)
    assert max(d for name, d in actual.items() if name.startswith("final weight")) > 1e6 * LAYOUT_TOLERANCE


# Options -------------------------------------------------------------------------------------------------------------

QK_CLIP = "optimizer.qk_clip_threshold"
ON = {"optimizer.name": "Muon", QK_CLIP: 100.0}
REJECTED = [
    ({QK_CLIP: 100.0}, {QK_CLIP: 'read only when optimizer.name is "Muon"; set that, or remove it'}),
    ({**ON, "model.qk_norm": True}, {QK_CLIP: "norms of queries and keys bound the logits"}),
    (
        {**ON, "fault_tolerance.enable": True, "fault_tolerance.group_size": 2},
        {QK_CLIP: "the largest logits are those of one group; set 0, or fault_tolerance.enable = false"},
    ),
]


@pytest.mark.parametrize(("settings", "rejected"), REJECTED, ids=str)
def test_rejected(tmp_path: Path, settings: dict[str, Any], rejected: dict[str, Any]):
    assert_rejected(lambda: load(tmp_path, settings), settings, rejected)
