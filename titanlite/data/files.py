"""Rows of text, JSON and parquet files, read from any place on.

A segment is a range of a file's rows. What `begin` and `end` count depends on the file:

    text by line or paragraph, JSON lines    bytes (of the text, if the file is compressed); a row belongs to the
                                             segment in which it begins
    parquet, JSON arrays                     rows
    text by document                         files: the file is one row, 0
"""

import contextlib
import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from titanlite.config.errors import TrainingError
from titanlite.config.loader import ConfigError, show
from titanlite.config.regular_file import open_file
from titanlite.config.schema import Training
from titanlite.files.durable import is_transient

LARGEST_ROW = 2**26
"""Bytes of a row, at most: it is in memory more than once while it is read."""
BYTES_AT_A_TIME = 2**24
"""Bytes of the rows of a table that are read together, about."""
END = 2**62
"""`end` of a segment whose number of rows or bytes is not known."""
BOM = b"\xef\xbb\xbf"


class Segment(NamedTuple):
    """A range of a dataset's rows."""

    file: str
    begin: int
    end: int
    bytes: int
    """About how much of the file it is, for progress and to partition a dataset evenly."""


class Row(NamedTuple):
    """A row, and where it and the next one begin."""

    begin: int
    end: int
    values: dict[str, Any]
    """By column; text files have the column "text"."""


class BadRowError(Exception):
    """A row cannot be read; the message says why."""

    def __init__(self, begin: int, problem: str):
        super().__init__(problem)
        self.begin = begin


def is_splittable(segment: Segment) -> bool:
    """Return whether a segment may be divided at any number between its limits."""
    return segment.end not in (1, END)


def segment_of(training: Training, path: Path) -> Segment:
    """Return the segment of all rows of a file. Raises ConfigError if it cannot be read."""
    size = path.stat().st_size
    if training.dataset == "parquet":
        with _errors_of(path):
            return Segment(str(path), 0, _parquet(path).metadata.num_rows, size)
    if training.dataset == "text" and training.text_sample_by == "document":
        return Segment(str(path), 0, 1, size)
    if path.suffix == ".gz" or _is_json_array(training, path):
        return Segment(str(path), 0, END, size)
    return Segment(str(path), 0, size, size)


def read_rows(training: Training, segment: Segment, columns: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of a segment with some of their columns.

    Raises:
        ConfigError: for a row that is no row, or has not these columns; one line that names the file and the row.
        TrainingError: if the file cannot be read now, and perhaps can later.
    """
    path = Path(segment.file)
    with _errors_of(path):
        try:
            if training.dataset == "parquet":
                yield from _parquet_rows(training, path, segment, columns)
            elif training.dataset == "json" and _is_json_array(training, path):
                yield from _array_rows(training, path, segment, columns)
            else:
                with _open(path) as file:
                    yield from _rows_of_bytes(training, file, segment, columns)
        except BadRowError as error:
            raise ConfigError([f"{place(training, segment.file, error.begin)}: {error}"]) from None


def place(training: Training, file: str, begin: int) -> str:
    """Return the file and the number of the row or line, from 1 on, for messages."""
    path = Path(file)
    if training.dataset == "text" and training.text_sample_by == "document":
        return file
    if training.dataset == "parquet" or _is_json_array(training, path):
        return f"{file}, row {begin + 1:,}"
    line, position = 1, 0
    with _open(path) as content:
        while position < begin and (chunk := content.read(min(begin - position, 2**24))):
            line, position = line + chunk.count(b"\n"), position + len(chunk)
    return f"{file}, line {line:,}"


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Raise what reading a file raises with a message of one line."""
    try:
        yield
    except (ConfigError, TrainingError, BadRowError):
        raise
    except Exception as error:  # every format raises its own
        reason = " ".join(str(error).split()) or type(error).__name__
        problem = f"{path}: cannot be read: {type(error).__name__}: {reason[:300]}"
        raise (TrainingError(problem) if is_transient(error) else ConfigError([problem])) from None


@contextlib.contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    with open_file(path) as file:
        if path.suffix != ".gz":
            yield file
            return
        with gzip.open(file) as unpacked:
            yield unpacked  # type: ignore[misc]


def _is_json_array(training: Training, path: Path) -> bool:
    if training.dataset != "json":
        return False
    with _errors_of(path), _open(path) as file:
        return file.read(2**10).removeprefix(BOM).lstrip()[:1] == b"["


def _select(training: Training, row: Any, begin: int, columns: Sequence[str]) -> dict[str, Any]:
    """Return some columns of a JSON object."""
    if not isinstance(row, dict):
        raise BadRowError(begin, f"expected a JSON object, found a value of type {type(row).__name__}")
    for column in columns:
        if column not in row:
            raise BadRowError(begin, _no_column(training, column, list(row)))
    return {column: row[column] for column in columns}


def column_option(training: Training, column: str) -> str:
    """Return the option that names a column, for messages."""
    keys = {
        "text": ["dataset_text_key"],
        "messages": ["dataset_messages_key"],
        "prompt_response": ["dataset_prompt_key", "dataset_response_key"],
    }[training.dataset_format]
    return next(f"training.{key}" for key in keys if getattr(training, key) == column)


def _no_column(training: Training, column: str, names: list[str]) -> str:
    return f"no column {show(column)}; it has {', '.join(names) or 'none'} ({column_option(training, column)})"


def _array_rows(training: Training, path: Path, segment: Segment, columns: Sequence[str]) -> Iterator[Row]:
    with _open(path) as file:
        content = file.read(LARGEST_ROW + 1)
    if len(content) > LARGEST_ROW:
        problem = f"{path}: a JSON array of more than {LARGEST_ROW:,} bytes; write it as JSON lines (jq -c '.[]')"
        raise ConfigError([problem])
    rows = json.loads(content.removeprefix(BOM).decode())
    for index in range(segment.begin, min(segment.end, len(rows))):
        yield Row(index, index + 1, _select(training, rows[index], index, columns))


def rows_at_a_time(n_rows: int, n_bytes: int) -> int:
    """Return how many of some rows are read together."""
    return min(max(BYTES_AT_A_TIME * n_rows // max(n_bytes, 1), 1), 256)


def _parquet(path: Path) -> Any:
    import pyarrow.parquet  # here, since a run on other data does not need it

    return pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**20)  # not all of a row group at once


def _parquet_rows(training: Training, path: Path, segment: Segment, columns: Sequence[str]) -> Iterator[Row]:
    """Yield rows from the row groups that have any of the segment."""
    file = _parquet(path)
    names = file.schema_arrow.names
    for column in columns:
        if column not in names:
            raise ConfigError([f"{path}: {_no_column(training, column, names)}"])
    row = 0
    for group in range(file.num_row_groups):
        metadata = file.metadata.row_group(group)
        end = row + metadata.num_rows
        if end <= segment.begin or row >= segment.end:
            row = end
            continue
        chunks = [metadata.column(index) for index in range(metadata.num_columns)]
        own = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in columns]
        rows = rows_at_a_time(metadata.num_rows, sum(chunk.total_uncompressed_size for chunk in own))
        for batch in file.iter_batches(batch_size=rows, row_groups=[group], columns=list(columns)):
            first = min(max(segment.begin - row, 0), len(batch))
            last = min(max(segment.end - row, 0), len(batch))
            for index, values in enumerate(batch.slice(first, last - first).to_pylist(), row + first):
                if any(isinstance(value, str) and len(value) > LARGEST_ROW for value in values.values()):
                    raise BadRowError(index, f"longer than {LARGEST_ROW:,} bytes")
                yield Row(index, index + 1, values)
            row += len(batch)
        if row != end:
            break
    if row != file.metadata.num_rows:  # pyarrow skips a page whose type is damaged
        problem = f"{path}: says that it has {file.metadata.num_rows:,} rows, and lacks some or has more: it is damaged"
        raise ConfigError([problem])


def _rows_of_bytes(training: Training, file: BinaryIO, segment: Segment, columns: Sequence[str]) -> Iterator[Row]:
    if training.dataset == "json":
        for begin, end, line in _lines(file, segment):
            if line.strip():
                try:
                    row = json.loads(line.decode())
                except ValueError as error:  # RecursionError, of hostile nesting, is none
                    raise BadRowError(begin, f"no JSON: {error}") from None
                except RecursionError:
                    raise BadRowError(begin, "JSON that is nested too deep") from None
                yield Row(begin, end, _select(training, row, begin, columns))
        return
    how = training.text_sample_by
    texts = {"document": _document, "paragraph": _paragraphs, "line": _lines}[how](file, segment)
    for begin, end, content in texts:
        if len(content) > LARGEST_ROW:
            problem = f"a {how} of more than {LARGEST_ROW:,} bytes; set training.text_sample_by so that documents are "
            raise BadRowError(begin, f"{problem}shorter")
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise BadRowError(begin, f"no UTF-8: {error}") from None
        if how == "line":
            text = text.removesuffix("\n").removesuffix("\r")
        yield Row(begin, end, {"text": text.replace("\r\n", "\n").replace("\r", "\n")})


def _document(file: BinaryIO, segment: Segment) -> Iterator[tuple[int, int, bytes]]:
    if segment.begin == 0:
        yield 0, 1, file.read(LARGEST_ROW + 1).removeprefix(BOM)


def _lines(file: BinaryIO, segment: Segment) -> Iterator[tuple[int, int, bytes]]:
    """Yield where each line that begins in a segment begins and ends, and the line with its line feed."""
    begin = segment.begin
    if begin:
        file.seek(begin - 1)
        begin -= 1
        while chunk := file.readline(2**20):  # the rest of the line before, if it is not complete
            begin += len(chunk)
            if chunk.endswith(b"\n"):
                break
    while begin < segment.end and (line := file.readline(LARGEST_ROW + 1)):
        if len(line) > LARGEST_ROW:
            raise BadRowError(begin, f"longer than {LARGEST_ROW:,} bytes")
        end = begin + len(line)
        yield begin, end, line.removeprefix(BOM) if begin == 0 else line
        begin = end


def _paragraphs(file: BinaryIO, segment: Segment) -> Iterator[tuple[int, int, bytes]]:
    """Yield where each paragraph that begins in a segment begins and ends, and its lines without the last line feed;
    empty lines separate paragraphs."""
    first = max(segment.begin - 2, 0)  # an empty line before the segment tells that a paragraph begins with it
    after_empty, begin, end, lines = first == 0, -1, 0, list[bytes]()
    for at, end, line in _lines(file, segment._replace(begin=first, end=END)):
        if not line.rstrip(b"\r\n"):
            if lines:
                yield begin, end, b"".join(lines).rstrip(b"\r\n")
            after_empty, lines = True, []
            continue
        if after_empty:
            begin = at
        if (begin if begin >= 0 else at) >= segment.end:
            return
        if begin >= segment.begin:
            lines.append(line)
        if end - begin > LARGEST_ROW and lines:
            yield begin, end, b"".join(lines)
        after_empty = False
    if lines:
        yield begin, end, b"".join(lines).rstrip(b"\r\n")
