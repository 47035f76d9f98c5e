"""One step of nanoGPT's train.py, alone or under DDP, written for `titanlite parity --against FOLDER`.

    python examples/verify/nanogpt_step.py FOLDER NANOGPT [--mask] [train.py's options]
    torchrun --nproc-per-node=2 examples/verify/nanogpt_step.py FOLDER NANOGPT

NANOGPT is a clone of the repository. train.py runs with its own loop, optimizer and clipping; three pieces of it are
replaced: two that put ranks on GPUs, and the function that draws random windows of a file. All targets are valid, as
those of that function are; with --mask they are data.py's. The loss is the one that train.py prints.
"""

import itertools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from data import CONFIG, SEQ_LEN, VOCAB_SIZE, batch
from folder import copies, write_folder
from torch import Tensor

SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 64}
ADAM = {"weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95}
STEP = {"max_iters": 0, "decay_lr": False, "learning_rate": 1e-3, "batch_size": 2, "gradient_accumulation_steps": 4}
ON_CPU = {"device": "cpu", "backend": "gloo", "dtype": "float32", "compile": False, "eval_iters": 0}
REPLACED = {"f'cuda:{ddp_local_rank}'": "'cpu'", ", device_ids=[ddp_local_rank]": "", "def get_batch(": "def unused("}
NAMES = {"model_type": "gpt2", "activation_function": "gelu", "layer_norm_epsilon": 1e-5, "n_positions": SEQ_LEN}


def by_name(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies by the names of transformers, whose GPT-2 has the layers' matrices transposed."""
    named = {name.removeprefix("module."): tensor for name, tensor in parameters.items()}
    return copies({name: tensor.T if ".h." in name and tensor.dim() == 2 else tensor for name, tensor in named.items()})


def main(folder: str, nanogpt: str, *options: str) -> None:
    rank, n_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    folder = Path(folder).resolve()  # train.py reads configurator.py from the current folder
    os.chdir(nanogpt)
    sys.path.insert(0, os.getcwd())
    own = {**SIZES, **ADAM, **STEP, **ON_CPU, "block_size": SEQ_LEN, "bias": True, "out_dir": tempfile.mkdtemp()}
    sys.argv[1:] = [*(f"--{name}={value}" for name, value in own.items()), *(o for o in options if o != "--mask")]
    import model

    sizes_of, clip = model.GPTConfig, torch.nn.utils.clip_grad_norm_
    model.GPTConfig = lambda **sizes: sizes_of(**{**sizes, "vocab_size": VOCAB_SIZE})
    torch.cuda.set_device = lambda device: None
    tokens, targets = batch(masked="--mask" in options)
    recorded: dict[str, Any] = {}

    def get_batch(split: str) -> tuple[Tensor, Tensor]:
        if not recorded:
            recorded["weights"] = by_name(dict(scope["model"].named_parameters()))
            size = scope["batch_size"]
            recorded["batches"] = itertools.cycle(
                zip(*(each.chunk(n_ranks)[rank].split(size) for each in (tokens, targets)), strict=True)
            )
        some, expected = next(recorded["batches"])
        return some, expected.masked_fill(expected == -100, -1)  # the target that model.py ignores

    def recorded_clip(*arguments: Any) -> Tensor:
        recorded["gradients"] = by_name({name: p.grad for name, p in scope["model"].named_parameters()})
        recorded["norm"] = clip(*arguments)
        return recorded["norm"]

    torch.nn.utils.clip_grad_norm_ = recorded_clip
    source = Path("train.py").read_text()
    for old, new in REPLACED.items():
        if source.count(old) != 1:
            raise SystemExit(f"train.py: has {old} {source.count(old)} times; expected once, as in commit 3adf61e")
        source = source.replace(old, new)
    scope: dict[str, Any] = {"__name__": "__main__", "get_batch": get_batch}
    exec(compile(source, "train.py", "exec"), scope)
    if rank == 0:
        step = {
            "program": f"nanoGPT's train.py, torch {torch.__version__}, {n_ranks} rank(s)",
            "dtypes": {"weights": "float32", "compute": "float32", "reduce": "float32"},
            "optimizer": {"name": "AdamW", "lr": scope["lr"], "eps": 1e-8, **ADAM, "weight_decay_dims": [2]},
            "max_norm": scope["grad_clip"],
            "degrees": {"dp": n_ranks, "accumulation_steps": scope["gradient_accumulation_steps"]},
            "loss": scope["lossf"],
            "gradient_norm": recorded["norm"].item(),
        }
        tensors = {"weights": recorded["weights"], "gradients": recorded["gradients"]}
        tensors["weights_after"] = by_name(dict(scope["model"].named_parameters()))
        config = {**SIZES, **NAMES, "vocab_size": CONFIG["vocab_size"]}
        write_folder(folder, config=config, tokens=tokens, targets=targets, step=step, **tensors)


if __name__ == "__main__":
    main(*sys.argv[1:])
