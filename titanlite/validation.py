"""The validation loss of a training run, every validation.freq steps and after the last step."""

from collections.abc import Callable, Iterator

import torch.distributed as dist

from titanlite.config.schema import Validation
from titanlite.data.loader import Batch
from titanlite.launch.process import Signals
from titanlite.launch.progress import mark, progress
from titanlite.metrics.logger import VALIDATION_LOSS
from titanlite.train_step import TrainStep


class Validator:
    """Computes the validation loss if validation.enable. Every rank must make the same calls. `batches()` returns this
    rank's batches of one validation and their number. A stop signal ends a running validation early."""

    def __init__(
        self,
        validation: Validation,
        train_step: TrainStep,
        batches: Callable[[], tuple[Iterator[Batch], int]],
        signals: Signals,
    ):
        self.validation, self.train_step, self.batches, self.signals = validation, train_step, batches, signals
        self.was_stopped = False
        """Whether the last validation ended because a rank was asked to stop."""

    def after_step(self, step: int, *, is_last: bool, stopping: bool) -> dict[str, float]:
        """Return the validation loss by tag, in nats; {} if no validation is due, or a rank was asked to stop."""
        if not self.validation.enable or stopping or not (is_last or step % self.validation.freq == 0):
            return {}
        mark("validation")
        batches, total = self.batches()
        with progress("validation", total=total, unit="batches", enabled=dist.get_rank() == 0) as advance:
            loss = self.train_step.validate(batches, advance, self.signals)
        if loss is None:
            self.was_stopped = True
            return {}
        for observer in self.train_step.observers:
            observer.after_validation(step)
        return {VALIDATION_LOSS: loss}
