"""Skip updates whose loss or gradients are not finite or are outliers, and adapt the loss scale of float16. The device
decides whether to skip, with the same result on all ranks, so that the host can queue the optimizer step without
waiting. The host reports a skipped update later, when it has read the loss and the gradient norm."""

import math
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.config.errors import TrainingError
from titanlite.launch.process_group import log_rank0
from titanlite.train_step import Totals


class Confirming(Protocol):
    """The methods of a Checkpointer that StepGuard calls."""

    def confirm(self, step: int) -> None:
        """Record that the loss of a step was finite, which confirms that checkpoints of earlier steps are good."""

    def after_divergence(self) -> str:
        """Rename the checkpoints whose weights gave no finite loss, and return text for the error message."""


class Owner(Protocol):
    """An object whose state a checkpoint stores in state.json."""

    def state(self) -> dict[str, Any]:
        """Return the object's state as plain JSON, under a single key."""

    def load(self, state: dict[str, Any]) -> None:
        """Restore the object from the state of a checkpoint. Raises ConfigError if the object's entry is damaged."""


class LossScale(Owner, Protocol):
    """Scales the loss in float16 (techniques/loss_scale.py)."""

    value: float

    def update(self, *, overflowed: bool) -> None:
        """Adapt the loss scale after a step. `overflowed`: the step's gradients were not finite."""


class OutlierSteps(Owner, Protocol):
    """Skips steps whose gradient norm is far above recent gradient norms (techniques/outlier_steps.py)."""

    n_skipped: int
    message: str

    def taken(self, norm: Tensor, finite: Tensor) -> Tensor:
        """Return whether to take an update, as a scalar on the device."""

    def skipped(self, norm: float) -> bool:
        """Return whether the last update was skipped as an outlier."""


class StepGuard:
    """Decides which updates are taken; counts and reports skipped updates. Every rank must make the same calls."""

    def __init__(self, n_allowed: int, loss_scale: LossScale | None = None, outliers: OutlierSteps | None = None):
        self.n_allowed, self.n_nonfinite = n_allowed, 0
        """How many steps without a finite loss and gradient norm are allowed, and how many have occurred."""
        self.last_loss = 0.0
        self._loss_scale, self._outliers = loss_scale, outliers

    @property
    def loss_scale(self) -> float:
        """Return the factor on the loss in the next backward."""
        return self._loss_scale.value if self._loss_scale else 1.0

    def taken(self, totals: Totals) -> Tensor:
        """Return whether to take the update of a step, as a scalar on the device: the host does not wait."""
        finite = totals.numbers.isfinite().all()
        return self._outliers.taken(totals.norm, finite) if self._outliers else finite

    def settle(self, step: int, loss: float, norm: float, own_loss_sum: Tensor, checkpoints: Confirming) -> None:
        """Record a step's loss and gradient norm, and print a line if the update was skipped. `own_loss_sum`: the sum
        of this rank's token losses, to name the ranks without a finite loss in errors. Raises TrainingError if more
        steps than training.nonfinite_steps_allowed had no finite loss or norm, or a full outlier_window was skipped."""
        scale = self._loss_scale
        overflowed = scale is not None and math.isfinite(loss) and not math.isfinite(norm)
        if overflowed and scale.value > 1:
            log_rank0(f"step {step}: gradients overflow at loss scale {scale.value:g}; skipped, and the scale halved")
        elif not (math.isfinite(loss) and math.isfinite(norm)):
            reason = explain_nonfinite(step, loss, norm, own_loss_sum)
            if self.n_nonfinite == self.n_allowed:
                allowed = f"{self.n_nonfinite}, all used" if self.n_nonfinite else "N skips N such steps"
                problem = f"{reason} (training.nonfinite_steps_allowed = {allowed})"
                raise TrainingError(problem + checkpoints.after_divergence())
            self.n_nonfinite += 1
            log_rank0(f"{reason}; skipped without an update, {self.n_nonfinite} of {self.n_allowed} allowed")
        else:
            checkpoints.confirm(step)
        if self._outliers and self._outliers.skipped(norm):
            log_rank0(f"step {step}: {self._outliers.message}")
        if scale:
            scale.update(overflowed=overflowed)
        self.last_loss = loss

    def metrics(self) -> dict[str, float]:
        return {"skipped_steps": self._outliers.n_skipped} if self._outliers else {}

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"skipped": self.n_nonfinite}
        for owner in filter(None, (self._loss_scale, self._outliers)):
            state |= owner.state()
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint; {} for a new run. Raises ConfigError if the state is damaged."""
        self.n_nonfinite = state.get("skipped", 0)
        for owner in filter(None, (self._loss_scale, self._outliers)):
            owner.load(state)

    def report_divergence(self, vocab_size: int) -> None:
        """Print a line if the last loss is nan, or more than 1 nat above the loss of a uniform guess."""
        if not self.last_loss <= (limit := math.log(vocab_size) + 1):  # `not <=` is also true for nan
            above = f"is above {limit:.4g}, 1 more than a uniform guess has: it has diverged"
            log_rank0(f"the last loss, {self.last_loss:,.4g}, {above}")


def explain_nonfinite(step: int, loss: float, norm: float, own_loss_sum: Tensor) -> str:
    """Return a sentence that tells which value of a step is not finite, and on which ranks. Every rank must call it."""
    sums = [torch.empty_like(own_loss_sum) for _ in range(dist.get_world_size())]
    dist.all_gather(sums, own_loss_sum)
    ranks = [str(rank) for rank, value in enumerate(sums) if not math.isfinite(value.item())]
    if ranks or not math.isfinite(loss):
        where = f"rank {', '.join(ranks)}" if ranks else "another replica group"
        return f"step {step}: the loss is {loss} because of {where}"
    return f"step {step}: the gradient norm is {norm} though the loss is finite on every rank ({loss:.4f})"
