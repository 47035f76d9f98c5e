"""Typed options from a TOML file and `--section.key=value` arguments: a class of sections, each a class of options.

What is read here knows nothing of the options themselves; those, and the rules between them, are in
titanlite/config.py. Everything wrong is found in one run, and each problem is one line: where the value stands, key =
value, what was expected."""

import contextlib
import dataclasses
import datetime
import difflib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, ConfigDict, ValidationError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

COMMAND_LINE = "command line"


class Section(BaseModel):
    """One [section] of the file. Strict: no unknown key, no silent conversion of types."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)


Options = TypeVar("Options", bound=Section)


class ConfigError(Exception):
    """The config or the launch is wrong. `problems` holds one line each; a program prints them and exits with 2."""

    def __init__(self, problems: list[str]):
        super().__init__("\n".join(problems))
        self.problems = [problem.replace("\n", "\\n") for problem in problems]


class Rejections(list[tuple[str, str, tuple[str, ...]]]):
    """Problems with the values of options; call it to add one."""

    def __call__(self, key: str, message: str, *others: str) -> None:
        """Args:
        key: `section.key` of the value that is wrong.
        message: what was expected and what to do.
        others: keys that the rule also read.
        """
        self.append((key, message, others))


@dataclasses.dataclass(frozen=True)
class LoadedConfig(Generic[Options]):
    """A config with where its values came from, so that later checks can say so."""

    config: Options
    file: str
    origins: dict[str, str]
    """File or command line, for each key that was given."""

    def lines(self, refusals: Rejections, ignoring: set[str] = frozenset()) -> list[str]:
        """One line a refusal, but for those that read a key to be ignored."""
        return [self._line(key, message) for key, message, others in refusals if not ignoring & {key, *others}]

    def _line(self, key: str, message: str) -> str:
        section, name = key.split(".")
        default = "" if key in self.origins else " (default)"
        value = show(getattr(getattr(self.config, section), name))
        return f"{self.origins.get(key, self.file)}: {key} = {value}{default}: {message}"


def load(
    kind: type[Options], argv: list[str], *, usage: str, rules: Callable[[Options, set[str]], Rejections]
) -> LoadedConfig:
    """Read a TOML file and overrides into options.

    Args:
        kind: a Section whose fields are Sections.
        argv: one path, any number of `--section.key=value` (a bare `--section.key` is true).
        rules: problems between options, from the options and the keys that were given a value other than the default.

    Raises:
        ConfigError: with every problem found: arguments, syntax, unknown keys, types, values, rules.
    """
    paths = [argument for argument in argv if not argument.startswith("-")]
    arguments = [argument for argument in argv if argument.startswith("-")]
    if len(paths) != 1 or not paths[0]:
        got = "no config file" if not paths else "an empty path" if paths == [""] else f"{len(paths)} files: "
        got += " ".join(paths) if len(paths) > 1 else ""
        problems = [f"{COMMAND_LINE}: expected one TOML file, got {got}; {usage}"]
        raise ConfigError(problems + _override(kind, arguments, {}, {}))
    (file,) = paths
    given = read_toml(file)
    origins = {f"{section}.{key}": file for section, keys in given.items() if isinstance(keys, dict) for key in keys}
    problems = _override(kind, arguments, given, origins)
    config, bad_keys, found = _validate(kind, given, file, origins)
    # The rules run even where single values are wrong (those stand in with their defaults): all problems in one run.
    loaded = LoadedConfig(config, file, origins)
    changed = {key for key in origins if key not in bad_keys and _differs_from_default(config, key)}
    problems += found + loaded.lines(rules(config, changed), ignoring=bad_keys)
    if problems:
        raise ConfigError(problems)
    return loaded


def read_toml(file: str) -> dict[str, Any]:
    """Raises:
    ConfigError: if it is not there, cannot be read or is not TOML.
    """
    path = Path(file)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # an editor on Windows may write a mark first
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [other.name for other in path.parent.glob("*.toml")], n=1)
        place = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise ConfigError(
            [f"{file}: no such file{f'; did you mean {path.parent / near[0]}?' if near else place}"]
        ) from None
    except OSError as error:
        raise ConfigError([f"{file}: cannot be read: {error.strerror}"]) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"{file}: not valid TOML: {error}"]) from None


def _override(kind: type[Section], arguments: list[str], given: dict[str, Any], origins: dict[str, str]) -> list[str]:
    """Write `--section.key=value` arguments over the file's values. Returns a line for each that cannot be."""
    problems = []
    for argument in arguments:
        name, equals, text = argument.removeprefix("--").partition("=")
        section, _, key = name.partition(".")
        if not argument.startswith("--") or not section or not key:
            problems.append(f"{COMMAND_LINE}: {argument}: expected --section.key=value")
            continue
        option = _option(kind, section, key)
        if not equals and option is not None and option.annotation is not bool:
            problems.append(f"{COMMAND_LINE}: {argument}: expected a value; write {argument}=VALUE")
            continue
        keys = given.setdefault(section, {})
        if isinstance(keys, dict):  # else the file has `section = something`, which is reported as such
            keys[key] = _parse(text, option) if equals else True
            origins[f"{section}.{key}"] = COMMAND_LINE
    return problems


def _parse(text: str, option: Any) -> Any:
    """The value of an argument: TOML where it is that, else (a word such as debug) a string. What a string option is
    given stays a string, whatever it looks like."""
    with contextlib.suppress(ValueError, RecursionError):
        parsed = tomllib.loads(f"value = {text}")
        value = parsed["value"]
        if len(parsed) == 1 and (option is None or option.annotation is not str or isinstance(value, str)):
            return value
    return text


def _validate(
    kind: type[Options], given: dict[str, Any], file: str, origins: dict[str, str]
) -> tuple[Options, set[str], list[str]]:
    """Validate types and ranges. Returns the options (bad values left at their defaults), bad keys, lines."""
    problems, bad_keys, good = [], set(), {}
    for section, keys in given.items():
        if section not in kind.model_fields:
            problems.append(_unknown_section(kind, section, keys, file, origins))
        elif not isinstance(keys, dict):
            problems.append(f"{file}: {section} = {show(keys)}: expected a section, written [{section}]")
            bad_keys |= {f"{section}.{key}" for key in kind.model_fields[section].annotation.model_fields}
        else:
            good[section] = dict(keys)
    try:
        return kind.model_validate(good), bad_keys, problems
    except ValidationError as error:
        for entry in error.errors():
            section, name, *_ = entry["loc"]
            key = f"{section}.{name}"
            if key in bad_keys:
                continue  # each branch of a union reports on its own
            bad_keys.add(key)
            value = good[section].pop(name)
            option = _option(kind, section, name)
            expected = (
                f"unknown key{_nearest(kind, section, name)}"
                if option is None
                else f"expected {expectation(option, finite=isinstance(value, float) and not math.isfinite(value))}"
            )
            problems.append(f"{origins.get(key, file)}: {key} = {show(value)}: {expected}")
        return kind.model_validate(good), bad_keys, problems


def _unknown_section(kind: type[Section], section: str, keys: Any, file: str, origins: dict[str, str]) -> str:
    if not isinstance(keys, (dict, list)):
        return f"{file}: {section} = {show(keys)}: a key outside any section{_nearest(kind, '', section)}"
    near = difflib.get_close_matches(section, list(kind.model_fields), n=1)
    hint = f"did you mean {near[0]}?" if near else "--help lists every option"
    given = [key for key in origins if key.startswith(f"{section}.")]
    if given and all(origins[key] == COMMAND_LINE for key in given):
        return f"{COMMAND_LINE}: --{given[0]}: an unknown section; {hint}"
    return f"{file}: [{section}]: an unknown section; {hint}"


def _option(kind: type[Section], section: str, key: str) -> Any:
    """The pydantic field of an option, or None."""
    return kind.model_fields[section].annotation.model_fields.get(key) if section in kind.model_fields else None


def _differs_from_default(config: Section, key: str) -> bool:
    """A resolved config names every option; only what differs from the defaults was meant."""
    section, _, name = key.partition(".")
    option = _option(type(config), section, name)
    return option is not None and (option.is_required() or getattr(getattr(config, section), name) != option.default)


def _nearest(kind: type[Section], section: str, key: str) -> str:
    """A hint after an unknown key: what is spelt alike in its section, or has it as a word there, or is the same key in
    another section."""
    keys = {name: list(field.annotation.model_fields) for name, field in kind.model_fields.items()}
    own = keys.get(section, [])
    near = [f"{section}.{other}" for other in difflib.get_close_matches(key, own, n=1)]
    near += [f"{section}.{other}" for other in own if key in other.split("_")]
    near += [f"{name}.{key}" for name, others in keys.items() if key in others]
    return f"; did you mean {near[0]}?" if near else "; --help lists every option"


def show(value: Any) -> str:
    """A value as it stands in TOML."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return json.dumps(value, ensure_ascii=False, default=str)


def expectation(option: Any, *, finite: bool = False) -> str:
    """What an option takes, in words: type, bounds and choices.

    Args:
        finite: say that a number must be finite, as the one that was given is not.
    """
    return _expectation(option.annotation, option.metadata, "a finite number" if finite else "a number")


def _expectation(annotation: Any, metadata: Any, number: str) -> str:
    if get_origin(annotation) is Annotated:
        annotation, *metadata = get_args(annotation)
    if get_origin(annotation) is Union:
        return ", or ".join(_expectation(branch, (), number) for branch in get_args(annotation))
    if get_origin(annotation) is Literal:
        choices = [show(choice) for choice in get_args(annotation)]
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    text = {bool: "true or false", int: "a whole number", float: number, str: "a string"}.get(annotation)
    text = text or ("a list of strings" if annotation == list[str] else "a list of lists of strings")
    constraints: list[Any] = []
    for item in metadata:
        constraints += item.metadata if hasattr(item, "metadata") else [item]
    words = {annotated_types.Ge: "at least", annotated_types.Gt: "above"}
    words |= {annotated_types.Le: "at most", annotated_types.Lt: "below"}
    bounds = [
        f"{words[type(item)]} {getattr(item, type(item).__name__.lower())}"
        for item in constraints
        if type(item) in words
    ]
    return f"{text} {' and '.join(bounds)}".rstrip()


def help_text(kind: type[Section], usage: str) -> str:
    """Every option with its type, default and meaning."""
    lines = [usage, "", "Values are TOML; a string needs no quotes. A bare --section.key means true.", ""]
    for section, field in kind.model_fields.items():
        lines.append(f"[{section}]")
        for key, option in field.annotation.model_fields.items():
            default = "the flavor's" if option.is_required() else show(option.default)
            lines.append(f"  --{section}.{key}   {expectation(option)}; default {default}")
            lines.append(f"      {' '.join((option.description or '').split())}")
        lines.append("")
    return "\n".join(lines)


def print_problems(error: ConfigError) -> None:
    """One line a problem; every program of this project then exits with 2."""
    for problem in error.problems:
        print(f"error: {problem}", file=sys.stderr)
