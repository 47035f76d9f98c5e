"""Time calls on all ranks at the same time."""

import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

GROUPS = 5
MOST_CALLS = 1000  # largest number of calls that are timed as one group


class Timer:
    """Times calls. Every rank must time the same calls in the same order. A call is repeated for at least `seconds`."""

    def __init__(self, device: torch.device, seconds: float = 0.05):
        self.device, self.budget = device, seconds
        self.spreads: list[float] = []  # median relative deviation of the groups' times from each result
        self._barrier = 0.0  # seconds that a group without calls takes
        self._barrier = self._mean(lambda: None, 1)

    def __call__(self, call: Callable[[], object]) -> float:
        """Return the seconds of a call: the mean over five groups of calls, without the slowest group, so that rare
        delays do not count. All ranks make equally many calls, begin a group together, and end it with the last rank,
        so the seconds include effects of shared resources and unequal ranks. The first two calls are not timed."""
        call()
        self._wait_for_all()
        begin = time.perf_counter()
        call()
        self._synchronize()
        slowest = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)  # a tensor in host memory, reduced by gloo
        return self._mean(call, min(math.ceil(self.budget / GROUPS / slowest.item()), MOST_CALLS))

    def _mean(self, call: Callable[[], object], n_calls: int) -> float:
        seconds = sorted(self._group(call, n_calls) for _ in range(GROUPS))
        mean = max(statistics.mean(seconds[:-1]), 1e-8)
        self.spreads.append(statistics.median(abs(x / mean - 1) for x in seconds))
        return mean

    def _group(self, call: Callable[[], object], n: int) -> float:
        """Return the seconds per call in a group of n calls, as rank 0 measures them."""
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
