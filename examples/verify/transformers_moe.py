"""One step of a mixture of experts of transformers, written for `titanlite parity --against FOLDER`.

    python examples/verify/transformers_moe.py FOLDER [--experts=eager] [--balance-loss]
    torchrun --nproc-per-node=2 examples/verify/transformers_moe.py FOLDER [--fsdp] [--experts=eager] [--balance-loss]

The model is a Qwen3-MoE of two layers. Under torchrun its experts are divided over the ranks, by transformers' expert
parallelism. The other layers are tensor parallel, and every rank has all tokens; with --fsdp they are in FSDP, and each
rank has its own sequences. --experts names the implementation of the experts' products: eager, batched_mm or
grouped_mm. With --balance-loss the model adds its own auxiliary loss.
"""

import dataclasses
import os
import sys
import tempfile
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from data import VOCAB_SIZE, batch
from folder import copies, write_folder
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

N_EXPERTS, TOP_K, BALANCE = 8, 2, 0.05
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 32,
    "num_experts": N_EXPERTS,
    "num_experts_per_tok": TOP_K,
    "norm_topk_prob": True,
    "eos_token_id": 0,
    "pad_token_id": None,
    "router_aux_loss_coef": BALANCE,
}


def full(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of full tensors. Every rank must call it."""
    return copies({name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()})


def layout(n_ranks: int, options: Sequence[str]) -> DistributedConfig:
    """Return expert parallel over all ranks; the other layers are tensor parallel or in FSDP."""
    known = {field.name for field in dataclasses.fields(DistributedConfig)}
    if "ep_size" not in known:  # before transformers 5.20
        return DistributedConfig(tp_size=n_ranks, enable_expert_parallel=True)
    if "--fsdp" in options:
        return DistributedConfig(tp_size=1, fsdp_size=n_ranks, ep_size=n_ranks)
    return DistributedConfig(tp_size=n_ranks, ep_size=n_ranks)


def build(experts: str, n_ranks: int, options: Sequence[str]) -> Qwen3MoeForCausalLM:
    """Return the same model for every number of ranks: its weights are read from a folder that rank 0 has written."""
    place = [tempfile.mkdtemp()]
    if n_ranks > 1:
        dist.init_process_group("gloo")
        dist.broadcast_object_list(place)
    torch.manual_seed(0)
    if not n_ranks > 1 or dist.get_rank() == 0:
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG)).save_pretrained(place[0])
    parallel = {}
    if n_ranks > 1:
        dist.barrier()
        parallel["distributed_config"] = layout(n_ranks, options)
    return Qwen3MoeForCausalLM.from_pretrained(
        place[0], dtype=torch.float32, experts_implementation=experts, attn_implementation="eager", **parallel
    )


def main(folder: str, *options: str) -> None:
    experts = next((option.removeprefix("--experts=") for option in options if "--experts=" in option), "eager")
    n_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    model, chosen = build(experts, n_ranks, options), dict[str, Tensor]()
    model.train()
    if n_ranks > 1 and len(local(model.model.layers[0].mlp.experts.gate_up_proj)) == N_EXPERTS:
        sys.exit("error: expert parallel has divided nothing")
    tokens, targets = batch()
    n_parts, part = (n_ranks, dist.get_rank()) if "--fsdp" in options else (1, 0)
    own_tokens, own_targets = tokens.chunk(n_parts)[part], targets.chunk(n_parts)[part]
    for number, layer in enumerate(model.model.layers):
        # The gate returns logits, scores and experts, before expert parallel changes them for a rank.
        def keep(gate: torch.nn.Module, args: tuple[Tensor, ...], number: int = number) -> None:
            logits = F.linear(args[0].reshape(-1, gate.weight.shape[-1]), torch.as_tensor(local(gate.weight)))
            chosen[f"layers.{number}"] = logits.softmax(-1).topk(TOP_K, dim=-1).indices.view(*own_tokens.shape, TOP_K)

        layer.mlp.gate.register_forward_pre_hook(keep)
    weights = full(dict(model.named_parameters()))
    with_balance = "--balance-loss" in options
    output = model(own_tokens, output_router_logits=with_balance)
    losses = F.cross_entropy(output.logits.flatten(0, 1), own_targets.flatten(), reduction="sum")
    loss = losses / (targets != -100).sum()
    total = loss * n_parts  # FSDP averages gradients over its ranks
    (total + BALANCE * output.aux_loss if with_balance else total).backward()
    if n_parts > 1:
        dist.all_reduce(loss := loss.detach().clone())
        chosen = {name: gathered(experts) for name, experts in chosen.items()}
    gradients = full({name: parameter.grad for name, parameter in model.named_parameters()})
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    degrees = {"ep": n_ranks, "dp": n_parts, "tp": n_ranks // n_parts}
    layout_of_run = " ".join(f"{name} {degree}" for name, degree in degrees.items())
    step = {
        "program": f"transformers {transformers.__version__}, torch {torch.__version__}, {experts}, {layout_of_run}",
        "dtypes": {"weights": "float32", "compute": "float32", "reduce": "float32"},
        "degrees": degrees,
        "loss": loss.item(),
        "gradient_norm": norm.item(),
    }
    if with_balance:
        step["balance_loss"] = {"weight": BALANCE, "layers": "together", "parts": n_parts}
    if n_ranks == 1 or dist.get_rank() == 0:
        config = model.config.to_dict()
        files = {"weights": weights, "gradients": gradients, "experts": chosen}
        write_folder(folder, config=config, tokens=tokens, targets=targets, step=step, **files)
    if n_ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def gathered(tensor: Tensor) -> Tensor:
    """Return the sequences of all ranks."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    main(*sys.argv[1:])
