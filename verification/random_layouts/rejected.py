"""Draw configs without regard to the rules. titanlite accepts each or rejects it in lines that name an option."""

import math
import re
from random import Random
from typing import Any

from tests.helpers.config import OPTIONS
from titanlite import build, config
from titanlite.config import Config, ConfigError, Launch
from verification.random_layouts.degrees import AXES, NAMES, Options
from verification.random_layouts.draw import FILE, draw, sections
from verification.random_layouts.options import literals

ODD_VALUES = (True, False, 0, -1, 1, 2, 3, 5, 7, 12, 1000, 2**31, 2**62, 0.5, -0.1, 1e300, float("nan"), "", "x", "2")
ODD_VALUES += ("\u0001", [], ["x"], [["x"]], [1], {}, {"x": 1}, [{"x": 1}], [{}], [{"name": "a", "dataset": "text"}])
LAUNCHES = (*[0] * 30, 1, 2, 3, 7, 8, 16, 1024)
"""How many ranks are launched; 0: as many as the degrees want."""
LINE = re.compile(rf"(?:(?:{re.escape(FILE)}|environment): )?((?:[\w-]+\.)*[\w-]+)(?: = .+?)?: .+")
PRINTABLE = re.compile(r"[^\x00-\x1f\x7f-\x9f]+")


def draw_values(rng: Random, seed: int) -> tuple[Options, Launch]:
    """Return the options of a random layout of which a few have other values, and a launch."""
    options = dict(draw(seed).options)
    for _ in range(rng.choice([1, 1, 2, 3, 5])):
        key = rng.choice(list(OPTIONS))
        if rng.random() < 0.4:
            key = rng.choice([key for key in OPTIONS if key.startswith(("parallelism.", "model.", "training."))])
        if rng.random() < 0.03:
            key = key[:-1]  # an unknown key
        options[key] = _value(rng, key, options)
    degrees = [options.get(f"parallelism.{NAMES[axis]}_degree", 1) for axis in AXES]
    wanted = math.prod(degree for degree in degrees if type(degree) is int and degree > 0)
    ranks = min(rng.choice(LAUNCHES) or wanted, 2**20)
    return options, Launch(0, 0, ranks, min(ranks, 8), n_devices=rng.choice([0, 0, 8]))


def _value(rng: Random, key: str, options: Options) -> Any:
    """Return a value of the option's type, the same option's value doubled, or any value."""
    possible = literals(OPTIONS[key].annotation) if key in OPTIONS else []
    if possible and rng.random() < 0.7:
        return rng.choice(possible)
    old = options.get(key)
    if type(old) is int and rng.random() < 0.5:
        return rng.choice([2 * old, old + 1, old - 1, 3 * old])
    return rng.choice([1, 2, 3, 4, 6, 8, 16]) if rng.random() < 0.4 else rng.choice(ODD_VALUES)


def check(options: Options, launch: Launch) -> Config | list[str]:
    """Return the resolved config, with which a model can be built, or the lines that reject it."""
    try:
        resolved = config.check(config.load_values(sections(options), FILE, []), launch)
    except ConfigError as error:
        return error.problems
    if resolved.model.n_layers * max(resolved.model.dim, resolved.model.vocab_size, resolved.model.ffn_dim) < 2**20:
        build.meta_model(resolved)
    return resolved


def wrong_lines(lines: list[str]) -> list[str]:
    """Return the lines that are not one line, or that name no option."""
    known = {*OPTIONS, *(key.rpartition(".")[0] for key in OPTIONS)}

    def is_right(line: str) -> bool:
        names_one = option_of(line) in known or "unknown" in line or line.startswith("environment")
        return bool(PRINTABLE.fullmatch(line)) and names_one

    return [line for line in lines if not is_right(line)]


def option_of(line: str) -> str:
    """Return the option or section that a line names, without the number and the name in a table of an array."""
    match = LINE.fullmatch(line)
    return re.sub(r"\.\d+(\.\w+)?$", "", match[1]) if match else ""
