"""Does concurrent.futures.ProcessPoolExecutor do for workers what a token cache needs of them?

    python benchmarks/executor_workers.py

It prints whether a worker is left 6 s after its parent was killed, for each way to start it, idle and busy, and with or
without a thread in it that waits for the parent's end; and what the parent learns of a worker that a signal has ended.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool


def end_with_parent() -> None:
    """Start a thread that ends this process as soon as its parent has ended."""

    def wait() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split()[2] != "Z"
    except FileNotFoundError:
        return False


def parent(method: str, waits: str, busy: str) -> None:
    """Print the ID of a worker, and stay until killed."""
    context = multiprocessing.get_context(method)
    pool = ProcessPoolExecutor(1, mp_context=context, initializer=end_with_parent if waits == "thread" else None)
    print(pool.submit(os.getpid).result(), flush=True)
    if busy == "busy":
        pool.submit(time.sleep, 3)
    time.sleep(60)


def main() -> None:
    """Print the results."""
    for method in ("spawn", "forkserver"):
        for waits in ("nothing", "thread"):
            for busy in ("idle", "busy"):
                command = [sys.executable, __file__, method, waits, busy]
                process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
                worker = int(process.stdout.readline())
                time.sleep(1)
                process.kill()
                process.wait()
                time.sleep(6)
                left = is_running(worker)
                print(f"{method}, {busy}, {waits} in it waits for the parent: left {left}", flush=True)
                if left:
                    os.kill(worker, signal.SIGKILL)
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    try:
        pool.submit(os.abort).result()
    except BrokenProcessPool as error:
        print(f"a worker that aborts: {error!r}")


if __name__ == "__main__":
    parent(*sys.argv[1:]) if sys.argv[1:] else main()
