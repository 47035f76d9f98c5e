"""Processes of a command that are forked from a server, in which the imports are done once."""

import multiprocessing
import os
import signal
from multiprocessing.context import ForkServerContext


def forkserver(preload: str) -> ForkServerContext:
    """Return the context of processes that are forked from a server that has imported a module. Ctrl-C reaches every
    process of a terminal, and only this one is to respond: the server, and what it forks, have SIGINT blocked. The
    server does not end before what it forks, which therefore ends by `end_after`, and not by prctl(2)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    # Processes are killed in the end. What they leave is freed then, so no warning is needed.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    multiprocessing.forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context
