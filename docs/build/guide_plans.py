"""Plan what docs/memory_tables.md and docs/scaling.md have tables of, into benchmarks/logs/guide_plans.jsonl.

    python -m docs.build.guide_plans [GROUP ...] [--again]      (default: all; half an hour on an idle core)

A plan that the log has is not computed again, unless its options have changed or --again is given. Each line of the log
is one plan: bytes by kind of memory, communication, seconds with their range. guide_tables.py writes the pages from it.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from titanlite.config import load
from titanlite.config.keys import AC_MODE as AC
from titanlite.config.keys import BATCH as LOCAL
from titanlite.config.keys import END_LAYERS, PIPELINE, REPLICATE, RESHARD, SCHEDULE, STAGES_PER_RANK, TENSOR
from titanlite.tools.plan.planner import make_plan
from titanlite.tools.plan.report import time_shares
from titanlite.tools.plan.result import Plan, RankPlan

ROOT = Path(__file__).resolve().parents[2]
LOG = ROOT / "benchmarks" / "logs" / "guide_plans.jsonl"
GROUPS = ("memory", "communication", "schedule", "saving", "tensor", "data", "cost")
Record = dict[str, Any]


class Case(NamedTuple):
    """A config and the options that are overridden."""

    config: str
    options: dict[str, Any]

    @property
    def arguments(self) -> list[str]:
        """The arguments of `titanlite plan`, as the log has them: when it was written, configs/ had every config."""
        options = {key: json.dumps(x) if isinstance(x, bool) else x for key, x in self.options.items()}
        return [f"configs/{self.config}.toml", *(f"--{key}={value}" for key, value in options.items())]


SHARD, REDUCE = "parallelism.data_parallel_shard_degree", "parallelism.fsdp_reduce_gradients"
GLOBAL, SELECTIVE = "training.global_batch_size", "activation_checkpoint.selective_ac_option"
LAST = {REDUCE: "last_accumulation_step"}
MODES: dict[str, dict[str, str]] = {
    "data parallel": LAST,
    "ZeRO-1": {RESHARD: "never", **LAST},
    "ZeRO-2": {RESHARD: "never"},
    "ZeRO-3": {RESHARD: "always"},
}
BFLOAT16_WEIGHTS = {"training.dtype": "bfloat16", "optimizer.stochastic_rounding": True}
REDUCED_IN_BFLOAT16 = {"training.mixed_precision_reduce": "bfloat16"}
MODELS: dict[str, Case] = {
    "7B": Case("llama2_7b", {}),
    "70B": Case("llama3_8b", {"model.flavor": "llama3_70b"}),
}
DEVICES = (4, 8, 64)
FULL_AC = "ZeRO-3, full AC"


def of_mode(model: str, mode: str, n: int, steps: int, **more: Any) -> Case:
    """Return the case of a model under a mode of data parallel on n devices, with some gradient accumulation steps of
    one sequence."""
    degrees = {REPLICATE: n, SHARD: 1} if mode == "data parallel" else {REPLICATE: 1, SHARD: n}
    config, options = MODELS[model]
    return Case(config, {**options, **degrees, **MODES[mode], LOCAL: 1, GLOBAL: n * steps, **more})


def memory_cases() -> dict[str, Case]:
    """Return the cases of memory by mode and number of devices, and those with the guides' data types."""
    cases = {}
    for model in MODELS:
        cases[f"{model}, one device"] = of_mode(model, "data parallel", 1, 4)
        for mode in MODES:
            for n in DEVICES if mode != "data parallel" else (8,):
                cases[f"{model}, {mode}, {n}"] = of_mode(model, mode, n, 4)
        for n in DEVICES:
            cases[f"{model}, {FULL_AC}, {n}"] = of_mode(model, "ZeRO-3", n, 4, **{AC: "full"})
    guide = {**BFLOAT16_WEIGHTS, "optimizer.state_dtype": "float32", **REDUCED_IN_BFLOAT16}
    cases |= {f"7B, 12 bytes, {mode}, 4": of_mode("7B", mode, 4, 4, **guide) for mode in MODES}
    eight_bit = {**BFLOAT16_WEIGHTS, "optimizer.state_dtype": "int8", AC: "full", "training.seq_len": 4096}
    cases["70B, 8 A100, 8-bit"] = of_mode("70B", "ZeRO-3", 8, 4, **eight_bit, **{"plan.device": "a100_80"})
    return cases


SENT = (("bfloat16", 1), ("float32", 1), ("float32", 4))
"""Data types of the reduction, and gradient accumulation steps."""


def name_of_sent(mode: str, dtype: str, steps: int) -> str:
    """Return the name in the log of the plan whose communication is shown. Those of 4 accumulation steps in float32
    are among the cases of memory."""
    own = f"communication: 7B, {mode}, {dtype}, {steps} steps"
    return f"memory: 7B, {mode}, 8" if (dtype, steps) == ("float32", 4) else own


def communication_cases() -> dict[str, Case]:
    """Return the cases of the bytes that each mode sends, by data type of the reduction and accumulation steps."""
    cases = {
        name_of_sent(mode, dtype, steps): of_mode("7B", mode, 8, steps, **{"training.mixed_precision_reduce": dtype})
        for mode in MODES
        for dtype, steps in SENT
    }
    return {
        name.removeprefix("communication: "): case for name, case in cases.items() if name.startswith("communication: ")
    }


SCHEDULES = {
    **{"GPipe": 1, "1F1B": 1, "LoopedBFS": 2, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2},
    **{"ZBVZeroBubble": 2, "DualPipeV": 2},
}
"""Pipeline schedules and their stages per rank."""
BUBBLES = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
MICROBATCHES = (4, 8, 16, 32, 64)


EQUAL_STAGES = {"model.n_layers": 28, **dict(zip(END_LAYERS, (0, 4), strict=True))}
"""The output head and the loss of 8B take about as long as 4 layers: so the last of 4 stages has 4 of 28 layers, the
others 8."""


def schedule_cases() -> dict[str, Case]:
    """Return the cases of pipeline schedules, of 8B over 4 stages, eager and without AC, as a split backward needs."""
    options = {PIPELINE: 4, SHARD: 1, "training.seq_len": 4096, AC: "none", "compile.enable": False}
    cases = {}
    for schedule, stages in SCHEDULES.items():
        for n in MICROBATCHES if schedule in BUBBLES else (16,):
            more = {SCHEDULE: schedule, STAGES_PER_RANK: stages, LOCAL: n, GLOBAL: n}
            cases[f"{schedule}, {n} microbatches"] = Case("llama3_8b", {**options, **more, **EQUAL_STAGES})
            if schedule == "1F1B":
                cases[f"{schedule}, unequal stages, {n} microbatches"] = Case("llama3_8b", {**options, **more})
    return cases


STATES = "optimizer.state_dtype"
SAVINGS: dict[str, dict[str, Any]] = {
    "as the config is": {},
    "no AC": {AC: "none"},
    "selective AC, every second matrix product": {SELECTIVE: "every_second_mm"},
    "selective AC, attention": {SELECTIVE: "attention"},
    "full AC": {AC: "full"},
    "unchunked cross-entropy": {"training.loss_chunks": 1},
    "eager, no torch.compile": {"compile.enable": False},
    "bfloat16 optimizer states": {STATES: "bfloat16"},
    "8-bit optimizer states": {STATES: "int8"},
    "4-bit optimizer states": {STATES: "int4"},
    "bfloat16 weights, stochastic rounding": BFLOAT16_WEIGHTS,
    "bfloat16 weights, 8-bit optimizer states": {**BFLOAT16_WEIGHTS, STATES: "int8"},
    "optimizer states in host memory": {"optimizer.enable_cpu_offload": True},
    "CPU offload": {"training.enable_cpu_offload": True},
    "ZeRO-2: weights stay gathered": {RESHARD: "never"},
    "float8, tensorwise": {"float8.enable": True, "float8.enable_fsdp_float8_all_gather": True},
}
"""Options of configs/llama3_8b.toml, each changed alone."""
TENSOR_DEGREES = (1, 2, 4, 8, 16)
TENSOR_STEPS = 8
"""Gradient accumulation steps, so that the update is a small part of a step."""
TENSOR_MODELS = {"8B": "llama3_8b", "70B": "llama3_70b"}


def tensor_cases() -> dict[str, Case]:
    """Return the cases of tensor parallel alone, with one sequence of 8,192 tokens per device. Degree 16 needs 16 KV
    heads, and all have them."""
    return {
        f"{size}, tp {n}": Case(
            "llama3_8b",
            {"model.flavor": flavor, "model.n_kv_heads": 16, TENSOR: n, SHARD: 1, LOCAL: n, GLOBAL: TENSOR_STEPS * n},
        )
        for size, flavor in TENSOR_MODELS.items()
        for n in TENSOR_DEGREES
    }


DATA_DEVICES = (8, 64, 512, 4096, 16384)
REPLICAS = {"FSDP": 0, "HSDP within 8": 8, "HSDP within 64": 64}
"""Ranks that weights are sharded over; 0: all."""
BATCHES = {"2 x 8,192 tokens": (2, 8192), "4,096 tokens": (1, 4096)}
"""Tokens per device and step."""
BATCH_DEVICES = {"2 x 8,192 tokens": (1, *DATA_DEVICES), "4,096 tokens": DATA_DEVICES}


def data_cases() -> dict[str, Case]:
    """Return the cases of FSDP and HSDP of 8B, with a constant per-device batch and no gradient accumulation."""
    cases = {}
    for batch, (local, seq_len) in BATCHES.items():
        options = {LOCAL: local, "training.seq_len": seq_len, "training.streaming": False}
        for name, shards in REPLICAS.items():
            for n in (n for n in BATCH_DEVICES[batch] if n > shards):
                degrees = {SHARD: shards or n, REPLICATE: n // (shards or n), GLOBAL: local * n}
                cases[f"{batch}, {name}, {n}"] = Case("llama3_8b", {**options, **degrees})
    for shards, local in ((64, 32), (128, 16)):  # the layouts of arXiv:2407.21783, table 4
        options = {SHARD: shards, LOCAL: local, GLOBAL: 2048, "parallelism.enable_async_tensor_parallel": False}
        cases[f"405B, tp 8 x pp 16, {shards * 128}"] = Case("405b", options)
    return cases


ATTENTION = {AC: "selective", SELECTIVE: "attention"}
FLOAT8 = SAVINGS["float8, tensorwise"]
CANDIDATES: dict[str, dict[str, Any]] = {
    "no AC, batch 2": {LOCAL: 2, AC: "none"},
    "selective AC, batch 1": {LOCAL: 1},
    "selective AC, batch 2": {LOCAL: 2},
    "selective AC, batch 4": {LOCAL: 4},
    "attention saved, batch 2": {LOCAL: 2, **ATTENTION},
    "attention saved, batch 4": {LOCAL: 4, **ATTENTION},
    "full AC, batch 4": {LOCAL: 4, AC: "full"},
}
OF_80_GB, OF_178_GIB = (
    ("attention saved, batch 2", "full AC, batch 4"),
    ("selective AC, batch 1", "attention saved, batch 4"),
)
COST_MODELS: dict[str, tuple[str, int, int, dict[str, tuple[str, ...]]]] = {
    "8B": (
        *("llama3_8b", 8, 64),
        {
            "a100_80": ("selective AC, batch 2",),
            "h100": ("selective AC, batch 2",),
            "b200": ("no AC, batch 2", "selective AC, batch 4"),
        },
    ),
    "70B": ("llama3_70b", 64, 256, {"a100_80": OF_80_GB, "h100": OF_80_GB, "b200": OF_178_GIB}),
}
"""Flavor, devices, global batch, and the candidates of each device, of which the fastest that fits stands in the
table."""
LLAMA_2 = {"training.seq_len": 4096, "plan.device": "a100_80", LOCAL: 2}
META: dict[str, Case] = {
    "Llama 2 7B": Case("llama2_7b", {**LLAMA_2, SHARD: 8, GLOBAL: 64}),
    "Llama 2 70B": Case(
        "llama3_8b",
        {"model.flavor": "llama3_70b", "model.vocab_size": 32000, **LLAMA_2, **ATTENTION, SHARD: 64, GLOBAL: 256},
    ),
}
"""Models whose device-hours on A100 are published."""


def cost_cases() -> dict[str, Case]:
    """Return the cases of what a run costs: 8B on 8 devices and 70B on 64, FSDP."""
    cases = {}
    for size, (flavor, n, batch, candidates) in COST_MODELS.items():
        for device, names in candidates.items():
            for dtype, more in {"bf16": {}, "float8": FLOAT8}.items():
                options = {"model.flavor": flavor, SHARD: n, GLOBAL: batch, "plan.device": device, **more}
                if dtype == "bf16" or device != "a100_80":
                    for name in names:
                        case = Case("llama3_8b", {**options, **CANDIDATES[name]})
                        cases[f"{size}, {device}, {dtype}, {name}"] = case
    return cases | META


def all_cases() -> dict[str, Case]:
    """Return all cases by group and name."""
    groups = (
        memory_cases(),
        communication_cases(),
        schedule_cases(),
        {name: Case("llama3_8b", options) for name, options in SAVINGS.items()},
        tensor_cases(),
        data_cases(),
        cost_cases(),
    )
    return {
        f"{group}: {name}": case for group, cases in zip(GROUPS, groups, strict=True) for name, case in cases.items()
    }


def most_of_each_kind(rank: RankPlan) -> dict[str, int]:
    """Return the most bytes of each kind at any moment of a step. The moments differ, so their sum is above the
    peak."""
    return {kind: max(point.bytes[kind] for point in rank.points) for kind in rank.peak.bytes}


def record_of(plan: Plan) -> Record:
    """Return what the tables need of a plan."""
    worst = plan.worst
    return {
        "world_size": plan.world_size,
        "device": plan.config.plan.device,
        "parameters": plan.n_parameters,
        "device_memory": plan.device.memory,
        "watts": plan.device.watts,
        "at_peak": worst.peak.bytes,
        "most": most_of_each_kind(worst),
        "activations_by_rank": [most_of_each_kind(rank)["activations"] for rank in plan.ranks],
        "total": worst.total,
        "totals": [rank.total for rank in plan.ranks],
        "offloaded": worst.offloaded,
        "communication": [[axis, name, *counted] for (axis, name), counted in plan.cost.communication.items()],
        "ranks_of_axis": {axis: plan.axis_size(axis)[0] for axis, _ in plan.cost.communication},
        "shares": time_shares(plan),
        "tokens_per_step": plan.config.tokens_per_step,
        "step_seconds": plan.step_seconds,
        "spread": plan.spread,
        "mfu": plan.mfu,
        "bubble": plan.pipeline_bubble,
    }


def read_log() -> dict[str, Record]:
    """Return the records of the log by name."""
    records = [json.loads(line) for line in LOG.read_text().splitlines()] if LOG.exists() else []
    return {record["name"]: record for record in records}


def rounded(value: Any) -> Any:
    """Return a value with its numbers rounded to six digits, for a log that can be read."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(x) for key, x in value.items()}
    return [rounded(x) for x in value] if isinstance(value, list | tuple) else value


def planned(name: str, case: Case) -> Record:
    """Plan a case and return its line of the log."""
    record = record_of(make_plan(load([case.config, *case.arguments[1:]])))
    return {"name": name, "arguments": case.arguments, **rounded(record)}


def write_log(records: dict[str, Record], names: Iterable[str]) -> None:
    """Write the log in the order of the cases."""
    LOG.write_text("".join(json.dumps(records[name]) + "\n" for name in names if name in records))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"any of {', '.join(GROUPS)}; default: all")
    parser.add_argument("--again", action="store_true", help="plan what the log has too")
    arguments = parser.parse_args()
    groups = arguments.groups or list(GROUPS)
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"unknown group: {', '.join(sorted(unknown))}")
    cases, records = all_cases(), read_log()
    for name, case in cases.items():
        is_known = name in records and records[name]["arguments"] == case.arguments
        if name.partition(":")[0] not in groups or (is_known and not arguments.again):
            continue
        records[name] = planned(name, case)
        print(f"{name}: {records[name]['step_seconds']} s, {records[name]['total'] / 2**30:.1f} GiB", flush=True)
        write_log(records, cases)
    write_log(records, cases)


if __name__ == "__main__":
    sys.exit(main())
