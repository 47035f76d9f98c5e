"""Fork a command's processes from a server process that has imported the needed modules once."""

import multiprocessing
import os
import signal
import sys
import types
from multiprocessing.context import ForkServerContext, ForkServerProcess


class _Process(ForkServerProcess):
    """A process that does not import the user's script, whose top level may train a model or start processes."""

    def start(self) -> None:
        script, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
        try:
            super().start()
        finally:
            sys.modules["__main__"] = script


class _Context(ForkServerContext):
    Process = _Process


def forkserver(preload: str) -> ForkServerContext:
    """Return a multiprocessing context whose processes are forked from a server that has imported `preload`. SIGINT is
    blocked in the server and its forks, as Ctrl-C reaches every process of a terminal, and only the command should
    respond. Each fork must call `end_after` to end with the command; prctl(2) would make it end with the server."""
    context = _Context()
    context.set_forkserver_preload([preload])
    # The resource tracker warns about resources of killed processes, which the kernel has freed: ignore the warnings.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    multiprocessing.forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context
