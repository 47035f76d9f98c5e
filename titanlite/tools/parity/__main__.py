"""The parity command under torchrun: torchrun ... -m titanlite.tools.parity CONFIG.toml."""

import sys

from titanlite.launch.safe_path import leave_working_directory

if __name__ == "__main__":
    leave_working_directory()  # before any import from it
    from titanlite.launch.cli import run_command
    from titanlite.launch.process import exit_process

    exit_process(run_command("parity", sys.argv[1:]))
