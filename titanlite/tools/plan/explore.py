"""Plan a grid of layouts similar to a config's, and write one HTML page on which a reader chooses a layout. The axes of
the grid are degrees, batch, activation checkpointing (AC) and device. Layouts that differ only in batch and device form
a chain; its batches are planned by size, up to the first that fits no device. Chains are planned in parallel."""

import contextlib
import html
import itertools
import json
import math
import re
import shlex
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

from titanlite.config import Config, load
from titanlite.config.keys import AC_MODE, BATCH, CONTEXT, MICROBATCH, PIPELINE, REPLICATE, TENSOR
from titanlite.config.launch import quantity
from titanlite.config.loader import ConfigError, LoadedConfig, value_of
from titanlite.launch.process import available_cores
from titanlite.launch.progress_bar import progress_bar
from titanlite.metrics.devices import find_device
from titanlite.metrics.summary import describe_mesh
from titanlite.tools.html_page import page
from titanlite.tools.plan.figures import KIND_COLOURS, SHARE_COLOURS
from titanlite.tools.plan.planner import make_plan, process_pool, resolve
from titanlite.tools.plan.report import range_line, speed_line, time_shares, verdict
from titanlite.tools.plan.result import Plan

DEGREES = {"tp": TENSOR, "pp": PIPELINE, "cp": CONTEXT, "dp_replicate": REPLICATE}
AC_OPTION = "activation_checkpoint.selective_ac_option"
AC = ["none", "selective", "selective attention", "full"]  # AC mode, then selective_ac_option unless it is "op"
MODE, WORKERS = r"(none|full|selective( \w+)?)", 4
AXIS = rf"({'|'.join(DEGREES)}|batch)=[1-9]\d*(,[1-9]\d*)*|ac={MODE}(,{MODE})*|device=.+"

Entries = dict[str, dict[str, Any]]  # JSON data of each layout on the page, by the values of all axes joined with "|"
Chain = dict[int, dict[str, LoadedConfig[Config]]]  # configs by batch and by key of Entries


def make_axes(config: Config, texts: list[str]) -> dict[str, list[Any]]:
    """Return the values of each axis of the grid, the config's own first. A text such as tp=1,2 gives the values of an
    axis. By default tp, pp, cp and batch also get half and twice their value. Raises ConfigError for a wrong text."""
    axes: dict[str, list[Any]] = {name: [value_of(config, key)] for name, key in DEGREES.items()}
    axes["batch"] = [value_of(config, MICROBATCH if axes["pp"] > [1] else BATCH)]
    for name in ("tp", "pp", "cp", "batch"):
        axes[name] += [max(axes[name][0] // 2, 1), 2 * axes[name][0]]
    axes["ac"] = [f"{value_of(config, AC_MODE)} {value_of(config, AC_OPTION)}".removesuffix(" op"), *AC]
    axes["device"] = [config.plan.device]
    for text in texts:
        name, _, values = text.partition("=")
        if not re.fullmatch(AXIS, text):
            expected = f"AXIS=VALUE,VALUE, where AXIS is one of {', '.join(axes)}; values of ac are {', '.join(AC)}"
            raise ConfigError([f"command line: --grid {text}: expected {expected}"])
        axes[name] = [axes[name][0], *map(type(axes[name][0]), values.split(","))]
    for device in axes["device"]:
        find_device(device)
    return {name: [*dict.fromkeys(values)] for name, values in axes.items()}


def overrides(choice: dict[str, Any], plan: Plan, loaded: LoadedConfig[Config]) -> list[str]:
    """Return the command-line options that give a config the chosen value of each axis. In a pipeline, the chosen batch
    is the microbatch size, and the number of gradient accumulation steps stays (1 if the config has no pipeline)."""
    config, product = plan.config, choice["tp"] * choice["pp"] * choice["cp"]
    ranks = max(plan.world_size // product, 1)  # number of ranks that read different sequences
    options = {key: choice[name] for name, key in DEGREES.items()}  # config rules reject degrees that do not fit
    options["parallelism.data_parallel_shard_degree"] = max(ranks // choice["dp_replicate"], 1)
    sequences, local = config.training.global_batch_size, choice["batch"]
    if choice["pp"] > 1:
        times = config.gradient_accumulation_steps if config.parallelism.pipeline_parallel_degree > 1 else 1
        options[MICROBATCH], local = local, max(sequences // ranks // times, local)
    if loaded.config.training.global_batch_size == -1:  # -1: round `sequences` up to full batches
        times = math.ceil(sequences / (local * ranks)) * loaded.config.fault_tolerance.n_groups
        options["training.global_batch_size"] = times * local * ranks
    options |= {BATCH: local, "plan.device": choice["device"]}
    options |= zip((AC_MODE, AC_OPTION), [*choice["ac"].split(), "op"], strict=False)
    return [f"--{key}={value}" for key, value in options.items()]


def planned(plan: Plan) -> dict[str, Any]:
    """Return the JSON data that the page shows for a plan."""
    fits, line = verdict(plan)
    memory = {kind: size for kind, size in plan.worst.peak.bytes.items() if size > 0}
    layout = f"{describe_mesh(plan.config)}; {plan.config.training.global_batch_size:,} sequences per step"
    return {
        "state": "fits" if fits else "does not fit",
        "lines": [line, layout, speed_line(plan), range_line(plan)],
        "memory": {**memory, "overhead": sum(plan.worst.overhead.values())},
        "limit": plan.device.memory,
        "time": {name: round(seconds, 6) for name, seconds in time_shares(plan).items()},
        "seconds": round(plan.step_seconds, 6),
        "speed": round(plan.tokens_per_second, 3),
    }


def plan_chain(chain: Chain, world_size: int) -> Entries:
    """Plan a chain; return an entry per config. Once a batch fits no device, larger batches are not planned."""
    entries, unfit = Entries(), 0
    for batch, variants in sorted(chain.items()):
        plans, cache, problem = [], {}, f"batch {unfit} does not fit already"
        try:
            plans = [make_plan(x, world_size=world_size, cache=cache) for x in variants.values() if not unfit]
        except Exception as error:  # report a layout that cannot be planned, and plan the other layouts
            problem = f"{type(error).__name__}: {error}"
        entries |= {key: {"state": "not planned", "lines": [problem]} for key in variants}
        entries |= zip(variants, map(planned, plans), strict=False)
        if plans and not any(verdict(plan)[0] for plan in plans):
            unfit = batch
    return entries


def write_explorer(plan: Plan, arguments: list[str], axes: dict[str, list[Any]], seconds: float, target: Path) -> bool:
    """Plan the grid of layouts, and write the page. Return False if Ctrl-C ended the planning early. `arguments`: the
    command's config and overrides. `seconds`: the time that planning the config itself took."""
    entries, chains, own = Entries(), dict[str, Chain](), load(arguments)
    for values in itertools.product(*axes.values()):
        choice = dict(zip(axes, values, strict=True))
        key, place = ("|".join(map(str, x.values())) for x in (choice, {**choice, "batch": "", "device": ""}))
        changed = [*arguments, *overrides(choice, plan, own)]
        entries[key] = {"state": "not planned", "lines": ["the command was interrupted"]}
        try:
            loaded = load(changed)
            resolve(loaded, plan.world_size)
            chains.setdefault(place, {}).setdefault(choice["batch"], {})[key] = loaded
        except ConfigError as error:
            entries[key] = {"state": "rejected", "lines": error.problems}
        entries[key]["command"] = shlex.join(["titanlite", "plan", *changed])
    entries["|".join(str(values[0]) for values in axes.values())] |= planned(plan)
    total, cores, complete = sum(map(len, chains.values())), min(WORKERS, available_cores()), False
    line = f"{len(entries):,} choices, {total:,} dry runs: {total * seconds / cores / 60:,.1f} min on {cores} cores"
    print(f"{line} if each takes {seconds:.0f} s, as above; Ctrl-C ends it, and what is planned is written", flush=True)
    with (
        contextlib.suppress(KeyboardInterrupt),
        process_pool(WORKERS, preload="titanlite.tools.plan.explore") as pool,
        progress_bar("grid", total=total, unit="dry runs", enabled=True) as advance,
    ):
        futures = {pool.submit(plan_chain, chain, plan.world_size): len(chain) for chain in chains.values()}
        for future in as_completed(futures):
            for key, entry in future.result().items():
                entries[key] |= entry
            advance(futures[future])
        complete = True
    model = f"{plan.config.model.flavor} on {quantity(plan.world_size, 'device')}"
    title = f"titanlite plan: {Path(own.file).name}, {model}"
    colours = KIND_COLOURS | SHARE_COLOURS | {"overhead": "#777777"}
    text = json.dumps({"axes": axes, "colours": colours, "entries": entries}, separators=(",", ":"))
    body = Path(__file__).with_name("explore.html").read_text(encoding="utf-8").replace("[[TITLE]]", html.escape(title))
    body = body.replace("[[GRID]]", text.replace("<", r"\u003c"))  # escape "<", since "</script>" would end the element
    target.write_text(page(title, body), encoding="utf-8", newline="\n")
    print(f"wrote {target}")
    return complete
