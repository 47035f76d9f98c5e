"""The steps of gpu_session.py as data: names, expected seconds and the options of each training run, in order of worth.

Llama 3 8B has weights, gradients and optimizer states in bfloat16, which is 60 GiB of the 120 that float32 would take.
What a run of it needs besides decides its sizes: a card of less than 100 GiB gets smaller ones. A global batch has
32768 tokens.
"""

from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
TOML = HERE / "gpu_session.toml"
TORCHTITAN_TOML = HERE / "torchtitan_8b.toml"
TOKENS = 32768
LARGE_GIB = 100
"""Memory of a card, in GiB, from which on the runs have the large sizes."""
Options = dict[str, str | int]
NO_OPTIONS: Options = {}
Kind = str  # environment, rates, pytest, train, trace, calibrate, ring, parity, recorded, torchtitan, card, plan
CORRECTNESS = ("pytest", "parity", "recorded", "card")
"""Kinds whose result says nothing about the speed of a card: done on one card, they are done."""
AT_ONCE = 8
"""Steps of such kinds that share the card at a time."""


class Step(NamedTuple):
    """A step: its own process, what it is expected to take, and a time limit that it is killed at."""

    name: str
    group: str
    kind: Kind
    seconds: int
    """Expected with 16 CPU cores: what it took on an H200, beside the steps that share the card, or an estimate."""
    options: Options = NO_OPTIONS
    """Of the training run or of the config. Of a parity test "ranks", "config" and "dtype", too."""
    needs: tuple[str, ...] = ("pydantic", "tomli_w")
    """Modules without which the step is recorded as not there."""
    together: int = 1
    """How many consecutive steps may share the card: more than one where no speed is measured."""

    @property
    def limit(self) -> int:
        """The seconds that it may take where there is time for it."""
        return max(60, 4 * self.seconds)


TORCHAO = ("pydantic", "tomli_w", "torchao")
TOKENIZERS = ("pydantic", "tomli_w", "tokenizers", "jinja2")
COMPILED: Options = {"compile.enable": "true"}
SELECTIVE: Options = {"activation_checkpoint.mode": "selective"}
EVERY_SECOND_MM: Options = {"activation_checkpoint.selective_ac_option": "every_second_mm"}
SAVE_ATTENTION: Options = {"activation_checkpoint.selective_ac_option": "attention"}
FULL: Options = {"activation_checkpoint.mode": "full"}
FLOAT8: Options = {"float8.enable": "true"}
ROUNDED: Options = {"optimizer.stochastic_rounding": "true"}
# On one GPU the all-gather is a cast from float32, which the default keeps for the step: 2 bytes per parameter.
RESHARDED: Options = {"parallelism.fsdp_reshard_after_forward": "always"}
# Gradients are accumulated in bfloat16, unsharded, and reduced once per optimizer step.
REDUCED_ONCE: Options = {
    "parallelism.fsdp_reshard_after_forward": "never",
    "parallelism.fsdp_reduce_gradients": "last_accumulation_step",
    "training.mixed_precision_reduce": "bfloat16",
}


def batch_of(sequences: int, seq_len: int) -> Options:
    """Return the options of a per-device batch size and the gradient accumulation steps to TOKENS."""
    return {
        "training.seq_len": seq_len,
        "training.local_batch_size": sequences,
        "training.global_batch_size": TOKENS // seq_len,
    }


def llama_8b(sequences: int, *options: Options, seq_len: int = 4096) -> Options:
    result = {"model.flavor": "llama3_8b", "training.dtype": "bfloat16"} | COMPILED | batch_of(sequences, seq_len)
    for more in options:
        result |= more
    return result


def smaller(size: str, sequences: int, *options: Options, seq_len: int = 4096) -> Options:
    """Return the options of Llama 3.2 1B or 3B with float32 weights: 18.4 and 47.9 GiB with gradients and states."""
    result = {"model.flavor": f"llama3_{size}"} | batch_of(sequences, seq_len)
    for more in options:
        result |= more
    return result


def attention(backend: str) -> Options:
    return {"training.attention_backend": backend}


PUBLISHED_CASE, LLAMA_8B, TORCHTITAN = "8b-published", "Llama 3 8B", "torchtitan 0.2.2"
ROWWISE: Options = FLOAT8 | {"float8.recipe": "rowwise"}


class Sizes(NamedTuple):
    """The runs whose sizes depend on the memory of the card, by name. The first one of Llama 3 8B is the base, which
    its variants and the profiler's trace are of."""

    llama_8b: dict[str, Options]
    other_sizes: dict[str, Options]


LARGE = Sizes(
    {
        "8b-b4-selective": llama_8b(4, SELECTIVE),
        "8b-b4-selective-reduced-once": llama_8b(4, SELECTIVE, REDUCED_ONCE),  # the fastest by the plan
        "8b-b4-selective-flash": llama_8b(4, SELECTIVE, attention("flash")),
        "8b-b4-none": llama_8b(4),  # 134 GiB of tensors by the plan
        "8b-b2-none": llama_8b(2),
        "8b-b2-selective": llama_8b(2, SELECTIVE),
    },
    {
        "1b-4096": smaller("1b", 8, COMPILED),
        "3b-4096": smaller("3b", 4, COMPILED, SELECTIVE),
        "1b-8192": smaller("1b", 4, COMPILED, seq_len=8192),
        "3b-8192": smaller("3b", 2, COMPILED, SELECTIVE, seq_len=8192),
        "8b-8192": llama_8b(2, SELECTIVE, seq_len=8192),
    },
)
SMALL = Sizes(
    {
        "8b-b2-attention": llama_8b(2, SELECTIVE, SAVE_ATTENTION),
        "8b-b2-attention-flash": llama_8b(2, SELECTIVE, SAVE_ATTENTION, attention("flash")),
        "8b-b1-attention": llama_8b(1, SELECTIVE, SAVE_ATTENTION),
        "8b-b4-full": llama_8b(4, FULL),
    },
    {
        "1b-4096": smaller("1b", 4, COMPILED),
        "3b-4096": smaller("3b", 2, COMPILED, SELECTIVE),
        "1b-8192": smaller("1b", 2, COMPILED, seq_len=8192),
        "3b-8192": smaller("3b", 1, COMPILED, SELECTIVE, seq_len=8192),
        "8b-8192": llama_8b(1, SELECTIVE, SAVE_ATTENTION, seq_len=8192),
    },
)
MEMORY: dict[str, Options] = {
    "memory-1b": smaller("1b", 2),
    "memory-1b-unchunked": smaller("1b", 2, {"training.loss_chunks": 1}),
    "memory-1b-full-ac": smaller("1b", 2, FULL),
    "memory-1b-selective-ac": smaller("1b", 2, SELECTIVE),
    "memory-1b-every-second-mm": smaller("1b", 2, SELECTIVE, EVERY_SECOND_MM),
    "memory-1b-resharded": smaller("1b", 2, RESHARDED),
    "memory-1b-compiled": smaller("1b", 2, COMPILED),
}

# torchtitan_8b.toml as titanlite runs it. A step has one sequence, and torchtitan's "op" recomputes every second mm.
AS_TORCHTITAN = llama_8b(1, SELECTIVE, EVERY_SECOND_MM, {"training.global_batch_size": 1}, seq_len=8192)

# Every test of tests/test_gpu.py is in one group.
TESTS: dict[str, list[str]] = {
    "tests-attention": [
        "test_attention_backend",
        "test_backward_of_a_chunk_of_keys_from_the_full_softmax",
        "test_documents_in_one_call_of_flash_attention",
        "test_window",
    ],
    "tests-reference": ["test_equals_the_single_process_reference_in_float64", "test_parity_command_under_torchrun"],
    "tests-training": [
        "test_bfloat16_is_the_default_and_trains",
        "test_float16_trains",
        "test_memory_snapshot",
        "test_measured_peak_flops_are_below_the_data_sheets",
    ],
    "tests-resume": ["test_resume_with_deterministic_algorithms_is_bit_for_bit"],
    "tests-compile": ["test_compiled_trains_as_eager_does", "test_a_step_does_not_synchronize_with_the_device"],
    "tests-float8": ["test_8_bit_products_train_as_bfloat16_does", "test_8_bit_products_are_those_of_a_cpu"],
    "tests-optimizer": ["test_low_bit_optimizer_states_train"],
    "tests-muon-and-offload": [
        "test_muon_trains",
        "test_optimizer_states_in_host_memory_train_as_on_the_device",
    ],
}
NEED_TORCHAO = ("tests-float8", "tests-optimizer")

# Ranks that share the GPU, through NCCL.
PARITY: dict[str, Options] = {
    "parity-fsdp-2": {"ranks": 2, "config": "debug"},
    "parity-fsdp-2-bfloat16": {"ranks": 2, "config": "debug", "dtype": "bfloat16"},
    "parity-ring-2-bfloat16": {
        "ranks": 2,
        "config": "debug_cp",
        "parallelism.context_parallel_degree": 2,
        "parallelism.context_parallel_ulysses_degree": 1,
        "dtype": "bfloat16",
    },
    "parity-tp-2": {"ranks": 2, "config": "debug_tp"},
    "parity-experts-2-accumulation": {
        "ranks": 2,
        "config": "debug_moe",
        "parallelism.expert_parallel_degree": 2,
        "training.global_batch_size": 32,
    },
    "parity-pp-tp-4": {"ranks": 4, "config": "debug_pp", "parallelism.tensor_parallel_degree": 2},
    "parity-ring-ulysses-4": {"ranks": 4, "config": "debug_cp"},
}

DEBUG: Options = {"model.flavor": "debug", "training.seq_len": 256, "training.local_batch_size": 16}


def all_steps(memory_gib: float) -> list[Step]:
    """Return every step for a card with this memory, in order of worth. Plans need no GPU, so they come last, and can
    be run anywhere: one for each training run."""
    sizes = LARGE if memory_gib >= LARGE_GIB else SMALL
    (base, base_options), *variants = sizes.llama_8b.items()
    seconds = {"tests-attention": 30, "tests-float8": 125, "tests-optimizer": 240}
    steps = [
        Step("environment", "Machine", "environment", 6, needs=()),
        Step("rates", "Machine", "rates", 14, needs=()),
        Step("debug-compiled", "Debug model", "train", 30, DEBUG | COMPILED),
        Step(base, LLAMA_8B, "train", 60, base_options),
    ]
    steps += [
        Step(name, "Tests", "pytest", seconds.get(name, 80), dict.fromkeys(names, ""), needs_of(name), AT_ONCE)
        for name, names in TESTS.items()
    ]
    steps += [
        Step("published-card", "Published curve", "card", 60, NO_OPTIONS, TOKENIZERS, AT_ONCE),
        Step("recorded-step", "Recorded step", "recorded", 20, together=AT_ONCE),
    ]
    steps += [
        Step(name, "Several ranks on one GPU", "parity", 40, options, together=AT_ONCE)
        for name, options in PARITY.items()
    ]
    steps += [
        Step("torchtitan-compiled", TORCHTITAN, "torchtitan", 50, COMPILED),
        Step("as-torchtitan-compiled", TORCHTITAN, "train", 40, AS_TORCHTITAN),
        # 30 steps: rowwise scales have given NaN within a few, where a backward recomputed a cast (pytorch 150859).
        Step(f"{base}-rowwise", LLAMA_8B, "train", 125, base_options | ROWWISE | {"training.steps": 30}, TORCHAO),
        Step("trace", "Profiler trace", "trace", 35),
        Step(PUBLISHED_CASE, "Published configuration", "train", 60, llama_8b(2, FULL)),
    ]
    steps += [
        Step(name, "Memory", "train", 35, options, together=3 if sizes is LARGE else 1)
        for name, options in MEMORY.items()
    ]
    steps += [Step(name, LLAMA_8B, "train", 60, options) for name, options in variants[:2]]
    steps.append(Step("torchtitan", TORCHTITAN, "torchtitan", 50))
    steps.append(Step("as-torchtitan", TORCHTITAN, "train", 50, AS_TORCHTITAN | {"compile.enable": "false"}))
    steps.append(Step(f"{base}-tensorwise", LLAMA_8B, "train", 60, base_options | FLOAT8, TORCHAO))
    steps.append(Step("calibrate", "Device file", "calibrate", 60))
    steps += [Step(name, LLAMA_8B, "train", 60, options) for name, options in variants[2:]]
    steps.append(Step(f"{base}-stochastic-rounding", LLAMA_8B, "train", 60, base_options | ROUNDED, TORCHAO))
    steps.append(Step("ring-attention", "Attention backends", "ring", 40))
    steps += [Step(name, "Other sizes", "train", 50, options) for name, options in sizes.other_sizes.items()]
    steps += [
        Step(f"{name}-float8", "Other sizes", "train", 60, options | FLOAT8, TORCHAO)
        for name, options in sizes.other_sizes.items()
    ]
    runs = [step for step in steps if step.kind == "train"]
    return steps + [Step(f"plan-{step.name}", "Plans", "plan", 20, step.options) for step in runs]


def needs_of(tests: str) -> tuple[str, ...]:
    """Return the modules that a group of tests needs."""
    return ("pytest", "pytest_timeout", *(TORCHAO if tests in NEED_TORCHAO else TORCHAO[:2]))


def toy(step: Step) -> Step:
    """Return a step as a dry run takes it: the debug model on a CPU for three steps, short sequences, no inductor."""
    if step.kind not in ("train", "plan"):
        return step
    options = step.options | {"model.flavor": "debug", "training.seq_len": 64, "training.local_batch_size": 2}
    options |= {"training.global_batch_size": 4}
    options.pop("training.attention_backend", None)
    if step.name == "debug-compiled":
        options["compile.backend"] = "aot_eager"
    else:
        options.pop("compile.enable", None)
    if "float8.enable" in options:
        options["float8.emulate"] = "true"
    steps = {"training.steps": 3} if step.kind == "train" else {}
    return step._replace(options=options | steps)
