"""Write docs/reference/config.md: every option with its type, default and meaning.

python -m docs.build.config_page
"""

import textwrap
from pathlib import Path

from titanlite.config import Config
from titanlite.config.loader import expectation, sections_of
from titanlite.config.reference import default_of, meaning_of, options_in, tables_of

PAGE = Path(__file__).parents[1] / "reference" / "config.md"


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


def wrap(text: str, indent: str = "") -> list[str]:
    """Return the lines of a paragraph, at most 100 columns wide, all but the first one indented."""
    limits = {"width": 100, "break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(" ".join(text.split()), subsequent_indent=indent, **limits)


if __name__ == "__main__":
    PAGE.write_text(reference_markdown(), encoding="utf-8")
