"""LoRA (low-rank adaptation, arXiv:2106.09685), for fine-tuning: weights are frozen, and targeted linear layers compute
W x + alpha / R B A x. Only the adapters' factors A and B have gradients and optimizer states. Adapters have no dropout.

Tensor parallel shards B like the rows of W in a column-wise layer, and A like the columns of W in a row-wise layer; the
other factor is replicated. An adapter adds no collective except the sum of the replicated factor's gradient.

A is stored transposed, [I, R], because FSDP shards the first dimension, and R may be less than the number of ranks.
Shapes: I inputs and O outputs of a linear layer, R rank of the adapter."""

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
    """Adds the adapters of a model or a pipeline stage, and freezes all other weights. An Adapters is the last module
    of a stage, so that `shard_weights` (parallel/own_rules.py) runs after tensor parallel has sharded the weights."""

    def __init__(self, stage: Llama, lora: Lora, model: Callable[[], Llama]):
        """Check lora.targets, and add adapters to `stage`. `model()` returns the full model. Raises ConfigError for a
        target that no layer has or that is not linear, and for a stage without a target."""
        super().__init__()
        names = _targets(stage, lora)
        self.lora, self.names = lora, sorted(set().union(*names.values()))
        self.stage = (stage,)  # a tuple hides the stage from torch, which would register it as a submodule: a cycle
        if not all(names.values()):  # layers of a target may be in another pipeline stage
            full = model()
            if missing := [target for target, found in _targets(full, lora).items() if not found]:
                layers = {name.rpartition(".")[2] for name, module in _modules(full) if isinstance(module, nn.Linear)}
                expected = f"expected names of linear layers: {', '.join(sorted(layers))} (wq is transformers' q_proj, "
                expected += "w1 gate_proj, w2 down_proj, w3 up_proj)"
                raise ConfigError([f"lora.targets: {show(each)}: no layer has it; {expected}" for each in missing])
        if not self.names:
            stages = "a pipeline stage has none of these layers; set targets that each stage has, or fewer stages"
            raise ConfigError([f"lora.targets = {show(lora.targets)}: {stages}"])

    def shard_weights(self, tensor: DeviceMesh | None, expert: DeviceMesh | None) -> None:
        """Add the adapters, sharded like their layers, and freeze all other weights in lora.base_dtype."""
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


def _targets(model: Llama, lora: Lora) -> dict[str, list[str]]:
    """Return the names of the modules that match each target. Raises ConfigError for a module that is not an nn.Linear
    or is computed with the experts, and for lora.rank above the width of a module."""
    of_experts = tuple(f"{name}." for name, module in _modules(model) if isinstance(module, RunsUncompiled))
    names: dict[str, list[str]] = {target: [] for target in lora.targets}
    for name, module in _modules(model):
        for target in (each for each in names if f".{name}".endswith(f".{each}")):
            problem = f"lora.targets: {show(target)}: {name} is a {type(module).__name__}"
            if type(module).forward is not nn.Linear.forward:
                problem += ", whose forward is not affine; name linear layers, as wq or feed_forward.w1"
                raise ConfigError([problem])
            if name.startswith(of_experts):
                raise ConfigError([f"{problem} of a mixture of experts, which has no adapters; name attention's"])
            if (most := min(module.in_features, module.out_features)) < lora.rank:
                problem = f"lora.rank = {lora.rank}: {name} has {module.in_features} inputs and {module.out_features}"
                raise ConfigError([f"{problem} outputs; expected at most {most}"])
            names[target].append(name)
    return names


def add_adapter(layer: nn.Linear, lora: Lora) -> None:
    """Add an adapter to a linear layer on the meta device, whose weight may be a plain tensor or a DTensor."""
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
    """Return a subclass of nn.Linear with adapters, the same for all layers, which torch.compile compiles only once."""
    return type(kind.__name__, (kind,), {"forward": _adapted, "base_forward": kind.forward})


def _adapted(layer: Any, x: Tensor) -> Tensor:
    """Return the sum of a frozen layer's output and its adapter's output, [..., O], for x [..., I]."""
    a_IR, b_OR, scale, base = layer.lora_a, layer.lora_b, layer.lora_scale, layer.base_forward
    if not isinstance(a_IR, DTensor):
        return base(x) + F.linear(x @ a_IR * scale, b_OR)
    mesh, (placement,) = layer.weight.device_mesh, layer.weight.placements
    inputs, input_gradient, output, _ = placements_of_products(placement, x.dim() - 1)
    local = x.redistribute(placements=[inputs]).to_local(grad_placements=[input_gradient])
    own = F.linear(local @ _local(a_IR) * scale, _local(b_OR))
    return base(x) + DTensor.from_local(own, mesh, [output], run_check=False)


def _local(factor: DTensor) -> Tensor:
    """Return this rank's shard of a factor. The gradient of a replicated factor is a partial sum on each rank."""
    return factor.to_local(grad_placements=[Partial() if p.is_replicate() else p for p in factor.placements])
