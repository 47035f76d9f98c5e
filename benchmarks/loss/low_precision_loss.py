"""Compare the loss curves of low-precision training with float32: bfloat16, stochastic rounding, float8, MXFP8, INT8
and 8-bit optimizer states.

    python -m benchmarks.loss.low_precision_loss [--steps 300] [--plot docs/images/low_precision_loss.png]

Every run is train.py on configs/debug.toml, on real text, with 8 sequences of 256 tokens per step, so all runs have the
same initial weights, tokens and learning-rate schedule. Training amplifies any rounding error. The second run is a
control: float32 with another attention backend, which shows how far two runs diverge that differ in the last digit
only. The learning rate is a fifth of the debug model's own, which keeps that distance small.

Every tenth step prints a JSON line; the plot shows the losses of these steps. The table has the mean loss over the last
30 steps and the validation loss, with their distance from float32. On CUDA float8 is the hardware's and the rest of the
model computes in bfloat16 (MXFP8 needs Blackwell there); elsewhere float8 is emulated in float32. INT8 is never
emulated.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.python_path import ROOT, with_python_path

FLOAT32 = "training.mixed_precision_param=float32"
RUNS = {
    "float32": [FLOAT32],
    "float32, another attention backend": [FLOAT32, "training.attention_backend=math"],
    "bfloat16 compute": ["training.mixed_precision_param=bfloat16"],
    "bfloat16 weights, stochastic rounding": ["training.dtype=bfloat16", "optimizer.stochastic_rounding=true"],
    "float8 tensorwise": ["float8.enable=true", "float8.recipe=tensorwise"],
    "float8 rowwise": ["float8.enable=true", "float8.recipe=rowwise"],
    "mxfp8": ["float8.enable=true", "float8.recipe=mxfp8"],
    "int8 products": ["int8.enable=true"],
    "8-bit optimizer states": [FLOAT32, "optimizer.state_dtype=int8"],
    "4-bit optimizer states": [FLOAT32, "optimizer.state_dtype=int4"],
    "float8 optimizer states": [FLOAT32, "optimizer.state_dtype=float8"],
}
LOSS, VALIDATION = "loss_metrics/global_avg_loss", "validation_metrics/global_avg_loss"


def run(options: list[str], steps: int, folder: Path) -> list[dict[str, float]]:
    """Train with these options and return the lines of metrics.jsonl, one per step."""
    common = {
        "training.seq_len": 256,
        "training.local_batch_size": 8,
        "optimizer.lr": 4e-4,
        "lr_scheduler.warmup_steps": 60,
        "training.steps": steps,
        "validation.freq": steps,
    }
    arguments = [f"--{option}" for option in options]
    if any(option.startswith("float8") for option in options) and not torch.cuda.is_available():
        arguments.append("--float8.emulate=true")
    return metrics_of(common, folder, *arguments)


def metrics_of(options: dict[str, object], folder: Path, *arguments: str) -> list[dict[str, float]]:
    """Train the debug model with these options, and return the lines of metrics.jsonl, one per step."""
    own = {"metrics.log_freq": 1, "metrics.enable_tensorboard": "false"}
    return train(ROOT / "configs" / "debug.toml", options | own, folder, *arguments)


def train(config: Path, options: dict[str, object], folder: Path, *arguments: str) -> list[dict[str, float]]:
    """Run train.py on a config with other options, and return the lines of metrics.jsonl; exit if it fails."""
    own = {"job.dump_folder": folder}
    arguments = *(f"--{key}={value}" for key, value in (options | own).items()), *arguments
    command = [sys.executable, str(ROOT / "train.py"), str(config), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=with_python_path(os.environ), text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}error: status {done.returncode} of {' '.join(command)}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME", help="besides float32")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "images" / "low_precision_loss.png")
    arguments = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"torch {torch.__version__}, {device}, {arguments.steps} steps", flush=True)
    curves: dict[str, list[tuple[int, float]]] = {}
    final_losses: dict[str, tuple[float, float]] = {}
    for name, options in RUNS.items():
        if name not in ("float32", *arguments.runs):
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows = run(options, arguments.steps, Path(folder))
        last, validation = statistics.mean(row[LOSS] for row in rows[-30:]), rows[-1][VALIDATION]
        curves[name], final_losses[name] = [(row["step"], row[LOSS]) for row in rows[9::10]], (last, validation)
        for row in rows[9::10]:
            sample = {"run": name, "step": row["step"], "loss": row[LOSS], "norm": row["grad_norm"]}
            print(json.dumps(sample), flush=True)
        print(json.dumps({"run": name, "last 30": last, "validation": validation}), flush=True)
    print(f"\n{'':40} {'last 30 steps':>14} {'':>8} {'validation':>12}")
    float32_last, float32_validation = final_losses["float32"]
    for name, (last, validation) in final_losses.items():
        distances = f"{last / float32_last - 1:+8.2%}", f"{validation / float32_validation - 1:+8.2%}"
        print(f"{name:40} {last:14.4f} {distances[0]} {validation:12.4f} {distances[1]}")
    draw(curves, arguments.plot)


def draw(curves: dict[str, list[tuple[int, float]]], file: Path) -> None:
    """Plot the loss over steps and its distance from the float32 run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (loss_axes, distance_axes) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, points in curves.items():
        steps, losses = zip(*points, strict=True)
        loss_axes.plot(steps, losses, label=name, linewidth=1)
        distances = [100 * (loss / base - 1) for loss, (_, base) in zip(losses, curves["float32"], strict=True)]
        distance_axes.plot(steps, distances, label=name, linewidth=1)
    loss_axes.set(xlabel="step", ylabel="loss (nats per token)", title="loss of every tenth step")
    distance_axes.set(xlabel="step", ylabel="% above float32", ylim=(-3, 3), title="distance from float32")
    loss_axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
