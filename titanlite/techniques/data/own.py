"""Own data (config/own.py): packed sequences from an object of the user."""

from __future__ import annotations

from typing import Any

import numpy as np

from titanlite.config.loader import ConfigError, check_all
from titanlite.config.schema import Debug, Model, Training
from titanlite.data.packing import PackedSequences, Sequence
from titanlite.loss import IGNORED


class OwnSequences:
    """Sequences of a user's object. data[index] is T + 1 tokens or a titanlite.data.packing.Sequence, the same at every
    call and on every rank. Past len(data), if the object has a len, the sequences repeat or, if `pads`, are padding."""

    def __init__(self, data: Any, training: Training, vocab_size: int, *, pads: bool = False):
        self.data, self.seq_len, self.vocab_size, self.pads = data, training.seq_len, vocab_size, pads
        self.n_sequences = len(data) if hasattr(data, "__len__") else 2**62
        if not hasattr(data, "__getitem__") or not self.n_sequences:
            raise ConfigError([f"own.data: {type(data).__name__} has no sequences: it needs data[index], no len of 0"])

    def __str__(self) -> str:
        return f"sequences of {type(self.data).__name__}"

    def __getitem__(self, index: int) -> Sequence:
        positions = np.arange(self.seq_len)
        if self.pads and index >= self.n_sequences:
            return Sequence(positions * 0, np.full(self.seq_len, IGNORED), positions)
        item, place = self.data[index % self.n_sequences], f"own.data: sequence {index}"
        expected = f"expected {self.seq_len + 1} integers, or a Sequence of three arrays of {self.seq_len}"
        try:
            if not isinstance(item, Sequence):
                item = Sequence(np.atleast_1d(item)[:-1], np.atleast_1d(item)[1:], positions)
            item = Sequence(*map(np.asarray, item))
        except Exception as error:  # ragged lists, or tensors that numpy cannot read
            raise ConfigError([f"{place} is no array: {error}; {expected}"]) from error
        limits = self.vocab_size, self.vocab_size, self.seq_len
        for name, values, limit in zip(item._fields, item, limits, strict=True):
            if values.shape != (self.seq_len,) or values.dtype.kind not in "iu":
                raise ConfigError([f"{place} has {name} of shape {values.shape}, {values.dtype}; {expected}"])
            found = values[(values < 0) | (values >= limit)]
            found = found[found != IGNORED] if name == "targets" else found
            if found.size:
                raise ConfigError([f"{place} has {name} of {found[0]}; expected 0 to {limit - 1}"])
        return Sequence(*(each.astype(np.int64) for each in item))

    read = PackedSequences.read

    def state(self, position: int) -> dict[str, Any]:
        """Return the state after training on `position` sequences, even if more were read, as plain JSON."""
        return {"own": self.data.state(position)} if hasattr(self.data, "state") else {}

    def resumed(self, loader_state: dict[str, Any] | None) -> OwnSequences:
        if loader_state and "own" in loader_state:
            self.data.load(loader_state["own"])
        return self


def open_own(
    build: Any, model: Model, training: Training, debug: Debug, validates: bool = False
) -> tuple[OwnSequences, OwnSequences | None, str]:
    """Return own data's splits (training, validation) and identity. Raises ConfigError if dataset options are set."""
    others = {"datasets": training.datasets, "streaming": training.streaming}
    problems = [f"training.{key}: own.data has the sequences; leave it out" for key in others if others[key]]
    arguments = training, model.vocab_size
    data = build(*arguments, debug.seed)
    if validates and not hasattr(data, "validation"):
        problems.append("validation.enable = true: own.data has no `validation`, sequences with a len; set false")
    sequences = OwnSequences(data, *arguments)
    if not problems and not all(np.array_equal(*pair) for pair in zip(sequences[0], sequences[0], strict=True)):
        problems.append("own.data: sequence 0 differs when it is read again; draw it from the seed and the index")
    check_all(problems=problems)
    validated = OwnSequences(data.validation, *arguments, pads=True) if validates else None
    return sequences, validated, f"own {type(data).__name__}/{training.seq_len}/{debug.seed}"
