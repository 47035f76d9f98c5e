"""Train a config on torchrun's ranks: `torchrun --nproc-per-node=N train.py CONFIG.toml [--section.key=value ...]`."""

import sys

from titanlite.launch.safe_path import leave_working_directory

if __name__ == "__main__":
    leave_working_directory()  # before any import from it
    from titanlite.launch.process import start_rank

    start_rank()  # before the imports, which take seconds
    from titanlite.train import main

    main(sys.argv[1:])
