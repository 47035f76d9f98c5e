"""A TOML file of torchtitan as a config: every key, models, and what the command prints."""

import math
from pathlib import Path
from typing import Any

import pytest

from titanlite.config import Config, load, load_values
from titanlite.config.loader import tomllib
from titanlite.config.schema import count_parameters
from titanlite.launch.cli import run_command
from titanlite.optimizer import lr_factor
from titanlite.tools.from_torchtitan.command import header, problems_of
from titanlite.tools.from_torchtitan.conversion import (
    DEFAULT,
    MEANING_CHANGED,
    MISSING,
    MODELS,
    NOT_OFFERED,
    NOT_READ,
    OF_0_2,
    RENAMED,
    SAME,
    TAKEN,
    UNKNOWN,
    Conversion,
    Row,
)
from titanlite.tools.from_torchtitan.groups import convert

Values = dict[str, Any]
# fmt: off
KEYS: dict[str, dict[str, Any]] = {
    "job": {
        "config_file": None, "dump_folder": "./outputs", "description": "default job", "print_config": False,
        "save_config_file": None, "custom_config_module": "",
    },
    "profiling": {
        "enable_profiling": False, "save_traces_folder": "profile_traces", "profile_freq": 10, "profiler_active": 1,
        "profiler_warmup": 3, "enable_memory_snapshot": False, "save_memory_snapshot_folder": "memory_snapshot",
    },
    "metrics": {
        "log_freq": 10, "enable_tensorboard": False, "disable_color_printing": False, "save_tb_folder": "tb",
        "save_for_all_ranks": False, "enable_wandb": False,
    },
    "model": {
        "name": "llama3", "flavor": "debugmodel", "hf_assets_path": "./tests/assets/tokenizer", "tokenizer_path": None,
        "converters": [], "print_after_conversion": False,
    },
    "optimizer": {
        "name": "AdamW", "lr": 0.0008, "beta1": 0.9, "beta2": 0.95, "eps": 1e-08, "weight_decay": 0.1,
        "implementation": "fused", "early_step_in_backward": False,
    },
    "lr_scheduler": {
        "warmup_steps": 200, "total_steps": None, "decay_ratio": None, "decay_type": "linear", "min_lr_factor": 0.0,
    },
    "training": {
        "dataset": "c4_test", "dataset_path": None, "local_batch_size": 8, "global_batch_size": -1, "seq_len": 2048,
        "max_norm": 1.0, "steps": 10000, "enable_cpu_offload": False, "dtype": "float32",
        "mixed_precision_param": "bfloat16", "mixed_precision_reduce": "float32", "gc_freq": 50, "gc_debug": False,
    },
    "training.dataloader": {
        "num_workers": 0, "persistent_workers": False, "pin_memory": False, "prefetch_factor": None,
    },
    "parallelism": {
        "data_parallel_replicate_degree": 1, "data_parallel_shard_degree": -1, "fsdp_reshard_after_forward": "default",
        "tensor_parallel_degree": 1, "disable_loss_parallel": False, "enable_async_tensor_parallel": False,
        "pipeline_parallel_degree": 1, "module_fqns_per_model_part": None,
        "pipeline_parallel_first_stage_less_layers": 1, "pipeline_parallel_last_stage_less_layers": 1,
        "pipeline_parallel_layers_per_stage": None, "pipeline_parallel_schedule": "1F1B",
        "pipeline_parallel_schedule_csv": "", "pipeline_parallel_microbatch_size": 1,
        "pipeline_parallel_expert_parallel_overlap": True, "context_parallel_degree": 1,
        "context_parallel_load_balancer": "headtail", "context_parallel_rotate_method": "allgather",
        "expert_parallel_degree": 1, "expert_tensor_parallel_degree": 1, "expert_parallel_comm_backend": "standard",
    },
    "checkpoint": {
        "enable": False, "enable_ft_dataloader_checkpoints": True, "folder": "checkpoint", "interval": 500,
        "initial_load_path": None, "initial_load_model_only": True, "initial_load_in_hf": False,
        "initial_load_in_hf_quantized": False, "last_save_model_only": True, "last_save_in_hf": False,
        "export_dtype": "float32", "async_mode": "disabled", "keep_latest_k": 10, "load_step": -1,
        "exclude_from_loading": [], "enable_first_step_checkpoint": False, "create_seed_checkpoint": False,
        "load_only": False,
    },
    "activation_checkpoint": {
        "mode": "selective", "selective_ac_option": "2",
        "per_op_sac_force_recompute_mm_shapes_by_fqns": ["moe.router.gate"], "early_stop": False, "memory_budget": 0.5,
        "visualize_memory_budget_pareto": False, "preserve_rng_state": True, "determinism_check": "default",
        "debug": False,
    },
    "compile": {
        "enable": False, "components": ["model", "loss"], "backend": "inductor",
    },
    "quantize.linear.float8": {
        "enable_fsdp_float8_all_gather": False, "precompute_float8_dynamic_scale_for_fsdp": False, "recipe_name": None,
        "filter_fqns": [], "emulate": False,
    },
    "quantize.linear.mx": {
        "mxfp8_dim1_cast_kernel_choice": "triton", "recipe_name": "mxfp8_cublas", "filter_fqns": ["output"],
    },
    "quantize.grouped_mm.float8": {
        "fqns": [],
    },
    "quantize.grouped_mm.mx": {
        "recipe_name": "mxfp8", "fqns": [],
    },
    "comm": {
        "init_timeout_seconds": 300, "train_timeout_seconds": 100, "trace_buf_size": 20000,
        "save_traces_folder": "comm_traces", "save_traces_file_prefix": "rank_", "mode": "default",
    },
    "memory_estimation": {
        "enable": False, "disable_fake_mode": False,
    },
    "fault_tolerance": {
        "enable": False, "process_group": "gloo", "process_group_timeout_ms": 10000, "replica_id": 0, "group_size": 0,
        "min_replica_size": 1, "semi_sync_method": None,
    },
    "experimental": {
        "custom_import": "", "custom_args_module": "",
    },
    "validation": {
        "enable": False, "dataset": "c4_validation", "dataset_path": None, "local_batch_size": 8, "seq_len": 2048,
        "freq": 10, "steps": -1,
    },
    "validation.dataloader": {
        "num_workers": 0, "persistent_workers": False, "pin_memory": False, "prefetch_factor": None,
    },
    "debug": {
        "seed": None, "deterministic": False, "deterministic_warn_only": False, "moe_force_load_balance": False,
    },
}
# fmt: on
"""Every key of torchtitan 0.2.2 with its default; None is no value in TOML."""
ALL = {f"{section}.{name}": value for section, keys in KEYS.items() for name, value in keys.items()}
EXAMPLES: Values = {
    "job.config_file": "run.toml",
    "job.save_config_file": "config.json",
    "model.tokenizer_path": "assets/tokenizer",
    "lr_scheduler.total_steps": 20_000,
    "lr_scheduler.decay_ratio": 0.5,
    "training.dataset_path": "data/c4",
    "parallelism.module_fqns_per_model_part": [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]],
    "parallelism.pipeline_parallel_layers_per_stage": 4,
    "checkpoint.initial_load_path": "weights",
    "quantize.linear.float8.recipe_name": "rowwise",
    "fault_tolerance.semi_sync_method": "local_sgd",
    "validation.dataset_path": "data/c4",
    "debug.seed": 1,
}
"""Values of keys that have none by default."""


def nested(values: Values) -> Values:
    """Return tables from keys with dots."""
    tables: Values = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        inner = tables
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return tables


def converted(values: Values) -> Conversion:
    return convert(nested(values))


def config_of(values: Values) -> Config:
    """Return the config that is written, read again."""
    conversion = converted(values)
    assert problems_of(conversion, "converted") == []
    return load_values(tomllib.loads(conversion.toml([])), "converted", []).config


def row_of(values: Values, key: str) -> Row:
    """Return the only row of a key."""
    (row,) = [row for row in converted(values).rows if row.status != DEFAULT and row.source.startswith(f"{key} = ")]
    return row


WITHOUT_EFFECT = ("job.description", "training.mixed_precision_reduce")
"""Keys whose default is written in another way, or only printed."""


# Every key


def test_there_are_149_keys():
    assert len(ALL) == 149
    assert not set(SAME) & NOT_OFFERED.keys()


@pytest.mark.parametrize("key", ALL)
def test_every_key_is_classified(key: str):
    value = EXAMPLES.get(key, 2) if ALL[key] is None else ALL[key]
    row = row_of({key: value}, key)
    assert row.status in (TAKEN, RENAMED, MEANING_CHANGED, MISSING, NOT_READ)
    assert row.status == TAKEN or row.note or row.target


@pytest.mark.parametrize("key", [key for key, value in ALL.items() if value is not None and key not in WITHOUT_EFFECT])
def test_a_key_that_is_absent_has_torchtitans_default(key: str):
    for others in ({}, {"checkpoint.enable": True, "model.converters": ["quantize.linear.float8"]}):
        if key not in others:
            assert config_of({**others, key: ALL[key]}) == config_of(others)


def test_what_torchtitan_has_by_default():
    config = config_of({})
    assert (config.training.shuffle, config.metrics.enable_tensorboard) == (False, False)
    assert (config.activation_checkpoint.mode, config.activation_checkpoint.selective_ac_option) == ("selective", 2)
    assert (config.training.dataset, config.training.dataset_path) == ("json", "tests/assets/c4_test")
    assert config.training.mixed_precision_param == "bfloat16"
    assert config.model.hf_assets_path == "./tests/assets/tokenizer"
    statuses = {row.status for row in converted({}).rows}
    assert statuses == {DEFAULT}


@pytest.mark.parametrize("key", [*ALL, *OF_0_2])
def test_no_value_is_dropped_or_raises(key: str):
    reads = {"validation.enable": True, "checkpoint.enable": True, "model.converters": ["quantize.linear.float8"]}
    for value in ([], {}, "x", "", -1, 0, True, 1.5, math.nan, 10**400, ["a", 1], "op", "c4"):
        conversion = converted({**reads, "parallelism.pipeline_parallel_degree": 2, key: value})
        problems = problems_of(conversion, "converted")
        text = conversion.toml(header("run.toml", conversion.rows, problems))
        assert value == {} or any(row.source.startswith(f"{key} = ") for row in conversion.rows)
        assert set(tomllib.loads(text)) <= set(Config.model_fields)


def test_unknown_keys_are_listed_with_a_hint():
    row = row_of({"training.local_batchsize": 4}, "training.local_batchsize")
    assert (row.status, row.matters) == (UNKNOWN, True)
    assert "training.local_batch_size" in row.note
    assert row_of({"muon.deep.x": 1}, "muon.deep.x").status == UNKNOWN
    assert convert({"steps": 3, "training": 4}).rows[-1].status == UNKNOWN


def test_control_characters_stay_out_of_comments():
    conversion = convert({"training": {"a\nsteps": "b\nc\x7f"}})
    text = conversion.toml(header("run\n.toml", conversion.rows, ["x\ny"]))
    assert all(line.startswith("#") for line in text.splitlines()[:3])
    tomllib.loads(text)


# Keys that a 0.2 release still reads


@pytest.mark.parametrize(
    ("key", "value", "status"),
    [
        ("model.tokenizer_path", "x", RENAMED),
        ("training.seed", 3, MEANING_CHANGED),
        ("training.deterministic", True, RENAMED),
        ("training.debug_moe_force_load_balance", True, MISSING),
    ],
)
def test_an_earlier_key_is_the_later_one(key: str, value: Any, status: str):
    assert config_of({key: value}) == config_of({OF_0_2[key]: value})
    assert row_of({key: value}, key).status == status


def test_of_two_keys_with_one_meaning_the_one_counts_that_torchtitan_reads():
    tokenizer = {"model.hf_assets_path": "new", "model.tokenizer_path": "old"}
    assert config_of(tokenizer).model.hf_assets_path == "old"
    assert row_of(tokenizer, "model.hf_assets_path").status == NOT_READ
    assert config_of({"model.hf_assets_path": "new", "model.tokenizer_path": ""}).model.hf_assets_path == "new"
    seed = {"debug.seed": 2, "training.seed": 3}
    assert config_of(seed).debug.seed == 2
    assert row_of(seed, "training.seed").status == NOT_READ


@pytest.mark.parametrize("key", ["training.batch_size", "experimental.pipeline_parallel_degree", "float8.scaling_type"])
def test_a_key_from_before_0_2_is_unknown(key: str):
    assert row_of({key: 1}, key).status == UNKNOWN


# Models


@pytest.mark.parametrize(("name", "flavor"), [(name, flavor) for name in MODELS for flavor in MODELS[name]])
def test_every_model_can_be_loaded(name: str, flavor: str):
    for seq_len in (4096, 8192):
        config_of({"model.name": name, "model.flavor": flavor, "training.seq_len": seq_len})


@pytest.mark.parametrize(
    ("name", "flavor", "parameters"),
    [
        ("llama3", "debugmodel", 6_163_712),
        ("llama3", "8B", 8_030_261_248),
        ("llama3", "70B", 70_553_706_496),
        ("qwen3", "30B-A3B", 30_532_122_624),
        ("deepseek_v3", "16B", 15_706_484_224),
        ("deepseek_v3", "671B", 671_026_404_352),
    ],
)
def test_parameters(name: str, flavor: str, parameters: int):
    assert count_parameters(config_of({"model.name": name, "model.flavor": flavor}).model) == parameters


def test_what_differs_from_the_published_models():
    assert config_of({"model.name": "qwen3", "model.flavor": "235B-A22B"}).model.rope_theta == 5_000_000
    large = {"model.name": "deepseek_v3", "model.flavor": "671B", "training.seq_len": 4096}
    model = config_of(large).model
    assert (model.norm_eps, model.rope_scaling_factor, model.mla.mscale_all_dim) == (1e-5, 1.0, 0.0)
    model = config_of({**large, "training.seq_len": 4104}).model
    assert (model.rope_scaling_factor, model.mla.mscale_all_dim) == (40.0, 1.0)
    small = config_of({**large, "model.flavor": "16B", "training.seq_len": 8192})
    assert (small.model.mla.kv_lora_rank, small.model.mla.q_lora_rank) == (512, 0)
    assert (small.model.mla.mscale_all_dim, small.model.moe.n_groups) == (0.7, 1)
    assert small.training.document_mask


@pytest.mark.parametrize(
    "values",
    [{"model.name": "llama4"}, {"model.flavor": "1B"}, {"model.name": "flux", "model.flavor": "dev"}],
)
def test_a_model_that_titanlite_lacks_is_a_problem(values: Values):
    conversion = converted(values)
    (problem,) = problems_of(conversion, "converted")
    assert "model.flavor" in problem
    assert row_of(values, next(iter(values))).status == MISSING


def test_a_model_of_the_same_dimensions_is_renamed():
    assert row_of({"model.flavor": "8B"}, "model.flavor").status == RENAMED
    assert row_of({"model.flavor": "8B_flex"}, "model.flavor").status == MEANING_CHANGED


# The learning rate


def torchtitan_lr_factor(step: int, total: int, warmup: int, ratio: float | None, kind: str, floor: float) -> float:
    """Return torchtitan's factor on the learning rate at a step, counted from 1."""
    warmup = min(warmup, total)
    decay = total - warmup if ratio is None else min(round(total * ratio), total - warmup)
    if step <= warmup:
        return step / warmup
    if step <= total + 1 - decay:
        return 1.0
    progress = (step - (total + 1 - decay)) / decay
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return floor + (1 - floor) * {"linear": 1 - progress, "sqrt": 1 - math.sqrt(progress), "cosine": cosine}[kind]


@pytest.mark.parametrize("kind", ["linear", "sqrt", "cosine"])
@pytest.mark.parametrize(
    ("steps", "total", "warmup", "ratio", "floor"),
    [
        (10, None, 2, 0.8, 0.0),
        (10, None, 2, 0.9, 0.1),
        (10, None, 5, 0.8, 0.1),
        (10, None, 200, None, 0.0),
        (997, None, 200, None, 0.1),
        (300, 1000, 0, None, 0.1),
        (50, None, 0, 0.0, 0.0),
        (50, None, 49, None, 0.0),
        (7, None, 0, 1.0, 0.5),
    ],
)
def test_every_step_has_torchtitans_learning_rate(
    steps: int, total: int | None, warmup: int, ratio: float | None, floor: float, kind: str
):
    schedule = {"warmup_steps": warmup, "total_steps": total, "decay_ratio": ratio, "min_lr_factor": floor}
    values = {f"lr_scheduler.{key}": value for key, value in schedule.items() if value is not None}
    config = config_of({**values, "lr_scheduler.decay_type": kind, "training.steps": steps})
    resolved = config.lr_scheduler.model_copy(update={"total_steps": total or steps})
    ours = [lr_factor(step, resolved) for step in range(1, steps + 1)]
    theirs = [torchtitan_lr_factor(step, total or steps, warmup, ratio, kind, floor) for step in range(1, steps + 1)]
    assert ours == pytest.approx(theirs, abs=1e-12)


# What is computed from several keys


def test_activation_checkpointing():
    mode, option = (f"activation_checkpoint.{key}" for key in ("mode", "selective_ac_option"))
    assert config_of({option: "op"}).activation_checkpoint.selective_ac_option == "every_second_mm"
    assert config_of({option: "3"}).activation_checkpoint.selective_ac_option == 3
    assert config_of({option: "0"}).activation_checkpoint.mode == "full"
    assert config_of({mode: "full", option: "2"}).activation_checkpoint.mode == "full"
    assert row_of({mode: "full", option: "2"}, option).status == NOT_READ
    budgeted = {mode: "memory_budget", "compile.enable": True}
    assert row_of(budgeted, mode).status == MISSING
    assert 'expected one of "none", "full", "selective"' in problems_of(converted(budgeted), "converted")[0]
    assert problems_of(converted({option: "every"}), "converted")


def test_float8():
    on = {"model.converters": ["quantize.linear.float8"]}
    section = "quantize.linear.float8"
    assert config_of({**on, f"{section}.recipe_name": "rowwise"}).float8.recipe == "rowwise"
    assert not config_of({f"{section}.recipe_name": "rowwise"}).float8.enable
    assert row_of({f"{section}.recipe_name": "rowwise"}, f"{section}.recipe_name").status == NOT_READ
    assert "output head" in row_of(on, "model.converters").note
    filtered = {**on, f"{section}.filter_fqns": ["output", "auto_filter_small_kn"]}
    assert config_of(filtered).float8.filter_fqns == ["output"]
    assert "auto_filter_small_kn" in row_of(filtered, f"{section}.filter_fqns").note
    both = row_of({"model.converters": ["quantize.linear.float8", "quantize.grouped_mm.float8"]}, "model.converters")
    assert (both.status, both.matters, both.target) == (MISSING, True, "float8.enable = true")


def test_float8_and_mxfp8_of_torchtitan_0_1():
    for name, option in (("float8", "enable_fsdp_float8_all_gather"), ("mx", "recipe_name")):
        later, value = f"quantize.linear.{name}", True if name == "float8" else "mxfp8_cublas"
        old, new = {"model.converters": [name]}, {"model.converters": [later]}
        assert config_of({**old, f"{name}.{option}": value}) == config_of({**new, f"{later}.{option}": value})
        assert row_of(old, "model.converters").status != MISSING


def test_mxfp8():
    on, section = {"model.converters": ["quantize.linear.mx"]}, "quantize.linear.mx"
    float8 = config_of(on).float8
    assert (float8.enable, float8.recipe, float8.emulate, float8.filter_fqns) == (True, "mxfp8", False, [])
    assert "multiples of 32" in row_of(on, "model.converters").note
    assert config_of({**on, f"{section}.filter_fqns": ["output", "wk"]}).float8.filter_fqns == ["wk"]
    recipe = f"{section}.recipe_name"
    assert config_of({**on, recipe: "mxfp8_emulated"}).float8.emulate
    assert "rounded down" in row_of({**on, recipe: "mxfp8_cublas"}, recipe).note
    assert "rounded" not in row_of({**on, recipe: "mxfp8_cublas_rceil"}, recipe).note
    assert problems_of(converted({**on, recipe: "mxfp4_cutlass"}), "converted")
    assert not config_of({recipe: "mxfp8_cublas"}).float8.enable
    assert row_of({recipe: "mxfp8_cublas"}, recipe).status == NOT_READ
    both = converted({"model.converters": ["quantize.linear.float8", "quantize.linear.mx"]})
    assert "float8.recipe" not in both.options
    assert any(row.status == MISSING and "quantize.linear.mx" in row.note for row in both.rows)


def test_datasets():
    c4 = config_of({"training.dataset": "C4"}).training
    assert (c4.dataset, c4.streaming, c4.shuffle) == ("c4", True, False)
    local = config_of({"training.dataset": "c4", "training.dataset_path": "data/c4"}).training
    assert (local.dataset, local.dataset_path, local.dataset_config) == ("hub", "data/c4", "en")
    split = config_of({"training.dataset": "c4_validation"}).training
    assert (split.dataset, split.dataset_path, split.dataset_split) == ("hub", "allenai/c4", "validation")
    (problem,) = problems_of(converted({"training.dataset": "my_data"}), "converted")
    assert "training.dataset" in problem


def test_streaming_shards_are_a_multiple_of_the_data_parallel_degree():
    degrees = {"parallelism.data_parallel_shard_degree": 48, "parallelism.data_parallel_replicate_degree": 2}
    assert config_of({"training.dataset": "c4", **degrees}).training.streaming_shards == 96
    degrees["parallelism.data_parallel_shard_degree"] = 8
    assert config_of({"training.dataset": "c4", **degrees}).training.streaming_shards == 64
    assert config_of(degrees).training.streaming_shards == 64


def test_validation():
    base = {"training.dataset": "c4", "validation.enable": True, "training.local_batch_size": 4}
    config = config_of({**base, "validation.local_batch_size": 2, "validation.steps": 10})
    assert (config.validation.enable, config.validation.freq, config.validation.steps) == (True, 10, 5)
    assert config_of(base).validation.steps == -1
    large = {**base, "validation.steps": 10, "training.global_batch_size": 64}
    assert config_of(large).validation.steps == 10
    assert "64" in row_of(large, "validation.steps").note
    degrees = {"parallelism.data_parallel_shard_degree": 4, "parallelism.data_parallel_replicate_degree": 2}
    assert config_of({**large, **degrees}).validation.steps == 10 * 8 * 8 // 64
    hub = config_of({**base, "training.dataset_path": "x", "validation.dataset_path": "x"})
    assert hub.validation.dataset_split == "validation"
    files = config_of({"validation.enable": True, "validation.dataset": "c4_test", "validation.dataset_path": "y"})
    assert files.validation.dataset_path == "y"
    other = {"validation.enable": True, "validation.freq": 5}
    assert not config_of(other).validation.enable  # c4_test trains, c4_validation validates
    assert row_of(other, "validation.enable").status == row_of(other, "validation.freq").status == MISSING


def test_pipeline():
    base = {"model.flavor": "8B", "parallelism.pipeline_parallel_degree": 4}
    schedule, layers = "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_layers_per_stage"
    looped = {**base, schedule: "interleaved1f1b", layers: 3}
    parallelism = config_of(looped).parallelism
    assert parallelism.pipeline_parallel_schedule == "Interleaved1F1B"
    assert parallelism.pipeline_parallel_stages_per_rank == 3  # of ceil((32 + 2) / 3) = 12 stages
    assert row_of({**base, layers: 3}, layers).status == MISSING
    ends = parallelism.pipeline_parallel_first_stage_less_layers, parallelism.pipeline_parallel_last_stage_less_layers
    assert ends == (1, 1), "torchtitan's default, where titanlite counts the output head's operations"
    last = "parallelism.pipeline_parallel_last_stage_less_layers"
    assert config_of({**base, last: 3}).parallelism.pipeline_parallel_last_stage_less_layers == 3
    assert row_of({last: 3}, last).status == NOT_READ
    assert config_of({last: 3}) == config_of({})


def test_expert_parallel_is_read_by_models_with_experts_only():
    key = "parallelism.expert_parallel_degree"
    assert config_of({"model.name": "qwen3", "model.flavor": "30B-A3B", key: 8}).parallelism.expert_parallel_degree == 8
    assert config_of({"model.flavor": "8B", key: 8}).parallelism.expert_parallel_degree == 1
    assert row_of({"model.flavor": "8B", key: 8}, key).status == NOT_READ


def test_initial_weights():
    on = {"checkpoint.enable": True}
    from_hf = {**on, "checkpoint.initial_load_in_hf": True, "model.hf_assets_path": "hf"}
    assert config_of(from_hf).checkpoint.initial_load_path == "hf"
    assert config_of({**from_hf, "checkpoint.initial_load_path": "x"}).checkpoint.initial_load_path == "x"
    own = {**on, "checkpoint.initial_load_path": "step-10", "checkpoint.initial_load_model_only": False}
    assert config_of(own).checkpoint.initial_load_path == "step-10"
    assert "export" in row_of(own, "checkpoint.initial_load_path").note
    assert row_of(own, "checkpoint.initial_load_model_only").matters
    assert not config_of({**from_hf, "checkpoint.enable": False}).checkpoint.initial_load_path


def test_exported_weights():
    values = {"checkpoint.enable": True, "checkpoint.last_save_in_hf": True, "training.dtype": "bfloat16"}
    assert config_of(values).checkpoint.export_dtype == "auto"  # torchtitan's float32 leaves the weights as they are
    assert config_of({**values, "checkpoint.export_dtype": "float16"}).checkpoint.export_dtype == "float16"
    assert config_of({"checkpoint.async_mode": "async_with_pinned_mem"}).checkpoint.async_mode == "async"


def test_semi_synchronous_training_is_not_offered():
    method, steps, on = (f"fault_tolerance.{name}" for name in ("semi_sync_method", "sync_steps", "enable"))
    row = row_of({on: True, method: "local_sgd"}, method)
    assert (row.status, row.matters) == ("not offered", True)
    assert "groups sum gradients in every step" in row.note
    assert not row_of({on: True, method: "local_sgd", steps: 20}, steps).matters
    assert row_of({method: "local_sgd"}, method).status == "not read"  # fault_tolerance.enable is false
    assert row_of({on: True}, on).status == "meaning changed"


def test_what_is_off_does_not_matter():
    assert not row_of({"metrics.enable_wandb": False}, "metrics.enable_wandb").matters
    assert row_of({"metrics.enable_wandb": True}, "metrics.enable_wandb").matters
    assert not row_of({"fault_tolerance.sync_steps": 3}, "fault_tolerance.sync_steps").matters
    assert row_of({"optimizer.early_step_in_backward": True}, "optimizer.early_step_in_backward").matters


# torchtitan's own files, by their values

COMMON: Values = {
    **{"optimizer.eps": 1e-8, "training.max_norm": 1.0, "metrics.log_freq": 10, "profiling.profile_freq": 100},
    **{"checkpoint.enable": False, "checkpoint.interval": 500, "checkpoint.export_dtype": "float32"},
    **{"checkpoint.last_save_model_only": True, "checkpoint.async_mode": "disabled", "training.dataset": "c4"},
    **{"compile.enable": False, "compile.components": ["model", "loss"], "profiling.enable_profiling": True},
    **{"quantize.linear.float8.filter_fqns": ["output"], "validation.enable": False, "validation.steps": -1},
    **{"parallelism.tensor_parallel_degree": 1, "parallelism.pipeline_parallel_degree": 1},
}
LLAMA3_8B: Values = {
    **COMMON,
    **{"model.name": "llama3", "model.flavor": "8B", "model.hf_assets_path": "./assets/hf/Llama-3.1-8B"},
    **{"optimizer.lr": 3e-4, "lr_scheduler.warmup_steps": 200, "training.local_batch_size": 1, "training.steps": 1000},
    **{"training.seq_len": 8192, "activation_checkpoint.mode": "selective"},
    "activation_checkpoint.selective_ac_option": "op",
}
LLAMA3_70B = LLAMA3_8B | {
    **{"model.flavor": "70B", "optimizer.lr": 1.5e-4, "training.local_batch_size": 8},
    **{"parallelism.tensor_parallel_degree": 8, "activation_checkpoint.mode": "full"},
}
LLAMA3_405B = LLAMA3_70B | {
    **{"model.flavor": "405B", "model.converters": ["quantize.linear.float8"], "optimizer.lr": 8e-5},
    **{"lr_scheduler.warmup_steps": 600, "training.steps": 3000, "training.local_batch_size": 2},
    **{"parallelism.enable_async_tensor_parallel": True, "compile.enable": True},
    "quantize.linear.float8.enable_fsdp_float8_all_gather": True,
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": True,
}
DEBUG = COMMON | {
    **{"model.flavor": "debugmodel", "optimizer.lr": 8e-4, "lr_scheduler.warmup_steps": 2, "training.steps": 10},
    **{"lr_scheduler.decay_ratio": 0.8, "lr_scheduler.decay_type": "linear", "training.dataset": "c4_test"},
    **{"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "2"},
}
DEEPSEEK_671B = COMMON | {
    **{"model.name": "deepseek_v3", "model.flavor": "671B", "optimizer.lr": 2.2e-4, "training.seq_len": 4096},
    **{"lr_scheduler.warmup_steps": 2000, "lr_scheduler.decay_ratio": 0.8, "lr_scheduler.decay_type": "cosine"},
    **{"lr_scheduler.min_lr_factor": 0.1, "training.local_batch_size": 4, "training.steps": 10_000},
    **{"parallelism.pipeline_parallel_schedule": "Interleaved1F1B", "parallelism.expert_parallel_degree": 1},
    **{"parallelism.expert_tensor_parallel_degree": 1, "activation_checkpoint.selective_ac_option": "op"},
    **{"compile.enable": True, "compile.components": ["loss"], "quantize.grouped_mm.float8.fqns": ["experts"]},
}
DEEPSEEK_16B = DEEPSEEK_671B | {"model.flavor": "16B", "parallelism.expert_parallel_degree": 8}
QWEN3_MOE = COMMON | {
    **{"model.name": "qwen3", "model.flavor": "debugmodel_moe", "optimizer.lr": 3e-4, "training.seq_len": 4096},
    **{"lr_scheduler.warmup_steps": 2, "training.steps": 10, "activation_checkpoint.selective_ac_option": "op"},
}
FILES = {
    **{"llama3_8b": LLAMA3_8B, "llama3_70b": LLAMA3_70B, "llama3_405b": LLAMA3_405B, "debug_model": DEBUG},
    **{"deepseek_v3_671b": DEEPSEEK_671B, "deepseek_v3_16b": DEEPSEEK_16B, "qwen3_moe_debug": QWEN3_MOE},
}


@pytest.mark.parametrize("name", FILES)
def test_torchtitans_files_are_converted_without_an_unknown_key(name: str):
    config_of(FILES[name])
    rows = converted(FILES[name]).rows
    assert not [row for row in rows if row.status == UNKNOWN or (row.status == MISSING and row.matters)]
    assert sum(row.status != DEFAULT for row in rows) == len(FILES[name])


def test_llama3_405b():
    config = config_of(LLAMA3_405B)
    assert (config.model.flavor, config.optimizer.lr, config.training.steps) == ("llama3_405b", 8e-5, 3000)
    assert config.float8.precompute_float8_dynamic_scale_for_fsdp
    assert config.activation_checkpoint.mode == "full"
    assert (config.parallelism.tensor_parallel_degree, config.training.local_batch_size) == (8, 2)


def test_the_config_says_what_the_file_said_and_no_more():
    values = {"model.name": "llama3", "model.flavor": "8B", "training.local_batch_size": 4, "training.dataset": "c4"}
    values |= {"training.steps": 1000, "activation_checkpoint.mode": "none", "metrics.enable_tensorboard": True}
    values |= {"model.hf_assets_path": "assets", "metrics.enable_wandb": True, "job.print_config": False}
    conversion = converted(values)
    assert conversion.toml(header("run.toml", conversion.rows, [])) == (
        '# Converted from torchtitan\'s "run.toml" by titanlite config --from-torchtitan.\n'
        "# not offered: metrics.enable_wandb = true: "
        "examples/follow_metrics.py passes metrics.jsonl on to Weights & Biases\n"
        '\n[model]\nflavor = "llama3_8b"\nhf_assets_path = "assets"\n'
        '\n[training]\ndataset = "c4"\nstreaming = true\nshuffle = false\nlocal_batch_size = 4\nsteps = 1000\n'
        'mixed_precision_param = "bfloat16"  # torchtitan\'s default\n'
        "\n[lr_scheduler]\ndecay_ratio = 0.799  # torchtitan's default\n"
        '\n[activation_checkpoint]\nmode = "none"\n'
        "\n[metrics]\nenable_tensorboard = true\n"
    )


# The command


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Return the exit status of titanlite config, its standard output and its standard error."""
    status, captured = run_command("config", arguments), capsys.readouterr()
    return status, captured.out, captured.err


def test_the_command_prints_a_config_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source, target = tmp_path / "titan.toml", tmp_path / "new" / "ours.toml"
    source.write_text('[model]\nflavor = "8B"\n[training]\nsteps = 20\n[metrics]\nenable_wandb = true\n[x]\ny = 1\n')
    status, out, err = run(["--from-torchtitan", str(source)], capsys)
    assert status == 0
    assert "steps = 20" in out
    for text in (TAKEN, DEFAULT, MISSING, UNKNOWN, "training.steps = 20", "x.y = 1", "Weight decay"):
        assert text in err
    status, out, err = run(["--from-torchtitan", str(source), str(target)], capsys)
    assert (status, out) == (0, "")
    assert f"written: {target}" in " ".join(err.split())
    assert load([str(target)]).config.training.steps == 20


def test_a_config_with_problems_says_so_and_does_not_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source, target = tmp_path / "titan.toml", tmp_path / "ours.toml"
    source.write_text('[model]\nname = "llama4"\nflavor = "17bx16e"\n[training]\nsteps = "ten"\n')
    status, _, err = run(["--from-torchtitan", str(source), str(target)], capsys)
    assert status == 2
    assert f'error: {target}: model.flavor = "llama4 17bx16e": expected one of' in err
    assert f'error: {target}: training.steps = "ten": expected an integer' in err
    assert "# error: " in target.read_text()
    assert run([str(target)], capsys)[0] == 2


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        ("a = [", ["{source}"], "{source}: not valid TOML"),
        ("", ["{source}x.toml"], "{source}x.toml: no such file"),
        ("", [], "error: expected titanlite config --from-torchtitan FILE [TARGET.toml]"),
        ("", ["{source}", "--training.steps=3"], "error: expected titanlite config"),
        ("", ["{source}", "{source}"], "{source}: is the file to convert"),
        ("", ["{source}", "{source}/x.toml"], "{source}/x.toml: cannot be written"),
    ],
)
def test_wrong_arguments_are_one_line(
    text: str, arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source = tmp_path / "titan.toml"
    source.write_text(text)
    filled = [argument.format(source=source) for argument in arguments]
    status, out, err = run(["--from-torchtitan", *filled], capsys)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert expected.format(source=source) in err
    assert source.read_text() == text
