"""Remove the working directory from Python's path: a copy.py or random.py there would replace Python's own module."""

import os
import sys

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def leave_working_directory() -> None:
    """Remove the working directory, or the script's folder, from sys.path. Call this before any other import."""
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11 or newer has this option
        del sys.path[0]


def keep_children_safe() -> None:
    """Have child processes ignore Python modules in the working directory, and find this titanlite."""
    specs = (finder.find_spec("titanlite", sys.path[1:]) for finder in sys.meta_path)
    installed = next((spec.origin for spec in specs if spec), "")  # titanlite as child processes would import it
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if installed != os.path.join(PACKAGE, "__init__.py") and os.path.dirname(PACKAGE) not in paths:
        paths.insert(0, os.path.dirname(PACKAGE))
    os.environ |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths)}
