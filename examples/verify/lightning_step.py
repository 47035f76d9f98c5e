"""One step of Lightning's Trainer with gradient accumulation, written for `titanlite parity --against FOLDER`.

    python examples/verify/lightning_step.py FOLDER [--count-tokens]
    torchrun --nproc-per-node=2 examples/verify/lightning_step.py FOLDER [--count-tokens]

The step takes four batches of two sequences: one after the other, or partitioned over ranks under DDP. The loss of a
batch is the model's own, a mean over the batch's tokens. With --count-tokens it is a sum that is divided by the valid
tokens of the global batch, and multiplied by the four batches, by which Lightning and DDP divide.
"""

import os
import sys
import tempfile

import lightning
import torch
import torch.distributed as dist
import transformers
from data import CONFIG, batch, batch_loss
from folder import copies, write_folder
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

N_RANKS, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
BATCHES, STEPS = 4, 4 // N_RANKS
ADAM = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.1}


class OneStep(lightning.LightningModule):
    """A Llama of transformers, which copies its gradients before Lightning clips them."""

    def __init__(self, *, count_tokens: bool):
        super().__init__()
        self.model = LlamaForCausalLM(LlamaConfig(**CONFIG))
        self.weights = copies(dict(self.model.named_parameters()))
        self.n_valid = (batch()[1] != -100).sum() if count_tokens else 0
        self.loss = torch.zeros(())

    def training_step(self, rows: list[Tensor]) -> Tensor:
        logits, expected = self.model(rows[0]).logits.flatten(0, 1), rows[1].flatten()
        loss = batch_loss(logits, expected, n_valid=self.n_valid, parts=BATCHES)
        self.loss += loss.detach() / BATCHES
        return loss

    def configure_gradient_clipping(self, *arguments: object, **options: object) -> None:
        self.gradients = copies({name: p.grad for name, p in self.model.named_parameters()})
        self.clip_gradients(*arguments, **options)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), **ADAM)


def main(folder: str, *options: str) -> None:
    torch.manual_seed(0)
    module = OneStep(count_tokens="--count-tokens" in options)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=N_RANKS,
        strategy="ddp" if N_RANKS > 1 else "auto",
        max_steps=1,
        accumulate_grad_batches=STEPS,
        gradient_clip_val=1.0,
        use_distributed_sampler=False,
        default_root_dir=tempfile.mkdtemp(),
        enable_checkpointing=False,
        logger=False,
    )
    tokens, targets = batch()
    own = TensorDataset(*(each.chunk(N_RANKS)[RANK] for each in (tokens, targets)))
    trainer.fit(module, DataLoader(own, batch_size=len(tokens) // BATCHES))
    if N_RANKS > 1:
        dist.all_reduce(module.loss)
    versions = f"lightning {lightning.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    step = {
        "program": f"{versions}, Trainer on {N_RANKS} rank(s)",
        "dtypes": {"weights": "float32", "compute": "float32", "reduce": "float32"},
        "optimizer": {"name": "AdamW", "beta1": 0.9, "beta2": 0.95, **ADAM, "weight_decay_dims": [1, 2]},
        "max_norm": 1.0,
        "degrees": {"dp": N_RANKS, "accumulation_steps": STEPS},
        "loss": module.loss.item(),
    }
    if RANK == 0:
        tensors = {"weights": module.weights, "gradients": module.gradients}
        tensors["weights_after"] = copies(dict(module.model.named_parameters()))
        write_folder(folder, config=CONFIG, tokens=tokens, targets=targets, step=step, **tensors)


if __name__ == "__main__":
    main(*sys.argv[1:])
