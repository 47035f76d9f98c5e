"""The rules about tensor, context and pipeline parallelism, and about pipeline schedules."""

import itertools
import math

from titanlite.config import keys
from titanlite.config.loader import Rejections, show, value_of
from titanlite.config.schema import Config
from titanlite.config.stage_split import ONE_STAGE, SPLIT_BACKWARD, V_SHAPED, module_names

MOST_ACTIONS = 2**16
"""Largest product of a pipeline's microbatches and stages: torch's schedules and plans list every forward."""


def shard_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    for key in ("model.n_heads", "model.n_kv_heads", "model.ffn_dim", "model.vocab_size"):
        if value_of(config, key) % config.parallelism.tensor_parallel_degree:
            reject(keys.TENSOR, f"expected a divisor of {key} = {value_of(config, key)}, sharded over these ranks", key)
    degrees = [key for key in (keys.TENSOR, keys.PIPELINE) if value_of(config, key) > 1]
    if isinstance(config.parallelism.fsdp_reshard_after_forward, int) and degrees:
        message = f"torch builds these groups as if all ranks had one model, and hangs under {' and '.join(degrees)}; "
        reject(keys.RESHARD, message + 'set "always" or "never"', *degrees)


def context_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    """Reject heads and sequences that context parallelism cannot split evenly."""
    degree, tensor = config.parallelism.context_parallel_degree, config.parallelism.tensor_parallel_degree
    ulysses = config.parallelism.context_parallel_ulysses_degree
    turned_off = degree == 1 and "context_parallel_degree" in config.parallelism.model_fields_set
    divides = degree % ulysses == 0
    if not divides and not turned_off:
        message = f"expected a divisor of {keys.CONTEXT} = {degree}; the quotient is the ring degree"
        reject(keys.ULYSSES, message, keys.CONTEXT)
    for key, heads in (("model.n_heads", "query heads"), ("model.n_kv_heads", "KV heads")):
        total = value_of(config, key)
        if divides and total % tensor == 0 and total // tensor % ulysses:
            sharded = f", sharded by tensor parallel {tensor}" if tensor > 1 else ""
            message = f"expected a divisor of the {total // tensor} {heads} of a rank ({key} = {total}{sharded}); "
            reject(keys.ULYSSES, message + "the other ranks can form a ring", key, keys.CONTEXT, keys.TENSOR)
    # Ring attention splits the sequence into two chunks per rank; tensor parallelism splits each rank's tokens again.
    chunks = 2 if divides and degree > ulysses else 1
    multiple = math.lcm(chunks * degree, degree * tensor)
    if config.training.seq_len % multiple:
        message = f"expected a multiple of {multiple}, to split evenly over context parallel {degree} x tensor "
        message += f"parallel {tensor}{' (a ring needs two chunks per rank)' if chunks == 2 else ''}"
        reject("training.seq_len", message, keys.CONTEXT, keys.ULYSSES, keys.TENSOR)


def split_backward_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    """Reject options that do not work with a pipeline schedule that splits the backward."""
    schedule, checkpointing = config.parallelism.pipeline_parallel_schedule, config.activation_checkpoint
    if config.parallelism.pipeline_parallel_degree == 1 or schedule not in SPLIT_BACKWARD:
        return
    reason = f"{show(schedule)} computes input gradients and weight gradients apart"
    if config.parallelism.fsdp_reshard_after_forward == "always":
        message = f'{reason} and needs the weights gathered in between; set "never" or "default"'
        reject(keys.RESHARD, message, keys.SCHEDULE)
    if config.compile.enable:
        message = f"{reason}, and a compiled block would compute both of them twice; set false, or the schedule to "
        reject("compile.enable", message + '"Interleaved1F1B"', keys.SCHEDULE)
    if checkpointing.mode == "selective" and not isinstance(checkpointing.selective_ac_option, int):
        message = f'{reason} and would need the recomputed tensors twice; set a number, or mode = "full"'
        reject("activation_checkpoint.selective_ac_option", message, keys.AC_MODE, keys.SCHEDULE)


def pipeline_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    """Reject stages and microbatches that a pipeline schedule cannot run."""
    parallelism, schedule = config.parallelism, config.parallelism.pipeline_parallel_schedule
    if parallelism.pipeline_parallel_degree == 1:
        return
    if config.model.tie_embeddings:
        message = "a pipeline has the embedding and the output head on two stages; set false"
        reject("model.tie_embeddings", message, keys.PIPELINE)
    if parallelism.fsdp_reduce_gradients == "last_accumulation_step":
        message = "a pipeline reduces gradients in every gradient accumulation step, after its last microbatch; set "
        message += '"every_accumulation_step", and a larger local_batch_size for fewer such steps'
        reject("parallelism.fsdp_reduce_gradients", message, keys.PIPELINE)
    per_rank = parallelism.pipeline_parallel_stages_per_rank
    fits, expected = per_rank > 1, "at least 2"
    if schedule in ONE_STAGE:
        fits, expected = per_rank == 1, "1"
    elif schedule in V_SHAPED:
        fits, expected = per_rank == 2, "2"
    if per_rank != -1 and not fits:
        reject(keys.STAGES_PER_RANK, f"expected {expected} under {show(schedule)}, or -1", keys.SCHEDULE)
        return
    _stage_rules(config, changed, reject)
    _microbatch_rules(config, reject)


def _stage_rules(config: Config, changed: set[str], reject: Rejections) -> None:
    stages, n_stages = config.parallelism.module_fqns_per_model_part, config.parallelism.n_stages
    n_layers, balance = config.model.n_layers, config.parallelism.pipeline_parallel_balance
    if not stages:
        if n_layers < n_stages:
            message = f"{n_stages} stages need at least as many layers, and model.n_layers = {n_layers}"
            reject(keys.PIPELINE, message, "model.n_layers", keys.STAGE_MODULES, keys.SCHEDULE, keys.STAGES_PER_RANK)
        for key in keys.END_LAYERS:
            if value_of(config, key) > n_layers:
                reject(key, f"expected at most model.n_layers = {n_layers}", "model.n_layers", keys.STAGE_MODULES)
            elif balance == "parameters" and key in changed:
                message = f'read only when {keys.BALANCE} is "layers"; set that, or remove it'
                reject(key, message, keys.BALANCE, keys.STAGE_MODULES)
        return
    for key in (keys.BALANCE, *keys.END_LAYERS):
        if key in changed:
            reject(key, f"{keys.STAGE_MODULES} names the stages' modules; remove one of the two", keys.STAGE_MODULES)
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
    reject(keys.STAGE_MODULES, problem, "model.n_layers", keys.PIPELINE, keys.SCHEDULE, keys.STAGES_PER_RANK)


def _microbatch_rules(config: Config, reject: Rejections) -> None:
    parallelism, batch, number = config.parallelism, config.training.local_batch_size, config.n_microbatches
    schedule, size = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_microbatch_size
    degree, n_stages = parallelism.pipeline_parallel_degree, parallelism.n_stages
    rounds = max(1, number // degree)
    if number * n_stages > MOST_ACTIONS:
        message = f"{number} microbatches x {n_stages} stages are more than the {MOST_ACTIONS} that a schedule can list"
        message += f"; set a larger {keys.MICROBATCH}"
        reject(keys.BATCH, message, keys.MICROBATCH, keys.PIPELINE, keys.STAGES_PER_RANK)
    elif batch % size:
        reject(keys.MICROBATCH, f"expected a divisor of {keys.BATCH} = {batch}", keys.BATCH)
    elif schedule in ("1F1B", "DualPipeV") and number < n_stages:
        message = f"{show(schedule)} needs as many microbatches as its {n_stages} stages, and there are {number}"
        remedy = f"set it to at least {n_stages * size}, or a smaller {keys.MICROBATCH} than {size}"
        reject(keys.BATCH, f"{message}; {remedy}", keys.MICROBATCH, keys.SCHEDULE, keys.PIPELINE, keys.STAGES_PER_RANK)
    elif schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and number % rounds:
        message = f"{show(schedule)} runs its microbatches in {rounds} equal rounds, and there are {number}"
        remedy = f"set it to a multiple of {degree * size} ({keys.MICROBATCH} = {size})"
        reject(keys.BATCH, f"{message}; {remedy}", keys.MICROBATCH, keys.SCHEDULE, keys.PIPELINE)
