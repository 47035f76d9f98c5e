"""Compare one step of Muon on FSDP shards with the same step in one process: torch.optim.Muon, and titanlite's.

    python benchmarks/muon_layouts.py

Ten matrices have random gradients. On 1, 2 and 4 gloo ranks, fully_shard shards them, and each optimizer takes a step.
Prints, for each optimizer and number of ranks, the largest difference of an update from that on one rank, relative to
the update: the norm of the difference over the norm.
"""

import platform

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from titanlite.config.schema import Optimizer
from titanlite.techniques.muon import build_muon
from titanlite.tools.parity.process_pool import ProcessPool

RANKS = 1, 2, 4
SIDES = [(256, 256), (768, 256)] * 5
SETTINGS = {
    "torch.optim.Muon": None,
    "titanlite, bfloat16": "bfloat16",
    "titanlite, float32": "float32",
    "titanlite, float64": "float64",
}


def updates(name: str) -> list[Tensor]:
    """Return the updates of one step. Every rank must call it."""
    torch.manual_seed(0)
    dtype = torch.float64 if SETTINGS[name] == "float64" else torch.float32
    model = nn.Sequential(*(nn.Linear(n, m, bias=False) for m, n in SIDES)).to(dtype)
    gradients = [torch.randn(shape).to(dtype) for shape in SIDES]
    fully_shard(model)
    named = [(f"layers.{key}", parameter) for key, parameter in model.named_parameters()]
    if SETTINGS[name] is None:
        settings = {"lr": 1.0, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
        optimizer: torch.optim.Optimizer = torch.optim.Muon([weight for _, weight in named], **settings)
    else:
        vector = nn.Parameter(torch.zeros(1, dtype=dtype))
        vector.grad = torch.zeros_like(vector)
        options = Optimizer(name="Muon", lr=1.0, weight_decay=0.0, muon_dtype=SETTINGS[name])
        optimizer = build_muon([*named, ("norm", vector)], options, dist.group.WORLD)
    before = [weight.full_tensor().detach().clone() for _, weight in named]
    for (_, weight), gradient in zip(named, gradients, strict=True):
        weight.grad = distribute_tensor(gradient, weight.device_mesh, weight.placements)
    optimizer.step()
    return [weight.full_tensor().detach() - old for (_, weight), old in zip(named, before, strict=True)]


def main() -> None:
    print(f"torch {torch.__version__}, {platform.machine()}, {len(SIDES)} matrices")
    found: dict[tuple[str, int], list[Tensor]] = {}
    for n in RANKS:
        pool = ProcessPool(n, timeout_seconds=300)
        for name in SETTINGS:
            found[name, n] = pool.run(updates, name=name)[0]
        pool.close()
    print(f"\n{'largest difference from one rank':36}" + "".join(f"{n:>6} ranks" for n in RANKS[1:]))
    for name in SETTINGS:
        row = []
        for n in RANKS[1:]:
            pairs = zip(found[name, n], found[name, 1], strict=True)
            row.append(max(((one - other).norm() / other.norm()).item() for one, other in pairs))
        print(f"{name:36}" + "".join(f"{x:12.1e}" for x in row))


if __name__ == "__main__":
    main()
