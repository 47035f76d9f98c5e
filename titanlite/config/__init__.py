"""Every option of a run: its type, its default, what it means, and the rules between options."""

from titanlite.config import loader, rules
from titanlite.config.launch import Launch, check
from titanlite.config.loader import ConfigError, LoadedConfig
from titanlite.config.schema import Config

__all__ = ["USAGE", "Config", "ConfigError", "Launch", "LoadedConfig", "check", "load"]

USAGE = "usage: train.py CONFIG.toml [--section.key=value ...]   (--help lists every option)"


def load(argv: list[str]) -> LoadedConfig[Config]:
    """Read a TOML file and overrides (`argv`, without the program's name) into a config that keeps the rules.

    Raises:
        ConfigError: with every problem found.
    """
    return loader.load(Config, argv, usage=USAGE, rules=rules.between_options)
