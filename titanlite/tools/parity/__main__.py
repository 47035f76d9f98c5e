"""The parity command under torchrun: torchrun ... -m titanlite.tools.parity CONFIG.toml."""

import sys

from titanlite.launch.cli import run_command
from titanlite.launch.process import exit_process

if __name__ == "__main__":
    exit_process(run_command("parity", sys.argv[1:]))
