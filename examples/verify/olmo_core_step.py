"""One step of OLMo-core's train module, alone or on several ranks, written for `titanlite parity --against FOLDER`.

    python examples/verify/olmo_core_step.py FOLDER
    torchrun --nproc-per-node=2 examples/verify/olmo_core_step.py FOLDER [--ddp] [--equal]

The ranks have FSDP, or DDP with --ddp. Each rank's batch is four microbatches. With --equal the sequences are ordered
so that both ranks have 72 valid targets; without, 40 and 104. An object that keeps the metrics replaces the trainer.
"""

import importlib.metadata
import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from data import CONFIG, N_SEQUENCES, SEQ_LEN, batch
from folder import write_folder
from olmo_core.config import DType
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.nn.feed_forward import FeedForwardConfig
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig
from olmo_core.train.train_module import TransformerDataParallelConfig, TransformerTrainModuleConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

N_RANKS = int(os.environ.get("WORLD_SIZE", 1))
MICROBATCHES = 4
ADAM = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.1}
HF_NAMES = {
    "lm_head.norm.": "model.norm.",
    "lm_head.w_out": "lm_head",
    "embeddings.": "model.embed_tokens.",
    "blocks.": "model.layers.",
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "attention.w_q": "self_attn.q_proj",
    "attention.w_k": "self_attn.k_proj",
    "attention.w_v": "self_attn.v_proj",
    "attention.w_out": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}


def full(model: nn.Module, *, gradients: bool = False) -> dict[str, Tensor]:
    """Return copies of full weights or gradients by the names of transformers. Every rank must call it."""
    found = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if gradients else parameter.detach()
        name = name.removeprefix("module.")
        for own, other in HF_NAMES.items():
            name = name.replace(own, other)
        found[name] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
    return found


def main(folder: str, *options: str) -> None:
    if N_RANKS > 1:
        dist.init_process_group("gloo")
    kind = DataParallelType.ddp if "--ddp" in options else DataParallelType.fsdp
    torch.manual_seed(0)
    model = TransformerConfig.llama_like(
        d_model=CONFIG["hidden_size"],
        vocab_size=CONFIG["vocab_size"],
        n_layers=CONFIG["num_hidden_layers"],
        n_heads=CONFIG["num_attention_heads"],
        n_kv_heads=CONFIG["num_key_value_heads"],
        rope_theta=int(CONFIG["rope_theta"]),
        layer_norm_eps=CONFIG["rms_norm_eps"],
        feed_forward=FeedForwardConfig(hidden_size=CONFIG["intermediate_size"], bias=False),
    ).build(init_device="cpu")
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=N_SEQUENCES // N_RANKS // MICROBATCHES * SEQ_LEN,
        max_sequence_length=SEQ_LEN,
        optim=AdamWConfig(betas=(0.9, 0.95), **ADAM),
        dp_config=TransformerDataParallelConfig(name=kind, reduce_dtype=DType.float32) if N_RANKS > 1 else None,
        max_grad_norm=1.0,
    ).build(model, device=torch.device("cpu"))
    metrics: dict[str, Tensor] = {}
    module._trainer = SimpleNamespace(record_metric=lambda name, value, *_, **__: metrics.update({name: value}))
    module._trainer.record_ce_loss = lambda value, *_, **__: metrics.update({"loss": value})
    tokens, targets = batch()
    if "--equal" in options:
        order = torch.tensor([0, 7, 2, 5, 1, 6, 3, 4])
        tokens, targets = tokens[order], targets[order]
    weights = full(module.model)
    rank = dist.get_rank() if N_RANKS > 1 else 0
    module.train_batch({"input_ids": tokens.chunk(N_RANKS)[rank], "labels": targets.chunk(N_RANKS)[rank]})
    gradients = full(module.model, gradients=True)
    module.optim_step()
    after, loss = full(module.model), metrics["loss"] / N_RANKS
    if N_RANKS > 1:
        dist.all_reduce(loss)  # the trainer's metric is the mean over ranks
    versions = " ".join(f"{name} {importlib.metadata.version(name)}," for name in ("ai2-olmo-core", "torch"))
    step = {
        "program": f"{versions} {f'{kind.value} on ' if N_RANKS > 1 else ''}{N_RANKS} rank(s)",
        "dtypes": {"weights": "float32", "compute": "float32", "reduce": "float32"},
        "optimizer": {"name": "AdamW", "beta1": 0.9, "beta2": 0.95, **ADAM, "weight_decay_dims": [1, 2]},
        "max_norm": 1.0,
        "degrees": {"dp": N_RANKS, "accumulation_steps": MICROBATCHES},
        "loss": loss.item(),
        "gradient_norm": metrics["total grad norm"].item(),
    }
    if rank == 0:
        tensors = {"weights": weights, "gradients": gradients, "weights_after": after}
        write_folder(folder, config=CONFIG, tokens=tokens, targets=targets, step=step, **tensors)


if __name__ == "__main__":
    main(*sys.argv[1:])
