"""Whether an update may be taken: losses and gradients that are not finite, the loss scale of float16, and outliers.

All three are decided on the device, alike on all ranks, so that the host need not wait for a step before it queues the
optimizer's. What is said about a step that was not taken is decided on the host, after its numbers were read.
"""

import math
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.config.errors import TrainingError
from titanlite.launch.process_group import log_rank0
from titanlite.train_step import Totals


class Confirming(Protocol):
    """The checkpoints of a run, as the guard sees them."""

    def confirm(self, step: int) -> None:
        """Record that a step was finite, which makes checkpoints of earlier steps good."""

    def after_divergence(self) -> str:
        """Set aside the checkpoints whose weights gave no finite step, and return words for the error's message."""


class Owner(Protocol):
    """Has a part of a checkpoint's state."""

    def state(self) -> dict[str, Any]:
        """Return the part, plain JSON under its key."""

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state. Raises ConfigError for a damaged part."""


class LossScale(Owner, Protocol):
    """Scales the loss in float16 (techniques/loss_scale.py)."""

    value: float

    def update(self, *, overflowed: bool) -> None:
        """Adapt the loss scale after a step. `overflowed`: its gradients were not finite."""


class OutlierSteps(Owner, Protocol):
    """Skips steps of far larger gradient norms than recent ones have (techniques/outlier_steps.py)."""

    n_skipped: int
    message: str

    def taken(self, norm: Tensor, finite: Tensor) -> Tensor:
        """Return whether to take a step, a scalar on the device."""

    def skipped(self, norm: float) -> bool:
        """Return whether the last step was skipped."""


class StepGuard:
    """Decides which updates are taken, and counts and reports the others. Every rank must make the same calls."""

    def __init__(self, n_allowed: int, loss_scale: LossScale | None = None, outliers: OutlierSteps | None = None):
        self.n_allowed, self.n_nonfinite = n_allowed, 0
        """How many steps may have no finite loss and gradient norm, and how many had none."""
        self.last_loss = 0.0
        self._loss_scale, self._outliers = loss_scale, outliers

    @property
    def loss_scale(self) -> float:
        """Factor on the loss in the backward of the next step."""
        return self._loss_scale.value if self._loss_scale else 1.0

    def taken(self, totals: Totals) -> Tensor:
        """Return whether the update of a step is to be taken, a scalar on the device: the host does not wait for it."""
        finite = totals.numbers.isfinite().all()
        return self._outliers.taken(totals.norm, finite) if self._outliers else finite

    def settle(self, step: int, loss: float, norm: float, own_loss_sum: Tensor, checkpoints: Confirming) -> None:
        """Count a step by its loss and gradient norm, and report one that was not taken; `own_loss_sum`, this rank's
        sum of token losses, names the ranks without a finite loss. Raises TrainingError if more steps than
        training.nonfinite_steps_allowed have no finite loss and norm, or a full window of steps were outliers."""
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
        """Return values by tag."""
        return {"skipped_steps": self._outliers.n_skipped} if self._outliers else {}

    def state(self) -> dict[str, Any]:
        """Return plain JSON for a checkpoint."""
        state: dict[str, Any] = {"skipped": self.n_nonfinite}
        for owner in filter(None, (self._loss_scale, self._outliers)):
            state |= owner.state()
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state; if it is empty, begin. Raises ConfigError for a damaged part."""
        self.n_nonfinite = state.get("skipped", 0)
        for owner in filter(None, (self._loss_scale, self._outliers)):
            owner.load(state)

    def report_divergence(self, vocab_size: int) -> None:
        """Print a line if the last loss is worse than a uniform guess."""
        if not self.last_loss <= (limit := math.log(vocab_size) + 1):  # a nan loss is reported, too
            above = f"is above {limit:.4g}, 1 more than a uniform guess has: it has diverged"
            log_rank0(f"the last loss, {self.last_loss:,.4g}, {above}")


def explain_nonfinite(step: int, loss: float, norm: float, own_loss_sum: Tensor) -> str:
    """Return which value of a step is not finite, and on which ranks. Every rank must call it."""
    sums = [torch.empty_like(own_loss_sum) for _ in range(dist.get_world_size())]
    dist.all_gather(sums, own_loss_sum)
    ranks = [str(rank) for rank, value in enumerate(sums) if not math.isfinite(value.item())]
    if ranks or not math.isfinite(loss):
        where = f"rank {', '.join(ranks)}" if ranks else "another replica group"
        return f"step {step}: the loss is {loss} because of {where}"
    return f"step {step}: the gradient norm is {norm} though the loss is finite on every rank ({loss:.4f})"
