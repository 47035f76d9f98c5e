"""Train a config on torchrun's ranks: `torchrun --nproc-per-node=N train.py CONFIG.toml [--section.key=value ...]`."""

import sys

from titanlite.rank import main

if __name__ == "__main__":
    main(sys.argv[1:])
