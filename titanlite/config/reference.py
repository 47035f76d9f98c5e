"""Lists of all options with type, default and meaning, for --help, editors and docs/build/config_page.py."""

import json
from collections.abc import Sequence
from typing import Any

from titanlite.config import USAGE, Config, ConfigError
from titanlite.config.loader import COMMAND_LINE, did_you_mean, expectation, options_of, sections_of, show, table_of
from titanlite.config.types import MAY_DIFFER


def help_text(arguments: Sequence[str] = ()) -> str:
    """Return the text of --help about the sections in `arguments`. Raises ConfigError for a misspelled section."""
    names = arguments[next((i for i, text in enumerate(arguments) if text in ("-h", "--help")), 0) + 1 :]
    for name in names:
        if name not in sections_of(Config) and (hint := did_you_mean(name, sections_of(Config))):
            raise ConfigError([f"{COMMAND_LINE}: --help {name}: an unknown section{hint}"])
    named = [each for each in sections_of(Config) if {each, each.partition(".")[0]} & {*names}]
    config = "CONFIG is a TOML file, or the name of a config shipped with titanlite, as in debug or 70b."
    values = "Values are TOML; a string needs no quotes. A bare --section.key means true. "
    lines = [USAGE, "", config, f"{values}--help SECTION has one section.", ""]
    for section in named or sections_of(Config):
        lines.append(f"[{section}]")
        for key, option in options_in(section):
            lines.append(f"  --{section}.{key}   {expectation(option)}; default {default_of(option)}")
            lines.append(f"      {meaning_of(option)}")
            lines += [f"      {text}" for text in tables_of(option)]
        lines.append("")
    return "\n".join(lines)


def json_schema() -> str:
    """Return the JSON Schema of a config, docs/reference/config.schema.json, which lacks the rules between options."""
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", **Config.model_json_schema()}
    for kind in {*sections_of(Config).values(), *filter(None, map(table_of, options_of(Config).values()))}:
        section = schema["$defs"][kind.__name__]
        section.pop("required", None)  # no option is required: model.flavor sets those that [model] omits
        if kind.__doc__:
            section["description"] = " ".join(kind.__doc__.split())
        for name, option in section["properties"].items():
            option.pop("title", None)
            if "$ref" not in option:
                option["description"] = meaning_of(kind.model_fields[name])
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def tables_of(option: Any) -> list[str]:
    """Return a line of help for each key of an option that is an array of tables; [] for any other option."""
    table = table_of(option)
    fields = table.model_fields.items() if table else ()
    return [f"{name}: {expectation(field)}; default {default_of(field)}. {meaning_of(field)}" for name, field in fields]


def options_in(section: str) -> list[tuple[str, Any]]:
    """Return (name, pydantic field) of each option of a section."""
    options = ((*key.rpartition(".")[::2], option) for key, option in options_of(Config).items())
    return [(name, option) for place, name, option in options if place == section]


def default_of(option: Any) -> str:
    return "the flavor's" if option.is_required() else show(option.default)


def meaning_of(option: Any) -> str:
    return " ".join([*(option.description or "").split(), *([MAY_DIFFER] if MAY_DIFFER in option.metadata else [])])
