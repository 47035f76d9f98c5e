"""Options of a run: their types, defaults and meanings, the rules between them, and the launch they are checked with.

A run is described by one TOML file and `--section.key=value` overrides. `load` reads both; `check` compares the config
with the ranks and devices of a launch. Both report every problem at once as one `ConfigError`, before any process group
exists. Nothing here imports torch, so a wrong config is reported in a fraction of a second.
"""

from titanlite.config import loader, rules
from titanlite.config.launch import Launch, check
from titanlite.config.loader import ConfigError, LoadedConfig
from titanlite.config.schema import Config

__all__ = ["USAGE", "Config", "ConfigError", "Launch", "LoadedConfig", "check", "load"]

USAGE = "usage: titanlite train CONFIG [--section.key=value ...]   (--help lists every option)"


def load(argv: list[str]) -> LoadedConfig[Config]:
    """Read a config and overrides (`argv`, without the program's name) and check the rules between options.

    Raises:
        ConfigError: with every problem found.
    """
    return loader.load(Config, argv, usage=USAGE, rules=rules.between_options)
