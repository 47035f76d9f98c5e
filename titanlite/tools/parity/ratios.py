"""Find the ratios of another program's numbers to the correct numbers, and possible causes of these ratios.

A wrong constant factor of gradients nearly always comes from a mean over the wrong number of ranks, tokens or
accumulation steps. The factor, and the precision with which it is known, tell which number the program divided by."""

import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

LARGEST_ALLOWED = 0.25  # largest allowed relative distance with which a tensor has a meaningful ratio
COARSE = 0.5  # relative distance from which equal tensors count as coarse: half a tensor is this far from the tensor
SMALL_FACTOR = 1.01  # a ratio nearer to 1 is reported as a difference, unless a known factor explains it


class Row(NamedTuple):
    """A compared number or tensor: the other program's (`theirs`), and the float64 reference (`ours`)."""

    name: str
    theirs: Tensor
    ours: Tensor
    allowed: float  # the distance that rounding explains, as a fraction of the norm of `ours`
    rounded: Tensor | None = None  # `ours` in the precision of `theirs`; None: unknown, or `ours` is only rounding

    @property
    def distance(self) -> float:
        """The 2-norm of the difference, as a fraction of the norm of `ours`."""
        return relative(self.theirs, self.ours)

    @property
    def equal(self) -> bool:
        """Whether rounding explains the distance."""
        return self.distance <= self.allowed

    @property
    def verdict(self) -> str:
        """Return "equal", "coarse" (rounding would explain even a wrong factor of 2) or "DIFFERS"."""
        is_far = self.rounded is not None and min(self.distance, relative(self.theirs, self.rounded)) >= COARSE
        return "DIFFERS" if not self.equal else "coarse" if is_far else "equal"

    @property
    def ratio(self) -> float | None:
        """The c > 0 that fits `theirs` = c * `ours` by least squares; None if rounding does not explain the rest."""
        square = self.ours.square().sum().item()
        ratio = (self.theirs * self.ours).sum().item() / square if square else 0.0
        return ratio if ratio > 0 and self.allowed < LARGEST_ALLOWED and self.is_multiple(ratio) else None

    def is_multiple(self, ratio: float) -> bool:
        """Return whether `theirs` is `ratio` times `ours`, within rounding."""
        return relative(self.theirs, ratio * self.ours) <= self.allowed


def relative(tensor: Tensor, reference: Tensor) -> float:
    """Return the 2-norm of the difference as a fraction of the reference's 2-norm."""
    distance, norm = (tensor - reference).norm().item(), reference.norm().item()
    return distance / norm if norm else math.inf if distance else 0.0


def clusters(rows: list[Row]) -> tuple[dict[float, list[Row]], list[Row]]:
    """Return the unequal rows by ratio, and the unequal rows that no ratio explains. Rows share a ratio if rounding
    explains the remaining differences; the ratio comes from the most precise row (the smallest `allowed`)."""
    shared: dict[float, list[Row]] = {}
    others = []
    for row in sorted((row for row in rows if not row.equal), key=lambda row: row.allowed):
        ratio = next((known for known in shared if row.is_multiple(known)), row.ratio)
        if ratio is None or abs(ratio - 1) <= row.allowed:
            others.append(row)
        else:
            shared.setdefault(ratio, []).append(row)
    in_order = {ratio: sorted(members, key=rows.index) for ratio, members in shared.items()}
    return in_order, sorted(others, key=rows.index)


def describe(ratio: float, precision: float, quantities: Mapping[str, float]) -> str:
    """Return a text that names a ratio and all its `reasons`, such as "2.0 x too small: dp = 2"."""
    factor, word = (ratio, "large") if ratio > 1 else (1 / ratio, "small")
    matches = reasons(ratio, precision, quantities)
    if not matches and factor < SMALL_FACTOR:
        return f"too {word} by {factor - 1:.1e} of its size, where {precision:.1e} is rounding"
    digits = min(max(math.ceil(-math.log10(max(precision, 1e-16))) + 1, 2), 6)
    reason = ", or ".join(matches) or "none of the known numbers, nor a product or quotient of two"
    return f"{float(f'{factor:.{digits}g}')} x too {word}: {reason}"


def reasons(ratio: float, precision: float, quantities: Mapping[str, float]) -> list[str]:
    """Return quantities, and products or quotients of two quantities, that equal a ratio or its inverse ("dp = 2")."""
    known = {name: value for name, value in quantities.items() if value != 1}
    candidates = [(f"{name} = {value:g}", max(value, 1 / value)) for name, value in known.items()]
    for (one, a), (other, b) in itertools.combinations(known.items(), 2):
        candidates.append((f"{one} x {other} = {a:g} x {b:g}", max(a * b, 1 / (a * b))))
        over, under = ((one, a), (other, b)) if a > b else ((other, b), (one, a))
        candidates.append((f"{over[0]} / {under[0]} = {over[1]:g} / {under[1]:g}", over[1] / under[1]))
    factor = max(ratio, 1 / ratio)
    return [text for text, value in candidates if abs(factor / value - 1) <= precision]
