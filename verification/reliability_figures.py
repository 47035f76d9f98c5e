"""Time what the reliability page quotes: locks that are taken, released and taken over, the hash of weights against
silent data corruption, and the checksums of a token cache.

    python -m verification.reliability_figures > benchmarks/logs/reliability_figures.log

Each figure has the seconds, or the rate, of every repetition. One CPU thread.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.python_path import ROOT
from titanlite.data import shard_builder, token_shards
from titanlite.launch.folder_lock import FolderLock
from titanlite.techniques.sdc import hash_of_bits

REPETITIONS = 5
BYTES = 2**28
HOLD = """
import os, sys, time
from pathlib import Path
from titanlite.launch.folder_lock import FolderLock
FolderLock(Path(sys.argv[1]), name="run.lock", purpose="", advice="", lost=print).acquire()
print(flush=True)
time.sleep(600)
"""


def lock(folder: Path) -> FolderLock:
    return FolderLock(folder, name="run.lock", purpose="lock", advice="", lost=print)


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def report(what: str, values: list[float], unit: str) -> None:
    each = ", ".join(f"{value:.3g}" for value in values)
    print(f"{what}: median {statistics.median(values):.3g} {unit} [{each}]", flush=True)


def leave_dead_lock(folder: Path, *, elsewhere: bool) -> None:
    """Have a process take the lock, and kill it; `elsewhere`: as if it had been on another node."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)})
    holder.stdout.readline()
    holder.kill()
    holder.wait()
    if elsewhere:
        file = folder / "run.lock"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"machine": "another"}))


def time_locks() -> None:
    taken, released, dead = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        mine = lock(Path(folder))
        for _ in range(REPETITIONS):
            taken.append(seconds(mine.acquire))
            released.append(1e3 * seconds(mine.release))
        for _ in range(REPETITIONS):
            leave_dead_lock(Path(folder), elsewhere=False)
            dead.append(seconds(mine.acquire))
            mine.release()
        leave_dead_lock(Path(folder), elsewhere=True)
        elsewhere = [seconds(mine.acquire)]
        mine.release()
    report("lock taken", taken, "s")
    report("lock released", released, "ms")
    report("lock of a dead process of this node taken over", dead, "s")
    report("lock of a dead process of another node taken over", elsewhere, "s")


def time_hash() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weights = torch.randn(BYTES // dtype.itemsize).to(dtype)
        rates = [BYTES / 2**30 / seconds(lambda weights=weights: hash_of_bits(weights)) for _ in range(REPETITIONS)]
        report(f"hash of {str(dtype).removeprefix('torch.')} weights", rates, "GiB/s")


def time_checksums() -> None:
    tokens = np.random.default_rng(0).integers(0, 300, BYTES // 2, dtype=np.uint16)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shard = shard_builder.write_shard(
            folder / token_shards.shard_name(0), "uint16", [("train", tokens, BYTES // 2)]
        )
        index = token_shards.Index(dtype="uint16", shards=[shard])

        def verify() -> None:
            assert not token_shards.TokenCache(folder, index).verify(lambda n_bytes: None)

        report("token cache verified", [BYTES / 1e9 / seconds(verify) for _ in range(REPETITIONS)], "GB/s")


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {os.cpu_count()} CPU cores, {BYTES / 2**20:.0f} MiB of weights and of tokens")
    time_locks()
    time_hash()
    time_checksums()
