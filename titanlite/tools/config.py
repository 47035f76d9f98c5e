"""Print a resolved config, compare two, print the JSON Schema of all options, or convert a TOML file of torchtitan.

titanlite config CONFIG [--section.key=value ...]     the config with every default filled in, as TOML, and the
                                                      problems that train would report
titanlite config A B                                  the options that differ between two configs or runs (folders
                                                      with a config.toml); exit status 1 if any option differs
titanlite config --schema                             the JSON Schema of a config, for editors
titanlite config --from-torchtitan FILE [TARGET.toml] a TOML file of torchtitan 0.2 as a config; what
                                                      became of each key is listed on standard error
"""

from pathlib import Path

from titanlite.config import Config, load
from titanlite.config.differences import differences, options_by_key, shown
from titanlite.config.reference import help_text, json_schema
from titanlite.config.schema import stage_modules


def main(argv: list[str]) -> int:
    """Run `titanlite config`. Returns 1 if two configs differ, otherwise 0. Raises ConfigError for a wrong config."""
    if not argv or "-h" in argv or "--help" in argv:
        print(f"{__doc__}\n{help_text(argv)}")
        return 0
    if argv == ["--schema"]:
        print(json_schema(), end="")
        return 0
    if argv[0] == "--from-torchtitan":
        from titanlite.tools.from_torchtitan import command  # late import: only --from-torchtitan reads keys.toml

        return command.main(argv[1:])
    if len(argv) == 2 and not any(name.startswith("-") for name in argv):
        return compare(*argv)
    from titanlite.launch.launcher import load_and_check  # late import: only a resolved config needs the launcher

    load_and_check(argv, lambda loaded: print_config(loaded.config))
    return 0


def print_config(config: Config) -> None:
    """Print a resolved config. Raises ConfigError if its adapters do not fit its model."""
    print(config.toml(), end="", flush=True)
    if config.lora.rank:
        from titanlite.build import meta_model  # late imports: only a model with adapters is built
        from titanlite.techniques.lora import Adapters

        for modules in stage_modules(config):
            Adapters(meta_model(config, modules), config.lora, lambda: meta_model(config))


def compare(*names: str) -> int:
    """Print the options that differ between two configs or run folders. Returns 1 if any option differs, else 0."""
    files = [f"{name}/config.toml" if "/" in name and Path(name).is_dir() else name for name in names]
    changed = differences(*(options_by_key(load([file]).config) for file in files))
    for key, (old, new) in changed.items():
        print(f"{key}  {shown(old)} -> {shown(new)}")
    return int(bool(changed))
