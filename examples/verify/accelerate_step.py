"""One step of a loop with accelerate and FSDP2, written for `titanlite parity --against FOLDER`.

    torchrun --nproc-per-node=2 examples/verify/accelerate_step.py FOLDER [--count-tokens] [--ddp]

Two batches are accumulated on each rank. The loss of a batch is the model's own, a mean over the batch's tokens. With
--count-tokens it is a sum that is divided by the valid tokens of the global batch, and multiplied by the ranks and the
accumulation steps, by which FSDP and accelerate divide.

accelerate offers FSDP only where there is an accelerator. Where there is none, its state is told to use FSDP anyway;
with --ddp it is DistributedDataParallel, unchanged.
"""

import sys

import accelerate
import torch
import transformers
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from data import CONFIG, batch, batch_loss
from folder import write_folder
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

ACCUMULATION_STEPS = 2
ADAM = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.1}


def full(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of full tensors. Every rank must call it."""
    gathered = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    return {name: tensor.detach().clone() for name, tensor in gathered.items()}


def build_accelerator(*, ddp: bool) -> Accelerator:
    """Return an Accelerator with FSDP2 or DDP."""
    cpu = not torch.cuda.is_available()
    if ddp:
        return Accelerator(cpu=cpu, gradient_accumulation_steps=ACCUMULATION_STEPS)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=cpu, fsdp_plugin=plugin, gradient_accumulation_steps=ACCUMULATION_STEPS)
    if cpu:
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    return accelerator


def main(folder: str, *options: str) -> None:
    accelerator = build_accelerator(ddp="--ddp" in options)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), **ADAM)
    model, optimizer = accelerator.prepare(model, optimizer)
    parameters = dict(accelerator.unwrap_model(model).named_parameters())
    if "--ddp" not in options and not all(isinstance(p, DTensor) for p in parameters.values()):
        sys.exit("error: FSDP has sharded nothing")
    weights = full(parameters)
    tokens, targets = batch()
    n_ranks, rank, total = accelerator.num_processes, accelerator.process_index, 0.0
    n_valid = (targets != -100).sum() if "--count-tokens" in options else 0
    own = zip(*(each.chunk(n_ranks)[rank].chunk(ACCUMULATION_STEPS) for each in (tokens, targets)), strict=True)
    for some, expected in own:
        with accelerator.accumulate(model):
            logits = model(some).logits.flatten(0, 1)
            loss = batch_loss(logits, expected.flatten(), n_valid=n_valid, parts=n_ranks * ACCUMULATION_STEPS)
            accelerator.backward(loss)
            total += accelerator.reduce(loss.detach(), "mean").item() / ACCUMULATION_STEPS
            if accelerator.sync_gradients:
                gradients = full({name: parameter.grad for name, parameter in parameters.items()})
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    after = full(parameters)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    versions = (
        f"accelerate {accelerate.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    )
    step = {
        "program": f"{versions}, {'DDP' if '--ddp' in options else 'FSDP2'} on {n_ranks} ranks",
        "dtypes": {"weights": "float32", "compute": "float32", "reduce": "float32"},
        "optimizer": {"name": "AdamW", "beta1": 0.9, "beta2": 0.95, **ADAM, "weight_decay_dims": [1, 2]},
        "max_norm": 1.0,
        "degrees": {"dp": n_ranks, "accumulation_steps": ACCUMULATION_STEPS},
        "loss": total,
        "gradient_norm": norm.item(),
    }
    tensors = {"weights": weights, "gradients": gradients, "weights_after": after}
    if accelerator.is_main_process:
        write_folder(folder, config=CONFIG, tokens=tokens, targets=targets, step=step, **tensors)
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
