"""Reading of typed options from a TOML file and `--section.key=value` arguments. All problems of a config are reported
at once, one per line: file or command line, key = value, what was expected, what to do."""

import contextlib
import copy
import dataclasses
import datetime
import difflib
import functools
import itertools
import json
import math
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from titanlite.config.regular_file import read_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

COMMAND_LINE = "command line"
LARGEST_CONFIG = 2**20  # largest TOML file, in bytes
OWN_MESSAGE = "own message"
"""pydantic type of errors that titanlite raises itself, whose message is shown unchanged."""
DEEPEST = 32  # deepest nesting of a TOML file, in levels; a config has five levels
FAR = 4096
"""Upper bounds of this value or more are technical limits; error messages name them only if they are exceeded."""
TYPES = {"boolean": "true or false", "integer": "an integer", "number": "a finite number", "string": "a string"}
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
"""Words for the types and bounds of JSON Schema."""
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that move a cursor, start a terminal's escape sequence or change a text's direction, or are not UTF-8."""
_LONG_KEY = re.compile(rf"""(?<![\w-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{DEEPEST}}}""")


class Section(BaseModel):
    """Base class of a [section], in which sections can be nested. Unknown keys are rejected; no types are converted."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)
    alternatives: ClassVar[dict[str, tuple[str, ...]]] = {}
    """For each option (`section.key`), the options in a file that it replaces if it is set on the command line."""
    copies: ClassVar[dict[str, tuple[str, str]]] = {}
    """For an option, the (section, key) of another one that it also replaces if a file gives both the same value."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_odd_characters(cls, value: Any) -> Any:
        texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
        # Reject control characters, which a terminal obeys, and surrogates, which stand for bytes that are not UTF-8.
        if any(re.search("[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", text) for text in texts):
            raise PydanticCustomError(OWN_MESSAGE, "expected UTF-8 text without control characters")
        return value


Options = TypeVar("Options", bound=Section)
Place = tuple[str | int, ...]
"""Path to a value in a config: names of sections and keys, and numbers of tables."""


class ConfigError(Exception):
    """The config or the launch is wrong; `problems` has one line per problem. `loaded` is the LoadedConfig with
    defaults in place of wrong values, None if there is none."""

    def __init__(self, problems: list[str], loaded: Any = None):
        super().__init__("\n".join(problems))
        self.loaded = loaded
        self.problems = [printable(problem) for problem in problems]


def check_all(*checks: Callable[[], Any], problems: Sequence[str] = ()) -> None:
    """Run all checks; raise one ConfigError with `problems` and the problems of all checks, if there are any."""
    problems = [*problems]
    for each in checks:
        try:
            each()
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


def print_problems(error: ConfigError) -> None:
    for problem in error.problems:
        print(f"error: {problem}", file=sys.stderr)


class Rejection(NamedTuple):
    """A wrong value: its key, a message with what was expected and what to do, and the keys that the rule reads."""

    key: str
    message: str
    reads: set[str]


class Rejections(list[Rejection]):
    """The wrong values that rules found; calling the list adds a Rejection."""

    def __call__(self, key: str, message: str, *reads: str) -> None:
        self.append(Rejection(key, message, {key, *reads}))


Rules = Callable[[Options, set[str]], Rejections]


@dataclasses.dataclass(frozen=True)
class LoadedConfig(Generic[Options]):
    """A config with the origin of each value, which error messages name."""

    config: Options
    file: str
    origins: dict[str, str]  # config file's name or COMMAND_LINE, for each `section.key` that was set

    def lines(self, rejections: Rejections, ignored: set[str] = frozenset()) -> list[str]:
        """Return a line per rejection. A rejection is left out if its rule has read a key in `ignored`."""
        lines = []
        for key, message, reads in rejections:
            if not ignored & reads:
                option, *in_table = re.split(r"\.(?=\d+\.)", key)
                table, _, name = key.rpartition(".")
                is_set = name in value_of(self.config, table).model_fields_set if in_table else option in self.origins
                value = show(value_of(self.config, key)) + ("" if is_set else " (default)")
                lines.append(f"{self.origins.get(option, self.file)}: {key} = {value}: {message}")
        return lines


def value_of(config: Section, key: str) -> Any:
    """Return the value of option `section.key`, or of `section.key.N.name` in table N of an array of tables."""
    value: Any = config
    for name in key.split("."):
        value = value[int(name)] if isinstance(value, list) else getattr(value, name)
    return value


def load(kind: type[Options], argv: list[str], *, rules: Rules) -> LoadedConfig:
    """Read a config (see `find_config`) and its `--section.key=value` overrides into an instance of `kind`. A bare
    `--section.key` means true, and `--section.key value` is accepted. `rules`: a function of the config and the set of
    keys with other values than the defaults. Raises ConfigError with every problem."""
    argv = _with_values(kind, argv)
    names = [argument for argument in argv if not argument.startswith("-")]
    options = [argument for argument in argv if argument.startswith("-")]
    if len(names) != 1 or not names[0]:
        first = f"{COMMAND_LINE}: expected one config, got {' '.join(names) or 'none'}; --help tells more"
        check_all(lambda: load_values(kind, {}, COMMAND_LINE, options, rules=lambda *_: Rejections()), problems=[first])
    file = str(find_config(names[0]))
    return load_values(kind, read_toml(file), file, options, rules=rules)


def _with_values(kind: type[Section], argv: list[str]) -> list[str]:
    """Return `argv` with each pair `--section.key value` joined to `--section.key=value`."""
    joined = [""]
    for text in argv:
        option = options_of(kind).get(joined[-1].removeprefix("--"))
        takes = option and not text.startswith("--") and (text in ("true", "false") or not _may_be_bare(option))
        joined[-1:] = [f"{joined[-1]}={text}"] if takes else [joined[-1], text]
    return joined[1:]


def _may_be_bare(option: Any) -> bool:
    return bool in (option.annotation, *get_args(option.annotation))


def load_values(
    kind: type[Options], values: dict[str, Any], file: str, arguments: list[str], *, rules: Rules
) -> LoadedConfig[Options]:
    """Check the `values` of a TOML file, or of another source, and the overrides in `arguments` (see `load`)."""
    origins = dict.fromkeys(_keys_in(kind, values), file)
    problems = _override(kind, _with_values(kind, arguments), values, origins)
    try:
        config, bad_keys, value_problems = _validate(kind, values, file, origins)
    except ConfigError as error:  # from_hf with a bad folder: check the rest of the config with the default flavor
        values["model"].pop("flavor")
        config, bad_keys, value_problems = _validate(kind, values, file, origins)
        bad_keys |= {key for key in options_of(kind) if key.startswith("model.")}
        value_problems += error.problems
    # The rules run with defaults in place of wrong values, so that one run reports all problems.
    loaded = LoadedConfig(config, file, origins)
    # A resolved config file sets every option, so an option counts as changed only if it differs from its default.
    options = [(key, option) for key, option in options_of(kind).items() if key in origins and key not in bad_keys]
    changed = {key for key, option in options if option.is_required() or value_of(config, key) != option.default}
    problems += value_problems + loaded.lines(rules(config, changed), bad_keys)
    if problems:
        raise ConfigError(problems, loaded)
    return loaded


def find_config(name: str) -> Path:
    """Return the path of a config. A bare name (debug, 70b) means a config shipped with titanlite; a name with a folder
    or the suffix .toml is a path. Raises ConfigError if no shipped config has the name."""
    path, package = Path(name), Path(__file__).parents[1]
    if path.name != name or path.suffix == ".toml" or (path.suffix and path.is_file()):
        return path
    folder = package / "configs" if (package / "configs").is_dir() else package.parent / "configs"
    files = {file.stem: file for part in (folder / "reference", folder) for file in part.glob("*.toml")}
    if name not in files:
        near = " or ".join(difflib.get_close_matches(name, files, cutoff=0.4)) or f"one of {', '.join(sorted(files))}"
        raise ConfigError([f"{name}: no config has this name; did you mean {near}? A path needs a folder or .toml"])
    return files[name]


def read_toml(file: str) -> dict[str, Any]:
    path = Path(file)
    try:
        return parse_toml(read_file(path, LARGEST_CONFIG).decode("utf-8-sig"))  # Windows editors may write a BOM
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [other.name for other in path.parent.glob("*.toml")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else "" if path.is_absolute() else f" in {Path.cwd()}"
        problem = f"no such file{hint}"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        problem = f"not valid TOML: {error}"
    raise ConfigError([f"{file}: {problem}"])


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Raises ValueError or RecursionError if the text is invalid or nested deeper than DEEPEST. For dotted
    keys, the limit bounds tomllib's time, which is quadratic in the number of parts."""

    def depth(value: Any) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return 1 + max(map(depth, inner), default=0)

    if _LONG_KEY.search(text) or depth(values := tomllib.loads(text)) > DEEPEST:
        raise ValueError(f"a key or a value is nested more than {DEEPEST} levels deep")
    return values


def _keys_in(kind: type[Section], values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    sections = sections_of(kind)
    for name, value in values.items():
        if f"{prefix}{name}" in sections and isinstance(value, dict):
            yield from _keys_in(kind, value, f"{prefix}{name}.")
        elif prefix:
            yield f"{prefix}{name}"


def _override(kind: type[Section], arguments: list[str], values: dict[str, Any], origins: dict[str, str]) -> list[str]:
    """Overwrite `values` with `--section.key=value` arguments, and return an error line for each malformed argument."""
    problems, replaced = [], list[str]()
    for argument in arguments:
        name, equals, text = argument.removeprefix("--").partition("=")
        known = [section for section in sections_of(kind) if name.startswith(f"{section}.")]
        section = max(known, key=len, default=name.partition(".")[0])  # the innermost section that exists
        key = name[len(section) + 1 :]
        option = options_of(kind).get(name)
        if not argument.startswith("--") or not section or not key:
            problems.append(f"{COMMAND_LINE}: {argument}: expected --section.key=value")
        elif section not in sections_of(kind):
            problems.append(f"{COMMAND_LINE}: {argument}: an unknown section{_hint(kind, section)}")
        elif not equals and option and not _may_be_bare(option):
            problems.append(f"{COMMAND_LINE}: {argument}: expected a value; write {argument}=VALUE")
        else:
            inner = values
            for part in section.split("."):
                inner = inner.setdefault(part, {}) if isinstance(inner, dict) else None
            if isinstance(inner, dict):  # _validate reports a section that is no table
                with contextlib.suppress(KeyError, TypeError):  # the option has no copy, or the file lacks one of them
                    table, copied = kind.copies[name]
                    replaced += [f"{table}.{copied}"] if values[table][copied] == inner[key] else []
                inner[key] = _parse(text, option) if equals else True
                origins[name] = COMMAND_LINE
                if inner[key] or option is None or option.default:  # an option set to its default 0 replaces no other
                    replaced += kind.alternatives.get(name, ())
    for name in (name for name in replaced if origins.get(name, COMMAND_LINE) != COMMAND_LINE):
        section, _, key = name.partition(".")
        del values[section][key], origins[name]
    return problems


def _parse(text: str, option: Any) -> Any:
    """Parse an argument as TOML. Return the text itself if this fails, or gives no string for a string option."""
    with contextlib.suppress(ValueError, RecursionError):
        parsed = parse_toml(f"value = {text}")
        value = parsed["value"]
        if len(parsed) == 1 and (option is None or option.annotation is not str or isinstance(value, str)):
            return value
    return text


def _validate(
    kind: type[Options], values: dict[str, Any], file: str, origins: dict[str, str]
) -> tuple[Options, set[str], list[str]]:
    """Return the options with defaults in place of bad values, the keys of bad values, and an error line per bad value.
    If the only bad option is derived from others, all options get defaults, and all keys count as bad."""
    good, lines, bad_keys = copy.deepcopy(values), dict[Place, str](), set[str]()
    while True:
        try:
            return kind.model_validate(good), bad_keys, [*lines.values()]
        except ValidationError as error:
            entries = sorted(error.errors(), key=lambda entry: len(entry["loc"]) > 1)  # errors of entire sections first
        found = [(*_place(kind, entry["loc"]), entry) for entry in entries]
        is_set = [each for each in found if _is_set(good, each[0])]
        for place, section, field, entry in is_set or found:
            if place in lines:
                continue  # pydantic reports an error for each branch of a union; one line is enough
            value = functools.reduce(operator.getitem, place[:-1], good).pop(place[-1]) if is_set else entry["input"]
            option = ".".join(itertools.takewhile(lambda part: isinstance(part, str), place))
            bad_keys |= {option, *(key for key in options_of(kind) if key.startswith(f"{option}."))}
            lines[place] = f"{origins.get(option, file)}: {_problem(kind, place, section, field, value, entry)}"
        if not is_set:
            return kind.model_validate({}), {*options_of(kind)}, [*lines.values()]


def _is_set(values: Any, place: Place) -> bool:
    with contextlib.suppress(KeyError, IndexError):
        functools.reduce(operator.getitem, place, values)
        return True
    return False


def _place(kind: type[Section], loc: Place) -> tuple[Place, type[Section], Any]:
    """Return the path to the option at a pydantic error's location (without appended list items and union branches),
    the section that contains the option, and the option's field (None for an unknown key)."""
    inner: type[Section] | None = kind
    for number, name in enumerate(loc):
        if isinstance(name, str) and inner:
            place, section, field = loc[: number + 1], inner, inner.model_fields.get(name)
            inner = table_of(field) or sections_of(inner).get(name)
    return place, section, field


def _problem(kind: type[Section], place: Place, section: type[Section], field: Any, value: Any, entry: Any) -> str:
    key, name = ".".join(map(str, place)), str(place[-1])
    if key in sections_of(kind):
        message = f"expected a section, written [{key}]"
    elif field:
        near = did_you_mean(value, re.findall('"(.+?)"', expected := f"expected {expectation(field, value)}"))
        message = entry["msg"] if entry["type"] == OWN_MESSAGE else expected + near
    elif len(place) == 1:
        if isinstance(value, (dict, list)):
            return f"[{key}]: an unknown section{_hint(kind, key)}"
        message = f"a key outside any section{_hint(kind, '', key)}"
    elif any(isinstance(part, int) for part in place):
        near = did_you_mean(name, section.model_fields)
        message = "unknown key" + (near or f"; expected one of {', '.join(section.model_fields)}")
    else:
        message = f"unknown key{_hint(kind, key.removesuffix(f'.{name}'), name)}"
    return f"{key} = {show(value)}: {message}"


def table_of(option: Any) -> type[Section] | None:
    """Return the Section that describes each table of an option, if the option is an array of tables."""
    items = get_args(option.annotation) if option and get_origin(option.annotation) is list else ()
    return next((item for item in items if isinstance(item, type) and issubclass(item, Section)), None)


@functools.cache
def sections_of(kind: type[Section]) -> dict[str, type[Section]]:
    """Return all sections inside a section, by name; nested sections have dotted names such as `model.moe`."""
    sections: dict[str, type[Section]] = {}
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            sections[name] = field.annotation
            sections |= {f"{name}.{inner}": section for inner, section in sections_of(field.annotation).items()}
    return sections


@functools.cache
def options_of(kind: type[Section]) -> dict[str, Any]:
    """Return the pydantic field of every option, by `section.key`."""
    sections = sections_of(kind)
    fields = ((f"{name}.{key}", field) for name, part in sections.items() for key, field in part.model_fields.items())
    return {key: option for key, option in fields if key not in sections}


ANSWERS = {"metrics.enable_wandb": "examples/follow_metrics.py passes metrics.jsonl on to Weights & Biases; remove it"}
"""Advice about options of other training programs that titanlite has no similar option for."""


def _hint(kind: type[Section], section: str, key: str = "") -> str:
    """Return a hint: a similar name, a key with a word that begins like `key`, or `key` in another section."""
    if f"{section}.{key}" in ANSWERS:
        return f"; {ANSWERS[f'{section}.{key}']}"
    keys = [option.rpartition(".")[::2] for option in options_of(kind)]
    own = [name for other, name in keys if other == section]
    near = [] if key else difflib.get_close_matches(section, sections_of(kind), n=1, cutoff=0.7)
    near += [f"{section}.{name}" for name in difflib.get_close_matches(key, own, n=1)]
    near += [f"{section}.{name}" for name in own if any(each.startswith(key) for each in name.split("_"))]
    near += [f"{other}.{name}" for other, name in keys if name == key]
    return f"; did you mean {near[0]}?" if near else "; --help lists every option"


def did_you_mean(value: Any, choices: Iterable[str]) -> str:
    """Return a hint: the choice with the closest spelling to `value`, or choices that begin with `value`; "" if there
    is none. A close spelling has the same first letter and digits (relu is not close to gelu)."""
    text, parts = value.lower().replace("-", "_") if isinstance(value, str) else "", re.compile("^.|[0-9]")
    names = {choice.lower(): choice for choice in choices}
    alike = [name for name in names if parts.findall(name) == parts.findall(text)]
    near = difflib.get_close_matches(text, alike, 1, 0.54) or [name for name in names if name.startswith(text or "?")]
    return f"; did you mean {' or '.join(names[name] for name in near[:3])}?" if near else ""


def printable(text: str, keep: str = "") -> str:
    """Return a text with control characters, except those in `keep`, as visible escapes such as \\x1b."""
    return _CONTROLS.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


def show(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    try:
        return printable(json.dumps(value, ensure_ascii=False, default=str))
    except ValueError:  # Python converts no integer of more than 4300 digits to text
        return "a number of more than 4300 digits"


def expectation(option: Any, value: Any = None) -> str:
    """Describe the values that an option accepts. Upper bounds >= FAR are named only if `value` exceeds them."""
    return _expectation(TypeAdapter(Annotated[option.annotation, option]).json_schema(), value)


def _expectation(schema: dict[str, Any], value: Any) -> str:
    if branches := schema.get("anyOf"):
        return ", or ".join(_expectation(branch, value) for branch in branches if branch.get("type") != "null")
    if "$ref" in schema:
        return "a table"
    if choices := schema.get("enum"):
        return f"one of {', '.join(map(show, choices))}"
    if "const" in schema:
        return show(schema["const"])
    if schema["type"] == "array":
        of = {"string": "a list of strings", "array": "a list of lists of strings", "number": "a list of numbers > 0"}
        return of.get(schema["items"].get("type"), "an array of tables")
    bounds = {bound: schema[bound] for bound in BOUNDS if bound in schema}
    if bounds.get("maximum", 0) >= FAR and not (type(value) is int and value > bounds["maximum"]):
        del bounds["maximum"]
    limits = " and ".join(f"{BOUNDS[bound]} {limit}" for bound, limit in bounds.items())
    return f"{TYPES[schema['type']]} {limits}".rstrip()
