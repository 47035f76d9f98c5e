"""Compute tokens per second, MFU and peak memory; write metrics to the console, TensorBoard and metrics.jsonl."""

import contextlib
import io
import json
import math
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.config.launch import quantity
from titanlite.config.loader import ConfigError, show
from titanlite.config.regular_file import open_own, read_file
from titanlite.config.schema import Metrics
from titanlite.files.appended_file import AppendedFile, report, row_of
from titanlite.files.durable import replace_file

VALIDATION_LOSS = "validation_metrics/global_avg_loss"


class PeakFlops:
    """Finds the peak FLOP/s of one GPU, to which model FLOPs utilization (MFU) is relative. For bfloat16 on a GPU of
    devices.toml, the peak is from the data sheet; otherwise, the fastest of ten matrix products is measured. On a CPU
    the peak is 0 (unknown), since other programs share the cores. `source` describes where `flops` is from."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.flops, self.source = 0.0, "none on a CPU"
        if device.type != "cuda":
            return
        from titanlite.metrics.devices import find_by_gpu_name  # imported here: only a run on a GPU needs it

        name, n = torch.cuda.get_device_name(device), 8192
        if dtype == torch.bfloat16 and (known := find_by_gpu_name(name)):
            self.flops = known.bf16
            self.source = f"of {known.bf16 / 1e12:.0f} TFLOP/s, dense bfloat16, {known.source}"
            return
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        for _ in range(10):
            start = time.perf_counter()
            a @ b
            torch.cuda.synchronize(device)
            self.flops = max(self.flops, 2 * n**3 / (time.perf_counter() - start))
        self.source = f"of {self.flops / 1e12:.3g} TFLOP/s, measured: {dtype} {n} x {n} product on {name}"


def peak_memory(device: torch.device) -> tuple[float, float]:
    """Return this rank's peak memory in GiB since the last call: (in active tensors, reserved by the allocator). On a
    CPU, both are the process's peak resident set since its start."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        torch.cuda.reset_peak_memory_stats(device)
        return stats["active_bytes.all.peak"] / 2**30, stats["reserved_bytes.all.peak"] / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS, KiB elsewhere
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
    return peak, peak


class ThroughputMeter:
    """Measures step time, tokens per second and MFU of a rank that trains on `tokens_per_step` tokens per step."""

    def __init__(self, device: torch.device, *, tokens_per_step: float, flops_per_token: int, peak: PeakFlops):
        self.device, self.tokens_per_step = device, tokens_per_step
        self.flops_per_token, self.peak = flops_per_token, peak
        self.seconds_per_step = 0.0
        self._reset()

    def _reset(self) -> None:
        self._start, self._data_seconds, self._steps = time.perf_counter(), 0.0, 0

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count the time of the with statement's body as data loading."""
        start = time.perf_counter()
        yield
        self._data_seconds += time.perf_counter() - start

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the with statement's body, such as a validation or a save, from the step time."""
        start = time.perf_counter()
        yield
        self._start += time.perf_counter() - start

    def step_done(self) -> None:
        self._steps += 1

    def metrics(self) -> dict[str, float]:
        """Return this rank's throughput, times and peak memory since the last call, by tag."""
        seconds = time.perf_counter() - self._start
        self.seconds_per_step = seconds / self._steps
        tokens_per_second = self.tokens_per_step / self.seconds_per_step
        flops = tokens_per_second * self.flops_per_token
        active, reserved = peak_memory(self.device)
        values = {
            "throughput(tps)": tokens_per_second,
            "tflops": flops / 1e12,
            **({"mfu(%)": 100 * flops / self.peak.flops} if self.peak.flops else {}),
            "time_metrics/end_to_end(s)": self.seconds_per_step,
            "time_metrics/data_loading(%)": 100 * self._data_seconds / seconds,
            "memory/max_active(GiB)": active,
            "memory/max_reserved(GiB)": reserved,
        }
        self._reset()
        return values


def step_values(loss: float, largest: float, norm: float, lr: float, counts: Sequence[int]) -> dict[str, float]:
    """Return a step's losses in nats, gradient norm, learning rate and numbers of tokens (from `counts`), by tag."""
    positions, _, padding, _ = counts
    return {
        "loss_metrics/global_avg_loss": loss,
        "loss_metrics/global_max_loss": largest,
        "grad_norm": norm,
        "lr": lr,
        "n_tokens_seen": positions - padding,
        "n_padding_seen": padding,
    }


class Logger:
    """A logger that writes nothing, for all ranks except the first."""

    def begin(self, last_step: int) -> None:
        """Prepare the files of a run that resumes after `last_step`, or of a new run (0)."""

    def log(self, step: int, values: Mapping[str, Any], seconds_per_step: float) -> None:
        """Write a step's values by tag. metrics.jsonl stores nan and inf as null; tensors become histograms."""

    def log_samples(self, step: int, prompts: Sequence[str], texts: Sequence[str]) -> None:
        """Write prompts and the generated texts that follow them, one line each on the console."""

    def remove_after(self, step: int) -> None:
        """Remove the logged values of all steps after `step`, since the run has returned to the weights of `step`."""

    def close(self) -> None:
        """Write records that could not be written before, or print a line if they are lost."""


class MetricsLogger(Logger):
    """Writes rank 0's console lines, metrics.jsonl, TensorBoard's files, and config.toml, whose text is `config`. A new
    run moves the files of an earlier run to previous/DATE. A resumed run removes the values of steps after its
    checkpoint. `begin` raises ConfigError if files cannot be changed. Later, if a file cannot be written, as on a full
    disk, one line is printed to stderr. `steps`: the number of the run's last step."""

    def __init__(self, dump_folder: Path, metrics: Metrics, *, steps: int, config: str):
        self.folder, self.metrics, self.steps, self.config = dump_folder, metrics, steps, config
        self.file, self.tensorboard = AppendedFile(dump_folder / "metrics.jsonl"), None

    def begin(self, last_step: int) -> None:
        tb_folder = self.metrics.save_tb_folder if self.metrics.enable_tensorboard else ""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if last_step == 0:
                _move_to_previous(self.folder, ["metrics.jsonl", "config.toml", *([tb_folder] if tb_folder else [])])
            else:
                _remove_later_steps(self.file.path, last_step)
        except OSError as error:
            problem = f"job.dump_folder = {show(str(self.folder))}: files of an earlier run cannot be changed: {error}"
            raise ConfigError([problem]) from None
        try:
            replace_file(self.folder / "config.toml", self.config.encode())
        except OSError as error:
            report(str(self.folder / "config.toml"), error, "training continues without it")
        if tb_folder:
            from titanlite.metrics.event_file import EventFile  # imported here: only rank 0 needs TensorBoard

            self.tensorboard = EventFile(self.folder / tb_folder, first_step=last_step + 1)
            self.tensorboard.add_text("config", "\n".join(f"    {line}" for line in self.config.splitlines()))

    def log(self, step: int, values: Mapping[str, Any], seconds_per_step: float) -> None:
        """Write values by tag to the console, metrics.jsonl and TensorBoard."""
        histograms = {tag: value for tag, value in values.items() if isinstance(value, Tensor)}
        values = {tag: value for tag, value in values.items() if tag not in histograms}
        if not values:
            return
        print(_console_line(step, self.steps, values, seconds_per_step), flush=True)
        record = {tag: value if math.isfinite(value) else None for tag, value in values.items()}
        self.file.append((json.dumps({"step": step, **record}) + "\n").encode())
        if self.tensorboard:
            self.tensorboard.add_scalars(values, step)
            for tag, value in histograms.items():
                self.tensorboard.add_histogram(tag, value, step)

    def log_samples(self, step: int, prompts: Sequence[str], texts: Sequence[str]) -> None:
        for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            print(f"step {step}: sample {index}: {show(prompt)} -> {show(text)}", flush=True)
            if self.tensorboard:
                self.tensorboard.add_text(f"samples/{index}", f"{prompt}{text}", step)

    def remove_after(self, step: int) -> None:
        try:
            _remove_later_steps(self.file.path, step)
        except OSError as error:
            report(str(self.file.path), error, f"it keeps the steps after {step} of an abandoned past")
        if self.tensorboard:
            self.tensorboard.begin(step + 1)

    def close(self) -> None:
        for file in (self.file, self.tensorboard.file if self.tensorboard else None):
            if file:
                file.close()


def _move_to_previous(folder: Path, names: list[str]) -> None:
    previous, moved = folder / "previous" / datetime.now().strftime("%Y-%m-%d_%H-%M-%S.%f"), []
    for path in (folder / name for name in names):
        is_folder = path.is_dir()  # move TensorBoard's files, but keep its folder, which has this run's lock
        files = list(path.glob("events.out.tfevents.*")) if is_folder else [path] if path.exists() else []
        for file in files:
            target = previous / path.resolve().name if is_folder else previous
            target.mkdir(parents=True, exist_ok=True)
            shutil.move(file, target)  # unlike rename, move works across file systems
        moved += [path.name] if files else []
    if moved:
        print(f"moved an earlier run's {', '.join(moved)} to {previous}", flush=True)


def _remove_later_steps(path: Path, last_step: int) -> None:
    """Remove the lines of later steps from a metrics.jsonl, and move damaged lines to metrics.jsonl.damaged."""
    content = read_file(path, path.stat().st_size) if path.exists() else b""
    earlier, damaged = [], []
    for line in io.BytesIO(content):
        row = row_of(line)
        if row is None:
            damaged.append(line)
        elif row["step"] <= last_step:
            earlier.append(line.rstrip(b"\n") + b"\n")
    if damaged:
        aside = path.with_name(f"{path.name}.damaged")
        with open(aside, "ab", opener=open_own) as file:
            file.writelines(damaged)
        print(f"{path}: moved {quantity(len(damaged), 'damaged line')} to {aside.name}", flush=True)
    if b"".join(earlier) != content:
        replace_file(path, b"".join(earlier))


def _console_line(step: int, steps: int, values: Mapping[str, float], seconds_per_step: float) -> str:
    parts = [f"step {step:>{len(str(steps))}}/{steps}"]
    if "grad_norm" in values:
        parts += [
            f"loss {values['loss_metrics/global_avg_loss']:7.4f}",
            f"norm {values['grad_norm']:8.4f}",
            f"lr {values['lr']:.3e}",
            f"{values['throughput(tps)']:8,.0f} tok/s",
            f"{values['tflops']:7.3f} TFLOP/s",
            *([f"MFU {values['mfu(%)']:5.1f} %"] if "mfu(%)" in values else []),
            f"{values['memory/max_reserved(GiB)']:6.2f} GiB",
            f"data {values['time_metrics/data_loading(%)']:4.1f} %",
            f"ETA {timedelta(seconds=round((steps - step) * seconds_per_step))}",
        ]
    if VALIDATION_LOSS in values:
        parts.append(f"validation loss {values[VALIDATION_LOSS]:.4f}")
    return "  ".join(parts)
