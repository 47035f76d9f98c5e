"""Print a resolved config, write the reference of all options, or convert a TOML file of torchtitan.

titanlite config CONFIG [--section.key=value ...]     the config with every default filled in, as TOML
titanlite config --reference [FILE]                   every option as Markdown, into docs/reference/config.md or FILE
titanlite config --from-torchtitan FILE [TARGET.toml] a TOML file of torchtitan 0.2 as a config; what
                                                      became of each key is listed on standard error
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
    if argv[0] == "--from-torchtitan":
        from titanlite.config.from_torchtitan import command  # here, since the other uses need no tables of its keys

        return command.main(argv[1:])
    try:
        print(load(argv).config.toml(), end="")
    except ConfigError as error:
        print_problems(error)
        return 2
    return 0
