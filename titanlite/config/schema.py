"""Every option of a run: its type, its default, what it means, and the rules between options.

A run is described by one TOML file plus `--section.key=value` overrides. `load` reads both, `check` holds them against
the ranks and devices of a launch. Both find every problem at once and raise one `ConfigError`; neither needs torch, so
a mistake costs a fraction of a second and is found before any process group exists.

    python -m titanlite.config CONFIG.toml [--section.key=value ...]     print the resolved config as TOML
    python -m titanlite.config --help                                    every option

Option names follow torchtitan 0.2.2 (its last release with TOML files) where an option means the same.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union, get_args

import tomli_w
from pydantic import Field, model_validator

from titanlite.config.loader import Section
from titanlite.config.model_sizes import SIZES
from titanlite.config.stage_split import ONE_STAGE, Schedule, module_names, split_into_stages

# Types that recur. The bounds are read back when a value is refused, so the message always names the true range.
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Precision = Literal["auto", "bfloat16", "float32", "float64"]


class Job(Section):
    dump_folder: str = "./outputs"
    """Folder that the run writes into: config.toml, tb/, metrics.jsonl, checkpoint/, profiles."""
    description: str = ""
    """One line about the run; it is printed first and stands in TensorBoard."""


class Model(Section):
    """`flavor` names a row of titanlite/sizes.py; every other key overrides that row."""

    flavor: Literal[tuple(SIZES)] = "debug"  # type: ignore[valid-type]
    """Named size whose dimensions are the defaults of this section."""
    hf_assets_path: str = ""
    """A Hugging Face tokenizer.json, or the folder that holds one; empty: every byte is a token."""
    dim: Count
    """Width of the residual stream."""
    n_layers: Count
    """Number of transformer blocks."""
    n_heads: Count
    """Query heads of an attention layer."""
    n_kv_heads: Count
    """Key and value heads; fewer than n_heads is grouped-query attention."""
    ffn_dim: Count
    """Width of the SwiGLU feed-forward layer."""
    vocab_size: Count
    """Rows of the embedding and of the output head; at least the tokenizer's vocabulary."""
    norm_eps: Positive
    """Epsilon of the RMS norms."""
    tie_embeddings: bool
    """Use the embedding's weight as the output head."""
    rope_theta: Positive
    """Base of the rotary frequencies."""
    rope_scaling_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)]
    """Llama 3.1 scaling of the low rotary frequencies; 1 leaves them alone."""
    rope_low_freq_factor: Positive
    """Wavelengths above rope_original_seq_len / this are scaled fully."""
    rope_high_freq_factor: Positive
    """Wavelengths below rope_original_seq_len / this are not scaled."""
    rope_original_seq_len: Count
    """Sequence length before the scaling."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_flavor(cls, given: dict[str, Any]) -> dict[str, Any]:
        flavor = given.get("flavor", "debug")
        return {**SIZES.get(flavor if isinstance(flavor, str) else "", SIZES["debug"]), **given}


class Training(Section):
    dataset: Literal["pydoc_topics", "text", "json", "parquet", "c4", "hub"] = "pydoc_topics"
    """pydoc_topics: the 465 KB of English prose that every CPython carries; text, json (also JSON lines), parquet:
    files at dataset_path; c4: allenai/c4 `en`; hub: the dataset that dataset_path names on the Hugging Face hub."""
    dataset_path: str = ""
    """File, folder or glob (text, json, parquet), or the name on the hub (hub)."""
    dataset_config: str = ""
    """Configuration of a hub dataset, where it has several."""
    dataset_split: str = "train"
    """Split of a hub dataset to train on."""
    dataset_text_key: str = "text"
    """Column that holds a document's text (json, parquet, hub)."""
    text_sample_by: Literal["document", "paragraph", "line"] = "document"
    """What one document of dataset = "text" is: a whole file, a paragraph, or a line."""
    streaming: bool = False
    """Read and tokenise documents while training instead of tokenising the whole dataset once before."""
    streaming_shards: Count = 64
    """Streaming: number of shards that the files are partitioned into. Sequence k comes from shard k mod
    streaming_shards, so the order does not depend on the ranks; the data-parallel degree must divide it, and the
    dataset must have at least as many files."""
    shuffle: bool = True
    """Draw the packed sequences in an order seeded by debug.seed, anew each epoch. A stream cannot."""
    cache_folder: str = "~/.cache/titanlite"
    """Where the tokens of a dataset are kept between runs."""
    seq_len: Count = 2048
    """Tokens of a packed sequence."""
    document_mask: bool = False
    """Attend only within a document, and count positions from its beginning; false: across all documents of a packed
    sequence."""
    local_batch_size: Count = 8
    """Sequences that a data-parallel rank takes a microstep. A pipeline cuts them into microbatches."""
    global_batch_size: Union[Literal[-1], Count] = -1
    """Sequences of an optimizer step over all ranks; more than local_batch_size x data-parallel ranks accumulates
    gradients. -1: no accumulation."""
    steps: Count = 10_000
    """Optimizer steps of the run."""
    max_norm: Positive = 1.0
    """Gradients are scaled down to this global norm if theirs is larger."""
    nonfinite_steps_allowed: CountOrZero = 0
    """How many steps of the whole run may be skipped because the loss or the gradient norm is not finite; one more
    stops the run."""
    gc_freq: Count = 50
    """Steps between Python's garbage collections, which otherwise come at different times on each rank."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type in which weights are kept, and optimizer states unless optimizer.state_dtype says otherwise. float64 is for
    proofs."""
    mixed_precision_param: Literal[Precision, "float16"] = "auto"
    """Type in which FSDP gathers the weights and the model computes; auto: bfloat16 on CUDA, `dtype` on a CPU. float16
    scales the loss (initial_loss_scale)."""
    mixed_precision_reduce: Precision = "auto"
    """Type in which gradients are accumulated and reduced; auto: float32, or `dtype` if that is float64."""
    attention_backend: Literal["auto", "cpu", "flash", "cudnn", "efficient", "math"] = "auto"
    """Kernel of attention; auto: what torch's scaled_dot_product_attention chooses. Under context parallelism or a
    document mask auto is cpu on a CPU, and on CUDA flash for bfloat16 and float16, efficient for float32, math for
    float64."""
    initial_loss_scale: Positive = 65536.0
    """What the loss is multiplied by under float16, so that small gradients are not lost. A step whose gradients
    overflow is skipped and halves it."""
    loss_scale_growth_interval: Count = 2000
    """Steps without overflow after which the loss scale is doubled."""
    loss_chunks: Count = 1
    """Parts that a microbatch's tokens go through the output head and the loss in, one after the other: of more than
    one, only a part's logits exist at any time."""
    enable_cpu_offload: bool = False
    """Keep weights, gradients and optimizer states in host memory; weights visit the device for their layer's turn."""


class Optimizer(Section):
    name: Literal["AdamW", "Adam"] = "AdamW"
    """AdamW decouples weight decay from the gradient; Adam adds it to the gradient."""
    lr: Positive = 8e-4
    """Peak learning rate."""
    beta1: Fraction = 0.9
    """Decay of the mean of gradients."""
    beta2: Fraction = 0.95
    """Decay of the mean of squared gradients."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NotNegative = 0.1
    """For weight matrices and embeddings; norms and biases have none."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """Which of torch's implementations takes the step."""
    state_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """Type of the two moments; auto: training.dtype; int8: a byte and a scale for each 256 of them."""
    stochastic_rounding: bool = False
    """Round weights that are kept in bfloat16 up or down by chance, so that updates smaller than their last digit are
    not lost. Needs training.dtype = "bfloat16"."""


class LRScheduler(Section):
    """Warm-up, stable, decay: the factor on optimizer.lr is the smaller of a ramp up and a ramp down."""

    warmup_steps: CountOrZero = 200
    """Steps over which the learning rate rises linearly to optimizer.lr. A run shorter than this ends on the ramp."""
    total_steps: Union[Literal[-1], Count] = -1
    """The schedule's horizon: the step after which the decay has ended. -1: training.steps."""
    decay_ratio: Union[Literal[-1], Annotated[float, Field(ge=0, le=1)]] = -1
    """Share of total_steps over which the learning rate decays; -1: all that follows the warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay; sqrt is 1 - sqrt(progress)."""
    min_lr_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where the decay ends, as a factor on optimizer.lr."""


class Parallelism(Section):
    """Degrees multiply to the number of ranks: pp x dp_replicate x dp_shard x cp x tp, outermost first."""

    data_parallel_replicate_degree: Count = 1
    """Replicas of the sharded model; above 1 with a shard degree above 1 this is hybrid sharding (HSDP)."""
    data_parallel_shard_degree: Union[Literal[-1], Count] = -1
    """Ranks that each weight is sharded over, besides the context-parallel ones; -1: the ranks that remain."""
    fsdp_reshard_after_forward: Union[Literal["default", "always", "never"], Annotated[int, Field(ge=2)]] = "default"
    """always: free the gathered weights after a layer's forward and gather them again for its backward (ZeRO-3); never:
    gather them once a step (ZeRO-1, ZeRO-2); N: keep them cut over groups of N ranks in between. default: always, and
    never in a pipeline, whose every microbatch would gather them again."""
    fsdp_reduce_gradients: Literal["every_accumulation_step", "last_accumulation_step"] = "every_accumulation_step"
    """When accumulating, reduce-scatter gradients in each microstep (ZeRO-2, ZeRO-3: gradients are kept sharded), or
    once, in the last (ZeRO-1, replicate: less traffic, gradients are kept whole)."""
    fsdp_forward_prefetch: CountOrZero = 0
    """Blocks whose weights are being gathered while one computes its forward; 0: FSDP's own way, which on CUDA begins
    the next block's gather as soon as the CPU gets there."""
    fsdp_backward_prefetch: CountOrZero = 0
    """The same in the backward; 0: FSDP's own way, the one block before."""
    tensor_parallel_degree: Count = 1
    """Ranks that share each layer's heads, channels and vocabulary, and, between the layers, its sequence."""
    disable_loss_parallel: bool = False
    """Gather the logits of tensor-parallel ranks instead of computing the loss from their parts of the vocabulary."""
    enable_async_tensor_parallel: bool = False
    """Overlap tensor parallel's collectives with its matrix products. Needs CUDA and compile.enable."""
    pipeline_parallel_degree: Count = 1
    """Ranks that the layers are dealt to."""
    pipeline_parallel_schedule: Literal[get_args(Schedule)] = "1F1B"  # type: ignore[valid-type]
    """Order in which a pipeline's ranks take forwards and backwards of microbatches."""
    pipeline_parallel_microbatch_size: Count = 1
    """Sequences of a pipeline's microbatch, cut from local_batch_size."""
    pipeline_parallel_stages_per_rank: Union[Literal[-1], Count] = -1
    """Stages of a rank under a schedule that has several; -1: 2, or 1 under GPipe and 1F1B."""
    pipeline_parallel_balance: Literal["layers", "parameters"] = "layers"
    """What stages are made equal in."""
    pipeline_parallel_first_stage_less_layers: CountOrZero = 1
    """How many layers the embedding counts as, when stages are balanced by layers."""
    pipeline_parallel_last_stage_less_layers: CountOrZero = 1
    """How many layers the norm and the output head count as, when stages are balanced by layers."""
    module_fqns_per_model_part: list[list[str]] = Field(default=[])
    """The modules of each stage by name, in order (tok_embeddings, layers.0, ..., norm, output), instead of balancing
    them; empty: balance them."""
    context_parallel_degree: Count = 1
    """Ranks that share each sequence."""
    context_parallel_ulysses_degree: Count = 1
    """How many of these trade sequence for heads (Ulysses); the others pass keys and values around a ring."""

    @property
    def n_stages(self) -> int:
        """Stages of the whole pipeline."""
        per_rank = self.pipeline_parallel_stages_per_rank
        if per_rank == -1:
            per_rank = 1 if self.pipeline_parallel_schedule in ONE_STAGE else 2
        return self.pipeline_parallel_degree * per_rank

    @property
    def ring_degree(self) -> int:
        """Ranks that pass keys and values around."""
        return max(self.context_parallel_degree // self.context_parallel_ulysses_degree, 1)

    @property
    def data_parallel_degree(self) -> int:
        """Number of ranks, or groups of ranks, that read sequences of their own (of a resolved config)."""
        return self.data_parallel_replicate_degree * self.data_parallel_shard_degree

    @property
    def world_size(self) -> int:
        """Number of ranks that the degrees multiply to (of a resolved config)."""
        model_parallel = self.pipeline_parallel_degree * self.context_parallel_degree * self.tensor_parallel_degree
        return self.data_parallel_degree * model_parallel


class Float8(Section):
    enable: bool = False
    """Take the matrix products of linear layers in 8-bit floating point."""
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """tensorwise: one scale a tensor; rowwise: one a row, which is more accurate; rowwise_with_gw_hp: rowwise, and
    gradients of weights in the model's own type."""
    emulate: bool = False
    """Round to float8 but multiply in the model's type, for hardware without float8."""
    filter_fqns: list[str] = Field(default=[])
    """Leave layers alone whose name has one of these in it, as in ["layers.0.", "attention.wk"]. The output head always
    is, and so is a layer whose weight has, on a rank, a side that is not a multiple of 16: the hardware needs that."""
    enable_fsdp_float8_all_gather: bool = False
    """FSDP gathers weights in float8. Tensorwise only."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Compute the scales of all weights at once after the optimizer's step. Needs enable_fsdp_float8_all_gather."""


class ActivationCheckpoint(Section):
    mode: Literal["none", "full", "selective", "memory_budget"] = "none"
    """full: a block keeps its inputs only, and computes the rest again in its backward; selective: see
    selective_ac_option; memory_budget: the compiler chooses what is kept, within memory_budget."""
    selective_ac_option: Union[Literal["op"], Count] = "op"
    """op: blocks keep the results of matrix products, attention and reductions over ranks, and recompute the rest; N:
    every N-th block is recomputed in full, the others keep everything."""
    memory_budget: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of a block's activations to keep, from 0 (its inputs only) to 1 (all that its backward uses)."""


class Compile(Section):
    enable: bool = False
    """Compile with torch.compile. The first steps take longer."""
    components: list[str] = Field(default=["model", "loss"])
    """What to compile: "model", each block by itself; "loss", the output head and the loss."""
    backend: Literal["inductor", "aot_eager"] = "inductor"
    """inductor: generated kernels; aot_eager: traced, but run with torch's own (fast to compile, for tests)."""


class Checkpoint(Section):
    enable: bool = False
    """Save checkpoints, and resume from the newest whole one in the folder."""
    folder: str = "checkpoint"
    """Where, relative to job.dump_folder."""
    interval: Count = 500
    """Steps between checkpoints; the last step is always saved."""
    keep_latest_k: CountOrZero = 10
    """Delete all but the newest k; 0 keeps all."""
    load_step: Union[Literal[-1], Count] = -1
    """Step to resume from; -1: the newest."""
    initial_load_path: str = ""
    """A checkpoint's step-N folder whose weights the run starts from where there is nothing to resume."""
    async_mode: Literal["disabled", "async"] = "disabled"
    """async: copy the state to host memory and write it while training goes on."""


class Metrics(Section):
    log_freq: Count = 10
    """Steps between two lines on the console and in metrics.jsonl."""
    enable_tensorboard: bool = True
    """Write the same values for TensorBoard."""
    save_tb_folder: str = "tb"
    """Where, relative to job.dump_folder."""


class Validation(Section):
    enable: bool = False
    """Compute the loss on the held-out split."""
    freq: Count = 100
    """Steps between validations; the last step is always validated."""
    steps: Union[Literal[-1], Count] = 64
    """Batches of local_batch_size per data-parallel rank that a validation reads, at most; -1: the full split."""
    fraction: Fraction = 0.05
    """Share of documents held out of training where no split or path is given, whether validation is enabled or not (so
    that enabling it does not change the training data)."""
    dataset_path: str = ""
    """Files to validate on, of the kind that training.dataset names (text, json, parquet)."""
    dataset_split: str = ""
    """Split of a hub dataset to validate on."""


class Profiling(Section):
    enable_profiling: bool = False
    """Write a Chrome trace of one step in each profile_freq."""
    profile_freq: Annotated[int, Field(ge=4)] = 10
    """Steps between traces (the profiler skips, warms up 3 steps, and records one)."""
    save_traces_folder: str = "profile_traces"
    """Where, relative to job.dump_folder."""
    enable_memory_snapshot: bool = False
    """Write CUDA memory snapshots (for pytorch.org/memory_viz) each profile_freq steps."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Where, relative to job.dump_folder."""


class Comm(Section):
    init_timeout_seconds: Count = 300
    """How long a collective may take until the first step is done (start-up, compilation, loading)."""
    train_timeout_seconds: Count = 100
    """How long a collective may take after that."""
    trace_buf_size: CountOrZero = 20_000
    """Collectives that NCCL's flight recorder keeps and dumps after a timeout; 0 turns it off."""


class Plan(Section):
    """What titanlite.plan reckons with; training does not read it."""

    device: str = "h100"
    """A name in titanlite/devices.py, or a TOML file with the same keys."""
    devices_per_node: Union[Literal[-1], Count] = -1
    """-1: as many as hosts with such devices usually have."""
    tokens: CountOrZero = 0
    """Tokens to train on, for days, hours and costs; 0: what training.steps see."""
    price: NotNegative = 0.0
    """Of one device for one hour, in any currency."""


class Debug(Section):
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 42
    """Seed of the weights, the data order and the random generators."""
    deterministic: bool = False
    """Use torch's deterministic algorithms only."""


class Config(Section):
    job: Job = Field(default_factory=Job)
    model: Model = Field(default_factory=lambda: Model.model_validate({}))
    training: Training = Field(default_factory=Training)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = Field(default_factory=LRScheduler)
    parallelism: Parallelism = Field(default_factory=Parallelism)
    float8: Float8 = Field(default_factory=Float8)
    activation_checkpoint: ActivationCheckpoint = Field(default_factory=ActivationCheckpoint)
    compile: Compile = Field(default_factory=Compile)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    metrics: Metrics = Field(default_factory=Metrics)
    validation: Validation = Field(default_factory=Validation)
    profiling: Profiling = Field(default_factory=Profiling)
    comm: Comm = Field(default_factory=Comm)
    plan: Plan = Field(default_factory=Plan)
    debug: Debug = Field(default_factory=Debug)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Number of times that a rank takes local_batch_size sequences in an optimizer step (of a resolved config)."""
        sequences = self.training.local_batch_size * self.parallelism.data_parallel_degree
        return self.training.global_batch_size // sequences

    @property
    def n_microbatches(self) -> int:
        """Number of microbatches that a pipeline splits a per-device batch into."""
        return self.training.local_batch_size // self.parallelism.pipeline_parallel_microbatch_size

    @property
    def hidden_shape(self) -> tuple[int, int, int]:
        """Shape of what one pipeline stage sends to the next: [sequences of a microbatch, tokens of a rank, dim]."""
        parallelism = self.parallelism
        ranks = parallelism.context_parallel_degree * parallelism.tensor_parallel_degree
        return parallelism.pipeline_parallel_microbatch_size, self.training.seq_len // ranks, self.model.dim

    def replace(self, **values: Any) -> Config:
        """A copy with other values, keyed `section__key`."""
        changed = {}
        for name, value in values.items():
            section, key = name.split("__")
            changed[section] = changed.get(section, getattr(self, section)).model_copy(update={key: value})
        return self.model_copy(update=changed)

    def toml(self) -> str:
        return tomli_w.dumps(self.model_dump())


def stage_modules(config: Config) -> list[list[str]]:
    """Names of the modules of each pipeline stage, in order."""
    parallelism, model = config.parallelism, config.model
    if parallelism.module_fqns_per_model_part:
        return parallelism.module_fqns_per_model_part
    names, n_stages = module_names(model.n_layers), parallelism.n_stages
    if parallelism.pipeline_parallel_balance == "layers":
        ends = (
            parallelism.pipeline_parallel_first_stage_less_layers,
            parallelism.pipeline_parallel_last_stage_less_layers,
        )
        costs = [ends[0], *[1] * model.n_layers, 0, ends[1]]
    else:
        layer, matrix = _layer_parameters(model), model.dim * model.vocab_size
        costs = [matrix, *[layer] * model.n_layers, model.dim, matrix]
    return split_into_stages(names, costs, n_stages)


def _layer_parameters(model: Model) -> int:
    head_dim = model.dim // model.n_heads
    attention = 2 * model.dim * head_dim * (model.n_heads + model.n_kv_heads)
    return attention + 3 * model.dim * model.ffn_dim + 2 * model.dim


def count_parameters(model: Model) -> int:
    """Weights of the whole model."""
    matrices = 1 if model.tie_embeddings else 2
    return matrices * model.dim * model.vocab_size + model.n_layers * _layer_parameters(model) + model.dim
