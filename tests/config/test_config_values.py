# ruff: noqa: F403, F405
"""One option at a time, files, arguments and names of configs, and the programs that print options."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.build.config_page import reference_markdown
from tests.helpers.config import *
from titanlite import config
from titanlite.config import Config
from titanlite.config.loader import sections_of, tomllib, value_of
from titanlite.config.model_sizes import SIZES
from titanlite.config.reference import help_text, json_schema, meaning_of

FLAVORS = "one of " + ", ".join(f'"{name}"' for name in (*SIZES, "from_hf"))

# ---------------------------------------------------------------------------------------------------------------------
# Types, bounds and choices

# fmt: off
WRONG_VALUES = {
    "a string": [
        "model.hf_model_type = 3",
        "job.dump_folder = 3", "job.description = true", "job.description = 2020-01-01",
        'job.description = ["a", "b"]', "model.hf_assets_path = 3", "training.dataset_path = 3",
        "training.dataset_config = 3", "training.dataset_split = 3", "training.dataset_text_key = 3",
        "training.dataset_messages_key = 3", "training.dataset_prompt_key = 3", "training.dataset_response_key = 3",
        "training.cache_folder = 3", "checkpoint.folder = 3", "checkpoint.initial_load_path = 3",
        "metrics.save_tb_folder = 3", "validation.dataset_path = 3", "validation.dataset_split = 3",
        "profiling.save_traces_folder = 3", "profiling.save_memory_snapshot_folder = 3", "plan.device = 3",
    ],
    "true or false": [
        "fault_tolerance.enable = 1", "ema.validation = 1", "ema.warmup = 1",
        "model.moe.normalize_scores = 1", "model.moe.balance_bias = 1", "model.tie_embeddings = 1",
        "model.mlp_bias = 0", "model.gated_ffn = 1", "model.attention_sinks = 1", "model.rope_yarn_truncate = 0",
        "model.moe.expert_bias = 1", 'model.moe.router_bias = "all"',
        'training.streaming = "yes"', "training.shuffle = 0", 'training.shuffle = "true"',
        "training.enable_cpu_offload = 1", 'checkpoint.enable = "on"', "metrics.enable_tensorboard = 1",
        "training.change_mixture_on_resume = 1", "checkpoint.last_save_in_hf = 1", "job.take_over_lock = 1",
        "validation.enable = 1", "profiling.enable_profiling = 1", "profiling.enable_memory_snapshot = 1",
        "debug.deterministic = 1", "training.document_mask = 1", 'parallelism.disable_loss_parallel = "true"',
        "parallelism.enable_async_tensor_parallel = 1", "compile.enable = 1", 'compile.enable = "true"',
        "optimizer.stochastic_rounding = 1", "optimizer.enable_cpu_offload = 1", "int8.enable = 1",
        "float8.enable = 1", 'float8.emulate = "on"',
        "float8.enable_fsdp_float8_all_gather = 1", "float8.precompute_float8_dynamic_scale_for_fsdp = 1",
    ],
    'true or false, or "all_heads"': ["model.qk_norm = 1", 'model.qk_norm = "true"'],
    "an integer >= 1": [
        "model.dim = 0", "model.n_layers = 0", "model.n_heads = 0", "model.n_kv_heads = 0", "model.ffn_dim = 0",
        "model.vocab_size = 0", "model.rope_original_seq_len = 0", "training.streaming_shards = 0",
        "training.streaming_shuffle_block = 0", "ema.start_step = 0",
        "training.seq_len = 0", "training.local_batch_size = 0", "training.steps = 0", "training.steps = 10.0",
        'training.steps = "10"', "training.steps = true", "training.steps = [1, 2]", "training.steps = 2020-01-01",
        "parallelism.data_parallel_replicate_degree = 0", "checkpoint.interval = 0",
        "parallelism.data_parallel_replicate_degree = -1", "metrics.log_freq = 0", "validation.freq = 0",
        "validation.generate_tokens = 0",
        "fault_tolerance.min_replica_size = 0", "fault_tolerance.process_group_timeout_ms = 0.5",
        "comm.init_timeout_seconds = 0", "comm.train_timeout_seconds = 2.5", "comm.train_timeout_seconds = 0",
        "parallelism.tensor_parallel_degree = 0", "parallelism.tensor_parallel_degree = -1",
        "parallelism.pipeline_parallel_degree = 0", "parallelism.pipeline_parallel_degree = 2.0",
        "parallelism.pipeline_parallel_microbatch_size = 0", "parallelism.pipeline_parallel_microbatch_size = -1",
        "parallelism.context_parallel_degree = 0", "parallelism.context_parallel_degree = true",
        "parallelism.context_parallel_ulysses_degree = 0", 'parallelism.context_parallel_ulysses_degree = "all"',
        "parallelism.expert_parallel_degree = 0", "model.moe.n_experts_per_token = 0", "model.moe.n_groups = 0",
        "model.moe.n_groups_per_token = 0", "model.moe.every_n_layers = 0", "model.mla.qk_nope_head_dim = 0",
        "model.mla.qk_rope_head_dim = 0", "model.mla.v_head_dim = -1",
        "optimizer.muon_newton_schulz_steps = 0", "training.gc_freq = 0", "training.loss_scale_growth_interval = 0",
    ],
    "an integer >= 0": [
        "lora.rank = -1",
        "model.sliding_window = -1", "model.sliding_window = true", "model.moe.n_experts = -1",
        "model.learned_positions = -1", "model.mla.kv_lora_rank = -1", "model.mla.q_lora_rank = 1.5",
        "model.moe.n_experts = true", "model.moe.n_shared_experts = -1", "model.moe.n_first_dense_layers = 1.5",
        "training.nonfinite_steps_allowed = -1", "debug.sdc_check_freq = -1", "debug.fingerprint_freq = -1",
        "lr_scheduler.warmup_steps = -1", "checkpoint.keep_latest_k = -1",
        "fault_tolerance.replica_id = -1", "fault_tolerance.group_size = -1",
        "comm.trace_buf_size = -1", "parallelism.pipeline_parallel_first_stage_less_layers = -1",
        "parallelism.fsdp_forward_prefetch = -1",
        "parallelism.fsdp_forward_prefetch = true", "parallelism.fsdp_backward_prefetch = -1", "plan.tokens = -1",
    ],
    "-1, or an integer >= 0": [
        "parallelism.pipeline_parallel_last_stage_less_layers = -2",
        "parallelism.pipeline_parallel_last_stage_less_layers = 0.5",
    ],
    "-1, or an integer >= 1": [
        "model.moe.expert_dim = 0",
        "model.head_dim = 0", "model.head_dim = -2", "model.head_dim = 64.0", 'model.head_dim = "auto"',
        "training.loss_chunks = 0", "training.loss_chunks = -2",
        "training.global_batch_size = 0", "training.global_batch_size = -2", "training.global_batch_size = 8.0",
        "training.global_batch_size = true", "lr_scheduler.total_steps = 0",
        "parallelism.data_parallel_shard_degree = 0", "checkpoint.load_step = 0", "validation.steps = 0",
        "parallelism.pipeline_parallel_stages_per_rank = 0", "parallelism.pipeline_parallel_stages_per_rank = -2",
        'parallelism.pipeline_parallel_stages_per_rank = "auto"', "plan.devices_per_node = 0",
    ],
    "an integer >= 1 and <= 2147483647": [
        "training.steps = 10000000000000000", "training.seq_len = 4611686018427387904",
        "training.local_batch_size = 1000000000000000000000000000000", "comm.init_timeout_seconds = 9007199254740992",
        "model.dim = 2147483648", "checkpoint.interval = 9223372036854775808",
    ],
    "an integer >= 1 and <= 4096": [
        "model.n_layers = 1000000000", "activation_checkpoint.layers_per_checkpoint = 1000000000",
    ],
    "an integer >= 1 and <= 65536": ["parallelism.tensor_parallel_degree = 1000000000"],
    "-1, or an integer >= 1 and <= 65536": ["parallelism.data_parallel_shard_degree = 1000000000"],
    "an integer >= 0 and <= 9007199254740992": ["plan.tokens = 4611686018427387904"],
    "an integer >= 4": ["profiling.profile_freq = 3", "training.outlier_window = 3"],
    "an integer >= 0 and <= 9223372036854775807": [
        "debug.seed = 18446744073709551616", "debug.seed = 9223372036854775808",
    ],
    "a finite number > 0": [
        "lora.alpha = 0",
        "model.moe.score_scaling = 0", "model.embedding_scale = 0", "model.residual_scale = -1.0",
        "model.logits_scale = 0.0", "model.moe.swiglu_alpha = 0",
        "model.norm_eps = 0.0", "model.rope_theta = 0", "model.rope_low_freq_factor = 0.0",
        "model.rope_high_freq_factor = -4.0", "model.rope_beta_fast = 0.0", "model.rope_beta_slow = -1.0",
        "training.max_norm = 0.0", "optimizer.lr = 0", 'optimizer.lr = "8e-4"',
        "optimizer.lr = true", "optimizer.eps = 0.0", "training.initial_loss_scale = 0", "optimizer.lr = nan",
        "optimizer.lr = inf", "training.initial_loss_scale = inf",
    ],
    "-1, or a finite number > 0": ["model.rope_attention_factor = 0.0", "model.rope_attention_factor = -2",
                                   "model.attention_scale = 0", "model.mla.norm_eps = 0"],
    "a finite number >= 0": [
        "model.mla.mscale_all_dim = -1", "optimizer.qk_clip_threshold = -1", "model.llama4_scaling_beta = -0.1",
        "model.moe.swiglu_limit = -7.0",
        "model.moe.balance_bias_rate = -1", "model.moe.balance_loss_weight = -0.1", "model.moe.z_loss_weight = inf",
        "optimizer.weight_decay = -0.1", "training.skip_outlier_sigma = -1", "training.epochs = -1",
                     "plan.price = -1", "optimizer.weight_decay = inf"],
    "a finite number >= 1": [
        "model.rope_scaling_factor = 0.5", "model.rope_scaling_factor = inf",
        "plan.expert_imbalance = 0.5", "plan.expert_imbalance = inf",
    ],
    "a finite number >= 0 and < 1": [
        "optimizer.muon_momentum = 1.0", "optimizer.beta1 = 1.0", "optimizer.beta1 = -0.1", "optimizer.beta2 = 1.5",
        "validation.fraction = 1.0", "ema.decay = 1.0", "lr_scheduler.warmup_ratio = 1.0",
        "validation.fraction = -0.1", "optimizer.beta1 = nan",
    ],
    "a finite number >= 0 and <= 1": [
        "lr_scheduler.min_lr_factor = 1.1", "lr_scheduler.min_lr_factor = -0.1",
        "lr_scheduler.min_lr_factor = nan", "model.partial_rotary_factor = 1.5",
    ],
    "-1, or a finite number >= 0 and <= 1": [
        "lr_scheduler.decay_ratio = 1.5", "lr_scheduler.decay_ratio = -0.5", 'lr_scheduler.decay_ratio = "all"',
        "lr_scheduler.decay_ratio = nan",
    ],
    FLAVORS: ['model.flavor = "llama3"', "model.flavor = 3", 'model.flavor = ["debug"]'],
    'one of "top_2_sum", "max"': ['model.moe.group_score = "sum"'],
    'one of "softmax", "sigmoid"': ['model.moe.score_function = "relu"'],
    'one of "none", "qkv", "all"': ["model.attention_bias = true", 'model.attention_bias = "q"'],
    'one of "llama3", "linear", "yarn", "longrope"': ['model.rope_scaling_type = "dynamic"'],
    'one of "rms", "rms_plus_one", "layer"': ['model.norm = "batch"'],
    'one of "before", "after", "both"': ['model.norm_placement = "none"'],
    'one of "silu", "gelu", "gelu_tanh"': ['model.activation = "relu"'],
    'one of "pydoc_topics", "text", "json", "parquet", "c4", "hub"': [
        'training.dataset = "c5"', "training.dataset = true",
    ],
    'one of "text", "messages", "prompt_response"': ['training.dataset_format = "chat"'],
    'one of "reject", "drop", "truncate"': ['training.long_conversations = "split"'],
    'one of "none", "mean"': ['model.new_tokens = "zero"'],
    'one of "ordinary", "special"': ["training.special_tokens_in_text = true"],
    'one of "concatenate", "best_fit"': ['training.packing = "first_fit"'],
    'one of "document", "paragraph", "line"': ['training.text_sample_by = "sentence"'],
    'one of "float32", "bfloat16", "float64"': ['training.dtype = "float16"'],
    'one of "auto", "bfloat16", "float32", "float64"': [
        'optimizer.muon_dtype = "float16"', 'training.mixed_precision_reduce = "float16"',
        'training.mixed_precision_reduce = "fp32"',
    ],
    'one of "auto", "bfloat16", "float32", "float64", "float16"': ['training.mixed_precision_param = "fp16"'],
    'one of "AdamW", "Adam", "Muon"': ['optimizer.name = "adamw"'],
    'one of "fused", "foreach", "for-loop"': ['optimizer.implementation = "loop"'],
    'one of "auto", "float32", "bfloat16", "float8", "int8", "int4"': [
        'optimizer.state_dtype = "float64"', "optimizer.state_dtype = 8",
    ],
    'one of "linear", "sqrt", "cosine"': ['lr_scheduler.decay_type = "exponential"'],
    'one of "default", "always", "never", or an integer >= 2': [
        "parallelism.fsdp_reshard_after_forward = 1", "parallelism.fsdp_reshard_after_forward = true",
        'parallelism.fsdp_reshard_after_forward = "2"', "parallelism.fsdp_reshard_after_forward = -1",
    ],
    'one of "every_accumulation_step", "last_accumulation_step"': ['parallelism.fsdp_reduce_gradients = "always"'],
    'one of "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"': [
        'parallelism.pipeline_parallel_schedule = "1f1b"', 'parallelism.pipeline_parallel_schedule = "ZeroBubble"',
    ],
    'one of "layers", "parameters"': ['parallelism.pipeline_parallel_balance = "flops"'],
    "a list of lists of strings": [
        "parallelism.module_fqns_per_model_part = 3", 'parallelism.module_fqns_per_model_part = "layers.0"',
        'parallelism.module_fqns_per_model_part = ["layers.0"]',
        'parallelism.module_fqns_per_model_part = [["layers.0", 1]]',
        'parallelism.module_fqns_per_model_part = [["norm"], "output"]',
        'parallelism.module_fqns_per_model_part = [[["norm"]]]',
    ],
    'one of "auto", "cpu", "flash", "cudnn", "efficient", "math"': [
        'training.attention_backend = "sdpa"', "training.attention_backend = true",
    ],
    'one of "auto", "bfloat16", "float32"': ['lora.base_dtype = "int4"'],
    'one of "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"': ['float8.recipe = "blockwise"'],
    "an array of tables": [
        "training.datasets = 3", 'training.datasets = "a"', "training.datasets = [3]", "model.layer_pattern = [1]",
    ],
    "a list of numbers > 0": ["model.rope_short_factors = 3", "model.rope_long_factors = [0]"],
    "a list of strings": [
        'compile.components = "model"', "compile.components = [1]", "float8.filter_fqns = 3", "int8.filter_fqns = 3",
        'lora.targets = "wq"',
        'validation.generate_prompts = "a"', "validation.generate_prompts = [1]",
        'float8.filter_fqns = "layers.0."', "float8.filter_fqns = [1]", 'float8.filter_fqns = [["layers.0."]]',
    ],
    'one of "none", "full", "selective"': [
        'activation_checkpoint.mode = "op"', "activation_checkpoint.mode = true",
    ],
    'one of "op", "every_second_mm", "attention", or an integer >= 1': [
        'activation_checkpoint.selective_ac_option = "2"', "activation_checkpoint.selective_ac_option = 0",
        "activation_checkpoint.selective_ac_option = true",
    ],
    'one of "inductor", "aot_eager"': ['compile.backend = "eager"', "compile.backend = true"],
    'one of "disabled", "async"': ['checkpoint.async_mode = "async_with_pinned_mem"'],
    'one of "stop", "previous"': ['checkpoint.on_corrupt = "ignore"'],
    'one of "fail", "continue"': ['checkpoint.on_error = "ignore"'],
    'one of "auto", "float32", "bfloat16", "float16"': ['checkpoint.export_dtype = "float64"'],
}
HINTS = {
    'training.mixed_precision_reduce = "fp32"': "float32", 'training.mixed_precision_param = "fp16"': "float16",
    'optimizer.name = "adamw"': "AdamW", 'parallelism.pipeline_parallel_schedule = "1f1b"': "1F1B",
    'parallelism.pipeline_parallel_schedule = "ZeroBubble"': "ZBVZeroBubble",
    'model.flavor = "llama3"': "llama3_1b or llama3_3b or llama3_8b", 'model.attention_bias = "q"': "qkv",
}
# fmt: on


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [pytest.param(text, expected, id=text) for expected, texts in WRONG_VALUES.items() for text in texts],
)
def test_wrong_value(tmp_path: Path, assignment: str, expected: str):
    lines = problems(lambda: load(tmp_path, assignment))
    hint = HINTS.get(assignment, "")
    assert lines == [f"{tmp_path / 'run.toml'}: {assignment}: expected {expected}{hint and f'; did you mean {hint}?'}"]


def test_wrong_values_cover_every_option():
    assert {text.split(" = ")[0] for texts in WRONG_VALUES.values() for text in texts} == set(OPTIONS)


TEXTS = [key for key, option in OPTIONS.items() if option.annotation in (str, list[str])]
PATHS = [key for key in TEXTS if key.endswith(("path", "folder")) or key == "plan.device"]


@pytest.mark.parametrize("key", TEXTS)
def test_a_text_has_neither_control_characters_nor_bytes_that_are_no_utf8(tmp_path: Path, key: str):
    text = '["a", "b{}c"]' if OPTIONS[key].annotation is not str else '"b{}c"'
    escape, nul, surrogate = text.format("\\u001b"), text.format("\\u0000"), text.format("\udcff")
    message = "expected UTF-8 text without control characters"
    for odd in (nul, escape):
        line = f"{tmp_path / 'run.toml'}: {key} = {odd}: {message}"
        assert problems(lambda odd=odd: load(tmp_path, f"{key} = {odd}")) == [line]
    argument = surrogate.strip('"')
    shown = text.format("\\udcff")
    assert problems(lambda: load(tmp_path, "", f"--{key}={argument}"))[0] == f"command line: {key} = {shown}: {message}"


@pytest.mark.parametrize("path", ["a" * 256, "é" * 128, "/a" * 2048], ids=["name", "UTF-8", "path"])
@pytest.mark.parametrize("key", PATHS)
def test_a_path_that_no_file_can_have_is_rejected(tmp_path: Path, key: str, path: str):
    message = "expected a path of at most 4,095 bytes, each name at most 255"
    line = f'{tmp_path / "run.toml"}: {key} = "{path}": {message}'
    assert problems(lambda: load(tmp_path, f'{key} = "{path}"')) == [line]
    longest = {256: "a" * 255, 128: "é" * 127, 4096: "/a" * 2047 + "/"}[len(path)]
    assert load(tmp_path, f'job.dump_folder = "{longest}"').config.job.dump_folder == longest


@pytest.mark.parametrize("key", PATHS)
def test_a_path_may_begin_with_a_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str):
    """Each node and each user has their own where nodes may have other paths; else it is that of this user."""
    monkeypatch.setenv("HOME", "/home/me")
    expected = {"~/a": "~/a" if key in MAY_DIFFER_BETWEEN_NODES else "/home/me/a", "./~a": "./~a"}
    for path, value in expected.items():
        assert value_of(Config.model_validate(tomllib.loads(f'{key} = "{path}"')), key) == value
    for path in ("~nosuchuser/a", "~nosuchuser"):
        message = "expected a path; its ~ names no home folder (a name: ./~)"
        line = f'{tmp_path / "run.toml"}: {key} = "{path}": {message}'
        assert problems(lambda path=path: load(tmp_path, f'{key} = "{path}"')) == [line]


def test_a_wrong_text_in_a_table_is_named(tmp_path: Path):
    toml = '[[training.datasets]]\nname = "a"\ndataset = "text"\ndataset_path = "{}"\n'
    for path, message in (
        ("a\\u0000", "expected UTF-8 text without control characters"),
        ("a" * 256, "expected a path of at most "),
    ):
        (line,) = problems(lambda path=path: load(tmp_path, toml.format(path)))
        start = f'{tmp_path / "run.toml"}: training.datasets.0.dataset_path = "{path}": {message}'
        assert line.startswith(start)


# fmt: off
RIGHT_VALUES = [  # at the edge of what is allowed
    "model.n_layers = 1", "model.head_dim = 2", "model.sliding_window = 1", "model.rope_attention_factor = -1",
    "training.global_batch_size = -1", "training.max_norm = 1e-30", "optimizer.beta2 = 0.9999999",
    "training.nonfinite_steps_allowed = 0", "lr_scheduler.warmup_steps = 0", "lr_scheduler.decay_ratio = -1",
    "lr_scheduler.total_steps = 10_000", "lr_scheduler.min_lr_factor = 0.0", "lr_scheduler.min_lr_factor = 1.0",
    "parallelism.fsdp_reshard_after_forward = 2", 'parallelism.fsdp_reshard_after_forward = "never"',
    'parallelism.fsdp_reshard_after_forward = "default"', "parallelism.tensor_parallel_degree = 1",
    "parallelism.pipeline_parallel_stages_per_rank = -1", "parallelism.pipeline_parallel_microbatch_size = 1",
    "parallelism.context_parallel_degree = 1", "parallelism.module_fqns_per_model_part = []",
    "comm.trace_buf_size = 0", "validation.fraction = 0.0", "profiling.profile_freq = 4",
    "comm.trace_buf_size = 0", "debug.seed = 0", "debug.seed = 0x7fffffffffffffff", "training.gc_freq = 1",
    "training.loss_chunks = 1", 'training.mixed_precision_param = "float16"', 'optimizer.state_dtype = "int8"',
    'optimizer.state_dtype = "bfloat16"', "parallelism.fsdp_forward_prefetch = 0",
    "parallelism.fsdp_forward_prefetch = 1000", "parallelism.fsdp_backward_prefetch = 0", "float8.enable = true",
    "float8.filter_fqns = []", 'activation_checkpoint.mode = "selective"',
    'activation_checkpoint.selective_ac_option = "op"',
]
AS_FLOAT = [
    "model.rope_scaling_factor = 1", "optimizer.lr = 1", "optimizer.beta1 = 0", "optimizer.weight_decay = 0",
    "lr_scheduler.decay_ratio = 0", "lr_scheduler.decay_ratio = 1", "training.initial_loss_scale = 65536",
]
# fmt: on


@pytest.mark.parametrize("assignment", [*RIGHT_VALUES, *AS_FLOAT])
def test_right_value(tmp_path: Path, assignment: str):
    key, text = assignment.split(" = ")
    value = tomllib.loads(f"value = {text}")["value"]
    value = float(value) if assignment in AS_FLOAT else value
    for loaded in load(tmp_path, assignment), load(tmp_path, "", f"--{key}={text}"):
        assert typed(of(loaded.config, key)) == typed(value)


def typed(value: Any) -> tuple[type, Any]:
    """Return a value with its type: 1, 1.0 and True are equal without."""
    return type(value), value


# ---------------------------------------------------------------------------------------------------------------------
# Files and arguments: every line in full. CLI stands for the command line.

# fmt: off
WRONG_INPUT = [
    ('job.dumpfolder = "x"\nlr_scheduler.warmup = 2\ntraining.bf16 = true', (),
     ['FILE: job.dumpfolder = "x": unknown key; did you mean job.dump_folder?',
     "FILE: training.bf16 = true: unknown key; --help lists every option",
     "FILE: lr_scheduler.warmup = 2: unknown key; did you mean lr_scheduler.warmup_steps?"]),
    ("training.lr = 1e-3\ntraining.seed = 1", (),
     ["FILE: training.lr = 0.001: unknown key; did you mean optimizer.lr?",
     "FILE: training.seed = 1: unknown key; did you mean debug.seed?"]),
    ("metrics.freq = 1\nprofiling.enable = true", (),
     ["FILE: metrics.freq = 1: unknown key; did you mean metrics.log_freq?",
     "FILE: profiling.enable = true: unknown key; did you mean profiling.enable_profiling?"]),
    ("[metrics]\nenable_wandb = true", (),
     ["FILE: metrics.enable_wandb = true: unknown key; examples/follow_metrics.py passes metrics.jsonl on to "
      "Weights & Biases; remove it"]),
    ("[optimizer.lrs]\nbase = 3", (), ['FILE: optimizer.lrs = {"base": 3}: unknown key; did you mean optimizer.lr?']),
    ("[training.steps]\nwarmup = 3", (), ['FILE: training.steps = {"warmup": 3}: expected an integer >= 1']),
    ("comm.x = 2020-01-01T12:00:00", (),
     ["FILE: comm.x = 2020-01-01T12:00:00: unknown key; --help lists every option"]),
    ("", ("--training.seq-len=3", "--training.streming", "--training.steps.x=3"),
     ["CLI: training.seq-len = 3: unknown key; did you mean training.seq_len?",
     "CLI: training.streming = true: unknown key; did you mean training.streaming?",
     "CLI: training.steps.x = 3: unknown key; did you mean training.steps?"]),
    ("[Training]", (), ["FILE: [Training]: an unknown section; did you mean training?"]),
    ('["a.b"]\nx = 1', (), ["FILE: [a.b]: an unknown section; --help lists every option"]),
    ("[optimiser]\nlr = 1", ("--optimiser.eps=1",),
     ["CLI: --optimiser.eps=1: an unknown section; did you mean optimizer?",
     "FILE: [optimiser]: an unknown section; did you mean optimizer?"]),
    ("", ("--optim.lr=1",), ["CLI: --optim.lr=1: an unknown section; did you mean optimizer?"]),
    ('model = "llama3_8b"', (), ['FILE: model = "llama3_8b": expected a section, written [model]']),
    ("[[training]]\nsteps = 3", (), ['FILE: training = [{"steps": 3}]: expected a section, written [training]']),
    ("training = 3", ("--training.steps=4",), ["FILE: training = 3: expected a section, written [training]"]),
    ("lr = 0.001", (), ["FILE: lr = 0.001: a key outside any section; did you mean optimizer.lr?"]),
    ("", ("--training", "--training.", "--steps=3", "--.steps=3", "--", "--training=3", "-training.steps=3"),
     ["CLI: --training: expected --section.key=value", "CLI: --training.: expected --section.key=value",
     "CLI: --steps=3: expected --section.key=value", "CLI: --.steps=3: expected --section.key=value",
     "CLI: --: expected --section.key=value", "CLI: --training=3: expected --section.key=value",
     "CLI: -training.steps=3: expected --section.key=value"]),
    ("", ("--training.shuffle", "3"), ["CLI: expected one config, got FILE 3; --help tells more"]),
    ("", ("--optimizer.lr", "--job.dump_folder", "--training.dataset", "--checkpoint.load_step"),
     ["CLI: --optimizer.lr: expected a value; write --optimizer.lr=VALUE",
     "CLI: --job.dump_folder: expected a value; write --job.dump_folder=VALUE",
     "CLI: --training.dataset: expected a value; write --training.dataset=VALUE",
     "CLI: --checkpoint.load_step: expected a value; write --checkpoint.load_step=VALUE"]),
    ("", ("--training.steps=", "--training.seq_len=many", "--training.streaming_shards==3", "--training.shuffle=False",
     "--model.rope_theta=1e400"), ["CLI: model.rope_theta = inf: expected a finite number > 0",
     'CLI: training.streaming_shards = "=3": expected an integer >= 1',
     'CLI: training.shuffle = "False": expected true or false',
     'CLI: training.seq_len = "many": expected an integer >= 1',
     'CLI: training.steps = "": expected an integer >= 1']),
    ("", ("--training.dtype=float16", "--training.global_batch_size=8.0", "--comm.trace_buf_size=-1",
     '--optimizer.lr="8e-4"'), ["CLI: training.global_batch_size = 8.0: expected -1, or an integer >= 1",
     'CLI: training.dtype = "float16": expected one of "float32", "bfloat16", "float64"',
     'CLI: optimizer.lr = "8e-4": expected a finite number > 0',
     "CLI: comm.trace_buf_size = -1: expected an integer >= 0"]),
    ("", ("--parallelism.module_fqns_per_model_part=[[layers.0]]",),
     ['CLI: parallelism.module_fqns_per_model_part = "[[layers.0]]": expected a list of lists of strings']),
    ("", ('--parallelism.module_fqns_per_model_part=[["layers.0"],3]',),
     ['CLI: parallelism.module_fqns_per_model_part = [["layers.0"], 3]: expected a list of lists of strings']),
    ("", ("--parallelism.module_fqns_per_model_part", "--parallelism.tensor_parallel_degree",
     "--training.attention_backend"), ["CLI: --parallelism.module_fqns_per_model_part: expected a value; write "
     "--parallelism.module_fqns_per_model_part=VALUE",
     "CLI: --parallelism.tensor_parallel_degree: expected a value; write "
     "--parallelism.tensor_parallel_degree=VALUE",
     "CLI: --training.attention_backend: expected a value; write --training.attention_backend=VALUE"]),
    ("[training]\nsteps = 0\nshufle = true\n" 'dataset = "text"\n' "global_batch_size = 12\n[nothing]\n"
     "[model]\nn_kv_heads = 3\ndim = 2.5\n[optimizer]\n" 'lr = "high"', ("--training.seq_len",
     "--comm.trace_buf_size=false", "--oops"),
     ["CLI: --training.seq_len: expected a value; write --training.seq_len=VALUE",
     "CLI: --oops: expected --section.key=value", "FILE: [nothing]: an unknown section; --help lists every option",
     "FILE: model.dim = 2.5: expected an integer >= 1", "FILE: training.steps = 0: expected an integer >= 1",
     "FILE: training.shufle = true: unknown key; did you mean training.shuffle?",
     'FILE: optimizer.lr = "high": expected a finite number > 0',
     "CLI: comm.trace_buf_size = false: expected an integer >= 0",
     "FILE: model.n_kv_heads = 3: expected a divisor of model.n_heads = 16; each KV head serves a group of "
     "query heads",
     'FILE: training.dataset_path = "" (default): training.dataset = "text" needs a file, folder or glob',
     "FILE: training.global_batch_size = 12: expected a multiple of training.local_batch_size = 8"]),
    ("training.steps = 0\noptimizer.beta1 = 2", ("--training.steps=-5",),
     ["CLI: training.steps = -5: expected an integer >= 1",
     "FILE: optimizer.beta1 = 2: expected a finite number >= 0 and < 1"]),
    ("training.seq_len = 30\nmodel.n_heads = 64\n[parallelism]\ntensor_parallel_degree = 16\n"
     "pipeline_parallel_degree = 7\npipeline_parallel_microbatch_size = 3\ncontext_parallel_degree = 4\n"
     "context_parallel_ulysses_degree = 3", (),
     ["FILE: parallelism.tensor_parallel_degree = 16: expected a divisor of model.n_kv_heads = 8, sharded over "
     "these ranks", "FILE: parallelism.context_parallel_ulysses_degree = 3: expected a divisor of "
     "parallelism.context_parallel_degree = 4; the quotient is the ring degree",
     "FILE: training.seq_len = 30: expected a multiple of 64, to split evenly over context parallel 4 x tensor "
     "parallel 16",
     "FILE: parallelism.pipeline_parallel_degree = 7: 7 stages need at least as many layers, and model.n_layers "
     "= 6", "FILE: parallelism.pipeline_parallel_microbatch_size = 3: expected a divisor of training.local_batch_size "
     "= 8"]),
    ("[training]\nsteps =\nseq_len = 3", (), ["FILE: not valid TOML: Invalid value (at line 2, column 8)"]),
    ("training steps", ("--training.steps=0",),
     ["FILE: not valid TOML: Expected '=' after a key in a key/value pair (at line 1, column 10)"]),
    ("training = 3\nlr_scheduler.total_steps = 5", (), ["FILE: training = 3: expected a section, written [training]"]),
    # values that are spelled alike
    ("", ("--model.flavor=llama3-8b", "--training.mixed_precision_param=bf16", "--optimizer.name=adamw"),
     ["CLI: model.flavor = \"llama3-8b\": expected one of FLAVORS; did you mean llama3_8b?",
      'CLI: training.mixed_precision_param = "bf16": expected one of "auto", "bfloat16", "float32", "float64", '
      '"float16"; did you mean bfloat16?',
      'CLI: optimizer.name = "adamw": expected one of "AdamW", "Adam", "Muon"; did you mean AdamW?']),
    ("", ("--peft.r=8",), ["CLI: --peft.r=8: an unknown section; --help lists every option"]),
    ("", ("--lora.r=8",), ["CLI: lora.r = 8: unknown key; did you mean lora.rank?"]),
    # a number from which another one beyond its bound follows
    ("", ("--model.dim=1099511627776",),
     ["CLI: model.dim = 1099511627776: expected an integer >= 1 and <= 2147483647"]),
    ("[model.mla]\nkv_lora_rank = 4\nqk_nope_head_dim = 2147483647", ("--training.seqlen=3",),
     ["CLI: training.seqlen = 3: unknown key; did you mean training.seq_len?",
      "FILE: model.head_dim = 2147483711: expected -1, or an integer >= 1 and <= 2147483647"]),
    # a value after a space
    ("", ("--optimizer.lr", "-1", "--checkpoint.enable", "false", "--training.steps", "0"),
     ["CLI: training.steps = 0: expected an integer >= 1", "CLI: optimizer.lr = -1: expected a finite number > 0"]),
    # a second line in an argument is not dropped
    ("", ("--training.steps=5\nx = 3",), [r'CLI: training.steps = "5\nx = 3": expected an integer >= 1']),
]
# fmt: on


@pytest.mark.parametrize(
    ("toml", "arguments", "lines"), [pytest.param(*case, id=" ".join((case[0], *case[1]))) for case in WRONG_INPUT]
)
def test_wrong_input(tmp_path: Path, toml: str, arguments: tuple[str, ...], lines: list[str]):
    names = {"FLAVORS": ", ".join(f'"{name}"' for name in (*SIZES, "from_hf"))}
    names |= {"FILE": str(tmp_path / "run.toml"), "CLI: ": "command line: "}
    for name, text in names.items():
        lines = [line.replace(name, text) for line in lines]
    assert problems(lambda: load(tmp_path, toml, *arguments)) == lines


UNKNOWN = "no config has this name; did you mean"
# fmt: off
WRONG_FILES = {
    "nothing": ([], "command line: expected one config, got none; --help tells more"),
    "only an override": (["--debug.seed=3"], "command line: expected one config, got none; --help tells more"),
    "empty, as from an unset variable": ([""], "command line: expected one config, got none; --help tells more"),
    "missing, like another": (["FOLDER/rum.toml"], "FOLDER/rum.toml: no such file; did you mean FOLDER/run.toml?"),
    "missing, like another here": (["rum.toml"], "rum.toml: no such file; did you mean run.toml?"),
    "missing, relative": (["nowhere/debug.toml"], "nowhere/debug.toml: no such file in FOLDER"),
    "missing, absolute": (["/nowhere/debug.toml"], "/nowhere/debug.toml: no such file"),
    "in a file": (["run.toml/debug.toml"], "run.toml/debug.toml: cannot be read: Not a directory"),
    "directory": (["FOLDER"], "FOLDER: cannot be read: Is a directory"),
    "not UTF-8": (["./latin1"], "latin1: not valid TOML: 'utf-8' codec can't decode byte 0xe9 in position 2: invalid "
                                "continuation byte"),
    "not TOML": (["run.yml"], "run.yml: not valid TOML: Expected '=' after a key in a key/value pair "
                              "(at line 1, column 6)"),
    "name like others": (["debug_xp"], f"debug_xp: {UNKNOWN} debug_tp or debug_pp or debug_cp? "
                                       "A path needs a folder or .toml"),
    "name of a file here": (["latin1"], f"latin1: {UNKNOWN} one of SHIPPED? A path needs a folder or .toml"),
}
# fmt: on


def test_without_a_config_wrong_options_are_named_too():
    lines = problems(lambda: config.load(["--training.stepz=1", "--training.steps=0", "--oops"]))
    nothing, *others = lines
    assert nothing == "command line: expected one config, got none; --help tells more"
    assert others == [
        "command line: --oops: expected --section.key=value",
        "command line: training.steps = 0: expected an integer >= 1",
        "command line: training.stepz = 1: unknown key; did you mean training.steps?",
    ]


@pytest.mark.parametrize(("arguments", "line"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_wrong_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], line: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin1").write_bytes(b"# \xe9\n")
    (tmp_path / "run.toml").touch()
    (tmp_path / "run.yml").write_text("model: 3")
    shipped = ", ".join(sorted(path.stem for path in (ROOT / "configs").rglob("*.toml")))
    for name, text in {"FOLDER": str(tmp_path), "SHIPPED": shipped}.items():
        arguments, line = [argument.replace(name, text) for argument in arguments], line.replace(name, text)
    assert problems(lambda: config.load(arguments)) == [line]


@pytest.mark.parametrize(
    "toml", ["training.steps = " + "9" * 5000, "training.x = " + "[" * 5000 + "]" * 5000], ids=["digits", "brackets"]
)
def test_toml_that_the_parser_gives_up_on_is_one_line(tmp_path: Path, toml: str):
    lines = problems(lambda: load(tmp_path, toml))  # the reason is Python's, and its words differ between versions
    assert [line.split(": ")[:2] for line in lines] == [[str(tmp_path / "run.toml"), "not valid TOML"]]


def test_a_problem_is_one_line_whatever_the_key(tmp_path: Path):
    lines = problems(lambda: load(tmp_path, '[training]\n"a\\nb" = 3\n["c\\nd"]'))
    assert [len(line.splitlines()) for line in lines] == [1, 1]


def test_a_byte_order_mark_is_skipped(tmp_path: Path):
    """Windows editors write one."""
    assert load(tmp_path, "\ufefftraining.steps = 3").config.training.steps == 3


def test_list_of_lists_in_a_file_and_on_the_command_line(tmp_path: Path):
    settings = {LAYERS: 2, PIPELINE: 2}
    toml = f"{LAYERS} = 2\n{PIPELINE} = 2\n{MODULES} = "
    lines = toml + str(TWO_STAGES).replace("], ", "],\n  ")
    for loaded in (
        load(tmp_path, lines),
        load(tmp_path, {**settings, f"--{MODULES}": TWO_STAGES}),
        load(tmp_path, {**settings, f"--{MODULES}": str(TWO_STAGES)}),  # Python's single quotes are TOML too
        load(tmp_path, {**settings, MODULES: [["norm"]], f"--{MODULES}": TWO_STAGES}),
    ):
        assert loaded.config.parallelism.module_fqns_per_model_part == TWO_STAGES
    assert load(tmp_path, lines, f"--{MODULES}=[]").config.parallelism.module_fqns_per_model_part == []
    assert Config().parallelism.module_fqns_per_model_part == []


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("--training.steps=1_000", 1000),
        ("--optimizer.lr=1e-4", 1e-4),
        ("--training.shuffle=false", False),
        ("--checkpoint.enable", True),
        ("--model.qk_norm", True),
        ("--model.qk_norm=all_heads", "all_heads"),
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
def test_override(tmp_path: Path, argument: str, value: Any):
    loaded = load(tmp_path, {STEPS: 2, "job.description": "file", SHUFFLE: True}, argument)
    assert typed(of(loaded.config, argument[2:].split("=")[0])) == typed(value)


def test_the_last_override_of_a_key_applies(tmp_path: Path):
    again = ["--training.steps=wrong", "--training.steps=4", "--training.shuffle=false", "--training.shuffle"]
    training = load(tmp_path, {STEPS: 2}, *again).config.training
    assert (training.steps, training.shuffle) == (4, True)


def test_overrides_may_precede_the_file(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.touch()
    loaded = config.load(["--training.steps=3", str(file), "--training.seq_len=5"])
    assert (loaded.config.training.steps, loaded.config.training.seq_len) == (3, 5)
    assert (loaded.file, loaded.origins) == (str(file), dict.fromkeys((STEPS, SEQ_LEN), "command line"))


# ---------------------------------------------------------------------------------------------------------------------
# Shipped configs and flavors


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.toml")), ids=lambda path: path.name)
def test_shipped_config_loads(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # a bare name is found from any folder
    loaded = config.load([str(path)])
    assert config.load([path.stem]) == loaded
    assert loaded.file == str(path)


def test_configs_of_an_installed_package(tmp_path: Path):
    """A wheel has the configs inside the package; its own come first."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "titanlite" / "config", tmp_path / "titanlite" / "config", ignore=ignore)
    shutil.copy(ROOT / "titanlite" / "__init__.py", tmp_path / "titanlite")
    (tmp_path / "titanlite" / "configs" / "reference").mkdir(parents=True)
    (tmp_path / "titanlite" / "configs" / "own.toml").write_text("training.steps = 77")
    (tmp_path / "titanlite" / "configs" / "reference" / "large.toml").write_text("training.steps = 79")
    (tmp_path / "own.toml").write_text("training.steps = 78")
    code = (
        f"import os; os.chdir({str(tmp_path)!r}); from titanlite import config\n"
        "print([config.load([name]).config.training.steps for name in ('own', './own.toml', 'large')])"
    )
    assert python("-c", code, PYTHONPATH=str(tmp_path)) == (0, "[77, 78, 79]\n", "")


@pytest.mark.parametrize("flavor", SIZES)
def test_flavor_sets_the_dimensions_and_keys_override_them(tmp_path: Path, flavor: str):
    settings = {FLAVOR: flavor, "optimizer.eps": 3e-9, "job.description": 'é = "#"', "training.seq_len": 1024}
    loaded = load(tmp_path, settings)
    model = loaded.config.model.model_dump()
    size = {**SIZES[flavor]}
    for section in ("moe", "mla"):
        options = size.pop(section, {})
        assert {key: model[section][key] for key in options} == options
    pattern = size.pop("layer_pattern", [])
    kinds = zip(model["layer_pattern"], pattern, strict=True)
    assert [{key: kind[key] for key in own} for kind, own in kinds] == pattern
    if "mla" in SIZES[flavor]:
        size["head_dim"] = 128 + 64
    elif size["head_dim"] == -1:
        size["head_dim"] = size["dim"] // size["n_heads"]
    assert {key: model[key] for key in size} == size
    assert load(tmp_path, loaded.config.toml()).config == loaded.config  # printed and read again
    shorter = {"training.seq_len": 1024}
    changed = load(tmp_path, {FLAVOR: flavor, VOCABULARY: 77, f"--{LAYERS}": 5, **shorter}).config.model
    assert changed.model_dump() == {**model, "vocab_size": 77, "n_layers": 5}


def test_head_dim_is_the_quotient_unless_it_is_set(tmp_path: Path):
    """A named size may set it: then it stays when another key is overridden. A loaded config has the number."""
    assert load(tmp_path, {DIM: 512}).config.model.head_dim == 32
    assert load(tmp_path, {DIM: 100, HEAD_DIM: 6}).config.model.head_dim == 6
    assert load(tmp_path, {DIM: 512, f"--{HEAD_DIM}": -1}).config.model.head_dim == 32
    assert load(tmp_path, {FLAVOR: "qwen3_0.6b", DIM: 512}).config.model.head_dim == 128


def test_flavor_on_the_command_line_keeps_the_dimensions_of_the_file(tmp_path: Path):
    model = load(tmp_path, {LAYERS: 3, f"--{FLAVOR}": "llama3_8b"}).config.model
    assert (model.flavor, model.n_layers, model.dim) == ("llama3_8b", 3, 4096)


def test_debug_is_the_default_flavor(tmp_path: Path):
    model = load(tmp_path, {}).config.model
    assert (model.dim, model.n_layers, model.n_heads, model.n_kv_heads, model.ffn_dim) == (256, 6, 16, 8, 768)
    assert Config().model == model


def test_validation_is_capped_by_default():
    assert Config().validation.steps == 16


# ---------------------------------------------------------------------------------------------------------------------
# What prints options


def keys_of(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield `section.key` of the keys of nested tables."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from keys_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_a_config_prints_every_option(tmp_path: Path):
    loaded = load(tmp_path, {FLAVOR: "llama3_8b", "job.description": 'é = "#"', f"--{STEPS}": 12})
    printed = tomllib.loads(loaded.config.toml())
    assert Config.model_validate(printed) == loaded.config
    assert [*keys_of(printed)] == list(OPTIONS)


def test_launcher_prints_help():
    status, out, error = python("-m", "titanlite", "train", "no-such-file.toml", "--help")
    assert (status, error) == (0, "")
    assert out.endswith(help_text() + "\n")


HELP = {
    '  --job.dump_folder   a string; default "./outputs"',
    f'  --model.flavor   {FLAVORS}; default "debug"',
    "  --model.dim   an integer >= 1; default the flavor's",
    "  --training.shuffle   true or false; default true",
    "  --training.global_batch_size   -1, or an integer >= 1; default -1",
    '  --training.mixed_precision_param   one of "auto", "bfloat16", "float32", "float64", "float16"; default "auto"',
    "  --training.initial_loss_scale   a finite number > 0; default 65536.0",
    "  --lr_scheduler.decay_ratio   -1, or a finite number >= 0 and <= 1; default -1",
    "  --parallelism.fsdp_reshard_after_forward   "
    'one of "default", "always", "never", or an integer >= 2; default "default"',
    "  --parallelism.tensor_parallel_degree   an integer >= 1; default 1",
    '  --parallelism.pipeline_parallel_balance   one of "layers", "parameters"; default "layers"',
    "  --parallelism.module_fqns_per_model_part   a list of lists of strings; default []",
    "  --float8.filter_fqns   a list of strings; default []",
    "  --training.datasets   an array of tables; default []",
    "      epochs: -1, or a finite number > 0; default -1. Number of epochs, possibly fractional, after which the "
    "mixture no longer reads the dataset. -1: no limit.",
    '  --activation_checkpoint.selective_ac_option   one of "op", "every_second_mm", "attention", or an integer >= 1; '
    'default "op"',
    "  --lr_scheduler.min_lr_factor   a finite number >= 0 and <= 1; default 0.0",
    "  --profiling.profile_freq   an integer >= 4; default 10",
    '  --compile.backend   one of "inductor", "aot_eager"; default "inductor"',
    "  --validation.steps   -1, or an integer >= 1; default 16",
}


MAY_DIFFER_BETWEEN_NODES = {"model.hf_assets_path", "training.dataset_path", "training.cache_folder"}


def test_help_of_a_section():
    assert re.findall(r"^\[(.*)\]", help_text(["--help", "model"]), re.M) == ["model", "model.moe", "model.mla"]
    assert help_text(["debug", "--help"]) == help_text()  # a config, and not the section of its name


def test_help_names_every_option_with_its_type_bounds_default_and_meaning():
    lines = help_text().splitlines()
    assert lines[0] == config.USAGE
    assert [line for line in lines if line.startswith("[")] == [f"[{section}]" for section in sections_of(Config)]
    shown = [number for number, line in enumerate(lines) if line.startswith("  --")]
    assert [lines[number].split()[0] for number in shown] == [f"--{key}" for key in OPTIONS]
    for number, (key, option) in zip(shown, OPTIONS.items(), strict=True):
        assert len(option.description or "") > 10, f"{key} has no description"
        suffix = " It may differ between nodes." if key in MAY_DIFFER_BETWEEN_NODES else ""
        assert lines[number + 1].strip() == " ".join(option.description.split()) + suffix
    assert not HELP - set(lines)


def test_reference_has_a_section_per_section_and_an_entry_per_option():
    lines = reference_markdown().splitlines()
    assert [line[3:] for line in lines if line.startswith("## ")] == [f"[{section}]" for section in sections_of(Config)]
    entries = {entry.split("\n")[0]: entry for entry in reference_markdown().split("\n### ")[1:]}
    assert list(entries) == list(OPTIONS)
    for key, option in OPTIONS.items():
        assert " ".join(option.description.split()) in " ".join(entries[key].split()), key
    assert "\n\nAn integer >= 1. Default: `10000`.\n\nOptimizer steps" in entries["training.steps"]
    assert max(len(line) for line in lines) <= 100


def test_the_json_schema_has_every_option_with_its_meaning_and_default():
    schema = json.loads(json_schema())
    for key, option in OPTIONS.items():
        section: Any = schema
        for name in key.split(".")[:-1]:
            section = schema["$defs"][section["properties"][name]["$ref"].rpartition("/")[2]]
            assert section["additionalProperties"] is False, key
            assert "required" not in section, key
        entry = section["properties"][key.rpartition(".")[2]]
        assert entry["description"] == meaning_of(option), key
        assert entry.get("default") == (None if option.is_required() else option.default), key
    steps = schema["$defs"]["Training"]["properties"]["steps"]
    assert (steps["type"], steps["minimum"], steps["maximum"]) == ("integer", 1, 2**31 - 1)
    assert schema["$defs"]["Training"]["properties"]["datasets"]["items"] == {"$ref": "#/$defs/MixedDataset"}


def test_config_needs_no_heavy_package(tmp_path: Path):
    """A wrong config is found in a fraction of a second, and before any device is touched."""
    code = (
        "import sys\n"
        "from titanlite import config\n"
        "config.check(config.load(['debug']), config.Launch(0, 0, 1, 1, 0))\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)))\n"
    )
    assert python("-c", code) == (0, "[]\n", "")
