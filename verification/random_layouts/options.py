"""Which values a random layout has for each option. Every option of the schema is in one of the three tables, which a
test compares with the schema: an option that is added must be listed."""

from collections.abc import Sequence
from random import Random
from typing import Any, Literal, NamedTuple, get_args, get_origin

from tests.helpers.config import OPTIONS
from titanlite.config.loader import value_of
from titanlite.config.model_sizes import SIZES
from titanlite.config.rules import DEPENDENT_OPTIONS
from titanlite.config.schema import Config


class Chance(NamedTuple):
    """How often an option is set, and to which values."""

    probability: float
    values: Sequence[Any] = ()
    """Empty: those of the option's type, true and false or the literals, so that a new literal is drawn too."""


CHANCES: dict[str, Chance] = {
    "model.flavor": Chance(0.35, [name for name in SIZES if name != "debug"]),
    "model.norm_eps": Chance(0.05, [1e-6, 1e-3]),
    "model.tie_embeddings": Chance(0.25),
    "model.attention_bias": Chance(0.2),
    "model.mlp_bias": Chance(0.15),
    "model.qk_norm": Chance(0.25),
    "model.rope_theta": Chance(0.1, [100.0, 10_000.0]),
    "model.rope_scaling_factor": Chance(0.2, [1.5, 8.0]),
    "model.rope_scaling_type": Chance(0.3),
    "model.rope_low_freq_factor": Chance(0.1, [0.5, 2.0]),
    "model.rope_high_freq_factor": Chance(0.1, [3.0, 8.0]),
    "model.rope_beta_fast": Chance(0.1, [4.0]),
    "model.rope_beta_slow": Chance(0.1, [0.25]),
    "model.rope_attention_factor": Chance(0.1, [1.2]),
    "model.rope_original_seq_len": Chance(0.3, [4, 64]),
    "model.rope_yarn_truncate": Chance(0.1, [False]),
    "model.attention_sinks": Chance(0.15),
    "model.moe.expert_bias": Chance(0.2),
    "model.moe.router_bias": Chance(0.2),
    "model.moe.swiglu_limit": Chance(0.2, [0.1, 7.0]),
    "model.moe.swiglu_alpha": Chance(0.1, [1.0]),
    "model.norm": Chance(0.15),
    "model.norm_placement": Chance(0.2),
    "model.activation": Chance(0.15),
    "model.gated_ffn": Chance(0.12),
    "model.embedding_scale": Chance(0.08, [3.0]),
    "model.attention_scale": Chance(0.08, [0.3]),
    "model.residual_scale": Chance(0.08, [0.5]),
    "model.logits_scale": Chance(0.08, [2.0]),
    "model.partial_rotary_factor": Chance(0.1, [0.5, 0.0]),
    "model.mla.norm_eps": Chance(0.1, [1e-3]),
    "model.moe.score_function": Chance(0.4),
    "model.moe.normalize_scores": Chance(0.4),
    "model.moe.score_scaling": Chance(0.2, [2.5]),
    "model.moe.balance_bias": Chance(0.4),
    "model.moe.balance_bias_rate": Chance(0.3, [0.05]),
    "model.moe.balance_loss_weight": Chance(0.4, [0.01, 0.5]),
    "model.moe.z_loss_weight": Chance(0.4, [0.001, 0.3]),
    "training.shuffle": Chance(0.2),
    "training.packing": Chance(0.1),
    "training.streaming": Chance(0.06),
    "training.streaming_shuffle_block": Chance(0.2, [1, 16]),
    "training.text_sample_by": Chance(0.2),
    "training.document_mask": Chance(0.35),
    "training.steps": Chance(0.3, [1, 2, 5, 1000]),
    "training.max_norm": Chance(0.3, [1e-3, 0.1, 1e6]),
    "training.nonfinite_steps_allowed": Chance(0.05, [3]),
    "training.skip_outlier_sigma": Chance(0.05, [1e3]),
    "training.outlier_window": Chance(0.02, [4]),
    "training.gc_freq": Chance(0.05, [1]),
    "training.attention_backend": Chance(0.15, ["cpu", "math"]),
    "training.loss_chunks": Chance(0.3, [1, 2, 3, 7]),
    "training.enable_cpu_offload": Chance(0.12),
    "optimizer.name": Chance(0.4),
    "optimizer.lr": Chance(0.1, [1e-3]),
    "optimizer.beta1": Chance(0.1, [0.0, 0.5]),
    "optimizer.beta2": Chance(0.1, [0.5, 0.999]),
    "optimizer.eps": Chance(0.1, [1e-5]),
    "optimizer.weight_decay": Chance(0.2, [0.0, 5.0]),
    "optimizer.muon_momentum": Chance(0.2, [0.0, 0.5]),
    "optimizer.muon_newton_schulz_steps": Chance(0.2, [1, 3]),
    "optimizer.qk_clip_threshold": Chance(0.3, [1e-3, 0.02]),
    "optimizer.implementation": Chance(0.15),
    "optimizer.enable_cpu_offload": Chance(0.12),
    "lr_scheduler.warmup_steps": Chance(0.3, [0, 1, 2, 10]),
    "lr_scheduler.total_steps": Chance(0.2, [1000, 2000]),
    "lr_scheduler.decay_ratio": Chance(0.2, [0.0, 0.5, 1.0]),
    "lr_scheduler.decay_type": Chance(0.2),
    "lr_scheduler.min_lr_factor": Chance(0.2, [0.1, 1.0]),
    "parallelism.fsdp_reshard_after_forward": Chance(0.35, ["always", "always", "never", "never", 2, 3, 4]),
    "parallelism.fsdp_reduce_gradients": Chance(0.35),
    "parallelism.fsdp_forward_prefetch": Chance(0.15, [1, 2, 3]),
    "parallelism.fsdp_backward_prefetch": Chance(0.15, [1, 2, 3]),
    "parallelism.disable_loss_parallel": Chance(0.3),
    "parallelism.pipeline_parallel_schedule": Chance(0.9),
    "parallelism.pipeline_parallel_balance": Chance(0.2),
    "parallelism.pipeline_parallel_first_stage_less_layers": Chance(0.15, [0, 2]),
    "parallelism.pipeline_parallel_last_stage_less_layers": Chance(0.15, [0, 2]),
    "float8.recipe": Chance(1.0),
    "float8.filter_fqns": Chance(0.15, [["layers.0."], ["attention.wk", "w2"]]),
    "float8.enable_fsdp_float8_all_gather": Chance(0.5),
    "float8.precompute_float8_dynamic_scale_for_fsdp": Chance(0.5),
    "int8.filter_fqns": Chance(0.15, [["layers.0."], ["feed_forward."]]),
    "activation_checkpoint.mode": Chance(0.6),
    "activation_checkpoint.selective_ac_option": Chance(0.8, ["every_second_mm", "attention", 1, 2]),
    "compile.enable": Chance(0.05),
    "compile.components": Chance(0.4, [["model"], ["loss"]]),
    "activation_checkpoint.layers_per_checkpoint": Chance(0.15, [2, 3, 5]),
    "debug.seed": Chance(0.3, [0, 1, 2**63 - 1]),
}
BY_THE_LAYOUT = {
    *(f"model.{key}" for key in ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size")),
    *("model.sliding_window", "model.mla.mscale_all_dim", "model.layer_pattern", "model.learned_positions"),
    *(f"model.moe.{key}" for key in ("n_experts", "n_experts_per_token", "expert_dim", "n_shared_experts")),
    *(f"model.moe.{key}" for key in ("n_first_dense_layers", "every_n_layers", "n_groups", "n_groups_per_token")),
    "model.moe.group_score",
    *(f"model.mla.{key}" for key in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")),
    *("model.mla.v_head_dim", "training.seq_len", "training.local_batch_size", "training.global_batch_size"),
    *("training.dataset", "training.dataset_path", "training.datasets", "training.streaming_shards"),
    *("training.dtype", "training.mixed_precision_param", "training.mixed_precision_reduce"),
    *("training.initial_loss_scale", "optimizer.muon_dtype", "optimizer.state_dtype", "optimizer.stochastic_rounding"),
    *("float8.enable", "float8.emulate", "int8.enable", "compile.backend"),
    *(f"parallelism.{axis}_degree" for axis in ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel")),
    *(f"parallelism.{axis}_degree" for axis in ("pipeline_parallel", "context_parallel", "context_parallel_ulysses")),
    *("parallelism.expert_parallel_degree", "parallelism.pipeline_parallel_microbatch_size"),
    *("parallelism.pipeline_parallel_stages_per_rank", "parallelism.module_fqns_per_model_part"),
}
"""Options that degrees.py draws: what they may be depends on the degrees and on each other."""
NOT_DRAWN = {
    "a comparison of steps does not read it": [
        *("job", "checkpoint", "metrics", "validation", "profiling", "comm", "plan", "ema"),
        *("debug.deterministic", "debug.sdc_check_freq", "debug.fingerprint_freq"),
        *("training.cache_folder", "training.change_mixture_on_resume", "training.loss_scale_growth_interval"),
    ],
    "it says how a model is exported, or is of a rotary table only": [
        *("model.hf_model_type", "model.rope_short_factors", "model.rope_long_factors", "model.llama4_scaling_beta"),
        "model.new_tokens",
    ],
    "it needs a tokenizer with a chat template, or the hub": [
        *("model.hf_assets_path", "training.dataset_config", "training.dataset_split", "training.dataset_text_key"),
        *("training.dataset_format", "training.dataset_messages_key", "training.dataset_prompt_key"),
        *("training.dataset_response_key", "training.long_conversations", "training.special_tokens_in_text"),
    ],
    "the layout of one replica group is compared": ["fault_tolerance"],
    "80 layouts of tests/techniques/test_lora.py have adapters; none is drawn at random yet": ["lora"],
    "the options that it takes the place of are drawn": ["training.epochs", "lr_scheduler.warmup_ratio"],
    "it needs CUDA": ["parallelism.enable_async_tensor_parallel"],
}
"""By the reason: options, or sections with all of theirs."""


def not_drawn() -> set[str]:
    """Return the options that no random layout sets."""
    listed = {key for keys in NOT_DRAWN.values() for key in keys}
    return {key for key in OPTIONS if key in listed or key.partition(".")[0] in listed}


def literals(annotation: Any) -> list[Any]:
    """Return the values of a type that has few: true and false, and literals."""
    if annotation is bool:
        return [True, False]
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for part in get_args(annotation) for value in literals(part)] if get_origin(annotation) else []


def values_of(key: str) -> list[Any]:
    """Return the values that an option may be drawn with, which its default is not."""
    values = list(CHANCES[key].values) or literals(OPTIONS[key].annotation)
    return [value for value in values if value != OPTIONS[key].default]


def draw_options(rng: Random) -> dict[str, Any]:
    """Draw the options of which each may be set for itself."""
    return {key: rng.choice(values_of(key)) for key, chance in CHANCES.items() if rng.random() < chance.probability}


def without_unread(options: dict[str, Any], config: Config) -> dict[str, Any]:
    """Return the options that a run reads: one that depends on a switch is read only with some values of that, and
    where that is read itself."""
    unread: set[str] = set()
    for _ in range(2):
        for dependent in DEPENDENT_OPTIONS:
            if dependent.switch in unread or not dependent.reads(value_of(config, dependent.switch)):
                unread |= set(dependent.keys)
    return {key: value for key, value in options.items() if key not in unread}
