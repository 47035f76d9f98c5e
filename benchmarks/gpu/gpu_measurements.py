"""Measure a device's rates, or plan the memory of a config; gpu_session.py runs each command in a process of its own.

    python -m benchmarks.gpu.gpu_measurements environment      versions of the libraries, and the device
    python -m benchmarks.gpu.gpu_measurements rates [--small]  a bfloat16 matrix product, a copy, a choice of experts
    python -m benchmarks.gpu.gpu_measurements plan CARD CONFIG.toml [--section.key=value ...]  CARD as torch names it
    python -m benchmarks.gpu.gpu_measurements parity N CONFIG.toml [--section.key=value ...]    N ranks on one device
    python -m benchmarks.gpu.gpu_measurements recorded FOLDER  a step, for `titanlite parity --against FOLDER`

The matrix product is of two square matrices of side 8192. They are random, because a GPU is faster on zeros. The copy
is of 4 GiB, and its bandwidth counts the bytes read and those written. Both are the median of groups of ten, of which
the first half is warm-up. The choice is of 8 of 128 experts for 16384
tokens: by a stable sort of all scores, as the router does, and by the top 8 of numbers that order score and place.
--small takes sizes for a CPU. The recorded step is of gpu_recorded.toml. The plan is the planned peak of a step, in
tensors, as the allocator's peak counts it: without CUDA context and fragmentation. The ranks of `titanlite parity`
share a device: each is a node of its own to torchrun, and to NCCL, which rejects two ranks of a node on one device, by
NCCL_HOSTID.

Prints one JSON line. Without a GPU, all of them use the CPU.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PACKAGES = ("torch", "triton", "torchao", "pydantic", "tomli-w", "numpy", "pytest", "nvidia-cudnn-cu13")
GROUP, GROUPS = 10, 60


def environment() -> dict[str, Any]:
    """Return the versions, and the device with its memory."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not there"
    result = {"Python": platform.python_version(), **versions, "CUDA": str(torch.version.cuda)}
    if not torch.cuda.is_available():
        return result | {"device": f"CPU ({platform.machine()}, {os.cpu_count()} cores)"}
    result |= {"cuDNN": str(torch.backends.cudnn.version()), "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    result |= {"device": torch.cuda.get_device_name(), "devices": torch.cuda.device_count()}
    result["memory GiB"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 2)
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
        output = subprocess.run(query, stdout=subprocess.PIPE, text=True).stdout
        result["driver, power limit, largest clock"] = output.partition("\n")[0]
    return result


def median_seconds(call: Callable[[], object], groups: int) -> float:
    """Return the median seconds of a call, timed in groups of ten, over the second half of the groups."""
    seconds = []
    for _ in range(groups):
        synchronize()
        start = time.perf_counter()
        for _ in range(GROUP):
            call()
        synchronize()
        seconds.append((time.perf_counter() - start) / GROUP)
    return statistics.median(seconds[groups // 2 :])


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def top_8_by_sort(scores: Tensor) -> Tensor:
    """Return the places of the 8 largest scores of each row, of equal ones the first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :8]


def top_8_by_keys(scores: Tensor) -> Tensor:
    """Return the same of scores that are not negative, without a sort of all of them."""
    last = scores.shape[1] - 1
    places = torch.arange(last, -1, -1, device=scores.device)
    keys = (scores.view(torch.int32).to(torch.int64) << 32) | places
    return last - (keys.topk(8, dim=-1).values & 0xFFFFFFFF)


def rates(small: bool) -> dict[str, float]:
    """Return TFLOP/s of the matrix product, TB/s of the copy, and the milliseconds of both choices of experts."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    side, size, groups = (256, 2**22, 4) if small else (8192, 2**32, GROUPS)
    one, other = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(one)
    matmul = median_seconds(lambda: torch.mm(one, other, out=product), groups)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = median_seconds(lambda: target.copy_(source), groups)
    scores = torch.randn(1024 if small else 16384, 128, device=device).softmax(-1)
    choices = {"sort": lambda: top_8_by_sort(scores), "top-k": lambda: top_8_by_keys(scores)}
    milliseconds = {f"experts by {name}, ms": 1e3 * median_seconds(call, groups) for name, call in choices.items()}
    return {"matmul TFLOP/s": 2 * side**3 / matmul / 1e12, "copy TB/s": 2 * size / copy / 1e12, **milliseconds}


def plan(card: str, arguments: list[str]) -> dict[str, float]:
    """Return the planned peak of a step's tensors on a card in GiB, and the planned tokens/s."""
    from titanlite.config import load  # here: the other commands run without titanlite's dependencies
    from titanlite.metrics.devices import DEVICES, find_by_gpu_name
    from titanlite.tools.plan.planner import make_plan

    device = next((name for name, each in DEVICES.items() if each is find_by_gpu_name(card)), card)
    planned = make_plan(load([*arguments, f"--plan.device={device}"]), world_size=1)
    return {"planned GiB": planned.worst.peak.total / 2**30, "planned tokens/s": planned.tokens_per_second}


def parity(n_ranks: int, arguments: list[str]) -> dict[str, str]:
    """Compare a layout whose ranks share a device with one process. Return what the command says of it."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={n_ranks}", "--nproc-per-node=1"]
    torchrun += ["--master-addr=localhost", f"--master-port={port}"]
    nodes = [
        subprocess.Popen(
            [*torchrun, f"--node-rank={rank}", "-m", "titanlite", "parity", *arguments],
            env=os.environ | {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(n_ranks)
    ]
    output = "".join(node.communicate()[0] for node in nodes)
    print(output, flush=True)
    verdicts = [line for line in output.splitlines() if line.startswith(("equal:", "different:"))]
    if any(node.returncode for node in nodes) or len(verdicts) != 1:
        raise SystemExit(f"error: the layout is not equal: {verdicts}")
    return {"result": verdicts[0]}


def recorded(folder: Path) -> dict[str, float]:
    """Take an optimizer step by the loop's own functions, and write it as `titanlite parity --against` reads it."""
    import numpy as np
    from safetensors.torch import save_file

    from titanlite.config import Launch, check, load
    from titanlite.hf.config_files import config_files
    from titanlite.launch.process_group import process_group
    from titanlite.tools.parity.reference import RandomSequences
    from titanlite.tools.parity.training_run import run_layout

    launch = Launch(0, 0, 1, 1, n_devices=int(torch.cuda.is_available()))
    config = check(load([str(Path(__file__).parent / "gpu_recorded.toml")]), launch)
    with process_group(launch, config.comm, str(folder)):
        trace = run_layout(config, launch, steps=1)
    batch = [RandomSequences(config)[index] for index in range(config.training.global_batch_size)]
    tokens, targets, _ = (torch.from_numpy(np.stack(column)).long() for column in zip(*batch, strict=True))
    training, optimizer = config.training, config.optimizer
    step = {
        "program": f"titanlite, torch {torch.__version__}, {environment()['device']}",
        "dtypes": {"weights": training.dtype, "compute": training.mixed_precision_param}
        | {"reduce": training.mixed_precision_reduce},
        "optimizer": {key: getattr(optimizer, key) for key in ("name", "lr", "beta1", "beta2", "eps", "weight_decay")}
        | {"weight_decay_dims": [2]},
        "max_norm": training.max_norm,
        "degrees": {"accumulation_steps": training.global_batch_size // training.local_batch_size},
        "loss": trace["step 1 loss"].item(),
        "gradient_norm": trace["step 1 norm"].item(),
    }
    model, _ = config_files(
        config.model, None, torch_dtype=training.dtype, max_seq_len=training.seq_len, bos=None, eos=None
    )
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(model))
    (folder / "step.json").write_text(json.dumps(step, indent=1))
    save_file({"tokens": tokens, "targets": targets}, folder / "batch.safetensors")
    kinds = {"model": "initial weight ", "gradients": "step 1 gradient ", "weights_after": "final weight "}
    for file, kind in kinds.items():
        tensors = {name.removeprefix(kind): tensor for name, tensor in trace.items() if name.startswith(kind)}
        save_file(tensors, folder / f"{file}.safetensors")
    return {"loss": step["loss"], "gradient norm": step["gradient_norm"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["environment", "rates", "plan", "parity", "recorded"])
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    arguments, config_arguments = parser.parse_known_args()
    if arguments.command == "plan":
        result = plan(config_arguments[0], config_arguments[1:])
    elif arguments.command == "recorded":
        result = recorded(Path(config_arguments[0]))
    elif arguments.command == "parity":
        result = parity(int(config_arguments[0]), config_arguments[1:])
    else:
        result = rates(arguments.small) if arguments.command == "rates" else environment()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
