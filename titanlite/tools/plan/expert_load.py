"""The load of experts that a plan assumes; in a run the routers decide the load.

The planned rank is the busiest of its expert-parallel group in every layer: it receives plan.expert_imbalance (1:
balanced) times the mean rows per rank, rounded up. The other ranks of the group share the remaining rows evenly. A
token that is sent to k experts makes k rows. Shapes: E experts of this rank, R ranks of an expert-parallel group."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from titanlite.config import Config
from titanlite.metrics.devices import find_device
from titanlite.tools.plan.op_trace import replaced


class ExpertLoad(NamedTuple):
    """The load of a layer's experts in a microbatch."""

    sent: int  # rows, one for each (token, expert) pair, that a rank sends to all experts together
    received: int  # rows that the planned rank receives from each rank of its expert-parallel group, itself included
    n_ranks: int  # ranks of the expert-parallel group
    n_experts: int  # experts of a rank

    @property
    def per_expert(self) -> float:
        """The mean number of rows that an expert of the planned rank receives."""
        return self.received * self.n_ranks / self.n_experts

    def counts(self, counts: Tensor) -> list[Any]:
        """Return the values of a tensor of counts: rows by expert, [E]; or rows sent and received, [2, R, E]."""
        if counts.dim() == 1:
            return even_shares(self.received * self.n_ranks, len(counts))
        others = even_shares(self.sent - self.received, self.n_ranks - 1)
        by_rank = [[self.received, *others], [self.received] * self.n_ranks]
        return [[even_shares(rows, counts.shape[2]) for rows in each] for each in by_rank]


def expert_load(config: Config) -> ExpertLoad:
    """Return the load under a resolved config. If ep is 1, all tensor-parallel ranks route all tokens."""
    parallelism, moe, n_ranks = config.parallelism, config.model.moe, config.parallelism.expert_parallel_degree
    splits = parallelism.tensor_parallel_degree if n_ranks > 1 else 1
    sent = config.tokens_of_forward // splits * moe.n_experts_per_token
    received = min(math.ceil(config.plan.expert_imbalance * sent / n_ranks), sent)
    return ExpertLoad(sent, received, n_ranks, moe.n_experts // n_ranks)


def even_shares(total: int, n: int) -> list[int]:
    """Return n integers that sum to `total`. If `total` does not divide evenly, the first integers are larger by 1."""
    return [total // n + (number < total % n) for number in range(n)]


@contextlib.contextmanager
def assumed(config: Config, on_read: Callable[[], None]) -> Iterator[None]:
    """Inside the with block, mixtures of experts read the assumed load instead of fake tensors' values, and use the
    grouped products of plan.device. `on_read` is called where the host would wait for the device to read counts."""
    from titanlite.techniques.moe import counts, layer  # late import: a dense model has no experts

    types, load = layer.GROUPED_MM_DTYPES, expert_load(config)

    def assumed_counts(tensor: Tensor) -> list[Any]:
        on_read()
        return load.counts(tensor)

    on_device = {"cpu": types["cpu" if find_device(config.plan.device).kind == "cpu" else "cuda"]}
    with replaced(counts, "read", assumed_counts), replaced(layer, "GROUPED_MM_DTYPES", on_device):
        yield
