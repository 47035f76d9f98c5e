"""Reads the footers of parquet files in a process of its own: at some damaged ones pyarrow ends its process.

python -m titanlite.data.parquet_footers        started by survivors: a JSON string on each line of stdin, the file's
                                                path, and an empty line on stdout once it has been read
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from titanlite.config.loader import ConfigError


def survivors(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the paths of files whose footers can be read, or raise an exception. Raises ConfigError for another."""
    command = [sys.executable, "-m", "titanlite.data.parquet_footers"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            for path in paths:
                with contextlib.suppress(BrokenPipeError):
                    print(json.dumps(str(path)), file=process.stdin, flush=True)
                if not process.stdout.readline():  # type: ignore[union-attr]
                    problem = f"its footer is damaged: pyarrow ended its process with status {process.wait()}"
                    raise ConfigError([f"{path}: cannot be read: {problem}"])
                yield path
        finally:
            process.kill()


def main() -> None:
    """Read the footers of the files that the parent names."""
    import pyarrow.parquet  # here, since the parent may do without

    for line in iter(sys.stdin.readline, ""):
        with contextlib.suppress(Exception):  # the parent meets it too
            metadata = pyarrow.parquet.ParquetFile(json.loads(line)).metadata
            for group in range(metadata.num_row_groups):
                for column in range(metadata.num_columns):
                    metadata.row_group(group).column(column).to_dict()
        print(flush=True)


if __name__ == "__main__":
    main()
