"""Read on the host how many rows each expert and rank gets, from which tensors get their sizes."""

from typing import Any

from torch import Tensor


def read(counts: Tensor) -> list[Any]:
    """Return counts as nested lists. The host waits for the device."""
    return counts.tolist()
