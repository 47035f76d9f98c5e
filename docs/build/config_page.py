"""Write docs/reference/config.md, every option with its type, default and meaning, and config.schema.json, for editors.

python -m docs.build.config_page
"""

import json
import textwrap
from pathlib import Path

from titanlite.config import Config
from titanlite.config.loader import expectation, options_of, sections_of, table_of
from titanlite.config.reference import default_of, meaning_of, options_in, tables_of

PAGE, SCHEMA = (Path(__file__).parents[1] / "reference" / name for name in ("config.md", "config.schema.json"))


def reference_markdown() -> str:
    """Return the page: one section per [section], each option with its type, default and meaning."""
    text = "A config is a TOML file with these sections. Every option can also be set on the command line, as in "
    text += "`--training.steps=100`; a bare `--section.key` means true. All nodes of a run need the same config, "
    text += "except for the options that say otherwise."
    origin = "<!-- Written by `python -m docs.build.pages` from titanlite/config/schema.py. -->"
    lines = ["# Config reference", "", origin, "", *wrap(text)]
    for section, kind in sections_of(Config).items():
        lines += ["", f"## [{section}]"]
        if kind.__doc__:
            lines += ["", *wrap(kind.__doc__)]
        for key, option in options_in(section):
            expected = expectation(option)
            lines += ["", f"### {section}.{key}", ""]
            default = default_of(option) if option.is_required() else f"`{default_of(option)}`"
            lines += [*wrap(f"{expected[0].upper()}{expected[1:]}. Default: {default}."), ""]
            lines += wrap(meaning_of(option))
            for text in tables_of(option):
                lines += ["", *wrap(f"- {text}", indent="  ")]
    return "\n".join(lines) + "\n"


def json_schema() -> str:
    """Return the JSON Schema of a config, with which editors complete and check options. It lacks the rules between
    options."""
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", **Config.model_json_schema()}
    for kind in {*sections_of(Config).values(), *filter(None, map(table_of, options_of(Config).values()))}:
        section = schema["$defs"][kind.__name__]
        section.pop("required", None)  # the flavor has what a model leaves out
        if kind.__doc__:
            section["description"] = " ".join(kind.__doc__.split())
        for name, option in section["properties"].items():
            option.pop("title", None)
            if "$ref" not in option:
                option["description"] = meaning_of(kind.model_fields[name])
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def wrap(text: str, indent: str = "") -> list[str]:
    """Return the lines of a paragraph, at most 100 columns wide, all but the first one indented."""
    limits = {"width": 100, "break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(" ".join(text.split()), subsequent_indent=indent, **limits)


def write() -> None:
    PAGE.write_text(reference_markdown(), encoding="utf-8")
    SCHEMA.write_text(json_schema(), encoding="utf-8")


if __name__ == "__main__":
    write()
