"""The rules between options. Those between a config and a launch are in launch.py, of old torch in torch_versions.py.

`reject(key, message, *reads)` takes the key of the wrong value and the other keys that the rule reads.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable
from typing import Any, get_args

from titanlite.config.loader import Rejections, show, value_of
from titanlite.config.schema import (
    DATASET_OPTIONS,
    FILES,
    FORMAT_OPTIONS,
    Config,
    FaultTolerance,
    Float8,
    Mla,
    Moe,
    Optimizer,
    Precision,
    count_parameters,
)
from titanlite.config.stage_split import ONE_STAGE, SPLIT_BACKWARD, V_SHAPED, module_names
from titanlite.config.types import MOST_TOKENS

EXPERTS, EXPERT = "model.moe.n_experts", "parallelism.expert_parallel_degree"
LATENT = "model.mla.kv_lora_rank"
TENSOR, PIPELINE = "parallelism.tensor_parallel_degree", "parallelism.pipeline_parallel_degree"
REPLICATE = "parallelism.data_parallel_replicate_degree"
CONTEXT, ULYSSES = "parallelism.context_parallel_degree", "parallelism.context_parallel_ulysses_degree"
SCHEDULE, MICROBATCH = "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_microbatch_size"
STAGES_PER_RANK, BALANCE = "parallelism.pipeline_parallel_stages_per_rank", "parallelism.pipeline_parallel_balance"
END_LAYERS = tuple(f"parallelism.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
STAGE_MODULES, RESHARD = "parallelism.module_fqns_per_model_part", "parallelism.fsdp_reshard_after_forward"
ASYNC_TENSOR, BATCH = "parallelism.enable_async_tensor_parallel", "training.local_batch_size"
DATASET, STREAMING, FRACTION = "training.dataset", "training.streaming", "validation.fraction"
PACKING, OPTIMIZER = "training.packing", "optimizer.name"
MIXTURE, GROUPS_ON, SEMI_SYNC = "training.datasets", "fault_tolerance.enable", "fault_tolerance.semi_sync_method"
DTYPE, PARAM, AC_MODE = "training.dtype", "training.mixed_precision_param", "activation_checkpoint.mode"

READ_OTHERWISE = ("n_experts", "balance_bias_rate")
PROMPTS, OUTLIER_SIGMA = "validation.generate_prompts", "training.skip_outlier_sigma"

MOST_ACTIONS, FLOAT64_BYTES = 2**16, 8
"""Most forwards of microbatches in all stages of a pipeline: torch's schedules, and a plan, list each of them."""
ABOVE_0, ABOVE_1 = range(1, sys.maxsize), range(2, sys.maxsize)

# Options, the option that decides whether a run reads them, and the values with which it does. The last column has the
# values that, written out, turn the options off: then they may stay in the file.
DEPENDENT_OPTIONS: list[tuple[Iterable[str], str, Any, tuple[Any, ...]]] = [
    ([PROMPTS], "validation.enable", (True,), (False,)),
    (["training.streaming_shards", "training.streaming_shuffle_block"], STREAMING, (True,), ()),
    (["training.initial_loss_scale", "training.loss_scale_growth_interval"], PARAM, ("float16",), get_args(Precision)),
    (["activation_checkpoint.selective_ac_option"], AC_MODE, ("selective",), ("none",)),
    (["activation_checkpoint.memory_budget"], AC_MODE, ("memory_budget",), ("none",)),
    (["checkpoint.last_save_in_hf"], "checkpoint.enable", (True,), (False,)),
    (["checkpoint.export_dtype"], "checkpoint.last_save_in_hf", (True,), (False,)),
    (["compile.backend", "compile.components"], "compile.enable", (True,), (False,)),
    ([f"float8.{key}" for key in Float8.model_fields if key != "enable"], "float8.enable", (True,), (False,)),
    (
        [f"fault_tolerance.{key}" for key in FaultTolerance.model_fields if key != "enable"],
        GROUPS_ON,
        (True,),
        (False,),
    ),
    (
        [f"fault_tolerance.{key}" for key in ("sync_steps", "outer_lr", "outer_momentum")],
        SEMI_SYNC,
        ("diloco",),
        ("none",),
    ),
    ([f"optimizer.{key}" for key in Optimizer.model_fields if key.startswith("muon_")], OPTIMIZER, ("Muon",), ()),
    (["int8.filter_fqns"], "int8.enable", (True,), (False,)),
    (["model.moe.balance_bias_rate"], "model.moe.balance_bias", (True,), (False,)),
    ([f"model.moe.{key}" for key in Moe.model_fields if key not in READ_OTHERWISE], EXPERTS, ABOVE_0, (0,)),
    ([EXPERT], EXPERTS, ABOVE_0, (0,)),
    (["parallelism.expert_parallel_row_bound"], EXPERT, ABOVE_1, (1,)),
    (["plan.expert_imbalance"], EXPERT, ABOVE_1, (1,)),
    ([f"model.mla.{key}" for key in Mla.model_fields if key != "kv_lora_rank"], LATENT, ABOVE_0, (0,)),
    (["parallelism.disable_loss_parallel", ASYNC_TENSOR], TENSOR, ABOVE_1, (1,)),
    ([SCHEDULE, MICROBATCH, STAGES_PER_RANK, BALANCE, *END_LAYERS, STAGE_MODULES], PIPELINE, ABOVE_1, (1,)),
]


def between_options(config: Config, changed: set[str]) -> Rejections:
    """Return the problems between options. `changed` has the keys whose value is not the default."""
    reject = Rejections()
    groups = [
        _model_rules,
        _dependent_options,
        _dataset_rules,
        _data_rules,
        _step_rules,
        _precision_rules,
        _compile_rules,
        _size_rules,
    ]
    groups += [_shard_rules, _context_rules, _expert_rules, _split_backward_rules, _pipeline_rules]
    for rules in groups:
        rules(config, changed, reject)
    for _, _, reads in reject:
        if any(key.startswith("model.") for key in reads):
            reads.add("model.flavor")  # it sets every dimension that is not set otherwise
    return reject


def _dependent_options(config: Config, changed: set[str], reject: Rejections) -> None:
    for options, switch, values, off_values in DEPENDENT_OPTIONS:
        section, _, name = switch.rpartition(".")
        value = value_of(config, switch)
        turned_off = value in off_values and name in value_of(config, section).model_fields_set
        needed = " or ".join(map(show, values)) if isinstance(values, tuple) else f"above {values.start - 1}"
        for key in options:
            if key in changed and value not in values and not turned_off:
                reject(key, f"read only when {switch} is {needed}; set that, or remove it", switch)


def _model_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    model = config.model
    if model.mla.kv_lora_rank:
        from titanlite.config.mla_rules import latent_attention_rules  # here, since few models need them

        latent_attention_rules(config, reject)
    elif model.head_dim == -1:  # of a model that can be loaded, it is a number
        message = f"expected a divisor of model.dim = {model.dim}; the quotient is head_dim, unless that is set"
        reject("model.n_heads", message, "model.dim", "model.head_dim")
    elif model.head_dim % 2 and model.head_dim * model.n_heads == model.dim and "model.head_dim" not in changed:
        head_dim = f"{model.dim} / {model.n_heads} = {model.head_dim}"
        message = f"expected an even head_dim, got {head_dim}; rotary embedding acts on pairs of channels"
        reject("model.n_heads", message, "model.dim", "model.head_dim")
    elif model.head_dim % 2:
        reject("model.head_dim", "expected an even number; rotary embedding acts on pairs of channels")
    if model.n_heads % model.n_kv_heads and not model.mla.kv_lora_rank:
        message = f"expected a divisor of model.n_heads = {model.n_heads}; each KV head serves a group of query heads"
        reject("model.n_kv_heads", message, "model.n_heads")
    scaling = model.rope_scaling_type if model.rope_scaling_factor > 1 else ""
    reads = ("model.rope_scaling_factor", "model.rope_scaling_type")
    if scaling == "llama3" and model.rope_low_freq_factor >= model.rope_high_freq_factor:
        message = f"expected a number below model.rope_high_freq_factor = {model.rope_high_freq_factor}"
        reject("model.rope_low_freq_factor", message, "model.rope_high_freq_factor", *reads)
    if scaling == "yarn" and model.rope_beta_slow >= model.rope_beta_fast:
        message = f"expected a number below model.rope_beta_fast = {model.rope_beta_fast}"
        reject("model.rope_beta_slow", message, "model.rope_beta_fast", *reads)
    if scaling == "yarn" and model.rope_theta <= 1:
        reject("model.rope_theta", "expected a number above 1; YaRN takes its logarithm", *reads)


def _dataset_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    """Reject options of datasets, of one or of each in a mixture, that miss or contradict others."""
    training, conversations = config.training, list[str]()
    datasets = {f"{MIXTURE}.{number}": dataset for number, dataset in enumerate(training.datasets)}
    for section, options in (datasets or {"training": training}).items():
        switch, kind, row = f"{section}.dataset", options.dataset, f"{section}.dataset_format"
        if kind in (*FILES, "hub") and not options.dataset_path:
            path = "a name on the Hugging Face hub, as in allenai/c4" if kind == "hub" else "a file, folder or glob"
            reject(f"{section}.dataset_path", f"{switch} = {show(kind)} needs {path}", MIXTURE)
        for readers, key, value in ((DATASET_OPTIONS, switch, kind), (FORMAT_OPTIONS, row, options.dataset_format)):
            for name, values in readers.items():
                is_set = getattr(options, name) != type(options).model_fields[name].default
                if is_set and value not in values:
                    message = f"read only when {key} is {' or '.join(map(show, values))}; set that, or remove it"
                    reject(f"{section}.{name}", message, key, MIXTURE)
        if options.dataset_format != "text" and kind in DATASET_OPTIONS["dataset_format"]:
            conversations.append(row)
    if conversations:
        _conversation_rules(config, conversations[0], reject)
    first = training.datasets[0] if training.datasets else training
    switch = f"{MIXTURE}.0.dataset" if training.datasets else DATASET
    for key, kinds in (("validation.dataset_path", FILES), ("validation.dataset_split", ("hub",))):
        if key in changed and first.dataset not in kinds:
            message = f"read only when {switch} is {' or '.join(map(show, kinds))}; set that, or remove it"
            reject(key, message, switch, MIXTURE)
    if training.datasets:
        from titanlite.config.mixture_rules import mixture_rules  # here, since most runs have one dataset

        mixture_rules(training, changed, reject)
    elif training.change_mixture_on_resume:
        reject("training.change_mixture_on_resume", f"read only with {MIXTURE}; set that, or remove it", MIXTURE)


def _conversation_rules(config: Config, key: str, reject: Rejections) -> None:
    """Reject options with which conversations cannot be trained on. `key` is the option that says that there are."""
    reason = f"conversations ({key} = {show(value_of(config, key))})"
    if config.training.packing != "best_fit":
        reject(PACKING, f'{reason} are not continued in another sequence; set "best_fit"', key)
    if not config.training.document_mask:
        reject("training.document_mask", f"{reason} must not attend to one another; set true", key)
    if not config.model.hf_assets_path:
        reject("model.hf_assets_path", f"{reason} need a tokenizer with a chat template; set its folder", key)


def _data_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    dataset, validation = config.training.dataset, config.validation
    streaming = config.training.streaming and not config.training.datasets
    own_split = all(each.dataset == "c4" for each in config.training.datasets or [config.training])
    if streaming and dataset == "pydoc_topics":
        reject(STREAMING, "the built-in text is in memory; set false", DATASET)
    if streaming and "training.streaming_shuffle_block" in changed and not config.training.shuffle:
        reject("training.streaming_shuffle_block", "read only with training.shuffle = true", "training.shuffle")
    if streaming and config.training.packing == "best_fit":
        message = "best-fit packing needs the lengths of all documents, and so the token cache; set false"
        reject(STREAMING, message, PACKING)
    has_split = bool(validation.dataset_path or validation.dataset_split or own_split)
    split_keys = (DATASET, MIXTURE, "validation.dataset_path", "validation.dataset_split")
    if streaming and FRACTION in changed:
        reject(FRACTION, "streaming cannot split off validation documents; remove it", STREAMING)
    elif has_split and FRACTION in changed:
        reject(FRACTION, "the dataset has a validation split of its own; remove it", *split_keys)
    if streaming and validation.enable and not has_split:
        message = "streaming cannot split off validation documents; set validation.dataset_path (files) or "
        message += "validation.dataset_split (hub), or training.streaming = false"
        reject("validation.enable", message, STREAMING, *split_keys)
    elif validation.enable and not has_split and not validation.fraction:
        message = "validation.enable needs documents; set a fraction above 0"
        reject(FRACTION, message, "validation.enable", STREAMING, *split_keys)
    for key in (PIPELINE, CONTEXT) if validation.generate_prompts else ():
        if value_of(config, key) > 1:
            message = f"a rank needs full sequences and all layers, and {key} = {value_of(config, key)}; set []"
            reject(PROMPTS, message, key)
    if "validation.generate_tokens" in changed and not validation.generate_prompts:
        reject("validation.generate_tokens", f"read only with {PROMPTS}; set that, or remove it", PROMPTS)


def _step_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    training, total_steps = config.training, config.lr_scheduler.total_steps
    if training.global_batch_size != -1 and training.global_batch_size % training.local_batch_size:
        reject("training.global_batch_size", f"expected a multiple of {BATCH} = {training.local_batch_size}", BATCH)
    if total_steps != -1 and total_steps < training.steps:
        message = f"expected at least training.steps = {training.steps}; the schedule ends after total_steps"
        reject("lr_scheduler.total_steps", message, "training.steps")
    if "training.outlier_window" in changed and not training.skip_outlier_sigma:
        message = f"read only when {OUTLIER_SIGMA} is above 0; set that, or remove it"
        reject("training.outlier_window", message, OUTLIER_SIGMA)
    if config.fault_tolerance.enable:
        from titanlite.config.fault_tolerance_rules import fault_tolerance_rules  # here, since few runs need them

        fault_tolerance_rules(config, reject)


def _precision_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    training, optimizer = config.training, config.optimizer
    for key in (PARAM, "training.mixed_precision_reduce"):
        if training.dtype == "float64" and value_of(config, key) not in ("auto", "float64"):
            reject(key, f'{DTYPE} = "float64" computes and reduces in float64; set "auto"', DTYPE)
    if training.mixed_precision_param == "float16" and training.dtype == "bfloat16":
        message = f'float16 gradients need float32 weights, and {DTYPE} is "bfloat16"; set "bfloat16" or "auto"'
        reject(PARAM, message, DTYPE)
    special = optimizer.name == "Muon", optimizer.state_dtype != "auto", optimizer.stochastic_rounding
    if any(special) or optimizer.enable_cpu_offload:
        from titanlite.config.optimizer_rules import optimizer_rules  # here, since few runs need them

        optimizer_rules(config, changed, reject)
    if config.checkpoint.last_save_in_hf and (training.dtype, config.checkpoint.export_dtype) == ("float64", "auto"):
        message = f'{DTYPE} = "float64", and Hugging Face folders have at most 32 bits; set "float32"'
        reject("checkpoint.export_dtype", message, DTYPE, "checkpoint.last_save_in_hf")
    if config.checkpoint.last_save_in_hf:
        from titanlite.config.hf_config import folder_rules  # here, since few runs write such a folder

        folder_rules(config.model, reject)
    if config.float8.enable or config.int8.enable:
        from titanlite.config.low_precision_rules import low_precision_rules  # here, since a plain run needs none

        low_precision_rules(config, reject)


def _compile_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    options, reads = config.compile, ("compile.enable", "compile.components")
    compiles_model = options.enable and "model" in options.components
    needed = 'set compile.enable = true, with "model" in compile.components'
    if not options.components or set(options.components) - {"model", "loss"}:
        reject("compile.components", 'expected "model", "loss" or both; to compile nothing, set compile.enable = false')
    if config.activation_checkpoint.mode == "memory_budget" and not compiles_model:
        reject(AC_MODE, f"the compiler chooses what is saved; {needed}, or another mode", *reads)
    overlaps = compiles_model and options.backend == "inductor"
    wants_overlap = config.parallelism.enable_async_tensor_parallel and config.parallelism.tensor_parallel_degree > 1
    if wants_overlap and not overlaps:
        message = f'torch.compile creates the overlap; {needed} and compile.backend = "inductor", or this to false'
        reject(ASYNC_TENSOR, message, *reads, "compile.backend", TENSOR)


def _size_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    """Reject products that no run can have: of a tensor whose bytes an int64 cannot count torch itself knows no size,
    not even without memory for it."""
    model, tokens = config.model, config.training.local_batch_size * config.training.seq_len
    widest = max(model.dim, model.vocab_size, model.ffn_dim, model.expert_dim * model.moe.n_experts)
    widest = max(widest, model.n_heads * max(model.head_dim, model.v_head_dim, config.training.seq_len))
    reads = BATCH, "model.dim", "model.n_heads", "model.ffn_dim", "model.vocab_size", "model.moe.n_experts"
    if tokens * widest * FLOAT64_BYTES >= 2**63:
        message = f"{tokens} tokens of {BATCH} sequences have activations or scores of {widest} numbers each, of "
        reject("training.seq_len", f"{message}more bytes than an int64 counts; set smaller ones", *reads)
    if (n_parameters := count_parameters(model)) > MOST_TOKENS:
        message = (
            f"the model has {n_parameters} parameters: expected at most {MOST_TOKENS}, which float64 counts exactly"
        )
        reject("model.dim", message, "model.n_layers", "model.head_dim", *reads)


def _shard_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    for key in ("model.n_heads", "model.n_kv_heads", "model.ffn_dim", "model.vocab_size"):
        if value_of(config, key) % config.parallelism.tensor_parallel_degree:
            reject(TENSOR, f"expected a divisor of {key} = {value_of(config, key)}, sharded over these ranks", key)
    degrees = [key for key in (TENSOR, PIPELINE) if value_of(config, key) > 1]
    if isinstance(config.parallelism.fsdp_reshard_after_forward, int) and degrees:
        message = f"torch builds these groups as if all ranks had one model, and hangs under {' and '.join(degrees)}; "
        reject(RESHARD, message + 'set "always" or "never"', *degrees)


def _context_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    degree, tensor = config.parallelism.context_parallel_degree, config.parallelism.tensor_parallel_degree
    ulysses = config.parallelism.context_parallel_ulysses_degree
    turned_off = degree == 1 and "context_parallel_degree" in config.parallelism.model_fields_set
    divides = degree % ulysses == 0
    if not divides and not turned_off:
        reject(ULYSSES, f"expected a divisor of {CONTEXT} = {degree}; the quotient is the ring degree", CONTEXT)
    for key, heads in (("model.n_heads", "query heads"), ("model.n_kv_heads", "KV heads")):
        total = value_of(config, key)
        if divides and total % tensor == 0 and total // tensor % ulysses:
            sharded = f", sharded by tensor parallel {tensor}" if tensor > 1 else ""
            message = f"expected a divisor of the {total // tensor} {heads} of a rank ({key} = {total}{sharded}); "
            reject(ULYSSES, message + "the other ranks can form a ring", key, CONTEXT, TENSOR)
    # Ring attention splits the sequence into two chunks per rank; tensor parallelism splits each rank's tokens again.
    chunks = 2 if divides and degree > ulysses else 1
    multiple = math.lcm(chunks * degree, degree * tensor)
    if config.training.seq_len % multiple:
        message = f"expected a multiple of {multiple}, to split evenly over context parallel {degree} x tensor "
        message += f"parallel {tensor}{' (a ring needs two chunks per rank)' if chunks == 2 else ''}"
        reject("training.seq_len", message, CONTEXT, ULYSSES, TENSOR)


def _expert_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    if config.model.moe.n_experts:
        from titanlite.config.moe_rules import expert_rules  # here, since a dense model needs none of them

        expert_rules(config, reject)


def _split_backward_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    schedule, checkpointing = config.parallelism.pipeline_parallel_schedule, config.activation_checkpoint
    if config.parallelism.pipeline_parallel_degree == 1 or schedule not in SPLIT_BACKWARD:
        return
    reason = f"{show(schedule)} computes input gradients and weight gradients apart"
    if config.parallelism.fsdp_reshard_after_forward == "always":
        reject(RESHARD, f'{reason} and needs the weights gathered in between; set "never" or "default"', SCHEDULE)
    if config.compile.enable:
        message = f"{reason}, and a compiled block would compute both of them twice; set false, or the schedule to "
        reject("compile.enable", message + '"Interleaved1F1B"', SCHEDULE)
    if checkpointing.mode == "selective" and not isinstance(checkpointing.selective_ac_option, int):
        message = f'{reason} and would need the recomputed tensors twice; set a number, or mode = "full"'
        reject("activation_checkpoint.selective_ac_option", message, AC_MODE, SCHEDULE)


def _pipeline_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    parallelism, schedule = config.parallelism, config.parallelism.pipeline_parallel_schedule
    if parallelism.pipeline_parallel_degree == 1:
        return
    if config.model.tie_embeddings:
        message = "a pipeline has the embedding and the output head on two stages; set false"
        reject("model.tie_embeddings", message, PIPELINE)
    if parallelism.fsdp_reduce_gradients == "last_accumulation_step":
        message = "a pipeline reduces gradients in every gradient accumulation step, after its last microbatch; set "
        message += '"every_accumulation_step", and a larger local_batch_size for fewer such steps'
        reject("parallelism.fsdp_reduce_gradients", message, PIPELINE)
    per_rank = parallelism.pipeline_parallel_stages_per_rank
    fits, expected = per_rank > 1, "at least 2"
    if schedule in ONE_STAGE:
        fits, expected = per_rank == 1, "1"
    elif schedule in V_SHAPED:
        fits, expected = per_rank == 2, "2"
    if per_rank != -1 and not fits:
        reject(STAGES_PER_RANK, f"expected {expected} under {show(schedule)}, or -1", SCHEDULE)
        return
    _stage_rules(config, changed, reject)
    _microbatch_rules(config, reject)


def _stage_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    stages, n_stages = config.parallelism.module_fqns_per_model_part, config.parallelism.n_stages
    n_layers, balance = config.model.n_layers, config.parallelism.pipeline_parallel_balance
    if not stages:
        if n_layers < n_stages:
            message = f"{n_stages} stages need at least as many layers, and model.n_layers = {n_layers}"
            reject(PIPELINE, message, "model.n_layers", STAGE_MODULES, SCHEDULE, STAGES_PER_RANK)
        for key in END_LAYERS if balance == "parameters" else ():
            if key in changed:
                reject(key, f'read only when {BALANCE} is "layers"; set that, or remove it', BALANCE, STAGE_MODULES)
        return
    for key in (BALANCE, *END_LAYERS):
        if key in changed:
            reject(key, f"{STAGE_MODULES} names the stages' modules; remove one of the two", STAGE_MODULES)
    names, order = list(itertools.chain(*stages)), module_names(n_layers)
    if len(stages) != n_stages:
        problem = f"expected {n_stages} lists, one per stage, got {len(stages)}"
    elif names != order:
        pairs = itertools.zip_longest(map(show, names), map(show, order), fillvalue="nothing")
        got, expected = next(pair for pair in pairs if pair[0] != pair[1])
        problem = f"expected tok_embeddings, every layers.N in order, norm, output; got {got} where {expected} belongs"
    elif not all(any(name.startswith("layers.") for name in stage) for stage in stages):
        problem = "expected at least one layer in each stage"
    else:
        return
    reject(STAGE_MODULES, problem, "model.n_layers", PIPELINE, SCHEDULE, STAGES_PER_RANK)


def _microbatch_rules(config: Config, reject: Rejections) -> None:
    parallelism, batch, number = config.parallelism, config.training.local_batch_size, config.n_microbatches
    schedule, size = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_microbatch_size
    degree, n_stages = parallelism.pipeline_parallel_degree, parallelism.n_stages
    rounds = max(1, number // degree)
    if number * n_stages > MOST_ACTIONS:
        message = f"{number} microbatches x {n_stages} stages are more than the {MOST_ACTIONS} that a schedule can list"
        reject(BATCH, f"{message}; set a larger {MICROBATCH}", MICROBATCH, PIPELINE, STAGES_PER_RANK)
    elif batch % size:
        reject(MICROBATCH, f"expected a divisor of {BATCH} = {batch}", BATCH)
    elif schedule in ("1F1B", "DualPipeV") and number < n_stages:
        message = f"{show(schedule)} needs as many microbatches as its {n_stages} stages, and there are {number}"
        remedy = f"set it to at least {n_stages * size}, or a smaller {MICROBATCH} than {size}"
        reject(BATCH, f"{message}; {remedy}", MICROBATCH, SCHEDULE, PIPELINE, STAGES_PER_RANK)
    elif schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and number % rounds:
        message = f"{show(schedule)} runs its microbatches in {rounds} equal rounds, and there are {number}"
        remedy = f"set it to a multiple of {degree * size} ({MICROBATCH} = {size})"
        reject(BATCH, f"{message}; {remedy}", MICROBATCH, SCHEDULE, PIPELINE)
