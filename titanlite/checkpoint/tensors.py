"""The tensors of a checkpoint: weights, optimizer states and random states, and which rank saves which slice."""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from titanlite.config.schema import LORA_FACTORS
from titanlite.parallel.shards import local_shard, n_replicas, shard_slice

Slices = dict[str, tuple[Tensor, tuple[int, ...], tuple[int, ...]]]
"""The slices that a rank saves, by tensor name: the slice, its offset in the full tensor, and the full shape."""


def slices_to_save(tensors: Mapping[str, Tensor]) -> Slices:
    """Return the slices that this rank saves. Ranks with the same shards take turns, so that each saves some shards."""
    slices: Slices = {}
    for index, (name, tensor) in enumerate(tensors.items()):
        offset, size = shard_slice(tensor)
        is_sharded = isinstance(tensor, DTensor)
        saves = _replica(tensor) == index % n_replicas(tensor) if is_sharded else is_on_first_rank(name, tensors)
        if saves and 0 not in size:
            slices[name] = plain_shard(tensor), offset, tuple(tensor.shape)
    return slices


def plain_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard as a plain tensor that shares its memory. Subclasses such as torchao's are unwrapped."""
    if type(local := local_shard(tensor).detach()) is Tensor:
        return local
    inner = [getattr(local, name) for name in local.__tensor_flatten__()[0]]
    return next(each for each in inner if each is not None and each.shape == local.shape)


def _replica(tensor: DTensor) -> int:
    """Return the index of this rank among the ranks that have the same shard."""
    number = 0
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            number = number * tensor.device_mesh.size(axis) + tensor.device_mesh.get_local_rank(axis)
    return number


def is_on_first_rank(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether this rank is the first of the ranks that have a tensor or its shards. An optimizer's plain scalar,
    such as a step count, belongs to the ranks of its parameter."""
    if name.startswith("optimizer."):
        name = "model." + name.removeprefix("optimizer.state.").rpartition(".")[0]
    tensor = tensors[name]
    return not isinstance(tensor, DTensor) or not any(tensor.device_mesh.get_coordinate())


def model_tensors(model: nn.Module, *, of_base: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a model that a checkpoint stores: all tensors or, if the model has LoRA adapters, the
    adapters only. With `of_base`, return the tensors of the base model instead: all tensors except adapters."""
    tensors = named_tensors(model)
    adapters = {name for name in tensors if name.endswith(LORA_FACTORS)}
    stored = tensors.keys() - adapters if of_base else adapters or tensors.keys()
    return {f"model.{name}": tensor for name, tensor in tensors.items() if name in stored}


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return, by name, a model's parameters and the routers' buffers. The tensors share the model's memory."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        for key in ("balance_bias", "load") if name.endswith(".router") else ():
            buffer = getattr(module, key)
            if buffer is not None and isinstance(module.weight, DTensor):
                mesh = module.weight.device_mesh  # the router's buffer is replicated over the weight's mesh
                buffer = DTensor.from_local(buffer, mesh, [Replicate()] * mesh.ndim, run_check=False)
            if buffer is not None:
                tensors[f"{name}.{key}"] = buffer
    return tensors


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer states; a state's name is "optimizer." and its key in DCP's flattened state dict. Before the
    first step, create the states. Learning rates and betas are left out: a resumed run takes them from its config."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict  # import takes 0.5 s

    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    return {f"optimizer.{name}": value for name, value in state.items() if name.startswith("state.")}


def dequantized(state: Tensor) -> Tensor:
    """Return an optimizer state in float32 if it is quantized, otherwise unchanged. Quantization blocks are parts of a
    rank's shard, so quantized states would not fit another layout."""
    if type(local := local_shard(state)) is Tensor:
        return state
    wide = local.dequantize().to(torch.float32)
    if not isinstance(state, DTensor):
        return wide
    mesh, placements = state.device_mesh, state.placements
    return DTensor.from_local(wide, mesh, placements, run_check=False, shape=state.shape, stride=state.stride())


def load_quantized(state: Tensor, values: Tensor, store: Callable[..., None], *, is_square: bool) -> None:
    """Quantize `values`, float32, and write them into this rank's shard of an optimizer state. `store` is the
    optimizer's quantizing function. `is_square`: the state is exp_avg_sq, not exp_avg."""
    values = local_shard(values)
    store(local_shard(state), values, torch.tensor(True, device=values.device), is_square=is_square)


def random_states() -> dict[str, Tensor]:
    """Return the states of this rank's random generators by name. The names contain the rank's number."""
    rank = dist.get_rank()
    states = {f"random.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"random.cuda.{rank}"] = torch.cuda.get_rng_state()
    return states


def plain_tensors(tensors: dict[str, Tensor]) -> list[Tensor]:
    """Return this rank's shards as plain tensors, which share the shards' memory."""
    return [plain for tensor in tensors.values() for plain in _plain(local_shard(tensor))]


def _plain(tensor: Tensor) -> list[Tensor]:
    """Return a tensor, or the tensors that a quantized optimizer state consists of."""
    if type(tensor) in (Tensor, nn.Parameter):
        return [tensor.detach()]
    return [inner for name in tensor.__tensor_flatten__()[0] for inner in _plain(getattr(tensor, name))]
