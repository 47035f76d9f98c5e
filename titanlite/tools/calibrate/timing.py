"""Time calls on all ranks at the same time."""

import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

GROUPS = 5
MOST_CALLS = 1000
"""Calls of a group, at most."""


class Timer:
    """Times calls. Every rank must time the same ones in the same order.

    Args:
        seconds: how long to repeat a call, at least.

    Attributes:
        spreads: of each timed call, how far its groups' times are from that mean: the median share.
    """

    def __init__(self, device: torch.device, seconds: float = 0.05):
        self.device, self.budget = device, seconds
        self.spreads: list[float] = []
        self._barrier = 0.0  # seconds of an empty group
        self._barrier = self._mean(lambda: None, 1)

    def __call__(self, call: Callable[[], object]) -> float:
        """Return the seconds of a call: the mean of five groups of calls without the slowest one. A step is a sum of
        many operators, so what often delays one of them counts, and what rarely does so does not.

        All ranks make as many calls and begin each group together, and it ends when the last rank has made them, as a
        step goes on when the last rank has reached a collective. So what ranks share, and how unequally fast they are,
        counts. The first two calls do not.
        """
        call()
        self._wait_for_all()
        begin = time.perf_counter()
        call()
        self._synchronize()
        slowest = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)  # in host memory, by gloo
        return self._mean(call, min(math.ceil(self.budget / GROUPS / slowest.item()), MOST_CALLS))

    def _mean(self, call: Callable[[], object], n_calls: int) -> float:
        seconds = sorted(self._group(call, n_calls) for _ in range(GROUPS))
        mean = max(statistics.mean(seconds[:-1]), 1e-8)
        self.spreads.append(statistics.median(abs(x / mean - 1) for x in seconds))
        return mean

    def _group(self, call: Callable[[], object], n: int) -> float:
        """Return the seconds of a call in a group of n, which are the same on all ranks."""
        self._wait_for_all()
        begin = time.perf_counter()
        for _ in range(n):
            call()
        self._wait_for_all()
        seconds = torch.tensor((time.perf_counter() - begin - self._barrier) / n, dtype=torch.float64)
        if dist.get_world_size() > 1:
            dist.broadcast(seconds, 0)
        return seconds.item()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _wait_for_all(self) -> None:
        self._synchronize()
        if dist.get_world_size() > 1:
            dist.barrier()
