"""One optimizer step (gradients, sums over ranks, update), and the validation loss, which needs no gradients. Training,
parity tests, tests of replica groups and the planner all run this file's code."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.config.schema import Parallelism
from titanlite.data.loader import Batch
from titanlite.launch.process import Signals
from titanlite.launch.progress import alive
from titanlite.loss import count_valid
from titanlite.optimizer import clip_factor, clipped_step, gradient_norm, scale_gradients
from titanlite.parallel import fsdp


class Runner(Protocol):
    """Runs a model, or the stages of a pipeline: a SingleStageRunner or a PipelineRunner."""

    def prepare(self, batch: Batch) -> None:
        """Compile the stages of a pipeline on one batch, before the first step. Later calls do nothing."""

    def forward_backward(self, batch: Batch, valid: Tensor) -> Tensor:
        """Add the gradient of (sum of this batch's token losses) / valid to the parameters, and return the sum."""

    def forward(self, batch: Batch) -> Tensor:
        """Return the sum of the token losses."""


class SingleStageRunner(Runner):
    """Runs a model that is not split into pipeline stages."""

    def __init__(self, model: nn.Module):
        self.model = model

    def forward_backward(self, batch: Batch, valid: Tensor) -> Tensor:
        loss = self.forward(batch)
        (loss / valid).backward()
        return loss.detach()

    def forward(self, batch: Batch) -> Tensor:
        return self.model(batch.tokens, **batch.inputs())


class Totals(NamedTuple):
    """The results of a step, on the device, the same on every rank."""

    numbers: Tensor
    """Float64: mean loss, gradient norm, numbers of ranks asked to stop and asked to save, and a sum for each count."""

    @property
    def norm(self) -> Tensor:
        return self.numbers[1]

    def read(self) -> list[float]:
        """Copy `numbers` to the host. In a step without logging, only this call makes the host wait for the device."""
        return self.numbers.tolist()


def sum_over_ranks(loss_sum: Tensor, signals: Signals, *counts: float) -> Tensor:
    """Return sums over all ranks, [3 + number of counts]: `loss_sum`, the number of ranks that were asked to stop, the
    number of ranks that were asked to save, and each of `counts`."""
    others = [torch.full_like(loss_sum, each) for each in (signals.stopping, signals.asked_to_save, *counts)]
    sums = torch.stack([loss_sum, *others])
    dist.all_reduce(sums)
    return sums


class SavedState(Protocol):
    """The methods of RunState, the state of a run that a checkpoint stores in addition to tensors."""

    def save(self) -> dict[str, Any]:
        """Return the run's state as plain JSON. Every rank must call it."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that another replica group has saved."""


class OneGroup:
    """Yields the numbers of a run's steps, and sums over its ranks, which form one group. A run of replica groups,
    which may fail, uses Replicas instead (techniques/replicas/)."""

    def begin(
        self, last_step: int, saved: Mapping[str, Any], state: SavedState, abandon: Callable[[int], None]
    ) -> None:
        """Prepare for steps after `last_step`; called before `steps`. `saved`: state in that step's checkpoint, or {}.
        Replica groups use `state` to exchange the run's state, and `abandon(step)` to remove metrics of later steps."""

    def steps(self, last_step: int, last: int) -> Iterable[int]:
        """Yield the number of each step from `last_step` + 1 to `last`."""
        return range(last_step + 1, last + 1)

    def count(self, valid: Tensor) -> None:
        """Sum a step's number of valid tokens over the replica groups, in place."""

    def totals(
        self, loss_sum: Tensor, valid: Tensor, parameters: Iterable[nn.Parameter], signals: Signals, *counts: float
    ) -> Totals | None:
        """Return the mean loss, the gradient norm, the numbers of ranks asked to stop or to save, and the sums of
        `counts`, over all ranks. `valid`: the global number of valid tokens. Return None if a replica group failed: the
        step must be repeated. Every rank must call it."""
        norm = gradient_norm(parameters, loss_sum.device)
        loss, *others = sum_over_ranks(loss_sum, signals, *counts)
        return Totals(torch.stack([loss / valid, norm, *others]))

    def final_step(self, step: int) -> int:
        """Return the step whose weights a run has if it ends after `step`."""
        return step

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last step by tag."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return the state of the replica groups for a checkpoint, as plain JSON."""
        return {}


class Observer:
    """Observes the steps of a run. An observer may raise to end the run, but must not change what a step computes."""

    def before_backward(self, step: int) -> None:
        """Called before the forward of each step."""

    def after_backward(self, step: int, batches: list[Batch], loss_sum: Tensor, *, is_test: bool) -> None:
        """Called after each backward, while the parameters have gradients. `loss_sum`: the sum of this rank's token
        losses. `is_test`: this batch only tests the final weights, and no update follows."""

    def after_validation(self, step: int) -> None:
        """Called after each validation. `step`: the step of the validated weights."""

    def metrics(self) -> dict[str, float]:
        """Return the observer's metrics since the last call, by tag. Every rank must call it."""
        return {}


class Balance(Protocol):
    """Balances the load of experts (techniques/moe/balance.py)."""

    def begin_step(self, loss_scale: float) -> None:
        """Set the loads of all experts to 0. `loss_scale`: the factor on losses in this step's backward passes."""

    def update(self, taken: Tensor) -> None:
        """Adjust the routers according to the loads of the last step. `taken`: whether the step's update was taken."""

    def metrics(self) -> dict[str, Any]:
        """Return metrics of the last step by tag."""


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """Computes losses, gradients and updates on one rank."""

    model: nn.Module
    """All modules of this rank."""
    runner: Runner
    parallelism: Parallelism
    device: torch.device
    contributes_loss: bool
    """Whether sums include this rank's tokens and losses: true for only one of the ranks that have the same tokens."""
    max_norm: float
    """The global gradient norm to which gradients are clipped."""
    balance: Balance | None = None
    """Balances the load of experts; None for a model without experts."""
    groups: OneGroup = dataclasses.field(default_factory=OneGroup)
    observers: list[Observer] = dataclasses.field(default_factory=list)

    def gradients(
        self, step: int, batches: list[Batch], loss_scale: float = 1.0, *, is_test: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Call the observers before and after forward_backward, and return its result. `is_test`: as in Observer."""
        self.runner.prepare(batches[0])  # prepare runs before any observer, so that none sees it
        for observer in self.observers:
            observer.before_backward(step)
        loss_sum, valid = self.forward_backward(batches, loss_scale)
        for observer in self.observers:
            observer.after_backward(step, batches, loss_sum, is_test=is_test)
        return loss_sum, valid

    def forward_backward(self, batches: list[Batch], loss_scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Compute the gradient of the global loss, from one batch for each gradient accumulation step.

        The global loss is the sum of all token losses divided by the number of valid tokens. Tokens of all ranks and
        accumulation steps are counted first; each token's loss is divided by the global count, and gradients are only
        summed. `loss_scale`: the factor on the loss in the backward; gradients are divided by it. Return float64 device
        scalars: the sum of this rank's token losses in nats (0 without `contributes_loss`), and the global token count.
        """
        if self.balance:
            self.balance.begin_step(loss_scale)
        valid = count_valid([batch.targets for batch in batches], self.device) * self.contributes_loss
        dist.all_reduce(valid)
        self.groups.count(valid)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for accumulation_step, batch in enumerate(batches, 1):
            fsdp.prepare_accumulation_step(self.model, self.parallelism, last=accumulation_step == len(batches))
            alive()
            loss_sum += self.runner.forward_backward(batch.to(self.device), valid / loss_scale)
        if loss_scale != 1:
            scale_gradients(self.model.parameters(), 1 / loss_scale)
        return (loss_sum if self.contributes_loss else torch.zeros_like(loss_sum)), valid

    def update(self, optimizer: torch.optim.Optimizer, norm: Tensor, taken: Tensor) -> None:
        """Clip the gradients, whose global norm is `norm`, and update the weights if `taken`. `norm` and `taken`
        are scalars on the device. Every rank must call it."""
        clipped_step(optimizer, clip_factor(norm, self.max_norm), taken)
        if self.balance:
            self.balance.update(taken)

    def largest_loss(self, loss_sum: Tensor, batches: list[Batch]) -> float:
        """Return the largest of the ranks' mean losses, in nats per token. Every rank must call it."""
        own = loss_sum / count_valid([batch.targets for batch in batches], loss_sum.device)
        # On a rank without valid tokens, the mean is 0 / 0 = nan.
        own = own.nan_to_num(nan=-math.inf) if self.contributes_loss else torch.full_like(own, -math.inf)
        dist.all_reduce(own, dist.ReduceOp.MAX)
        return own.item()

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the last step's experts by tag; a value that is a tensor becomes a histogram."""
        return self.balance.metrics() if self.balance else {}

    @torch.no_grad()
    def validate(
        self,
        batches: Iterable[Batch],
        advance: Callable[[int], None] = lambda amount: None,
        signals: Signals | None = None,
    ) -> float | None:
        """Return the mean loss of all ranks' valid tokens, in nats; None if some rank was asked to stop. Every rank
        must have the same number of batches. `advance(1)` is called after each batch."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in batches:
            if signals:
                stopping = torch.tensor(float(signals.stopping))  # a tensor on the host: no rank waits for its device
                dist.all_reduce(stopping)
                if stopping:
                    fsdp.reshard(self.model)
                    return None
            totals[0] += self.runner.forward(batch.to(self.device))
            totals[1] += count_valid([batch.targets], self.device)
            advance(1)
        fsdp.reshard(self.model)
        totals = totals if self.contributes_loss else torch.zeros_like(totals)
        dist.all_reduce(totals)
        return (totals[0] / totals[1]).item()
