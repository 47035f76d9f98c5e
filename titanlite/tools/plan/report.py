"""Print a plan as text and tables."""

import collections
import math
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.table import Column, Table
from rich.text import Text

from titanlite.config.loader import read_toml
from titanlite.metrics.summary import describe_mesh, describe_precision
from titanlite.tools.plan.connections import gloo_connections, process_groups
from titanlite.tools.plan.efficiency import ANY, Share, reached
from titanlite.tools.plan.expert_load import expert_load
from titanlite.tools.plan.hints import hints
from titanlite.tools.plan.result import Plan, devices_per_node
from titanlite.tools.plan.saving import saving
from titanlite.tools.plan.segments import KINDS

GIB, WIDTH = 2**30, 126
WORDS = read_toml(str(Path(__file__).with_name("words.toml")))
KIND_WORDS, GROUP_NAMES = WORDS["kinds"], WORDS["groups"]


def verdict(plan: Plan) -> tuple[bool, str]:
    """Return whether the rank that needs the most memory fits its device, and a line with the verdict."""
    worst, memory = plan.worst, plan.device.memory
    spare = (memory - worst.total) / GIB
    where = f"pipeline rank {worst.rank}" if len(plan.ranks) > 1 else "every rank"
    numbers = f"{worst.total / GIB:.1f} of {memory / GIB:.1f} GiB on {where}, peak in {worst.peak.label}"
    fits, distance = spare >= 0, f"{abs(spare):.1f} GiB"
    return fits, f"fits: {numbers}; {distance} spare" if fits else f"does NOT fit: {numbers}; {distance} over"


def report(plan: Plan, file: str) -> Group:
    """Return the full report of a plan, as text and tables."""
    fits, line = verdict(plan)
    offloaded = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in plan.worst.offloaded.items())
    parts = [
        Text(f"{file}: {plan.config.model.flavor}, {plan.n_parameters:,} parameters", style="bold"),
        Text(
            f"{describe_mesh(plan.config)} = {plan.world_size} x {plan.config.plan.device} "
            f"({plan.device.source}), {devices_per_node(plan.config, plan.device)} per node"
        ),
        Text(rates_line(plan)),
        Text(describe_precision(plan.config)),
        *([Text(experts_line(plan))] if plan.config.model.moe.n_experts else []),
        memory_table(plan),
        Text(line, style="green" if fits else "bold red"),
        *([Text(f"in host memory, GiB per rank: {offloaded}")] if offloaded else []),
        *([communication_table(plan)] if plan.cost.communication else []),
        time_table(plan),
        Text(operations_line(plan)),
        Text(connections_line(plan)),
        Text(speed_line(plan), style="bold"),
        Text(range_line(plan)),
        Text(budget_line(plan)),
        *([Text(checkpoint_line(plan))] if plan.config.checkpoint.enable else []),
    ]
    if plan.cost.seconds["overlapped"]:
        parts.append(Text("async TP: collectives overlap in chunks, as read in torch 2.13; no GPU has run it"))
    if plan.config.training.document_mask:
        parts.append(Text("documents are planned as long as their sequences: attention over shorter ones is faster"))
    if plan.config.fault_tolerance.enable:
        parts.append("this is the plan of one replica group; what groups send to each other is not planned")
    measured = plan.device.measured
    if plan.device.kind == "cpu" and measured is None:
        parts.append(Text("times on a CPU are rough: no data sheet has its rates; titanlite calibrate measures"))
    if plan.device.kind == "cpu" and measured and measured.ranks != plan.world_size:
        text = f"calibrated with {measured.ranks} ranks, which share the cores: calibrate with {plan.world_size}"
        parts.append(Text(text, style="bold red"))
    return Group(*parts, *(Text(f"hint: {hint}", style="yellow") for hint in hints(plan)))


def empty_table(title: str, *columns: str, right: tuple[str, ...]) -> Table:
    """Return a table without rows, with the columns `columns` and then the right-aligned columns `right`."""
    headers = [*columns, *(Column(name, justify="right") for name in right)]
    looks = {"title_justify": "left", "caption_justify": "left", "box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0)}
    return Table(*headers, title=title, **looks)


def memory_table(plan: Plan) -> Table:
    """Return a table of memory by rank and kind, at each rank's peak."""
    shown = [kind for kind in KINDS if any(rank.peak.bytes[kind] for rank in plan.ranks)]
    table = empty_table("peak memory of a step, GiB", "rank", right=(*shown, "tensors", "overhead", "total"))
    for rank in plan.ranks:
        sizes = [*(rank.peak.bytes[kind] for kind in shown), rank.peak.total, sum(rank.overhead.values()), rank.total]
        name = f"pp {rank.rank}" if len(plan.ranks) > 1 else "each"
        table.add_row(name, *(f"{size / GIB:.2f}" for size in sizes), style="bold" if rank is plan.worst else "")
    overhead = ", ".join(f"{name} {size / GIB:.2f}" for name, size in plan.worst.overhead.items())
    words = "; ".join(f"{kind}: {text}" for kind, text in KIND_WORDS.items() if kind in shown)
    table.caption = "\n".join(filter(None, (words, f"non-tensor overhead: {overhead}" if overhead else "")))
    return table


def rates_line(plan: Plan) -> str:
    """Return a line that says where the plan's rates come from."""
    if plan.device.measured:
        return "rates: measured by titanlite calibrate"
    name, shares = Path(plan.config.plan.device).stem, dict[str, list[str]]()
    for key, share in reached(plan.device, name):
        if isinstance(share, Share):
            shares.setdefault(share.basis(name), []).append(key.replace("_", " "))
    bases = "; ".join(f"{basis}: {', '.join(keys)}" for basis, keys in shares.items())
    return f"rates: the data sheet's, times shares that are {bases}"


def experts_line(plan: Plan) -> str:
    """Return a line on the assumed load of experts, and on where their tokens are sent."""
    model, moe, imbalance = plan.config.model, plan.config.model.moe, plan.config.plan.expert_imbalance
    layers = f"{sum(map(model.has_experts, range(model.n_layers)))} of {model.n_layers} layers"
    load = "balanced" if imbalance == 1 else f"{imbalance:g} times the mean on the planned rank"
    tokens = f"{expert_load(plan.config).per_expert:,.0f} tokens per expert and microbatch ({load})"
    line = f"experts: {moe.n_experts_per_token} of {moe.n_experts} per token in {layers}; planned with {tokens}"
    degree = plan.config.parallelism.expert_parallel_degree
    return line + (f"; ep {degree}, all-to-all {_where(plan, 'ep')}" if degree > 1 else "")


def _where(plan: Plan, axis: str) -> str:
    if axis == "host":
        return "to host memory"
    _, n_nodes = plan.axis_size(axis)
    return "within a node" if n_nodes == 1 else f"network, {n_nodes} nodes"


def communication_table(plan: Plan) -> Table:
    """Return a table of the busiest rank's communication by mesh axis."""
    columns = ("axis", "collective", "ranks", "interconnect")
    table = empty_table("communication per rank and step", *columns, right=("count", "GiB", "GiB each"))
    for (axis, name), (count, size) in sorted(plan.cost.communication.items(), key=lambda item: -item[1][1]):
        sizes = f"{size / GIB:.2f}", f"{size / GIB / count:.4f}"
        table.add_row(axis, name, str(plan.axis_size(axis)[0]), _where(plan, axis), str(count), *sizes)
    return table


def time_table(plan: Plan) -> Table:
    table = empty_table("time of a step", "", right=("seconds", "of the step"))
    for name, seconds in time_shares(plan).items():
        table.add_row(name, f"{seconds:.3f}", f"{seconds / plan.step_seconds:.1%}")
    table.add_section()
    table.add_row("the step", f"{plan.step_seconds:.3f}", "100.0%")
    return table


def time_shares(plan: Plan) -> dict[str, float]:
    """Return the seconds that the busiest rank's step spends on each activity: computation, communication, waiting."""
    cost, host, optimizer = plan.cost, plan.cost.seconds["host"], plan.cost.seconds["optimizer"]
    shares = {"matrix multiplication": cost.seconds["matmul"], "attention": cost.seconds["attention"]}
    shares["other operators (memory-bound)"] = cost.seconds["memory"]
    shares["exposed communication"] = max(cost.elapsed - sum(shares.values()) - host - optimizer, 0.0)
    if plan.spans:
        shares["waiting for other pipeline ranks"] = max(plan.step_seconds - cost.elapsed, 0.0)
    if optimizer:
        shares["optimizer step on the CPU"] = optimizer
    if host:
        shares["waiting for the host"] = host
    return shares


def operations_line(plan: Plan) -> str:
    """Return a line with a device's FLOPs in a step, including recomputed ones, and those that MFU counts."""
    flops = ", ".join(f"{flops / 1e12:,.4g} TFLOP in {dtype}" for dtype, flops in sorted(plan.cost.flops.items()))
    counted = plan.flops_per_token * plan.config.tokens_per_step / plan.world_size / 1e12
    return f"matrix multiplication and attention per device and step: {flops}; MFU counts {counted:,.4g}"


def connections_line(plan: Plan) -> str:
    """Return a line with the process groups of a rank and the number of gloo's connections."""
    counts = collections.Counter(name for name, _ in process_groups(plan))
    names = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())
    first, others = gloo_connections(plan)
    line = f"process groups per rank: {counts.total()}, with those of one rank and of checkpoints ({names}); "
    line += "gloo connections, computed: at most "
    return line + f"{first:,} on rank 0, {others:,} on another"


def speed_line(plan: Plan) -> str:
    """Return a line with throughput, MFU and the pipeline bubble."""
    speed, schedule = plan.tokens_per_second, plan.config.parallelism.pipeline_parallel_schedule
    line = f"{speed:,.0f} tokens/s per device, {speed * plan.world_size:,.0f} in total; "
    line += f"MFU {plan.mfu:.1%} of {plan.device.bf16 / 1e12:,.3g} TFLOP/s"
    return line + (f"; pipeline bubble {plan.pipeline_bubble:.1%} ({schedule})" if plan.spans else "")


def range_line(plan: Plan) -> str:
    """Return a line with the range of the step time, and the groups of rates that contribute most to the range."""
    shortest, longest = plan.step_range
    speeds = (plan.config.tokens_per_step / seconds / plan.world_size for seconds in (longest, shortest))
    line = f"from {shortest:.3f} to {longest:.3f} s per step, {' to '.join(f'{x:,.0f}' for x in speeds)} tokens/s; "
    widest = sorted(plan.spread, key=lambda group: plan.spread[group][0] - plan.spread[group][1])[:3]
    parts = [
        f"{GROUP_NAMES.get(group, group)} ({plan.spread[group][0]:+.3f}, {plan.spread[group][1]:+.3f} s)"
        for group in widest
        if plan.spread[group] != (0.0, 0.0)
    ]
    return line + f"least certain: {', '.join(parts)}"


def budget_line(plan: Plan) -> str:
    """Return a line with the time, energy and cost of all tokens of the run."""
    options, training = plan.config.plan, plan.config.training
    if training.epochs and not options.tokens:
        return f"training.epochs = {training.epochs:g}: a plan reads no data; plan.tokens plans time and cost"
    tokens = options.tokens or training.steps * plan.config.tokens_per_step
    steps = math.ceil(tokens / plan.config.tokens_per_step)
    hours = steps * plan.step_seconds / 3600
    device_hours = hours * plan.world_size
    line = f"{tokens:,} tokens, {steps:,} steps: {hours / 24:,.1f} days, {device_hours:,.0f} device-hours, "
    line += f"{device_hours * plan.device.watts / 1e6:,.2f} MWh at {plan.device.watts:.0f} W per device"
    return line + (f", costs {device_hours * options.price:,.0f}" if options.price else "")


def checkpoint_line(plan: Plan) -> str:
    """Return a line with a checkpoint's size and the seconds for which a save stops training, with their range."""
    config, per_node = plan.config, devices_per_node(plan.config, plan.device)
    size, copy, (seconds, least, most), pinned = saving(config, plan.device, plan.world_size, per_node)
    between = config.checkpoint.interval * plan.step_seconds
    line = f"a checkpoint has {size / GIB:,.1f} GiB and is written in {seconds:,.1f} s"
    line += f" ({least:,.1f} to {most:,.1f}); " if least < most else "; "
    is_async = config.checkpoint.async_mode == "async"
    stop = copy + (max(seconds - between, 0.0) if is_async else seconds)
    line += f"a save stops training for {stop:,.1f} s, {stop / (stop + between):.1%} of the time"
    line += ": it waits for the one before" if is_async and seconds > between else ""
    first, least, most = (copy + pinned / rate for rate in (ANY.pinning.expected, ANY.pinning.high, ANY.pinning.low))
    once = f"; the first for {first:,.0f} s ({least:,.0f} to {most:,.0f}), pinning {pinned / GIB:,.1f} GiB of each node"
    return line + (once if is_async and pinned else "")


def print_report(plan: Plan, file: str, *tables: Table) -> None:
    """Print the report and the tables, at least WIDTH columns wide, so that no cell is truncated."""
    Console(highlight=False, width=max(Console().width, WIDTH)).print(Group(report(plan, file), *tables))
