"""One step of DeepSpeed with ZeRO, alone or on several ranks, written for `titanlite parity --against FOLDER`.

    torchrun --nproc-per-node=1 examples/verify/deepspeed_step.py FOLDER [--zero=0 | 1 | 2 | 3] [--count-tokens]
    torchrun --nproc-per-node=2 examples/verify/deepspeed_step.py FOLDER [--zero=0 | 1 | 2 | 3] [--count-tokens]

Two batches are accumulated on each rank. The loss of a batch is the model's own, a mean over the batch's tokens. With
--count-tokens it is a sum that is divided by the valid tokens of the global batch, and multiplied by the ranks and the
accumulation steps, by which DeepSpeed divides. Gradients are recorded between backward and step, in which DeepSpeed
clips.
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
import transformers
from data import CONFIG, N_SEQUENCES, batch, batch_loss
from deepspeed.utils import safe_get_full_grad
from folder import copies, write_folder
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

ACCUMULATION_STEPS = 2
ADAM = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.1}


def full(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of full weights. Every rank must call it."""
    with deepspeed.zero.GatheredParameters(list(model.parameters())):  # without ZeRO-3 it does nothing
        return copies(dict(model.named_parameters()))


def main(folder: str, *options: str) -> None:
    stage = next((int(option.removeprefix("--zero=")) for option in options if "--zero=" in option), 0)
    deepspeed.init_distributed("gloo")
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    config = {
        "train_batch_size": N_SEQUENCES,
        "gradient_accumulation_steps": ACCUMULATION_STEPS,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,  # torch's AdamW: DeepSpeed's own is compiled when it is first used
    }
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), **ADAM)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    weights = full(model)
    tokens, targets = batch()
    n_valid, total = (targets != -100).sum() if "--count-tokens" in options else 0, torch.zeros(())
    own = zip(*(each.chunk(n_ranks)[rank].chunk(ACCUMULATION_STEPS) for each in (tokens, targets)), strict=True)
    for some, expected in own:
        logits = engine(some).logits.flatten(0, 1)
        loss = batch_loss(logits, expected.flatten(), n_valid=n_valid, parts=n_ranks * ACCUMULATION_STEPS)
        engine.backward(loss)
        total += loss.detach() / ACCUMULATION_STEPS / n_ranks
        if engine.is_gradient_accumulation_boundary():
            gradients = copies({name: safe_get_full_grad(p) for name, p in model.named_parameters()})
        engine.step()
    dist.all_reduce(total)
    norm = engine.get_global_grad_norm()  # without ZeRO, in float32, DeepSpeed keeps none
    after = full(model)
    versions = f"DeepSpeed {deepspeed.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    step = {
        "program": f"{versions}, ZeRO-{stage} on {n_ranks} rank(s)",
        "dtypes": {"weights": "float32", "compute": "float32", "reduce": "float32"},
        "optimizer": {"name": "AdamW", "beta1": 0.9, "beta2": 0.95, **ADAM, "weight_decay_dims": [1, 2]},
        "max_norm": 1.0,
        "degrees": {"dp": n_ranks, "accumulation_steps": ACCUMULATION_STEPS},
        "loss": total.item(),
        "gradient_norm": None if norm is None else float(norm),
    }
    if rank == 0:
        tensors = {"weights": weights, "gradients": gradients, "weights_after": after}
        write_folder(folder, config=CONFIG, tokens=tokens, targets=targets, step=step, **tensors)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
