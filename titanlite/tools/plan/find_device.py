"""Find the device that a plan is for: by its name, or in a user's TOML file."""

import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from titanlite.config.loader import ConfigError, did_you_mean, expectation, read_toml, show
from titanlite.metrics.devices import DEVICES, Device


def find_device(name: str) -> Device:
    """Return a device by its name in DEVICES, or from a TOML file with the keys and units of `Device`.

    Raises ConfigError if there is none, or a key of the file is missing, unknown or wrong."""
    if name in DEVICES:
        return DEVICES[name]
    file = Path(os.path.expanduser(name))
    if file.suffix != ".toml":
        problem = f"plan.device = {show(name)}: expected one of {', '.join(DEVICES)}, or a TOML file"
        raise ConfigError([problem + did_you_mean(name, DEVICES)])
    try:
        return Device.model_validate(read_toml(str(file)))
    except ValidationError as error:
        raise ConfigError([_problem(file, entry) for entry in error.errors()]) from None


def _problem(file: Path, entry: Any) -> str:
    key = entry["loc"][0]
    if len(entry["loc"]) > 1:
        return f"{file}: {'.'.join(map(str, entry['loc']))}: {entry['msg'].lower()}; calibrate anew"
    if entry["type"] == "extra_forbidden":
        return f"{file}: unknown key {key}; expected {', '.join(Device.model_fields)}"
    where = f"missing key {key}" if entry["type"] == "missing" else f"{key} = {show(entry['input'])}"
    return f"{file}: {where}: expected {expectation(Device.model_fields[key])}"
