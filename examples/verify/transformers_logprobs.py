"""Write rows for `titanlite logprobs`: a transformers model is the trainer, and computes as right and wrong engines do.

    python examples/verify/transformers_logprobs.py OUT
    titanlite logprobs OUT/hf OUT/NAME.jsonl

The model has random weights, six layers and a vocabulary of 2,000. It samples the rows, and computes in bfloat16.
"""

import copy
import functools
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

N_ROWS, N_PROMPT, N_NEW, BOS = 4, 8, 200, 1
SIZES = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4}
SIZES |= {"intermediate_size": 512, "vocab_size": 2000, "max_position_embeddings": 512}


def build(theta: float = 10000.0) -> Any:
    """Return a model in float32, whose logits are as far apart as those of a trained one."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": theta}
    model = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope, initializer_range=0.06)).eval()
    with torch.no_grad():
        model.lm_head.weight *= 2
    return model


def logprobs(model: Any, tokens: Tensor, temperature: float = 1.0) -> list[float | None]:
    logits = model(tokens[None]).logits[0, :-1].float() / temperature
    return [None, *logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].tolist()]


def logprobs_with_cache(model: Any, tokens: Tensor) -> list[float | None]:
    """Return what a model computes from one token at a time."""
    values, cache = [None], None
    for token, following in itertools.pairwise(tokens):
        output = model(token[None, None], past_key_values=cache, use_cache=True)
        values.append(output.logits[0, -1].float().log_softmax(-1)[following].item())
        cache = output.past_key_values
    return values


def autocast(model: Any, tokens: Tensor) -> list[float | None]:
    with torch.autocast("cpu", torch.bfloat16):
        return logprobs(model, tokens)


def tensor_parallel(model: Any, degree: int) -> Any:
    """Return a model whose row-wise products are sums over ranks, rounded after each, as with tensor parallel."""

    def summed(linear: Any, x: Tensor) -> Tensor:
        chunks = zip(x.chunk(degree, -1), linear.weight.chunk(degree, -1), strict=True)
        return functools.reduce(torch.add, [F.linear(*each) for each in chunks])

    model = copy.deepcopy(model)
    for layer in model.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.forward = functools.partial(summed, linear)
    return model


@torch.no_grad()
def main(out: Path) -> None:
    """Write the model's folder and a file of rows for each engine."""
    build().bfloat16().save_pretrained(out / "hf")
    model = AutoModelForCausalLM.from_pretrained(out / "hf", dtype=torch.bfloat16)
    wide = AutoModelForCausalLM.from_pretrained(out / "hf", dtype=torch.float32)
    eager = AutoModelForCausalLM.from_pretrained(out / "hf", dtype=torch.bfloat16, attn_implementation="eager")
    other = build(theta=20000.0)
    other.load_state_dict(wide.state_dict())
    prompts = torch.randint(3, 2000, (N_ROWS, N_PROMPT), generator=torch.Generator().manual_seed(1))
    rows = model.generate(prompts, do_sample=True, min_new_tokens=N_NEW, max_new_tokens=N_NEW, top_k=0, pad_token_id=0)
    two, eight = tensor_parallel(model, 2), tensor_parallel(model, 8)
    engines: dict[str, Callable[[Tensor], list[float | None]]] = {
        "sdpa": lambda x: logprobs(model, x),
        "cache": lambda x: logprobs_with_cache(eager, x),
        "autocast": lambda x: autocast(wide, x),
        "tp_2": lambda x: logprobs(two, x),
        "tp_8": lambda x: logprobs(eight, x),
        "rope_theta_20000": lambda x: autocast(other, x),
        "bos_twice": lambda x: [None, *logprobs(model, torch.cat([torch.tensor([BOS]), x]))[2:]],
        "shifted": lambda x: [None, *logprobs(model, x)[2:], -1.0],
        "temperature_1.1": lambda x: logprobs(model, x, 1.1),
    }
    for name, engine in engines.items():
        reports = [{"trainer_logprobs": logprobs(eager, row), "engine_logprobs": engine(row)} for row in rows]
        lines = [json.dumps({"token_ids": row.tolist(), **each}) for row, each in zip(rows, reports, strict=True)]
        (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
