"""What a config needs and how fast it will go, without the hardware that it names.

    python -m titanlite.plan CONFIG.toml [--section.key=value ...] [--html FILE]

Prints memory, traffic, time and cost of a training step on `plan.device`. --html writes the same with pictures (memory
over the step, the pipeline's schedule, where the time goes) as one file. A config that cannot run is refused with
train.py's own lines.

Exit status: 0 it fits its device; 1 it does not; 2 the config is wrong.
"""

import argparse
import logging
import sys
import time
import warnings
from pathlib import Path

from rich.console import Console

from titanlite import options
from titanlite.config import load
from titanlite.options import ConfigError


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--html", type=Path)
    arguments, others = parser.parse_known_args(argv)
    began, console = time.monotonic(), Console(stderr=True)
    try:
        loaded = load(others)
        from titanlite import plan  # here: a wrong config is refused before torch is imported
        from titanlite.plan.report import print_report, verdict

        with console.status("rehearsing") as status:

            def progress(what: str, done: int, of: int) -> None:
                status.update(f"{what}: {done} of {of}")

            made = plan.make_plan(loaded, progress)
    except ConfigError as error:
        options.print_problems(error)
        return 2
    print_report(made, loaded.file)
    if arguments.html:
        from titanlite.plan.pictures import write_html

        write_html(made, loaded.file, arguments.html)
        print(f"written: {arguments.html}")
    print(f"{time.monotonic() - began:.0f} s")
    return 0 if verdict(made)[0] else 1


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    sys.exit(main(sys.argv[1:]))
