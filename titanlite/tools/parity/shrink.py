"""Shrink a config's model under the same layout, and replace options that a CPU lacks."""

import dataclasses
import itertools
import math
from typing import Any

from titanlite.config import Config, Launch, LoadedConfig, check
from titanlite.config.loader import value_of
from titanlite.config.schema import Mla, Moe


def smaller(loaded: LoadedConfig[Config], launch: Launch, dtype: str) -> tuple[Config, list[str]]:
    """Return the resolved config of a smaller model, and the changed sizes. With own.data, vocab_size stays."""
    loaded = loaded if launch.n_devices else adapt_to_cpu(loaded)
    small, changes = shrink(dataclasses.replace(loaded, config=check(loaded, launch)), dtype)
    if loaded.config.own.data:
        size, changes = loaded.config.model.vocab_size, [each for each in changes if "vocab_size" not in each]
        small = dataclasses.replace(small, config=small.config.replace(model__vocab_size=size))
    return check(small, launch), changes


def shrink(loaded: LoadedConfig[Config], dtype: str) -> tuple[LoadedConfig[Config], list[str]]:
    """Make the model, the sequence and the batch of a resolved config as small as its layout allows, and also return
    the changed sizes as "section.key old -> new". Degrees, schedule, stages given by name, gradient accumulation,
    grouped-query attention, tied embeddings, biases, norms, document mask, optimizer and windowing stay."""
    config, sizes = loaded.config, _smaller_sizes(loaded.config)
    keys = {option.replace("__", "."): size for option, size in sizes.items()}
    changes = [f"{key} {old} -> {size}" for key, size in keys.items() if (old := value_of(config, key)) != size]
    config = config.replace(**sizes, **_numeric_options(config, dtype))
    return dataclasses.replace(loaded, config=config), changes


def _smaller_sizes(config: Config) -> dict[str, Any]:
    """Return the least sizes with which every rank has work, as keywords of `Config.replace`."""
    model, training, parallelism = config.model, config.training, config.parallelism
    tensor, ulysses = parallelism.tensor_parallel_degree, parallelism.context_parallel_ulysses_degree
    context, pipeline = parallelism.context_parallel_degree, parallelism.pipeline_parallel_degree
    low_precision = config.float8.enable or config.int8.enable
    n_kv_heads = tensor * ulysses * min(2, model.n_kv_heads // (tensor * ulysses))
    n_heads = n_kv_heads * min(2, model.n_heads // model.n_kv_heads)
    least = max(parallelism.n_stages + 1, 2, len(model.layer_pattern))
    n_layers = model.n_layers if parallelism.module_fqns_per_model_part else min(model.n_layers, least)
    local_batch_size = min(training.local_batch_size, 2)
    if pipeline > 1:  # smallest batch with which every schedule keeps all ranks busy
        local_batch_size = min(config.n_microbatches, max(2 * pipeline, parallelism.n_stages))
    accumulation_steps = min(config.gradient_accumulation_steps, 2)
    seq_len = min(training.seq_len, math.lcm(2 * context, context * tensor) * 4)
    # Layers narrower than `width` would stay in high precision under float8, int8 and mxfp8.
    width = 32 if config.float8.enable and config.float8.recipe == "mxfp8" else 16 if low_precision else 8
    head_dim = width if model.n_heads * model.head_dim == model.dim else 2 * width
    return {
        "model__n_layers": n_layers,
        "model__n_heads": n_heads,
        "model__n_kv_heads": n_kv_heads,
        "model__dim": width * n_heads,
        "model__head_dim": head_dim,
        # A window that is a few tokens longer than a ring's chunk begins in the middle of another chunk.
        "model__sliding_window": _smaller_window(model.sliding_window, config, seq_len),
        **_smaller_options_of_families(config, seq_len, head_dim),
        "model__ffn_dim": (width if low_precision else 12) * max(tensor, 2),
        "model__vocab_size": tensor * math.ceil(60 / tensor),
        "training__seq_len": seq_len,
        "training__local_batch_size": local_batch_size,
        "training__global_batch_size": local_batch_size * parallelism.data_parallel_degree * accumulation_steps,
        "parallelism__pipeline_parallel_microbatch_size": 1,
        "fault_tolerance__enable": False,  # the layout of one replica group is compared
        **(_smaller_experts(model.moe, tensor) if model.moe.n_experts else {}),
        **(_smaller_latents(config.model.mla, width) if model.mla.kv_lora_rank else {}),
    }


def _smaller_window(window: int, config: Config, seq_len: int) -> int:
    return max(seq_len * 3 // 8, 1) if 0 < window < config.training.seq_len else window


def _smaller_options_of_families(config: Config, seq_len: int, head_dim: int) -> dict[str, Any]:
    """Return, as keywords of `Config.replace`, a pattern with one layer of each kind, learned positions for the smaller
    sequence, and as many rotary factors as the smaller head has pairs of channels."""
    model, options = config.model, dict[str, Any]()
    if model.layer_pattern and not config.parallelism.module_fqns_per_model_part:
        windows = [_smaller_window(kind.sliding_window, config, seq_len) for kind in model.layer_pattern]
        options["model__layer_pattern"] = [
            kind.model_copy(update={"count": 1, "sliding_window": window})
            for kind, window in zip(model.layer_pattern, windows, strict=True)
        ]
    for name in ("rope_short_factors", "rope_long_factors"):
        factors, n_pairs = getattr(model, name), int(head_dim * model.partial_rotary_factor) // 2
        if factors:
            options[f"model__{name}"] = [*itertools.islice(itertools.cycle(factors), n_pairs)]
    if model.learned_positions:
        options["model__learned_positions"] = seq_len
    return options


def _smaller_latents(mla: Mla, width: int) -> dict[str, Any]:
    """Return the least sizes of latent attention, as keywords of `Config.replace`. Unequal head dims stay unequal."""
    return {
        "model__head_dim": 2 * width,
        "model__mla__qk_nope_head_dim": width,
        "model__mla__qk_rope_head_dim": width,
        "model__mla__v_head_dim": width if mla.v_head_dim < mla.qk_head_dim else 2 * width,
        "model__mla__kv_lora_rank": 2 * width,
        "model__mla__q_lora_rank": 4 * width if mla.q_lora_rank else 0,
    }


def _smaller_experts(moe: Moe, tensor: int) -> dict[str, Any]:
    """Return the least sizes of experts, as keywords of `Config.replace`. Layer 0 or layer 1 keeps experts."""
    return {
        "model__moe__expert_dim": 12 * max(tensor, 2),
        "model__moe__n_first_dense_layers": min(moe.n_first_dense_layers, 1),
        "model__moe__every_n_layers": min(moe.every_n_layers, 2),
    }


def _numeric_options(config: Config, dtype: str) -> dict[str, Any]:
    """Return options with which steps of two layouts in `dtype` can be compared, as keywords of `Config.replace`."""
    options = {
        "training__dtype": "float64" if dtype == "float64" else "float32",
        "training__mixed_precision_param": dtype if dtype in ("bfloat16", "float16") else "auto",
        "training__mixed_precision_reduce": "auto",
        "training__attention_backend": "auto" if dtype != "bfloat16" else config.training.attention_backend,
        "training__steps": 100,
        "training__epochs": 0.0,
        "training__max_norm": 0.1,  # smaller than the gradient norm, so that clipping is compared
        "optimizer__muon_dtype": "auto",
        # In low precision, Adam's steps along gradients that are only rounding must be far smaller than weights (0.02).
        "optimizer__lr": 1e-2 if dtype == "float64" and not (config.float8.enable or config.int8.enable) else 1e-4,
        "lr_scheduler__warmup_steps": 2,
        "lr_scheduler__warmup_ratio": 0.0,
        "lr_scheduler__total_steps": -1,
    }
    if dtype == "float64":  # low-bit optimizer states would round far above float64's tolerance
        options |= {"optimizer__state_dtype": "auto", "optimizer__stochastic_rounding": False}
    return options


def adapt_to_cpu(loaded: LoadedConfig[Config]) -> LoadedConfig[Config]:
    """Replace the options that a CPU does not support, so that a config for GPUs can be verified on one."""
    config = loaded.config.replace(
        training__attention_backend="auto",
        parallelism__enable_async_tensor_parallel=False,
        float8__emulate=loaded.config.float8.enable,
        compile__backend="aot_eager",  # aot_eager traces the same graphs and skips minutes of compiling C++
        profiling__enable_memory_snapshot=False,
    )
    return dataclasses.replace(loaded, config=config)
