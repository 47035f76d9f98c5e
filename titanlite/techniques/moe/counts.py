"""Read on the host how many rows each expert and each rank gets. These numbers are sizes of tensors."""

from typing import Any

from torch import Tensor


def read(counts: Tensor) -> list[Any]:
    """Return counts as nested lists. The host waits for the device."""
    return counts.tolist()
