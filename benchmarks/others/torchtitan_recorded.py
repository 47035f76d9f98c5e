"""Train torchtitan 0.2.2 from given weights on given batches, for layout_distance.py.

    python -m benchmarks.others.torchtitan_recorded INPUTS OUT INTERVAL [torchtitan's own options]  (or under torchrun)

It runs in torchtitan's environment, on a CPU as torchtitan_cpu.py describes. The trainer is torchtitan's own. INPUTS is
a safetensors file: the weights by name, and `tokens` and `targets` of all global batches one after the other. After
each step the last rank writes the loss that torchtitan reports to OUT/metrics.jsonl; every INTERVAL steps rank 0 writes
the full weights to OUT/step-N.safetensors.
"""

# ruff: noqa: E402  (torchtitan reads its arguments when it is imported)

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import IterableDataset

INPUTS, OUT, INTERVAL = (sys.argv.pop(1) for _ in range(3)) if __name__ == "__main__" else ("", "", "")

from benchmarks.others import torchtitan_cpu  # before torchtitan, which takes the device that it names

# isort: split
from torchtitan import train
from torchtitan.components.dataloader import ParallelAwareDataloader

SIZES = {"dim": 64, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 512, "multiple_of": 32}
"""The model of layout_distance.py. A multiple of 32 makes the feed-forward width 192."""


class Sequences(IterableDataset):
    """The sequences that a data-parallel rank takes: every n-th."""

    def __init__(self, rank: int, n_ranks: int):
        self.rank, self.n_ranks, inputs = rank, n_ranks, load_file(INPUTS)
        self.tokens, self.targets = inputs["tokens"], inputs["targets"]

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for row in itertools.count(self.rank, self.n_ranks):
            yield {"input": self.tokens[row]}, self.targets[row]


def build_dataloader(dp_world_size: int, dp_rank: int, tokenizer: None, job_config: Any) -> ParallelAwareDataloader:
    batch_size = job_config.training.local_batch_size
    return ParallelAwareDataloader(Sequences(dp_rank, dp_world_size), dp_rank, dp_world_size, batch_size=batch_size)


class Recorder(train.Trainer):
    """torchtitan's trainer, which begins with the given weights and writes the weights every INTERVAL steps."""

    def __init__(self, job_config: Any):
        super().__init__(job_config)
        weights = load_file(INPUTS)
        with torch.no_grad():
            for name, own in torchtitan_cpu.named_parameters(self.model_parts).items():
                if isinstance(own, DTensor):
                    own.copy_(distribute_tensor(weights[name], own.device_mesh, own.placements, src_data_rank=None))
                else:
                    own.copy_(weights[name])

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        super().train_step(data_iterator)
        if self.step % int(INTERVAL) == 0:
            own = {name: p.detach() for name, p in torchtitan_cpu.named_parameters(self.model_parts).items()}
            weights = torchtitan_cpu.full_tensors(own)
            if dist.get_rank() == 0:
                save_file(weights, Path(OUT) / f"step-{self.step}.safetensors")


class Metrics(torchtitan_cpu.Metrics):
    """torchtitan's metrics, of which the loss is written with all its digits."""

    def log(self, step: int, global_avg_loss: float, *arguments: Any, **kwargs: Any) -> None:
        super().log(step, global_avg_loss, *arguments, **kwargs)
        if dist.get_rank() == dist.get_world_size() - 1:  # in a pipeline, only the last stage has the loss
            with (Path(OUT) / "metrics.jsonl").open("a") as file:
                print(json.dumps({"step": step, "loss_metrics/global_avg_loss": global_avg_loss}), file=file)


if __name__ == "__main__":
    torchtitan_cpu.train_llama(Recorder, build_dataloader, Metrics, SIZES)
