"""Dynamic loss scaling (arXiv:1710.03740) for mixed precision in float16, which rounds gradients below 6e-8 to 0."""

from typing import Annotated, Any

from pydantic import Field

from titanlite.files.durable import Int63, parse_part

Saved = tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], Int63]
"""The entry in a checkpoint: the loss scale, and the number of steps without overflow since the scale last changed."""


class LossScale:
    """The factor that multiplies the loss before the backward, and divides gradients after it. `update` doubles
    the factor after `growth_interval` steps without overflow, and halves the factor after an overflow."""

    def __init__(self, initial: float, growth_interval: int):
        self.value, self.growth_interval, self._good_steps = initial, growth_interval, 0

    def update(self, *, overflowed: bool) -> None:
        """Adapt the loss scale after a step. `overflowed`: some rank had gradients that were not finite."""
        self._good_steps = 0 if overflowed else self._good_steps + 1
        if overflowed:
            self.value /= 2
        elif self._good_steps == self.growth_interval:
            self.value, self._good_steps = self.value * 2, 0

    def state(self) -> dict[str, list[float]]:
        return {"loss_scale": [self.value, self._good_steps]}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the loss scale if a checkpoint's state contains it. Raises ConfigError for a damaged entry."""
        if saved := parse_part(state, "loss_scale", Saved | None):
            self.value, self._good_steps = saved
