"""The gradients of one optimizer step, and the loss without them. Training and the parity tests run this same code."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.config.schema import Parallelism
from titanlite.data.loader import Batch
from titanlite.loss import count_valid
from titanlite.optimizer import scale_gradients
from titanlite.parallel import fsdp
from titanlite.progress import alive
from titanlite.reliability.process import Signals


class SingleStageRunner:
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


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """Computes losses and gradients on one rank."""

    model: nn.Module
    """All modules that this rank has."""
    runner: Any
    """A SingleStageRunner or a PipelineRunner."""
    parallelism: Parallelism
    device: torch.device
    contributes_loss: bool
    """Whether this rank's tokens and losses count. Of the ranks that work on the same tokens, only one contributes."""
    balance: Any = None
    """The LoadBalance of a model with experts, to be updated after each optimizer step; None: there are none."""
    count_over_groups: Callable[[Tensor], None] | None = None
    """Replicas.count, which sums the number of tokens over replica groups in place; None: there is one group."""

    def forward_backward(self, batches: list[Batch], loss_scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Leave the gradient of the global loss in the parameters.

        The global loss is the sum of all token losses over the number of valid tokens, both over all ranks and gradient
        accumulation steps. Tokens are counted first, so each accumulation step's sum is divided by the final count and
        gradients are only summed.

        Args:
            batches: one per gradient accumulation step.
            loss_scale: factor on the loss in the backward; gradients are divided by it afterwards.

        Returns:
            Sum of this rank's token losses (nats; 0 if it does not contribute them) and the global number of valid
            tokens, float64 scalars on the device.
        """
        if self.balance:
            self.balance.begin_step(loss_scale)
        valid = count_valid([batch.targets for batch in batches], self.device) * self.contributes_loss
        dist.all_reduce(valid)
        if self.count_over_groups:
            self.count_over_groups(valid)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for accumulation_step, batch in enumerate(batches, 1):
            fsdp.prepare_accumulation_step(self.model, self.parallelism, last=accumulation_step == len(batches))
            alive()
            loss_sum += self.runner.forward_backward(batch.to(self.device), valid / loss_scale)
        if loss_scale != 1:
            scale_gradients(self.model.parameters(), 1 / loss_scale)
        return (loss_sum if self.contributes_loss else torch.zeros_like(loss_sum)), valid

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
