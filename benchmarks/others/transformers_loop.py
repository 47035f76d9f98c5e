"""Train a model of transformers in a plain PyTorch loop, as the second program of vs_transformers.py.

python -m benchmarks.others.transformers_loop STEPS LOCAL_BATCH [ddp | fsdp]        Llama (the last two under torchrun)
python -m benchmarks.others.transformers_loop STEPS LOCAL_BATCH eager | grouped_mm  Qwen3-MoE, its experts in this way
"""

import os
import sys
import time
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

SEQ_LEN = 512
SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 2048,
    "max_position_embeddings": SEQ_LEN,
    "use_cache": False,
    "attn_implementation": "sdpa",
}
EXPERTS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def build(mode: str) -> nn.Module:
    if mode not in ("eager", "grouped_mm"):
        return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=768))
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | EXPERTS))
    model.set_experts_implementation(mode)
    return model


def main(steps: int, local_batch: int, mode: str) -> None:
    rank = int(os.environ.get("RANK", 0))
    torch.manual_seed(42)
    model = build(mode)
    lr = 1e-5 if mode in ("eager", "grouped_mm") else 1e-3  # vs_transformers_moe.toml says why
    if rank == 0:
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    is_distributed = mode in ("ddp", "fsdp")
    if is_distributed:
        dist.init_process_group("gloo")
    if mode == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    if mode == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    text = "".join(topics.values()).encode()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(rank)

    for step in range(1, steps + 1):
        start = time.perf_counter()
        offsets = torch.randint(len(tokens) - SEQ_LEN, (local_batch,), generator=generator).tolist()
        batch = torch.stack([tokens[offset : offset + SEQ_LEN] for offset in offsets])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        if rank == 0:
            print(f"step {step} loss {value:.4f} seconds {time.perf_counter() - start:.4f}", flush=True)
    if is_distributed:
        dist.barrier()
    os._exit(0)  # as titanlite does, because gloo can abort at exit


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), (*sys.argv[3:], "alone")[0])
