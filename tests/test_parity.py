"""The table of layouts: each computes what one process computes, in float64 to 1e-12."""

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite import config, init, parity
from titanlite.parallel import fsdp

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
    """The small config with some options (section__key, or the key alone in [parallelism]), held against a launch."""
    file = tmp_path / "config.toml"
    file.write_text(SMALL)
    names = [key.replace("__", ".") if "__" in key else f"parallelism.{key}" for key in options]
    values = [f"{value}".replace("True", "true") for value in options.values()]
    arguments = [f"--{name}={value}" for name, value in zip(names, values, strict=True)]
    return config.check(config.load([str(file), *arguments]), config.Launch(0, 0, world_size, world_size, 0))


# A case runs on every rank of a pool. -------------------------------------------------------------------------------


Break = Callable[[int], contextlib.AbstractContextManager[Any]]
"""Breaks a part on purpose, on the rank with this number."""


def trace(job: config.Config, broken: Break | None = None) -> parity.Trace | None:
    """The trace of a layout, from rank 0, with a part broken or none."""
    launch = config.Launch.from_environment(n_devices=0)
    torch.compiler.reset()  # what earlier cases compiled counts towards a limit
    with broken(launch.rank) if broken else contextlib.nullcontext():
        result = parity.run(job, launch, steps=STEPS)
    return result if launch.rank == 0 else None


def _mean_instead_of_sum(rank: int) -> Any:
    """Gradients divided by the number of ranks, as FSDP does unless told otherwise."""
    return mock.patch.object(fsdp.FSDPModule, "set_gradient_divide_factor")


def _rank_in_the_seed(rank: int) -> Any:
    """Initial weights that depend on who draws them."""
    real = init.parameter_seed
    return mock.patch.object(init, "parameter_seed", lambda seed, name: real(seed + rank, name))


def _neighbours_instead_of_strides(rank: int) -> Any:
    """Sequences dealt to ranks so that some are read twice and some never."""
    real = parity.ProofSequences.read
    return mock.patch.object(
        parity.ProofSequences, "read", lambda self, first, *others: real(self, first + rank, *others)
    )


def _no_sum_over_replicas(rank: int) -> Any:
    """Each replica keeps its own gradients and drifts away, as if there were no others."""
    real = fsdp.fully_shard
    return mock.patch.object(fsdp, "fully_shard", lambda m, mesh, **others: real(m, mesh=mesh["fsdp"], **others))


def _mean_of_means(rank: int) -> Any:
    """Each rank's loss divided by its own tokens: right only if all ranks have as many."""
    return mock.patch("titanlite.train_step.dist.all_reduce", lambda tensor: tensor.mul_(2))


def collectives(job: config.Config) -> dict[str, int]:
    """How many collectives of each kind the forward and backward of one step start on this rank."""
    counted = CountCalls("c10d")
    forward_backward(job, counted)
    return dict(counted.calls)


def forward_backward(job: config.Config, watch: contextlib.AbstractContextManager[Any]) -> None:
    """Those of one step on this rank, while a context holds."""
    parts = parity.Parts(job, CPU)
    with watch:
        parts.work.forward_backward(parts.loader.next())
    parts.loader.close()


class CountCalls(TorchDispatchMode):
    """Of the operators of a namespace, by name."""

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
    ranks: Any, tmp_path: Any, world_size: int, options: dict[str, Any], broken: Break | None = None
) -> dict[str, float]:
    job = resolve(tmp_path, world_size, options)
    (found, *_) = ranks(world_size).run(trace, job=job, broken=broken)
    return parity.differences(found, parity.run_alone(job, CPU, steps=STEPS))


LAYOUTS = {
    "replicate": lambda n: REPLICATE | {"data_parallel_replicate_degree": n},
    "ZeRO-1": lambda n: ZERO_1,
    "ZeRO-2": lambda n: ZERO_2,
    "ZeRO-3": lambda n: ZERO_3,
    "ZeRO-3, gradients in the last microstep": lambda n: ZERO_3 | {"fsdp_reduce_gradients": "last_accumulation_step"},
    "ZeRO-3, CPU offload": lambda n: ZERO_3 | {"training__enable_cpu_offload": True},
    "ZeRO-2, CPU offload": lambda n: ZERO_2 | {"training__enable_cpu_offload": True},
    "ZeRO-3, tied embeddings": lambda n: ZERO_3 | {"model__tie_embeddings": True},
    "ZeRO-2, tied embeddings": lambda n: ZERO_2 | {"model__tie_embeddings": True},
    "ZeRO-3, Adam for-loop": lambda n: {"optimizer__name": "Adam", "optimizer__implementation": "for-loop"},
    "ZeRO-3, AdamW foreach": lambda n: {"optimizer__implementation": "foreach"},
}
HYBRID = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}
LAYOUTS_OF_4 = {
    "HSDP": HYBRID,
    "HSDP, ZeRO-2": HYBRID | ZERO_2,
    "HSDP, ZeRO-1": HYBRID | ZERO_1,
    "HSDP, CPU offload": HYBRID | {"training__enable_cpu_offload": True},
    "HSDP, tied embeddings": HYBRID | {"model__tie_embeddings": True},
    "reshard to groups of 2": {"fsdp_reshard_after_forward": 2},
}
ROWS = [pytest.param(n, layout(n), id=f"{n} ranks, {name}") for n in (1, 2, 4) for name, layout in LAYOUTS.items()] + [
    pytest.param(4, layout, id=f"4 ranks, {name}") for name, layout in LAYOUTS_OF_4.items()
]


@pytest.mark.parametrize("microsteps", [1, 3], ids=["1 microstep", "3 microsteps"])
@pytest.mark.parametrize(("world_size", "options"), ROWS)
def test_equals_one_process(ranks, tmp_path, world_size, options, microsteps):
    batch = {"training__global_batch_size": 2 * world_size * microsteps}
    found = compare(ranks, tmp_path, world_size, options | batch)
    assert {what: d for what, d in found.items() if d > TOLERANCE} == {}
    assert all(d == 0 for what, d in found.items() if what.startswith("initial weight")), "not bit for bit"
    assert len(found) == len({what.split()[-1] for what in found if "weight" in what}) * (STEPS + 2) + 2 * STEPS + 1


@pytest.mark.parametrize(
    ("broken", "world_size", "options", "first"),
    [
        (_mean_instead_of_sum, 2, ZERO_3, "step 1 norm"),
        (_rank_in_the_seed, 2, ZERO_3, "initial weight tok_embeddings.weight"),
        (_neighbours_instead_of_strides, 2, ZERO_3, "step 1 loss"),
        (_no_sum_over_replicas, 4, HYBRID, "step 1 norm"),
        (_mean_of_means, 2, ZERO_3, "step 1 loss"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_broken_on_purpose_goes_red(ranks, tmp_path, broken, world_size, options, first):
    found = compare(ranks, tmp_path, world_size, options, broken)
    assert next(what for what, d in found.items() if d > 1e-6) == first


UNITS = 5  # of fully_shard: three blocks, the embedding, and norm with output head


@pytest.mark.parametrize(
    ("layout", "gathers", "scatters", "reduces"),
    [
        ("replicate", 0, 0, UNITS),
        ("ZeRO-1", UNITS, UNITS, 0),
        ("ZeRO-2", UNITS, 3 * UNITS, 0),
        ("ZeRO-3", 3 * (2 * UNITS - 1), 3 * UNITS, 0),  # the last unit is not gathered again for its backward
    ],
)
def test_traffic_of_three_microsteps(ranks, tmp_path, layout, gathers, scatters, reduces):
    """The table of docs/data_parallel.md; one more all-reduce counts the valid tokens."""
    job = resolve(tmp_path, 2, LAYOUTS[layout](2) | {"training__global_batch_size": 12})
    expected = {"allreduce_": reduces + 1, "_allgather_base_": gathers, "_reduce_scatter_base_": scatters}
    for found in ranks(2).run(collectives, job=job):
        assert found == {name: count for name, count in expected.items() if count}


def test_the_clip_is_at_work(tmp_path):
    """The rows above prove clipping only if their norms exceed max_norm."""
    job = resolve(tmp_path, 1, {})
    assert all(norm > job.training.max_norm for norm in parity.run_alone(job, CPU, steps=STEPS).norms)


def test_bfloat16_policy(ranks, tmp_path):
    """Weights in float32, compute in bfloat16, gradients reduced in float32: two ranks against one, both in bfloat16.

    A bfloat16 product is off by about 2^-9 of its size; gradients are compared by their relative error over all
    weights, and one rank in bfloat16 must be farther from float32 than two ranks are from it."""
    options = {"training__dtype": "float32", "training__global_batch_size": 4}
    half = options | {"training__mixed_precision_param": "bfloat16"}
    traces = {}
    for world_size, layout in ((1, half), (2, half), (1, options)):
        job = resolve(tmp_path, world_size, layout)
        key = world_size, job.training.mixed_precision_param
        traces[key] = ranks(world_size).run(trace, job=job)[0]

    def error(one: parity.Trace, other: parity.Trace) -> float:
        flat = [torch.cat([g.flatten() for g in t.gradients[0].values()]) for t in (one, other)]
        return ((flat[0] - flat[1]).norm() / flat[1].norm()).item()

    rounding = error(traces[1, "bfloat16"], traces[1, "float32"])
    layout = error(traces[2, "bfloat16"], traces[1, "bfloat16"])
    assert 1e-4 < rounding < 2e-2
    assert layout < rounding
