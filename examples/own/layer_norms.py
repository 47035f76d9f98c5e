"""An own metric: the gradient norm of each layer, in TensorBoard and metrics.jsonl.

titanlite train debug_tp --own examples/own/layer_norms.py:own
"""

import re

import torch
import torch.distributed as dist

from titanlite import Own
from titanlite.parallel.shards import local_shard, n_replicas
from titanlite.train_step import Observer, TrainStep


class LayerNorms(Observer):
    """Sees the gradients after each backward; `metrics` is called for a step that is logged."""

    def __init__(self, train_step: TrainStep):
        self.model, self.device, self.squares = train_step.model, train_step.device, torch.zeros(0)

    def after_backward(self, step, batches, loss_sum, *, is_test: bool) -> None:
        self.squares = torch.zeros(1024, dtype=torch.float64, device=self.device)  # by layer: this rank's
        for name, parameter in self.model.named_parameters():
            if (layer := re.match(r"layers\.(\d+)\.", name)) and parameter.grad is not None:
                square = local_shard(parameter.grad).double().square().sum().to(self.device)
                self.squares[int(layer[1])] += square / n_replicas(parameter.grad)

    def metrics(self) -> dict[str, float]:
        dist.all_reduce(self.squares)  # over all ranks: shards of layers, and stages of a pipeline
        return {f"gradient_norm/layer_{n:03}": x for n, x in enumerate(self.squares.sqrt().tolist()) if x > 0}


own = Own(metrics=LayerNorms)
