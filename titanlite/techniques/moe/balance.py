"""Balance the load of experts by a bias on each expert's score (arXiv:2408.15664), by auxiliary losses, or by both.

Routers record the load in the backward (router.py). After each optimizer step, LoadBalance sums the records of all
ranks; in the next step, routers use the sums to choose experts and to weight auxiliary losses.
Shapes: L layers of the full model, E experts."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.config.schema import Model
from titanlite.techniques.moe.router import Router


class LoadBalance:
    """Balances the load of the experts of a model or of a rank's pipeline stages. Every rank must make the same calls.
    `tokens_per_step` is the number of tokens of the global batch."""

    def __init__(self, model: nn.Module, section: Model, *, tokens_per_step: int, device: torch.device):
        self.moe, self.tokens_per_step = section.moe, tokens_per_step
        self.layers = [layer for layer in range(section.n_layers) if section.has_experts(layer)]
        self.routers: dict[int, Router] = {
            index: model.layers[str(layer)].feed_forward.router
            for index, layer in enumerate(self.layers)
            if str(layer) in model.layers
        }
        for router in self.routers.values():
            router.tokens_per_step = tokens_per_step
        self.records = torch.zeros(len(self.layers), 2 * self.moe.n_experts + 1, dtype=torch.float64, device=device)

    def begin_step(self, loss_scale: float) -> None:
        """Reset the routers' records. `loss_scale`: factor on auxiliary losses in the backward passes of the step."""
        for router in self.routers.values():
            router.record.zero_()
            router.loss_scale = loss_scale

    def update(self, taken: Tensor, *, all_reduce: bool = True) -> None:
        """Adjust the routers by the load of the last step. `taken`: a scalar, whether the optimizer took the step."""
        self.records.zero_()
        for index, router in self.routers.items():
            self.records[index] = router.record
        if all_reduce:
            dist.all_reduce(self.records)
        n_experts = self.moe.n_experts
        loads = self.records[:, :n_experts].to(torch.int64)
        for index, router in self.routers.items():
            load_E = loads[index]
            router.load.copy_(load_E.where(taken, router.load))
            if router.balance_bias is not None:
                below_E = (load_E.sum() - n_experts * load_E).sign()  # integers: no rounding changes the sign
                router.balance_bias += self.moe.balance_bias_rate * below_E * taken

    def metrics(self) -> dict[str, Any]:
        """Return the last step's metrics by tag. moe/tokens_per_expert is a tensor with the loads of all layers'
        experts, for a histogram. Loads are relative to the mean over a layer's experts."""
        n_experts, records = self.moe.n_experts, self.records.cpu()
        loads_LE, scores_LE, z_L = records[:, :n_experts], records[:, n_experts:-1], records[:, -1]
        shares_LE = loads_LE / loads_LE.sum(1, keepdim=True)
        entropy = torch.special.entr(shares_LE).sum(1) / math.log(n_experts) if n_experts > 1 else torch.ones(1)
        pairs = self.tokens_per_step * self.moe.n_experts_per_token * len(self.layers)
        values = {
            "moe/tokens_per_expert_min": (shares_LE.min() * n_experts).item(),
            "moe/tokens_per_expert_max": (shares_LE.max() * n_experts).item(),
            "moe/load_entropy": entropy.mean().item(),
            "moe/dropped_tokens": pairs - loads_LE.sum().item(),
            "moe/balance_loss": (n_experts * shares_LE * scores_LE).sum(1).mean().item() / self.tokens_per_step,
        }
        if self.moe.z_loss_weight:
            values["moe/z_loss"] = z_L.mean().item() / self.tokens_per_step
        return values | {"moe/tokens_per_expert": (loads_LE / loads_LE.mean(1, keepdim=True)).flatten()}
