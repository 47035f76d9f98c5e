"""What the tables of guide_tables.py are computed of: speeds with their range, efficiencies, bytes, published runs."""

import math
from collections.abc import Iterable, Mapping

from docs.build import guide_plans as plans
from docs.build.guide_plans import Record
from docs.build.page_tables import table_lines
from docs.build.published_page import compared_runs
from titanlite.tools.plan.result import range_of

GIB = 2**30
Records = Mapping[str, Record]
Row = list[str]


def table(head: str, rows: Iterable[Row]) -> str:
    """Return a Markdown table; the columns of the head are divided by |."""
    return "".join(f"{line}\n" for line in table_lines(head.split(" | "), rows))


def speed(record: Record, seconds: float) -> float:
    """Return the tokens per second and device if a step takes so many seconds."""
    return record["tokens_per_step"] / seconds / record["world_size"]


def speed_range(record: Record) -> tuple[float, float, float]:
    """Return the expected, the lowest and the highest tokens per second and device."""
    shortest, longest = range_of(record["step_seconds"], record["spread"])
    return tuple(speed(record, seconds) for seconds in (record["step_seconds"], longest, shortest))


def efficiency(record: Record, base: Record) -> tuple[float, float, float]:
    """Return the speed per device relative to another plan's: expected, lowest, highest.

    Each group of times is at an end of its range in both plans at once, since what is wrong for both in the same way
    makes no difference. The groups are independent, so the squares of what they change are added.
    """
    expected = speed(record, record["step_seconds"]) / speed(base, base["step_seconds"])
    down, up = [], []
    for group, ends in record["spread"].items():
        pairs = zip(ends, base["spread"][group], strict=True)
        changes = [
            speed(record, record["step_seconds"] + own) / speed(base, base["step_seconds"] + other) - expected
            for own, other in pairs
        ]
        down.append(min(*changes, 0.0))
        up.append(max(*changes, 0.0))
    return expected, expected - math.hypot(*down), expected + math.hypot(*up)


def sent_bytes(record: Record) -> float:
    """Return the bytes that a rank sends in a step. In a ring of n ranks it sends (n - 1) / n of the full tensor, and
    twice that in an all-reduce."""
    total = 0.0
    for axis, name, _, size in record["communication"]:
        n = record["ranks_of_axis"][axis]
        total += size * (n - 1) / n * (2 if name == "all_reduce" else 1)
    return total


def moved_bytes(record: Record, name: str) -> int:
    """Return the bytes of the full tensors of a collective in a step."""
    return sum(size for _, collective, _, size in record["communication"] if collective == name)


def gib(size: float) -> str:
    """Return bytes in GiB."""
    return f"{size / GIB:.1f}"


def between(values: tuple[float, float, float], form: str = "{:.0%}") -> str:
    """Return an expected value and its range."""
    expected, low, high = (form.format(value) for value in values)
    return f"{expected} ({low} to {high})" if low != high else expected


def relative_speed(record: Record, base: Record) -> str:
    """Return the speed of a plan relative to another one."""
    return f"{efficiency(record, base)[0]:.0%}"


def published() -> dict[str, Record]:
    """Return the published runs with the speeds of their plans, by name."""
    return {each.run["name"]: each.run | each.planned for each in compared_runs("published_runs.toml")}


PAIRS = {
    "torchtitan, 8B, FSDP": ("8B, FSDP 8 (torchtitan 2024-12)", "8B, FSDP 128 (torchtitan 2024-12)"),
    "torchtitan, 8B, FSDP, compiled": (
        "8B, FSDP 8, compiled (torchtitan 2024-12)",
        "8B, FSDP 128, compiled (torchtitan 2024-12)",
    ),
    "torchtitan, 8B, FSDP, float8": (
        "8B, FSDP 8, float8 (torchtitan 2024-12)",
        "8B, FSDP 128, float8 (torchtitan 2024-12)",
    ),
    "NeMo, 8B, cp 2": ("NeMo 24.09 Llama 3.1 8B BF16 8xH100 CP2", "NeMo 24.09 Llama 3.1 8B BF16 128xH100 CP2"),
    "NeMo, 70B, tp 4 x pp 4 x cp 2": (
        "NeMo 24.09 Llama 3.1 70B BF16 64xH100 TP4 PP4 CP2 VP5",
        "NeMo 24.09 Llama 3.1 70B BF16 512xH100 TP4 PP4 CP2 VP5",
    ),
    "MaxText, 70B, FSDP": (
        "MaxText Llama 3 70B BF16 128xH100 FSDP128",
        "MaxText Llama 3 70B BF16 256xH100 FSDP256",
    ),
    "Crusoe, torchtitan, 8B, FSDP, H200": (
        "Crusoe 8B, 32 h200, FSDP, batch 4",
        "Crusoe 8B, 128 h200, FSDP, batch 4",
    ),
    "Trainy, torchtitan, 8B, FSDP, H200": ("8B, FSDP 32, H200 (Trainy 2025-06)", "8B, FSDP 64, H200 (Trainy 2025-06)"),
    "KempnerForge, 13B, tp 4 x FSDP, H200": (
        "KempnerForge weak scaling 13B, 32 H200, TP 4 x FSDP 8",
        "KempnerForge weak scaling 13B, 128 H200, TP 4 x FSDP 32",
    ),
    "KempnerForge, 70B, tp 4 x FSDP, H200": (
        "KempnerForge weak scaling 70B, 32 H200, TP 4 x FSDP 8",
        "KempnerForge weak scaling 70B, 128 H200, TP 4 x FSDP 32",
    ),
    "KempnerForge, 8B, FSDP, H200": (
        "8B, one H200, bfloat16 weights (KempnerForge 2026-04)",
        "KempnerForge 7B, 4 H200, TP 1 x FSDP 4 (no 4)",
    ),
}
"""Published runs that differ in the number of devices: the smaller and the larger one, by name."""


def published_pairs() -> dict[str, tuple[Record, Record]]:
    """Return the smaller and the larger run of each pair."""
    runs = published()
    return {label: (runs[small], runs[large]) for label, (small, large) in PAIRS.items()}


GUIDES_OF_TENSOR = {2: (95, 98), 4: (90, 95), 8: (80, 90), 16: (60, 75)}
"""The efficiency of tensor parallel that guides give, in percent, by degree: from, to."""
KEMPNER = {
    1: "8B, one H200, bfloat16 weights (KempnerForge 2026-04)",
    2: "KempnerForge 7B, 2 H200, TP 2 x FSDP 1 (no 3)",
    4: "KempnerForge 7B, 4 H200, TP 4 x FSDP 1 (no 5)",
}
"""Published runs of tensor parallel alone, by degree."""


def published_tensor() -> dict[int, float]:
    """Return the published efficiency of tensor parallel by degree."""
    runs = published()
    return {n: runs[name]["tokens/s"] / runs[KEMPNER[1]]["tokens/s"] for n, name in KEMPNER.items()}


def fastest(log: Records, size: str, device: str, dtype: str) -> tuple[str, Record] | None:
    """Return the fastest plan that fits, with the name of its candidate."""
    names = plans.COST_MODELS[size][3][device]
    found = [(name, log.get(f"cost: {size}, {device}, {dtype}, {name}")) for name in names]
    fitting = [(name, record) for name, record in found if record and record["total"] <= record["device_memory"]]
    return max(fitting, key=lambda pair: speed_range(pair[1])[0]) if fitting else None
