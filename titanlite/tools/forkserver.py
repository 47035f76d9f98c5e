"""Fork a command's processes from a server that has done the imports once."""

import multiprocessing
import os
import signal
from multiprocessing.context import ForkServerContext


def forkserver(preload: str) -> ForkServerContext:
    """Return a multiprocessing context whose processes are forked from a server that has imported `preload`. Ctrl-C
    reaches every process of a terminal, and only this one should respond: SIGINT is blocked in the server and its
    forks. The server outlives its forks, so these end by `end_after` and not by prctl(2)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    # Processes are killed in the end. That frees what they hold, so the resource tracker need not warn.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    multiprocessing.forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context
