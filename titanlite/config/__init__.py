"""Options of a run: types, defaults, rules between options, and the launch (its ranks and devices). `load` reads a TOML
file and `--section.key=value` overrides; `check` compares a config with a launch. Both report all problems in one
`ConfigError`, and quickly, since nothing here imports torch."""

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
    """Read and check a config and overrides from `argv` (without the program's name). The result's config contains
    `own`, parts of the run that the user wrote. Raises ConfigError with every problem."""
    loaded = loader.load(Config, argv, rules=rules.between_options)
    return dataclasses.replace(loaded, config=loaded.config.with_own(own)) if own else loaded


def load_values(values: dict[str, Any], name: str, arguments: list[str]) -> LoadedConfig[Config]:
    """Check a dict of sections as `load` checks a file, with overrides in `arguments`; errors call the dict `name`."""
    return loader.load_values(Config, values, name, arguments, rules=rules.between_options)
