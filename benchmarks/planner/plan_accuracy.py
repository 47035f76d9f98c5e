"""Measure how accurate plans are: memory against real runs on this machine, memory and speed against published runs.

    python -m benchmarks.planner.plan_accuracy [layouts] [experts] [published] [mixtures] [2026] [bubbles] [cost]

layouts: memory on a CPU. Real ranks over gloo take three training steps of a small model under each layout. The third
step's peak is the memory of all tensors before it plus the growth of the process at its peak (resident_memory.py). The
plan is of the same config. Both are of the rank that needs the most. They share nothing else.

experts: the same, of models with experts. Their routers choose experts in turn, as the plan assumes, or the first ones.

published: throughput and memory that others reported (published_runs.toml), each with the plan of the same model,
degrees, batch, precision and kind of device, and the range of its speed. Where their memory is what the allocator
reserved, the plan adds fragmentation, but not the CUDA context; where it is what was allocated, nothing. Memory is not
scored where a row says what of its kind is not known (SCORED_MEMORY). A row of [[oom]] must not fit.

mixtures: the same, of mixtures of experts (published_moe_runs.toml), with three bounds on what another program may gain
(moe_bounds.py). published_page.py writes their table in NOTEBOOK.md from the log.

2026: the same, of published_runs_2026.toml, in which no plan was ever compared before its first log. --resume LOG takes
the lines of published runs from an earlier log that was not finished, and plans the others.

bubbles: the schedules of pipeline_bubble.py, simulated and measured. cost: what two plans cost to compute.

Prints JSON lines, then a table for each of the seven. The bound for memory on a CPU is 3 %.
"""

import argparse
import contextlib
import functools
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.memory.resident_memory import map_each_tensor, reset_peak, resident_bytes
from benchmarks.planner import moe_bounds, pipeline_bubble
from titanlite.config import Config, Launch, check, load
from titanlite.config.loader import read_toml
from titanlite.launch.process_group import device_of
from titanlite.techniques.moe.router import Router
from titanlite.tools.parity.process_pool import ProcessPool
from titanlite.tools.parity.training_run import TrainingRun
from titanlite.tools.plan.planner import FRAGMENTATION, make_plan

HERE = Path(__file__).resolve().parent
DEBUG = HERE.parents[1] / "configs" / "debug.toml"
MODEL = {
    "model.dim": 256,
    "model.n_layers": 8,
    "model.vocab_size": 2048,
    "training.seq_len": 512,
    "training.local_batch_size": 4,
    "plan.device": "cpu",
}
PIPELINE = {"parallelism.pipeline_parallel_degree": 2, "training.local_batch_size": 8}
EVERY_SECOND_MM = {
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "every_second_mm",
}
FULL = {"activation_checkpoint.mode": "full"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "accumulation": (1, {"training.global_batch_size": 16}),
    "full AC": (1, {"activation_checkpoint.mode": "full"}),
    "selective AC op": (1, {"activation_checkpoint.mode": "selective"}),
    "selective AC every_second_mm": (1, dict(EVERY_SECOND_MM)),
    "selective AC every 2": (
        1,
        {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": 2},
    ),
    "8 cross-entropy chunks": (1, {"training.loss_chunks": 8}),
    "bfloat16": (1, {"training.mixed_precision_param": "bfloat16"}),
    "bfloat16 states": (1, {"optimizer.state_dtype": "bfloat16", "optimizer.implementation": "fused"}),
    "shard 2": (2, {"parallelism.data_parallel_shard_degree": 2}),
    "shard 4": (4, {"parallelism.data_parallel_shard_degree": 4}),
    "shard 4, ZeRO-2": (
        4,
        {"parallelism.data_parallel_shard_degree": 4, "parallelism.fsdp_reshard_after_forward": "never"},
    ),
    "replicate 2": (2, {"parallelism.data_parallel_replicate_degree": 2, "parallelism.data_parallel_shard_degree": 1}),
    "hybrid 2 x 2": (4, {"parallelism.data_parallel_replicate_degree": 2}),
    "tensor 2": (2, {"parallelism.tensor_parallel_degree": 2}),
    "tensor 2 x shard 2": (4, {"parallelism.tensor_parallel_degree": 2}),
    "ring 2": (2, {"parallelism.context_parallel_degree": 2}),
    "ulysses 2": (
        2,
        {"parallelism.context_parallel_degree": 2, "parallelism.context_parallel_ulysses_degree": 2},
    ),
    "GPipe 2": (2, {**PIPELINE, "parallelism.pipeline_parallel_schedule": "GPipe"}),
    "1F1B 2": (2, PIPELINE),
    "interleaved 2": (2, {**PIPELINE, "parallelism.pipeline_parallel_schedule": "Interleaved1F1B"}),
    "zero-bubble 2": (2, {**PIPELINE, "parallelism.pipeline_parallel_schedule": "InterleavedZeroBubble"}),
    "ZBV 2": (2, {**PIPELINE, "parallelism.pipeline_parallel_schedule": "ZBVZeroBubble"}),
    "1F1B 2 x tensor 2": (4, {**PIPELINE, "parallelism.tensor_parallel_degree": 2}),
    "float8, shard 2": (2, {"float8.enable": "true", "float8.emulate": "true"}),
}
EXPERTS = {
    "model.moe.n_experts": 8,
    "model.moe.n_experts_per_token": 2,
    "model.moe.expert_dim": 256,
    "model.moe.n_shared_experts": 1,
    "model.moe.n_first_dense_layers": 1,
}
SHARD_2, EP_2 = {"parallelism.data_parallel_shard_degree": 2}, {"parallelism.expert_parallel_degree": 2}
LAYOUTS_WITH_EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    name: (ranks, EXPERTS | changes)
    for name, (ranks, changes) in {
        "one rank": (1, {}),
        "bfloat16": (1, {"training.mixed_precision_param": "bfloat16"}),
        "float64, one by one": (1, {"training.dtype": "float64"}),
        "full AC": (1, FULL),
        "selective AC op": (1, {"activation_checkpoint.mode": "selective"}),
        "shard 2": (2, SHARD_2),
        "shard 2, ep 2": (2, SHARD_2 | EP_2),
        "shard 2, ep 2, bfloat16": (2, SHARD_2 | EP_2 | {"training.mixed_precision_param": "bfloat16"}),
        "shard 2, ep 2, full AC": (2, SHARD_2 | EP_2 | FULL),
        "tensor 2": (2, {"parallelism.tensor_parallel_degree": 2}),
        "tensor 2, ep 2": (2, {"parallelism.tensor_parallel_degree": 2} | EP_2),
        "shard 2, ep 2, all tokens to one rank": (2, SHARD_2 | EP_2 | {"plan.expert_imbalance": 2}),
        "shard 4, ep 2": (4, {"parallelism.data_parallel_shard_degree": 4} | EP_2),
        "1F1B 2": (2, PIPELINE),
        "1F1B 2 x shard 2, ep 2": (4, PIPELINE | SHARD_2 | EP_2),
    }.items()
}
ALLOWED = 0.03

PUBLISHED, PUBLISHED_MIXTURES = HERE / "published_runs.toml", HERE / "published_moe_runs.toml"
PUBLISHED_2026 = HERE / "published_runs_2026.toml"
SCORED_MEMORY = "max allocated", "max reserved", "allocated"
"""How the kind of a memory that is scored begins. Unknown kinds, and nvidia-smi's, are printed and not scored."""
FINISHED: dict[str, dict[str, Any]] = {}
"""By name: the results of published runs that an earlier log has."""


def config_of(options: dict[str, Any], ranks: int) -> tuple[Any, Config, Launch]:
    """Return the config as loaded and as resolved for some ranks, and their launch."""
    loaded = load([str(DEBUG), *(f"--{key}={value}" for key, value in options.items())])
    launch = Launch(0, 0, ranks, ranks, 0)
    return loaded, check(loaded, launch), launch


def measure(options: dict[str, Any]) -> int:
    """Return the peak bytes of this rank's third step. Every rank must call it."""
    launch = Launch.from_environment(0)
    _, config, _ = config_of(options, launch.world_size)
    Router.choose = choose_in_turn if config.plan.expert_imbalance == 1 else choose_the_first
    run = TrainingRun(config, device_of(launch))
    batches = [run.loader.next() for _ in range(3)]
    run.loader.close()  # its thread must not create objects while they are counted
    for batch in batches:
        gc.collect()
        persistent, before = tensor_bytes(), resident_bytes("VmRSS")
        reset_peak()
        run.step(batch)
        peak = persistent + resident_bytes("VmHWM") - before
    dist.barrier()
    return peak


def choose_in_turn(router: Router, scores: Tensor) -> Tensor:
    """Return the experts of each token so that all have the same load."""
    n_tokens, n_chosen = len(scores), router.moe.n_experts_per_token
    return torch.arange(n_tokens * n_chosen).remainder(router.n_experts).view(n_tokens, n_chosen)


def choose_the_first(router: Router, scores: Tensor) -> Tensor:
    """Return the first experts for each token, all of which are on one rank."""
    return torch.arange(router.moe.n_experts_per_token).expand(len(scores), -1)


def tensor_bytes() -> int:
    """Return the bytes of all tensors that Python's garbage collector knows of."""
    storages = {}
    for value in gc.get_objects():
        if type(value) in (Tensor, nn.Parameter):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def compare_with_real_runs(layouts: dict[str, tuple[int, dict[str, Any]]]) -> list[str]:
    """Return the lines of the table."""
    lines, pools, width = [], {}, max(map(len, layouts))
    for name, (ranks, changes) in layouts.items():
        options = MODEL | changes
        if ranks not in pools:
            pools[ranks] = ProcessPool(ranks, timeout_seconds=300)
        measured = max(pools[ranks].run(measure, options=options))
        planned = make_plan(config_of(options, ranks)[0], world_size=ranks).worst.peak.total
        off = planned / measured - 1
        print(json.dumps({"layout": name, "ranks": ranks, "measured": measured, "planned": planned}), flush=True)
        verdict = "" if abs(off) <= ALLOWED else f"   more than {ALLOWED:.0%}"
        lines.append(f"{name:{width}} {ranks:5} {measured / 2**20:10.1f} {planned / 2**20:10.1f} {off:+8.1%}{verdict}")
    for pool in pools.values():
        pool.close()
    return [f"{'peak memory, MiB':{width}} {'ranks':>5} {'measured':>10} {'planned':>10}", *lines]


def compare_with_published_runs(path: Path) -> list[str]:
    """Return the lines of the table, and how far the plans are off in total."""
    table = read_toml(str(path))
    width = max(len(run["name"]) for run in table["run"])
    head = f"{'tokens/s':>9} {'planned':>9} {'off':>7} {'from':>6} {'to':>6} {'GiB':>7} {'planned':>7} {'off':>7}"
    lines, speeds, memories, widths, in_range = [f"{'':{width}} {'device':14} {'devices':>7} {head}"], [], [], [], 0
    for run in sorted(table["run"], key=lambda run: (run["device"], run["framework"], run["name"])):
        result = FINISHED.get(run["name"]) or plan_of_published_run(run, with_bounds=path == PUBLISHED_MIXTURES)
        print(json.dumps(result), flush=True)
        published, (slowest, fastest), memory = result["tokens/s"], result["range"], result["GiB"]
        speeds.append(result["planned"] / published - 1)
        widths.append(fastest / slowest)
        in_range += slowest <= published <= fastest
        cells = f"{published:9,.0f} {result['planned']:9,.0f} {speeds[-1]:+7.1%} "
        cells += f"{slowest / published - 1:+6.0%} {fastest / published - 1:+6.0%} "
        if memory:
            off, scored = result["planned GiB"] / memory - 1, run["memory_kind"].startswith(SCORED_MEMORY)
            memories += [off] if scored and not run.get("memory_unknown") else []
            cells += f"{memory:7.1f} {result['planned GiB']:7.1f} {off:+7.1%}{'' if scored else ' not scored'}"
        device = Path(run["device"]).stem
        lines.append(f"{run['name']:{width}} {device:14} {run['devices']:7,} {cells}".rstrip())
    for run in table.get("oom", []):
        plan = make_plan(load(arguments_of(run)), world_size=run["devices"])
        fits = plan.worst.total <= plan.device.memory
        lines.append(f"{run['name']:{width}} did not fit; planned {plan.worst.total / 2**30:.1f} GiB: {fits=}")
    lines += ["", summary("speed", speeds), f"the published speed is in the range of {in_range} of {len(speeds)}"]
    lines.append(f"highest over lowest speed of a range: median {statistics.median(widths):.2f}")
    return [*lines, *([summary("memory", memories)] if memories else [])]


def plan_of_published_run(run: dict[str, Any], *, with_bounds: bool) -> dict[str, Any]:
    """Return the speed and the memory of a published run and of its plan."""
    loaded, devices = load(arguments_of(run)), run["devices"]
    plan, bounds = (
        moe_bounds.plan_with_bounds(loaded, devices) if with_bounds else (make_plan(loaded, world_size=devices), {})
    )
    planned, fragmentation = plan.tokens_per_second, 0 if "allocated" in run["memory_kind"] else FRAGMENTATION
    slowest, fastest = (planned * plan.step_seconds / seconds for seconds in reversed(plan.step_range))
    result = {
        "name": run["name"],
        "tokens/s": run["tokens_per_second"],
        "planned": planned,
        "range": [slowest, fastest],
    }
    planned_memory = plan.worst.peak.total * (1 + fragmentation) / 2**30
    return result | {"GiB": run["memory_gib"], "planned GiB": planned_memory} | bounds


def arguments_of(run: dict[str, Any]) -> list[str]:
    """Return the arguments of `titanlite plan` for a published run."""
    device = str(HERE / run["device"]) if run["device"].endswith(".toml") else run["device"]
    options = run["options"] | {"plan.device": device, "plan.devices_per_node": run["devices_per_node"]}
    options |= {"training.dataset": "pydoc_topics"}
    return [str(DEBUG), *(f"--{key}={v if isinstance(v, str) else json.dumps(v)}" for key, v in options.items())]


def summary(name: str, errors: list[float]) -> str:
    """Return the median error and how many are within 10 and 25 %."""
    sizes = [abs(error) for error in errors]
    within = ", ".join(f"{sum(x <= bound for x in sizes)} within {bound:.0%}" for bound in (0.1, 0.25))
    return f"{name}: {len(errors)} runs, median error {statistics.median(sizes):.1%}, {within}"


def compare_with_measured_bubbles() -> list[str]:
    """Return the lines of pipeline_bubble.py's table: pipeline bubbles by the formula, simulated, and measured."""
    lines, sleeps = [pipeline_bubble.HEAD], pipeline_bubble.Sleeps(0.04, 0.04, 0.04)
    for n_ranks in (2, 4):
        pool = ProcessPool(n_ranks, timeout_seconds=600)
        lines += [pipeline_bubble.compare(pool, schedule, 8, sleeps, steps=3) for schedule in pipeline_bubble.SCHEDULES]
        pool.close()
    return lines


def measure_planning() -> list[str]:
    """Return the lines of a table of what plans cost to compute: seconds, and peak memory of all processes."""
    lines = [f"{'plan':24} {'devices':>8} {'seconds':>8} {'GiB':>6}"]
    for name, devices in (("70b", 64), ("405b", 16384)):
        begin, most = time.monotonic(), 0
        command = [sys.executable, "-m", "titanlite", "plan", name]
        process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=HERE.parents[1])
        while process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                tree = [process, *process.children(recursive=True)]
                most = max(most, sum(member.memory_info().rss for member in tree))
            time.sleep(0.2)
        result = {"plan": name, "devices": devices, "seconds": time.monotonic() - begin, "GiB": most / 2**30}
        print(json.dumps(result), flush=True)
        lines.append(f"{name:24} {devices:8,} {result['seconds']:8.1f} {result['GiB']:6.2f}")
    return lines


TABLES = {
    "layouts": functools.partial(compare_with_real_runs, LAYOUTS),
    "experts": functools.partial(compare_with_real_runs, LAYOUTS_WITH_EXPERTS),
    "published": functools.partial(compare_with_published_runs, PUBLISHED),
    "mixtures": functools.partial(compare_with_published_runs, PUBLISHED_MIXTURES),
    "2026": functools.partial(compare_with_published_runs, PUBLISHED_2026),
    "bubbles": compare_with_measured_bubbles,
    "cost": measure_planning,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"any of {', '.join(TABLES)}; default: all")
    parser.add_argument(
        "--resume", metavar="LOG", type=Path, help="an earlier log, whose published runs are not planned"
    )
    arguments = parser.parse_args()
    tables = arguments.tables or list(TABLES)
    if arguments.resume:
        lines = [json.loads(line) for line in arguments.resume.read_text().splitlines() if line.startswith('{"name"')]
        FINISHED.update({line["name"]: line for line in lines})
    if unknown := set(tables) - set(TABLES):
        parser.error(f"unknown table: {', '.join(sorted(unknown))}")
    map_each_tensor()
    print(f"torch {torch.__version__}, {platform.machine()}; {json.dumps(MODEL)}", flush=True)
    for table in tables:
        print("\n".join([*TABLES[table](), ""]), flush=True)


if __name__ == "__main__":
    main()
