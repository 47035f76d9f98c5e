"""A rank of `titanlite train`; what train.py of a checkout is for torchrun."""

import sys

from titanlite.launch.process import start_rank

if __name__ == "__main__":
    start_rank()  # before the imports, which take seconds
    from titanlite.train import main

    main(sys.argv[1:])
