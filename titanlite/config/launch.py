"""Rules between a config and a launch's ranks and devices, and the automatic values that depend on the launch."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
import resource
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from titanlite.config.keys import ASYNC_TENSOR, CONTEXT, EXPERT, GROUPS_ON, PIPELINE, REPLICATE, RESHARD, TENSOR
from titanlite.config.loader import ConfigError, LoadedConfig, Rejections, check_all, show, value_of
from titanlite.config.schema import Config, Optimizer
from titanlite.config.torch_versions import torch_version_rules
from titanlite.config.types import MOST_ITEMS, MOST_RANKS, MOST_TOKENS

ATTENTION_BACKENDS_ON_CUDA = {
    "bfloat16": ("flash", "cudnn", "efficient", "math"),
    "float16": ("flash", "cudnn", "efficient", "math"),
    "float32": ("efficient", "math"),
    "float64": ("math",),
}
"""The attention backends that support each data type of a model; the first backend is the default."""
LEAST_OPEN_FILES = 256
"""Minimum number of open files that a process needs: up to 64 shards of each token cache, and connections."""
MOST_CHUNKS = 4096  # upper bound on training.loss_chunks, since a rank computes chunks sequentially
CUDNN_SWITCH = "TORCH_CUDNN_SDPA_AVOID_RECOMPILE"


@dataclasses.dataclass(frozen=True)
class Launch:
    """The ranks and devices that a run was started with."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    n_devices: int  # accelerators of this node; 0: the run is on CPUs

    @classmethod
    def from_environment(cls, n_devices: int) -> Launch:
        """Read torchrun's variables; without them, the launch is one rank. Raises ConfigError for a wrong variable."""
        world_size = count_from_environment(os.environ, "WORLD_SIZE", 1)
        counts = {"RANK": (0, world_size - 1), "LOCAL_RANK": (0,), "WORLD_SIZE": (1,), "LOCAL_WORLD_SIZE": (1,)}
        return cls(*(count_from_environment(os.environ, name, *limits) for name, limits in counts.items()), n_devices)


def count_from_environment(environment: Mapping[str, str], name: str, least: int, most: float = math.inf) -> int:
    """Return the integer in an environment variable, or `least` if the variable is unset or empty."""
    text = environment.get(name) or str(least)
    if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most:
        limit = f" and <= {most}" if most < math.inf else ""
        raise ConfigError([f"environment: {name} = {show(text)}: expected an integer >= {least}{limit}"])
    return int(text)


def raise_open_file_limit(connections: int = 0) -> None:
    """Raise the limit on open files to the hard limit. Raises ConfigError if the hard limit is too low, since torch
    would hang. `connections` is the number of sockets that this process needs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS rejects the infinite hard limit that it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] < (least := LEAST_OPEN_FILES + connections):  # -1: no limit
        raise ConfigError([f"environment: ulimit -n = {hard}: expected at least {least} open files; raise the limit"])


def require_torchft() -> None:
    """Raise ConfigError if torchft or its lighthouse's address, which replica groups need, is missing."""
    problems = []
    if not importlib.util.find_spec("torchft"):
        problems.append(f'{GROUPS_ON} = true: torchft is not installed; pip install "titanlite[ft]", or set false')
    address = os.environ.get("TORCHFT_LIGHTHOUSE", "")
    if not re.fullmatch(r"https?://([\w.-]+|\[[0-9a-fA-F:.]+\])(:[0-9]{1,5})?/?", address):
        problem = f"environment: TORCHFT_LIGHTHOUSE = {show(address)}: expected the address of torchft's lighthouse"
        problems.append(f"{problem}, as in http://HOST:29510 ({GROUPS_ON} = true)")
    check_all(problems=problems)


def plan_command(file: str) -> str:
    return f"titanlite plan {file} predicts memory and step time"


def quantity(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def check(loaded: LoadedConfig[Config], launch: Launch) -> Config:
    """Check a config against a launch, and resolve its automatic values. Raises ConfigError with every problem."""
    reject, problems = Rejections(), []
    if launch.world_size > MOST_RANKS:
        raise ConfigError([f"{loaded.file}: {launch.world_size} ranks: expected at most {MOST_RANKS}; lower a degree"])
    if launch.n_devices and launch.local_world_size > launch.n_devices:
        ranks, devices = quantity(launch.local_world_size, "rank"), quantity(launch.n_devices, "device")
        problem = f"{ranks} on this node, which has {devices}; start fewer ranks (smaller degrees, or NGPU), or use"
        problems.append(f"{loaded.file}: {problem} more nodes (NNODES); {plan_command(loaded.file)}")
    on_cuda = launch.n_devices > 0
    config = resolve(loaded.config, _shard_degree(loaded.config, launch.world_size, reject), on_cuda=on_cuda)
    _rank_rules(config, launch.world_size, reject)
    _device_rules(config, on_cuda, reject)
    torch_version_rules(config, on_cuda, reject)
    check_all(problems=[*problems, *loaded.lines(reject)])
    return config


def _shard_degree(config: Config, world_size: int, reject: Rejections) -> int:
    """Return the degree of FSDP, with -1 resolved. Reject degrees whose product is not the world size."""
    shard, product = config.parallelism.data_parallel_shard_degree, config.parallelism.ranks_per_shard
    names = {PIPELINE: "pipeline", REPLICATE: "replicate", CONTEXT: "context", TENSOR: "tensor"}
    degrees = {key: f"{name} {value_of(config, key)}" for key, name in names.items() if value_of(config, key) > 1}
    words = " x ".join(degrees.values())
    if shard == -1 and world_size % product:
        message = f"{words} needs a multiple of {product} ranks, and the launch has {world_size}; start that many, or "
        reject(next(iter(degrees)), message + "change the degrees")
    elif shard != -1 and shard * product != world_size:
        words = " x ".join([*degrees.values(), f"shard {shard}"])
        message = f"{words} needs {quantity(product * shard, 'rank')}, and the launch has {world_size}; start "
        message += f"{product * shard} (titanlite train does, without NGPU), or set the degrees to the ranks there are"
        reject("parallelism.data_parallel_shard_degree", message)
    return shard if shard != -1 else max(world_size // product, 1)


def resolve(config: Config, shard_degree: int, *, on_cuda: bool) -> Config:
    """Return a config in which the values of this launch replace "auto" and -1."""
    training, parallelism = config.training, config.parallelism
    automatic = "bfloat16" if on_cuda and training.dtype == "float32" else training.dtype
    param = _or_automatic(training.mixed_precision_param, automatic)
    reduced = "float64" if training.dtype == "float64" else "float32"
    degree = parallelism.data_parallel_replicate_degree * shard_degree * config.fault_tolerance.n_groups
    shards = 1 if parallelism.disable_loss_parallel else parallelism.tensor_parallel_degree
    chunks = loss_chunks(config.tokens_of_forward, config.model.vocab_size / shards)
    resolved = config.replace(
        parallelism__data_parallel_shard_degree=shard_degree,
        parallelism__fsdp_reshard_after_forward=_reshard_after_forward(config, shard_degree, param),
        parallelism__context_parallel_ulysses_degree=parallelism.context_parallel_degree // parallelism.ring_degree,
        parallelism__pipeline_parallel_stages_per_rank=parallelism.n_stages // parallelism.pipeline_parallel_degree,
        optimizer__muon_dtype=_muon_dtype(config.optimizer, param),
        checkpoint__initial_load_path=config.initial_weights,
        training__global_batch_size=_or_automatic(training.global_batch_size, training.local_batch_size * degree),
        training__attention_backend=_attention_backend(config, param, on_cuda),
        training__loss_chunks=_or_automatic(training.loss_chunks, chunks),
        training__mixed_precision_param=param,
        training__mixed_precision_reduce=_or_automatic(training.mixed_precision_reduce, reduced),
    )
    return resolved if training.epochs else resolve_epochs(resolved)


def resolve_epochs(config: Config, sequences: Any = None) -> Config:
    """Return a config with the lengths of schedule and warmup, and with training.epochs, if set, converted to steps (an
    epoch has `sequences.n_sequences` sequences). Raises ConfigError if the epochs give too few or too many steps."""
    training, lr_scheduler, steps = config.training, config.lr_scheduler, config.training.steps
    if training.epochs:
        least = config.ema.start_step if config.ema.decay else 1
        total = int(Fraction(repr(training.epochs)) * sequences.n_sequences)  # repr makes 0.29 exactly 29/100
        steps = total // training.global_batch_size
        if not least <= steps <= MOST_ITEMS:
            problem = f"{total:,} sequences in steps of {training.global_batch_size} are {steps:,} steps"
            message = f"training.epochs = {training.epochs:g}: {problem}; expected {least:,} to {MOST_ITEMS:,}"
            raise ConfigError([f"{message}; set other epochs, or training.steps"])
    length, ratio = _or_automatic(lr_scheduler.total_steps, steps), lr_scheduler.warmup_ratio
    return config.replace(
        training__epochs=0.0,
        training__steps=steps,
        lr_scheduler__total_steps=length,
        lr_scheduler__warmup_steps=round(ratio * length) if ratio else lr_scheduler.warmup_steps,
        lr_scheduler__warmup_ratio=0.0,
    )


def _or_automatic(value: Any, automatic: Any) -> Any:
    return automatic if value in ("auto", -1) else value


def _muon_dtype(optimizer: Optimizer, param: str) -> str:
    automatic = "float32" if param == "float16" else param
    return _or_automatic(optimizer.muon_dtype, automatic) if optimizer.name == "Muon" else optimizer.muon_dtype


def _reshard_after_forward(config: Config, shard_degree: int, param: str) -> str | int:
    training, parallelism = config.training, config.parallelism
    if parallelism.fsdp_reshard_after_forward != "default":
        return parallelism.fsdp_reshard_after_forward
    # With one shard, FSDP's all-gather is at most a cast, without communication; with EP, experts may have more shards.
    one_shard = shard_degree * parallelism.context_parallel_degree == 1 and not training.enable_cpu_offload
    keeps = one_shard and (parallelism.expert_parallel_degree == 1 or param != training.dtype)
    return "never" if keeps or parallelism.pipeline_parallel_degree > 1 else "always"


def _attention_backend(config: Config, param: str, on_cuda: bool) -> str:
    training, ring_or_exchange = config.training, config.parallelism.context_parallel_degree > 1
    has_mask = training.document_mask or config.windowed or config.model.attention_sinks
    if training.attention_backend != "auto" or not (ring_or_exchange or has_mask):
        return training.attention_backend
    return ATTENTION_BACKENDS_ON_CUDA[param][0] if on_cuda else "cpu"


def loss_chunks(tokens: int, vocabulary: float) -> int:
    """Return into how many chunks the loss splits `tokens` tokens, so that each has at most 2 GiB of float32 logits.
    Chunks of equal size compile once, so up to twice the minimum is chosen. `vocabulary`: size of this rank's shard."""
    least = math.ceil(tokens * vocabulary * 4 / 2**31)
    return next((n for n in range(least, 2 * least) if tokens % n == 0), least)


def _rank_rules(config: Config, world_size: int, reject: Rejections) -> None:
    training, degree = config.training, config.parallelism.data_parallel_degree * config.fault_tolerance.n_groups
    shards = config.parallelism.data_parallel_shard_degree * config.parallelism.context_parallel_degree
    group = config.parallelism.fsdp_reshard_after_forward
    if isinstance(group, int) and (shards % group or group >= shards):
        sizes = [str(size) for size in range(2, shards) if shards % size == 0]
        choices = ", ".join(['"default"', '"always"', '"never"', *sizes])
        reject(RESHARD, f"expected one of {choices} for {quantity(shards, 'shard')}")
    if training.global_batch_size % (training.local_batch_size * degree):
        ranks = "ranks" if degree == world_size else "data-parallel ranks"
        product = f"{training.local_batch_size} x {degree} = {training.local_batch_size * degree}"
        reject("training.global_batch_size", f"expected a multiple of local_batch_size x {ranks} = {product}")
    if config.tokens_per_step > MOST_TOKENS:
        message = f"{config.tokens_per_step} tokens in a step: expected at most {MOST_TOKENS}, as float64 counts them"
        reject("training.global_batch_size", message)
    if training.loss_chunks > MOST_CHUNKS:
        message = f"{training.loss_chunks} loss chunks: expected at most {MOST_CHUNKS}, which have 2 GiB of logits each"
        reject("training.local_batch_size", f"{message}; set fewer sequences, or shorter ones")
    if training.streaming and training.streaming_shards % degree:
        message = f"expected a multiple of the data-parallel degree {degree}, so that no two ranks share a shard"
        reject("training.streaming_shards", message)
    ranks = shards * config.parallelism.tensor_parallel_degree
    if ranks % config.parallelism.expert_parallel_degree:
        message = f"expected a divisor of shard x context x tensor parallel = {ranks}, whose ranks have the experts"
        reject(EXPERT, message)


def _device_rules(config: Config, on_cuda: bool, reject: Rejections) -> None:
    parallelism, float8, param = config.parallelism, config.float8, config.training.mixed_precision_param
    backends = ("auto", *(ATTENTION_BACKENDS_ON_CUDA[param] if on_cuda else ("cpu", "math")))
    if config.training.attention_backend not in backends:
        device = f"CUDA in {param}" if on_cuda else "a CPU"
        reject("training.attention_backend", f"expected one of {', '.join(map(show, backends))} on {device}")
    if config.training.attention_backend == "cudnn":
        if config.training.document_mask or config.windowed or parallelism.ring_degree > 1:
            message = "cuDNN takes dense tensors, and documents, windows and the chunks of a ring are slices; set"
            reject("training.attention_backend", f'{message} "flash"')
        if os.environ.get(CUDNN_SWITCH) == "1":
            message = f"{CUDNN_SWITCH}=1 changes the layout of its log-sum-exp; unset that variable, or set"
            reject("training.attention_backend", f'{message} "flash"')
    if config.training.attention_backend in ("flash", "cudnn") and (odd := config.model.head_dim % 8):
        wider = config.model.head_dim + 8 - odd
        message = f"its kernels take a head_dim that is a multiple of 8, and it is {config.model.head_dim}; set"
        reject("training.attention_backend", f'{message} "math", or another head_dim, as {wider}', "model.head_dim")
    needs_cuda = "needs CUDA, and this run is on a CPU; set"
    if parallelism.enable_async_tensor_parallel and parallelism.tensor_parallel_degree > 1 and not on_cuda:
        reject(ASYNC_TENSOR, f"{needs_cuda} false")
    if float8.enable:
        _float8_device_rules(config, on_cuda, needs_cuda, reject)
    if config.debug.sdc_check_freq and on_cuda and not config.debug.deterministic:
        reject("debug.sdc_check_freq", "compares bits of repeated steps on CUDA; set debug.deterministic = true")
    if config.profiling.enable_memory_snapshot and not on_cuda:
        reject("profiling.enable_memory_snapshot", f"{needs_cuda} false")


def _float8_device_rules(config: Config, on_cuda: bool, needs_cuda: str, reject: Rejections) -> None:
    param, emulated, options = config.training.mixed_precision_param, config.float8.emulate, config.compile
    if not emulated and not on_cuda:
        reject("float8.enable", f"{needs_cuda} float8.emulate = true, or this to false")
    elif not emulated and param != "bfloat16":
        message = f"float8 products are bfloat16, and the model computes in {param}; set float8.emulate = true, or "
        reject("float8.enable", message + "this to false")
    compiles_model = options.enable and "model" in options.components and options.backend == "inductor"
    if compiles_model and config.float8.recipe == "mxfp8" and not on_cuda:  # inductor of torch 2.13 fails an assertion
        message = "inductor's C++ fails on the blocks of MXFP8, and this run is on a CPU; set"
        reject("compile.backend", f'{message} "aot_eager", or compile.enable = false')
