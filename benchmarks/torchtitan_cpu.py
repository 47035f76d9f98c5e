"""torchtitan 0.2.2 on the CPUs of this machine: the other side of vs_torchtitan.py.

    python torchtitan_cpu.py [torchtitan's own options]     (alone or under torchrun, in torchtitan's environment)

The training is torchtitan's own, from its own entry, torchtitan.train.main, with its own model, parallelism, optimizer,
loader and loop. Through its extension points (a TrainSpec under the name llama3) come

    a dataset     of the text that CPython carries, a byte a token, as titanlite reads it, since the datasets that come
                  with torchtitan need files or a network, and its tokenizer a file. Sequences of one global batch are
                  the same however many ranks share it. It costs some microseconds a sequence.
    a line a step "step N  loss X" from the last rank, when torchtitan reports the step, for vs_torchtitan.py to time.
                  In a pipeline only that rank knows the loss. On a GPU it has the peak memory. Before the first line
                  stands what a step is made of.

Where there is no GPU, what torchtitan takes for granted is replaced at run time:

    the device    it is "cuda" where torch names no accelerator: torch._utils._get_available_device_type, which it asks
                  while it is imported, says "cpu" meanwhile.
    its functions torch.cpu has no device name, device properties, memory statistics or cache to empty; torchtitan asks
                  for all of them at the start and for the statistics after each step. The Cpu below answers; the
                  statistics are empty.
    a number      torch.cpu.current_device() is the string "cpu"; torchtitan hands it to a barrier after the first step,
                  as a device number. The Cpu's is 0.
    FSDP's sums   torchtitan sets FSDP's gradient division to 1, for which FSDP takes a pre-multiplied sum, that only
                  NCCL has ("Cannot use ReduceOp.PREMUL_SUM with Gloo"). FSDP is told to take plain sums, as titanlite
                  tells it.

And anywhere, without torchrun, the variables that torchrun would have set for one rank: torchtitan reads them.

Context parallelism cannot be run: torch has no rule for the CPU's attention kernel in a DTensor ("Operator
aten._scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy registered").
"""

import contextlib
import dataclasses
import importlib.metadata
import itertools
import os
import sys
import types
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any
from unittest import mock

import torch
import torch._utils
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import IterableDataset

VERSION = "0.2.2"
ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


class Cpu:
    """What torchtitan asks of torch.cuda, for a CPU."""

    set_device = staticmethod(torch.cpu.set_device)
    synchronize = staticmethod(torch.cpu.synchronize)

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def get_device_name(device: torch.device) -> str:
        return "CPU"

    @staticmethod
    def get_device_properties(device: torch.device) -> types.SimpleNamespace:
        return types.SimpleNamespace(total_memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))

    @staticmethod
    def memory_stats(device: torch.device) -> dict[str, int]:
        return {}

    @staticmethod
    def reset_peak_memory_stats() -> None:
        pass

    @staticmethod
    def empty_cache() -> None:
        pass


def patched_device() -> contextlib.AbstractContextManager[Any]:
    """While it lasts, torch says that the accelerator is the CPU. Nothing is changed where there is a GPU."""
    if torch.cuda.is_available():
        return contextlib.nullcontext()
    return mock.patch.multiple(
        torch._utils, _get_available_device_type=lambda: "cpu", _get_device_module=lambda device_type: Cpu
    )


if importlib.metadata.version("torchtitan") != VERSION:
    sys.exit(f"error: torchtitan is {importlib.metadata.version('torchtitan')}; this is for {VERSION}")
with patched_device():  # torchtitan's modules keep what they are told while they are imported
    from torchtitan import train
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.models import llama3
    from torchtitan.protocols.train_spec import register_train_spec


class Text(IterableDataset):
    """Endless pieces of text from random places; each rank takes every n_ranks-th."""

    def __init__(self, seq_len: int, rank: int, n_ranks: int, seed: int):
        self.tokens = torch.frombuffer(bytearray("".join(topics.values()).encode()), dtype=torch.uint8).long()
        self.seq_len, self.rank, self.n_ranks, self.seed = seq_len, rank, n_ranks, seed

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        for number in itertools.count():
            offset = torch.randint(len(self.tokens) - self.seq_len, (), generator=generator).item()
            if number % self.n_ranks == self.rank:
                piece = self.tokens[offset : offset + self.seq_len + 1]
                yield {"input": piece[:-1]}, piece[1:]


def build_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: None, job_config: JobConfig
) -> ParallelAwareDataloader:
    """torchtitan's loader of `Text`. It passes arguments by these names."""
    training = job_config.training
    text = Text(training.seq_len, dp_rank, dp_world_size, seed=job_config.debug.seed or 0)
    return ParallelAwareDataloader(text, dp_rank, dp_world_size, batch_size=training.local_batch_size)


class Metrics(MetricsProcessor):
    """torchtitan's report of a step, and after it the line that is timed."""

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Called on all ranks when the step has been taken."""
        peak = self.device_memory_monitor.get_peak_stats().max_reserved_gib  # the report resets it
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        if dist.get_rank() != dist.get_world_size() - 1:
            return
        if step == 1:
            seq_len = self.job_config.training.seq_len
            print(f"a step: {extra_metrics['n_tokens_seen'] // seq_len} sequences x {seq_len} tokens")
        memory = f"  {peak:.2f} GiB" if torch.cuda.is_available() else ""
        print(f"step {step}  loss {global_avg_loss:.4f}  norm {grad_norm:.4f}{memory}", flush=True)


def build_metrics(job_config: JobConfig, parallel_dims: ParallelDims, model_args: Any) -> Metrics:
    return Metrics(job_config, parallel_dims)


def parallelize(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    """torchtitan's, with plain sums where the backend is gloo."""
    model = llama3.parallelize_llama(model, parallel_dims, job_config)
    if not torch.cuda.is_available():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return model


def main() -> None:
    for name, value in ONE_RANK.items():
        os.environ.setdefault(name, value)
    spec = dataclasses.replace(
        llama3.get_train_spec(),
        parallelize_fn=parallelize,
        build_dataloader_fn=build_dataloader,
        build_tokenizer_fn=None,
        build_metrics_processor_fn=build_metrics,
    )
    register_train_spec("llama3", spec)
    train.main(train.Trainer)


if __name__ == "__main__":
    main()
