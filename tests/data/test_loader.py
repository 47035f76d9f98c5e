"""The loader: one order of packed sequences for any ranks, batch sizes and resumes; batches, prefetch, validation."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.data import (
    BYTES,
    NO_SPECIAL_TOKENS,
    T,
    as_lists,
    consume,
    flat,
    in_steps,
    numbered_sequences,
    open_loader,
    some_texts,
    training,
)
from tests.helpers.launches import wait_until
from titanlite.config.schema import Validation
from titanlite.data import loader as loader_module
from titanlite.data import packing
from titanlite.data.loader import Batch, SequenceShard, Share, n_validation_batches, validation_batches
from titanlite.data.packing import PackedSequences, ValidationSequences
from titanlite.loss import IGNORED

# Order over ranks, prefetch ------------------------------------------------------------------------------------------


def indices_of(sequences: PackedSequences, indices: range) -> list[int]:
    """Where in the flat array the sequences with these global indices are."""
    return [int(sequences[index].inputs[0]) // T for index in indices]


def test_an_epochs_order_is_a_permutation():
    sequences = numbered_sequences(50)
    epochs = [indices_of(sequences, range(50 * epoch, 50 * (epoch + 1))) for epoch in range(4)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, range(50)]}) == 5
    assert indices_of(numbered_sequences(50, seed=43), range(50)) not in epochs
    assert indices_of(numbered_sequences(50, shuffle=False), range(100)) == [*range(50), *range(50)]
    # Any index can be asked for at any time.
    assert indices_of(sequences, range(199, -1, -1)) == [index for epoch in epochs for index in epoch][::-1]


def test_the_order_never_changes():
    """Numbers of an earlier version: another order would send a resumed run over other data, unnoticed."""
    epochs = [2, 7, 5, 3, 9, 4, 8, 6, 0, 1], [3, 6, 2, 9, 8, 0, 4, 5, 1, 7]
    assert indices_of(numbered_sequences(), range(20)) == [*epochs[0], *epochs[1]]


def check_order_over_ranks() -> None:
    """12 sequences a step, 5 steps: 6 epochs of 10."""
    expected = in_steps(numbered_sequences(), 12, 5)
    for n_ranks in (1, 2, 4):
        for size in (1, 3, 12 // n_ranks):
            assert consume(numbered_sequences, n_ranks=n_ranks, steps=5, batch=12, size=size)[0] == expected


def test_order_does_not_depend_on_the_ranks():
    check_order_over_ranks()


BROKEN_READS: dict[str, Callable[..., Any]] = {
    "rank in the index": lambda read, self, first, *rest: read(self, 2 * first, *rest),
    "rank in the seed": lambda read, self, first, *rest: read(numbered_sequences(seed=42 + first), first, *rest),
    "neighbours instead of strides": lambda read, self, first, _: read(self, 3 * first, 1),
}


@pytest.mark.parametrize("broken", BROKEN_READS)
def test_an_order_that_depends_on_the_ranks_fails(monkeypatch, broken):
    real = PackedSequences.read
    monkeypatch.setattr(PackedSequences, "read", lambda *arguments: BROKEN_READS[broken](real, *arguments))
    with pytest.raises(AssertionError):
        check_order_over_ranks()


def check_resume(
    steps: int, ranks_before: int, batch_before: int, ranks_after: int, batch_after: int, off: int = 0
) -> None:
    before, states = consume(numbered_sequences, n_ranks=ranks_before, steps=steps, batch=batch_before)
    position = {"next_sequence": steps * batch_before}
    assert all({**state, "counts": 0} == {**position, "counts": 0} for state in states)
    state = {"next_sequence": states[0]["next_sequence"] + off}
    after, _ = consume(numbered_sequences, n_ranks=ranks_after, steps=3, batch=batch_after, state=state)
    consumed = [sequence for step in before + after for sequence in step]
    assert [consumed] == in_steps(numbered_sequences(), steps * batch_before + 3 * batch_after, 1), "another order"


@pytest.mark.parametrize(
    "ranks_and_batches",
    [(1, 4, 2, 4), (2, 4, 1, 4), (2, 4, 4, 4), (4, 4, 2, 4), (4, 8, 1, 8), (2, 6, 4, 8), (4, 4, 3, 6), (1, 5, 4, 4)],
)
def test_resume_on_other_ranks_keeps_the_order(ranks_and_batches):
    for steps in (0, 1, 3, 6):
        check_resume(steps, *ranks_and_batches)


def test_a_resume_one_sequence_off_fails():
    with pytest.raises(AssertionError, match="another order"):
        check_resume(3, 2, 4, 4, 4, off=1)


class EndlessSequences:
    """Endless sequences that count how many were read; the one with number `fails_at` cannot be."""

    def __init__(self, fails_at: int = -1):
        self.count, self.fails_at = 0, fails_at

    def read(self, first: int, stride: int) -> Iterator[Any]:
        while self.count != self.fails_at:
            self.count += 1
            yield packing.Sequence(*(np.full(T, first) for _ in packing.Sequence._fields)), None
            first += stride
        raise OSError("the disk is gone")

    def wait_for(self, count: int) -> None:
        wait_until(lambda: self.count == count, f"{count} sequences", seconds=10)


def test_batches_are_prefetched_but_not_without_end_nor_after_close(monkeypatch):
    monkeypatch.setattr(loader_module, "PREFETCH_STEPS", 3)
    sequences = EndlessSequences()
    loader = open_loader(sequences)
    sequences.wait_for(4 * 4)  # three steps wait to be asked for, and the next one waits for room in the queue
    time.sleep(0.05)
    sequences.wait_for(4 * 4)
    assert loader.state()["next_sequence"] == 0, "what was prefetched is not trained on yet"
    loader.next()
    sequences.wait_for(5 * 4)
    assert loader.state()["next_sequence"] == 4
    for opened in (loader, open_loader(EndlessSequences())):
        assert opened._thread in threading.enumerate()
        for _ in range(2):
            opened.close()
            assert opened._thread not in threading.enumerate()


def test_an_error_is_raised_where_the_batch_is_waited_for_each_time(monkeypatch):
    monkeypatch.setattr(loader_module, "PREFETCH_STEPS", 1)
    loader = open_loader(EndlessSequences(fails_at=6))
    loader.next()
    for _ in range(3):
        with pytest.raises(OSError, match="the disk is gone"):
            loader.next()
    assert loader.state()["next_sequence"] == 4
    loader.close()
    assert not loader._thread.is_alive()


def test_an_error_does_not_wait_for_a_read_that_hangs():
    hanging, reached = threading.Event(), threading.Event()

    class Hanging:
        def read(self, first: int, stride: int) -> Any:
            yield numbered_sequences()[first], None
            reached.set()
            hanging.wait()

    loader = open_loader(Hanging(), local_batch_size=1, global_batch_size=1)
    reached.wait(10)
    with pytest.raises(RuntimeError, match="a rank was lost"), loader:
        raise RuntimeError("a rank was lost")
    assert loader._thread.is_alive()
    hanging.set()
    loader._thread.join(10)
    assert not loader._thread.is_alive()


def test_an_error_ends_the_thread_of_data_that_are_read():
    loader = open_loader(numbered_sequences(), local_batch_size=1)
    with pytest.raises(RuntimeError), loader:
        raise RuntimeError
    loader._thread.join(10)
    assert not loader._thread.is_alive()


# Validation ----------------------------------------------------------------------------------------------------------


def validate(
    sequences: ValidationSequences,
    data_rank: int = 0,
    data_parallel_degree: int = 1,
    steps: int = -1,
    shard: SequenceShard | None = None,
    **options: Any,
) -> list[Batch]:
    """The batches that one rank validates on."""
    share = Share(data_rank, data_parallel_degree, SequenceShard() if shard is None else shard)
    return list(validation_batches(sequences, training(**options), Validation(steps=steps), share))


@pytest.mark.parametrize("length", [2, T, T + 1, T + 2, 7 * T + 3])
@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_validation_takes_every_target_once(length, n_ranks):
    sequences = ValidationSequences(np.arange(1, length + 1), NO_SPECIAL_TOKENS, T)
    for size in (1, 2, 5):
        batches = [validate(sequences, rank, n_ranks, local_batch_size=size) for rank in range(n_ranks)]
        count = n_validation_batches(
            sequences, training(local_batch_size=size), Validation(steps=-1), Share(0, n_ranks)
        )
        assert {len(own) for own in batches} == {count}, "every rank must take as many batches"
        seen: Counter[int] = Counter()
        for tokens, targets, positions, document_positions in (batch for own in batches for batch in own):
            assert tokens.shape == targets.shape == positions.shape == (size, T)
            assert document_positions is None
            valid = targets != IGNORED
            assert (targets[valid] == tokens[valid] + 1).all()
            assert (tokens[~valid] == 0).all()
            seen.update(targets[valid].tolist())
        assert seen == Counter(range(2, length + 1))


def test_validation_is_capped_by_its_steps():
    sequences = ValidationSequences(np.arange(10 * T + 1), NO_SPECIAL_TOKENS, T)
    for steps, expected in ((-1, 3), (1, 1), (2, 2), (3, 3), (4, 3)):
        sections = training(local_batch_size=2), Validation(steps=steps)
        assert n_validation_batches(sequences, *sections, Share(0, 2)) == expected
        assert [len(validate(sequences, rank, 2, steps, local_batch_size=2)) for rank in range(2)] == [expected] * 2


@pytest.mark.parametrize(("n_ranks", "size"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1)])
def test_a_capped_validation_reads_the_same_sequences_under_every_layout(n_ranks: int, size: int):
    sequences = ValidationSequences(np.arange(1, 20 * T + 2), NO_SPECIAL_TOKENS, T)
    batches = [validate(sequences, rank, n_ranks, steps=3, local_batch_size=size) for rank in range(n_ranks)]
    first_tokens = [row[0] for own in batches for batch in own for row in batch.tokens.tolist()]
    assert sorted(first_tokens) == [1 + T * number for number in range(3 * 4)]


def test_validation_ends_documents_and_stops_after_some_steps():
    tokens = np.array(flat(some_texts(20)), np.uint16)
    sequences = ValidationSequences(tokens, BYTES, T)
    every, first = (validate(sequences, steps=steps, local_batch_size=2, global_batch_size=2) for steps in (-1, 2))
    assert len(every) == -(-(len(tokens) - 1) // (2 * T))
    n_targets = sum(int((batch.targets != IGNORED).sum()) for batch in every)
    assert n_targets == len(tokens) - 20, "every token is a target but the first of each document"
    assert [batch.targets.tolist() for batch in first] == [batch.targets.tolist() for batch in every[:2]]


# What of each sequence a rank takes ----------------------------------------------------------------------------------

OWN, RING = np.array([14, 3, 4, 9, 0]), np.array([11, 0, 3, 4, 15, 14, 9, 2])
SHARD = SequenceShard(OWN, RING)
EVERYTHING = np.arange(T)


def expected_batches(
    sequences: Any, indices: list[int], size: int, shard: SequenceShard, document_mask: bool
) -> list[list[Any]]:
    """The lists of the batches of some sequences, their elements taken one by one."""
    batches = []
    for first in range(0, len(indices), size):
        rows = [as_lists(sequences[index]) for index in indices[first : first + size]]
        inputs, targets, own = ([[row[array][i] for i in shard.own] for row in rows] for array in range(3))
        if document_mask:
            positions = [own, [[row[2][i] for i in shard.ring] for row in rows]]
        else:
            positions = [[[int(i) for i in shard.own]] * size, None]
        batches.append([inputs, targets, *positions])
    return batches


def lists_of(batches: list[Batch], size: int, shard: SequenceShard) -> list[list[Any]]:
    for batch in batches:
        assert isinstance(batch, Batch)
        for tensor, indices in zip(batch, [shard.own] * 3 + [shard.ring], strict=True):
            if tensor is not None:
                assert tensor.dtype == torch.int64
                assert tensor.shape == (size, len(indices))
                assert tensor.is_contiguous(), "not contiguous"
    return [[tensor if tensor is None else tensor.tolist() for tensor in batch] for batch in batches]


def check_training(shard: SequenceShard, document_mask: bool, size: int = 3) -> None:
    """Two data-parallel ranks, two steps of twelve sequences."""
    tokens = np.array(flat(some_texts()))
    sequences = PackedSequences(tokens, BYTES, training(shuffle=True), seed=0)
    options = {"local_batch_size": size, "global_batch_size": 12, "document_mask": document_mask}
    for rank in range(2):
        loader = open_loader(sequences, data_rank=rank, data_parallel_degree=2, shard=shard, **options)
        batches = [*loader.next(), *loader.next()]
        loader.close()
        expected = expected_batches(sequences, list(range(rank, 24, 2)), size, shard, document_mask)
        assert lists_of(batches, size, shard) == expected, "another shard"


def check_validation(shard: SequenceShard, document_mask: bool, size: int = 3) -> None:
    """Two data-parallel ranks and a full split, which ends in padding."""
    sequences = ValidationSequences(np.array(flat(some_texts(20))), BYTES, T)
    n_padded = 2 * size * -(-sequences.n_sequences // (2 * size))
    options = {"local_batch_size": size, "document_mask": document_mask}
    for rank in range(2):
        batches = validate(sequences, rank, 2, shard=shard, **options)
        expected = expected_batches(sequences, list(range(rank, n_padded, 2)), size, shard, document_mask)
        assert lists_of(batches, size, shard) == expected, "another shard"


@pytest.mark.parametrize("check", [check_training, check_validation])
@pytest.mark.parametrize("document_mask", [False, True], ids=["plain", "document mask"])
def test_a_rank_takes_its_shard_of_each_sequence(check, document_mask):
    for size in (1, 3):
        check(SHARD, document_mask, size)
    check(SHARD._replace(own=EVERYTHING), document_mask)
    check(SequenceShard(EVERYTHING, EVERYTHING), document_mask)


def test_a_rank_takes_everything_unless_told_otherwise():
    sequences, shard = numbered_sequences(), SequenceShard(EVERYTHING, EVERYTHING)
    validation = ValidationSequences(sequences.tokens, NO_SPECIAL_TOKENS, T)
    loader = open_loader(sequences, local_batch_size=2, shard=SequenceShard())
    batches = loader.next()
    loader.close()
    assert lists_of(batches, 2, shard) == expected_batches(sequences, [0, 1, 2, 3], 2, shard, False)
    batches = validate(validation, steps=1, shard=SequenceShard(), local_batch_size=2)
    assert lists_of(batches, 2, shard) == expected_batches(validation, [0, 1, 2, 3], 2, shard, False)


Collate = Callable[[list[packing.Sequence], SequenceShard, bool], Batch]


def _positions_in_shard(collate: Collate, rows: Any, shard: SequenceShard, mask: bool) -> Batch:
    return collate(rows, shard, mask)._replace(positions=torch.arange(len(shard.own)).repeat(len(rows), 1))


def _next_in_shard(collate: Collate, rows: Any, shard: SequenceShard, mask: bool) -> Batch:
    batch = collate(rows, shard, mask)
    return batch._replace(targets=batch.tokens.roll(-1, dims=1))


def _document_positions_of_own(collate: Collate, rows: Any, shard: SequenceShard, mask: bool) -> Batch:
    return collate(rows, shard._replace(ring=shard.own[np.arange(len(shard.ring)) % len(shard.own)]), mask)


def _mask_forgotten(collate: Collate, rows: Any, shard: SequenceShard, mask: bool) -> Batch:
    return collate(rows, shard, mask)._replace(positions=collate(rows, shard, False).positions)


def _mask_unasked(collate: Collate, rows: Any, shard: SequenceShard, mask: bool) -> Batch:
    return collate(rows, shard, True)._replace(document_positions=None)


def _columns_first(collate: Collate, rows: Any, shard: SequenceShard, mask: bool) -> Batch:
    """As numpy leaves what it takes by an array of indices."""
    batch = collate(rows, shard, mask)
    return Batch(*(tensor if tensor is None else tensor.T.contiguous().T for tensor in batch))


INJECTED_BUGS: dict[Callable[..., Batch], bool] = {
    _positions_in_shard: False,
    _next_in_shard: False,
    _document_positions_of_own: True,
    _mask_forgotten: True,
    _mask_unasked: False,
    _columns_first: False,
}
"""Which show with a document mask, and which without one."""


@pytest.mark.parametrize("check", [check_training, check_validation])
@pytest.mark.parametrize("bug", INJECTED_BUGS)
def test_a_wrong_shard_fails(monkeypatch, bug, check):
    real = loader_module.collate

    def collate(rows: list[packing.Sequence], shard: SequenceShard, mask: bool) -> Batch:
        return real(rows, shard, document_mask=mask, pin=False)

    def broken(rows: list[packing.Sequence], shard: SequenceShard, *, document_mask: bool, pin: bool) -> Batch:
        return bug(collate, rows, shard, document_mask)

    monkeypatch.setattr(loader_module, "collate", broken)
    with pytest.raises(AssertionError, match="not contiguous" if bug is _columns_first else "another shard"):
        check(SHARD, INJECTED_BUGS[bug])


@pytest.mark.parametrize("document_mask", [False, True])
def test_ranks_that_share_sequences_take_each_token_once(document_mask):
    """Whichever tokens each of four takes; the target of a token is what follows it, whoever takes that."""
    indices = np.split(np.random.RandomState(0).permutation(T), (3, 4, 11))
    shards = [SequenceShard(own, EVERYTHING) for own in indices]
    options = {"local_batch_size": 2, "document_mask": document_mask}
    loaders = [open_loader(numbered_sequences(), shard=shard, **options) for shard in shards]
    seen: Counter[tuple[int, int, int]] = Counter()
    for _ in range(5):
        for loader in loaders:
            for batch in loader.next():
                seen.update(zip(*(tensor.flatten().tolist() for tensor in batch[:3]), strict=True))
    for loader in loaders:
        loader.close()
    assert seen == Counter({(token, token + 1, token % T): 2 for token in range(10 * T)}), "two epochs"
