"""The differences between two configs, by `section.key`."""

from collections.abc import Mapping
from typing import Any

import xxhash

from titanlite.config.loader import Section, show, table_of


def options_by_key(config: Section, *, without: str = "", prefix: str = "") -> dict[str, Any]:
    """Return the value of every option by `section.key`, or by `section.key.N.name` for an option in table N of an
    array. Options whose type has the metadata `without` are left out."""
    options: dict[str, Any] = {}
    for name, field in type(config).model_fields.items():
        key, value = f"{prefix}{name}", getattr(config, name)
        if isinstance(value, Section):
            options |= options_by_key(value, without=without, prefix=f"{key}.")
        elif table_of(field):
            for number, table in enumerate(value):
                options |= options_by_key(table, without=without, prefix=f"{key}.{number}.")
        elif without not in field.metadata:
            options[key] = value
    return options


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the old and the new value of each option that differs; None for an option that one side lacks."""
    return {key: (old.get(key), new.get(key)) for key in {**new, **old} if old.get(key) != new.get(key)}


def shown(value: Any) -> str:
    """Return a value as TOML writes it, shortened if it is long."""
    text = "unset" if value is None else show(value)
    return text if len(text) <= 100 else f"{text[:97]}... ({xxhash.xxh3_64_hexdigest(text.encode())[:8]})"
