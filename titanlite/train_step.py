"""One optimizer step's gradients, and the loss without them: what train.py runs and what parity.py proves is this
same code."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.data import Batch
from titanlite.loss import count_valid
from titanlite.optimizer import scale_gradients
from titanlite.parallel import fsdp
from titanlite.parallel.pipeline import Pipeline


class SingleStageRunner:
    """Runs a model that is not cut into stages; Pipeline's counterpart."""

    def __init__(self, model: nn.Module):
        self.model = model

    def forward_backward(self, batch: Batch, valid: Tensor) -> Tensor:
        """Add the gradient of (sum of this batch's token losses) / valid to the parameters, and return the sum."""
        loss = self.forward(batch)
        (loss / valid).backward()
        return loss.detach()

    def forward(self, batch: Batch) -> Tensor:
        """Sum of the token losses."""
        return self.model(batch.tokens, batch.positions, batch.document_positions, batch.targets)


class TrainStep:
    """What a rank does with the batches of a run.

    Args:
        model: all modules that this rank has.
        runner: how a microbatch passes through them.
        contributes_loss: whether this rank's tokens and losses count. Several ranks may work on the same tokens; one of them,
            which has the logits, speaks for them.
        The others: see fsdp.prepare_accumulation_step.
    """

    def __init__(
        self,
        model: nn.Module,
        runner: SingleStageRunner | Pipeline,
        *,
        device: torch.device,
        contributes_loss: bool,
        reshard_after_forward: fsdp.Reshard,
        reduce_gradients: str,
    ):
        self.model, self.runner, self.device, self.contributes_loss = model, runner, device, contributes_loss
        self.reshard_after_forward, self.reduce_gradients = reshard_after_forward, reduce_gradients

    def forward_backward(self, batch: list[Batch], loss_scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Leave the gradient of the global loss in the parameters.

        The global loss is the sum of all token losses over the number of valid tokens, both over all ranks and
        microsteps. Tokens are counted first, so each microstep's sum is divided by the final count and gradients only
        ever add up.

        Args:
            loss_scale: what the loss is multiplied by before the backward, and gradients are divided by after it.

        Returns:
            Sum of this rank's token losses (nats; 0 if they do not count) and the global number of valid tokens,
            float64 scalars on the device.
        """
        valid = count_valid([microbatch.targets for microbatch in batch], self.device) * self.contributes_loss
        dist.all_reduce(valid)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, microbatch in enumerate(batch):
            fsdp.prepare_accumulation_step(
                self.model,
                last=index == len(batch) - 1,
                reshard_after_forward=self.reshard_after_forward,
                reduce_gradients=self.reduce_gradients,
            )
            loss_sum += self.runner.forward_backward(microbatch.to(self.device), valid / loss_scale)
        if loss_scale != 1:
            scale_gradients(self.model.parameters(), 1 / loss_scale)
        return (loss_sum if self.contributes_loss else torch.zeros_like(loss_sum)), valid

    @torch.no_grad()
    def validate(self, batches: Iterable[Batch]) -> float:
        """Loss by the same rule as in training: token losses over valid tokens, of all ranks, nats.

        Args:
            batches: this rank's, as many on every rank.
        """
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in batches:
            totals[0] += self.runner.forward(batch.to(self.device))
            totals[1] += count_valid([batch.targets], self.device)
        fsdp.reshard(self.model)
        totals = totals if self.contributes_loss else torch.zeros_like(totals)
        dist.all_reduce(totals)
        return (totals[0] / totals[1]).item()
