"""Activation checkpointing over groups of layers: what is saved, and how often weights are gathered. test_layouts.py
compares every layout with one process."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.config import assert_rejected, load
from tests.parallel.test_layouts import FULL, ONE_ACCUMULATION_STEP, SHARD, with_batches
from tests.parallel.test_parity import CPU, ZERO_2, ZERO_3, collectives, resolve
from titanlite import config
from titanlite.tools.parity.training_run import TrainingRun

N_LAYERS = 8
SIZE = "activation_checkpoint__layers_per_checkpoint"


def job_of(tmp_path: Any, n_ranks: int, options: dict[str, Any]) -> config.Config:
    return resolve(tmp_path, n_ranks, with_batches(ONE_ACCUMULATION_STEP | {"model__n_layers": N_LAYERS} | options))


class Storages(TorchDispatchMode):
    """This mode has the storages of all results of operators that still exist, by their address."""

    def __init__(self) -> None:
        super().__init__()
        self.references: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for storage in (each.untyped_storage() for each in tree_leaves(out) if type(each) is torch.Tensor):
            self.references[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return out

    def alive(self) -> dict[int, int]:
        """Return the bytes of each storage, by its address."""
        return {address: size for address, (storage, size) in self.references.items() if not storage.expired()}


def saved_by_layers(job: config.Config) -> tuple[list[int], list[int], dict[int, int], int]:
    """Return the addresses of the inputs of all layers; the bytes of the activations that exist after the forward of
    all layers, by their address, without the last layer's result; and the bytes of that."""
    run = TrainingRun(job, CPU)
    run.loader.close()
    for name in ("norm", "output"):
        run.model.register_module(name, None)
    inputs: list[int] = []
    for block in run.model.layers.values():
        block.register_forward_pre_hook(lambda _, args: inputs.append(args[0].untyped_storage().data_ptr()))
    tokens = torch.zeros(job.training.local_batch_size, job.training.seq_len, dtype=torch.int64)
    run.model(tokens)  # FSDP begins, DTensor's rules are computed
    inputs.clear()
    with Storages() as storages:
        x_ND = run.model(tokens)
        alive = storages.alive()
    own = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in run.parameters.values()]
    for tensor in [*own, run.model.rope, tokens]:
        alive.pop(tensor.untyped_storage().data_ptr(), None)
    size = alive.pop(x_ND.untyped_storage().data_ptr())
    return inputs, alive, size


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_the_inputs_of_every_nth_layer_are_saved(ranks, tmp_path, n, mode):
    """And nothing else of the layers: the inputs of the others are freed in the forward."""
    options = {SIZE: n, "activation_checkpoint__mode": mode}
    inputs, alive, size = ranks(1).run(saved_by_layers, job=job_of(tmp_path, 1, options))[0]
    assert alive == dict.fromkeys(inputs[::n], size)
    assert size == 4 * 16 * 32 * 8  # tokens, width, bytes


def test_full_checkpointing_saves_the_inputs_of_every_layer(ranks, tmp_path):
    inputs, alive, size = ranks(1).run(saved_by_layers, job=job_of(tmp_path, 1, FULL))[0]
    assert alive == dict.fromkeys(inputs, size)
    inputs, alive, size = ranks(1).run(saved_by_layers, job=job_of(tmp_path, 1, {}))[0]
    assert sum(alive.values()) > 10 * size * N_LAYERS


def most_gathered(job: config.Config) -> tuple[int, int]:
    """Return how many layers compute in a step, attention counted, and of how many the weights are gathered at most."""
    run = TrainingRun(job, CPU)
    layers, gathered = run.model.layers.values(), []
    for layer in layers:
        layer.attention.register_forward_pre_hook(
            lambda *_: gathered.append(sum(not isinstance(each.attention.wq.weight, DTensor) for each in layers))
        )
    run.train_step.forward_backward(run.loader.next())
    run.loader.close()
    return len(gathered), max(gathered)


@pytest.mark.parametrize(
    ("options", "computed", "gathered", "gathers"),
    [
        ({}, N_LAYERS, 1, 2 * N_LAYERS + 3),
        (FULL, 2 * N_LAYERS, 1, 2 * N_LAYERS + 3),
        ({SIZE: 4}, 2 * N_LAYERS, 2, 2 * N_LAYERS + 7),
        (FULL | {SIZE: 4}, 3 * N_LAYERS - 2, 2, 2 * N_LAYERS + 7),
        (FULL | {SIZE: 2}, 3 * N_LAYERS - 4, 2, 2 * N_LAYERS + 3),
        (FULL | {SIZE: 3}, 3 * N_LAYERS - 3, 2, 2 * N_LAYERS + 5),
        (FULL | {SIZE: 4} | ZERO_2, 3 * N_LAYERS - 2, N_LAYERS, N_LAYERS + 2),
    ],
    ids=["no AC", "full AC", "groups of 4", "full AC, 4", "full AC, 2", "full AC, 3", "full AC, 4, never resharded"],
)
def test_a_group_gathers_its_weights_one_layer_after_the_other(ranks, tmp_path, options, computed, gathered, gathers):
    """A group of n layers gathers n in the forward, n - 1 to recompute it and n - 1 in the backward: its last but
    one is still gathered. A gather in flight is no gathered layer. The embedding is gathered twice besides, and the
    head once. Under full AC the last layer of a group is computed twice, and the others three times."""
    job = job_of(tmp_path, 2, SHARD | ZERO_3 | options)
    assert ranks(2).run(most_gathered, job=job)[0] == (computed, gathered)
    (counts, _) = ranks(2).run(collectives, job=job)
    assert counts["_allgather_base_"] == gathers
    assert counts["_reduce_scatter_base_"] == N_LAYERS + 2


def test_operators_are_saved_by_no_group(tmp_path):
    mode, size = "activation_checkpoint.mode", "activation_checkpoint.layers_per_checkpoint"
    options = {mode: "selective", size: 2}
    assert_rejected(lambda: load(tmp_path, options), options, {size: f'read only when {mode} is "none" or "full"'})
