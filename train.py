"""Train a config on torchrun's ranks: `torchrun --nproc-per-node=N train.py CONFIG.toml [--section.key=value ...]`."""

import sys

from titanlite.launch.process import start_rank

if __name__ == "__main__":
    start_rank()  # before the imports, which take seconds
    from titanlite.train import main

    main(sys.argv[1:])
