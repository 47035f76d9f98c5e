"""Outlier steps: a step whose gradient norm is far above recent gradient norms is skipped without an update."""

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from titanlite.config.errors import TrainingError
from titanlite.files.durable import Record, parse_part


class Saved(Record):
    """The entry in a checkpoint: how many outlier steps were skipped, and the norms of the window, the oldest first."""

    skipped: int = Field(ge=0)
    norms: list[Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(max_length=1_000_000)


class OutlierSteps:
    """Decides whether a step is taken: its gradient norm must be at most mean + sigma x standard deviation of the norms
    of the last `window` taken steps. Until half a window of norms is known, every step with a finite norm is taken. The
    idea is from OLMo-core's SkipStepOptimizer (olmo_core/optim/skip_step_optimizer.py)."""

    def __init__(self, sigma: float, window: int, device: torch.device):
        self.sigma, self.window = sigma, window
        self.n_skipped = 0
        """Steps skipped since the run began."""
        self.message = ""
        """The message about the last step that was skipped."""
        self._in_a_row = 0
        # Norms of the last `window` taken steps, the oldest first; NaN stands for a step that has not been taken yet.
        self._norms = torch.full((window,), torch.nan, dtype=torch.float64, device=device)
        self._limit = torch.full((), torch.inf, dtype=torch.float64, device=device)

    def taken(self, norm: Tensor, finite: Tensor) -> Tensor:
        """Return whether to take a step with this gradient norm; if so, record the norm."""
        known = ~self._norms.isnan()
        n = known.sum()
        mean = self._norms.nansum() / n
        deviation = (torch.where(known, self._norms - mean, 0).square().sum() / n).sqrt()
        self._limit = torch.where(2 * n >= self.window, mean + self.sigma * deviation, torch.inf)
        taken = finite & (norm <= self._limit)
        self._norms = torch.where(taken, torch.cat([self._norms[1:], norm[None]]), self._norms)
        return taken

    def skipped(self, norm: float) -> bool:
        """Return whether the last step, with gradient norm `norm`, was skipped as an outlier; if so, count it. Raises
        TrainingError if `window` consecutive steps were skipped, since such norms are no outliers."""
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

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the entry in a checkpoint. JSON stores floats without rounding."""
        norms = [norm for norm in self._norms.tolist() if norm == norm]
        return {"outliers": {"skipped": self.n_skipped, "norms": norms}}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the counter and the newest norms from a checkpoint. Raises ConfigError for a damaged entry."""
        if saved := parse_part(state, "outliers", Saved | None):
            self.n_skipped, newest = saved.skipped, saved.norms[-self.window :]
            values = [torch.nan] * (self.window - len(newest)) + newest
            self._norms.copy_(torch.tensor(values, dtype=torch.float64))
