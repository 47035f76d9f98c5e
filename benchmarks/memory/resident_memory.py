"""Measure the resident memory of this process, and the CPU time of any process, as the Linux kernel reports them
(/proc), independently of torch."""

import os
import re
from pathlib import Path


def map_each_tensor() -> None:
    """Make glibc of processes started from now on map each tensor of 64 KiB or more separately, and unmap it when it
    is freed. The resident set of such a process is then its live tensors."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)
    os.environ["MALLOC_MMAP_MAX_"] = str(2**20)


def resident_bytes(field: str) -> int:
    """Return VmRSS, the bytes resident now, or VmHWM, the most since `reset_peak`."""
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 2**10


def reset_peak() -> None:
    """Restart the peak VmHWM from the current resident set (man 5 proc, clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def cpu_seconds(process: int) -> float:
    """Return the CPU time of a process, of all its threads together."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
