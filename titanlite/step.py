"""One optimizer step's gradients: what train.py runs and what parity.py proves are this same function."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.data import Batch
from titanlite.loss import count_valid, cross_entropy_sum
from titanlite.parallel import fsdp


def forward_backward(
    model: nn.Module,
    batch: Batch,
    *,
    device: torch.device,
    reshard_after_forward: fsdp.Reshard,
    reduce_gradients: str,
) -> tuple[Tensor, Tensor]:
    """Leave the gradient of the global loss in the parameters.

    The global loss is the sum of all token losses over the number of valid tokens, both over all ranks and microsteps.
    Tokens are counted first, so each microstep's sum is divided by the final count and gradients only ever add up.

    Returns:
        Sum of this rank's token losses (nats) and the global number of valid tokens, float64 scalars on `device`.
    """
    valid = count_valid([targets for _, targets in batch], device)
    dist.all_reduce(valid)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    for index, (tokens, targets) in enumerate(batch):
        fsdp.before_microstep(
            model,
            last=index == len(batch) - 1,
            reshard_after_forward=reshard_after_forward,
            reduce_gradients=reduce_gradients,
        )
        logits = model(tokens.to(device, non_blocking=True))
        loss = cross_entropy_sum(logits, targets.to(device, non_blocking=True))
        del logits  # not kept alive by this name through the backward
        (loss / valid).backward()
        loss_sum += loss.detach()
    return loss_sum, valid
