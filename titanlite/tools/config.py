"""Print a resolved config, compare two, write the reference of all options, or convert a TOML file of torchtitan.

titanlite config CONFIG [--section.key=value ...]     the config with every default filled in, as TOML, and the
                                                      problems that train would report
titanlite config A B                                  the options that differ between two configs or runs (folders
                                                      with a config.toml); exit status 1 if any does
titanlite config --schema                             the JSON Schema of a config, for editors
titanlite config --reference [FILE]                   every option as Markdown, into docs/reference/config.md or FILE
titanlite config --from-torchtitan FILE [TARGET.toml] a TOML file of torchtitan 0.2 as a config; what
                                                      became of each key is listed on standard error
"""

from pathlib import Path

from titanlite.config import load
from titanlite.config.differences import differences, options_by_key, shown
from titanlite.config.reference import help_text, json_schema, reference_markdown

REFERENCE = "docs/reference/config.md"


def main(argv: list[str]) -> int:
    """Return the exit status: 0; 1 if two configs differ. Raises ConfigError if a config is wrong."""
    if not argv or "-h" in argv or "--help" in argv:
        print(f"{__doc__}\n{help_text(argv)}")
        return 0
    if argv[0] == "--reference":
        target = Path(argv[1] if len(argv) > 1 else REFERENCE)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(reference_markdown(), encoding="utf-8")
        print(f"written: {target}")
        return 0
    if argv == ["--schema"]:
        print(json_schema(), end="")
        return 0
    if argv[0] == "--from-torchtitan":
        from titanlite.tools.from_torchtitan import command  # imported here: the other uses need no tables of its keys

        return command.main(argv[1:])
    if len(argv) == 2 and not any(name.startswith("-") for name in argv):
        return compare(*argv)
    from titanlite.launch.launcher import load_and_check  # imported here, since the other uses need no run

    load_and_check(argv, lambda loaded: print(loaded.config.toml(), end="", flush=True))
    return 0


def compare(*names: str) -> int:
    """Print the options that differ between two configs, and return 1 if there are any, otherwise 0. A run's folder
    stands for its config.toml. Raises ConfigError if a config is wrong."""
    files = [f"{name}/config.toml" if "/" in name and Path(name).is_dir() else name for name in names]
    changed = differences(*(options_by_key(load([file]).config) for file in files))
    for key, (old, new) in changed.items():
        print(f"{key}  {shown(old)} -> {shown(new)}")
    return int(bool(changed))
