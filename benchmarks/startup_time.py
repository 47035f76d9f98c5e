"""From launching train.py to the end of its first step, cold and warm, with and without torch.compile.

    python benchmarks/startup_time.py [--rounds 3]

Runs train.py on configs/debug.toml for one step, on CUDA if there is any, in four ways that take turns:

    eager, cold       in a new, empty folder for all that a run keeps for later ones: tokens (training.cache_folder) and
                      compiled code (TORCHINDUCTOR_CACHE_DIR, which also has Triton's)
    eager, warm       a second run with the same folder
    compiled, cold    as above, with compile.enable: each block by inductor
    compiled, warm    a second run with the same folder

"Ready" is from the launch to the last line before the first step: imports, process group, data, model, optimizer.
"First step" is from the launch to the line that reports it. The system's own cache of files is as it is: it has Python
and torch from the first launch on, if not before.

Prints a line of JSON a launch, then the medians over the rounds.
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

ROOT = Path(__file__).resolve().parents[1]


def launch(folder: str, compiled: bool) -> tuple[float, float]:
    """Seconds until the run is (ready, done with its first step).

    Args:
        folder: where the run keeps what later ones may use.
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
    environment.pop("TRITON_CACHE_DIR", None)  # it would not be in there
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
                    way = f"{name}, {state}"
                    sample = {"round": number, "way": way, "ready s": ready, "first step s": first}
                    print(json.dumps(sample), flush=True)
                    seconds.setdefault(way, []).append((ready, first))
    print(f"{'median seconds':16} {'ready':>6} {'first step':>10}")
    for way, samples in seconds.items():
        ready, first = (statistics.median(values) for values in zip(*samples, strict=True))
        print(f"{way:16} {ready:6.1f} {first:10.1f}")


if __name__ == "__main__":
    main()
