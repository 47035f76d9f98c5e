"""The parts of a run that users may replace by their own code (docs/extend.md). This module does not import torch."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Parts:
    """Default parts of a run; the subclass `Own` in techniques/own.py has the parts that a user replaces."""

    block: Callable[..., Any] | None = None
    """Function (a layer's section [model], the layer's number) -> titanlite.model.Block with the user's own modules."""
    styles: dict[str, Any] = dataclasses.field(default_factory=dict)
    """torch's ParallelStyle by the name of a user module with weights in its block, as in "feed_forward.up"."""
    loss: Callable[..., Any] | None = None
    """Function (logits [N, V], targets [N], group) -> loss of each token [N], 0 where the target is -100. With a
    process group, V is this rank's shard of the vocabulary, as in titanlite.loss.cross_entropy."""
    data: Callable[..., Any] | None = None
    """Function (section [training], vocabulary size, seed) -> data as in techniques/data/own.py."""
    optimizer: Callable[..., Any] | None = None
    """Function (model, section [optimizer]) -> torch.optim.Optimizer, whose learning rate every training step sets."""
    metrics: Callable[..., Any] | None = None
    """Function (TrainStep) -> Observer, whose metrics are written to TensorBoard and metrics.jsonl."""

    place: str = ""
    """FILE.py:NAME of the object with the user's parts; empty if the object exists in this process only."""
    digest: str = ""
    """Names of the user's file and object, with a hash of the file; empty if the user replaces no part."""

    def prepare(self, *arguments: Any) -> None:
        """Set the tensor-parallel `styles` of the user's blocks. Raises ConfigError if results depend on the layout."""

    def check_loss(self, *arguments: Any) -> None:
        """Raise ConfigError for a loss function whose result depends on the layout."""


def take_own(argv: list[str]) -> tuple[Parts, list[str]]:
    """Return the user's parts that `--own` names, and the other arguments. Raises ConfigError if `--own` is wrong."""
    if not any(each.partition("=")[0] == "--own" for each in argv):
        return Parts(), argv
    return importlib.import_module("titanlite.techniques.own").take_own(argv)  # techniques.own imports torch
