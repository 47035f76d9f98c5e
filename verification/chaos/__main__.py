"""Run rounds of chaos for some minutes, or some number of faults, and print a table.

    python -m verification.chaos [--seed 0] [--minutes 10] [--faults N] [--folder FOLDER]

FOLDER gets chaos.jsonl, a line per round, table.md, and the output of each round that had a problem. The exit status is
1 if there was a problem.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from verification.chaos.faults import unmount
from verification.chaos.runner import Campaign, table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--faults", type=int, default=10**9, help="end after so many faults, if that is earlier")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    deadline = time.monotonic() + 60 * options.minutes
    campaign = Campaign(folder, options.seed)
    try:
        while time.monotonic() < deadline and sum(bool(record.seconds) for record in campaign.records) < options.faults:
            campaign.any_round()
        campaign.complete()
    finally:
        text = table(campaign.records)
        (folder / "table.md").write_text(text + "\n")
        print(text, f"in {folder}", sep="\n")
        for mounted in folder.glob("folder-*"):
            unmount(mounted)
    return int(any(record.problems for record in campaign.records))


if __name__ == "__main__":
    sys.exit(main())
