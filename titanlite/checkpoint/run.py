"""The checkpoints of a training run: when it resumes from them, saves and confirms them."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from titanlite.checkpoint.changed_options import changes
from titanlite.checkpoint.checkpointer import Checkpointer, load_weights
from titanlite.config.schema import SEEDED, Checkpoint, Model
from titanlite.data.loader import Loader
from titanlite.launch.process import Signals
from titanlite.launch.process_group import log_rank0
from titanlite.launch.progress import mark
from titanlite.step_guard import StepGuard
from titanlite.train_step import OneGroup


class RunState(NamedTuple):
    """What a checkpoint has of a run beside tensors, as plain JSON."""

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


class RunCheckpoints:
    """Resumes, saves and confirms. Without a checkpointer, all that it does is to load initial weights.

    Args:
        checkpointer: None where checkpoint.enable is false.
        steps: the last step of the run.
        signals: tells that this rank has saved what it was asked to save.
    """

    def __init__(
        self,
        checkpointer: Checkpointer | None,
        checkpoint: Checkpoint,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        steps: int,
        signals: Signals,
    ):
        self.checkpointer, self.checkpoint, self.steps, self.signals = checkpointer, checkpoint, steps, signals
        self._trained = model, optimizer
        self._last_step = 0
        """The step of the checkpoint that was saved, or resumed from, last."""

    def resume(self, options: Model, seed: int) -> dict[str, Any]:
        """Load the newest checkpoint, else the weights of checkpoint.initial_load_path, else leave the initial ones.

        Args:
            options: the [model] section.
            seed: that of the initial weights, to be printed.

        Returns:
            The saved state with its `step`; empty without a checkpoint.

        Raises:
            ConfigError: if what is to be loaded is damaged or does not fit the run.
        """
        mark("loading a checkpoint")
        model, optimizer = self._trained
        saved = (self.checkpointer.resume(model, optimizer) if self.checkpointer else None) or {}
        self._last_step, place = saved.get("step", 0), self.checkpoint.initial_load_path
        if saved:
            weights = f"resumed after step {self._last_step} of {self.steps} from {self.checkpointer.folder}"
        elif place != SEEDED:
            load_weights(Path(place), model, options)
            weights = f"loaded from {place}"
        else:
            weights = f"initial, by debug.seed = {seed}"
        log_rank0(f"weights    {weights}")
        if saved.get("config") and saved["config"] != self.checkpointer.config:
            log_rank0(changes(saved["config"], self.checkpointer.config, self._last_step))
        return saved

    def finished_on_error(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that finishes an asynchronous save if its body raises."""
        return self.checkpointer.finished_on_error() if self.checkpointer else contextlib.nullcontext()

    def confirm(self, step: int) -> None:
        """Record that a step was finite: checkpoints of earlier steps are good."""
        if self.checkpointer:
            self.checkpointer.confirm(step)

    def after_divergence(self) -> str:
        """Set aside the checkpoints whose weights gave no finite step. Return what to tell the user."""
        return self.checkpointer.after_divergence() if self.checkpointer else ""

    def after_step(self, step: int, state: RunState, *, asked: bool, is_last: bool) -> None:
        """Save a step if it is due: every checkpoint.interval steps, when a rank was `asked` to save, and the last one.
        Raises TrainingError as Checkpointer.save does."""
        if not self.checkpointer:
            return
        mark("saving a checkpoint")
        self.checkpointer.poll()
        if step % self.checkpoint.interval == 0 or is_last or asked:
            self.signals.answered_saves = self.signals.saves
            if asked:
                log_rank0(f"asked to save: checkpoint step-{step}")
            self._save(step, state, is_last=is_last)

    def _save(self, step: int, state: RunState, *, is_last: bool) -> None:
        self.checkpointer.save(step, *self._trained, state.save(), is_last=is_last)
        self._last_step = step

    def finish(self, step: int, state: RunState, last_loss: Callable[[], float]) -> None:
        """Wait for the last checkpoint, and test it if no later step has. Raises TrainingError if one could not be
        written or the loss is not finite.

        Args:
            step: the step that the weights are of; it is saved if it was not yet.
            last_loss: returns the loss of a further batch with these weights. Every rank calls it.
        """
        if not self.checkpointer:
            return
        if step != self._last_step:
            mark("saving a checkpoint")
            self._save(step, state, is_last=True)
        mark("waiting for the last checkpoint")
        self.checkpointer.finish()
        if self.checkpointer.unconfirmed:
            mark("testing the last checkpoint")
            may_fail = state.guard.n_nonfinite < state.guard.n_allowed
            self.checkpointer.confirm_last(step, last_loss(), may_fail=may_fail)

    def metrics(self) -> dict[str, float]:
        """Return values since the last call by tag."""
        return {"time_metrics/checkpoint(s)": self.checkpointer.take_seconds()} if self.checkpointer else {}

    def close(self) -> None:
        """Wait for all background work. Raises what an asynchronous save raised."""
        if self.checkpointer:
            self.checkpointer.close()
