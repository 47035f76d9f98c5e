"""One step of TRL's SFTTrainer with gradient accumulation, written for `titanlite parity --against FOLDER`.

    python examples/verify/trl_sft.py FOLDER [--packing]
    torchrun --nproc-per-node=2 examples/verify/trl_sft.py FOLDER [--packing]

The step takes four batches of two sequences, one after the other or partitioned over ranks under DDP. Completions have
different lengths. With --packing each sequence is two documents, which TRL packs without padding. The batch of the
folder is what the model was given, and gradients are recorded where the Trainer clips them.
"""

import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import transformers
import trl
from data import CONFIG, N_SEQUENCES, SEQ_LEN, VOCAB_SIZE, batch
from datasets import Dataset
from folder import copies, write_folder
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

N_RANKS = int(os.environ.get("WORLD_SIZE", 1))
ADAM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


class OneStep(trl.SFTTrainer):
    """An SFTTrainer that copies what the model is given, and the gradients before it clips them."""

    def create_optimizer(self, *arguments: Any) -> torch.optim.Optimizer:
        optimizer, clip, self.given = super().create_optimizer(*arguments), self.accelerator.clip_grad_norm_, []

        def recorded_clip(*arguments: Any, **kwargs: Any) -> Tensor:
            if not hasattr(self, "norm"):  # a later call only asks for the norm
                self.gradients = copies({name: p.grad for name, p in self.model.named_parameters()})
                self.norm = clip(*arguments, **kwargs)
            return self.norm

        self.accelerator.clip_grad_norm_ = recorded_clip
        return optimizer

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *arguments: Any, **kwargs: Any) -> Tensor:
        rows = {name: inputs[name].reshape(-1, SEQ_LEN).tolist() for name in ("input_ids", "labels")}
        positions = inputs.get("position_ids", torch.arange(SEQ_LEN).expand(len(rows["labels"]), -1))
        self.given.append({**rows, "positions": positions.reshape(-1, SEQ_LEN).tolist()})
        return super().compute_loss(model, inputs, *arguments, **kwargs)

    def global_batch(self) -> dict[str, Tensor]:
        """Return what all ranks gave their models: [B, T]. Every rank must call it."""
        parts = [self.given] * N_RANKS
        if N_RANKS > 1:
            dist.all_gather_object(parts, self.given)
        given = [each for part in parts for each in part]
        return {name: torch.tensor([row for each in given for row in each[name]]) for name in given[0]}


def dataset(*, packing: bool) -> Dataset:
    """Return sequences whose first tokens are a prompt; with `packing`, documents that fill sequences in pairs."""
    documents, masks = [], []
    for row, tokens in enumerate(batch()[0]):
        for document in tokens.tensor_split([9 + row] if packing else []):
            documents.append(document.tolist())
            masks.append([int(position > row // 2 * 3) for position in range(len(document))])
    return Dataset.from_dict({"input_ids": documents, "completion_mask": masks})


def main(folder: str, *options: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**CONFIG))
    weights, packing = copies(dict(model.named_parameters())), "--packing" in options
    arguments = trl.SFTConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=1,
        per_device_train_batch_size=N_SEQUENCES // 4,
        gradient_accumulation_steps=4 // N_RANKS,
        max_length=SEQ_LEN,
        packing=packing,
        completion_only_loss=True,
        learning_rate=ADAM["lr"],
        lr_scheduler_type="constant",
        adam_beta1=ADAM["beta1"],
        adam_beta2=ADAM["beta2"],
        adam_epsilon=ADAM["eps"],
        weight_decay=ADAM["weight_decay"],
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    vocabulary = models.WordLevel({"<pad>": 0, **{str(i): i for i in range(1, VOCAB_SIZE)}}, unk_token="<pad>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(vocabulary), pad_token="<pad>", eos_token="1")
    trainer = OneStep(model, arguments, train_dataset=dataset(packing=packing), processing_class=tokenizer)
    loss = trainer.train().training_loss
    given = trainer.global_batch()
    none = torch.full((len(given["labels"]), 1), -100)
    step = {
        "program": f"TRL {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}, "
        f"SFTTrainer on {N_RANKS} rank(s){', packing' if packing else ''}",
        "dtypes": {"weights": "float32", "compute": "float32", "reduce": "float32"},
        "optimizer": {"name": "AdamW", **ADAM, "weight_decay_dims": [2]},
        "max_norm": 1.0,
        "degrees": {"dp": N_RANKS, "accumulation_steps": arguments.gradient_accumulation_steps},
        "loss": loss,
        "gradient_norm": trainer.norm.item(),
    }
    if int(os.environ.get("RANK", 0)) == 0:
        write_folder(
            folder,
            config=CONFIG,
            weights=weights,
            tokens=given["input_ids"],
            targets=torch.cat((given["labels"][:, 1:], none), dim=1),
            document_positions=given["positions"],
            step=step,
            gradients=trainer.gradients,
            weights_after=dict(model.named_parameters()),
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
