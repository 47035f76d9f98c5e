"""The parts of a run that a user may replace, which a Config has beside its options (docs/extend.md). This module does
not import torch."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a run without any of the user's own; `Own` in techniques/own.py has a user's parts."""

    block: Callable[..., Any] | None = None
    """(the layer's section [model], its number) -> its titanlite.model.Block, whose attention and feed_forward may be
    the user's."""
    styles: dict[str, Any] = dataclasses.field(default_factory=dict)
    """How tensor parallel shards the user's modules that have weights: torch's ParallelStyle by the module's name in
    the block, as "feed_forward.up"."""
    loss: Callable[..., Any] | None = None
    """(logits [N, V], targets [N], group) -> the loss of each token [N], 0 where the target is -100. With a group, the
    logits are this rank's shard of the vocabulary, as in titanlite.loss.cross_entropy."""
    data: Callable[..., Any] | None = None
    """(the section [training], the vocabulary's size, the seed) -> an object with the training sequence of each index
    (techniques/data/own.py)."""
    optimizer: Callable[..., Any] | None = None
    """(model, the section [optimizer]) -> its torch.optim.Optimizer; each step sets the learning rate of its groups."""
    metrics: Callable[..., Any] | None = None
    """(titanlite.train_step.TrainStep) -> its Observer, whose metrics TensorBoard and metrics.jsonl have."""

    place: str = ""
    """FILE.py:NAME of the parts; empty if only this process has them."""
    digest: str = ""
    """The name of the file and of the object in it, and a hash of the file; empty: no part is the user's own."""

    def prepare(self, *arguments: Any) -> None:
        """Give the user's blocks their styles. Raise ConfigError for one that a layout would compute differently."""

    def check_loss(self, *arguments: Any) -> None:
        """Raise ConfigError for a loss that some layout would compute differently."""


def take_own(argv: list[str]) -> tuple[Parts, list[str]]:
    """Return the parts that `--own` names, and the other arguments. Raises ConfigError if `--own` is wrong."""
    if not any(each.partition("=")[0] == "--own" for each in argv):
        return Parts(), argv
    return importlib.import_module("titanlite.techniques.own").take_own(argv)  # the import loads torch
