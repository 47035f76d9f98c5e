"""Start a rank: its signals and its launcher first, then the imports, which take seconds."""

import sys

from titanlite.reliability.process import start_rank


def main(argv: list[str]) -> None:
    """Prepare the process of a rank, and train."""
    start_rank()
    from titanlite.train import main as train

    train(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
