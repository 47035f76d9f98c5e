"""Convert the keys of a torchtitan file to options and to rows of the listing. keys.toml has torchtitan 0.2.2's keys,
defaults and models. For a key that the file lacks, torchtitan's default is written if titanlite's differs."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from titanlite.config.differences import shown
from titanlite.config.loader import options_of, printable, read_toml, sections_of, show
from titanlite.config.rules import DEPENDENT_OPTIONS
from titanlite.config.schema import Config
from titanlite.tools.toml_keys import flat

TAKEN, RENAMED, DEFAULT = "taken", "renamed", "torchtitan's default"
MEANING_CHANGED, NOT_READ, MISSING, UNKNOWN = "meaning changed", "not read", "not offered", "unknown"
STATUSES = (TAKEN, RENAMED, DEFAULT, NOT_READ, MEANING_CHANGED, MISSING, UNKNOWN)
OPTIONS = options_of(Config)
LARGEST = 2**53  # numbers from here on are invalid: no run can start with them
_TABLES = read_toml(str(Path(__file__).with_name("keys.toml")))


class Missing(NamedTuple):
    """A key of torchtitan for which titanlite has no option, and the reason. With the value `off` it has no effect, so
    nothing is lost. A key without `off` has an effect only if another missing key, which the listing names, is on."""

    reason: str
    off: Any = None


class Note(NamedTuple):
    """A text about `keys`. It is shown if the values in `when` are all set, unless those in `unless` are all set."""

    keys: list[str]
    text: str
    status: str = MEANING_CHANGED
    when: Mapping[str, Any] = {}
    unless: Mapping[str, Any] = {}


SAME = [f"{section}.{name}" for section, names in _TABLES["same"].items() for name in names]
"""Keys of torchtitan whose option has the same name in titanlite."""
NOTES = [Note(**values) for values in _TABLES["notes"]]
DATASETS: dict[str, dict[str, Any]] = _TABLES["datasets"]  # titanlite's options, by torchtitan's name of the dataset
DEFAULTS: dict[str, Any] = _TABLES["defaults"]
"""torchtitan's defaults of keys for which titanlite has another default or no option."""
NOT_OFFERED = {key: Missing(**values) for key, values in _TABLES["not_offered"].items()}
OF_0_2: dict[str, str] = _TABLES["of_0_2"]
"""Old keys that a 0.2 release of torchtitan still reads, each with the key of 0.2.2 that replaced it."""
MODELS: dict[str, dict[str, dict[str, Any]]] = _TABLES["models"]
"""titanlite's flavor and the options that differ from the flavor, by torchtitan's model.name and model.flavor."""
DEEPSEEK_ORIGINAL_SEQ_LEN = 4096  # the largest training.seq_len with which torchtitan's DeepSeek-V3 has no YaRN
WHATEVER_THE_FILE_SAYS: list[str] = _TABLES["whatever_the_file_says"]
"""Differences between torchtitan and titanlite for which torchtitan's file has no key."""


class Row(NamedTuple):
    """A line of the listing. `matters` is false if nothing is lost although the key is not converted."""

    status: str
    source: str
    target: str
    note: str
    matters: bool = True


class Conversion:
    """Collects the options to which a torchtitan file is converted, each with the key of torchtitan that sets it."""

    def __init__(self, values: dict[str, Any]):
        pairs = sorted(flat(values), key=lambda pair: _precedence(*pair))
        self.values: dict[str, Any] = {}
        self.written: dict[str, tuple[str, Any]] = {}
        """Key and value as written in the file, by the key of torchtitan 0.2.2."""
        self.options: dict[str, tuple[Any, str]] = {}
        self.notes: dict[str, list[str]] = {}
        self.statuses: dict[str, str] = {}
        self.rows: list[Row] = []
        for key, value in pairs:
            if (name := OF_0_2.get(key, key)) in self.written:
                other = " = ".join((printable(self.written[name][0]), shown(self.written[name][1])))
                self.rows.append(Row(NOT_READ, other, "", f"{printable(key)} is set, too", matters=False))
            self.written[name] = key, value
            self.values[name] = value

    def get(self, key: str) -> Any:
        """Return the value of a key of torchtitan 0.2.2, or torchtitan's default."""
        if key in self.values:
            return self.values[key]
        return DEFAULTS[key] if key in DEFAULTS else OPTIONS[key].default if key in OPTIONS else None

    def number(self, key: str, default: float) -> Any:
        """Return a key's value if it is -1 or above 0; otherwise `default`; the schema later reports a wrong value."""
        value = self.get(key)
        return value if type(value) in (int, float) and (0 < value < LARGEST or value == -1) else default

    def names(self, key: str) -> list[str]:
        value = self.get(key)
        value = [value] if isinstance(value, str) else value
        return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []

    def put(self, option: str, value: Any, key: str) -> None:
        self.options[option] = value, key

    def note(self, key: str, text: str, status: str = MEANING_CHANGED) -> None:
        """Add a text about a key. Also set the key's status, unless `status` is "" or the present one is MISSING."""
        self.notes.setdefault(key, []).append(text)
        if status and self.statuses.get(key) != MISSING:
            self.statuses[key] = status

    def note_if_set(self, key: str, text: str, status: str = MEANING_CHANGED) -> None:
        if key in self.values:
            self.note(key, text, status)

    def have(self, values: Mapping[str, Any]) -> bool:
        return all(show(self.get(key)) == show(value) for key, value in values.items())

    def unread(self, keys: list[str], reason: str) -> None:
        """List keys that torchtitan itself does not read. `reason` says why, such as the value of another key."""
        for key in keys:
            self.note_if_set(key, reason, NOT_READ)

    def finish(self) -> None:
        """Drop defaults that torchtitan and titanlite share, and add a row for each key and each remaining default."""
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

    def toml(self, header: list[str]) -> str:
        """Return the options as TOML, below a header of comments. A comment marks each default of torchtitan."""
        lines = [f"# {line}" for line in header]
        for section in sections_of(Config):
            of_section = [option for option in OPTIONS if option.rpartition(".")[0] == section]
            chosen = [option for option in of_section if option in self.options]
            lines += ["", f"[{section}]"] if chosen else []
            for option in chosen:
                value, key = self.options[option]
                text = tomli_w.dumps({option.removeprefix(f"{section}."): value}).rstrip("\n")
                is_default = key not in self.values and "\n" not in text
                lines.append(f"{text}  # {DEFAULT}" if is_default else text)
        return "\n".join(lines).lstrip("\n") + "\n"

    def _add_switches(self) -> None:
        """Write a switch that is off if its options are set, which torchtitan ignores and titanlite would reject."""
        for dependent in DEPENDENT_OPTIONS:
            switch = dependent.switch
            if switch in self.options or switch.startswith("model."):  # [model]'s switches come from model.flavor
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
    """Return a key's precedence. Of two keys with one meaning, the larger precedence counts, as in torchtitan."""
    if key == "model.tokenizer_path":
        return 2 if value else 0
    return 0 if key in OF_0_2 else 1


def hint(key: str) -> str:
    near = difflib.get_close_matches(key, [*SAME, *OPTIONS, *NOT_OFFERED, *OF_0_2], n=1, cutoff=0.8)
    return f"; did you mean {near[0]}?" if near else ""
