"""A worker process (worker_process.py) with limits on memory and time, which handles untrusted data: tokenizers' files,
chat templates, rows, and footers of parquet files. A message is a line: a name and JSON. A call names a function of
titanlite; its arguments and result must have the types that the function declares. A malicious file can make a worker
send wrong tokens, but not code."""

import contextlib
import functools
import inspect
import os
import pkgutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, BinaryIO, get_type_hints

from pydantic import TypeAdapter

from titanlite.config.errors import TrainingError
from titanlite.config.loader import ConfigError
from titanlite.data.tokenizer import SECONDS

MEMORY = 7 * 2**28  # maximum bytes of data in a worker's memory, and of a message
THREADS = 4  # cores per worker; reading and decompression use one of them
MESSAGES: dict[str, TypeAdapter[Any]] = {
    "error": TypeAdapter(tuple[bool, list[str]]),  # whether the error is a ConfigError; the error's lines
    "report": TypeAdapter(tuple[int, int, list[str]]),  # bytes and tokens since the last report; unread columns' names
    "at": TypeAdapter(tuple[str, int]),  # file and row that a worker reads next
}
"""Types of the contents of a worker's messages, except results, by name."""


def name_of(target: Any) -> str:
    """Return the name by which a message refers to a function or class."""
    return f"{target.__module__}:{target.__qualname__}"


def named(name: str) -> Any:
    """Return the function or class of titanlite with a name. Raises ValueError for any other name."""
    target = pkgutil.resolve_name(name) if name.startswith("titanlite.") else None
    if target is None or name_of(target) != name:  # reject objects that the module has only imported
        raise ValueError(f"{name} is no function of titanlite")
    return target


@functools.cache
def types_of(function: Callable[..., Any]) -> tuple[TypeAdapter[Any], TypeAdapter[Any]]:
    """Return the types of a function's arguments, except the first (the tokenizer), and of its result."""
    hints = get_type_hints(function, include_extras=True)
    _, *names = inspect.signature(function).parameters
    return TypeAdapter(tuple[tuple(hints[name] for name in names)]), TypeAdapter(hints["return"])  # type: ignore[misc]


def write(pipe: BinaryIO, name: str, content: bytes) -> None:
    pipe.write(b"%s %s\n" % (name.encode(), content))
    pipe.flush()


def read(pipe: BinaryIO) -> tuple[str, bytes]:
    """Return the name and JSON of the next message. Raises EOFError if the other process has ended."""
    if not (line := pipe.readline(MEMORY)).endswith(b"\n"):
        raise EOFError
    name, _, content = line.partition(b" ")
    return name.decode(), content


class Worker:
    """Calls functions on a tokenizer, by default on the tokenizer of bytes, in a process that ends with this one."""

    def __init__(self, hf_assets_path: str = ""):
        environment = dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS"), str(THREADS))
        environment |= {"TOKENIZERS_PARALLELISM": "true", "ARROW_DEFAULT_MEMORY_POOL": "system"}  # avoids large arenas
        self.path, self._lock = hf_assets_path, threading.Lock()
        self.process: Any = subprocess.Popen(
            [sys.executable, "-m", "titanlite.data.worker_process", hf_assets_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,  # signals to a launch's process group must not reach a worker
        )

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        where: Callable[[], str] = lambda: "",
        received: Callable[..., None] = lambda *content: None,
        subject: str = "",
    ) -> Any:
        """Call a function in the worker and return its result. Raises the function's error; for a crash or an exceeded
        limit, a ConfigError that names `subject` (default: tokenizer) and `where`. `received` gets other messages."""
        types, result = types_of(function)
        content, problem = types.dump_json(arguments), ""
        with self._lock:
            try:
                write(self.process.stdin, name_of(function), content)
                while True:
                    kind, content = read(self.process.stdout)
                    content = (result if kind == "result" else MESSAGES[kind]).validate_json(content, strict=True)
                    if kind == "result":
                        return content
                    if kind == "error":
                        raise ConfigError(content[1]) if content[0] else TrainingError(*content[1])
                    received(kind, *content)
            except (BrokenPipeError, EOFError):
                pass  # the worker has ended
            except (ValueError, KeyError):
                problem = "makes a process send what is no answer"
        self.process.kill()
        status = self.process.wait()
        if not problem and (status >= 0 or status == -signal.SIGKILL):
            problem = f"a process that reads data ended with status {status}"
            raise TrainingError(f"{problem}; perhaps the memory was too small")
        if status == -signal.SIGPROF:
            problem = f"takes more than {SECONDS} s of processor time"
        crash = f"crashes ({signal.Signals(-status).name}) or takes more than {MEMORY / 2**30:.3g} GiB of memory"
        subject = subject or f"{self.path}: its tokenizer.json or chat template"
        raise ConfigError([f"{subject} {problem or crash}{where()}; correct it"])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def send(kind: str, content: Any) -> None:
    write(sys.__stdout__.buffer, kind, MESSAGES[kind].dump_json(content))
