"""Fork a command's processes from a server process that has imported their modules once."""

import multiprocessing
import os
import signal
from multiprocessing.context import ForkServerContext


def forkserver(preload: str) -> ForkServerContext:
    """Return a multiprocessing context whose processes are forked from a server that has imported `preload`. SIGINT is
    blocked in the server and its forks, because Ctrl-C reaches every process of a terminal, and only the command should
    respond. Forks end with the command by `end_after`: by prctl(2), they would end with their parent, the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    # The command kills its processes, which frees their resources: the resource tracker's warnings are false alarms.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    multiprocessing.forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context
