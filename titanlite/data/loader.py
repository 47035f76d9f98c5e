"""The data loader: per-device batches of packed sequences, prepared by a thread ahead of the training."""

import contextlib
import itertools
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from titanlite.config.schema import Training, Validation
from titanlite.data.packing import PADDING, Sequence, Sequences, SplitSequences
from titanlite.files.durable import Int63, parse_part
from titanlite.loss import IGNORED
from titanlite.model import Documents

PREFETCH_STEPS = 2  # number of optimizer steps whose batches are prepared in advance


class Batch(NamedTuple):
    """A per-device batch of B sequences. Each tensor is int64 [B, T / context-parallel ranks]: a rank's tokens."""

    tokens: Tensor
    targets: Tensor
    """The token that follows each token; IGNORED where there is nothing to predict."""
    positions: Tensor
    """Position of each token in its sequence or, with a document mask, in its document."""
    document_positions: Tensor | None = None
    """With a document mask: positions in documents of the tokens in SequenceShard.ring, [B, T / ring ranks], on CPU."""

    def inputs(self) -> dict[str, Any]:
        """Return the arguments that every pipeline stage takes; only the first stage also takes the tokens."""
        documents = {} if self.document_positions is None else {"documents": Documents(self.document_positions)}
        return {"positions": self.positions, "targets": self.targets, **documents}

    def to(self, device: torch.device) -> "Batch":
        """Return a copy on a device; the copy of a batch in pinned memory is asynchronous."""
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self[:3]), self.document_positions)


class SequenceShard(NamedTuple):
    """Indices of the tokens that a context-parallel rank takes from each sequence."""

    own: slice | np.ndarray = slice(None)
    """Indices of this rank's tokens."""
    ring: slice | np.ndarray = slice(None)
    """Indices of the tokens of this rank's Ulysses group."""


class Share(NamedTuple):
    """The data of a rank: the sequences `rank`, `rank` + `degree`, ..., and of each sequence the tokens in `shard`."""

    rank: int
    degree: int
    shard: SequenceShard = SequenceShard()


def collate(sequences: Iterable[Sequence], shard: SequenceShard, *, document_mask: bool, pin: bool) -> Batch:
    """Return a rank's shard of some sequences as a batch. `pin`: use pinned memory, for copies to a GPU."""
    tokens, targets, document_positions = (np.stack(arrays) for arrays in zip(*sequences, strict=True))
    positions = document_positions if document_mask else np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    arrays = [array[:, shard.own] for array in (tokens, np.maximum(targets, IGNORED), positions)]
    if document_mask:
        arrays.append(document_positions[:, shard.ring])
    tensors = [torch.from_numpy(np.array(array, order="C")) for array in arrays]
    return Batch(*(tensor.pin_memory() if pin else tensor for tensor in tensors))


def count(sequences: Iterable[Sequence]) -> np.ndarray:
    """Return int64 [4]: number of targets, of masked and padding ones, and of sequences that end within a document."""
    targets = np.stack([sequence.targets for sequence in sequences])
    masks = targets == IGNORED, targets == PADDING, targets[:, -1] >= 0
    return np.array([targets.size, *map(np.sum, masks)])


class Loader:
    """Returns this rank's batches, one optimizer step at a time. A thread prepares them ahead of the training.
    Optimizer step s trains on sequences s G to s G + G - 1, where G is the global batch size. `n_copies` ranks, this
    one included, take the same `share`. `pin`: use pinned memory. `state` is the `Loader.state` of a saved run."""

    def __init__(
        self,
        sequences: Sequences,
        training: Training,
        share: Share,
        *,
        n_copies: int,
        pin: bool,
        state: dict[str, Any] | None,
    ):
        self.sequences, self.training, self.share, self.n_copies, self.pin = sequences, training, share, n_copies, pin
        self.start(state)

    def start(self, state: dict[str, Any] | None) -> None:
        """Start at `state`; call close before a second start. Raises ConfigError for a damaged state."""
        sequences, self.stateful = self.sequences, None
        if hasattr(sequences, "resumed"):  # a mixture, a stream or own data has a state of its own
            self.stateful = sequences = sequences.resumed(state)
        state = {"next_sequence": 0} if state is None else state
        self.position, self._again = parse_part(state, "data.next_sequence", Int63), list[Batch]()
        counts = parse_part(state, "data.counts", tuple[Int63, Int63, Int63, Int63] | None)
        self.counts = np.array(counts or [self.position * self.training.seq_len, 0, 0, 0])
        """Sum of the function `count` over all sequences that all ranks have read so far."""
        reader = sequences.read(self.position + self.share.rank, self.share.degree)
        self._ready = queue.Queue[Any](maxsize=PREFETCH_STEPS)  # items: data of a step, or an exception
        self._closed = False
        self._thread = threading.Thread(target=self._prefetch, args=(reader,), name="data", daemon=True)
        self._thread.start()

    def _prefetch(self, reader: Iterator[tuple[Sequence, tuple[int, Any] | None]]) -> None:
        size, document_mask = self.training.local_batch_size, self.training.document_mask
        accumulation_steps = self.training.global_batch_size // (size * self.share.degree)
        try:
            while not self._closed:
                batches, shard_states, counts = [], {}, np.zeros(4)
                for _ in range(accumulation_steps):
                    sequences, states = zip(*itertools.islice(reader, size), strict=True)
                    shard_states.update(state for state in states if state is not None)
                    batches.append(collate(sequences, self.share.shard, document_mask=document_mask, pin=self.pin))
                    counts += count(sequences) / self.n_copies
                self._ready.put((batches, shard_states, counts.tolist()))
        except Exception as error:  # `next` raises the error in the main thread
            self._ready.put(error)

    def next(self) -> list[Batch]:
        """Return the batches of the next optimizer step, one per gradient accumulation step."""
        if self._again:
            batches, self._again = self._again, []
            self.position += self.training.global_batch_size
            return batches
        if isinstance(item := self._ready.get(), Exception):
            self._ready.put(item)  # put the error back: a further call must raise it again
            raise item
        batches, shard_states, self.step_counts = item
        self.position += self.training.global_batch_size
        if shard_states:
            self.stateful.passed.update(shard_states)
        return batches

    def add(self, step_counts: list[float]) -> None:
        self.counts += np.rint(step_counts).astype(np.int64)

    def take_back(self, batches: list[Batch]) -> None:
        """Make `next` return `batches`, the result of its last call, once more."""
        self._again, self.position = batches, self.position - self.training.global_batch_size

    def close(self, error: object = None, *_: object) -> None:
        """End the thread. After an error, do not wait for the thread, since a hanging read would delay the report."""
        self._closed = True
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._ready.get_nowait()
            if error:
                return
            self._thread.join(0.01)

    def __enter__(self) -> None: ...

    __exit__ = close

    def state(self) -> dict[str, Any]:
        """Return the run's global position in its data as plain JSON. Every rank must call this."""
        state = {"next_sequence": self.position, "counts": self.counts.tolist()}
        return state | self.stateful.state(self.position) if self.stateful else state


def n_validation_batches(sequences: SplitSequences, training: Training, validation: Validation, share: Share) -> int:
    """Return a rank's number of batches in a validation: at most validation.steps global batches under any layout."""
    cap = sequences.n_sequences if validation.steps == -1 else validation.steps * training.global_batch_size
    return -(-min(sequences.n_sequences, cap) // (share.degree * training.local_batch_size))


def validation_batches(
    sequences: SplitSequences, training: Training, validation: Validation, share: Share
) -> Iterator[Batch]:
    """Yield this rank's n_validation_batches from the beginning of the validation split, padded at its end."""
    size, mask = share.degree * training.local_batch_size, training.document_mask
    for batch in range(n_validation_batches(sequences, training, validation, share)):
        indices = range(batch * size + share.rank, (batch + 1) * size, share.degree)
        yield collate([sequences[index] for index in indices], share.shard, document_mask=mask, pin=False)
