"""Explain the recommended layout: a table of the fastest layouts, the reason for each choice, and the config."""

import math
import textwrap

import tomli_w
from rich.table import Table

from titanlite.tools.advise.estimates import estimate_bytes
from titanlite.tools.advise.search import PlannedLayout, Search
from titanlite.tools.advise.search_space import CHECKPOINTING, GIB, LONG_SEQUENCE, STATE_BYTES, Candidate, Mesh, Task
from titanlite.tools.plan.report import GROUP_NAMES
from titanlite.tools.plan.result import range_of, spread_of_difference

MUCH_OVERLAPPED = 0.5  # share of a step above which overlapped communication is mentioned


def layout_table(search: Search, n_layouts: int) -> Table:
    """Return a table of the fastest planned layouts that fit."""
    caption = "batch: sequences per device, by those of a pipeline's microbatch; AC: activation checkpointing"
    table = Table(title=f"{len(search.planned)} layouts planned; *: recommended", title_justify="left", caption=caption)
    for name in ("", "layout", "schedule", "batch, sequences", "AC"):
        table.add_column(name)
    for name in ("GiB per device", "tokens/s per device", "from, tokens/s", "to, tokens/s", "MFU"):
        table.add_column(name, justify="right")
    recommended = search.recommended()
    for number, layout in enumerate(search.fitting()[:n_layouts], 1):
        candidate, star = layout.candidate, " *" * (layout is recommended)
        batch = f"{candidate.local_batch}" + f" by {candidate.microbatch}" * (candidate.mesh.pp > 1)
        choices = str(candidate.mesh), candidate.pipeline or "-", batch, _precision_and_checkpointing(candidate)
        per_step = layout.tokens_per_second * layout.seconds
        speeds = (per_step / seconds for seconds in reversed(range_of(layout.seconds, layout.spread)))
        speeds = [f"{speed:,.0f}" for speed in (layout.tokens_per_second, *speeds)]
        figures = f"{layout.bytes / GIB:.1f}", *speeds, f"{layout.mfu:.1%}"
        table.add_row(f"{number}{star}", *choices, *figures, style="bold" if star else "")
    return table


def _precision_and_checkpointing(candidate: Candidate) -> str:
    return candidate.checkpointing + ", float8" * candidate.float8 + ", not compiled" * (not candidate.compiled)


def explain(search: Search) -> list[str]:
    """Return the reasons for the recommended layout, with a line for each choice."""
    task, layout, fastest = search.task, search.recommended(), search.fitting()[0]
    states = STATE_BYTES * task.n_parameters
    lines = [
        f"Weights, gradients and optimizer states are {STATE_BYTES} bytes per parameter, {states / GIB:,.0f} GiB: at "
        f"least {math.ceil(states / task.device.memory)} of {task.n_devices} devices must share them.",
        *_explain_degrees(search, layout),
        _explain_checkpointing(search, layout),
    ]
    if layout.overlapped > MUCH_OVERLAPPED * layout.seconds:
        lines.append(
            f"FSDP's collectives and a ring's messages take {layout.overlapped / layout.seconds:.0%} as long as the "
            "step and are planned as overlapped with computation; a network that is slower than planned shows."
        )
    lines.append(_compare_with_baseline(search, layout))
    if fastest is not layout:
        gain = fastest.tokens_per_second / layout.tokens_per_second - 1
        why = "many have trained with the heuristic baseline"
        if layout.candidate.mesh != search.baseline:
            shares = [f"{one.communication / one.seconds:.0%}" for one in (fastest, layout)]
            why = f"its communication takes {shares[0]} of its step, this one's {shares[1]}, overlapped or not"
        lines.append(f"The fastest, {_describe(fastest)}, promises {gain:.1%} more, less than a plan can tell; {why}.")
    return [*lines, *_explain_doubts(search, layout)]


def _explain_doubts(search: Search, layout: PlannedLayout) -> list[str]:
    """Return a line on layouts that may be as fast as `layout`, and on how to find out; no line if there are none."""
    others = [(one, *spread_of_difference(layout.spread, one.spread)) for one in search.fitting() if one is not layout]
    doubts = [each for each in others if abs(each[0].seconds - layout.seconds) < each[1]]
    if not doubts:
        return []
    other, wrong, group = doubts[0]
    which = f"{len(doubts)} other layouts cannot" if len(doubts) > 1 else "One other layout cannot"
    return [
        f"{which} be told apart from this one by speed: {_describe(other)} is planned to take "
        f"{other.seconds / layout.seconds - 1:+.1%}, which may be wrong by {wrong / layout.seconds:.1%}, most of it "
        f"because of {GROUP_NAMES.get(group, group)}. Plan with a device file of titanlite calibrate, or measure both."
    ]


def _describe(layout: PlannedLayout) -> str:
    candidate = layout.candidate
    pipeline = f"{candidate.pipeline}, " * (candidate.mesh.pp > 1)
    return f"{candidate.mesh} ({pipeline}AC {_precision_and_checkpointing(candidate)}, {layout.bytes / GIB:.1f} GiB)"


def _explain_degrees(search: Search, layout: PlannedLayout) -> list[str]:
    """Return a line for each of tensor, pipeline, data, context and expert parallelism."""
    length, candidate, mesh = search.task.seq_len, layout.candidate, layout.candidate.mesh
    ring, n_microbatches = mesh.cp // mesh.ulysses, candidate.local_batch // candidate.microbatch
    share = layout.shares.get("exposed communication", 0) / layout.seconds
    exposed = f"exposed communication is {share:.1%} of the step"
    tensor = f"No TP: its collectives would be exposed in every layer, FSDP's overlap; {exposed}."
    if mesh.tp > 1:
        tensor = f"TP {mesh.tp} within a node: it shards weights and activations; {exposed}."
    pipeline = "No PP: memory does not need it, and no stage waits for another."
    if mesh.pp > 1:
        pipeline = (
            f"PP {mesh.pp}: only activations are sent. {candidate.schedule} with {candidate.stages} stage(s) per rank "
            f"and {n_microbatches} microbatches: a pipeline bubble of {layout.pipeline_bubble:.1%}."
        )
    sharding = f"HSDP: sharded over {mesh.dp_shard}, replicated {mesh.dp_replicate} times"
    data = f"DP {mesh.dp} ({sharding if mesh.dp_replicate > 1 else 'FSDP'}), {candidate.local_batch} sequence(s) each."
    context = f"No CP: a device has memory for the {length // mesh.tp:,} tokens of a sequence."
    if mesh.cp > 1:
        why = "for the long sequence" if length > LONG_SEQUENCE else "instead of AC or more TP"
        kept = f"{length // (mesh.cp * mesh.tp):,} of {length:,} tokens per device between layers"
        context = f"CP {mesh.cp} {why}, ring {ring} x ulysses {mesh.ulysses}: {kept}."
    return [tensor, pipeline, *([data] if mesh.dp > 1 else []), context, *_explain_experts(search.task, mesh)]


def _explain_experts(task: Task, mesh: Mesh) -> list[str]:
    n_experts, per_node = task.model.moe.n_experts, task.device.devices_per_node
    if not n_experts:
        return []
    if mesh.ep == 1:
        return [f"No EP: FSDP gathers all {n_experts} experts of a layer, and no token leaves its device."]
    where = "within a node" if mesh.ep <= per_node else f"across {math.ceil(mesh.ep / per_node)} nodes"
    own = f"a device gathers {n_experts // mesh.ep} of a layer's {n_experts} experts"
    return [f"EP {mesh.ep}: {own}, and tokens are sent to them {where}. The plan assumes that their load is balanced."]


def _explain_checkpointing(search: Search, layout: PlannedLayout) -> str:
    candidate, memory = layout.candidate, search.task.device.memory
    spare = f"{(memory - layout.bytes) / GIB:.1f} GiB spare"
    if candidate.checkpointing == "none":
        compiled = "; the compiler still recomputes pointwise results" if candidate.compiled else ""
        return f"No activation checkpointing, {spare}{compiled}."
    less = candidate._replace(checkpointing=CHECKPOINTING[CHECKPOINTING.index(candidate.checkpointing) - 1])
    planned = [one.bytes for one in search.planned if one.candidate == less and not one.problem]
    size = planned[0] if planned else search.corrected(estimate_bytes, "bytes")(less)
    needs = f"needs {size / GIB:.1f} of {memory / GIB:.1f} GiB ({'planned' if planned else 'estimated'})"
    needs = "fits, but is no faster" if search.fits(size) else needs
    return f"{candidate.checkpointing.capitalize()} AC, {spare}: {less.checkpointing} {needs}."


def _compare_with_baseline(search: Search, layout: PlannedLayout) -> str:
    """Return a line that compares the layout with the heuristic baseline: how much faster it is, and why."""
    baseline, sequences = search.baseline, search.task.sequences
    if layout.candidate.mesh == baseline:
        return f"This is the heuristic baseline: {baseline}."
    inside = "EP" if search.task.model.moe.n_experts else "TP"
    start = f"The heuristic baseline ({inside} within a node, PP across, CP for long sequences, DP over the rest) is "
    start += f"{baseline}"
    planned = [one for one in search.planned if one.candidate.mesh == baseline and not one.problem]
    if fitting := [one for one in search.fitting() if one.candidate.mesh == baseline]:
        other = fitting[0]
        longer = {what: seconds - layout.shares.get(what, 0.0) for what, seconds in other.shares.items()}
        causes = [f"{what} ({longer[what]:+.2f} s)" for what in sorted(longer, key=longer.get) if longer[what] > 0]
        spends = f"; its step spends more on {' and '.join(causes[:-3:-1])}" if causes else ""
        slower = 1 - other.tokens_per_second / layout.tokens_per_second
        return f"{start}: {other.tokens_per_second:,.0f} tokens/s per device, {slower:.1%} less{spends}."
    if planned:
        return f"{start}, which does not fit: {min(one.bytes for one in planned) / GIB:.1f} GiB planned."
    if sequences % baseline.dp:
        return f"{start}, whose data-parallel degree {baseline.dp} does not divide {sequences} sequences."
    return f"{start}, which is rejected: {search.rejected.get(baseline, 'it does not fit, by the estimate')}"


def config_toml(search: Search) -> str:
    """Return the recommended layout as a config, with the reasons as comments."""
    task, layout = search.task, search.recommended()
    lines = [
        f"{task.flavor} on {task.n_devices} x {task.device_name}: {layout.candidate.mesh}.",
        "",
        f"Recommended by: titanlite advise --gpus {task.n_devices} --device {task.device_name} --model {task.flavor} "
        f"--seq-len {task.seq_len} --global-batch {task.sequences * task.seq_len}" + " --float8" * task.float8,
        f"Planned: {layout.bytes / GIB:.1f} of {task.device.memory / GIB:.1f} GiB, "
        f"{layout.tokens_per_second:,.0f} tokens/s per device, MFU {layout.mfu:.1%}.",
        *explain(search),
        "",
        "It is a layout only: the tokenizer, the learning rate, the steps and checkpoints are still to be chosen.",
    ]
    wrapped = [part for line in lines for part in (textwrap.wrap(line, 117, break_on_hyphens=False) or [""])]
    return "\n".join([f"# {line}".rstrip() for line in wrapped] + [tomli_w.dumps(layout.candidate.options(task))])
