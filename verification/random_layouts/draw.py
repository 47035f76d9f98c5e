"""Draw a layout from a seed: a config that titanlite accepts, with the number of its ranks."""

import copy
import dataclasses
import functools
import itertools
from random import Random
from typing import Any

import tomli_w

from tests.parallel.test_parity import SMALL
from titanlite import config
from titanlite.config import Config, ConfigError, Launch, loader
from titanlite.config.loader import tomllib
from verification.random_layouts.degrees import Options, draw_degrees, draw_sizes
from verification.random_layouts.options import draw_options, without_unread

FILE = "layout.toml"
MOST_DRAWS = 1000
"""Draws after which a seed's degrees are taken to be impossible, which is a bug of the generator."""


@functools.cache
def base() -> dict[str, Any]:
    """Return the sections of the small config that options of a layout are added to."""
    return tomllib.loads(SMALL)


def sections(options: Options) -> dict[str, Any]:
    """Return the small config with other options, as the sections of a TOML file."""
    values = copy.deepcopy(base())
    for key, value in options.items():
        *names, name = key.split(".")
        functools.reduce(lambda section, part: section.setdefault(part, {}), names, values)[name] = value
    return values


@dataclasses.dataclass(frozen=True)
class Layout:
    """Options that are added to the small config, and where they are from."""

    options: Options
    seed: int | None = None
    rejected: tuple[tuple[Options, ConfigError], ...] = ()
    """What was drawn before it, and titanlite rejected."""

    @functools.cached_property
    def config(self) -> Config:
        """The resolved config. Raises ConfigError if titanlite rejects it."""
        loaded = config.load_values(sections(self.options), FILE, [])
        degrees = loaded.config.parallelism
        ranks = degrees.ranks_per_shard * max(degrees.data_parallel_shard_degree, 1)
        return config.check(loaded, Launch(0, 0, ranks, ranks, 0))

    @property
    def ranks(self) -> int:
        return self.config.parallelism.world_size

    @property
    def toml(self) -> str:
        """The config as a TOML file."""
        return tomli_w.dumps(sections(self.options))

    @property
    def arguments(self) -> str:
        """The options in one line, as arguments of the command line."""
        return " ".join(f"--{key}={value}".replace(" ", "") for key, value in sorted(self.options.items()))


def draw(seed: int) -> Layout:
    """Draw options until titanlite accepts them. The degrees are those of the first draw, so that rules about what
    goes with a degree make none of them rare."""
    degrees, rejected = draw_degrees(Random(f"{seed} degrees")), []
    for number in itertools.count():
        rng = Random(f"{seed} {number}")
        options = draw_options(rng)
        options |= draw_sizes(rng, degrees, options)
        layout = Layout(options, seed, tuple(rejected))
        try:
            return dataclasses.replace(layout, options=_read_options(layout))
        except ConfigError as error:
            rejected.append((options, error))
        if number == MOST_DRAWS:
            raise AssertionError(f"seed {seed}: no draw of {degrees} is accepted: {rejected[-1][1]}")


def _read_options(layout: Layout) -> Options:
    """Return the options that a run reads, if titanlite accepts them."""
    shape = loader.load_values(Config, sections(layout.options), FILE, [], rules=lambda *_: loader.Rejections())
    options = without_unread(layout.options, shape.config)
    Layout(options).config  # noqa: B018
    return options


def layout_of(values: dict[str, Any], prefix: str = "") -> Layout:
    """Return the layout of a config's sections."""
    options: Options = {}
    for name, value in values.items():
        if isinstance(value, dict):
            options |= layout_of(value, f"{prefix}{name}.").options
        else:
            options[prefix + name] = value
    return Layout(options)
