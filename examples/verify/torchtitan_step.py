"""One step of torchtitan 0.2.2, alone or on several ranks, written for `titanlite parity --against FOLDER`.

    python examples/verify/torchtitan_step.py FOLDER [torchtitan's own options]
    torchrun --nproc-per-node=2 examples/verify/torchtitan_step.py FOLDER --parallelism.tensor_parallel_degree=2

It runs in torchtitan's environment, on a CPU as benchmarks/others/torchtitan_cpu.py describes. The trainer is
torchtitan's own: the step is recorded where it clips gradients, before and after.
"""

# ruff: noqa: E402  (torchtitan reads its arguments when it is imported)

import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from data import CONFIG, N_SEQUENCES, SEQ_LEN, VOCAB_SIZE, batch
from folder import write_folder
from torch import Tensor
from torch.utils.data import IterableDataset

OPTIONS = {
    "training.seq_len": SEQ_LEN,
    "training.steps": 1,
    "training.mixed_precision_param": "float32",
    "lr_scheduler.warmup_steps": 0,
    "activation_checkpoint.mode": "none",
    "debug.seed": 0,
    "comm.trace_buf_size": 0,
}
FOLDER, *options = sys.argv[1:]
given = {option.partition("=")[0] for option in options}
sys.argv[1:] = [*(f"--{name}={value}" for name, value in OPTIONS.items() if f"--{name}" not in given), *options]

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.others import torchtitan_cpu  # before torchtitan, which takes the device that it names

# isort: split
from torchtitan import train
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.distributed import utils

# torchtitan scales the rotary embedding as Llama 3.1 whatever the model is; its feed-forward width is a multiple of 32.
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OWN_CONFIG = {**CONFIG, "intermediate_size": 192, "rope_scaling": {**ROPE, "original_max_position_embeddings": 8192}}
SIZES = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": VOCAB_SIZE, "multiple_of": 32}


class Sequences(IterableDataset):
    """The sequences of the global batch that a data-parallel rank takes: neighbouring ones."""

    def __init__(self, rank: int, n_ranks: int):
        self.rows = range(N_SEQUENCES)[rank * N_SEQUENCES // n_ranks :][: N_SEQUENCES // n_ranks]

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        tokens, targets = batch()
        for row in self.rows:
            yield {"input": tokens[row]}, targets[row]


def build_dataloader(dp_world_size: int, dp_rank: int, tokenizer: None, job_config: Any) -> ParallelAwareDataloader:
    sequences = Sequences(dp_rank, dp_world_size)
    return ParallelAwareDataloader(sequences, dp_rank, dp_world_size, batch_size=job_config.training.local_batch_size)


class Recorder(train.Trainer):
    """torchtitan's trainer, which records its step."""

    def tensors(self, gradients: bool = False) -> dict[str, Tensor]:
        """Return the full weights or gradients of all pipeline stages. Every rank must call it."""
        named = torchtitan_cpu.named_parameters(self.model_parts)
        return torchtitan_cpu.full_tensors({name: p.grad if gradients else p.detach() for name, p in named.items()})

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """Take the step, and keep what it began with, its gradients and its norm."""
        clip = utils.clip_grad_norm_

        def recorded_clip(*arguments: Any, **kwargs: Any) -> Tensor:
            self.gradients = self.tensors(gradients=True)
            self.norm = clip(*arguments, **kwargs)
            return self.norm

        self.weights = self.tensors()
        self.lr = self.optimizers.optimizers[0].param_groups[0]["lr"]
        utils.clip_grad_norm_ = recorded_clip
        super().train_step(data_iterator)

    def close(self) -> None:
        """Write the folder on rank 0, if a step was taken."""
        if hasattr(self, "norm"):
            after, losses = self.tensors(), [0.0] * dist.get_world_size()
            dist.all_gather_object(losses, self.metrics_processor.loss)
            if dist.get_rank() == 0:
                self.write(after, losses[-1])  # in a pipeline, only the last stage has the loss
        super().close()

    def write(self, after: dict[str, Tensor], loss: float) -> None:
        """Write the folder."""
        training, parallelism, optimizer = (
            getattr(self.job_config, name) for name in ("training", "parallelism", "optimizer")
        )
        dims = self.parallel_dims
        versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torchtitan", "torch"))
        degrees = f"dp_replicate {dims.dp_replicate} dp_shard {dims.dp_shard} tp {dims.tp} pp {dims.pp}"
        microbatches = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
        adam = {name: getattr(optimizer, name) for name in ("name", "beta1", "beta2", "eps", "weight_decay")}
        step = {
            "program": f"{versions}, {degrees}",
            "dtypes": {"weights": training.dtype, "compute": training.mixed_precision_param, "reduce": "float32"},
            "optimizer": {**adam, "lr": self.lr, "weight_decay_dims": [1, 2]},
            "max_norm": training.max_norm,
            "degrees": {
                "dp": dims.dp_replicate * dims.dp_shard,
                "tp": dims.tp,
                "pp": dims.pp,
                "microbatches": microbatches if dims.pp > 1 else 1,
                "accumulation_steps": self.gradient_accumulation_steps,
            },
            "loss": loss,
            "gradient_norm": self.norm.item(),
        }
        tokens, targets = batch()
        tensors = {"weights": self.weights, "gradients": self.gradients, "weights_after": after}
        write_folder(FOLDER, config=OWN_CONFIG, tokens=tokens, targets=targets, step=step, **tensors)


class Metrics(torchtitan_cpu.Metrics):
    """torchtitan's metrics, which keep the loss of the step."""

    def log(self, step: int, global_avg_loss: float, *arguments: Any, **kwargs: Any) -> None:
        self.loss = global_avg_loss
        super().log(step, global_avg_loss, *arguments, **kwargs)


if __name__ == "__main__":
    torchtitan_cpu.train_llama(Recorder, build_dataloader, Metrics, SIZES)
