"""Search for the fastest layout with which a model fits a number of devices.

Plans up to twelve layouts, and prints the fastest ones and the reasons for the recommended layout. --write writes the
recommended layout as a config, which `titanlite plan` plans in detail. The search needs no GPU and takes minutes. After
Ctrl-C, the result of the plans made by then is printed and written.

Exit status: 0 a layout is recommended; 1 nothing fits, or the search was interrupted; 2 the options are wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from titanlite.config.model_sizes import SIZES
from titanlite.config.types import MOST_TOKENS
from titanlite.launch.arguments import Parser, count, new_file
from titanlite.metrics.devices import find_device

if TYPE_CHECKING:
    from titanlite.tools.advise.search_space import Task

MOST_DEVICES = 2**14  # listing the candidate layouts of more devices would take minutes
TOKENS = 4 * 2**20  # default number of tokens per optimizer step: that of Llama 2 and 3 with 7 to 70 billion parameters


def parse_options(argv: list[str]) -> Any:
    """Return the parsed options. Raises ConfigError if an option is missing, unknown or wrong."""
    parser = Parser("titanlite advise --gpus N --model FLAVOR --seq-len TOKENS [options]", __doc__)
    tokens = f"tokens of an optimizer step, at least one sequence (default {TOKENS:,})"
    parser.add_argument("--gpus", type=count(MOST_DEVICES), required=True, help="devices")
    parser.add_argument("--device", default="h100", help="of titanlite/metrics/devices.toml, or a file (default h100)")
    parser.add_argument("--model", choices=SIZES, required=True, metavar="FLAVOR", help=f"one of {', '.join(SIZES)}")
    parser.add_argument("--seq-len", type=count(), required=True, help="tokens of a sequence")
    parser.add_argument("--global-batch", type=count(MOST_TOKENS), default=TOKENS, help=tokens)
    parser.add_argument("--top", type=count(), default=5, help="layouts in the table (default %(default)s)")
    parser.add_argument("--write", type=new_file, metavar="FILE", help="write the recommended layout as a config")
    parser.add_argument("--float8", action="store_true", help="try float8 too")
    return parser.parse_args(argv)


def make_task(options: Any) -> Task:
    """Return the task that the options describe. Raises ConfigError if the device is unknown."""
    from titanlite.tools.advise.search_space import Task  # late import: --help need not wait for torch

    n_devices, sequences = options.gpus, max(1, options.global_batch // options.seq_len)
    if sequences > n_devices:  # each data-parallel degree divides n_devices, so it divides the rounded batch
        sequences -= sequences % n_devices
    device = find_device(options.device)
    return Task(options.model, options.seq_len, sequences, n_devices, options.device, device, options.float8)


def main(argv: list[str]) -> int:
    """Run `titanlite advise`. Returns the exit status."""
    options = parse_options(argv)
    task = make_task(options)
    from rich.console import Console

    from titanlite.tools.advise.explanation import config_toml, explain, layout_table
    from titanlite.tools.advise.search import PLANS_PER_ROUND, ROUNDS, search
    from titanlite.tools.advise.search_space import GIB

    result, out = search(task, show_progress=True), Console(highlight=False, markup=False)
    if not out.is_terminal:
        out.width = 120
    out.print(
        f"{task.flavor}, {task.n_parameters:,} parameters, on {task.n_devices} x {task.device_name} "
        f"({task.device.devices_per_node} per node); {task.sequences:,} sequences of {task.seq_len:,} tokens per step",
        soft_wrap=True,
    )
    for layout in result.planned:
        if layout.problem:
            out.print(f"cannot be planned, left out: {layout.candidate.mesh}: {layout.problem}")
    if not result.fitting():
        needed, memory = result.least_bytes() / GIB, task.device.memory / GIB
        out.print(f"nothing fits: the layout that needs least memory needs {needed:,.1f} of {memory:,.1f} GiB")
        out.print(result.remedy(), soft_wrap=True)
        return 1
    out.print(layout_table(result, options.top))
    for line in explain(result):
        out.print(f"- {line}", soft_wrap=True)
    if options.write:
        options.write.write_text(config_toml(result))
        out.print(f"wrote {options.write}")
    if result.interrupted:
        out.print(f"interrupted: {len(result.planned)} of up to {ROUNDS * PLANS_PER_ROUND} layouts were planned")
    return 1 if result.interrupted else 0
