"""The first lines that a run prints: the model, the data, the precision and the layout."""

import torch

from titanlite.config import Config
from titanlite.config.loader import show
from titanlite.config.model_sizes import SIZES
from titanlite.config.schema import QUANTIZED_STATES, SEEDED, Model, stage_modules
from titanlite.data.packing import Sequences, SplitSequences
from titanlite.model import Llama


def run_summary(
    config: Config,
    n_parameters: int,
    sequences: Sequences,
    validation: SplitSequences | None,
    peak_flops_source: str,
    stages: dict[int, Llama],
) -> str:
    """Return the lines that rank 0 prints before the first step. `peak_flops_source`: PeakFlops.source, for MFU."""
    n_trained = next(iter(stages.values())).adapters.n_trained() if config.lora.rank else 0
    trained = f"; trains {n_trained:,} of {n_parameters:,} parameters ({100 * n_trained / n_parameters:.2g} %)"
    training, model, groups = config.training, config.model, config.fault_tolerance
    attention = "12LDT" if model.n_heads * model.head_dim == model.dim else "12LHKT"
    attention = "6LH(K+V)T" if model.mla.kv_lora_rank else attention
    dataset = "own" if config.own.data else "mixture" if training.datasets else training.dataset
    padding = "; tok/s and MFU count padding, too" * (training.packing == "best_fit")  # best_fit alone pads sequences
    of_flavor = SIZES.get(model.flavor, model.model_dump())["vocab_size"]
    larger = f" for the tokenizer ({model.flavor}: {of_flavor})" if model.vocab_size > of_flavor else ""
    windows = {layer.sliding_window for layer in model.of_layers()}
    some = " in some layers" if len(windows) > 1 else ""
    window = f", where T is the window {min(windows - {0})}{some}" if config.windowed else ""
    n = training.steps * training.global_batch_size
    epochs = "" if training.streaming or config.own.data else f"{n / sequences.n_sequences:.3g} epochs, "
    lines = [
        *([config.job.description] if config.job.description else []),
        f"model      {model.flavor}: {model.n_layers} layers, dim {model.dim}, {model.n_heads} heads, "
        f"{model.n_kv_heads} KV heads, {family_summary(model)}ffn {model.ffn_dim}, "
        f"vocabulary {model.vocab_size}{larger}; {n_parameters:,} parameters",
        f"precision  {describe_precision(config)}",
        *optimization_summary(config, trained),
        f"mesh       {describe_mesh(config)}",
        *([f"groups     number {groups.replica_id} of {groups.group_size} replica groups"] if groups.enable else []),
        *expert_summary(config),
        *pipeline_summary(config),
        f"data       {dataset}: {sequences}; validation: {validation_summary(config, validation)}",
        f"step       {training.global_batch_size} sequences x {training.seq_len} tokens in "
        f"{config.gradient_accumulation_steps} gradient accumulation step(s){padding}",
        f"steps      {training.steps:,}: {epochs}{n * training.seq_len:,} tokens",
        f"MFU        {peak_flops_source}; 6N + {attention} FLOPs per token{window}",
    ]
    return "\n".join(lines)


def account(positions: int, masked: int, padding: int, cut: int) -> str:
    """Return a line with the numbers of trained, masked and padding positions, and of documents cut short."""
    trained = f"account    {positions - masked - padding:,} of {positions:,} positions trained on"
    return f"{trained}, {masked:,} masked, {padding:,} padding; {cut:,} documents cut by the end of a sequence"


def family_summary(model: Model) -> str:
    """Return the options in which a model differs from a plain Llama, each followed by a comma; "" for a Llama."""
    words = [f"head_dim {model.head_dim}"] if model.n_heads * model.head_dim != model.dim else []
    words += [f"{key} {rank}" for key, rank in model.mla if key.endswith("lora_rank") and rank]
    words += [f"attention_bias {model.attention_bias}"] if model.attention_bias != "none" else []
    words += ["mlp_bias"] if model.mlp_bias else []
    words += ["qk_norm" if model.qk_norm is True else f"qk_norm {model.qk_norm}"] if model.qk_norm else []
    words += [f"sliding_window {model.sliding_window}"] if model.sliding_window else []
    others = ("norm", "norm_placement", "activation", "gated_ffn", "partial_rotary_factor", "learned_positions")
    changed = [key for key in others if getattr(model, key) != type(model).model_fields[key].default]
    words += [f"{key} {show(getattr(model, key))}" for key in changed]
    words += [f"{len(model.layer_pattern)} kinds of layers"] if model.layer_pattern else []
    return "".join(f"{word}, " for word in words)


def describe_mesh(config: Config) -> str:
    parallelism = config.parallelism
    ring, ulysses = parallelism.ring_degree, parallelism.context_parallel_ulysses_degree
    inner = f" (ring {ring} x ulysses {ulysses})" if ulysses > 1 else ""
    experts = f", ep {parallelism.expert_parallel_degree}" * (parallelism.expert_parallel_degree > 1)
    return (
        f"pp {parallelism.pipeline_parallel_degree} x dp_replicate {parallelism.data_parallel_replicate_degree} x "
        f"dp_shard {parallelism.data_parallel_shard_degree} x cp {parallelism.context_parallel_degree}{inner} x "
        f"tp {parallelism.tensor_parallel_degree}{experts}"
    )


def bytes_per_state(dtype: str) -> float:
    """Return the bytes of one element of an optimizer state, with its share of a quantization block's scale."""
    if dtype in QUANTIZED_STATES:
        return (0.5 if dtype == "int4" else 1) + 4 / QUANTIZED_STATES[dtype]
    return getattr(torch, dtype).itemsize


def describe_precision(config: Config) -> str:
    """Return the dtypes of a run, and the bytes on all ranks together per parameter: weight, gradient and optimizer
    states. Under Muon, one state is counted for every parameter, although embeddings and norms have two."""
    training, state_dtype = config.training, config.optimizer.state_dtype.replace("auto", config.training.dtype)
    n_states = 1 if config.optimizer.name == "Muon" else 2
    size = 2 * getattr(torch, training.dtype).itemsize + n_states * bytes_per_state(state_dtype)
    states = f"optimizer states {state_dtype}"
    if config.ema.decay:
        states, size = f"{states}, EMA", size + max(4, getattr(torch, training.dtype).itemsize)
    rounding = " (stochastic rounding)" if config.optimizer.stochastic_rounding else ""
    unit = "parameter of an adapter" if config.lora.rank else "parameter"
    return (
        f"weights {training.dtype}{rounding}, compute {training.mixed_precision_param}, gradients {training.dtype}, "
        f"reduced in {training.mixed_precision_reduce}, {states}: {size:.4g} bytes per {unit}"
    )


def optimization_summary(config: Config, trained: str = "") -> list[str]:
    """Return a line for each enabled technique that saves time or memory. `trained`: text on what LoRA trains."""
    float8, ac, lora, chunks = config.float8, config.activation_checkpoint, config.lora, config.training.loss_chunks
    option = f" {ac.selective_ac_option}" * (ac.mode == "selective")
    groups = f", {ac.layers_per_checkpoint} layers per checkpoint" * (ac.layers_per_checkpoint > 1)
    path = config.checkpoint.initial_load_path
    base = "random weights (checkpoint.initial_load_path)" if path == SEEDED else path
    adapters = f"rank {lora.rank}, alpha {lora.alpha:g}, of {', '.join(lora.targets)}{trained}; base: {base}"
    lines = {
        f"LoRA       {adapters}": lora.rank > 0,
        f"float8     {float8.recipe}{', emulated' * float8.emulate}": float8.enable,
        "int8       products of linear layers, a scale per row and column": config.int8.enable,
        f"AC         {ac.mode}{option}{groups}": f"{ac.mode}{groups}" != "none",
        f"loss       chunked cross-entropy, {chunks} chunks": chunks > 1,
        f"compile    {' and '.join(config.compile.components)}, {config.compile.backend}": config.compile.enable,
    }
    return [line for line, is_used in lines.items() if is_used]


def pipeline_summary(config: Config) -> list[str]:
    parallelism = config.parallelism
    if parallelism.pipeline_parallel_degree == 1:
        return []
    stages = [names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}" for names in stage_modules(config)]
    schedule = f"{parallelism.pipeline_parallel_schedule}, {config.n_microbatches} microbatch(es)"
    return [f"pipeline   {schedule}, stages {' | '.join(stages)}"]


def expert_summary(config: Config) -> list[str]:
    """Return a line that describes a model's experts; [] for a model without experts."""
    model, moe = config.model, config.model.moe
    if not moe.n_experts:
        return []
    layers = f"in {sum(map(model.has_experts, range(model.n_layers)))} of {model.n_layers} layers"
    shared = f", {moe.n_shared_experts} shared" * (moe.n_shared_experts > 0)
    experts = f"{moe.n_experts} of width {model.expert_dim} {layers}, {moe.n_experts_per_token} per token{shared}"
    return [f"experts    {experts}"]


def validation_summary(config: Config, validation: SplitSequences | None) -> str:
    """Return the size of the validation split, and how many of its sequences validation.steps reads."""
    if validation is None:
        return "none"
    steps, sequences = config.validation.steps, config.validation.steps * config.training.global_batch_size
    capped = steps != -1 and sequences < validation.n_sequences
    return f"the first {sequences:,} of {validation} (validation.steps = {steps})" if capped else str(validation)
