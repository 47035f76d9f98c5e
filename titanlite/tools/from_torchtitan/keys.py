"""The keys, defaults and models of torchtitan 0.2.2, from keys.toml, as conversion.py and groups.py read them."""

from pathlib import Path
from typing import Any, NamedTuple

from titanlite.config.loader import read_toml

_TABLES = read_toml(str(Path(__file__).with_name("keys.toml")))
DETAIL = object()
"""The `off` value of a key that is only read with another key, which is listed if it is on."""


class Missing(NamedTuple):
    """A key without an option: the value with which nothing is lost, and the reason."""

    reason: str
    off: Any = DETAIL


SAME = [f"{section}.{name}" for section, names in _TABLES["same"].items() for name in names]
"""Keys with an option of the same name."""
CHANGED: dict[str, str] = _TABLES["changed"]
"""What means something else under the same name."""
DEFAULTS: dict[str, Any] = _TABLES["defaults"]
"""torchtitan's defaults where an option of the same name has another, or none."""
NOT_OFFERED = {key: Missing(**values) for key, values in _TABLES["not_offered"].items()}
OF_0_2: dict[str, str] = _TABLES["of_0_2"]
"""Keys that a 0.2 release still reads, and the later key."""
MODELS: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    (name, flavor): (ours["flavor"], {key: value for key, value in ours.items() if key != "flavor"})
    for name, flavors in _TABLES["models"].items()
    for flavor, ours in flavors.items()
}
"""By model.name and model.flavor: our flavor, and what differs from it."""
DEEPSEEK_ORIGINAL_SEQ_LEN = 4096
"""Up to this training.seq_len torchtitan's DeepSeek-V3 has no YaRN."""
WHATEVER_THE_FILE_SAYS: list[str] = _TABLES["whatever_the_file_says"]
"""What differs between the two programs and has no key in torchtitan's file."""
