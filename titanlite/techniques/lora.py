"""LoRA (low-rank adaptation, arXiv:2106.09685), for fine-tuning: weights are frozen, and targeted linear layers compute
W x + alpha / rank B A x. Only the adapters A and B have gradients and optimizer states. There is no dropout.

Tensor parallel shards an adapter with its base. Where W is sharded by rows (column-wise), so is B, and where it is
sharded by columns (row-wise), so is A; the other factor is on every rank. So an adapter adds no collective to a forward
or backward: the input is the base's, already gathered, and a partial sum joins the base's before its reduce-scatter.
Only the gradient of the replicated factor is summed over ranks, which has rank x I or rank x O numbers.

A is stored transposed, [I, R], since FSDP shards the first dimension, and R may be less than the number of ranks.

Shapes: N tokens; I inputs and O outputs of a linear layer, R rank of the adapter.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from titanlite.config import ConfigError
from titanlite.config.loader import show
from titanlite.config.schema import LORA_FACTORS, Lora
from titanlite.model import Llama
from titanlite.parallel.own_rules import RunsUncompiled
from titanlite.techniques.low_precision import placements_of_products


class Adapters(nn.Module):
    """Adds the adapters of a model or a pipeline stage, and freezes its other weights. It is the last module of the
    stage, so that its `shard_weights` (parallel/own_rules.py) sees the weights as tensor parallel has left them."""

    def __init__(self, stage: Llama, lora: Lora, model: Callable[[], Llama]):
        """Check the targets. `model()` returns the full model, of which `stage` may be a pipeline stage. Raises
        ConfigError for a target that no layer has, or whose forward is not affine, and for a stage without targets."""
        super().__init__()
        names = _targets(stage, lora.targets)
        self.lora, self.names = lora, sorted(set().union(*names.values()))
        self.stage = (stage,)  # a tuple, since an attribute would make the stage a module of its own module
        if not all(names.values()):  # other stages may have them
            full = model()
            if missing := [target for target, found in _targets(full, lora.targets).items() if not found]:
                layers = {name.rpartition(".")[2] for name, module in _modules(full) if isinstance(module, nn.Linear)}
                expected = f"expected names of linear layers: {', '.join(sorted(layers))}"
                raise ConfigError([f"lora.targets: {show(each)}: no layer has it; {expected}" for each in missing])
        if not self.names:
            stages = "a pipeline stage has none of these layers; set targets that each stage has, or fewer stages"
            raise ConfigError([f"lora.targets = {show(lora.targets)}: {stages}"])

    def shard_weights(self, tensor: DeviceMesh | None, expert: DeviceMesh | None) -> None:
        """Add the adapters, sharded as their bases are, and freeze the bases in lora.base_dtype."""
        (stage,) = self.stage
        for name in self.names:
            add_adapter(stage.get_submodule(name), self.lora)
        for module in stage.modules():
            for key, parameter in list(module.named_parameters(recurse=False)):
                if key not in LORA_FACTORS:
                    base = parameter.detach()
                    base = base if self.lora.base_dtype == "auto" else base.to(getattr(torch, self.lora.base_dtype))
                    module.register_parameter(key, nn.Parameter(base, requires_grad=False))
        stage.tie()


def _modules(model: Llama) -> Iterator[tuple[str, nn.Module]]:
    for layer, block in model.layers.items():
        yield from ((f"layers.{layer}.{name}", module) for name, module in block.named_modules() if name)


def _targets(model: Llama, targets: list[str]) -> dict[str, list[str]]:
    """Return the names of the modules that each target names. Raises ConfigError for one whose forward is not affine,
    or that is computed with the experts."""
    of_experts = tuple(f"{name}." for name, module in _modules(model) if isinstance(module, RunsUncompiled))
    names: dict[str, list[str]] = {target: [] for target in targets}
    for name, module in _modules(model):
        for target in (each for each in names if f".{name}".endswith(f".{each}")):
            problem = f"lora.targets: {show(target)}: {name} is a {type(module).__name__}"
            if type(module).forward is not nn.Linear.forward:
                problem += ", whose forward is not affine; name linear layers, as wq or feed_forward.w1"
                raise ConfigError([problem])
            if name.startswith(of_experts):
                raise ConfigError([f"{problem} of a mixture of experts, which has no adapters; name attention's"])
            names[target].append(name)
    return names


def add_adapter(layer: nn.Linear, lora: Lora) -> None:
    """Add the adapter of a linear layer on the meta device, whose weight is a plain tensor or a DTensor."""
    shapes = (layer.in_features, lora.rank), (layer.out_features, lora.rank)
    factors = [torch.empty(shape, dtype=layer.weight.dtype, device="meta") for shape in shapes]
    if isinstance(layer.weight, DTensor):
        (placement,), mesh = layer.weight.placements, layer.weight.device_mesh
        a, b = Shard(0) if placement == Shard(1) else Replicate(), Shard(0) if placement == Shard(0) else Replicate()
        factors = [distribute_tensor(x, mesh, [p], src_data_rank=None) for x, p in zip(factors, (a, b), strict=True)]
    for name, factor in zip(LORA_FACTORS, factors, strict=True):
        layer.register_parameter(name, nn.Parameter(factor))
    layer.__class__, layer.lora_scale = _adapted_class(type(layer)), lora.alpha / lora.rank


@functools.cache
def _adapted_class(kind: type[nn.Linear]) -> type[nn.Linear]:
    """Return a class, since torch.compile would compile a block for each layer that has a `forward` of its own."""
    return type(kind.__name__, (kind,), {"forward": _adapted, "base_forward": kind.forward})


def _adapted(layer: Any, x: Tensor) -> Tensor:
    """Return the base's output [..., O] for x [..., I], with the adapter's added. With DTensors, each rank multiplies
    its own shards, as LowPrecisionLinear does."""
    a_IR, b_OR, scale, base = layer.lora_a, layer.lora_b, layer.lora_scale, layer.base_forward
    if not isinstance(a_IR, DTensor):
        return base(x) + F.linear(x @ a_IR * scale, b_OR)
    mesh, (placement,) = layer.weight.device_mesh, layer.weight.placements
    inputs, input_gradient, output, _ = placements_of_products(placement, x.dim() - 1)
    local = x.redistribute(placements=[inputs]).to_local(grad_placements=[input_gradient])
    own = F.linear(local @ _local(a_IR) * scale, _local(b_OR))
    return base(x) + DTensor.from_local(own, mesh, [output], run_check=False)


def _local(factor: DTensor) -> Tensor:
    """Return this rank's shard of a factor. Where every rank has all of it, each has a partial sum of its gradient."""
    return factor.to_local(grad_placements=[Partial() if p.is_replicate() else p for p in factor.placements])
