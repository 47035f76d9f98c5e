"""The working directory is not on the path of modules: a copy.py or random.py there is not Python's."""

import os
import sys

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def safe_environment() -> dict[str, str]:
    """Return the environment variables by which Python processes, and those that they start, have no working directory
    on their path, and find the titanlite that this process has imported."""
    installed = os.path.dirname(PACKAGE)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != installed]
    if os.path.basename(installed) not in ("site-packages", "dist-packages"):  # there it is found after Python's own
        paths.insert(0, installed)
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths)}


def leave_working_directory() -> None:
    """Remove from this process's path the folder that Python has put there, if it is the working directory or this
    package, whose modules have names of Python's. Only a process's first module may call this."""
    try:
        folders = "", PACKAGE, os.getcwd()
    except OSError:  # it was deleted
        folders = "", PACKAGE
    if sys.path and sys.path[0] in folders:
        del sys.path[0]
    os.environ |= safe_environment()


def python(code: str) -> list[str]:
    """Return the command of a Python process that runs code without the working directory on its path, also in Python
    3.10, which does not know PYTHONSAFEPATH."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = filter(None, sys.path); {code}"]
