"""The end of a rank after an error: the printed message, the exit status, and the record for other ranks."""

import os
import re
import socket
import traceback
from datetime import timedelta
from typing import Any

from titanlite.config import ConfigError, Launch
from titanlite.config.errors import TrainingError
from titanlite.launch import process
from titanlite.launch.process_table import machine

BACKSTOP_SECONDS = 15
"""Seconds by which process groups' timeouts exceed the watchdog's timeout, so that the watchdog reports first."""
LOST_CONNECTION = re.compile(r"closed by peer|[Cc]onnection [a-z]+|Broken pipe|[Tt]imed out|[Tt]imeout|ncclRemoteError")
"""Matches messages of gloo, NCCL and torch's store about errors that another rank has caused."""
RECORD_SECONDS = 5.0
"""Seconds for which a rank that has lost a connection waits for another rank to record the cause."""


class OneRank:
    """Ends the only rank of a run; its subclass Watchdog ends all ranks of a larger run."""

    def __init__(self, launch: Launch):
        self.launch = launch

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...

    def end(self, message: str, status: int, *, lost_connection: bool = False) -> None:
        """End this process because of an error. lost_connection: another rank may have failed first."""
        process.begin_to_end()
        process.clean_up()
        process.print_to_console(message)
        process.exit_process(status)


def fail(error: Exception, rank: OneRank | None) -> None:
    """End this process because of an error, which is printed in one line if it is a ConfigError or TrainingError.
    `rank` is None during startup, when all ranks find the same ConfigError: only a node's first rank prints it."""
    status = 2 if isinstance(error, ConfigError) else 1
    lost_connection = isinstance(error, RuntimeError) and bool(LOST_CONNECTION.search(f"{error}"))
    where = f"rank {rank.launch.rank} on {socket.gethostname()}" if rank else "a rank"
    if isinstance(error, ConfigError):
        message = "\n".join(f"error: {problem}" for problem in error.problems)
    elif isinstance(error, TrainingError):
        message = f"error: {error}"
    elif lost_connection:
        reason = re.sub(r"^\[.*?\] ", "", f"{error}").partition("\nException raised from")[0]  # leave out C++ frames
        message = f"error: {where} has lost another rank, which has died or does not answer: {reason}"
    else:
        message = "".join(traceback.format_exception(error)).rstrip()
        if rank and rank.launch.world_size > 1:
            message = f"error: {where}:\n{message}"
    if rank:
        rank.end(message, status, lost_connection=lost_connection)
    if status == 1 or os.environ.get("LOCAL_RANK", "0") == "0" or "TORCHELASTIC_RUN_ID" not in os.environ:
        process.print_to_console(message)
    process.exit_process(status)


def failure(rank: int, message: str, status: int = 1) -> dict[str, Any]:
    """Return the record of a rank's failure. Once stored, a record ends all ranks. An empty message is not printed."""
    return {"rank": rank, "machine": machine(), "status": status, "message": message, "kind": "error"}


def ranks_store(address: str, port: int | str, timeout_seconds: float) -> Any:
    """Return a connection to the torch.distributed.Store of the ranks that were started together."""
    import torch.distributed as dist  # imported here, since importing torch takes seconds

    timeout = timedelta(seconds=timeout_seconds)
    store = dist.TCPStore(address, int(port), is_master=False, timeout=timeout, wait_for_workers=False)
    # The launcher's agent makes a new store for each attempt; torchrun's agent keeps its store after a restart.
    attempt = "0" if process.STARTED_BY in os.environ else os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"titanlite/{attempt}", store)
