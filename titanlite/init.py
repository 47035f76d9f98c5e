"""Weight initialization from (seed, parameter name): bit for bit the same for every layout of the model over ranks.
Every rank draws the full parameter from a generator seeded for that parameter, and keeps its own shard; of stacked
experts, a rank draws only the experts in its shard. This needs no communication. DTensor's random operators are not
used: on a CPU, they give every rank the same numbers."""

import hashlib
import math

import torch

from titanlite.model import Llama
from titanlite.parallel.shards import Slice, local_shard, shard_slice

# Weights are drawn as in GPT-2 (Radford et al. 2019, section 2.3; Megatron-LM, arXiv:1909.08053, section 3): from a
# normal distribution of standard deviation 0.02. The two layers of a block that add to the residual stream are scaled
# by 1 / sqrt(2 L), so that the variance of the residual stream does not grow with the number of layers L.
STD = 0.02
RESIDUAL_OUTPUTS = ("attention.wo.weight", "feed_forward.w2.weight", "experts.w2", "shared.w2.weight")


def parameter_seed(seed: int, name: str) -> int:
    """Return a parameter's 63-bit generator seed, the same on every machine and Python version."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1


def _generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(parameter_seed(seed, name))


@torch.no_grad()
def init_weights(model: Llama, *, seed: int, n_layers: int, device: torch.device) -> None:
    """Fill every parameter, a plain tensor or a DTensor of any placement, of a materialized model or stage. `n_layers`:
    number of layers of the full model. `device` draws float32 numbers, which differ between CPU and CUDA."""
    for name, parameter in model.named_parameters():
        std = STD / math.sqrt(2 * n_layers) if name.endswith(RESIDUAL_OUTPUTS) else STD
        if parameter.dim() > 2 and not name.endswith(".lora_b"):  # each expert's generator is seeded by its number
            (first, *offsets), (n_local, *sizes) = shard_slice(parameter)
            of_expert = Slice(tuple(offsets), tuple(sizes)).indices
            for index in range(n_local):
                full = torch.empty(parameter.shape[1:], dtype=torch.float32, device=device)
                full.normal_(0.0, std, generator=_generator(seed, f"{name}.{first + index}", device))
                local_shard(parameter)[index].copy_(full[of_expert])
            continue
        is_zero = name.endswith(("bias", ".sinks", ".lora_b"))
        start = 0.0 if is_zero else model.first_norm_weight
        full = torch.full(parameter.shape, start, dtype=torch.float32, device=device)
        if parameter.dim() == 2 and not is_zero:
            full.normal_(0.0, std, generator=_generator(seed, name, device))
        local_shard(parameter).copy_(full[shard_slice(parameter).indices])
