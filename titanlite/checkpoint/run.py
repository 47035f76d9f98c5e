"""The state of a run that a checkpoint stores, and the substitute for Checkpointer in a run without checkpoints."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from titanlite.config.schema import SEEDED, Checkpoint, Model
from titanlite.data.loader import Loader
from titanlite.launch.process import Signals
from titanlite.launch.process_group import log_rank0
from titanlite.launch.progress import mark
from titanlite.step_guard import StepGuard
from titanlite.train_step import OneGroup


class RunState(NamedTuple):
    """The objects of a run whose state a checkpoint stores as plain JSON, in addition to tensors."""

    loader: Loader
    guard: StepGuard
    groups: OneGroup

    def save(self) -> dict[str, Any]:
        """Return the state of data loader, step guard and replica groups. Every rank must call it."""
        return {**self.guard.state(), "data": self.loader.state(), **self.groups.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that another replica group has saved."""
        self.guard.load(state)
        self.loader.close()
        self.loader.start(state["data"])


class Trained(NamedTuple):
    """The model and optimizer that a run trains, its last step, and the signals that ask it to save."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    steps: int
    signals: Signals


class NoCheckpoints:
    """Loads initial weights and saves no checkpoint (checkpoint.enable = false). The base class of Checkpointer."""

    def __init__(self, checkpoint: Checkpoint, run: Trained | None = None):
        self.checkpoint, self.run = checkpoint, run

    def begin(self, options: Model, seed: int) -> dict[str, Any]:
        """Load the newest checkpoint or, if there is none, the weights in checkpoint.initial_load_path, if it is set.
        `options`: the section [model]. `seed`: the seed of the initial weights, for the log. Return the checkpoint's
        state with its `step`; {} without a checkpoint. Raises ConfigError if the weights are damaged or do not fit."""
        mark("loading a checkpoint")
        place = self.checkpoint.initial_load_path
        self.load_initial(options)
        log_rank0(f"weights    {f'initial, by debug.seed = {seed}' if place == SEEDED else f'loaded from {place}'}")
        return {}

    def load_initial(self, options: Model) -> None:
        if self.checkpoint.initial_load_path != SEEDED:
            from titanlite.checkpoint.loading import load_weights  # imported here: few runs load weights

            load_weights(Path(self.checkpoint.initial_load_path), self.run.model, options)

    def finished_on_error(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that finishes an asynchronous save if its body raises."""
        return contextlib.nullcontext()

    def confirm(self, step: int) -> None:
        """Mark the checkpoints before `step` as good, since the loss of `step` is finite. May raise TrainingError."""

    def after_divergence(self) -> str:
        """Set aside the checkpoints whose weights gave no finite loss, and return a text for the error message."""
        return ""

    def after_step(self, step: int, state: RunState, *, asked: bool, is_last: bool) -> None:
        """Save a step if its number is a multiple of checkpoint.interval, if a rank was `asked` to save, or if the step
        `is_last`. Raises TrainingError as Checkpointer.save does."""

    def end(self, step: int, state: RunState, last_loss: Callable[[], float]) -> None:
        """Save the last step if it has not been saved, and wait for the save. If a checkpoint is unconfirmed, test it
        with `last_loss()`, the loss of one more batch with its weights. Every rank must call this method. Raises
        TrainingError if a checkpoint could not be written, or the loss is not finite."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics of checkpoints since the last call, by tag."""
        return {}

    def close(self) -> None:
        """Wait for all work in the background. Raises the error of an asynchronous save, if there is one."""
