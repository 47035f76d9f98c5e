"""The parity command under torchrun: torchrun ... -m titanlite.tools.parity CONFIG.toml."""

import sys

from titanlite.launch.safe_path import leave_working_directory

if __name__ == "__main__":
    leave_working_directory()  # the imports below must find nothing there
    from titanlite.launch import process
    from titanlite.launch.cli import run_command

    process.prepare(is_command=True)
    process.exit_process(run_command("parity", sys.argv[1:]))
