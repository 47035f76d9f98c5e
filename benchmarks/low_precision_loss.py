"""Do the ways to compute with fewer bits end where float32 ends? 300 steps of the debug model on real text with each.

    python benchmarks/low_precision_loss.py [--steps 300] [--plot docs/images/low_precision_loss.png]

Every run is train.py on configs/debug.toml with 8 sequences of 256 tokens a step, so all see the same weights, tokens
and schedule. Training magnifies any rounding: the second run is float32 too, but for attention's kernel, and shows how
far apart two runs end that differ in the last digit only. The learning rate is a fifth of the debug model's own, so
that this is near.

Prints a line of JSON for every tenth step, then a table of the mean loss over the last 30 steps and of the validation
loss, with their distance from float32; writes the curves as a plot. On CUDA float8 is the hardware's own and the model
around it computes in bfloat16; elsewhere it is emulated, in float32.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
FLOAT32 = "training.mixed_precision_param=float32"
RUNS = {
    "float32": [FLOAT32],
    "float32, another attention kernel": [FLOAT32, "training.attention_backend=math"],
    "bfloat16 compute": ["training.mixed_precision_param=bfloat16"],
    "bfloat16 weights, stochastic rounding": ["training.dtype=bfloat16", "optimizer.stochastic_rounding=true"],
    "float8 tensorwise": ["float8.enable=true", "float8.recipe=tensorwise"],
    "float8 rowwise": ["float8.enable=true", "float8.recipe=rowwise"],
    "8-bit moments": [FLOAT32, "optimizer.state_dtype=int8"],
}
LOSS, VALIDATION = "loss_metrics/global_avg_loss", "validation_metrics/global_avg_loss"


def run(options: list[str], steps: int, folder: Path) -> list[dict[str, float]]:
    """Rows of metrics.jsonl of a run, a step each."""
    common = {
        "job.dump_folder": folder,
        "training.seq_len": 256,
        "training.local_batch_size": 8,
        "optimizer.lr": 4e-4,
        "lr_scheduler.warmup_steps": 60,
        "training.steps": steps,
        "validation.freq": steps,
        "metrics.log_freq": 1,
        "metrics.enable_tensorboard": "false",
    }
    arguments = [f"--{key}={value}" for key, value in common.items()] + [f"--{option}" for option in options]
    if any(option.startswith("float8") for option in options) and not torch.cuda.is_available():
        arguments.append("--float8.emulate=true")
    command = [sys.executable, str(ROOT / "train.py"), str(ROOT / "configs" / "debug.toml"), *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "images" / "low_precision_loss.png")
    arguments = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"torch {torch.__version__}, {device}, {arguments.steps} steps", flush=True)
    curves: dict[str, list[float]] = {}
    ends: dict[str, tuple[float, float]] = {}
    for name, options in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            rows = run(options, arguments.steps, Path(folder))
        curves[name] = [row[LOSS] for row in rows]
        ends[name] = statistics.mean(curves[name][-30:]), rows[-1][VALIDATION]
        for row in rows[9::10]:
            print(
                json.dumps({"run": name, "step": row["step"], "loss": row[LOSS], "norm": row["grad_norm"]}), flush=True
            )
        print(json.dumps({"run": name, "last 30": ends[name][0], "validation": ends[name][1]}), flush=True)
    print(f"\n{'':40} {'last 30 steps':>14} {'':>8} {'validation':>12}")
    of_float32 = ends["float32"]
    for name, (last, validation) in ends.items():
        shares = f"{last / of_float32[0] - 1:+8.2%}", f"{validation / of_float32[1] - 1:+8.2%}"
        print(f"{name:40} {last:14.4f} {shares[0]} {validation:12.4f} {shares[1]}")
    draw(curves, arguments.plot)


def draw(curves: dict[str, list[float]], file: Path) -> None:
    """Loss over steps, and its distance from float32's, both smoothed over 10 steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def smooth(values: list[float]) -> list[float]:
        return [statistics.mean(values[max(0, step - 9) : step + 1]) for step in range(len(values))]

    figure, (whole, apart) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, values in curves.items():
        steps = range(1, len(values) + 1)
        whole.plot(steps, smooth(values), label=name, linewidth=1)
        difference = [100 * (a / b - 1) for a, b in zip(smooth(values), smooth(curves["float32"]), strict=True)]
        apart.plot(steps, difference, label=name, linewidth=1)
    whole.set(xlabel="step", ylabel="loss (nats a token)", title="mean of 10 steps")
    apart.set(xlabel="step", ylabel="% above float32", ylim=(-3, 3), title="distance from float32")
    whole.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
