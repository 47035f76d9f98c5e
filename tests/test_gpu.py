"""What only a CUDA device can show, on one GPU: `pytest -m gpu`. The same paths run on the CPU in the other tests."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from titanlite import config, parity
from titanlite.metrics import Peak

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.gpu

CONFIG = """
[model]
dim = 256
n_layers = 2
n_heads = 4
n_kv_heads = 2
ffn_dim = 512

[training]
seq_len = 256
local_batch_size = 4
global_batch_size = 8
steps = 6

[optimizer]
lr = 1e-3

[lr_scheduler]
warmup_steps = 2

[metrics]
log_freq = 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "gpu.toml").write_text(CONFIG)
    return tmp_path


def train(folder: Path, run: str, *arguments: str) -> list[dict[str, float]]:
    common = [f"--job.dump_folder={folder / run}", f"--training.cache_folder={folder / 'cache'}"]
    command = [sys.executable, "train.py", str(folder / "gpu.toml"), *common, *arguments]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240)
    return [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "offloaded"])
def test_equals_one_process_in_float64(folder, offload):
    """NCCL with one rank, FSDP, accumulation and clipping against plain tensors on the same device."""
    launch = config.Launch(0, 0, 1, 1, 1)
    arguments = ["--training.dtype=float64", f"--training.enable_cpu_offload={str(offload).lower()}"]
    job = config.check(config.load([str(folder / "gpu.toml"), *arguments]), launch)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = parity.run(job, launch, steps=3)
    finally:
        dist.destroy_process_group()
    differences = parity.differences(found, parity.run_alone(job, torch.device("cuda", 0), steps=3))
    assert {what: d for what, d in differences.items() if d > 1e-11} == {}


def test_bfloat16_is_the_default_and_trains(folder):
    rows = train(folder, "run")
    assert 'mixed_precision_param = "bfloat16"' in (folder / "run" / "config.toml").read_text()
    assert rows[-1]["loss_metrics/global_avg_loss"] < rows[0]["loss_metrics/global_avg_loss"] - 0.5
    assert 0 < rows[-1]["memory/max_active(GiB)"] <= rows[-1]["memory/max_reserved(GiB)"]


def test_resume_with_deterministic_algorithms_is_bit_for_bit(folder):
    arguments = ["--checkpoint.enable", "--debug.deterministic", "--lr_scheduler.total_steps=6"]
    whole = train(folder, "whole", *arguments)
    train(folder, "parts", *arguments, "--training.steps=3", "--checkpoint.async_mode=async")
    parts = train(folder, "parts", *arguments)
    for tag in ("step", "loss_metrics/global_avg_loss", "grad_norm"):
        assert [row[tag] for row in parts] == [row[tag] for row in whole]


def test_memory_snapshot(folder):
    train(folder, "run", "--profiling.enable_memory_snapshot", "--profiling.profile_freq=4")
    assert (folder / "run" / "memory_snapshot" / "step_4" / "rank0.pickle").stat().st_size > 1000


def test_the_measured_peak_is_below_the_data_sheet():
    device = torch.device("cuda", 0)
    sheet, measured = Peak(device, torch.bfloat16), Peak(device, torch.float16)  # float16 is as fast and in no table
    assert "measured" in measured.source
    assert 0.3 * sheet.flops < measured.flops < 1.05 * sheet.flops
