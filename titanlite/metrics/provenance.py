"""The provenance of a run: the versions, git revision and hardware that are needed to repeat it."""

import platform
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import torch


def describe(device: torch.device, world_size: int) -> str:
    """Return date, command line, versions, git revision and hardware, as comment lines of a TOML file."""
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    lines = [
        f"{datetime.now().astimezone().isoformat(timespec='seconds')}: {' '.join(sys.argv)}",
        f"titanlite {git_revision()}, torch {torch.__version__}, Python {platform.python_version()}",
        f"{world_size} x {hardware} on {platform.system()}",
    ]
    return "".join(f"# {line}\n" for line in lines)


def git_revision() -> str:
    """Return the git revision of this file's checkout, with "-dirty" for uncommitted changes; or "without git"."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        return result.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "without git"
