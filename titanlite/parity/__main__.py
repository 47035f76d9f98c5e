"""The parity command under torchrun: torchrun ... -m titanlite.parity CONFIG.toml."""

import sys

from titanlite.parallel import mesh
from titanlite.parity import command

if __name__ == "__main__":
    mesh.exit_process(command.main(sys.argv[1:]))
