"""One step of picotron, alone or on several ranks, written for `titanlite parity --against FOLDER`.

    PYTHONPATH=CHECKOUT torchrun --nproc-per-node=2 examples/verify/picotron_step.py FOLDER --tp=2

It runs with transformers 4.47.0 and datasets 2.19.1, as picotron asks for, but for torch, which is 2.13.

CHECKOUT is a clone of huggingface/picotron, whose train.py runs on a CPU with the options that it has for that
(use_cpu, FLASH_ATTEN 0): its model, parallel wrappers, batches of each rank, training step and loop. The step is
recorded where the optimizer takes it; picotron does not clip. What is replaced at run time changes no number:

    flash_attn, wandb   train.py imports them, and uses neither with these options: empty modules.
    torch.cuda          Communication ends with torch.cuda.synchronize(), under gloo too: a function that does nothing.
    get_num_params      It counts parameters in a tensor on "cuda", for a printed line: returns 1.
    the data            Sequences of data.py, in place of a dataset and a tokenizer of the Hugging Face Hub. picotron
                        partitions them over the ranks, as for context parallelism. It can mask no target.
    AdamW               A subclass, which copies weights and gradients around torch's own step.
    two functions       Wrapped, to keep the model and the loss that they return.

The rotary table is in bfloat16, also where everything else is in float32, unless the environment has DTYPE=float32.
train.py does not set it.

Recorded are the weights and gradients of the first replica: data-parallel and context-parallel rank 0. For each other
replica a line says how far it is from them. --mean-over-cp records the mean of the gradients of context-parallel ranks
instead, which this script computes, and no weights after the step.
"""

# ruff: noqa: E402  (picotron is imported after the modules that it cannot import here)

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from data import CONFIG, N_SEQUENCES, SEQ_LEN, batch
from folder import copies, write_folder
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

UNUSED = {
    "flash_attn.flash_attn_interface": "flash_attn_func",
    "flash_attn.layers.rotary": "apply_rotary_emb",
    "flash_attn.ops.triton.layer_norm": "layer_norm_fn",
    "wandb": "init",
}
for module_name, unused in UNUSED.items():
    sys.modules[module_name] = ModuleType(module_name)
    setattr(sys.modules[module_name], unused, None)

import picotron.checkpoint
import picotron.data
import picotron.process_group_manager as groups
import picotron.utils
from picotron.tensor_parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

CHECKOUT = Path(picotron.data.__file__).parents[1]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "FLASH_ATTEN": "0", "HF_TOKEN": ""}
SHARDED_DIMS = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
NAMES = {
    "decoder_layers.": "model.layers.",
    ".attention.": ".self_attn.",
    ".out_proj.": ".o_proj.",
    "embedding.": "model.embed_tokens.",
    "final_norm.": "model.norm.",
    "final_proj.": "lm_head.",
}
RETURNED: dict[str, Any] = {}
"""What picotron's functions returned, by their names."""
Tensors = dict[str, Tensor]
Replica = tuple[int, int]
"""Data-parallel rank and context-parallel rank."""


def keep(module: ModuleType, name: str) -> None:
    """Let a function of picotron keep what it returns."""
    function = getattr(module, name)

    def kept(*arguments: Any, **kwargs: Any) -> Any:
        RETURNED[name] = function(*arguments, **kwargs)
        return RETURNED[name]

    setattr(module, name, kept)


def gathered(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def replicas(tensor_of: Callable[[nn.Parameter], Tensor]) -> dict[Replica, Tensors]:
    """Return the full tensors of each replica, by the names of transformers. Every rank must call it."""
    model, here = RETURNED["init_model_with_materialized_weights"], groups.process_group_manager
    own = copies({name: tensor_of(parameter) for name, parameter in model.named_parameters()})
    dims = {name: SHARDED_DIMS.get(type(model.get_submodule(name.removesuffix(".weight")))) for name in own}
    shards: dict[Replica, dict[str, list[Tensor]]] = {}
    dims_of_all: dict[str, int | None] = {}
    for replica, tensors, dims_of_rank in gathered(((here.dp_rank, here.cp_rank), own, dims)):
        dims_of_all.update(dims_of_rank)
        for name, tensor in tensors.items():  # ranks ascend, and with them the tensor-parallel rank
            shards.setdefault(replica, {}).setdefault(name, []).append(tensor)

    def whole(name: str, parts: list[Tensor]) -> Tensor:
        dim = dims_of_all[name]
        return parts[0] if dim is None else torch.cat(parts, dim)

    return {
        replica: {renamed(name): whole(name, parts) for name, parts in of_replica.items()}
        for replica, of_replica in shards.items()
    }


def renamed(name: str) -> str:
    for old, new in NAMES.items():
        name = name.replace(old, new)
    return name


def distance(one: Tensors, other: Tensors, origin: Tensors | None = None) -> float:
    """Return the norm of the difference, over the norm of `other`, both measured from `origin`."""
    difference = torch.cat([(one[name] - other[name]).flatten() for name in other])
    size = torch.cat([(other[name] - (origin[name] if origin else 0)).flatten() for name in other])
    return (difference.norm() / size.norm()).item()


class Recorder(torch.optim.AdamW):
    """torch's AdamW, which writes the folder of the step that it takes."""

    arguments: argparse.Namespace

    def step(self, *closure: Any) -> None:
        weights, gradients = replicas(lambda parameter: parameter.detach()), replicas(lambda parameter: parameter.grad)
        super().step(*closure)
        after = replicas(lambda parameter: parameter.detach())
        loss = gathered(RETURNED["average_loss_across_dp_cp_ranks"])[-1]  # of the last stage of the pipeline
        if dist.get_rank() > 0:
            return
        first = (0, 0)
        for replica in list(gradients)[1:]:
            apart = (
                distance(gradients[replica], gradients[first]),
                distance(after[replica], after[first], weights[first]),
            )
            figures = "gradients {:.1e}, updates {:.1e}".format(*apart)
            print("dp rank {} cp rank {}, distance from the recorded replica: ".format(*replica) + figures)
        tensors = {"gradients": gradients[first], "weights_after": after[first]}
        if self.arguments.mean_over_cp:
            of_cp = [gradients[0, rank] for rank in range(self.arguments.cp)]
            tensors = {"gradients": {name: sum(each[name] for each in of_cp) / len(of_cp) for name in of_cp[0]}}
        self.write(loss, weights=weights[first], **tensors)

    def write(self, loss: float, **tensors: Tensors) -> None:
        """Write the folder."""
        options, a = self.param_groups[0], self.arguments
        git = ["git", "-C", str(CHECKOUT), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
        degrees = {"dp": a.dp, "tp": a.tp, "cp": a.cp, "pp": a.pp}
        layout = " ".join(f"{name} {degree}" for name, degree in degrees.items()) + f" {a.pp_engine}" * (a.pp > 1)
        accumulated = "microbatches" if a.pp > 1 else "accumulation_steps"
        step = {
            "program": f"picotron {commit} torch {torch.__version__}, {layout}",
            "dtypes": {"weights": "float32", "compute": "float32", "reduce": "float32"},
            "optimizer": {
                "name": "AdamW",
                "lr": options["lr"],
                "beta1": options["betas"][0],
                "beta2": options["betas"][1],
                "eps": options["eps"],
                "weight_decay": options["weight_decay"],
                "weight_decay_dims": [1, 2],
            },
            "degrees": {**degrees, accumulated: accumulation_steps(a)},
            "loss": loss,
        }
        tokens, targets = batch(masked=False)
        write_folder(a.folder, config=CONFIG, tokens=tokens, targets=targets, step=step, **tensors)


def accumulation_steps(arguments: argparse.Namespace) -> int:
    return N_SEQUENCES // arguments.dp // arguments.micro_batch_size


def sequences(n_ranks: int) -> list[dict[str, list[int]]]:
    """Return the sequences so that picotron, which assigns every n-th to a rank, gives each rank neighbouring ones."""
    tokens, targets = batch(masked=False)
    ids = torch.cat((tokens, targets[:, -1:]), dim=1)
    return [{"input_ids": row.tolist()} for row in ids.view(n_ranks, -1, SEQ_LEN + 1).transpose(0, 1).flatten(0, 1)]


def train_config(arguments: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Return the content of train.py's config."""
    degrees = {f"{name}_size": getattr(arguments, name) for name in ("dp", "tp", "cp", "pp")}
    return {
        "distributed": {**degrees, "pp_engine": arguments.pp_engine, "use_cpu": True},
        "model": {"name": str(model), "use_fused_adam": False},
        "training": {
            "seed": 0,
            "learning_rate": 1e-3,
            "total_train_steps": 1,
            "seq_length": SEQ_LEN,
            "micro_batch_size": arguments.micro_batch_size,
            "gradient_accumulation_steps": accumulation_steps(arguments),
            "max_tokens": None,
        },
        "dataset": {"name": "", "num_workers": 0, "num_proc": 1},
        "checkpoint": {"save_frequency": 2, "load_path": ""},
        "logging": {"use_wandb": False},
        "environment": ENVIRONMENT,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=os.path.abspath)
    for name in ("dp", "tp", "cp", "pp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--pp-engine", choices=["1f1b", "afab"], default="1f1b")
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--mean-over-cp", action="store_true")
    arguments = Recorder.arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        model = Path(folder, "hf_model_safetensors")  # train.py reads shapes here, and initializes the weights itself
        LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(model)
        Path("train.json").write_text(json.dumps(train_config(arguments, model)))
        torch.cuda.synchronize = lambda *_: None
        torch.optim.AdamW = Recorder
        AutoTokenizer.from_pretrained = picotron.data.load_dataset = lambda *_, **__: None
        picotron.data.MicroBatchDataLoader.tokenize_dataset = lambda *_: sequences(arguments.dp)
        picotron.utils.get_num_params = lambda model: 1
        keep(picotron.checkpoint, "init_model_with_materialized_weights")
        keep(picotron.utils, "average_loss_across_dp_cp_ranks")
        sys.argv[1:] = ["--config=train.json"]
        runpy.run_path(str(CHECKOUT / "train.py"), run_name="__main__")
        os.chdir(CHECKOUT)  # out of the folder, which is removed


if __name__ == "__main__":
    main()
