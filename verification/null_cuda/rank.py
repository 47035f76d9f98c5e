"""One rank of a training on the null CUDA, which writes what each step asked of the device.

    torchrun --nproc-per-node=N -m verification.null_cuda.rank FOLDER CONFIG [--section.key=value ...]

It is `titanlite train` as it is; a step begins when the loader is asked for its batches. asked_of_RANK.jsonl in the
folder gets a line for each step but the last.
"""

import json
import os
import sys

import torch

from titanlite import train
from titanlite.data.loader import Loader
from verification.null_cuda.steps import device, numbers_that_are_read, report


def main(folder: str, argv: list[str]) -> None:
    steps, next_batches = 0, Loader.next

    def begin_step(loader: Loader) -> object:
        nonlocal steps
        if steps:
            with open(f"{folder}/asked_of_{os.environ['RANK']}.jsonl", "a") as file:
                file.write(json.dumps(report()) + "\n")
        steps += 1
        torch.cuda.reset_peak_memory_stats()
        device().begin()
        return next_batches(loader)

    Loader.next = begin_step  # type: ignore[assignment,method-assign]
    device().begin()
    with numbers_that_are_read():
        train.main(argv)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
