"""All ranks must read the same data."""

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from titanlite.config.loader import ConfigError
from titanlite.launch.progress import mark


@contextlib.contextmanager
def compared_over_ranks() -> Iterator[Callable[..., None]]:
    """Return a function that every rank must call with the identities of what it has opened in the body. It waits for
    the others, and raises ConfigError if these differ.

    Nodes with token caches of their own may tokenize for hours longer than others. Only the watchdog limits the wait.
    """
    group = dist.new_group(backend="gloo", timeout=timedelta(days=365))

    def compare(*own: str) -> None:
        mark("waiting for the data of other ranks", limited=False)
        identities: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(identities, own, group=group)
        if set(identities) != {own}:
            other = next(rank for rank, name in enumerate(identities) if name != identities[0])
            problem = f"training.dataset_path: rank {other} reads other data than rank 0; give all nodes the same"
            raise ConfigError([problem])

    yield compare
    dist.destroy_process_group(group)
