"""Train a config on torchrun's ranks: `torchrun --nproc-per-node=N train.py CONFIG.toml [--section.key=value ...]`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("titanlite.rank", run_name="__main__")
