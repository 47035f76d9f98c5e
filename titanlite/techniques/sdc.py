"""Silent data corruption: a device that computes or stores wrong numbers without an error. Every debug.sdc_check_freq
steps, ranks with replicas of a weight compare hashes of the weight's bits, and each rank computes the step's forward
and backward twice and compares hashes of loss and gradients."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.checkpointer import Checkpointer
from titanlite.checkpoint.folder import SUSPECT
from titanlite.checkpoint.tensors import plain_shard
from titanlite.config.errors import TrainingError
from titanlite.data.loader import Batch
from titanlite.launch.progress import alive
from titanlite.step_guard import StepGuard
from titanlite.train_step import Observer, TrainStep

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
CHUNK_ELEMENTS = 2**22
"""Number of elements that are hashed at a time. Hashing takes 8 bytes of memory per element of a chunk."""


@torch.no_grad()
def hash_of_bits(tensor: Tensor) -> Tensor:
    """Return a hash of a plain tensor's bits and their positions, an int64 scalar on the tensor's device. The hash is
    the sum, modulo 2**64, of each element's bits times an odd number that depends on the position. Multiplication by an
    odd number loses no bit, so every change of a single element changes the sum."""
    bits = tensor.detach().contiguous().reshape(-1).view(INTEGERS[tensor.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(bits), CHUNK_ELEMENTS):
        chunk = bits[start : start + CHUNK_ELEMENTS]
        odd = torch.arange(2 * start + 1, 2 * (start + len(chunk)), 2, device=tensor.device)
        total += (chunk * odd).sum()
        alive()
    return total


class CorruptionCheck(Observer):
    """Compares replicas, and a step with its repetition, every `freq` steps. Every rank must make the same calls.
    A checkpoint that `checkpointer`, if any, saves counts as correct only after a later check finds no difference."""

    def __init__(
        self,
        freq: int,
        train_step: TrainStep,
        optimizer: torch.optim.Optimizer,
        guard: StepGuard,
        checkpointer: Checkpointer | None,
    ):
        self.freq, self.train_step, self.guard = freq, train_step, guard
        self.parameters, self.optimizer = dict(train_step.model.named_parameters()), optimizer
        self.checkpointer = checkpointer
        if checkpointer:
            checkpointer.agreed_step = 0

    def after_backward(self, step: int, batches: list[Batch], loss_sum: Tensor, *, is_test: bool) -> None:
        if is_test or step % self.freq == 0:
            self.check(step, loss_sum, lambda: self.train_step.forward_backward(batches, self.guard.loss_scale))

    def check(self, step: int, loss_sum: Tensor, compute_again: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Compare a step's loss and gradients with the results of `compute_again`, and the weights with their replicas.
        `compute_again` repeats the step's forward and backward and leaves its gradients in the parameters. `loss_sum`
        is this rank's sum of token losses. Raises TrainingError on every rank if some rank found a difference."""
        gradients = self._hashes_of_gradients()
        self.optimizer.zero_grad()
        again, _ = compute_again()
        differ = self._hashes_of_gradients() != gradients
        names = [name for name, wrong in zip(self.parameters, differ.tolist(), strict=True) if wrong]
        own = []
        if hash_of_bits(again) != hash_of_bits(loss_sum):
            own.append((0, [dist.get_rank()], "the loss"))
        elif names:
            own.append((1, [dist.get_rank()], f"the gradient of {_and_more(names)}"))
        own += self._different_replicas()
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, own)
        if found := [problem for each in problems for problem in each]:
            consequence = f"; {self.checkpointer.set_aside(SUSPECT)}" if self.checkpointer else ""
            raise TrainingError(f"step {step}: {_explanation(found)}{consequence}")
        if self.checkpointer:
            self.checkpointer.agreed_step = step

    def _hashes_of_gradients(self) -> Tensor:
        gradients = [parameter.grad for parameter in self.parameters.values()]
        none = torch.zeros((), dtype=torch.int64)
        return torch.stack([none if grad is None else hash_of_bits(plain_shard(grad)).cpu() for grad in gradients])

    def _different_replicas(self) -> list[tuple[int, list[int], str]]:
        """Return this rank's weights whose replicas differ, as (2, ranks, names); 2 is the kind for _explanation."""
        by_replicas: dict[tuple[DeviceMesh, tuple[int, ...]], list[str]] = {}
        for name, parameter in self.parameters.items():
            if axes := _replicated_axes(parameter):
                by_replicas.setdefault((parameter.device_mesh, axes), []).append(name)
        wrong: dict[tuple[int, ...], list[str]] = {}
        for (mesh, axes), names in by_replicas.items():
            own = [hash_of_bits(plain_shard(self.parameters[name])).to(mesh.device_type) for name in names]
            hashes = _gathered(torch.stack(own), mesh, axes).tolist()
            for name, of_replicas in zip(names, zip(*hashes, strict=True), strict=True):
                if len(set(of_replicas)) > 1:
                    wrong.setdefault(tuple(_minority(_replica_ranks(mesh, axes), of_replicas)), []).append(name)
        return [(2, list(ranks), _and_more(names)) for ranks, names in wrong.items()]


def _replicated_axes(parameter: nn.Parameter) -> tuple[int, ...]:
    if not isinstance(parameter, DTensor):
        return ()
    sizes = parameter.device_mesh.shape
    return tuple(axis for axis, p in enumerate(parameter.placements) if p.is_replicate() and sizes[axis] > 1)


def _gathered(own: Tensor, mesh: DeviceMesh, axes: Iterable[int]) -> Tensor:
    """Return the hashes of all replicas over mesh axes, [replicas, parameters], in the order of `_replica_ranks`."""
    gathered = own[None]
    for axis in reversed(tuple(axes)):
        of_axis = [torch.empty_like(gathered) for _ in range(mesh.size(axis))]
        dist.all_gather(of_axis, gathered, group=mesh.get_group(axis))
        gathered = torch.cat(of_axis)
    return gathered


def _replica_ranks(mesh: DeviceMesh, axes: tuple[int, ...]) -> list[int]:
    """Return the ranks that have the same shard as this rank; the first axis varies slowest."""
    place = tuple(slice(None) if axis in axes else n for axis, n in enumerate(mesh.get_coordinate()))
    return mesh.mesh[place].flatten().tolist()


def _minority(ranks: list[int], hashes: tuple[int, ...]) -> list[int]:
    """Return the ranks whose hash differs from the majority's hash; all ranks if there is no majority."""
    counts = {value: hashes.count(value) for value in hashes}
    most = max(counts, key=counts.__getitem__)
    return [rank for rank, value in zip(ranks, hashes, strict=True) if value != most or 2 * counts[most] <= len(ranks)]


def _and_more(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _explanation(found: list[tuple[int, list[int], str]]) -> str:
    """Return in one line which ranks computed or store which wrong values. A wrong loss is the rank's own error,
    and makes the gradients of all ranks wrong, so the line names wrong gradients only if no loss is wrong."""
    kinds = [
        "computed twice with different results",
        "computed twice with different results (or got it from a rank that did)",
        "with other bits than replicas",
    ]
    words = []
    for kind, description in enumerate(kinds):
        ranks: dict[str, set[int]] = {}
        for number, of_problem, what in found:
            if number == kind and not (kind == 1 and words):
                ranks.setdefault(what, set()).update(of_problem)
        for what, each in ranks.items():
            words.append(f"{what} {description}: rank {', '.join(map(str, sorted(each)))}")
    return f"silent data corruption: {'; '.join(words)}; test or replace their devices"
