"""What the arguments of `titanlite generate` and `titanlite eval` have in common."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from titanlite.config.loader import ConfigError

DTYPES = ("float32", "bfloat16", "float64")


class Parser(argparse.ArgumentParser):
    """Parses arguments; a wrong one is a ConfigError of one line."""

    def __init__(self, usage: str, description: str):
        style = argparse.RawDescriptionHelpFormatter
        super().__init__(usage=usage, description=description, formatter_class=style, allow_abbrev=False)
        self.add_argument("folder", type=Path, metavar="FOLDER", help="a checkpoint or a Hugging Face folder")
        self.add_argument("--tokenizer", metavar="FOLDER", help="a tokenizer.json, the folder with it, or bytes")
        self.add_argument("--dtype", choices=DTYPES, help="dtype of the weights in memory (default: as in the folder)")

    def error(self, message: str) -> NoReturn:
        raise ConfigError([f"command line: {message}; --help tells more"])


def number(kind: type, expected: str, accepts: Callable[[Any], bool]) -> Callable[[str], Any]:
    """Return a function that reads an argument as a number that it accepts, which `expected` says in words."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not accepts(value):
            raise argparse.ArgumentTypeError(f"{text}: expected {expected}")
        return value

    return read


COUNT = number(int, "an integer >= 1", lambda value: value >= 1)
