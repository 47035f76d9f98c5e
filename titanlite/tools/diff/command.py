"""Find where two runs first differ, by the fingerprints that debug.fingerprint_freq writes.

Prints the options that differ; the first tensor, in the order of computation, that differs by more than its inputs and
the precision explain; and the distances of all modules in its step. The runs may have different layouts, precisions and
machines, but must have the same model and batches. Exit status: 0 the runs agree; 1 they differ; 2 the runs or some
tensors cannot be compared, because one run lacks tensors, or rounding would explain even the distance of a wrong
tensor.
"""

from pathlib import Path

from rich.console import Console

from titanlite.config import ConfigError
from titanlite.launch.arguments import Parser, new_file

USAGE = "titanlite diff RUN_A RUN_B [--html FILE]"


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    parser = Parser(USAGE, __doc__)
    parser.add_argument("runs", nargs=2, metavar="RUN", type=Path, help="folder of a run (job.dump_folder)")
    parser.add_argument("--html", type=new_file, metavar="FILE", help="also write a page with figures of all distances")
    arguments = parser.parse_args(argv)
    a, b = arguments.runs
    if missing := [str(run) for run in (a, b) if not run.is_dir()]:
        raise ConfigError([f"{run}: no such folder" for run in missing])
    from titanlite.tools.diff.compare import compare_runs
    from titanlite.tools.diff.report import judge, report

    steps = list(compare_runs(a, b))
    Console(highlight=False, soft_wrap=True).print(report(steps, a, b))
    if arguments.html:
        from titanlite.tools.diff.figures import write_html  # late import: matplotlib takes a second

        write_html(steps, a, b, arguments.html)
        print(f"wrote {arguments.html}")
    return judge(steps)[0]
