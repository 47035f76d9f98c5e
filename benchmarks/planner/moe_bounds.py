"""Plan a mixture of experts, and the same step with one cost removed, to bound what another program can gain by it.

The plan is of this program. The bounds are computed from the same dry run, for benchmarks/planner/plan_accuracy.py:

once per node    what an all-to-all sends to other nodes is sent once for each node that has experts of a token, as by
                 DeepEP, not once for each expert; within a node it costs what it costs here
no all-to-all    all-to-alls take no time: none is as fast, not even one beside another microbatch's computation
no launches      the host issues every operator in no time, as a CUDA graph of the step nearly does
"""

import functools
from typing import Any

from titanlite.config import Config
from titanlite.tools.plan import planner
from titanlite.tools.plan.cost_model import GROUPS, CostModel
from titanlite.tools.plan.op_trace import Dispatch
from titanlite.tools.plan.result import Plan

ONCE_PER_NODE, NO_ALL_TO_ALL, NO_LAUNCHES = "once per node", "no all-to-all", "no launches"
BOUNDS = ONCE_PER_NODE, NO_ALL_TO_ALL, NO_LAUNCHES


class BoundedCostModel(CostModel):
    """Computes costs as the plan does and, where the changed group is one of BOUNDS, without one of them."""

    def __init__(self, sent_once: float, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.sent_once = sent_once

    def collective_seconds(self, name: str, size: int, ranks: list[int]) -> float:
        """Return the seconds of a collective."""
        seconds = super().collective_seconds(name, size, ranks)
        if name != "all_to_all" or not self.faster:
            return seconds
        if self.changed == NO_ALL_TO_ALL:
            return 0.0
        if self.changed == ONCE_PER_NODE and ranks[-1] - ranks[0] >= self.devices_per_node:
            within = super().collective_seconds(name, size, list(range(self.devices_per_node)))
            return max(within, super().collective_seconds(name, round(size * self.sent_once), ranks))
        return seconds

    def dispatch_seconds(self, dispatch: Dispatch) -> float:
        """Return how long the host takes before it issues the next event."""
        return 0.0 if self.changed == NO_LAUNCHES and self.faster else super().dispatch_seconds(dispatch)


def sent_once(config: Config, per_node: int) -> float:
    """Return the mean number of nodes that have experts of a token, divided by its experts: each expert of a token is
    on any node, or on any of the groups that the router allows, with the same probability."""
    moe = config.model.moe
    nodes = max(config.parallelism.expert_parallel_degree // per_node, 1)
    allowed = min(nodes, moe.n_groups_per_token) if nodes > 1 and moe.n_groups_per_token < moe.n_groups else nodes
    return allowed * (1 - (1 - 1 / allowed) ** moe.n_experts_per_token) / moe.n_experts_per_token


def plan_with_bounds(loaded: Any, world_size: int) -> tuple[Plan, dict[str, float]]:
    """Return the plan of a config, and the tokens per second of a device at each bound."""
    config, device, _ = planner.resolve(loaded, world_size)
    share = sent_once(config, planner.devices_per_node(config, device))
    planner.GROUPS = GROUPS + BOUNDS
    planner.CostModel = functools.partial(BoundedCostModel, share)
    try:
        plan = planner.make_plan(loaded, world_size=world_size)
    finally:
        planner.GROUPS, planner.CostModel = GROUPS, CostModel
    gains = {name: plan.spread.pop(name)[0] for name in BOUNDS}
    step = plan.step_seconds
    return plan, {name: plan.tokens_per_second * step / (step + gain) for name, gain in gains.items()}
