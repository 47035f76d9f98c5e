"""The rules between options: what the types of single ones cannot say. Those between a config and a launch are in
titanlite/config.py."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from titanlite.config.loader import Rejections, show
from titanlite.config.stage_split import ONE_STAGE, SPLIT_BACKWARD, V_SHAPED, module_names

if TYPE_CHECKING:
    from titanlite.config import Config
from titanlite.config.schema import LRScheduler, Model, Training, Validation


def between_options(config: Config, given: set[str]) -> Rejections:
    """What single types cannot say. `given` holds the keys that were set to something else than the default."""
    reject = Rejections()
    _model_rules(config.model, reject)
    _data_rules(config.training, config.validation, given, reject)
    _step_rules(config.training, config.lr_scheduler, reject)
    _shard_rules(config, reject)
    _tensor_rules(config, reject)
    _context_rules(config, given, reject)
    _pipeline_rules(config, given, reject)
    _recomputation_rules(config, given, reject)
    _precision_rules(config, given, reject)
    _compile_rules(config, given, reject)
    _switched_off(config, "float8", given, reject)
    return reject


def _switched_off(config: Config, section: str, given: set[str], reject: Rejections) -> None:
    """A section whose `enable` was not given is off, and its other keys are not read."""
    if "enable" not in getattr(config, section).model_fields_set:
        for key in sorted(key for key in given if key.startswith(f"{section}.")):
            reject(key, f"read only when {section}.enable is true; set that, or remove it", f"{section}.enable")


def _recomputation_rules(config: Config, given: set[str], reject: Rejections) -> None:
    mode = config.activation_checkpoint.mode
    turned_off = mode == "none" and "mode" in config.activation_checkpoint.model_fields_set
    for key, user in (("selective_ac_option", "selective"), ("memory_budget", "memory_budget")):
        if f"activation_checkpoint.{key}" in given and mode != user and not turned_off:
            why = f"read only when activation_checkpoint.mode is {show(user)}; remove it"
            reject(f"activation_checkpoint.{key}", why, "activation_checkpoint.mode")
    if mode == "memory_budget" and not (config.compile.enable and "model" in config.compile.components):
        reject(
            "activation_checkpoint.mode",
            'the compiler chooses what is kept; set compile.enable = true, with "model" in compile.components, or '
            "another mode",
            *("compile.enable", "compile.components"),
        )


def _compile_rules(config: Config, given: set[str], reject: Rejections) -> None:
    _switched_off(config, "compile", given, reject)
    components = config.compile.components
    if not components or set(components) - {"model", "loss"}:
        reject("compile.components", 'expected "model", "loss" or both; to compile nothing, set compile.enable = false')


def _precision_rules(config: Config, given: set[str], reject: Rejections) -> None:
    training, optimizer, float8 = config.training, config.optimizer, config.float8
    half = training.mixed_precision_param == "float16"
    turned_off = not half and "mixed_precision_param" in training.model_fields_set
    for key in ("initial_loss_scale", "loss_scale_growth_interval"):
        if f"training.{key}" in given and not half and not turned_off:
            why = 'read only when training.mixed_precision_param is "float16"; remove it'
            reject(f"training.{key}", why, "training.mixed_precision_param")
    if half and training.dtype == "bfloat16":
        reject(
            "training.mixed_precision_param",
            'gradients in float16 need weights in float32, and training.dtype is "bfloat16"; set "bfloat16" or "auto"',
            "training.dtype",
        )
    if optimizer.stochastic_rounding and training.dtype != "bfloat16":
        why = f'weights are kept in {training.dtype}; set false, or training.dtype = "bfloat16"'
        reject("optimizer.stochastic_rounding", why, "training.dtype")
    if optimizer.state_dtype != "auto" and training.dtype == "float64":
        reject("optimizer.state_dtype", 'training.dtype = "float64" is for proofs; set "auto"', "training.dtype")
    if (optimizer.state_dtype != "auto" or optimizer.stochastic_rounding) and "optimizer.implementation" in given:
        reject(
            "optimizer.implementation",
            "torchao takes the step where moments have a type of their own or rounding is stochastic; remove it",
            *("optimizer.state_dtype", "optimizer.stochastic_rounding"),
        )
    if not float8.enable:
        return
    if float8.enable_fsdp_float8_all_gather and float8.recipe != "tensorwise":
        reject(
            "float8.enable_fsdp_float8_all_gather",
            f"{show(float8.recipe)} has a scale a row, which FSDP cannot gather; set false, or float8.recipe = "
            '"tensorwise"',
            "float8.recipe",
        )
    if float8.precompute_float8_dynamic_scale_for_fsdp and not float8.enable_fsdp_float8_all_gather:
        reject(
            "float8.precompute_float8_dynamic_scale_for_fsdp",
            "the scales are for weights gathered in float8; set float8.enable_fsdp_float8_all_gather = true, or this "
            "to false",
            "float8.enable_fsdp_float8_all_gather",
        )


def _model_rules(model: Model, reject: Rejections) -> None:
    if model.dim % model.n_heads:
        reject(
            "model.n_heads",
            f"expected a divisor of model.dim = {model.dim}; each head takes dim / n_heads of it",
            *("model.dim", "model.flavor"),
        )
    elif model.dim // model.n_heads % 2:
        reject(
            "model.n_heads",
            f"expected an even head size, got {model.dim} / {model.n_heads} = {model.dim // model.n_heads}; rotary "
            "embedding turns pairs",
            *("model.dim", "model.flavor"),
        )
    if model.n_heads % model.n_kv_heads:
        reject(
            "model.n_kv_heads",
            f"expected a divisor of model.n_heads = {model.n_heads}; each key head serves a group of query heads",
            *("model.n_heads", "model.flavor"),
        )
    if model.rope_scaling_factor > 1 and model.rope_low_freq_factor >= model.rope_high_freq_factor:
        reject(
            "model.rope_low_freq_factor",
            f"expected a number below model.rope_high_freq_factor = {model.rope_high_freq_factor}",
            *("model.rope_high_freq_factor", "model.rope_scaling_factor", "model.flavor"),
        )


FILES = ("text", "json", "parquet")  # datasets that are files at a path


def _data_rules(training: Training, validation: Validation, given: set[str], reject: Rejections) -> None:
    dataset = training.dataset

    def only_for(key: str, *users: str) -> None:
        if key in given and dataset not in users:
            names = " or ".join(show(name) for name in users)
            reject(key, f"read only when training.dataset is {names}; remove it", "training.dataset")

    if dataset in (*FILES, "hub") and not training.dataset_path:
        what = "a name on the Hugging Face hub, as in allenai/c4" if dataset == "hub" else "a file, folder or glob"
        reject("training.dataset_path", f"training.dataset = {show(dataset)} needs {what}", "training.dataset")
    only_for("training.dataset_path", *FILES, "hub")
    only_for("training.dataset_config", "hub")
    only_for("training.dataset_split", "hub")
    only_for("training.dataset_text_key", "json", "parquet", "hub")
    only_for("training.text_sample_by", "text")
    only_for("validation.dataset_path", *FILES)
    only_for("validation.dataset_split", "hub")

    own_split = bool(validation.dataset_path or validation.dataset_split or dataset == "c4")
    split_keys = ("training.dataset", "validation.dataset_path", "validation.dataset_split")
    if training.streaming:
        if dataset == "pydoc_topics":
            reject("training.streaming", "the built-in text is in memory; set false", "training.dataset")
        if training.shuffle:
            reject(
                "training.shuffle",
                "a stream cannot be drawn in a random order that survives a stop and a resume exactly; set false "
                "(documents come in their files' order), or training.streaming = false",
                "training.streaming",
            )
        if "validation.fraction" in given:
            reject("validation.fraction", "a stream has no documents to hold out; remove it", "training.streaming")
        if validation.enable and not own_split:
            reject(
                "validation.enable",
                "a stream has no documents to hold out; set validation.dataset_path (files) or "
                "validation.dataset_split (hub), or training.streaming = false",
                "training.streaming",
                *split_keys,
            )
    else:
        if "training.streaming_shards" in given:
            reject(
                "training.streaming_shards",
                "read only when training.streaming is true; remove it",
                "training.streaming",
            )
        if own_split and "validation.fraction" in given:
            reject("validation.fraction", "the dataset has a validation split of its own; remove it", *split_keys)
        if validation.enable and not own_split and not validation.fraction:
            keys = ("validation.enable", "training.streaming", *split_keys)
            reject("validation.fraction", "validation.enable needs documents: set it above 0", *keys)


def _step_rules(training: Training, lr_scheduler: LRScheduler, reject: Rejections) -> None:
    if training.global_batch_size != -1 and training.global_batch_size % training.local_batch_size:
        reject(
            "training.global_batch_size",
            f"expected a multiple of training.local_batch_size = {training.local_batch_size}",
            "training.local_batch_size",
        )
    for key in ("mixed_precision_param", "mixed_precision_reduce"):
        if training.dtype == "float64" and getattr(training, key) not in ("auto", "float64"):
            reject(
                f"training.{key}",
                'training.dtype = "float64" computes and reduces in float64; set "auto"',
                "training.dtype",
            )
    if lr_scheduler.total_steps != -1 and lr_scheduler.total_steps < training.steps:
        reject(
            "lr_scheduler.total_steps",
            f"expected at least training.steps = {training.steps}; the schedule has no value after its horizon",
            "training.steps",
        )


def _shard_rules(config: Config, reject: Rejections) -> None:
    parallelism = config.parallelism
    cutting = [
        key
        for key in ("parallelism.tensor_parallel_degree", "parallelism.pipeline_parallel_degree")
        if getattr(parallelism, key.removeprefix("parallelism.")) > 1
    ]
    if isinstance(parallelism.fsdp_reshard_after_forward, int) and cutting:
        reject(
            "parallelism.fsdp_reshard_after_forward",
            f"torch makes these groups as if all ranks shared one model, and hangs under {' and '.join(cutting)}; set "
            '"always" or "never"',
            *cutting,
        )


def _tensor_rules(config: Config, reject: Rejections) -> None:
    parallelism, model = config.parallelism, config.model
    degree, key = parallelism.tensor_parallel_degree, "parallelism.tensor_parallel_degree"
    if degree == 1:
        for name in ("disable_loss_parallel", "enable_async_tensor_parallel"):
            if getattr(parallelism, name) and "tensor_parallel_degree" not in parallelism.model_fields_set:
                reject(f"parallelism.{name}", f"read only when {key} is above 1; set that, or remove it", key)
        return
    compiled = config.compile
    overlaps = compiled.enable and compiled.backend == "inductor" and "model" in compiled.components
    if parallelism.enable_async_tensor_parallel and not overlaps:
        reject(
            "parallelism.enable_async_tensor_parallel",
            'the overlap is made by torch.compile; set compile.enable = true, with "model" in compile.components and '
            'compile.backend = "inductor", or this to false',
            *("compile.enable", "compile.backend", "compile.components", key),
        )
    for name in ("n_heads", "n_kv_heads", "ffn_dim", "vocab_size"):
        if getattr(model, name) % degree:
            reject(
                key,
                f"expected a divisor of model.{name} = {getattr(model, name)}, which the ranks share",
                *(f"model.{name}", "model.flavor"),
            )


def _context_rules(config: Config, given: set[str], reject: Rejections) -> None:
    parallelism, model, training = config.parallelism, config.model, config.training
    degree, ulysses = parallelism.context_parallel_degree, parallelism.context_parallel_ulysses_degree
    tensor = parallelism.tensor_parallel_degree
    key, inner_key = "parallelism.context_parallel_degree", "parallelism.context_parallel_ulysses_degree"
    turned_off = degree == 1 and "context_parallel_degree" in parallelism.model_fields_set
    divides = degree % ulysses == 0
    if not divides and not turned_off:
        reject(inner_key, f"expected a divisor of {key} = {degree}, of which it is the inner part", key)
    for name, what in (("n_heads", "query heads"), ("n_kv_heads", "key heads")):
        heads = getattr(model, name) // tensor
        if divides and heads % ulysses and getattr(model, name) % tensor == 0:
            share = f", shared by tensor parallel {tensor}" if tensor > 1 else ""
            reject(
                inner_key,
                f"expected a divisor of the {heads} {what} of a rank (model.{name} = {getattr(model, name)}{share}); "
                "the other ranks can be in the ring",
                *(f"model.{name}", "model.flavor", key, "parallelism.tensor_parallel_degree"),
            )
    # A ring cuts the sequence into two chunks a rank; tensor parallelism cuts what each rank has once more.
    is_ring = divides and degree > ulysses
    pieces = math.lcm(2 * degree if is_ring else degree, degree * tensor)
    if training.seq_len % pieces:
        reject(
            "training.seq_len",
            f"expected a multiple of {pieces}, to be cut evenly over context parallel {degree} x tensor parallel "
            f"{tensor}" + (" (a ring needs two chunks a rank)" if is_ring else ""),
            *(key, inner_key, "parallelism.tensor_parallel_degree"),
        )


PIPELINE_KEYS = (
    "pipeline_parallel_schedule",
    "pipeline_parallel_microbatch_size",
    "pipeline_parallel_stages_per_rank",
    "pipeline_parallel_balance",
    "pipeline_parallel_first_stage_less_layers",
    "pipeline_parallel_last_stage_less_layers",
    "module_fqns_per_model_part",
)


def _pipeline_rules(config: Config, given: set[str], reject: Rejections) -> None:
    parallelism, model, training = config.parallelism, config.model, config.training
    degree, n_stages = parallelism.pipeline_parallel_degree, parallelism.n_stages
    schedule = parallelism.pipeline_parallel_schedule
    key, schedule_key = "parallelism.pipeline_parallel_degree", "parallelism.pipeline_parallel_schedule"
    if degree == 1:
        for name in PIPELINE_KEYS:
            if f"parallelism.{name}" in given and "pipeline_parallel_degree" not in parallelism.model_fields_set:
                reject(f"parallelism.{name}", f"read only when {key} is above 1; set that, or remove it", key)
        return
    if model.tie_embeddings:
        reject("model.tie_embeddings", "a pipeline has the embedding and the output head on two stages; set false", key)

    if schedule in SPLIT_BACKWARD and parallelism.fsdp_reshard_after_forward == "always":
        reject(
            "parallelism.fsdp_reshard_after_forward",
            f"{show(schedule)} computes gradients of inputs and of weights apart and needs the weights gathered in "
            'between; set "never" or "default"',
            schedule_key,
        )
    if schedule in SPLIT_BACKWARD and config.compile.enable:
        reject(
            "compile.enable",
            f"{show(schedule)} computes gradients of inputs and of weights apart, and a compiled block would compute "
            'all of them both times; set false, or the schedule to "Interleaved1F1B"',
            schedule_key,
        )
    recomputation = config.activation_checkpoint
    if schedule in SPLIT_BACKWARD and (recomputation.mode, recomputation.selective_ac_option) == ("selective", "op"):
        reject(
            "activation_checkpoint.selective_ac_option",
            f"{show(schedule)} computes gradients of inputs and of weights apart and would need what was recomputed "
            'twice; set a number, or mode = "full"',
            *("activation_checkpoint.mode", schedule_key),
        )
    if parallelism.fsdp_reduce_gradients == "last_accumulation_step":
        reject(
            "parallelism.fsdp_reduce_gradients",
            "a pipeline reduces gradients once a microstep, after its last microbatch; set "
            '"every_accumulation_step", and a larger local_batch_size for fewer microsteps',
            key,
        )
    per_rank_key = "parallelism.pipeline_parallel_stages_per_rank"
    per_rank = parallelism.pipeline_parallel_stages_per_rank
    right = per_rank == 1 if schedule in ONE_STAGE else per_rank == 2 if schedule in V_SHAPED else per_rank > 1
    if per_rank != -1 and not right:
        expected = "1" if schedule in ONE_STAGE else "2" if schedule in V_SHAPED else "at least 2"
        reject(per_rank_key, f"expected {expected} under {show(schedule)}, or -1", schedule_key)
        return
    _stage_rules(config, given, reject)

    size_key, size = "parallelism.pipeline_parallel_microbatch_size", parallelism.pipeline_parallel_microbatch_size
    if training.local_batch_size % size:
        why = f"expected a divisor of training.local_batch_size = {training.local_batch_size}"
        reject(size_key, why, "training.local_batch_size")
        return
    microbatches = training.local_batch_size // size
    what = f"{microbatches} (local_batch_size {training.local_batch_size} / microbatch size {size})"
    others = (size_key, schedule_key, key, per_rank_key)
    if schedule in ("1F1B", "DualPipeV") and microbatches < n_stages:
        reject(
            "training.local_batch_size",
            f"{show(schedule)} needs at least as many microbatches as its {n_stages} stages, and there are {what}; set "
            f"it to at least {n_stages * size}, or make the microbatches smaller",
            *others,
        )
    rounds = max(1, microbatches // degree)
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and microbatches % rounds:
        reject(
            "training.local_batch_size",
            f"{show(schedule)} takes its microbatches in {rounds} equal rounds, and there are {what}; set it to a "
            f"multiple of {degree * size}",
            *others,
        )


def _stage_rules(config: Config, given: set[str], reject: Rejections) -> None:
    parallelism, model = config.parallelism, config.model
    n_stages, key = parallelism.n_stages, "parallelism.pipeline_parallel_degree"
    keys = (key, "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_stages_per_rank")
    parts = parallelism.module_fqns_per_model_part
    if not parts:
        if model.n_layers < n_stages:
            why = f"{n_stages} stages need at least as many layers, and model.n_layers = {model.n_layers}"
            reject(key, why, "model.n_layers", "model.flavor", "parallelism.module_fqns_per_model_part", *keys[1:])
        if parallelism.pipeline_parallel_balance == "parameters":
            for name in PIPELINE_KEYS[4:6]:
                if f"parallelism.{name}" in given:
                    reject(
                        f"parallelism.{name}",
                        'read only when parallelism.pipeline_parallel_balance is "layers"; remove it',
                        *("parallelism.pipeline_parallel_balance", "parallelism.module_fqns_per_model_part"),
                    )
        return
    for name in PIPELINE_KEYS[3:6]:
        if f"parallelism.{name}" in given:
            why = "parallelism.module_fqns_per_model_part names the stages' modules; remove one of the two"
            reject(f"parallelism.{name}", why, "parallelism.module_fqns_per_model_part")
    names = [name for part in parts for name in part]
    if len(parts) != n_stages:
        problem = f"expected {n_stages} lists, one a stage, got {len(parts)}"
    elif names != module_names(model.n_layers):
        pairs = itertools.zip_longest(names, module_names(model.n_layers))
        found, right = next(pair for pair in pairs if pair[0] != pair[1])
        problem = (
            "expected tok_embeddings, every layers.N in order, norm, output; got "
            f"{'nothing' if found is None else show(found)} where {'nothing' if right is None else show(right)} belongs"
        )
    elif not all(any(name.startswith("layers.") for name in part) for part in parts):
        problem = "expected at least one layer in each stage"
    else:
        return
    reject("parallelism.module_fqns_per_model_part", problem, "model.n_layers", "model.flavor", *keys)
