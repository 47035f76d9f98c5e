"""The keys, defaults and models of torchtitan 0.2.2, as conversion.py and groups.py read them. They were read in the
sources of the releases 0.2.0, 0.2.1 and 0.2.2, the last one with TOML files, and are frozen: no key is added.
"""

from typing import Any, NamedTuple


def _keys(section: str, names: str) -> list[str]:
    return [f"{section}.{name}" for name in names.split()]


SAME: list[str] = [
    *_keys("job", "dump_folder description"),
    *_keys("profiling", "enable_profiling save_traces_folder profile_freq enable_memory_snapshot"),
    *_keys("profiling", "save_memory_snapshot_folder"),
    *_keys("metrics", "log_freq enable_tensorboard save_tb_folder"),
    *_keys("optimizer", "name lr beta1 beta2 eps weight_decay implementation"),
    *_keys("lr_scheduler", "total_steps decay_type min_lr_factor"),
    *_keys("training", "local_batch_size global_batch_size seq_len max_norm steps enable_cpu_offload dtype"),
    *_keys("training", "mixed_precision_param mixed_precision_reduce gc_freq"),
    *_keys("parallelism", "data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward"),
    *_keys("parallelism", "tensor_parallel_degree disable_loss_parallel enable_async_tensor_parallel"),
    *_keys("parallelism", "pipeline_parallel_degree pipeline_parallel_first_stage_less_layers"),
    *_keys("parallelism", "pipeline_parallel_last_stage_less_layers context_parallel_degree"),
    *_keys("checkpoint", "enable folder interval keep_latest_k load_step"),
    *_keys("compile", "enable components backend"),
    *_keys("comm", "init_timeout_seconds train_timeout_seconds trace_buf_size"),
    *_keys("debug", "seed deterministic"),
    *_keys("fault_tolerance", "enable process_group_timeout_ms replica_id group_size min_replica_size"),
]
"""Keys with an option of the same name. groups.py converts those that are in none of these tables."""

CHANGED: dict[str, str] = {
    "optimizer.weight_decay": "of weight matrices and embeddings only; torchtitan's acts on norms too",
    "debug.seed": "other weights are drawn from the same seed",
    "comm.init_timeout_seconds": "also ends a run whose ranks give no sign of life or make no progress",
    "comm.train_timeout_seconds": "also ends a run whose ranks give no sign of life or make no progress",
}
"""What means something else under the same name."""

DEFAULTS: dict[str, Any] = {
    "metrics.enable_tensorboard": False,
    "model.name": "llama3",
    "model.flavor": "debugmodel",
    "model.hf_assets_path": "./tests/assets/tokenizer",
    "model.converters": [],
    "lr_scheduler.warmup_steps": 200,
    "training.dataset": "c4_test",
    "training.mixed_precision_param": "bfloat16",
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "2",
    "parallelism.pipeline_parallel_schedule": "1F1B",
    "validation.dataset": "c4_validation",
    "validation.local_batch_size": 8,
    "validation.seq_len": 2048,
    "validation.freq": 10,
    "validation.steps": -1,
    "checkpoint.async_mode": "disabled",
    "checkpoint.export_dtype": "float32",
}
"""torchtitan's defaults where an option of the same name has another, or none."""

_WORKERS = "num_workers persistent_workers pin_memory prefetch_factor"
_MX = "quantize.linear.mx", "mxfp8_dim1_cast_kernel_choice recipe_name filter_fqns use_fp8_dim1_cast_triton_kernel"
_FLOAT8 = "enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp recipe_name filter_fqns emulate"

DETAIL = object()
"""The `off` value of a key that is only read with another key, which is listed if it is on."""


class Missing(NamedTuple):
    """A key without an option: the value with which nothing is lost, and the reason."""

    off: Any
    reason: str


NOT_OFFERED: dict[str, Missing] = {
    "job.config_file": Missing(DETAIL, "a config is the first argument"),
    "job.print_config": Missing(False, "titanlite config CONFIG prints it, and a run writes config.toml"),
    "job.save_config_file": Missing(DETAIL, "every run writes config.toml into its dump folder"),
    "job.custom_config_module": Missing("", "options are those of titanlite's schema; no Python is imported"),
    "job.use_for_integration_test": Missing(DETAIL, "of torchtitan's own tests"),
    "experimental.custom_import": Missing("", "no Python is imported by a config"),
    "experimental.custom_args_module": Missing("", "options are those of titanlite's schema; no Python is imported"),
    "profiling.profiler_active": Missing(1, "a trace is of one step"),
    "profiling.profiler_warmup": Missing(3, "the profiler warms up for 3 steps"),
    "metrics.disable_color_printing": Missing(DETAIL, "the console has no colors to disable"),
    "metrics.enable_color_printing": Missing(DETAIL, "the console has no colors"),
    "metrics.save_for_all_ranks": Missing(False, "metrics are global, and one rank writes them"),
    "metrics.rank_0_only": Missing(True, "metrics are global, and one rank writes them"),
    "metrics.enable_wandb": Missing(False, "metrics go to metrics.jsonl and TensorBoard"),
    "model.print_after_conversion": Missing(False, "the first lines of a run say what is converted"),
    "optimizer.early_step_in_backward": Missing(False, "the optimizer steps after the backward, on clipped gradients"),
    "training.gc_debug": Missing(False, "there is no check for reference cycles"),
    **{
        f"{section}.dataloader.{name}": Missing(DETAIL, "data is read by a thread of each rank, without workers")
        for section in ("training", "validation")
        for name in _WORKERS.split()
    },
    "parallelism.pipeline_parallel_schedule_csv": Missing("", "schedules are those that have a name"),
    "parallelism.pipeline_parallel_expert_parallel_overlap": Missing(DETAIL, "a matter of speed, under DualPipeV"),
    "parallelism.context_parallel_load_balancer": Missing(
        "headtail", "ring attention always gives each rank a chunk of the head and one of the tail; a matter of speed"
    ),
    "parallelism.context_parallel_rotate_method": Missing(
        "allgather", "a ring sends chunks of keys and values; context_parallel_ulysses_degree exchanges heads"
    ),
    "parallelism.expert_tensor_parallel_degree": Missing(
        1, "experts are sharded over the ranks that expert_parallel_degree leaves; the numbers are the same"
    ),
    "parallelism.expert_parallel_comm_backend": Missing("standard", "tokens are exchanged by torch's all-to-all"),
    "parallelism.enable_compiled_autograd": Missing(False, "the backward is compiled with the forward"),
    "checkpoint.enable_ft_dataloader_checkpoints": Missing(DETAIL, "a living group sends its position in the data"),
    "checkpoint.exclude_from_loading": Missing([], "a resumed run loads all of a checkpoint"),
    "checkpoint.enable_first_step_checkpoint": Missing(False, "SIGUSR1 saves a checkpoint after the current step"),
    "checkpoint.create_seed_checkpoint": Missing(False, "initial weights are the same for every layout without it"),
    "checkpoint.load_only": Missing(False, "a run that loads checkpoints also saves them"),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": Missing(
        ["moe.router.gate"], "matrix products are not chosen by shape; the numbers are the same"
    ),
    **{
        f"activation_checkpoint.{name}": Missing(DETAIL, "without effect on the numbers: nothing random is recomputed")
        for name in ("early_stop", "preserve_rng_state", "determinism_check", "debug")
    },
    "activation_checkpoint.memory_budget": Missing(DETAIL, "the compiler does not choose what is saved"),
    "activation_checkpoint.visualize_memory_budget_pareto": Missing(False, "no such figure is drawn"),
    **{
        f"{_MX[0]}.{name}": Missing(DETAIL, "the kernel that casts is not chosen; a matter of speed")
        for name in _MX[1].split()
        if "cast" in name
    },
    "quantize.grouped_mm.float8.fqns": Missing(DETAIL, "experts are not converted to float8"),
    "quantize.grouped_mm.mx.recipe_name": Missing(DETAIL, "experts are not converted to MXFP8"),
    "quantize.grouped_mm.mx.fqns": Missing(DETAIL, "experts are not converted to MXFP8"),
    "quantize.linear.float8.force_recompute_fp8_weight_in_bwd": Missing(DETAIL, "the recipe says what is kept"),
    **{
        f"quantize.linear.float8.scaling_type_{name}": Missing("dynamic", "scales are computed anew in every step")
        for name in ("input", "weight", "grad_output")
    },
    "comm.save_traces_folder": Missing(DETAIL, "traces of collectives are in the dump folder"),
    "comm.save_traces_file_prefix": Missing(DETAIL, "traces of collectives have names of their own"),
    "comm.mode": Missing("default", "titanlite plan needs no devices; titanlite parity compares layouts on CPUs"),
    "memory_estimation.enable": Missing(False, "titanlite plan CONFIG plans memory"),
    "memory_estimation.disable_fake_mode": Missing(DETAIL, "titanlite plan CONFIG plans memory"),
    "fault_tolerance.process_group": Missing(DETAIL, "groups communicate by gloo on CPUs and by NCCL on CUDA"),
    "fault_tolerance.semi_sync_method": Missing(None, "groups sum gradients in every step, and do not train apart"),
    **{
        f"fault_tolerance.{name}": Missing(DETAIL, "read with semi_sync_method only")
        for name in ("sync_steps", "should_quantize", "fragment_sync_delay", "fragment_update_alpha")
    },
    "debug.deterministic_warn_only": Missing(False, "an operator without a deterministic algorithm raises"),
    "debug.moe_force_load_balance": Missing(False, "the router always chooses the experts"),
}

OF_0_2: dict[str, str] = {
    "model.tokenizer_path": "model.hf_assets_path",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "training.debug_moe_force_load_balance": "debug.moe_force_load_balance",
    **{f"float8.{name}": f"quantize.linear.float8.{name}" for name in _FLOAT8.split()},
    **{f"mx.{name}": f"{_MX[0]}.{name}" for name in _MX[1].split()},
}
"""Keys that a 0.2 release still reads, and the later key; [float8] and [mx] are those of 0.1."""

_DEBUG = {"n_kv_heads": 16, "vocab_size": 2048, "rope_theta": 500_000.0, "rope_scaling_factor": 8.0}
_QWEN_DEBUG = {"dim": 256, "n_layers": 8, "n_heads": 16, "n_kv_heads": 8, "ffn_dim": 3072, "vocab_size": 2048}
_SOFTMAX = {
    **{"moe.score_function": "softmax", "moe.normalize_scores": False, "moe.n_groups": 1, "moe.n_groups_per_token": 1},
    **{"moe.score_scaling": 1.0, "moe.n_shared_experts": 2, "moe.n_first_dense_layers": 1},
}


def _deepseek(dim: int, n_layers: int, n_heads: int, ffn_dim: int, vocab_size: int, **other: Any) -> dict[str, Any]:
    dimensions = {"dim": dim, "n_layers": n_layers, "n_heads": n_heads, "n_kv_heads": n_heads, "ffn_dim": ffn_dim}
    return {**dimensions, "vocab_size": vocab_size, "norm_eps": 1e-5, **_SOFTMAX, **other}


_DEEPSEEK_DEBUG = _deepseek(256, 6, 16, 1024, 2048) | {
    **{"moe.n_experts": 8, "moe.n_experts_per_token": 3, "moe.expert_dim": 256},
    **{"mla.q_lora_rank": 0, "mla.mscale_all_dim": 0.7},
}
_DEEPSEEK_16B = _deepseek(2048, 27, 16, 10944, 102400) | {
    **{"moe.n_experts": 64, "moe.n_experts_per_token": 6, "moe.expert_dim": 1408},
    **{"mla.q_lora_rank": 0, "mla.mscale_all_dim": 0.7},
}
_DEEPSEEK_236B = _deepseek(5120, 60, 128, 12288, 102400) | {
    **{"moe.n_experts": 160, "moe.n_experts_per_token": 6, "moe.expert_dim": 1536, "moe.score_scaling": 16.0},
    **{"moe.n_groups": 8, "moe.n_groups_per_token": 3},
}
_DOCUMENTS = {"document_mask": True}

MODELS: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("llama3", "debugmodel"): ("debug", _DEBUG),
    ("llama3", "debugmodel_flex_attn"): ("debug", _DEBUG | _DOCUMENTS),
    ("llama3", "debugmodel_varlen_attn"): ("debug", _DEBUG | _DOCUMENTS),
    ("llama3", "8B"): ("llama3_8b", {}),
    ("llama3", "8B_flex"): ("llama3_8b", _DOCUMENTS),
    ("llama3", "8B_varlen"): ("llama3_8b", _DOCUMENTS),
    ("llama3", "70B"): ("llama3_70b", {}),
    ("llama3", "405B"): ("llama3_405b", {}),
    ("llama2", "7B"): ("llama2_7b", {}),
    ("llama2", "13B"): ("llama2_13b", {}),
    ("qwen3", "debugmodel"): ("qwen3_0.6b", _QWEN_DEBUG),
    ("qwen3", "0.6B"): ("qwen3_0.6b", {}),
    ("qwen3", "1.7B"): ("qwen3_1.7b", {}),
    ("qwen3", "4B"): ("qwen3_4b", {}),
    ("qwen3", "8B"): ("qwen3_8b", {}),
    ("qwen3", "14B"): ("qwen3_14b", {}),
    ("qwen3", "32B"): ("qwen3_32b", {}),
    ("qwen3", "debugmodel_moe"): ("qwen3_30b_a3b", {**_QWEN_DEBUG, "moe.n_experts": 64, "moe.expert_dim": 768}),
    ("qwen3", "30B-A3B"): ("qwen3_30b_a3b", {}),
    ("qwen3", "235B-A22B"): ("qwen3_235b_a22b", {"rope_theta": 5_000_000.0}),
    ("deepseek_v3", "debugmodel"): ("deepseek_v3_671b", _DEEPSEEK_DEBUG),
    ("deepseek_v3", "debugmodel_flex_attn"): ("deepseek_v3_671b", _DEEPSEEK_DEBUG | _DOCUMENTS),
    ("deepseek_v3", "16B"): ("deepseek_v3_671b", _DEEPSEEK_16B | _DOCUMENTS),
    ("deepseek_v3", "236B"): ("deepseek_v3_671b", _DEEPSEEK_236B | _DOCUMENTS),
    ("deepseek_v3", "671B"): ("deepseek_v3_671b", {"norm_eps": 1e-5} | _DOCUMENTS),
}
"""By model.name and model.flavor: our flavor, and what differs from it. The flex and varlen flavors, and the large ones
of DeepSeek-V3, have a document mask."""
DEEPSEEK_ORIGINAL_SEQ_LEN = 4096
"""Up to this training.seq_len torchtitan's DeepSeek-V3 has no YaRN."""

WHATEVER_THE_FILE_SAYS = [
    "Initial weights: every matrix from a normal of standard deviation 0.02, the embedding too (torchtitan's: 1).",
    "Weight decay: norms have none (torchtitan's decays every parameter).",
    "Data: the same documents in another order; the target after an EOS, the next document's BOS, is not trained on.",
    "Checkpoints: the last one is a full checkpoint too, from which a run can resume.",
    "A loss or gradient norm that is not finite ends the run (training.nonfinite_steps_allowed).",
]
"""What differs between the two programs and has no key in torchtitan's file."""
