"""Parser of command-line arguments, and the arguments that several commands share."""

import argparse
import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from titanlite.config.loader import ConfigError, did_you_mean
from titanlite.config.types import MOST_ITEMS

MODEL_DTYPES = ("float32", "bfloat16", "float64")


class Parser(argparse.ArgumentParser):
    """argparse's parser, except that a wrong argument raises ConfigError."""

    def __init__(self, usage: str, description: str | None):
        style = argparse.RawDescriptionHelpFormatter
        super().__init__(usage=usage, description=description, formatter_class=style, allow_abbrev=False)

    def add_model_arguments(self) -> None:
        self.add_argument("folder", type=Path, metavar="FOLDER", help="a checkpoint or a Hugging Face folder")
        self.add_argument("--tokenizer", metavar="FOLDER", help="a tokenizer.json, the folder with it, or bytes")
        self.add_argument("--dtype", choices=MODEL_DTYPES, help="dtype of weights in memory (default: the folder's)")

    def error(self, message: str) -> NoReturn:
        found = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        hint = did_you_mean(found[1], re.findall(r"[\w.]+", found[2])) if found else ""
        raise ConfigError([f"command line: {message}{hint or '; --help tells more'}"])


def number(kind: type, expected: str, accepts: Callable[[Any], bool]) -> Callable[[str], Any]:
    """Return a parser of a command-line number for which `accepts` is true; `expected` describes such numbers."""

    def read(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if accepts(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text}: expected {expected}")

    return read


def count(most: int = MOST_ITEMS) -> Callable[[str], int]:
    return number(int, f"an integer >= 1 and <= {most}", lambda value: 1 <= value <= most)


def new_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: expected a file in a folder that exists")
    return path
