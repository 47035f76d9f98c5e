"""The ranks and devices that a run is started with, and the rules between them and a config."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import os
import re
from collections.abc import Mapping

from titanlite.config.loader import ConfigError, LoadedConfig, Rejections, show
from titanlite.config.schema import Config, Parallelism
from titanlite.config.stage_split import SPLIT_BACKWARD, V_SHAPED


@dataclasses.dataclass(frozen=True)
class Launch:
    """The ranks and devices that a run was started with."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    n_devices: int
    """Accelerators that this host has for its ranks; 0: the run is on CPUs."""

    @classmethod
    def from_environment(cls, n_devices: int) -> Launch:
        """torchrun's variables; without them, one rank.

        Raises:
            ConfigError: if one of them is no number.
        """
        variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
        return cls(*(count_from_environment(os.environ, name, least) for name, least in variables.items()), n_devices)


def count_from_environment(environment: Mapping[str, str], name: str, least: int) -> int:
    """A count in an environment variable; where it is unset or empty, the least it can be."""
    text = environment.get(name) or str(least)
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least:
        raise ConfigError([f"environment: {name} = {show(text)}: expected a whole number at least {least}"])
    return int(text)


def plan_command(file: str) -> str:
    return f"titanlite plan {file} tells what it needs and how fast it will be"


def ranks_in_words(number: int) -> str:
    return f"{number} rank" if number == 1 else f"{number} ranks"


def check(loaded: LoadedConfig[Config], launch: Launch) -> Config:
    """Hold a config against a launch and fill in what depends on it.

    Returns:
        The config with the shard degree, the global batch size, the schedule's horizon and the precisions resolved.

    Raises:
        ConfigError: with every problem found, the numbers, and what to do.
    """
    config, reject, world, problems = loaded.config, Rejections(), launch.world_size, []
    parallelism, training = config.parallelism, config.training
    if launch.n_devices and launch.local_world_size > launch.n_devices:
        devices = f"{launch.n_devices} {'device' if launch.n_devices == 1 else 'devices'}"
        problems.append(
            f"{loaded.file}: {ranks_in_words(launch.local_world_size)} on this host, which has {devices}; start fewer "
            f"(smaller degrees, or NGPU), or use more hosts (NNODES); {plan_command(loaded.file)}"
        )

    replicate, shard = parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree
    others = other_degrees(parallelism)
    product = math.prod(others.values())
    if shard == -1:
        shard = max(world // product, 1)
        if world % product:
            degrees = {name: degree for name, degree in others.items() if degree > 1}
            ((name, _),) = [*degrees.items()][:1]
            reject(
                f"parallelism.{name}",
                f"expected a divisor of the {ranks_in_words(world)} that the launch has; start a multiple of {product}"
                if len(degrees) == 1
                else f"{_product(parallelism, '')} needs a multiple of {product} ranks, and the launch has {world}",
            )
    elif product * shard != world:
        reject(
            "parallelism.data_parallel_shard_degree",
            f"{_product(parallelism, f' x shard {shard}')} needs {ranks_in_words(product * shard)}, and the launch has {world};"
            f" start {product * shard} (./run_train.sh does, without NGPU), or set the degrees to the ranks there are",
        )
    data_ranks, shards = replicate * shard, shard * parallelism.context_parallel_degree
    group = parallelism.fsdp_reshard_after_forward
    if isinstance(group, int) and (shards % group or group >= shards):
        choices = ['"default"', '"always"', '"never"', *(str(size) for size in range(2, shards) if shards % size == 0)]
        reject(
            "parallelism.fsdp_reshard_after_forward",
            f"expected one of {', '.join(choices)} for {shards} {'shard' if shards == 1 else 'shards'}",
        )
    microstep = training.local_batch_size * data_ranks
    global_batch_size = microstep if training.global_batch_size == -1 else training.global_batch_size
    if global_batch_size % microstep:
        name = "ranks" if data_ranks == world else "data-parallel ranks"
        reject(
            "training.global_batch_size",
            f"expected a multiple of local_batch_size x {name} = {training.local_batch_size} x {data_ranks} = "
            f"{microstep}",
        )
    if training.streaming and training.streams % data_ranks:
        reject(
            "training.streams",
            f"expected a multiple of the data-parallel degree {data_ranks}, so that each rank has whole streams",
        )
    param, reduce = training.mixed_precision_param, training.mixed_precision_reduce
    if param == "auto":
        param = "bfloat16" if launch.n_devices and training.dtype == "float32" else training.dtype
    if reduce == "auto":
        reduce = "float64" if training.dtype == "float64" else "float32"
    _device_rules(config, launch, param, reject)
    if config.profiling.enable_memory_snapshot and not launch.n_devices:
        reject("profiling.enable_memory_snapshot", "needs CUDA, and this run is on a CPU; set false")
    problems += loaded.lines(reject)
    if problems:
        raise ConfigError(problems)

    reshard, kernel = parallelism.fsdp_reshard_after_forward, training.attention_backend
    if reshard == "default":
        reshard = "never" if parallelism.pipeline_parallel_degree > 1 else "always"
    if kernel == "auto" and (parallelism.context_parallel_degree > 1 or training.document_mask):
        kernel = ATTENTION_BACKENDS_ON_CUDA[param][0] if launch.n_devices else "cpu"
    horizon = config.lr_scheduler.total_steps
    return config.replace(
        parallelism__data_parallel_shard_degree=shard,
        parallelism__fsdp_reshard_after_forward=reshard,
        parallelism__context_parallel_ulysses_degree=parallelism.context_parallel_degree // parallelism.ring_degree,
        parallelism__pipeline_parallel_stages_per_rank=parallelism.n_stages // parallelism.pipeline_parallel_degree,
        training__global_batch_size=global_batch_size,
        training__attention_backend=kernel,
        training__mixed_precision_param=param,
        training__mixed_precision_reduce=reduce,
        lr_scheduler__total_steps=training.steps if horizon == -1 else horizon,
    )


def other_degrees(parallelism: Parallelism) -> dict[str, int]:
    """All degrees but the shards'."""
    names = ("pipeline_parallel_degree", "data_parallel_replicate_degree", "context_parallel_degree")
    return {name: getattr(parallelism, name) for name in (*names, "tensor_parallel_degree")}


def _product(parallelism: Parallelism, shard: str) -> str:
    """The degrees that multiply to the number of ranks, in words; those of 1 but replicas' are left out."""
    pipeline, replicate, context, tensor = other_degrees(parallelism).values()
    words = [f"pipeline {pipeline}"] if pipeline > 1 else []
    words.append(f"replicate {replicate}{shard}")
    words += [f"{name} {degree}" for name, degree in (("context", context), ("tensor", tensor)) if degree > 1]
    return " x ".join(words)


ATTENTION_BACKENDS_ON_CUDA = {
    "bfloat16": ("flash", "cudnn", "efficient", "math"),
    "float16": ("flash", "cudnn", "efficient", "math"),
    "float32": ("efficient", "math"),
    "float64": ("math",),
}
"""By the type that the model computes in, the default first."""


def _device_rules(config: Config, launch: Launch, param: str, reject: Rejections) -> None:
    """What depends on the kind of device and on torch's version. `param`: the type that the model computes in."""
    parallelism, kernel = config.parallelism, config.training.attention_backend
    choices = ("auto", *(ATTENTION_BACKENDS_ON_CUDA[param] if launch.n_devices else ("cpu", "math")))
    if kernel not in choices:
        where = f"CUDA in {param}" if launch.n_devices else "a CPU"
        names = ", ".join(show(choice) for choice in choices)
        reject("training.attention_backend", f"expected one of {names} on {where}")
    if parallelism.enable_async_tensor_parallel and parallelism.tensor_parallel_degree > 1 and not launch.n_devices:
        reject("parallelism.enable_async_tensor_parallel", "needs CUDA, and this run is on a CPU; set false")
    if config.float8.enable and not config.float8.emulate and not launch.n_devices:
        reject("float8.enable", "needs CUDA, and this run is on a CPU; set float8.emulate = true, or this to false")
    elif config.float8.enable and not config.float8.emulate and param != "bfloat16":
        why = f"its products give bfloat16, and the model computes in {param}; set float8.emulate = true, or false here"
        reject("float8.enable", why)
    version = tuple(int(part) for part in importlib.metadata.version("torch").split(".")[:2])
    schedule = parallelism.pipeline_parallel_schedule
    if parallelism.pipeline_parallel_degree > 1 and schedule in V_SHAPED and not launch.n_devices and version < (2, 12):
        reject(
            "parallelism.pipeline_parallel_schedule",
            f"torch {version[0]}.{version[1]} lets a V-shaped schedule's rank send to itself, which gloo cannot; use "
            'a newer torch, or "InterleavedZeroBubble"',
        )
    budget = config.activation_checkpoint.mode == "memory_budget"
    if version == (2, 12) and budget and parallelism.tensor_parallel_degree > 1:
        why = "torch 2.12 cannot weigh the graphs of tensor parallel; use another torch, or another mode"
        reject("activation_checkpoint.mode", why, "parallelism.tensor_parallel_degree")
    if version < (2, 13) and parallelism.pipeline_parallel_degree > 1 and schedule in SPLIT_BACKWARD:
        users = {"float8.enable": config.float8.enable, "training.loss_chunks": config.training.loss_chunks > 1}
        for key in (key for key, used in users.items() if used):
            why = f"torch {version[0]}.{version[1]} fails at its backward in halves under {show(schedule)}; "
            reject(key, why + "use torch 2.13, or another schedule", "parallelism.pipeline_parallel_schedule")
