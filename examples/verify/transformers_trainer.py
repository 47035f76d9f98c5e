"""One step of transformers' Trainer with gradient accumulation, written for `titanlite parity --against FOLDER`.

    python examples/verify/transformers_trainer.py FOLDER
    torchrun --nproc-per-node=2 examples/verify/transformers_trainer.py FOLDER

The step takes four batches of two sequences, whose numbers of valid targets differ: one after the other, or partitioned
over ranks under DDP. Gradients are recorded where the Trainer clips them.
"""

import os
import sys
import tempfile
from typing import Any

import torch
import transformers
from data import CONFIG, N_SEQUENCES, batch
from folder import copies, write_folder
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

N_RANKS = int(os.environ.get("WORLD_SIZE", 1))
ACCUMULATION_STEPS, BATCH_SIZE = 4 // N_RANKS, N_SEQUENCES // 4
ADAM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


ARGUMENTS: dict[str, Any] = {
    "max_steps": 1,
    "per_device_train_batch_size": BATCH_SIZE,
    "gradient_accumulation_steps": ACCUMULATION_STEPS,
    "learning_rate": ADAM["lr"],
    "lr_scheduler_type": "constant",
    "adam_beta1": ADAM["beta1"],
    "adam_beta2": ADAM["beta2"],
    "adam_epsilon": ADAM["eps"],
    "weight_decay": ADAM["weight_decay"],
    "max_grad_norm": 1.0,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
}


class RecordsGradients(Trainer):
    """A Trainer that copies the gradients before it clips them."""

    def create_optimizer(self, *arguments: Any) -> torch.optim.Optimizer:
        optimizer, clip = super().create_optimizer(*arguments), self.accelerator.clip_grad_norm_

        def recorded_clip(*arguments: Any, **kwargs: Any) -> Tensor:
            if not hasattr(self, "norm"):  # a later call only asks for the norm
                self.gradients = copies({name: p.grad for name, p in self.model.named_parameters()})
                self.norm = clip(*arguments, **kwargs)
            return self.norm

        self.accelerator.clip_grad_norm_ = recorded_clip
        return optimizer


class OneStep(RecordsGradients):
    """A Trainer that reads sequences in their order."""

    def _get_train_sampler(self, *_: Any) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def main(folder: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**CONFIG))
    weights = copies(dict(model.named_parameters()))
    tokens, targets = batch()
    targets[:, -1] = -100  # its id is in no input: transformers takes labels of the inputs' positions and shifts them
    labels = torch.cat((torch.full((N_SEQUENCES, 1), -100), targets[:, :-1]), dim=1)
    arguments = TrainingArguments(output_dir=tempfile.mkdtemp(), **ARGUMENTS)
    dataset = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]
    trainer = OneStep(model, arguments, train_dataset=dataset)
    loss = trainer.train().training_loss
    step = {
        "program": f"transformers {transformers.__version__}, torch {torch.__version__}, Trainer on {N_RANKS} rank(s)",
        "dtypes": {"weights": "float32", "compute": "float32", "reduce": "float32"},
        "optimizer": {"name": "AdamW", **ADAM, "weight_decay_dims": [2]},
        "max_norm": 1.0,
        "degrees": {"dp": N_RANKS, "accumulation_steps": ACCUMULATION_STEPS},
        "loss": loss,
        "gradient_norm": trainer.norm.item(),
    }
    if int(os.environ.get("RANK", 0)) == 0:
        tensors = {"weights": weights, "gradients": trainer.gradients, "weights_after": dict(model.named_parameters())}
        write_folder(folder, config=CONFIG, tokens=tokens, targets=targets, step=step, **tensors)


if __name__ == "__main__":
    main(sys.argv[1])
