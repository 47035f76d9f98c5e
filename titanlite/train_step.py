"""One optimizer step (gradients, sums over ranks, update), and the loss of a validation, without gradients.

Training, the parity tests, the tests of replica groups and the planner run this same code.
"""

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
        """Do what must precede the first step, with one of its batches. Later calls, and a single stage, do nothing."""

    def forward_backward(self, batch: Batch, valid: Tensor) -> Tensor:
        """Add the gradient of (sum of this batch's token losses) / valid to the parameters, and return the sum."""

    def forward(self, batch: Batch) -> Tensor:
        """Return the sum of the token losses."""


class SingleStageRunner(Runner):
    """Runs a model that is not split into pipeline stages, as PipelineRunner runs one that is."""

    def __init__(self, model: nn.Module):
        self.model = model

    def forward_backward(self, batch: Batch, valid: Tensor) -> Tensor:
        """Add the gradient of (sum of this batch's token losses) / valid to the parameters, and return the sum."""
        loss = self.forward(batch)
        (loss / valid).backward()
        return loss.detach()

    def forward(self, batch: Batch) -> Tensor:
        """Return the sum of the token losses."""
        return self.model(batch.tokens, **batch.inputs())


class Totals(NamedTuple):
    """The numbers of a step that all ranks know once its gradients are summed, on the device."""

    numbers: Tensor
    """The mean loss, the gradient norm, how many ranks were asked to stop and to save, sums of counts: float64."""

    @property
    def norm(self) -> Tensor:
        return self.numbers[1]

    def read(self) -> list[float]:
        """Return the numbers. The host waits here for the device, and in a step that is not logged nowhere else."""
        return self.numbers.tolist()


def sum_over_ranks(loss_sum: Tensor, signals: Signals, *counts: float) -> Tensor:
    """Return sums over all ranks, [3 + counts]: of `loss_sum`, the number of ranks that were asked to stop, the number
    that were asked to save, and each of `counts`."""
    others = [torch.full_like(loss_sum, each) for each in (signals.stopping, signals.asked_to_save, *counts)]
    sums = torch.stack([loss_sum, *others])
    dist.all_reduce(sums)
    return sums


class SavedState(Protocol):
    """The state of a run that a checkpoint stores beside tensors: a RunState."""

    def save(self) -> dict[str, Any]:
        """Return the state as plain JSON. Every rank must call it."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another replica group."""


class OneGroup:
    """Yields the steps and sums over ranks, where all ranks are one group. A run whose groups may fail has Replicas
    instead (techniques/replicas/)."""

    def begin(
        self, last_step: int, saved: Mapping[str, Any], state: SavedState, abandon: Callable[[int], None]
    ) -> None:
        """Begin after a step, before `steps`. `saved`: the state of that step's checkpoint, empty without one; `state`:
        what another group may need; `abandon`: removes what steps after one have logged, if the group leaves them."""

    def steps(self, last_step: int, last: int) -> Iterable[int]:
        """Yield the number of each step from `last_step` + 1 to `last`."""
        return range(last_step + 1, last + 1)

    def count(self, valid: Tensor) -> None:
        """Sum a step's number of tokens over the groups, in place."""

    def totals(
        self, loss_sum: Tensor, valid: Tensor, parameters: Iterable[nn.Parameter], signals: Signals, *counts: float
    ) -> Totals | None:
        """Sum over all ranks this rank's token losses, the gradients of its parameters, whether it was asked to stop or
        to save, and `counts`. `valid`: the global number of valid tokens. Return None if a group was lost, so that the
        step has to be taken again. Every rank must call it."""
        norm = gradient_norm(parameters, loss_sum.device)
        loss, *others = sum_over_ranks(loss_sum, signals, *counts)
        return Totals(torch.stack([loss / valid, norm, *others]))

    def final_step(self, step: int) -> int:
        """Return the step whose weights the run ends with, once it has taken `step`."""
        return step

    def metrics(self) -> dict[str, float]:
        """Return values of the last step by tag."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return the state of the groups that a checkpoint stores, as plain JSON."""
        return {}


class Observer:
    """Sees the steps of a run and may end it by an exception. It must not change a number that a step computes."""

    def before_backward(self, step: int) -> None:
        """See that a step begins."""

    def after_backward(self, step: int, batches: list[Batch], loss_sum: Tensor, *, is_test: bool) -> None:
        """See what the forward and backward of a step have computed, with the gradients in the parameters. `loss_sum`:
        the sum of this rank's token losses; `is_test`: the weights are tested after a run, and no update follows."""

    def after_validation(self, step: int) -> None:
        """Note that a validation has ended."""

    def metrics(self) -> dict[str, float]:
        """Return values by tag since the last call. Every rank must call it."""
        return {}


class Balance(Protocol):
    """Balances the load of experts (techniques/moe/balance.py)."""

    def begin_step(self, loss_scale: float) -> None:
        """Forget the loads of the step before. The backward passes of this one multiply losses by `loss_scale`."""

    def update(self, taken: Tensor) -> None:
        """Adjust the routers by the load of the step that has just ended; `taken`: whether its update was taken."""

    def metrics(self) -> dict[str, Any]:
        """Return values of the last step by tag."""


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """Computes losses, gradients and updates on one rank."""

    model: nn.Module
    """All modules that this rank has."""
    runner: Runner
    parallelism: Parallelism
    device: torch.device
    contributes_loss: bool
    """Whether this rank's tokens and losses count. Only one of the ranks that work on the same tokens contributes."""
    max_norm: float
    """Gradients are clipped to this norm."""
    balance: Balance | None = None
    """The LoadBalance of a model with experts; None for any other."""
    groups: OneGroup = dataclasses.field(default_factory=OneGroup)
    observers: list[Observer] = dataclasses.field(default_factory=list)

    def gradients(
        self, step: int, batches: list[Batch], loss_scale: float = 1.0, *, is_test: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Compute a step's gradients, and show them to the observers. Arguments and result are those of
        `forward_backward`; `is_test`: see Observer."""
        self.runner.prepare(batches[0])  # observers do not see this call
        for observer in self.observers:
            observer.before_backward(step)
        loss_sum, valid = self.forward_backward(batches, loss_scale)
        for observer in self.observers:
            observer.after_backward(step, batches, loss_sum, is_test=is_test)
        return loss_sum, valid

    def forward_backward(self, batches: list[Batch], loss_scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Leave the gradient of the global loss in the parameters.

        The global loss is the sum of all token losses over the number of valid tokens, both over all ranks and gradient
        accumulation steps. Tokens are counted first, so each accumulation step's sum is divided by the final count and
        gradients are only summed. `batches` has one for each accumulation step. `loss_scale`: a factor on the loss in
        the backward, by which gradients are divided afterwards.

        Return the sum of this rank's token losses (nats; 0 if it does not contribute them) and the global number of
        valid tokens, float64 scalars on the device.
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
        """Clip the gradients, whose norm is `norm`, and update the weights, unless the update is not `taken`: both are
        scalars on the device. Every rank must call it."""
        clipped_step(optimizer, clip_factor(norm, self.max_norm), taken)
        if self.balance:
            self.balance.update(taken)

    def largest_loss(self, loss_sum: Tensor, batches: list[Batch]) -> float:
        """Return the largest of the ranks' own mean losses of a step, in nats. Every rank must call it."""
        own = loss_sum / count_valid([batch.targets for batch in batches], loss_sum.device)
        own = own.nan_to_num(nan=-math.inf) if self.contributes_loss else torch.full_like(own, -math.inf)  # nan: 0 / 0
        dist.all_reduce(own, dist.ReduceOp.MAX)
        return own.item()

    def metrics(self) -> dict[str, Any]:
        """Return values of the last step by tag; a tensor is for a histogram."""
        return self.balance.metrics() if self.balance else {}

    @torch.no_grad()
    def validate(
        self,
        batches: Iterable[Batch],
        advance: Callable[[int], None] = lambda amount: None,
        signals: Signals | None = None,
    ) -> float | None:
        """Return the loss in nats by the rule of training; None if some rank was asked to stop meanwhile. Call
        `advance` with 1 after each batch, of which every rank needs the same number."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in batches:
            if signals:
                stopping = torch.tensor(float(signals.stopping))  # on the host, so that no rank waits for its device
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
