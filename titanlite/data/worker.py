"""A process with limits of memory and time, for what the files of a tokenizer, a chat template, a row and the footer of
a parquet file may ask for.

Worker starts it, sends and receives pickles on its stdin and stdout, and it ends with its parent, when stdin does.
"""

import contextlib
import os
import pickle
import queue
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config.errors import TrainingError
from titanlite.config.loader import ConfigError, show
from titanlite.data.hf_tokenizer import SECONDS, HuggingFaceTokenizer, reason_of
from titanlite.data.tokenizer import ByteTokenizer
from titanlite.launch.safe_path import python, safe_environment

MEMORY = 7 * 2**28
"""Bytes of data in a worker's memory, at most."""
THREADS = 4
"""Cores for each worker. Reading and unpacking take one thread of it."""


class Worker:
    """Calls functions on a tokenizer, that of bytes by default, in a process of its own, which ends when this one
    does."""

    process: Any = None

    def __init__(self, hf_assets_path: str = ""):
        environment = dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS"), str(THREADS))
        environment |= {"TOKENIZERS_PARALLELISM": "true", "ARROW_DEFAULT_MEMORY_POOL": "system"}  # no large arenas
        self.path, self._lock = hf_assets_path, threading.Lock()
        self.process = subprocess.Popen(
            [*python("from titanlite.data.worker import main; main()"), hf_assets_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **safe_environment(), **environment},
            start_new_session=True,  # a signal to all processes of a launch asks its ranks to stop, and no worker
        )

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        where: Callable[[], str] = lambda: "",
        received: Callable[..., None] = lambda *content: None,
        subject: str = "",
    ) -> Any:
        """Return what a function does there. Raises what it raises, and ConfigError if it exceeds the limits or
        crashes: `subject`, by default the tokenizer's files, with the reason and `where`. `received` is called with
        what it sends meanwhile."""
        with self._lock, contextlib.suppress(BrokenPipeError, EOFError, pickle.UnpicklingError):  # it has ended
            pickle.dump((function, arguments), self.process.stdin)
            self.process.stdin.flush()
            while True:
                kind, content = pickle.load(self.process.stdout)
                if kind == "result":
                    return content
                if kind == "error":
                    raise content
                received(kind, *content)
        status = self.process.wait()
        if status >= 0 or status == -signal.SIGKILL:
            problem = f"a process that reads data ended with status {status}"
            raise TrainingError(f"{problem}; perhaps the memory was too small")
        problem = f"crashes ({signal.Signals(-status).name}) or takes more than {MEMORY / 2**30:.3g} GiB of memory"
        if status == -signal.SIGPROF:
            problem = f"takes more than {SECONDS} s of processor time"
        subject = subject or f"{self.path}: its tokenizer.json or chat template"
        raise ConfigError([f"{subject} {problem}{where()}; correct it"])

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class TokenizerProcess(Worker, HuggingFaceTokenizer):
    """A Hugging Face tokenizer in a worker."""

    def __init__(self, path: Path):
        Worker.__init__(self, str(path))
        self.bos, self.eos, self.vocab_size, self.identity = self.call(_properties)

    def encode_chunks(self, chunks: list[str]) -> list[np.ndarray]:
        at = f" at the text {show(chunks[0][:40])}, or shortly after it"
        return self.call(HuggingFaceTokenizer.encode_chunks, chunks, where=lambda: at)

    def decode(self, tokens: list[int]) -> str:
        return self.call(HuggingFaceTokenizer.decode, tokens)

    def __del__(self) -> None:
        if self.process:
            self.close()


# In the worker -------------------------------------------------------------------------------------------------------


def _properties(tokenizer: Any) -> tuple[Any, ...]:
    return tokenizer.bos, tokenizer.eos, tokenizer.vocab_size, tokenizer.identity


def send(kind: str, content: Any) -> None:
    """Send something to the parent before the result."""
    sys.stdout.buffer.write(pickle.dumps((kind, content)))
    sys.stdout.buffer.flush()


def main() -> None:
    """Answer the parent's calls."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where the library's Rust code prints how it fails
    path, tokenizer, calls = sys.argv[1], None, queue.SimpleQueue[Any]()

    def read() -> None:
        with contextlib.suppress(EOFError):
            while True:
                calls.put(pickle.load(sys.stdin.buffer))
        os._exit(1)  # the parent has ended

    threading.Thread(target=read, daemon=True).start()
    while True:
        function, arguments = calls.get()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # ends the process
        try:
            tokenizer = tokenizer or (HuggingFaceTokenizer(Path(path)) if path else ByteTokenizer())
            send("result", function(tokenizer, *arguments))
        except (ConfigError, TrainingError) as error:
            send("error", error)
        except OSError as error:
            send("error", TrainingError(str(error)))
        except BaseException as error:  # of Rust code, it may be no Exception
            problem = f"{path}: its tokenizer.json or chat template cannot be used: {reason_of(error)}"
            send("error", ConfigError([problem]))
