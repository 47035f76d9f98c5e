"""The options of replica groups that may die, [fault_tolerance]. torchtitan 0.2.2 has the same names."""

from titanlite.config.loader import Section
from titanlite.config.types import Count, CountOrZero


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

    @property
    def n_groups(self) -> int:
        return self.group_size if self.enable else 1
