r"""Measure how far right layouts are apart in low precision: families x layouts x precisions x seeds.

    python -m verification.tolerances layouts [--seeds 3] [--steps 1 100] > benchmarks/logs/tolerances.jsonl
    python -m verification.tolerances layouts --seeds 1 --steps 100 --families Llama experts \
        --layouts "FSDP 2" "TP 2" "EP 2" --precisions float32 bfloat16 > benchmarks/logs/tolerances_100_steps.jsonl
    python -m verification.tolerances sizes [--seeds 3] >> benchmarks/logs/tolerances.jsonl
    python -m verification.tolerances experts >> benchmarks/logs/tolerances.jsonl
    python -m verification.tolerances table benchmarks/logs/tolerances.jsonl

`layouts` takes optimizer steps of a small model of two layers under a layout, in one process, and in one process in
float64. `distance` is that of the layout from one process in the same precision, `rounding` that of one process from
float64: the 2-norm of the difference of all gradients (all weights), over the norm of all gradients (all weights); for
the loss and the gradient norm the absolute difference over the value. Gradients are those before clipping.

`sizes` measures `rounding` alone, in one process, for one step of a Llama of other depths, widths and numbers of
tokens. `experts` compares the first loss of a mixture of experts with 8, 4 and 2 expert-parallel ranks and the same
weights and tokens.
"""

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.config import Config, Launch, check, load
from titanlite.tools.parity.process_pool import run_in_pool
from titanlite.tools.parity.reference import Trace, run_reference
from titanlite.tools.parity.shrink import adapt_to_cpu

CPU = torch.device("cpu")
MODEL = {"dim": 64, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "head_dim": 8, "ffn_dim": 192, "vocab_size": 512}
EXPERTS = {"moe.n_experts": 8, "moe.n_experts_per_token": 2, "moe.expert_dim": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"qk_norm": True},
    "experts": {"qk_norm": True, **EXPERTS},
}
LAYOUTS = {
    "FSDP 2": {"data_parallel_shard": 2},
    "TP 2": {"tensor_parallel": 2},
    "PP 2": {"pipeline_parallel": 2},
    "CP 2": {"context_parallel": 2},
    "FSDP 2 x TP 2": {"data_parallel_shard": 2, "tensor_parallel": 2},
    "EP 2": {"data_parallel_shard": 2, "expert_parallel": 2},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"training.mixed_precision_param": "bfloat16"},
    "float8": {"training.mixed_precision_param": "bfloat16", "float8.enable": True},
}
UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float8": 2.0**-4}
"""The largest relative error of rounding a number: half the distance between 1 and the next larger one."""
EXACT = {
    "training__dtype": "float64",
    "training__mixed_precision_param": "float64",
    "float8__enable": False,
}


def config_of(
    model: dict[str, Any], degrees: dict[str, int], options: dict[str, Any], *, seed: int, seq_len: int = 64
) -> Config:
    """Return the resolved config of a model under a layout: 8 sequences in each step."""
    n_ranks = math.prod(size for name, size in degrees.items() if name != "expert_parallel")
    data_ranks = degrees.get("data_parallel_shard", 1)
    values = {f"model.{key}": value for key, value in (MODEL | model).items()}
    values |= {f"parallelism.{key}_degree": size for key, size in degrees.items()}
    values |= {"training.local_batch_size": 8 // data_ranks, "training.global_batch_size": 8}
    values |= {"training.seq_len": seq_len, "training.steps": 100, "training.dtype": "float32", "debug.seed": seed}
    values |= {"optimizer.lr": 1e-3, "lr_scheduler.warmup_steps": 2, "training.mixed_precision_param": "float32"}
    values |= options
    arguments = [f"--{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in values.items()]
    loaded, launch = adapt_to_cpu(load(["debug", *arguments])), Launch(0, 0, n_ranks, n_ranks, n_devices=0)
    return check(dataclasses.replace(loaded, config=check(loaded, launch)), launch)


def relative(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Return the 2-norm of the differences of pairs of tensors over the norm of the second ones."""
    squares = sum((a.double() - b.double()).square().sum().item() for a, b in pairs)
    return math.sqrt(squares / sum(b.double().square().sum().item() for _, b in pairs))


def distances(trace: Trace, reference: Trace, step: int) -> dict[str, float]:
    """Return the relative distances of two traces in `step`, the last one."""
    groups = {
        "loss": [f"step {step} loss"],
        "gradient norm": [f"step {step} norm"],
        "gradients": [name for name in reference if name.startswith(f"step {step} gradient ")],
        "weights": [name for name in reference if name.startswith("final weight ")],
    }
    return {what: relative([(trace[each], reference[each]) for each in names]) for what, names in groups.items()}


def measure_layouts(
    seeds: int, all_steps: list[int], families: list[str], layouts: list[str], precisions: list[str]
) -> Iterator[dict[str, Any]]:
    for steps, family, precision in itertools.product(all_steps, families, precisions):
        for name in layouts:
            degrees = LAYOUTS[name]
            if "expert_parallel" in degrees and family != "experts":
                continue
            arguments = FAMILIES[family], degrees, PRECISIONS[precision]
            configs = [config_of(*arguments, seed=seed) for seed in range(seeds)]
            n_ranks = 4 if " x " in name else 2
            for seed, (config, trace) in enumerate(zip(configs, run_in_pool(configs, n_ranks, steps), strict=True)):
                if isinstance(trace, Exception):
                    raise trace
                one = run_reference(config, CPU, steps=steps)
                exact = run_reference(config.replace(**EXACT), CPU, steps=steps)
                yield {
                    "family": family,
                    "layout": name,
                    "precision": precision,
                    "steps": steps,
                    "seed": seed,
                    "distance": distances(trace, one, steps),
                    "rounding": distances(one, exact, steps),
                }


def measure_sizes(seeds: int) -> Iterator[dict[str, Any]]:
    plain = {"n_layers": 2, "dim": 64, "seq_len": 64}
    sizes = [plain | {"n_layers": n} for n in (1, 4, 16, 32)] + [plain | {"dim": n} for n in (32, 128, 256, 512)]
    sizes += [plain, *(plain | {"seq_len": n} for n in (16, 256))]
    for precision, size, seed in itertools.product(PRECISIONS, sizes, range(seeds)):
        heads = {"n_heads": size["dim"] // 8, "n_kv_heads": size["dim"] // 16, "ffn_dim": 3 * size["dim"]}
        model = {"dim": size["dim"], "n_layers": size["n_layers"], **heads}
        config = config_of(model, {}, PRECISIONS[precision], seed=seed, seq_len=size["seq_len"])
        one, exact = (run_reference(each, CPU, steps=1) for each in (config, config.replace(**EXACT)))
        yield {**size, "precision": precision, "seed": seed, "rounding": distances(one, exact, 1)}


def measure_experts() -> Iterator[dict[str, Any]]:
    """Yield the first loss of a mixture of experts whose vocabulary is Qwen3's, under expert parallel of any degree."""
    model = FAMILIES["experts"] | {"vocab_size": 151_936, "n_layers": 4}
    for precision, seed in itertools.product(("float32", "bfloat16"), range(2)):
        losses = {}
        for degree in (8, 4, 2):
            degrees = {"data_parallel_shard": 8, "expert_parallel": degree}
            config = config_of(model, degrees, PRECISIONS[precision], seed=seed, seq_len=16)
            (trace,) = run_in_pool([config], 8, 1)
            if isinstance(trace, Exception):
                raise trace
            losses[f"EP {degree}"] = trace["step 1 loss"].item()
        losses["one process"] = run_reference(config, CPU, steps=1)["step 1 loss"].item()
        losses["float64"] = run_reference(config.replace(**EXACT), CPU, steps=1)["step 1 loss"].item()
        yield {"precision": precision, "seed": seed, "losses": losses}


def median(rows: list[dict[str, Any]], kind: str, what: str) -> float:
    return statistics.median(row[kind][what] for row in rows)


def grouped(rows: list[dict[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Return the rows that have all keys, by the values of these keys."""
    groups = defaultdict(list)
    for row in rows:
        if row.keys() >= {*keys}:
            groups[tuple(row[key] for key in keys)].append(row)
    return groups


def table(path: Path) -> str:
    """Return the tables of a log: the largest of the layouts' medians over seeds; of sizes, the median in units of one
    rounding; of expert-parallel degrees, each loss."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    lines = ["| steps | precision | model | loss | gradient norm | gradients | weights |", "| --- " * 7 + "|"]
    for key, some in grouped(rows, "steps", "precision", "family").items():
        layouts = grouped(some, "layout").values()
        cells = [*map(str, key)]
        for what in ("loss", "gradient norm", "gradients", "weights"):
            farthest = max(median(each, "distance", what) for each in layouts)
            cells.append(f"{farthest:.1e} ({median(some, 'rounding', what):.1e})")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| precision | layers | width | tokens in a sequence | gradients |", "| --- " * 5 + "|"]
    for key, some in grouped(rows, "precision", "n_layers", "dim", "seq_len").items():
        lines.append(f"| {' | '.join(map(str, key))} | {median(some, 'rounding', 'gradients') / UNIT[key[0]]:.2g} |")
    experts = [row for row in rows if "losses" in row]
    for row in experts[:1]:
        lines += ["", f"| precision | seed | {' | '.join(row['losses'])} |", "| --- " * 7 + "|"]
    for row in experts:
        losses = " | ".join(f"{loss:.7f}" for loss in row["losses"].values())
        lines.append(f"| {row['precision']} | {row['seed']} | {losses} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["layouts", "sizes", "experts", "table"])
    parser.add_argument("log", type=Path, nargs="?")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 100])
    some = {"families": FAMILIES, "layouts": LAYOUTS, "precisions": PRECISIONS}
    for name, known in some.items():
        parser.add_argument(f"--{name}", nargs="+", choices=known, default=[*known], help="taken by layouts")
    arguments = parser.parse_args()
    if arguments.what == "table":
        print(table(arguments.log))
        return
    rows = {
        "layouts": lambda: measure_layouts(
            arguments.seeds, arguments.steps, *(getattr(arguments, name) for name in some)
        ),
        "sizes": lambda: measure_sizes(arguments.seeds),
        "experts": measure_experts,
    }
    for row in rows[arguments.what]():
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    sys.exit(main())
