"""Parity tests of data parallelism: each layout computes what the single-process reference computes, in float64 to
1e-12."""

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.cases import Case, marks_for
from titanlite import config, init
from titanlite.parallel import fsdp
from titanlite.tools.parity.compare import differences
from titanlite.tools.parity.reference import RandomSequences, Trace, run_reference
from titanlite.tools.parity.training_run import TrainingRun, run_layout

CPU = torch.device("cpu")
STEPS = 3
TOLERANCE = 1e-12
"""float64 has 1.1e-16; three AdamW steps of sums over at most a thousand terms in another order stay far below this."""

SMALL = """
[model]
dim = 32
n_layers = 3
n_heads = 4
n_kv_heads = 2
ffn_dim = 48
vocab_size = 60

[training]
seq_len = 16
local_batch_size = 2
steps = 3
max_norm = 0.5
dtype = "float64"

[optimizer]
lr = 1e-2

[lr_scheduler]
warmup_steps = 2
"""

REPLICATE = {"data_parallel_shard_degree": 1, "fsdp_reduce_gradients": "last_accumulation_step"}
ZERO_1 = {"fsdp_reshard_after_forward": "never", "fsdp_reduce_gradients": "last_accumulation_step"}
ZERO_2 = {"fsdp_reshard_after_forward": "never"}
ZERO_3 = {"fsdp_reshard_after_forward": "always"}


def resolve(tmp_path: Any, world_size: int, options: dict[str, Any]) -> config.Config:
    """Return the small config with some options (section__key, or the key alone in [parallelism]), resolved for a
    launch."""
    file = tmp_path / "config.toml"
    file.write_text(SMALL)
    return config.check(
        config.load([str(file), *arguments_of(options)]), config.Launch(0, 0, world_size, world_size, 0)
    )


def arguments_of(options: dict[str, Any]) -> list[str]:
    """Return options (see `resolve`) as arguments of the command line."""
    names = [key.replace("__", ".") if "__" in key else f"parallelism.{key}" for key in options]
    values = [str(value).lower() if isinstance(value, bool) else str(value) for value in options.values()]
    return [f"--{name}={value}" for name, value in zip(names, values, strict=True)]


# Functions that run on every rank of a pool --------------------------------------------------------------------------


Bug = Callable[[int], contextlib.AbstractContextManager[Any]]
"""Injects a bug on the rank with this number (mutation testing)."""


def trace(job: config.Config, bug: Bug | None = None) -> Trace | None:
    """Return the trace of a layout on rank 0, with a bug injected or none."""
    launch = config.Launch.from_environment(n_devices=0)
    torch.compiler.reset()  # what earlier test cases compiled counts towards a limit
    with bug(launch.rank) if bug else contextlib.nullcontext():
        result = run_layout(job, launch, steps=STEPS)
    return result if launch.rank == 0 else None


def _mean_instead_of_sum(rank: int) -> Any:
    """Divide gradients by the number of ranks, which is FSDP's default."""
    return mock.patch.object(fsdp.FSDPModule, "set_gradient_divide_factor")


def _seed_depends_on_rank(rank: int) -> Any:
    """Initial weights depend on the rank that draws them."""
    real = init.parameter_seed
    return mock.patch.object(init, "parameter_seed", lambda seed, name: real(seed + rank, name))


def _sequences_overlap(rank: int) -> Any:
    """Sequences are assigned to ranks so that some are read twice and some never."""
    real = RandomSequences.read
    return mock.patch.object(RandomSequences, "read", lambda self, first, *args: real(self, first + rank, *args))


def _no_sum_over_replicas(rank: int) -> Any:
    """Gradients are not summed over replicas, which diverge."""
    real = fsdp.fully_shard
    return mock.patch.object(fsdp, "fully_shard", lambda m, mesh, **kwargs: real(m, mesh=mesh["fsdp"], **kwargs))


def _mean_of_means(rank: int) -> Any:
    """Each rank's loss is divided by its own number of tokens: right only if all ranks have as many."""
    return mock.patch("titanlite.train_step.dist.all_reduce", lambda tensor: tensor.mul_(2))


def collectives(job: config.Config) -> dict[str, int]:
    """Count the collectives of each kind that the forward and backward of one step start on this rank."""
    counted = CountCalls("c10d")
    forward_backward(job, counted)
    return dict(counted.calls)


def forward_backward(job: config.Config, watch: contextlib.AbstractContextManager[Any]) -> None:
    """Run the forward and backward of one step on this rank within a context."""
    run = TrainingRun(job, CPU)
    with watch:
        run.train_step.forward_backward(run.loader.next())
    run.loader.close()


class CountCalls(TorchDispatchMode):
    """This mode counts the calls of the operators of a namespace, by name."""

    def __init__(self, namespace: str) -> None:
        super().__init__()
        self.namespace, self.calls = namespace, Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name, *_ = str(function).split(".")
        if namespace == self.namespace:
            self.calls[name] += 1
        return function(*args, **(kwargs or {}))


# --------------------------------------------------------------------------------------------------------------------


def compare(
    ranks: Any, tmp_path: Any, world_size: int, options: dict[str, Any], bug: Bug | None = None
) -> dict[str, float]:
    """Return the differences between the single-process reference and a layout on a pool, with or without a bug."""
    job = resolve(tmp_path, world_size, options)
    (layout, *_) = ranks(world_size).run(trace, job=job, bug=bug)
    reference = run_reference(job, CPU, steps=STEPS) if bug else reference_of(job)  # a bug may be in both
    return differences(reference, layout)


REFERENCES: dict[str, Trace] = {}


def reference_of(job: config.Config) -> Trace:
    """Return the reference of a config. Layouts of the same model, training and optimizer share it."""
    of_layouts = {"activation_checkpoint", "compile", "checkpoint"}
    if not (job.float8.enable or job.int8.enable):  # which layers they convert depends on the tensor-parallel degree
        of_layouts.add("parallelism")
    key = job.model_dump_json(exclude=of_layouts)
    if key not in REFERENCES:
        REFERENCES[key] = run_reference(job, CPU, steps=STEPS)
    return REFERENCES[key]


LAYOUTS = {
    "replicate": lambda n: Case(REPLICATE | {"data_parallel_replicate_degree": n}, always=n == 2),
    "ZeRO-1": lambda n: Case(ZERO_1, always=n == 2),
    "ZeRO-2": lambda n: ZERO_2,
    "ZeRO-3": lambda n: Case(ZERO_3, always=n < 4),
    "ZeRO-3, reduce-scatter in the last accumulation step": lambda n: Case(
        ZERO_3 | {"fsdp_reduce_gradients": "last_accumulation_step"}, always=n == 2
    ),
    "ZeRO-3, CPU offload": lambda n: Case(ZERO_3 | {"training__enable_cpu_offload": True}, always=n == 2),
    "ZeRO-2, CPU offload": lambda n: ZERO_2 | {"training__enable_cpu_offload": True},
    "ZeRO-3, tied embeddings": lambda n: ZERO_3 | {"model__tie_embeddings": True},
    "ZeRO-2, tied embeddings": lambda n: ZERO_2 | {"model__tie_embeddings": True},
    "ZeRO-3, Adam for-loop": lambda n: {"optimizer__name": "Adam", "optimizer__implementation": "for-loop"},
    "ZeRO-3, AdamW foreach": lambda n: {"optimizer__implementation": "foreach"},
}
HYBRID = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}
LAYOUTS_OF_4 = {
    "HSDP": Case(HYBRID, always=True),
    "HSDP, ZeRO-2": HYBRID | ZERO_2,
    "HSDP, ZeRO-1": HYBRID | ZERO_1,
    "HSDP, CPU offload": HYBRID | {"training__enable_cpu_offload": True},
    "HSDP, tied embeddings": HYBRID | {"model__tie_embeddings": True},
    "reshard to groups of 2": {"fsdp_reshard_after_forward": 2},
}
TEST_CASES = {f"{n} ranks, {name}": (n, of(n)) for n in (1, 2, 4) for name, of in LAYOUTS.items()}
TEST_CASES |= {f"4 ranks, {name}": (4, options) for name, options in LAYOUTS_OF_4.items()}


@pytest.mark.parametrize(
    "accumulation_steps",
    [pytest.param(1, marks=pytest.mark.nightly), 3],
    ids=["1 accumulation step", "3 accumulation steps"],
)
@pytest.mark.parametrize(
    ("world_size", "options"),
    [pytest.param(*case, id=name, marks=marks_for(case[1])) for name, case in TEST_CASES.items()],
)
def test_layout_matches_reference(ranks, tmp_path, world_size, options, accumulation_steps):
    batch = {"training__global_batch_size": 2 * world_size * accumulation_steps}
    actual = compare(ranks, tmp_path, world_size, options | batch)
    assert {name: d for name, d in actual.items() if d > TOLERANCE} == {}
    assert all(d == 0 for name, d in actual.items() if name.startswith("initial weight")), "not bit for bit"
    assert len(actual) == len({name.split()[-1] for name in actual if "weight" in name}) * (STEPS + 2) + 3 * STEPS + 1


@pytest.mark.parametrize(
    ("bug", "world_size", "options", "first"),
    [
        (_mean_instead_of_sum, 2, ZERO_3, "step 1 norm"),
        (_seed_depends_on_rank, 2, ZERO_3, "initial weight tok_embeddings.weight"),
        (_sequences_overlap, 2, ZERO_3, "step 1 loss"),
        (_no_sum_over_replicas, 4, HYBRID, "step 1 norm"),
        (_mean_of_means, 2, ZERO_3, "step 1 loss"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_injected_bug_fails(ranks, tmp_path, bug, world_size, options, first):
    actual = compare(ranks, tmp_path, world_size, options, bug)
    assert next(name for name, d in actual.items() if d > 1e-6) == first


UNITS = 5  # of fully_shard: three blocks, the embedding, and norm with output head


@pytest.mark.parametrize(
    ("layout", "gathers", "scatters", "reduces"),
    [
        ("replicate", 0, 0, UNITS),
        ("ZeRO-1", UNITS, UNITS, 0),
        ("ZeRO-2", UNITS, 3 * UNITS, 0),
        ("ZeRO-3", 3 * (2 * UNITS - 1), 3 * UNITS, 0),  # the last unit is not gathered again for its backward
        ("HSDP", 3 * (2 * UNITS - 1), 3 * UNITS, UNITS),  # sums of shards are reduced once over the replicas
    ],
)
def test_collectives_of_three_accumulation_steps(ranks, tmp_path, layout, gathers, scatters, reduces):
    """As in the table of docs/parallelism.md; one more all-reduce counts the valid tokens."""
    n_ranks, options = (4, HYBRID) if layout == "HSDP" else (2, LAYOUTS[layout](2))
    job = resolve(tmp_path, n_ranks, options | {"training__global_batch_size": 6 * n_ranks})
    expected = {"allreduce_": reduces + 1, "_allgather_base_": gathers, "_reduce_scatter_base_": scatters}
    for counts in ranks(n_ranks).run(collectives, job=job):
        assert counts == {name: count for name, count in expected.items() if count}


def test_gradients_are_clipped(tmp_path):
    """The test cases above verify clipping only if their norms exceed max_norm."""
    job = resolve(tmp_path, 1, {})
    norms = [value for name, value in run_reference(job, CPU, steps=STEPS).items() if name.endswith(" norm")]
    assert len(norms) == STEPS
    assert all(norm > job.training.max_norm for norm in norms)


def test_bfloat16_mixed_precision(ranks, tmp_path):
    """Weights in float32, compute in bfloat16, gradients reduced in float32: two ranks against one, both in bfloat16.

    A bfloat16 product is off by about 2^-9 of its size; gradients are compared by their relative error over all
    weights, and one rank in bfloat16 must differ more from float32 than from two ranks in bfloat16."""
    options = {"training__dtype": "float32", "training__global_batch_size": 4}
    half = options | {"training__mixed_precision_param": "bfloat16"}
    traces = {}
    for world_size, layout in ((1, half), (2, half), (1, options)):
        job = resolve(tmp_path, world_size, layout)
        key = world_size, job.training.mixed_precision_param
        traces[key] = ranks(world_size).run(trace, job=job)[0]

    def error(one: Trace, other: Trace) -> float:
        names = [name for name in one if name.startswith("step 1 gradient ")]
        flat = [torch.cat([trace[name].flatten() for name in names]) for trace in (one, other)]
        return ((flat[0] - flat[1]).norm() / flat[1].norm()).item()

    rounding = error(traces[1, "bfloat16"], traces[1, "float32"])
    layout = error(traces[2, "bfloat16"], traces[1, "bfloat16"])
    assert 1e-4 < rounding < 2e-2
    assert layout < rounding
