"""Exponential moving average (EMA) of the weights (after Polyak averaging, doi:10.1137/0330046). After each update of
an optimizer, average = d average + (1 - d) weight, where d = ema.decay. Up to update ema.start_step, the average equals
the weight. Averages are optimizer states: each rank averages its own shard of a weight, and checkpoints save the
averages. Averages are in float32, since bfloat16 would round away their small changes."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from titanlite.config.schema import Ema
from titanlite.parallel.shards import local_shard
from titanlite.validation import Validator

AVERAGE, COUNT = "ema", "ema_step"
"""Names of the two optimizer states: the average of a weight, and the number of updates that the optimizer has made."""


def follow(optimizer: torch.optim.Optimizer, options: Ema) -> None:
    """Have each step of an optimizer update the averages of its weights. A skipped step changes no average."""
    optimizer.register_step_post_hook(lambda *_: update(optimizer, options))


@torch.no_grad()
def update(optimizer: torch.optim.Optimizer, options: Ema) -> None:
    """Update the averages after an optimizer step, unless `found_inf` is 1. The host does not wait for the device."""
    count = _create_states(optimizer)
    taken = 1 - getattr(optimizer, "found_inf", torch.zeros_like(count))
    count.add_(taken)
    n = count.double() - options.start_step
    decay = ((1 + n) / (10 + n)).clamp(max=options.decay) if options.warmup else options.decay
    share = torch.where(n <= 0, 1.0, (1 - decay) * taken.double())
    for weight, state in optimizer.state.items():
        average = local_shard(state[AVERAGE])
        average.lerp_(local_shard(weight).to(average.dtype), share.to(average.dtype))


def _create_states(optimizer: torch.optim.Optimizer) -> Tensor:
    """Add an average, equal to the weight, to the states of each weight without an average. Return the tensor that
    counts updates; each weight's states include it, because a rank of another layout may have only one weight."""
    device = optimizer.param_groups[0]["params"][0].device
    counts = (state[COUNT] for state in optimizer.state.values() if COUNT in state)
    count = next(counts, torch.zeros((), device=device))
    for weight, state in optimizer.state.items():
        if AVERAGE not in state:
            wide = torch.promote_types(weight.dtype, torch.float32)
            state[AVERAGE], state[COUNT] = torch.zeros_like(weight, dtype=wide), count
            local_shard(state[AVERAGE]).copy_(local_shard(weight))
    return count


@contextlib.contextmanager
def averaged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Replace the weights by their averages within a `with` block, and restore the weights afterwards, bit for bit."""
    shards = [local_shard(weight) for weight in optimizer.state]
    weights = [shard.clone() for shard in shards]
    try:
        for shard, state in zip(shards, optimizer.state.values(), strict=True):
            shard.copy_(local_shard(state[AVERAGE]))
        yield
    finally:
        for shard, value in zip(shards, weights, strict=True):
            shard.copy_(value)


class AveragedValidator(Validator):
    """Validates, and generates samples, with the averages of the weights that `optimizer` trains."""

    def __init__(self, optimizer: torch.optim.Optimizer, *arguments: Any):
        super().__init__(*arguments)
        of_validation = self.batches

        def batches() -> Any:
            # Swap in the averages here, since Validator calls batches() only when a validation begins.
            self._averages.enter_context(averaged(optimizer))
            return of_validation()

        self.batches = batches

    def after_step(self, step: int, *, is_last: bool, stopping: bool) -> dict[str, float]:
        with torch.no_grad(), contextlib.ExitStack() as self._averages:
            return super().after_step(step, is_last=is_last, stopping=stopping)
