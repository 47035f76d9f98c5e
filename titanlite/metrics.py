"""What a run reports: the console line, TensorBoard, metrics.jsonl; throughput, MFU and memory."""

import contextlib
import json
import math
import resource
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import torch

from titanlite import devices

VALIDATION_LOSS = "validation_metrics/global_avg_loss"


class PeakFlops:
    """Matrix rate that MFU is a share of.

    A data sheet's figure for bfloat16 on a known GPU; otherwise measured here, with as many threads as the training
    has: the best product of two square matrices of this type.

    Attributes:
        flops: FLOP/s of one device.
        source: where it is from, in words.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        known = devices.of_gpu(name) if dtype == torch.bfloat16 else None
        if known:
            self.flops, self._factors = known.bf16, None
            self.source = f"{self.flops / 1e12:.0f} TFLOP/s, dense bfloat16, {known.source}"
            return
        n = 8192 if device.type == "cuda" else 1024
        self._factors = [torch.randn(n, n, device=device).to(dtype) for _ in range(2)]
        self.flops = 0.0
        self._measure(seconds=1 / 3)
        what = f"{str(dtype).removeprefix('torch.')} {n} x {n} product on {name}"
        self.source = f"{self.flops / 1e12:.3g} TFLOP/s, measured: {what}"

    def _measure(self, seconds: float) -> None:
        one, other = self._factors
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            start = time.perf_counter()
            one @ other
            if one.device.type == "cuda":
                torch.cuda.synchronize(one.device)
            self.flops = max(self.flops, 2 * one.shape[0] ** 3 / (time.perf_counter() - start))

    def share(self, flops: float) -> float:
        """What share of the peak a rate is. One that comes too close to a measured peak tells that the machine was
        slower when that was measured, as shared machines are at times: it is measured again, and the best counts."""
        if self._factors and flops > 0.8 * self.flops:
            self._measure(seconds=1 / 10)
        return flops / self.flops


def memory(device: torch.device) -> tuple[float, float]:
    """Peak GiB of this rank: (in tensors, reserved by the allocator) on CUDA since the last call; on a CPU, which has
    no such allocator, twice the peak resident set of the process since its start."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        torch.cuda.reset_peak_memory_stats(device)
        return stats["active_bytes.all.peak"] / 2**30, stats["reserved_bytes.all.peak"] / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes there, KiB elsewhere
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
    return peak, peak


class ThroughputMeter:
    """Times and rates of the steps since the last reading, for one rank.

    Args:
        tokens_per_step: tokens that one rank's share of a step amounts to.
        flops_per_token: see model.flops_per_token.
    """

    def __init__(self, device: torch.device, *, tokens_per_step: float, flops_per_token: int, peak: PeakFlops):
        self.device, self.tokens_per_step = device, tokens_per_step
        self.flops_per_token, self.peak = flops_per_token, peak
        self.seconds_per_step = 0.0
        self._begin()

    def _begin(self) -> None:
        self._start, self._data, self._steps = time.perf_counter(), 0.0, 0

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count the body as time that the step waited for its batch."""
        start = time.perf_counter()
        yield
        self._data += time.perf_counter() - start

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the body (validation, saving) out of the time of the steps."""
        start = time.perf_counter()
        yield
        self._start += time.perf_counter() - start

    def step_done(self) -> None:
        self._steps += 1

    def read(self) -> dict[str, float]:
        """Values by tag since the last reading; rates are per rank."""
        seconds = time.perf_counter() - self._start
        self.seconds_per_step = seconds / self._steps
        tokens_per_second = self.tokens_per_step / self.seconds_per_step
        flops = tokens_per_second * self.flops_per_token
        active, reserved = memory(self.device)
        values = {
            "throughput(tps)": tokens_per_second,
            "tflops": flops / 1e12,
            "mfu(%)": 100 * self.peak.share(flops),
            "time_metrics/end_to_end(s)": self.seconds_per_step,
            "time_metrics/data_loading(%)": 100 * self._data / seconds,
            "memory/max_active(GiB)": active,
            "memory/max_reserved(GiB)": reserved,
        }
        self._begin()
        return values


class MetricsLogger:
    """Rank 0's reports: the console, metrics.jsonl, TensorBoard, config.toml.

    A run that starts anew moves what an earlier one left in the folder to previous/DATE, so that the two neither mix
    nor destroy each other. A run that goes on removes what was reported after the step it goes on from.

    Args:
        folder: the run's dump folder.
        tb_folder: name of TensorBoard's folder in it, or None.
        last_step: the step the run goes on after; 0 if it starts.
        steps: the run's last step.
        config: the resolved config with its provenance, as TOML.
    """

    def __init__(self, folder: Path, *, tb_folder: str | None, last_step: int, steps: int, config: str):
        self.file, self.steps = folder / "metrics.jsonl", steps
        folder.mkdir(parents=True, exist_ok=True)
        if last_step == 0:
            _set_aside(folder, [self.file.name, "config.toml", *([tb_folder] if tb_folder else [])])
        else:
            _keep_rows(self.file, last_step)
        (folder / "config.toml").write_text(config)
        self.tensorboard = None
        if tb_folder:
            from torch.utils.tensorboard import SummaryWriter  # here: half a second, which only rank 0 need spend

            self.tensorboard = SummaryWriter(str(folder / tb_folder), purge_step=last_step + 1)
            self.tensorboard.add_text("config", "\n".join(f"    {line}" for line in config.splitlines()))

    def report(self, step: int, values: dict[str, float], seconds_per_step: float) -> None:
        """Values by tag to all three places; in metrics.jsonl, null stands for what is not finite."""
        print(_console_line(step, self.steps, values, seconds_per_step), flush=True)
        row = {tag: value if math.isfinite(value) else None for tag, value in values.items()}
        with self.file.open("a") as file:
            file.write(json.dumps({"step": step, **row}) + "\n")
        if self.tensorboard:
            for tag, value in values.items():
                self.tensorboard.add_scalar(tag, value, step)
            self.tensorboard.flush()


def _set_aside(folder: Path, names: list[str]) -> None:
    there = [name for name in names if (folder / name).exists()]
    previous = folder / "previous" / datetime.now().strftime("%Y-%m-%d_%H-%M-%S.%f")
    for name in there:
        previous.mkdir(parents=True, exist_ok=True)
        (folder / name).rename(previous / name)
    if there:
        print(f"moved an earlier run's {', '.join(there)} to {previous}", flush=True)


def _keep_rows(file: Path, last_step: int) -> None:
    """Cut the rows after a step, and a half-written one, off a metrics file."""
    rows = file.read_text().splitlines(keepends=True) if file.exists() else []
    kept = [row for row in rows if row.endswith("\n") and json.loads(row)["step"] <= last_step]
    replacement = file.with_suffix(".tmp")
    replacement.write_text("".join(kept))
    replacement.replace(file)


def _console_line(step: int, steps: int, values: dict[str, float], seconds_per_step: float) -> str:
    parts = [f"step {step:>{len(str(steps))}}/{steps}"]
    if "grad_norm" in values:
        parts += [
            f"loss {values['loss_metrics/global_avg_loss']:7.4f}",
            f"norm {values['grad_norm']:8.4f}",
            f"lr {values['lr']:.3e}",
            f"{values['throughput(tps)']:8,.0f} tok/s",
            f"{values['tflops']:7.3f} TFLOP/s",
            f"MFU {values['mfu(%)']:5.1f} %",
            f"{values['memory/max_reserved(GiB)']:6.2f} GiB",
            f"data {values['time_metrics/data_loading(%)']:4.1f} %",
            f"ETA {timedelta(seconds=round((steps - step) * seconds_per_step))}",
        ]
    if VALIDATION_LOSS in values:
        parts.append(f"validation loss {values[VALIDATION_LOSS]:.4f}")
    return "  ".join(parts)
