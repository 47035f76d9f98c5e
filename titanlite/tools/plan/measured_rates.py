"""Look up how long an operator or a collective takes on a device that `titanlite calibrate` has measured. Between
measured points, the seconds of collectives and memory-bound operators are interpolated over bytes, and the FLOP/s of
matrix multiplication and attention over sizes, on a logarithmic scale because sizes differ by orders of magnitude."""

import bisect
import itertools
import math
from collections.abc import Sequence

import numpy as np

from titanlite.config.loader import ConfigError
from titanlite.metrics.devices import Measured
from titanlite.tools.plan.op_trace import Work


def work_seconds(measured: Measured, work: Work) -> float:
    """Return the seconds of an operator. Raises ConfigError if no matrix multiplication in its dtype was measured."""
    if not work.flops:
        name = work.name.partition(".")[2].removesuffix("_")
        return seconds_at(measured.operators.get(name) or measured.operators["mul"], work.read + work.written)
    if "attention" not in work.name:
        if work.dtype not in measured.matmul:
            raise ConfigError([f"plan.device: no matrix multiplication in {work.dtype} was measured there"])
        n, *sizes = work.sizes
        return n * 2 * math.prod(sizes) / rate_at(measured.matmul[work.dtype], sizes)
    rows = measured.attention_backward if "backward" in work.name else measured.attention
    queries, keys, head_dim = work.sizes
    return work.flops / rate_at(rows, (math.sqrt(queries * keys), head_dim))


def collective_seconds(measured: Measured, name: str, size: int, n: int, nodes: int) -> float:
    """Return the seconds of a collective of `size` bytes over n ranks on `nodes` nodes, from the most similar measured
    group (spanning nodes or not, then number of ranks). In a group of n ranks, a rank sends (n - 1) / n of the size, as
    in a ring; equal bytes sent take equal seconds. Raises ConfigError if no group was measured."""
    if not (rows := [row for row in measured.collectives if row.name == name]):
        raise ConfigError([f"plan.device: no {name} was measured there; calibrate with at least two ranks"])
    nearest = min(
        rows, key=lambda row: ((row.nodes > 1) != (nodes > 1), abs(math.log(row.ranks / n)), abs(row.nodes - nodes))
    )
    sent = size if name == "send" else size * (1 - 1 / n) / (1 - 1 / nearest.ranks)
    return seconds_at(nearest.points, sent)


def seconds_at(points: Sequence[Sequence[float]], size: float) -> float:
    """Return the seconds at a size, from points (size, seconds) in ascending order. Below the first point seconds are
    constant; above the last point they are proportional to the size."""
    smallest, largest = points[0], points[-1]
    if size <= smallest[0]:
        return smallest[1]
    if size >= largest[0]:
        return largest[1] * size / largest[0]
    return float(np.exp(np.interp(math.log(size), *np.log(points).T)))


def rate_at(rows: Sequence[Sequence[float]], sizes: Sequence[float]) -> float:
    """Return the rate at `sizes`, from rows (*sizes, rate) on a grid with gaps. Sizes outside the grid are moved to its
    edge. The rate is a weighted mean over the measured corners of the grid cell or, without these, the nearest rate."""
    table = {tuple(row[:-1]): row[-1] for row in rows}
    sides = []
    for axis, size in enumerate(sizes):
        values = sorted({key[axis] for key in table})
        size = min(max(size, values[0]), values[-1])
        after = max(bisect.bisect_left(values, size), 1) if len(values) > 1 else 0
        low, high = values[max(after - 1, 0)], values[after]
        share = math.log(size / low) / math.log(high / low) if high > low else 0.0
        sides.append(((low, 1 - share), (high, share)))
    weighted, total = 0.0, 0.0
    for corner in itertools.product(*sides):
        weight = math.prod(share for _, share in corner)
        if weight and (rate := table.get(tuple(value for value, _ in corner))):
            weighted, total = weighted + weight * math.log(rate), total + weight
    if total:
        return math.exp(weighted / total)
    return min(table.items(), key=lambda item: math.dist([*map(math.log, item[0])], [*map(math.log, sizes)]))[1]
