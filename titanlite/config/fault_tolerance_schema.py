"""The options of replica groups that may die, [fault_tolerance]. torchtitan 0.2.2 has the same names."""

from typing import Literal

from titanlite.config.loader import Section
from titanlite.config.types import Count, CountOrZero, Fraction, Positive


class FaultTolerance(Section):
    enable: bool = False
    """Train in replica groups: launches of the same config, each with all of its ranks, that torchft connects. A step
    is that of the groups that live. Needs titanlite[ft], and the lighthouse's address in TORCHFT_LIGHTHOUSE."""
    replica_id: CountOrZero = 0
    """Which group this launch is, from 0 to group_size - 1."""
    group_size: CountOrZero = 0
    """Number of groups that the global batch is divided among, whether they live or not."""
    min_replica_size: Count = 1
    """Fewest living groups that may take a step. Fewer wait for others."""
    process_group_timeout_ms: Count = 10_000
    """Milliseconds after which a collective between groups has failed, and its step is taken again."""
    semi_sync_method: Literal["none", "diloco"] = "none"
    """none: groups sum gradients in every step; diloco: each group trains by itself for sync_steps steps, and an outer
    optimizer then updates the weights with the average of what they have changed by."""
    sync_steps: Count = 100
    """Steps between two synchronizations of DiLoCo."""
    outer_lr: Positive = 0.7
    """Learning rate of DiLoCo's outer optimizer, SGD. 1, without momentum: weights are averaged (local SGD)."""
    outer_momentum: Fraction = 0.9
    """Its momentum, which is Nesterov's."""

    @property
    def uses_diloco(self) -> bool:
        return self.enable and self.semi_sync_method == "diloco"

    @property
    def n_groups(self) -> int:
        return self.group_size if self.enable else 1
