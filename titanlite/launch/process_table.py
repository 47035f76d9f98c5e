"""Find out whether a process, identified by ID and start time, exists on this node."""

import functools
import os
import platform
import secrets
import subprocess
import sys
from pathlib import Path


@functools.cache
def machine() -> str:
    """Return a name that identifies this booted kernel and this process table; each container has its own table."""
    if not sys.platform.startswith("linux"):
        return platform.node()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:  # a random name equals no other, so only heartbeats show whether another process is alive
        return secrets.token_hex(16)


def process_start_time(pid: int) -> str | None:
    """Return a process's start time as text; "" if the process has ended, None if this user may not know."""
    if not sys.platform.startswith("linux"):
        command = ["ps", "-o", "lstart=", "-p", str(pid)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    try:
        # The name, in parentheses, may have spaces. Field 3 is the state, field 22 the start time (proc_pid_stat(5)).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # /proc may hide other users' processes (hidepid)
        try:
            os.kill(pid, 0)
        except OSError as error:  # any other error means that the process exists
            return "" if isinstance(error, ProcessLookupError) else None
        return None
    return "" if fields[0] in "ZX" else fields[19]
