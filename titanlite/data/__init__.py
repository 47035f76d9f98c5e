"""Packed sequences for a rank's steps, read ahead of them; nothing about them depends on the number of ranks."""

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.config.loader import ConfigError, show
from titanlite.data.documents import Source, load_documents, load_stream
from titanlite.data.packed import PackedSequences, Sequence, ValidationSequences, token_files
from titanlite.data.streamed import StreamedSequences
from titanlite.data.tokenizer import Tokenizer

Sequences = PackedSequences | StreamedSequences


class Batch(NamedTuple):
    """What a rank works on at once: its share of the tokens of B sequences, int64."""

    tokens: Tensor
    """[B, T / context-parallel ranks]"""
    targets: Tensor
    """The tokens that follow them, IGNORED where there is nothing to predict."""
    positions: Tensor
    """Of the tokens, in their sequence or, with a document mask, in their document."""
    document_positions: Tensor | None
    """With a document mask: positions in their documents of all tokens that this rank's attention is computed for,
    [B, T / ring ranks]."""

    def to(self, device: torch.device) -> "Batch":
        """Copies on a device; without waiting, from pinned memory."""
        return Batch(*(part if part is None else part.to(device, non_blocking=True) for part in self))


class SequenceShard(NamedTuple):
    """Which tokens of every sequence a rank works on, as indices of them."""

    own: Any = slice(None)
    """Those it holds itself."""
    ring: Any = slice(None)
    """Those that it and its Ulysses group hold together."""
    document_mask: bool = False
    """Whether attention and positions end with each document."""


FULL_SEQUENCE = SequenceShard()


def open_sequences(
    tokenizer: Tokenizer,
    *,
    dataset: str,
    dataset_path: str,
    dataset_config: str,
    dataset_split: str,
    text_key: str,
    text_sample_by: str,
    streaming: bool,
    streams: int,
    shuffle: bool,
    seed: int,
    seq_len: int,
    cache_folder: str,
    validation_path: str,
    validation_split: str,
    validation_fraction: float,
    validation_enable: bool,
    builds_cache: bool,
) -> tuple[Sequences, ValidationSequences | None, str]:
    """Open the training split and, where it is wanted, the validation split.

    Args:
        builds_cache: whether this rank tokenises (one of each host does).

    Returns:
        Training sequences, validation sequences, and the identity of what they are made of: equal for two runs only if
        their global indices name the same sequences.

    Raises:
        ConfigError: if the data cannot be had, is too short, or cannot keep the promise of its order.
    """
    if dataset == "c4":
        validation_split = "validation"
    source = Source(dataset, dataset_path, dataset_config, dataset_split, text_key, text_sample_by)
    own_source = None
    if validation_path:
        own_source = dataclasses.replace(source, dataset_path=validation_path, key="validation.dataset_path")
    elif validation_split:
        own_source = dataclasses.replace(source, split=validation_split)

    def tokens_of(source: Source, fraction: float) -> tuple[np.ndarray, np.ndarray, str]:
        documents = load_documents(source)
        return token_files(documents, tokenizer, fraction=fraction, cache_folder=cache_folder, builds=builds_cache)

    if streaming:
        stream, column, content = load_stream(source)
        train: Sequences = StreamedSequences(stream, column, source, tokenizer, seq_len=seq_len, n_streams=streams)
        identity = f"{content}/{tokenizer.identity}/seq_len {seq_len}/{streams} streams"
    else:
        tokens, held_out, content = tokens_of(source, 0.0 if own_source else validation_fraction)
        train = PackedSequences(tokens, seq_len=seq_len, tokenizer=tokenizer, shuffle=shuffle, seed=seed)
        identity = f"{content}/seq_len {seq_len}/{f'seed {seed}' if shuffle else 'in order'}"
    if not validation_enable:
        return train, None, identity
    if own_source:
        held_out, _, _ = tokens_of(own_source, 0.0)
    if len(held_out) < 2:
        why = (
            f"{own_source.key} = {show(own_source.dataset_path)}: has no text to validate on"
            if own_source
            else f"validation.fraction = {validation_fraction}: holds out no document of this dataset; set it higher, "
            "or give files or a split to validate on"
        )
        raise ConfigError([why])
    return train, ValidationSequences(held_out, seq_len=seq_len, tokenizer=tokenizer), identity


def _stack(rows: list[Sequence], shard: SequenceShard, pin: bool) -> Batch:
    """A rank's share of some sequences, in pinned memory if it is to go to a GPU."""
    tokens, targets, documents = (np.stack(parts) for parts in zip(*rows, strict=True))
    positions = documents if shard.document_mask else np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    parts = [part[:, shard.own] for part in (tokens, targets, positions)]
    parts += [documents[:, shard.ring]] if shard.document_mask else []
    tensors = [torch.from_numpy(np.array(part, order="C")) for part in parts]
    tensors = [tensor.pin_memory() for tensor in tensors] if pin else tensors
    return Batch(*tensors, *([] if shard.document_mask else [None]))


class Loader:
    """This rank's microbatches, a step at a time, made by a thread that runs ahead of the training.

    Global step s trains on the sequences s G .. s G + G - 1; data-parallel rank r of d takes every d-th of them,
    from r on.

    Args:
        n_ranks: data-parallel ranks; `rank` is this one's number among them.
        local_batch_size: sequences of a microbatch.
        global_batch_size: sequences of a step, G.
        shard: what of each sequence this rank takes.
        pin: put batches into pinned memory.
        state: what `state` returned when the run was saved, on any number of ranks.
        ahead: steps that are prepared before they are asked for.
    """

    def __init__(
        self,
        sequences: Sequences,
        *,
        rank: int,
        n_ranks: int,
        local_batch_size: int,
        global_batch_size: int,
        shard: SequenceShard = FULL_SEQUENCE,
        pin: bool,
        state: dict[str, Any] | None = None,
        ahead: int = 2,
    ):
        self.position = state["next_sequence"] if state else 0
        self.rank, self.n_ranks, self.global_batch_size = rank, n_ranks, global_batch_size
        self._streams: dict[int, Any] = {int(number): s for number, s in state["streams"].items()} if state else {}
        reader = sequences.read(self.position + rank, n_ranks, dict(self._streams))
        self._ready: queue.Queue[Any] = queue.Queue(maxsize=ahead)
        self._closed = False
        n_accumulation_steps = global_batch_size // (local_batch_size * n_ranks)
        self._thread = threading.Thread(
            target=self._run_ahead,
            args=(reader, n_accumulation_steps, local_batch_size, shard, pin),
            name="data",
            daemon=True,
        )
        self._thread.start()

    def _run_ahead(
        self, reader: Iterator[Any], n_accumulation_steps: int, local_batch_size: int, shard: SequenceShard, pin: bool
    ) -> None:
        try:
            while not self._closed:
                batch, states = [], {}
                for _ in range(n_accumulation_steps):
                    rows = []
                    for _ in range(local_batch_size):
                        sequence, state = next(reader)
                        rows.append(sequence)
                        if state is not None:
                            states[state[0]] = state[1]
                    batch.append(_stack(rows, shard, pin))
                self._ready.put((batch, states))
        except Exception as error:  # raised again where the training waits for the batch
            self._ready.put(error)

    def next(self) -> list[Batch]:
        """The next step's microbatches."""
        item = self._ready.get()
        if isinstance(item, Exception):
            self._ready.put(item)  # for whoever asks again
            raise item
        batch, states = item
        self.position += self.global_batch_size
        self._streams.update(states)
        return batch

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._ready.get_nowait()
            self._thread.join(0.01)

    def state(self) -> dict[str, Any]:
        """Where the run stands in its data, over all ranks: plain JSON. Every rank must call it."""
        streams = {}
        if self._streams:
            everywhere: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, (self.rank, self._streams))
            gathered = dict(everywhere)  # by data-parallel rank; those that share one have the same
            # A rank that resumed also holds old states of other ranks' streams; a stream's owner has the newest.
            for number in sorted({number for states in gathered.values() for number in states}):
                owner = gathered[(number - self.position) % self.n_ranks]
                if number in owner:
                    streams[str(number)] = owner[number]
        return {"next_sequence": self.position, "streams": streams}


def validation_batches(
    sequences: ValidationSequences,
    *,
    rank: int,
    n_ranks: int,
    local_batch_size: int,
    steps: int,
    shard: SequenceShard = FULL_SEQUENCE,
) -> Iterator[Batch]:
    """This rank's batches of one pass over the validation split: as many on every rank, the last ones padded.

    Args:
        steps: at most so many batches; -1: the whole split.
        shard: what of each sequence this rank takes.
    """
    per_batch = n_ranks * local_batch_size
    n_batches = -(-sequences.n_sequences // per_batch)
    for batch in range(n_batches if steps == -1 else min(steps, n_batches)):
        indices = range(batch * per_batch + rank, (batch + 1) * per_batch, n_ranks)
        yield _stack([sequences[index] for index in indices], shard, pin=False)
