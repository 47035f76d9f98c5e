"""The state of a run that a checkpoint stores, and the stand-in for a run without checkpoints."""

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
    """The state of a run that a checkpoint stores beside tensors, as plain JSON."""

    loader: Loader
    guard: StepGuard
    groups: OneGroup

    def save(self) -> dict[str, Any]:
        """Return the state. Every rank must call it."""
        return {**self.guard.state(), "data": self.loader.state(), **self.groups.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another replica group."""
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
    """Loads initial weights, and saves nothing: checkpoint.enable = false. Its subclass Checkpointer does the rest."""

    def __init__(self, checkpoint: Checkpoint, run: Trained | None = None):
        self.checkpoint, self.run = checkpoint, run

    def begin(self, options: Model, seed: int) -> dict[str, Any]:
        """Load the newest checkpoint, else the weights of checkpoint.initial_load_path, else leave the initial ones.
        `options` is the [model] section, `seed` the seed of the initial weights, to be printed. Return the saved state
        with its `step`; without a checkpoint, an empty one. Raises ConfigError if it is damaged or does not fit."""
        mark("loading a checkpoint")
        place = self.checkpoint.initial_load_path
        self.load_initial(options)
        log_rank0(f"weights    {f'initial, by debug.seed = {seed}' if place == SEEDED else f'loaded from {place}'}")
        return {}

    def load_initial(self, options: Model) -> None:
        """Load the weights of checkpoint.initial_load_path, if it names any."""
        if self.checkpoint.initial_load_path != SEEDED:
            from titanlite.checkpoint.loading import load_weights  # here, as few runs need it

            load_weights(Path(self.checkpoint.initial_load_path), self.run.model, options)

    def finished_on_error(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that finishes an asynchronous save if its body raises."""
        return contextlib.nullcontext()

    def confirm(self, step: int) -> None:
        """Register that a step was finite, so that checkpoints of earlier steps are good. This is cheap if there is
        nothing to do. Raises TrainingError if a checkpoint cannot be renamed."""

    def after_divergence(self) -> str:
        """Set aside the checkpoints whose weights gave no finite step. Return what to tell the user."""
        return ""

    def after_step(self, step: int, state: RunState, *, asked: bool, is_last: bool) -> None:
        """Save a step if it is due: every checkpoint.interval steps, when a rank was `asked` to save, and the last one.
        Raises TrainingError as Checkpointer.save does."""

    def end(self, step: int, state: RunState, last_loss: Callable[[], float]) -> None:
        """Save the step of the weights unless it was saved before, wait for the last checkpoint, and test it if no
        later step has tested it, by `last_loss`, the loss of a further batch with these weights. Every rank calls it.
        Raises TrainingError if a checkpoint could not be written or the loss is not finite."""

    def metrics(self) -> dict[str, float]:
        """Return the values since the last call, by tag."""
        return {}

    def close(self) -> None:
        """Wait for all background work. Raises what an asynchronous save raised."""
