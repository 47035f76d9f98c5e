"""Measure the overhead of metrics logging: the throughput meter, the console line, metrics.jsonl and TensorBoard.

    python benchmarks/metrics_overhead.py [--rounds 30]

Steps of the debug model on a CPU and metrics logging alternate, as in train.py with `metrics.log_freq = 1`. The logging
is what rank 0 does; the other ranks log nothing. The step of the debug model is short, so the overhead relative to any
larger model is smaller, and with the default log_freq of 10 it is a tenth of that.

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

from titanlite import build
from titanlite.config import Launch, check, load
from titanlite.config.schema import Comm
from titanlite.launch.process_group import process_group
from titanlite.metrics import logger as metrics
from titanlite.metrics.flops import flops_per_token
from titanlite.tools.parity.training_run import TrainingRun

DEBUG = Path(__file__).resolve().parents[1] / "configs" / "debug.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    launch = Launch(0, 0, 1, 1, n_devices=0)
    config, device = check(load([str(DEBUG)]), launch), torch.device("cpu")
    step_seconds, log_seconds = [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        process_group(launch, Comm(init_timeout_seconds=600, trace_buf_size=0), ""),
    ):
        run = TrainingRun(config, device)
        logger = metrics.MetricsLogger(Path(folder), config.metrics, steps=rounds, config="")
        logger.begin(0)
        meter = metrics.ThroughputMeter(
            device,
            tokens_per_step=config.training.global_batch_size * config.training.seq_len,
            flops_per_token=flops_per_token(build.parameter_sizes(config), config.model, config.training.seq_len),
            peak=metrics.PeakFlops(device, torch.float32),
        )
        for step in range(1, rounds + 1):
            start = time.perf_counter()
            run.step(run.loader.next())
            meter.step_done()
            stepped = time.perf_counter()
            values = {"loss_metrics/global_avg_loss": 5.0, "loss_metrics/global_max_loss": 5.0, "grad_norm": 1.0}
            values |= {"lr": 1e-3, "n_tokens_seen": step, **meter.metrics()}
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                logger.log(step, values, meter.seconds_per_step)
            step_seconds.append(stepped - start)
            log_seconds.append(time.perf_counter() - stepped)
        run.loader.close()
    step, log = statistics.median(step_seconds), statistics.median(log_seconds)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {rounds} steps of {len(values)} values")
    print(f"step {step * 1000:.1f} ms, metrics logging {log * 1000:.2f} ms: {log / step:.3%} of a step")
    print(f"with log_freq = {config.metrics.log_freq}: {log / step / config.metrics.log_freq:.3%}")


if __name__ == "__main__":
    main()
