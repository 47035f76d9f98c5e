"""Compare the fingerprints of two runs: the distance of each tensor, and how much of it the runs' precision explains.
After a thousand steps the tensors of two correct layouts may differ much, but no tensor differs much more than its
inputs do. Each distance is therefore compared with the distances of the tensor's inputs (computation.py)."""

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
"""A tensor may differ by GROWTH times the distance of its inputs, or by GROWTH roundings (measured between correct
layouts in 1,000 steps: 20 times, benchmarks/logs/fingerprints.log). A distance above LARGE may be at most GROWTH / 2
times the distance of the tensor's inputs (measured: 11 times). A block's output, which contains the block's input, may
differ by GROWTH_OF_OUTPUT times the distance of its inputs (measured: 5 times)."""
PRODUCTS_ONLY = {"float8": 4, "int8": 4}
"""Number of roundings by which a tensor may differ, for data types to which only the operands of a block's seven matrix
products are rounded. The results of two correct blocks are at most sqrt(14) roundings apart (measured: 1.4)."""
GROWTH_OF_ROOT = 16
"""If the inputs have the distance d, some results may have the distance GROWTH_OF_ROOT * sqrt(d), since a fraction d of
their elements may differ fully: Adam takes a full step along a gradient that is only rounding, and a router chooses
another expert. The largest measured factor is 7, with Muon in bfloat16, whose iteration magnifies small numbers."""
LIKELY = 1e-3  # routers count as equal if a token goes to another expert with a smaller probability
FACTOR, GROWTH_OF_FACTOR = 0.25, 8
"""If B = c A, |c - 1| / max(c, 1) may be FACTOR, or GROWTH_OF_FACTOR times the inputs' distance (measured: 4.4)."""
MULTIPLE = 0.3  # B counts as a multiple of A if the norm of B - c A is at most this fraction of the norm of B
FAR = 0.7  # tensors this far apart may be unrelated: of unrelated pairs, sqrt(2) apart, 1 in 1,000 seems nearer
ZERO = 0.02
"""A gradient smaller than this fraction of one rounding of its module's largest gradient is only rounding. Biases of
keys without rotary embedding had gradients of 0.001 to 0.003 roundings in float64, float32 and bfloat16."""
SUMMED = 1e-13
"""Largest relative distance of the fingerprints of equal tensors, whose sums in float64 may have different orders."""
ROUNDING = {
    **{name: torch.finfo(getattr(torch, name)).eps / 2 for name in ("float64", "float32", "bfloat16", "float16")},
    **{"float8": 2**-4 / math.sqrt(3), "int8": 2**-6, "int4": 2**-2},
}  # largest relative rounding error, by data type; float8's is PRODUCT_ERROR of tests/parallel/test_layouts.py
Distances = Mapping[str, float]
Descriptions = tuple[Description, Description]


class Entry(NamedTuple):
    """The comparison of one tensor of a step."""

    name: str
    distance: float
    allowed: float
    ratio: float  # the c with B = c A for the tensors A and B of the two runs; 1 if B = A, or B is no multiple of A
    is_coarse: bool  # whether `allowed` is so large that a wrong tensor could go undetected

    @property
    def differs(self) -> bool:
        return not self.distance <= self.allowed  # a NaN distance counts as a difference


class Step(NamedTuple):
    """The comparison of a step, with entries in the order of computation."""

    number: int
    entries: list[Entry]
    missing: tuple[list[str], list[str]]  # names of the tensors that run A lacks, and of the tensors that run B lacks
    descriptions: tuple[Description, Description]

    @property
    def first(self) -> Entry | None:
        return next((entry for entry in self.entries if entry.differs), None)


def compare_runs(a: Path, b: Path) -> Iterable[Step]:
    """Compare all common steps. Raises ConfigError if there is none, a file is damaged, or global batches differ."""
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
    """Compare all tensors of a step that both runs have. `before`: distances of the previous step, by name."""
    inputs = inputs_of_entries(a.keys() & b.keys())
    a, b = ({name: own[name] for name in inputs if name in own} for own in (a, b))
    a, b = (own | {GRADIENT_NORM: _gradient_norm(own)} for own in (a, b))
    distances = {name: distance(a[name], b[name]) for name in inputs}
    norms = {name: max(_norm(a[name]), _norm(b[name])) for name in inputs}
    limits, entries = _Limits(descriptions, norms, before, is_first=is_first), []
    used = {name: far for name, far in distances.items() if " ".join(name.split(" ")[:2]) not in limits.unused}
    lists = {id(own): own for own in inputs.values()}  # lists of inputs without duplicates: many tensors share a list
    largest = {key: max([used[each] for each in own if each in used], default=0.0) for key, own in lists.items()}
    for name, own in inputs.items():
        tensors, far, explained = (a[name], b[name]), distances[name], largest[id(own)]
        phase, _, tensor = name.partition(" ")
        allowed, is_weight = limits.allowed(name, explained), phase == "update" and " " not in tensor
        is_far = is_weight and f"input {tensor}" not in inputs
        if is_weight and not is_far:  # compare the changes of weights, since the weights themselves are far larger
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
    """The allowed distances of a step's tensors. `norms`: by name, the larger of a tensor's norms in the two runs."""

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
        """Number of tokens that routers may send to different experts in the two runs."""
        self.forward_before = max([far for name, far in before.items() if name.startswith("forward ")], default=0.0)
        gradients = [name for name in norms if name.startswith("gradient ") and name != GRADIENT_NORM]
        self.parameters = {name.removeprefix("gradient "): norms[name] for name in gradients}
        ascending = sorted(self.parameters.items(), key=lambda parameter: parameter[1])
        self.largest = {module_of(name): norm for name, norm in ascending}
        of_zero = {module: ZERO * self.rounding * norm for module, norm in self.largest.items()}
        self.unused = {f"input {name}" for name, norm in self.parameters.items() if norm <= of_zero[module_of(name)]}
        """Parameters whose gradient is zero except for rounding."""

    def allowed(self, name: str, explained: float) -> float:
        """Return the allowed distance of a tensor; for a weight's update, that of the change before rounding."""
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
            # A small gradient (of wq, if attention is nearly uniform) contains the rounding errors of larger numbers.
            allowed *= self.largest[module_of(tensor)] / self.norms[name]
        return allowed

    def _allowed_of_input(self, tensor: str) -> float:
        """Return the allowed distance of an input: infinity for weights and states after the first compared step."""
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
    """Return c with B = c A (`tensors`: A, B), and the allowed distance, reduced if rounding does not explain c."""
    ratio = constant_ratio(*tensors, tolerance=allowed) if far > min(allowed, FACTOR) else 1.0
    factor = max(FACTOR, GROWTH_OF_FACTOR * explained)
    is_multiple = abs(ratio - 1) > factor * max(ratio, 1) and allowed < math.inf
    return ratio, min(allowed, factor) if is_multiple else allowed


def constant_ratio(a: Tensor, b: Tensor, tolerance: float) -> float:
    """Return c if B = c A except for rounding, by the fingerprints of A and B; 1 if no c exists."""
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
    """Return the fingerprint of the difference of two tensors; its squared norm is an estimate from inner products."""
    products = after[1:] - before[1:]
    return torch.cat([products.square().mean()[None], products])
