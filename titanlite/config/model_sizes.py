"""Dimensions of published models, from models.toml."""

from pathlib import Path
from typing import Any

from titanlite.config.loader import read_toml

DIMENSIONS = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size")
"""Options that the list `size` of a model in models.toml sets, in this order."""
_TABLES = read_toml(str(Path(__file__).with_name("models.toml")))
COMMON: dict[str, Any] = _TABLES["common"]


def _over(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return `base` updated by `values`; nested tables are merged key by key."""
    inner = {key: _over(base.get(key, {}), value) for key, value in values.items() if isinstance(value, dict)}
    return {**base, **values, **inner}


def _options(table: dict[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in table.items() if key not in ("family", "size")}
    base = _options(_TABLES["families"][table["family"]]) if "family" in table else COMMON
    return _over(base, {**dict(zip(DIMENSIONS, table.get("size", ()), strict=False)), **own})


SIZES = {name: _options(table) for name, table in _TABLES["models"].items()}
"""The options of each model that `model.flavor` can name."""
