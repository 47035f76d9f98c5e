"""Two nodes on one machine: network namespaces joined by a link that can be cut. This needs Linux and root.

Both share the file system, as nodes of a cluster share the dump folder. What a namespace does not have is the address
to which the machine's own name resolves, so gloo is told its interface by name.
"""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from tests.helpers.launches import wait_until

ROOT = Path(__file__).parents[2]
ADDRESSES = "10.213.7.1", "10.213.7.2"
PORT = "29500"  # no other process has it: each namespace has ports of its own


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout


@functools.cache
def reason_to_skip() -> str:
    """Return why this machine cannot have two nodes; "" if it can."""
    if not sys.platform.startswith("linux") or not shutil.which("ip"):
        return "network namespaces need Linux and its command ip"
    try:
        with TwoNodes():
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted here: {error.stderr.strip()}"


class TwoNodes:
    """Two nodes, for the body of a with statement; all their processes are killed after it."""

    def __init__(self) -> None:
        self.names = tuple(f"tl{os.getpid()}-{node}" for node in (0, 1))
        self.started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "TwoNodes":
        try:
            for name in self.names:
                ip("netns", "add", name)
            first, second = self.names
            ip("link", "add", "link0", "netns", first, "type", "veth", "peer", "name", "link0", "netns", second)
            for name, address in zip(self.names, ADDRESSES, strict=True):
                ip("-n", name, "address", "add", f"{address}/24", "dev", "link0")
                for interface in ("lo", "link0"):
                    ip("-n", name, "link", "set", interface, "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for node, name in enumerate(self.names):
            with contextlib.suppress(subprocess.CalledProcessError):  # it was not made
                self.kill_processes(node)
                ip("netns", "delete", name)
        for process in self.started:
            process.communicate()
        self.started.clear()

    def start(self, node: int, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command on a node, as one of two nodes with one rank each."""
        variables = {"NNODES": "2", "NODE_RANK": str(node), "NGPU": "1", "OMP_NUM_THREADS": "1", "LOG_RANK": "0"}
        variables |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": "link0"}
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[node], *command],
            cwd=ROOT,
            env=os.environ | variables | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def cut(self) -> None:
        """Cut the link: packets get lost, and nobody is told."""
        self.set_link("down")

    def connect(self) -> None:
        """Restore the link."""
        self.set_link("up")

    def set_link(self, state: str) -> None:
        for name in self.names:
            ip("-n", name, "link", "set", "link0", state)

    def kill(self, node: int) -> None:
        """Kill every process of a node, as if it had lost its power: the link goes first, since the kernel of a node
        that is still up would close their connections."""
        self.cut()
        self.kill_processes(node)

    def kill_processes(self, node: int) -> None:
        def killed() -> bool:
            processes = self.processes(node)
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            return not processes

        wait_until(killed, f"no process of node {node}", seconds=10)

    def processes(self, node: int) -> list[int]:
        """Return the processes of a node that have not ended."""
        pids = map(int, ip("netns", "pids", self.names[node]).split())
        return [pid for pid in pids if not has_ended(pid)]


def has_ended(process: int) -> bool:
    """Return whether a process is gone, or a zombie whose parent has not asked for its status yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
