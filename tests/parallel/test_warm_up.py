"""Compiling the stages of a pipeline before its first step: everything is compiled, and nothing else changes."""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import compilation_time_metrics, counters

from tests.parallel.test_layouts import COMPILED, MODEL, PP, SHARD, TP, schedule, with_batches, world_size
from tests.parallel.test_parity import CPU, resolve
from titanlite import config
from titanlite.tools.parity.reference import Trace, trace_of
from titanlite.tools.parity.training_run import TrainingRun

INTERLEAVED = schedule("Interleaved1F1B")
FULL = {"activation_checkpoint__mode": "full"}


def compiled_graphs() -> tuple[int, int]:
    """Return how many graphs dynamo has compiled, and for how many of them autograd has compiled a backward."""
    return counters["stats"]["unique_graphs"], len(compilation_time_metrics.get("backward._backward_impl", ()))


def run(job: config.Config, *, warm_up: bool) -> tuple[list[tuple[int, int]], list[str], Trace]:
    """Take a step and validate on this rank. Return the graphs compiled by the warm-up and after the step and the
    validation, what the warm-up has left behind, and all results."""
    torch.compiler.reset()
    counters.clear()
    compilation_time_metrics.clear()
    training = TrainingRun(job, CPU)
    training.train_step.runner.compiles, training.train_step.runner.validates = False, True
    batches, generator, graphs, left = training.loader.next(), torch.get_rng_state(), [], []
    if warm_up:
        training.train_step.runner.warm_up(batches[0])
        left = [name for name, parameter in training.parameters.items() if parameter.grad is not None]
        left += [] if torch.equal(generator, torch.get_rng_state()) else ["random state"]
        graphs.append(compiled_graphs())
    loss_sum, valid = training.train_step.forward_backward(batches)
    trace = {"loss": loss_sum} | trace_of("gradient", {name: p.grad for name, p in training.parameters.items()})
    training.update(training.totals(loss_sum, valid))
    trace["validation loss"] = torch.tensor(training.train_step.validate(batches))
    graphs.append(compiled_graphs())
    training.loader.close()
    return graphs, left, trace | trace_of("weight", training.parameters)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout",
    [
        PP,
        PP | SHARD,
        INTERLEAVED | TP,
        PP | SHARD | FULL,
        PP | {"compile__components": '["loss"]'},
    ],
    ids=["pp", "pp x shard", "Interleaved1F1B x tp", "pp x shard, full AC", "pp, loss only"],
)
def test_a_warm_pipeline_compiles_nothing_more_and_computes_the_same(ranks, tmp_path, layout: dict[str, Any]):
    options = with_batches(MODEL | COMPILED | layout)
    n = world_size(options)
    job = resolve(tmp_path, n, options)
    cold, warm = (ranks(n).run(run, job=job, warm_up=warm_up) for warm_up in (False, True))
    for ((total,), _, expected), ((before, after), left, actual) in zip(cold, warm, strict=True):
        assert left == []
        assert before == after <= total, "compiled after the warm-up, or for nothing"
        assert actual.keys() == expected.keys()
        assert [name for name, value in actual.items() if not torch.equal(value, expected[name])] == []
    assert any(graphs[0] > (0, 0) for graphs, _, _ in warm)
