"""Which modules of the model each pipeline stage has, and which stages each rank. Plain arithmetic on names, without
torch: the config's rules use it before anything is started."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

Schedule = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]

ONE_STAGE: tuple[Schedule, ...] = ("GPipe", "1F1B")
"""Schedules with one stage a rank; all others have several."""
V_SHAPED: tuple[Schedule, ...] = ("ZBVZeroBubble", "DualPipeV")
"""Schedules whose two stages a rank lie on the way down and on the way back up."""
SPLIT_BACKWARD: tuple[Schedule, ...] = ("InterleavedZeroBubble", *V_SHAPED)
"""Schedules that compute gradients of inputs and of weights apart."""


def module_names(n_layers: int) -> list[str]:
    """The parts that a model can be cut into, in the order in which tokens pass through them."""
    return ["tok_embeddings", *(f"layers.{layer}" for layer in range(n_layers)), "norm", "output"]


def split_into_stages(names: Sequence[str], costs: Sequence[float], n_stages: int) -> list[list[str]]:
    """Cut an ordered list into consecutive stages, so that the most expensive stage is as cheap as can be, and among
    those cuts the squares of the stages' costs are least (the most even).

    Args:
        names: modules in order; each stage gets at least one whose name begins with "layers.".
        costs: cost of each, in any unit.

    Raises:
        ValueError: if there are fewer layers than stages.
    """
    layers_before = [0]
    for name in names:
        layers_before.append(layers_before[-1] + name.startswith("layers."))
    if layers_before[-1] < n_stages:
        raise ValueError(f"{n_stages} stages need at least as many layers, and there are {layers_before[-1]}")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def best(cost_of: Callable[[float, float], float], limit: float) -> tuple[float, list[int]]:
        """Least total and the ends of its stages, none of which costs more than the limit.

        Args:
            cost_of: the total after a stage, from the total before it and the stage's cost.
        """
        totals: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # of the first so many modules
        for _ in range(n_stages):
            longer: dict[int, tuple[float, list[int]]] = {}
            for end in range(1, len(names) + 1):
                candidates = [
                    (cost_of(total, sums[end] - sums[start]), [*ends, end])
                    for start, (total, ends) in totals.items()
                    if layers_before[end] > layers_before[start] and sums[end] - sums[start] <= limit
                ]
                if candidates:
                    longer[end] = min(candidates)
            totals = longer
        return totals[len(names)]

    largest, _ = best(max, math.inf)
    _, ends = best(lambda total, cost: total + cost**2, largest)
    return [list(names[start:end]) for start, end in pairwise([0, *ends])]


def rank_of_stage(schedule: Schedule, degree: int, n_stages: int) -> list[int]:
    """Pipeline rank of each stage: round and round, or, V-shaped, there and back."""
    if schedule in V_SHAPED:
        return [min(stage, n_stages - 1 - stage) for stage in range(n_stages)]
    return [stage % degree for stage in range(n_stages)]
