"""What a process has in memory, from the kernel (Linux: /proc): the measure that knows nothing of torch."""

import os
import re
from pathlib import Path


def map_each_tensor() -> None:
    """Have processes that begin from now on map tensors of 64 KiB and more one by one, and unmap each when it is freed
    (glibc reads these variables as it begins): then what is resident is what is alive."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)
    os.environ["MALLOC_MMAP_MAX_"] = str(2**20)


def resident_bytes(field: str) -> int:
    """VmRSS, what this process has resident; or VmHWM, the most it had since `forget_peak`."""
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 2**10


def forget_peak() -> None:
    """Begin VmHWM anew; man 5 proc."""
    Path("/proc/self/clear_refs").write_text("5")
