"""Measure each kind of parallelism on the GPUs of this node: tokens/s per GPU, MFU and memory, against one GPU.

    python -m benchmarks.gpu.parallelism_overhead_gpu [--steps 12] [--batch 2] [--model llama3_1b]
    python -m benchmarks.gpu.parallelism_overhead_gpu --device cpu  (tries the script: the debug model on two CPU ranks)

Runs ./run_train.sh on parallelism_overhead_gpu.toml (Llama 3.2 1B, sequences of 4096, bfloat16, the text that CPython
carries) on one GPU, and then on 2, 4, ... up to all GPUs with each kind of parallelism:

    replicate, fsdp    data parallel: a replica on each GPU, or weights and optimizer states sharded (ZeRO-3)
    tp, pp             tensor parallel; pipeline parallel, 1F1B with microbatches of one sequence
    ring, ulysses      context parallel by ring attention or by Ulysses

The global batch has --batch sequences per GPU, so all runs do the same work per GPU, and the ideal ratio is 1.

Each step prints a JSON line (rank 0's metrics.jsonl). The table has, for each run, the medians over the steps after the
second of tokens/s per GPU, its ratio to one GPU, and MFU (model FLOPs utilization); and rank 0's peak memory, in
tensors and reserved from the device. A run that is rejected by a rule of the config, or that fails, prints a JSON line
with the reason, and the table says "failed".
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
FOR_CPU = {"training.seq_len": 256, "training.mixed_precision_param": "float32"}
THROUGHPUT, MFU = "throughput(tps)", "mfu(%)"
ACTIVE, RESERVED = "memory/max_active(GiB)", "memory/max_reserved(GiB)"
Options = dict[str, str | int]


def parallelisms(n: int, batch: int) -> dict[str, Options]:
    """Return the options of each kind of parallelism over n ranks, for a global batch of n * batch sequences."""
    shared = {"training.local_batch_size": n * batch}
    context = {**shared, "parallelism.context_parallel_degree": n}
    replicate = {"data_parallel_replicate_degree": n, "data_parallel_shard_degree": 1}
    replicate |= {"fsdp_reshard_after_forward": "never"}
    return {
        "replicate": {f"parallelism.{key}": value for key, value in replicate.items()},
        "fsdp": {"parallelism.data_parallel_shard_degree": n},
        "tp": {**shared, "parallelism.tensor_parallel_degree": n},
        "pp": {**shared, "parallelism.pipeline_parallel_degree": n},
        "ring": context,
        "ulysses": {**context, "parallelism.context_parallel_ulysses_degree": n},
    }


def train(n: int, options: Options, on_cpu: bool) -> list[dict[str, float]]:
    """Run train.py on n ranks and return the lines of its metrics.jsonl.

    Raises:
        subprocess.CalledProcessError: if the run fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {**options, "job.dump_folder": folder}
        command = [str(HERE.parents[1] / "run_train.sh"), str(HERE / "parallelism_overhead_gpu.toml")]
        environment = os.environ | {"NGPU": str(n), "PYTHON": sys.executable}
        if on_cpu:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        arguments = [f"--{key}={value}" for key, value in options.items()]
        subprocess.run([*command, *arguments], env=environment, check=True, capture_output=True, text=True)
        return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--model", help="model.flavor (default: llama3_1b, on a CPU debug)")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=2)
    arguments = parser.parse_args()
    on_cpu = arguments.device == "cpu"
    n_devices = 2 if on_cpu else torch.cuda.device_count()
    if n_devices < 2:
        sys.exit(f"error: parallelism_overhead_gpu.py needs at least 2 GPUs, and this node has {n_devices}")
    common: Options = {"model.flavor": arguments.model or ("debug" if on_cpu else "llama3_1b")}
    common |= {"training.steps": arguments.steps, "training.local_batch_size": arguments.batch}
    common |= FOR_CPU if on_cpu else {}
    sizes = [2**power for power in range(1, n_devices.bit_length())]
    runs = [("alone", 1, {})]
    runs += [(name, n, options) for n in sizes for name, options in parallelisms(n, arguments.batch).items()]
    device_name = "CPU" if on_cpu else torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, {n_devices} x {device_name}, {json.dumps(common)}", flush=True)
    table, one_gpu = [], math.nan
    for name, n, options in runs:
        try:
            rows = train(n, common | options, on_cpu)
        except subprocess.CalledProcessError as error:
            reason = (error.stdout + error.stderr)[-2000:]
            print(json.dumps({"parallelism": name, "ranks": n, "failed": reason}), flush=True)
            table.append(f"{name:11} {n:5}  failed")
            continue
        for row in rows:
            print(json.dumps({"parallelism": name, "ranks": n, **row}), flush=True)
        speed, mfu = (statistics.median(row[tag] for row in rows[2:]) for tag in (THROUGHPUT, MFU))
        one_gpu = speed if n == 1 else one_gpu
        active, reserved = (max(row[tag] for row in rows) for tag in (ACTIVE, RESERVED))
        memory = f"{active:10.2f} {reserved:12.2f}"
        table.append(f"{name:11} {n:5} {speed:12,.0f} {speed / one_gpu:7.3f} {mfu:7.1f} {memory}")
    heads = f"{'tokens/s/GPU':>12} {'ratio':>7} {'MFU %':>7} {'GiB active':>10} {'GiB reserved':>12}"
    print(f"{'parallelism':11} {'ranks':>5} {heads}")
    print("\n".join(table))


if __name__ == "__main__":
    main()
