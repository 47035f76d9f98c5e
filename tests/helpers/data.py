"""Small datasets, tokenizers and options for the tests of titanlite.data."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch

from titanlite.config.loader import ConfigError
from titanlite.config.schema import Training
from titanlite.data import documents, packing
from titanlite.data.documents import open_dataset, read_documents
from titanlite.data.hf_tokenizer import HuggingFaceTokenizer
from titanlite.data.loader import Batch, Loader, SequenceShard, Share
from titanlite.data.packing import PackedSequences, Sequences
from titanlite.data.source import Source
from titanlite.data.tokenizer import ByteTokenizer, encode_documents
from titanlite.loss import IGNORED
from titanlite.techniques.data.streaming import StreamingSequences

T = 16
BYTES = ByteTokenizer()
NO_SPECIAL_TOKENS: Any = SimpleNamespace(bos=None, eos=-1)  # for tokens that are just numbers

Lists = tuple[list[int], list[int], list[int]]  # inputs, targets and document positions of a sequence


def training(**options: Any) -> Training:
    """Sequences of T tokens in their order, four per optimizer step, one by one."""
    return Training(**{"seq_len": T, "shuffle": False, "local_batch_size": 1, "global_batch_size": 4} | options)


def rejection(call: Callable[[], Any]) -> str:
    """The one line of the ConfigError that `call` must raise."""
    with pytest.raises(ConfigError) as caught:
        call()
    (line,) = caught.value.problems
    assert "\n" not in line
    return line


class Code:
    """Its pickle writes a file when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch code_ran",)


def as_lists(sequence: packing.Sequence) -> Lists:
    inputs, targets, document_positions = sequence
    targets = np.maximum(targets, IGNORED)  # as in a batch
    assert inputs.dtype == targets.dtype == document_positions.dtype == np.int64
    return inputs.tolist(), targets.tolist(), document_positions.tolist()


# Texts and tokens ----------------------------------------------------------------------------------------------------


def some_texts(count: int = 60) -> list[str]:
    """Different documents of 0 to 40 characters."""
    generator = np.random.RandomState(0)
    return ["".join(chr(97 + (number + i) % 26) for i in range(generator.randint(40))) for number in range(count)]


def built_in_texts() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def flat(texts: list[str], tokenizer: Any = BYTES) -> list[int]:
    """Tokens of documents with their BOS and EOS, end to end."""
    return [int(token) for tokens in encode_documents(tokenizer, texts) for token in tokens]


def positions_of(texts: list[str], tokenizer: Any = BYTES) -> list[int]:
    """The position of each of these tokens in its document."""
    return [position for tokens in encode_documents(tokenizer, texts) for position in range(len(tokens))]


class Assets:
    """A folder with a tokenizer.json and perhaps a tokenizer_config.json."""

    def __init__(self, folder: Path, content: str):
        self.folder, self.file, self.settings = folder, folder / "tokenizer.json", folder / "tokenizer_config.json"
        self.file.write_text(content, encoding="utf-8")

    def open(self, **settings: Any) -> HuggingFaceTokenizer:
        self.settings.write_text(json.dumps(settings))
        return HuggingFaceTokenizer(self.folder)


# Files ---------------------------------------------------------------------------------------------------------------


def write(file: Path, texts: list[Any]) -> Path:
    """Documents in the format that the file's name says; a Parquet file has row groups of two."""
    columns = {"text": texts, "other": [f"{i}!" for i in range(len(texts))], "id": list(range(len(texts)))}
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table(columns), file, row_group_size=2)
    elif file.suffix == ".txt":
        file.write_text("\n".join(texts))
    else:
        rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def source(dataset: str, path: Any, **options: Any) -> Source:
    return Source(training(dataset=dataset, dataset_path=str(path), **options))


def texts_of(*arguments: Any, **options: Any) -> list[str]:
    dataset = source(*arguments, **options)
    return [text for segment in open_dataset(dataset)[0] for _, text in read_documents(dataset, segment)]


def open_stream(dataset: str, path: Any, streaming_shards: int = 1, **options: Any) -> StreamingSequences:
    opened = source(dataset, path, streaming_shards=streaming_shards, **options)
    return StreamingSequences(documents.open_stream(opened)[0], opened, BYTES, seed=42)


def rejections(*arguments: Any, **options: Any) -> Iterator[str]:
    """How data is rejected when it is tokenized first and when it is streamed, as it is opened or as it is read."""
    yield rejection(lambda: texts_of(*arguments, **options))
    yield rejection(lambda: list(zip(range(9), open_stream(*arguments, **options).read(0, 1), strict=False)))


# Sequences and batches -----------------------------------------------------------------------------------------------


def numbered_sequences(n_sequences: int = 10, seed: int = 42, shuffle: bool = True) -> PackedSequences:
    """Sequences whose tokens tell their index in the flat array."""
    tokens = np.arange(n_sequences * T + 1)
    return PackedSequences(tokens, NO_SPECIAL_TOKENS, training(shuffle=shuffle), seed=seed)


def open_loader(
    sequences: Any,
    *,
    data_rank: int = 0,
    data_parallel_degree: int = 1,
    shard: SequenceShard | None = None,
    state: Any = None,
    **options: Any,
) -> Loader:
    share = Share(data_rank, data_parallel_degree, SequenceShard() if shard is None else shard)
    return Loader(sequences, training(**options), share, n_copies=1, pin=False, state=state)


def _sequences_of(batches: list[Batch], local_batch_size: int) -> list[Lists]:
    """Of batches with a document mask."""
    for tokens, targets, positions, document_positions in batches:
        assert tokens.shape == targets.shape == positions.shape == (local_batch_size, T)
        assert tokens.dtype == targets.dtype == positions.dtype == torch.int64
        assert torch.equal(document_positions, positions)
    lists = ([tensor.tolist() for tensor in batch[:3]] for batch in batches)
    return [sequence for batch in lists for sequence in zip(*batch, strict=True)]


def consume(
    make: Callable[[], Sequences],
    *,
    n_ranks: int,
    steps: int,
    batch: int,
    size: int = 1,
    state: Any = None,
    **options: Any,
) -> tuple[list[list[Lists]], list[dict[str, Any]]]:
    """What all ranks train on in some steps, each step's sequences in their global order, and the ranks' states (not of
    streaming shards: those are gathered, which takes a pool of ranks)."""
    options |= {"local_batch_size": size, "global_batch_size": batch, "document_mask": True}
    loaders = [
        open_loader(make(), data_rank=rank, data_parallel_degree=n_ranks, state=state, **options)
        for rank in range(n_ranks)
    ]
    try:
        consumed = []
        for _ in range(steps):
            of_ranks = [_sequences_of(loader.next(), size) for loader in loaders]
            assert {len(sequences) for sequences in of_ranks} == {batch // n_ranks}
            consumed.append([of_ranks[k % n_ranks][k // n_ranks] for k in range(batch)])
        is_streaming = isinstance(loaders[0].sequences, StreamingSequences)
        return consumed, [] if is_streaming else [json.loads(json.dumps(loader.state())) for loader in loaders]
    finally:
        for loader in loaders:
            loader.close()


def in_steps(sequences: Any, batch: int, steps: int, first: int = 0) -> list[list[Lists]]:
    return [[as_lists(sequences[first + step * batch + i]) for i in range(batch)] for step in range(steps)]
