"""Streaming: sequences of streaming shards do not depend on the ranks, and resume exactly."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from tests.data_helpers import (
    BYTES,
    T,
    consume,
    flat,
    in_steps,
    open_loader,
    open_stream,
    positions_of,
    rejection,
    write,
)
from titanlite.data import packing
from titanlite.data.streaming import StreamingSequences
from titanlite.errors import TrainingError
from titanlite.loss import IGNORED

pytestmark = pytest.mark.usefixtures("offline")


FILES, STEPS, BATCH = 8, 24, 4
SHARDS = {"json": 8, "parquet": 4}


def file_texts(kind: str, number: int) -> list[str]:
    """3 to 6 documents of up to 40 characters: an epoch of a streaming shard has a dozen packed sequences."""
    generator = np.random.RandomState(number)
    return [f"{kind}{number}/{i} " + "x" * generator.randint(32) for i in range(generator.randint(3, 7))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Eight small files of each kind."""
    folder = tmp_path_factory.mktemp("files")
    for kind in SHARDS:
        for number in range(FILES):
            write(folder / kind / f"{number}.{kind}", file_texts(kind, number))
    return {kind: folder / kind for kind in SHARDS}


class Expected:
    """The sequences of the streaming shards, packed by hand: each shard has equally many files, over and over."""

    def __init__(self, kind: str):
        files, size = [file_texts(kind, number) for number in range(FILES)], FILES // SHARDS[kind]
        texts = [[text for file in files[i : i + size] for text in file] for i in range(0, FILES, size)]
        self.shards = [np.array(flat(own)) for own in texts]
        self.positions = [np.array(positions_of(own)) for own in texts]

    def __getitem__(self, index: int) -> packing.Sequence:
        window, number = divmod(index, len(self.shards))
        tokens, indices = self.shards[number], np.arange(window * T, (window + 1) * T)
        inputs, targets = tokens[indices % len(tokens)], tokens[(indices + 1) % len(tokens)]
        positions = np.minimum(self.positions[number][indices % len(tokens)], np.arange(T))
        return packing.Sequence(inputs, np.where(inputs == BYTES.eos, IGNORED, targets), positions)


def streaming_sequences(kind: str, folder: Path) -> Callable[[], StreamingSequences]:
    return lambda: open_stream(kind, folder, SHARDS[kind])


@pytest.mark.parametrize("kind", SHARDS)
def test_streaming_shards_do_not_depend_on_the_ranks(folders, kind):
    assert max(len(tokens) for tokens in Expected(kind).shards) < 40 * 8 * T / SHARDS[kind] / 2, "two epochs"
    for n_ranks, size in ((1, 8), (2, 1), (2, 4), (4, 2)):
        consumed, _ = consume(streaming_sequences(kind, folders[kind]), n_ranks=n_ranks, steps=40, batch=8, size=size)
        assert consumed == in_steps(Expected(kind), 8, 40)


def run_in_rank(
    kind: str, folder: Path, steps: int, state: Any, batch: int, data_ranks: list[int] | None
) -> list[dict[str, Any]]:
    """The state after each step, through JSON."""
    data_ranks = list(range(dist.get_world_size())) if data_ranks is None else data_ranks
    options = {"data_rank": data_ranks[dist.get_rank()], "data_parallel_degree": max(data_ranks) + 1}
    loader = open_loader(streaming_sequences(kind, folder)(), **options, global_batch_size=batch, state=state)
    states = []
    for _ in range(steps):
        loader.next()
        states.append(json.loads(json.dumps(loader.state())))
    loader.close()
    return states


def states_of(
    pool: Any,
    kind: str,
    folder: Path,
    steps: int,
    state: Any = None,
    batch: int = BATCH,
    data_ranks: list[int] | None = None,
) -> list[Any]:
    """The state after each step of a run in a pool of ranks: where a run stands is gathered from all.

    Args:
        data_ranks: the data-parallel rank that each is or, with others, shares.
    """
    options = {"steps": steps, "state": state, "batch": batch, "data_ranks": data_ranks}
    first, *others = pool.run(run_in_rank, kind=kind, folder=folder, **options)
    assert all(states == first for states in others)
    return first


@pytest.fixture(scope="module")
def saved(ranks, folders) -> dict[tuple[str, int], list[Any]]:
    """States after 1 .. STEPS steps, of two and of four ranks."""
    return {(kind, n): states_of(ranks(n), kind, folders[kind], STEPS) for kind in SHARDS for n in (2, 4)}


def check_resume(kind: str, folder: Path, state: dict[str, Any], n_ranks: int, batch: int = BATCH) -> None:
    """What follows a state is what follows without a stop."""
    steps = 8 // batch + 1
    consumed, _ = consume(streaming_sequences(kind, folder), n_ranks=n_ranks, steps=steps, batch=batch, state=state)
    assert consumed == in_steps(Expected(kind), batch, steps, first=state["next_sequence"])


@pytest.mark.parametrize("kind", SHARDS)
def test_streaming_shards_resume_exactly_after_every_step(saved, folders, kind):
    assert saved[kind, 2] == saved[kind, 4]
    assert min(len(tokens) for tokens in Expected(kind).shards) < STEPS * BATCH * T / SHARDS[kind], "past an end"
    assert len(saved["json", 2][0]["streaming_shards"]) == 4, "half of the shards have not begun after the first step"
    for step, state in enumerate(saved[kind, 2], 1):
        assert state["next_sequence"] == step * BATCH
        check_resume(kind, folders[kind], state, n_ranks=(1, 2, 4)[step % 3])
    for n_ranks, batch in ((1, 4), (2, 2), (4, 8), (1, 6)):
        check_resume(kind, folders[kind], saved[kind, 2][10], n_ranks, batch)


@pytest.mark.parametrize("kind", SHARDS)
def test_a_resumed_run_saves_states_that_are_as_good(ranks, saved, folders, kind):
    """Ranks that resumed at another number know old states of shards that are no longer theirs."""
    after_six = states_of(ranks(2), kind, folders[kind], steps=3, batch=2)[-1]
    assert after_six["next_sequence"] == 6, "no multiple of four: rank 0 of four resumes with shard 2"
    for n_ranks, state in ((4, saved[kind, 2][6]), (2, saved[kind, 4][6]), (4, after_six)):
        for resumed in states_of(ranks(n_ranks), kind, folders[kind], 5, state):
            check_resume(kind, folders[kind], resumed, n_ranks=2)


@pytest.mark.parametrize("data_ranks", [[0, 0, 1, 1], [0, 1, 0, 1]], ids=["neighbours", "strides"])
@pytest.mark.parametrize("kind", SHARDS)
def test_ranks_that_share_a_data_parallel_rank_save_the_same_states(ranks, saved, folders, kind, data_ranks):
    pool, folder = ranks(4), folders[kind]
    assert states_of(pool, kind, folder, STEPS, data_ranks=data_ranks) == saved[kind, 2]
    after_six = states_of(pool, kind, folder, 3, batch=2, data_ranks=data_ranks)[-1]
    assert after_six == states_of(ranks(2), kind, folder, 3, batch=2)[-1]
    for state in (saved[kind, 4][6], after_six):
        resumed = states_of(pool, kind, folder, 5, state, data_ranks=data_ranks)
        assert resumed == states_of(ranks(2), kind, folder, 5, state)


@pytest.mark.parametrize("broken", ["one token off", "one document off", "one sequence off", "a stale shard"])
def test_a_state_that_is_off_fails(monkeypatch, saved, folders, broken):
    real, state = StreamingSequences._documents, json.loads(json.dumps(saved["json", 2][9]))

    def documents(self: StreamingSequences, number: int, start: dict[str, Any]) -> Any:
        result = real(self, number, start)
        if broken == "one document off":
            next(result)
        for position, tokens, used in result:
            yield position, tokens, used + (broken == "one token off" and used > 0)

    monkeypatch.setattr(StreamingSequences, "_documents", documents)
    if broken == "one sequence off":
        state["next_sequence"] += 1
    elif broken == "a stale shard":
        state["streaming_shards"]["2"] = saved["json", 2][7]["streaming_shards"]["2"]
    with pytest.raises(AssertionError):
        check_resume("json", folders["json"], state, n_ranks=2)


def test_a_document_of_many_sequences_resumes_within(tmp_path):
    """3 MB are 46 sequences; documents before and after it are less than one."""
    texts, seq_len = ["before", "many bytes " * 280_000, "after", "it"], 2**16
    sequences = open_stream("json", write(tmp_path / "a.jsonl", texts), seq_len=seq_len)
    expected = np.tile(flat(texts), 3)
    states = []
    for index, (sequence, (_, state)) in zip(range(120), sequences.read(0, 1, {}), strict=False):
        assert np.array_equal(sequence.inputs, expected[index * seq_len : (index + 1) * seq_len])
        states.append(json.loads(json.dumps(state)))
    for index in (0, 20, 45, 46, 47, 70, 95):
        sequence, _ = next(sequences.read(index + 1, 1, {0: states[index]}))
        assert np.array_equal(sequence.inputs, expected[(index + 1) * seq_len : (index + 2) * seq_len])


def test_a_failing_disk_is_no_error_of_the_config(tmp_path):
    """Another start may succeed, so the launcher may start the ranks anew."""
    write(tmp_path / "0.txt", ["some text"])
    stream = open_stream("text", tmp_path, 1, text_sample_by="line")
    stream.dataset = mock.Mock()
    stream.dataset.shard.return_value = files = mock.MagicMock()
    files.__iter__.side_effect = OSError(errno.EIO, "Input/output error")
    loader = open_loader(stream, local_batch_size=2, global_batch_size=2)
    with pytest.raises(TrainingError, match=r"cannot be read: OSError: .* Input/output error"):
        loader.next()
    loader.close()


def test_streaming_shards_without_a_file_or_without_documents_are_rejected(tmp_path):
    write(tmp_path / "0.txt", ["some text"])
    write(tmp_path / "1.txt", [""])
    line = rejection(lambda: open_stream("text", tmp_path, 3, text_sample_by="line"))
    assert line.startswith("training.streaming_shards = 3: the dataset has 2 files")
    loader = open_loader(
        open_stream("text", tmp_path, 2, text_sample_by="line"), local_batch_size=2, global_batch_size=2
    )
    for _ in range(2):
        assert rejection(loader.next) == "training.streaming_shards = 2: shard 1 has no documents"
    loader.close()
