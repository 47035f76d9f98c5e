"""The values of an untrusted JSON file, checked by type; each wrong value becomes one line of the error."""

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlite.config.loader import ConfigError, show
from titanlite.config.regular_file import read_file

LARGEST_FILE, LARGEST = 2**20, 2**31 - 1
"""Maximum size of a config.json in bytes, and the largest integer in a config.json."""


def read_json_object(file: Path, content: bytes | None = None) -> dict[str, Any]:
    """Return the JSON object in a file, or in `content`. Raises ConfigError if it is invalid or too large."""
    try:
        text = (read_file(file, LARGEST_FILE) if content is None else content).decode("utf-8-sig")
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_key_twice)
    except FileNotFoundError:
        problem = f"no such file{how_to_download(file.parent)}"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        problem = f"not valid JSON: {str(error) or 'nested too deeply'}"
    else:
        if isinstance(value, dict):
            return value
        problem = f"expected a JSON object, got {_shown(value)}"
    raise ConfigError([f"{file}: {problem}"])


def how_to_download(folder: Path) -> str:
    """Return advice on downloading a model if `folder` is not a folder but a name on the hub, else ""."""
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", f"{folder}") or folder.parent.exists():
        return ""
    return f"; if it is a model of the hub: hf download {folder} --local-dir assets/{folder.name}, and name that folder"


def token_ids(values: dict[str, Any], key: str, file: Path) -> list[int]:
    """Return the token ids at a key of config.json or generation_config.json: one id, a list, or null for none."""
    ids = values.get(key)
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if any(type(each) is not int for each in ids):
        raise ConfigError([f"{file}: {key} = {_shown(values[key])}: expected token ids"])
    return ids


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key in [key for key, n in Counter(key for key, _ in pairs).items() if n > 1][:1]:
        raise ValueError(f"{_shown(key)} is there twice")
    return dict(pairs)


def _shown(value: Any) -> str:
    text = "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else show(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


class JsonObject:
    """Typed access to the values of a JSON object. Each wrong value adds a line to `problems`, and is replaced by a
    valid one. `names` maps keys to their names in the file, where these differ."""

    def __init__(
        self,
        where: str,
        values: dict[str, Any],
        problems: list[str],
        rejected: set[str] | None = None,
        names: Mapping[str, str] | None = None,
    ):
        self.where, self.problems, self.names = where, problems, names or {}
        keys = {own: key for key, own in self.names.items()}
        self.values = {keys.get(key, key): value for key, value in values.items()}
        self.rejected = set() if rejected is None else rejected

    def reject(self, key: str, message: str, *reads: str) -> None:
        """Add a problem with a key, unless a key in `reads` was rejected and no longer has the file's value."""
        if not self.rejected.isdisjoint(reads):
            return
        self.rejected.add(key)
        value = f" = {_shown(self.values[key])}" if key in self.values else " is missing"
        self.problems.append(f"{self.where}{_shown(self.names.get(key, key))[1:-1]}{value}: {message}")

    def only(self, key: str, value: Any, reason: str, *reads: str) -> None:
        """Reject any value except `value` (1.0 equals 1, true does not). `reads`: other keys that the rule reads."""
        actual = self.values.get(key)
        if actual is not None and (actual != value or isinstance(actual, bool) != isinstance(value, bool)):
            self.reject(key, f"expected {show(value)}; {reason}", *reads)

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = LARGEST) -> int:
        """Return the integer at a key. A missing or null key gives the default; without a default, it is an error."""
        if (value := self.values.get(key)) is None and default is not None:
            return default
        if type(value) is int and least <= value <= most:
            return value
        self.reject(key, f"expected an integer from {least} to {most}")
        return least

    def number(self, key: str, default: float | None = None, *, least: float = 0.0) -> float:
        """Return the finite number at a key, above 0 and at least `least`; for the default see `integer`."""
        if (value := self.values.get(key)) is None and default is not None:
            return default
        if type(value) in (int, float) and 0 < value <= sys.float_info.max and value >= least:
            return float(value)
        self.reject(key, f"expected a finite number {f'>= {least:g}' if least else '> 0'}")
        return 1.0

    def numbers(self, key: str) -> list[float]:
        """Return the list of finite numbers above 0 at a key."""
        values = self.values.get(key)
        values = values if isinstance(values, list) else [None]
        if all(type(each) in (int, float) and 0 < each <= sys.float_info.max for each in values):
            return [float(each) for each in values]
        self.reject(key, "expected a list of finite numbers > 0")
        return []

    def boolean(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if not (value is None or isinstance(value, bool)):
            self.reject(key, "expected true or false")
        return value if isinstance(value, bool) else default

    def choice(self, key: str, choices: tuple[str, ...], default: str | None = None) -> str:
        """Return the string at a key, which is one of `choices`; for the default see `integer`."""
        if (value := self.values.get(key)) is None and default is not None:
            return default
        if isinstance(value, str) and value in choices:
            return value
        self.reject(key, f"expected one of {', '.join(map(show, choices))}")
        return choices[0]

    def object(self, key: str) -> "JsonObject":
        """Return the object at a key; an empty object if the key is missing or null."""
        value = self.values.get(key)
        if not (value is None or isinstance(value, dict)):
            self.reject(key, "expected an object")
        return JsonObject(f"{self.where}{key}.", value if isinstance(value, dict) else {}, self.problems, self.rejected)
