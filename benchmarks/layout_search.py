"""Compare the layout search with the one before it, which ordered the layouts by a closed-form model of step time.

    python benchmarks/layout_search.py [--old CHECKOUT] [--tasks N ...]

Both plan at most twelve layouts. The measure is the planned step time of the layout that each recommends. What the old
search printed is in benchmarks/logs/advise.log. A task that is not there is run in CHECKOUT, a checkout of commit
4641fed, the last one with the old search.

Prints the layouts that the search planned, and a table. A difference of up to 3 % is one that plans cannot tell apart.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from python_path import with_python_path

from titanlite.tools.advise.command import make_task, parse_options
from titanlite.tools.advise.search import search
from titanlite.tools.advise.search_space import GIB

TASKS = (
    "--gpus 8 --device h100 --model llama3_8b --seq-len 8192",
    "--gpus 64 --device h100 --model llama3_70b --seq-len 8192",
    "--gpus 64 --device h100 --model llama3_8b --seq-len 32768",
    "--gpus 512 --device h100 --model llama3_405b --seq-len 8192",
)
LOG = Path(__file__).parent / "logs" / "advise.log"


def old_output(options: str, checkout: Path | None) -> str:
    """Return what the old search prints: from its log, or else by running it."""
    logged = LOG.read_text().partition(f"$ python -m titanlite.tools.plan --advise {options}")[2]
    if logged:
        return logged.partition("\n$ ")[0]
    if checkout is None:
        sys.exit(f"{LOG} has no output for {options}: --old CHECKOUT of commit 4641fed is needed")
    command = [sys.executable, "-m", "titanlite.tools.plan", "--advise", *options.split()]
    environment = with_python_path(os.environ, checkout.resolve())
    return subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True, text=True).stdout


def old_result(output: str) -> tuple[str, int, float]:
    """Return the recommended layout of the old search, how many it planned, and its tokens per second and device."""
    (planned,) = re.findall(r"planned, the fastest first; (\d+) of them", output)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    starred = next(number for number, row in enumerate(rows) if row[0].endswith("*"))
    row = rows[starred]
    layout = row[1]
    if starred + 1 < len(rows) and not rows[starred + 1][0]:  # a long name takes two lines
        layout += " " + rows[starred + 1][1]
    return f"{layout}, {row[4]}", int(planned), float(row[-2].replace(",", ""))


def compare(options: str, checkout: Path | None) -> str:
    """Run a task and return its line of the table."""
    task = make_task(parse_options(options.split()))
    tokens = task.sequences * task.seq_len / task.n_devices
    begin = time.monotonic()
    result = search(task)
    print(f"$ titanlite advise {options}", flush=True)
    for layout in result.planned:
        candidate = layout.candidate
        print(
            f"  {candidate.mesh}; {candidate.pipeline or 'no pipeline'}; batch {candidate.local_batch}; "
            f"AC {candidate.checkpointing}; {layout.bytes / GIB:.1f} GiB; {layout.seconds:.3f} s; "
            f"{layout.tokens_per_second:,.0f} tokens/s per device{'; ' * bool(layout.problem)}{layout.problem}"
        )
    best = result.recommended()
    print(f"  {time.monotonic() - begin:.0f} s on {os.cpu_count()} cores", flush=True)
    old, n_old, speed = old_result(old_output(options, checkout))
    change = best.seconds / (tokens / speed) - 1
    return (
        f"| {task.flavor}, {task.n_devices} x {task.device_name}, {task.seq_len:,} | {old} | {n_old} | "
        f"{tokens / speed:.2f} s | {best.candidate.mesh}, {best.candidate.checkpointing} | {len(result.planned)} | "
        f"{best.seconds:.2f} s | {change:+.1%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, metavar="CHECKOUT", help="checkout of commit 4641fed")
    parser.add_argument("--tasks", type=int, nargs="+", default=range(1, len(TASKS)), help="their numbers, from 1")
    arguments = parser.parse_args()
    lines = [compare(TASKS[number - 1], arguments.old) for number in arguments.tasks]
    print("\n| task | before: layout, AC | planned | step | now: layout, AC | planned | step | step time |")
    print("| --- " * 8 + "|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
