"""Compare right layouts over many steps by their fingerprints, and measure what a step with fingerprints costs.

    python -m verification.fingerprints [--steps 1000] [--only "float32;bfloat16, experts"] [--layout "FSDP 2"]

A small Llama is trained on the text that CPython carries, in one process, with FSDP, and with pipeline x tensor
parallel, in several precisions. Every step has fingerprints. Between one process and each layout, no tensor may differ
by more than `titanlite diff` allows. For each phase it prints the largest part of the allowed distance that was used:
below 1, no alarm.

The cost is that of the debug config on one process: every second step has fingerprints, so the medians of steps with
and without are of the same run.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from titanlite.tools.diff.compare import compare_runs

MODEL = [
    "--model.dim=64", "--model.n_layers=4", "--model.n_heads=8", "--model.n_kv_heads=4", "--model.ffn_dim=96",
    "--training.seq_len=64", "--training.global_batch_size=8", "--training.local_batch_size=4",
    "--validation.enable=false", "--optimizer.lr=2e-3", "--optimizer.implementation=fused",
    "--debug.fingerprint_freq=1", "--metrics.log_freq=100", "--metrics.enable_tensorboard=false",
]  # fmt: skip
LOW = ["--training.mixed_precision_param=bfloat16"]
EXPERTS = [
    "--model.moe.n_experts=8", "--model.moe.n_experts_per_token=2", "--model.moe.expert_dim=48",
    "--model.moe.balance_bias=true",
]  # fmt: skip
KINDS = {
    "float32": [],
    "bfloat16": LOW,
    "bfloat16 weights": [*LOW, "--training.dtype=bfloat16", "--optimizer.stochastic_rounding=true"],
    "float32, experts": EXPERTS,
    "bfloat16, experts": EXPERTS + LOW,
    "bfloat16, Muon": [*LOW, "--optimizer.name=Muon"],
}
ONE = ["--parallelism.data_parallel_shard_degree=1", "--training.local_batch_size=8"]
LAYOUTS = {
    "FSDP 2": ["--parallelism.data_parallel_shard_degree=2"],
    "pp 2 x tp 2": ["--parallelism.pipeline_parallel_degree=2", "--parallelism.tensor_parallel_degree=2"],
}
COST = {"debug": [], "debug, 4 times the tokens": ["--training.local_batch_size=64"]}


def train(folder: Path, *options: str) -> Path:
    """Train the debug config with these options. Return the folder of the run."""
    command = [sys.executable, "-m", "titanlite", "train", "debug", f"--job.dump_folder={folder}", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    return folder


def compare(reference: Path, layout: Path) -> tuple[int, dict[str, tuple[float, float, str]]]:
    """Return how many tensors differ by more than is allowed; and by phase the largest part of the allowed distance
    that was used, that distance, and the tensor."""
    alarms, largest = 0, defaultdict(lambda: (0.0, 0.0, ""))
    for step in compare_runs(reference, layout):
        for entry in step.entries:
            alarms += entry.differs
            phase, used = entry.name.split()[0], entry.distance / entry.allowed
            largest[phase] = max(largest[phase], (used, entry.distance, f"step {step.number}: {entry.name}"))
    return alarms, largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--only", help="some of KINDS and COST, by name, separated by ;")
    parser.add_argument("--layout", choices=LAYOUTS, help="one of them (default: all)")
    arguments = parser.parse_args()
    layouts = [arguments.layout] if arguments.layout else [*LAYOUTS]
    wanted = arguments.only.split(";") if arguments.only else [*KINDS, *COST]
    for kind, options in KINDS.items():
        if kind not in wanted:
            continue
        with tempfile.TemporaryDirectory() as name:
            own = [*MODEL, *options, f"--training.steps={arguments.steps}"]
            reference = train(Path(name) / "one", *own, *ONE)
            for layout in layouts:
                alarms, largest = compare(reference, train(Path(name) / layout, *own, *LAYOUTS[layout]))
                print(f"{kind}, {layout} and one process, {arguments.steps} steps: {alarms} alarms", flush=True)
                for phase, (used, distance, where) in largest.items():
                    print(
                        f"    {phase:<9} {used:6.3f} of the allowed distance is used at most: {distance:.1e} in {where}"
                    )
    for kind, options in COST.items():
        if kind not in wanted:
            continue
        with tempfile.TemporaryDirectory() as name:
            steps = ["--training.steps=41", "--debug.fingerprint_freq=2", "--metrics.log_freq=1", *options]
            run = train(Path(name), *steps, "--validation.enable=false", "--parallelism.data_parallel_shard_degree=1")
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            seconds = [line["time_metrics/end_to_end(s)"] for line in lines]
        plain, with_them = statistics.median(seconds[2::2]), statistics.median(seconds[3::2])
        print(f"{kind}: a step takes {plain:.3f} s, one with fingerprints {with_them:.3f} s: {with_them / plain:.2f} x")


if __name__ == "__main__":
    main()
