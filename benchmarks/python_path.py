"""The environment of a program that is run from a checkout; several benchmarks share this."""

import os
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def with_python_path(environment: Mapping[str, str], checkout: Path = ROOT) -> dict[str, str]:
    """Return a copy of the environment in which a checkout is first in PYTHONPATH, before what is set there."""
    paths = [str(checkout), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}
