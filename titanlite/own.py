"""The parts of a run that may be the user's own: the seam that build.py's functions take (docs/extend.md)."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from titanlite.build_llama import build_block
from titanlite.config.schema import Model, Optimizer, Training
from titanlite.loss import TokenLoss, cross_entropy


@dataclasses.dataclass(frozen=True)
class Parts:
    """Holds titanlite's own parts, of which nothing is to be checked or said. techniques/own.py has those of a user."""

    block: Callable[[Model, int], nn.Module] = build_block
    """(options of the layer, its number) -> its titanlite.model.Block, whose attention and feed_forward may be own."""
    styles: dict[str, ParallelStyle] = dataclasses.field(default_factory=dict)
    """How tensor parallel shards own modules that have weights, by their name in the block, "feed_forward.up"."""
    loss: TokenLoss = cross_entropy
    """(logits [N, V], targets [N], group) -> the loss of each token [N], 0 where the target is -100. With a group, the
    logits are this rank's shard of the vocabulary, as in titanlite.loss.cross_entropy."""
    data: Callable[[Training, int, int], Any] | None = None
    """(options, vocabulary size, seed) -> what has the training sequence of each index (techniques/data/own.py)."""
    optimizer: Callable[[nn.Module, Optimizer], torch.optim.Optimizer] | None = None
    """(model, options) -> its optimizer; each step sets the learning rate of its groups."""
    metrics: Callable[[Any], Any] | None = None
    """(TrainStep) -> an Observer (titanlite/train_step.py), whose metrics TensorBoard and metrics.jsonl have."""

    note: str = ""
    """A comment for the run's config.toml: the file of own parts, and its hash."""

    def options(self) -> dict[str, str]:
        """Return what the ranks of a run compare, and a run that resumes says if it is another."""
        return {}

    def identity(self) -> dict[str, bool]:
        """Return what a checkpoint has of it: whether its weights are of own blocks, which other commands reject."""
        return {}

    def check(self, *arguments: Any) -> None:
        """Raise ConfigError for a block, or a loss, that some layout would compute otherwise."""


PLAIN = Parts()


def own_of(argv: list[str]) -> tuple[Parts, list[str]]:
    """Return what `--own` names, and the other arguments. Raises ConfigError if it is wrong."""
    if not any(each.partition("=")[0] == "--own" for each in argv):
        return PLAIN, argv
    # By its name, since it imports this file; and here, since most runs have nothing own.
    return importlib.import_module("titanlite.techniques.own").own_of(argv)
