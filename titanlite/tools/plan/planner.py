"""Plan a config: dry-run each pipeline stage, and compose a step's memory and time on the config's plan.device."""

import contextlib
import logging
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from titanlite import build
from titanlite.config import Config, Launch, check
from titanlite.config.keys import ASYNC_TENSOR
from titanlite.config.launch import ATTENTION_BACKENDS_ON_CUDA, quantity
from titanlite.config.loader import ConfigError, LoadedConfig
from titanlite.config.schema import stage_modules
from titanlite.config.stage_split import module_names, rank_of_stage
from titanlite.launch.launcher import ranks_wanted
from titanlite.launch.process import end_after
from titanlite.launch.progress_bar import progress_bar
from titanlite.metrics.devices import Device, find_device
from titanlite.metrics.flops import flops_per_token
from titanlite.tools.forkserver import forkserver
from titanlite.tools.plan.cost_model import GROUPS, CostModel
from titanlite.tools.plan.dry_run import DryRun, checkpointing_period, dry_run
from titanlite.tools.plan.efficiency import ANY
from titanlite.tools.plan.memory_timeline import Bytes, Point
from titanlite.tools.plan.result import Plan, RankPlan, Spread, devices_per_node
from titanlite.tools.plan.schedule import all_actions
from titanlite.tools.plan.segments import layers_of
from titanlite.tools.plan.step import StageCost, StepTime, memory_points, step_time

# CONTEXT_BYTES: CUDA's context, kernels and cuBLAS workspaces, by nvidia-smi; GROUP_BYTES: each NCCL process group.
CONTEXT_BYTES, GROUP_BYTES = int(0.6 * 2**30), int(0.25 * 2**30)
FRAGMENTATION = 0.03  # share of peak memory that CUDA's caching allocator loses, with expandable segments


def resolve(loaded: LoadedConfig[Config], world_size: int | None = None) -> tuple[Config, Device, int]:
    """Return the config as train.py resolves it on plan.device, the device, and the number of ranks: `world_size` or,
    if None, the product of the degrees (the devices of a node if a degree is -1). Raises ConfigError with the problems
    that train.py reports, and for matrix products or async TP that the plan cannot model on the device."""
    device = find_device(loaded.config.plan.device)
    per_node = devices_per_node(loaded.config, device)
    n_devices = 0 if device.kind == "cpu" else per_node
    world = world_size or ranks_wanted(loaded, os.environ, n_devices)
    try:
        config = check(loaded, Launch(0, 0, world, min(world, per_node), n_devices))
    except ConfigError as error:
        note = "" if world_size else assumption(loaded.config, world)
        raise ConfigError([f"{problem}; {note}" if note else problem for problem in error.problems]) from None
    _check_device(config, device, min(world, per_node))
    if config.fault_tolerance.enable:  # the plan covers a single replica group
        size = config.training.global_batch_size // config.fault_tolerance.n_groups
        config = config.replace(training__global_batch_size=size, fault_tolerance__group_size=1)
    return config, device, world


def assumption(config: Config, world: int) -> str:
    """Return a line with the assumed number of devices and the option that sets it; "" if the config sets it."""
    if config.parallelism.data_parallel_shard_degree != -1:
        return ""
    return f"planned for {quantity(world, 'device')}; set parallelism.data_parallel_shard_degree for another number"


def make_plan(
    loaded: LoadedConfig[Config],
    *,
    world_size: int | None = None,
    cache: dict[str, list[DryRun]] | None = None,
    **options: bool,
) -> Plan:
    """Plan a run; see `resolve` for `world_size`. `cache` collects dry runs: plans that differ only in the device share
    them. `options` are arguments of `_dry_run_stages`. Raises ConfigError as `resolve` does."""
    config, device, world = resolve(loaded, world_size)
    parallelism, degree = config.parallelism, config.parallelism.pipeline_parallel_degree
    names = stage_modules(config) if degree > 1 else [module_names(config.model.n_layers)]
    schedule = parallelism.pipeline_parallel_schedule
    ranks = rank_of_stage(schedule, degree, len(names))
    cache, key = {} if cache is None else cache, config.replace(plan__device=device.kind).toml()
    dry_runs = cache[key] = cache.get(key) or _dry_run_stages(config, names, ranks, **options)
    actions = all_actions(schedule, degree, len(names), config.n_microbatches) if degree > 1 else []
    per_node = devices_per_node(config, device)

    dtype, reduced = (getattr(torch, name) for name in (config.training.dtype, config.training.mixed_precision_reduce))
    offloads = config.training.enable_cpu_offload and device.kind == "gpu"
    rates = {"offload": dtype.itemsize / reduced.itemsize if offloads else None, "cudnn": takes_cudnn(config, device)}
    rates |= {"name": Path(config.plan.device).stem, "n_devices": world}

    def time_of(changed: str = "", *, faster: bool = False) -> StepTime:
        models = (CostModel(device, run.axes, per_node, changed, faster=faster, **rates) for run in dry_runs)
        costs = [StageCost(config, *pair) for pair in zip(dry_runs, models, strict=True)]
        return step_time(config, costs, ranks, actions)

    step, points = time_of(), memory_points(config, dry_runs, ranks, actions)
    degrees = [degree, parallelism.data_parallel_replicate_degree, parallelism.tensor_parallel_degree]
    shards = parallelism.data_parallel_shard_degree * parallelism.context_parallel_degree
    degrees += [parallelism.ring_degree, parallelism.context_parallel_ulysses_degree, shards]
    if (expert := parallelism.expert_parallel_degree) > 1:  # axes of expert weights have separate groups (mesh.py)
        degrees += [expert, shards * parallelism.tensor_parallel_degree // expert]
    sizes, overhead = build.parameter_sizes(config), overhead_bytes(device, degrees)
    of_tp = [size // count for (_, name), (count, size) in step.cost.communication.items() if "overlapped" in name]
    overhead |= {"symmetric memory": 2 * max(of_tp) // parallelism.tensor_parallel_degree} if of_tp else {}
    return Plan(
        config=config,
        device=device,
        world_size=world,
        ranks=[_rank_plan(config, rank, points, overhead) for rank, points in enumerate(points)],
        spans=step.spans,
        cost=step.cost,
        step_seconds=step.seconds,
        spread=_spread(time_of, step.seconds, device),
        update_seconds=step.update_seconds,
        flops_per_token=flops_per_token(sizes, config.model, config.training.seq_len),
        n_parameters=sum(sizes.values()),
        axes=dict(dry_runs[0].axes.values()),
    )


def _spread(time_of: Callable[..., StepTime], seconds: float, device: Device) -> Spread:
    """Return by how many seconds the uncertainty of each group of rates, and of the program, may change a step."""
    spread = {name: (time_of(name, faster=True).seconds - seconds, time_of(name).seconds - seconds) for name in GROUPS}
    if device.kind == "gpu" and not device.measured:
        spread["program"] = seconds * (ANY.program.low - 1), seconds * (ANY.program.high - 1)
    return spread


def _check_device(config: Config, device: Device, per_node: int) -> None:
    float8, degree = config.float8, config.parallelism.tensor_parallel_degree
    if config.parallelism.enable_async_tensor_parallel and per_node % degree:
        raise ConfigError([f"{ASYNC_TENSOR} = true: {degree} ranks on several nodes share no memory; set false"])
    if config.int8.enable:
        raise ConfigError(["int8.enable = true: the plan has no rates of INT8 products; set false"])
    if float8.enable and float8.recipe == "mxfp8" and not float8.emulate and device.architecture != "blackwell":
        problem = f'float8.recipe = "mxfp8": {config.plan.device} has no MXFP8 products, which need compute capability '
        raise ConfigError([problem + "10.0 (Blackwell); set float8.emulate = true, another recipe or another device"])


def takes_cudnn(config: Config, device: Device) -> bool:
    """Return whether cuDNN computes attention. With the backend "auto", torch 2.11 and later choose cuDNN on compute
    capability 9.x and 10.x, in 16 bits, unless the config asks for determinism (sdp_utils.cpp:
    check_prefer_cudnn_attention, can_use_cudnn_attention). cuDNN's largest head_dim is that of torch 2.11 to 2.13."""
    backend, head_dim = config.training.attention_backend, config.model.head_dim
    widest = {"hopper": 256, "blackwell": 128}.get(device.architecture, 0) if device.kind == "gpu" else 0
    fits = config.training.mixed_precision_param in ("bfloat16", "float16") and head_dim <= widest and not head_dim % 8
    return backend == "cudnn" or (backend == "auto" and fits and not config.debug.deterministic)


def config_for_dry_run(config: Config) -> Config:
    """Return a config that fake tensors can run, with the allocations and the work of the original. Blocks run
    uncompiled; fusion.py models the compiler's effect. As fake tensors are on the CPU, "auto" becomes a CUDA attention
    backend; cuDNN's backend saves the same tensors. CPU offload is off: FSDP gathers weights on the device anyway."""
    backend = config.training.attention_backend
    if backend == "auto" and find_device(config.plan.device).kind == "gpu":
        backend = ATTENTION_BACKENDS_ON_CUDA[config.training.mixed_precision_param][0]
    return config.replace(
        training__attention_backend=backend,
        training__enable_cpu_offload=False,
        optimizer__enable_cpu_offload=False,
        compile__enable=False,
    )


def _dry_run_stages(
    config: Config, stages: list[list[str]], ranks: list[int], *, fold: bool = True, show_progress: bool = False
) -> list[DryRun]:
    """Return each stage's dry run; stages of one kind share a dry run. Each dry run has its own process, because torch
    keeps process groups until the process ends. fold=False runs all layers, for a test of folding."""
    fused = config.compile.components if config.compile.enable else ()
    config = config_for_dry_run(config)
    kinds, futures = [kind_of_stage(config, names) for names in stages], dict[tuple, Future[DryRun]]()
    total = len({*kinds})
    with (
        process_pool(total, preload="titanlite.tools.plan.dry_run", single_use=True) as pool,
        progress_bar("dry run", total=total, unit="kinds of stages", enabled=show_progress) as advance,
    ):
        for number, kind in enumerate(kinds):
            if kind not in futures:
                options = {"pipeline_rank": ranks[number], "fused": fused, "fold": fold}
                futures[kind] = pool.submit(dry_run, config, stages[number], number, **options)
        for _ in as_completed(futures.values()):
            advance(1)
    return [futures[kind].result() for kind in kinds]


def kind_of_stage(config: Config, names: list[str]) -> tuple:
    """Return a key that is equal for stages with equal dry runs: modules other than layers, each layer's experts and
    window, the first layer's place in the pattern of activation checkpointing. With own.block, all keys differ."""
    layers = layers_of(names)
    if config.own.block:
        return tuple(names)
    numbers = [int(name.split(".")[1]) for name in layers]
    kinds = tuple((config.model.has_experts(n), config.model.of_layer(n).sliding_window) for n in numbers)
    return tuple(name for name in names if name not in layers), kinds, numbers[0] % checkpointing_period(config)


@contextlib.contextmanager
def process_pool(n: int, *, preload: str, single_use: bool = False) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of at most n processes, and at most one per core, that start with the module `preload` imported.
    With `single_use`, each process runs only one of n tasks. An error or Ctrl-C in the caller kills the processes."""
    workers, options = min(n, os.cpu_count() or 1), {}
    if single_use and sys.version_info >= (3, 11):
        options = {"max_tasks_per_child": 1}
    elif single_use:  # Python 3.10 cannot limit the tasks of a process, so start one process per task
        workers = n
    with ProcessPoolExecutor(workers, forkserver(preload), initializer=start_worker, **options) as pool:
        try:
            yield pool
        except BaseException:  # the pool's exit would wait for running tasks, so kill them
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.kill()
            raise


def start_worker() -> None:
    """Prepare a process of a pool, which ends with the main process and hides warnings that concern real runs."""
    end_after(multiprocessing.parent_process().join, "main process")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def overhead_bytes(device: Device, degrees: Iterable[int]) -> dict[str, int]:
    """Return the bytes of non-tensor overhead except fragmentation, which depends on the peak. All ranks together form
    one process group, and each axis with a degree above 1 adds a group."""
    if device.kind == "cpu":
        return {}
    groups = 1 + sum(degree > 1 for degree in degrees)
    return {"CUDA context": CONTEXT_BYTES, f"NCCL buffers of {groups} groups": groups * GROUP_BYTES}


def _rank_plan(config: Config, rank: int, points: list[Point], overhead: dict[str, int]) -> RankPlan:
    """Return a rank's plan, with offloaded bytes moved to host memory and fragmentation added to the overhead."""
    offloaded: Bytes = {}
    if config.training.enable_cpu_offload or config.optimizer.enable_cpu_offload:
        kinds = ("parameters", "gradients", "optimizer") if config.training.enable_cpu_offload else ("optimizer",)
        offloaded = {kind: max(point.bytes[kind] for point in points) for kind in kinds}
        points = [Point(point.label, {**point.bytes, **dict.fromkeys(kinds, 0)}) for point in points]
    fragmentation = {"fragmentation": round(FRAGMENTATION * max(point.total for point in points))} if overhead else {}
    return RankPlan(rank, points, offloaded, {**overhead, **fragmentation})
