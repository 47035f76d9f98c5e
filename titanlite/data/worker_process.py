"""The program of a worker process (worker.py): python -m titanlite.data.worker_process HF_ASSETS_PATH."""

import contextlib
import os
import queue
import resource
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from titanlite.config.errors import TrainingError
from titanlite.config.loader import ConfigError
from titanlite.data.hf_tokenizer import HuggingFaceTokenizer, reason_of
from titanlite.data.tokenizer import SECONDS, ByteTokenizer, restart_time_limit
from titanlite.data.worker import MEMORY, Worker, named, read, send, types_of, write


def read_footer(_: Any, file: Path) -> None:
    """Read all of a parquet file's footer, of which pyarrow decodes parts only on access."""
    import pyarrow.parquet  # imported here, since few workers need pyarrow

    with contextlib.suppress(Exception):  # the run will raise this error when it reads the file
        metadata = pyarrow.parquet.ParquetFile(file).metadata
        for group in range(metadata.num_row_groups):
            restart_time_limit()
            for column in range(metadata.num_columns):
                metadata.row_group(group).column(column).to_dict()


def readable_footers(files: Iterable[Path]) -> Iterator[Path]:
    """Yield parquet files whose footers a worker has read. Raises ConfigError for a footer that crashes the worker."""
    with contextlib.closing(Worker()) as worker:
        for file in files:
            worker.call(read_footer, file, subject=f"{file}: reading its footer")
            yield file


def main() -> None:
    """Answer the calls of the parent process."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.__stdout__, sys.stdout = os.fdopen(os.dup(1), "w"), os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    for descriptor in (1, 2):  # prints of the tokenizers library to stdout would corrupt answers
        os.dup2(sys.stdout.fileno(), descriptor)
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers would import torch, which no tokenizer needs
    path, tokenizer, calls = sys.argv[1], None, queue.SimpleQueue[Any]()

    def receive() -> None:
        with contextlib.suppress(EOFError, ValueError):
            while True:
                calls.put(read(sys.stdin.buffer))
        os._exit(1)  # the parent has ended, or stdin is damaged

    threading.Thread(target=receive, daemon=True).start()
    while True:
        name, arguments = calls.get()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # SIGPROF ends this process after SECONDS of processor time
        try:
            function = named(name)
            types, result = types_of(function)
            tokenizer = tokenizer or (HuggingFaceTokenizer(Path(path)) if path else ByteTokenizer())
            content = function(tokenizer, *types.validate_json(arguments, strict=True))
            write(sys.__stdout__.buffer, "result", result.dump_json(content))
        except ConfigError as error:
            send("error", (True, error.problems))
        except (TrainingError, OSError) as error:
            send("error", (False, [str(error)]))
        except BaseException as error:  # a panic in the Rust library is a BaseException
            send("error", (True, [f"{path}: its tokenizer.json or chat template cannot be used: {reason_of(error)}"]))


if __name__ == "__main__":
    main()
