"""The summary of gpu_session.py in Markdown: a row for every step, also for those that did not run."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.gpu_steps import LLAMA_8B, PUBLISHED_CASE, Step
from docs.build.page_tables import table_lines

THROUGHPUT, ACTIVE, RESERVED = "throughput(tps)", "memory/max_active(GiB)", "memory/max_reserved(GiB)"
DRY_RUN = {
    "cpu": "dry run on a CPU: toy sizes, no figure here is of a GPU",
    "null-cuda": "dry run on the null CUDA: speeds mean nothing, and nothing here is measured on a GPU",
}
# KempnerForge, benchmarks/mfu_scaling/mfu_scaling_2026-04-05.md: experiment 1, "7B" of 8.03 billion parameters on one
# H200: sequences of 4096, two of them and four gradient accumulation steps, full activation checkpointing, compiled,
# weights and optimizer states in bfloat16. It writes GB for an H200 of 140, so its unit is GiB.
PUBLISHED = {THROUGHPUT: 10_471, ACTIVE: 80.7}
Result = dict[str, Any]
SPEED = ["tokens/s", "of base", "TFLOP/s", "MFU %", "causal MFU %", "of matmul %", "causal of matmul %"]
PLANNED = ["planned tokens/s", "planned / measured"]
MEMORY = ["GiB", "planned GiB", "reserved", "B/param"]


def one_line(result: Result) -> str:
    """Return what a step's line on the console and in a plain table says."""
    reason = result.get("reason", "")
    if THROUGHPUT in result:
        speed, mfu = result[THROUGHPUT], result["mfu(%)"]
        figures = "" if result["shared"] else f"{speed:,.0f} tokens/s, MFU {mfu:.1f} %, "
        figures += f"{result[ACTIVE]:.1f} GiB, {result[RESERVED]:.1f} reserved"
        return f"{figures}; {reason}" if reason else figures
    if reason:
        return reason
    values = [(key, value) for key, value in result.items() if key not in ("status", "seconds", "lines")]
    return "; ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values)


def summary(cards: Mapping[str, tuple[Sequence[Step], dict[str, Result]]], *, dry_run: str) -> str:
    """Return the page: for each card a table of each group of its steps, what they printed, and what they took."""
    parts = ["# A session on one GPU\n"]
    parts += [f"**{DRY_RUN[dry_run]}**\n"] if dry_run else []
    for card, (steps, results) in cards.items():
        parts.append(f"# {card}\n")
        groups: dict[str, list[Step]] = {}
        for step in steps:
            groups.setdefault(step.group, []).append(step)
        for group, members in groups.items():
            parts.append(f"## {group}\n")
            if all(step.kind == "train" for step in members):
                parts += training_table(members, results, with_published=not dry_run)
            else:
                parts += plain_table(members, results)
            for step in members:
                if lines := results.get(step.name, {}).get("lines"):
                    parts += ["", f"{step.name}:", "", "```text", *lines, "```"]
            parts.append("")
        taken = [step for step in steps if results.get(step.name, {}).get("seconds")]
        rows = [[step.name, str(step.seconds), f"{results[step.name]['seconds']:.0f}"] for step in taken]
        parts += ["## Seconds\n", *table_lines(["step", "expected", "took"], rows), ""]
    return "\n".join(parts)


def status_of(results: dict[str, Result], name: str) -> str:
    """Return the status of a step, with the reason if it is not done."""
    result = results.get(name, {"status": "not run"})
    return f"{result['status']}: {result['reason']}" if "reason" in result else result["status"]


def plain_table(steps: list[Step], results: dict[str, Result]) -> list[str]:
    rows = []
    for step in steps:
        result = results.get(step.name, {"seconds": 0})
        done = "status" in result and "reason" not in result
        line = one_line(result) if done else ""
        rows.append([step.name, status_of(results, step.name), f"{result['seconds']:.0f}", line])
    return table_lines(["step", "status", "seconds", "result"], rows)


def training_table(steps: list[Step], results: dict[str, Result], *, with_published: bool) -> list[str]:
    """Return a table of training runs, with the published figures beside the run of the same configuration. The base
    is the first run of Llama 3 8B, so only its group has ratios to it."""
    matmul = results.get("rates", {}).get("matmul TFLOP/s")
    base = results.get(steps[0].name, {}).get(THROUGHPUT) if steps[0].group == LLAMA_8B else None
    columns, rows = [*SPEED, *PLANNED, *MEMORY], []
    for step in steps:
        result, plan = results.get(step.name, {}), results.get(f"plan-{step.name}", {})
        cells = figures(result, plan, matmul, base) if THROUGHPUT in result else dict.fromkeys(columns, "")
        rows.append([step.name, status_of(results, step.name), *(cells[column] for column in columns)])
        if step.name == PUBLISHED_CASE and with_published:
            published = dict.fromkeys(columns, "") | {SPEED[0]: f"{PUBLISHED[THROUGHPUT]:,}"}
            published["GiB"] = f"{PUBLISHED[ACTIVE]}"
            if THROUGHPUT in result:
                published["TFLOP/s"] = f"{PUBLISHED[THROUGHPUT] * result['flops per token'] / 1e12:.1f}"
            rows.append(["KempnerForge, one H200", "published", *published.values()])
    return table_lines(["step", "status", *columns], rows)


def figures(result: Result, plan: Result, matmul: float | None, base: float | None) -> dict[str, str]:
    """Return the cells of a training run by their columns. `matmul` is the measured rate of the matrix product in
    TFLOP/s, `base` the tokens/s of the run that others are compared with."""
    speed, tflops, mfu, memory = result[THROUGHPUT], result["tflops"], result["mfu(%)"], result[ACTIVE]
    cells = [f"{speed:,.0f}", f"{speed / base:.3f}" if base else "", f"{tflops:.1f}", f"{mfu:.1f}"]
    cells.append(f"{mfu * result['causal']:.1f}")
    cells += [f"{100 * tflops / matmul * factor:.1f}" if matmul else "" for factor in (1, result["causal"])]
    if result["shared"]:  # the speed of a run that shares the card with others
        cells = [""] * len(cells)
    if "planned tokens/s" in plan and not result["shared"]:
        planned = plan["planned tokens/s"]
        cells += [f"{planned:,.0f}", f"{planned / speed:.3f}"]
    else:
        cells += ["", ""]
    planned_memory = f"{plan['planned GiB']:.2f}" if "planned GiB" in plan else ""
    cells += [f"{memory:.2f}", planned_memory, f"{result[RESERVED]:.2f}"]
    cells.append(f"{memory * 2**30 / result['parameters']:.2f}")
    return dict(zip([*SPEED, *PLANNED, *MEMORY], cells, strict=True))
