"""The files of a run's metrics, when they are damaged and when the disk is full."""

import contextlib
import errno
import gc
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers.cases import cases
from tests.helpers.launches import ROOT
from titanlite.config.loader import ConfigError
from titanlite.config.schema import Metrics
from titanlite.files import appended_file
from titanlite.files.appended_file import AppendedFile
from titanlite.files.durable import replace_file
from titanlite.launch import process, progress
from titanlite.metrics import logger as metrics
from titanlite.metrics import out_of_memory


def open_logger(folder: Path, last_step: int = 0, **options: bool) -> metrics.MetricsLogger:
    logger = metrics.MetricsLogger(folder, Metrics(**options), steps=100, config="the config of this run\n")
    logger.begin(last_step)
    return logger


def line_of(step: int, **values: float) -> bytes:
    return (json.dumps({"step": step, **values}) + "\n").encode()


def steps_of(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


DAMAGED = {
    "torn at the end": b'{"step": 3, "lo',
    "torn in the middle": b'{"step": 3, "lo\n',
    "NULs": bytes(700) + b"\n",
    "garbage": b"\xff\xfe\r\x1b[2J\n",
    "no object": b"[3]\n",
    "no step": b'{"loss": 1.0}\n',
    "step of another type": b'{"step": true}\n',
    "deep": b"[" * 100_000 + b"\n",
    "large number": b'{"step": ' + b"9" * 10_000 + b"}\n",
    "blank": b"\n",
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_lines_are_set_aside_and_the_good_ones_stay(tmp_path, capsys, damage):
    good = [line_of(1), line_of(2, loss=0.5)]
    whole = DAMAGED[damage].endswith(b"\n")
    for number, place in enumerate((0, 1, 2) if whole else (2,), 1):
        content = [*good[:place], DAMAGED[damage], *good[place:], *([line_of(3)] if whole else [])]
        (tmp_path / "metrics.jsonl").write_bytes(b"".join(content))
        capsys.readouterr()
        logger = open_logger(tmp_path, last_step=2, enable_tensorboard=False)
        assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(good)
        assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == DAMAGED[damage] * number
        line = f"{tmp_path}/metrics.jsonl: moved 1 damaged line to metrics.jsonl.damaged\n"
        assert capsys.readouterr().out == line
        logger.log(3, {"lr": 0.1}, 1.0)
        assert steps_of(tmp_path) == [1, 2, 3]


def test_a_last_line_without_its_end_is_good(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_bytes(line_of(1) + line_of(2).rstrip())
    open_logger(tmp_path, last_step=2, enable_tensorboard=False).log(3, {"lr": 0.1}, 1.0)
    assert steps_of(tmp_path) == [1, 2, 3]
    assert "damaged" not in capsys.readouterr().out


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """Mount a small file system on the folder; yield functions that fill it and that free its space."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a file system")

    def fill() -> None:
        with open(folder / "filler", "ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    try:
        yield fill, (folder / "filler").unlink
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextlib.contextmanager
def size_limit(folder: Path) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """Yield functions that forbid files above a small size, so that a record is written in part, and that allow it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    def fill() -> None:
        limit(max(path.stat().st_size for path in folder.rglob("*") if path.is_file()) + 5)

    try:
        yield fill, lambda: limit(before[0])
    finally:
        limit(before[0])


@pytest.mark.parametrize("make", [full_disk, size_limit])
def test_training_goes_on_with_a_full_disk_and_no_step_is_lost(tmp_path, capsys, make):
    folder = tmp_path / "run"
    with make(folder) as (fill, free):
        logger = open_logger(folder)
        for step in range(1, 60):
            if step == 2:
                fill()
            if step == 50:
                free()
            logger.log(step, {"lr": float(step), **{f"value {number}": 0.5 for number in range(50)}}, 1.0)
        logger.close()
        assert steps_of(folder) == list(range(1, 60))
        events = EventAccumulator(str(folder / "tb"), size_guidance={"scalars": 0}).Reload()
        assert [(event.step, event.value) for event in events.Scalars("lr")] == [(step, step) for step in range(1, 60)]
        lines = capsys.readouterr().err.splitlines()
        assert sum("could not be written: " in line for line in lines) == 2, lines
        assert sum("is written again" in line for line in lines) == 2, lines
        assert len(lines) == 4


def test_what_a_disk_that_stays_full_loses_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(appended_file, "open_own", lambda path, flags: os.open("/dev/full", flags))
    file = AppendedFile(tmp_path / "file")
    for _ in range(3):
        file.append(b"12345")
    file.close()
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith(f"warning: {tmp_path}/file could not be written: No space left on device; ")
    assert last == f"warning: the last 15 bytes of {tmp_path}/file are lost"


def test_a_file_that_cannot_be_opened_for_a_while_keeps_its_content(tmp_path, capsys):
    """What the file of a resumed run has is not taken for a part of a record."""
    path = tmp_path / "folder" / "file"
    path.parent.mkdir()
    path.write_bytes(b"before ")
    path.parent.rename(tmp_path / "away")
    path.parent.write_text("not a folder")
    file = AppendedFile(path)
    file.append(b"a ")
    path.parent.unlink()
    (tmp_path / "away").rename(path.parent)
    file.append(b"b")
    assert path.read_bytes() == b"before a b"


def test_the_config_of_the_run_before_stays_when_the_disk_is_full(tmp_path, capsys):
    (tmp_path / "config.toml").write_text("before")
    with size_limit(tmp_path) as (fill, _):
        fill()
        open_logger(tmp_path, last_step=1, enable_tensorboard=False)
    assert (tmp_path / "config.toml").read_text() == "before"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {tmp_path}/config.toml could not be written: ")
    assert not (tmp_path / "config.toml.tmp").exists()


def test_earlier_files_that_cannot_be_changed_are_one_line(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match="files of an earlier run cannot be changed: "):
        open_logger(tmp_path, last_step=1)


def test_the_steps_of_an_abandoned_past_are_removed(tmp_path):
    """A replica group has got the state of another one, which has gone on from step 2 by itself."""
    logger = open_logger(tmp_path)
    for step in (1, 2, 3, 4):
        logger.tensorboard.add_scalars({"loss": float(step)}, step)
        logger.file.append(line_of(step))
    logger.remove_after(2)
    logger.tensorboard.add_scalars({"loss": 9.0}, 9)
    logger.file.append(line_of(9))
    logger.close()
    assert steps_of(tmp_path) == [1, 2, 9]
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 9]


# MFU ------------------------------------------------------------------------------------------------------------------


def metrics_of_a_step(folder: Path, peak: metrics.PeakFlops, capsys: pytest.CaptureFixture[str]) -> tuple[dict, str]:
    """Return the values of a step by tag, and its line on the console."""
    meter = metrics.ThroughputMeter(torch.device("cpu"), tokens_per_step=1e6, flops_per_token=10**9, peak=peak)
    meter.step_done()
    values = {"loss_metrics/global_avg_loss": 5.0, "grad_norm": 1.0, "lr": 0.1, **meter.metrics()}
    capsys.readouterr()
    open_logger(folder, enable_tensorboard=False).log(1, values, meter.seconds_per_step)
    return values, capsys.readouterr().out


def test_a_cpu_has_no_mfu(tmp_path, capsys):
    peak = metrics.PeakFlops(torch.device("cpu"), torch.float32)
    values, line = metrics_of_a_step(tmp_path, peak, capsys)
    assert ("mfu(%)" in values, "MFU" in line, "tflops" in values) == (False, False, True)
    assert peak.source == "none on a CPU"


def test_a_gpu_has_one_peak_in_a_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    peak = metrics.PeakFlops(torch.device("cuda"), torch.bfloat16)
    assert peak.source.startswith("of 989 TFLOP/s, dense bfloat16, NVIDIA H100 data sheet")
    for _ in range(2):  # at rates above the peak too
        values, line = metrics_of_a_step(tmp_path, peak, capsys)
        assert values["mfu(%)"] == pytest.approx(values["tflops"] / 989 * 100)
        assert f"MFU {values['mfu(%)']:5.1f} %" in line


# Memory that is used up -----------------------------------------------------------------------------------------------

OF_CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
OF_CPU += "allocate 201326592 bytes. Error code 12 (Cannot allocate memory)"
OF_CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.00 GiB is"
OUT_OF_MEMORY = {
    "CPU": (RuntimeError(OF_CPU), ", where it tried to allocate 201326592 bytes"),
    "CUDA": (torch.OutOfMemoryError(OF_CUDA), ", where it tried to allocate 2.00 GiB"),
    "cuBLAS": (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), ""),
    "Python": (MemoryError(), ""),
    "threads": (RuntimeError("can't start new thread"), ""),
    "system": (OSError(errno.ENOMEM, "Cannot allocate memory"), ""),
}


@cases("case", OUT_OF_MEMORY, always=["CPU"])
def test_an_out_of_memory_error_is_a_line_with_the_largest_consumers(monkeypatch, case):
    def gib(name: str) -> float:
        line = str(out_of_memory.explain_out_of_memory(error))
        assert line.startswith(f"rank 3 is out of memory at 'step 7: forward and backward'{wanted}: ")
        assert "`titanlite plan CONFIG`" in line
        sizes = [float(size) for size in re.findall(r"([\d.]+) GiB", line.rpartition(": ")[2])]
        assert sizes == sorted(sizes, reverse=True)
        return float(re.search(rf"[:,] {name} ([\d.]+) GiB", line)[1])

    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(progress, "current", progress.Activity("forward and backward", 7))
    error, wanted = OUT_OF_MEMORY[case]
    names = ("weights", "gradients", "optimizer states", "the rest, such as activations")
    before = {name: gib(name) for name in names}
    layer = torch.nn.Linear(2048, 8192, bias=False)  # 1/16 GiB
    optimizer = torch.optim.AdamW(layer.parameters())
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    gc.freeze()  # as the training loop does
    after = {name: gib(name) for name in names}
    assert [round(16 * (after[name] - before[name])) for name in names[:3]] == [1, 1, 2]
    assert after[names[3]] > 0.1


@pytest.mark.parametrize("error", [ValueError("out of memory"), RuntimeError("a bug"), ConfigError(["out of memory"])])
def test_another_error_stays_as_it_is(error):
    assert out_of_memory.explain_out_of_memory(error) is error


@pytest.mark.nightly
def test_a_run_without_memory_ends_with_one_line(tmp_path):
    """Its activations need more than the 5 GiB of addresses that it may have."""
    options = [
        f"--job.dump_folder={tmp_path}/run",
        f"--training.cache_folder={tmp_path}/cache",
        "--training.seq_len=64",
    ]
    options += ["--model.n_layers=1", "--model.dim=32", "--model.n_heads=2", "--model.n_kv_heads=1"]
    options += ["--training.local_batch_size=131072", "--training.global_batch_size=131072"]
    command = ["prlimit", f"--as={5 * 2**30}", sys.executable, str(ROOT / "train.py"), "debug", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert line.startswith("error: rank 0 is out of memory at 'step 1: forward and backward', where it tried to ")
    log = (tmp_path / "run" / "logs" / "rank-00000.log").read_text()
    assert log.endswith(f"{line}\n")
    assert "Traceback (most recent call last):" in log


OTHERS = {
    "link": lambda path, other: path.symlink_to(other),
    "broken link": lambda path, other: path.symlink_to(other.with_name("nothing")),
    "pipe": lambda path, other: os.mkfifo(path),
    "pipe with a reader": lambda path, other: (os.mkfifo(path), os.open(path, os.O_RDONLY | os.O_NONBLOCK)),
    "folder": lambda path, other: path.mkdir(),
}


@pytest.mark.parametrize("kind", [*OTHERS])
def test_what_takes_the_place_of_a_file_while_running_is_not_written(kind, tmp_path, capsys):
    """The records are kept, and written when it is gone."""
    other, path = tmp_path / "other", tmp_path / "metrics.jsonl"
    other.write_text("of others\n")
    file = AppendedFile(path)
    file.append(b"1\n")
    path.unlink()
    OTHERS[kind](path, other)
    file.append(b"2\n")
    assert f"{path} could not be written: " in capsys.readouterr().err
    path.rmdir() if kind == "folder" else path.unlink()
    file.append(b"3\n")
    assert path.read_bytes() == b"2\n3\n"
    assert {each.name for each in tmp_path.iterdir()} == {"other", "metrics.jsonl"}
    assert other.read_text() == "of others\n"


@pytest.mark.parametrize("kind", [*OTHERS])
def test_what_takes_the_place_of_other_files_is_not_written(kind, tmp_path, monkeypatch):
    """That of a new file before it gets its name, and a rank's lines."""
    other = tmp_path / "other"
    other.write_text("of others\n")
    OTHERS[kind](tmp_path / "config.toml.tmp", other)
    with pytest.raises(OSError, match=r"config\.toml\.tmp"):
        replace_file(tmp_path / "config.toml", b"new")
    monkeypatch.setattr(process, "log", 2)
    OTHERS[kind](tmp_path / "rank-00000.log", other)
    process.keep_log(str(tmp_path))
    os.write(process.log, b"a line\n")
    assert {each.name for each in tmp_path.iterdir()} <= {"other", "rank-00000.log", "config.toml.tmp"}
    assert other.read_text() == "of others\n"


def test_a_folder_that_is_replaced_while_running_is_not_written(tmp_path, capsys):
    """As that of TensorBoard's events. The records are kept, and written when it is back."""
    own, other = tmp_path / "own", tmp_path / "other"
    other.mkdir()
    file = AppendedFile(own / "events")
    file.append(b"1")
    own.rename(tmp_path / "moved")
    own.symlink_to(other)
    file.append(b"2")
    assert "its folder is another one since the run has begun" in capsys.readouterr().err
    assert [*other.iterdir()] == []
    own.unlink()
    (tmp_path / "moved").rename(own)
    file.append(b"3")
    assert (own / "events").read_bytes() == b"123"


def test_a_pipe_in_the_place_of_the_metrics_is_not_read(tmp_path, capsys):
    logger = metrics.MetricsLogger(tmp_path, Metrics(enable_tensorboard=False), steps=9, config="")
    os.mkfifo(tmp_path / "metrics.jsonl")
    logger.remove_after(3)
    assert "metrics.jsonl could not be written: expected a regular file" in capsys.readouterr().err
