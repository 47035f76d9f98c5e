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
from titanlite.launch.progress import progress
from titanlite.techniques.fingerprints import file
from titanlite.techniques.fingerprints.file import Description
from titanlite.techniques.fingerprints.sketch import N_PRODUCTS, distance
from titanlite.tools.diff.computation import GRADIENT_NORM, inputs_of_entries, module_of

GROWTH, LARGE, GROWTH_OF_OUTPUT = 32, 0.5, 12
"""A tensor may differ by this many times as much as its inputs, or as rounding once. Between right layouts, 20 times
was the most in 1,000 steps (benchmarks/logs/fingerprints.log). Both distances may be wrong by a factor of 2. Distances
from LARGE on are only half as many times those of their inputs: 11 times was the most there; the output of a block,
which is its input and more, at most 12 times: 5 was the most."""
PRODUCTS_ONLY = {"float8": 4, "int8": 4}
"""The same for rounding to types to which only the operands of a block's seven matrix products are rounded: two right
blocks are sqrt(14) roundings apart, or less. 1.4 was the most."""
GROWTH_OF_ROOT = 16
"""The same for what turns a small difference into a large one in some elements: Adam takes a step of full size in the
direction of a gradient that is rounding only, and a router sends a token to another expert. Of a relative distance d
about a fraction d of the elements is affected, so the distance grows with the root of d. 7 times was the most, of Muon
in bfloat16, whose iteration magnifies what is small."""
LIKELY = 1e-3  # where fewer tokens than this are expected to be sent to other experts, none is
FACTOR, GROWTH_OF_FACTOR = 0.25, 8
"""Rounding is nearly orthogonal to a tensor, and adds to the norms of both. So one may be a multiple of the other by no
more than the first, as a fraction of the larger, or the second times their inputs' distance: 4.4 times was the most."""
MULTIPLE = 0.3
"""Where more than this fraction of a tensor is no multiple of the other, it is not taken for one."""
FAR = 0.7
"""Of two tensors that have nothing in common, whose distance is sqrt(2), one in 1,000 has an estimate below this."""
ZERO = 0.02
"""A gradient that is smaller than this part of one rounding of the largest of its module is zero but for rounding.
Those of biases of keys, without rotary embedding, were 0.001 to 0.003 of one in float64, float32 and bfloat16."""
SUMMED = 1e-13
"""Relative distance of the fingerprints of equal tensors, whose float64 sums are taken in another order."""
ROUNDING = {
    **{name: torch.finfo(getattr(torch, name)).eps / 2 for name in ("float64", "float32", "bfloat16", "float16")},
    **{"float8": 2**-4 / math.sqrt(3), "int8": 2**-6, "int4": 2**-2},
}
"""The largest relative error of rounding; in float8, the mean error of a product of matrices (PRODUCT_ERROR of
tests/parallel/test_layouts.py)."""
Distances = Mapping[str, float]
Descriptions = tuple[Description, Description]


class Entry(NamedTuple):
    """The comparison of one tensor of a step."""

    name: str
    distance: float
    allowed: float
    ratio: float
    """The constant by which B is a multiple of A; 1 where it is equal or no multiple."""
    is_coarse: bool
    """Whether rounding explains so much that a wrong tensor would not have been told from this one."""

    @property
    def differs(self) -> bool:
        """Whether the tensor differs by more than its inputs and rounding explain."""
        return not self.distance <= self.allowed  # NaN explains nothing


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
    """Yield the comparison of each step that both runs have fingerprints of. Raises ConfigError if there is none, a
    file is damaged, or the runs have global batches of other sizes."""
    steps_a, steps_b = file.steps_of(a), file.steps_of(b)
    if not (steps_a and steps_b):
        raise ConfigError([f"{b if steps_a else a}: no fingerprints; set debug.fingerprint_freq"])
    common, before = sorted({*steps_a} & {*steps_b}), Step(-1, [], ([], []), ())
    if not common:
        ranges = " and ".join(f"{steps[0]} to {steps[-1]}" for steps in (steps_a, steps_b))
        raise ConfigError([f"{a} and {b}: no step in common: {ranges}"])
    with progress("comparing", total=len(common), unit="steps") as advance:
        for number in common:
            (of_a, in_a), (of_b, in_b) = file.read(a, number), file.read(b, number)
            for what in ("sequences", "tokens"):
                if of_a.counts[what] != of_b.counts[what]:
                    problem = f"step {number}: {what} of the global batch: {of_a.counts[what]} and {of_b.counts[what]}"
                    raise ConfigError([f"{a} and {b}: {problem}; compare runs with the same batches"])
            explained = {e.name: e.distance for e in before.entries} if before.number == number - 1 else {}
            entries = compare_step(in_a, in_b, (of_a, of_b), explained, is_first=number == common[0])
            missing = tuple(sorted(one.keys() - other.keys()) for one, other in ((in_b, in_a), (in_a, in_b)))
            before = Step(number, entries, missing, (of_a, of_b))
            yield before
            advance()


def compare_step(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], descriptions: Descriptions, before: Distances, *, is_first: bool
) -> list[Entry]:
    """Return the comparison of the tensors of a step that both runs have. `before` has the distances of the step before
    by name, if that has fingerprints."""
    inputs = inputs_of_entries(a.keys() & b.keys())
    a, b = ({name: own[name] for name in inputs if name in own} for own in (a, b))
    a, b = (own | {GRADIENT_NORM: _gradient_norm(own)} for own in (a, b))
    distances = {name: distance(a[name], b[name]) for name in inputs}
    norms = {name: max(_norm(a[name]), _norm(b[name])) for name in inputs}
    limits, entries = _Limits(descriptions, norms, before, is_first=is_first), []
    used = {name: far for name, far in distances.items() if " ".join(name.split(" ")[:2]) not in limits.unused}
    lists = {id(own): own for own in inputs.values()}  # many tensors have the same one
    largest = {key: max([used[each] for each in own if each in used], default=0.0) for key, own in lists.items()}
    for name, own in inputs.items():
        tensors, far, explained = (a[name], b[name]), distances[name], largest[id(own)]
        phase, _, tensor = name.partition(" ")
        allowed, is_weight = limits.allowed(name, explained), phase == "update" and " " not in tensor
        is_far = is_weight and f"input {tensor}" not in inputs
        if is_weight and not is_far:  # The change of the weight is compared, since the weight itself is far larger.
            tensors = tuple(_change(each[f"input {tensor}"], each[name]) for each in (a, b))
            far = distance(*tensors)
            allowed += GROWTH * limits.of_weights * _norm(a[name]) / (max(map(_norm, tensors)) or 1)
        ratio, allowed = _ratio(tensors, far, allowed, explained)
        of_a, of_b = map(_norm, tensors)
        is_far |= far >= FAR or abs(of_a - of_b) > FACTOR * max(of_a, of_b)
        is_coarse = is_far and far <= allowed and f"input {tensor.split(' ')[0]}" not in limits.unused
        entries.append(Entry(name, far, allowed, ratio, is_coarse))
    return entries


class _Limits:
    """How far two runs may be from each other in each tensor of a step. `norms` are their larger norms."""

    def __init__(self, descriptions: Descriptions, norms: Distances, before: Distances, *, is_first: bool):
        self.norms, self.before, self.is_first = norms, before, is_first
        self.rounding, self.of_weights, self.of_states = (
            max(ROUNDING[getattr(each, name)] for each in descriptions)
            for name in ("compute_dtype", "weights_dtype", "state_dtype")
        )
        compute_dtypes = [each.compute_dtype for each in descriptions]
        self.once = max(ROUNDING[name] * PRODUCTS_ONLY.get(name, GROWTH) for name in compute_dtypes)
        self.same_weights_dtype = descriptions[0].weights_dtype == descriptions[1].weights_dtype
        self.n_tokens = descriptions[0].counts["tokens"] if any(".router." in name for name in norms) else 0.0
        """Those that may be sent to other experts."""
        self.forward_before = max([far for name, far in before.items() if name.startswith("forward ")], default=0.0)
        gradients = [name for name in norms if name.startswith("gradient ") and name != GRADIENT_NORM]
        self.parameters = {name.removeprefix("gradient "): norms[name] for name in gradients}
        ascending = sorted(self.parameters.items(), key=lambda parameter: parameter[1])
        self.largest = {module_of(name): norm for name, norm in ascending}
        of_zero = {module: ZERO * self.rounding * norm for module, norm in self.largest.items()}
        self.unused = {f"input {name}" for name, norm in self.parameters.items() if norm <= of_zero[module_of(name)]}
        """Parameters whose gradient is zero but for rounding."""

    def allowed(self, name: str, explained: float) -> float:
        """Return the limit of a tensor; of the update of a weight, the limit of its change but for its rounding."""
        phase, _, tensor = name.partition(" ")
        if phase == "input":
            return self._allowed_of_input(tensor)
        if phase == "update":
            if " " not in tensor:
                return GROWTH_OF_ROOT * math.sqrt(max(explained, self.rounding))
            return GROWTH * max(explained, self.rounding, self.of_states)
        is_output = phase == "forward" and tensor != "loss"
        allowed = self._allowed_of_activation(explained, GROWTH_OF_OUTPUT if is_output else GROWTH)
        if phase == "gradient" and self.parameters.get(tensor):
            # Small gradients of a block are differences of large numbers, as those of queries and keys are where
            # attention is about even, and rounding is relative to those.
            allowed *= self.largest[module_of(tensor)] / self.norms[name]
        return allowed

    def _allowed_of_input(self, tensor: str) -> float:
        """Return the limit of what a step begins with. In the first step all is compared. Later, tokens are, and the
        buffers of routers, which the loads of the step before have changed; the rest was an update of that."""
        if tensor in ("tokens", "targets") or self.is_first:
            return SUMMED if tensor in ("tokens", "targets") or self.same_weights_dtype else GROWTH * self.of_weights
        if " " in tensor or tensor in self.parameters or f"input {tensor}" not in self.before:
            return math.inf
        return self._allowed_of_activation(max(self.before[f"input {tensor}"], self.forward_before))

    def _allowed_of_activation(self, explained: float, growth: float = GROWTH) -> float:
        if GROWTH * max(explained, self.rounding) * self.n_tokens > LIKELY:
            return GROWTH_OF_ROOT * math.sqrt(max(explained, self.rounding))
        return max(self.once, min(growth * explained, max(LARGE, GROWTH / 2 * explained)))


def _ratio(tensors: tuple[Tensor, ...], far: float, allowed: float, explained: float) -> tuple[float, float]:
    """Return the constant by which B is a multiple of A, and the limit of their distance, which such a constant lowers
    where it is farther from 1 than rounding explains."""
    ratio = constant_ratio(*tensors, tolerance=allowed) if far > min(allowed, FACTOR) else 1.0
    factor = max(FACTOR, GROWTH_OF_FACTOR * explained)
    is_multiple = abs(ratio - 1) > factor * max(ratio, 1) and allowed < math.inf
    return ratio, min(allowed, factor) if is_multiple else allowed


def constant_ratio(a: Tensor, b: Tensor, tolerance: float) -> float:
    """Return c where B = c A but for rounding, from two fingerprints; 1 where there is no such constant."""
    a, b = a[1:], b[1:]
    square = a.square().sum()
    if not (square > 0 and b.isfinite().all()):
        return 1.0
    ratio = (a @ b / square).item()
    rest = (b - ratio * a).square().sum() / b.square().sum()
    return ratio if math.sqrt(rest) <= min(tolerance, MULTIPLE) else 1.0


def _gradient_norm(fingerprints: Mapping[str, Tensor]) -> Tensor:
    square = sum((each[:1] for name, each in fingerprints.items() if name.startswith("gradient ")), torch.zeros(1))
    return torch.cat([square, square.sqrt().double().expand(N_PRODUCTS)])


def _norm(fingerprint: Tensor) -> float:
    return math.sqrt(fingerprint[0].item())


def _change(before: Tensor, after: Tensor) -> Tensor:
    """Return the fingerprint of the difference of two tensors; its squared norm is estimated from the products."""
    products = after[1:] - before[1:]
    return torch.cat([products.square().mean()[None], products])
