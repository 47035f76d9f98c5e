"""Compare the loss of Muon and AdamW at equal tokens, each at several learning rates: the debug model on its real text.

    python benchmarks/muon_loss.py [--steps N] [--plot FILE]

Every run takes the same batches from the same initial weights, in float32 on a CPU. Prints JSON lines, then the mean
loss of the last 30 steps and the loss on the validation split of each; plots the loss of the best run of each.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch
from low_precision_loss import LOSS, ROOT, VALIDATION, metrics_of

RATES = {"AdamW": (1e-3, 2e-3, 4e-3), "Muon": (2e-3, 4e-3, 8e-3, 1.6e-2)}


def run(optimizer: str, lr: float, steps: int, folder: Path) -> list[dict[str, float]]:
    """Train, and return the lines of metrics.jsonl, one per step."""
    options = {
        "optimizer.name": optimizer,
        "optimizer.lr": lr,
        "training.seq_len": 256,
        "training.local_batch_size": 4,
        "training.global_batch_size": 4,
        "training.mixed_precision_param": "float32",
        "lr_scheduler.warmup_steps": 60,
        "training.steps": steps,
        "validation.freq": steps,
    }
    return metrics_of(options, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "images" / "muon_loss.png")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {arguments.steps} steps of 4 x 256 tokens", flush=True)
    curves: dict[tuple[str, float], list[tuple[int, float]]] = {}
    found: dict[tuple[str, float], tuple[float, float]] = {}
    for optimizer, lr in [(name, lr) for name, rates in RATES.items() for lr in rates]:
        with tempfile.TemporaryDirectory() as folder:
            rows = run(optimizer, lr, arguments.steps, Path(folder))
        curves[optimizer, lr] = [(row["step"], row[LOSS]) for row in rows[9::10]]
        found[optimizer, lr] = statistics.mean(row[LOSS] for row in rows[-30:]), rows[-1][VALIDATION]
        for step, loss in curves[optimizer, lr]:
            print(json.dumps({"optimizer": optimizer, "lr": lr, "step": step, "loss": loss}), flush=True)
    print(f"\n{'optimizer':10} {'lr':>7} {'last 30 steps':>14} {'validation':>11}")
    for (optimizer, lr), (last, validation) in found.items():
        print(f"{optimizer:10} {lr:7g} {last:14.4f} {validation:11.4f}")
    best = [min((key for key in found if key[0] == name), key=lambda key: found[key][1]) for name in RATES]
    best_curves = {f"{name}, lr {lr:g}": curves[name, lr] for name, lr in best}
    draw(best_curves, arguments.plot, title="loss of every tenth step")


def draw(curves: dict[str, list[tuple[int, float]]], file: Path, title: str) -> None:
    """Plot the loss over steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), label=name, linewidth=1)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    figure.legend(loc="outside right upper")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
