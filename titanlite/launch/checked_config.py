"""Pass the config that a launcher has checked to its ranks, which ignore later changes of the config's file."""

import json
import os
import socket
from pathlib import Path

from titanlite.config import ConfigError, LoadedConfig, load, load_values
from titanlite.config.own import take_own
from titanlite.launch.process import at_exit

CHECKED_CONFIG = "TITANLITE_CONFIG"
"""Environment variable for the file with the config that the launcher has checked."""


def write_for_ranks(loaded: LoadedConfig, folder: Path) -> str:
    """Write a config for this node's ranks, and return the file's name. The file is deleted when this process ends."""
    file = folder / f"config-{socket.gethostname()}-{os.getpid()}.json"
    at_exit.append(lambda: file.unlink(missing_ok=True))
    content = {"file": loaded.file, "origins": loaded.origins, "values": loaded.config.model_dump(exclude_unset=True)}
    file.write_text(json.dumps(content), encoding="utf-8")
    return str(file)


def load_for_rank(argv: list[str]) -> LoadedConfig:
    """Return the config that this rank's launcher has checked; without a launcher, load the command line's config."""
    own, options = take_own(argv)
    if not (file := os.environ.get(CHECKED_CONFIG)):
        return load(options, own)
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{file}: cannot be read: {error.strerror}; start the run again, which writes it"]) from None
    config = load_values(content["values"], content["file"], []).config.with_own(own)
    return LoadedConfig(config, content["file"], content["origins"])
