"""Whether a process exists on this node, by the process table: an ID and a start time name a process."""

import functools
import os
import platform
import secrets
import subprocess
import sys
from pathlib import Path


@functools.cache
def machine() -> str:
    """Return a name for this kernel since its start and this process table. Containers have their own process tables;
    those of one kernel may share a file system."""
    if not sys.platform.startswith("linux"):
        return platform.node()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:  # unknown: a name that no other equals; only heartbeats count then
        return secrets.token_hex(16)


def process_start_time(pid: int) -> str | None:
    """Return when a process started, as text that is only comparable for one ID; "" if there is no such process, or it
    has ended and its parent has not noticed yet; None if this user may not know."""
    if not sys.platform.startswith("linux"):
        command = ["ps", "-o", "lstart=", "-p", str(pid)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    try:
        # The name, in parentheses, may have spaces. After it come the state and, 19 fields on, the clock ticks from
        # the kernel's start to that of the process (proc_pid_stat(5)).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # /proc may hide other users' processes (hidepid)
        try:
            os.kill(pid, 0)
        except OSError as error:  # any other error: the process exists
            return "" if isinstance(error, ProcessLookupError) else None
        return None
    return "" if fields[0] in "ZX" else fields[19]
