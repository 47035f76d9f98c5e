"""The parity command under torchrun: torchrun ... -m titanlite.tools.parity CONFIG.toml."""

import sys

from titanlite.launch.process import exit_process
from titanlite.tools.parity import command

if __name__ == "__main__":
    exit_process(command.main(sys.argv[1:]))
