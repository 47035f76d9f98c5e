"""Compare the loss of two replica groups that synchronize by DiLoCo with that of summing gradients in every step.

    python benchmarks/diloco_loss.py [--steps N] [--runs NAME ...] [--plot FILE]
    python benchmarks/diloco_loss.py --runs --log benchmarks/logs/diloco_loss.log       (plots the runs of a log)

Each group is a run of train.py with one rank: the debug model on its real text, in float32 on a CPU. In each step the
groups together train on the same 8 sequences of 256 tokens as the one process of the first run, which is what groups
that sum gradients compute. The last run has the sequences of one group only. Validation is after a synchronization.
Prints JSON lines and a table, and plots the loss on the validation split.
"""

import argparse
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from low_precision_loss import ROOT, VALIDATION, metrics_of
from muon_loss import draw

EVERY_STEP, ALONE = "every step", "one group alone"
SETTINGS = [
    *(("DiLoCo, outer lr 0.7, momentum 0.9", 0.7, 0.9, sync_steps) for sync_steps in (10, 50, 100)),
    ("DiLoCo, outer lr 0.7, momentum 0.5", 0.7, 0.5, 50),
    *(("local SGD", 1, 0, sync_steps) for sync_steps in (10, 50, 100)),
]
RUNS: dict[str, dict[str, float]] = {EVERY_STEP: {}, ALONE: {}} | {
    f"{name}, every {sync_steps} steps": {"sync_steps": sync_steps, "outer_lr": lr, "outer_momentum": momentum}
    for name, lr, momentum, sync_steps in SETTINGS
}
INTERVAL = 100
"""Steps between two validations."""


def run(steps: int, folder: Path, batch_size: int, **groups: object) -> list[dict[str, float]]:
    """Train, and return the lines of metrics.jsonl, one per step."""
    options = {
        "training.seq_len": 256,
        "training.local_batch_size": 4,
        "training.global_batch_size": batch_size,
        "training.mixed_precision_param": "float32",
        "training.steps": steps,
        "lr_scheduler.warmup_steps": 60,
        "validation.freq": INTERVAL,
    }
    return metrics_of(options | {f"fault_tolerance.{key}": value for key, value in groups.items()}, folder)


def run_groups(steps: int, folder: Path, **outer: object) -> list[dict[str, float]]:
    """Train with two groups, and return the lines of the first. Raises ValueError if they validate another model."""
    groups = {"enable": "true", "group_size": 2, "min_replica_size": 2, "semi_sync_method": "diloco"}
    groups |= outer
    with ThreadPoolExecutor(2) as threads:
        calls = [
            threads.submit(run, steps, folder / f"group-{number}", 8, replica_id=number, **groups)
            for number in range(2)
        ]
        first, second = (call.result() for call in calls)
    if [row.get(VALIDATION) for row in first] != [row.get(VALIDATION) for row in second]:
        raise ValueError("the groups have different validation losses")
    return first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--log", type=Path, help="lines of earlier runs, which the table and the plot have, too")
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=list(RUNS), metavar="NAME")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "images" / "diloco_loss.png")
    arguments = parser.parse_args()
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, heartbeat_timeout_ms=2000)
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse.address()
    print(f"torch {torch.__version__}, {arguments.steps} steps of 2 x 4 x 256 tokens", flush=True)
    curves: dict[str, list[tuple[int, float]]] = {}
    lines = arguments.log.read_text().splitlines() if arguments.log else []
    for row in (json.loads(line) for line in lines if line.startswith("{")):
        curves.setdefault(row["run"], []).append((row["step"], row["validation"]))
    for name in arguments.runs:
        with tempfile.TemporaryDirectory() as folder:
            if RUNS[name]:
                rows = run_groups(arguments.steps, Path(folder), **RUNS[name])
            else:
                rows = run(arguments.steps, Path(folder), 8 if name == EVERY_STEP else 4)
        curves[name] = [(row["step"], row[VALIDATION]) for row in rows if VALIDATION in row]
        for step, loss in curves[name]:
            print(json.dumps({"run": name, "step": step, "validation": loss}), flush=True)
    print(f"\n{'':52} {'validation loss':>16}")
    for name, points in curves.items():
        print(f"{name:52} {points[-1][1]:16.4f}")
    lighthouse.shutdown()
    draw(curves, arguments.plot, title="loss on the validation split")


if __name__ == "__main__":
    main()
