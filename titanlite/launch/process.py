"""The first actions of a process, before it imports torch: it handles signals, and a rank ends with its launcher.

    SIGTERM, SIGHUP    stop: finish the step, save a checkpoint, exit with 0
    SIGINT             the same; a second one ends the process at once, with 1
    SIGUSR1            save a checkpoint after this step, and continue

Before there is anything to save, SIGTERM, SIGHUP and SIGINT end the process at once, with 0."""

import contextlib
import ctypes
import io
import math
import os
import pwd
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import IO, Any, NoReturn

from titanlite.launch.safe_path import keep_children_safe

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
STARTED_BY = "TITANLITE_LAUNCHER"
"""Environment variable: the process ID of the launcher that started a rank."""
ENDS_WITH_STDIN = "TITANLITE_ENDS_WITH_STDIN"
"""Environment variable of a command's ranks: a rank ends when its standard input closes, because the command ended."""
STOPPED = 128 + signal.SIGTERM
"""Exit status of a rank that was asked to stop before it had anything to save."""
SECONDS_OF_A_STALL = 10
"""Seconds to wait for a stalled terminal or pipe (Ctrl-S), less than the time after which a rank counts as hanging."""
LOG_FOLDER = "TITANLITE_LOG_FOLDER"
"""Environment variable: the folder of the ranks' logs. Ranks that LOG_RANK names write to the console, too."""


def available_cores() -> int:
    # macOS has no sched_getaffinity.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Signals:
    """The signals that this process has received. A thread reads them, since the main thread may hang."""

    def __init__(self) -> None:
        self.stopping, self.saves, self.answered_saves = False, 0, 0
        self.nothing_to_save = True
        """Whether a stop ends the process at once."""
        self.stopped: Callable[[], None] = lambda: None
        """Called before a signal ends the process."""
        self._interrupts, self._interrupted = 0, -math.inf

    @property
    def asked_to_save(self) -> bool:
        return self.saves > self.answered_saves

    def listen(self, received: Callable[[int], None]) -> None:
        """Call `received` with the number of each signal, in a thread. Only the main thread may call this."""
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, lambda number, frame: None)

        def read() -> None:
            while numbers := os.read(read_end, 64):
                for number in filter(SIGNALS.__contains__, numbers):  # the pipe gets every signal that has a handler
                    received(number)

        threading.Thread(target=read, name="signals", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the launcher starts ranks with blocked signals

    def received_by_rank(self, number: int) -> None:
        """Record a signal that a rank has received, or end the process."""
        if number == signal.SIGUSR1:
            self.saves += 1
            return
        if number == signal.SIGINT:
            # A scheduler's SIGINT to all processes reaches a rank twice: from the scheduler and from the launcher.
            self._interrupts += time.monotonic() - self._interrupted > 0.5
            self._interrupted = time.monotonic()
        if self._interrupts > 1:
            self.end("interrupted twice: ended without saving", status=1)
        if self.nothing_to_save:
            # The status STOPPED tells the launcher that other ranks must end, too, and that nothing has failed.
            status = STOPPED if STARTED_BY in os.environ else 0
            self.end("asked to stop before the first step was done: nothing to save", status)
        self.stopping = True

    def end(self, message: str, status: int) -> None:
        """Print a message and end the process, from any thread."""
        begin_to_end()
        if os.environ.get("RANK", "0") == "0":
            for file in {2, log}:
                append(file, f"{message}\n")
        self.stopped()
        clean_up()
        os._exit(status)


at_exit: list[Callable[[], None]] = []
"""Functions to call before the process ends in any way except by SIGKILL."""
_ending = threading.RLock()


def begin_to_end() -> None:
    """Return in the first thread that calls this, which then ends the process; in other threads, never return."""
    if not _ending.acquire(blocking=False):
        threading.Event().wait()


def clean_up() -> None:
    """Call the functions of `at_exit`, for at most two seconds each, since a disk may hang."""
    while at_exit:
        with_deadline(at_exit.pop())


def with_deadline(call: Callable[[], None], seconds: float = 2.0) -> None:
    """Call a function, wait at most `seconds` for its end, and ignore its errors."""

    def run() -> None:
        with contextlib.suppress(Exception):
            call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)


signals = Signals()
console = 2
"""File descriptor of the user's console (the launcher's standard error), even in a rank whose lines are hidden."""
log = 2
"""File descriptor of this rank's log file; 2 if standard error is the log file, or if there is no log file."""


def prepare(*, is_command: bool) -> None:
    """Make a process independent of its environment: remove rank variables that a notebook has set, open closed
    standard streams, escape characters that a stream cannot encode, and give an unknown user a name and a home."""
    keep_children_safe()
    if "TORCHELASTIC_RUN_ID" not in os.environ and (is_command or "WORLD_SIZE" not in os.environ):
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ["USER"] = os.environ.get("USER") or f"{os.getuid()}"
        os.environ["HOME"] = os.environ.get("HOME") or tempfile.mkdtemp(prefix="home-")


def start_rank() -> None:
    """Prepare the process of a rank. A second call does nothing."""
    if signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL:
        return
    prepare(is_command=False)
    signals.listen(signals.received_by_rank)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # the parent is torchrun; another parent, such as a shell, may end early
        _end_with_parent()
    if folder := os.environ.get(LOG_FOLDER):
        keep_log(folder)
    sys.stdout, sys.stderr = UnfailingStream(sys.stdout), UnfailingStream(sys.stderr)


def retain_freed_memory() -> None:
    """Let glibc keep freed memory for the next step: mapping and zeroing new pages takes time."""
    with contextlib.suppress(AttributeError, OSError):
        for parameter in (-3, -1):  # malloc.h: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            ctypes.CDLL(None).mallopt(parameter, 2**31 - 1)


def end_after(wait: Callable[[], object], name: str, status: int = -signal.SIGKILL) -> None:
    """Start a thread that calls `wait`, then ends this process with `status` or, if negative, by signal -status."""

    def watch() -> None:
        wait()
        os._exit(status) if status >= 0 else os.kill(os.getpid(), -status)

    threading.Thread(target=watch, name=name, daemon=True).start()


def _end_with_parent() -> None:
    """Kill this process when its parent, the launcher, ends: by prctl(2) on Linux, elsewhere by checks each second."""
    parent = int(os.environ.get(STARTED_BY) or os.getppid())

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(1)

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # sys/prctl.h: PR_SET_PDEATHSIG
    else:
        end_after(wait, "parent")
    if os.getppid() != parent:  # the parent has ended already
        os.kill(os.getpid(), signal.SIGKILL)


def keep_log(folder: str) -> None:
    """Write this rank's output to a log file and, if LOG_RANK names the rank or torchrun started it, to the console."""
    global console, log
    if log != 2 or console != 2:
        return
    from titanlite.config.regular_file import open_own  # imported here, after signals are handled

    try:
        os.makedirs(folder, exist_ok=True)
        log = open_own(log_file(folder, int(os.environ.get("RANK", 0))), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:  # a full disk must not end the run
        log = os.open(os.devnull, os.O_WRONLY)
    append(log, time.strftime("started %Y-%m-%d %H:%M:%S %z\n"))  # the file may contain lines of earlier starts
    shown = (os.environ.get("LOG_RANK") or "0").split(",")
    if LOG_FOLDER in os.environ and os.environ.get("LOCAL_RANK") not in shown:
        console = os.dup(2)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        log = 2


def log_file(folder: str, rank: int) -> str:
    return os.path.join(folder, f"rank-{rank:05d}.log")


_stalled: set[int | IO[str]] = set()


def takes_text(file: int | IO[str]) -> bool:
    """Return whether a file accepts text now. Wait only once for a stalled terminal or pipe; later text is lost."""
    poll = select.poll()
    with contextlib.suppress(ValueError):  # the stream has no file descriptor
        poll.register(file, select.POLLOUT)
        if not poll.poll(0 if file in _stalled else SECONDS_OF_A_STALL * 1000):
            _stalled.add(file)
            return False
        _stalled.discard(file)
    return True


def append(file: int, text: str) -> None:
    """Write to a file descriptor, and ignore errors such as a full disk."""
    with contextlib.suppress(OSError):
        if takes_text(file):
            os.write(file, text.encode(errors="backslashreplace"))


def print_to_console(text: str, *, hidden: bool = False) -> None:
    """Write text, with control characters escaped, to the rank's log and, unless `hidden`, to the user's console."""
    from titanlite.config.loader import printable  # imported here, after signals are handled

    text = printable(text, keep="\n\t")
    sys.stdout.flush()
    sys.stderr.flush()
    for file in {console, log} - ({console} if hidden else set()):
        append(file, f"{text}\n")


class UnfailingStream:
    """Writes each line at once to a stream and the rank's log. Never fails, since a lost console must end no run."""

    def __init__(self, stream: IO[str]):
        self._stream, self._line = stream, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._line += text
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        line, self._line = self._line, ""
        if line and log != 2:
            append(log, line)
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
            if takes_text(self._stream):
                self._stream.write(line)
                self._stream.flush()


def exit_process(status: int) -> NoReturn:
    """End the process without Python's shutdown, in which an abort of gloo's threads could fail a finished run."""
    begin_to_end()
    clean_up()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)
