"""LoRA (low-rank adaptation, arXiv:2106.09685), for fine-tuning: weights are frozen, and targeted linear layers, or
routed experts, compute W x + (alpha / R) B A x. Only the adapters' factors A and B have gradients and optimizer states.

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
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from titanlite.config import ConfigError
from titanlite.config.loader import show
from titanlite.config.schema import LORA_FACTORS, Lora
from titanlite.model import Llama
from titanlite.parallel.own_rules import RunsUncompiled
from titanlite.techniques.low_precision import placements_of_products
from titanlite.techniques.moe.layer import Experts
from titanlite.techniques.moe.parallel import local_weight


class Adapters(nn.Module):
    """Adds the adapters of a model or a pipeline stage, and freezes all other weights. Adapters is a stage's last
    module and modules are sharded in order, so its `shard_weights` (parallel/own_rules.py) runs after W is sharded."""

    def __init__(self, stage: Llama, lora: Lora, model: Callable[[], Llama]):
        """Check lora.targets; `shard_weights` will add adapters to `stage`. `model()` returns the full model. Raises
        ConfigError for a target that no layer has or that is not linear, and for a stage without a target."""
        super().__init__()
        names = _targets(stage, lora)
        self.lora, self.full_model, self.names = lora, model, sorted(set().union(*names.values()))
        self.stage = (stage,)  # a tuple hides the stage from torch, which would register it as a submodule: a cycle
        if not all(names.values()):  # layers of a target may be in another pipeline stage
            full = model()
            if missing := [target for target, found in _targets(full, lora).items() if not found]:
                layers = {"experts" for name, each in _layers(full) if isinstance(each, nn.Parameter)}
                layers |= {name.rpartition(".")[2] for name, each in _layers(full) if isinstance(each, nn.Linear)}
                expected = f"expected names of linear layers: {', '.join(sorted(layers))} (wq is transformers' q_proj, "
                expected += "w1 gate_proj, w2 down_proj, w3 up_proj)"
                raise ConfigError([f"lora.targets: {show(each)}: no layer has it; {expected}" for each in missing])
        if not self.names:
            stages = "a pipeline stage has none of these layers; set targets that each stage has, or fewer stages"
            raise ConfigError([f"lora.targets = {show(lora.targets)}: {stages}"])

    def n_trained(self) -> int:
        """Return the number of elements of all adapters of the full model."""
        model = self.full_model()
        Adapters(model, self.lora, self.full_model).shard_weights(None, None)
        return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    def shard_weights(self, tensor: DeviceMesh | None, expert: DeviceMesh | None) -> None:
        """Add the adapters, sharded like their layers, and freeze all other weights in lora.base_dtype."""
        (stage,) = self.stage
        for name in self.names:
            parent, _, weight = name.rpartition(".")
            if isinstance(experts := stage.get_submodule(parent), Experts):
                mixture, adapter = stage.get_submodule(parent.removesuffix(".experts")), AdapterOfExperts()
                add_factors(adapter, getattr(experts, weight), self.lora)
                mixture.add_adapter(weight, adapter, expert)
            else:
                layer = stage.get_submodule(name)
                add_factors(layer, layer.weight, self.lora)
                layer.__class__ = _adapted_class(type(layer))
        for module in stage.modules():
            for key, parameter in list(module.named_parameters(recurse=False)):
                if key not in LORA_FACTORS:
                    base = parameter.detach()
                    base = base if self.lora.base_dtype == "auto" else base.to(getattr(torch, self.lora.base_dtype))
                    module.register_parameter(key, nn.Parameter(base, requires_grad=False))
        stage.tie()


def _layers(model: Llama) -> Iterator[tuple[str, nn.Module | nn.Parameter]]:
    """Yield each module of the blocks with its name; for an Experts module, yield its weights w1, w2 and w3 instead."""
    for layer, block in model.layers.items():
        for name, module in block.named_modules(prefix=f"layers.{layer}"):
            if isinstance(module, Experts):
                yield from ((f"{name}.{key}", getattr(module, key)) for key in ("w1", "w2", "w3"))
            elif module is not block and not isinstance(module, nn.ModuleDict):
                yield name, module


def _is_target(target: str, name: str, layer: nn.Module | nn.Parameter) -> bool:
    """Return whether a target is the end of a layer's name. Experts match only if the target contains "experts"."""
    if isinstance(layer, nn.Parameter):
        return "experts" in target and any(f".{each}".endswith(f".{target}") for each in (name, name[: -len(".w1")]))
    return f".{name}".endswith(f".{target}")


def _targets(model: Llama, lora: Lora) -> dict[str, list[str]]:
    """Return the names of the modules that match each target. Raises ConfigError if such a module is not an nn.Linear,
    is a linear layer of a mixture but no routed expert, or is narrower than lora.rank."""
    mixtures = tuple(f"{name}." for name, module in _layers(model) if isinstance(module, RunsUncompiled))
    names: dict[str, list[str]] = {target: [] for target in lora.targets}
    for name, module in _layers(model):
        for target in (each for each in names if _is_target(each, name, module)):
            problem = f"lora.targets: {show(target)}: {name} is a {type(module).__name__}"
            is_stacked = isinstance(module, nn.Parameter)
            if not is_stacked and type(module).forward is not nn.Linear.forward:
                raise ConfigError([f"{problem}, whose forward is not affine; name linear layers, as wq or w1"])
            if not is_stacked and name.startswith(mixtures):
                raise ConfigError([f"{problem} of a mixture, which has adapters of routed experts only; name experts"])
            n_outputs, n_inputs = (module if is_stacked else module.weight).shape[-2:]
            if (most := min(n_inputs, n_outputs)) < lora.rank:
                problem = f"lora.rank = {lora.rank}: {name} has {n_inputs} inputs and {n_outputs} outputs"
                raise ConfigError([f"{problem}; expected at most {most}"])
            names[target].append(name)
    return names


def add_factors(module: nn.Module, weight: Tensor, lora: Lora) -> None:
    """Add the factors [..., I, R] and [..., O, R] of a weight [..., O, I], a plain tensor or a DTensor, to a module."""
    *stacked, n_outputs, n_inputs = weight.shape
    shapes = (*stacked, n_inputs, lora.rank), (*stacked, n_outputs, lora.rank)
    factors = [torch.empty(shape, dtype=weight.dtype, device="meta") for shape in shapes]
    if isinstance(weight, DTensor):
        (placement,), mesh = weight.placements, weight.device_mesh
        rows, columns = Shard(len(stacked)), Shard(len(stacked) + 1)
        a = rows if placement == columns else Replicate() if placement == rows else placement
        b = Replicate() if placement == columns else placement
        factors = [distribute_tensor(x, mesh, [p], src_data_rank=None) for x, p in zip(factors, (a, b), strict=True)]
    for name, factor in zip(LORA_FACTORS, factors, strict=True):
        module.register_parameter(name, nn.Parameter(factor))
    module.lora_scale = lora.alpha / lora.rank


class AdapterOfExperts(nn.Module):
    """One adapter per expert. The factors of all experts are stacked (`add_factors`), as their weights are."""

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return this rank's shards of (alpha / R) A, [E, R, I], and of B, [E, O, R]."""
        return local_weight(self.lora_a).transpose(1, 2) * self.lora_scale, local_weight(self.lora_b)


@functools.cache
def _adapted_class(kind: type[nn.Linear]) -> type[nn.Linear]:
    """Return a subclass of `kind` with adapters. All layers share it, so that torch.compile compiles it only once."""
    return type(kind.__name__, (kind,), {"forward": _adapted, "base_forward": kind.forward})


def _adapted(layer: Any, x: Tensor) -> Tensor:
    """Return the sum of a frozen layer's output and its adapter's output, [..., O], for x [..., I]."""
    a_IR, b_OR, scale, base = layer.lora_a, layer.lora_b, layer.lora_scale, layer.base_forward
    if not isinstance(a_IR, DTensor):
        return base(x) + F.linear(x @ a_IR * scale, b_OR)
    mesh, (placement,) = layer.weight.device_mesh, layer.weight.placements
    inputs, input_gradient, output, _ = placements_of_products(placement, x.dim() - 1)
    local = x.redistribute(placements=[inputs]).to_local(grad_placements=[input_gradient])
    own = F.linear(local @ local_weight(a_IR) * scale, local_weight(b_OR))
    return base(x) + DTensor.from_local(own, mesh, [output], run_check=False)
