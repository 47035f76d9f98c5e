"""Measure the memory and time of a training step with one option changed, against a baseline without it.

The options are activation checkpointing (AC), chunked cross-entropy, bfloat16 weights with stochastic rounding,
low-bit optimizer states, Muon, INT8 products and bfloat16 compute; on CUDA also CPU offloading and torch.compile.

    python -m benchmarks.memory.options_memory [--rounds 5] [--cases "loss_chunks = 8" ...]  (default: all cases)
    python -m benchmarks.memory.options_memory --vocab-size 131072 --cases "loss_chunks = 2"  (as large as Llama 3's)
    python -m benchmarks.memory.options_memory --device cuda [the same]

One rank runs complete steps (forward, backward, clipping, optimizer) as train.py does, on a model whose vocabulary is
large enough for the logits to matter. On a CPU: the debug model with a vocabulary of 32768, one sequence of 2048
tokens, float32, eager. On CUDA: Llama 3.2 1B, one sequence of 4096 tokens, bfloat16 compute, eager. The cases that only
CUDA has are CPU offloading, which a CPU does not need, and the compiler, which takes too long there.

Each case is a new process. After two steps everything is compiled and the optimizer states exist. Then memory is

    persistent  what is resident between two steps: weights and optimizer states. On a CPU the bytes of their tensors;
                on CUDA the bytes that the allocator has allocated.
    step        what the next step adds at its peak: activations, gradients, gathered weights, logits. On a CPU the
                growth of the resident set, with glibc set to return freed memory at once, so that it is the live
                tensors (Linux only: /proc); on CUDA the allocator's peak over the persistent memory.

and the peak is their sum: the median of three steps. It excludes the process itself, libraries and the compiler. From
then on glibc retains freed memory, as in a training run. The case and the baseline, which runs for all cases, take
--rounds steps alternately. Seconds are medians, and the ratio is the median of the ratios of neighbouring steps.

Each case prints a JSON line. The table follows, and docs/images/options_memory.png, on CUDA options_memory_cuda.png. A
case whose process dies prints a line that says "failed" and is not in the table; stderr has the reason.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.memory.resident_memory import map_each_tensor, reset_peak, resident_bytes
from titanlite.config import Config, Launch, check, load
from titanlite.config.schema import Comm
from titanlite.launch.process import retain_freed_memory
from titanlite.launch.process_group import device_of, process_group
from titanlite.tools.parity.training_run import TrainingRun

HERE = Path(__file__).resolve().parent
Options = dict[str, str | int]
MODELS: dict[str, Options] = {
    "cpu": {"model.flavor": "debug", "model.vocab_size": 32768, "training.seq_len": 2048},
    "cuda": {"model.flavor": "llama3_1b", "training.seq_len": 4096},
}
CASES: dict[str, Options] = {
    "full AC": {"activation_checkpoint.mode": "full"},
    "selective AC, op": {"activation_checkpoint.mode": "selective"},
    "selective AC, every 2 layers": {
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": 2,
    },
    "loss_chunks = 2": {"training.loss_chunks": 2},
    "loss_chunks = 8": {"training.loss_chunks": 8},
    "bfloat16 weights": {"training.dtype": "bfloat16", "optimizer.stochastic_rounding": "true"},
    "bfloat16 optimizer states": {"optimizer.state_dtype": "bfloat16"},
    "8-bit optimizer states": {"optimizer.state_dtype": "int8"},
    "float8 optimizer states": {"optimizer.state_dtype": "float8"},
    "4-bit optimizer states": {"optimizer.state_dtype": "int4"},
    "Muon": {"optimizer.name": "Muon"},
    "INT8 products": {"int8.enable": "true"},
}
ONLY_ON_CPU: dict[str, Options] = {"bfloat16 compute": {"training.mixed_precision_param": "bfloat16"}}
ONLY_ON_CUDA: dict[str, Options] = {
    "CPU offload": {"training.enable_cpu_offload": "true"},
    "optimizer states in host memory": {"optimizer.enable_cpu_offload": "true"},
    "compiled": {"compile.enable": "true"},
}


class OneBatch:
    """A trainer that repeats its step on one batch."""

    def __init__(self, config: Config, device: torch.device):
        self.run, self.device = TrainingRun(config, device), device
        self.batch = self.run.loader.next()
        self.run.loader.close()

    def step(self) -> float:
        """Run a training step and return its seconds."""
        start = time.perf_counter()
        self.run.step(self.batch)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def memory(self) -> tuple[float, float]:
        """Run a training step and return (persistent MiB, MiB that the step adds at its peak)."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            persistent = torch.cuda.memory_allocated(self.device)
            self.step()
            return persistent / 2**20, (torch.cuda.max_memory_allocated(self.device) - persistent) / 2**20
        states = [value for state in self.run.optimizer.state.values() for value in state.values()]
        persistent = sum(
            n_bytes(value) for value in [*self.run.parameters.values(), *states] if isinstance(value, Tensor)
        )
        reset_peak()
        before = resident_bytes("VmRSS")
        self.step()
        return persistent / 2**20, (resident_bytes("VmHWM") - before) / 2**20


def n_bytes(tensor: Tensor) -> int:
    """Return the bytes of the plain tensors in a tensor: the shard of a DTensor, codes and scales of 8-bit states."""
    if isinstance(tensor, DTensor):
        return n_bytes(tensor.to_local())
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(n_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.element_size()


def serve(options: Options, device_type: str, pipe: Connection) -> None:
    """Run the process of a case: send the memory of three steps, then the seconds of a step per message received."""
    launch = Launch(0, 0, 1, 1, n_devices=int(device_type == "cuda"))
    arguments = [f"--{key}={value}" for key, value in options.items()]
    config = check(load([str(HERE.parents[1] / "configs" / "debug.toml"), *arguments]), launch)
    with process_group(launch, Comm(init_timeout_seconds=3600, trace_buf_size=0), ""):
        trainer = OneBatch(config, device_of(launch))
        for _ in range(2):
            trainer.step()
        pipe.send([trainer.memory() for _ in range(3)])
        retain_freed_memory()
        trainer.step()
        while True:
            pipe.recv()
            pipe.send(trainer.step())


class CaseProcess:
    """A case in a process of its own, which runs only during `step`."""

    def __init__(self, options: Options, device_type: str):
        context = multiprocessing.get_context("spawn")
        self.pipe, other_end = context.Pipe()
        self.process = context.Process(target=serve, args=(options, device_type, other_end), daemon=True)
        self.process.start()
        other_end.close()  # then the pipe closes when the process ends
        self.memory: list[tuple[float, float]] = self.pipe.recv()

    def step(self) -> float:
        self.pipe.send(None)
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def summary(case: str, process: CaseProcess, seconds: float, ratio: float) -> dict[str, Any]:
    """Return a row of the table: medians of memory in MiB, seconds per step, ratio of seconds to the baseline."""
    persistent, step = (statistics.median(values) for values in zip(*process.memory, strict=True))
    return {"case": case, "persistent": persistent, "step": step, "seconds": seconds, "ratio": ratio}


def table(rows: list[dict[str, Any]]) -> str:
    """Format the summaries, of which the first is the baseline."""
    head = f"{'persistent MiB':>15} {'step MiB':>9} {'peak MiB':>9} {'ratio':>6} {'s/step':>9} {'ratio':>6}"
    lines = [f"{'':28} {head}"]
    baseline = rows[0]["persistent"] + rows[0]["step"]
    for row in rows:
        peak = row["persistent"] + row["step"]
        memory = f"{row['persistent']:15.1f} {row['step']:9.1f} {peak:9.1f} {peak / baseline:6.3f}"
        lines.append(f"{row['case']:28} {memory} {row['seconds']:9.3f} {row['ratio']:6.3f}")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], file: Path, title: str) -> None:
    """Plot horizontal bars with the baseline on top: persistent memory, what a step adds, and both ratios."""
    names, persistent, step = ([row[key] for row in rows] for key in ("case", "persistent", "step"))
    baseline = persistent[0] + step[0]
    figure = Figure(figsize=(9, 0.8 + 0.4 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.barh(names, persistent, color="#4c72b0", label="persistent: weights, optimizer states")
    axes.barh(names, step, left=persistent, color="#dd8452", label="added by a step at its peak")
    for number, row in enumerate(rows):
        peak = row["persistent"] + row["step"]
        note = f"{peak / baseline:.2f}, time {row['ratio']:.2f}"
        if number == 0:
            note = f"{peak:,.0f} MiB, {row['seconds']:.2f} s"
        axes.text(peak + 0.01 * baseline, number, note, va="center", fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("MiB")
    figure.suptitle(title, fontsize=10)
    figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=2)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", metavar="CASE")
    parser.add_argument("--vocab-size", type=int, help="instead of the model's; writes no figure")
    arguments = parser.parse_args()
    device = arguments.device
    cases = CASES | (ONLY_ON_CUDA if device == "cuda" else ONLY_ON_CPU)
    names = arguments.cases or list(cases)
    if unknown := set(names) - set(cases):
        parser.error(f"unknown on {device}: {', '.join(sorted(unknown))}; expected {', '.join(cases)}")
    map_each_tensor()
    common = MODELS[device] | {"training.local_batch_size": 1}
    if arguments.vocab_size:
        common["model.vocab_size"] = arguments.vocab_size
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"
    print(f"torch {torch.__version__}, torchao {version('torchao')}, {name}; {json.dumps(common)}", flush=True)
    baseline, rows, baseline_seconds = CaseProcess(common, device), [], []
    print(json.dumps({"case": "baseline", "persistent, step MiB": baseline.memory}), flush=True)
    for case in names:
        try:
            process = CaseProcess(common | cases[case], device)
        except EOFError:  # its traceback is on stderr
            print(json.dumps({"case": case, "failed": True}), flush=True)
            continue
        pairs = [(process.step(), baseline.step()) for _ in range(arguments.rounds)]
        sample = {"case": case, "persistent, step MiB": process.memory, "seconds, baseline": pairs}
        print(json.dumps(sample), flush=True)
        ratio = statistics.median(own / base for own, base in pairs)
        rows.append(summary(case, process, statistics.median(own for own, _ in pairs), ratio))
        baseline_seconds += [base for _, base in pairs]
        process.kill()
    baseline.kill()
    rows.insert(0, summary("baseline", baseline, statistics.median(baseline_seconds), 1.0))
    print(table(rows))
    if not arguments.vocab_size:
        file = "options_memory.png" if device == "cpu" else "options_memory_cuda.png"
        size = f"{common['model.flavor']} model, {common['training.seq_len']} tokens, {name}"
        title = f"Peak memory of a training step, one option at a time ({size})"
        draw(rows, HERE.parents[1] / "docs" / "images" / file, title)


if __name__ == "__main__":
    main()
