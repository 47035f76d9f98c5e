"""One step of a plain PyTorch loop with a model of transformers, written for `titanlite parity --against FOLDER`.

    python examples/verify/transformers_loop.py FOLDER [--dtype=float32 | bfloat16 | float64] [--accumulate-means]

Gradients are accumulated over four batches of two sequences, whose numbers of valid targets differ. Each loss is
divided by the valid tokens of all of them. With --accumulate-means each is a mean over its own tokens, divided by four,
as many loops do.
"""

import sys

import torch
import torch.nn.functional as F
import transformers
from data import CONFIG, batch
from folder import copies, write_folder
from transformers import LlamaConfig, LlamaForCausalLM

ACCUMULATION_STEPS = 4
ADAM = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.1}


def main(folder: str, *options: str) -> None:
    dtype = next((option.removeprefix("--dtype=") for option in options if "--dtype=" in option), "float32")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).to(getattr(torch, dtype))
    weights = copies(dict(model.named_parameters()))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), **ADAM)
    tokens, targets = batch()
    n_valid, total = (targets != -100).sum(), 0.0
    for some, expected in zip(tokens.chunk(ACCUMULATION_STEPS), targets.chunk(ACCUMULATION_STEPS), strict=True):
        logits = model(some).logits.flatten(0, 1)
        if "--accumulate-means" in options:
            loss = F.cross_entropy(logits.float(), expected.flatten()) / ACCUMULATION_STEPS
        else:
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            loss = F.cross_entropy(wide, expected.flatten(), reduction="sum") / n_valid
        loss.backward()
        total += loss.item()
    gradients = copies({name: parameter.grad for name, parameter in model.named_parameters()})
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    step = {
        "program": f"transformers {transformers.__version__}, torch {torch.__version__}, a plain loop",
        "dtypes": {"weights": dtype, "compute": dtype, "reduce": dtype},
        "optimizer": {"name": "AdamW", "beta1": 0.9, "beta2": 0.95, **ADAM, "weight_decay_dims": [1, 2]},
        "max_norm": 1.0,
        "degrees": {"accumulation_steps": ACCUMULATION_STEPS},
        "loss": total,
        "gradient_norm": norm.item(),
    }
    write_folder(
        folder,
        config=CONFIG,
        weights=weights,
        tokens=tokens,
        targets=targets,
        step=step,
        gradients=gradients,
        weights_after=dict(model.named_parameters()),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
