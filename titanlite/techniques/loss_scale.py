"""Dynamic loss scaling (arXiv:1710.03740), for mixed precision in float16, which has no gradients below 6e-8. For one
process, torch.amp.GradScaler does the same."""

from typing import Annotated, Any

from pydantic import Field

from titanlite.files.durable import Int63, parse_part

Saved = tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], Int63]
"""What a checkpoint has: the factor, and how many steps without overflow are behind it."""


class LossScale:
    """A factor on the loss in the backward; gradients are divided by it afterwards. It is doubled after
    `growth_interval` steps without overflow, and halved after a step with overflow."""

    def __init__(self, initial: float, growth_interval: int):
        self.value, self.growth_interval, self._good_steps = initial, growth_interval, 0

    def update(self, *, overflowed: bool) -> None:
        """Adapt the factor after a step. `overflowed`: some rank had gradients that were not finite."""
        self._good_steps = 0 if overflowed else self._good_steps + 1
        if overflowed:
            self.value /= 2
        elif self._good_steps == self.growth_interval:
            self.value, self._good_steps = self.value * 2, 0

    def state(self) -> dict[str, list[float]]:
        """Return its part of a checkpoint's state."""
        return {"loss_scale": [self.value, self._good_steps]}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state, or begin if it has no part. Raises ConfigError for a damaged one."""
        if saved := parse_part(state, "loss_scale", Saved | None):
            self.value, self._good_steps = saved
