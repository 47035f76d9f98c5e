"""Read how many rows each expert and each rank gets. The host needs these numbers as sizes of tensors."""

from typing import Any

from torch import Tensor


def read(counts: Tensor) -> list[Any]:
    """Return counts as nested lists. The host waits for the device."""
    return counts.tolist()
