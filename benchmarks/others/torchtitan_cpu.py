"""Run torchtitan 0.2.2 on the CPUs of this machine, as the second program of vs_torchtitan.py.

    python -m benchmarks.others.torchtitan_cpu [torchtitan's own options]       (alone, in torchtitan's environment)
    torchrun [...] -m benchmarks.others.torchtitan_cpu [torchtitan's own options]

The training is torchtitan's: its entry point torchtitan.train.main, its model, parallelism, optimizer, loader and loop.
Two things come in through its extension points (a TrainSpec under the name llama3):

    a dataset     The text that CPython carries, one token per byte, as titanlite reads it. The datasets of torchtitan
                  need files or a network, and its tokenizer needs a file. The sequences of a global batch do not depend
                  on the number of ranks. Reading one takes some microseconds.
    a step's line The last rank prints "step N  loss X" when torchtitan reports the step, for vs_torchtitan.py to time.
                  In a pipeline only that rank has the loss. On a GPU the line includes the peak memory. Before the
                  first step a line gives the global batch.

Where there is no GPU, four things that torchtitan assumes are replaced at run time:

    the device    torchtitan assumes "cuda" where torch names no accelerator. It asks
                  torch._utils._get_available_device_type during its import, which returns "cpu" meanwhile.
    its functions torch.cpu has no device name, device properties, memory statistics or cache to empty. torchtitan needs
                  all of them at the start, and the statistics after each step. The class Cpu provides them; its
                  statistics are empty.
    its index     torch.cpu.current_device() returns the string "cpu". torchtitan passes it to a barrier after the first
                  step as a device index. Cpu returns 0.
    FSDP's sums   torchtitan sets FSDP's gradient division to 1. FSDP then uses a pre-multiplied sum, which only NCCL
                  has ("Cannot use ReduceOp.PREMUL_SUM with Gloo"). FSDP is set to plain sums, as titanlite sets it.

Without torchrun the environment variables of a single rank are set, because torchtitan reads them.

Context parallelism cannot run: torch has no DTensor sharding rule for the attention of the CPU ("Operator
aten._scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy registered").
"""

import dataclasses
import importlib.metadata
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pydoc_data.topics import topics
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset

from benchmarks.others.torchtitan_device import ONE_RANK, patched_device

VERSION = "0.2.2"

if importlib.metadata.version("torchtitan") != VERSION:
    sys.exit(f"error: torchtitan is {importlib.metadata.version('torchtitan')}; this is for {VERSION}")
with patched_device():  # torchtitan's modules store the device type during import
    from torchtitan import train
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.models import llama3
    from torchtitan.protocols.train_spec import register_train_spec


class Text(IterableDataset):
    """An endless stream of sequences from random offsets of the text; each rank takes every n_ranks-th."""

    def __init__(self, seq_len: int, rank: int, n_ranks: int, seed: int):
        self.tokens = torch.frombuffer(bytearray("".join(topics.values()).encode()), dtype=torch.uint8).long()
        self.seq_len, self.rank, self.n_ranks, self.seed = seq_len, rank, n_ranks, seed

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        for number in itertools.count():
            offset = torch.randint(len(self.tokens) - self.seq_len, (), generator=generator).item()
            if number % self.n_ranks == self.rank:
                sequence = self.tokens[offset : offset + self.seq_len + 1]
                yield {"input": sequence[:-1]}, sequence[1:]


def build_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: None, job_config: JobConfig
) -> ParallelAwareDataloader:
    """Build torchtitan's loader of `Text`. torchtitan passes arguments by these names."""
    training = job_config.training
    text = Text(training.seq_len, dp_rank, dp_world_size, seed=job_config.debug.seed or 0)
    return ParallelAwareDataloader(text, dp_rank, dp_world_size, batch_size=training.local_batch_size)


class Metrics(MetricsProcessor):
    """torchtitan's metrics processor, which prints the timed line after its own report of a step."""

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Report a step; torchtitan calls it on all ranks at the end of the step."""
        peak = self.device_memory_monitor.get_peak_stats().max_reserved_gib  # super().log resets it
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        if dist.get_rank() != dist.get_world_size() - 1:
            return
        if step == 1:
            seq_len = self.job_config.training.seq_len
            print(f"global batch: {extra_metrics['n_tokens_seen'] // seq_len} sequences x {seq_len} tokens")
        memory = f"  {peak:.2f} GiB" if torch.cuda.is_available() else ""
        print(f"step {step}  loss {global_avg_loss:.4f}  norm {grad_norm:.4f}{memory}", flush=True)


def parallelize(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    """Apply torchtitan's parallelism, with plain sums where the backend is gloo."""
    model = llama3.parallelize_llama(model, parallel_dims, job_config)
    if not torch.cuda.is_available():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return model


def named_parameters(model_parts: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """Return the parameters of all pipeline stages of this rank by name."""
    return {name: parameter for part in model_parts for name, parameter in part.named_parameters()}


def full_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of full tensors, of all pipeline stages. Every rank must call it."""
    own = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    stages: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(stages, {name: tensor.clone() for name, tensor in own.items()})
    return {name: tensor for stage in reversed(stages) for name, tensor in stage.items()}


def train_llama(
    trainer: type[train.Trainer],
    build_dataloader: Callable[..., ParallelAwareDataloader],
    metrics: type[Metrics],
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Train as the command line says, with another loader, metrics and, of the debug model, other sizes; none:
    torchtitan's own."""
    for name, value in ONE_RANK.items():
        os.environ.setdefault(name, value)
    if sizes:
        llama3.llama3_args["debugmodel"] = llama3.TransformerModelArgs(**sizes)
    spec = dataclasses.replace(
        llama3.get_train_spec(),
        parallelize_fn=parallelize,
        build_dataloader_fn=build_dataloader,
        build_tokenizer_fn=None,
        build_metrics_processor_fn=lambda job_config, parallel_dims, model_args: metrics(job_config, parallel_dims),
    )
    register_train_spec("llama3", spec)
    train.main(trainer)


if __name__ == "__main__":
    train_llama(train.Trainer, build_dataloader, Metrics)
