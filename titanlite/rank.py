"""The program that each rank of `titanlite train` runs. In a clone of the repository, train.py runs it for torchrun."""

import sys

from titanlite.launch.safe_path import leave_working_directory

if __name__ == "__main__":
    leave_working_directory()  # modules in the working directory could shadow the imports below
    from titanlite.launch.process import start_rank

    start_rank()  # signal handlers and logs must exist before the imports below, which take seconds
    from titanlite.train import main

    main(sys.argv[1:])
