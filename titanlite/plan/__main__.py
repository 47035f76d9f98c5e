"""What a config needs and how fast it will go, without the hardware that it names.

    python -m titanlite.plan CONFIG.toml [--section.key=value ...] [--html FILE]
    python -m titanlite.plan --advise --gpus N --device NAME --model NAME --seq-len TOKENS
                             [--global-batch TOKENS] [--float8] [--top K] [--write FILE.toml]

Prints memory, traffic, time and cost of a training step on `plan.device`. --html writes the same with pictures (memory
over the step, the pipeline's schedule, where the time goes) as one file. A config that cannot run is refused with
train.py's own lines.

--advise takes no config: it searches the layouts of a model on so many devices that are legal and fit, plans the most
promising ones, prints the fastest and why, and writes the first as a config that trains (titanlite/plan/advise.py). It
takes a few minutes.

Exit status: 0 it fits its device; 1 it does not; 2 the config is wrong.
"""

import argparse
import logging
import sys
import time
import warnings
from pathlib import Path

from rich.console import Console

from titanlite import advise, plan
from titanlite.config import load, loader
from titanlite.config.loader import ConfigError
from titanlite.plan.report import print_report, verdict


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--html", type=Path)
    advise.add_options(parser)
    arguments, others = parser.parse_known_args(argv)
    began, console = time.monotonic(), Console(stderr=True)
    try:
        advise.reject_mixtures(arguments, others)
        if arguments.advise:
            return advise.main(arguments)
        loaded = load(others)
        with console.status("rehearsing") as status:

            def progress(what: str, done: int, of: int) -> None:
                status.update(f"{what}: {done} of {of}")

            made = plan.make_plan(loaded, progress)
    except ConfigError as error:
        loader.print_problems(error)
        return 2
    print_report(made, loaded.file)
    if arguments.html:
        from titanlite.plan.figures import write_html  # here: matplotlib takes a second to import

        write_html(made, loaded.file, arguments.html)
        print(f"written: {arguments.html}")
    print(f"{time.monotonic() - began:.0f} s")
    return 0 if verdict(made)[0] else 1


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    sys.exit(main(sys.argv[1:]))
