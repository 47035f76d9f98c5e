"""What it costs to report a step: reading the meter, the console's line, metrics.jsonl and TensorBoard.

    python benchmarks/metrics_cost.py [--rounds 30]

Steps of the debug model on a CPU and reports of them, in turn, as train.py takes them with `metrics.log_freq = 1`; the
report is what rank 0 does, the only one that has any. The debug model's step is short, so the share of any other is
smaller, and with the default log_freq of 10 a tenth of that.

Prints the medians.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from titanlite import build, metrics
from titanlite.config import Launch, check, load
from titanlite.parallel import mesh
from titanlite.parity.training_run import TrainingRun

DEBUG = Path(__file__).resolve().parents[1] / "configs" / "debug.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    launch = Launch(0, 0, 1, 1, n_devices=0)
    config, device = check(load([str(DEBUG)]), launch), torch.device("cpu")
    steps, reports = [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        mesh.process_group(launch, timeout_seconds=600, trace_buf_size=0, dump_folder=""),
    ):
        run = TrainingRun(config, device)
        reporter = metrics.MetricsLogger(Path(folder), tb_folder="tb", last_step=0, steps=rounds, config="")
        meter = metrics.ThroughputMeter(
            device,
            tokens_per_step=config.training.global_batch_size * config.training.seq_len,
            flops_per_token=build.count_flops_per_token(config, build.parameter_sizes(config)),
            peak=metrics.PeakFlops(device, torch.float32),
        )
        for step in range(1, rounds + 1):
            began = time.perf_counter()
            run.step(run.loader.next())
            meter.step_done()
            stepped = time.perf_counter()
            values = {"loss_metrics/global_avg_loss": 5.0, "loss_metrics/global_max_loss": 5.0, "grad_norm": 1.0}
            values |= {"lr": 1e-3, "n_tokens_seen": step, **meter.read()}
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                reporter.report(step, values, meter.seconds_per_step)
            steps.append(stepped - began)
            reports.append(time.perf_counter() - stepped)
        run.loader.close()
    step, report = statistics.median(steps), statistics.median(reports)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {rounds} steps of {len(values)} values")
    print(f"a step {step * 1000:.1f} ms, a report {report * 1000:.2f} ms: {report / step:.3%} of a step")
    print(f"with log_freq = {config.metrics.log_freq}: {report / step / config.metrics.log_freq:.3%}")


if __name__ == "__main__":
    main()
