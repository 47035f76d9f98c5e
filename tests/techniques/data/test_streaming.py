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
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.helpers.cases import cases
from tests.helpers.data import (
    BYTES,
    T,
    as_lists,
    consume,
    flat,
    in_steps,
    open_loader,
    open_stream,
    positions_of,
    rejection,
    write,
)
from titanlite.config.errors import TrainingError
from titanlite.config.loader import ConfigError
from titanlite.data import files, packing
from titanlite.data.files import END, Segment
from titanlite.loss import IGNORED
from titanlite.techniques.data.streaming import StreamingSequences, partition

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
    """The sequences of the streaming shards, packed by hand: each shard has as many bytes of the files, over and over.
    A document of parquet is in its file where its number says."""

    def __init__(self, kind: str, folder: Path):
        sizes = [(folder / f"{number}.{kind}").stat().st_size for number in range(FILES)]
        texts: list[list[str]] = [[] for _ in range(SHARDS[kind])]
        before = 0
        for number, size in enumerate(sizes):
            own = file_texts(kind, number)
            begins = [size * row // len(own) for row in range(len(own))]
            if kind == "json":
                lines = (folder / f"{number}.json").read_bytes().splitlines(keepends=True)
                begins = [sum(map(len, lines[:row])) for row in range(len(own))]
            for begin, text in zip(begins, own, strict=True):
                limits = [sum(sizes) * shard // len(texts) for shard in range(1, len(texts))]
                texts[sum(before + begin >= limit for limit in limits)].append(text)
            before += size
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


@cases("kind", SHARDS, always=["json"])
def test_streaming_shards_do_not_depend_on_the_ranks(folders, kind):
    assert max(len(tokens) for tokens in Expected(kind, folders[kind]).shards) < 40 * 8 * T / SHARDS[kind] / 2, (
        "two epochs"
    )
    for n_ranks, size in ((1, 8), (2, 1), (2, 4), (4, 2)):
        consumed, _ = consume(streaming_sequences(kind, folders[kind]), n_ranks=n_ranks, steps=40, batch=8, size=size)
        assert consumed == in_steps(Expected(kind, folders[kind]), 8, 40)


def resumed(sequences: StreamingSequences, states: dict[Any, Any]) -> StreamingSequences:
    """Continue from the states of shards, by their number."""
    return sequences.resumed({"streaming_shards": {str(number): each for number, each in states.items()}})


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
    assert consumed == in_steps(Expected(kind, folder), batch, steps, first=state["next_sequence"])


@cases("kind", SHARDS, always=["json"])
def test_streaming_shards_resume_exactly_after_every_step(saved, folders, kind):
    assert saved[kind, 2] == saved[kind, 4]
    assert min(len(tokens) for tokens in Expected(kind, folders[kind]).shards) < STEPS * BATCH * T / SHARDS[kind], (
        "past an end"
    )
    assert len(saved["json", 2][0]["streaming_shards"]) == 4, "half of the shards have not begun after the first step"
    for step, state in enumerate(saved[kind, 2], 1):
        assert state["next_sequence"] == step * BATCH
        check_resume(kind, folders[kind], state, n_ranks=(1, 2, 4)[step % 3])
    for n_ranks, batch in ((1, 4), (2, 2), (4, 8), (1, 6)):
        check_resume(kind, folders[kind], saved[kind, 2][10], n_ranks, batch)


@cases("kind", SHARDS, always=["json"])
def test_a_resumed_run_saves_states_that_are_as_good(ranks, saved, folders, kind):
    """Ranks that resumed at another number know old states of shards that are no longer theirs."""
    after_six = states_of(ranks(2), kind, folders[kind], steps=3, batch=2)[-1]
    assert after_six["next_sequence"] == 6, "no multiple of four: rank 0 of four resumes with shard 2"
    for n_ranks, state in ((4, saved[kind, 2][6]), (2, saved[kind, 4][6]), (4, after_six)):
        for resumed in states_of(ranks(n_ranks), kind, folders[kind], 5, state):
            check_resume(kind, folders[kind], resumed, n_ranks=2)


@pytest.mark.parametrize("data_ranks", [[0, 0, 1, 1], [0, 1, 0, 1]], ids=["neighbours", "strides"])
@cases("kind", SHARDS, always=["json"])
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
    for index, (sequence, (_, state)) in zip(range(120), sequences.read(0, 1), strict=False):
        assert np.array_equal(sequence.inputs, expected[index * seq_len : (index + 1) * seq_len])
        states.append(json.loads(json.dumps(state)))
    for index in (0, 20, 45, 46, 47, 70, 95):
        sequence, _ = next(resumed(sequences, {0: states[index]}).read(index + 1, 1))
        assert np.array_equal(sequence.inputs, expected[(index + 1) * seq_len : (index + 2) * seq_len])


def test_a_forged_number_of_used_tokens_is_rejected(tmp_path):
    sequences = open_stream("json", write(tmp_path / "a.jsonl", ["some text"]), seq_len=4)
    state = {"position": None, "used": 2**62, "block": 0, "taken": 0}
    line = rejection(lambda: next(resumed(sequences, {0: state}).read(0, 1)))
    assert line == (
        f"checkpoint: streaming shard 0: {2**62:,} tokens of a document of {len(flat(['some text']))} are used: "
        "the dataset or state.json was changed"
    )


def test_a_failing_disk_is_no_error_of_the_config(tmp_path, monkeypatch):
    """Another start may succeed, so the launcher may start the ranks anew."""
    write(tmp_path / "0.txt", ["some text"])
    stream = open_stream("text", tmp_path, 1, text_sample_by="line")
    failing = mock.Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    monkeypatch.setattr(files, "_open", failing)
    loader = open_loader(stream, local_batch_size=2, global_batch_size=2)
    with pytest.raises(TrainingError, match=r"cannot be read: OSError: .* Input/output error"):
        loader.next()
    loader.close()


def test_streaming_shards_without_a_file_or_without_documents_are_rejected(tmp_path):
    write(tmp_path / "0.txt", ["some text"])
    write(tmp_path / "1.txt", [""])
    line = rejection(lambda: open_stream("text", tmp_path, 3))
    assert line.startswith("training.streaming_shards = 3: the dataset has 2 files, and these cannot be split")
    stream = open_stream("text", tmp_path, 3, text_sample_by="line")  # a line cannot be split either
    loader = open_loader(stream, local_batch_size=2, global_batch_size=2)
    for _ in range(2):
        assert rejection(loader.next) == "training.streaming_shards = 3: shard 1 has no documents"
    loader.close()


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64])
def test_a_partition_has_every_row_once_and_shards_of_as_many_bytes(n):
    segments = [Segment(f"{number}", 0, rows, 10 * rows) for number, rows in enumerate([50, 3, 0, 997, 20])]
    shards = partition(segments, n)
    rows = [(each.file, row) for shard in shards for each in shard for row in range(each.begin, each.end)]
    assert rows == [(each.file, row) for each in segments for row in range(each.end)]
    sizes = [sum(each.bytes for each in shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1
    compressed = [segment._replace(end=END) for segment in segments]
    shards = partition(compressed, n)
    assert sorted(each for shard in shards for each in shard) == sorted(compressed)
    assert all(shard == sorted(shard, key=compressed.index) for shard in shards)
    assert all(shards) == (n <= len(compressed))


# Shuffled blocks -----------------------------------------------------------------------------------------------------


def shuffled(kind: str, folder: Path, block: int = 5) -> StreamingSequences:
    return open_stream(kind, folder, SHARDS[kind], shuffle=True, streaming_shuffle_block=block)


@cases("kind", SHARDS, always=["json"])
def test_shuffled_blocks_have_the_sequences_of_a_shard_once(folders, kind):
    n, block = SHARDS[kind], 5
    reader = shuffled(kind, folders[kind], block).read(0, 1)
    read = [as_lists(next(reader)[0]) for _ in range(3 * block * n)]
    expected = Expected(kind, folders[kind])
    orders = []
    for shard in range(n):
        for first in range(0, 3 * block, block):
            own = [read[shard + n * number] for number in range(first, first + block)]
            in_order = [as_lists(expected[shard + n * number]) for number in range(first, first + block)]
            assert sorted(own) == sorted(in_order)
            orders.append([in_order.index(sequence) for sequence in own])
    assert len({tuple(order) for order in orders}) > 1, "all blocks have one order"
    assert orders != [sorted(order) for order in orders]


@cases("kind", SHARDS, always=["json"])
def test_shuffled_blocks_resume_exactly_after_every_sequence(folders, kind):
    n = SHARDS[kind]
    reader, states = shuffled(kind, folders[kind]).read(0, 1), {}
    steps = [next(reader) for _ in range(14 * n)]
    for number, (_, (shard, state)) in enumerate(steps[:-n], 1):
        states[shard] = json.loads(json.dumps(state))
        reader = resumed(shuffled(kind, folders[kind]), states).read(number, 1)
        for expected, after in steps[number : number + n]:
            sequence, state = next(reader)
            assert as_lists(sequence) == as_lists(expected)
            assert state == after


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.lists(st.text("ab\n", max_size=40), min_size=1, max_size=12), min_size=1, max_size=5),
    n_shards=st.sampled_from([1, 2, 3, 4]),
    stops=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=4),
    block=st.integers(1, 6),
    shuffle=st.booleans(),
)
def test_order_does_not_depend_on_sizes_ranks_and_stops(tmp_path_factory, texts, n_shards, stops, block, shuffle):
    """`stops` are the steps until a run is stopped, and its number of ranks."""
    folder = tmp_path_factory.mktemp("sizes")
    for number, own in enumerate(texts):
        write(folder / f"{number}.json", own)

    def sequences() -> StreamingSequences:
        return open_stream("json", folder, n_shards, shuffle=shuffle, streaming_shuffle_block=block)

    batch = n_shards
    reader = sequences().read(0, 1)
    try:
        expected = [as_lists(next(reader)[0]) for _ in range(batch * sum(steps for steps, _ in stops))]
    except ConfigError as error:
        assume("has no documents" not in str(error))
        raise
    actual, states = [], dict[int, Any]()
    for steps, ranks in stops:
        ranks = ranks if n_shards % ranks == 0 else 1
        position, saved = len(actual), json.loads(json.dumps(states))
        readers = [resumed(sequences(), saved).read(position + rank, ranks) for rank in range(ranks)]
        for number in range(steps * batch):
            sequence, (shard, states[shard]) = next(readers[number % ranks])
            actual.append(as_lists(sequence))
    assert actual == expected
