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
from titanlite.config.schema import Training
from titanlite.parallel.mesh import log_rank0
from titanlite.train_step import Totals


class Confirming(Protocol):
    """The checkpoints of a run, as the guard sees them."""

    def confirm(self, step: int) -> None:
        """Record that a step was finite, which makes checkpoints of earlier steps good."""

    def after_divergence(self) -> str:
        """Set aside the checkpoints whose weights gave no finite step, and return words for the error's message."""


class LossScale:
    """Dynamic loss scaling (arXiv:1710.03740) is for mixed precision: float16 has no gradients below 6e-8, so the loss
    is multiplied by a factor before the backward and gradients are divided by it after.

    The factor is doubled after `growth_interval` steps without overflow; None: it never changes.
    """

    def __init__(self, initial: float = 1.0, growth_interval: int | None = None):
        self.value, self.growth_interval, self._good_steps = initial, growth_interval, 0
        self.dynamic = growth_interval is not None

    def update(self, *, overflowed: bool) -> None:
        """Adapt the factor after a step, by whether gradients were not finite on any rank."""
        self._good_steps = 0 if overflowed else self._good_steps + 1
        if self.dynamic and overflowed:
            self.value /= 2
        elif self.dynamic and self._good_steps == self.growth_interval:
            self.value, self._good_steps = self.value * 2, 0

    def state(self) -> list[float]:
        """Return plain JSON for a checkpoint."""
        return [self.value, self._good_steps]

    def load(self, state: list[float]) -> None:
        """Continue from `state`, if the factor is dynamic."""
        if self.dynamic:
            self.value, self._good_steps = state


def build_loss_scale(training: Training) -> LossScale:
    """Build the loss scale, which is 1 for every compute type but float16."""
    if training.mixed_precision_param != "float16":
        return LossScale()
    return LossScale(training.initial_loss_scale, training.loss_scale_growth_interval)


class OutlierSteps:
    """Decides whether a step is taken: its gradient norm must be at most mean + sigma x standard deviation of the norms
    of the last `window` steps that were taken. Until half a window of them is known, every finite step is taken.

    OLMo-core's SkipStepOptimizer has the same idea (olmo_core/optim/skip_step_optimizer.py). Here only norms of steps
    that were taken count, and the decision stays on the device.
    """

    def __init__(self, sigma: float, window: int, device: torch.device):
        self.sigma, self.window = sigma, window
        self.n_skipped = 0
        """Steps skipped since the run began."""
        self.message = ""
        """What to say about the last step that was skipped."""
        self._in_a_row = 0
        self._norms = torch.full((window,), torch.nan, dtype=torch.float64, device=device)  # oldest first; nan: none
        self._limit = torch.full((), torch.inf, dtype=torch.float64, device=device)

    def taken(self, norm: Tensor, finite: Tensor) -> Tensor:
        """Return whether to take a step with this gradient norm, and remember the norm if so. All are scalars on the
        device; the host does not wait for them."""
        known = ~self._norms.isnan()
        n = known.sum()
        mean = self._norms.nansum() / n
        deviation = (torch.where(known, self._norms - mean, 0).square().sum() / n).sqrt()
        self._limit = torch.where(2 * n >= self.window, mean + self.sigma * deviation, torch.inf)
        taken = finite & (norm <= self._limit)
        self._norms = torch.where(taken, torch.cat([self._norms[1:], norm[None]]), self._norms)
        return taken

    def skipped(self, norm: float) -> bool:
        """Return whether the last step, whose gradient norm this was, was skipped as an outlier; count it.

        Raises:
            TrainingError: if a full window of steps in a row were: their norms are no outliers, but the new normal.
        """
        limit = self._limit.item()
        outlier = limit < norm < torch.inf
        self._in_a_row = self._in_a_row + 1 if outlier else 0
        self.n_skipped += outlier
        of = f"mean + {self.sigma:g} standard deviations of recent steps"
        self.message = f"the gradient norm is {norm:.4g}, above {limit:.4g} ({of}); skipped without an update"
        if self._in_a_row == self.window:
            problem = f"{self.window} steps in a row, a full training.outlier_window, were skipped as outliers"
            raise TrainingError(f"{problem}: raise training.skip_outlier_sigma = {self.sigma:g}, or lower optimizer.lr")
        return outlier

    def state(self) -> dict[str, int | list[float]]:
        """Return plain JSON for a checkpoint. Python writes every digit of a float, so nothing is rounded."""
        return {"skipped": self.n_skipped, "norms": [norm for norm in self._norms.tolist() if norm == norm]}

    def load(self, skipped: int, norms: list[float]) -> None:
        """Continue from a checkpoint's state; if the window is shorter now, with its newest norms."""
        self.n_skipped, newest = skipped, norms[-self.window :]
        values = [torch.nan] * (self.window - len(newest)) + newest
        self._norms.copy_(torch.tensor(values, dtype=torch.float64))


class StepGuard:
    """Decides which updates are taken, and counts and reports the others. Every rank must make the same calls."""

    def __init__(self, training: Training, device: torch.device):
        self.n_allowed, self.n_nonfinite = training.nonfinite_steps_allowed, 0
        """How many steps may have no finite loss and gradient norm, and how many had none."""
        self.last_loss = 0.0
        self._loss_scale = build_loss_scale(training)
        sigma, window = training.skip_outlier_sigma, training.outlier_window
        self._outliers = OutlierSteps(sigma, window, device) if sigma else None

    @property
    def loss_scale(self) -> float:
        """Factor on the loss in the backward of the next step."""
        return self._loss_scale.value

    def taken(self, totals: Totals) -> Tensor:
        """Return whether the update of a step is to be taken, a scalar on the device: the host does not wait for it."""
        finite = totals.numbers.isfinite().all()
        return self._outliers.taken(totals.norm, finite) if self._outliers else finite

    def settle(self, step: int, loss: float, norm: float, own_loss_sum: Tensor, checkpoints: Confirming) -> None:
        """Count a step by its loss and gradient norm, and report one that was not taken.

        Args:
            own_loss_sum: the sum of this rank's token losses, by which a rank without a finite loss is named.

        Raises:
            TrainingError: if more steps than training.nonfinite_steps_allowed have no finite loss and gradient norm, or
                a full window of steps in a row were outliers.
        """
        scale = self._loss_scale
        overflowed = scale.dynamic and math.isfinite(loss) and not math.isfinite(norm)
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
        scale.update(overflowed=overflowed)
        self.last_loss = loss

    def metrics(self) -> dict[str, float]:
        """Return values by tag."""
        return {"skipped_steps": self._outliers.n_skipped} if self._outliers else {}

    def state(self) -> dict[str, Any]:
        """Return plain JSON for a checkpoint."""
        state = {"skipped": self.n_nonfinite, "loss_scale": self._loss_scale.state()}
        return state | ({"outliers": self._outliers.state()} if self._outliers else {})

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `state` has returned; if it is empty, begin."""
        if state:
            self.n_nonfinite = state["skipped"]
            self._loss_scale.load(state["loss_scale"])
        if self._outliers and state.get("outliers"):
            self._outliers.load(**state["outliers"])

    def report_divergence(self, vocab_size: int) -> None:
        """Say so if the last loss is worse than that of a uniform guess."""
        if not self.last_loss <= (limit := math.log(vocab_size) + 1):  # also if it is nan
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
