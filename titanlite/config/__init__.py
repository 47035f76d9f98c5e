"""Options of a run: their types, defaults and meanings, the rules between them, and the launch they are checked with.

A run is described by one TOML file and `--section.key=value` overrides. `load` reads both; `check` compares the config
with the ranks and devices of a launch. Both report every problem at once as one `ConfigError`, before any process group
exists. Nothing here imports torch, so a wrong config is reported in a fraction of a second.
"""

import dataclasses
from typing import Any

from titanlite.config import loader, rules
from titanlite.config.launch import Launch, check, resolve_epochs
from titanlite.config.loader import ConfigError, LoadedConfig
from titanlite.config.own import Parts
from titanlite.config.schema import Config

__all__ = ["USAGE", "Config", "ConfigError", "Launch", "LoadedConfig", "check", "load", "load_values", "resolve_epochs"]

USAGE = "usage: titanlite train CONFIG [--section.key=value ...]   (--help lists every option)"


def load(argv: list[str], own: Parts | None = None) -> LoadedConfig[Config]:
    """Read a config and overrides (`argv`, without the program's name) and check the rules between options. `own`: the
    user's own parts, which the returned config carries. Raises ConfigError with every problem."""
    loaded = loader.load(Config, argv, usage=USAGE, rules=rules.between_options)
    return dataclasses.replace(loaded, config=loaded.config.with_own(own)) if own else loaded


def load_values(values: dict[str, Any], name: str, arguments: list[str]) -> LoadedConfig[Config]:
    """Check options of sections as `load` does a file's, and `--section.key=value` arguments. Messages name `name`."""
    return loader.load_values(Config, values, name, arguments, rules=rules.between_options)
