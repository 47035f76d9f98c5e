"""The parts of a run that may be the user's own, which a Config has beside its options (docs/extend.md). Nothing here
imports torch."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Parts:
    """Holds titanlite's parts: None of the user's own. techniques/own.py has those of a user, `Own`."""

    block: Callable[..., Any] | None = None
    """(the layer's section [model], its number) -> its titanlite.model.Block, whose attention and feed_forward may be
    own."""
    styles: dict[str, Any] = dataclasses.field(default_factory=dict)
    """How tensor parallel shards own modules that have weights: torch's ParallelStyle by the name in the block, as
    "feed_forward.up"."""
    loss: Callable[..., Any] | None = None
    """(logits [N, V], targets [N], group) -> the loss of each token [N], 0 where the target is -100. With a group, the
    logits are this rank's shard of the vocabulary, as in titanlite.loss.cross_entropy."""
    data: Callable[..., Any] | None = None
    """(the section [training], the vocabulary's size, the seed) -> what has the training sequence of each index
    (techniques/data/own.py)."""
    optimizer: Callable[..., Any] | None = None
    """(model, the section [optimizer]) -> its torch.optim.Optimizer; each step sets the learning rate of its groups."""
    metrics: Callable[..., Any] | None = None
    """(titanlite.train_step.TrainStep) -> its Observer, whose metrics TensorBoard and metrics.jsonl have."""

    place: str = ""
    """FILE.py:NAME; empty if it is of this process alone."""
    digest: str = ""
    """The name of the file and of the object in it, and a hash of the file. Empty: nothing is the user's own."""

    def prepare(self, *arguments: Any) -> None:
        """Give own blocks their styles. Raise ConfigError for one that some layout would compute otherwise."""

    def check_loss(self, *arguments: Any) -> None:
        """Raise ConfigError for a loss that some layout would compute otherwise."""


def take_own(argv: list[str]) -> tuple[Parts, list[str]]:
    """Return what `--own` names, and the other arguments. Raises ConfigError if it is wrong."""
    if not any(each.partition("=")[0] == "--own" for each in argv):
        return Parts(), argv
    return importlib.import_module("titanlite.techniques.own").take_own(argv)  # by its name, since it imports torch
