"""Assignment of a model's modules to pipeline stages, and of stages to ranks, for the rules of the config."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Literal

Schedule = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]

ONE_STAGE: tuple[Schedule, ...] = ("GPipe", "1F1B")
"""Schedules with one stage per rank; all other schedules have several stages per rank."""
V_SHAPED: tuple[Schedule, ...] = ("ZBVZeroBubble", "DualPipeV")
"""Schedules with two stages per rank: the order of ranks is first to last, then last to first."""
SPLIT_BACKWARD: tuple[Schedule, ...] = ("InterleavedZeroBubble", *V_SHAPED)
"""Schedules that compute input gradients and weight gradients in separate steps."""


def module_names(n_layers: int) -> list[str]:
    """Return the names of the modules that stages are made of, in the order of the forward."""
    return ["tok_embeddings", *(f"layers.{layer}" for layer in range(n_layers)), "norm", "output"]


def split_into_stages(names: Sequence[str], costs: Sequence[float], n_stages: int) -> list[list[str]]:
    """Split modules into consecutive stages so that the most expensive stage is as cheap as possible; among such
    splits, minimize the sum of the stages' squared costs. `names` and `costs` (any unit) describe the modules in order.
    Each stage gets at least one module named "layers.N". Raises ValueError for fewer layers than stages."""
    layers_before = list(accumulate((name.startswith("layers.") for name in names), initial=0))
    cost_before = list(accumulate(costs, initial=0.0))
    if layers_before[-1] < n_stages:
        raise ValueError(f"{n_stages} stages need at least as many layers, and there are {layers_before[-1]}")

    def best(combine: Callable[[float, float], float], limit: float) -> tuple[float, list[int]]:
        """Return the smallest combined cost of stages that each cost at most `limit`, and the stages' ends."""
        totals: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # number of modules -> (total cost, stages' ends)
        for _ in range(n_stages):
            longer: dict[int, tuple[float, list[int]]] = {}
            for end in range(1, len(names) + 1):
                candidates = [
                    (combine(total, cost_before[end] - cost_before[start]), [*ends, end])
                    for start, (total, ends) in totals.items()
                    if layers_before[end] > layers_before[start] and cost_before[end] - cost_before[start] <= limit
                ]
                if candidates:
                    longer[end] = min(candidates)
            totals = longer
        return totals[len(names)]

    largest, _ = best(max, math.inf)
    _, ends = best(lambda total, cost: total + cost**2, largest)
    return [list(names[start:end]) for start, end in pairwise([0, *ends])]


def rank_of_stage(schedule: Schedule, degree: int, n_stages: int) -> list[int]:
    """Return the pipeline rank of each stage: round-robin, or first to last rank and back for V-shaped schedules."""
    if schedule in V_SHAPED:
        return [min(stage, n_stages - 1 - stage) for stage in range(n_stages)]
    return [stage % degree for stage in range(n_stages)]
