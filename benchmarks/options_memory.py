"""What each option saves: memory and time of a training step with one option changed, beside a step with none.

    python benchmarks/options_memory.py [--rounds 5] [--cases "loss_chunks = 8" ...]       (default: all cases)
    python benchmarks/options_memory.py --vocab-size 131072 --cases "loss_chunks = 2"     (as large as Llama 3's)
    python benchmarks/options_memory.py --device cuda [the same]

One rank takes whole steps (forward, backward, clipping, optimizer) as train.py does, of a model whose vocabulary is
large enough for logits to matter. On a CPU: the debug model with a vocabulary of 32768, one sequence of 2048 tokens,
everything in float32 and eager. On CUDA: Llama 3.2 1B, one sequence of 4096 tokens, computing in bfloat16, eager; there
cases are added for which a CPU has no use (offloading) or no patience (the compiler).

Each case is a new process. After two steps, by when everything is compiled and the moments exist, memory is

    held     what is there between two steps: weights and optimizer states. On a CPU the bytes of their tensors; on CUDA
             what the allocator has given out.
    step     what the next step adds to it at its peak: activations, gradients, gathered weights, logits. On a CPU the
             growth of the resident set, with glibc told to return what is freed at once, so that it is the live
             tensors (Linux only: /proc); on CUDA the allocator's peak over what it held.

and the peak is their sum: the median of three steps. Neither counts the process itself, libraries and the compiler.
From then on glibc keeps freed memory, as in a training run, and the case and the baseline, which stays for all of them,
take --rounds steps in turn. Seconds are medians, and the ratio is the median of those of neighbouring steps.

Prints a line of JSON a case, then the table; and draws docs/images/options_memory.png, on CUDA options_memory_cuda.png.
A case whose process ends before its time is "failed" in its line, and not in the table; stderr has why.
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
from resident import forget_peak, map_each_tensor, resident_bytes
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.config import Config, Launch, check, load
from titanlite.parallel import mesh
from titanlite.parity.training_run import TrainingRun

HERE = Path(__file__).resolve().parent
Options = dict[str, str | int]
MODELS: dict[str, Options] = {
    "cpu": {"model.flavor": "debug", "model.vocab_size": 32768, "training.seq_len": 2048},
    "cuda": {"model.flavor": "llama3_1b", "training.seq_len": 4096},
}
CASES: dict[str, Options] = {
    "recompute: full": {"activation_checkpoint.mode": "full"},
    "recompute: selective, op": {"activation_checkpoint.mode": "selective"},
    "recompute: selective, 2": {
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": 2,
    },
    "loss_chunks = 2": {"training.loss_chunks": 2},
    "loss_chunks = 8": {"training.loss_chunks": 8},
    "weights in bfloat16": {"training.dtype": "bfloat16", "optimizer.stochastic_rounding": "true"},
    "moments in bfloat16": {"optimizer.state_dtype": "bfloat16"},
    "moments in int8": {"optimizer.state_dtype": "int8"},
}
ONLY_ON_CPU: dict[str, Options] = {"compute in bfloat16": {"training.mixed_precision_param": "bfloat16"}}
ONLY_ON_CUDA: dict[str, Options] = {
    "cpu offload": {"training.enable_cpu_offload": "true"},
    "compiled": {"compile.enable": "true"},
    "compiled, memory_budget": {"compile.enable": "true", "activation_checkpoint.mode": "memory_budget"},
}


class OneBatch:
    """Takes steps on one batch, over and over."""

    def __init__(self, config: Config, device: torch.device):
        self.run, self.device = TrainingRun(config, device), device
        self.batch = self.run.loader.next()
        self.run.loader.close()

    def step(self) -> float:
        """Seconds that it took."""
        start = time.perf_counter()
        self.run.step(self.batch)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def memory(self) -> tuple[float, float]:
        """MiB (held before a step, added by it at its peak)."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            held = torch.cuda.memory_allocated(self.device)
            self.step()
            return held / 2**20, (torch.cuda.max_memory_allocated(self.device) - held) / 2**20
        states = [value for state in self.run.optimizer.state.values() for value in state.values()]
        held = sum(n_bytes(value) for value in [*self.run.parameters.values(), *states] if isinstance(value, Tensor))
        forget_peak()
        before = resident_bytes("VmRSS")
        self.step()
        return held / 2**20, (resident_bytes("VmHWM") - before) / 2**20


def n_bytes(tensor: Tensor) -> int:
    """Of the plain tensors that one consists of: a DTensor of its shard, 8-bit moments of numbers and scales."""
    if isinstance(tensor, DTensor):
        return n_bytes(tensor.to_local())
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(n_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.element_size()


def serve(options: Options, device_type: str, pipe: Connection) -> None:
    """The process of a case: send the memory of three steps, then the seconds of a step for everything received."""
    launch = Launch(0, 0, 1, 1, n_devices=int(device_type == "cuda"))
    arguments = [f"--{key}={value}" for key, value in options.items()]
    config = check(load([str(HERE.parent / "configs" / "debug.toml"), *arguments]), launch)
    with mesh.process_group(launch, timeout_seconds=3600, trace_buf_size=0, dump_folder=""):
        trainer = OneBatch(config, mesh.device_of(launch))
        for _ in range(2):
            trainer.step()
        pipe.send([trainer.memory() for _ in range(3)])
        mesh.retain_freed_memory()
        trainer.step()
        while True:
            pipe.recv()
            pipe.send(trainer.step())


class Side:
    """A case in a process of its own, which does nothing while it is not asked."""

    def __init__(self, options: Options, device_type: str):
        context = multiprocessing.get_context("spawn")
        self.pipe, other_end = context.Pipe()
        self.process = context.Process(target=serve, args=(options, device_type, other_end), daemon=True)
        self.process.start()
        other_end.close()  # so that the end of the process is the end of the pipe
        self.memory: list[tuple[float, float]] = self.pipe.recv()

    def step(self) -> float:
        self.pipe.send(None)
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def summary(case: str, side: Side, seconds: float, ratio: float) -> dict[str, Any]:
    held, step = (statistics.median(values) for values in zip(*side.memory, strict=True))
    return {"case": case, "held": held, "step": step, "seconds": seconds, "ratio": ratio}


def table(rows: list[dict[str, Any]]) -> str:
    """The summaries, the baseline first."""
    heads = f"{'held MiB':>9} {'step MiB':>9} {'peak MiB':>9} {'ratio':>6} {'s a step':>9} {'ratio':>6}"
    lines = [f"{'':26} {heads}"]
    whole = rows[0]["held"] + rows[0]["step"]
    for row in rows:
        peak = row["held"] + row["step"]
        memory = f"{row['held']:9.1f} {row['step']:9.1f} {peak:9.1f} {peak / whole:6.3f}"
        lines.append(f"{row['case']:26} {memory} {row['seconds']:9.3f} {row['ratio']:6.3f}")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], file: Path, title: str) -> None:
    """Horizontal bars, the baseline on top: what is held, what a step adds, and both ratios in words."""
    names, held, step = ([row[key] for row in rows] for key in ("case", "held", "step"))
    whole = held[0] + step[0]
    figure = Figure(figsize=(9, 0.8 + 0.4 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.barh(names, held, color="#4c72b0", label="held between steps: weights, optimizer states")
    axes.barh(names, step, left=held, color="#dd8452", label="added by a step, at its peak")
    for number, row in enumerate(rows):
        peak = row["held"] + row["step"]
        note = f"{peak / whole:.2f}, time {row['ratio']:.2f}" if number else f"{peak:,.0f} MiB, {row['seconds']:.2f} s"
        axes.text(peak + 0.01 * whole, number, note, va="center", fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("MiB")
    axes.set_title(title, fontsize=10, loc="left")
    figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=2)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", metavar="CASE")
    parser.add_argument("--vocab-size", type=int, help="instead of the model's; draws nothing")
    arguments = parser.parse_args()
    device = arguments.device
    cases = CASES | (ONLY_ON_CUDA if device == "cuda" else ONLY_ON_CPU)
    wanted = arguments.cases or list(cases)
    if unknown := set(wanted) - set(cases):
        parser.error(f"no such case on {device}: {', '.join(sorted(unknown))}; there are: {', '.join(cases)}")
    map_each_tensor()
    common = MODELS[device] | {"training.local_batch_size": 1}
    if arguments.vocab_size:
        common["model.vocab_size"] = arguments.vocab_size
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"
    print(f"torch {torch.__version__}, torchao {version('torchao')}, {name}; {json.dumps(common)}", flush=True)
    baseline, rows, of_baseline = Side(common, device), [], []
    print(json.dumps({"case": "baseline", "held, step MiB": baseline.memory}), flush=True)
    for case in wanted:
        try:
            side = Side(common | cases[case], device)
        except EOFError:  # its traceback is on stderr
            print(json.dumps({"case": case, "failed": True}), flush=True)
            continue
        pairs = [(side.step(), baseline.step()) for _ in range(arguments.rounds)]
        print(json.dumps({"case": case, "held, step MiB": side.memory, "seconds, baseline's": pairs}), flush=True)
        ratio = statistics.median(own / other for own, other in pairs)
        rows.append(summary(case, side, statistics.median(own for own, _ in pairs), ratio))
        of_baseline += [other for _, other in pairs]
        side.kill()
    baseline.kill()
    rows.insert(0, summary("baseline", baseline, statistics.median(of_baseline), 1.0))
    print(table(rows))
    file = "options_memory.png" if device == "cpu" else "options_memory_cuda.png"
    size = f"{common['model.flavor']} model, {common['training.seq_len']} tokens, {name}"
    if not arguments.vocab_size:
        draw(
            rows,
            HERE.parent / "docs" / "images" / file,
            f"Peak memory of a training step, one option at a time ({size})",
        )


if __name__ == "__main__":
    main()
