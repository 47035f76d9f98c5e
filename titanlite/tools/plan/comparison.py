"""Compare a plan with the metrics of a run of the same config."""

import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from titanlite.config.loader import ConfigError
from titanlite.config.regular_file import read_file
from titanlite.tools.plan.report import GIB, empty_table
from titanlite.tools.plan.result import Plan

LARGEST_METRICS = 2**28  # largest accepted metrics.jsonl in bytes


def read_measurement(file: Path) -> tuple[Sequence[float], int, int, float]:
    """Return four figures of a metrics.jsonl: the seconds of a step by logged line, tokens per step, ranks, and rank
    0's peak memory in GiB (of tensors; on a CPU, of the process). The first logged line, with compilation and warm-up,
    does not count. Raises ConfigError if the file cannot be read or has fewer than two logged steps."""
    try:
        rows = [json.loads(line) for line in read_file(file, LARGEST_METRICS).splitlines()]
        lines = [row for row in rows if "throughput(tps)" in row]
        after_first = [
            (
                line["time_metrics/end_to_end(s)"],
                (_positions(line) - _positions(before)) / (line["step"] - before["step"]),
                line["throughput(tps)"],
                line["memory/max_active(GiB)"],
            )
            for before, line in itertools.pairwise(lines)
        ]
    except OSError as error:
        raise ConfigError([f"{file}: cannot be read: {error.strerror}"]) from None
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ConfigError([f"{file}: is not the metrics.jsonl of a run: {type(error).__name__}: {error}"]) from None
    if not after_first:
        raise ConfigError([f"{file}: has no logged step but the first; train more steps"])
    seconds, tokens, rates, memory = zip(*after_first, strict=True)
    return seconds, round(tokens[-1]), round(tokens[-1] / rates[-1] / seconds[-1]), max(memory)


def _positions(line: dict[str, Any]) -> int:
    """Return how many tokens and padding positions a run has computed; the logged throughput counts both."""
    return line["n_tokens_seen"] + line.get("n_padding_seen", 0)


def comparison_table(plan: Plan, file: Path) -> Table:
    """Return a table of a plan beside a run's metrics: step time, throughput and, on a GPU, memory. Raises ConfigError
    as read_measurement does, and if run and plan differ in tokens per step or in the number of ranks."""
    of_lines, tokens, ranks, memory = read_measurement(file)
    sizes = {"tokens per step": (tokens, plan.config.tokens_per_step), "ranks": (ranks, plan.world_size)}
    for name, (measured, planned) in sizes.items():
        if measured != planned:
            problem = f"{file}: the run has {measured:,} {name}, and the plan {planned:,}; plan the run's config.toml"
            raise ConfigError([problem])
    seconds = statistics.median(of_lines)
    rows = {
        "seconds of a step": (plan.step_seconds, seconds, 3),
        "tokens/s per device": (plan.tokens_per_second, tokens / ranks / seconds, 0),
    }
    caption = f"run: the median of {len(of_lines):,} logged lines after the first, from {min(of_lines):,.3f} to "
    caption += f"{max(of_lines):,.3f} s; plan: from {plan.step_range[0]:,.3f} to {plan.step_range[1]:,.3f} s"
    if plan.device.kind == "cpu":
        caption += "; memory is not compared: on a CPU the metrics have that of the process"
    else:
        rows["peak memory of rank 0 in tensors, GiB"] = plan.ranks[0].peak.total / GIB, memory, 2
    table = empty_table(f"the plan against {file}", "", right=("plan", "run", "difference"))
    table.caption = caption
    for name, (planned, measured, digits) in rows.items():
        table.add_row(name, f"{planned:,.{digits}f}", f"{measured:,.{digits}f}", f"{planned / measured - 1:+.1%}")
    return table
