"""Print a resolved config, or write the reference of all options.

titanlite config CONFIG [--section.key=value ...]     the config with every default filled in, as TOML
titanlite config --reference [FILE]                   every option as Markdown, into docs/reference/config.md or FILE
"""

from pathlib import Path

from titanlite.config import ConfigError, load
from titanlite.config.loader import print_problems
from titanlite.config.reference import help_text, reference_markdown

REFERENCE = "docs/reference/config.md"


def main(argv: list[str]) -> int:
    """Return the exit status: 0, or 2 if the config is wrong."""
    if not argv or "-h" in argv or "--help" in argv:
        print(f"{__doc__}\n{help_text()}")
        return 0
    if argv[0] == "--reference":
        target = Path(argv[1] if len(argv) > 1 else REFERENCE)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(reference_markdown(), encoding="utf-8")
        print(f"written: {target}")
        return 0
    try:
        print(load(argv).config.toml(), end="")
    except ConfigError as error:
        print_problems(error)
        return 2
    return 0
