"""Every wrong config is refused with the exact line that a user reads; every right one gives the values it says.

Lines are compared whole. `{file}` stands for the config's path, `{folder}` for the folder that holds it.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from titanlite import config, launcher
from titanlite.config import Config, ConfigError, Launch, LoadedConfig
from titanlite.config import loader as options
from titanlite.config.model_sizes import SIZES

ROOT = Path(__file__).parents[1]
USAGE = "usage: train.py CONFIG.toml [--section.key=value ...]   (--help lists every option)"
OPTIONS = {
    f"{name}.{key}": option
    for name, section in Config.model_fields.items()
    for key, option in section.annotation.model_fields.items()
}


class Folder:
    """A folder with one config, `run.toml`."""

    def __init__(self, path: Path):
        self.path = path
        self.file = path / "run.toml"
        self.file.touch()

    def load(self, toml: str = "", *overrides: str) -> LoadedConfig[Config]:
        self.file.write_text(toml, encoding="utf-8")
        return config.load([str(self.file), *overrides])

    def fill_in(self, text: str) -> str:
        names = {"file": self.file, "folder": self.path, "usage": USAGE, "flavors": FLAVORS}
        return re.sub(r"\{(\w+)\}", lambda match: str(names[match[1]]), text)

    def refused(self, call: Callable[[], Any], lines: list[str]) -> None:
        """`call` is refused with exactly these lines."""
        with pytest.raises(ConfigError) as caught:
            call()
        assert caught.value.problems == [self.fill_in(line) for line in lines]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def of(settings: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(settings, section), name)


def typed(value: Any) -> tuple[type, Any]:
    """1, 1.0 and True are equal; with their types they are not."""
    return type(value), value


def on(ranks: int, *, hosts: int = 1, devices: int = 0) -> Launch:
    """Rank 0 of so many ranks on hosts of so many devices; none is a CPU."""
    return Launch(0, 0, ranks, ranks // hosts, devices)


def read(table: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Title, what is given and `> ` what is expected of it, case by case; an indented row continues the one above."""
    title, given, expected = "", [], []
    for row in [*filter(None, table.splitlines()), "## end"]:
        if expected and not row.startswith((">", " ")):
            yield title, given, expected
            given, expected = [], []
        if row.startswith("## "):
            assert not given, f"nothing is expected of {given}"
            title = row[3:]
        elif row.startswith("> "):
            expected.append(row[2:])
        elif row.startswith(" "):
            expected[-1] += f" {row.strip()}"
        elif not row.startswith("# "):
            given.append(row)


def read_values(table: str) -> list[Any]:
    """A case for each `key = value` and what is expected of it."""
    cases = [(part, line) for _, given, (line,) in read(table) for row in given for part in row.split("; ")]
    return [pytest.param(*case, id=case[0]) for case in cases]


# ---------------------------------------------------------------------------------------------------------------------
# One option at a time: types, bounds, choices

COUNT_OR_AUTO = "-1, or a whole number at least 1"
FLAVORS = (
    'one of "debug", "llama3_1b", "llama3_3b", "llama2_7b", "llama2_13b", "llama_30b", "llama3_8b", "llama3_70b", '
    '"llama3_405b", "gpt_175b"'
)
COMPUTE_TYPES = 'one of "auto", "bfloat16", "float32", "float64", "float16"'
RESHARD = 'one of "default", "always", "never", or a whole number at least 2'

WRONG_VALUES = f"""
job.dump_folder = 3; job.description = true; job.description = 2020-01-01; job.description = ["a", "b"]
model.hf_assets_path = 3; training.dataset_path = 3; training.dataset_config = 3; training.dataset_split = 3
training.dataset_text_key = 3; training.cache_folder = 3; checkpoint.folder = 3; checkpoint.initial_load_path = 3
metrics.save_tb_folder = 3; validation.dataset_path = 3; validation.dataset_split = 3
profiling.save_traces_folder = 3; profiling.save_memory_snapshot_folder = 3; plan.device = 3
> a string
model.tie_embeddings = 1; training.streaming = "yes"; training.shuffle = 0; training.shuffle = "true"
training.enable_cpu_offload = 1; checkpoint.enable = "on"; metrics.enable_tensorboard = 1; validation.enable = 1
profiling.enable_profiling = 1; profiling.enable_memory_snapshot = 1; debug.deterministic = 1
training.document_mask = 1; parallelism.disable_loss_parallel = "true"; parallelism.enable_async_tensor_parallel = 1
compile.enable = 1; compile.enable = "true"; optimizer.stochastic_rounding = 1; float8.enable = 1; float8.emulate = "on"
float8.enable_fsdp_float8_all_gather = 1; float8.precompute_float8_dynamic_scale_for_fsdp = 1
> true or false
model.dim = 0; model.n_layers = 0; model.n_heads = 0; model.n_kv_heads = 0; model.ffn_dim = 0; model.vocab_size = 0
model.rope_original_seq_len = 0; training.streaming_shards = 0; training.seq_len = 0; training.local_batch_size = 0
training.steps = 0; training.steps = 10.0; training.steps = "10"; training.steps = true; training.steps = [1, 2]
training.steps = 2020-01-01; parallelism.data_parallel_replicate_degree = 0; checkpoint.interval = 0
parallelism.data_parallel_replicate_degree = -1; metrics.log_freq = 0; validation.freq = 0
comm.init_timeout_seconds = 0; comm.train_timeout_seconds = 2.5; comm.train_timeout_seconds = 0
parallelism.tensor_parallel_degree = 0; parallelism.tensor_parallel_degree = -1
parallelism.pipeline_parallel_degree = 0; parallelism.pipeline_parallel_degree = 2.0
parallelism.pipeline_parallel_microbatch_size = 0; parallelism.pipeline_parallel_microbatch_size = -1
parallelism.context_parallel_degree = 0; parallelism.context_parallel_degree = true
parallelism.context_parallel_ulysses_degree = 0; parallelism.context_parallel_ulysses_degree = "all"
training.gc_freq = 0; training.loss_scale_growth_interval = 0; training.loss_chunks = 0; training.loss_chunks = -1
> a whole number at least 1
training.nonfinite_steps_allowed = -1; lr_scheduler.warmup_steps = -1; checkpoint.keep_latest_k = -1
comm.trace_buf_size = -1; parallelism.pipeline_parallel_first_stage_less_layers = -1
parallelism.pipeline_parallel_last_stage_less_layers = 0.5; parallelism.fsdp_forward_prefetch = -1
parallelism.fsdp_forward_prefetch = true; parallelism.fsdp_backward_prefetch = -1; plan.tokens = -1
> a whole number at least 0
training.global_batch_size = 0; training.global_batch_size = -2; training.global_batch_size = 8.0
training.global_batch_size = true; lr_scheduler.total_steps = 0; parallelism.data_parallel_shard_degree = 0
checkpoint.load_step = 0; validation.steps = 0; parallelism.pipeline_parallel_stages_per_rank = 0
parallelism.pipeline_parallel_stages_per_rank = -2; parallelism.pipeline_parallel_stages_per_rank = "auto"
plan.devices_per_node = 0
> {COUNT_OR_AUTO}
profiling.profile_freq = 3
> a whole number at least 4
# torch.manual_seed(seed + rank) takes 64 bits
debug.seed = -1; debug.seed = 18446744073709551616; debug.seed = 9223372036854775808
> a whole number at least 0 and at most 9223372036854775807
model.norm_eps = 0.0; model.rope_theta = 0; model.rope_low_freq_factor = 0.0; model.rope_high_freq_factor = -4.0
training.max_norm = 0.0; optimizer.lr = 0; optimizer.lr = "8e-4"; optimizer.lr = true; optimizer.eps = 0.0
training.initial_loss_scale = 0
> a number above 0
optimizer.lr = nan; optimizer.lr = inf; training.initial_loss_scale = inf
> a finite number above 0
optimizer.weight_decay = -0.1; plan.price = -1
> a number at least 0
optimizer.weight_decay = inf
> a finite number at least 0
model.rope_scaling_factor = 0.5
> a number at least 1
model.rope_scaling_factor = inf
> a finite number at least 1
optimizer.beta1 = 1.0; optimizer.beta1 = -0.1; optimizer.beta2 = 1.5; validation.fraction = 1.0
validation.fraction = -0.1
> a number at least 0 and below 1
optimizer.beta1 = nan
> a finite number at least 0 and below 1
lr_scheduler.min_lr_factor = 1.1; lr_scheduler.min_lr_factor = -0.1; activation_checkpoint.memory_budget = 1.1
activation_checkpoint.memory_budget = -0.1
> a number at least 0 and at most 1
activation_checkpoint.memory_budget = nan
> a finite number at least 0 and at most 1
lr_scheduler.decay_ratio = 1.5; lr_scheduler.decay_ratio = -0.5; lr_scheduler.decay_ratio = "all"
> -1, or a number at least 0 and at most 1
lr_scheduler.decay_ratio = nan
> -1, or a finite number at least 0 and at most 1
model.flavor = "llama3"; model.flavor = 3; model.flavor = ["debug"]
> {FLAVORS}
training.dataset = "c5"; training.dataset = true
> one of "pydoc_topics", "text", "json", "parquet", "c4", "hub"
training.text_sample_by = "sentence"
> one of "document", "paragraph", "line"
training.dtype = "float16"
> one of "float32", "bfloat16", "float64"
# float64 is what check() makes of auto
training.mixed_precision_reduce = "float16"; training.mixed_precision_reduce = "fp32"
> one of "auto", "bfloat16", "float32", "float64"
training.mixed_precision_param = "fp16"
> {COMPUTE_TYPES}
optimizer.name = "adamw"
> one of "AdamW", "Adam"
optimizer.implementation = "loop"
> one of "fused", "foreach", "for-loop"
optimizer.state_dtype = "float64"; optimizer.state_dtype = 8
> one of "auto", "float32", "bfloat16", "int8"
lr_scheduler.decay_type = "exponential"
> one of "linear", "sqrt", "cosine"
parallelism.fsdp_reshard_after_forward = 1; parallelism.fsdp_reshard_after_forward = true
parallelism.fsdp_reshard_after_forward = "2"; parallelism.fsdp_reshard_after_forward = -1
> {RESHARD}
parallelism.fsdp_reduce_gradients = "always"
> one of "every_accumulation_step", "last_accumulation_step"
parallelism.pipeline_parallel_schedule = "1f1b"; parallelism.pipeline_parallel_schedule = "ZeroBubble"
> one of "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
parallelism.pipeline_parallel_balance = "flops"
> one of "layers", "parameters"
parallelism.module_fqns_per_model_part = 3; parallelism.module_fqns_per_model_part = "layers.0"
parallelism.module_fqns_per_model_part = ["layers.0"]; parallelism.module_fqns_per_model_part = [["layers.0", 1]]
parallelism.module_fqns_per_model_part = [["norm"], "output"]; parallelism.module_fqns_per_model_part = [[["norm"]]]
> a list of lists of strings
training.attention_backend = "sdpa"; training.attention_backend = true
> one of "auto", "cpu", "flash", "cudnn", "efficient", "math"
float8.recipe = "blockwise"
> one of "tensorwise", "rowwise", "rowwise_with_gw_hp"
compile.components = "model"; compile.components = [1]
float8.filter_fqns = 3; float8.filter_fqns = "layers.0."; float8.filter_fqns = [1]; float8.filter_fqns = [["layers.0."]]
> a list of strings
activation_checkpoint.mode = "op"; activation_checkpoint.mode = true
> one of "none", "full", "selective", "memory_budget"
activation_checkpoint.selective_ac_option = "2"; activation_checkpoint.selective_ac_option = 0
activation_checkpoint.selective_ac_option = true
> "op", or a whole number at least 1
compile.backend = "eager"; compile.backend = true
> one of "inductor", "aot_eager"
checkpoint.async_mode = "async_with_pinned_mem"
> one of "disabled", "async"
"""


@pytest.mark.parametrize(("assignment", "expected"), read_values(WRONG_VALUES))
def test_wrong_value(folder: Folder, assignment: str, expected: str):
    folder.refused(lambda: folder.load(assignment), [f"{{file}}: {assignment}: expected {expected}"])


def test_wrong_values_cover_every_option():
    assert {case.values[0].split(" = ")[0] for case in read_values(WRONG_VALUES)} == set(OPTIONS)


RIGHT_AT_THE_EDGE = """
model.n_layers = 1; training.global_batch_size = -1; training.max_norm = 1e-30; optimizer.beta2 = 0.9999999
training.nonfinite_steps_allowed = 0; lr_scheduler.warmup_steps = 0; lr_scheduler.decay_ratio = -1
lr_scheduler.total_steps = 10_000; lr_scheduler.min_lr_factor = 0.0; lr_scheduler.min_lr_factor = 1.0
parallelism.fsdp_reshard_after_forward = 2; parallelism.fsdp_reshard_after_forward = "never"
parallelism.fsdp_reshard_after_forward = "default"; parallelism.tensor_parallel_degree = 1
parallelism.pipeline_parallel_stages_per_rank = -1; parallelism.pipeline_parallel_microbatch_size = 1
parallelism.context_parallel_degree = 1; parallelism.module_fqns_per_model_part = []
checkpoint.keep_latest_k = 0; validation.fraction = 0.0; profiling.profile_freq = 4; comm.trace_buf_size = 0
debug.seed = 0; debug.seed = 0x7fffffffffffffff; training.gc_freq = 1; training.loss_chunks = 1
training.mixed_precision_param = "float16"; optimizer.state_dtype = "int8"; optimizer.state_dtype = "bfloat16"
parallelism.fsdp_forward_prefetch = 0; parallelism.fsdp_forward_prefetch = 1000; parallelism.fsdp_backward_prefetch = 0
float8.enable = true; float8.filter_fqns = []; activation_checkpoint.mode = "selective"
activation_checkpoint.selective_ac_option = "op"
> as it is written
model.rope_scaling_factor = 1; optimizer.lr = 1; optimizer.beta1 = 0; optimizer.weight_decay = 0
lr_scheduler.decay_ratio = 0; lr_scheduler.decay_ratio = 1; training.initial_loss_scale = 65536
> as a float
"""


@pytest.mark.parametrize(("assignment", "read"), read_values(RIGHT_AT_THE_EDGE))
def test_right_value_at_the_edge(folder: Folder, assignment: str, read: str):
    key, text = assignment.split(" = ")
    written = options.tomllib.loads(f"value = {text}")["value"]
    for loaded in folder.load(assignment), folder.load("", f"--{key}={text}"):
        assert typed(of(loaded.config, key)) == typed(float(written) if read == "as a float" else written)


# ---------------------------------------------------------------------------------------------------------------------
# Wrong configs. A case is a file (`;` parts its lines, too), `$` arguments, and `>` the lines of its refusal. Where `@`
# stands, the config is right and its launch is refused: by `check` if ranks are given, else by `ranks_per_node`. The
# rules under "silent rule" read a value that is itself refused: they would speak of its default.

TABLE = r"""
## unknown key
# spelt alike; a word of a key; like nothing but its section
job.dumpfolder = "x"; lr_scheduler.warmup = 2; training.bf16 = true
> {file}: job.dumpfolder = "x": unknown key; did you mean job.dump_folder?
> {file}: training.bf16 = true: unknown key; --help lists every option
> {file}: lr_scheduler.warmup = 2: unknown key; did you mean lr_scheduler.warmup_steps?
# a key of another section
training.lr = 1e-3; training.seed = 1
> {file}: training.lr = 0.001: unknown key; did you mean optimizer.lr?
> {file}: training.seed = 1: unknown key; did you mean debug.seed?
# of several, the key of its own section
metrics.freq = 1; profiling.enable = true
> {file}: metrics.freq = 1: unknown key; did you mean metrics.log_freq?
> {file}: profiling.enable = true: unknown key; did you mean profiling.enable_profiling?
[optimizer.lrs]; base = 3
> {file}: optimizer.lrs = {"base": 3}: unknown key; did you mean optimizer.lr?
[training.steps]; warmup = 3
> {file}: training.steps = {"warmup": 3}: expected a whole number at least 1
# a value that JSON does not have
comm.x = 2020-01-01T12:00:00
> {file}: comm.x = 2020-01-01T12:00:00: unknown key; --help lists every option
$ --training.seq-len=3 --training.streming --training.steps.x=3
> command line: training.seq-len = 3: unknown key; did you mean training.seq_len?
> command line: training.streming = true: unknown key; did you mean training.streaming?
> command line: training.steps.x = 3: unknown key; did you mean training.steps?

## section
[Training]
> {file}: [Training]: an unknown section; did you mean training?
["a.b"]; x = 1
> {file}: [a.b]: an unknown section; --help lists every option
# in file and command line: told once
[optimiser]; lr = 1
$ --optimiser.eps=1
> {file}: [optimiser]: an unknown section; did you mean optimizer?
$ --optim.lr=1
> command line: --optim.lr: an unknown section; did you mean optimizer?
model = "llama3_8b"
> {file}: model = "llama3_8b": expected a section, written [model]
[[training]]; steps = 3
> {file}: training = [{"steps": 3}]: expected a section, written [training]
training = 3
$ --training.steps=4
> {file}: training = 3: expected a section, written [training]
lr = 0.001
> {file}: lr = 0.001: a key outside any section; did you mean optimizer.lr?

## model
model.dim = 100
> {file}: model.n_heads = 16 (default): expected a divisor of model.dim = 100; each head takes dim / n_heads of it
$ --model.n_heads=24
> command line: model.n_heads = 24: expected a divisor of model.dim = 256; each head takes dim / n_heads of it
model.dim = 240
> {file}: model.n_heads = 16 (default): expected an even head size, got 240 / 16 = 15; rotary embedding turns pairs
model.n_kv_heads = 3
> {file}: model.n_kv_heads = 3: expected a divisor of model.n_heads = 16; each key head serves a group of query heads
model.flavor = "llama3_8b"; model.rope_low_freq_factor = 4
> {file}: model.rope_low_freq_factor = 4.0: expected a number below model.rope_high_freq_factor = 4.0

## data
training.dataset = "text"
> {file}: training.dataset_path = "" (default): training.dataset = "text" needs a file, folder or glob
training.dataset = "json"
> {file}: training.dataset_path = "" (default): training.dataset = "json" needs a file, folder or glob
training.dataset = "parquet"; training.dataset_path = ""
> {file}: training.dataset_path = "": training.dataset = "parquet" needs a file, folder or glob
training.dataset = "hub"
> {file}: training.dataset_path = "" (default): training.dataset = "hub" needs a name on the Hugging Face hub, as in
    allenai/c4
training.dataset = "c4"; training.dataset_path = "x"; training.dataset_config = "en"
> {file}: training.dataset_path = "x": read only when training.dataset is "text" or "json" or "parquet" or "hub";
    remove it
> {file}: training.dataset_config = "en": read only when training.dataset is "hub"; remove it
training.dataset = "text"; training.dataset_path = "x"; training.dataset_split = "test"
training.dataset_text_key = "body"; validation.dataset_split = "test"
> {file}: training.dataset_split = "test": read only when training.dataset is "hub"; remove it
> {file}: training.dataset_text_key = "body": read only when training.dataset is "json" or "parquet" or "hub"; remove
    it
> {file}: validation.dataset_split = "test": read only when training.dataset is "hub"; remove it
training.dataset = "json"; training.dataset_path = "x"; training.text_sample_by = "line"
> {file}: training.text_sample_by = "line": read only when training.dataset is "text"; remove it
training.dataset = "hub"; training.dataset_path = "x"; validation.dataset_path = "y"
> {file}: validation.dataset_path = "y": read only when training.dataset is "text" or "json" or "parquet"; remove it
training.streaming = true; training.shuffle = false
> {file}: training.streaming = true: the built-in text is in memory; set false
training.dataset = "c4"; training.streaming = true
> {file}: training.shuffle = true (default): a stream cannot be drawn in a random order that survives a stop and a
    resume exactly; set false (documents come in their files' order), or training.streaming = false
training.dataset = "c4"; training.streaming = true; training.shuffle = false; validation.fraction = 0.1
> {file}: validation.fraction = 0.1: a stream has no documents to hold out; remove it
training.dataset = "text"; training.dataset_path = "x"; training.streaming = true; training.shuffle = false
validation.enable = true
> {file}: validation.enable = true: a stream has no documents to hold out; set validation.dataset_path (files) or
    validation.dataset_split (hub), or training.streaming = false
training.streaming_shards = 8
> {file}: training.streaming_shards = 8: read only when training.streaming is true; remove it
training.dataset = "c4"; validation.fraction = 0.1
> {file}: validation.fraction = 0.1: the dataset has a validation split of its own; remove it
validation.enable = true; validation.fraction = 0.0
> {file}: validation.fraction = 0.0: validation.enable needs documents: set it above 0

## steps
training.global_batch_size = 12; lr_scheduler.total_steps = 5
> {file}: training.global_batch_size = 12: expected a multiple of training.local_batch_size = 8
> {file}: lr_scheduler.total_steps = 5: expected at least training.steps = 10000; the schedule has no value after its
    horizon
training.dtype = "float64"; training.mixed_precision_param = "bfloat16"; training.mixed_precision_reduce = "float32"
> {file}: training.mixed_precision_param = "bfloat16": training.dtype = "float64" computes and reduces in float64;
    set "auto"
> {file}: training.mixed_precision_reduce = "float32": training.dtype = "float64" computes and reduces in float64;
    set "auto"
training.steps = 5; lr_scheduler.total_steps = 5
$ --training.steps=6
> {file}: lr_scheduler.total_steps = 5: expected at least training.steps = 6; the schedule has no value after its
    horizon

## recomputation
[activation_checkpoint]; selective_ac_option = 2; memory_budget = 0.2
> {file}: activation_checkpoint.selective_ac_option = 2: read only when activation_checkpoint.mode is "selective";
    remove it
> {file}: activation_checkpoint.memory_budget = 0.2: read only when activation_checkpoint.mode is "memory_budget";
    remove it
# each in the other's mode
[activation_checkpoint]; mode = "selective"; memory_budget = 0.2
> {file}: activation_checkpoint.memory_budget = 0.2: read only when activation_checkpoint.mode is "memory_budget";
    remove it
compile.enable = true
[activation_checkpoint]; mode = "memory_budget"; selective_ac_option = 1
> {file}: activation_checkpoint.selective_ac_option = 1: read only when activation_checkpoint.mode is "selective";
    remove it
# without compiled blocks
activation_checkpoint.mode = "memory_budget"
> {file}: activation_checkpoint.mode = "memory_budget": the compiler chooses what is kept; set compile.enable = true,
    with "model" in compile.components, or another mode
compile.enable = true; compile.components = ["loss"]
$ --activation_checkpoint.mode=memory_budget
> command line: activation_checkpoint.mode = "memory_budget": the compiler chooses what is kept; set compile.enable =
    true, with "model" in compile.components, or another mode
compile.enable = true; compile.components = ["model", "optimizer"]
> {file}: compile.components = ["model", "optimizer"]: expected "model", "loss" or both; to compile nothing, set
    compile.enable = false

## precision
training.initial_loss_scale = 8.0; training.loss_scale_growth_interval = 10
> {file}: training.initial_loss_scale = 8.0: read only when training.mixed_precision_param is "float16"; remove it
> {file}: training.loss_scale_growth_interval = 10: read only when training.mixed_precision_param is "float16"; remove
    it
training.dtype = "bfloat16"; training.mixed_precision_param = "float16"
> {file}: training.mixed_precision_param = "float16": gradients in float16 need weights in float32, and training.dtype
    is "bfloat16"; set "bfloat16" or "auto"
optimizer.stochastic_rounding = true
> {file}: optimizer.stochastic_rounding = true: weights are kept in float32; set false, or training.dtype = "bfloat16"
training.dtype = "float64"; training.mixed_precision_param = "float16"
optimizer.stochastic_rounding = true; optimizer.state_dtype = "bfloat16"
> {file}: training.mixed_precision_param = "float16": training.dtype = "float64" computes and reduces in float64; set
    "auto"
> {file}: optimizer.stochastic_rounding = true: weights are kept in float64; set false, or training.dtype = "bfloat16"
> {file}: optimizer.state_dtype = "bfloat16": training.dtype = "float64" is for proofs; set "auto"
[optimizer]; state_dtype = "int8"; implementation = "foreach"
> {file}: optimizer.implementation = "foreach": torchao takes the step where moments have a type of their own or
    rounding is stochastic; remove it
training.dtype = "bfloat16"; optimizer.stochastic_rounding = true
$ --optimizer.implementation=for-loop
> command line: optimizer.implementation = "for-loop": torchao takes the step where moments have a type of their own or
    rounding is stochastic; remove it
[float8]; enable = true; recipe = "rowwise"; enable_fsdp_float8_all_gather = true
> {file}: float8.enable_fsdp_float8_all_gather = true: "rowwise" has a scale a row, which FSDP cannot gather; set
    false, or float8.recipe = "tensorwise"
[float8]; enable = true; enable_fsdp_float8_all_gather = true
$ --float8.recipe=rowwise_with_gw_hp
> {file}: float8.enable_fsdp_float8_all_gather = true: "rowwise_with_gw_hp" has a scale a row, which FSDP cannot
    gather; set false, or float8.recipe = "tensorwise"
[float8]; enable = true; precompute_float8_dynamic_scale_for_fsdp = true
> {file}: float8.precompute_float8_dynamic_scale_for_fsdp = true: the scales are for weights gathered in float8; set
    float8.enable_fsdp_float8_all_gather = true, or this to false

## tensor
[parallelism]; tensor_parallel_degree = 2
[model]; n_heads = 1; n_kv_heads = 1
> {file}: parallelism.tensor_parallel_degree = 2: expected a divisor of model.n_heads = 1, which the ranks share
> {file}: parallelism.tensor_parallel_degree = 2: expected a divisor of model.n_kv_heads = 1, which the ranks share
$ --parallelism.tensor_parallel_degree=16
> command line: parallelism.tensor_parallel_degree = 16: expected a divisor of model.n_kv_heads = 8, which the ranks
    share
[parallelism]; tensor_parallel_degree = 4
[model]; ffn_dim = 770; vocab_size = 270
> {file}: parallelism.tensor_parallel_degree = 4: expected a divisor of model.ffn_dim = 770, which the ranks share
> {file}: parallelism.tensor_parallel_degree = 4: expected a divisor of model.vocab_size = 270, which the ranks share
parallelism.tensor_parallel_degree = 4; training.seq_len = 30
> {file}: training.seq_len = 30: expected a multiple of 4, to be cut evenly over context parallel 1 x tensor parallel 4
# without compiling, and with a backend that does not overlap
[parallelism]; tensor_parallel_degree = 2; enable_async_tensor_parallel = true
> {file}: parallelism.enable_async_tensor_parallel = true: the overlap is made by torch.compile; set compile.enable =
    true, with "model" in compile.components and compile.backend = "inductor", or this to false
compile.enable = true; compile.backend = "aot_eager"; parallelism.tensor_parallel_degree = 2
$ --parallelism.enable_async_tensor_parallel
> command line: parallelism.enable_async_tensor_parallel = true: the overlap is made by torch.compile; set
    compile.enable = true, with "model" in compile.components and compile.backend = "inductor", or this to false

## context
[parallelism]; context_parallel_degree = 4; context_parallel_ulysses_degree = 3
> {file}: parallelism.context_parallel_ulysses_degree = 3: expected a divisor of parallelism.context_parallel_degree =
    4, of which it is the inner part
# how large the ring would be is unknown then, and nothing is said of its chunks
training.seq_len = 12
[parallelism]; context_parallel_degree = 4; context_parallel_ulysses_degree = 8
> {file}: parallelism.context_parallel_ulysses_degree = 8: expected a divisor of parallelism.context_parallel_degree =
    4, of which it is the inner part
parallelism.context_parallel_ulysses_degree = 2
> {file}: parallelism.context_parallel_ulysses_degree = 2: expected a divisor of parallelism.context_parallel_degree =
    1, of which it is the inner part
# heads of the model, and of a tensor-parallel rank
[parallelism]; context_parallel_degree = 32; context_parallel_ulysses_degree = 32
> {file}: parallelism.context_parallel_ulysses_degree = 32: expected a divisor of the 16 query heads of a rank
    (model.n_heads = 16); the other ranks can be in the ring
> {file}: parallelism.context_parallel_ulysses_degree = 32: expected a divisor of the 8 key heads of a rank
    (model.n_kv_heads = 8); the other ranks can be in the ring
[parallelism]; context_parallel_degree = 4; context_parallel_ulysses_degree = 4; tensor_parallel_degree = 4
> {file}: parallelism.context_parallel_ulysses_degree = 4: expected a divisor of the 2 key heads of a rank
    (model.n_kv_heads = 8, shared by tensor parallel 4); the other ranks can be in the ring
# a ring, without and with Ulysses inside; Ulysses alone; each of them with tensor parallelism
training.seq_len = 6; parallelism.context_parallel_degree = 2
> {file}: training.seq_len = 6: expected a multiple of 4, to be cut evenly over context parallel 2 x tensor parallel 1
    (a ring needs two chunks a rank)
training.seq_len = 12
[parallelism]; context_parallel_degree = 4; context_parallel_ulysses_degree = 2
> {file}: training.seq_len = 12: expected a multiple of 8, to be cut evenly over context parallel 4 x tensor parallel 1
    (a ring needs two chunks a rank)
training.seq_len = 7
[parallelism]; context_parallel_degree = 2; context_parallel_ulysses_degree = 2
> {file}: training.seq_len = 7: expected a multiple of 2, to be cut evenly over context parallel 2 x tensor parallel 1
training.seq_len = 6
[parallelism]; context_parallel_degree = 2; context_parallel_ulysses_degree = 2; tensor_parallel_degree = 2
> {file}: training.seq_len = 6: expected a multiple of 4, to be cut evenly over context parallel 2 x tensor parallel 2
training.seq_len = 12
[parallelism]; context_parallel_degree = 2; tensor_parallel_degree = 4
> {file}: training.seq_len = 12: expected a multiple of 8, to be cut evenly over context parallel 2 x tensor parallel 4
    (a ring needs two chunks a rank)
$ --parallelism.context_parallel_degree=3
> {file}: training.seq_len = 2048 (default): expected a multiple of 6, to be cut evenly over context parallel 3 x tensor
    parallel 1 (a ring needs two chunks a rank)

## pipeline
model.tie_embeddings = true; parallelism.pipeline_parallel_degree = 2
> {file}: model.tie_embeddings = true: a pipeline has the embedding and the output head on two stages; set false
model.flavor = "llama3_1b"
$ --parallelism.pipeline_parallel_degree=2
> {file}: model.tie_embeddings = true (default): a pipeline has the embedding and the output head on two stages; set
    false
[parallelism]; pipeline_parallel_degree = 2; pipeline_parallel_stages_per_rank = 2
> {file}: parallelism.pipeline_parallel_stages_per_rank = 2: expected 1 under "1F1B", or -1
[parallelism]; pipeline_parallel_degree = 2; pipeline_parallel_stages_per_rank = 2; pipeline_parallel_schedule = "GPipe"
> {file}: parallelism.pipeline_parallel_stages_per_rank = 2: expected 1 under "GPipe", or -1
[parallelism]; pipeline_parallel_degree = 2; pipeline_parallel_stages_per_rank = 1
$ --parallelism.pipeline_parallel_schedule=LoopedBFS
> {file}: parallelism.pipeline_parallel_stages_per_rank = 1: expected at least 2 under "LoopedBFS", or -1
[parallelism]; pipeline_parallel_degree = 2; pipeline_parallel_stages_per_rank = 1
$ --parallelism.pipeline_parallel_schedule=InterleavedZeroBubble
> {file}: parallelism.pipeline_parallel_stages_per_rank = 1: expected at least 2 under "InterleavedZeroBubble", or -1
[parallelism]; pipeline_parallel_degree = 2; pipeline_parallel_stages_per_rank = 1
$ --parallelism.pipeline_parallel_schedule=ZBVZeroBubble
> {file}: parallelism.pipeline_parallel_stages_per_rank = 1: expected 2 under "ZBVZeroBubble", or -1
[parallelism]; pipeline_parallel_degree = 2; pipeline_parallel_stages_per_rank = 3
$ --parallelism.pipeline_parallel_schedule=DualPipeV
> {file}: parallelism.pipeline_parallel_stages_per_rank = 3: expected 2 under "DualPipeV", or -1
[parallelism]; pipeline_parallel_degree = 2; pipeline_parallel_microbatch_size = 3
> {file}: parallelism.pipeline_parallel_microbatch_size = 3: expected a divisor of training.local_batch_size = 8
# the number of microbatches alone is unknown then
[parallelism]; pipeline_parallel_degree = 2; pipeline_parallel_microbatch_size = 16
fsdp_reduce_gradients = "last_accumulation_step"; module_fqns_per_model_part = [["norm"]]
> {file}: parallelism.fsdp_reduce_gradients = "last_accumulation_step": a pipeline reduces gradients once a microstep, after its
    last microbatch; set "every_accumulation_step", and a larger local_batch_size for fewer microsteps
> {file}: parallelism.module_fqns_per_model_part = [["norm"]]: expected 2 lists, one a stage, got 1
> {file}: parallelism.pipeline_parallel_microbatch_size = 16: expected a divisor of training.local_batch_size = 8
[parallelism]; pipeline_parallel_degree = 4; pipeline_parallel_microbatch_size = 4
> {file}: training.local_batch_size = 8 (default): "1F1B" needs at least as many microbatches as its 4 stages, and there
    are 2 (local_batch_size 8 / microbatch size 4); set it to at least 16, or make the microbatches smaller
[parallelism]; pipeline_parallel_degree = 2; pipeline_parallel_microbatch_size = 4
$ --parallelism.pipeline_parallel_schedule=DualPipeV
> {file}: training.local_batch_size = 8 (default): "DualPipeV" needs at least as many microbatches as its 4 stages, and
    there are 2 (local_batch_size 8 / microbatch size 4); set it to at least 16, or make the microbatches smaller
training.local_batch_size = 5; parallelism.pipeline_parallel_degree = 2
$ --parallelism.pipeline_parallel_schedule=Interleaved1F1B
> {file}: training.local_batch_size = 5: "Interleaved1F1B" takes its microbatches in 2 equal rounds, and there are 5
    (local_batch_size 5 / microbatch size 1); set it to a multiple of 2
training.local_batch_size = 14
[parallelism]; pipeline_parallel_degree = 3; pipeline_parallel_microbatch_size = 2
$ --parallelism.pipeline_parallel_schedule=InterleavedZeroBubble
> {file}: training.local_batch_size = 14: "InterleavedZeroBubble" takes its microbatches in 2 equal rounds, and there
    are 7 (local_batch_size 14 / microbatch size 2); set it to a multiple of 6
[parallelism]; pipeline_parallel_degree = 2; fsdp_reshard_after_forward = "always"
$ --parallelism.pipeline_parallel_schedule=InterleavedZeroBubble
> {file}: parallelism.fsdp_reshard_after_forward = "always": "InterleavedZeroBubble" computes gradients of inputs and of
    weights apart and needs the weights gathered in between; set "never" or "default"
[parallelism]; pipeline_parallel_degree = 2; fsdp_reshard_after_forward = "always"
$ --parallelism.pipeline_parallel_schedule=ZBVZeroBubble
> {file}: parallelism.fsdp_reshard_after_forward = "always": "ZBVZeroBubble" computes gradients of inputs and of weights
    apart and needs the weights gathered in between; set "never" or "default"
activation_checkpoint.mode = "selective"
[parallelism]; pipeline_parallel_degree = 2; pipeline_parallel_schedule = "ZBVZeroBubble"
> {file}: activation_checkpoint.selective_ac_option = "op" (default): "ZBVZeroBubble" computes gradients of inputs and
    of weights apart and would need what was recomputed twice; set a number, or mode = "full"
# torch makes the groups on a part of the ranks only
[parallelism]; pipeline_parallel_degree = 2; fsdp_reshard_after_forward = 2
> {file}: parallelism.fsdp_reshard_after_forward = 2: torch makes these groups as if all ranks shared one model, and
    hangs under parallelism.pipeline_parallel_degree; set "always" or "never"
[parallelism]; tensor_parallel_degree = 2; pipeline_parallel_degree = 2; fsdp_reshard_after_forward = 2
> {file}: parallelism.fsdp_reshard_after_forward = 2: torch makes these groups as if all ranks shared one model, and
    hangs under parallelism.tensor_parallel_degree and parallelism.pipeline_parallel_degree; set "always" or "never"
[parallelism]; pipeline_parallel_degree = 2; fsdp_reshard_after_forward = "always"
$ --parallelism.pipeline_parallel_schedule=DualPipeV
> {file}: parallelism.fsdp_reshard_after_forward = "always": "DualPipeV" computes gradients of inputs and of weights
    apart and needs the weights gathered in between; set "never" or "default"
[parallelism]; pipeline_parallel_degree = 2; fsdp_reduce_gradients = "last_accumulation_step"
> {file}: parallelism.fsdp_reduce_gradients = "last_accumulation_step": a pipeline reduces gradients once a microstep, after its
    last microbatch; set "every_accumulation_step", and a larger local_batch_size for fewer microsteps
compile.enable = true; parallelism.pipeline_parallel_degree = 2
$ --parallelism.pipeline_parallel_schedule=InterleavedZeroBubble
> {file}: compile.enable = true: "InterleavedZeroBubble" computes gradients of inputs and of weights apart, and a
    compiled block would compute all of them both times; set false, or the schedule to "Interleaved1F1B"
compile.enable = true; parallelism.pipeline_parallel_degree = 2
$ --parallelism.pipeline_parallel_schedule=ZBVZeroBubble
> {file}: compile.enable = true: "ZBVZeroBubble" computes gradients of inputs and of weights apart, and a compiled
    block would compute all of them both times; set false, or the schedule to "Interleaved1F1B"
compile.enable = true; parallelism.pipeline_parallel_degree = 2
$ --parallelism.pipeline_parallel_schedule=DualPipeV
> {file}: compile.enable = true: "DualPipeV" computes gradients of inputs and of weights apart, and a compiled block
    would compute all of them both times; set false, or the schedule to "Interleaved1F1B"

## stages
parallelism.pipeline_parallel_degree = 7
> {file}: parallelism.pipeline_parallel_degree = 7: 7 stages need at least as many layers, and model.n_layers = 6
parallelism.pipeline_parallel_degree = 2; model.n_layers = 3
$ --parallelism.pipeline_parallel_schedule=LoopedBFS
> {file}: parallelism.pipeline_parallel_degree = 2: 4 stages need at least as many layers, and model.n_layers = 3
parallelism.pipeline_parallel_degree = 2; model.n_layers = 5
$ --parallelism.pipeline_parallel_schedule=LoopedBFS --parallelism.pipeline_parallel_stages_per_rank=3
> {file}: parallelism.pipeline_parallel_degree = 2: 6 stages need at least as many layers, and model.n_layers = 5
[parallelism]; pipeline_parallel_degree = 2; pipeline_parallel_balance = "parameters"
pipeline_parallel_first_stage_less_layers = 2; pipeline_parallel_last_stage_less_layers = 0
> {file}: parallelism.pipeline_parallel_first_stage_less_layers = 2: read only when
    parallelism.pipeline_parallel_balance is "layers"; remove it
> {file}: parallelism.pipeline_parallel_last_stage_less_layers = 0: read only when
    parallelism.pipeline_parallel_balance is "layers"; remove it
model.n_layers = 2
[parallelism]; module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]
pipeline_parallel_degree = 2; pipeline_parallel_balance = "parameters"
pipeline_parallel_first_stage_less_layers = 2; pipeline_parallel_last_stage_less_layers = 0
> {file}: parallelism.pipeline_parallel_balance = "parameters": parallelism.module_fqns_per_model_part names the stages'
    modules; remove one of the two
> {file}: parallelism.pipeline_parallel_first_stage_less_layers = 2: parallelism.module_fqns_per_model_part names the
    stages' modules; remove one of the two
> {file}: parallelism.pipeline_parallel_last_stage_less_layers = 0: parallelism.module_fqns_per_model_part names the
    stages' modules; remove one of the two
# lists, layers, order and names of modules
model.n_layers = 2; parallelism.pipeline_parallel_degree = 2
$ --parallelism.module_fqns_per_model_part=[["tok_embeddings","layers.0","layers.1","norm","output"]]
> command line: parallelism.module_fqns_per_model_part = [["tok_embeddings", "layers.0", "layers.1", "norm", "output"]]:
    expected 2 lists, one a stage, got 1
model.n_layers = 2; parallelism.pipeline_parallel_degree = 2
$ --parallelism.module_fqns_per_model_part=[["tok_embeddings","layers.0"],["layers.1","norm","output"]]
$ --parallelism.pipeline_parallel_schedule=LoopedBFS
> command line: parallelism.module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["layers.1", "norm",
    "output"]]: expected 4 lists, one a stage, got 2
model.n_layers = 2; parallelism.pipeline_parallel_degree = 2
$ --parallelism.module_fqns_per_model_part=[["tok_embeddings"],["layers.0","layers.1","norm","output"]]
> command line: parallelism.module_fqns_per_model_part = [["tok_embeddings"], ["layers.0", "layers.1", "norm",
    "output"]]: expected at least one layer in each stage
model.n_layers = 2; parallelism.pipeline_parallel_degree = 2
$ --parallelism.module_fqns_per_model_part=[["tok_embeddings","layers.1"],["layers.0","norm","output"]]
> command line: parallelism.module_fqns_per_model_part = [["tok_embeddings", "layers.1"], ["layers.0", "norm",
    "output"]]: expected tok_embeddings, every layers.N in order, norm, output; got "layers.1" where "layers.0" belongs
model.n_layers = 3; parallelism.pipeline_parallel_degree = 2
$ --parallelism.module_fqns_per_model_part=[["tok_embeddings","layers.0"],["layers.1","norm","head"]]
> command line: parallelism.module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["layers.1", "norm",
    "head"]]: expected tok_embeddings, every layers.N in order, norm, output; got "norm" where "layers.2" belongs
model.n_layers = 2; parallelism.pipeline_parallel_degree = 2
$ --parallelism.module_fqns_per_model_part=[["tok_embeddings","layers.0"],["layers.1","norm","head"]]
> command line: parallelism.module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["layers.1", "norm",
    "head"]]: expected tok_embeddings, every layers.N in order, norm, output; got "head" where "output" belongs
# no name, one name short, and one too many
model.n_layers = 2; parallelism.pipeline_parallel_degree = 2
$ --parallelism.module_fqns_per_model_part=[["tok_embeddings","layers.0"],["layers.1","norm",""]]
> command line: parallelism.module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["layers.1", "norm", ""]]:
    expected tok_embeddings, every layers.N in order, norm, output; got "" where "output" belongs
model.n_layers = 2; parallelism.pipeline_parallel_degree = 2
$ --parallelism.module_fqns_per_model_part=[["tok_embeddings","layers.0"],["layers.1","norm"]]
> command line: parallelism.module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["layers.1", "norm"]]:
    expected tok_embeddings, every layers.N in order, norm, output; got nothing where "output" belongs
model.n_layers = 2; parallelism.pipeline_parallel_degree = 2
$ --parallelism.module_fqns_per_model_part=[["tok_embeddings","layers.0"],["layers.1","norm","output","head"]]
> command line: parallelism.module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output",
    "head"]]: expected tok_embeddings, every layers.N in order, norm, output; got "head" where nothing belongs

## argument
$ --training --training. --steps=3 --.steps=3 -- --training=3 -training.steps=3
> command line: --training: expected --section.key=value
> command line: --training.: expected --section.key=value
> command line: --steps=3: expected --section.key=value
> command line: --.steps=3: expected --section.key=value
> command line: --: expected --section.key=value
> command line: --training=3: expected --section.key=value
> command line: -training.steps=3: expected --section.key=value
$ --training.steps 3
> command line: expected one TOML file, got 2 files: {file} 3; {usage}
> command line: --training.steps: expected a value; write --training.steps=VALUE
$ --optimizer.lr --job.dump_folder --training.dataset --checkpoint.load_step
> command line: --optimizer.lr: expected a value; write --optimizer.lr=VALUE
> command line: --job.dump_folder: expected a value; write --job.dump_folder=VALUE
> command line: --training.dataset: expected a value; write --training.dataset=VALUE
> command line: --checkpoint.load_step: expected a value; write --checkpoint.load_step=VALUE
# no value, a word, two =, Python's False, too large for a float
$ --training.steps= --training.seq_len=many --training.streaming_shards==3 --training.shuffle=False --model.rope_theta=1e400
> command line: model.rope_theta = inf: expected a finite number above 0
> command line: training.streaming_shards = "=3": expected a whole number at least 1
> command line: training.shuffle = "False": expected true or false
> command line: training.seq_len = "many": expected a whole number at least 1
> command line: training.steps = "": expected a whole number at least 1
$ --training.dtype=float16 --training.global_batch_size=8.0 --comm.trace_buf_size=-1 --optimizer.lr="8e-4"
> command line: training.global_batch_size = 8.0: expected -1, or a whole number at least 1
> command line: training.dtype = "float16": expected one of "float32", "bfloat16", "float64"
> command line: optimizer.lr = "8e-4": expected a number above 0
> command line: comm.trace_buf_size = -1: expected a whole number at least 0
# a list is TOML: its strings need quotes
$ --parallelism.module_fqns_per_model_part=[[layers.0]]
> command line: parallelism.module_fqns_per_model_part = "[[layers.0]]": expected a list of lists of strings
$ --parallelism.module_fqns_per_model_part=[["layers.0"],3]
> command line: parallelism.module_fqns_per_model_part = [["layers.0"], 3]: expected a list of lists of strings
$ --parallelism.module_fqns_per_model_part --parallelism.tensor_parallel_degree --training.attention_backend
> command line: --parallelism.module_fqns_per_model_part: expected a value; write
    --parallelism.module_fqns_per_model_part=VALUE
> command line: --parallelism.tensor_parallel_degree: expected a value; write --parallelism.tensor_parallel_degree=VALUE
> command line: --training.attention_backend: expected a value; write
    --training.attention_backend=VALUE

## several
[training]; steps = 0; shufle = true; dataset = "text"; global_batch_size = 12
[nothing]
[model]; n_kv_heads = 3; dim = 2.5
[optimizer]; lr = "high"
$ --training.seq_len --comm.trace_buf_size=false --oops
> command line: --training.seq_len: expected a value; write --training.seq_len=VALUE
> command line: --oops: expected --section.key=value
> {file}: [nothing]: an unknown section; --help lists every option
> {file}: model.dim = 2.5: expected a whole number at least 1
> {file}: training.steps = 0: expected a whole number at least 1
> {file}: training.shufle = true: unknown key; did you mean training.shuffle?
> {file}: optimizer.lr = "high": expected a number above 0
> command line: comm.trace_buf_size = false: expected a whole number at least 0
> {file}: model.n_kv_heads = 3: expected a divisor of model.n_heads = 16; each key head serves a group of query heads
> {file}: training.dataset_path = "" (default): training.dataset = "text" needs a file, folder or glob
> {file}: training.global_batch_size = 12: expected a multiple of training.local_batch_size = 8
# a default that was written out is not marked as one
training.dataset = "c4"; training.streaming = true; training.shuffle = true
> {file}: training.shuffle = true: a stream cannot be drawn in a random order that survives a stop and a resume
    exactly; set false (documents come in their files' order), or training.streaming = false
training.steps = 0; optimizer.beta1 = 2
$ --training.steps=-5
> command line: training.steps = -5: expected a whole number at least 1
> {file}: optimizer.beta1 = 2: expected a number at least 0 and below 1
# of each parallelism
training.seq_len = 30; model.n_heads = 64
[parallelism]; tensor_parallel_degree = 16; pipeline_parallel_degree = 7; pipeline_parallel_microbatch_size = 3
context_parallel_degree = 4; context_parallel_ulysses_degree = 3
> {file}: parallelism.tensor_parallel_degree = 16: expected a divisor of model.n_kv_heads = 8, which the ranks share
> {file}: parallelism.context_parallel_ulysses_degree = 3: expected a divisor of parallelism.context_parallel_degree =
    4, of which it is the inner part
> {file}: training.seq_len = 30: expected a multiple of 64, to be cut evenly over context parallel 4 x tensor parallel
    16
> {file}: parallelism.pipeline_parallel_degree = 7: 7 stages need at least as many layers, and model.n_layers = 6
> {file}: parallelism.pipeline_parallel_microbatch_size = 3: expected a divisor of training.local_batch_size = 8

## silent rule
model.dim = 0; model.n_heads = 24
> {file}: model.dim = 0: expected a whole number at least 1
model.dim = 0; model.n_heads = 256
> {file}: model.dim = 0: expected a whole number at least 1
model.flavor = 3; model.n_heads = 256
> {file}: model.flavor = 3: expected {flavors}
model.n_heads = "x"; model.n_kv_heads = 3
> {file}: model.n_heads = "x": expected a whole number at least 1
model.flavor = "llama"; model.n_heads = 24; model.n_kv_heads = 5
model.rope_scaling_factor = 8; model.rope_low_freq_factor = 9
> {file}: model.flavor = "llama": expected {flavors}
model.rope_scaling_factor = 8; model.rope_low_freq_factor = 9; model.rope_high_freq_factor = 0
> {file}: model.rope_high_freq_factor = 0: expected a number above 0
model.flavor = "llama3_8b"; model.rope_scaling_factor = 0; model.rope_low_freq_factor = 9
> {file}: model.rope_scaling_factor = 0: expected a number at least 1
training.dataset = "c5"; training.dataset_path = "x"; training.streaming = true; training.shuffle = false
validation.enable = true
> {file}: training.dataset = "c5": expected one of "pydoc_topics", "text", "json", "parquet", "c4", "hub"
training.dataset = "text"; training.dataset_path = "x"; training.streaming = true; training.shuffle = false
validation.enable = true; validation.dataset_path = 3
> {file}: validation.dataset_path = 3: expected a string
training.dataset = "text"; training.dataset_path = "x"
validation.enable = true; validation.fraction = 0.0; validation.dataset_path = 3
> {file}: validation.dataset_path = 3: expected a string
training.dataset = "hub"; training.dataset_path = "x"
validation.enable = true; validation.fraction = 0.0; validation.dataset_split = 3
> {file}: validation.dataset_split = 3: expected a string
training.streaming = "yes"; training.streaming_shards = 8; validation.enable = true; validation.fraction = 0.0
> {file}: training.streaming = "yes": expected true or false
training.local_batch_size = 0; training.global_batch_size = 12; training.steps = "many"; lr_scheduler.total_steps = 5
training.dtype = "f64"; training.mixed_precision_param = "bfloat16"
> {file}: training.local_batch_size = 0: expected a whole number at least 1
> {file}: training.steps = "many": expected a whole number at least 1
> {file}: training.dtype = "f64": expected one of "float32", "bfloat16", "float64"
training = 3; lr_scheduler.total_steps = 5
> {file}: training = 3: expected a section, written [training]
[parallelism]; tensor_parallel_degree = 0; disable_loss_parallel = true; enable_async_tensor_parallel = true
context_parallel_degree = 8; context_parallel_ulysses_degree = 16
> {file}: parallelism.tensor_parallel_degree = 0: expected a whole number at least 1
> {file}: parallelism.context_parallel_ulysses_degree = 16: expected a divisor of parallelism.context_parallel_degree =
    8, of which it is the inner part
[parallelism]; tensor_parallel_degree = "x"; context_parallel_degree = 16; context_parallel_ulysses_degree = 16
> {file}: parallelism.tensor_parallel_degree = "x": expected a whole number at least 1
model.n_kv_heads = 0; parallelism.tensor_parallel_degree = 16
> {file}: model.n_kv_heads = 0: expected a whole number at least 1
model.flavor = "llama"; parallelism.tensor_parallel_degree = 32
> {file}: model.flavor = "llama": expected {flavors}
training.attention_backend = "math"
[parallelism]; context_parallel_degree = 0; context_parallel_ulysses_degree = 2
> {file}: parallelism.context_parallel_degree = 0: expected a whole number at least 1
[parallelism]; context_parallel_degree = 3; context_parallel_ulysses_degree = "all"
> {file}: parallelism.context_parallel_ulysses_degree = "all": expected a whole number at least 1
training.seq_len = "long"; parallelism.context_parallel_degree = 3
> {file}: training.seq_len = "long": expected a whole number at least 1
[parallelism]; pipeline_parallel_degree = 0; pipeline_parallel_schedule = "GPipe"; pipeline_parallel_balance = "layers"
module_fqns_per_model_part = [["x"]]
> {file}: parallelism.pipeline_parallel_degree = 0: expected a whole number at least 1
[parallelism]; pipeline_parallel_degree = 4; pipeline_parallel_schedule = "BFS"; pipeline_parallel_stages_per_rank = 2
module_fqns_per_model_part = [["x"]]
> {file}: parallelism.pipeline_parallel_schedule = "BFS": expected one of "GPipe", "1F1B", "Interleaved1F1B",
    "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
model.n_layers = 0; training.local_batch_size = 0
[parallelism]; pipeline_parallel_degree = 7; pipeline_parallel_microbatch_size = 3
> {file}: model.n_layers = 0: expected a whole number at least 1
> {file}: training.local_batch_size = 0: expected a whole number at least 1
model.tie_embeddings = 1; model.n_layers = 32; training.local_batch_size = 8
[parallelism]; pipeline_parallel_degree = 16; pipeline_parallel_microbatch_size = "all"
> {file}: model.tie_embeddings = 1: expected true or false
> {file}: parallelism.pipeline_parallel_microbatch_size = "all": expected a whole number at least 1
[parallelism]; pipeline_parallel_degree = 2; pipeline_parallel_balance = 3
pipeline_parallel_schedule = "DualPipeV"; fsdp_reshard_after_forward = "sometimes"; fsdp_reduce_gradients = "seldom"
> {file}: parallelism.fsdp_reshard_after_forward = "sometimes": expected one of "default", "always", "never", or a
    whole number at least 2
> {file}: parallelism.fsdp_reduce_gradients = "seldom": expected one of "every_accumulation_step", "last_accumulation_step"
> {file}: parallelism.pipeline_parallel_balance = 3: expected one of "layers", "parameters"
training.document_mask = "yes"; training.attention_backend = "math"
> {file}: training.document_mask = "yes": expected true or false
compile.enable = "yes"; compile.backend = "aot_eager"
parallelism.tensor_parallel_degree = 2; parallelism.enable_async_tensor_parallel = true
> {file}: compile.enable = "yes": expected true or false
compile.enable = true; compile.backend = "eager"; activation_checkpoint.mode = "memory_budget"
parallelism.tensor_parallel_degree = 2; parallelism.enable_async_tensor_parallel = true
> {file}: compile.backend = "eager": expected one of "inductor", "aot_eager"
compile.enable = "yes"; activation_checkpoint.mode = "memory_budget"
> {file}: compile.enable = "yes": expected true or false
[activation_checkpoint]; mode = "op"; selective_ac_option = 2; memory_budget = 0.2
> {file}: activation_checkpoint.mode = "op": expected one of "none", "full", "selective", "memory_budget"
training.mixed_precision_param = "fp16"; training.initial_loss_scale = 8.0; training.loss_scale_growth_interval = 10
> {file}: training.mixed_precision_param = "fp16": expected one of "auto", "bfloat16", "float32", "float64", "float16"
training.dtype = "bf16"; optimizer.stochastic_rounding = true
> {file}: training.dtype = "bf16": expected one of "float32", "bfloat16", "float64"
[float8]; enable = "yes"; emulate = true
> {file}: float8.enable = "yes": expected true or false
[float8]; enable = true; enable_fsdp_float8_all_gather = 1; precompute_float8_dynamic_scale_for_fsdp = true
> {file}: float8.enable_fsdp_float8_all_gather = 1: expected true or false
# too many stages, and ends that go unread, if the parts were balanced
[parallelism]; pipeline_parallel_degree = 7; module_fqns_per_model_part = ["layers.0"]
pipeline_parallel_balance = "parameters"; pipeline_parallel_first_stage_less_layers = 2
> {file}: parallelism.module_fqns_per_model_part = ["layers.0"]: expected a list of lists of strings

## syntax
[training]; steps =; seq_len = 3
> {file}: not valid TOML: Invalid value (at line 2, column 8)
# nothing else is read then
training steps
$ --training.steps=0
> {file}: not valid TOML: Expected '=' after a key in a key/value pair (at line 1, column 10)

## launch
@ ranks=4 hosts=2 devices=1
> {file}: 2 ranks on this host, which has 1 device; start fewer (smaller degrees, or NGPU),
    or use more hosts (NNODES); python -m titanlite.plan {file} tells what it needs and how fast it will be
parallelism.data_parallel_shard_degree = 1
@ ranks=4 devices=0
> {file}: parallelism.data_parallel_shard_degree = 1: replicate 1 x shard 1 needs 1 rank, and the launch has 4; start 1
    (./run_train.sh does, without NGPU), or set the degrees to the ranks there are
parallelism.data_parallel_shard_degree = 4; parallelism.data_parallel_replicate_degree = 2
@ ranks=4 devices=8
> {file}: parallelism.data_parallel_shard_degree = 4: replicate 2 x shard 4 needs 8 ranks, and the launch has 4;
    start 8
    (./run_train.sh does, without NGPU), or set the degrees to the ranks there are
parallelism.data_parallel_replicate_degree = 8
@ ranks=4 devices=0
> {file}: parallelism.data_parallel_replicate_degree = 8: expected a divisor of the 4 ranks that the launch has;
    start a multiple of 8
# the shards of one replica
parallelism.fsdp_reshard_after_forward = 4; parallelism.data_parallel_replicate_degree = 2
@ ranks=8 devices=0
> {file}: parallelism.fsdp_reshard_after_forward = 4: expected one of "default", "always", "never", 2 for 4 shards
# shards are over the context-parallel ranks too
[parallelism]; fsdp_reshard_after_forward = 4; context_parallel_degree = 2
@ ranks=4 devices=0
> {file}: parallelism.fsdp_reshard_after_forward = 4: expected one of "default", "always", "never", 2 for 4 shards
[parallelism]; fsdp_reshard_after_forward = 2; data_parallel_replicate_degree = 2
@ ranks=4 devices=0
> {file}: parallelism.fsdp_reshard_after_forward = 2: expected one of "default", "always", "never" for 2 shards
[parallelism]; fsdp_reshard_after_forward = 3; context_parallel_degree = 4; data_parallel_replicate_degree = 2
@ ranks=16 devices=0
> {file}: parallelism.fsdp_reshard_after_forward = 3: expected one of "default", "always", "never", 2, 4 for 8 shards
parallelism.fsdp_reshard_after_forward = 2
@ ranks=1 devices=0
> {file}: parallelism.fsdp_reshard_after_forward = 2: expected one of "default", "always", "never" for 1 shard
# one degree that does not divide the ranks
parallelism.context_parallel_degree = 4
@ ranks=6 devices=0
> {file}: parallelism.context_parallel_degree = 4: expected a divisor of the 6 ranks that the launch has; start a
    multiple of 4
$ --parallelism.tensor_parallel_degree=2
@ ranks=1 devices=0
> command line: parallelism.tensor_parallel_degree = 2: expected a divisor of the 1 rank that the launch has; start a
    multiple of 2
parallelism.pipeline_parallel_degree = 3
@ ranks=8 devices=8
> {file}: parallelism.pipeline_parallel_degree = 3: expected a divisor of the 8 ranks that the launch has; start a
    multiple of 3
# several, with the shards that remain and with as many as are given
[parallelism]; pipeline_parallel_degree = 2; tensor_parallel_degree = 2
@ ranks=6 devices=0
> {file}: parallelism.pipeline_parallel_degree = 2: pipeline 2 x replicate 1 x tensor 2 needs a multiple of 4 ranks, and
    the launch has 6
[parallelism]; context_parallel_degree = 2
$ --parallelism.data_parallel_replicate_degree=3
@ ranks=8 devices=8
> command line: parallelism.data_parallel_replicate_degree = 3: replicate 3 x context 2 needs a multiple of 6 ranks, and
    the launch has 8
[parallelism]; pipeline_parallel_degree = 2; data_parallel_replicate_degree = 2; context_parallel_degree = 2
tensor_parallel_degree = 4; data_parallel_shard_degree = 2
@ ranks=32 devices=0
> {file}: parallelism.data_parallel_shard_degree = 2: pipeline 2 x replicate 2 x shard 2 x context 2 x tensor 4 needs 64
    ranks, and the launch has 32; start 64 (./run_train.sh does, without NGPU), or set the degrees to the ranks there
    are
parallelism.tensor_parallel_degree = 2; parallelism.data_parallel_shard_degree = 4
@ ranks=4 devices=8
> {file}: parallelism.data_parallel_shard_degree = 4: replicate 1 x shard 4 x tensor 2 needs 8 ranks, and the launch has
    4; start 8 (./run_train.sh does, without NGPU), or set the degrees to the ranks there are
# ranks that share sequences count once
parallelism.tensor_parallel_degree = 2; training.global_batch_size = 24
@ ranks=4 devices=0
> {file}: training.global_batch_size = 24: expected a multiple of local_batch_size x data-parallel ranks = 8 x 2 = 16
[parallelism]; pipeline_parallel_degree = 2; context_parallel_degree = 2; data_parallel_replicate_degree = 3
$ --training.global_batch_size=32
@ ranks=12 devices=0
> command line: training.global_batch_size = 32: expected a multiple of local_batch_size x data-parallel ranks = 8 x 3 =
    24
training.dataset = "c4"; training.streaming = true; training.shuffle = false; training.streaming_shards = 4
[parallelism]; tensor_parallel_degree = 2; context_parallel_degree = 2
@ ranks=12 devices=0
> {file}: training.streaming_shards = 4: expected a multiple of the data-parallel degree 3, so that each rank has whole streams
# what the devices can do
training.attention_backend = "flash"
[parallelism]; context_parallel_degree = 2
@ ranks=2 devices=0
> {file}: training.attention_backend = "flash": expected one of "auto", "cpu", "math" on a CPU
training.document_mask = true; training.attention_backend = "cpu"
@ ranks=1 devices=1
> {file}: training.attention_backend = "cpu": expected one of "auto", "flash", "cudnn", "efficient", "math" on
    CUDA in bfloat16
# by the type that is computed in, whatever the weights have
training.document_mask = true; training.mixed_precision_param = "float32"; training.attention_backend = "flash"
@ ranks=1 devices=1
> {file}: training.attention_backend = "flash": expected one of "auto", "efficient", "math" on CUDA in float32
training.attention_backend = "cudnn"
[parallelism]; context_parallel_degree = 2
$ --training.dtype=bfloat16 --training.mixed_precision_param=float32
@ ranks=2 devices=2
> {file}: training.attention_backend = "cudnn": expected one of "auto", "efficient", "math" on CUDA in float32
training.document_mask = true; training.mixed_precision_param = "float16"; training.attention_backend = "cpu"
@ ranks=1 devices=1
> {file}: training.attention_backend = "cpu": expected one of "auto", "flash", "cudnn", "efficient", "math" on
    CUDA in float16
training.dtype = "float64"; parallelism.context_parallel_degree = 2
$ --training.attention_backend=efficient
@ ranks=2 devices=2
> command line: training.attention_backend = "efficient": expected one of "auto", "math" on CUDA in float64
# a mask needs a kernel where context parallelism is turned off, too
training.attention_backend = "flash"
[parallelism]; context_parallel_degree = 1
$ --training.document_mask
@ ranks=1 devices=0
> {file}: training.attention_backend = "flash": expected one of "auto", "cpu", "math" on a CPU
compile.enable = true
[parallelism]; tensor_parallel_degree = 2; enable_async_tensor_parallel = true
@ ranks=2 devices=0
> {file}: parallelism.enable_async_tensor_parallel = true: needs CUDA, and this run is on a CPU; set false
float8.enable = true
@ ranks=1 devices=0
> {file}: float8.enable = true: needs CUDA, and this run is on a CPU; set float8.emulate = true, or this to false
float8.enable = true; training.mixed_precision_param = "float16"
@ ranks=1 devices=1
> {file}: float8.enable = true: its products give bfloat16, and the model computes in float16; set float8.emulate =
    true, or false here
training.dataset = "c4"; training.streaming = true; training.shuffle = false
@ ranks=3 devices=0
> {file}: training.streaming_shards = 64 (default): expected a multiple of the data-parallel degree 3, so that each rank has
    whole streams
# every rule at once, for the ranks that the degrees need
training.dataset = "c4"; training.streaming = true; training.shuffle = false; training.streaming_shards = 6
parallelism.data_parallel_shard_degree = 4; profiling.enable_memory_snapshot = true
$ --training.global_batch_size=24 --parallelism.fsdp_reshard_after_forward=3
@ ranks=6 devices=0
> {file}: parallelism.data_parallel_shard_degree = 4: replicate 1 x shard 4 needs 4 ranks, and the launch has 6;
    start 4
    (./run_train.sh does, without NGPU), or set the degrees to the ranks there are
> command line: parallelism.fsdp_reshard_after_forward = 3: expected one of "default", "always", "never", 2 for 4 shards
> command line: training.global_batch_size = 24: expected a multiple of local_batch_size x data-parallel ranks = 8 x 4 =
    32
> {file}: training.streaming_shards = 6: expected a multiple of the data-parallel degree 4, so that each rank has whole
    streams
> {file}: profiling.enable_memory_snapshot = true: needs CUDA, and this run is on a CPU; set false
# and with each parallelism
training.dataset = "c4"; training.streaming = true; training.shuffle = false; training.global_batch_size = 40
compile.enable = true; training.attention_backend = "cudnn"
[parallelism]; pipeline_parallel_degree = 2; context_parallel_degree = 2; tensor_parallel_degree = 2
data_parallel_shard_degree = 3; enable_async_tensor_parallel = true
@ ranks=8 devices=0
> {file}: parallelism.data_parallel_shard_degree = 3: pipeline 2 x replicate 1 x shard 3 x context 2 x tensor 2 needs 24
    ranks, and the launch has 8; start 24 (./run_train.sh does, without NGPU), or set the degrees to the ranks there are
> {file}: training.global_batch_size = 40: expected a multiple of local_batch_size x data-parallel ranks = 8 x 3 = 24
> {file}: training.streaming_shards = 64 (default): expected a multiple of the data-parallel degree 3, so that each rank has
    whole streams
> {file}: training.attention_backend = "cudnn": expected one of "auto", "cpu", "math" on a CPU
> {file}: parallelism.enable_async_tensor_parallel = true: needs CUDA, and this run is on a CPU; set false
training.global_batch_size = 16
@ ranks=9 devices=8
> {file}: 9 ranks on this host, which has 8 devices; start fewer (smaller degrees, or NGPU),
    or use more hosts (NNODES); python -m titanlite.plan {file} tells what it needs and how fast it will be
> {file}: training.global_batch_size = 16: expected a multiple of local_batch_size x ranks = 8 x 9 = 72

## ranks per host
$ --parallelism.data_parallel_shard_degree=3
@ NNODES=2 devices=0
> {file}: 3 ranks cannot be dealt evenly to NNODES = 2 hosts
$ --parallelism.data_parallel_replicate_degree=8
@ NNODES=3 devices=0
> {file}: 8 ranks cannot be dealt evenly to NNODES = 3 hosts
$ --parallelism.data_parallel_shard_degree=16
@ devices=8
> {file}: 16 ranks on this host, which has 8 devices; start fewer (smaller degrees, or NGPU),
    or use more hosts (NNODES); python -m titanlite.plan {file} tells what it needs and how fast it will be
@ NGPU=16 devices=8
> {file}: 16 ranks on this host, which has 8 devices; start fewer (smaller degrees, or NGPU),
    or use more hosts (NNODES); python -m titanlite.plan {file} tells what it needs and how fast it will be
# the launch is checked
$ --training.global_batch_size=16
@ NGPU=4 devices=8
> command line: training.global_batch_size = 16: expected a multiple of local_batch_size x ranks = 8 x 4 = 32
# replicas that do not divide the devices
$ --parallelism.data_parallel_replicate_degree=3
@ devices=8
> command line: parallelism.data_parallel_replicate_degree = 3: expected a divisor of the 8 ranks that the
    launch has; start a multiple of 3
$ --parallelism.pipeline_parallel_degree=2 --parallelism.tensor_parallel_degree=2
@ devices=6
> command line: parallelism.pipeline_parallel_degree = 2: pipeline 2 x replicate 1 x tensor 2 needs a multiple of 4
    ranks, and the launch has 6
$ --parallelism.context_parallel_degree=3 --training.seq_len=12 --parallelism.data_parallel_shard_degree=3
@ NNODES=2 devices=0
> {file}: 9 ranks cannot be dealt evenly to NNODES = 2 hosts
$ --parallelism.data_parallel_shard_degree=4
@ NGPU=3 devices=8
> command line: parallelism.data_parallel_shard_degree = 4: replicate 1 x shard 4 needs 4 ranks, and the launch has 3;
    start 4
    (./run_train.sh does, without NGPU), or set the degrees to the ranks there are
@ NGPU=0 devices=8
> environment: NGPU = "0": expected a whole number at least 1
@ NGPU=-2 devices=8
> environment: NGPU = "-2": expected a whole number at least 1
@ NNODES=1.5 devices=8
> environment: NNODES = "1.5": expected a whole number at least 1
"""


def read_given(given: list[str]) -> tuple[str, list[str], dict[str, str]]:
    """The file, the arguments and the launch of a case."""
    args = [argument for row in given if row.startswith("$ ") for argument in row[2:].split()]
    launch = dict(item.split("=") for row in given if row.startswith("@ ") for item in row[2:].split())
    toml = "\n".join(row.replace("; ", "\n") for row in given if not row.startswith(("$ ", "@ ")))
    return toml, args, launch


@pytest.mark.parametrize(
    ("given", "lines"),
    [pytest.param(given, lines, id=f"{title}: {' '.join(given)}") for title, given, lines in read(TABLE)],
)
def test_wrong_config(folder: Folder, given: list[str], lines: list[str]):
    toml, args, launch = read_given(given)
    if not launch:
        return folder.refused(lambda: folder.load(toml, *args), lines)
    loaded, devices = folder.load(toml, *args), int(launch["devices"])
    if "ranks" in launch:
        ranks = on(int(launch["ranks"]), hosts=int(launch.get("hosts", 1)), devices=devices)
        folder.refused(lambda: config.check(loaded, ranks), lines)
    else:
        folder.refused(lambda: config.ranks_per_node(loaded, launch, devices), lines)


ABSENT = """
parallelism.disable_loss_parallel = true; parallelism.enable_async_tensor_parallel = true
> parallelism.tensor_parallel_degree is above 1; set that, or remove it
parallelism.pipeline_parallel_schedule = "GPipe"; parallelism.pipeline_parallel_microbatch_size = 3
parallelism.pipeline_parallel_stages_per_rank = 2; parallelism.pipeline_parallel_balance = "parameters"
parallelism.pipeline_parallel_first_stage_less_layers = 0; parallelism.pipeline_parallel_last_stage_less_layers = 2
parallelism.module_fqns_per_model_part = [["layers.0"], ["layers.1"]]
> parallelism.pipeline_parallel_degree is above 1; set that, or remove it
compile.backend = "aot_eager"
> compile.enable is true; set that, or remove it
float8.recipe = "rowwise"; float8.emulate = true; float8.filter_fqns = ["layers.0."]
float8.enable_fsdp_float8_all_gather = true
> float8.enable is true; set that, or remove it
"""


@pytest.mark.parametrize(("assignment", "users"), read_values(ABSENT))
def test_option_of_an_absent_axis(folder: Folder, assignment: str, users: str):
    """Where its degree is not given, the option does nothing, which its user did not know; a given degree of 1 turns
    the axis of a file off, as compile.enable = false does compiling."""
    folder.refused(lambda: folder.load(assignment), [f"{{file}}: {assignment}: read only when {users}"])
    (key, value), axis = assignment.split(" = "), users.split()[0]
    off, on_ = ("false", "true") if axis.endswith(".enable") else (1, 2)
    for loaded in (
        folder.load(f"{assignment}\n{axis} = {off}"),
        folder.load(f"{assignment}\n{axis} = {on_}", f"--{axis}={off}"),
    ):
        resolved = config.check(loaded, on(1, devices=1))
        assert of(resolved, key) == of(loaded.config, key) == options.tomllib.loads(f"value = {value}")["value"]


def test_kernel_is_read_under_a_document_mask(folder: Folder):
    toml = "training.document_mask = true\ntraining.attention_backend = 'math'"
    assert config.check(folder.load(toml), on(1)).training.attention_backend == "math"


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "DualPipeV"])
def test_v_shaped_schedule_on_a_cpu_needs_a_torch_that_sends_to_no_rank_itself(folder: Folder, schedule: str):
    toml = f"parallelism.pipeline_parallel_degree = 2\nparallelism.pipeline_parallel_schedule = '{schedule}'"
    loaded = folder.load(toml)
    interleaved = folder.load(toml.replace(schedule, "InterleavedZeroBubble"))
    absent = folder.load(toml, "--parallelism.pipeline_parallel_degree=1")
    line = (
        f'{{file}}: parallelism.pipeline_parallel_schedule = "{schedule}": torch 2.11 lets a V-shaped schedule\'s rank '
        'send to itself, which gloo cannot; use a newer torch, or "InterleavedZeroBubble"'
    )
    for version in "2.11.0", "2.11.1+cpu", "2.11.0a0+git1234567":
        with patch("importlib.metadata.version", return_value=version):
            folder.refused(lambda: config.check(loaded, on(2)), [line])
            config.check(loaded, on(2, devices=2))
            config.check(interleaved, on(2))
            config.check(absent, on(2))
    for version in "2.12.0", "2.13.0+cpu", "3.0.0":
        with patch("importlib.metadata.version", return_value=version):
            config.check(loaded, on(2))


BUDGETED = "compile.enable = true\nactivation_checkpoint.mode = 'memory_budget'\n"
ZERO_BUBBLE = (
    "parallelism.pipeline_parallel_degree = 2\nparallelism.pipeline_parallel_schedule = 'InterleavedZeroBubble'\n"
)
IN_HALVES = 'fails at its backward in halves under "InterleavedZeroBubble"; use torch 2.13, or another schedule'


@pytest.mark.parametrize(
    ("toml", "cure", "line", "versions"),
    [
        (
            f"{BUDGETED}parallelism.tensor_parallel_degree = 2",
            "parallelism.tensor_parallel_degree=1",
            'activation_checkpoint.mode = "memory_budget": torch 2.12 cannot weigh the graphs of tensor parallel; use '
            "another torch, or another mode",
            ["2.12"],
        ),
        (
            f"{ZERO_BUBBLE}training.loss_chunks = 2",
            "parallelism.pipeline_parallel_schedule=1F1B",
            f"training.loss_chunks = 2: torch VERSION {IN_HALVES}",
            ["2.11", "2.12"],
        ),
        (
            f"{ZERO_BUBBLE}float8.enable = true\nfloat8.emulate = true",
            "parallelism.pipeline_parallel_schedule=1F1B",
            f"float8.enable = true: torch VERSION {IN_HALVES}",
            ["2.11", "2.12"],
        ),
    ],
    ids=["memory budget", "loss in parts", "float8"],
)
def test_what_fails_with_an_older_torch_is_refused_there(
    folder: Folder, toml: str, cure: str, line: str, versions: list[str]
):
    loaded, cured = folder.load(toml), folder.load(toml, f"--{cure}")
    for version in "2.11", "2.12", "2.13", "2.15":
        with patch("importlib.metadata.version", return_value=f"{version}.1+cu130"):
            if version in versions:
                folder.refused(lambda: config.check(loaded, on(2)), [f"{{file}}: {line.replace('VERSION', version)}"])
            else:
                config.check(loaded, on(2))
            config.check(cured, on(2))


def test_a_second_line_in_an_override_is_not_dropped(folder: Folder):
    line = r'command line: training.steps = "5\nx = 3": expected a whole number at least 1'
    folder.refused(lambda: folder.load("", "--training.steps=5\nx = 3"), [line])


# fmt: off
WRONG_FILES = {
    "nothing": ([], "command line: expected one TOML file, got no config file; {usage}"),
    "only an override": (["--debug.seed=3"], "command line: expected one TOML file, got no config file; {usage}"),
    "empty, as from an unset variable": ([""], "command line: expected one TOML file, got an empty path; {usage}"),
    "missing, like another": (["{folder}/rum.toml"], "{folder}/rum.toml: no such file; did you mean {file}?"),
    "missing, like another here": (["rum.toml"], "rum.toml: no such file; did you mean run.toml?"),
    "missing, relative": (["nowhere/debug.toml"], "nowhere/debug.toml: no such file in {folder}"),
    "missing, absolute": (["/nowhere/debug.toml"], "/nowhere/debug.toml: no such file"),
    "in a file": (["run.toml/debug.toml"], "run.toml/debug.toml: cannot be read: Not a directory"),
    "directory": (["{folder}"], "{folder}: cannot be read: Is a directory"),
    "not UTF-8": (["latin1"], "latin1: not valid TOML: 'utf-8' codec can't decode byte 0xe9 in position 2: invalid "
                              "continuation byte"),
}
# fmt: on


@pytest.mark.parametrize(("args", "line"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_wrong_file(folder: Folder, monkeypatch: pytest.MonkeyPatch, args: list[str], line: str):
    monkeypatch.chdir(folder.path)
    (folder.path / "latin1").write_bytes(b"# \xe9\n")
    folder.refused(lambda: config.load([folder.fill_in(argument) for argument in args]), [line])


@pytest.mark.parametrize(
    "toml", ["training.steps = " + "9" * 5000, "training.x = " + "[" * 5000 + "]" * 5000], ids=["digits", "brackets"]
)
def test_toml_that_the_parser_gives_up_on_is_one_line(folder: Folder, toml: str):
    with pytest.raises(ConfigError) as caught:  # the reason is Python's, in words that differ between versions
        folder.load(toml)
    assert [line.split(": ")[:2] for line in caught.value.problems] == [[str(folder.file), "not valid TOML"]]


def test_a_problem_is_one_line_whatever_the_key(folder: Folder):
    with pytest.raises(ConfigError) as caught:
        folder.load('[training]\n"a\\nb" = 3\n["c\\nd"]')
    assert [len(problem.splitlines()) for problem in caught.value.problems] == [1, 1]


# ---------------------------------------------------------------------------------------------------------------------
# Right configs

STREAMED_C4 = "training.dataset = 'c4'\ntraining.streaming = true\ntraining.shuffle = false\n"
STREAMED_TEXT = STREAMED_C4.replace("c4", "text") + "training.dataset_path = 'x'\n"
FLOAT8 = "float8.enable = true\n"

RIGHT = {
    "empty": "",
    "stream of c4, validated on its own split": f"{STREAMED_C4}validation.enable = true",
    "stream of text, validated on files": f"{STREAMED_TEXT}validation.enable = true\nvalidation.dataset_path = 'y'",
    "number of streams": f"{STREAMED_C4}training.streaming_shards = 6",
    "defaults that are not read, written out": "training.streaming_shards = 64\ntraining.dataset_split = 'train'\n"
    "training.initial_loss_scale = 65536.0\ntraining.loss_scale_growth_interval = 2000\nfloat8.emulate = false\n"
    "activation_checkpoint.selective_ac_option = 'op'\nactivation_checkpoint.memory_budget = 0.5",
    "hub dataset": "training.dataset = 'hub'\ntraining.dataset_path = 'allenai/c4'\ntraining.dataset_config = 'en'\n"
    "training.dataset_split = 'test'\ntraining.dataset_text_key = 'text'\nvalidation.dataset_split = 'validation'",
    "json at a path": "training.dataset = 'json'\ntraining.dataset_path = 'x'\ntraining.dataset_text_key = 'body'",
    "text by lines": "training.dataset = 'text'\ntraining.dataset_path = 'x'\ntraining.text_sample_by = 'line'",
    "held-out share of the built-in text": "validation.enable = true\nvalidation.fraction = 0.1",
    "nothing held out, nothing validated": "validation.fraction = 0.0",
    "float64": "training.dtype = 'float64'",
    "accumulation": "training.global_batch_size = 64",
    "horizon after the last step": "training.steps = 5\nlr_scheduler.total_steps = 9",
    "warm-up longer than the run": "training.steps = 5\nlr_scheduler.warmup_steps = 9",
    "rope factors that are not read": "model.rope_low_freq_factor = 9.0",
    "one key head": "model.n_kv_heads = 1",
    "compiled": "compile.enable = true",
    "compiled by another backend": "compile.enable = true\ncompile.backend = 'aot_eager'",
    "default backend, written out": "compile.backend = 'inductor'",
    "recomputed in full": "activation_checkpoint.mode = 'full'",
    "recomputation turned off": "activation_checkpoint.mode = 'none'\nactivation_checkpoint.selective_ac_option = 2",
    "float16 turned off": "training.mixed_precision_param = 'auto'\ntraining.initial_loss_scale = 8.0",
    "float8 turned off": "float8.enable = false\nfloat8.precompute_float8_dynamic_scale_for_fsdp = true",
    "each block recomputed": "activation_checkpoint.mode = 'selective'\nactivation_checkpoint.selective_ac_option = 1",
    "memory budget of another backend": f"{BUDGETED}compile.backend = 'aot_eager'",
    "least memory budget": f"{BUDGETED}activation_checkpoint.memory_budget = 0",
    "largest memory budget": f"{BUDGETED}activation_checkpoint.memory_budget = 1",
    "float16": "training.mixed_precision_param = 'float16'",
    "float16 from the least scale": "training.mixed_precision_param = 'float16'\n"
    "training.initial_loss_scale = 1e-30\ntraining.loss_scale_growth_interval = 1",
    "moments of fewer bits": "optimizer.state_dtype = 'int8'\noptimizer.implementation = 'fused'",
    "stochastic rounding": "training.dtype = 'bfloat16'\noptimizer.stochastic_rounding = true",
    "all of torchao's steps": "training.dtype = 'bfloat16'\noptimizer.stochastic_rounding = true\n"
    "optimizer.state_dtype = 'bfloat16'\noptimizer.name = 'Adam'",
    "torch's own step, another way": "training.dtype = 'bfloat16'\noptimizer.implementation = 'foreach'",
    "float8 of some layers, by rows": f"{FLOAT8}float8.recipe = 'rowwise'\nfloat8.filter_fqns = ['layers.0.', 'wk']",
    "float8 gathered": f"{FLOAT8}float8.enable_fsdp_float8_all_gather = true",
    "float8 gathered, scales at once": f"{FLOAT8}float8.enable_fsdp_float8_all_gather = true\n"
    "float8.precompute_float8_dynamic_scale_for_fsdp = true",
}


@pytest.mark.parametrize("toml", RIGHT.values(), ids=RIGHT)
def test_right_config_loads_and_its_resolved_form_loads_to_the_same(folder: Folder, toml: str):
    """What train.py leaves in the dump folder can be run again."""
    loaded = folder.load(toml)
    for section, keys in options.tomllib.loads(toml).items():
        for key, value in keys.items():
            assert of(loaded.config, f"{section}.{key}") == value
    resolved = config.check(loaded, on(2, devices=8))
    assert folder.load(resolved.toml()).config == resolved


# Neighbours of the wrong configs above. `>` gives the degrees that are resolved: pipeline x replicate x shard x context
# (of that Ulysses) x tensor.
RIGHT_PARALLELISMS = """
## tensor
parallelism.tensor_parallel_degree = 8; model.ffn_dim = 776; parallelism.disable_loss_parallel = true
@ ranks=8 devices=0
> 1 x 1 x 1 x 1 (1) x 8
compile.enable = true; parallelism.tensor_parallel_degree = 2; parallelism.enable_async_tensor_parallel = true
@ ranks=4 devices=4
> 1 x 1 x 2 x 1 (1) x 2
parallelism.tensor_parallel_degree = 4; training.seq_len = 32
@ ranks=4 devices=0
> 1 x 1 x 1 x 1 (1) x 4

## context
[parallelism]; context_parallel_degree = 4; context_parallel_ulysses_degree = 2
@ ranks=4 devices=0
> 1 x 1 x 1 x 4 (2) x 1
# as many as there are key heads; the others are in the ring
[parallelism]; context_parallel_degree = 32; context_parallel_ulysses_degree = 8
@ ranks=32 devices=0
> 1 x 1 x 1 x 32 (8) x 1
[parallelism]; context_parallel_degree = 4; context_parallel_ulysses_degree = 2; tensor_parallel_degree = 4
@ ranks=16 devices=0
> 1 x 1 x 1 x 4 (2) x 4
training.seq_len = 8; parallelism.context_parallel_degree = 2
@ ranks=2 devices=0
> 1 x 1 x 1 x 2 (1) x 1
training.seq_len = 16
[parallelism]; context_parallel_degree = 4; context_parallel_ulysses_degree = 2
@ ranks=4 devices=0
> 1 x 1 x 1 x 4 (2) x 1
# without a ring, one chunk a rank
training.seq_len = 12
[parallelism]; context_parallel_degree = 4; context_parallel_ulysses_degree = 4
@ ranks=4 devices=0
> 1 x 1 x 1 x 4 (4) x 1
training.seq_len = 6
[parallelism]; context_parallel_degree = 2; context_parallel_ulysses_degree = 2
@ ranks=2 devices=0
> 1 x 1 x 1 x 2 (2) x 1
training.seq_len = 4
[parallelism]; context_parallel_degree = 2; context_parallel_ulysses_degree = 2; tensor_parallel_degree = 2
@ ranks=4 devices=0
> 1 x 1 x 1 x 2 (2) x 2
training.seq_len = 8
[parallelism]; context_parallel_degree = 2; tensor_parallel_degree = 4
@ ranks=8 devices=0
> 1 x 1 x 1 x 2 (1) x 4
training.attention_backend = "cpu"
[parallelism]; context_parallel_degree = 2
@ ranks=2 devices=0
> 1 x 1 x 1 x 2 (1) x 1
training.attention_backend = "cudnn"
[parallelism]; context_parallel_degree = 2
@ ranks=2 devices=2
> 1 x 1 x 1 x 2 (1) x 1
training.attention_backend = "math"
[parallelism]; context_parallel_degree = 2
@ ranks=2 devices=0
> 1 x 1 x 1 x 2 (1) x 1

## axis turned off
# what its other options say is not read, be it left in the file or on the command line
[parallelism]; context_parallel_degree = 4; context_parallel_ulysses_degree = 4
$ --parallelism.context_parallel_degree=1
@ ranks=1 devices=0
> 1 x 1 x 1 x 1 (1) x 1
parallelism.context_parallel_degree = 1
$ --parallelism.context_parallel_ulysses_degree=3
@ ranks=2 devices=0
> 1 x 1 x 2 x 1 (1) x 1
# not cut, and no heads traded
training.seq_len = 7; model.n_heads = 4; model.n_kv_heads = 2
[parallelism]; context_parallel_degree = 1; context_parallel_ulysses_degree = 8
@ ranks=1 devices=0
> 1 x 1 x 1 x 1 (1) x 1
[parallelism]; tensor_parallel_degree = 2; enable_async_tensor_parallel = true
$ --parallelism.tensor_parallel_degree=1
@ ranks=1 devices=0
> 1 x 1 x 1 x 1 (1) x 1

## pipeline
model.tie_embeddings = false; parallelism.pipeline_parallel_degree = 2
@ ranks=2 devices=0
> 2 x 1 x 1 x 1 (1) x 1
[parallelism]; pipeline_parallel_degree = 2; pipeline_parallel_stages_per_rank = 1; pipeline_parallel_schedule = "GPipe"
@ ranks=2 devices=0
> 2 x 1 x 1 x 1 (1) x 1
[parallelism]; pipeline_parallel_degree = 2; pipeline_parallel_stages_per_rank = 3
$ --parallelism.pipeline_parallel_schedule=LoopedBFS
@ ranks=2 devices=0
> 2 x 1 x 1 x 1 (1) x 1
[parallelism]; pipeline_parallel_degree = 2; pipeline_parallel_stages_per_rank = 2
$ --parallelism.pipeline_parallel_schedule=DualPipeV
@ ranks=2 devices=2
> 2 x 1 x 1 x 1 (1) x 1
# as many microbatches as stages, or more; fewer under a schedule that may
training.local_batch_size = 10
[parallelism]; pipeline_parallel_degree = 4; pipeline_parallel_microbatch_size = 2
@ ranks=4 devices=0
> 4 x 1 x 1 x 1 (1) x 1
[parallelism]; pipeline_parallel_degree = 4; pipeline_parallel_microbatch_size = 2
@ ranks=4 devices=0
> 4 x 1 x 1 x 1 (1) x 1
[parallelism]; pipeline_parallel_degree = 2; pipeline_parallel_microbatch_size = 2
$ --parallelism.pipeline_parallel_schedule=DualPipeV
@ ranks=2 devices=2
> 2 x 1 x 1 x 1 (1) x 1
[parallelism]; pipeline_parallel_degree = 4; pipeline_parallel_microbatch_size = 4; pipeline_parallel_schedule = "GPipe"
@ ranks=4 devices=0
> 4 x 1 x 1 x 1 (1) x 1
# rounds of equal size; less than two rounds
training.local_batch_size = 6; parallelism.pipeline_parallel_degree = 2
$ --parallelism.pipeline_parallel_schedule=Interleaved1F1B
@ ranks=2 devices=0
> 2 x 1 x 1 x 1 (1) x 1
training.local_batch_size = 10
[parallelism]; pipeline_parallel_degree = 3; pipeline_parallel_microbatch_size = 2
$ --parallelism.pipeline_parallel_schedule=InterleavedZeroBubble
@ ranks=3 devices=0
> 3 x 1 x 1 x 1 (1) x 1
# other schedules take any number
training.local_batch_size = 5; parallelism.pipeline_parallel_degree = 2
$ --parallelism.pipeline_parallel_schedule=LoopedBFS
@ ranks=2 devices=0
> 2 x 1 x 1 x 1 (1) x 1
[parallelism]; pipeline_parallel_degree = 2; fsdp_reshard_after_forward = "never"
$ --parallelism.pipeline_parallel_schedule=ZBVZeroBubble
@ ranks=2 devices=2
> 2 x 1 x 1 x 1 (1) x 1
[parallelism]; pipeline_parallel_degree = 2; fsdp_reshard_after_forward = "always"; pipeline_parallel_balance = "layers"
@ ranks=4 devices=0
> 2 x 1 x 2 x 1 (1) x 1
# compiled; a zero-bubble schedule that is not read
compile.enable = true; compile.backend = "aot_eager"; parallelism.pipeline_parallel_degree = 2
@ ranks=2 devices=0
> 2 x 1 x 1 x 1 (1) x 1
compile.enable = true; parallelism.pipeline_parallel_degree = 2
$ --parallelism.pipeline_parallel_schedule=Interleaved1F1B
@ ranks=2 devices=0
> 2 x 1 x 1 x 1 (1) x 1
compile.enable = false; parallelism.pipeline_parallel_degree = 2
$ --parallelism.pipeline_parallel_schedule=InterleavedZeroBubble
@ ranks=2 devices=0
> 2 x 1 x 1 x 1 (1) x 1
compile.enable = true; parallelism.pipeline_parallel_degree = 1
$ --parallelism.pipeline_parallel_schedule=DualPipeV
@ ranks=1 devices=0
> 1 x 1 x 1 x 1 (1) x 1
# no pipeline
[parallelism]; fsdp_reduce_gradients = "last_accumulation_step"; fsdp_reshard_after_forward = "never"
@ ranks=2 devices=0
> 1 x 1 x 2 x 1 (1) x 1
model.tie_embeddings = true; model.n_layers = 1; parallelism.pipeline_parallel_degree = 1
@ ranks=2 devices=0
> 1 x 1 x 2 x 1 (1) x 1

## stages
parallelism.pipeline_parallel_degree = 6
@ ranks=6 devices=0
> 6 x 1 x 1 x 1 (1) x 1
parallelism.pipeline_parallel_degree = 2; model.n_layers = 4
$ --parallelism.pipeline_parallel_schedule=LoopedBFS
@ ranks=2 devices=0
> 2 x 1 x 1 x 1 (1) x 1
[parallelism]; pipeline_parallel_degree = 2; pipeline_parallel_balance = "parameters"
@ ranks=2 devices=0
> 2 x 1 x 1 x 1 (1) x 1
[parallelism]; pipeline_parallel_degree = 2
pipeline_parallel_first_stage_less_layers = 2; pipeline_parallel_last_stage_less_layers = 0
@ ranks=2 devices=0
> 2 x 1 x 1 x 1 (1) x 1
model.n_layers = 2
[parallelism]; module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]
pipeline_parallel_degree = 2
@ ranks=2 devices=0
> 2 x 1 x 1 x 1 (1) x 1

## launch
[parallelism]; fsdp_reshard_after_forward = 2; context_parallel_degree = 2
@ ranks=4 devices=0
> 1 x 1 x 2 x 2 (1) x 1
[parallelism]; fsdp_reshard_after_forward = 4; context_parallel_degree = 8
@ ranks=8 devices=0
> 1 x 1 x 1 x 8 (1) x 1
[parallelism]; pipeline_parallel_degree = 2; data_parallel_replicate_degree = 2; context_parallel_degree = 2
tensor_parallel_degree = 4; data_parallel_shard_degree = 2
@ ranks=64 devices=0
> 2 x 2 x 2 x 2 (1) x 4
[parallelism]; pipeline_parallel_degree = 2; data_parallel_replicate_degree = 2; context_parallel_degree = 2
tensor_parallel_degree = 4
@ ranks=96 devices=0
> 2 x 2 x 3 x 2 (1) x 4
parallelism.tensor_parallel_degree = 2; training.global_batch_size = 32
@ ranks=4 devices=0
> 1 x 1 x 2 x 1 (1) x 2
training.dataset = "c4"; training.streaming = true; training.shuffle = false; training.streaming_shards = 3
[parallelism]; tensor_parallel_degree = 2; context_parallel_degree = 2
@ ranks=12 devices=0
> 1 x 1 x 3 x 2 (1) x 2
# float8 where there are products of it, emulated, and turned off
float8.enable = true
@ ranks=1 devices=1
> 1 x 1 x 1 x 1 (1) x 1
float8.enable = true; float8.emulate = true
@ ranks=1 devices=0
> 1 x 1 x 1 x 1 (1) x 1
float8.enable = true
$ --float8.enable=false
@ ranks=1 devices=0
> 1 x 1 x 1 x 1 (1) x 1
"""


@pytest.mark.parametrize(
    ("given", "degrees"),
    [
        pytest.param(given, degrees, id=f"{title}: {' '.join(given)}")
        for title, given, (degrees,) in read(RIGHT_PARALLELISMS)
    ],
)
def test_right_parallelism(folder: Folder, given: list[str], degrees: str):
    toml, args, launch = read_given(given)
    resolved = config.check(folder.load(toml, *args), on(int(launch["ranks"]), devices=int(launch["devices"])))
    pipeline, replicate, shard, context, ulysses, tensor = (
        of(resolved, key) for key in (PIPELINE, REPLICATE, SHARD, CONTEXT, ULYSSES, TENSOR)
    )
    assert degrees == f"{pipeline} x {replicate} x {shard} x {context} ({ulysses}) x {tensor}"
    assert folder.load(resolved.toml()).config == resolved


def test_list_of_lists_in_a_file_and_on_the_command_line(folder: Folder):
    parts = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]
    toml = "model.n_layers = 2\nparallelism.pipeline_parallel_degree = 2\n"
    key, on_lines = "parallelism.module_fqns_per_model_part", options.show(parts).replace("], ", "],\n  ")
    for loaded in (
        folder.load(f"{toml}{key} = {on_lines}"),
        folder.load(toml, f"--{key}={options.show(parts)}"),
        folder.load(toml, f"--{key}={parts}"),  # Python's single quotes are TOML too
        folder.load(f"{toml}{key} = [['norm']]", f"--{key}={options.show(parts)}"),
    ):
        assert loaded.config.parallelism.module_fqns_per_model_part == parts
    assert folder.load(f"{toml}{key} = {on_lines}", f"--{key}=[]").config.parallelism.module_fqns_per_model_part == []
    assert Config().parallelism.module_fqns_per_model_part == []


def test_a_byte_order_mark_is_read_over(folder: Folder):
    """Windows editors write one."""
    assert folder.load("\ufefftraining.steps = 3").config.training.steps == 3


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.toml")), ids=lambda path: path.name)
def test_shipped_config_loads(path: Path):
    config.load([str(path)])


@pytest.mark.parametrize("flavor", SIZES)
def test_flavor_fills_the_dimensions_and_keys_override_them(folder: Folder, flavor: str):
    loaded = folder.load(f"model.flavor = '{flavor}'\noptimizer.eps = 3e-9\njob.description = 'é = \"#\"'")
    model = loaded.config.model.model_dump()
    assert {key: model[key] for key in SIZES[flavor]} == SIZES[flavor]
    assert folder.load(loaded.config.toml()).config == loaded.config  # printed and read again
    changed = folder.load(f"model.flavor = '{flavor}'\nmodel.vocab_size = 77", "--model.n_layers=3").config.model
    assert changed.model_dump() == {**model, "vocab_size": 77, "n_layers": 3}


def test_flavor_on_the_command_line_keeps_the_files_dimensions(folder: Folder):
    model = folder.load("model.n_layers = 3", "--model.flavor=llama3_8b").config.model
    assert (model.flavor, model.n_layers, model.dim) == ("llama3_8b", 3, 4096)


def test_debug_is_the_default_flavor(folder: Folder):
    model = folder.load().config.model
    assert (model.dim, model.n_layers, model.n_heads, model.n_kv_heads, model.ffn_dim) == (256, 6, 16, 8, 768)
    assert Config().model == model


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("--training.steps=1_000", 1000),
        ("--optimizer.lr=1e-4", 1e-4),
        ("--training.shuffle=false", False),
        ("--checkpoint.enable", True),
        ("--optimizer.name=Adam", "Adam"),
        ("--parallelism.fsdp_reshard_after_forward=never", "never"),
        ("--job.description=a word, or = more", "a word, or = more"),
        ("--job.dump_folder=a=b=c", "a=b=c"),
        ("--job.description=", ""),
        ("--job.description=12", "12"),
        ("--job.description=true", "true"),
        ("--job.description=[1", "[1"),
        ("--job.description=C:\\new", "C:\\new"),
        ("--job.description=# x", "# x"),
        ('--job.description="quoted"', "quoted"),
        ("--job.description='quoted'", "quoted"),
    ],
)
def test_override(folder: Folder, argument: str, value: Any):
    loaded = folder.load("training.steps = 2\njob.description = 'file'\ntraining.shuffle = true", argument)
    assert typed(of(loaded.config, argument[2:].split("=")[0])) == typed(value)


def test_the_last_override_of_a_key_holds(folder: Folder):
    again = ["--training.steps=wrong", "--training.steps=4", "--training.shuffle=false", "--training.shuffle"]
    training = folder.load("training.steps = 2", *again).config.training
    assert (training.steps, training.shuffle) == (4, True)


def test_overrides_may_stand_before_the_file(folder: Folder):
    loaded = config.load(["--training.steps=3", str(folder.file), "--training.seq_len=5"])
    assert (loaded.config.training.steps, loaded.config.training.seq_len) == (3, 5)
    keys = "training.steps", "training.seq_len"
    assert (loaded.file, loaded.origins) == (str(folder.file), dict.fromkeys(keys, "command line"))


# ---------------------------------------------------------------------------------------------------------------------
# A config and a launch

REPLICATE = "parallelism.data_parallel_replicate_degree"
SHARD = "parallelism.data_parallel_shard_degree"
RESHARD_KEY = "parallelism.fsdp_reshard_after_forward"
KERNEL = "training.attention_backend"
CONTEXT = "parallelism.context_parallel_degree"
ULYSSES = "parallelism.context_parallel_ulysses_degree"
TENSOR = "parallelism.tensor_parallel_degree"
PIPELINE = "parallelism.pipeline_parallel_degree"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
STAGES = "parallelism.pipeline_parallel_stages_per_rank"

RESOLVED_KEYS = (
    *(REPLICATE, SHARD, "training.global_batch_size", "training.mixed_precision_param"),
    *("training.mixed_precision_reduce", "lr_scheduler.total_steps"),
)
F16 = "training.mixed_precision_param = 'float16'"
PRECISIONS = 'training.mixed_precision_param = "float32"\ntraining.mixed_precision_reduce = "bfloat16"'
# fmt: off
RESOLVED = {  # config, launch, values of RESOLVED_KEYS
    "one CPU rank":     ("", on(1),                                     (1, 1, 8, "float32", "float32", 10_000)),
    "eight GPUs":       ("", on(8, devices=8),                          (1, 8, 64, "bfloat16", "float32", 10_000)),
    "two hosts":        ("", on(16, devices=8, hosts=2),                (1, 16, 128, "bfloat16", "float32", 10_000)),
    "replicas":         (f"{REPLICATE} = 2", on(4),                     (2, 2, 32, "float32", "float32", 10_000)),
    "only replicas":    (f"{REPLICATE} = 4", on(4),                     (4, 1, 32, "float32", "float32", 10_000)),
    "groups of shards": (f"{RESHARD_KEY} = 2", on(4),                   (1, 4, 32, "float32", "float32", 10_000)),
    "bfloat16 on CPU":  ("training.dtype = 'bfloat16'", on(1),          (1, 1, 8, "bfloat16", "float32", 10_000)),
    "bfloat16 on GPU":  ("training.dtype = 'bfloat16'", on(1, devices=1), (1, 1, 8, "bfloat16", "float32", 10_000)),
    "float64 on CPU":   ("training.dtype = 'float64'", on(1),           (1, 1, 8, "float64", "float64", 10_000)),
    "float64 on GPU":   ("training.dtype = 'float64'", on(1, devices=1), (1, 1, 8, "float64", "float64", 10_000)),
    "float16 on CPU":   (F16, on(1),                                    (1, 1, 8, "float16", "float32", 10_000)),
    "float16 on GPU":   (F16, on(1, devices=1),                         (1, 1, 8, "float16", "float32", 10_000)),
    "given precisions": (PRECISIONS, on(1, devices=1),                  (1, 1, 8, "float32", "bfloat16", 10_000)),
    "steps":            ("training.steps = 7", on(1),                   (1, 1, 8, "float32", "float32", 7)),
    "given horizon":    ("lr_scheduler.total_steps = 10_001", on(1),    (1, 1, 8, "float32", "float32", 10_001)),
    "accumulation":     ("training.global_batch_size = 96", on(2),      (1, 2, 96, "float32", "float32", 10_000)),
}

RESOLVED_PARALLELISM_KEYS = (SHARD, "training.global_batch_size", RESHARD_KEY, KERNEL, STAGES)
BF16, F64 = "training.dtype = 'bfloat16'", "training.dtype = 'float64'"
F32 = "training.mixed_precision_param = 'float32'"
PP2, CP2, TP2 = f"{PIPELINE} = 2\n", f"{CONTEXT} = 2\n", f"{TENSOR} = 2\n"
MASK = "training.document_mask = true\n"
RESOLVED_PARALLELISM = {  # config, launch, values of RESOLVED_PARALLELISM_KEYS
    "one CPU rank":        ("", on(1),                                      (1, 8, "always", "auto", 1)),
    "bfloat16":            (MASK, on(1, devices=1),                           (1, 8, "always", "flash", 1)),
    "bfloat16 weights":    (MASK + BF16, on(1, devices=1),                         (1, 8, "always", "flash", 1)),
    "float16":             (MASK + F16, on(1, devices=1),                          (1, 8, "always", "flash", 1)),
    "float32":             (MASK + F32, on(1, devices=1),                          (1, 8, "always", "efficient", 1)),
    "float64":             (MASK + F64, on(1, devices=1),                          (1, 8, "always", "math", 1)),
    "bfloat16 on CPU":     (MASK + BF16, on(1),                                    (1, 8, "always", "cpu", 1)),
    "float64 on CPU":      (MASK + F64, on(1),                                     (1, 8, "always", "cpu", 1)),
    "given kernel":        (f"{CP2}{KERNEL} = 'cudnn'", on(2, devices=2),   (1, 8, "always", "cudnn", 1)),
    "given kernel on CPU": (f"{CP2}{KERNEL} = 'math'", on(2),               (1, 8, "always", "math", 1)),
    "bfloat16 pieces":     (CP2, on(2, devices=2),                          (1, 8, "always", "flash", 1)),
    "float32 pieces":      (f"{CP2}{F32}", on(2, devices=2),                (1, 8, "always", "efficient", 1)),
    "float64 pieces":      (f"{CP2}{F64}", on(2, devices=2),                (1, 8, "always", "math", 1)),
    "masked, bfloat16":    (f"{MASK}{KERNEL} = 'efficient'", on(1, devices=1), (1, 8, "always", "efficient", 1)),
    "masked, float32":     (f"{MASK}{F32}\n{KERNEL} = 'math'", on(1, devices=1), (1, 8, "always", "math", 1)),
    "masked, float64":     (f"{MASK}{F64}\n{KERNEL} = 'math'", on(1, devices=1), (1, 8, "always", "math", 1)),
    "given reshard":       (f"{RESHARD_KEY} = 'never'", on(2),              (2, 16, "never", "auto", 1)),
    "default written out": (f"{RESHARD_KEY} = 'default'", on(2),            (2, 16, "always", "auto", 1)),
    "tensor":              (TP2, on(8),                                     (4, 32, "always", "auto", 1)),
    "context":             (CP2, on(8),                                     (4, 32, "always", "cpu", 1)),
    "context groups":      (f"{CP2}{RESHARD_KEY} = 4", on(8),               (4, 32, 4, "cpu", 1)),
    "pipeline":            (PP2, on(8),                                     (4, 32, "never", "auto", 1)),
    "pipeline, default":   (f"{PP2}{RESHARD_KEY} = 'default'", on(8),       (4, 32, "never", "auto", 1)),
    "pipeline, always":    (f"{PP2}{RESHARD_KEY} = 'always'", on(8),        (4, 32, "always", "auto", 1)),
    "all axes":            (f"{PP2}{CP2}{TP2}{REPLICATE} = 2", on(48),      (3, 48, "never", "cpu", 1)),
    "GPipe":               (f"{PP2}{SCHEDULE} = 'GPipe'", on(2),            (1, 8, "never", "auto", 1)),
    "1F1B":                (f"{PP2}{SCHEDULE} = '1F1B'", on(2),             (1, 8, "never", "auto", 1)),
    "Interleaved1F1B":     (f"{PP2}{SCHEDULE} = 'Interleaved1F1B'", on(2),  (1, 8, "never", "auto", 2)),
    "LoopedBFS":           (f"{PP2}{SCHEDULE} = 'LoopedBFS'", on(2),        (1, 8, "never", "auto", 2)),
    "zero bubble":         (f"{PP2}{SCHEDULE} = 'InterleavedZeroBubble'", on(2), (1, 8, "never", "auto", 2)),
    "ZBVZeroBubble":       (f"{PP2}{SCHEDULE} = 'ZBVZeroBubble'", on(2, devices=2), (1, 8, "never", "auto", 2)),
    "DualPipeV":           (f"{PP2}{SCHEDULE} = 'DualPipeV'", on(2, devices=2), (1, 8, "never", "auto", 2)),
    "given stages":        (f"{PP2}{SCHEDULE} = 'LoopedBFS'\n{STAGES} = 3", on(2), (1, 8, "never", "auto", 3)),
}
# fmt: on


@pytest.mark.parametrize(
    ("toml", "launch", "values"),
    [
        pytest.param(toml, launch, dict(zip(keys, values, strict=True)), id=name)
        for keys, table in ((RESOLVED_KEYS, RESOLVED), (RESOLVED_PARALLELISM_KEYS, RESOLVED_PARALLELISM))
        for name, (toml, launch, values) in table.items()
    ],
)
def test_launch_resolves(folder: Folder, toml: str, launch: Launch, values: dict[str, Any]):
    loaded = folder.load(toml)
    resolved = config.check(loaded, launch)
    assert {key: of(resolved, key) for key in values} == values
    keys = {*RESOLVED_KEYS, *RESOLVED_PARALLELISM_KEYS}
    changed = {key.replace(".", "__"): of(resolved, key) for key in keys}
    assert resolved == loaded.config.replace(**changed)  # nothing else has changed


def test_launch_from_environment():
    for environment in {}, {"RANK": "", "WORLD_SIZE": ""}:
        with patch.dict(os.environ, environment, clear=True):
            assert Launch.from_environment(2) == Launch(0, 0, 1, 1, 2)
    torchrun = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    with patch.dict(os.environ, torchrun, clear=True):
        assert Launch.from_environment(4) == Launch(rank=5, local_rank=1, world_size=8, local_world_size=4, n_devices=4)


WRONG_NUMBERS = [("RANK", "-1", 0), ("LOCAL_RANK", "1.0", 0), ("WORLD_SIZE", "two", 1), ("LOCAL_WORLD_SIZE", "0", 1)]


@pytest.mark.parametrize(("name", "value", "least"), WRONG_NUMBERS)
def test_wrong_torchrun_environment(folder: Folder, name: str, value: str, least: int):
    line = f'environment: {name} = "{value}": expected a whole number at least {least}'
    with patch.dict(os.environ, {name: value}, clear=True):
        folder.refused(lambda: Launch.from_environment(0), [line])


@pytest.mark.parametrize(
    ("args", "environment", "n_devices", "here"),
    [
        pytest.param((), {}, 0, 1, id="CPU: one"),
        pytest.param((), {}, 8, 8, id="GPUs: one each"),
        pytest.param((), {"NGPU": "2"}, 8, 2, id="NGPU of the GPUs"),
        pytest.param((), {"NGPU": "4"}, 0, 4, id="NGPU on a CPU"),
        pytest.param((), {"NNODES": "2"}, 8, 8, id="two hosts"),
        pytest.param((), {"NNODES": "2"}, 0, 1, id="two CPU hosts"),
        pytest.param((), {"NNODES": "", "NGPU": ""}, 8, 8, id="empty is unset, as run_train.sh takes it"),
        pytest.param((f"--{SHARD}=4",), {}, 8, 4, id="shard degree"),
        pytest.param((f"--{SHARD}=4",), {}, 0, 4, id="shard degree on a CPU"),
        pytest.param((f"--{SHARD}=4",), {"NNODES": "2"}, 2, 2, id="shard degree over two hosts"),
        pytest.param((f"--{REPLICATE}=2",), {}, 0, 2, id="replicas on a CPU"),
        pytest.param((f"--{REPLICATE}=2",), {}, 8, 8, id="replicas on GPUs"),
        pytest.param((f"--{REPLICATE}=2", f"--{SHARD}=3"), {}, 8, 6, id="both degrees"),
        pytest.param((f"--{REPLICATE}=2",), {"NNODES": "2", "NGPU": "2"}, 0, 2, id="replicas, NGPU, two hosts"),
        pytest.param((f"--{TENSOR}=4",), {}, 0, 4, id="tensor on a CPU"),
        pytest.param((f"--{TENSOR}=4",), {}, 8, 8, id="tensor on GPUs"),
        pytest.param((f"--{PIPELINE}=2", f"--{CONTEXT}=2", f"--{TENSOR}=2"), {}, 0, 8, id="three axes on a CPU"),
        pytest.param((f"--{PIPELINE}=2", f"--{CONTEXT}=2"), {"NNODES": "2"}, 0, 2, id="two axes over two CPU hosts"),
        pytest.param((f"--{PIPELINE}=2", f"--{TENSOR}=2", f"--{SHARD}=3"), {}, 16, 12, id="two axes and shards"),
        pytest.param((f"--{PIPELINE}=2", f"--{SHARD}=8"), {"NNODES": "2"}, 8, 8, id="a pipeline over two hosts"),
    ],
)
def test_ranks_per_host(folder: Folder, args: tuple[str, ...], environment: dict[str, str], n_devices: int, here: int):
    loaded, hosts = folder.load("", *args), int(environment.get("NNODES") or 1)
    assert config.ranks_per_node(loaded, environment, n_devices) == here
    assert launcher.ranks_wanted(loaded, environment, n_devices) == here * hosts


# ---------------------------------------------------------------------------------------------------------------------
# The program


def python(*args: str, **environment: str) -> tuple[int, str, str]:
    """Exit status, output and errors of the interpreter, on a host without devices (no nvidia-smi on its PATH)."""
    kept = {name: value for name, value in os.environ.items() if name not in ("NGPU", "NNODES")}
    kept |= {"PATH": "", "PYTHONUTF8": "1", **environment}
    command = [sys.executable, *args]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=ROOT, env=kept, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


PROGRAM = ("-m", "titanlite.config")


def test_program_refuses_a_wrong_config(folder: Folder):
    folder.file.write_text("[training]\nsteps = 0\nlr = 'é'\n", encoding="utf-8")
    lines = folder.fill_in(
        "error: command line: --oops: expected --section.key=value\n"
        "error: {file}: training.steps = 0: expected a whole number at least 1\n"
        'error: {file}: training.lr = "é": unknown key; did you mean optimizer.lr?\n'
        'error: command line: optimizer.lr = "high": expected a number above 0\n'
    )
    assert python(*PROGRAM, str(folder.file), "--optimizer.lr=high", "--oops") == (2, "", lines)


def test_program_prints_a_right_config(folder: Folder):
    loaded = folder.load("model.flavor = 'llama3_8b'\njob.description = 'é = \"#\"'", "--training.steps=12")
    status, output, errors = python(*PROGRAM, str(folder.file), "--training.steps=12")
    assert (status, errors) == (0, "")
    printed = options.tomllib.loads(output)
    assert Config.model_validate(printed) == loaded.config
    assert [f"{section}.{key}" for section, keys in printed.items() for key in keys] == list(OPTIONS)


def test_program_counts_ranks(folder: Folder):
    count = (*PROGRAM, "--ranks-per-host", str(folder.file))
    assert python(*count, f"--{SHARD}=4", NNODES="2") == (0, "2\n", "")
    line = folder.fill_in("error: {file}: 3 ranks cannot be dealt evenly to NNODES = 2 hosts\n")
    assert python(*count, f"--{SHARD}=3", NNODES="2") == (2, "", line)


def test_program_helps():
    assert python(*PROGRAM, "no-such-file.toml", "--help") == (0, options.help_text(Config, USAGE) + "\n", "")


HELP = {
    '  --job.dump_folder   a string; default "./outputs"',
    f'  --model.flavor   {FLAVORS}; default "debug"',
    "  --model.dim   a whole number at least 1; default the flavor's",
    "  --training.shuffle   true or false; default true",
    f"  --training.global_batch_size   {COUNT_OR_AUTO}; default -1",
    f'  --training.mixed_precision_param   {COMPUTE_TYPES}; default "auto"',
    "  --training.initial_loss_scale   a number above 0; default 65536.0",
    "  --lr_scheduler.decay_ratio   -1, or a number at least 0 and at most 1; default -1",
    f'  --parallelism.fsdp_reshard_after_forward   {RESHARD}; default "default"',
    "  --parallelism.tensor_parallel_degree   a whole number at least 1; default 1",
    '  --parallelism.pipeline_parallel_balance   one of "layers", "parameters"; default "layers"',
    "  --parallelism.module_fqns_per_model_part   a list of lists of strings; default []",
    "  --float8.filter_fqns   a list of strings; default []",
    '  --activation_checkpoint.selective_ac_option   "op", or a whole number at least 1; default "op"',
    "  --activation_checkpoint.memory_budget   a number at least 0 and at most 1; default 0.5",
    "  --profiling.profile_freq   a whole number at least 4; default 10",
    '  --compile.backend   one of "inductor", "aot_eager"; default "inductor"',
}


def test_help_names_every_option_with_its_type_bounds_default_and_meaning():
    lines = options.help_text(Config, USAGE).splitlines()
    assert lines[0] == USAGE
    assert [line for line in lines if line.startswith("[")] == [f"[{section}]" for section in Config.model_fields]
    shown = [number for number, line in enumerate(lines) if line.startswith("  --")]
    assert [lines[number].split()[0] for number in shown] == [f"--{key}" for key in OPTIONS]
    for number, (key, option) in zip(shown, OPTIONS.items(), strict=True):
        assert len(option.description or "") > 10, f"{key} has no description"
        assert lines[number + 1].strip() == " ".join(option.description.split())
    assert not HELP - set(lines)


def test_config_needs_no_heavy_package(folder: Folder):
    """A wrong config is found in a fraction of a second, and before any device is touched."""
    code = (
        "import sys\n"
        "from titanlite import config\n"
        f"config.check(config.load([{str(folder.file)!r}]), config.Launch(0, 0, 1, 1, 0))\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)))\n"
    )
    assert python("-c", code) == (0, "[]\n", "")
