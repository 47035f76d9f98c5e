"""Measure startup time: from the launch of train.py to its first step, with cold and warm caches, with torch.compile.

    python -m benchmarks.speed.startup_time [--rounds 3]

Each round runs train.py on configs/debug.toml for one step, on CUDA where there is any, in four variants:

    eager, cold       the caches start empty: tokens (training.cache_folder) and compiled code (TORCHINDUCTOR_CACHE_DIR,
                      which also holds Triton's)
    eager, warm       a second run with the same caches
    compiled, cold    empty caches and compile.enable: inductor compiles each block
    compiled, warm    a second run with the same caches

"ready" is the time from the launch to the last line before the first step: imports, process group, data, model,
optimizer. "first step" is the time from the launch to the line that reports it. The page cache of the operating system
is not controlled: from the first launch on at the latest it contains Python and torch.

Each launch prints a JSON line. The medians over the rounds follow.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def launch(folder: str, compiled: bool) -> tuple[float, float]:
    """Run one step and return the seconds until the run is ready and until its first step is reported.

    Args:
        folder: the folder of the caches.
    """
    options = {
        "job.dump_folder": f"{folder}/run",
        "training.cache_folder": f"{folder}/tokens",
        "training.steps": 1,
        "validation.enable": "false",
        "compile.enable": str(compiled).lower(),
    }
    command = [sys.executable, str(ROOT / "train.py"), str(ROOT / "configs" / "debug.toml")]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    environment.pop("TRITON_CACHE_DIR", None)  # it would put Triton's cache elsewhere
    ready = first = float("nan")
    start = time.perf_counter()
    with subprocess.Popen(
        [*command, *(f"--{key}={value}" for key, value in options.items())],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        for line in process.stdout:
            if line.startswith("step 1/"):
                first = time.perf_counter() - start
                break
            ready = time.perf_counter() - start
        process.stdout.read()
    if process.returncode:
        raise SystemExit(f"failed with {process.returncode}: {process.args}")
    return ready, first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    print(f"torch {torch.__version__}, {device}, {os.cpu_count()} cores, {rounds} rounds", flush=True)
    seconds: dict[str, list[tuple[float, float]]] = {}
    for number in range(rounds):
        for name, compiled in (("eager", False), ("compiled", True)):
            with tempfile.TemporaryDirectory() as folder:
                for state in ("cold", "warm"):
                    ready, first = launch(folder, compiled)
                    variant = f"{name}, {state}"
                    sample = {"round": number, "variant": variant, "ready s": ready, "first step s": first}
                    print(json.dumps(sample), flush=True)
                    seconds.setdefault(variant, []).append((ready, first))
    print(f"{'median seconds':16} {'ready':>6} {'first step':>10}")
    for variant, samples in seconds.items():
        ready, first = (statistics.median(values) for values in zip(*samples, strict=True))
        print(f"{variant:16} {ready:6.1f} {first:10.1f}")


if __name__ == "__main__":
    main()
