"""Losses of the datasets of a mixture. The parity tests compare them with one process under every layout."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from titanlite.loss import IGNORED, chunked_cross_entropy
from titanlite.techniques.data.dataset_losses import DatasetLosses
from titanlite.tools.parity.reference import RandomSequences

T, BATCH = 4, 6


class Rank:
    """One data-parallel rank of several, with an output head that has the token losses it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, data_rank: int = 0, degree: int = 1, contributes: bool = True):
        monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
        self.output: Any = SimpleNamespace(loss=lambda losses, targets, record: record(losses, targets))
        model = SimpleNamespace(output=self.output)
        train_step: Any = SimpleNamespace(
            model=model,
            parallelism=SimpleNamespace(data_parallel_degree=degree, context_parallel_degree=1),
            device=torch.device("cpu"),
            contributes_loss=contributes,
        )
        training: Any = SimpleNamespace(global_batch_size=BATCH, seq_len=T)
        mixture = SimpleNamespace(
            names=["a", "b", "c"],
            datasets_of=lambda positions: [p % 3 for p in positions],
            metrics=lambda position: {},
        )
        self.loader: Any = SimpleNamespace(position=0)
        self.losses = DatasetLosses(mixture, self.loader, train_step, training, data_rank=data_rank)

    def end_step(self, position: int, *, is_test: bool = False) -> None:
        """End a step whose global batch ends before an index."""
        self.loader.position = position
        self.losses.after_backward(1, [], torch.zeros(()), is_test=is_test)

    def forward(self, of_sequences: list[float], n_ignored: int = 0) -> None:
        """A microbatch of sequences whose tokens have these losses, but for the first ones of each."""
        losses = torch.tensor(of_sequences)[:, None].repeat(1, T)
        targets = torch.zeros(len(of_sequences), T, dtype=torch.int64)
        losses[:, :n_ignored], targets[:, :n_ignored] = 0, IGNORED
        self.output.loss(losses.flatten(), targets.flatten())


def test_losses_are_means_over_the_tokens_of_all_steps_since_the_last_reading(monkeypatch):
    rank = Rank(monkeypatch)
    rank.losses.before_backward(1)
    rank.forward([1, 2, 3, 4], n_ignored=1)
    rank.forward([5, 6])
    rank.end_step(BATCH)
    a, b, c = (3 * 1 + 3 * 4) / 6, (3 * 2 + 4 * 5) / 7, (3 * 3 + 4 * 6) / 7
    assert rank.losses.metrics() == pytest.approx({"data/a/loss": a, "data/b/loss": b, "data/c/loss": c})
    for position, loss in ((2 * BATCH, 1.0), (3 * BATCH, 2.0)):
        rank.losses.before_backward(1)
        rank.forward([loss] * BATCH)
        rank.end_step(position)
    assert rank.losses.metrics() == dict.fromkeys(("data/a/loss", "data/b/loss", "data/c/loss"), 1.5)
    assert rank.losses.metrics() == {}


def test_a_rank_has_every_dth_sequence(monkeypatch):
    rank = Rank(monkeypatch, data_rank=1, degree=2)
    rank.losses.before_backward(1)
    rank.forward([1, 2, 3])  # of the global indices 7, 9, 11
    rank.end_step(2 * BATCH)
    assert rank.losses.metrics() == {"data/a/loss": 2, "data/b/loss": 1, "data/c/loss": 3}


def test_validation_is_not_recorded(monkeypatch):
    rank = Rank(monkeypatch)
    rank.forward([1.0] * BATCH)
    rank.losses.before_backward(1)
    rank.forward([2.0] * BATCH)
    rank.end_step(BATCH)
    rank.forward([1.0] * BATCH)
    assert set(rank.losses.metrics().values()) == {2.0}


def test_the_test_of_the_last_weights_is_not_recorded(monkeypatch):
    rank = Rank(monkeypatch)
    rank.losses.before_backward(1)
    rank.forward([1.0] * BATCH)
    rank.end_step(BATCH, is_test=True)
    assert rank.losses.metrics() == {}


def test_a_step_without_a_finite_loss_does_not_count(monkeypatch):
    rank = Rank(monkeypatch)
    for position, loss in ((BATCH, 2.0), (2 * BATCH, float("nan")), (3 * BATCH, float("inf"))):
        rank.losses.before_backward(1)
        rank.forward([loss, *[2.0] * (BATCH - 1)])
        rank.end_step(position)
    assert rank.losses.totals().tolist() == [[2 * 2.0 * T, 2 * T]] * 3


def test_a_rank_that_contributes_no_loss_adds_nothing(monkeypatch):
    rank = Rank(monkeypatch, contributes=False)
    rank.losses.before_backward(1)
    rank.end_step(BATCH)
    assert rank.losses.totals().tolist() == [[0, 0]] * 3


@pytest.mark.parametrize("n_chunks", [1, 3])
@pytest.mark.parametrize("with_gradient", [True, False])
def test_the_losses_that_are_recorded_add_up_to_the_loss(n_chunks, with_gradient):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 8, dtype=torch.float64, generator=generator) for n in (10, 20))
    targets, recorded = torch.randint(20, (10,), generator=generator), []
    targets[4] = IGNORED
    x, weight = x.requires_grad_(with_gradient), weight.requires_grad_(with_gradient)
    options: Any = {"n_chunks": n_chunks, "loss_parallel": True, "record": lambda *both: recorded.append(both)}
    loss = chunked_cross_entropy(x, weight, targets, **options)
    ((losses, own_targets),) = recorded
    assert loss.requires_grad == with_gradient
    assert not losses.requires_grad
    assert own_targets is targets
    expected = -(x @ weight.T).log_softmax(1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
    torch.testing.assert_close(losses, expected.where(targets != IGNORED, 0).detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(losses.sum(), loss.detach(), rtol=1e-13, atol=0)


def test_random_sequences_count_as_three_datasets():
    assert RandomSequences.datasets_of(RandomSequences, range(4, 8)) == [1, 2, 0, 1]
