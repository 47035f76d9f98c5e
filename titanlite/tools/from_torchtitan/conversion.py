"""Convert the keys of a torchtitan file to options, and to the rows of the listing.

keys.toml has the keys, defaults and models of torchtitan 0.2.2. An absent key means torchtitan's default. Where
titanlite's default differs, torchtitan's is written, too.
"""

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from titanlite.config.loader import options_of, printable, read_toml, show
from titanlite.config.rules import DEPENDENT_OPTIONS
from titanlite.config.schema import Config

TAKEN, RENAMED, DEFAULT = "taken", "renamed", "torchtitan's default"
MEANING_CHANGED, NOT_READ, MISSING, UNKNOWN = "meaning changed", "not read", "not offered", "unknown"
STATUSES = (TAKEN, RENAMED, DEFAULT, NOT_READ, MEANING_CHANGED, MISSING, UNKNOWN)
OPTIONS = options_of(Config)
LARGEST = 2**53
"""Above any number in a config that a run can read."""
_TABLES = read_toml(str(Path(__file__).with_name("keys.toml")))


class Missing(NamedTuple):
    """A key without an option, and the reason. With the value `off` nothing is lost. A key without `off` is read only
    with another key, which the listing has if it is on."""

    reason: str
    off: Any = None


class Note(NamedTuple):
    """A text about keys that the file sets, and the values of keys with which it is shown, or is not."""

    keys: list[str]
    text: str
    status: str = MEANING_CHANGED
    when: Mapping[str, Any] = {}
    unless: Mapping[str, Any] = {}


SAME = [f"{section}.{name}" for section, names in _TABLES["same"].items() for name in names]
"""Keys with an option of the same name."""
NOTES = [Note(**values) for values in _TABLES["notes"]]
DATASETS: dict[str, dict[str, Any]] = _TABLES["datasets"]
"""Our options, by torchtitan's name of the dataset."""
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


class Row(NamedTuple):
    """A line of the listing. `matters` is false if nothing is lost."""

    status: str
    source: str
    target: str
    note: str
    matters: bool = True


class Conversion:
    """The options that a torchtitan file converts to, by name, each with the key that it comes from."""

    def __init__(self, values: dict[str, Any]):
        pairs = sorted(flat(values), key=lambda pair: _precedence(*pair))
        self.values: dict[str, Any] = {}
        self.written: dict[str, tuple[str, Any]] = {}
        """The file's own key and value, by the key of 0.2.2."""
        self.options: dict[str, tuple[Any, str]] = {}
        self.notes: dict[str, list[str]] = {}
        self.statuses: dict[str, str] = {}
        self.rows: list[Row] = []
        for key, value in pairs:
            name = OF_0_2.get(key, key)
            if name in self.written:
                other = " = ".join((printable(self.written[name][0]), shown(self.written[name][1])))
                self.rows.append(Row(NOT_READ, other, "", f"{printable(key)} is set, too", matters=False))
            self.written[name] = key, value
            self.values[name] = value

    def get(self, key: str) -> Any:
        """Return the value of a key of 0.2.2, or torchtitan's default."""
        if key in self.values:
            return self.values[key]
        return DEFAULTS[key] if key in DEFAULTS else OPTIONS[key].default if key in OPTIONS else None

    def number(self, key: str, default: float) -> Any:
        """Return a number above 0, or -1. For any other value, which the schema reports, return the default."""
        value = self.get(key)
        return value if type(value) in (int, float) and (0 < value < LARGEST or value == -1) else default

    def names(self, key: str) -> list[str]:
        """Return a list of names."""
        value = self.get(key)
        value = [value] if isinstance(value, str) else value
        return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []

    def put(self, option: str, value: Any, key: str) -> None:
        """Set an option, and record the key that it comes from."""
        self.options[option] = value, key

    def note(self, key: str, text: str, status: str = MEANING_CHANGED) -> None:
        """Add a text about a key, and its status unless that is empty. A missing feature keeps its status."""
        self.notes.setdefault(key, []).append(text)
        if status and self.statuses.get(key) != MISSING:
            self.statuses[key] = status

    def note_if_set(self, key: str, text: str, status: str = MEANING_CHANGED) -> None:
        """Add a text about a key as `note` does, but only if the file sets the key."""
        if key in self.values:
            self.note(key, text, status)

    def have(self, values: Mapping[str, Any]) -> bool:
        """Return whether all these keys have these values."""
        return all(show(self.get(key)) == show(value) for key, value in values.items())

    def unread(self, keys: list[str], reason: str) -> None:
        """List keys that torchtitan does not read either, because of another key."""
        for key in keys:
            self.note_if_set(key, reason, NOT_READ)

    def finish(self) -> None:
        """Drop torchtitan's defaults that titanlite shares. Add a row for each key of the file and other default."""
        for option, (value, key) in list(self.options.items()):
            if key not in self.values and value == OPTIONS[option].default and not option.startswith("model."):
                del self.options[option]
        self._add_switches()
        targets: dict[str, list[str]] = {}
        for option, (value, key) in self.options.items():
            targets.setdefault(key, []).append(f"{option} = {show(value)}")
        self.rows += [self._row(key, targets.get(key, [])) for key in self.values]
        for key in targets.keys() - self.values.keys():
            self.rows.append(Row(DEFAULT, key, "\n".join(targets[key]), "; ".join(self.notes.get(key, []))))
        self.rows.sort(key=lambda row: (STATUSES.index(row.status), row.status == DEFAULT and row.source))

    def _add_switches(self) -> None:
        """Write a switch that is off if its options are set: torchtitan ignores these, titanlite would report them."""
        for dependent in DEPENDENT_OPTIONS:
            switch = dependent.switch
            if switch in self.options or switch.startswith("model."):  # a model's defaults are its flavor's
                continue
            default = OPTIONS[switch].default
            is_off = default in dependent.off
            if is_off and any(o in self.options and self.options[o][0] != OPTIONS[o].default for o in dependent.keys):
                self.put(switch, default, switch)

    def _row(self, key: str, lines: list[str]) -> Row:
        (name, value), notes, status = self.written[key], self.notes.get(key, []), self.statuses.get(key)
        matters = status != NOT_READ
        if status is None and key in NOT_OFFERED:
            missing = NOT_OFFERED[key]
            is_off = self.values[key] == missing.off
            matters = missing.off is not None and not is_off
            status, notes = MISSING, [missing.reason + " (nothing is lost with this value)" * is_off, *notes]
        elif status is None and not lines:
            status, notes = UNKNOWN, [f"no key of torchtitan that titanlite knows{hint(key)}"]
        elif status is None:
            option, _, text = lines[0].partition(" = ")
            is_same = len(lines) == 1 and text == show(value)
            status = (TAKEN if option == name else RENAMED) if is_same else MEANING_CHANGED
        return Row(status, f"{printable(name)} = {shown(value)}", "\n".join(lines), "; ".join(notes), matters)


def _precedence(key: str, value: Any) -> int:
    """Return a key's precedence: of two keys with one meaning, that with the larger number counts, as in torchtitan."""
    if key == "model.tokenizer_path":
        return 2 if value else 0
    return 0 if key in OF_0_2 else 1


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of all tables with their values, as section.key."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def shown(value: Any) -> str:
    """Return a value as TOML writes it, if it is short."""
    text = printable(show(value))
    return text if len(text) <= 100 else f"{text[:100]}..."


def hint(key: str) -> str:
    """Return a hint that names a known key with a similar spelling."""
    near = difflib.get_close_matches(key, [*SAME, *OPTIONS, *NOT_OFFERED, *OF_0_2], n=1, cutoff=0.8)
    return f"; did you mean {near[0]}?" if near else ""
