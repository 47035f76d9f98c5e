"""Keys of TOML files that titanlite did not check: of other programs, and of other versions of titanlite."""

from collections.abc import Iterator
from typing import Any


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of all tables with their values, as section.key."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
