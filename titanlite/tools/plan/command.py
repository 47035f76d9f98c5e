"""Plan a config without the hardware that it names.

Prints the memory, communication, time and cost of a training step on `plan.device`. --html also writes an HTML page
with figures of memory, pipeline schedule and step time. --against also compares the plan with the metrics.jsonl of a
run of the same config. A config that cannot run is rejected with the error lines that `titanlite train` prints.

--explore also plans layouts similar to the config's, and writes an HTML page on which a reader changes degrees, batch,
activation checkpointing and device. Planning takes minutes; after Ctrl-C the page contains the layouts planned by then.

Exit status: 0 the run fits its device; 1 it does not fit, or the command was interrupted; 2 CONFIG or METRICS is wrong.
"""

import time
from pathlib import Path

from titanlite.config import load
from titanlite.config.own import take_own
from titanlite.launch.arguments import Parser, new_file


def main(argv: list[str]) -> int:
    """Run `titanlite plan`. Returns the exit status."""
    parser = Parser("titanlite plan CONFIG.toml [--section.key=value ...] [--own FILE.py:NAME] [options]", __doc__)
    parser.add_argument("--html", type=new_file, metavar="FILE", help="also write the plan with figures as a page")
    parser.add_argument("--against", type=Path, metavar="METRICS", help="also compare the plan with a metrics.jsonl")
    parser.add_argument("--explore", type=new_file, metavar="FILE", help="also write a page of layouts around this one")
    text = "values of an axis of --explore: tp, pp, cp, dp_replicate, batch, ac or device, as in device=h100,b200"
    parser.add_argument("--grid", action="append", metavar="AXIS=VALUE,VALUE", help=text)
    begin = time.monotonic()
    arguments, config_arguments = parser.parse_known_args(argv)
    if arguments.grid and not arguments.explore:
        parser.error("--grid is an option of --explore")
    own, config_arguments = take_own(config_arguments)
    if own.digest and arguments.explore:
        parser.error("--explore plans titanlite's own blocks; leave out --own")
    loaded = load(config_arguments, own)
    from titanlite.tools.plan.comparison import comparison_table
    from titanlite.tools.plan.planner import assumption, make_plan
    from titanlite.tools.plan.report import print_report, verdict

    if arguments.explore:
        from titanlite.tools.plan.explore import make_axes, write_explorer  # late import: matplotlib takes a second

        axes = make_axes(loaded.config, arguments.grid or [])
    planning = time.monotonic()
    plan = make_plan(loaded, show_progress=True)
    seconds = time.monotonic() - planning
    tables = [comparison_table(plan, arguments.against)] if arguments.against else []
    if note := assumption(loaded.config, plan.world_size):
        print(note)
    print_report(plan, loaded.file, *tables)
    if arguments.html:
        from titanlite.tools.plan.figures import write_html  # late import: matplotlib takes a second

        write_html(plan, Path(loaded.file).name, arguments.html)
        print(f"wrote {arguments.html}")
    complete = not arguments.explore or write_explorer(plan, config_arguments, axes, seconds, arguments.explore)
    print(f"{time.monotonic() - begin:.0f} s")
    return 0 if verdict(plan)[0] and complete else 1
