"""Every option of a run: its type, its default, what it means, and the rules between options.

A run is described by one TOML file plus `--section.key=value` overrides. `load` reads both, `check` holds them against
the ranks and devices of a launch. Both find every problem at once and raise one `ConfigError`; neither needs torch, so
a mistake costs a fraction of a second and is found before any process group exists.

    python -m titanlite.config CONFIG.toml [--section.key=value ...]     print the resolved config as TOML
    python -m titanlite.config --help                                    every option

Option names follow torchtitan 0.2.2 (its last release with TOML files) where an option means the same.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import tomli_w
from pydantic import Field, model_validator

from titanlite import options
from titanlite.options import ConfigError, Loaded, Refusals, Section, show
from titanlite.sizes import SIZES

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
    streams: Count = 64
    """Streaming: number of independent streams that the files are dealt to. Sequence k comes from stream k mod streams,
    so the order does not depend on the ranks; the data-parallel degree must divide it, and there must be as many
    files."""
    shuffle: bool = True
    """Draw the packed sequences in an order seeded by debug.seed, anew each epoch. A stream cannot."""
    cache_folder: str = "~/.cache/titanlite"
    """Where the tokens of a dataset are kept between runs."""
    seq_len: Count = 2048
    """Tokens of a packed sequence."""
    local_batch_size: Count = 8
    """Sequences that a data-parallel rank takes a microstep."""
    global_batch_size: Union[Literal[-1], Count] = -1
    """Sequences of an optimizer step over all ranks; more than local_batch_size x ranks accumulates gradients. -1: no
    accumulation."""
    steps: Count = 10_000
    """Optimizer steps of the run."""
    max_norm: Positive = 1.0
    """Gradients are scaled down to this global norm if theirs is larger."""
    nonfinite_steps_allowed: CountOrZero = 0
    """How many steps of the whole run may be skipped because the loss or the gradient norm is not finite; one more
    stops the run."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type in which weights and optimizer states are kept. float64 is for proofs."""
    mixed_precision_param: Precision = "auto"
    """Type in which FSDP gathers the weights and the model computes; auto: bfloat16 on CUDA, `dtype` on a CPU."""
    mixed_precision_reduce: Precision = "auto"
    """Type in which gradients are accumulated and reduced; auto: float32, or `dtype` if that is float64."""
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
    data_parallel_replicate_degree: Count = 1
    """Replicas of the sharded model; above 1 with a shard degree above 1 this is hybrid sharding (HSDP)."""
    data_parallel_shard_degree: Union[Literal[-1], Count] = -1
    """Ranks that each weight is sharded over; -1: the ranks that remain."""
    fsdp_reshard_after_forward: Union[Literal["always", "never"], Annotated[int, Field(ge=2)]] = "always"
    """always: free the gathered weights after a layer's forward and gather them again for its backward (ZeRO-3); never:
    gather them once a step (ZeRO-1, ZeRO-2); N: keep them cut over groups of N ranks in between."""
    fsdp_reduce_gradients: Literal["each_microstep", "last_microstep"] = "each_microstep"
    """When accumulating, reduce-scatter gradients in each microstep (ZeRO-2, ZeRO-3: gradients are kept sharded), or
    once, in the last (ZeRO-1, replicate: less traffic, gradients are kept whole)."""


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
    steps: Union[Literal[-1], Count] = -1
    """Batches of local_batch_size per rank that a validation reads; -1: the whole split."""
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
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    metrics: Metrics = Field(default_factory=Metrics)
    validation: Validation = Field(default_factory=Validation)
    profiling: Profiling = Field(default_factory=Profiling)
    comm: Comm = Field(default_factory=Comm)
    debug: Debug = Field(default_factory=Debug)

    def replace(self, **values: Any) -> Config:
        """A copy with other values, keyed `section__key`."""
        changed = {}
        for name, value in values.items():
            section, key = name.split("__")
            changed[section] = changed.get(section, getattr(self, section)).model_copy(update={key: value})
        return self.model_copy(update=changed)

    def toml(self) -> str:
        return tomli_w.dumps(self.model_dump())


USAGE = "usage: train.py CONFIG.toml [--section.key=value ...]   (--help lists every option)"


def load(argv: list[str]) -> Loaded[Config]:
    """Read a TOML file and overrides (`argv`, without the program's name) into a config that keeps the rules.

    Raises:
        ConfigError: with every problem found.
    """
    return options.load(Config, argv, usage=USAGE, rules=_rules)


# ---------------------------------------------------------------------------------------------------------------------
# Rules between options


def _rules(config: Config, given: set[str]) -> Refusals:
    """What single types cannot say. `given` holds the keys that were set to something else than the default."""
    refuse = Refusals()
    _model_rules(config.model, refuse)
    _data_rules(config.training, config.validation, given, refuse)
    _step_rules(config.training, config.lr_scheduler, refuse)
    return refuse


def _model_rules(model: Model, refuse: Refusals) -> None:
    if model.dim % model.n_heads:
        refuse(
            "model.n_heads",
            f"expected a divisor of model.dim = {model.dim}; each head takes dim / n_heads of it",
            *("model.dim", "model.flavor"),
        )
    elif model.dim // model.n_heads % 2:
        refuse(
            "model.n_heads",
            f"expected an even head size, got {model.dim} / {model.n_heads} = {model.dim // model.n_heads}; rotary "
            "embedding turns pairs",
            *("model.dim", "model.flavor"),
        )
    if model.n_heads % model.n_kv_heads:
        refuse(
            "model.n_kv_heads",
            f"expected a divisor of model.n_heads = {model.n_heads}; each key head serves a group of query heads",
            *("model.n_heads", "model.flavor"),
        )
    if model.rope_scaling_factor > 1 and model.rope_low_freq_factor >= model.rope_high_freq_factor:
        refuse(
            "model.rope_low_freq_factor",
            f"expected a number below model.rope_high_freq_factor = {model.rope_high_freq_factor}",
            *("model.rope_high_freq_factor", "model.rope_scaling_factor", "model.flavor"),
        )


FILES = ("text", "json", "parquet")  # datasets that are files at a path


def _data_rules(training: Training, validation: Validation, given: set[str], refuse: Refusals) -> None:
    dataset = training.dataset

    def only_for(key: str, *users: str) -> None:
        if key in given and dataset not in users:
            names = " or ".join(show(name) for name in users)
            refuse(key, f"read only when training.dataset is {names}; remove it", "training.dataset")

    if dataset in (*FILES, "hub") and not training.dataset_path:
        what = "a name on the Hugging Face hub, as in allenai/c4" if dataset == "hub" else "a file, folder or glob"
        refuse("training.dataset_path", f"training.dataset = {show(dataset)} needs {what}", "training.dataset")
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
            refuse("training.streaming", "the built-in text is in memory; set false", "training.dataset")
        if training.shuffle:
            refuse(
                "training.shuffle",
                "a stream cannot be drawn in a random order that survives a stop and a resume exactly; set false "
                "(documents come in their files' order), or training.streaming = false",
                "training.streaming",
            )
        if "validation.fraction" in given:
            refuse("validation.fraction", "a stream has no documents to hold out; remove it", "training.streaming")
        if validation.enable and not own_split:
            refuse(
                "validation.enable",
                "a stream has no documents to hold out; set validation.dataset_path (files) or "
                "validation.dataset_split (hub), or training.streaming = false",
                "training.streaming",
                *split_keys,
            )
    else:
        if "training.streams" in given:
            refuse("training.streams", "read only when training.streaming is true; remove it", "training.streaming")
        if own_split and "validation.fraction" in given:
            refuse("validation.fraction", "the dataset has a validation split of its own; remove it", *split_keys)
        if validation.enable and not own_split and not validation.fraction:
            keys = ("validation.enable", "training.streaming", *split_keys)
            refuse("validation.fraction", "validation.enable needs documents: set it above 0", *keys)


def _step_rules(training: Training, lr_scheduler: LRScheduler, refuse: Refusals) -> None:
    if training.global_batch_size != -1 and training.global_batch_size % training.local_batch_size:
        refuse(
            "training.global_batch_size",
            f"expected a multiple of training.local_batch_size = {training.local_batch_size}",
            "training.local_batch_size",
        )
    for key in ("mixed_precision_param", "mixed_precision_reduce"):
        if training.dtype == "float64" and getattr(training, key) not in ("auto", "float64"):
            refuse(
                f"training.{key}",
                'training.dtype = "float64" computes and reduces in float64; set "auto"',
                "training.dtype",
            )
    if lr_scheduler.total_steps != -1 and lr_scheduler.total_steps < training.steps:
        refuse(
            "lr_scheduler.total_steps",
            f"expected at least training.steps = {training.steps}; the schedule has no value after its horizon",
            "training.steps",
        )


# ---------------------------------------------------------------------------------------------------------------------
# Rules between the config and a launch


@dataclasses.dataclass(frozen=True)
class Launch:
    """The ranks and devices that a run was started with."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    n_devices: int
    """Accelerators that this host has for its ranks; 0: the run is on CPUs."""

    @classmethod
    def from_environment(cls, n_devices: int) -> Launch:
        """torchrun's variables; without them, one rank.

        Raises:
            ConfigError: if one of them is no number.
        """
        variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
        return cls(*(_number(os.environ, name, least) for name, least in variables.items()), n_devices)


def _number(environment: Mapping[str, str], name: str, least: int) -> int:
    """A count in an environment variable; where it is unset or empty, the least it can be."""
    text = environment.get(name) or str(least)
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least:
        raise ConfigError([f"environment: {name} = {show(text)}: expected a whole number at least {least}"])
    return int(text)


def _ranks(number: int) -> str:
    return f"{number} rank" if number == 1 else f"{number} ranks"


def check(loaded: Loaded[Config], launch: Launch) -> Config:
    """Hold a config against a launch and fill in what depends on it.

    Returns:
        The config with the shard degree, the global batch size, the schedule's horizon and the precisions resolved.

    Raises:
        ConfigError: with every problem found, the numbers, and what to do.
    """
    config, refuse, world, problems = loaded.config, Refusals(), launch.world_size, []
    parallelism, training = config.parallelism, config.training
    if launch.n_devices and launch.local_world_size > launch.n_devices:
        devices = f"{launch.n_devices} {'device' if launch.n_devices == 1 else 'devices'}"
        problems.append(
            f"{loaded.file}: {_ranks(launch.local_world_size)} on this host, which has {devices}; start fewer "
            "(smaller degrees, or NGPU), or use more hosts (NNODES)"
        )

    replicate, shard = parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree
    if shard == -1:
        shard = max(world // replicate, 1)
        if world % replicate:
            refuse(
                "parallelism.data_parallel_replicate_degree",
                f"expected a divisor of the {_ranks(world)} that the launch has; start a multiple of {replicate}",
            )
    elif replicate * shard != world:
        refuse(
            "parallelism.data_parallel_shard_degree",
            f"replicate {replicate} x shard {shard} needs {_ranks(replicate * shard)}, and the launch has {world}; "
            f"start {replicate * shard} (./run_train.sh does, without NGPU), or set the degrees to the ranks there are",
        )
    ranks = replicate * shard
    group = parallelism.fsdp_reshard_after_forward
    if isinstance(group, int) and (shard % group or group >= shard):
        choices = ['"always"', '"never"', *(str(size) for size in range(2, shard) if shard % size == 0)]
        refuse(
            "parallelism.fsdp_reshard_after_forward",
            f"expected one of {', '.join(choices)} for {shard} {'shard' if shard == 1 else 'shards'}",
        )
    microstep = training.local_batch_size * ranks
    global_batch_size = microstep if training.global_batch_size == -1 else training.global_batch_size
    if global_batch_size % microstep:
        refuse(
            "training.global_batch_size",
            f"expected a multiple of local_batch_size x ranks = {training.local_batch_size} x {ranks} = {microstep}",
        )
    if training.streaming and training.streams % ranks:
        refuse(
            "training.streams",
            f"expected a multiple of the data-parallel degree {ranks}, so that each rank has whole streams",
        )
    if config.profiling.enable_memory_snapshot and not launch.n_devices:
        refuse("profiling.enable_memory_snapshot", "needs CUDA, and this run is on a CPU; set false")
    problems += loaded.lines(refuse)
    if problems:
        raise ConfigError(problems)

    param, reduce = training.mixed_precision_param, training.mixed_precision_reduce
    if param == "auto":
        param = "bfloat16" if launch.n_devices and training.dtype == "float32" else training.dtype
    if reduce == "auto":
        reduce = "float64" if training.dtype == "float64" else "float32"
    horizon = config.lr_scheduler.total_steps
    return config.replace(
        parallelism__data_parallel_shard_degree=shard,
        training__global_batch_size=global_batch_size,
        training__mixed_precision_param=param,
        training__mixed_precision_reduce=reduce,
        lr_scheduler__total_steps=training.steps if horizon == -1 else horizon,
    )


def ranks_per_host(loaded: Loaded[Config], environment: Mapping[str, str], n_devices: int) -> int:
    """How many ranks run_train.sh starts on this host: NGPU, else what the degrees ask for, else one a device.

    Args:
        environment: of which NGPU and NNODES are read.

    Raises:
        ConfigError: if the degrees and the hosts do not fit together or `check` refuses the resulting launch.
    """
    hosts = _number(environment, "NNODES", 1)
    parallelism = loaded.config.parallelism
    replicate, shard = parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree
    wanted = replicate * shard if shard != -1 else max(replicate, hosts * max(n_devices, 1))
    if wanted % hosts and not environment.get("NGPU"):
        raise ConfigError([f"{loaded.file}: {_ranks(wanted)} cannot be dealt evenly to NNODES = {hosts} hosts"])
    here = _number(environment, "NGPU", 1) if environment.get("NGPU") else wanted // hosts
    check(loaded, Launch(0, 0, here * hosts, here, n_devices))
    return here


def count_devices() -> int:
    """Accelerators of this host. torch is asked only where a driver is installed: importing it takes seconds."""
    if not shutil.which("nvidia-smi") and not Path("/dev/kfd").exists():
        return 0
    import torch

    return torch.cuda.device_count()


def main(argv: list[str]) -> None:
    if "--help" in argv or "-h" in argv:
        print(options.help_text(Config, USAGE))
        return
    try:
        if argv[:1] == ["--ranks-per-host"]:  # run_train.sh: the launch is checked once, before any rank is started
            print(ranks_per_host(load(argv[1:]), os.environ, count_devices()))
        else:
            print(load(argv).config.toml(), end="")
    except ConfigError as error:
        options.print_problems(error)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
