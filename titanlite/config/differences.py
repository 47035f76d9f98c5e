"""Comparison of two configs, option by option."""

from collections.abc import Mapping
from typing import Any

import xxhash

from titanlite.config.loader import Section, show, table_of


def options_by_key(config: Section, *, without: str = "", prefix: str = "") -> dict[str, Any]:
    """Return options by `section.key`, or `section.key.N.name` for tables, except options annotated with `without`."""
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
    """Return (old, new) for each option whose values differ; None stands for an option that one config lacks."""
    return {key: (old.get(key), new.get(key)) for key in {**new, **old} if old.get(key) != new.get(key)}


def shown(value: Any) -> str:
    """Return a value in TOML syntax. A text over 100 characters is cut short, and a hash of the full text added."""
    text = "unset" if value is None else show(value)
    return text if len(text) <= 100 else f"{text[:97]}... ({xxhash.xxh3_64_hexdigest(text.encode())[:8]})"
