"""Dynamic loss scaling (arXiv:1710.03740), for mixed precision in float16, which has no gradients below 6e-8. For one
process, torch.amp.GradScaler does the same."""


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

    def state(self) -> list[float]:
        """Return plain JSON for a checkpoint."""
        return [self.value, self._good_steps]

    def load(self, state: list[float]) -> None:
        """Continue from a result of `state`."""
        self.value, self._good_steps = state
