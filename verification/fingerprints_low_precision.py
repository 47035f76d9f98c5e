"""Measure how far right layouts are apart in each precision, and which wrong tensors `titanlite diff` names.

    python -m verification.fingerprints_low_precision [--only "tensorwise;int8"] [--steps 20] [--folder RUNS]

Each precision trains a small Llama on random tokens, in one process and under five layouts. The learning rate is large,
so the runs leave each other within the steps. For each precision it prints, over all steps and layouts:

- how many tensors differ (none should), and in which step the first is too coarse to compare;
- by phase, the largest distance over that of the inputs, and over one rounding where the inputs are nearer than half of
  one; of small gradients, both relative to the largest one of their block;
- the largest factor of a tensor that is nearly a multiple of the other, over the distance of the inputs;
- of the first step, what is said if one tensor is doubled, halved, zero, negative, or has nothing in common with it.
"""

import argparse
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.parallel.test_parity import resolve
from tests.tools.diff.runs import run
from titanlite.techniques.fingerprints import file
from titanlite.techniques.fingerprints.sketch import N_PRODUCTS, distance
from titanlite.tools.diff import compare
from titanlite.tools.diff.computation import GRADIENT_NORM, inputs_of_entries, module_of
from titanlite.tools.parity.process_pool import ProcessPool

BASE: dict[str, Any] = {
    **{"debug__fingerprint_freq": 1, "training__dtype": "float32", "optimizer__lr": 2e-3},
    **{"training__seq_len": 64, "training__global_batch_size": 8, "training__local_batch_size": 4},
    **{"model__dim": 128, "model__n_layers": 4, "model__n_heads": 8, "model__n_kv_heads": 4},
    **{"model__ffn_dim": 192, "model__vocab_size": 272},
}
LOW = {"training__mixed_precision_param": "bfloat16"}
FLOAT8 = LOW | {"float8__enable": True, "float8__emulate": True}
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": LOW,
    "tensorwise": FLOAT8,
    "rowwise": FLOAT8 | {"float8__recipe": "rowwise"},
    "rowwise_with_gw_hp": FLOAT8 | {"float8__recipe": "rowwise_with_gw_hp"},
    "mxfp8": FLOAT8 | {"float8__recipe": "mxfp8"},
    "int8": LOW | {"int8__enable": True},
}
ONE = "one process"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    ONE: (1, {"training__local_batch_size": 8}),
    "4 accumulation steps": (1, {"training__local_batch_size": 2}),
    "FSDP 2": (2, {"data_parallel_shard_degree": 2}),
    "tp 2": (2, {"tensor_parallel_degree": 2}),
    "cp 2": (2, {"context_parallel_degree": 2}),
    "pp 2": (2, {"pipeline_parallel_degree": 2}),
}
SCALED: dict[str, Callable[[Tensor], Tensor]] = {
    "doubled": lambda own: own * torch.tensor([4.0] + [2.0] * N_PRODUCTS),
    "halved": lambda own: own * torch.tensor([0.25] + [0.5] * N_PRODUCTS),
    "zero": lambda own: 0 * own,
    "negative": lambda own: own * torch.tensor([1.0] + [-1.0] * N_PRODUCTS),
    "foreign": lambda own: torch.cat([own[:1], own[:1].sqrt() * torch.randn(N_PRODUCTS, dtype=torch.float64)]),
}


def train(folder: Path, precisions: Iterable[str], steps: int) -> None:
    """Take the steps of each precision under each layout, unless their folder is there."""
    pools = {n: ProcessPool(n, timeout_seconds=100) for n in (1, 2)}
    for precision in precisions:
        for layout, (n_ranks, options) in LAYOUTS.items():
            own = folder / precision / layout
            if not own.is_dir():
                own.mkdir(parents=True)
                job = resolve(own, n_ranks, BASE | PRECISIONS[precision] | options | {"job__dump_folder": own})
                pools[n_ranks].run(run, job=job, steps=steps)
    for pool in pools.values():
        pool.close()


def growth(a: Path, b: Path, largest: dict[str, tuple[float, str]]) -> None:
    """Note the largest growth by kind, and where it is."""
    for step in sorted({*file.steps_of(a)} & {*file.steps_of(b)}):
        (described, in_a), (_, in_b) = file.read(a, step), file.read(b, step)
        rounding = compare.ROUNDING[described.compute_dtype]
        inputs = inputs_of_entries(in_a.keys() & in_b.keys())
        far = {name: distance(in_a[name], in_b[name]) for name in inputs if name != GRADIENT_NORM}
        of_module: dict[str, float] = defaultdict(float)
        for name in far:
            if name.startswith("gradient "):
                module = module_of(name.removeprefix("gradient "))
                of_module[module] = max(of_module[module], in_a[name][0].item() ** 0.5)
        for name, own in inputs.items():
            phase, _, tensor = name.partition(" ")
            if phase not in ("forward", "backward", "gradient") or name == GRADIENT_NORM:
                continue
            explained = max([far[each] for each in own if each in far], default=0.0)
            scale = of_module[module_of(tensor)] / in_a[name][0].item() ** 0.5 if phase == "gradient" else 1.0
            ratio = compare.constant_ratio(in_a[name], in_b[name], tolerance=1.0)
            factor = abs(ratio - 1) / max(ratio, 1)
            kinds = {f"{phase} over inputs": far[name] / scale / max(explained, rounding / 2)}
            if explained <= rounding / 2:
                kinds = {f"{phase} over rounding": far[name] / scale / rounding}
            if factor > compare.FACTOR and explained < compare.FAR:
                kinds["factor over inputs"] = factor / max(explained, rounding)
            for kind, number in kinds.items():
                largest[kind] = max(largest.get(kind, (0.0, "")), (number, f"{b.name}, step {step}: {name}"))


def verdicts(a: Path, b: Path) -> dict[tuple[str, str], Counter[str]]:
    """Return what is said of the first step by phase and change, if one tensor of B is changed."""
    (described, in_a), (_, in_b) = file.read(a, 1), file.read(b, 1)
    said: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for name, own in in_b.items():
        for what, change in SCALED.items():
            changed = change(own)
            if name.startswith("update ") and name.count(" ") == 1:  # the change of the weight is changed
                products = own[1:] - in_b[name.replace("update", "input", 1)][1:]
                moved = change(torch.cat([products.square().mean()[None], products]))[1:] - products
                changed = torch.cat([own[:1], own[1:] + moved])
            entries = compare.compare_step(in_a, in_b | {name: changed}, (described, described), {}, is_first=True)
            first = next((entry.name for entry in entries if entry.differs), None)
            coarse = any(entry.is_coarse for entry in entries)
            kind = "named" if first == name else "misnamed" if first else "too coarse" if coarse else "EQUAL"
            said[name.split()[0], what][kind] += 1
    return said


def report(folder: Path, precision: str) -> None:
    """Print what is measured of a precision."""
    reference, largest = folder / precision / ONE, dict[str, tuple[float, str]]()
    said: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    print(f"{precision}", flush=True)
    for layout in [layout for layout in LAYOUTS if layout != ONE]:
        steps = list(compare.compare_runs(reference, folder / precision / layout))
        alarms = sum(entry.differs for step in steps for entry in step.entries)
        coarse = [step.number for step in steps if any(entry.is_coarse for entry in step.entries)]
        first = f"the first that is too coarse is in step {coarse[0]}" if coarse else "none is too coarse"
        print(f"    {layout}: {alarms} tensors of {len(steps)} steps differ, {first}", flush=True)
        growth(reference, folder / precision / layout, largest)
        for key, counts in verdicts(reference, folder / precision / layout).items():
            said[key] += counts
    for kind, (number, where) in sorted(largest.items()):
        print(f"    {kind:<22} {number:6.2f}  {where}")
    for (phase, what), counts in sorted(said.items()):
        print(f"    {phase:<9} {what:<9} {', '.join(f'{n} {kind}' for kind, n in counts.most_common())}", flush=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="some of PRECISIONS, separated by ;")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="keep the runs here, and use those that are there")
    arguments = parser.parse_args(argv)
    precisions = arguments.only.split(";") if arguments.only else [*PRECISIONS]
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.folder or Path(name)
        train(folder, precisions, arguments.steps)
        for precision in precisions:
            report(folder, precision)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sys.exit(main(sys.argv[1:]))
