"""Draw layouts from seeds, compare each with the single-process reference, and shrink what fails.

    python -m verification.random_layouts --seed 0 --count 500 --log FILE [--minutes 8]  a line each; resumes the log
    python -m verification.random_layouts --seed 17 --shrink  print the smallest config that fails as seed 17 does
    python -m verification.random_layouts --config FILE.toml  compare the layout of a config
    python -m verification.random_layouts --report FILE       count what the layouts of a log have had
    python -m verification.random_layouts --wrong 2000        draw wrong configs, and count what rejects them

Exit status: 0 if every layout is equal to the reference or rejected when it is built, and each wrong config is rejected
in lines; else 1.
"""

import argparse
import platform
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

import torch

from titanlite.config.loader import tomllib
from verification.random_layouts import rejected
from verification.random_layouts.draw import Layout, draw, layout_of
from verification.random_layouts.report import read, report
from verification.random_layouts.run import Result, Runner
from verification.random_layouts.shrink import shrink


def line(layout: Layout, result: Result) -> str:
    """Return a layout's line of the log."""
    ranks = f"{layout.ranks} rank{'s' if layout.ranks > 1 else ''}"
    return f"seed {layout.seed} | {ranks} | {result} | {result.seconds:.1f} s | {layout.arguments}"


def run_all(runner: Runner, seeds: list[int], log: Path | None, minutes: float, most_ranks: int) -> int:
    """Run the layouts of seeds that the log lacks, and of each 25 those of few ranks first. Return how many are not
    equal."""
    deadline, n_wrong = time.monotonic() + 60 * minutes, 0
    known = {seed for seed, *_ in read(log)} if log and log.exists() else set()
    if log and not log.exists():
        command = f"python -m verification.random_layouts --seed {seeds[0]} --count {len(seeds)}"
        log.write_text(f"# {command}; torch {torch.__version__}, Python {platform.python_version()}, gloo on CPUs\n")
    layouts = [layout for layout in (draw(seed) for seed in seeds if seed not in known) if layout.ranks <= most_ranks]
    for layout in sorted(layouts, key=lambda layout: (layout.seed // 25, layout.ranks)):
        if time.monotonic() > deadline:
            break
        result = runner.run(layout)
        n_wrong += not result.is_right
        print(line(layout, result), flush=True)
        if log:
            with log.open("a") as file:
                file.write(line(layout, result) + "\n")
    return n_wrong


def shrink_and_print(runner: Runner, layout: Layout) -> int:
    """Print the smallest config that fails like a layout, and how to run it. Return 1 if the layout fails, else 0."""
    first = runner.run(layout)
    print(line(layout, first), flush=True)
    if first.is_right:
        return 0
    last = first

    def fails(candidate: Layout) -> bool:
        nonlocal last
        result = runner.run(candidate)
        if result.kind == first.kind:
            last = result
            print(f"{candidate.ranks} ranks, {len(candidate.options)} options: {result}", flush=True)
        return result.kind == first.kind

    smallest = shrink(layout, fails)
    print(
        f"\n{last}\n{smallest.arguments}\n\n# python -m verification.random_layouts --config THIS_FILE\n{smallest.toml}"
    )
    return 1


def reject_all(seeds: range) -> int:
    """Draw wrong configs, and print how many are rejected because of which option. Return 1 if one is not rejected in
    lines, else 0."""
    by_option, n_accepted, n_wrong = Counter[str](), 0, 0
    for seed in seeds:
        options, launch = rejected.draw_values(Random(f"{seed} wrong"), seed)
        try:
            lines = rejected.check(options, launch)
        except Exception as error:
            lines = [f"{type(error).__name__}: {error}"]
        if not isinstance(lines, list):
            n_accepted += 1
            continue
        by_option.update({rejected.option_of(line) for line in lines})
        if wrong := rejected.wrong_lines(lines):
            n_wrong += 1
            print(f"seed {seed}: {wrong[0]!r}")
    n_rejected = len(seeds) - n_accepted - n_wrong
    print(f"seeds {seeds[0]} to {seeds[-1]}: {n_accepted} accepted, {n_rejected} rejected in lines, {n_wrong} not so")
    print(f"options that are rejected: {len(by_option)}")
    for option, count in by_option.most_common():
        print(f"    {count:4} {option}")
    return int(n_wrong > 0)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--minutes", type=float, default=1e9, help="start no layout after so many minutes")
    parser.add_argument("--most-ranks", type=int, default=16, help="leave out layouts of more ranks")
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--wrong", type=int, metavar="COUNT")
    arguments = parser.parse_args(argv)
    if arguments.report:
        print(report(arguments.report))
        return 0
    if arguments.wrong:
        return reject_all(range(arguments.seed, arguments.seed + arguments.wrong))
    torch.set_num_threads(1)
    runner = Runner()
    try:
        if arguments.config or arguments.shrink:
            text = arguments.config.read_text() if arguments.config else ""
            layout = layout_of(tomllib.loads(text)) if text else draw(arguments.seed)
            if arguments.shrink:
                return shrink_and_print(runner, layout)
            result = runner.run(layout)
            print(line(layout, result))
            return int(not result.is_right)
        seeds = list(range(arguments.seed, arguments.seed + arguments.count))
        return int(run_all(runner, seeds, arguments.log, arguments.minutes, arguments.most_ranks) > 0)
    finally:
        runner.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
