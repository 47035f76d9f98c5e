"""The summary of gpu_session.py in Markdown: a row for every step, also for those that did not run."""

from collections.abc import Iterable
from typing import Any

from gpu_steps import PUBLISHED_CASE, Step
from page_tables import table_lines

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
TRAINING = ["tokens/s", "TFLOP/s", "MFU %", "causal", "of matmul %", "causal", "GiB", "reserved", "B/param"]


def one_line(result: Result) -> str:
    """Return what a step's line on the console and in a plain table says."""
    if "reason" in result:
        return result["reason"]
    if THROUGHPUT in result:
        speed, mfu = result[THROUGHPUT], result["mfu(%)"]
        return f"{speed:,.0f} tokens/s, MFU {mfu:.1f} %, {result[ACTIVE]:.1f} GiB, {result[RESERVED]:.1f} reserved"
    values = [(key, value) for key, value in result.items() if key not in ("status", "seconds", "lines")]
    return "; ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values)


def summary(steps: Iterable[Step], results: dict[str, Result], *, dry_run: str) -> str:
    """Return the page: a table for each group of steps, and what its steps printed."""
    title = "# A session on one GPU\n"
    parts = [title, f"**{DRY_RUN[dry_run]}**\n"] if dry_run else [title]
    groups: dict[str, list[Step]] = {}
    for step in steps:
        groups.setdefault(step.group, []).append(step)
    for group, members in groups.items():
        parts.append(f"## {group}\n")
        if members[0].kind == "plan":
            parts += plan_table(members, results)
        elif all(step.kind == "train" for step in members):
            parts += training_table(members, results, with_published=not dry_run)
        else:
            parts += plain_table(members, results)
        for step in members:
            if lines := results.get(step.name, {}).get("lines"):
                parts += ["", f"{step.name}:", "", "```text", *lines, "```"]
        parts.append("")
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
    """Return a table of training runs, with the published figures beside the run of the same configuration."""
    matmul = results.get("rates", {}).get("matmul TFLOP/s")
    rows = []
    for step in steps:
        result = results.get(step.name, {})
        cells = figures(result, matmul) if THROUGHPUT in result else [""] * len(TRAINING)
        rows.append([step.name, status_of(results, step.name), *cells])
        if step.name == PUBLISHED_CASE and with_published:
            flops = f"{PUBLISHED[THROUGHPUT] * result['flops per token'] / 1e12:.1f}" if THROUGHPUT in result else ""
            speed, memory = f"{PUBLISHED[THROUGHPUT]:,}", f"{PUBLISHED[ACTIVE]}"
            rows.append(["KempnerForge, one H200", "published", speed, flops, *[""] * 4, memory, "", ""])
    return table_lines(["step", "status", *TRAINING], rows)


def figures(result: Result, matmul: float | None) -> list[str]:
    """Return the cells of a training run. `matmul` is the measured rate of the matrix product in TFLOP/s."""
    tflops, mfu, causal = result["tflops"], result["mfu(%)"], result["causal"]
    of_matmul = [f"{100 * tflops / matmul:.1f}", f"{100 * tflops / matmul * causal:.1f}"] if matmul else ["", ""]
    cells = [f"{result[THROUGHPUT]:,.0f}", f"{tflops:.1f}", f"{mfu:.1f}", f"{mfu * causal:.1f}", *of_matmul]
    memory = result[ACTIVE]
    return [*cells, f"{memory:.2f}", f"{result[RESERVED]:.2f}", f"{memory * 2**30 / result['parameters']:.2f}"]


def plan_table(steps: list[Step], results: dict[str, Result]) -> list[str]:
    """Return planned beside allocated memory: the peak of a step in tensors, of the run with the same config."""
    rows = []
    for step in steps:
        planned = results.get(step.name, {}).get("planned GiB")
        allocated = results.get(step.name.removeprefix("plan-"), {}).get(ACTIVE)
        cells = ["" if value is None else f"{value:.2f}" for value in (planned, allocated)]
        off = f"{planned / allocated - 1:+.1%}" if planned and allocated else ""
        rows.append([step.name, status_of(results, step.name), *cells, off])
    return table_lines(["step", "status", "planned GiB", "allocated GiB", "off"], rows)
