"""Record fingerprints of a run's steps, without gathering tensors and without changing any number of the training."""

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.checkpoint.tensors import dequantized, named_tensors
from titanlite.config.schema import Debug, Float8, Int8, Job, Optimizer, Training
from titanlite.data.loader import Batch, SequenceShard
from titanlite.loss import count_valid
from titanlite.model import Llama
from titanlite.parallel.mesh import Layout
from titanlite.parallel.shards import local_shard, shard_slice
from titanlite.step_guard import StepGuard
from titanlite.techniques.fingerprints import file
from titanlite.techniques.fingerprints.sketch import SIZE, fingerprint, rows_of_slice, scaled
from titanlite.train_step import Observer, TrainStep

STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Names of the optimizer states that have the shape of their parameter."""
AXES = "data", "context", "tensor"


class Place:
    """Maps rows of this rank's activations to tokens of the global batch. `degree`: the degree of data parallelism."""

    def __init__(self, layout: Layout, shard: SequenceShard, seq_len: int, degree: int):
        self.data_rank, self.degree, self.seq_len = layout.data_rank, degree, seq_len
        self.tensor_rank, self.tensor_degree = layout.mesh.get_local_rank("tp"), layout.mesh["tp"].size()
        self.positions = torch.from_numpy(np.arange(seq_len)[shard.own])

    def rows(self, n_rows: int, call: int, *, sequence_parallel: bool = True) -> Tensor:
        """Return the global index of each row of an activation, [n_rows] int64: the index of the row's sequence in the
        global batch, times the sequence length, plus the row's position. `call`: number of the module's earlier forward
        passes in this step, all of this size. `sequence_parallel`: whether rows are sharded over tp."""
        n_shards = self.tensor_degree if sequence_parallel else 1
        n_tokens, first = len(self.positions), self.tensor_rank * n_rows if sequence_parallel else 0
        token = torch.arange(first, first + n_rows)
        sequence = call * (n_rows * n_shards // n_tokens) + token // n_tokens
        return (self.data_rank + self.degree * sequence) * self.seq_len + self.positions[token % n_tokens]


class Fingerprints(Observer):
    """Writes the fingerprints of step 1 and of every debug.fingerprint_freq-th step. Every rank must make the same
    calls. This must be the first observer, because later observers may run forward and backward again. `full_model`:
    the model with all stages, on the meta device; `shard`: the tokens of each sequence that this rank has."""

    def __init__(
        self,
        debug: Debug,
        job: Job,
        training: Training,
        optimizer_section: Optimizer,
        float8: Float8,
        int8: Int8,
        full_model: Llama,
        layout: Layout,
        shard: SequenceShard,
        train_step: TrainStep,
        optimizer: torch.optim.Optimizer,
        guard: StepGuard,
    ):
        self.freq, self.folder = debug.fingerprint_freq, Path(job.dump_folder)
        self.train_step, self.optimizer, self.guard = train_step, optimizer, guard
        parallelism = train_step.parallelism
        self.place = Place(layout, shard, training.seq_len, parallelism.data_parallel_degree)
        states, lower = optimizer_section.state_dtype, {"float8": float8.enable, "int8": int8.enable}
        self.description = file.Description(
            step=0,
            compute_dtype=next((name for name, enabled in lower.items() if enabled), training.mixed_precision_param),
            weights_dtype=training.dtype,
            state_dtype=training.dtype if states == "auto" else states,
            counts={
                **{f"{axis} parallel": getattr(parallelism, f"{axis}_parallel_degree") for axis in AXES},
                "pipeline stages": parallelism.n_stages,
                "microbatches": getattr(train_step.runner, "n_microbatches", 1),
                "sequences": training.global_batch_size,
                "tokens": training.global_batch_size * training.seq_len,
            },
        )
        self._entries, self._entries_of_update = entries(full_model)
        self._names = {parameter: name for name, parameter in train_step.model.named_parameters()}
        self._own: dict[str, Tensor] = {}  # this rank's terms of the step's fingerprints
        self._full: dict[str, Tensor] = {}  # the step's fingerprints, summed over all ranks
        self._is_active = self._awaits_update = False
        self._updated_step: int | None = None  # the step whose update is in `_full`
        self._calls, self._seen = Counter[str](), set[tuple[str, int]]()
        model = train_step.model
        modules = {"tok_embeddings": model.tok_embeddings, "norm": model.norm}
        modules |= {f"layers.{number}": block for number, block in model.layers.items()}
        for name in [name for name, module in modules.items() if module is not None]:
            modules[name].register_forward_hook(functools.partial(self._see_output, name))
        optimizer.register_step_post_hook(lambda *_: self._see_update())

    def before_backward(self, step: int) -> None:
        """Record the weights and the optimizer states, if fingerprints of this step are due."""
        self._is_active = step % self.freq == 0 or step == 1
        if not self._is_active:
            return
        self._own, self._calls, self._seen = {}, Counter(), set()
        if self._updated_step == step - 1:
            self._full = {f"input{name[6:]}": each for name, each in self._full.items() if name.startswith("update ")}
        else:
            self._full = {}
            self._add_weights_and_states("input")
        tensors = named_tensors(self.train_step.model)
        for name in tensors.keys() - self._names.values():  # routers' buffers, which change after the update
            self._add_tensor("input", name, tensors[name])

    def after_backward(self, step: int, batches: list[Batch], loss_sum: Tensor, *, is_test: bool) -> None:
        """Write the fingerprints of the step's input, activations, gradients and loss, if they are due."""
        is_due, self._is_active = self._is_active and not is_test, False
        if not is_due:
            return
        for parameter, name in self._names.items():
            if parameter.grad is not None:
                self._add_tensor("gradient", name, parameter.grad)
        contributes = self.train_step.contributes_loss  # true on only one of the ranks that have the same tokens
        for call, batch in enumerate(batches):
            rows = self.place.rows(batch.tokens.numel(), call, sequence_parallel=False).to(batch.tokens.device)
            # The signs of each (position, token, target) add up to the same sum in any order of the sequences.
            kinds = (rows % self.place.seq_len << 40) + (batch.tokens.flatten() << 20) + batch.targets.flatten()
            self._add("sequences", fingerprint("sequences", torch.ones_like(kinds)[:, None], kinds) * contributes)
            for name, column in (("tokens", batch.tokens), ("targets", batch.targets)):
                self._add(f"input {name}", fingerprint(name, column.reshape(-1, 1), rows) * contributes)
        valid = count_valid([batch.targets for batch in batches], loss_sum.device) * contributes
        self._add("loss", torch.stack([loss_sum, valid, *[torch.zeros_like(valid)] * (SIZE - 2)]))
        self._full |= self._summed(self._entries)
        loss, n_valid, *_ = self._full.pop("loss")
        self._full["forward loss"] = scaled(loss.new_ones(SIZE), loss / n_valid)
        sequences = [int(each) for each in self._full.pop("sequences")[1:].tolist()]
        counts = {"valid tokens": n_valid.item(), "accumulation steps": len(batches)}
        counts = {name: count for name, count in (self.description.counts | counts).items() if count}
        self.description = self.description.model_copy(update={"step": step, "counts": counts, "sequences": sequences})
        self._write()
        self._awaits_update = True

    def _see_output(self, name: str, module: nn.Module, _: Any, output: Tensor) -> None:
        if not self._is_active:
            return
        call, own = self._calls[name], local_shard(output.detach())
        self._calls[name] += 1
        rows = self.place.rows(len(own), call)
        self._add(f"forward {name}", fingerprint(name, own, rows))
        if output.requires_grad:
            output.register_hook(functools.partial(self._see_gradient, name, call, rows))

    def _see_gradient(self, name: str, call: int, rows: Tensor, gradient: Tensor) -> None:
        """Record the gradient of a module's output, but only once if a split backward calls this hook twice."""
        if self._is_active and (name, call) not in self._seen:
            self._seen.add((name, call))
            own = fingerprint(name, local_shard(gradient), rows)
            self._add(f"backward {name}", scaled(own, 1 / self.guard.loss_scale))

    def _see_update(self) -> None:
        """Write the step's file again, with the weights and optimizer states after the update."""
        if not self._awaits_update:
            return
        self._awaits_update, self._own = False, {}
        self._add_weights_and_states("update")
        self._full |= self._summed(self._entries_of_update)
        self._updated_step = self.description.step
        self._write()

    def _add_weights_and_states(self, phase: str) -> None:
        for parameter, name in self._names.items():
            self._add_tensor(phase, name, parameter)
            states = self.optimizer.state.get(parameter, {})
            for key in STATES:
                if key in states:
                    self._add_tensor(phase, f"{name} {key}", dequantized(states[key]))

    def _add_tensor(self, phase: str, name: str, tensor: Tensor) -> None:
        offset, size = shard_slice(tensor)
        rows = rows_of_slice(offset, size, tensor.shape)
        matrix = local_shard(tensor.detach()).reshape(len(rows), size[-1])  # an empty shard has 0 rows
        self._add(f"{phase} {name}", fingerprint(name, matrix, rows, offset[-1]), matrix.numel() / tensor.numel())

    def _add(self, entry: str, own: Tensor, coverage: float = 0.0) -> None:
        own = torch.cat([own, own.new_full((1,), coverage)]).to(self.train_step.device)
        self._own[entry] = self._own[entry] + own if entry in self._own else own

    def _summed(self, names: list[str]) -> dict[str, Tensor]:
        """Return each entry's sum over ranks, divided by its number of replicas, the sum of the last column."""
        none = torch.zeros(SIZE + 1, dtype=torch.float64, device=self.train_step.device)
        sums, added = torch.stack([self._own.get(name, none) for name in names]), torch.zeros(len(names))
        dist.all_reduce(sums)
        added[[index for index, name in enumerate(names) if name in self._own]] = 1
        dist.all_reduce(added)
        sums = sums[:, :-1] / sums[:, -1:].where(sums[:, -1:] > 0, 1)
        return {name: own for name, own, n in zip(names, sums, added.tolist(), strict=True) if n}

    def _write(self) -> None:
        if dist.get_rank() == 0:
            file.write(self.folder, self.description, self._full)


def entries(full_model: Llama) -> tuple[list[str], list[str]]:
    """Return two lists, the same on all ranks: names of a step's fingerprints before its update, and those after it."""
    tensors, parameters = [*named_tensors(full_model)], [name for name, _ in full_model.named_parameters()]
    modules = ["tok_embeddings", *(f"layers.{number}" for number in full_model.layers), "norm"]
    states = [f"{name} {key}" for name in parameters for key in STATES]
    names = ["loss", "sequences", "input tokens", "input targets", *(f"input {name}" for name in tensors + states)]
    names += [f"{phase} {module}" for phase in ("forward", "backward") for module in modules]
    names += [f"gradient {name}" for name in parameters]
    return names, [f"update {name}" for name in parameters + states]
