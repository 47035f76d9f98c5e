"""One step of TRL's SFTTrainer with gradient accumulation, written for `titanlite parity --against FOLDER`.

    python examples/verify/trl_sft.py FOLDER [--packing]
    torchrun --nproc-per-node=2 examples/verify/trl_sft.py FOLDER [--packing]

The step takes four batches of two sequences, one after the other or partitioned over ranks under DDP. Completions have
different lengths. With --packing each sequence is two documents, which TRL packs without padding. The batch of the
folder is what the model got, and gradients are recorded where the Trainer clips them.
"""

import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import transformers
import trl
from data import CONFIG, SEQ_LEN, VOCAB_SIZE, batch
from datasets import Dataset
from folder import copies, write_folder
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers_trainer import ACCUMULATION_STEPS, ADAM, ARGUMENTS, N_RANKS, RecordsGradients


class OneStep(RecordsGradients, trl.SFTTrainer):
    """An SFTTrainer that copies what the model gets, and the gradients before it clips them."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.inputs: list[dict[str, list[list[int]]]] = []

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *arguments: Any, **kwargs: Any) -> Tensor:
        rows = {name: inputs[name].reshape(-1, SEQ_LEN).tolist() for name in ("input_ids", "labels")}
        positions = inputs.get("position_ids", torch.arange(SEQ_LEN).expand(len(rows["labels"]), -1))
        self.inputs.append({**rows, "positions": positions.reshape(-1, SEQ_LEN).tolist()})
        return super().compute_loss(model, inputs, *arguments, **kwargs)

    def global_batch(self) -> dict[str, Tensor]:
        """Return the inputs of the models of all ranks: [B, T]. Every rank must call it."""
        of_ranks = [self.inputs] * N_RANKS
        if N_RANKS > 1:
            dist.all_gather_object(of_ranks, self.inputs)
        batches = [each for own in of_ranks for each in own]
        return {name: torch.tensor([row for each in batches for row in each[name]]) for name in batches[0]}


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
        max_length=SEQ_LEN,
        packing=packing,
        completion_only_loss=True,
        gradient_checkpointing=False,
        bf16=False,
        **ARGUMENTS,
    )
    vocabulary = models.WordLevel({"<pad>": 0, **{str(i): i for i in range(1, VOCAB_SIZE)}}, unk_token="<pad>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(vocabulary), pad_token="<pad>", eos_token="1")
    trainer = OneStep(model, arguments, train_dataset=dataset(packing=packing), processing_class=tokenizer)
    loss = trainer.train().training_loss
    inputs = trainer.global_batch()
    none = torch.full((len(inputs["labels"]), 1), -100)
    step = {
        "program": f"TRL {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}, "
        f"SFTTrainer on {N_RANKS} rank(s){', packing' if packing else ''}",
        "dtypes": {"weights": "float32", "compute": "float32", "reduce": "float32"},
        "optimizer": {"name": "AdamW", **ADAM, "weight_decay_dims": [2]},
        "max_norm": 1.0,
        "degrees": {"dp": N_RANKS, "accumulation_steps": ACCUMULATION_STEPS},
        "loss": loss,
        "gradient_norm": trainer.norm.item(),
    }
    if int(os.environ.get("RANK", 0)) == 0:
        write_folder(
            folder,
            config=CONFIG,
            weights=weights,
            tokens=inputs["input_ids"],
            targets=torch.cat((inputs["labels"][:, 1:], none), dim=1),
            document_positions=inputs["positions"],
            step=step,
            gradients=trainer.gradients,
            weights_after=dict(model.named_parameters()),
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
