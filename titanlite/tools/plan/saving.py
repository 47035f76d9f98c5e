"""Compute how large a checkpoint is and how long a save takes."""

import math
from typing import NamedTuple

import torch

from titanlite import build
from titanlite.config import Config
from titanlite.config.schema import QUANTIZED_STATES
from titanlite.metrics.devices import Device
from titanlite.techniques.lora import Adapters
from titanlite.tools.plan.efficiency import ANY


class Saving(NamedTuple):
    """The size of a checkpoint and the times of a save."""

    size: int  # bytes of the weights, the optimizer states and, with ema, the averaged weights
    copy_seconds: float  # seconds until each rank's shards are in host memory
    write_seconds: tuple[float, ...]  # seconds until each node has written its shards: expected, least and most
    pinned: float  # bytes of node memory that the first async save pins; a tensor's bytes round up to a power of two


def saving(config: Config, device: Device, world_size: int, devices_per_node: int) -> Saving:
    """Return the size of a run's checkpoint and the times of its save. Replicas of a shard each save a part of it, so
    every rank saves the same number of bytes. Quantized optimizer states are saved in float32."""
    dtype, state = config.training.dtype, config.optimizer.state_dtype
    state = dtype if state == "auto" else "float32" if state in QUANTIZED_STATES else state
    model, parallelism = build.meta_model(config), config.parallelism
    if config.lora.rank:  # a checkpoint of LoRA contains only adapters
        Adapters(model, config.lora, lambda: model).shard_weights(None, None)
    sizes = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    n_parameters, n_states = sum(sizes), 2 * sum(sizes)
    if config.optimizer.name == "Muon":
        from titanlite.tools.plan.muon_step import shapes_of_matrices  # late import: most plans do without Muon

        n_states -= sum(math.prod(shape) for shape in shapes_of_matrices(config, None))
    size = n_parameters * getattr(torch, dtype).itemsize + n_states * getattr(torch, state).itemsize
    size += n_parameters * max(4, getattr(torch, dtype).itemsize) * (config.ema.decay > 0)
    on_host = device.kind == "cpu" or config.training.enable_cpu_offload
    link = device.host_bandwidth * (1.0 if device.measured else ANY.host_link.expected)
    nodes = math.ceil(world_size / devices_per_node)
    rates = ANY.storage.expected, ANY.storage.high, ANY.storage.low
    write = tuple(size / nodes / (device.storage_bandwidth or rate) for rate in rates)
    shards = world_size / parallelism.pipeline_parallel_degree / parallelism.data_parallel_replicate_degree
    blocks = sum(2 ** math.ceil(math.log2(n / shards)) for n in sizes) * shards / n_parameters  # pinned / saved bytes
    return Saving(size, 0.0 if on_host else size / world_size / link, write, 0.0 if on_host else size / nodes * blocks)
