"""The parity command under torchrun: torchrun ... -m titanlite.parity CONFIG.toml."""

import sys

from titanlite.parity import command
from titanlite.reliability.process import exit_process

if __name__ == "__main__":
    exit_process(command.main(sys.argv[1:]))
