"""Muon updates the matrices of the layers by momentum that Newton-Schulz iterations orthogonalize (Keller Jordan,
kellerjordan.github.io/posts/muon; at scale: Moonlight, arXiv:2502.16982). AdamW updates all other weights. The
iteration needs the full matrix, so each matrix has one owner among the ranks with its shards or replicas. The owner
gathers the momentum, iterates, and sends shards of the result back. Layouts do not change the iteration's sums."""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.config.schema import Optimizer
from titanlite.optimizer import build_adam, parameter_groups
from titanlite.parallel.shards import Slice, local_shard, shard_slice

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Coefficients of the odd polynomial that moves singular values to between about 0.7 and 1.2 (Keller Jordan)."""
PLACEMENT = "device_mesh", "placements"
"""Attributes of a DTensor that, together with the shape, decide which slice of a weight each rank has."""
RMS = 0.2
"""Root mean square of update / learning rate, about as large as AdamW's (arXiv:2502.16982, section 2.2)."""


class Unit(NamedTuple):
    """The matrices that one rank orthogonalizes in a round: one matrix, or some matrices of a stack of experts."""

    number: int  # index of the weight among the optimizer's matrices
    shape: tuple[int, ...]
    first: int  # number of the first expert; 0 for a matrix


def is_orthogonalized(name: str, parameter: Tensor) -> bool:
    """Return whether Muon updates a parameter: a matrix or a stack of matrices of a layer, but no bias."""
    return name.startswith("layers.") and parameter.dim() >= 2 and not name.endswith("bias")


def newton_schulz(matrix: Tensor, n_steps: int) -> Tensor:
    """Return approximately U V^T, where U S V^T is the singular value decomposition of a matrix [..., rows, columns]:
    its nearest orthogonal matrix. The iteration computes in the matrix's data type."""
    a, b, c = COEFFICIENTS
    transposed = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if transposed else matrix
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)  # all singular values are now at most 1
    for _ in range(n_steps):
        product = x @ x.mT
        x = a * x + (b * product + c * product @ product) @ x
    return x.mT if transposed else x


def assign(shapes: Sequence[tuple[int, ...]], n_ranks: int) -> list[list[Unit]]:
    """Return rounds of units; in a round, rank r owns the unit with index r. Experts, divided among all ranks, come
    first. Matrices follow by decreasing work, so that the units of a round take about the same time."""
    experts, matrices = list[Unit](), list[Unit]()
    for number, shape in enumerate(shapes):
        if len(shape) == 2:
            matrices.append(Unit(number, shape, 0))
            continue
        size = math.ceil(shape[0] / n_ranks)
        firsts = range(0, shape[0], size)
        experts += [Unit(number, (min(size, shape[0] - first), *shape[1:]), first) for first in firsts]
    matrices.sort(key=lambda unit: (-work_of(unit.shape), unit.number))
    units = experts + matrices
    return [units[i : i + n_ranks] for i in range(0, len(units), n_ranks)]


def work_of(shape: tuple[int, ...]) -> int:
    """Return a number proportional to the floating-point operations of a Newton-Schulz iteration for a shape."""
    return math.prod(shape) * min(shape[-2:])


class Slices:
    """The slice of a unit on each rank, by rank. A rank without elements of the unit has a slice of size 0."""

    def __init__(self, unit: Unit, of_weight: Iterable[Slice]):
        self.of_ranks = [_of_unit(unit, each) for each in of_weight]
        self.elements = [math.prod(each.size) for each in self.of_ranks]
        self._ranks: dict[Slice, list[int]] = {}
        for rank, each in enumerate(self.of_ranks):
            self._ranks.setdefault(each, []).append(rank)

    def sent(self, rank: int, owner: int) -> int:
        """Return how many elements of the unit `rank` sends to `owner`: 0 if another rank sends the same slice."""
        own = self.of_ranks[rank]
        replicas = self._ranks[own]
        sender = owner if self.of_ranks[owner] == own else replicas[owner % len(replicas)]
        return self.elements[rank] if rank == sender else 0


def _of_unit(unit: Unit, of_weight: Slice) -> Slice:
    """Return the part of a weight's slice that belongs to a unit, as a slice of the unit."""
    if len(unit.shape) == 2:
        return of_weight
    (first, *offset), (n, *size) = of_weight
    begin, end = max(first, unit.first), min(first + n, unit.first + unit.shape[0])
    return Slice((max(begin - unit.first, 0), *offset), (max(end - begin, 0), *size))


class Assignment(NamedTuple):
    """A unit (one or more matrices), the rank that orthogonalizes the unit (owner), and the unit's slices by rank."""

    unit: Unit
    owner: int
    slices: Slices


class Muon(torch.optim.Optimizer):
    """Updates `matrices`, plain tensors or DTensors, by Muon, and all other weights by `adamw`. `group`: the ranks with
    shards of the matrices; None: this rank alone. The state of a matrix, momentum_buffer, is placed like the matrix."""

    def __init__(
        self,
        adamw: torch.optim.AdamW,
        matrices: Sequence[nn.Parameter],
        optimizer: Optimizer,
        group: dist.ProcessGroup | None,
    ):
        self.adamw, self.matrices, self.options, self._group = adamw, list(matrices), optimizer, group
        self.dtype = getattr(torch, optimizer.muon_dtype)
        self._rank, self._n_ranks = (group.rank(), group.size()) if group else (0, 1)
        self.clip: Any = None
        """A qk_clip.QkClip, whose `step` is the last part of each step of this optimizer; None: no QK-clip."""
        self._step_supports_amp_scaling = getattr(adamw, "_step_supports_amp_scaling", False)
        own = {"params": list(matrices), "weight_decay": optimizer.weight_decay, "is_muon": True}
        super().__init__(adamw.param_groups + ([own] if matrices else []), adamw.defaults | {"is_muon": False})

    @functools.cached_property
    def _rounds(self) -> list[list[Assignment]]:
        """Each round's assignments, computed in the first step: a dry run takes no step, and cannot exchange slices."""
        keys = [(weight.shape, *(getattr(weight, name, None) for name in PLACEMENT)) for weight in self.matrices]
        weights = dict(zip(keys, self.matrices, strict=True))
        of_weights = {key: self._of_ranks(shard_slice(weight)) for key, weight in weights.items()}
        build = functools.cache(lambda unit, key: Slices(unit, of_weights[key]))
        return [
            [Assignment(x, owner, build(x._replace(number=0), keys[x.number])) for owner, x in enumerate(units)]
            for units in assign([tuple(weight.shape) for weight in self.matrices], self._n_ranks)
        ]

    def _of_ranks(self, own: Slice) -> list[Slice]:
        slices: list[Any] = [own] * self._n_ranks
        if self._group is not None:
            dist.all_gather_object(slices, own, self._group)
        return slices

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step with gradients divided by `grad_scale`, on all ranks; change nothing if `found_inf` is 1."""
        self.adamw.state = self.state
        self.adamw.param_groups = [group for group in self.param_groups if not group["is_muon"]]
        scaling = {name: getattr(self, name) for name in ("grad_scale", "found_inf") if hasattr(self, name)}
        vars(self.adamw).update(scaling)
        self.adamw.step()
        for name in scaling:
            delattr(self.adamw, name)
        if self.matrices:
            self._step_of_matrices(self.param_groups[-1], scaling)
        if self.clip is not None:
            self.clip.step(scaling.get("found_inf"))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and the largest attention logits of QK-clip."""
        super().zero_grad(set_to_none)
        if self.clip is not None:
            self.clip.reset()

    def _step_of_matrices(self, own: dict[str, Any], scaling: dict[str, Tensor]) -> None:
        takes = 1 - self.found_inf if scaling else 1.0
        for weight in self.matrices:
            self._add_to_momentum(weight, scaling)
            local_shard(weight).mul_(1 - own["lr"] * own["weight_decay"] * takes)
        gathered = [self._gather(first, scaling) for first in self._rounds[:1]]
        for number, assignments in enumerate(self._rounds):
            full = self._receive(assignments, *gathered.pop())
            gathered += [self._gather(later, scaling) for later in self._rounds[number + 1 : number + 2]]
            if full is not None:
                full = newton_schulz(full, self.options.muon_newton_schulz_steps)
            self._update(assignments, full, own["lr"] * RMS)

    def _add_to_momentum(self, weight: Tensor, scaling: dict[str, Tensor]) -> None:
        if not (state := self.state[weight]):
            state["momentum_buffer"] = torch.zeros_like(weight)
        gradient, buffer = local_shard(weight.grad), local_shard(state["momentum_buffer"])
        if not scaling:
            buffer.lerp_(gradient, 1 - self.options.muon_momentum)
            return
        new = buffer.lerp(gradient / scaling["grad_scale"], 1 - self.options.muon_momentum)
        buffer.copy_(buffer.where(scaling["found_inf"].bool(), new))

    def _gather(self, assignments: Sequence[Assignment], scaling: dict[str, Tensor]) -> tuple[Tensor, Any]:
        """Start to send Nesterov momentum to the owners of a round. Return the receive buffer and the dist.Work."""
        sizes = [x.slices.sent(self._rank, x.owner) for x in assignments]
        sent = [self._nesterov(x, scaling) for x, size in zip(assignments, sizes, strict=True) if size]
        flat = torch.cat(sent) if sent else self._empty(0)
        if self._group is None:
            return flat, None
        n, received = self._n_ranks, self._received(assignments)
        buffer, sizes = self._empty(sum(received)), sizes + [0] * (n - len(assignments))
        return buffer, dist.all_to_all_single(buffer, flat, received, sizes, self._group, async_op=True)

    def _received(self, assignments: Sequence[Assignment]) -> list[int]:
        """Return how many elements each rank sends of the unit that this rank owns in a round."""
        if self._rank >= len(assignments):
            return [0] * self._n_ranks
        slices = assignments[self._rank].slices
        return [slices.sent(rank, self._rank) for rank in range(len(slices.of_ranks))]

    def _nesterov(self, assigned: Assignment, scaling: dict[str, Tensor]) -> Tensor:
        """Return this rank's shard of a unit's Nesterov momentum, in muon_dtype."""
        weight = self.matrices[assigned.unit.number]
        momentum = self.state[weight]["momentum_buffer"]
        gradient, buffer = self._local_slice(assigned, weight.grad), self._local_slice(assigned, momentum)
        if not scaling:
            return gradient.lerp(buffer, self.options.muon_momentum).to(self.dtype).flatten()
        ahead = (gradient / scaling["grad_scale"]).lerp(buffer, self.options.muon_momentum)
        return ahead.masked_fill(scaling["found_inf"].bool(), 0).to(self.dtype).flatten()

    def _local_slice(self, assigned: Assignment, tensor: Tensor) -> Tensor:
        """Return a view of those rows of a local shard (weight, gradient or state) that belong to a unit."""
        local, (offset, size) = local_shard(tensor), assigned.slices.of_ranks[self._rank]
        if local.dim() == 2:
            return local
        begin = offset[0] + assigned.unit.first - shard_slice(tensor).offset[0]
        return local[begin : begin + size[0]] if size[0] else local[:0]

    def _receive(self, assignments: Sequence[Assignment], buffer: Tensor, work: Any) -> Tensor | None:
        """Return the full momentum of the unit that this rank owns in a round; None if this rank owns none."""
        if work is not None:
            work.wait()
        if self._rank >= len(assignments):
            return None
        unit, _, slices = assignments[self._rank]
        full, sizes = self._empty(*unit.shape), self._received(assignments) if self._group else [len(buffer)]
        for each, values in zip(slices.of_ranks, buffer.split(sizes), strict=True):
            if len(values):
                full[each.indices].copy_(values.view(each.size))
        return full

    def _update(self, assignments: Sequence[Assignment], full: Tensor | None, lr: float) -> None:
        """Send shards of a round's orthogonalized matrices from owners to all ranks, and update the weights."""
        if self._group is None:
            results = [full.flatten()]
        else:
            n, slices = self._n_ranks, assignments[self._rank].slices if full is not None else None
            sent = [full[each.indices].flatten() for each in slices.of_ranks] if slices else [self._empty(0)]
            received = [x.slices.elements[self._rank] for x in assignments]
            buffer = self._empty(sum(received))
            sizes = received + [0] * (n - len(assignments)), slices.elements if slices else [0] * n
            dist.all_to_all_single(buffer, torch.cat(sent), *sizes, self._group)
            results = buffer.split(received)
        for x, result in zip(assignments, results, strict=True):
            local = self._local_slice(x, self.matrices[x.unit.number])
            local.sub_(result.view(local.shape) * (lr * math.sqrt(max(x.unit.shape[-2:]))))

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=local_shard(self.matrices[0]).device)


def stage_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the process group of the ranks that have this rank's pipeline stages. All of them must call this."""
    if mesh["pp"].size() == 1:
        return dist.group.WORLD
    ranks = mesh.mesh[mesh.get_local_rank("pp")].flatten().tolist()
    return dist.new_group(ranks, use_local_synchronization=True)  # all backends, since Muon._of_ranks needs gloo


def build_muon(
    parameters: Iterable[tuple[str, nn.Parameter]], optimizer: Optimizer, group: dist.ProcessGroup | None
) -> "Muon":
    named = list(parameters)
    matrices = [parameter for name, parameter in named if is_orthogonalized(name, parameter)]
    others = [(name, parameter) for name, parameter in named if not is_orthogonalized(name, parameter)]
    return Muon(build_adam(parameter_groups(others, optimizer), optimizer, "AdamW"), matrices, optimizer, group)


def muon_of(model: nn.Module, optimizer: Optimizer, mesh: DeviceMesh | None) -> Muon:
    """Build Muon, with QK-clip if qk_clip_threshold is set. If `mesh` is None, only this rank trains."""
    muon = build_muon(model.named_parameters(), optimizer, group := stage_group(mesh) if mesh else None)
    if optimizer.qk_clip_threshold:
        from titanlite.techniques.qk_clip import QkClip

        muon.clip = QkClip(model, optimizer.qk_clip_threshold, group, mesh.get_local_rank("tp") if mesh else 0)
    return muon
