"""Train one model under eight layouts, and measure at every step how far each is from one process.

    python -m verification.layout_distance train FOLDER [--only KIND ...] [--runs NAME ...]
    python -m verification.layout_distance torchtitan FOLDER --python PYTHON
    python -m verification.layout_distance log FOLDER > benchmarks/logs/layout_distance.log

`train` starts `titanlite train` for each run that FOLDER does not have yet: a Llama of two layers on the text that
CPython carries, 1,000 steps in float32 and the first 200 of these in float64. A third kind has four layers and experts,
in float64: 200 steps of a mixture of four, with balance biases and a balance loss. The losses are those of
metrics.jsonl. The weights are those of checkpoints, every 50 steps in float32 and every 20 in float64.

Two kinds of runs are controls. `one process, again` is the same run: its distance must be 0. Others compute the same
in another order, in one process: gradient accumulation, chunked cross-entropy, attention by torch's plain operators
instead of its fused one. They show how far rounding alone drives two runs apart, which training magnifies.

`killed, resumed` is one run of six launches. Each of the first five is ended by SIGKILL of all its processes between
two checkpoints, and the next one resumes under another layout.

`torchtitan` trains torchtitan 0.2.2 from the same weights on the same batches (torchtitan_recorded.py), 300 steps in
float32, in one process and under the layouts that it has on a CPU. Without weight decay, which torchtitan also applies
to norms, and without a decay of the learning rate both programs have the same recipe. So titanlite is trained with it
too, and all runs of both programs are compared with torchtitan in one process.

`log` prints the distances as comma-separated values. That of losses is |loss - loss of one process| / loss of one
process; that of weights is the norm of the difference of all weights, over the norm of those of one process.
layout_distance_figure.py prints the largest ones of each run and draws them.
"""

import argparse
import csv
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np
import psutil
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.loss.low_precision_loss import LOSS
from benchmarks.others.interleaved import Options, arguments_of, program
from benchmarks.python_path import ROOT, with_python_path
from titanlite import build
from titanlite.checkpoint.reader import CheckpointReader
from titanlite.config import Config, load
from titanlite.data.open import build_tokenizer, open_sequences
from titanlite.init import init_weights

ONE, AGAIN, RESUMED = "one process", "one process, again", "killed, resumed"
ACCUMULATION, CHUNKED, MATH = (
    f"one process, {way}" for way in ("4 accumulation steps", "chunked loss", "math attention")
)
SEQUENCES, SEQ_LEN, STEPS = 8, 64, 1000

# A model that torchtitan has too: it scales the rotary embedding whatever the model is.
MODEL: Options = {
    "model.dim": 64,
    "model.n_layers": 2,
    "model.n_heads": 8,
    "model.n_kv_heads": 4,
    "model.ffn_dim": 192,
    "model.vocab_size": 512,
    "model.rope_theta": 10_000,
    "model.rope_scaling_factor": 8,
}
EXPERTS: Options = {
    "model.n_layers": 4,
    "model.moe.n_experts": 4,
    "model.moe.n_experts_per_token": 2,
    "model.moe.expert_dim": 64,
    "model.moe.n_shared_experts": 1,
    "model.moe.n_first_dense_layers": 1,
    "model.moe.balance_bias": True,
    "model.moe.balance_loss_weight": 0.01,
}
RECIPE: Options = {
    "training.seq_len": SEQ_LEN,
    "training.global_batch_size": SEQUENCES,
    "optimizer.lr": 2e-3,
    "lr_scheduler.warmup_steps": 20,
}
TITANLITE: Options = {
    "lr_scheduler.total_steps": STEPS,
    "validation.enable": "false",
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": "false",
    "checkpoint.enable": True,
    "checkpoint.keep_latest_k": 0,
    "comm.train_timeout_seconds": 300,
}

LOCAL, MICROBATCH = "training.local_batch_size", "parallelism.pipeline_parallel_microbatch_size"
FSDP, HSDP = "parallelism.data_parallel_shard_degree", "parallelism.data_parallel_replicate_degree"
TP, PP = "parallelism.tensor_parallel_degree", "parallelism.pipeline_parallel_degree"
CP, EP = "parallelism.context_parallel_degree", "parallelism.expert_parallel_degree"
SCHEDULE, ZERO_BUBBLE = "parallelism.pipeline_parallel_schedule", "InterleavedZeroBubble"
ALONE: dict[str, Options] = {
    ONE: {LOCAL: 8},
    AGAIN: {LOCAL: 8},
    ACCUMULATION: {LOCAL: 2},
    CHUNKED: {LOCAL: 8, "training.loss_chunks": 4},
    MATH: {LOCAL: 8, "training.attention_backend": "math"},
}
LAYOUTS: dict[str, Options] = {
    "FSDP 2": {FSDP: 2, LOCAL: 4},
    "HSDP 2 x 2": {HSDP: 2, FSDP: 2, LOCAL: 2},
    "TP 2": {TP: 2, LOCAL: 8},
    "CP 2": {CP: 2, LOCAL: 8},
    "PP 2 (GPipe)": {PP: 2, SCHEDULE: "GPipe", LOCAL: 8, MICROBATCH: 2},
    "PP 2 x FSDP 2": {PP: 2, FSDP: 2, LOCAL: 4, MICROBATCH: 2},
    "PP 2 x CP 2 x TP 2": {PP: 2, CP: 2, TP: 2, LOCAL: 8, MICROBATCH: 4},
    "PP 2 x FSDP 2 x CP 2 x TP 2": {PP: 2, FSDP: 2, CP: 2, TP: 2, LOCAL: 4, MICROBATCH: 2},
}
LAYOUTS_WITH_EXPERTS: dict[str, Options] = {
    "FSDP 2, EP 2": {FSDP: 2, EP: 2, LOCAL: 4},
    "TP 2, EP 2": {TP: 2, EP: 2, LOCAL: 8},
    "FSDP 2 x TP 2, EP 4": {FSDP: 2, TP: 2, EP: 4, LOCAL: 4},
    "PP 2 (zero-bubble) x CP 2, EP 2": {PP: 2, SCHEDULE: ZERO_BUBBLE, CP: 2, EP: 2, LOCAL: 8, MICROBATCH: 4},
}
IN_TURN = ("FSDP 2", "PP 2 x FSDP 2", "TP 2", "PP 2 (GPipe)", "CP 2", "HSDP 2 x 2")
IN_TURN_WITH_EXPERTS = (
    "FSDP 2, EP 2",
    "PP 2 (zero-bubble) x CP 2, EP 2",
    ONE,
    "FSDP 2 x TP 2, EP 4",
    "FSDP 2, EP 2",
    "TP 2, EP 2",
)

# The same in the words of torchtitan, and what both programs are given so that they have the same recipe.
SAME_RECIPE: Options = {"optimizer.weight_decay": 0, "lr_scheduler.decay_ratio": 0}
TORCHTITAN: Options = {
    "model.flavor": "debugmodel",
    "training.mixed_precision_param": "float32",
    "optimizer.implementation": "fused",
    "activation_checkpoint.mode": "none",
    "metrics.log_freq": 1,
    "metrics.disable_color_printing": True,
    "comm.trace_buf_size": 0,
}
TORCHTITAN_RUNS: dict[str, tuple[int, Options]] = {
    ONE: (1, {LOCAL: 8}),
    AGAIN: (1, {LOCAL: 8}),
    ACCUMULATION: (1, {LOCAL: 2}),
    "FSDP 2": (2, {FSDP: 2, LOCAL: 4}),
    "TP 2": (2, {TP: 2, LOCAL: 8}),
    "DDP 2": (2, {HSDP: 2, FSDP: 1, LOCAL: 4}),
    "PP 2": (2, {PP: 2, SCHEDULE: "1F1B", LOCAL: 8, MICROBATCH: 4}),
}
BESIDE_TORCHTITAN: dict[str, Options] = {
    f"titanlite, {run}": options for run, (_, options) in TORCHTITAN_RUNS.items() if run not in (AGAIN, ACCUMULATION)
}


class Kind(NamedTuple):
    """Runs that are compared with one another: their common options, steps, and the steps between two checkpoints."""

    options: Options
    steps: int
    interval: int
    layouts: dict[str, Options]
    in_turn: tuple[str, ...]
    """The layouts of the run that is killed and resumed."""

    @property
    def runs(self) -> dict[str, Options]:
        return ALONE | self.layouts


FLOAT64: Options = {"training.dtype": "float64"}
KINDS = {
    "float64": Kind(MODEL | FLOAT64, 200, 20, LAYOUTS, IN_TURN),
    "float64, experts": Kind(MODEL | EXPERTS | FLOAT64, 200, 20, LAYOUTS_WITH_EXPERTS, IN_TURN_WITH_EXPERTS),
    "float32": Kind(MODEL, STEPS, 50, LAYOUTS, IN_TURN),
}
WITH_TORCHTITAN, RECIPE_OF_BOTH = "float32, torchtitan 0.2.2", Kind(MODEL | SAME_RECIPE, 300, 50, BESIDE_TORCHTITAN, ())


# Training -------------------------------------------------------------------------------------------------------------


def options_of(folder: Path, kind: Kind, layout: Options) -> Options:
    """Return the options of a run in a folder."""
    own: Options = {
        "job.dump_folder": str(folder),
        "training.steps": kind.steps,
        "checkpoint.interval": kind.interval,
        FSDP: 1,
    }
    return RECIPE | TITANLITE | kind.options | own | layout


def start(folder: Path, kind: Kind, layout: Options, output: TextIO) -> subprocess.Popen[bytes]:
    """Start `titanlite train` in a folder, which resumes from the checkpoint in it if there is one."""
    command = [sys.executable, "-m", "titanlite", "train", "debug", *arguments_of(options_of(folder, kind, layout))]
    environment = with_python_path(os.environ | {"OMP_NUM_THREADS": "1"})
    return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


def train(folder: Path, kind: Kind, layout: Options) -> None:
    """Train to the last step."""
    output = folder / "output.log"
    with output.open("a") as file:
        status = start(folder, kind, layout, file).wait()
    if status:
        raise SystemExit(f"failed, see {output}")


def kill_after(step: int, folder: Path, kind: Kind, layout: Options) -> int:
    """Train until a step is logged, and kill every process of the run. Return the last step that was logged."""
    with (folder / "output.log").open("a") as file:
        process = start(folder, kind, layout, file)
        try:
            while last_step(folder) < step:
                if process.poll() is not None:
                    raise SystemExit(f"ended before step {step}, see {file.name}")
                time.sleep(0.005)
        finally:
            ranks = psutil.Process(process.pid).children(recursive=True)
            for each in (process, *ranks):
                each.kill()
            psutil.wait_procs(ranks)
            process.wait()
    return last_step(folder)


def last_step(folder: Path) -> int:
    """Return the last step in the metrics.jsonl of a run; 0 if there is none."""
    file = folder / "metrics.jsonl"
    *lines, _ = file.read_text().split("\n") if file.exists() else [""]
    return json.loads(lines[-1])["step"] if lines else 0


def train_killed(folder: Path, kind: Kind) -> None:
    """Train to the last step, killed between checkpoints and resumed under the next layout until none is left."""
    events, n_launches = [], len(kind.in_turn)
    for number, name in enumerate(kind.in_turn[:-1], 1):
        step = number * kind.steps // n_launches + kind.interval // 3
        events.append((name, kill_after(step, folder, kind, kind.runs[name])))
    train(folder, kind, kind.runs[kind.in_turn[-1]])
    starts = re.findall(
        r"^weights +(initial|resumed after step \d+)", (folder / "output.log").read_text(), re.MULTILINE
    )
    lines = [
        f"killed after step {killed} of {name}, {resumed} as {following}"
        for (name, killed), resumed, following in zip(events, starts[1:], kind.in_turn[1:], strict=True)
    ]
    (folder / "events.txt").write_text("".join(f"{line}\n" for line in lines))


def folder_of(folder: Path, kind: str, run: str) -> Path:
    return folder / re.sub(r"\W+", "_", kind) / re.sub(r"\W+", "_", run)


def train_missing(folder: Path, kinds: Mapping[str, Kind], runs: list[str] | None) -> None:
    """Train what the folder lacks. What has begun and not ended must be removed first."""
    for name, kind in kinds.items():
        for run, layout in [*kind.runs.items(), (RESUMED, None)]:
            own = folder_of(folder, name, run)
            if (runs and run not in runs) or (own / "done").exists():
                continue
            own.mkdir(parents=True)
            begin = time.monotonic()
            if layout is None:
                train_killed(own, kind)
            else:
                train(own, kind, layout)
            (own / "done").touch()
            print(f"{name}: {run}: {time.monotonic() - begin:.0f} s", flush=True)


def train_torchtitan(folder: Path, python: str) -> None:
    """Train torchtitan from the initial weights of titanlite on its batches."""
    kind, inputs = RECIPE_OF_BOTH, folder / "torchtitan_inputs.safetensors"
    save_file(initial_weights() | batches(kind.steps), inputs)
    for run, (ranks, layout) in TORCHTITAN_RUNS.items():
        own = folder_of(folder, WITH_TORCHTITAN, run)
        if (own / "done").exists():
            continue
        own.mkdir(parents=True)
        script = [
            str(ROOT / "benchmarks" / "others" / "torchtitan_recorded.py"),
            str(inputs),
            str(own),
            str(kind.interval),
        ]
        options = (
            RECIPE | TORCHTITAN | SAME_RECIPE | {"training.steps": kind.steps, "job.dump_folder": str(own)} | layout
        )
        command = program("torchtitan", ranks, script, options, python=python).command
        with (own / "output.log").open("w") as output:
            environment = with_python_path(os.environ | {"OMP_NUM_THREADS": "1"})
            status = subprocess.run(command, stdout=output, stderr=output, env=environment).returncode
        if status:
            raise SystemExit(f"failed, see {own / 'output.log'}")
        (own / "done").touch()
        print(f"{WITH_TORCHTITAN}: {run}", flush=True)
    train_missing(folder, {WITH_TORCHTITAN: kind}, [*BESIDE_TORCHTITAN])


def reference_config() -> Config:
    """Return the config of the run in one process, in float32."""
    return load(["debug", *arguments_of(RECIPE | TITANLITE | MODEL | ALONE[ONE])]).config


def initial_weights() -> dict[str, Tensor]:
    """Return the weights that every run in float32 begins with."""
    config = reference_config()
    model, device = build.meta_model(config), torch.device("cpu")
    model.materialize(device)
    init_weights(model, seed=config.debug.seed, n_layers=config.model.n_layers, device=device)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def batches(steps: int) -> dict[str, Tensor]:
    """Return the tokens and targets of the first steps, each [steps x sequences of a global batch, T]."""
    config = reference_config()
    tokenizer, seed = build_tokenizer(config.model.hf_assets_path), config.debug.seed
    sequences, *_ = open_sequences(tokenizer, config.training, config.validation, seed=seed, builds_cache=True)
    tokens, targets, _ = zip(*(sequences[index] for index in range(steps * SEQUENCES)), strict=True)
    return {"tokens": torch.from_numpy(np.stack(tokens)), "targets": torch.from_numpy(np.stack(targets))}


# Distances ------------------------------------------------------------------------------------------------------------


def distance(tensors: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference of all tensors, over the norm of those of the reference."""
    if tensors.keys() != reference.keys():
        raise ValueError(f"tensors differ: {sorted(tensors.keys() ^ reference.keys())}")
    difference = sum(float((tensors[name].double() - each.double()).square().sum()) for name, each in reference.items())
    return math.sqrt(difference / sum(float(each.double().square().sum()) for each in reference.values()))


def weights_of(folder: Path, step: int) -> dict[str, Tensor]:
    """Return the full weights of a run after a step, from its checkpoint or the file that torchtitan's run wrote."""
    file = folder / f"step-{step}.safetensors"
    if file.exists():
        return load_file(file)
    reader = CheckpointReader(folder / "checkpoint" / f"step-{step}")
    ends = ("optimizer.state.", ".exp_avg")  # what the optimizer updates; routers also have counts of tokens
    names = [name.removeprefix(ends[0]).removesuffix(ends[1]) for name in reader.shapes if name.endswith(ends[1])]
    return {name: reader.read(f"model.{name}") for name in names}


def losses_of(folder: Path) -> list[float]:
    """Return the losses of a run. Raises ValueError if a step is missing or there twice."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if [row["step"] for row in rows] != list(range(1, len(rows) + 1)):
        raise ValueError(f"{folder / 'metrics.jsonl'}: its steps are not 1, 2, 3, ...")
    return [row[LOSS] for row in rows]


def write_kind(out: TextIO, folder: Path, name: str, runs: list[str], steps: int, interval: int) -> None:
    """Write the distances of all runs of a kind: rows of a quantity, a step, the value of one process, and a distance
    for each run. For the weights, the value of one process is their norm."""
    folders = {run: folder_of(folder, name, run) for run in (ONE, *runs)}
    losses = {run: losses_of(own) for run, own in folders.items()}
    if {len(each) for each in losses.values()} != {steps}:
        raise ValueError(f"{name}: the runs have { {run: len(each) for run, each in losses.items()} } steps")
    for run, own in folders.items():
        events = own / "events.txt"
        for line in events.read_text().splitlines() if events.exists() else []:
            print(f"# {name}: {run}: {line}", file=out)
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["kind", name])
    writer.writerow(["quantity", "step", ONE, *runs])
    for step, reference in enumerate(losses[ONE], 1):
        apart = [abs(losses[run][step - 1] - reference) / reference for run in runs]
        writer.writerow(["loss", step, repr(reference), *map(short, apart)])
    for step in range(interval, steps + 1, interval):
        reference = weights_of(folders[ONE], step)
        norm = math.sqrt(sum(float(each.double().square().sum()) for each in reference.values()))
        apart = [distance(weights_of(folders[run], step), reference) for run in runs]
        writer.writerow(["weights", step, f"{norm:.6f}", *map(short, apart)])


def short(number: float) -> str:
    return f"{number:.2e}" if number else "0"


def write_log(out: TextIO, folder: Path) -> None:
    """Write the distances of all kinds that the folder has."""
    print(f"# torch {torch.__version__}, CPU with {os.cpu_count()} cores, one thread per rank, gloo", file=out)
    print(
        "# distances from one process: |loss - loss1| / loss1 and norm(weights - weights1) / norm(weights1)", file=out
    )
    for name, kind in KINDS.items():
        if folder_of(folder, name, RESUMED).exists():
            runs = [run for run in (*kind.runs, RESUMED) if run != ONE]
            write_kind(out, folder, name, runs, kind.steps, kind.interval)
    if folder_of(folder, WITH_TORCHTITAN, ONE).exists():
        runs = [run for run in (*TORCHTITAN_RUNS, *BESIDE_TORCHTITAN) if run != ONE]
        write_kind(out, folder, WITH_TORCHTITAN, runs, RECIPE_OF_BOTH.steps, RECIPE_OF_BOTH.interval)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    training.add_argument("--runs", nargs="+", metavar="NAME", help="default: all")
    with_torchtitan = commands.add_parser("torchtitan")
    with_torchtitan.add_argument("--python", required=True, help="Python of torchtitan's environment")
    for command in (training, with_torchtitan, commands.add_parser("log")):
        command.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "train":
        train_missing(arguments.folder, {name: KINDS[name] for name in arguments.only}, arguments.runs)
    elif arguments.command == "torchtitan":
        train_torchtitan(arguments.folder, arguments.python)
    else:
        write_log(sys.stdout, arguments.folder)


if __name__ == "__main__":
    main()
