"""Measure collectives of several sizes in the kinds of groups that a layout's axes form: neighbouring ranks of a node;
on several nodes, also one rank of each node, and all ranks. As ranks compute between the collectives of a training
step, each collective is timed after matrix products. Its time includes waiting for slow ranks and waking threads."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.tools.calibrate.timing import Timer

SIZES = {"cpu": [2**i for i in range(10, 25, 2)], "cuda": [2**i for i in range(12, 31, 2)]}  # bytes of the full tensor
LEAST_SECONDS = 1e-6  # lower bound of a collective's time, since a difference of noisy measurements may be smaller


def measure_collectives(timer: Timer, ranks_per_node: int) -> list[dict[str, object]]:
    """Return points (bytes, seconds) of each collective in each kind of group. Every rank must call this function."""
    # Hide the warning that torch 2.13 renamed two of these collectives: torch 2.11 lacks the new names.
    warnings.filterwarnings("ignore", message=".*is deprecated. Please use", category=FutureWarning)
    world, results = dist.get_world_size(), []
    compute = _products(timer.device)
    computing = timer(compute)
    for members in kinds_of_groups(world, ranks_per_node):
        group = dist.new_subgroups_by_enumeration(members)[0]
        n, nodes = len(members[0]), len({rank // ranks_per_node for rank in members[0]})
        for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"):
            points = []
            for size in SIZES[timer.device.type]:
                call = call_of(name, size, group, timer.device)
                seconds = timer(lambda call=call: (compute(), call())) - computing
                points.append([size, max(seconds, LEAST_SECONDS)])
            results.append({"name": name, "ranks": n, "nodes": nodes, "points": points})
    return results


def kinds_of_groups(world: int, per_node: int) -> list[list[list[int]]]:
    """Return the kinds of groups to measure, and for each kind the ranks of all groups of that kind. A group has 2, 4,
    8, ... neighbouring ranks, all ranks of a node, one rank of each node, or all ranks."""
    sizes = sorted({2**i for i in range(1, per_node.bit_length()) if 2**i <= per_node} | {per_node} - {1})
    kinds = [[list(range(first, first + n)) for first in range(0, world, n)] for n in sizes if world % n == 0]
    if world > per_node:
        kinds.append([list(range(first, world, per_node)) for first in range(per_node)])
        if per_node > 1:
            kinds.append([list(range(world))])
    return kinds


def _products(device: torch.device) -> Callable[[], None]:
    """Return a function that computes matrix products for about as long as a training step computes between two
    collectives: ranks that share a CPU's cores wait longer for each other after longer computation."""
    rows, side, dtype = (4096, 4096, torch.bfloat16) if device.type == "cuda" else (1024, 256, torch.float32)
    left, right = (torch.randn(n, side, device=device).to(dtype) for n in (rows, side))

    def compute() -> None:
        for _ in range(4):
            torch.mm(left, right)

    return compute


def call_of(name: str, size: int, group: dist.ProcessGroup, device: torch.device) -> Callable[..., Any]:
    """Return a function that runs a collective of `size` bytes or, for "send", a message from each rank to the next."""
    n = group.size()
    elements = max(size // 4 // n, 1) * n
    full = torch.ones(elements, device=device)
    shard = torch.ones(elements // n, device=device)
    calls: dict[str, Callable[..., Any]] = {
        "all_gather": lambda **options: dist.all_gather_into_tensor(full, shard, group=group, **options),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(shard, full, group=group),
        "all_reduce": lambda: dist.all_reduce(full, group=group),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(full), full, group=group),
        "send": lambda: _pass_on(full, torch.empty_like(full), group),
    }
    return calls[name]


def _pass_on(sent: Tensor, received: Tensor, group: dist.ProcessGroup) -> None:
    n, rank = group.size(), group.rank()
    send = dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % n)
    receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % n)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def measure_slowdown(timer: Timer) -> float:
    """Return the fraction by which a matrix product is slower during an all-gather; 0 on one rank."""
    if dist.get_world_size() == 1:
        return 0.0
    device = timer.device
    side, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    gather = call_of("all_gather", SIZES[device.type][-1], dist.group.WORLD, device)
    alone, gathers = timer(lambda: torch.mm(left, right)), timer(gather)
    n_products = max(int(gathers / alone), 1)

    def both() -> None:
        work = gather(async_op=True)
        for _ in range(n_products):
            torch.mm(left, right)
        work.wait()

    beside = timer(both) - max(gathers - n_products * alone, 0.0)
    return max(min(beside / (n_products * alone) - 1, 1.0), 0.0)


def best_bandwidths(collectives: list[dict[str, object]]) -> dict[str, float]:
    """Return the best bandwidth of an all-gather, in bytes/s received by a rank, by whether the group spans nodes."""
    best: dict[bool, float] = {}
    for row in collectives:
        if row["name"] == "all_gather":
            share = 1 - 1 / row["ranks"]
            rate = max(size * share / seconds for size, seconds in row["points"])
            best[row["nodes"] > 1] = max(best.get(row["nodes"] > 1, 0.0), rate)
    return best
