"""Every wrong config is refused with the exact line that a user reads; every right one gives the values it says.

Lines are compared whole. `{file}` stands for the config's path, `{folder}` for the folder that holds it.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from titanlite import config
from titanlite.config import Config, ConfigError, Launch, Loaded
from titanlite.sizes import SIZES

ROOT = Path(__file__).parents[1]
USAGE = "usage: train.py CONFIG.toml [--section.key=value ...]   (--help lists every option)"


class Folder:
    """A folder with one config, `run.toml`."""

    def __init__(self, path: Path):
        self.path = path
        self.file = path / "run.toml"
        self.file.touch()

    def load(self, toml: str = "", *overrides: str) -> Loaded:
        self.file.write_text(toml, encoding="utf-8")
        return config.load([str(self.file), *overrides])

    def fill_in(self, text: str) -> str:
        text = text.replace("{file}", str(self.file)).replace("{folder}", str(self.path))
        return text.replace("{usage}", USAGE)

    def refused(self, call: Any, lines: list[str]) -> None:
        """`call` is refused with exactly these lines."""
        with pytest.raises(ConfigError) as caught:
            call()
        assert caught.value.problems == [self.fill_in(line) for line in lines]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def of(options: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(options, section), name)


def on(ranks: int, *, hosts: int = 1, devices: int = 0) -> Launch:
    """Rank 0 of so many ranks on hosts of so many devices; none is a CPU."""
    return Launch(0, 0, ranks, ranks // hosts, devices)


# ---------------------------------------------------------------------------------------------------------------------
# One option at a time: types, bounds, choices

TEXT, FLAG = "a string", "true or false"
COUNT, COUNT_OR_ZERO = "a whole number at least 1", "a whole number at least 0"
COUNT_OR_AUTO = "-1 or a whole number at least 1"
POSITIVE, NOT_NEGATIVE = "a number above 0", "a number at least 0"
FRACTION, SHARE = "a number at least 0 and below 1", "a number at least 0 and at most 1"
SEED = "a whole number at least 0 and at most 9223372036854775807"  # torch.manual_seed(seed + rank) takes 64 bits
FLAVORS = (
    'one of "debug", "llama3_1b", "llama3_3b", "llama2_7b", "llama2_13b", "llama_30b", "llama3_8b", "llama3_70b", '
    '"llama3_405b", "gpt_175b"'
)
DATASETS = 'one of "pydoc_topics", "text", "json", "parquet", "c4", "hub"'
PRECISION = 'one of "auto", "bfloat16", "float32", "float64"'  # float64 is what check() makes of auto
RESHARD = 'one of "always", "never" or a whole number at least 2'

WRONG_VALUES = [  # key, value as it stands in TOML, what is expected
    ("job.dump_folder", "3", TEXT),
    ("job.description", "true", TEXT),
    ("job.description", "2020-01-01", TEXT),
    ("job.description", '["a", "b"]', TEXT),
    ("model.flavor", '"llama3"', FLAVORS),
    ("model.flavor", "3", FLAVORS),
    ("model.flavor", '["debug"]', FLAVORS),
    ("model.hf_assets_path", "3", TEXT),
    ("model.dim", "0", COUNT),
    ("model.n_layers", "0", COUNT),
    ("model.n_heads", "0", COUNT),
    ("model.n_kv_heads", "0", COUNT),
    ("model.ffn_dim", "0", COUNT),
    ("model.vocab_size", "0", COUNT),
    ("model.norm_eps", "0.0", POSITIVE),
    ("model.tie_embeddings", "1", FLAG),
    ("model.rope_theta", "0", POSITIVE),
    ("model.rope_scaling_factor", "0.5", "a number at least 1"),
    ("model.rope_scaling_factor", "inf", "a finite number at least 1"),
    ("model.rope_low_freq_factor", "0.0", POSITIVE),
    ("model.rope_high_freq_factor", "-4.0", POSITIVE),
    ("model.rope_original_seq_len", "0", COUNT),
    ("training.dataset", '"c5"', DATASETS),
    ("training.dataset", "true", DATASETS),
    ("training.dataset_path", "3", TEXT),
    ("training.dataset_config", "3", TEXT),
    ("training.dataset_split", "3", TEXT),
    ("training.dataset_text_key", "3", TEXT),
    ("training.text_sample_by", '"sentence"', 'one of "document", "paragraph", "line"'),
    ("training.streaming", '"yes"', FLAG),
    ("training.streams", "0", COUNT),
    ("training.shuffle", "0", FLAG),
    ("training.shuffle", '"true"', FLAG),
    ("training.cache_folder", "3", TEXT),
    ("training.seq_len", "0", COUNT),
    ("training.local_batch_size", "0", COUNT),
    ("training.global_batch_size", "0", COUNT_OR_AUTO),
    ("training.global_batch_size", "-2", COUNT_OR_AUTO),
    ("training.global_batch_size", "8.0", COUNT_OR_AUTO),
    ("training.global_batch_size", "true", COUNT_OR_AUTO),
    ("training.steps", "0", COUNT),
    ("training.steps", "10.0", COUNT),
    ("training.steps", '"10"', COUNT),
    ("training.steps", "true", COUNT),
    ("training.steps", "[1, 2]", COUNT),
    ("training.steps", "2020-01-01", COUNT),
    ("training.max_norm", "0.0", POSITIVE),
    ("training.nonfinite_steps_allowed", "-1", COUNT_OR_ZERO),
    ("training.dtype", '"float16"', 'one of "float32", "bfloat16", "float64"'),
    ("training.mixed_precision_param", '"float16"', PRECISION),
    ("training.mixed_precision_reduce", '"fp32"', PRECISION),
    ("training.enable_cpu_offload", "1", FLAG),
    ("optimizer.name", '"adamw"', 'one of "AdamW", "Adam"'),
    ("optimizer.lr", "0", POSITIVE),
    ("optimizer.lr", '"8e-4"', POSITIVE),
    ("optimizer.lr", "true", POSITIVE),
    ("optimizer.lr", "nan", "a finite number above 0"),
    ("optimizer.lr", "inf", "a finite number above 0"),
    ("optimizer.beta1", "1.0", FRACTION),
    ("optimizer.beta1", "-0.1", FRACTION),
    ("optimizer.beta1", "nan", FRACTION),
    ("optimizer.beta2", "1.5", FRACTION),
    ("optimizer.eps", "0.0", POSITIVE),
    ("optimizer.weight_decay", "-0.1", NOT_NEGATIVE),
    ("optimizer.weight_decay", "inf", "a finite number at least 0"),
    ("optimizer.implementation", '"loop"', 'one of "fused", "foreach", "for-loop"'),
    ("lr_scheduler.warmup_steps", "-1", COUNT_OR_ZERO),
    ("lr_scheduler.total_steps", "0", COUNT_OR_AUTO),
    ("lr_scheduler.decay_ratio", "1.5", f"-1 or {SHARE}"),
    ("lr_scheduler.decay_ratio", "-0.5", f"-1 or {SHARE}"),
    ("lr_scheduler.decay_ratio", '"all"', f"-1 or {SHARE}"),
    ("lr_scheduler.decay_type", '"exponential"', 'one of "linear", "sqrt", "cosine"'),
    ("lr_scheduler.min_lr_factor", "1.1", SHARE),
    ("lr_scheduler.min_lr_factor", "-0.1", SHARE),
    ("parallelism.data_parallel_replicate_degree", "0", COUNT),
    ("parallelism.data_parallel_replicate_degree", "-1", COUNT),
    ("parallelism.data_parallel_shard_degree", "0", COUNT_OR_AUTO),
    ("parallelism.fsdp_reshard_after_forward", "1", RESHARD),
    ("parallelism.fsdp_reshard_after_forward", "true", RESHARD),
    ("parallelism.fsdp_reshard_after_forward", '"2"', RESHARD),
    ("parallelism.fsdp_reshard_after_forward", '"default"', RESHARD),
    ("parallelism.fsdp_reduce_gradients", '"always"', 'one of "each_microstep", "last_microstep"'),
    ("checkpoint.enable", '"on"', FLAG),
    ("checkpoint.folder", "3", TEXT),
    ("checkpoint.interval", "0", COUNT),
    ("checkpoint.keep_latest_k", "-1", COUNT_OR_ZERO),
    ("checkpoint.load_step", "0", COUNT_OR_AUTO),
    ("checkpoint.initial_load_path", "3", TEXT),
    ("checkpoint.async_mode", '"async_with_pinned_mem"', 'one of "disabled", "async"'),
    ("metrics.log_freq", "0", COUNT),
    ("metrics.enable_tensorboard", "1", FLAG),
    ("metrics.save_tb_folder", "3", TEXT),
    ("validation.enable", "1", FLAG),
    ("validation.freq", "0", COUNT),
    ("validation.steps", "0", COUNT_OR_AUTO),
    ("validation.fraction", "1.0", FRACTION),
    ("validation.fraction", "-0.1", FRACTION),
    ("validation.dataset_path", "3", TEXT),
    ("validation.dataset_split", "3", TEXT),
    ("profiling.enable_profiling", "1", FLAG),
    ("profiling.profile_freq", "3", "a whole number at least 4"),
    ("profiling.save_traces_folder", "3", TEXT),
    ("profiling.enable_memory_snapshot", "1", FLAG),
    ("profiling.save_memory_snapshot_folder", "3", TEXT),
    ("comm.init_timeout_seconds", "0", COUNT),
    ("comm.train_timeout_seconds", "2.5", COUNT),
    ("comm.trace_buf_size", "-1", COUNT_OR_ZERO),
    ("debug.seed", "-1", SEED),
    ("debug.seed", "18446744073709551616", SEED),
    ("debug.deterministic", "1", FLAG),
]


def by_value(rows: list[tuple[str, str, str]]) -> list[Any]:
    return [pytest.param(*row, id=f"{row[0]} = {row[1]}") for row in rows]


@pytest.mark.parametrize(("key", "value", "expected"), by_value(WRONG_VALUES))
def test_wrong_value_in_the_file(folder: Folder, key: str, value: str, expected: str):
    line = f"{{file}}: {key} = {value}: expected {expected}"
    folder.refused(lambda: folder.load(f"{key} = {value}"), [line])


@pytest.mark.parametrize(("key", "value", "expected"), by_value([row for row in WRONG_VALUES if row[2] != TEXT]))
def test_wrong_value_on_the_command_line(folder: Folder, key: str, value: str, expected: str):
    line = f"command line: {key} = {value}: expected {expected}"
    folder.refused(lambda: folder.load("", f"--{key}={value}"), [line])


def test_wrong_values_cover_every_option():
    keys = [f"{name}.{key}" for name, section in Config.model_fields.items() for key in section.annotation.model_fields]
    assert list(dict.fromkeys(key for key, _, _ in WRONG_VALUES)) == keys


RIGHT_AT_THE_EDGE = [
    ("model.n_layers", "1", 1),
    ("model.rope_scaling_factor", "1", 1.0),
    ("training.global_batch_size", "-1", -1),
    ("training.nonfinite_steps_allowed", "0", 0),
    ("training.max_norm", "1e-30", 1e-30),
    ("optimizer.lr", "1", 1.0),
    ("optimizer.beta1", "0", 0.0),
    ("optimizer.beta2", "0.9999999", 0.9999999),
    ("optimizer.weight_decay", "0", 0.0),
    ("lr_scheduler.warmup_steps", "0", 0),
    ("lr_scheduler.decay_ratio", "-1", -1),
    ("lr_scheduler.decay_ratio", "0", 0.0),
    ("lr_scheduler.decay_ratio", "1", 1.0),
    ("lr_scheduler.min_lr_factor", "0.0", 0.0),
    ("lr_scheduler.min_lr_factor", "1.0", 1.0),
    ("lr_scheduler.total_steps", "10_000", 10_000),
    ("parallelism.fsdp_reshard_after_forward", "2", 2),
    ("parallelism.fsdp_reshard_after_forward", '"never"', "never"),
    ("checkpoint.keep_latest_k", "0", 0),
    ("validation.fraction", "0.0", 0.0),
    ("profiling.profile_freq", "4", 4),
    ("comm.trace_buf_size", "0", 0),
    ("debug.seed", "0", 0),
    ("debug.seed", "0x7fffffffffffffff", 2**63 - 1),
]


@pytest.mark.parametrize(("key", "text", "value"), RIGHT_AT_THE_EDGE)
def test_right_value_at_the_edge(folder: Folder, key: str, text: str, value: Any):
    for loaded in folder.load(f"{key} = {text}"), folder.load("", f"--{key}={text}"):
        assert (of(loaded.config, key), type(of(loaded.config, key))) == (value, type(value))


# ---------------------------------------------------------------------------------------------------------------------
# The table of wrong configs: `#` its name, then the file, `$` an argument, `>` a line of the refusal (an indented one
# continues it). Where `@` stands the config is right and its launch is refused: by `check` if ranks are given, else by
# `ranks_per_host`. The rules under "silent rule" read a value that is itself refused: they would speak of its default.

TABLE = r"""
## unknown key

# job
job.dumpfolder = "x"
> {file}: job.dumpfolder = "x": unknown key; did you mean job.dump_folder?

# model
model.n_layer = 2
> {file}: model.n_layer = 2: unknown key; did you mean model.n_layers?

# training
training.batch_size = 2
> {file}: training.batch_size = 2: unknown key; did you mean training.local_batch_size?

# optimizer
optimizer.wieght_decay = 0.0
> {file}: optimizer.wieght_decay = 0.0: unknown key; did you mean optimizer.weight_decay?

# lr_scheduler
lr_scheduler.warmup = 2
> {file}: lr_scheduler.warmup = 2: unknown key; did you mean lr_scheduler.warmup_steps?

# parallelism
parallelism.data_parallel_shards = 2
> {file}: parallelism.data_parallel_shards = 2: unknown key; did you mean parallelism.data_parallel_shard_degree?

# checkpoint
checkpoint.keep_latest = 2
> {file}: checkpoint.keep_latest = 2: unknown key; did you mean checkpoint.keep_latest_k?

# metrics
metrics.logfreq = 2
> {file}: metrics.logfreq = 2: unknown key; did you mean metrics.log_freq?

# validation
validation.frac = 0.1
> {file}: validation.frac = 0.1: unknown key; did you mean validation.fraction?

# profiling
profiling.profile_frequency = 9
> {file}: profiling.profile_frequency = 9: unknown key; did you mean profiling.profile_freq?

# comm
comm.init_timeout = 9
> {file}: comm.init_timeout = 9: unknown key; did you mean comm.init_timeout_seconds?

# debug
debug.sead = 9
> {file}: debug.sead = 9: unknown key; did you mean debug.seed?

# like nothing
comm.x = 9
> {file}: comm.x = 9: unknown key; --help lists every option

# like nothing but its section
training.bf16 = true
> {file}: training.bf16 = true: unknown key; --help lists every option

# lr of optimizer
training.lr = 1e-3
> {file}: training.lr = 0.001: unknown key; did you mean optimizer.lr?

# seed of debug
training.seed = 1
> {file}: training.seed = 1: unknown key; did you mean debug.seed?

# warm-up of lr_scheduler
training.warmup_steps = 1
> {file}: training.warmup_steps = 1: unknown key; did you mean lr_scheduler.warmup_steps?

# nearer in its own section than equal in another: freq
metrics.freq = 1
> {file}: metrics.freq = 1: unknown key; did you mean metrics.log_freq?

# nearer in its own section than equal in another: enable
profiling.enable = true
> {file}: profiling.enable = true: unknown key; did you mean profiling.enable_profiling?

# table as a key
[optimizer.lrs]
base = 3
> {file}: optimizer.lrs = {"base": 3}: unknown key; did you mean optimizer.lr?

# table as a value
[training.steps]
warmup = 3
> {file}: training.steps = {"warmup": 3}: expected a whole number at least 1

# value that JSON does not have
comm.x = 2020-01-01T12:00:00
> {file}: comm.x = 2020-01-01T12:00:00: unknown key; --help lists every option

# on the command line
$ --training.seq-len=3
> command line: training.seq-len = 3: unknown key; did you mean training.seq_len?

# bare on the command line
$ --training.streming
> command line: training.streming = true: unknown key; did you mean training.streaming?

# three names on the command line
$ --training.steps.x=3
> command line: training.steps.x = 3: unknown key; did you mean training.steps?

## section

# unknown
[nothing]
x = 1
> {file}: [nothing]: an unknown section; --help lists every option

# near
[optimiser]
lr = 1
> {file}: [optimiser]: an unknown section; did you mean optimizer?

# capital
[Training]
> {file}: [Training]: an unknown section; did you mean training?

# dot in its name
["a.b"]
x = 1
> {file}: [a.b]: an unknown section; --help lists every option

# unknown, in file and command line: told once
[optimiser]
lr = 1
$ --optimiser.eps=1
> {file}: [optimiser]: an unknown section; did you mean optimizer?

# unknown, on the command line
$ --optim.lr=1
> command line: [optim]: an unknown section; did you mean optimizer?

# number
training = 3
> {file}: training = 3: expected a section, written [training]

# text
model = "llama3_8b"
> {file}: model = "llama3_8b": expected a section, written [model]

# array of tables
[[training]]
steps = 3
> {file}: training = [{"steps": 3}]: expected a section, written [training]

# number, with a key on the command line
training = 3
$ --training.steps=4
> {file}: training = 3: expected a section, written [training]

# key outside
lr = 0.001
> {file}: lr = 0.001: a key outside any section; did you mean optimizer.lr?

## model

# heads do not divide the width
model.dim = 100
> {file}: model.n_heads = 16: expected a divisor of model.dim = 100; each head takes dim / n_heads of it

# heads, from the command line
$ --model.n_heads=24
> command line: model.n_heads = 24: expected a divisor of model.dim = 256; each head takes dim / n_heads of it

# odd head size
model.dim = 240
> {file}: model.n_heads = 16: expected an even head size, got 240 / 16 = 15; rotary embedding turns pairs

# key heads do not divide the heads
model.n_kv_heads = 3
> {file}: model.n_kv_heads = 3: expected a divisor of model.n_heads = 16; each key head serves a group of query heads

# more key heads than heads
model.n_kv_heads = 32
> {file}: model.n_kv_heads = 32: expected a divisor of model.n_heads = 16; each key head serves a group of query
    heads

# low rope factor not below the high one
model.flavor = "llama3_8b"
model.rope_low_freq_factor = 4
> {file}: model.rope_low_freq_factor = 4.0: expected a number below model.rope_high_freq_factor = 4.0

## data

# text without a path
training.dataset = "text"
> {file}: training.dataset_path = "": training.dataset = "text" needs a file, folder or glob

# json without a path
training.dataset = "json"
> {file}: training.dataset_path = "": training.dataset = "json" needs a file, folder or glob

# parquet without a path
training.dataset = "parquet"
training.dataset_path = ""
> {file}: training.dataset_path = "": training.dataset = "parquet" needs a file, folder or glob

# hub without a name
training.dataset = "hub"
> {file}: training.dataset_path = "": training.dataset = "hub" needs a name on the Hugging Face hub, as in allenai/c4

# path for c4
training.dataset = "c4"
training.dataset_path = "x"
> {file}: training.dataset_path = "x": only training.dataset = "text" or "json" or "parquet" or "hub" reads it;
    remove it

# configuration for c4
training.dataset = "c4"
training.dataset_config = "en"
> {file}: training.dataset_config = "en": only training.dataset = "hub" reads it; remove it

# split for text
training.dataset = "text"
training.dataset_path = "x"
training.dataset_split = "test"
> {file}: training.dataset_split = "test": only training.dataset = "hub" reads it; remove it

# text column for text
training.dataset = "text"
training.dataset_path = "x"
training.dataset_text_key = "body"
> {file}: training.dataset_text_key = "body": only training.dataset = "json" or "parquet" or "hub" reads it; remove
    it

# document size for json
training.dataset = "json"
training.dataset_path = "x"
training.text_sample_by = "line"
> {file}: training.text_sample_by = "line": only training.dataset = "text" reads it; remove it

# validation path for the hub
training.dataset = "hub"
training.dataset_path = "x"
validation.dataset_path = "y"
> {file}: validation.dataset_path = "y": only training.dataset = "text" or "json" or "parquet" reads it; remove it

# validation split for text
training.dataset = "text"
training.dataset_path = "x"
validation.dataset_split = "test"
> {file}: validation.dataset_split = "test": only training.dataset = "hub" reads it; remove it

# stream of the built-in text
training.streaming = true
training.shuffle = false
> {file}: training.streaming = true: the built-in text is in memory; set false

# shuffled stream
training.dataset = "c4"
training.streaming = true
> {file}: training.shuffle = true: a stream cannot be drawn in a random order that survives a stop and a resume
    exactly; set false (documents come in their files' order), or training.streaming = false

# held-out share of a stream
training.dataset = "c4"
training.streaming = true
training.shuffle = false
validation.fraction = 0.1
> {file}: validation.fraction = 0.1: a stream has no documents to hold out; remove it

# validation of a stream
training.dataset = "text"
training.streaming = true
training.shuffle = false
training.dataset_path = "x"
validation.enable = true
> {file}: validation.enable = true: a stream has no documents to hold out; set validation.dataset_path (files) or
    validation.dataset_split (hub), or training.streaming = false

# streams without streaming
training.streams = 8
> {file}: training.streams = 8: only training.streaming = true reads it; remove it

# held-out share of c4
training.dataset = "c4"
validation.fraction = 0.1
> {file}: validation.fraction = 0.1: the dataset has a validation split of its own; remove it

# validation of no documents
validation.enable = true
validation.fraction = 0.0
> {file}: validation.fraction = 0.0: validation.enable needs documents: set it above 0

## steps

# global batch not a multiple of the local one
training.global_batch_size = 12
> {file}: training.global_batch_size = 12: expected a multiple of training.local_batch_size = 8

# global batch below the local one
training.global_batch_size = 4
> {file}: training.global_batch_size = 4: expected a multiple of training.local_batch_size = 8

# bfloat16 weights of float64
training.dtype = "float64"
training.mixed_precision_param = "bfloat16"
> {file}: training.mixed_precision_param = "bfloat16": training.dtype = "float64" computes and reduces in float64;
    set "auto"

# float32 gradients of float64
training.dtype = "float64"
training.mixed_precision_reduce = "float32"
> {file}: training.mixed_precision_reduce = "float32": training.dtype = "float64" computes and reduces in float64;
    set "auto"

# horizon before the last step
lr_scheduler.total_steps = 5
> {file}: lr_scheduler.total_steps = 5: expected at least training.steps = 10000; the schedule has no value after its
    horizon

# horizon moved behind by the command line
[training]
steps = 5
[lr_scheduler]
total_steps = 5
$ --training.steps=6
> {file}: lr_scheduler.total_steps = 5: expected at least training.steps = 6; the schedule has no value after its
    horizon

## override

# no key
$ --training
> command line: --training: expected --section.key=value

# no key but a dot
$ --training.
> command line: --training.: expected --section.key=value

# no section
$ --steps=3
> command line: --steps=3: expected --section.key=value

# no section but a dot
$ --.steps=3
> command line: --.steps=3: expected --section.key=value

# nothing
$ --
> command line: --: expected --section.key=value

# section as a value
$ --training=3
> command line: --training=3: expected --section.key=value

# one dash
$ -training.steps=3
> command line: -training.steps=3: expected --section.key=value

# space for =
$ --training.steps
$ 3
> command line: expected one TOML file, got 2 files: {file} 3; {usage}
> command line: --training.steps: expected a value; write --training.steps=VALUE

# bare whole number
$ --training.steps
> command line: --training.steps: expected a value; write --training.steps=VALUE

# bare number
$ --optimizer.lr
> command line: --optimizer.lr: expected a value; write --optimizer.lr=VALUE

# bare string
$ --job.dump_folder
> command line: --job.dump_folder: expected a value; write --job.dump_folder=VALUE

# bare choice
$ --training.dataset
> command line: --training.dataset: expected a value; write --training.dataset=VALUE

# bare union
$ --parallelism.fsdp_reshard_after_forward
> command line: --parallelism.fsdp_reshard_after_forward: expected a value; write
    --parallelism.fsdp_reshard_after_forward=VALUE

# empty number
$ --training.steps=
> command line: training.steps = "": expected a whole number at least 1

# word for a number
$ --training.steps=many
> command line: training.steps = "many": expected a whole number at least 1

# two =
$ --training.steps==3
> command line: training.steps = "=3": expected a whole number at least 1

# Python's False
$ --training.shuffle=False
> command line: training.shuffle = "False": expected true or false

# too large for a float
$ --model.rope_theta=1e400
> command line: model.rope_theta = inf: expected a finite number above 0

## several

# arguments, sections, keys, types and rules
[training]
steps = 0
shufle = true
dataset = "text"
global_batch_size = 12
[nothing]
[model]
n_kv_heads = 3
dim = 2.5
[optimizer]
lr = "high"
$ --training.seq_len
$ --comm.trace_buf_size=false
$ --oops
> command line: --training.seq_len: expected a value; write --training.seq_len=VALUE
> command line: --oops: expected --section.key=value
> {file}: model.dim = 2.5: expected a whole number at least 1
> {file}: training.steps = 0: expected a whole number at least 1
> {file}: training.shufle = true: unknown key; did you mean training.shuffle?
> {file}: optimizer.lr = "high": expected a number above 0
> command line: comm.trace_buf_size = false: expected a whole number at least 0
> {file}: [nothing]: an unknown section; --help lists every option
> {file}: model.n_kv_heads = 3: expected a divisor of model.n_heads = 16; each key head serves a group of query heads
> {file}: training.dataset_path = "": training.dataset = "text" needs a file, folder or glob
> {file}: training.global_batch_size = 12: expected a multiple of training.local_batch_size = 8

# rules of all three kinds
[model]
n_heads = 24
[training]
streaming = true
global_batch_size = 12
[validation]
enable = true
> {file}: model.n_heads = 24: expected a divisor of model.dim = 256; each head takes dim / n_heads of it
> {file}: training.streaming = true: the built-in text is in memory; set false
> {file}: training.shuffle = true: a stream cannot be drawn in a random order that survives a stop and a resume
    exactly; set false (documents come in their files' order), or training.streaming = false
> {file}: validation.enable = true: a stream has no documents to hold out; set validation.dataset_path (files) or
    validation.dataset_split (hub), or training.streaming = false
> {file}: training.global_batch_size = 12: expected a multiple of training.local_batch_size = 8

# file and command line, each named
training.steps = 0
optimizer.beta1 = 2
$ --training.steps=-5
> command line: training.steps = -5: expected a whole number at least 1
> {file}: optimizer.beta1 = 2: expected a number at least 0 and below 1

## silent rule

# width, for the heads
model.dim = 0
model.n_heads = 24
> {file}: model.dim = 0: expected a whole number at least 1

# heads, for the key heads
model.n_heads = "x"
model.n_kv_heads = 3
> {file}: model.n_heads = "x": expected a whole number at least 1

# flavor, for the heads
model.flavor = "llama"
model.n_heads = 24
model.n_kv_heads = 5
> {file}: model.flavor = "llama": expected one of "debug", "llama3_1b", "llama3_3b", "llama2_7b", "llama2_13b",
    "llama_30b", "llama3_8b", "llama3_70b", "llama3_405b", "gpt_175b"

# high rope factor, for the low one
model.rope_scaling_factor = 8
model.rope_low_freq_factor = 9
model.rope_high_freq_factor = 0
> {file}: model.rope_high_freq_factor = 0: expected a number above 0

# dataset, for its path
training.dataset = "txt"
training.dataset_path = "x"
> {file}: training.dataset = "txt": expected one of "pydoc_topics", "text", "json", "parquet", "c4", "hub"

# streaming, for the streams
training.streaming = 1
training.streams = 8
> {file}: training.streaming = 1: expected true or false

# local batch, for the global one
training.local_batch_size = 0
training.global_batch_size = 12
> {file}: training.local_batch_size = 0: expected a whole number at least 1

# steps, for the horizon
training.steps = "many"
lr_scheduler.total_steps = 5
> {file}: training.steps = "many": expected a whole number at least 1

# dtype, for the precisions
training.dtype = "f64"
training.mixed_precision_param = "bfloat16"
> {file}: training.dtype = "f64": expected one of "float32", "bfloat16", "float64"

# dataset, for the validation of a stream
training.dataset = "c5"
training.streaming = true
training.shuffle = false
validation.enable = true
> {file}: training.dataset = "c5": expected one of "pydoc_topics", "text", "json", "parquet", "c4", "hub"

# validation path, for the validation of a stream
training.dataset = "text"
training.streaming = true
training.shuffle = false
training.dataset_path = "x"
validation.enable = true
validation.dataset_path = 3
> {file}: validation.dataset_path = 3: expected a string

# validation path, for the held-out share
training.dataset = 'text'
training.dataset_path = 'x'
validation.enable = true
validation.fraction = 0.0
validation.dataset_path = 3
> {file}: validation.dataset_path = 3: expected a string

# streaming, for the held-out share
training.streaming = "yes"
validation.enable = true
validation.fraction = 0.0
> {file}: training.streaming = "yes": expected true or false

# section, for the horizon
training = 3
[lr_scheduler]
total_steps = 5
> {file}: training = 3: expected a section, written [training]

## syntax

# no value
[training]
steps =
> {file}: not valid TOML: Invalid value (at line 2, column 8)

# no equals sign
training steps
> {file}: not valid TOML: Expected '=' after a key in a key/value pair (at line 1, column 10)

# nothing else is read then
training steps
$ --training.steps=0
> {file}: not valid TOML: Expected '=' after a key in a key/value pair (at line 1, column 10)

## launch

# more ranks than devices
@ ranks=9 devices=8
> {file}: 9 ranks on this host, which has 8 devices; start at most 8 ranks a host (NGPU), on more hosts (NNODES)

# more ranks than devices, on one of two hosts
@ ranks=8 hosts=2 devices=3
> {file}: 4 ranks on this host, which has 3 devices; start at most 3 ranks a host (NGPU), on more hosts (NNODES)

# shard degree below the ranks
parallelism.data_parallel_shard_degree = 2
@ ranks=4 devices=0
> {file}: parallelism.data_parallel_shard_degree = 2: replicate 1 x shard 2 needs 2 ranks, and 4 were started; start
    2 (./run_train.sh does), or set the degrees to the ranks there are

# shard degree above the ranks, on GPUs
$ --parallelism.data_parallel_shard_degree=8
@ ranks=2 devices=8
> command line: parallelism.data_parallel_shard_degree = 8: replicate 1 x shard 8 needs 8 ranks, and 2 were started;
    start 8 (./run_train.sh does), or set the degrees to the ranks there are

# shard degree above one rank
parallelism.data_parallel_shard_degree = 2
@ ranks=1 devices=0
> {file}: parallelism.data_parallel_shard_degree = 2: replicate 1 x shard 2 needs 2 ranks, and 1 was started; start 2
    (./run_train.sh does), or set the degrees to the ranks there are

# shard degree 1, asked for
parallelism.data_parallel_shard_degree = 1
@ ranks=4 devices=0
> {file}: parallelism.data_parallel_shard_degree = 1: replicate 1 x shard 1 needs 1 rank, and 4 were started; start 1
    (./run_train.sh does), or set the degrees to the ranks there are

# both degrees above the ranks
parallelism.data_parallel_shard_degree = 4
parallelism.data_parallel_replicate_degree = 2
@ ranks=4 devices=8
> {file}: parallelism.data_parallel_shard_degree = 4: replicate 2 x shard 4 needs 8 ranks, and 4 were started; start
    8 (./run_train.sh does), or set the degrees to the ranks there are

# replicate degree above the ranks
parallelism.data_parallel_replicate_degree = 8
@ ranks=4 devices=0
> {file}: parallelism.data_parallel_replicate_degree = 8: replicate 8 x shard 1 needs 8 ranks, and 4 were started;
    start 8 (./run_train.sh does), or set the degrees to the ranks there are

# groups that do not divide the shards
parallelism.fsdp_reshard_after_forward = 3
@ ranks=4 devices=8
> {file}: parallelism.fsdp_reshard_after_forward = 3: expected a divisor of the shard degree 4, smaller than it; or
    "always" or "never"

# groups as large as the shards
parallelism.fsdp_reshard_after_forward = 4
@ ranks=4 devices=0
> {file}: parallelism.fsdp_reshard_after_forward = 4: expected a divisor of the shard degree 4, smaller than it; or
    "always" or "never"

# groups as large as the shards of a replica
parallelism.fsdp_reshard_after_forward = 2
parallelism.data_parallel_replicate_degree = 2
@ ranks=4 devices=0
> {file}: parallelism.fsdp_reshard_after_forward = 2: expected a divisor of the shard degree 2, smaller than it; or
    "always" or "never"

# global batch below a microstep
training.global_batch_size = 16
@ ranks=4 devices=8
> {file}: training.global_batch_size = 16: expected a multiple of local_batch_size x ranks = 8 x 4 = 32

# global batch between microsteps
training.global_batch_size = 24
@ ranks=2 devices=0
> {file}: training.global_batch_size = 24: expected a multiple of local_batch_size x ranks = 8 x 2 = 16

# streams cut unevenly
training.dataset = "c4"
training.streaming = true
training.shuffle = false
@ ranks=3 devices=0
> {file}: training.streams = 64: expected a multiple of the data-parallel degree 3, so that each rank has whole
    streams

# memory snapshots of a CPU
profiling.enable_memory_snapshot = true
@ ranks=1 devices=0
> {file}: profiling.enable_memory_snapshot = true: needs CUDA, and this run is on a CPU; set false

# several at once
training.dataset = "c4"
training.streaming = true
training.shuffle = false
training.streams = 3
parallelism.data_parallel_shard_degree = 2
profiling.enable_memory_snapshot = true
$ --training.global_batch_size=24
$ --parallelism.fsdp_reshard_after_forward=2
@ ranks=4 devices=0
> {file}: parallelism.data_parallel_shard_degree = 2: replicate 1 x shard 2 needs 2 ranks, and 4 were started; start
    2 (./run_train.sh does), or set the degrees to the ranks there are
> command line: parallelism.fsdp_reshard_after_forward = 2: expected a divisor of the shard degree 2, smaller than
    it; or "always" or "never"
> command line: training.global_batch_size = 24: expected a multiple of local_batch_size x ranks = 8 x 2 = 16
> {file}: training.streams = 3: expected a multiple of the data-parallel degree 2, so that each rank has whole
    streams
> {file}: profiling.enable_memory_snapshot = true: needs CUDA, and this run is on a CPU; set false

# too few devices and more
training.global_batch_size = 16
@ ranks=9 devices=8
> {file}: 9 ranks on this host, which has 8 devices; start at most 8 ranks a host (NGPU), on more hosts (NNODES)
> {file}: training.global_batch_size = 16: expected a multiple of local_batch_size x ranks = 8 x 9 = 72

## ranks per host

# uneven over the hosts
$ --parallelism.data_parallel_shard_degree=3
@ NNODES=2 devices=0
> {file}: 3 ranks cannot be dealt evenly to NNODES = 2 hosts

# replicas uneven over the hosts
$ --parallelism.data_parallel_replicate_degree=8
@ NNODES=3 devices=0
> {file}: 8 ranks cannot be dealt evenly to NNODES = 3 hosts

# more than the devices
$ --parallelism.data_parallel_shard_degree=16
@ devices=8
> {file}: 16 ranks on this host, which has 8 devices; start at most 8 ranks a host (NGPU), on more hosts (NNODES)

# NGPU more than the devices
@ NGPU=16 devices=8
> {file}: 16 ranks on this host, which has 8 devices; start at most 8 ranks a host (NGPU), on more hosts (NNODES)

# the launch is checked
$ --training.global_batch_size=16
@ NGPU=4 devices=8
> command line: training.global_batch_size = 16: expected a multiple of local_batch_size x ranks = 8 x 4 = 32

# replicas do not divide the devices
$ --parallelism.data_parallel_replicate_degree=3
@ devices=8
> command line: parallelism.data_parallel_replicate_degree = 3: expected a divisor of the 8 ranks to start (1 host x
    8 devices); or set NGPU

# NGPU against the degrees
$ --parallelism.data_parallel_shard_degree=4
@ NGPU=3 devices=8
> command line: parallelism.data_parallel_shard_degree = 4: replicate 1 x shard 4 needs 4 ranks, and NGPU = 3 starts
    3; set NGPU = 4 or leave it out

# NGPU is 0
@ NGPU=0 devices=8
> environment: NGPU = "0": expected a whole number at least 1

# NGPU is -2
@ NGPU=-2 devices=8
> environment: NGPU = "-2": expected a whole number at least 1

# NGPU is 1.5
@ NGPU=1.5 devices=8
> environment: NGPU = "1.5": expected a whole number at least 1

# NGPU is abc
@ NGPU=abc devices=8
> environment: NGPU = "abc": expected a whole number at least 1

# NNODES is 0
@ NNODES=0 devices=8
> environment: NNODES = "0": expected a whole number at least 1

# NNODES is -2
@ NNODES=-2 devices=8
> environment: NNODES = "-2": expected a whole number at least 1

# NNODES is 1.5
@ NNODES=1.5 devices=8
> environment: NNODES = "1.5": expected a whole number at least 1

# NNODES is abc
@ NNODES=abc devices=8
> environment: NNODES = "abc": expected a whole number at least 1
"""


def read_table() -> Iterator[Any]:
    """A case (file, arguments, launch, lines) for each `#`."""
    for group in TABLE.strip().split("## ")[1:]:
        title, *cases = group.split("\n\n# ")
        for case in cases:
            name, *rows = case.strip().splitlines()
            toml, args, launch, lines = "", [], {}, []
            for row in rows:
                if row.startswith("$ "):
                    args.append(row[2:])
                elif row.startswith("@ "):
                    launch = dict(item.split("=") for item in row[2:].split())
                elif row.startswith("> "):
                    lines.append(row[2:])
                elif lines:
                    lines[-1] += f" {row.strip()}"
                else:
                    toml += f"{row}\n"
            assert lines, f"{title}: {name}"
            yield pytest.param(toml, args, launch, lines, id=f"{title}: {name}")


@pytest.mark.parametrize(("toml", "args", "launch", "lines"), read_table())
def test_wrong_config(folder: Folder, toml: str, args: list[str], launch: dict[str, str], lines: list[str]):
    if not launch:
        return folder.refused(lambda: folder.load(toml, *args), lines)
    loaded = folder.load(toml, *args)
    if "ranks" in launch:
        given = on(**{name: int(value) for name, value in launch.items()})
        folder.refused(lambda: config.check(loaded, given), lines)
    else:
        folder.refused(lambda: config.ranks_per_host(loaded, launch, int(launch["devices"])), lines)


def test_a_second_line_in_an_override_is_not_dropped(folder: Folder):
    line = r'command line: training.steps = "5\nx = 3": expected a whole number at least 1'
    folder.refused(lambda: folder.load("", "--training.steps=5\nx = 3"), [line])


# fmt: off
WRONG_FILES = {
    "nothing": ([], "command line: expected one TOML file, got no config file; {usage}"),
    "only an override": (["--debug.seed=3"], "command line: expected one TOML file, got no config file; {usage}"),
    "two": (["{file}", "x.toml"], "command line: expected one TOML file, got 2 files: {file} x.toml; {usage}"),
    "empty, as from an unset variable": ([""], "command line: expected one TOML file, got an empty path; {usage}"),
    "missing, like another": (["{folder}/rum.toml"], "{folder}/rum.toml: no such file; did you mean {file}?"),
    "missing, like another here": (["rum.toml"], "rum.toml: no such file; did you mean run.toml?"),
    "missing, relative": (["nowhere/debug.toml"], "nowhere/debug.toml: no such file in {folder}"),
    "missing, absolute": (["/nowhere/debug.toml"], "/nowhere/debug.toml: no such file"),
    "directory": (["{folder}"], "{folder}: cannot be read: [Errno 21] Is a directory: '{folder}'"),
    "not UTF-8": (["latin1"], "latin1: cannot be read: 'utf-8' codec can't decode byte 0xe9 in position 2: invalid "
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

RIGHT = {
    "empty": "",
    "dotted keys": "training.steps = 3\noptimizer.lr = 1",
    "stream of c4, validated on its own split": f"{STREAMED_C4}validation.enable = true",
    "stream of text, validated on files": f"{STREAMED_TEXT}validation.enable = true\nvalidation.dataset_path = 'y'",
    "number of streams": f"{STREAMED_C4}training.streams = 6",
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
}


@pytest.mark.parametrize("toml", RIGHT.values(), ids=RIGHT)
def test_right_config(folder: Folder, toml: str):
    loaded = folder.load(toml)
    for section, keys in config.tomllib.loads(toml).items():
        for key, value in keys.items():
            assert of(loaded.config, f"{section}.{key}") == value


def test_a_byte_order_mark_is_read_over(folder: Folder):
    """Windows editors write one."""
    assert folder.load("\ufefftraining.steps = 3").config.training.steps == 3


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.toml")), ids=lambda path: path.name)
def test_shipped_config_loads(path: Path):
    config.load([str(path)])


@pytest.mark.parametrize("flavor", SIZES)
def test_flavor_fills_the_dimensions_and_keys_override_them(folder: Folder, flavor: str):
    model = folder.load(f"model.flavor = '{flavor}'").config.model.model_dump()
    assert {key: model[key] for key in SIZES[flavor]} == SIZES[flavor]
    changed = folder.load(f"model.flavor = '{flavor}'\nmodel.vocab_size = 77", "--model.n_layers=3").config.model
    assert changed.model_dump() == {**model, "vocab_size": 77, "n_layers": 3}


def test_flavor_on_the_command_line_keeps_the_files_dimensions(folder: Folder):
    model = folder.load("model.n_layers = 3", "--model.flavor=llama3_8b").config.model
    assert (model.flavor, model.n_layers, model.dim) == ("llama3_8b", 3, 4096)


def test_debug_is_the_default_flavor(folder: Folder):
    model = folder.load().config.model
    assert (model.dim, model.n_layers, model.n_heads, model.n_kv_heads, model.ffn_dim) == (256, 6, 16, 8, 768)
    assert Config().model == model


@pytest.mark.parametrize("flavor", SIZES)
def test_printed_config_loads_to_the_same(folder: Folder, flavor: str):
    loaded = folder.load(f"model.flavor = '{flavor}'\noptimizer.eps = 3e-9\njob.description = 'é = \"#\"'")
    assert folder.load(loaded.config.toml()).config == loaded.config


@pytest.mark.parametrize("toml", RIGHT.values(), ids=RIGHT)
def test_resolved_config_loads_to_the_same(folder: Folder, toml: str):
    """What train.py leaves in the dump folder can be run again."""
    resolved = config.check(folder.load(toml), on(2, devices=8))
    assert folder.load(resolved.toml()).config == resolved


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--training.steps=30"], "training.steps", 30),
        (["--training.steps=1_000"], "training.steps", 1000),
        (["--debug.seed=0x10"], "debug.seed", 16),
        (["--optimizer.lr=1e-4"], "optimizer.lr", 1e-4),
        (["--optimizer.lr=1"], "optimizer.lr", 1.0),
        (["--training.global_batch_size=-1"], "training.global_batch_size", -1),
        (["--training.shuffle=false"], "training.shuffle", False),
        (["--checkpoint.enable=true"], "checkpoint.enable", True),
        (["--checkpoint.enable"], "checkpoint.enable", True),
        (["--optimizer.name=Adam"], "optimizer.name", "Adam"),
        (['--optimizer.name="Adam"'], "optimizer.name", "Adam"),
        (["--parallelism.fsdp_reshard_after_forward=never"], "parallelism.fsdp_reshard_after_forward", "never"),
        (["--parallelism.fsdp_reshard_after_forward=4"], "parallelism.fsdp_reshard_after_forward", 4),
        (["--job.description=a word, or = more"], "job.description", "a word, or = more"),
        (["--job.dump_folder=a=b=c"], "job.dump_folder", "a=b=c"),
        (["--job.description="], "job.description", ""),
        (["--job.description=12"], "job.description", "12"),
        (["--job.description=true"], "job.description", "true"),
        (["--job.description=[1"], "job.description", "[1"),
        (["--job.description=C:\\new"], "job.description", "C:\\new"),
        (["--job.description=# x"], "job.description", "# x"),
        (['--job.description="quoted"'], "job.description", "quoted"),
        (["--job.description='quoted'"], "job.description", "quoted"),
        (["--training.steps=3", "--training.steps=4"], "training.steps", 4),
        (["--training.steps=wrong", "--training.steps=4"], "training.steps", 4),
        (["--training.shuffle=false", "--training.shuffle"], "training.shuffle", True),
    ],
    ids=lambda argument: " ".join(argument) if isinstance(argument, list) else "",
)
def test_override(folder: Folder, arguments: list[str], key: str, value: Any):
    options = folder.load("training.steps = 2\njob.description = 'file'\ntraining.shuffle = true", *arguments).config
    assert (of(options, key), type(of(options, key))) == (value, type(value))


def test_overrides_may_stand_before_the_file(folder: Folder):
    loaded = config.load(["--training.steps=3", str(folder.file), "--training.seq_len=5"])
    assert (loaded.config.training.steps, loaded.config.training.seq_len) == (3, 5)
    assert (loaded.file, loaded.origins) == (
        str(folder.file),
        {"training.steps": "command line", "training.seq_len": "command line"},
    )


# ---------------------------------------------------------------------------------------------------------------------
# A config and a launch

REPLICATE = "parallelism.data_parallel_replicate_degree"
SHARD = "parallelism.data_parallel_shard_degree"
RESHARD_KEY = "parallelism.fsdp_reshard_after_forward"

RESOLVED_KEYS = (
    *(REPLICATE, SHARD, "training.global_batch_size", "training.mixed_precision_param"),
    *("training.mixed_precision_reduce", "lr_scheduler.total_steps"),
)
PRECISIONS = 'training.mixed_precision_param = "float32"\ntraining.mixed_precision_reduce = "bfloat16"'
# fmt: off
RESOLVED = {  # config, launch, values of RESOLVED_KEYS
    "one CPU rank":     ("", on(1),                                     (1, 1, 8, "float32", "float32", 10_000)),
    "four CPU ranks":   ("", on(4),                                     (1, 4, 32, "float32", "float32", 10_000)),
    "eight GPUs":       ("", on(8, devices=8),                          (1, 8, 64, "bfloat16", "float32", 10_000)),
    "two hosts":        ("", on(16, devices=8, hosts=2),                (1, 16, 128, "bfloat16", "float32", 10_000)),
    "replicas":         (f"{REPLICATE} = 2", on(4),                     (2, 2, 32, "float32", "float32", 10_000)),
    "only replicas":    (f"{REPLICATE} = 4", on(4),                     (4, 1, 32, "float32", "float32", 10_000)),
    "groups of shards": (f"{RESHARD_KEY} = 2", on(4),                   (1, 4, 32, "float32", "float32", 10_000)),
    "bfloat16 on CPU":  ("training.dtype = 'bfloat16'", on(1),          (1, 1, 8, "bfloat16", "float32", 10_000)),
    "bfloat16 on GPU":  ("training.dtype = 'bfloat16'", on(1, devices=1), (1, 1, 8, "bfloat16", "float32", 10_000)),
    "float64 on CPU":   ("training.dtype = 'float64'", on(1),           (1, 1, 8, "float64", "float64", 10_000)),
    "float64 on GPU":   ("training.dtype = 'float64'", on(1, devices=1), (1, 1, 8, "float64", "float64", 10_000)),
    "given precisions": (PRECISIONS, on(1, devices=1),                  (1, 1, 8, "float32", "bfloat16", 10_000)),
    "steps":            ("training.steps = 7", on(1),                   (1, 1, 8, "float32", "float32", 7)),
    "given horizon":    ("lr_scheduler.total_steps = 10_001", on(1),    (1, 1, 8, "float32", "float32", 10_001)),
    "accumulation":     ("training.global_batch_size = 96", on(2),      (1, 2, 96, "float32", "float32", 10_000)),
}
# fmt: on


@pytest.mark.parametrize(("toml", "launch", "resolved"), RESOLVED.values(), ids=RESOLVED)
def test_launch_resolves(folder: Folder, toml: str, launch: Launch, resolved: tuple[Any, ...]):
    loaded = folder.load(toml)
    options = config.check(loaded, launch)
    assert tuple(of(options, key) for key in RESOLVED_KEYS) == resolved
    changed = {key.replace(".", "__"): of(options, key) for key in RESOLVED_KEYS}
    assert options == loaded.config.replace(**changed)  # nothing else has changed


def test_launch_from_environment(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert Launch.from_environment(2) == Launch(0, 0, 1, 1, 2)
    for name, value in (("RANK", "5"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "8"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert Launch.from_environment(4) == Launch(rank=5, local_rank=1, world_size=8, local_world_size=4, n_devices=4)


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
    ],
)
def test_ranks_per_host(folder: Folder, args: tuple[str, ...], environment: dict[str, str], n_devices: int, here: int):
    assert config.ranks_per_host(folder.load("", *args), environment, n_devices) == here


def test_wrong_torchrun_environment(folder: Folder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    line = 'environment: WORLD_SIZE = "two": expected a whole number at least 1'
    folder.refused(lambda: Launch.from_environment(0), [line])


# ---------------------------------------------------------------------------------------------------------------------
# The program


def program(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m titanlite.config`, on a host without devices (no nvidia-smi on its PATH)."""
    kept = {name: value for name, value in os.environ.items() if name not in ("NGPU", "NNODES")}
    return subprocess.run(
        [sys.executable, "-m", "titanlite.config", *args],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=ROOT,
        env={**kept, "PATH": "", "PYTHONUTF8": "1", **environment},
        timeout=60,
        check=False,
    )


def test_program_refuses_a_wrong_config(folder: Folder):
    folder.file.write_text("[training]\nsteps = 0\nlr = 'é'\n", encoding="utf-8")
    done = program(str(folder.file), "--optimizer.lr=high", "--oops")
    assert done.stderr == folder.fill_in(
        "error: command line: --oops: expected --section.key=value\n"
        "error: {file}: training.steps = 0: expected a whole number at least 1\n"
        'error: {file}: training.lr = "é": unknown key; did you mean optimizer.lr?\n'
        'error: command line: optimizer.lr = "high": expected a number above 0\n'
    )
    assert (done.returncode, done.stdout) == (2, "")


def test_program_prints_a_right_config(folder: Folder):
    loaded = folder.load("model.flavor = 'llama3_8b'\njob.description = 'é = \"#\"'", "--training.steps=12")
    done = program(str(folder.file), "--training.steps=12")
    assert (done.returncode, done.stderr) == (0, "")
    printed = config.tomllib.loads(done.stdout)
    assert Config.model_validate(printed) == loaded.config
    assert {section: list(keys) for section, keys in printed.items()} == {
        section: list(field.annotation.model_fields) for section, field in Config.model_fields.items()
    }


def test_program_counts_ranks(folder: Folder):
    done = program("--ranks-per-host", str(folder.file), f"--{SHARD}=4", NNODES="2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
    done = program("--ranks-per-host", str(folder.file), f"--{SHARD}=3", NNODES="2")
    line = folder.fill_in("error: {file}: 3 ranks cannot be dealt evenly to NNODES = 2 hosts\n")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


def test_program_helps():
    done = program("no-such-file.toml", "--help")
    assert (done.returncode, done.stdout, done.stderr) == (0, config.help_text() + "\n", "")


def test_help_names_every_option_with_its_meaning():
    lines = config.help_text().splitlines()
    assert lines[0] == USAGE
    for section, field in Config.model_fields.items():
        assert lines.count(f"[{section}]") == 1
        for key, option in field.annotation.model_fields.items():
            assert option.description, f"{section}.{key} has no description"
            assert len(option.description) > 10
            at = [number for number, line in enumerate(lines) if line.startswith(f"  --{section}.{key}   ")]
            assert len(at) == 1
            assert lines[at[0] + 1].strip() == " ".join(option.description.split())


@pytest.mark.parametrize(
    "line",
    [
        '  --job.dump_folder   a string; default "./outputs"',
        f'  --model.flavor   {FLAVORS}; default "debug"',
        "  --model.dim   a whole number at least 1; default the flavor's",
        "  --training.shuffle   true or false; default true",
        "  --training.global_batch_size   -1 or a whole number at least 1; default -1",
        "  --lr_scheduler.decay_ratio   -1 or a number at least 0 and at most 1; default -1",
        f'  --parallelism.fsdp_reshard_after_forward   {RESHARD}; default "always"',
        "  --profiling.profile_freq   a whole number at least 4; default 10",
    ],
)
def test_help_says_type_bounds_and_default(line: str):
    assert config.help_text().splitlines().count(line) == 1


def test_config_needs_no_heavy_package(folder: Folder):
    """A wrong config is found in a fraction of a second, and before any device is touched."""
    code = (
        "import sys\n"
        "from titanlite import config\n"
        f"config.check(config.load([{str(folder.file)!r}]), config.Launch(0, 0, 1, 1, 0))\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
