"""Train a config: `torchrun --nproc-per-node=N train.py CONFIG.toml [--section.key=value ...]`; see titanlite/train.py."""

import sys

from titanlite.train import main

if __name__ == "__main__":
    main(sys.argv[1:])
