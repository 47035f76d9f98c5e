"""Draw degrees, and the sizes and data types that go with them and with each other."""

import math
from collections.abc import Sequence
from random import Random
from typing import Any

from titanlite.config.model_sizes import SIZES
from titanlite.config.stage_split import ONE_STAGE, V_SHAPED, module_names

RANKS = {1: 4, 2: 32, 3: 8, 4: 36, 6: 6, 8: 9, 12: 1, 16: 4}
"""How often a layout has so many ranks, of a hundred."""
AXES = ("replicate", "shard", "cp", "tp", "pp")
NAMES = {"replicate": "data_parallel_replicate", "shard": "data_parallel_shard", "cp": "context_parallel"}
NAMES |= {"tp": "tensor_parallel", "pp": "pipeline_parallel", "ulysses": "context_parallel_ulysses"}
NAMES |= {"ep": "expert_parallel"}
LEAST_TOKENS = 16
"""Of a sequence. Of two sequences with as many, one of several thousand pairs has no valid target."""
VOCABULARY = 320
"""Of layouts that read text: bytes and special tokens."""

Options = dict[str, Any]
"""Values by `section.key`."""


def prime_factors(number: int) -> list[int]:
    """Return the prime factors of a number, in ascending order."""
    for prime in range(2, number + 1):
        if number % prime == 0:
            return [prime, *prime_factors(number // prime)]
    return []


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def draw_degrees(rng: Random) -> dict[str, int]:
    """Draw the number of ranks and give each of its prime factors to an axis."""
    (ranks,) = rng.choices(list(RANKS), weights=list(RANKS.values()))
    degrees = dict.fromkeys(AXES, 1)
    for prime in prime_factors(ranks):
        degrees[rng.choice(AXES)] *= prime
    degrees["ulysses"] = rng.choice(divisors(degrees["cp"]))
    degrees["ep"] = rng.choice(divisors(degrees["shard"] * degrees["cp"] * degrees["tp"]))
    return degrees


def draw_sizes(rng: Random, degrees: dict[str, int], options: Options) -> Options:
    """Draw the options that depend on the degrees and on options that are drawn already."""
    drawn = draw_precision(rng, options)
    width = 32 if options.get("float8.recipe") == "mxfp8" else 16
    width = width if drawn.get("float8.enable") or drawn.get("int8.enable") else 1
    drawn |= _draw_batches(rng, degrees, options)
    drawn |= _draw_model(rng, degrees, options, width)
    drawn |= _draw_experts(rng, degrees, options, width)
    drawn |= _draw_data(rng, degrees, options)
    for axis, degree in degrees.items():
        if degree > 1 and (axis != "ep" or drawn.get("model.moe.n_experts")):
            drawn[f"parallelism.{NAMES[axis]}_degree"] = degree
    if degrees["replicate"] > 1 and degrees["shard"] == 1 and rng.random() < 0.5:
        drawn["parallelism.data_parallel_shard_degree"] = 1
    if options.get("compile.enable"):
        drawn["compile.backend"] = "aot_eager"  # inductor compiles for a minute
    return drawn | _with_gradients(drawn, options)


def _with_gradients(drawn: Options, options: Options) -> Options:
    """Return other values where a gradient is zero but for rounding, which Muon turns into an update of full size: the
    normalized score of a token's only expert is always 1, and so is the weight of the only token in a window."""
    other: Options = {}
    moe = SIZES[options.get("model.flavor", "debug")].get("moe", {})
    normalized = options.get("model.moe.normalize_scores", moe.get("normalize_scores"))
    if drawn.get("model.moe.n_experts_per_token") == 1 and normalized:
        other["model.moe.normalize_scores"] = False
    in_float64 = drawn.keys().isdisjoint({"training.dtype", "float8.enable", "int8.enable"})
    if drawn.get("model.sliding_window") == 1 and (options.get("optimizer.name") == "Muon" or not in_float64):
        other["model.sliding_window"] = 2
    return other


def draw_precision(rng: Random, options: Options) -> Options:
    """Draw the data types: mostly float64, in which a difference is a bug."""
    modes: dict[str, tuple[int, Options]] = {
        "float64": (78, {}),
        "float8": (6, {"float8.enable": True, "float8.emulate": True}),
        "int8": (3, {"int8.enable": True}),
        "float32": (2, {"training.dtype": "float32"}),
        "bfloat16": (3, {"training.dtype": "float32", "training.mixed_precision_param": "bfloat16"}),
        "float16": (2, {"training.dtype": "float32", "training.mixed_precision_param": "float16"}),
        "states": (4, {"training.dtype": "float32"}),
        "bfloat16 weights": (2, {"training.dtype": "bfloat16"}),
    }
    mode = rng.choices(list(modes), weights=[weight for weight, _ in modes.values()])[0]
    drawn = dict(modes[mode][1])
    if mode == "states":
        drawn["optimizer.state_dtype"] = rng.choice(["float32", "bfloat16", "float8", "int8", "int4"])
    if mode == "float8" and rng.random() < 0.3:
        drawn |= {"training.dtype": "float32", "training.mixed_precision_param": "bfloat16"}
    if mode == "float16" and rng.random() < 0.5:
        drawn["training.initial_loss_scale"] = 1024.0
    if mode == "bfloat16 weights":
        drawn["optimizer.stochastic_rounding"] = rng.random() < 0.5
    if drawn.get("training.dtype", "float64") != "float64" and rng.random() < 0.3:
        drawn["training.mixed_precision_reduce"] = "float32"  # the reference rounds no gradient to bfloat16
    if options.get("optimizer.name") == "Muon" and rng.random() < 0.1:
        drawn["optimizer.muon_dtype"] = rng.choice(["float32", "bfloat16"])
    if mode != "float64":
        drawn["optimizer.lr"] = 1e-4  # rounding turns Adam's first steps, of the size of lr, into the other direction
    return drawn


def _draw_batches(rng: Random, degrees: dict[str, int], options: Options) -> Options:
    """Draw the sequence length and the batch, with stages and microbatches of a pipeline."""
    chunks = 1 if degrees["ulysses"] == degrees["cp"] else 2
    multiple = math.lcm(chunks * degrees["cp"], degrees["cp"] * degrees["tp"])
    least = math.ceil(LEAST_TOKENS / multiple)
    drawn: Options = {"training.seq_len": multiple * (least + rng.choice([0, 0, 1, 3, 8]) % (2 * least + 1))}
    size, number = 1, rng.choice([1, 1, 2, 3])
    if degrees["pp"] > 1:
        schedule, per_rank = options.get("parallelism.pipeline_parallel_schedule", "1F1B"), 2
        if schedule in ONE_STAGE:
            per_rank = 1
        elif schedule not in V_SHAPED and rng.random() < 0.3:
            per_rank = 3
            drawn["parallelism.pipeline_parallel_stages_per_rank"] = per_rank
        stages = degrees["pp"] * per_rank
        drawn["model.n_layers"] = stages + rng.choice([0, 0, 1, 2])
        number, size = rng.choice([1, 2, degrees["pp"], 2 * degrees["pp"], stages, stages + 1]), rng.choice([1, 1, 2])
        drawn["parallelism.pipeline_parallel_microbatch_size"] = size
        if rng.random() < 0.1:
            drawn["parallelism.module_fqns_per_model_part"] = _draw_stages(rng, drawn["model.n_layers"], stages)
    else:
        drawn["model.n_layers"] = rng.choice([1, 2, 2, 3])
    drawn["training.local_batch_size"] = size * number
    sequences, accumulation_steps = size * number * degrees["replicate"] * degrees["shard"], rng.choice([1, 1, 2, 3])
    drawn["training.global_batch_size"] = sequences * (accumulation_steps if sequences > 1 else accumulation_steps + 1)
    return drawn


def _draw_stages(rng: Random, n_layers: int, n_stages: int) -> list[list[str]]:
    """Return the modules of stages that have at least one layer each."""
    ends = sorted(rng.sample(range(1, n_layers), n_stages - 1))
    first, *names = module_names(n_layers)
    stages = [names[begin:end] for begin, end in zip([0, *ends], [*ends, len(names)], strict=True)]
    stages[0].insert(0, first)
    return stages


def _draw_model(rng: Random, degrees: dict[str, int], options: Options, width: int) -> Options:
    """Draw the dimensions of a model that tensor parallelism and Ulysses can shard. `width` divides most of them."""
    tensor, groups = degrees["tp"], degrees["tp"] * degrees["ulysses"]
    if options.get("model.rope_scaling_factor", 1) == 1:  # the others are rejected then, in a config drawn by itself
        for key in [key for key in options if key.startswith("model.rope_") and key != "model.rope_theta"]:
            del options[key]
    latent = bool(SIZES[options.get("model.flavor", "debug")].get("mla")) or rng.random() < 0.12
    n_kv_heads, shared = groups * rng.choice([1, 1, 2]), rng.choice([1, 2, 3])
    n_heads = n_kv_heads * (1 if latent else shared)
    head_dim = rng.choice([2, 4, 8]) if width == 1 else 16
    wide = max(width, 1)
    dim = n_heads * head_dim if rng.random() < 0.5 else wide * rng.choice([2, 3]) if width > 1 else rng.randint(9, 40)
    drawn: Options = {
        "model.dim": dim,
        "model.n_heads": n_heads,
        "model.n_kv_heads": n_heads if latent else n_kv_heads,
        "model.ffn_dim": tensor * wide * (rng.choice([1, 2, 3]) if width > 1 else rng.choice([1, 5, 8, 12])),
        "model.vocab_size": tensor * rng.choice([5, 15, 32]),
    }
    if latent:
        return drawn | _draw_latents(rng, options)
    if rng.random() < 0.1:
        drawn["model.learned_positions"] = tensor * 64
    if rng.random() < 0.15:
        drawn["model.layer_pattern"] = _draw_layers(rng)
    return drawn | {"model.head_dim": head_dim, "model.sliding_window": rng.choice([0] * 6 + [1, 3, 7])}


def _draw_layers(rng: Random) -> list[Options]:
    """Draw a pattern of two or three kinds of layers."""
    of_kind: dict[str, Sequence[Any]] = {
        "count": [1, 2],
        "sliding_window": [0, 2, 5],
        "rope_theta": [100.0],
        "rope_scaling_factor": [1.0, 4.0],
        "partial_rotary_factor": [0.0],
    }
    kinds = range(rng.choice([2, 2, 3]))
    return [{key: rng.choice(values) for key, values in of_kind.items() if rng.random() < 0.4} for _ in kinds]


def _draw_latents(rng: Random, options: Options) -> Options:
    """Draw the dimensions of latent attention. Options that it has not are removed from those that are drawn."""
    for key in ("model.attention_bias", "model.qk_norm", "model.attention_sinks"):
        options.pop(key, None)
    nope, rope = rng.choice([2, 5, 8]), rng.choice([2, 4])
    drawn = {
        "model.mla.kv_lora_rank": rng.choice([3, 8, 16]),
        "model.mla.q_lora_rank": rng.choice([0, 5, 12]),
        "model.mla.qk_nope_head_dim": nope,
        "model.mla.qk_rope_head_dim": rope,
        "model.mla.v_head_dim": rng.randint(1, nope + rope),
        "model.mla.mscale_all_dim": rng.choice([0.0, 1.0]),
        "model.sliding_window": rng.choice([0, 0, 5]),
    }
    is_yarn = options.get("model.rope_scaling_type") == "yarn" and options.get("model.rope_scaling_factor", 1) > 1
    if not is_yarn and SIZES[options.get("model.flavor", "debug")].get("rope_scaling_type") != "yarn":
        drawn["model.mla.mscale_all_dim"] = 0.0
    return drawn


def _draw_experts(rng: Random, degrees: dict[str, int], options: Options, width: int) -> Options:
    """Draw experts and their sizes, of a family that has some and else sometimes."""
    if not SIZES[options.get("model.flavor", "debug")].get("moe") and rng.random() > 0.2:
        return {}
    options.pop("model.mlp_bias", None)
    n_experts = degrees["ep"] * rng.choice([1, 2, 3]) * rng.choice([1, 2])
    per_token = rng.randint(1, min(n_experts, 4))
    n_groups, chosen, shared = 1, 1, rng.choice([0, 0, 1, 2])
    if "gpt_oss" in options.get("model.flavor", "") or {"model.moe.expert_bias", "model.moe.swiglu_limit"} & set(
        options
    ):
        shared = 0
    if n_experts >= 4 and n_experts % 2 == 0 and rng.random() < 0.4:
        n_groups = rng.choice([number for number in divisors(n_experts) if n_experts // number >= 2])
        chosen = rng.randint(math.ceil(per_token / (n_experts // n_groups)), n_groups)
    return {
        "model.moe.n_experts": n_experts,
        "model.moe.n_experts_per_token": per_token,
        "model.moe.expert_dim": degrees["tp"] * max(width, 1) * rng.choice([1, 3, 4]),
        "model.moe.n_shared_experts": shared,
        "model.moe.n_first_dense_layers": rng.choice([0, 0, 1]),
        "model.moe.every_n_layers": rng.choice([1, 1, 2]),
        "model.moe.n_groups": n_groups,
        "model.moe.n_groups_per_token": chosen,
        "model.moe.group_score": rng.choice(["top_2_sum", "max"]) if chosen < n_groups else "top_2_sum",
    }


def _draw_data(rng: Random, degrees: dict[str, int], options: Options) -> Options:
    """Draw files of text where an option of the data is drawn; else sequences are random tokens."""
    if not {"training.packing", "training.streaming"} & set(options):
        for key in ("training.shuffle", "training.streaming_shuffle_block", "training.text_sample_by"):
            options.pop(key, None)
        return {}
    vocabulary = {"model.vocab_size": math.ceil(VOCABULARY / degrees["tp"]) * degrees["tp"]}
    if options.get("training.streaming"):
        ranks = degrees["replicate"] * degrees["shard"]
        vocabulary["training.streaming_shards"] = ranks * rng.choice([1, 2])
    elif rng.random() < 0.4:
        options.pop("training.text_sample_by", None)
        table = {"dataset": "text", "dataset_path": "texts"}
        return vocabulary | {"training.datasets": [table | {"name": name, "weight": len(name)} for name in ("a", "bb")]}
    return vocabulary | {"training.dataset": "text", "training.dataset_path": "texts"}
