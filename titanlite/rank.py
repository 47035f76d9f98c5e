"""The program of each rank of `titanlite train`, and of train.py in a clone."""

import sys

from titanlite.launch.safe_path import leave_working_directory

if __name__ == "__main__":
    leave_working_directory()  # before the imports below could find something there
    from titanlite.launch.process import start_rank

    start_rank()  # before the imports of the training, which take seconds
    from titanlite.train import main

    main(sys.argv[1:])
