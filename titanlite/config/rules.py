"""Rules between options; rules_*.py have more rules. A rule calls `reject(key, message, *reads)` with the key of the
wrong value and the other keys that the rule reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

from titanlite.config import keys
from titanlite.config.loader import Rejections, options_of, show, value_of
from titanlite.config.rules_data import data_rules, dataset_rules
from titanlite.config.rules_families import family_rules
from titanlite.config.rules_model import expert_rules, model_rules, size_rules
from titanlite.config.rules_parallelism import context_rules, pipeline_rules, shard_rules, split_backward_rules
from titanlite.config.schema import Config, Precision

STATES, ROUNDING = "optimizer.state_dtype", "optimizer.stochastic_rounding"
OFFLOAD, OFFLOAD_ALL = "optimizer.enable_cpu_offload", "training.enable_cpu_offload"
QK_CLIP, GATHER = "optimizer.qk_clip_threshold", "float8.enable_fsdp_float8_all_gather"
PRECOMPUTED, EMA = "float8.precompute_float8_dynamic_scale_for_fsdp", "ema.decay"
MAX_GROUPS = 1024
MOST_INT8_TOKENS = (2**31 - 1) // 127**2
"""Largest number of products of two 8-bit integers whose sum cannot overflow in 32 bits."""


class Dependent(NamedTuple):
    """Options that a run reads only with some values of another option, the switch."""

    keys: Sequence[str]
    switch: str
    on: tuple[Any, ...] = ()
    """Values of the switch with which a run reads the options; empty: all numbers above the values in `off`."""
    off: tuple[Any, ...] = ()
    """Values of the switch that turn the options off; a file that sets such a value may still contain the options."""

    def reads(self, value: Any) -> bool:
        return value in self.on if self.on else value > max(self.off)


def _keys(beginning: str, *others: str) -> list[str]:
    """Return the keys of all options that start with `beginning`, except the keys `beginning` + one of `others`."""
    return [key for key in options_of(Config) if key.startswith(beginning) and key[len(beginning) :] not in others]


LOSS_SCALE = ["training.initial_loss_scale", "training.loss_scale_growth_interval"]
OF_GROUPS = _keys("fault_tolerance.", "enable")
OF_EXPERTS = [*_keys("model.moe.", "n_experts", "balance_bias_rate", "swiglu_alpha"), keys.EXPERT]
OF_PIPELINE = [keys.SCHEDULE, keys.MICROBATCH, keys.STAGES_PER_RANK, keys.BALANCE, *keys.END_LAYERS, keys.STAGE_MODULES]
OF_CHECKPOINTS = _keys("checkpoint.", "enable", "initial_load_path", "export_dtype")
DEPENDENT_OPTIONS = [
    Dependent([keys.PROMPTS, "ema.validation"], "validation.enable", on=(True,), off=(False,)),
    Dependent(["training.streaming_shards", keys.SHUFFLE_BLOCK], keys.STREAMING, on=(True,)),
    Dependent(LOSS_SCALE, keys.PARAM, on=("float16",), off=get_args(Precision)),
    Dependent(["training.outlier_window"], "training.skip_outlier_sigma", off=(0,)),
    Dependent(["activation_checkpoint.selective_ac_option"], keys.AC_MODE, on=("selective",), off=("none",)),
    Dependent(["activation_checkpoint.layers_per_checkpoint"], keys.AC_MODE, on=("none", "full")),
    Dependent(OF_CHECKPOINTS, "checkpoint.enable", on=(True,), off=(False,)),
    Dependent(["checkpoint.export_dtype"], "checkpoint.last_save_in_hf", on=(True,), off=(False,)),
    Dependent(["compile.backend", "compile.components"], "compile.enable", on=(True,), off=(False,)),
    Dependent(_keys("float8.", "enable"), "float8.enable", on=(True,), off=(False,)),
    Dependent(OF_GROUPS, keys.GROUPS_ON, on=(True,), off=(False,)),
    Dependent([*_keys("optimizer.muon_"), QK_CLIP], keys.OPTIMIZER, on=("Muon",)),
    Dependent(_keys("ema.", "decay"), EMA, off=(0,)),
    Dependent(_keys("lora.", "rank"), "lora.rank", off=(0,)),
    Dependent(["int8.filter_fqns"], "int8.enable", on=(True,), off=(False,)),
    Dependent(["model.moe.balance_bias_rate"], "model.moe.balance_bias", on=(True,), off=(False,)),
    Dependent(["model.moe.swiglu_alpha"], "model.moe.swiglu_limit", off=(0,)),
    Dependent(OF_EXPERTS, keys.EXPERTS, off=(0,)),
    Dependent(["plan.expert_imbalance"], keys.EXPERT, off=(1,)),
    Dependent(_keys("model.mla.", "kv_lora_rank"), keys.LATENT, off=(0,)),
    Dependent(["parallelism.disable_loss_parallel", keys.ASYNC_TENSOR], keys.TENSOR, off=(1,)),
    Dependent(OF_PIPELINE, keys.PIPELINE, off=(1,)),
]
EPOCHS, RATIO = "training.epochs", "lr_scheduler.warmup_ratio"
GROUPS, ALONE = keys.GROUPS_ON, f"or {keys.GROUPS_ON} = false"
EXCLUSIVE: list[tuple[str, Any, str, str]] = [
    ("model.attention_bias", "none", keys.LATENT, 'latent attention has no biases; set "none"'),
    ("model.qk_norm", False, keys.LATENT, "latent attention has norms of its latents; set false"),
    ("model.attention_sinks", False, keys.LATENT, "latent attention has no sinks; set false"),
    ("model.norm", "rms", keys.LATENT, 'latents have RMSNorm; set "rms"'),
    ("model.attention_scale", -1, keys.LATENT, "latent attention has model.mla.mscale_all_dim instead; remove it"),
    ("model.mlp_bias", False, keys.EXPERTS, "experts have model.moe.expert_bias instead; set false"),
    (keys.STREAMING, False, EPOCHS, f"the length of an epoch is not known before it ends; set false, or {EPOCHS} = 0"),
    ("training.steps", 10_000, EPOCHS, f"{EPOCHS} sets the steps; remove one of the two"),
    ("lr_scheduler.warmup_steps", 200, RATIO, f"{RATIO} sets the steps of the warmup; remove one of the two"),
    ("lr_scheduler.total_steps", -1, EPOCHS, f"the schedule has the length of {EPOCHS}; remove it, or set steps"),
    (keys.STREAMING, False, keys.MIXTURE, f"unsupported with {keys.MIXTURE}; set false"),
    (OFFLOAD, False, OFFLOAD_ALL, f"{OFFLOAD_ALL} keeps the states in host memory too; set one of the two"),
    ("int8.enable", False, "float8.enable", "float8.enable = true converts the same layers; set one of them false"),
    (keys.STREAMING, False, GROUPS, f"the position in a stream is lost with a group; set false, {ALONE}"),
    (keys.MIXTURE, [], GROUPS, f"the losses of datasets are of one group; use one dataset, {ALONE}"),
    (keys.EXPERTS, 0, GROUPS, f"the load of experts is balanced in one group; set 0, {ALONE}"),
    ("debug.sdc_check_freq", 0, GROUPS, f"a step is computed again in one group only; set 0, {ALONE}"),
    (QK_CLIP, 0, GROUPS, f"the largest logits are those of one group; set 0, {ALONE}"),
    ("debug.fingerprint_freq", 0, GROUPS, f"fingerprints are those of one group; set 0, {ALONE}"),
    (QK_CLIP, 0, "model.qk_norm", "norms of queries and keys bound the logits, and undo a factor on weights; set 0"),
    (EMA, 0, GROUPS, f"the average is that of one group; set 0, {ALONE}"),
    ("ema.validation", False, PRECOMPUTED, f"the scales are those of the weights; set false, or {PRECOMPUTED} = false"),
    (PRECOMPUTED, False, GROUPS, f"the scales of weights that another group sends are not known; set false, {ALONE}"),
    (EMA, 0, "lora.rank", "adapters have no average; set 0, or lora.rank = 0"),
    (GROUPS, False, "lora.rank", "a group that returns gets all weights from another; set false, or lora.rank = 0"),
    ("debug.fingerprint_freq", 0, "lora.rank", "fingerprints are those of full weights; set 0, or lora.rank = 0"),
    ("model.new_tokens", "none", "lora.rank", 'the embedding is frozen; set "none", or lora.rank = 0'),
    (GATHER, False, "lora.rank", "frozen weights are gathered in their own data type; set false, or lora.rank = 0"),
]
"""Rows: an option, the only value that it may have while a switch is on, the switch, and the error message."""


def between_options(config: Config, changed: set[str]) -> Rejections:
    """Return all problems between options. `changed` has the keys whose value is not the default."""
    reject = Rejections()
    of_sections = model_rules, family_rules, _dependent_options, dataset_rules, data_rules, _training_rules
    of_numbers = _optimizer_rules, _lora_rules, _low_precision_rules, _compile_rules, _fault_tolerance_rules
    of_layouts = size_rules, shard_rules, context_rules, expert_rules, split_backward_rules, pipeline_rules
    for rules in (*of_sections, *of_numbers, *of_layouts):
        rules(config, changed, reject)
    for rejection in reject:
        if any(key.startswith("model.") for key in rejection.reads):
            rejection.reads.add("model.flavor")  # model.flavor sets every dimension that the file does not set
    return reject


def _dependent_options(config: Config, changed: set[str], reject: Rejections) -> None:
    for dependent in DEPENDENT_OPTIONS:
        switch, value = dependent.switch, value_of(config, dependent.switch)
        section, _, name = switch.rpartition(".")
        turned_off = value in dependent.off and name in value_of(config, section).model_fields_set
        if dependent.reads(value) or turned_off:
            continue
        needed = " or ".join(map(show, dependent.on)) or f"above {max(dependent.off)}"
        for key in dependent.keys:
            if key in changed:
                reject(key, f"read only when {switch} is {needed}; set that, or remove it", switch)
    for key, only, switch, message in EXCLUSIVE:
        if value_of(config, switch) and value_of(config, key) != only:
            reject(key, message, switch)


def _training_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    training, total_steps = config.training, config.lr_scheduler.total_steps
    if training.global_batch_size != -1 and training.global_batch_size % training.local_batch_size:
        message = f"expected a multiple of {keys.BATCH} = {training.local_batch_size}"
        reject("training.global_batch_size", message, keys.BATCH)
    if -1 < total_steps < training.steps and not training.epochs:
        message = f"expected at least training.steps = {training.steps}; the schedule ends after total_steps"
        reject("lr_scheduler.total_steps", message, "training.steps")
    if config.ema.decay and config.ema.start_step > training.steps and not training.epochs:
        message = f"expected at most training.steps = {training.steps}, before which the average begins"
        reject("ema.start_step", message, "training.steps", EMA)
    for key in (keys.PARAM, "training.mixed_precision_reduce"):
        if training.dtype == "float64" and value_of(config, key) not in ("auto", "float64"):
            reject(key, f'{keys.DTYPE} = "float64" computes and reduces in float64; set "auto"', keys.DTYPE)
    if training.mixed_precision_param == "float16" and training.dtype == "bfloat16":
        message = f'float16 gradients need float32 weights, and {keys.DTYPE} is "bfloat16"; set "bfloat16" or "auto"'
        reject(keys.PARAM, message, keys.DTYPE)
    if config.checkpoint.last_save_in_hf and (training.dtype, config.checkpoint.export_dtype) == ("float64", "auto"):
        message = f'{keys.DTYPE} = "float64", and Hugging Face folders have at most 32 bits; set "float32"'
        reject("checkpoint.export_dtype", message, keys.DTYPE, "checkpoint.last_save_in_hf")
    if config.checkpoint.last_save_in_hf:
        from titanlite.config.hf.config_json import folder_rules  # imported here, since few runs export weights

        folder_rules(config.model, reject)


def _optimizer_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    training, optimizer = config.training, config.optimizer
    low_bit, offload = optimizer.state_dtype != "auto" or optimizer.stochastic_rounding, optimizer.enable_cpu_offload
    if optimizer.stochastic_rounding and training.dtype != "bfloat16":
        reject(ROUNDING, f'the weights are {training.dtype}; set false, or {keys.DTYPE} = "bfloat16"', keys.DTYPE)
    if optimizer.state_dtype != "auto" and training.dtype == "float64":
        reject(STATES, f'{keys.DTYPE} = "float64" is for parity tests; set "auto"', keys.DTYPE)
    if low_bit and keys.IMPLEMENTATION in changed:
        message = "torchao computes the step with state_dtype or stochastic_rounding; remove it"
        reject(keys.IMPLEMENTATION, message, STATES, ROUNDING)
    if optimizer.name == "Muon" and low_bit:
        message = 'low-bit steps are those of Adam; remove it, or set optimizer.name = "AdamW"'
        reject(ROUNDING if optimizer.stochastic_rounding else STATES, message, keys.OPTIMIZER)
    if offload and (low_bit or optimizer.name == "Muon"):
        message = "the CPU's step is that of Adam and AdamW in the weights' data type; set false, or remove the other"
        reject(OFFLOAD, message, keys.OPTIMIZER, STATES, ROUNDING)
    if offload and keys.IMPLEMENTATION in changed:
        reject(keys.IMPLEMENTATION, f"the step with {OFFLOAD} is fused; remove it", OFFLOAD)
    if optimizer.name == "Muon" and training.enable_cpu_offload:
        message = 'Muon multiplies matrices, on the device; set false, or optimizer.name = "AdamW"'
        reject(OFFLOAD_ALL, message, keys.OPTIMIZER)


def _lora_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    if config.lora.rank and not config.lora.targets:
        reject("lora.targets", 'expected names of linear layers, as ["wq", "wv"]', "lora.rank")
    if config.lora.rank and config.optimizer.name == "Muon":
        reject(keys.OPTIMIZER, 'an adapter is no matrix to orthogonalize; set "AdamW" or "Adam"', "lora.rank")
    if config.lora.rank and config.model.moe.balance_bias and config.model.moe.balance_bias_rate:
        reject("model.moe.balance_bias_rate", "LoRA freezes the routers; set 0", "lora.rank", "model.moe.balance_bias")


def _low_precision_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    float8, int8 = config.float8, config.int8
    if float8.enable and float8.enable_fsdp_float8_all_gather and float8.recipe != "tensorwise":
        part = "block" if float8.recipe == "mxfp8" else "row"
        message = f"{show(float8.recipe)} has a scale per {part}, which FSDP cannot gather; set false, or "
        reject(GATHER, message + 'float8.recipe = "tensorwise"', "float8.recipe")
    if float8.enable and float8.precompute_float8_dynamic_scale_for_fsdp and not float8.enable_fsdp_float8_all_gather:
        message = f"the scales are for weights gathered in float8; set {GATHER} = true, or this to false"
        reject(PRECOMPUTED, message, GATHER)
    wants_overlap = config.parallelism.enable_async_tensor_parallel and config.parallelism.tensor_parallel_degree > 1
    is_mxfp8 = float8.enable and float8.recipe == "mxfp8"
    if wants_overlap and (int8.enable or is_mxfp8):
        message = f"torch.compile overlaps no collective with {'INT8' if int8.enable else 'MXFP8'} products; set false"
        switch = "float8.enable" if float8.enable else "int8.enable"
        reject(keys.ASYNC_TENSOR, message, switch, "float8.recipe", keys.TENSOR)
    key = keys.MICROBATCH if config.parallelism.pipeline_parallel_degree > 1 else keys.BATCH
    if int8.enable and (tokens := config.tokens_of_forward) > MOST_INT8_TOKENS:
        message = f"the weight gradients of INT8 sum {tokens} tokens in 32 bits, which {MOST_INT8_TOKENS} cannot "
        reject(key, message + "overflow; set less", "int8.enable", "training.seq_len", keys.CONTEXT)


def _compile_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    options = config.compile
    if not options.components or set(options.components) - {"model", "loss"}:
        reject("compile.components", 'expected "model", "loss" or both; to compile nothing, set compile.enable = false')
    overlaps = options.enable and "model" in options.components and options.backend == "inductor"
    wants_overlap = config.parallelism.enable_async_tensor_parallel and config.parallelism.tensor_parallel_degree > 1
    if wants_overlap and not overlaps:
        message = 'torch.compile creates the overlap; set compile.enable = true, with "model" in compile.components'
        message += ' and compile.backend = "inductor", or this to false'
        reject(keys.ASYNC_TENSOR, message, "compile.enable", "compile.components", "compile.backend", keys.TENSOR)


def _fault_tolerance_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    section = config.fault_tolerance
    if not section.enable:
        return
    if not 2 <= section.group_size <= MAX_GROUPS:
        reject(keys.GROUP_SIZE, f"expected 2 to {MAX_GROUPS} replica groups", keys.GROUPS_ON)
    elif section.replica_id >= section.group_size:
        message = f"expected a number below {keys.GROUP_SIZE} = {section.group_size}"
        reject("fault_tolerance.replica_id", message, keys.GROUP_SIZE, keys.GROUPS_ON)
    elif section.min_replica_size > section.group_size:
        message = f"expected at most {keys.GROUP_SIZE} = {section.group_size}"
        reject("fault_tolerance.min_replica_size", message, keys.GROUP_SIZE, keys.GROUPS_ON)
