"""A plan in words and tables, for the terminal."""

import math
from collections import Counter

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from titanlite import build
from titanlite.plan import Plan, RankPlan, devices_per_node
from titanlite.plan.dry_run import KINDS

GIB, WIDTH = 2**30, 126


def verdict(plan: Plan) -> tuple[bool, str]:
    """Whether the worst rank fits its device, and by how much."""
    worst, room = plan.worst, plan.device.memory
    spare = (room - worst.total) / GIB
    where = f"pipeline rank {worst.rank}" if len(plan.ranks) > 1 else "every rank"
    numbers = f"{worst.total / GIB:.1f} of {room / GIB:.1f} GiB on {where}, at its peak in {worst.peak.label}"
    return spare >= 0, (f"fits: {numbers}; {spare:.1f} GiB spare" if spare >= 0 else f"does NOT fit: {numbers}")


def report(plan: Plan, file: str) -> Group:
    """Everything, from what it is to what it costs."""
    fits, line = verdict(plan)
    parts = [
        Text(f"{file}: {plan.config.model.flavor}, {plan.n_parameters:,} parameters", style="bold"),
        Text(
            f"{build.describe_mesh(plan.config)} = {plan.world_size} x {plan.config.plan.device} "
            f"({plan.device.source}), {devices_per_node(plan.config, plan.device)} a host"
        ),
        Text(build.describe_precision(plan.config)),
        memory_table(plan),
        Text(line, style="green" if fits else "bold red"),
        *([host_line(plan.worst)] if plan.worst.on_host else []),
        *([traffic_table(plan)] if plan.cost.traffic else []),
        time_table(plan),
        Text(operations_line(plan)),
        Text(speed_line(plan), style="bold"),
        Text(budget_line(plan)),
    ]
    if plan.config.training.document_mask:
        parts.append(Text("documents are taken as long as their sequences: attention takes less where they are not"))
    if plan.config.plan.device == "cpu":
        parts.append(Text("times of a CPU are of the order only: its rates are not a data sheet's"))
    return Group(*parts)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def memory_table(plan: Plan) -> Table:
    """By rank and kind, at each rank's peak."""
    table = _table("memory at the peak of a step, GiB")
    table.add_column("rank")
    shown = [kind for kind in KINDS if any(rank.peak.bytes[kind] for rank in plan.ranks)]
    for name in (*shown, "tensors", "allowance", "total"):
        table.add_column(name, justify="right")
    for rank in plan.ranks:
        sizes = [*(rank.peak.bytes[kind] for kind in shown), rank.peak.total, sum(rank.allowance.values()), rank.total]
        name = f"pp {rank.rank}" if len(plan.ranks) > 1 else "each"
        table.add_row(name, *(f"{size / GIB:.2f}" for size in sizes), style="bold" if rank is plan.worst else "")
    allowance = ", ".join(f"{name} {size / GIB:.2f}" for name, size in plan.worst.allowance.items())
    table.caption = f"allowance: {allowance}" if allowance else None
    return table


def host_line(rank: RankPlan) -> Text:
    """What offloading moves."""
    kinds = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in rank.on_host.items())
    return Text(
        f"in host memory, GiB a rank: {kinds}; what its copies and the CPU's optimizer take is not in the time below"
    )


def traffic_table(plan: Plan) -> Table:
    """Of the busiest rank, by mesh axis."""
    table = _table("traffic of a rank in a step")
    for name in ("axis", "collective", "ranks", "over"):
        table.add_column(name)
    for name in ("times", "GiB", "GiB each"):
        table.add_column(name, justify="right")
    for (axis, name), (count, size) in sorted(plan.cost.traffic.items(), key=lambda item: -item[1][1]):
        n, hosts = plan.spread(axis)
        over = "links of a host" if hosts == 1 else f"{hosts} hosts"
        table.add_row(axis, name, str(n), over, str(count), f"{size / GIB:.2f}", f"{size / GIB / count:.4f}")
    return table


def time_table(plan: Plan) -> Table:
    """Where the step goes."""
    table = _table("time of a step")
    table.add_column("")
    table.add_column("seconds", justify="right")
    table.add_column("of the step", justify="right")
    for name, seconds in time_shares(plan).items():
        table.add_row(name, f"{seconds:.3f}", f"{seconds / plan.step_seconds:.1%}")
    table.add_section()
    table.add_row("the step", f"{plan.step_seconds:.3f}", "100.0%")
    return table


def time_shares(plan: Plan) -> Counter:
    """Seconds of the busiest rank's step: what it computes, what it waits for on links because nothing overlaps it, and
    the pipeline."""
    cost, shares = plan.cost, Counter()
    for name, what in (
        ("products", "matrix products"),
        ("attention", "attention"),
        ("memory", "all other operators (memory-bound)"),
    ):
        shares[what] = cost.seconds[name]
    shares["links, not overlapped"] = max(cost.elapsed - sum(shares.values()), 0.0)
    if plan.spans:
        shares["waiting for other stages"] = max(plan.step_seconds - cost.elapsed, 0.0)
    return shares


def operations_line(plan: Plan) -> str:
    """What a device computes in a step, with what is computed again, beside what MFU counts."""
    done = ", ".join(f"{flops / 1e12:,.4g} TFLOP in {rate}" for rate, flops in sorted(plan.cost.flops.items()))
    counted = plan.flops_per_token * plan.tokens_per_step / plan.world_size / 1e12
    return f"a device's products and attention in a step: {done}; MFU counts {counted:,.4g}"


def speed_line(plan: Plan) -> str:
    """Rates."""
    parts = [
        f"{plan.tokens_per_second:,.0f} tokens/s a device, {plan.tokens_per_second * plan.world_size:,.0f} in all",
        f"MFU {plan.mfu:.1%} of {plan.device.bf16 / 1e12:,.3g} TFLOP/s",
    ]
    if plan.spans:
        parts.append(f"pipeline bubble {plan.bubble:.1%} ({plan.config.parallelism.pipeline_parallel_schedule})")
    return "; ".join(parts)


def budget_line(plan: Plan) -> str:
    """How long and how dear the tokens of the run are."""
    options, training = plan.config.plan, plan.config.training
    tokens = options.tokens or training.steps * plan.tokens_per_step
    steps = math.ceil(tokens / plan.tokens_per_step)
    hours = steps * plan.step_seconds / 3600
    device_hours = hours * plan.world_size
    energy = device_hours * plan.device.watts / 1e6
    text = (
        f"{tokens:,} tokens, {steps:,} steps: {hours / 24:,.1f} days, {device_hours:,.0f} device-hours, "
        f"{energy:,.2f} MWh at {plan.device.watts:.0f} W a device"
    )
    return text + (f", costs {device_hours * options.price:,.0f}" if options.price else "")


def print_report(plan: Plan, file: str) -> None:
    console = Console(highlight=False)
    if console.width < WIDTH:  # a wrapped line is easier to read than a cut word
        console = Console(highlight=False, width=WIDTH)
    console.print(report(plan, file))
