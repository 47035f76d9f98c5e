"""The program of a process with limits of memory and time: python -m titanlite.data.worker_process HF_ASSETS_PATH.
Worker starts it."""

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
    """Read all of a parquet file's footer, since pyarrow reads its parts only when they are asked for."""
    import pyarrow.parquet  # imported here, since few workers need it

    with contextlib.suppress(Exception):  # the reader of the file will raise it, too
        metadata = pyarrow.parquet.ParquetFile(file).metadata
        for group in range(metadata.num_row_groups):
            restart_time_limit()
            for column in range(metadata.num_columns):
                metadata.row_group(group).column(column).to_dict()


def readable_footers(files: Iterable[Path]) -> Iterator[Path]:
    """Yield the parquet files whose footers pyarrow can read or raises an exception for. They are read in another
    process, since some damaged footers crash pyarrow's process. Raises ConfigError for these."""
    with contextlib.closing(Worker()) as worker:
        for file in files:
            worker.call(read_footer, file, subject=f"{file}: reading its footer")
            yield file


def main() -> None:
    """Answer the parent's calls."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.__stdout__, sys.stdout = os.fdopen(os.dup(1), "w"), os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    for descriptor in (1, 2):  # the library's Rust code prints there: that is no answer
        os.dup2(sys.stdout.fileno(), descriptor)
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers would import it, and no tokenizer needs it
    path, tokenizer, calls = sys.argv[1], None, queue.SimpleQueue[Any]()

    def receive() -> None:
        with contextlib.suppress(EOFError, ValueError):
            while True:
                calls.put(read(sys.stdin.buffer))
        os._exit(1)  # the parent has ended, or stdin has something else than a call

    threading.Thread(target=receive, daemon=True).start()
    while True:
        name, arguments = calls.get()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # SIGPROF ends the process after these seconds
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
        except BaseException as error:  # a panic in the Rust library is no Exception
            problem = f"{path}: its tokenizer.json or chat template cannot be used: {reason_of(error)}"
            send("error", (True, [problem]))


if __name__ == "__main__":
    main()
