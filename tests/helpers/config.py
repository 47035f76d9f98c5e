"""Names of options, launches, and what the tests of the config compare."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from titanlite import config
from titanlite.config import Config, ConfigError, Launch, LoadedConfig
from titanlite.config.loader import options_of, show, value_of

ROOT = Path(__file__).parents[2]
OPTIONS = options_of(Config)

TENSOR, PIPELINE = "parallelism.tensor_parallel_degree", "parallelism.pipeline_parallel_degree"
CONTEXT, ULYSSES = "parallelism.context_parallel_degree", "parallelism.context_parallel_ulysses_degree"
SHARD, REPLICATE = "parallelism.data_parallel_shard_degree", "parallelism.data_parallel_replicate_degree"
RESHARD, REDUCE = "parallelism.fsdp_reshard_after_forward", "parallelism.fsdp_reduce_gradients"
ASYNC, LOSS_PARALLEL = "parallelism.enable_async_tensor_parallel", "parallelism.disable_loss_parallel"
SCHEDULE, MICROBATCH = "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_microbatch_size"
STAGES, BALANCE = "parallelism.pipeline_parallel_stages_per_rank", "parallelism.pipeline_parallel_balance"
FIRST, LAST = (f"parallelism.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
MODULES = "parallelism.module_fqns_per_model_part"
BATCH, GLOBAL_BATCH, SEQ_LEN = "training.local_batch_size", "training.global_batch_size", "training.seq_len"
STEPS, TOTAL_STEPS = "training.steps", "lr_scheduler.total_steps"
DATASET, PATH, TEXT_KEY = "training.dataset", "training.dataset_path", "training.dataset_text_key"
STREAMING, SHUFFLE, STREAMING_SHARDS = "training.streaming", "training.shuffle", "training.streaming_shards"
SHUFFLE_BLOCK = "training.streaming_shuffle_block"
VALIDATE, FRACTION = "validation.enable", "validation.fraction"
PROMPTS = "validation.generate_prompts"
VALIDATION_PATH, VALIDATION_SPLIT = "validation.dataset_path", "validation.dataset_split"
DTYPE, PARAM, REDUCE_DTYPE = "training.dtype", "training.mixed_precision_param", "training.mixed_precision_reduce"
LOSS_SCALE, GROWTH = "training.initial_loss_scale", "training.loss_scale_growth_interval"
BACKEND, MASK = "training.attention_backend", "training.document_mask"
STATES, ROUNDING = "optimizer.state_dtype", "optimizer.stochastic_rounding"
IMPLEMENTATION = "optimizer.implementation"
AC_MODE, SAC = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
COMPILE, COMPONENTS, COMPILER = "compile.enable", "compile.components", "compile.backend"
FLOAT8, RECIPE, EMULATE = "float8.enable", "float8.recipe", "float8.emulate"
INT8 = "int8.enable"
GATHER, PRECOMPUTE = "float8.enable_fsdp_float8_all_gather", "float8.precompute_float8_dynamic_scale_for_fsdp"
FLAVOR, DIM, LAYERS, HEADS, KV_HEADS = (
    f"model.{key}" for key in ("flavor", "dim", "n_layers", "n_heads", "n_kv_heads")
)
HEAD_DIM, WINDOW = "model.head_dim", "model.sliding_window"
FFN_DIM, VOCABULARY, TIED = "model.ffn_dim", "model.vocab_size", "model.tie_embeddings"
ROPE_SCALING, ROPE_LOW, ROPE_HIGH = (f"model.rope_{key}_factor" for key in ("scaling", "low_freq", "high_freq"))
ROPE_TYPE, ROPE_THETA = "model.rope_scaling_type", "model.rope_theta"
ROPE_FAST, ROPE_SLOW = "model.rope_beta_fast", "model.rope_beta_slow"
EXPERTS, PER_TOKEN, GROUPS, CHOSEN_GROUPS = (
    f"model.moe.{key}" for key in ("n_experts", "n_experts_per_token", "n_groups", "n_groups_per_token")
)
EXPERT, BIAS_RATE = "parallelism.expert_parallel_degree", "model.moe.balance_bias_rate"
IMBALANCE = "plan.expert_imbalance"
REPLICAS, REPLICA_GROUPS = "fault_tolerance.enable", "fault_tolerance.group_size"
SNAPSHOT = "profiling.enable_memory_snapshot"

C4_STREAM = {DATASET: "c4", STREAMING: True, SHUFFLE: False}
TEXT_STREAM = {DATASET: "text", PATH: "x", STREAMING: True, SHUFFLE: False}
TWO_STAGES = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]

Settings = Mapping[str, Any]
"""Values by `section.key`, which are written into a file, or by `--section.key`, which become arguments."""
Rejected = Mapping[str, Any]
"""A phrase of the message, or several phrases, for each option that is rejected."""


def load(folder: Path, settings: Settings | str, *arguments: str) -> LoadedConfig[Config]:
    """Load a config from run.toml in the folder."""
    file = folder / "run.toml"
    if not isinstance(settings, str):
        arguments = (*arguments, *(argument(key, settings[key]) for key in settings if key.startswith("--")))
        settings = "\n".join(f"{key} = {show(value)}" for key, value in settings.items() if not key.startswith("--"))
    file.write_text(settings, encoding="utf-8")
    return config.load([str(file), *arguments])


def argument(key: str, value: Any) -> str:
    return f"{key}={value if isinstance(value, str) else show(value)}"


def problems(call: Callable[[], Any]) -> list[str]:
    """Return the lines of the ConfigError that a call raises."""
    with pytest.raises(ConfigError) as caught:
        call()
    return caught.value.problems


def assert_rejected(call: Callable[[], Any], settings: Settings, rejected: Rejected) -> None:
    """Assert that a call rejects these options and no others. Each line names where the option was set, or that it was
    not, and contains the phrase."""
    lines = problems(call)
    expected = [
        (key, text) for key, texts in rejected.items() for text in ([texts] if isinstance(texts, str) else texts)
    ]
    assert len(lines) == len(expected), lines
    for key, text in expected:
        found = [line for line in lines if f": {key} = " in line and text in line]
        assert len(found) == 1, (key, text, lines)
        assert (" (default): " in found[0]) == (key not in settings and f"--{key}" not in settings), found
        assert found[0].startswith("command line") == (f"--{key}" in settings), found


def on(ranks: int, *, nodes: int = 1, devices: int = 0) -> Launch:
    """Return the launch of rank 0 of so many ranks on nodes with so many devices each; 0: on CPUs."""
    return Launch(0, 0, ranks, ranks // nodes, devices)


def of(settings: Config, key: str) -> Any:
    return value_of(settings, key)


def named(cases: list[tuple]) -> list[Any]:
    """Return the cases as parameters with the settings, their first item, as id."""
    return [pytest.param(*case, id=describe(case[0])) for case in cases]


def describe(settings: Settings | str) -> str:
    if isinstance(settings, str):
        return settings
    return ", ".join(f"{key.split('.')[-1]}={value}" for key, value in settings.items()) or "nothing set"


def modules_of_a_plain_llama() -> list[str]:
    """Return the names of the modules that building a plain Llama under tensor parallel imports."""
    code = (
        "import sys, torch\n"
        "from titanlite import train, build, config\n"
        "build.meta_model(config.check(config.load(['debug_tp']), config.Launch(0, 0, 2, 2, 0)))\n"
        "print(*sys.modules)\n"
    )
    status, names, errors = python("-c", code)
    assert (status, errors) == (0, "")
    return names.split()


def python(*args: str, **environment: str) -> tuple[int, str, str]:
    """Run Python without devices (no nvidia-smi on the PATH), and return its exit status, output and errors."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("NGPU", "NNODES")}
    env = {**inherited, "PATH": "", "PYTHONUTF8": "1", **environment}
    run = subprocess.run(
        [sys.executable, *args], capture_output=True, encoding="utf-8", cwd=ROOT, env=env, timeout=60, check=False
    )
    return run.returncode, run.stdout, run.stderr
