"""Every axis of parallelism on the GPUs of this host: tokens/s a GPU, MFU and memory, beside one GPU.

    python benchmarks/parallelism_overhead_gpu.py [--steps 12] [--batch 2] [--model llama3_1b]
    python benchmarks/parallelism_overhead_gpu.py --device cpu          (tries the script itself: the debug model on two CPU ranks)

Runs ./run_train.sh on parallelism_overhead_gpu.toml (Llama 3.2 1B, sequences of 4096, bfloat16, the text that CPython carries) on one
GPU and then on 2, 4, ... up to all GPUs, once for each axis:

    replicate, fsdp    data parallel: a replica a GPU, or weights and states sharded (ZeRO-3)
    tp, pp             tensor parallel; pipeline, 1F1B with microbatches of one sequence
    ring, ulysses      context parallel by either means

A step has --batch sequences a GPU, so all runs do the same work a GPU, and the ideal ratio is 1.

Prints a line of JSON a step (rank 0's metrics.jsonl), then for each run the medians over all steps but the first two
of tokens/s a GPU, its ratio to one GPU, and MFU; and rank 0's peak memory, as tensors and as reserved from the device.
A run that a config's rule refuses, or that fails, is a line of JSON with the reason, and "failed" in the table.
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


def axes(n: int, batch: int) -> dict[str, Options]:
    """The options of each axis over n ranks; of data-parallel ones, each rank has sequences of its own."""
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
    """Run train.py on n ranks; its rows of metrics.jsonl.

    Raises:
        subprocess.CalledProcessError: if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {**options, "job.dump_folder": folder}
        command = [str(HERE.parent / "run_train.sh"), str(HERE / "parallelism_overhead_gpu.toml")]
        environment = os.environ | {"NGPU": str(n), "PYTHON": sys.executable}
        if on_cpu:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        arguments = [f"--{key}={value}" for key, value in options.items()]
        subprocess.run([*command, *arguments], env=environment, check=True, capture_output=True, text=True)
        return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--model", help="a size of titanlite/sizes.py (default: llama3_1b, on a CPU debug)")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=2)
    arguments = parser.parse_args()
    on_cpu = arguments.device == "cpu"
    n_devices = 2 if on_cpu else torch.cuda.device_count()
    if n_devices < 2:
        sys.exit(f"error: parallelism_overhead_gpu.py needs at least 2 GPUs, and this host has {n_devices}")
    common: Options = {"model.flavor": arguments.model or ("debug" if on_cpu else "llama3_1b")}
    common |= {"training.steps": arguments.steps, "training.local_batch_size": arguments.batch}
    common |= FOR_CPU if on_cpu else {}
    sizes = [2**power for power in range(1, n_devices.bit_length())]
    runs = [("alone", 1, {})]
    runs += [(name, n, options) for n in sizes for name, options in axes(n, arguments.batch).items()]
    name = "CPU" if on_cpu else torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, {n_devices} x {name}, {json.dumps(common)}", flush=True)
    table, alone = [], math.nan
    for axis, n, options in runs:
        try:
            rows = train(n, common | options, on_cpu)
        except subprocess.CalledProcessError as error:
            print(json.dumps({"axis": axis, "ranks": n, "failed": (error.stdout + error.stderr)[-2000:]}), flush=True)
            table.append(f"{axis:10} {n:5}  failed")
            continue
        for row in rows:
            print(json.dumps({"axis": axis, "ranks": n, **row}), flush=True)
        speed, share = (statistics.median(row[tag] for row in rows[2:]) for tag in (THROUGHPUT, MFU))
        alone = speed if n == 1 else alone
        active, reserved = (max(row[tag] for row in rows) for tag in (ACTIVE, RESERVED))
        memory = f"{active:10.2f} {reserved:12.2f}"
        table.append(f"{axis:10} {n:5} {speed:12,.0f} {speed / alone:7.3f} {share:7.1f} {memory}")
    heads = f"{'tokens/s/GPU':>12} {'ratio':>7} {'MFU %':>7} {'GiB active':>10} {'GiB reserved':>12}"
    print(f"{'axis':10} {'ranks':>5} {heads}")
    print("\n".join(table))


if __name__ == "__main__":
    main()
