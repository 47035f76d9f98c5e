"""The keys, defaults and models of torchtitan 0.2.2, from keys.toml, as conversion.py and groups.py read them."""

from pathlib import Path
from typing import Any, NamedTuple

from titanlite.config.loader import read_toml

_TABLES = read_toml(str(Path(__file__).with_name("keys.toml")))
DETAIL = object()
"""The `off` value of a key that is read only with another key. If that key is on, the listing has it anyway."""


class Missing(NamedTuple):
    """A key without an option, the value of it with which nothing is lost, and the reason."""

    reason: str
    off: Any = DETAIL


SAME = [f"{section}.{name}" for section, names in _TABLES["same"].items() for name in names]
"""Keys with an option of the same name."""
CHANGED: dict[str, str] = _TABLES["changed"]
"""Keys whose option of the same name means something else, with the difference."""
DEFAULTS: dict[str, Any] = _TABLES["defaults"]
"""torchtitan's defaults of keys whose option has another default or none."""
NOT_OFFERED = {key: Missing(**values) for key, values in _TABLES["not_offered"].items()}
OF_0_2: dict[str, str] = _TABLES["of_0_2"]
"""Old keys that some 0.2 release still reads, each with the later key."""
MODELS: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    (name, flavor): (ours["flavor"], {key: value for key, value in ours.items() if key != "flavor"})
    for name, flavors in _TABLES["models"].items()
    for flavor, ours in flavors.items()
}
"""Our flavor and the options that differ from it, by model.name and model.flavor."""
DEEPSEEK_ORIGINAL_SEQ_LEN = 4096
"""The largest training.seq_len with which torchtitan's DeepSeek-V3 has no YaRN."""
WHATEVER_THE_FILE_SAYS: list[str] = _TABLES["whatever_the_file_says"]
"""Differences between the two programs that no key of torchtitan's file is about."""
