"""Compare the fingerprints of two runs: the distance of each tensor, and what the two precisions explain of it.

A tensor differs because of what it is computed from, or because it is computed in another way. So each distance is
compared with those of the tensor's own inputs (computation.py), and not with a fixed number: after a thousand steps the
tensors of two right layouts may be far from each other, and none of them is much farther than its inputs.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from titanlite.config import ConfigError
from titanlite.techniques.fingerprints import file
from titanlite.techniques.fingerprints.file import Description
from titanlite.techniques.fingerprints.sketch import N_PRODUCTS, distance
from titanlite.tools.diff.computation import GRADIENT_NORM, inputs_of_entries, module_of

GROWTH = 32
"""A tensor may differ by this many times as much as its inputs, or as rounding once. Between right layouts, 20 times
was the most in 1,000 steps (benchmarks/logs/fingerprints.log). Both distances may be wrong by a factor of 2."""
GROWTH_OF_ROOT = 16
"""The same for what turns a small difference into a large one in some elements: Adam takes a step of full size in the
direction of a gradient that is rounding only, and a router sends a token to another expert. Of a relative distance d
about a fraction d of the elements is affected, so the distance grows with the root of d. 7 times was the most, of Muon
in bfloat16, whose iteration magnifies what is small."""
LIKELY = 1e-3
"""Where fewer tokens than this are expected to be sent to other experts, none is."""
SUMMED = 1e-13
"""Relative distance of the fingerprints of equal tensors, whose float64 sums are taken in another order."""
SAME_BATCH = ("sequences", "tokens")
ROUNDING = {"float8": 2**-4, "int8": 2**-6, "int4": 2**-2}
"""Relative rounding errors of types that are none of torch's, or scaled by block."""


class Entry(NamedTuple):
    """The comparison of one tensor of a step."""

    name: str
    distance: float
    allowed: float
    ratio: float
    """The constant by which B is a multiple of A; 1 where it is equal or no multiple."""
    norms: tuple[float, float]

    @property
    def differs(self) -> bool:
        """Whether the tensor differs by more than its inputs and rounding explain."""
        return self.distance > self.allowed


class Step(NamedTuple):
    """The comparison of a step: its entries in the order of computation."""

    number: int
    entries: list[Entry]
    missing: tuple[list[str], list[str]]
    """The tensors that A lacks, and those that B lacks."""
    descriptions: tuple[Description, Description]

    @property
    def first(self) -> Entry | None:
        """The first entry that differs."""
        return next((entry for entry in self.entries if entry.differs), None)


def compare_runs(a: Path, b: Path) -> Iterable[Step]:
    """Yield the comparison of each step that both runs have fingerprints of.

    Raises:
        ConfigError: if there is no such step, a file is damaged, or the runs have global batches of other sizes.
    """
    steps_a, steps_b = file.steps_of(a), file.steps_of(b)
    for folder, steps in ((a, steps_a), (b, steps_b)):
        if not steps:
            raise ConfigError([f"{folder}: no fingerprints; set debug.fingerprint_freq"])
    common = sorted({*steps_a} & {*steps_b})
    if not common:
        raise ConfigError([f"{a} and {b}: no step in common: {_range(steps_a)} and {_range(steps_b)}"])
    before = Step(-1, [], ([], []), ())
    for number in common:
        (of_a, in_a), (of_b, in_b) = file.read(a, number), file.read(b, number)
        for count in SAME_BATCH:
            if of_a.counts.get(count) != of_b.counts.get(count):
                problem = f"{count} of the global batch: {of_a.counts.get(count)} and {of_b.counts.get(count)}"
                raise ConfigError([f"{a} and {b}: step {number}: {problem}; compare runs with the same batches"])
        explained = {e.name: e.distance for e in before.entries} if before.number == number - 1 else {}
        entries = compare_step(in_a, in_b, (of_a, of_b), explained, is_first=number == common[0])
        before = Step(number, entries, (sorted({*in_b} - {*in_a}), sorted({*in_a} - {*in_b})), (of_a, of_b))
        yield before


def _range(steps: list[int]) -> str:
    return f"{steps[0]} to {steps[-1]}"


def compare_step(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    descriptions: tuple[Description, Description],
    before: Mapping[str, float],
    *,
    is_first: bool,
) -> list[Entry]:
    """Return the comparison of the tensors of a step that both runs have. `before` has the distances of the step before
    by name, if that has fingerprints."""
    a, b = ({**fingerprints, GRADIENT_NORM: _gradient_norm(fingerprints)} for fingerprints in (a, b))
    inputs = inputs_of_entries({*a} & {*b})
    distances = {name: distance(a[name], b[name]) for name in inputs}
    norms = {name: max(_norm(a[name]), _norm(b[name])) for name in inputs}
    limits = _Limits(descriptions, distances, norms, before, is_first=is_first)
    entries = []
    for name, own in inputs.items():
        tensors, far, allowed = (a[name], b[name]), distances[name], limits.allowed(name, own)
        phase, _, tensor = name.partition(" ")
        if phase == "update" and tensor in limits.parameters and f"input {tensor}" in inputs:
            # The change of the weight is compared, since the weight itself is far larger.
            tensors = tuple(_change(each[f"input {tensor}"], each[name]) for each in (a, b))
            far = distance(*tensors)
            allowed += GROWTH * limits.of_weights * _norm(a[name]) / (max(map(_norm, tensors)) or 1)
        ratio = constant_ratio(*tensors, tolerance=allowed) if far > allowed else 1.0
        entries.append(Entry(name, far, allowed, ratio, (_norm(a[name]), _norm(b[name]))))
    return entries


class _Limits:
    """How far two runs may be from each other in each tensor of a step. `distances` are those of all tensors, `norms`
    their larger norms."""

    def __init__(
        self,
        descriptions: tuple[Description, Description],
        distances: Mapping[str, float],
        norms: Mapping[str, float],
        before: Mapping[str, float],
        *,
        is_first: bool,
    ):
        self.distances, self.norms, self.before, self.is_first = distances, norms, before, is_first
        self.has_experts = any(".router." in name for name in distances)
        self.parameters = {name.removeprefix("gradient ") for name in distances if name.startswith("gradient ")}
        self.largest_gradients: dict[str, float] = {}
        for name in self.parameters:
            module = module_of(name)
            self.largest_gradients[module] = max(self.largest_gradients.get(module, 0.0), norms[f"gradient {name}"])
        self.rounding = max(rounding_of(each.compute_dtype) for each in descriptions)
        self.of_weights = max(rounding_of(each.weights_dtype) for each in descriptions)
        self.of_states = max(rounding_of(each.state_dtype) for each in descriptions)
        self.n_tokens = descriptions[0].counts.get("tokens", math.inf)
        self.same_weights_dtype = len({each.weights_dtype for each in descriptions}) == 1

    def allowed(self, name: str, inputs: list[str]) -> float:
        """Return the limit of a tensor; of the update of a weight, the limit of its change but for its rounding."""
        phase, _, tensor = name.partition(" ")
        explained = max([self.distances[each] for each in inputs], default=0.0)
        if phase == "input":
            return self._allowed_of_input(tensor)
        if phase == "update":
            if tensor in self.parameters:
                return GROWTH_OF_ROOT * math.sqrt(max(explained, self.rounding))
            return GROWTH * max(explained, self.rounding, self.of_states)
        allowed = self._allowed_of_activation(max(explained, self.rounding))
        if phase == "gradient" and tensor in self.parameters and self.norms[name]:
            # Small gradients of a block are differences of large numbers, as those of queries and keys are where
            # attention is about even, and rounding is relative to those.
            allowed *= self.largest_gradients[module_of(tensor)] / self.norms[name]
        return allowed

    def _allowed_of_input(self, tensor: str) -> float:
        """Return the limit of what a step begins with. In the first step all is compared. Later, tokens are, and the
        buffers of routers, which the loads of the step before have changed; the rest was an update of that."""
        if tensor in ("tokens", "targets") or (self.is_first and self.same_weights_dtype):
            return SUMMED
        if self.is_first:
            return GROWTH * self.of_weights
        if " " in tensor or tensor in self.parameters or not self.before:
            return math.inf
        forward = [each for name, each in self.before.items() if name.startswith("forward ")]
        return self._allowed_of_activation(max(self.before[f"input {tensor}"], self.rounding, *forward))

    def _allowed_of_activation(self, explained: float) -> float:
        others = self.has_experts and GROWTH * explained * self.n_tokens > LIKELY
        return GROWTH_OF_ROOT * math.sqrt(explained) if others else GROWTH * explained


def rounding_of(dtype: str) -> float:
    """Return the largest relative error of rounding to a data type, by its name in a config."""
    if dtype in ROUNDING:
        return ROUNDING[dtype]
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        raise ConfigError([f"{dtype}: no data type of fingerprints that is known"])
    return torch.finfo(torch_dtype).eps / 2


def constant_ratio(a: Tensor, b: Tensor, tolerance: float) -> float:
    """Return c where B = c A but for rounding, from two fingerprints; 1 where there is no such constant."""
    products_a, products_b = a[1:], b[1:]
    square = products_a.square().sum()
    if not (square > 0 and products_b.isfinite().all()):
        return 1.0
    ratio = (products_a @ products_b / square).item()
    rest = (products_b - ratio * products_a).square().sum() / products_b.square().sum()
    return ratio if math.sqrt(rest) <= min(tolerance, 0.1) else 1.0


def _gradient_norm(fingerprints: Mapping[str, Tensor]) -> Tensor:
    squares = [each[0] for name, each in fingerprints.items() if name.startswith("gradient ")]
    square = sum(squares, torch.zeros((), dtype=torch.float64))
    return torch.cat([square[None], square.sqrt().expand(N_PRODUCTS)])


def _norm(fingerprint: Tensor) -> float:
    return math.sqrt(max(fingerprint[0].item(), 0.0))


def _change(before: Tensor, after: Tensor) -> Tensor:
    """Return the fingerprint of the difference of two tensors; its squared norm is estimated from the products."""
    products = after[1:] - before[1:]
    return torch.cat([products.square().mean()[None], products])
